"""The parts of the explorer page: its program, its style sheet, and the manifest and arrays of its data.

Weights are stored as levels of their square root, and every array is compressed, in base64. A level is an integer from
0 to `count`. A weight w has the level

    k = round(count · √(w / s)),    at least 1 if w > 0,

where s is the weight that `count` stands for: 1 for weights of pairs, which are at most 1. The level k stands for the
weight s · (k / count)². Level 0 is exactly 0. Small weights have finer steps than large ones: the stored value differs
from w by at most s · (k + ¼) / count², which is about √(s · w) / count. So small weights remain apart from each other
and from 0, and cost few bits.
"""

from __future__ import annotations

import base64
import json
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.operations import Array
from ..palette import THEMES, css_variables, rgb

if TYPE_CHECKING:
    from .data import Exploration, Links, ShownLayer


BASE64_RATIO = 4 / 3  # number of base64 characters that encode one byte
# numbers of levels from the finest to the coarsest: 16 bits, 12 bits, 8 bits, then fewer levels
LEVELS: tuple[int, ...] = (65535, 4095, 255, *range(240, 63, -16))
# names of the page's JavaScript files, in the order in which `program` joins them
SCRIPTS = ("inflate", "numbers", "layers", "grid", "axes", "map", "strip", "panel", "vector", "explorer")
TAG_BYTES = 64  # bytes of the HTML element that holds an array, without the array's text
SAMPLED_WEIGHTS = 1 << 19  # about this number of weights is compressed to estimate the size of all weights


def to_levels(weights: Array, count: int, scales: Array) -> Array:
    """Return the levels of weights, or of other numbers, of H heads.

    Parameters
    ----------
    weights : (H, ...) floats, at least 0
    count : int
        The highest level.
    scales : (H,) float32
        For each head the weight s that `count` stands for, at least the largest weight of the head.

    Returns
    -------
    uint8 array of the shape of `weights`, or uint16 if `count` is above 255
    """
    levels = np.empty(weights.shape, np.uint8 if count <= 255 else np.uint16)
    for head, (p, scale) in enumerate(zip(weights, scales, strict=True)):
        levels[head] = np.maximum(np.rint(count * np.sqrt(np.maximum(p, 0).astype(np.float32) / scale)), p > 0)
    return levels


def compute_scales(weights: Array, *, relative: bool) -> Array:
    """Return the weight (H,) float32 that the highest level of each head stands for.

    This weight is 1, or the head's largest weight if that is above 1, or if `relative` is true and that is above 0.
    """
    largest = weights.reshape(len(weights), -1).max(1).astype(np.float32)
    return np.where(largest > 0, largest, 1) if relative else np.maximum(largest, 1)


def choose_levels(weights: Sequence[Array], limit: float) -> int | None:
    """Return the largest number of levels in `LEVELS` with which all weights fit into `limit` bytes of base64.

    Return None if no number makes the weights fit. The size of the weights is estimated from the compressed
    weights of evenly spaced keys.
    """
    total = sum(array.size for array in weights)
    step = max(total // SAMPLED_WEIGHTS, 1)
    sampled = [array[:, :, step // 2 % array.shape[2] :: step] for array in weights]
    scales = [compute_scales(array, relative=False) for array in weights]
    share = total / sum(array.size for array in sampled)

    def fits(count: int) -> bool:
        pairs = zip(sampled, scales, strict=True)
        parts = (to_levels(array, count, scale).swapaxes(1, 2) for array, scale in pairs)
        return share * BASE64_RATIO * sum(len(_compress(part)) for part in parts) <= limit

    first = bisect_left(LEVELS, True, key=fits)  # fewer levels take fewer bytes
    return LEVELS[first] if first < len(LEVELS) else None


def encode_array(array: Array) -> str:
    """Return the compressed bytes of an array in base64.

    The first bytes of all little-endian numbers come first, then all second bytes and so on, because bytes of one place
    compress better together. The compression is DEFLATE (RFC 1951), without a header.
    """
    return base64.b64encode(_compress(array)).decode("ascii")


def _compress(array: Array) -> bytes:
    size = array.dtype.itemsize
    numbers = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    planes = np.ascontiguousarray(numbers.reshape(-1).view(np.uint8).reshape(-1, size).T)
    # Z_FILTERED avoids short repeats, which cost more than single bytes in noisy data
    stream = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_FILTERED)
    return stream.compress(planes.tobytes()) + stream.flush()


def program() -> str:
    """Return the page's JavaScript program, which defines `explorer(root, manifest, read)`."""
    return "'use strict';\n" + "\n".join(page_file(f"{part}.js") for part in SCRIPTS)


def style() -> str:
    """Return the page's style sheet: the colours of both themes, then `style.css`."""
    themes = (f'.sl[data-theme="{name}"] {{ {css_variables(theme)} }}' for name, theme in THEMES.items())
    return "\n".join((*themes, page_file("style.css")))


def serialise(data: Exploration) -> tuple[dict[str, Any], list[str]]:
    """Return the manifest of the page, and the list of its arrays as texts of `encode_array`.

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
        arrays.append(encode_array(array))
        return {"at": len(arrays) - 1, "type": array.dtype.str[1:], "shape": array.shape} | record

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
