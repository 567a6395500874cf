"""Which keys a cache keeps: published policies, as functions of exact statistics of attention.

Each function returns the positions that `KVCache.keep` takes:

>>> import numpy as np, sightline
>>> rng = np.random.default_rng(0)
>>> query, key, value = (rng.normal(size=(1, heads, 100, 16)) for heads in (4, 2, 2))
>>> cache = sightline.KVCache()
>>> cache.append(key, value)
>>> see = [sightline.received("mean", last=8)]
>>> output, (received,) = sightline.attention(query, cache, mask=sightline.causal(), see=see)
>>> cache.keep(sightline.eviction.snapkv(cache, received, budget=20, last=8))
>>> cache.key.shape
(1, 2, 20, 16)

A policy that reads statistics needs those of the rows that the cache has now, (B, H, rows). The H/G query heads that
share a key head decide together, by their mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays.operations import to_numpy
from .errors import ParameterError, ShapeError, check_count
from .kv_cache import KVCache

__all__ = ["h2o", "sinks", "snapkv", "tova"]

Positions = NDArray[np.int64]


def snapkv(cache: KVCache, received: Any, budget: int, last: int = 32, pool: int = 5) -> Positions:
    """Keep the last positions, and those before them that they attend to, with their neighbours.

    The weights that the last queries give to a key are averaged over these queries, then over `pool` adjacent keys.
    Each key head keeps its last `last` positions and the `budget` − `last` others with the largest averages.

    Parameters
    ----------
    cache : KVCache
        After the prompt.
    received : (B, H, rows) array
        `received("mean", last=last)` of the prompt's call, under a causal mask.
    budget : int
        The number of positions that each key head keeps, above `last`.
    last : int
    pool : int
        An odd number; 1 averages nothing. Beyond the ends of the keys, weights count as 0.

    Returns
    -------
    (B, G, budget) int64, or fewer if the sequences are shorter; −1 after the positions of a shorter sequence

    References
    ----------
    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, section 4 (arXiv:2404.14469).
    """
    check_count(f"pool={pool!r}", pool, 1, "pool=5")
    if pool % 2 == 0:
        raise ParameterError(f"pool={pool}", "an odd number", f"pool={pool + 1}")
    is_last = _is_last(cache, _check_budget(budget, last, "last"))
    scores = np.where(is_last, 0, _of_key_heads(cache, received))
    padded = np.pad(scores, ((0, 0), (0, 0), (pool // 2, pool // 2)))
    sums = np.lib.stride_tricks.sliding_window_view(padded, pool, axis=-1).sum(-1)
    return _largest(cache, np.where(is_last, np.inf, sums / pool), budget)


def h2o(cache: KVCache, received: Any, budget: int, recent: int) -> Positions:
    """Keep the newest positions, and the heavy hitters among the others: the keys with the largest sums of weights.

    Parameters
    ----------
    cache : KVCache
    received : (B, H, rows) array
        The sum of `received()` over all calls so far. After `keep`, take its entries at the rows that were kept.
    budget : int
        The number of positions that each key head keeps, at least `recent`.
    recent : int
        How many of them are the newest; the paper's experiments take half of the budget.

    Returns
    -------
    (B, G, budget) int64, or fewer if the sequences are shorter; −1 after the positions of a shorter sequence

    References
    ----------
    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", 2023,
    section 4 (arXiv:2306.14048).
    """
    is_recent = _is_last(cache, _check_budget(budget, recent, "recent"))
    return _largest(cache, np.where(is_recent, np.inf, _of_key_heads(cache, received)), budget)


def tova(cache: KVCache, received: Any, budget: int) -> Positions:
    """Keep the keys to which the last query attends most, averaged over all heads, and the last position.

    All heads keep the same positions.

    Parameters
    ----------
    cache : KVCache
    received : (B, H, rows) array
        `received(last=1)` of the newest call.
    budget : int
        The number of positions that are kept, at least 1.

    Returns
    -------
    (B, G, budget) int64, or fewer if the sequences are shorter; −1 after the positions of a shorter sequence

    References
    ----------
    Oren et al., "Transformers are Multi-State RNNs", 2024, section 4 (arXiv:2401.06104). There the last position may be
    dropped too.
    """
    scores = _of_key_heads(cache, received).mean(1, keepdims=True)
    return _largest(cache, np.where(_is_last(cache, _check_budget(budget, 1, "1")), np.inf, scores), budget)


def sinks(cache: KVCache, budget: int, first: int = 4) -> Positions:
    """Keep the first positions, to which many heads attend whatever the text says, and the newest ones.

    Parameters
    ----------
    cache : KVCache
    budget : int
        The number of positions that are kept, at least `first`.
    first : int
        How many of them are the first ones.

    Returns
    -------
    (B, G, budget) int64, or fewer if the sequences are shorter; −1 after the positions of a shorter sequence

    References
    ----------
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024, section 3.2 (arXiv:2309.17453). There
    the rotary positions are counted within the cache; here they stay those of the text.
    """
    positions = cache.key_positions
    is_first = (positions >= 0) & (positions < _check_budget(budget, first, "first"))
    return _largest(cache, np.where(is_first, np.inf, positions), budget)


def _check_budget(budget: Any, least: Any, name: str) -> int:
    """Return `least`, the number of positions that are kept in any case, after a check of it and of the budget."""
    count = check_count(f"{name}={least!r}", least, 1, f"{name}=4")
    check_count(f"budget={budget!r}", budget, count, f"a budget of at least {name}, for example 1024")
    return count


def _is_last(cache: KVCache, count: int) -> Any:
    """Return (B, G, rows) booleans: whether a row holds one of the last `count` positions of its sequence."""
    return cache.key_positions >= cache.lengths[:, None, None] - count


def _of_key_heads(cache: KVCache, statistic: Any) -> Any:
    """Return the mean of a statistic (B, H, rows) over the query heads of each key head, (B, G, rows) float64."""
    positions, found = cache.key_positions, np.asarray(to_numpy(statistic), np.float64)
    B, G, rows = positions.shape
    heads = found.shape[1] if found.ndim == 3 else 0
    if found.shape != (B, heads, rows) or heads % max(G, 1):
        raise ShapeError(
            f"a statistic of shape {found.shape} of a cache with {B} sequences, {G} heads and {rows} rows",
            f"({B}, a multiple of {G}, {rows})",
            "the statistic of a call on this cache, before later appends: attention(query, cache, see=...)",
        )
    return found.reshape(B, G, -1, rows).mean(2)


def _largest(cache: KVCache, scores: Any, budget: int) -> Positions:
    """Return the positions of the rows with the largest scores, of equal ones the last; ascending, −1 at the end."""
    positions = cache.key_positions
    scores = np.where(positions >= 0, scores, -np.inf)
    order = np.argsort(scores, axis=-1, kind="stable")[..., max(scores.shape[-1] - budget, 0) :]
    chosen = np.take_along_axis(positions, order, -1)
    none = np.iinfo(np.int64).max
    ascending = np.sort(np.where(chosen < 0, none, chosen), axis=-1)
    return np.where(ascending == none, -1, ascending)
