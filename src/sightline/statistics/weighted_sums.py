"""The statistic `weighted_sum`: the product of the weights with an array x other than value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..arrays.kinds import check_device, check_kind
from ..arrays.operations import broadcast_to, check_float_dtype, convert, dtype_name, namespace
from ..errors import ShapeError
from .base import Outer
from .selection import Statistic

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


def weighted_sum(x: Any) -> Statistic:
    """Request (P x)_i = Σⱼ P_ij x_j: the product of the weights, before dropout, with an array x other than value.

    If x holds positions, the result is the mean position that a query attends to. If x has one-hot rows, the result is
    the weight on each group of keys. If x is the rollout matrix of earlier layers, the result is the attention rollout
    (Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020, section 3).

    The result is (..., H, n, r) in the query's dtype; 0 for a query without keys. The weights and x get gradients.

    Parameters
    ----------
    x : (m, r), (G, m, r) or (..., G, m, r) floats
        One row for every key. Attention converts x to the query's dtype.

    Raises
    ------
    DtypeError
        x is not a plain array of floats.
    ShapeError, DeviceError
        Raised by attention if x does not fit the keys, or lies on another device than the query.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x, mask = np.zeros((3, 1), np.float32), sightline.causal()  # tokens with equal scores
    >>> places = np.arange(3, dtype=np.float32)[:, None]
    >>> _, (mean,) = sightline.attention(x, x, x, mask=mask, see=[sightline.weighted_sum(places)])
    >>> mean.ravel().round(2)  # the mean of the positions 0 to i
    array([0. , 0.5, 1. ], dtype=float32)
    """
    check_kind("x of weighted_sum(x)", x)
    check_float_dtype("x of weighted_sum(x)", x)
    return WeightedSum(x)
