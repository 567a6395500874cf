"""Conversion of the `Seen` of a watched model to the data of the explorer page.

The data come from the statistic `weights()`, or from pooled statistics if the weights were not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arrays.operations import to_numpy
from ...errors import ParameterError
from .data import (
    PAGE_BYTES,
    TOP_ENTRIES,
    DenseLayer,
    Exploration,
    Links,
    ShownLayer,
    Text,
    make_exploration,
    text_name,
)
from .fitting import fit

Array = np.ndarray[Any, np.dtype[Any]]

REQUIRED_STATISTICS = ("pooled", "top_k", "entropy", "received")
CURE = "see=[sightline.weights()], or see=[pooled(64, 64), top_k(8), entropy(), received()]"


def from_seen(seen: Any, *, title: str = "Attention", limit: int = PAGE_BYTES, top: int = TOP_ENTRIES) -> Exploration:
    """Return the data of a page that shows the attention of a watched model.

    Parameters
    ----------
    seen : Seen
        The recording. Every call has the statistic `weights()`, or every call has all of `pooled(...)`, `top_k(...)`,
        `entropy()` and `received()`. With `weights()`, the page shows the last run of each layer: a forward pass and
        the generation steps after it, joined. With the other statistics, the page shows the last call of each layer.
    title : str, default "Attention"
    limit : int, default 10 MB
        Largest size of a page in bytes; see `from_weights`. A page of pooled statistics stores numbers in fewer bits,
        then fewer of the keys of `top_k`, then coarser maps, until it fits. The page and its `notes` say what it
        stores, and if the limit is too low for any page of this recording.
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
        raise ParameterError(
            f"an explorer page of a {type(seen).__name__}", "an Exploration or a Seen", "from_weights(tokens, weights)"
        )
    shown = dict.fromkeys(call.name for call in seen.calls)
    runs = [_last_run([call for call in seen.calls if call.name == name]) for name in shown]
    if not runs:
        raise ParameterError(
            "a Seen without calls: nothing was recorded", "calls of a layer", "with watch(...) as seen: model(**inputs)"
        )
    statistic_names = [[statistic.name for statistic in run[-1].statistics] for run in runs]
    is_dense = all("weights" in names for names in statistic_names)
    for run, names in zip(runs, statistic_names, strict=True):
        if not is_dense:
            _check(run[-1], names)
    batch = range(len(to_numpy(_first(runs[0][-1].results[0]))))
    if is_dense:
        return make_exploration(title, [[_dense(seen, run, entry) for run in runs] for entry in batch], limit, top)
    texts = [[_pooled(seen, run[-1], entry) for run in runs] for entry in batch]
    named = tuple(Text(text_name(text[0].queries), tuple(text)) for text in texts)
    return fit(Exploration(title, named, ("The map shows pooled weights.",)), limit)


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _last_run(calls: Sequence[Any]) -> list[Any]:
    """Return the calls of a layer's last run: the last call that starts at position 0, and the calls after it.

    These are a forward pass and the generation steps after it. If no call starts at position 0, all calls are returned.
    """
    run_starts = [place for place, call in enumerate(calls) if not call.query_start and call.kind == "self"]
    return list(calls[run_starts[-1] if run_starts else 0 :])


def _check(call: Any, names: Sequence[str]) -> None:
    """Raise ParameterError unless the call has every statistic in `REQUIRED_STATISTICS`.

    The pooled weights must cover all pairs, and the received weight must be a sum.
    """
    missing = [name for name in REQUIRED_STATISTICS if name not in names]
    if missing:
        raise ParameterError(
            f"{call.layer} with {', '.join(names) or 'no statistic of its own'}; missing {', '.join(missing)}",
            f"weights, or all of {', '.join(REQUIRED_STATISTICS)}",
            CURE,
        )
    pooled, received = (call.statistics[names.index(name)] for name in ("pooled", "received"))
    if getattr(pooled, "within", None) is not None or getattr(received, "how", "sum") != "sum":
        raise ParameterError(
            f"{pooled!r} and {received!r}", "pooled weights of all pairs, and received() as a sum", CURE
        )


def _dense(seen: Any, run: Sequence[Any], entry: int) -> DenseLayer:
    """Return a layer's weights on one text of the batch. The steps of a generation are joined into one matrix."""
    parts = [to_numpy(call["weights"])[entry] for call in run]
    start = min(call.key_start for call in run)
    m, n = max(call.key_start + call.m for call in run) - start, sum(call.n for call in run)
    weights = parts[0] if len(run) == 1 else np.zeros((len(parts[0]), n, m), parts[0].dtype)
    queries: list[str] = []
    keys = [str(start + j) for j in range(m)]
    for call, part in zip(run, parts, strict=True):
        query_labels, key_labels = _labels(seen, call, entry)
        first = call.key_start - start
        if len(run) > 1:
            weights[:, len(queries) : len(queries) + call.n, first : first + call.m] = part
        queries += query_labels
        keys[first : first + call.m] = key_labels
    n, m = _unpadded_length(queries), _unpadded_length(keys)
    return DenseLayer(run[0].name, tuple(queries[:n]), tuple(keys[:m]), weights[:, :n, :m], run[0].heads)


def _pooled(seen: Any, call: Any, entry: int) -> ShownLayer:
    """Return a layer of the page from the pooled statistics of one call on one text of the batch.

    Padding tokens stay, because the pooled cells include them.
    """
    queries, keys = _labels(seen, call, entry)
    how = call.statistics[[statistic.name for statistic in call.statistics].index("pooled")].how
    cells, entropy, received = (to_numpy(call[name])[entry] for name in ("pooled", "entropy", "received"))
    weights, where = (to_numpy(part)[entry] for part in call["top_k"])
    return ShownLayer(
        call.name,
        tuple(queries),
        tuple(keys),
        cells.astype(np.float32),
        how,
        entropy.astype(np.float32),
        received.astype(np.float32),
        Links(weights.astype(np.float32), where.astype(np.int32)),
        heads=call.heads,
    )


def _labels(seen: Any, call: Any, entry: int) -> tuple[list[str], list[str]]:
    """Return the labels of the queries and those of the keys: their positions if no labels are recorded."""
    queries, keys = seen.labels(call, entry)
    first = call.key_start + (call.query_start or 0)
    queries = [str(first + i) for i in range(call.n)] if queries is None else list(queries)
    keys = [str(call.key_start + j) for j in range(call.m)] if keys is None else list(keys)
    return queries, keys


def _unpadded_length(tokens: Sequence[str]) -> int:
    """Return the number of tokens before the padding, which is the empty labels at the end; at least 1."""
    count = len(tokens)
    while count > 1 and not tokens[count - 1]:
        count -= 1
    return count
