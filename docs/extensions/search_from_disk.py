"""Excerpts of search results without a server: the texts of all pages as a script, for static/search_from_disk.js."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup


def page_text(page: Path) -> str:
    """Return the main part of a page: its text, inside the elements that have the identifiers of its sections."""
    main = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser").select_one('[role="main"]')
    if main is None:
        return ""
    for element in main.select(".headerlink, script, style"):
        element.decompose()
    for element in main.find_all(True):
        if element.name == "section" or (element.name == "dt" and element.get("id")):
            element.attrs = {"id": element["id"]}
        else:
            element.unwrap()
    main.attrs = {"role": "main"}
    return str(main)


def write_texts(app: Any, error: Exception | None) -> None:
    """Write the script."""
    if error is None:
        folder = Path(app.outdir)
        texts = {f"{name}.html": page_text(folder / f"{name}.html") for name in sorted(app.env.found_docs)}
        script = f"const PAGE_TEXTS = {json.dumps(texts, ensure_ascii=False)};\n"
        (folder / "_static" / "page_texts.js").write_text(script, encoding="utf-8")


def add_script(app: Any, pagename: str, *arguments: Any) -> None:
    """Load the script of static/ on the search page."""
    if pagename == "search":
        app.add_js_file("search_from_disk.js")


def setup(app: Any) -> dict[str, bool]:
    """Connect both functions."""
    app.connect("html-page-context", add_script)
    app.connect("build-finished", write_texts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
