"""Attention in operations of JAX: for derivatives of every order, and for devices without a generated kernel.

A loop of `jax.lax` computes one block of queries after another, each with all keys. A derivative computes each block
again instead of storing it, so the memory is O(n). JAX differentiates these operations forward and backward. A hidden
key adds nothing to the results and derivatives, even if its rows of key and value have NaN or ∞.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..call.problem import Problem
from ..call.spec import split_arrays
from ..errors import DtypeError
from ..reference.dropout import philox_rounds, threshold
from ..reference.streaming import TileOps
from ..statistics import Reduction, Statistic, TopK
from ..statistics.reduction import cell_of, find_extremum
from .options import PrimitiveOptions

BLOCK_ELEMENTS = 1 << 22  # the most scores of one block, over all batches and heads; one query may have more


def compute(*inputs: Any, options: PrimitiveOptions) -> list[Any]:
    """Return the results of the primitive `attention`. lse in float64 is 0, because the derivatives here ignore it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as formulas need it
        return _compute(inputs, options)


def _compute(inputs: Sequence[Any], options: PrimitiveOptions) -> list[Any]:
    problem, seed = _make_problem(inputs, options)
    blocks = _Blocks(problem, seed)
    rows = min(max(BLOCK_ELEMENTS // max(problem.B * problem.H * problem.m, 1), 1), max(problem.n, 1))
    count = -(-problem.n // rows)
    padding = [(0, 0)] * (problem.query.ndim - 2) + [(0, count * rows - problem.n), (0, 0)]
    query = jnp.pad(problem.query, padding)
    query = jnp.moveaxis(query.reshape((*query.shape[:-2], count, rows, problem.d_k)), -3, 0)
    starts = jnp.arange(count) * rows
    output, lse, *arrays = jax.lax.map(jax.checkpoint(lambda block: copy(blocks).compute(*block)), (starts, query))
    output, lse = (_concatenate(x, problem) for x in (output, lse))
    results = [output, lse, jnp.zeros((*lse.shape, 2), jnp.uint32)]
    for statistic, own in zip(problem.see, split_arrays(problem.see, arrays, 0), strict=True):
        results += _join_blocks(statistic, own, problem)
    types = options.result_types(inputs)
    return [result.astype(kind.dtype) for result, kind in zip(results, types, strict=True)]


def tangents(*inputs: Any, options: PrimitiveOptions, wanted: tuple[int, ...]) -> list[Any]:
    """Return the results of the primitive `tangent`: tangents of results, from those of the arguments `wanted`."""
    primals, directions = inputs[: options.spec.num_arrays], inputs[options.spec.num_arrays + 2 :]
    function = _restrict(primals, options, wanted, options.differentiable_results(primals))
    derivatives: list[Any] = jax.jvp(function, [primals[k] for k in wanted], list(directions))[1]
    return derivatives


def gradients(*inputs: Any, options: PrimitiveOptions, wanted: tuple[int, ...], given: tuple[int, ...]) -> list[Any]:
    """Return the results of the primitive `backward`: gradients of the arguments `wanted`, from those of `given`."""
    primals, cotangents = inputs[: options.spec.num_arrays], inputs[options.spec.num_arrays + 2 :]
    function = _restrict(primals, options, wanted, given)
    return list(jax.vjp(function, *[primals[k] for k in wanted])[1](list(cotangents)))


def _restrict(
    primals: Sequence[Any], options: PrimitiveOptions, wanted: Sequence[int], given: Sequence[int]
) -> Callable[..., list[Any]]:
    """Return `compute` as a function from the arguments `wanted` to the results `given`, the others constant."""

    def function(*chosen: Any) -> list[Any]:
        replaced = dict(zip(wanted, chosen, strict=True))
        results = compute(*[replaced.get(k, x) for k, x in enumerate(primals)], options=options)
        return [results[k] for k in given]

    return function


def _make_problem(inputs: Sequence[Any], options: PrimitiveOptions) -> tuple[Problem, Any]:
    """Return the problem, and the seed as two uint32 words, or None without dropout."""
    arrays = options.spec.unflatten(inputs)
    pairs = zip(arrays.tables, options.wide_tables, strict=True)
    tables = [_narrow(table, wide) if wide else table for table, wide in pairs]
    problem = options.spec.problem(arrays._replace(tables=tables), options.spec.formulas(tables))
    return problem, arrays.seed


def _narrow(words: Any, dtype: str) -> Any:
    """Convert float64 numbers to float32. `words` has two uint32 words of each number, the lower word first.

    DtypeError is raised for int64, because an int64 table is passed as words only if an entry needs more than 32 bits.
    """
    if dtype != "float64":
        raise DtypeError(
            f"a table of {dtype} with entries of more than 32 bits, and jax_enable_x64 is off",
            "whole numbers that fit in 32 bits, for second derivatives, forward derivatives of statistics, and devices "
            "other than the CPU",
            'jax.config.update("jax_enable_x64", True); or, if the formula only compares the entries with each other, '
            "np.unique(array, return_inverse=True)[1]",
        )
    low, high = words[..., 0], words[..., 1]
    sign, exponent = jnp.where(high >> 31 == 1, -1.0, 1.0), (high >> 20 & 0x7FF).astype(jnp.int32)
    fraction = (high & 0xFFFFF).astype(jnp.float32) * 2.0**-20 + low.astype(jnp.float32) * 2.0**-52
    finite = jnp.ldexp(jnp.where(exponent == 0, fraction, 1 + fraction), jnp.clip(exponent, 1, 2046) - 1023)
    special = jnp.where(fraction == 0, jnp.inf, jnp.nan)
    return sign * jnp.where(exponent == 0x7FF, special, finite)


# -- one block of queries ----------------------------------------------------------------------------------------------


class _Namespace:
    """`jax.numpy`, in which int64 and float64 mean int32 and float32 unless `jax_enable_x64` is set."""

    def __init__(self) -> None:
        self.int64, self.float64 = (jax.dtypes.canonicalize_dtype(name) for name in ("int64", "float64"))

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)


class _Blocks(TileOps):
    """Computes the results of a problem, for one block of queries at a time. A tile has all keys."""

    is_finite = False  # an array may have NaN or ∞; only a running program knows

    def __init__(self, problem: Problem, seed: Any) -> None:
        super().__init__(problem)
        self.seed, self.xp, self.columns = seed, _Namespace(), slice(0, problem.m)
        self.has_finite_values = jnp.all(jnp.isfinite(problem.value))
        self.statistics = [statistic.unaveraged for statistic in problem.see if statistic.num_arrays]

    def compute(self, start: Any, query: Any) -> list[Any]:
        """Return output, lse and the statistics' arrays of the block `query`, whose first query is number `start`."""
        problem, rows = self.problem, slice(0, query.shape[-2])
        b, h, i, j = problem.positions(self.xp, rows, self.columns)
        i = start + i
        self.at = {"b": b, "h": h, "i": i, "j": j, "n": problem.n, "m": problem.m}
        scaled = self.scaled(query.astype(self.dtype), self.columns)
        scores = self.masked(scaled, rows, self.columns, full=False)
        weights, lse = self.normalise(scores)
        factor = _keep_factor(problem, self.seed, self.at, self.dtype)
        output = self.sum_over_keys(weights * factor, self.widen(problem.value, self.columns))
        counted = jnp.where(i < problem.n, weights, 0)  # the last block may have queries past the end
        arrays = [array for one in self.statistics for array in self.compute_statistic(one, scores, counted, lse)]
        return [output, lse, *arrays]

    def symbols(self, rows: slice, columns: slice, s: Any = None) -> dict[str, Any]:
        return self.at | {"s": s}

    def normalise(self, scores: Any) -> tuple[Any, Any]:
        """Return the weights before dropout, and lse. They are 0 and −∞ for a query without sink and visible keys."""
        sinks = self.problem.sinks
        largest = jnp.max(scores, axis=-1, initial=-jnp.inf)
        if sinks is not None:
            sinks = sinks.astype(self.dtype)[:, None]
            largest = jnp.maximum(largest, sinks)
        shift = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
        powers = jnp.exp(scores - shift[..., None])
        total = jnp.sum(powers, axis=-1) + (0 if sinks is None else jnp.exp(sinks - shift))
        safe = jnp.where(total == 0, 1, total)
        return powers / safe[..., None], jnp.where(total == 0, -jnp.inf, jnp.log(safe) + shift)

    def dot_products(self, array: Any, other: Any) -> Any:
        return _dot_products(self.group_heads(array), other).reshape((*array.shape[:-1], other.shape[-2]))

    def nan_safe_matmul(self, weights: Any, array: Any) -> Any:
        sums = weights @ self.zero_nonfinite(array)
        zeros, constants = jnp.zeros_like(sums), jax.lax.stop_gradient(weights)

        def find_nonfinite() -> Any:
            """Return the sum of the nonfinite entries of `array` with a weight ≠ 0: NaN, ∞ or −∞, or 0 if none."""
            seen, kinds = (constants != 0).astype(self.dtype), (jnp.isnan(array), array == jnp.inf, array == -jnp.inf)
            nan, up, down = (seen @ kind.astype(self.dtype) > 0 for kind in kinds)
            return jnp.where(nan | (up & down), jnp.nan, jnp.where(up, jnp.inf, jnp.where(down, -jnp.inf, zeros)))

        return sums + jax.lax.cond(self.has_finite_values, lambda: zeros, find_nonfinite)

    def compute_statistic(self, statistic: Statistic, scores: Any, weights: Any, lse: Any) -> list[Any]:
        """Return the statistic's arrays for a block, from its final scores, its weights before dropout, and lse."""
        match statistic:
            case TopK():
                visible = scores != -jnp.inf
                padding = [(0, 0)] * (weights.ndim - 1) + [(0, max(statistic.k - self.problem.m, 0))]
                marked = jnp.pad(jnp.where(visible, weights, -1), padding, constant_values=-1)
                largest, keys = jax.lax.top_k(marked, statistic.k)
                return [jnp.where(largest < 0, 0, largest), jnp.where(largest < 0, -1, keys)]
            case Reduction():
                return self.reduce(statistic, self.entries(statistic, scores, weights, lse), scores)
        raise NotImplementedError(f"the statistic {statistic!r} in operations of JAX")

    def entries(self, statistic: Reduction, scores: Any, weights: Any, lse: Any) -> Any:
        """Return f of every pair of the block, as `Reduction.entries` does."""
        if statistic.is_plain:
            return weights
        is_hidden = (scores == -jnp.inf) | (self.at["i"] >= self.problem.n)
        is_ignored = is_hidden | ((weights == 0) & statistic.vanishes)
        # where f is ignored, its arguments are replaced, so that its derivative there is finite
        s, p = jnp.where(is_ignored, 0, scores), jnp.where(is_ignored, 1, weights)
        logarithm = s - jnp.where(is_ignored, 0, lse[..., None])
        symbols = self.at | {"s": s, "p": p, "ln p": logarithm}
        found = self.evaluate_formula(statistic.pair_formula, symbols, self.xp.float64)
        return statistic.hide(jnp.broadcast_to(found, weights.shape).astype(self.dtype), weights, is_hidden)

    def reduce(self, statistic: Reduction, entries: Any, scores: Any) -> list[Any]:
        """Return the arrays of the sum, maximum or minimum of the entries of the block."""
        if not statistic.axes:
            return [entries]
        if statistic.cells is not None:
            return [self.pool(statistic, entries)]
        if statistic.axes == "ij":
            operation = {"max": jnp.max, "min": jnp.min}.get(statistic.how, jnp.sum)
            return [operation(entries, axis=(-2, -1), initial=statistic.hidden)]
        i, j = self.at["i"], self.at["j"]
        axis, positions = (-2, i) if statistic.axes == "i" else (-1, j)
        if not statistic.is_extremum:
            return [jnp.sum(entries, axis=axis)]
        if statistic.finds:
            positions = jnp.where((scores == -jnp.inf) | (i >= self.problem.n), -1, positions)
        return _find_extremum(statistic, entries, positions, axis)

    def pool(self, statistic: Reduction, weights: Any) -> Any:
        """Return the sum or the maximum of the entries in each cell, (*batch_shape, H, rows, columns)."""
        how = {"max": jax.ops.segment_max, "min": jax.ops.segment_min}
        reduce, lengths = how.get(statistic.how, jax.ops.segment_sum), (self.problem.n, self.problem.m)
        positions = self.at["i"][:, 0], self.at["j"]
        spans = zip(statistic.rectangle(*lengths), statistic.grid(*lengths), strict=True)
        for axis, at, ((start, stop), cells) in zip((-2, -1), positions, spans, strict=True):
            inside = (start <= at) & (at < stop)
            ids = jnp.where(inside, cell_of(at - start, max(stop - start, 1), cells), cells)  # the last cell is dropped
            pooled = reduce(jnp.moveaxis(weights, axis, 0), ids, num_segments=cells + 1)[:cells]
            weights = jnp.moveaxis(pooled, 0, axis)
        return jnp.maximum(weights, 0) if statistic.how == "max" and statistic.hidden == 0 else weights


def _find_extremum(statistic: Reduction, values: Any, positions: Any, axis: int) -> list[Any]:
    """Return the arrays of a maximum or minimum along an axis. The gradient of its value goes to its position."""
    if values.shape[axis]:
        extremum: Any = find_extremum(statistic.how, values, positions, axis)
    else:
        shape = [length for k, length in enumerate(values.shape) if k != axis % values.ndim]
        extremum = jnp.full(shape, statistic.hidden, values.dtype), jnp.full(shape, -1)
    return list(extremum[: statistic.num_arrays])


@jax.custom_jvp  # type: ignore[untyped-decorator]
def _dot_products(query: Any, key: Any) -> Any:
    """Return query @ keyᵀ. Its derivative reads NaN and ∞ as 0, so that NaN in a hidden key changes no gradient."""
    return query @ jnp.matrix_transpose(key)


@_dot_products.defjvp  # type: ignore[untyped-decorator]
def _differentiate_dot_products(primals: tuple[Any, Any], directions: tuple[Any, Any]) -> tuple[Any, Any]:
    (query, key), (d_query, d_key) = primals, directions
    tangent = d_query @ jnp.matrix_transpose(_zero_nonfinite(key))
    return _dot_products(query, key), tangent + _zero_nonfinite(query) @ jnp.matrix_transpose(d_key)


def _zero_nonfinite(array: Any) -> Any:
    return jnp.where(jnp.isfinite(array), array, 0)


# -- all blocks --------------------------------------------------------------------------------------------------------


def _concatenate(array: Any, problem: Problem) -> Any:
    """Return the arrays of all blocks as one array, without the padded queries."""
    axis = len(problem.batch_shape) + 1  # of the queries in an array of one block
    blocks = jnp.moveaxis(array, 0, axis)
    joined = blocks.reshape((*blocks.shape[:axis], math.prod(blocks.shape[axis : axis + 2]), *blocks.shape[axis + 2 :]))
    return jax.lax.slice_in_dim(joined, 0, problem.n, axis=axis)


def _join_blocks(statistic: Statistic, arrays: Sequence[Any], problem: Problem) -> list[Any]:
    """Return the arrays of a statistic from those of all blocks.

    In `arrays`, a mean over queries or a cell is still a sum, and a mean of matrices still has all axes.
    """
    of = statistic.unaveraged
    if not isinstance(of, Reduction) or "i" not in of.axes:
        joined = [_concatenate(array, problem) for array in arrays]
    elif of.is_extremum:
        values, positions = (*arrays, 0)[:2]
        joined = _find_extremum(of, values, positions, 0)
    else:
        joined = [jnp.sum(array, axis=0) for array in arrays]
    if isinstance(of, Reduction) and of.how == "mean":
        joined = [of.divide(joined[0], problem.n, problem.m)]
    return [statistic.average(x, len(problem.batch_shape)) for x in joined]


# -- dropout -----------------------------------------------------------------------------------------------------------


def _keep_factor(problem: Problem, seed: Any, symbols: dict[str, Any], dtype: Any) -> Any:
    """Return the dropout factor of each weight of a block: 0, or 1 / (1 − p); the same as `dropout.keep_factor`."""
    p = problem.dropout
    if p in (0, 1):
        return 1.0 - p
    quads = jnp.arange(-(-problem.m // 4))
    counter = [x.astype(jnp.uint32) for x in (symbols["b"], symbols["h"], symbols["i"], quads)]
    found = philox_rounds((seed[0], seed[1]), counter, _multiply_wide, lambda word, weyl: word + np.uint32(weyl))
    words = jnp.stack(jnp.broadcast_arrays(*found), axis=-1)
    words = words.reshape((*words.shape[:-2], 4 * len(quads)))[..., : problem.m]
    return (words >= np.uint32(min(threshold(problem), 2**32 - 1))).astype(dtype) / (1 - p)


def _multiply_wide(constant: int, x: Any) -> tuple[Any, Any]:
    """Return the high and the low 32-bit word of constant · x, computed from products of 16-bit halves."""
    (a1, a0), (x1, x0) = map(np.uint32, divmod(constant, 1 << 16)), (x >> 16, x & 0xFFFF)
    middle = a1 * x0 + (a0 * x0 >> 16)
    carry = a0 * x1 + (middle & 0xFFFF)
    return a1 * x1 + (middle >> 16) + (carry >> 16), np.uint32(constant) * x
