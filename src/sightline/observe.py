"""Statistics of the weights: what `see=[...]` asks for.

A statistic is one small class. A kernel hands it the normalised weights tile by tile; what it keeps is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .arrays import namespace, resolve

if TYPE_CHECKING:
    from .problem import Problem

__all__ = ["STATISTICS", "Lse", "Statistic", "Tile", "Weights", "lse", "weights"]


@dataclass(frozen=True)
class Tile:
    """Normalised weights of some queries on some keys: (..., H, rows, columns), before dropout."""

    rows: slice
    columns: slice
    weights: Any


class Statistic:
    """Something to be known of the weights.

    `name` stands for it in texts and is unique.
    """

    name: str

    def shape(self, problem: Problem) -> tuple[int, ...]:
        """Shape of the result."""
        raise NotImplementedError(type(self).__name__)

    def dtype(self, problem: Problem) -> str:
        """Dtype of the result: the accumulator's unless it says otherwise."""
        return problem.accumulator

    def collect(self, problem: Problem, lse: Any, tiles: Callable[[], Iterator[Tile]]) -> Any:
        """The result, from the normaliser and, if it must, one pass over the tiles that hold any weight."""
        raise NotImplementedError(type(self).__name__)

    def d_weights(self, gradient: Any, rows: slice, columns: slice) -> Any:
        """d result / d weights of a tile, contracted with the result's gradient; 0 where it has none."""
        return 0.0

    def __repr__(self) -> str:
        return f"{self.name}()"


class Lse(Statistic):
    """The normaliser of every query; see `lse`."""

    name = "lse"

    def shape(self, problem: Problem) -> tuple[int, ...]:
        return (*problem.lead, problem.H, problem.n)

    def collect(self, problem: Problem, lse: Any, tiles: Callable[[], Iterator[Tile]]) -> Any:
        xp = namespace(lse)
        return xp.astype(lse, resolve(xp, problem.accumulator))


class Weights(Statistic):
    """The whole matrix; see `weights`."""

    name = "weights"

    def shape(self, problem: Problem) -> tuple[int, ...]:
        return (*problem.lead, problem.H, problem.n, problem.m)

    def dtype(self, problem: Problem) -> str:
        return problem.dtype

    def collect(self, problem: Problem, lse: Any, tiles: Callable[[], Iterator[Tile]]) -> Any:
        xp = namespace(problem.query)
        whole = xp.zeros(self.shape(problem), dtype=resolve(xp, self.dtype(problem)), device=problem.query.device)
        for tile in tiles():
            whole[..., tile.rows, tile.columns] = xp.astype(tile.weights, whole.dtype)
        return whole

    def d_weights(self, gradient: Any, rows: slice, columns: slice) -> Any:
        return gradient[..., rows, columns]


def lse() -> Statistic:
    """lse_i = ln Σⱼ exp(score(s_ij)) over the keys i may see, the sink counted.

    Returns, in `seen`, (..., H, n) in the accumulator's dtype (float64 for float64, else float32), in nats; −∞ for a
    query that sees nothing. Two parts of the keys merge by it. Source: Milakov and Gimelshein, 2018 (the running
    normaliser).
    """
    return Lse()


def weights() -> Statistic:
    """P_ij = exp(score(s_ij) − lse_i), 0 where hidden: the whole matrix, before dropout.

    Returns, in `seen`, (..., H, n, m) in the input's dtype: the one thing here that takes n × m memory.
    """
    return Weights()


STATISTICS: dict[str, Callable[[], Statistic]] = {"lse": lse, "weights": weights}
