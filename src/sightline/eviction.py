"""Which keys a cache keeps: published policies, on exact statistics of attention.

A policy names the statistic that it reads, and returns the positions that `KVCache.keep` takes:

>>> import numpy as np, sightline
>>> rng = np.random.default_rng(0)
>>> query, key, value = (rng.normal(size=(1, heads, 100, 16)) for heads in (4, 2, 2))
>>> cache, policy = sightline.KVCache(), sightline.eviction.SnapKV(budget=20, last=8)
>>> cache.append(key, value)
>>> output, (seen,) = sightline.attention(query, cache, mask=sightline.causal(), see=[policy.see])
>>> cache.keep(policy(cache, seen))
>>> cache.key.shape
(1, 2, 20, 16)

`sightline.transformers.Cache(evict=policy)` does this in each layer of a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .arrays.operations import to_numpy
from .errors import ParameterError, ShapeError, check_count
from .kv_cache import KVCache
from .statistics import Statistic, received

__all__ = ["H2O", "TOVA", "Policy", "Sinks", "SnapKV"]

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Policy(ABC):
    """A choice of the keys to keep. Calling it returns their positions.

    The H/G query heads that share a key head decide together, by their mean. Of equal keys the later one is kept.

    Parameters
    ----------
    budget : int
        The number of positions that each key head keeps.

    Attributes
    ----------
    see : Statistic, optional
        What the policy reads, of a call under a causal mask. None if it reads nothing.
    in_steps : bool
        True if keys are evicted after every call; False if after calls of several queries alone, such as prompts.
    adds : bool
        True if the policy reads the sum of the statistic over all calls so far. After `keep`, its entries are those of
        the rows that were kept.
    """

    budget: int
    in_steps: ClassVar[bool] = True
    adds: ClassVar[bool] = False

    @property
    @abstractmethod
    def see(self) -> Statistic | None: ...

    @property
    @abstractmethod
    def least(self) -> tuple[str, int]:
        """The name and the number of the positions that are kept in any case."""

    @abstractmethod
    def rank(self, positions: Any, lengths: Any, seen: Any) -> Any:
        """Return a number for each row, (B, G or 1, rows); rows with larger numbers are kept.

        `positions` (B, G, rows) and `lengths` (B, 1, 1) are those of the cache; `seen` is the statistic by key head.
        """

    def __post_init__(self) -> None:
        name, count = self.least
        check_count(f"{name}={count!r}", count, 1, f"{name}=4")
        check_count(f"budget={self.budget!r}", self.budget, count, f"a budget of at least {count}, for example 1024")

    def __call__(self, cache: KVCache, seen: Any = None) -> Positions:
        """Return the positions to keep, (B, G, budget) int64, ascending; −1 after those of a shorter sequence.

        Parameters
        ----------
        cache : KVCache
        seen : (B, H, rows) array
            The statistic `see` of the newest call on the cache, or its sum if `adds`.

        Raises
        ------
        ShapeError
            The statistic has another shape.
        """
        positions = cache.key_positions
        by_head = None if self.see is None else _of_key_heads(positions, seen)
        scores = np.where(positions >= 0, self.rank(positions, cache.lengths[:, None, None], by_head), -np.inf)
        order = np.argsort(scores, axis=-1, kind="stable")[..., max(scores.shape[-1] - self.budget, 0) :]
        chosen = np.take_along_axis(positions, order, -1)
        none = np.iinfo(np.int64).max
        ascending = np.sort(np.where(chosen < 0, none, chosen), axis=-1)
        return np.where(ascending == none, -1, ascending)


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep the last positions of a prompt, and those before them that they attend to, with their neighbours.

    The weights that the last queries give to a key are averaged over these queries, then over adjacent keys. Each key
    head keeps its last positions, and the others with the largest averages.

    Parameters
    ----------
    budget : int
        The number of positions that each key head keeps, at least `last`.
    last : int, default 32
        The number of the last queries, and of the last positions.
    pool : int, default 5
        The number of adjacent keys, odd; 1 averages nothing. Beyond the ends of the keys, weights count as 0.

    References
    ----------
    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, section 4 (arXiv:2404.14469).
    """

    last: int = 32
    pool: int = 5
    in_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_count(f"pool={self.pool!r}", self.pool, 1, "pool=5") % 2 == 0:
            raise ParameterError(f"pool={self.pool}", "an odd number", f"pool={self.pool + 1}")

    @property
    def see(self) -> Statistic | None:
        return received("mean", last=self.last)

    @property
    def least(self) -> tuple[str, int]:
        return "last", self.last

    def rank(self, positions: Any, lengths: Any, seen: Any) -> Any:
        is_last = positions >= lengths - self.last
        padded = np.pad(np.where(is_last, 0, seen), ((0, 0), (0, 0), (self.pool // 2, self.pool // 2)))
        sums = np.lib.stride_tricks.sliding_window_view(padded, self.pool, axis=-1).sum(-1)
        return np.where(is_last, np.inf, sums / self.pool)


@dataclass(frozen=True)
class H2O(Policy):
    """Keep the newest positions, and the heavy hitters among the others: the keys with the largest sums of weights.

    Parameters
    ----------
    budget : int
        The number of positions that each key head keeps, at least `recent`.
    recent : int
        How many of them are the newest; the paper's experiments take half of the budget.

    References
    ----------
    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", 2023,
    section 4 (arXiv:2306.14048).
    """

    recent: int
    adds: ClassVar[bool] = True

    @property
    def see(self) -> Statistic | None:
        return received()

    @property
    def least(self) -> tuple[str, int]:
        return "recent", self.recent

    def rank(self, positions: Any, lengths: Any, seen: Any) -> Any:
        return np.where(positions >= lengths - self.recent, np.inf, seen)


@dataclass(frozen=True)
class TOVA(Policy):
    """Keep the keys to which the last query attends most, averaged over all heads, and the last position.

    All heads keep the same positions.

    Parameters
    ----------
    budget : int
        The number of positions that are kept, at least 1.

    References
    ----------
    Oren et al., "Transformers are Multi-State RNNs", 2024, section 4 (arXiv:2401.06104). There the last position may be
    dropped too.
    """

    @property
    def see(self) -> Statistic | None:
        return received(last=1)

    @property
    def least(self) -> tuple[str, int]:
        return "budget", 1

    def rank(self, positions: Any, lengths: Any, seen: Any) -> Any:
        return np.where(positions >= lengths - 1, np.inf, seen.mean(1, keepdims=True))


@dataclass(frozen=True)
class Sinks(Policy):
    """Keep the first positions, to which many heads attend whatever the text says, and the newest ones.

    Parameters
    ----------
    budget : int
        The number of positions that are kept, at least `first`.
    first : int, default 4
        How many of them are the first ones.

    References
    ----------
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024, section 3.2 (arXiv:2309.17453). There
    rotary positions are counted within the cache; here they stay those of the text.
    """

    first: int = 4

    @property
    def see(self) -> Statistic | None:
        return None

    @property
    def least(self) -> tuple[str, int]:
        return "first", self.first

    def rank(self, positions: Any, lengths: Any, seen: Any) -> Any:
        return np.where(positions < self.first, np.inf, positions)


def _of_key_heads(positions: Any, statistic: Any) -> Any:
    """Return the mean of a statistic (B, H, rows) over the query heads of each key head, (B, G, rows) float64."""
    found = np.asarray(to_numpy(statistic), np.float64)
    B, G, rows = positions.shape
    heads = found.shape[1] if found.ndim == 3 else 0
    if found.shape != (B, heads, rows) or heads % max(G, 1):
        raise ShapeError(
            f"a statistic of shape {found.shape} of a cache with {B} sequences, {G} heads and {rows} rows",
            f"({B}, a multiple of {G}, {rows})",
            "the statistic of a call on this cache, before later appends: attention(..., see=[policy.see])",
        )
    return found.reshape(B, G, -1, rows).mean(2)
