"""What the explorer page holds: tokens, and for every layer its map, where queries look and who looks at keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays import to_numpy
from ...errors import DtypeError, ParameterError, ShapeError
from ...labels import labels_by_entry
from ..heatmaps import pooled

__all__ = [
    "PAGE_BYTES",
    "TOP_ENTRIES",
    "DenseLayer",
    "Exploration",
    "Layer",
    "Links",
    "Text",
    "from_weights",
    "make_exploration",
    "text_name",
]

Array = np.ndarray[Any, np.dtype[Any]]
Tokens = Sequence[str] | Sequence[Sequence[str]]

PAGE_BYTES = 32 << 20  # bytes of a page: opened at once from a disk, sent by mail
TOP_ENTRIES = 8  # heaviest entries of each row and column, where the weights are too many to be kept
MAP_SIDES = (32, 1024)  # cells of a pooled map each way: fewer show nothing, more are slow to draw
BASE64_RATIO = 4 / 3  # characters of base64 for a byte


@dataclass(frozen=True)
class Links:
    """The heaviest entries of each row, or of each column, in descending order; exact.

    Parameters
    ----------
    weights : (H, n, k) float32
    where : (H, n, k) int32
        The key, or the query, of each; −1 past those there are.
    complete : bool
        False: of a column, only those that are among the heaviest of their own rows too.
    """

    weights: Array
    where: Array
    complete: bool = True


@dataclass(frozen=True)
class Layer:
    """One layer's heads on one text.

    Parameters
    ----------
    name : str
    queries, keys : tokens
        The same in self-attention.
    cells : (H, rows, columns) float16 or float32
        The weights themselves, or pooled to fewer rows and columns: cell (r, c) is queries ⌊r·n/rows⌋ to
        ⌊(r+1)·n/rows⌋, keys likewise.
    how : {"whole", "mean", "max"}
        What a cell is.
    entropy : (H, n) float32, nats
    received : (H, m) float32
        Weights summed over the queries.
    looks, seen_by : Links, optional
        Of each query and of each key; None where `cells` are the weights themselves.
    heads : H numbers, optional
        What the heads are called; by default 0 to H − 1.
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


@dataclass(frozen=True)
class DenseLayer:
    """One layer's weights on one text, (H, n, m), on their way into a page."""

    name: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    weights: Array
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Text:
    """One text of a batch."""

    name: str
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Exploration:
    """All a page shows; `notes` tell its reader what was left out."""

    title: str
    texts: tuple[Text, ...]
    notes: tuple[str, ...] = ()


def from_weights(
    tokens: Tokens,
    weights: Any,
    *,
    keys: Tokens | None = None,
    names: Sequence[str] | None = None,
    title: str = "Attention",
    limit: int = PAGE_BYTES,
    top: int = TOP_ENTRIES,
) -> Exploration:
    """What a page shows of dense weights.

    Parameters
    ----------
    tokens : n tokens, or a list of tokens for each text of a batch
        Of the queries. A text of fewer tokens than there are rows is taken to be padded at its end: what lies past its
        tokens is left out.
    weights : (H, n, m) or (B, H, n, m) array, or one for each layer
        Normalised weights; NumPy's or torch's.
    keys : like tokens, optional
        Tokens of the keys, in cross-attention.
    names : one for each layer, optional
    title : str
    limit : int, bytes
        The most a page should take. Beyond it the map is pooled to means, and of each query and key the heaviest
        entries are kept exactly; the page says so.
    top : int
        How many of these at most.

    Raises
    ------
    ShapeError
        Weights that are no (H, n, m) or (B, H, n, m), more tokens than rows or columns, other numbers of texts, a text
        without tokens.
    DtypeError
        Weights that are no real numbers.
    ParameterError
        Weights below 0, a limit or top below 1, names that are not one for each layer, tokens that are no strings.
    """
    arrays = _as_layers(weights)
    if names is not None and len(names) != len(arrays):
        raise ParameterError(f"{len(names)} names for {len(arrays)} layers", "one for each", "names=None")
    labels = list(map(str, names)) if names is not None else [f"Layer {number}" for number in range(len(arrays))]
    queries = _as_texts(tokens)
    columns = queries if keys is None else _as_texts(keys)
    _check(queries, columns, arrays)
    texts = [
        [
            DenseLayer(name, rows, over, array[place, :, : len(rows), : len(over)])
            for name, array in zip(labels, arrays, strict=True)
        ]
        for place, (rows, over) in enumerate(zip(queries, columns, strict=True))
    ]
    return make_exploration(str(title), texts, limit, top)


def make_exploration(
    title: str, texts: Sequence[Sequence[DenseLayer]], limit: int = PAGE_BYTES, top: int = TOP_ENTRIES
) -> Exploration:
    """Whole weights where a page of `limit` bytes holds them, else pooled maps and the `top` heaviest entries."""
    if not all(isinstance(number, int | float) and number >= 1 for number in (limit, top)):
        raise ParameterError(f"limit={limit!r}, top={top!r}", "numbers ≥ 1", f"limit={PAGE_BYTES}, top={TOP_ENTRIES}")
    all_weights = [layer.weights for text in texts for layer in text]
    itemsize = 2 if all(array.dtype == np.float16 for array in all_weights) else 4
    whole = sum(array.size for array in all_weights) * itemsize * BASE64_RATIO <= limit
    count, side = (0, 0) if whole else _split_budget(limit, all_weights, top)
    made = tuple(
        Text(text_name(text[0].queries), tuple(_make_layer(one, count, side) for one in text)) for text in texts
    )
    return Exploration(title, made, () if whole else (_pooling_note(limit, count, side),))


def text_name(tokens: Sequence[str]) -> str:
    """The beginning of a text, of its tokens put together."""
    marked = any(token.startswith(("Ġ", "▁", " ")) for token in tokens)
    text = "".join(tokens) if marked else " ".join(tokens).replace(" ##", "")
    return text.replace("Ġ", " ").replace("▁", " ").strip()[:80]


def _as_layers(weights: Any) -> list[Array]:
    """(B, H, n, m) of every layer; float16 stays, all else becomes float32 when it is kept."""
    given = weights if isinstance(weights, Sequence) else [weights]
    arrays: list[Array] = [np.asarray(to_numpy(array)) for array in given]
    shapes = [array.shape for array in arrays]
    if not arrays or any(array.ndim not in (3, 4) for array in arrays):
        raise ShapeError(
            f"weights of shape {shapes}", "(H, n, m) or (B, H, n, m) for each layer", "one array for each layer"
        )
    for array in arrays:
        if array.dtype.kind in "cOSU":
            raise DtypeError(f"weights of dtype {array.dtype}", "real numbers", "cast them")
        if (array < 0).any():
            raise ParameterError(
                f"weights of which one is {array.min()}",
                "normalised weights, from 0 on",
                "scores go through softmax first",
            )
    return [array[None] if array.ndim == 3 else array for array in arrays]


def _as_texts(tokens: Tokens) -> list[tuple[str, ...]]:
    """Lists of tokens, one for each text."""
    return [tuple(one) for one in labels_by_entry(tokens)]


def _check(queries: Sequence[Any], keys: Sequence[Any], arrays: Sequence[Array]) -> None:
    longest = tuple(max(map(len, side), default=0) for side in (queries, keys))
    empty = any(len(text) == 0 for text in (*queries, *keys))
    for array in arrays:
        batch, _, n, m = array.shape
        texts = batch == len(queries) == len(keys) and not empty
        if not texts or longest[0] > n or longest[1] > m or 0 in array.shape:
            raise ShapeError(
                f"weights of shape {array.shape} for {len(queries)} texts of up to {longest[0]} queries and "
                f"{longest[1]} keys",
                "(B, H, n, m): one row for each token, a column for each key, none empty",
                "tokens of one text as a list of strings, of a batch as a list of such lists; keys= where they differ",
            )


def _split_budget(limit: int, all_weights: Sequence[Array], top: int) -> tuple[int, int]:
    """Entries kept of each row and column, and the side of the pooled maps: half of the limit each, where they fit."""
    ends, heads = sum(len(p) * sum(p.shape[1:]) for p in all_weights), sum(map(len, all_weights))
    count = int(min(max(limit / 2 / BASE64_RATIO / (8 * ends), 1), top))  # a float32 and an int32 each
    left = max(limit / BASE64_RATIO - 8 * count * ends, 0) / 2  # float16
    return count, int(np.clip(np.sqrt(left / heads), *MAP_SIDES))


def _make_layer(one: DenseLayer, count: int, side: int) -> Layer:
    """A layer of the page, head by head, so that no float64 copy of all of it is made."""
    p, names = one.weights, (one.name, one.queries, one.keys)
    dtype = np.float16 if p.dtype == np.float16 else np.float32
    entropy = np.stack([_entropy(head) for head in p]).astype(np.float32)
    received = np.stack([head.sum(0, dtype=np.float64) for head in p]).astype(np.float32)
    if not count:
        return Layer(*names, p.astype(dtype), "whole", entropy, received, heads=one.heads)
    cells = np.stack([pooled(head.astype(np.float32), side) for head in p]).astype(np.float16)
    looks, seen_by = (stack_heads([top_links(head, count) for head in side_of]) for side_of in (p, p.swapaxes(1, 2)))
    return Layer(*names, cells, "mean", entropy, received, looks, seen_by, one.heads)


def _entropy(p: Array) -> Array:
    """−Σ_j P_ij ln P_ij, in nats, in float64 a block of rows at a time."""
    found = []
    for start in range(0, len(p), 256):
        rows = p[start : start + 256].astype(np.float64)
        found.append(-(rows * np.log(np.where(rows > 0, rows, 1))).sum(-1) + 0.0)
    return np.concatenate(found)


def top_links(p: Array, k: int) -> tuple[Array, Array]:
    """The k heaviest entries above 0 of every row of a matrix (n, m): weights and columns, (n, k); ties: first column.

    Entries past those there are weigh 0 and are at −1.
    """
    n, m = p.shape
    k = min(k, m)
    weights, where = np.zeros((n, k), np.float32), np.full((n, k), -1, np.int32)
    for start in range(0, n, 256):
        rows = np.ascontiguousarray(p[start : start + 256], np.float32)
        ordered = (rows.view(np.int32).astype(np.int64) << 32) - np.arange(m)  # floats ≥ 0 order as their bits do
        best = np.argpartition(ordered, m - k, axis=1)[:, m - k :]
        best = np.take_along_axis(best, np.argsort(-np.take_along_axis(ordered, best, 1), axis=1), 1)
        weights[start : start + 256] = np.take_along_axis(rows, best, 1)
        where[start : start + 256] = np.where(weights[start : start + 256] > 0, best, -1)
    return weights, where


def stack_heads(pairs: Iterable[tuple[Array, Array]]) -> Links:
    """(weights, where) of every head as one."""
    weights, where = zip(*pairs, strict=True)
    return Links(np.stack(weights), np.stack(where))


def _pooling_note(limit: int, count: int, side: int) -> str:
    return (
        f"All weights would take more than this page's {limit / 2**20:.0f} MiB. The map shows means over cells, {side} "
        f"each way at most; the {count} keys each query weighs most, and the {count} queries that weigh each key most, "
        "are exact."
    )
