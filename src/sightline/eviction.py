"""Published policies that choose, by exact statistics of attention, which keys a KV cache keeps.

The statistic that a policy needs is `policy.see`. A call of the policy returns the positions for `KVCache.keep`:

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
    """A rule that chooses the keys to keep. A call of the policy returns the positions of these keys.

    A statistic is averaged over the H/G query heads that share a key head. Of keys with equal ranks the later are kept.

    Parameters
    ----------
    budget : int
        The number of positions that each key head keeps.

    Attributes
    ----------
    see : Statistic, optional
        The statistic that the policy reads, from a call with a causal mask. None if it reads no statistic.
    in_steps : bool
        True if keys are evicted after every call. False if only after a call of several queries, such as a prompt.
    adds : bool
        True if the policy reads the sum of the statistic over all calls so far. After `keep`, the sum must have entries
        of the kept rows only.
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
        """The parameter that says how many positions are kept in any case: its name and its value."""

    @abstractmethod
    def rank(self, positions: Any, lengths: Any, seen: Any) -> Any:
        """Return a number for each row of the cache, (B, G or 1, rows). Rows with larger numbers are kept.

        `positions` (B, G, rows) and `lengths` (B, 1, 1) are the cache's. `seen` (B, G, rows) is None without `see`.
        """

    def __post_init__(self) -> None:
        name, count = self.least
        check_count(name + "={!r}", count, 1, f"{name}=4")
        check_count("budget={!r}", self.budget, count, f"a budget of at least {count}, for example 1024")

    def __call__(self, cache: KVCache, seen: Any = None) -> Positions:
        """Return the positions to keep, (B, G, budget) int64, ascending. −1 fills the end of a shorter sequence.

        Parameters
        ----------
        cache : KVCache
        seen : (B, H, rows) array
            The result of `see` in the newest call on the cache. If `adds`, the sum of its results in all calls.

        Raises
        ------
        ShapeError
            `seen` has another shape.
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
    """Keep the last positions of a prompt, and the earlier positions to which the last queries attend most.

    The weights that the last queries give to a key are averaged over these queries, then over adjacent keys. Each key
    head keeps the last positions, and the earlier positions with the largest averages.

    Parameters
    ----------
    budget : int
        The number of positions that each key head keeps, at least `last`.
    last : int, default 32
        The number of last queries whose weights are read, and of last positions that are kept.
    pool : int, default 5
        The number of adjacent keys in an average, an odd number. Beyond the first and last key, weights count as 0.

    References
    ----------
    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, section 4 (arXiv:2404.14469).
    """

    last: int = 32
    pool: int = 5
    in_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_count("pool={!r}", self.pool, 1, "pool=5") % 2 == 0:
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
        How many of these positions are the newest ones. The paper's experiments use half of the budget.

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
    Oren et al., "Transformers are Multi-State RNNs", 2024, section 4 (arXiv:2401.06104). In the paper, the last
    position may be dropped too.
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
        How many of these positions are the first ones.

    References
    ----------
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024, section 3.2 (arXiv:2309.17453). In
    the paper, a rotary position counts the rows of the cache. Here it stays the position in the text.
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
    values = np.asarray(to_numpy(statistic), np.float64)
    B, G, rows = positions.shape
    heads = values.shape[1] if values.ndim == 3 else 0
    if values.shape != (B, heads, rows) or heads % max(G, 1):
        raise ShapeError(
            f"a statistic of shape {values.shape} of a cache with {B} sequences, {G} heads and {rows} rows",
            f"({B}, a multiple of {G}, {rows})",
            "the statistic of a call on this cache, before later appends: attention(..., see=[policy.see])",
        )
    return values.reshape(B, G, -1, rows).mean(2)
