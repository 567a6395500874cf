"""Code on pages: names of the API become links, and examples lose the empty line before their end."""

from __future__ import annotations

import re
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


def link_names(app: Any, document: Any, docname: str) -> None:
    """Link `sightline.name`, `name(...)` and names of classes to the API reference."""
    objects = app.env.domains.python_domain.objects
    for literal in list(document.findall(nodes.literal)):
        match = NAME.fullmatch(literal.astext())
        if match is None or isinstance(literal.parent, (nodes.reference, nodes.title)):
            continue
        prefix, name, arguments = match.groups()
        entry = objects.get(f"sightline.{name}")
        if entry is None or not (prefix or arguments or name[0].isupper()):
            continue
        uri = app.builder.get_relative_uri(docname, entry.docname) + f"#{entry.node_id}"
        link = nodes.reference("", "", internal=True, refuri=uri, reftitle=f"sightline.{name}")
        literal.replace_self(link)
        link += literal


def setup(app: Any) -> dict[str, bool]:
    """Register the transform and the links."""
    app.add_transform(TrimExamples)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
