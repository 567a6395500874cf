"""Conversion of a `Seen`, the recording of a watched model, to the data of the explorer page.

The data come from the statistic `weights()`, or from pooled statistics if the weights were not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arrays.operations import Array, to_numpy
from ...errors import ParameterError
from ...statistics import arrays_of
from ...statistics.reduction import cell_edges
from .data import (
    PAGE_BYTES,
    TOP_ENTRIES,
    DenseLayer,
    Exploration,
    Links,
    ShownLayer,
    Text,
    make_exploration,
    make_layer,
    page_title,
    text_name,
)
from .fitting import fit

REQUIRED_STATISTICS = ("pooled", "top_k", "entropy", "received")
CURE = "see=sightline.OVERVIEW, the default of watch, or see=[sightline.weights()]"


def from_seen(seen: Any, *, title: str | None = None, limit: int = PAGE_BYTES, top: int = TOP_ENTRIES) -> Exploration:
    """Return the data of a page that shows the attention of a watched model.

    Parameters
    ----------
    seen : Seen
        The recording. Every call must have `weights()`, or the four statistics that `watch` records by default:
        `pooled(...)`, `top_k(...)`, `entropy()` and `received()`. The page shows the last run of each layer: the last
        forward pass, joined with the generation steps after it. The page shows every weight if the calls have
        `weights()`, or if `pooled` has one cell for each pair, as in calls of up to 64 queries and keys.
    title : str, optional
        By default the name of the model, and the text if there is one.
    limit : int, default 10 MB
        Largest size of a page in bytes; see `from_weights`. A page of pooled statistics stores numbers in fewer bits,
        then fewer of the keys of `top_k`, then coarser maps, until the page fits. The `notes` on the page say what is
        stored. They also say if the limit is too low for any page of this recording.
    top : int, default 8
        Largest number of weights that are stored per query and per key; see `from_weights`.

    Returns
    -------
    Exploration

    Raises
    ------
    ParameterError
        The argument is not a `Seen`, the `Seen` has no calls, or its calls lack the statistics named above.
    """
    if not hasattr(seen, "calls"):
        given = f"an explorer page of a {type(seen).__name__}"
        raise ParameterError(given, "an Exploration or a Seen", "from_weights(tokens, weights)")
    shown = dict.fromkeys(call.name for call in seen.calls)
    runs = [_last_run([call for call in seen.calls if call.name == name]) for name in shown]
    if not runs:
        given = "a Seen without calls: nothing was recorded"
        raise ParameterError(given, "calls of a layer", "with watch(...) as seen: model(**inputs)")
    whole = [[_whole(call) for call in run] for run in runs]
    pairs = list(zip(runs, whole, strict=True))
    is_dense = all(part is not None for parts in whole for part in parts)
    if not is_dense:
        for run in runs:
            _check(run[-1])
    batch = range(len(to_numpy(arrays_of(runs[0][-1].results[0])[0])))
    if title is None:
        title = page_title(seen.model, [_labels(seen, runs[0], entry)[0] for entry in batch])
    if is_dense:
        return make_exploration(title, [[_dense(seen, *pair, entry) for pair in pairs] for entry in batch], limit, top)
    texts = [[_shown(seen, *pair, entry) for pair in pairs] for entry in batch]
    named = tuple(Text(text_name(text[0].queries), tuple(text)) for text in texts)
    return fit(Exploration(title, named, ("The map shows pooled weights.",)), limit)


def _last_run(calls: Sequence[Any]) -> list[Any]:
    """Return the calls of a layer's last run: the last call that starts at position 0, and the calls after it.

    A run is a forward pass and the generation steps after it. If no call starts at position 0, all calls are returned.
    """
    run_starts = [place for place, call in enumerate(calls) if not call.query_start]
    return list(calls[run_starts[-1] if run_starts else 0 :])


def _check(call: Any) -> None:
    """Raise ParameterError unless the call has every statistic in `REQUIRED_STATISTICS`.

    The pooled weights must cover all pairs, and the received weight must be a sum.
    """
    names = [statistic.name for statistic in call.statistics]
    missing = [name for name in REQUIRED_STATISTICS if name not in names]
    if missing:
        given = f"{call.layer} with {', '.join(names) or 'no statistics of single calls'}; missing {', '.join(missing)}"
        raise ParameterError(given, f"weights, or all of {', '.join(REQUIRED_STATISTICS)}", CURE)
    pooled, received = (call.statistics[names.index(name)] for name in ("pooled", "received"))
    if getattr(pooled, "within", None) is not None or getattr(received, "how", "sum") != "sum":
        given = f"{pooled!r} and {received!r}"
        raise ParameterError(given, "pooled weights of all pairs, and received() as a sum", CURE)


def _whole(call: Any) -> Any:
    """Return the weights (B, H, n, m) of a call, or None if no recorded statistic has them.

    `pooled` has all weights if it has one cell for each pair. `received` has all weights in a call of one query.
    """
    by_name = {statistic.name: statistic for statistic in call.statistics}
    if "weights" in by_name:
        return to_numpy(call["weights"])
    if "pooled" in by_name and getattr(by_name["pooled"], "within", None) is None:
        cells = to_numpy(call["pooled"])
        if cells.shape[-2:] == (call.n, call.m):
            return cells
    if call.n == 1 and "received" in by_name:
        return to_numpy(call["received"])[..., None, :]
    return None


def _key_span(run: Sequence[Any]) -> tuple[int, int]:
    """Return (the first position, past the last position) of the keys of all calls."""
    return min(call.key_start for call in run), max(call.key_start + call.m for call in run)


def _labels(seen: Any, run: Sequence[Any], entry: int) -> tuple[list[str], list[str]]:
    """Return the labels of the queries and the labels of the keys of all calls, for text `entry` of the batch."""
    start, stop = _key_span(run)
    queries: list[str] = []
    keys = [str(j) for j in range(start, stop)]
    for call in run:
        query_labels, key_labels = seen.labels(call, entry)
        queries += query_labels
        keys[call.key_start - start : call.key_start - start + call.m] = key_labels
    return queries, keys


def _dense(seen: Any, run: Sequence[Any], parts: Sequence[Array], entry: int) -> DenseLayer:
    """Return a layer's weights on one text of the batch. The steps of a generation are joined into one matrix."""
    (start, stop), (queries, keys) = _key_span(run), _labels(seen, run, entry)
    weights = parts[0][entry]
    if len(run) > 1:
        weights, row = np.zeros((len(weights), len(queries), stop - start), weights.dtype), 0
        for call, part in zip(run, parts, strict=True):
            first = call.key_start - start
            weights[:, row : row + call.n, first : first + call.m] = part[entry]
            row += call.n
    n, m = _unpadded_length(queries), _unpadded_length(keys)
    return DenseLayer(run[0].name, tuple(queries[:n]), tuple(keys[:m]), weights[:, :n, :m], run[0].heads)


def _shown(seen: Any, run: Sequence[Any], parts: Sequence[Array | None], entry: int) -> ShownLayer:
    """Return a layer of a page of pooled maps: with all weights if a map has as many cells, else with pooled cells."""
    (start, stop), known = _key_span(run), [part for part in parts if part is not None]
    if len(known) == len(parts) and max(sum(call.n for call in run), stop - start) <= _side(run):
        return make_layer(_dense(seen, run, known, entry))
    return _pooled(seen, run, parts, entry)


def _pooled(seen: Any, run: Sequence[Any], parts: Sequence[Array | None], entry: int) -> ShownLayer:
    """Return a layer of the page from the pooled statistics of its calls on one text of the batch.

    Padding tokens stay, because the pooled cells include them. Cells of several calls can be joined if they are means.
    If they are maxima, the layer shows the last call only.
    """
    how = next(statistic.how for statistic in run[0].statistics if statistic.name == "pooled")
    if how == "max":
        run, parts = run[-1:], parts[-1:]
    (start, stop), (queries, keys) = _key_span(run), _labels(seen, run, entry)
    cells = [to_numpy(call["pooled"] if part is None else part)[entry] for call, part in zip(run, parts, strict=True)]
    received = np.zeros((len(cells[0]), stop - start), np.float32)
    links: list[list[Array]] = [[], []]
    for call in run:
        first = call.key_start - start
        received[:, first : first + call.m] += to_numpy(call["received"])[entry]
        weights, where = (to_numpy(part)[entry] for part in call["top_k"])
        links[0].append(weights)
        links[1].append(np.where(where < 0, where, where + first))
    return ShownLayer(
        run[0].name,
        tuple(queries),
        tuple(keys),
        cells[0].astype(np.float32) if len(run) == 1 else _join_cells(run, cells),
        how,
        np.concatenate([to_numpy(call["entropy"])[entry] for call in run], -1).astype(np.float32),
        received,
        Links(np.concatenate(links[0], 1).astype(np.float32), np.concatenate(links[1], 1).astype(np.int32)),
        heads=run[0].heads,
    )


def _join_cells(run: Sequence[Any], cells: Sequence[Array]) -> Array:
    """Return the mean weights of each head on a grid over the queries and keys of all calls, (H, rows, columns).

    The cells of the calls have other edges than the cells of the result. A cell of the result is the mean of the cells
    that overlap it, weighted by the number of pairs (i, j) in the overlap.
    """
    (start, stop), n = _key_span(run), sum(call.n for call in run)
    edges = cell_edges(0, n, min(_side(run), n)), cell_edges(start, stop, min(_side(run), stop - start))
    sums, row = np.zeros((len(cells[0]), *(len(each) - 1 for each in edges))), 0
    for call, array in zip(run, cells, strict=True):
        down = _overlaps(edges[0], cell_edges(row, row + call.n, array.shape[1]))
        across = _overlaps(edges[1], cell_edges(call.key_start, call.key_start + call.m, array.shape[2]))
        # einsum of two arrays, because a product by the threads of BLAS takes 50 ms if other programs keep them busy
        sums += np.einsum("hrb,cb->hrc", np.einsum("ra,hab->hrb", down, array), across)
        row += call.n
    joined: Array = (sums / np.outer(*map(np.diff, edges))).astype(np.float32)
    return joined


def _side(run: Sequence[Any]) -> int:
    """Return the largest number of cells along an axis of the calls' pooled maps."""
    return max(length for call in run for length in call["pooled"].shape[-2:])  # type: ignore[no-any-return]


def _overlaps(edges: Array, others: Array) -> Array:
    """Return an array: entry (a, b) is the number of positions in both cell a of `edges` and cell b of `others`."""
    first, stop = np.maximum.outer(edges[:-1], others[:-1]), np.minimum.outer(edges[1:], others[1:])
    return np.maximum(stop - first, 0.0)  # type: ignore[no-any-return]


def _unpadded_length(tokens: Sequence[str]) -> int:
    """Return the number of tokens before the padding, which is the empty labels at the end; at least 1."""
    count = len(tokens)
    while count > 1 and not tokens[count - 1]:
        count -= 1
    return count
