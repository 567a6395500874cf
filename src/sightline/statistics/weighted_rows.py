"""The product of the weights and rows of an array."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..arrays.operations import broadcast_to, convert, dtype_name, namespace
from ..arrays.unreadable import check_device
from ..errors import ShapeError
from .base import Outer
from .statistic import Statistic

if TYPE_CHECKING:
    from ..call.kernel import Result
    from ..call.problem import Problem


@dataclass(frozen=True, eq=False, repr=False)
class WeightedSum(Statistic):
    """The product P x; see `weighted_sum`. Kernels compute it as attention with x in place of value."""

    x: Any

    name = "weighted_sum"
    has_own_problem = True

    def __repr__(self) -> str:
        return f"weighted_sum({'×'.join([str(length) for length in self.x.shape])} {dtype_name(self.x)})"

    def shapes(self, problem: Problem, outer: Outer, n: int) -> tuple[tuple[int, ...], ...]:
        return ((*outer, n, self.x.shape[-1]),)

    def dtypes(self, problem: Problem) -> tuple[str, ...]:
        return (dtype_name(problem.query),)

    def _rows(self, problem: Problem) -> Any:
        """Return x in the query's library. An x with a batch axis gets a head axis if the caller's arrays have none."""
        x = convert(self.x, problem.query)
        return x[..., None, :, :] if problem.heads_squeezed and x.ndim > 2 else x

    def check(self, problem: Problem, outer: Outer, n: int) -> None:
        shape, whole = tuple(self._rows(problem).shape), (*problem.batch_shape, problem.G, problem.m)
        own = shape[:-1]
        fits = len(shape) > 1 and len(own) <= len(whole) and own[-1] == whole[-1]
        if not fits or any(a not in (1, w) for a, w in zip(own[::-1], whole[::-1], strict=False)):
            raise ShapeError(
                f"weighted_sum(x) of shape {tuple(self.x.shape)}",
                f"(m, r), (G, m, r) or (..., G, m, r), with m = {problem.m} keys, G = {problem.G} key heads and any r",
                "give x one row for every key",
            )
        check_device("x of weighted_sum", self.x, problem.query)

    def make_own_problem(self, problem: Problem) -> Problem:
        xp = namespace(problem.query)
        if problem.row_formats is not None:  # no kernel reads codes as keys and floats as values
            key = problem.row_formats[0].unpack(problem.key)
            problem = replace(problem, query=xp.astype(problem.query, key.dtype), key=key, row_formats=None)
        x = xp.astype(self._rows(problem), problem.query.dtype)
        shape = (*problem.batch_shape, problem.G, *x.shape[-2:])
        return problem.with_statistics(value=broadcast_to(x, shape))

    def extract_result(self, result: Result, problem: Problem) -> Any:
        return namespace(result.output).astype(result.output, problem.query.dtype, copy=False)
