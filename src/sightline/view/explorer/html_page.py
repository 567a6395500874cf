"""The page: one HTML file with its style, its program and its data inside; nothing is ever asked of a network."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from ...errors import ParameterError
from ..terminal import CIVIDIS
from .data import Exploration, Layer, Links, Text
from .from_recording import from_seen

__all__ = ["html", "program", "save_html", "serialise", "short_name", "style"]

# what a page runs, in the order of the reading
SCRIPTS = ("numbers", "layers", "grid", "map", "strip", "panel", "vector", "explorer")
TYPE_CODES = {"float16": "f2", "float32": "f4", "int32": "i4"}


def html(data: Exploration | Any) -> str:
    """The page as text: complete in itself, opened from a disk as well as from a server.

    Parameters
    ----------
    data : Exploration or Seen

    Raises
    ------
    ParameterError
        A Seen without the statistics the page needs; see `from_seen`.
    """
    data = data if isinstance(data, Exploration) else from_seen(data)
    manifest, arrays = serialise(data)
    script, css = program() + "\nexplorerPage();\n", style()
    blobs = "\n".join(f'<script type="text/plain" id="sl-array-{k}">{text}</script>' for k, text in enumerate(arrays))
    return Template(_read("page.html")).substitute(
        title=_escape(data.title),
        script_hash=_csp_hash(script),
        style_hash=_csp_hash(css),
        style=css,
        manifest=json.dumps(manifest, separators=(",", ":")).replace("<", "\\u003c"),
        arrays=blobs,
        script=script,
    )


def save_html(data: Exploration | Any, path: str | Path) -> Path:
    """Write the page there and return the path; as `html`.

    Raises
    ------
    ParameterError
        As `html` does; no file can be written there.
    """
    page = html(data).encode("utf-8", "replace")  # before the file is opened; names of folders may be no text
    try:
        path = Path(path)
        path.write_bytes(page)
    except (OSError, TypeError, ValueError) as error:
        raise ParameterError(
            f"a page at {str(path)!r}: {error}", "a file in a folder that is there", 'save_html(data, "page.html")'
        ) from error
    return path


def program() -> str:
    """The page's program, which makes `explorer(root, manifest, read)`."""
    return "'use strict';\n" + "\n".join(_read(f"{part}.js") for part in SCRIPTS)


def style() -> str:
    """The page's style sheet."""
    return _read("style.css")


def serialise(data: Exploration) -> tuple[dict[str, Any], list[str]]:
    """All the page shows, as JSON takes it, and the arrays it names by number, little-endian in base64."""
    arrays: list[str] = []
    tokens: dict[tuple[str, ...], int] = {}

    def store(array: Any) -> dict[str, Any]:
        array = np.ascontiguousarray(array)
        letter = TYPE_CODES[array.dtype.name]
        arrays.append(base64.b64encode(array.astype(f"<{letter}").tobytes()).decode("ascii"))
        return {"at": len(arrays) - 1, "type": letter, "shape": array.shape}

    def links(found: Links | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {"weights": store(found.weights), "where": store(found.where), "complete": found.complete}

    def layer(place: int, one: Layer) -> dict[str, Any]:
        return {
            "name": one.name,
            "queries": tokens.setdefault(one.queries, len(tokens)),
            "keys": tokens.setdefault(one.keys, len(tokens)),
            "how": one.how,
            "heads": one.heads,
            "short": short_name(one.name, place),
            **{name: store(getattr(one, name)) for name in ("cells", "entropy", "received")},
            **{name: links(getattr(one, name)) for name in ("looks", "seen_by")},
        }

    def text(one: Text) -> dict[str, Any]:
        return {"name": one.name, "layers": [layer(place, each) for place, each in enumerate(one.layers)]}

    manifest = {
        "title": data.title,
        "notes": data.notes,
        "texts": [text(one) for one in data.texts],
        "colours": CIVIDIS,
    }
    return manifest | {"tokens": list(map(list, tokens))}, arrays


def short_name(name: str, place: int) -> str:
    """A layer's number as its path tells it, with the decoder's d, or × across sequences; else its place."""
    words = name.lower().replace(" ", ".").split(".")
    numbers = [word for word in words if word.isdigit()]
    is_cross = any(mark in name.lower() for mark in ("cross", "encdec", "encoder_attn"))
    return ("×" if is_cross else "d" if "decoder" in words else "") + (numbers[0] if numbers else str(place))


def _read(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    """What a Content-Security-Policy calls the text between two tags."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
