"""Code on pages: names of the API become links, and examples lose the empty line before their end."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform

NAME = re.compile(r"(sightline\.)?([A-Za-z_][\w.]*?)(\(.*\))?")


class TrimExamples(SphinxTransform):
    """Remove empty lines at the end of code. Doctest needs one there, readers do not."""

    default_priority = 400

    def apply(self, **options: Any) -> None:
        for block in self.document.findall(nodes.literal_block):
            text = block.astext().rstrip()
            block.rawsource, block.children = text, []
            block += nodes.Text(text)


def classes_by_name(objects: dict[str, Any]) -> dict[str, str]:
    """Return the full names of classes whose own name is unique."""
    names = [full for full, entry in objects.items() if entry.objtype in ("class", "exception")]
    count = Counter(full.rpartition(".")[2] for full in names)
    return {full.rpartition(".")[2]: full for full in names if count[full.rpartition(".")[2]] == 1}


def link_names(app: Any, document: Any, docname: str) -> None:
    """Link `sightline.name`, `name(...)` and names of classes to the API reference."""
    objects = app.env.domains.python_domain.objects
    classes = classes_by_name(objects)
    for literal in list(document.findall(nodes.literal)):
        match = NAME.fullmatch(literal.astext())
        if match is None or isinstance(literal.parent, (nodes.reference, nodes.title)):
            continue
        prefix, name, arguments = match.groups()
        full = classes.get(name, f"sightline.{name}")
        entry = objects.get(full)
        if entry is None or not (prefix or arguments or name[0].isupper()):
            continue
        uri = app.builder.get_relative_uri(docname, entry.docname) + f"#{entry.node_id}"
        link = nodes.reference("", "", internal=True, refuri=uri, reftitle=full)
        literal.replace_self(link)
        link += literal


def setup(app: Any) -> dict[str, bool]:
    """Register the transform and the links."""
    app.add_transform(TrimExamples)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
