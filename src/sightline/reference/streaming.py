"""The streaming kernel: attention by tiles in plain array operations, in O(n) memory.

The kernel serves NumPy, every device of torch, every dtype and every formula. Arrays of other libraries with the array
API have only a forward pass. The forward pass keeps a running maximum and sum for each query (Milakov and Gimelshein,
2018; Dao et al., "FlashAttention", 2022, algorithm 1). The backward pass computes the weights again from the saved lse
("FlashAttention", algorithm 4). The forward and the backward pass use plain operations on new arrays, so torch can
differentiate them to any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import numpy as np

from ..arrays.caching import cached_property
from ..arrays.operations import convert, device_option, namespace, resolve_dtype
from ..call.gradient_parts import MAX_LSE, MAX_LSE_DIFFERENCE, find_learned_lookups, is_lse_too_large, sink_weights
from ..call.kernel import GivenGradients, Gradients, Kernel, Refusal, Result, Tangents
from ..call.problem import Problem
from ..formula.derivative import derivative, score_tangent
from ..formula.evaluate_array import evaluate
from ..formula.expression import Expression
from ..formula.tile_ranges import TileRanges, find_tile_ranges
from ..statistics import Statistic, Tile, accumulate_statistics, statistic_gradients
from .dropout import keep_factor

TILE_ELEMENTS = 1 << 20  # the most scores of one tile, over all batches and heads; a tile of one row may have more
MAX_TILE_KEYS = 512


class TileOps:
    """The array operations by which the forward and backward passes compute the tiles of one problem."""

    def __init__(self, problem: Problem, *others: Any) -> None:
        if not isinstance(problem.query, np.ndarray):
            problem = problem.map_tables(lambda array: convert(array, problem.query))
        self.problem = problem
        self.xp = namespace(problem.query)
        self.dtype = resolve_dtype(self.xp, problem.accumulator)
        formats = problem.row_formats or ()
        self.row_formats = dict(zip((id(problem.key), id(problem.value)), formats, strict=False))
        self.arrays = problem.query, problem.key, problem.value, *others

    @cached_property
    def is_finite(self) -> bool:
        """True if no entry of the arrays is NaN or ∞. The rows of a packed cache are not read to find out."""
        arrays = [x for x in self.arrays if x is not None]
        return not self.row_formats and all(bool(self.xp.all(self.xp.isfinite(x))) for x in arrays)

    @cached_property
    def runs(self) -> TileRanges:
        """For each block of queries, the blocks of keys that the mask does not hide, as ranges of tiles."""
        problem = self.problem
        columns = min(MAX_TILE_KEYS, 1 << max(problem.m - 1, 0).bit_length())
        rows = max(TILE_ELEMENTS // (max(problem.B * problem.H, 1) * columns), 1)
        return find_tile_ranges(problem.mask, problem.extent, min(1 << (rows.bit_length() - 1), 1024), columns)

    def query_blocks(self) -> Iterator[slice]:
        """Yield each block of queries as a slice of query positions."""
        size = self.runs.query_block
        for start in range(0, self.problem.n, size):
            yield slice(start, min(start + size, self.problem.n))

    def key_blocks(self, rows: slice) -> Iterator[tuple[slice, bool]]:
        """Yield each block of keys that some of these queries see in some batch or head, and whether the tile is full.

        The tile is full if every batch and head allows all pairs of these queries and these keys.
        """
        runs = self.runs
        full: dict[int, int] = {}
        for b, h in np.ndindex(runs.batches, runs.heads):
            for entry in runs.row(b, h, rows.start // runs.query_block):
                for column in range(runs.first[entry], runs.last[entry]):
                    full[column] = full.get(column, 0) + bool(runs.full[entry])
        for column in sorted(full):
            start = column * runs.key_block
            stop = min(start + runs.key_block, self.problem.m)
            yield slice(start, stop), full[column] == runs.batches * runs.heads

    def widen(self, array: Any, part: slice) -> Any:
        """Return the positions `part` of query, key or value, in the accumulator's dtype."""
        row_format, rows = self.row_formats.get(id(array)), array[..., part, :]
        return self.xp.astype(rows if row_format is None else row_format.unpack(rows), self.dtype)

    def symbols(self, rows: slice, columns: slice, s: Any = None) -> dict[str, Any]:
        b, h, i, j = self.problem.positions(self.xp, rows, columns)
        return {"b": b, "h": h, "i": i, "j": j, "s": s, "n": self.problem.n, "m": self.problem.m}

    def evaluate_formula(self, formula: Any, symbols: dict[str, Any], dtype: Any = None) -> Any:
        dtype = self.dtype if dtype is None else dtype
        symbols = {name: value for name, value in symbols.items() if value is not None}
        return evaluate(formula, symbols, xp=self.xp, float_dtype=dtype, like=self.problem.query)

    def multiply_nan_safe(self, x: Any, slope: Any) -> Any:
        """Return x · slope. Where x is 0 the product is 0, even if the slope is NaN or ∞."""
        xp = self.xp
        if isinstance(slope, float):
            return x * slope
        return x * xp.where((x == 0) & ~xp.isfinite(slope), self.full(0.0), slope)

    def evaluate_on_scores(self, formula: Any, rows: slice, columns: slice, masked: Any) -> Any:
        """Return the results of a formula over a tile, with s = `masked`, the final scores; 0 where s is −∞."""
        xp, hidden = self.xp, masked == -self.xp.inf
        values = self.evaluate_formula(formula, self.symbols(rows, columns, xp.where(hidden, self.full(0.0), masked)))
        return xp.where(hidden, self.full(0.0), xp.astype(values, self.dtype))

    def scaled(self, query: Any, columns: slice) -> Any:
        """Return Q Kᵀ · scale of a tile, of shape (*batch_shape, H, rows, columns).

        `query` has the rows of the tile in the accumulator's dtype.
        """
        return self.dot_products(query, self.widen(self.problem.key, columns)) * self.problem.scale

    def masked(self, s: Any, rows: slice, columns: slice, full: bool) -> Any:
        """Return the final scores of a tile from its scaled scores s: by the score formula, and −∞ at hidden pairs."""
        problem, xp, allowed = self.problem, self.xp, None
        if problem.mask is not None and not full:
            allowed = self.evaluate_formula(problem.mask, self.symbols(rows, columns), xp.float64)
        if problem.score is not None:
            read = s if allowed is None else xp.where(allowed, s, self.full(0.0))  # a finite slope at hidden pairs
            values = self.evaluate_formula(problem.score, self.symbols(rows, columns, read))
            s = xp.astype(xp.broadcast_to(values, s.shape), self.dtype)
        return s if allowed is None else xp.where(allowed, s, self.full(-xp.inf))

    def sum_over_keys(self, weights: Any, array: Any) -> Any:
        """Return Σⱼ weights[i, j] · array[j], of shape (*batch_shape, H, rows, width). `array` has the key heads."""
        product = self.nan_safe_matmul(self.group_heads(weights), array)
        return self.xp.reshape(product, (*weights.shape[:-1], array.shape[-1]))

    def sum_over_queries(self, weights: Any, array: Any) -> Any:
        """Return Σ weights[i, j] · array[i], of shape (*batch_shape, G, columns, width).

        The sum runs over the rows i and over the query heads that share a key head.
        """
        return self.nan_safe_matmul(self.xp.matrix_transpose(self.group_heads(weights)), self.group_heads(array))

    def dot_products(self, array: Any, other: Any) -> Any:
        """Return the dot products array[i] · other[j], of shape (*batch_shape, H, rows, columns)."""
        product = self.group_heads(array) @ self.xp.matrix_transpose(other)
        return self.xp.reshape(product, (*array.shape[:-1], other.shape[-2]))

    def group_heads(self, array: Any) -> Any:
        """Reshape (*batch_shape, H, rows, width) to (*batch_shape, G, H / G · rows, width): one matrix per key head."""
        problem, (rows, width) = self.problem, array.shape[-2:]
        return self.xp.reshape(array, (*problem.batch_shape, problem.G, problem.group * rows, width))

    def split_lse(self, lse: Any) -> tuple[Any, Any]:
        """Return arrays (high, low) of the accumulator's dtype with high + low = lse; 0 and 0 where the lse is −∞.

        Each array has the shape (..., rows, 1).
        """
        xp = self.xp
        lse = xp.where(lse == -xp.inf, xp.zeros_like(lse), lse)[..., None]
        high = xp.astype(lse, self.dtype)
        return high, xp.astype(lse - xp.astype(high, lse.dtype), self.dtype)

    def nan_safe_matmul(self, weights: Any, array: Any) -> Any:
        """Return weights @ array. A weight of 0 adds 0, even if it is multiplied by NaN or ∞.

        The function is correct only if no entry of the array that is NaN or ∞ has a negative weight.
        """
        if self.is_finite:
            return weights @ array
        xp = self.xp
        seen = xp.astype(weights != 0, self.dtype)
        kinds = (xp.isnan(array), array == xp.inf, array == -xp.inf)
        nan, up, down = (seen @ xp.astype(kind, self.dtype) > 0 for kind in kinds)
        result = weights @ self.zero_nonfinite(array)
        for where_, value in ((up, xp.inf), (down, -xp.inf), (nan | (up & down), xp.nan)):
            result = xp.where(where_, self.full(value), result)
        return result

    def zero_nonfinite(self, array: Any) -> Any:
        """Return the array with 0 in place of NaN and ∞. A query that sees such an entry has NaN weights anyway."""
        return array if self.is_finite else self.xp.where(self.xp.isfinite(array), array, self.full(0.0))

    def full(self, value: float, *shape: int) -> Any:
        return self.xp.full(shape, value, dtype=self.dtype, **device_option(self.problem.query))

    def sink(self, rows: int) -> Any:
        """Return the sinks as logits of shape (*batch_shape, H, rows); −∞ if the problem has no sinks."""
        problem, xp = self.problem, self.xp
        if problem.sinks is None:
            return self.full(-xp.inf, *problem.batch_shape, problem.H, rows)
        return xp.broadcast_to(xp.astype(problem.sinks, self.dtype)[:, None], (*problem.batch_shape, problem.H, rows))


def forward(ops: TileOps) -> tuple[Any, Any]:
    """Return (output, lse). The output has the accumulator's dtype.

    The lse is float64, because weights that are computed from the lse inherit its error.
    """
    xp, problem = ops.xp, ops.problem
    output = ops.full(0.0, *problem.batch_shape, problem.H, problem.n, problem.d_v)
    lse = xp.astype(ops.full(-xp.inf, *problem.batch_shape, problem.H, problem.n), xp.float64)
    for rows in ops.query_blocks():
        query = ops.widen(problem.query, rows)
        largest = ops.sink(query.shape[-2])
        total = xp.astype(largest != -xp.inf, xp.float64)
        acc = xp.zeros_like(output[..., rows, :])  # new memory, because torch saves `acc` for second derivatives
        for columns, full in ops.key_blocks(rows):
            s = ops.masked(ops.scaled(query, columns), rows, columns, full)
            new = xp.maximum(largest, xp.max(s, axis=-1))
            shift = xp.where(new == -xp.inf, ops.full(0.0), new)
            alpha = xp.exp(xp.astype(largest - shift, xp.float64))
            p = xp.exp(s - shift[..., None])
            total = total * alpha + xp.astype(xp.sum(p, axis=-1), xp.float64)
            p = xp.astype(p * keep_factor(problem, xp, rows, columns), ops.dtype)
            values = ops.sum_over_keys(p, ops.widen(problem.value, columns))
            acc = acc * xp.astype(alpha, ops.dtype)[..., None] + values
            largest = new
        has_visible_keys = total != 0  # a NaN counts as a visible key
        safe = xp.where(has_visible_keys, total, xp.ones_like(total))
        output[..., rows, :] = acc / xp.astype(safe, ops.dtype)[..., None]
        lse[..., rows] = xp.astype(xp.where(has_visible_keys, largest, ops.full(-xp.inf)), xp.float64) + xp.log(safe)
    return output, lse


def visible_tiles(ops: TileOps, lse: Any) -> Iterator[Tile]:
    """Yield every tile that is not empty. Its weights are normalised, before dropout."""
    for rows in ops.query_blocks():
        for columns, _, masked, weights in row_tiles(ops, rows, lse):
            yield Tile(rows, columns, weights, masked, lse[..., rows])


def compute_statistics(ops: TileOps, lse: Any) -> tuple[Any, ...]:
    """Compute the statistics of the problem from the lse, in a second pass over the tiles."""
    return accumulate_statistics(ops.problem, lse, lambda: visible_tiles(ops, lse))


def row_tiles(ops: TileOps, rows: slice, lse: Any) -> Iterator[tuple[slice, Any, Any, Any]]:
    """Yield (columns, scaled scores, final scores S, weights P) of each tile of these queries.

    P is exp(S − lse), and 0 where S is −∞.
    """
    high, low = _normalizers(ops, rows, lse[..., rows])
    for columns, scaled, masked in _score_tiles(ops, rows):
        yield columns, scaled, masked, ops.xp.exp((masked - high) - low)


def _score_tiles(ops: TileOps, rows: slice) -> Iterator[tuple[slice, Any, Any]]:
    """Yield (columns, scaled scores, final scores S) of each tile of these queries."""
    query = ops.widen(ops.problem.query, rows)
    for columns, full in ops.key_blocks(rows):
        scaled = ops.scaled(query, columns)
        yield columns, scaled, ops.masked(scaled, rows, columns, full)


def _normalizers(ops: TileOps, rows: slice, lse: Any) -> tuple[Any, Any]:
    """Return (high, low), each of shape (..., rows, 1), whose sum is the lse of these queries.

    The lse is m + ln l, where m is the largest score. If |m| is huge, rounding removes ln l from the lse. An example is
    the least finite number, which hides keys in some models. For such a query, high is m and low is ln l. This needs
    m + ln l to equal the given lse, which may also belong to more keys than the problem has.
    """
    xp = ops.xp
    high, low = ops.split_lse(lse)
    is_large = xp.isfinite(lse) & (xp.abs(lse) > MAX_LSE[ops.problem.accumulator])
    if not bool(xp.any(is_large)):
        return high, low
    largest = ops.sink(lse.shape[-1])
    for _, _, s in _score_tiles(ops, rows):
        largest = xp.maximum(largest, xp.max(s, axis=-1))
    largest = xp.where(largest == -xp.inf, ops.full(0.0), largest)
    total = xp.exp(xp.astype(ops.sink(lse.shape[-1]) - largest, xp.float64))
    for _, _, s in _score_tiles(ops, rows):
        total = total + xp.astype(xp.sum(xp.exp(s - largest[..., None]), axis=-1), xp.float64)
    logarithm = xp.log(total)
    made = xp.astype(largest, xp.float64) + logarithm
    is_own = (is_large & (xp.abs(made - lse) <= xp.abs(lse) * 2.0**-40))[..., None]
    parts = (xp.astype(part, ops.dtype)[..., None] for part in (largest, logarithm))
    return tuple(xp.where(is_own, part, given) for part, given in zip(parts, (high, low), strict=True))


def backward_by(kernel: Kernel, problem: Problem, given: GivenGradients) -> Gradients:
    """Return the gradients by the backward pass of a kernel. If it returns None, return those of `backward`.

    Output and lse are computed again if an |lse| is above `MAX_LSE`.
    """
    gradients = kernel.backward(problem, given)
    if gradients is not None:
        return gradients
    is_imprecise = is_lse_too_large(given.saved[1], problem.accumulator)
    return backward(problem, given._replace(saved=None) if is_imprecise else given)


def backward(problem: Problem, given: GivenGradients) -> Gradients:
    """Return the gradients of Σ d_output ∘ output + Σ d_lse ∘ lse + Σ d_seen ∘ seen.

        P = exp(S − lse)    dV = (P ∘ keep)ᵀ dO    dP = (dO Vᵀ) ∘ keep + d_weights
        dS = P ∘ (dP − rowsum(P ∘ dP) + d_lse) + d_scores    dQ = dS K · scale    dK = dSᵀ Q · scale

    `keep` has the factors of dropout. The gradients of statistics contribute d_weights, d_scores and a part of d_lse.

    If `given.saved` is None, the forward pass and `given.statistics` are computed again, and the returned gradients
    can be differentiated again.
    """
    ops, saved, added = TileOps(problem, given.d_output), given.saved, given.statistics
    xp = ops.xp
    output, lse = forward(ops) if saved is None else (xp.astype(saved[0], ops.dtype), saved[1])
    d_output = xp.zeros_like(output) if given.d_output is None else xp.astype(given.d_output, ops.dtype)
    score_gradients = ScoreGradients(ops)
    if saved is not None and problem.dtype != problem.accumulator and score_gradients.lookups:
        exact, own_lse = forward(ops)  # a rounded output changes the gradients of all pairs of a query alike
        is_own = xp.abs(own_lse - lse) < MAX_LSE_DIFFERENCE  # else the output belongs to other keys too
        output = xp.where(is_own[..., None], exact, output)
    row = xp.sum(d_output * output, axis=-1)
    if saved is None and given.d_seen:

        def compute(statistic: Statistic) -> Any:
            return accumulate_statistics(problem.with_statistics(statistic), lse, lambda: visible_tiles(ops, lse))[0]

        added = statistic_gradients(problem, lse, given.d_seen, compute=compute)
    known = added.add_to_d_lse(given.d_lse)
    row = row if known is None else row - xp.astype(known, ops.dtype)
    lead, d_query = problem.key.shape[:-1], ops.full(0.0, *problem.query.shape)
    d_key, d_value = (ops.full(0.0, *lead, width) for width in (problem.d_k, problem.d_v))
    for rows in ops.query_blocks():
        d_o, d_row = d_output[..., rows, :], row[..., rows]
        for columns, _, masked, p in row_tiles(ops, rows, lse) if added.needs_weights_sum else ():
            added_weights = ops.evaluate_on_scores(added.weights, rows, columns, masked)
            d_row = d_row + xp.sum(p * xp.where(p == 0, ops.full(0.0), added_weights), axis=-1)
        for columns, scaled, masked, p in row_tiles(ops, rows, lse):
            keep = keep_factor(problem, xp, rows, columns)
            d_p = ops.dot_products(d_o, ops.widen(problem.value, columns))
            if problem.dropout:
                d_p = ops.multiply_nan_safe(keep, d_p)
            if added.weights is not None:
                d_p = d_p + ops.evaluate_on_scores(added.weights, rows, columns, masked)
            d_masked = xp.where(p == 0, ops.full(0.0), xp.astype(p * (d_p - d_row[..., None]), ops.dtype))
            if added.scores is not None:
                own = ops.evaluate_on_scores(added.scores, rows, columns, masked)
                d_masked = d_masked + (own if added.includes_zero_weights else xp.where(p == 0, ops.full(0.0), own))
            score_gradients.add(d_masked, scaled, rows, columns)
            d_s = ops.multiply_nan_safe(d_masked, score_gradients.slope(scaled, rows, columns)) * problem.scale
            d_query[..., rows, :] += ops.sum_over_keys(d_s, ops.zero_nonfinite(ops.widen(problem.key, columns)))
            d_key[..., columns, :] += ops.sum_over_queries(d_s, ops.zero_nonfinite(ops.widen(problem.query, rows)))
            d_value[..., columns, :] += ops.sum_over_queries(xp.astype(p * keep, ops.dtype), d_o)
        score_gradients.add_sinks(d_row, lse[..., rows])
    d_query, d_key, d_value = (xp.astype(gradient, problem.query.dtype) for gradient in (d_query, d_key, d_value))
    return Gradients(d_query, d_key, d_value, *score_gradients.gradients())


class ScoreGradients:
    """The gradients of the score's tables and of the sinks, summed tile by tile, and the slope d score / d s."""

    def __init__(self, ops: TileOps) -> None:
        self.ops, problem = ops, ops.problem
        self.d_s = None if problem.score is None else derivative(problem.score)
        learned = find_learned_lookups(problem, range(len(problem.tables)))
        self.lookups = [(node, derivative(cast(Expression, problem.score), node)) for _, node, _ in learned]
        self.tables = {id(node.table): ops.full(0.0, *node.table.shape) for node, _ in self.lookups}
        self.sinks = None if problem.sinks is None else ops.full(0.0, problem.H)

    def slope(self, scaled: Any, rows: slice, columns: slice) -> Any:
        """Return d score / d s over a tile; 1.0 if the problem has no score formula."""
        return 1.0 if self.d_s is None else self.ops.evaluate_formula(self.d_s, self.ops.symbols(rows, columns, scaled))

    def add(self, d_masked: Any, scaled: Any, rows: slice, columns: slice) -> None:
        """Add this tile's part to the gradients of the tables.

        The gradient of a table entry is Σ dS · d score / d entry, over the pairs that read the entry.
        """
        ops, xp = self.ops, self.ops.xp
        symbols = ops.symbols(rows, columns, scaled)
        for node, slope in self.lookups:
            share = ops.multiply_nan_safe(d_masked, ops.evaluate_formula(slope, symbols))
            index = tuple(
                xp.broadcast_to(xp.clip(ops.evaluate_formula(a, symbols), 0, length - 1), d_masked.shape)
                for a, length in zip(node.arguments, node.table.shape, strict=True)
            )
            _scatter_add(self.tables[id(node.table)], index, share)

    def add_sinks(self, d_row: Any, lse: Any) -> None:
        """Add the part of these queries to the gradient of the sinks.

        The gradient of sink h is −Σ exp(sink_h − lse) (rowsum(P ∘ dP) − d_lse), over the queries of head h.
        """
        if self.sinks is not None:
            weights = self.ops.xp.astype(sink_weights(self.ops.problem.sinks, lse), self.ops.dtype)
            sums = self.ops.xp.sum(-weights * d_row, axis=-1)
            self.sinks += self.ops.xp.sum(sums, axis=tuple(range(sums.ndim - 1)))

    def gradients(self) -> tuple[tuple[Any, ...], Any]:
        """Return (gradients of the problem's tables, gradient of the sinks).

        A table's gradient is None if the score formula does not read the table as floats. The gradient of the sinks is
        None if the problem has no sinks.
        """
        xp, problem = self.ops.xp, self.ops.problem
        tables = tuple(
            xp.astype(self.tables[id(t)], t.array.dtype) if id(t) in self.tables else None for t in problem.tables
        )
        return tables, None if self.sinks is None else xp.astype(self.sinks, cast(Any, problem.sinks).dtype)


def _scatter_add(target: Any, index: tuple[Any, ...], values: Any) -> None:
    """Add `values` to target[index], where an index may occur several times.

    The order of the sum is fixed, so every run gives the same bits.
    """
    flat_index: Any = 0
    for part, length in zip(index, target.shape, strict=True):
        flat_index = flat_index * length + part
    if isinstance(target, np.ndarray):
        np.add.at(target.reshape(-1), flat_index, values)
    else:
        target.view(-1).index_add_(0, flat_index.reshape(-1), values.reshape(-1))


def tangent(problem: Problem, tangents: Tangents, saved: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the tangents of output and lse, in O(n) memory. `d` marks a tangent, and `keep` are the dropout factors.

        ds = (dQ Kᵀ + Q dKᵀ) · scale        D = P ∘ (d score / d s · ds + the score's derivative along its tables)
        d_lse = rowsum(D)                     d_output = (D ∘ keep) V + (P ∘ keep) dV − d_lse ∘ output

    A sink adds exp(sink − lse) times its tangent to d_lse.

    Parameters
    ----------
    tangents : the tangents of the inputs
    saved : (output, lse) of the forward pass
    """
    ops = TileOps(problem, tangents.query, tangents.key, tangents.value)
    xp, (output, lse) = ops.xp, saved
    d_output = ops.full(0.0, *problem.batch_shape, problem.H, problem.n, problem.d_v)
    d_lse = xp.zeros_like(lse)
    score = ScoreGradients(ops)
    formula = score_tangent(problem.score, dict(zip(problem.tables, tangents.tables, strict=False)))
    with np.errstate(all="ignore"):  # hidden scores may overflow
        for rows in ops.query_blocks():
            total, row = ops.full(0.0), ops.full(0.0)
            if tangents.sinks is not None:
                weights = xp.astype(sink_weights(problem.sinks, lse[..., rows]), ops.dtype)
                total = weights * xp.astype(tangents.sinks, ops.dtype)[:, None]
            for columns, scaled, _, p in row_tiles(ops, rows, lse):
                d_score = score.slope(scaled, rows, columns) * _product_tangent(ops, tangents, rows, columns)
                if formula is not None:
                    d_score = d_score + ops.evaluate_formula(formula, ops.symbols(rows, columns, scaled))
                d = xp.astype(xp.where(p == 0, ops.full(0.0), p * d_score), ops.dtype)
                total = total + xp.sum(d, axis=-1)
                keep = keep_factor(problem, xp, rows, columns)
                row = row + ops.sum_over_keys(xp.astype(d * keep, ops.dtype), ops.widen(problem.value, columns))
                if tangents.value is not None:
                    kept = xp.astype(p * keep, ops.dtype)
                    row = row + ops.sum_over_keys(kept, ops.widen(tangents.value, columns))
            own = xp.astype(output[..., rows, :], ops.dtype)
            d_output[..., rows, :] = row - xp.where(total == 0, ops.full(0.0), total)[..., None] * own
            d_lse[..., rows] = xp.astype(total, d_lse.dtype)
    return xp.astype(d_output, problem.query.dtype), d_lse


def _product_tangent(ops: TileOps, tangents: Tangents, rows: slice, columns: slice) -> Any:
    """Return the tangent of Q Kᵀ · scale over a tile. The caller ignores its entries at hidden pairs, NaN and ∞ too."""
    problem, total = ops.problem, ops.full(0.0)
    for query, key in ((tangents.query, problem.key), (problem.query, tangents.key)):
        if query is not None and key is not None:
            total = total + ops.dot_products(ops.widen(query, rows), ops.widen(key, columns)) * problem.scale
    return total


class Streaming(Kernel):
    """The kernel that computes attention by tiles in plain array operations. It serves every problem."""

    name = "streaming"
    description = "tiles in plain array operations (NumPy, torch on any device, array API), O(n) memory"

    def cost(self, problem: Problem) -> float:
        return 10.0

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        """Yield nothing: streaming has a backward pass for every problem."""
        yield from ()

    def run(self, problem: Problem) -> Result:
        ops = TileOps(problem)
        with np.errstate(all="ignore"):  # hidden scores may overflow
            output, lse = forward(ops)
        return Result(ops.xp.astype(output, problem.query.dtype), lse, seen=compute_statistics(ops, lse))

    def backward(self, problem: Problem, given: GivenGradients) -> Gradients:
        return backward(problem, given)
