"""The HTML page of the explorer: one file that contains the style sheet, the JavaScript program and the data.

The page makes no network requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from ...errors import ParameterError
from ..terminal import CIVIDIS
from .data import Exploration, Links, ShownLayer
from .from_recording import from_seen
from .storage import compute_scales, pack, to_levels

# names of the page's JavaScript files, in the order in which `program` joins them
SCRIPTS = ("inflate", "numbers", "layers", "grid", "axes", "map", "strip", "panel", "vector", "explorer")
TYPE_CODES = {"uint8": "u1", "uint16": "u2", "float16": "f2", "float32": "f4", "int32": "i4"}


def html(data: Exploration | Any) -> str:
    """Return the HTML of the explorer page. The page is self-contained and opens from a disk as well as from a server.

    Parameters
    ----------
    data : Exploration or Seen

    Returns
    -------
    str

    Raises
    ------
    ParameterError
        data is neither an Exploration nor a Seen, or the Seen lacks statistics that the page needs; see `from_seen`.
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
    """Write the page that `html` returns to a file, and return the path of the file.

    Parameters
    ----------
    data : Exploration or Seen
    path : str or Path

    Returns
    -------
    Path

    Raises
    ------
    ParameterError
        data is neither an Exploration nor a Seen, the Seen lacks statistics that the page needs, or the file cannot be
        written.
    """
    page = html(data).encode("utf-8", "replace")  # a folder's name, as the title, may not be valid UTF-8
    try:
        path = Path(path)
        path.write_bytes(page)
    except (OSError, TypeError, ValueError) as error:
        raise ParameterError(
            f"a page at {str(path)!r}: {error}",
            "a file that can be written, in a folder that exists",
            'save_html(data, "page.html")',
        ) from error
    return path


def program() -> str:
    """Return the page's JavaScript program, which defines `explorer(root, manifest, read)`."""
    return "'use strict';\n" + "\n".join(_read(f"{part}.js") for part in SCRIPTS)


def style() -> str:
    """Return the page's style sheet."""
    return _read("style.css")


def serialise(data: Exploration) -> tuple[dict[str, Any], list[str]]:
    """Return the manifest of the page and its arrays as texts, which `storage.pack` writes.

    The manifest is JSON-compatible and refers to an array by the array's index in the list. Cells are stored key by
    key, as (H, columns, rows), because the weights that one key receives resemble each other.
    """
    arrays: list[str] = []
    tokens: dict[tuple[str, ...], int] = {}

    def store(array: Any) -> dict[str, Any]:
        arrays.append(pack(array))
        return {"at": len(arrays) - 1, "type": TYPE_CODES[array.dtype.name], "shape": array.shape}

    def links(found: Links | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {"weights": store(found.weights), "where": store(found.where), "complete": found.complete}

    def layer_record(place: int, layer: ShownLayer) -> dict[str, Any]:
        cells, scales = layer.cells, None
        if layer.levels is not None:
            scales = compute_scales(cells, relative=layer.how != "whole")
            cells = to_levels(cells, layer.levels, scales)
        return {
            "name": layer.name,
            "queries": tokens.setdefault(layer.queries, len(tokens)),
            "keys": tokens.setdefault(layer.keys, len(tokens)),
            "how": layer.how,
            "heads": layer.heads,
            "short": short_name(layer.name, place),
            "cells": store(cells.swapaxes(1, 2)),
            "levels": layer.levels,
            "scales": None if scales is None else scales.tolist(),
            **{name: store(getattr(layer, name)) for name in ("entropy", "received")},
            **{name: links(getattr(layer, name)) for name in ("looks", "seen_by")},
        }

    texts = [
        {"name": text.name, "layers": [layer_record(place, layer) for place, layer in enumerate(text.layers)]}
        for text in data.texts
    ]
    manifest = {"title": data.title, "notes": data.notes, "texts": texts, "colours": CIVIDIS}
    return manifest | {"tokens": list(map(list, tokens))}, arrays


def short_name(name: str, place: int) -> str:
    """Return a short name of a layer: the first number in its name, or `place` if its name has no number.

    The short name of a cross-attention layer starts with ×, that of another decoder layer with d.
    """
    parts = name.lower().replace(" ", ".").split(".")
    is_cross = any(marker in name.lower() for marker in ("cross", "encdec", "encoder_attn"))
    number = next((part for part in parts if part.isdigit()), str(place))
    return ("×" if is_cross else "d" if "decoder" in parts else "") + number


def _read(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    """Return the hash of an inline script or style, by which a Content-Security-Policy allows it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
