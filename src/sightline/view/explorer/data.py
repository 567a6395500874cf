"""The data of the explorer page: texts with tokens, and each layer's map, entropy, received weight and links.

A link is one weight with its query and its key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from textwrap import shorten
from typing import Any

import numpy as np

from ...arrays.operations import Array, to_numpy
from ...errors import DtypeError, ParameterError, ShapeError
from ...statistics.per_query import entropy_of
from ...statistics.recording import labels_by_entry
from ..heatmaps import pool_cells
from .fitting import fit
from .page_parts import BASE64_RATIO, choose_levels, count_bytes

TokenLists = Sequence[str] | Sequence[Sequence[str]]

PAGE_BYTES = 10_000_000  # default limit of a page's size; such a page opens quickly and fits into a mail
ESTIMATED_SHARE = 0.96  # share of the limit for rounded weights, whose size is an estimate; the rest covers its error
TOP_ENTRIES = 8  # default number of weights stored per query and per key if a page cannot hold all weights
ROUNDED = (
    "Exact weights would take more than the {:.3g} MB of this page. The square root of each weight is rounded to a "
    "multiple of 1/{}; ± is the largest error of the weight. 0, entropy and received are exact."
)
MAP_SIDES = (32, 1024)  # (least, most) cells per side of a pooled map; a browser draws more cells slowly


@dataclass(frozen=True)
class Links:
    """The k heaviest weights of each query, or of each key, in descending order, with their positions.

    Parameters
    ----------
    weights : (H, n, k) float32, or (H, m, k) for keys
    where : int32 array of the shape of `weights`
        The key position of each weight of a query, or the query position of each weight of a key. An unused place has
        position −1 and weight 0.
    levels : int, optional
        The page stores the weights rounded to this number of levels above 0, as `page_parts.to_levels` does. If
        `levels` is None, the page stores every weight exactly.
    """

    weights: Array
    where: Array
    levels: int | None = None


@dataclass(frozen=True)
class ShownLayer:
    """What the page shows of the heads of one layer on one text.

    Parameters
    ----------
    name : str
    queries, keys : tuples of str
        The tokens of the queries and of the keys, which are the same in self-attention.
    cells : (H, rows, columns) float16 or float32
        The weights, or the weights pooled to fewer rows and columns. Cell (r, c) covers the queries from ⌊r·n/rows⌋ up
        to, not including, ⌊(r+1)·n/rows⌋, and the keys from ⌊c·m/columns⌋ up to, not including, ⌊(c+1)·m/columns⌋.
    how : {"whole", "mean", "max"}
        What a cell holds: one weight, or the mean or the maximum of the weights that the cell covers.
    entropy : (H, n) float32, in nats
    received : (H, m) float32
        The weight that each key receives: the sum of its weights over the queries.
    looks, seen_by : Links, optional
        The heaviest keys of each query, and the heaviest queries of each key; both None if `cells` are the weights.
        If only `seen_by` is None, the page finds the queries of a key among those that have it in `looks`.
    heads : tuple of H ints, optional
        The numbers of the heads in the model; by default 0 to H − 1.
    levels, sum_levels : int, optional
        The page stores the cells rounded to `levels`, and entropy and received rounded to `sum_levels`, as in `Links`.
    """

    name: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    cells: Array
    how: str
    entropy: Array
    received: Array
    looks: Links | None = None
    seen_by: Links | None = None
    heads: tuple[int, ...] | None = None
    levels: int | None = None
    sum_levels: int | None = None


@dataclass(frozen=True)
class DenseLayer:
    """One layer's dense weights (H, n, m) on one text, before they are stored in a page."""

    name: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    weights: Array
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Text:
    """One text of a batch.

    Parameters
    ----------
    name : str
        The name of the text, shown where the reader chooses a text.
    layers : tuple of ShownLayer
    """

    name: str
    layers: tuple[ShownLayer, ...]


@dataclass(frozen=True)
class Exploration:
    """The data of one explorer page.

    Parameters
    ----------
    title : str
    texts : tuple of Text
    notes : tuple of str
        Lines of text at the foot of the page, which say what the page leaves out.
    """

    title: str
    texts: tuple[Text, ...]
    notes: tuple[str, ...] = ()


def from_weights(
    tokens: TokenLists,
    weights: Any,
    *,
    keys: TokenLists | None = None,
    names: Sequence[str] | None = None,
    title: str | None = None,
    limit: int = PAGE_BYTES,
    top: int = TOP_ENTRIES,
) -> Exploration:
    """Return the data of a page that shows dense weights.

    Parameters
    ----------
    tokens : sequence of n str, or one such sequence for each text of a batch
        The tokens of the queries. If a text has fewer tokens than the weights have rows, the rows after the tokens are
        padding and are left out. Columns without a token of a key are left out too.
    weights : (H, n, m) or (B, H, n, m) array, or a sequence with one such array for each layer
        Normalised weights, as NumPy arrays or torch tensors.
    keys : sequence of m str, or one such sequence for each text of a batch, optional
        The tokens of the keys in cross-attention; by default those of the queries.
    names : sequence of str, optional
        The name of each layer; by default "Layer 0", "Layer 1" and so on.
    title : str, optional
        By default "Attention" and the text, if there is one.
    limit : int, default 10 MB
        Largest size of a page in bytes. If exact weights are larger, the page stores each weight rounded to 16, 12 or 8
        bits, or to fewer levels, and shows how exact a weight is. If 64 levels are too many, the map shows means, and
        only the heaviest weights of each query and key are stored, as many and as exactly as the limit allows. The
        `notes` on the page say what is stored. They also say if the limit is too low for any page of these weights.
    top : int, default 8
        Largest number of weights that are stored per query and per key if the map shows means.

    Returns
    -------
    Exploration

    Raises
    ------
    ShapeError
        The weights are not (H, n, m) or (B, H, n, m), there are more tokens than rows or columns, the number of texts
        is not B, or a text has no tokens.
    DtypeError
        The weights are not real numbers.
    ParameterError
        A weight is below 0, limit or top is below 1, the number of names is not the number of layers, or a token is not
        a string.

    Examples
    --------
    >>> from sightline.data import load
    >>> from sightline.view.explorer import from_weights
    >>> cat = load("minilm_cat")
    >>> page = from_weights(cat.tokens, [cat.layers[k].weights for k in (0, 3)], names=["0", "3"])
    >>> len(page.texts), [layer.cells.shape for layer in page.texts[1].layers]  # 12 heads
    (2, [(12, 20, 20), (12, 20, 20)])
    """
    arrays = _as_layers(weights)
    if names is not None and len(names) != len(arrays):
        raise ParameterError(f"{len(names)} names for {len(arrays)} layers", "one name for each layer", "names=None")
    labels = list(map(str, names)) if names is not None else [f"Layer {number}" for number in range(len(arrays))]
    sides = tokens, tokens if keys is None else keys
    queries, key_texts = (list(map(tuple, labels_by_entry(side))) for side in sides)
    _check(queries, key_texts, arrays)
    layers = list(zip(labels, arrays, strict=True))
    texts = [
        [DenseLayer(name, rows, columns, array[k, :, : len(rows), : len(columns)]) for name, array in layers]
        for k, (rows, columns) in enumerate(zip(queries, key_texts, strict=True))
    ]
    return make_exploration(page_title("Attention", queries) if title is None else str(title), texts, limit, top)


def make_exploration(
    title: str, texts: Sequence[Sequence[DenseLayer]], limit: int = PAGE_BYTES, top: int = TOP_ENTRIES
) -> Exploration:
    """Return the data of a page of at most `limit` bytes, or of the smallest page if none is so small.

    The page has all weights if they fit, exact or rounded to the largest number of levels that fits. Otherwise the page
    has pooled maps, and `top` of the heaviest weights of each query and of each key. If this needs more space, `fit`
    stores fewer bits, then fewer weights, then coarser maps.
    """
    if not all(isinstance(number, int | float) and number >= 1 for number in (limit, top)):
        raise ParameterError(f"limit={limit!r}, top={top!r}", "numbers ≥ 1", f"limit={PAGE_BYTES}, top={TOP_ENTRIES}")
    all_weights = [layer.weights for text in texts for layer in text]
    itemsize = 2 if all(array.dtype == np.float16 for array in all_weights) else 4
    sides = {side for text in texts for layer in text for side in (layer.queries, layer.keys)}
    left = limit - count_bytes(Exploration(title, (), tuple(json.dumps(side) for side in sides)))
    left -= BASE64_RATIO * 4 * sum(len(array) * sum(array.shape[1:]) for array in all_weights)  # entropy and received
    levels, notes = None, list[str]()
    whole = sum(array.size for array in all_weights) * itemsize * BASE64_RATIO <= left
    if not whole:
        levels = choose_levels(all_weights, ESTIMATED_SHARE * left)
        whole = levels is not None
        notes = [ROUNDED.format(limit / 1e6, levels) if levels else "The map shows means of weights."]
    cells = max(limit / 2 / BASE64_RATIO, 1) / sum(map(len, all_weights))  # of each head, in half of the page
    side = int(np.clip(np.sqrt(cells), *MAP_SIDES)) // 4 * 4  # divisible by 4, because `fit` may halve maps twice
    made = [[make_layer(layer, 0 if whole else int(top), side, levels) for layer in text] for text in texts]
    named = tuple(Text(text_name(layers[0].queries), tuple(layers)) for layers in made)
    data = Exploration(title, named, tuple(notes))
    return data if whole else fit(data, limit)


def text_name(tokens: Sequence[str]) -> str:
    """Return the first 80 characters of the text that the tokens form, as a name of the text."""
    has_spaces = any(token.startswith(("Ġ", "▁", " ")) for token in tokens)
    text = "".join(tokens) if has_spaces else " ".join(tokens).replace(" ##", "")
    return text.replace("Ġ", " ").replace("▁", " ").strip()[:80]


def page_title(model: str, texts: Sequence[Sequence[str]]) -> str:
    """Return the name of the model, and the beginning of the text if there is one text, of words and not of patches."""
    text = text_name([token for token in texts[0] if not re.fullmatch(r"\[[A-Z]+\]|<.+>", token)])
    is_text = len(texts) == 1 and texts[0][0] != "class" and re.search(r"[^\W\d_]{2}", text)
    return f"{model}: “{shorten(text, 60, placeholder=' …')}”" if is_text else model


def _as_layers(weights: Any) -> list[Array]:
    """Return an array of weights (B, H, n, m) for every layer.

    The arrays keep their dtypes. `make_layer` converts dtypes other than float16 to float32.
    """
    given = weights if isinstance(weights, Sequence) else [weights]
    arrays: list[Array] = [np.asarray(to_numpy(array)) for array in given]
    shapes = [array.shape for array in arrays]
    if not arrays or any(array.ndim not in (3, 4) for array in arrays):
        given = f"weights of shapes {shapes}" if arrays else "no weights: an empty list"
        cure = "[array[None]] for one head (n, m), list(array) for layers stacked in one array"
        raise ShapeError(given, "one layer or more, each (H, n, m) or (B, H, n, m)", cure)
    for array in arrays:
        if array.dtype.kind in "cOSU":
            raise DtypeError(f"weights of dtype {array.dtype}", "real numbers", "weights.astype('float32')")
        if (array < 0).any():
            given = f"weights with an entry {array.min()}"
            raise ParameterError(given, "normalised weights, at least 0", "apply softmax to scores")
    return [array[None] if array.ndim == 3 else array for array in arrays]


def _check(queries: Sequence[Any], keys: Sequence[Any], arrays: Sequence[Array]) -> None:
    longest = tuple(max(map(len, side), default=0) for side in (queries, keys))
    empty = any(len(text) == 0 for text in (*queries, *keys))
    for array in arrays:
        batch, _, n, m = array.shape
        if empty or not batch == len(queries) == len(keys) or longest[0] > n or longest[1] > m or 0 in array.shape:
            counts = "{} texts of up to {} queries and {} keys".format(len(queries), *longest)
            allowed = "(B, H, n, m): at least one row per token and one column per key, no empty text"
            cure = "tokens: a list of strings, or for a batch a list of such lists; keys= for other tokens of the keys"
            raise ShapeError(f"weights of shape {array.shape} for {counts}", allowed, cure)


def make_layer(layer: DenseLayer, count: int = 0, side: int = 0, levels: int | None = None) -> ShownLayer:
    """Return a layer of the page. Heads are computed one by one, so that only one head's weights are copied at a time.

    If `count` is 0, the layer has all weights. Otherwise it has maps of at most `side` cells per side, and the `count`
    heaviest weights of each query and of each key. The page rounds the weights to `levels`.
    """
    p, names = layer.weights, (layer.name, layer.queries, layer.keys)
    dtype = np.float16 if p.dtype == np.float16 else np.float32
    entropy = np.stack([_entropy(head) for head in p]).astype(np.float32)
    received = np.stack([head.sum(0, dtype=np.float64) for head in p]).astype(np.float32)
    if not count:
        return ShownLayer(*names, p.astype(dtype), "whole", entropy, received, heads=layer.heads, levels=levels)
    cells = np.stack([pool_cells(head.astype(np.float32), side) for head in p]).astype(np.float32)
    looks, seen_by = (Links(*top_links(matrix, count)) for matrix in (p, p.swapaxes(1, 2)))
    return ShownLayer(*names, cells, "mean", entropy, received, looks, seen_by, layer.heads, levels)


def _entropy(p: Array) -> Array:
    """Return for each query i the entropy −Σ_j P_ij ln P_ij in nats, computed in float64 on 256 queries at a time."""
    blocks = (p[start : start + 256].astype(np.float64) for start in range(0, len(p), 256))
    return np.concatenate([entropy_of(rows) + 0.0 for rows in blocks])


def top_links(p: Array, k: int) -> tuple[Array, Array]:
    """Return (k largest weights of each row, their columns), each (..., n, k), of weights (..., n, m).

    Of equal weights the one in the first column comes first. A row with fewer than k weights above 0 is filled up with
    weight 0 and column −1. If m < k, k is m.
    """
    *heads, n, m = p.shape
    k = min(k, m)
    weights, where = np.zeros((*heads, n, k), np.float32), np.full((*heads, n, k), -1, np.int32)
    for *head, start in product(*map(range, heads), range(0, n, 256)):
        at: Any = (*head, slice(start, start + 256))
        rows = np.ascontiguousarray(p[at], np.float32)
        bits = rows.view(np.int32).astype(np.int64)  # bits of floats ≥ 0 have the floats' order
        ordered = (bits << 32) - np.arange(m)
        best = np.argpartition(ordered, m - k, axis=1)[:, m - k :]
        best = np.take_along_axis(best, np.argsort(-np.take_along_axis(ordered, best, 1), axis=1), 1)
        weights[at] = np.take_along_axis(rows, best, 1)
        where[at] = np.where(weights[at] > 0, best, -1)
    return weights, where
