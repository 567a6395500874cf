"""The site opens from a disk, without a server and without a network.

`search_from_disk.js` of the folder static/ shows excerpts of search results. It reads the texts of all pages from a
script that this module writes. A page that loads anything from a network is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from sphinx.errors import ExtensionError

LOADED = "script[src], img[src], iframe[src], link[href][rel=stylesheet], link[href][rel=preload]"


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


def check_addresses(page: Path) -> None:
    """Raise an error if a page loads a script, a style or a picture from a network."""
    for element in BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser").select(LOADED):
        address = element.get("src") or element["href"]
        if address.startswith(("http:", "https:", "//")):
            raise ExtensionError(f"{page} loads {address}; the site must work without a network")


def finish(app: Any, error: Exception | None) -> None:
    """Check the pages and write the script."""
    if error is None:
        folder = Path(app.outdir)
        pages = [folder / f"{name}.html" for name in sorted(app.env.found_docs)]
        for page in pages:
            check_addresses(page)
        texts = {page.relative_to(folder).as_posix(): page_text(page) for page in pages}
        script = f"const PAGE_TEXTS = {json.dumps(texts, ensure_ascii=False)};\n"
        (folder / "_static" / "page_texts.js").write_text(script, encoding="utf-8")


def add_script(app: Any, pagename: str, *arguments: Any) -> None:
    """Load the script of static/ on the search page."""
    if pagename == "search":
        app.add_js_file("search_from_disk.js")


def setup(app: Any) -> dict[str, bool]:
    """Connect the functions."""
    app.connect("html-page-context", add_script)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
