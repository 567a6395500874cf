"""The parts of the explorer page: its program, its style sheet, and the manifest and arrays of its data."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from ..palette import THEMES, css_variables, rgb
from .storage import compute_scales, pack, to_levels

if TYPE_CHECKING:
    from .data import Exploration, Links, ShownLayer

# names of the page's JavaScript files, in the order in which `program` joins them
SCRIPTS = ("inflate", "numbers", "layers", "grid", "axes", "map", "strip", "panel", "vector", "explorer")
TYPE_CODES = {"uint8": "u1", "uint16": "u2", "float16": "f2", "float32": "f4", "int32": "i4"}
TAG_BYTES = 64  # bytes of the HTML element that holds an array, without the array's text


def program() -> str:
    """Return the page's JavaScript program, which defines `explorer(root, manifest, read)`."""
    return "'use strict';\n" + "\n".join(page_file(f"{part}.js") for part in SCRIPTS)


def style() -> str:
    """Return the page's style sheet: the colours of both themes, then `style.css`."""
    themes = (f'.sl[data-theme="{name}"] {{ {css_variables(theme)} }}' for name, theme in THEMES.items())
    return "\n".join((*themes, page_file("style.css")))


def serialise(data: Exploration) -> tuple[dict[str, Any], list[str]]:
    """Return the manifest of the page, and the list of its arrays as texts of `storage.pack`.

    The manifest is JSON-compatible and refers to an array by the array's index in the list. Cells are stored key by
    key, as (H, columns, rows): the weights on one key are similar, so they are compressed better.
    """
    arrays: list[str] = []
    tokens: dict[tuple[str, ...], int] = {}

    def store(array: Any, levels: int | None = None, relative: bool = False, axes: Any = None) -> dict[str, Any]:
        record = {}
        if levels is not None:
            scales = compute_scales(array, relative=relative)
            array, record = to_levels(array, levels, scales), {"levels": levels, "scales": scales.tolist()}
        array = array if axes is None else array.transpose(axes)
        arrays.append(pack(array))
        return {"at": len(arrays) - 1, "type": TYPE_CODES[array.dtype.name], "shape": array.shape} | record

    def links(found: Links | None, positions: int) -> dict[str, Any] | None:
        if found is None:
            return None
        where = np.maximum(found.where, 0).astype(np.uint16) if positions <= 1 << 16 else found.where
        return {"weights": store(found.weights, found.levels), "where": store(where)}

    def layer_record(place: int, layer: ShownLayer) -> dict[str, Any]:
        return {
            "name": layer.name,
            "queries": tokens.setdefault(layer.queries, len(tokens)),
            "keys": tokens.setdefault(layer.keys, len(tokens)),
            "how": layer.how,
            "heads": layer.heads,
            "short": short_name(layer.name, place),
            "cells": store(layer.cells, layer.levels, layer.how != "whole", (0, 2, 1)),
            **{name: store(getattr(layer, name), layer.sum_levels, True) for name in ("entropy", "received")},
            "looks": links(layer.looks, len(layer.keys)),
            "seen_by": links(layer.seen_by, len(layer.queries)),
        }

    texts = [
        {"name": text.name, "layers": [layer_record(place, layer) for place, layer in enumerate(text.layers)]}
        for text in data.texts
    ]
    colours = {
        name: {"hidden": rgb(theme.hidden), "weights": [rgb(colour) for colour in theme.weights]}
        for name, theme in THEMES.items()
    }
    manifest = {"title": data.title, "notes": data.notes, "texts": texts, "colours": colours}
    return manifest | {"tokens": list(map(list, tokens))}, arrays


def manifest_text(manifest: dict[str, Any]) -> str:
    """Return the manifest as JSON without the sign <, which could end the HTML element that holds the manifest."""
    return json.dumps(manifest, separators=(",", ":")).replace("<", "\\u003c")


def count_bytes(data: Exploration) -> int:
    """Return an upper bound of the size of the page in bytes."""
    manifest, arrays = serialise(data)
    parts = (page_file("page.html"), program(), style(), data.title, manifest_text(manifest))
    return sum(len(part.encode("utf-8", "replace")) for part in parts) + sum(len(text) + TAG_BYTES for text in arrays)


def short_name(name: str, place: int) -> str:
    """Return a short name of a layer: the first number in its name, or `place` if its name has no number.

    The short name of a cross-attention layer starts with ×. The short name of any other decoder layer starts with d.
    """
    parts = name.lower().replace(" ", ".").split(".")
    is_cross = any(marker in name.lower() for marker in ("cross", "encdec", "encoder_attn"))
    number = next((part for part in parts if part.isdigit()), str(place))
    return ("×" if is_cross else "d" if "decoder" in parts else "") + number


def page_file(name: str) -> str:
    """Return the text of a file of the folder `page`."""
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")
