"""Assertions for the tests of a kernel, and array layouts that are difficult for a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays.operations import dtype_name, to_numpy
from ..call.kernel import Result
from ..call.problem import Problem
from .accuracy import budget_used, compute_baseline, term_sizes
from .definition import compute_stages

__all__ = ["LAYOUTS", "assert_conforms", "assert_within_budget", "with_guards"]


def assert_within_budget(actual: Any, oracle: Any, baseline: Any, what: str = "result", terms: Any = None) -> None:
    """Raise AssertionError if `budget_used(actual, oracle, baseline, terms)` is above 1. `what` names the result."""
    used = budget_used(actual, oracle, baseline, terms)
    if not used <= 1:
        raise AssertionError(f"{what} uses {used:.3g} times its budget of rounding errors")


def assert_conforms(run: Callable[[Problem], Result], problem: Problem) -> None:
    """Raise AssertionError unless a kernel's `run` agrees with the definition within the budget of rounding errors.

    Output and lse are compared, and so are the statistics `weights` and `lse` if the problem requests them.
    """
    result, oracle, baseline = run(problem), compute_stages(problem), compute_baseline(problem)
    lse = to_numpy(result.lse).astype(problem.accumulator)
    compared = {"output": (result.output, oracle.output, baseline.output), "lse": (lse, oracle.lse, baseline.lse)}
    for statistic, array in zip(problem.see, result.seen, strict=True):
        if statistic.name == "weights":
            compared["weights"] = (array, oracle.weights, baseline.weights)
        if not statistic.num_arrays:
            compared["statistic lse"] = (array, oracle.lse, baseline.lse)
    sizes = {"output": term_sizes(problem, oracle.weights), "lse": 1.0, "statistic lse": 1.0}
    for what, (actual, expected, orders) in compared.items():
        dtype = problem.accumulator if "lse" in what else problem.dtype
        if dtype_name(actual) != dtype:
            raise AssertionError(f"{what} has dtype {dtype_name(actual)}, not {dtype}")
        if "lse" in what:
            # the whole lse counts as one row; see `reference.accuracy`
            actual, expected = actual.reshape(-1), expected.reshape(-1)
        assert_within_budget(actual, expected, orders, what, sizes.get(what))


GUARD_BYTES = 4096  # the size of each guard: even a read of the widest vector at an end of the array stays inside


def with_guards(array: Any) -> tuple[Any, Callable[[], None]]:
    """Return a copy of a NumPy array that lies between two guards of NaN bytes, and a function that checks the guards.

    The function raises AssertionError if a guard was written to. If a kernel reads a guard, its results show NaN,
    because the bytes of a guard are NaN in every float format.
    """
    buffer = np.full(array.nbytes + 2 * GUARD_BYTES, 0xFF, np.uint8)
    inside: Any = np.ndarray(array.shape, array.dtype, buffer, GUARD_BYTES)
    inside[...] = array

    def check() -> None:
        for name, guard in (("before", buffer[:GUARD_BYTES]), ("after", buffer[GUARD_BYTES + array.nbytes :])):
            if not (guard == 0xFF).all():
                raise AssertionError(f"{np.count_nonzero(guard != 0xFF)} bytes written {name} the array")

    return inside, check


def _permute_storage(array: Any, source: int, target: int) -> Any:
    """Return the array unchanged in shape and entries, but stored in memory with axis `source` at place `target`."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, source, target)), target, source)


def _with_gaps(array: Any) -> Any:
    """Return a view that equals the array: every second entry, along the last two axes, of an array of NaN or of 1."""
    lengths = (*array.shape[:-2], *[2 * length for length in array.shape[-2:]])
    whole: Any = np.full(lengths, 1 if array.dtype.kind in "biu" else np.nan, array.dtype)
    inside = whole[(..., *[slice(None, None, 2)] * len(array.shape[-2:]))]
    inside[...] = array
    return inside


def _to_odd_address(array: Any) -> Any:
    """Return a copy of the array that starts one byte past an aligned address."""
    buffer = np.empty(array.nbytes + 1, np.uint8)
    inside: Any = np.ndarray(array.shape, array.dtype, buffer, 1)
    inside[...] = array
    return inside


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": np.ascontiguousarray,
    "columns first": lambda x: _permute_storage(x, -1, -2),
    "Fortran": lambda x: np.asfortranarray(x),
    "positions before heads": lambda x: _permute_storage(x, -3, -2) if x.ndim > 2 else np.ascontiguousarray(x),
    "backwards": lambda x: np.flip(np.ascontiguousarray(np.flip(x))),
    "gaps": _with_gaps,
    "unaligned": _to_odd_address,
    "one row for all": lambda x: np.broadcast_to(x[..., :1, :], x.shape),  # stride 0; all rows equal the first
    "one head for all": lambda x: np.broadcast_to(x[..., :1, :, :], x.shape) if x.ndim > 2 else x,
}
