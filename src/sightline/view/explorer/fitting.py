"""How a page is made to fit into its limit of bytes: the page stores fewer bits, then fewer links, then coarser maps.

A link is one weight with its query and its key.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...arrays.operations import Array
from ...statistics.reduction import cell_edges
from .page_parts import count_bytes

if TYPE_CHECKING:
    from .data import Exploration, Links, ShownLayer


LEAST_LEVELS = 63  # levels of a layer with all its weights, on a page whose other layers have lost their links


@dataclass(frozen=True)
class Detail:
    """How much a page stores. Fields `..._levels` are the `count` of `page_parts.to_levels`, or None for floats."""

    count: int  # number of links of each query, and of each key
    link_levels: int | None = None
    sum_levels: int | None = None  # for entropy and received
    cell_levels: int | None = 255  # for the cells of the maps
    halvings: int = 0  # how many times the numbers of rows and columns of the maps are halved


def details(count: int) -> Iterator[Detail]:
    """Yield details from `count` links and floats to the coarsest. Each makes a smaller page than the one before."""
    yield Detail(count, cell_levels=None)
    yield Detail(count)
    yield Detail(count, 65535, 65535)
    yield Detail(count, 4095, 4095)
    while count > 1:
        yield Detail(count, 255, 4095)
        count = count * 3 // 4
    yield from (Detail(1, 255, 4095), Detail(1, 255, 255, halvings=1), Detail(1, 63, 63, halvings=1))
    yield from (Detail(0, None, levels, min(4 * levels, 255), halvings) for levels, halvings in ((63, 1), (15, 2)))


def fit(data: Exploration, limit: float) -> Exploration:
    """Return the data reduced as little as a page of at most `limit` bytes allows, with a note of what was reduced.

    If no reduction is small enough, the data are reduced as far as possible, and the note says so. Every layer of
    `data` has pooled maps and links, or all weights. At least one layer has links, and all arrays hold floats.
    """
    count = max(layer.looks.weights.shape[-1] for text in data.texts for layer in text.layers if layer.looks)
    options = list(details(count))

    def made(place: int) -> Exploration:
        reduced = _reduced(data, options[place])
        return replace(reduced, notes=(*data.notes, *_notes(limit, options[place], count, reduced))) if place else data

    chosen = bisect_left(range(len(options)), True, key=lambda place: count_bytes(made(place)) <= limit)
    if chosen < len(options):
        return made(chosen)
    least = made(-1)
    note = f"No page is smaller than this, of {count_bytes(least) / 1e6:.2g} MB: record fewer heads or tokens."
    return replace(least, notes=(*least.notes, note))


def _notes(limit: float, reduction: Detail, count: int, made: Exploration) -> list[str]:
    parts = [f"{reduction.count or 'none'} of the {count} heaviest keys of each query"] * (reduction.count < count)
    if reduction.halvings:
        layer = next(layer for layer in made.texts[0].layers if layer.how != "whole")
        parts.append("maps of at most {} × {} cells".format(*layer.cells.shape[1:]))
    if reduction.link_levels:
        parts.append(f"roots of weights rounded to multiples of 1/{reduction.link_levels}")
    if reduction.sum_levels:
        parts.append(f"entropy and received rounded in {reduction.sum_levels} steps; ± is the largest error")
    stored = ", ".join(parts) or "maps rounded to 8 bits"
    return [f"More would exceed the limit of {limit / 1e6:.3g} MB. This page stores {stored}."]


def _reduced(data: Exploration, reduction: Detail) -> Exploration:
    texts = (replace(text, layers=tuple(_layer(layer, reduction) for layer in text.layers)) for text in data.texts)
    return replace(data, texts=tuple(texts))


def _layer(layer: ShownLayer, reduction: Detail) -> ShownLayer:
    if layer.how == "whole":
        levels = reduction.link_levels if reduction.count else LEAST_LEVELS
        return replace(layer, levels=levels, sum_levels=reduction.sum_levels)
    cells = layer.cells
    for _ in range(reduction.halvings):
        cells = halve(cells, len(layer.queries), len(layer.keys), layer.how)
    return replace(
        layer,
        cells=cells,
        levels=reduction.cell_levels,
        sum_levels=reduction.sum_levels,
        looks=_links(layer.looks, reduction),
        seen_by=_links(layer.seen_by, reduction),
    )


def _links(links: Links | None, reduction: Detail) -> Links | None:
    if links is None or not reduction.count:
        return None
    weights, where = (part[..., : reduction.count] for part in (links.weights, links.where))
    return replace(links, weights=weights, where=where, levels=reduction.link_levels)


def halve(cells: Array, n: int, m: int, how: str) -> Array:
    """Return cells (H, rows, columns) of n queries and m keys with half as many rows and columns.

    An odd number of rows or columns is not halved. New cells are maxima if `how` is "max", else means weighted by size.
    """
    for axis, length in ((1, n), (2, m)):
        count = cells.shape[axis]
        if count % 2 == 0:
            sizes = np.expand_dims(np.diff(cell_edges(0, length, count)), 2 - axis)
            weighted = cells if how == "max" else cells * sizes
            pairs = (weighted.take(np.arange(start, count, 2), axis) for start in (0, 1))
            joined = np.expand_dims(sizes.reshape(-1, 2).sum(1), 2 - axis)
            cells = np.maximum(*pairs) if how == "max" else sum(pairs) / joined
    return cells.astype(np.float32)
