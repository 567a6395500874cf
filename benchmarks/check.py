"""Check the results of a contender against the float64 definition, with the error budget of `reference.accuracy`.

A problem too large for a dense computation is checked in parts. Of the output and of statistics per query, consecutive
rows of the first head and the last rows of the last head are checked. Gradients and statistics per key are checked for
the whole last head, and a pooled statistic in one row of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sightline.arrays.operations import Array, resolve_dtype
from sightline.call.partition.parts import part_of
from sightline.call.problem import Problem, make_problem
from sightline.formula.evaluate_array import evaluate_dense
from sightline.formula.library import bias
from sightline.reference.accuracy import budget_used, compute_baseline, dense_attention, gradient_term_sizes, term_sizes
from sightline.reference.definition import compute_stages
from sightline.statistics import Tile, accumulate_statistics, arrays_of

from .core import SEED, Results

if TYPE_CHECKING:
    from .attention import Attention, Inputs


CHECKED_ROWS = 64  # number of queries that are checked in each of two heads
OPERANDS = ("query", "key", "value")


class Part(NamedTuple):
    """Some rows and columns of one head of a problem, as a problem of their own."""

    problem: Problem
    head: int
    rows: slice
    columns: slice


def part(whole: Problem, head: int, rows: slice, columns: slice | None = None, see: Any = ()) -> Part:
    """Return a part of a problem. By default it has the keys that the mask allows for any of its rows."""
    if columns is None and whole.mask is not None:
        everything = part(whole, head, rows, slice(0, whole.m)).problem
        assert everything.mask is not None
        allowed = np.flatnonzero(evaluate_dense(everything.mask, everything.extent).any((0, 1, 2)))
        columns = slice(allowed[0] // 4 * 4, allowed[-1] + 1)  # dropout counts keys in groups of 4
    columns = columns or slice(0, whole.m)
    of_keys = slice(head // whole.group, head // whole.group + 1)
    query = whole.query[:, head : head + 1, rows]
    key, value = (array[:, of_keys, columns] for array in (whole.key, whole.value))
    firsts = {"first_head": head, "first_row": rows.start, "first_key": columns.start}
    return Part(part_of(whole, query, key, value, see=see, **firsts), head, rows, columns)


def problem_of(problem: Attention, inputs: Inputs) -> Problem:
    """Return the problem as the definition reads it, with NumPy arrays of the problem's dtype."""
    kind = resolve_dtype(np, problem.dtype)
    return make_problem(
        *(array.astype(kind) for array in (inputs.query, inputs.key, inputs.value)),
        mask=problem.formula,
        score=None if inputs.bias is None else bias(inputs.bias.astype(kind)),
        dropout=problem.dropout,
        seed=problem.seed if problem.dropout else None,
        see=problem.see,
    )


def checked_parts(whole: Problem, see: Any = ()) -> list[Part]:
    """Return the parts whose rows are checked: random rows of the first head, and the last rows of the last head."""
    count = min(CHECKED_ROWS, whole.n)
    first = int(np.random.default_rng(SEED).integers(whole.n - count + 1))
    last = slice(whole.n - count, whole.n)
    return [part(whole, 0, slice(first, first + count), see=see), part(whole, whole.H - 1, last, see=see)]


def error_of(problem: Attention, inputs: Inputs, results: Results) -> float:
    """Return the largest share of the budget of rounding errors that any of the results uses; correct ones use up to 1.

    The results are float32 arrays by name (`core.Results`), with numbers of the problem's dtype.
    """
    kind = resolve_dtype(np, problem.dtype)
    shape = (problem.B, problem.H, problem.n, problem.d_v)
    if results["output"].shape != shape:
        raise ValueError(f"the output has the shape {results['output'].shape}, expected {shape}")
    whole, shares = problem_of(problem, inputs), []
    for checked, head, rows, _ in checked_parts(whole):
        stages, output = compute_stages(checked), results["output"][:, head, None, rows].astype(kind)
        baseline, sizes = compute_baseline(checked), term_sizes(checked, stages.weights)
        shares.append(budget_used(output, stages.output, baseline.output, sizes))
    if problem.passes != "forward":
        for name, (truth, rough, size) in _expected_gradients(problem, inputs).items():
            shares.append(budget_used(results[name][:, -1:].astype(kind), truth, rough, size))
    shares += [_error_of_statistic(whole, each, results[repr(each)]) for each in whole.see]
    return max(shares)


# -- gradients ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)  # all contenders of a problem share one computation of the gradients
def _expected_gradients(problem: Attention, inputs: Inputs) -> dict[str, tuple[Array, Array, Array]]:
    """Return by name (true gradients, gradients of the dense computation, sizes of their terms) of the last head."""
    assert inputs.d_output is not None
    assert problem.G == problem.H  # so the gradient of a key head sums over one query head only
    whole, kind = problem_of(problem, inputs), resolve_dtype(np, problem.dtype)
    last = part(whole, whole.H - 1, slice(0, whole.n), slice(0, whole.m)).problem
    d_output = inputs.d_output[:, -1:]
    sizes = gradient_term_sizes(last, d_output)
    truth = _differentiate(last, problem.bias, d_output, "float64", 0)
    rough = [_differentiate(last, problem.bias, d_output, problem.dtype, order) for order in (0, 1)]
    found = {}
    for place, name in enumerate((*OPERANDS, *["bias"] * problem.bias)):
        dense = np.stack([each[place][:, -1:].astype(kind) for each in rough])
        size = sizes[0 if name == "bias" else name]  # the bias is the only table
        found[name] = truth[place][:, -1:], dense, size[:, -1:]
    return found


def _differentiate(problem: Problem, has_bias: bool, d_output: Array, dtype: str, order: int) -> list[Array]:
    """Return the gradients of query, key, value and bias by torch.autograd of the dense computation in this dtype."""
    import torch

    wide = torch.float64 if dtype == "float64" else getattr(torch, problem.accumulator)
    arrays = [problem.query, problem.key, problem.value]
    arrays += [problem.tables[0].array] if has_bias else []
    leaves = [torch.from_numpy(np.asarray(array, np.float32)).to(wide).requires_grad_() for array in arrays]
    problem = problem.with_tables(leaves[3:]) if has_bias else problem
    problem = replace(problem, query=leaves[0], key=leaves[1], value=leaves[2])
    output, _, _ = dense_attention(problem, dtype, order)
    gradients = torch.autograd.grad(output, leaves, torch.from_numpy(d_output).to(output.dtype))
    return [gradient.numpy() for gradient in gradients]


# -- statistics -------------------------------------------------------------------------------------------------------


def _error_of_statistic(whole: Problem, statistic: Any, found: Sequence[Array]) -> float:
    """Return the share of the budget that a contender's arrays of a statistic use.

    If the statistic names keys, the true scores or weights at these keys are compared in place of the keys.
    """
    last = whole.H - 1
    if statistic.name == "received":
        parts = [part(whole, last, slice(0, whole.n), see=(statistic,))]
        places = [parts[0].columns]
    elif statistic.name == "pooled":  # the last row of cells
        rows, of_row = (
            slice(whole.n - whole.n // statistic.cells[0], whole.n),
            (replace(statistic, cells=(1, statistic.cells[1])),),
        )
        parts, places = [part(whole, last, rows, slice(0, whole.m), of_row)], [slice(-1, None)]
    else:
        parts = checked_parts(whole, (statistic,))
        places = [each.rows for each in parts]
    shares, reads_scores = [], statistic.name in ("lse", "max_score")
    for (problem, head, _, columns), where in zip(parts, places, strict=True):
        stages, dtype = compute_stages(problem), problem.accumulator
        truth = _accumulate(problem, "float64", stages.weights, stages.lse)
        runs = [dense_attention(problem, dtype, order) for order in (0, 1)]
        rough = np.stack([_accumulate(problem, dtype, weights, lse) for _, lse, weights in runs])
        values, *keys = (array[:, head, None, where].astype(dtype) for array in found)
        matrix, missing = (stages.masked, -np.inf) if reads_scores else (stages.weights, 0.0)
        for given in (values, *(_look_up(each - columns.start, matrix, missing) for each in keys)):
            if reads_scores:  # the errors grow with the scores, not with the statistic
                shares.append(budget_used(given.ravel(), truth.ravel(), rough.reshape(2, -1), np.float64(1)))
            else:
                shares.append(budget_used(given, truth, rough))
    return max(shares)


def _accumulate(problem: Problem, dtype: str, weights: Array, lse: Array) -> Array:
    """Return the statistic of a part by its definition, from these weights and from scores in this dtype."""
    query, key = (array.astype(dtype) for array in (problem.query, problem.key))
    scores = query @ key.swapaxes(-1, -2) * query.dtype.type(problem.scale)
    if problem.mask is not None:
        scores = np.where(evaluate_dense(problem.mask, problem.extent), scores, query.dtype.type(-np.inf))
    problem = replace(problem, query=query, key=key, value=problem.value.astype(dtype))
    tile = Tile(slice(0, problem.n), slice(0, problem.m), weights, scores, lse)
    (result,) = accumulate_statistics(problem, lse, lambda: iter([tile]))
    return np.asarray(arrays_of(result)[0])


def _look_up(keys: Array, matrix: Array, missing: float) -> Array:
    """Return the entries of a matrix at these keys: NaN outside the matrix, and `missing` for no key, which is < 0."""
    index = keys.astype(np.int64).reshape(*matrix.shape[:-1], -1)
    entries = np.take_along_axis(matrix, np.clip(index, 0, matrix.shape[-1] - 1), axis=-1)
    entries = np.where(index < matrix.shape[-1], np.where(index < 0, missing, entries), np.nan)
    return entries.reshape(keys.shape).astype(keys.dtype)
