"""Assertions and hard-to-read arrays for the tests of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .accuracy import budget_used, compute_baseline, term_sizes
from .arrays import dtype_name, to_numpy
from .kernel import Result
from .problem import Problem
from .reference import compute_stages
from .statistics import Lse, Weights

__all__ = ["LAYOUTS", "assert_conforms", "assert_within_budget", "with_guards"]


def assert_within_budget(actual: Any, oracle: Any, baseline: Any, what: str = "result", terms: Any = None) -> None:
    """Raise AssertionError where `budget_used` is over 1."""
    used = budget_used(actual, oracle, baseline, terms)
    if not used <= 1:
        raise AssertionError(f"{what} uses {used:.3g} times its budget of rounding errors")


def assert_conforms(run: Callable[[Problem], Result], problem: Problem) -> None:
    """Raise AssertionError unless a kernel's `run` answers as the definition does: output, lse, weights if asked."""
    result, truth, rough = run(problem), compute_stages(problem), compute_baseline(problem)
    expected = {
        "output": (result.output, truth.output, rough.output, problem.dtype),
        "lse": (
            to_numpy(result.lse).astype(problem.accumulator).reshape(-1),
            truth.lse.reshape(-1),
            rough.lse,
            problem.accumulator,
        ),
    }
    for statistic, found in zip(problem.see, result.seen, strict=True):
        if isinstance(statistic, Weights):
            expected["weights"] = (found, truth.weights, rough.weights, problem.dtype)
        if isinstance(statistic, Lse):
            expected["lse seen"] = (found.reshape(-1), truth.lse.reshape(-1), rough.lse, problem.accumulator)
    sizes = {"output": term_sizes(problem, truth.weights), "lse": 1.0, "lse seen": 1.0}
    for what, (found, oracle, worst, dtype) in expected.items():
        if dtype_name(found) != dtype:
            raise AssertionError(f"{what} has dtype {dtype_name(found)}, not {dtype}")
        assert_within_budget(found, oracle, worst, what, sizes.get(what))


GUARD_BYTES = 4096  # bytes on either side: more than any kernel's widest read past an end


def with_guards(array: Any) -> tuple[Any, Callable[[], None]]:
    """A NumPy array between guards of NaN bytes, and a check that raises AssertionError where a guard was written on.

    Reading a guard shows too: its bytes are NaN in every float format.
    """
    buffer = np.full(array.nbytes + 2 * GUARD_BYTES, 0xFF, np.uint8)
    inside = buffer[GUARD_BYTES : GUARD_BYTES + array.nbytes].view(array.dtype).reshape(array.shape)
    inside[...] = array

    def check() -> None:
        for name, guard in (("before", buffer[:GUARD_BYTES]), ("after", buffer[GUARD_BYTES + array.nbytes :])):
            if not (guard == 0xFF).all():
                raise AssertionError(f"{np.count_nonzero(guard != 0xFF)} bytes written {name} the array")

    return inside, check


def _permute_storage(array: Any, source: int, target: int) -> Any:
    """The same array, its axes stored in another order."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, source, target)), target, source)


def _with_gaps(array: Any) -> Any:
    """Every second entry of an array twice as wide both ways; NaN between."""
    *batch_shape, rows, width = array.shape
    whole = np.full((*batch_shape, 2 * rows, 2 * width), np.nan, array.dtype)
    whole[..., ::2, ::2] = array
    return whole[..., ::2, ::2]


def _to_odd_address(array: Any) -> Any:
    """An array that starts at an odd address."""
    buffer = np.empty(array.nbytes + 1, np.uint8)
    inside = (
        buffer[1:].view(array.dtype) if array.dtype.itemsize == 1 else np.ndarray(array.shape, array.dtype, buffer, 1)
    )
    inside[...] = array
    return inside


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": np.ascontiguousarray,
    "columns first": lambda x: _permute_storage(x, -1, -2),
    "Fortran": lambda x: np.asfortranarray(x),
    "positions before heads": lambda x: _permute_storage(x, -3, -2) if x.ndim > 2 else np.ascontiguousarray(x),
    "backwards": lambda x: np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1],
    "gaps": _with_gaps,
    "unaligned": _to_odd_address,
    "one row for all": lambda x: np.broadcast_to(x[..., :1, :], x.shape),  # stride 0; other values
    "one head for all": lambda x: np.broadcast_to(x[..., :1, :, :], x.shape) if x.ndim > 2 else x,
}
