"""Links from pages to other files of the repository.

A link to a source file leads to a page that shows the file, so the site needs no network. A page of `mirrored_pages`
has the text of a file of the root.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

LANGUAGES = {".py": "python", ".md": "markdown", ".toml": "toml", ".json": "json", ".c": "c"}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)")


def mirror(app: Any, docname: str, source: list[str]) -> None:
    """Replace the first line of a page of `mirrored_pages`. Links of the file are relative to the root."""
    home = f"]({app.config.root_doc}.md"
    if docname in app.config.mirrored_pages:
        path = app.srcdir.parent / app.config.mirrored_pages[docname]
        app.env.note_dependency(path, docname=docname)
        text = LINK.sub("../", path.read_text(encoding="utf-8")).replace("](../docs/", "](")
        own = source[0].partition("\n")[2]
        source[0] = re.sub(r"\]\(\.\./README\.md(#[\w-]+)?", home, text) + own


def is_file_link(node: nodes.Node) -> bool:
    """True if a node is a link to a file outside of docs/, as Markdown's parser makes it."""
    if isinstance(node, addnodes.pending_xref):
        return bool(node["refdomain"] == "doc") and Path(node["reftarget"]).is_absolute()
    return isinstance(node, addnodes.download_reference)


class LinkFiles(SphinxTransform):
    """Turn links to files outside of docs/ into links to pages."""

    default_priority = 400

    def apply(self, **options: Any) -> None:
        root = Path(self.app.srcdir).parent
        pages = {root / name: page for page, name in self.config.mirrored_pages.items()}
        pages[root / "README.md"] = self.config.root_doc
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for link in list(self.document.findall(is_file_link)):
            path = (folder / link["reftarget"]).resolve()
            if isinstance(link, addnodes.pending_xref):  # of a Markdown file, without its ending
                path = path.with_suffix(".md")
            if (page := pages.get(path)) is None and path.suffix in LANGUAGES:
                page = f"source/{path.relative_to(root).as_posix()}".replace(".", "_")
                self.env.linked_files[page] = path
            if page is not None:
                uri = self.app.builder.get_relative_uri(self.env.docname, page)
                link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))


def source_pages(app: Any) -> Any:
    """Yield a page for each linked file."""
    for page, path in sorted(app.env.linked_files.items()):
        text = path.read_text(encoding="utf-8")
        block = app.builder.highlighter.highlight_block(text, LANGUAGES[path.suffix], lineanchors="line")
        name = PurePosixPath(path.relative_to(app.srcdir.parent))
        yield page, {"title": name.name, "body": f"<h1>{name}</h1>\n{block}"}, "page.html"


def prepare(app: Any, env: Any, docnames: list[str]) -> None:
    """Create the collection of linked files; a later build keeps what an earlier one collected."""
    env.linked_files = getattr(env, "linked_files", {})


def setup(app: Any) -> dict[str, bool]:
    """Register the transform and the pages."""
    app.add_config_value("mirrored_pages", {}, "env")
    app.connect("env-before-read-docs", prepare)
    app.connect("source-read", mirror)
    app.connect("html-collect-pages", source_pages)
    app.add_transform(LinkFiles)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
