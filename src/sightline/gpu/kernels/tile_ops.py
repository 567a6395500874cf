"""Device functions that the kernels share: loads of rows, scores, the running softmax, dropout.

In every kernel `formulas` is a `codegen.formula_functions.FormulaFunctions`, and `meta` is a `MetaParameters`.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
NO_KEY = tl.constexpr(2147483647)  # larger than every key index


@dataclass(frozen=True)
class MetaParameters:
    """Compile-time constants of one kernel. Kernels read a constant as `meta.rows`.

    Lengths and strides are run-time arguments instead.
    """

    rows: int  # queries of a tile, a power of two
    keys: int  # keys of a tile, a power of two, at most 128
    d_k: int
    d_v: int
    padded_d_k: int  # the width of the tiles of Q and K: `launch.arguments.padded_width(d_k)`
    padded_d_v: int
    even: bool  # True if the problem's number of keys is a multiple of the tile size `keys`
    index_type: Any  # integer type of the offsets within a tile
    accumulator: Any  # float type of scores and sums
    sign: float  # the sign of the problem's scale, 1, −1 or 0: s = Q Kᵀ · sign · scale is a score before its formula
    precision: str  # the precision of float32 products: "ieee" or "tf32"
    widens_operands: bool  # True if tiles are widened to `accumulator`, as Triton's interpreter needs for bfloat16
    max_score: bool = False  # True if the forward kernel also computes the largest score of each query and its key
    entropy: bool = False  # True if the forward kernel also computes the entropy of each query
    subblocks: int = 0  # number of blocks of this size in a flagged block, which a NaN-safe launch recomputes; else 0
    merged_rows: int = 0  # in `merge_splits`, the number of queries rounded up to a power of two
    is_grouped: bool = False  # in `backward_keys`, True if several query heads share a key head and schedule rows
    heads_differ: bool = False  # in `backward_keys`, True if they share a key head, and have schedule rows of their own
    all_full: bool = False  # in `backward_keys`, True if tiles divide the queries and the keys
    kinds: tuple[str, ...] = ()  # in `backward_queries`, the kind of each lookup whose table has a gradient
    sequential: bool = False  # in `backward_queries`, True if one of the kinds is "pair": see there
    shares_batches: bool = False  # in `backward_queries`, True if batches read the same entry of such a table
    shares_heads: bool = False  # as `shares_batches`, for heads
    output_kind: str = ""  # of `dense_weights`


def name_variants(plain: str, nan_safe: str) -> Callable[[Any], str]:
    """Return the option `repr` of `triton.jit` for a kernel with two variants.

    Profilers show the name `nan_safe` if `meta.subblocks` is not 0, else the name `plain`.
    """
    return lambda found: nan_safe if tl.core._unwrap_if_constexpr(found.constants["meta"].subblocks) else plain


class StridedArray(NamedTuple):
    """An array (*batch, heads, rows, columns) as `launch.arguments.to_operand` passes it. Strides count entries."""

    start: Any
    lengths: Any  # the lengths of the batch axes
    strides: Any  # the strides of the batch axes
    head: Any  # the stride between heads
    row: Any  # the stride between rows
    column: Any  # the stride between columns


class KernelArrays(NamedTuple):
    """The arrays that a kernel reads and writes; None for what it lacks. B, H and n are lengths of the problem."""

    query: Any  # a `StridedArray`, as are `key`, `value`, `d_output`, and the `output` that `backward_preprocess` reads
    key: Any
    value: Any
    tables: Any  # for each table (pointer, strides, lengths), see `codegen.render_triton`
    schedule: Any = None  # a `tile_loop.GpuSchedule`; None without a mask
    sinks: Any = None  # (H,) float64
    dropout_state: Any = ()  # what `dropout_mask` reads; () if no weight is dropped
    output: Any = None  # (B, H, n, d_v), contiguous where a kernel writes it
    lse: Any = None  # (B, H, n) float64, contiguous
    nonfinite_flags: Any = None  # int32, one for each block: 1 if a result of the block has NaN, or is not finite
    seen: Any = (None, None, None, ())  # arrays of statistics; see `fused_statistics.store`, and the second pass
    split_output: Any = None  # (splits, B, H, n, d_v): in `decode` the softmax over each split times V
    split_lse: Any = None  # (splits, B, H, n) float64: in `decode` log2 Σ 2^x over each split
    d_output: Any = None
    d_lse: Any = None  # (B, H, n) float64, contiguous; None means 0
    rows: Any = None  # (B, H, n, 4): high, low, δ and no number for each query, which `backward_preprocess` writes
    d_query: Any = None  # (B, H, n, d_k), contiguous, as are `d_key` (B, G, m, d_k) and `d_value` (B, G, m, d_v)
    d_key: Any = None
    d_value: Any = None
    sums: Any = None  # for each lookup whose table has a gradient the array of sums, see `table_gradient`


class Arguments(namedtuple("Arguments", "arrays n m H group scale unit dropout_scale")):
    """The arguments of a kernel that device functions read. `unit` is that of `find_unit`."""


class Head(namedtuple("Head", "start row column")):
    """The rows of one head of an array, or of several heads if `start` is a block of pointers.

    `row` and `column` are the strides between rows and between columns.
    """


class BlockLocation(namedtuple("BlockLocation", "b h i n m")):
    """The location of a block of queries: (b, h, i, n, m).

    h is a number, or a column (rows, 1) if the block has queries of several heads. i is a column (rows, 1) of query
    indices, at most n − 1.
    """


class QueryBlock(namedtuple("QueryBlock", "query key value location scale unit tables dropout_state")):
    """A block of queries, and the heads of K and V that they attend to.

    `scale` and `unit` have the accumulator's type.
    """


@triton.jit
def scalar(x, dtype: tl.constexpr):
    """Return a kernel's argument x in the type `dtype`, without rounding x to a narrower type first."""
    return tl.full((), x, dtype)


@triton.jit
def find_unit(scale, formulas):
    """Return the float64 `unit`: kernels compute e^S of a final score S as 2^(x · unit).

    With a score formula x is S; without one x is Q Kᵀ · sign, which is not yet scaled.
    """
    unit = scalar(LOG2_E, tl.float64)  # Triton's interpreter rounds the factor LOG2_E of a scalar to float32
    if formulas.score_at is None:
        unit = unit * scale
    return unit


@triton.jit
def clamp_finite(x, meta):
    """Return float64 numbers x in the accumulator's type. Finite numbers beyond its range become ±`FLOAT32_MAX`."""
    if meta.accumulator == tl.float32:
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -FLOAT32_MAX), FLOAT32_MAX), x)
    return x.to(meta.accumulator)


@triton.jit
def apply_sign(x, meta):
    """Return queries or keys x multiplied by the sign of the scale, which rounds nothing.

    A product, even by 1, would take x through registers for every matrix product that reads it.
    """
    if meta.sign != 1:
        x = (x * scalar(meta.sign, meta.accumulator)).to(x.dtype)
    return x


@triton.jit
def zero_nonfinite(x):
    """Return x with NaN, ∞ and −∞ replaced by 0."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def has_nan(block):
    """Return 1 if the matrix `block` has a NaN, else 0."""
    return tl.max(tl.max(tl.where(block == block, 0, 1), 1), 0)


@triton.jit
def locate_head(array, b, head):
    """Return the `Head` of an array; `head` may be a block of heads."""
    offset = tl.cast(head, tl.int64) * array.head
    for k in tl.static_range(len(array.lengths)):
        length = array.lengths[len(array.lengths) - 1 - k]
        offset += tl.cast(b % length, tl.int64) * array.strides[len(array.lengths) - 1 - k]
        b = b // length
    return Head(array.start + offset, array.row, array.column)


@triton.jit
def load_rows(head, first, ROWS: tl.constexpr, count, WIDTH: tl.constexpr, PADDED: tl.constexpr, BOUND, meta):
    """Return rows `first` ... `first` + ROWS − 1 of a head, (ROWS, PADDED).

    Columns from WIDTH on are 0. Rows from `count` on are 0 if BOUND; otherwise the head must have all the rows.
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    return _load(head, first, row, column, count, WIDTH, PADDED, BOUND, meta)


@triton.jit
def load_transposed(head, first, ROWS: tl.constexpr, count, WIDTH: tl.constexpr, PADDED: tl.constexpr, BOUND, meta):
    """Return the transpose of what `load_rows` returns, (PADDED, ROWS)."""
    row, column = tl.arange(0, ROWS)[None, :], tl.arange(0, PADDED)[:, None]
    return _load(head, first, row, column, count, WIDTH, PADDED, BOUND, meta)


@triton.jit
def load_queries(query, b, h, first, n, meta):
    """Return the block of queries of a head that begins at query `first`, times the sign of the scale."""
    q = load_rows(locate_head(query, b, h), first, meta.rows, n, meta.d_k, meta.padded_d_k, True, meta)
    return apply_sign(q, meta)


@triton.jit
def load_query_block(args, b, h, first, meta):
    """Return the `QueryBlock` that begins at query `first` of a head."""
    g, arrays = h // args.group, args.arrays
    q = load_queries(arrays.query, b, h, first, args.n, meta)
    location = BlockLocation(b, h, query_indices(first, args.n, meta), args.n, args.m)
    scale, unit = scalar(args.scale, meta.accumulator), scalar(args.unit, meta.accumulator)
    key, value = locate_head(arrays.key, b, g), locate_head(arrays.value, b, g)
    return QueryBlock(q, key, value, location, scale, unit, arrays.tables, arrays.dropout_state)


@triton.jit
def gather_rows(heads, row, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, meta):
    """Return a matrix (rows, PADDED) whose row r is row `row[r]` of the head `heads.start[r]`; 0 if not `inside[r]`.

    `heads.start`, `row` and `inside` have the shape (rows, 1). Columns from WIDTH on are 0.
    """
    column = tl.arange(0, PADDED)[None, :]
    pointers = heads.start + tl.cast(row, tl.int64) * heads.row + column.to(meta.index_type) * heads.column
    block = tl.load(pointers, mask=inside & (column < WIDTH), other=0.0)
    if meta.widens_operands:
        block = block.to(meta.accumulator)
    return block


@triton.jit
def _load(head, first, row, column, count, WIDTH: tl.constexpr, PADDED: tl.constexpr, BOUND: tl.constexpr, meta):
    offsets = row.to(meta.index_type) * head.row + column.to(meta.index_type) * head.column
    pointers = head.start + tl.cast(first, tl.int64) * head.row + offsets
    if BOUND and PADDED != WIDTH:
        block = tl.load(pointers, mask=(row < count - first) & (column < WIDTH), other=0.0)
    elif BOUND:
        block = tl.load(pointers, mask=row < count - first, other=0.0)
    elif PADDED != WIDTH:
        block = tl.load(pointers, mask=column < WIDTH, other=0.0)
    else:
        block = tl.load(pointers)
    if meta.widens_operands:
        block = block.to(meta.accumulator)
    return block


@triton.jit
def query_indices(first, n, meta):
    """Return the query indices of the block that begins at query `first`, (rows, 1), at most n − 1."""
    return tl.minimum(first + tl.arange(0, meta.rows), n - 1)[:, None]


@triton.jit
def compute_scores(products, location, j, scale, tables, formulas, PARTIAL: tl.constexpr, meta):
    """Return the final scores of a tile from its products Q · K; −∞ where the mask hides the pair or j is not below m.

    A full tile (PARTIAL is False) has no such pairs, so they are not looked for. With a score formula, the scores are
    in nats. Without a score formula they are not yet scaled, so that scaling and shifting together round once. `j` has
    the shape (1, keys); in a transposed tile, `location.i` is the row and `j` the column.
    """
    b, h, i, n, m = location
    s = products
    at = j
    if PARTIAL and not meta.even:
        at = tl.minimum(j, m - 1)
    if formulas.score_at is not None:
        _, s = tl.broadcast(products, formulas.score_at(s * scale, b, h, i, at, n, m, tables))
    if PARTIAL:
        if formulas.mask_at is not None:
            s = tl.where(formulas.mask_at(b, h, i, at, n, m, tables), s, float("-inf"))
        if not meta.even:
            s = tl.where(j < m, s, float("-inf"))
    return s


@triton.jit
def update_softmax(s, tile_max, maximum, total, compensation, unit):
    """Advance the running softmax by a tile of scores s: the running maximum m becomes m' = max(m, max s).

    Returns (x, p, Σ p, log2 α, α, m', l, compensation) with x = (s − m') · unit, p = 2^x, α = 2^((m − m') · unit).
    The difference s − m' is exact for scores near the maximum, however large the scores are.
    """
    new = tl.maximum(maximum, tile_max)
    shift = tl.where(new == float("-inf"), 0.0, new)
    log2_alpha = (maximum - shift) * unit
    alpha = tl.exp2(log2_alpha)
    x = (s - shift[:, None]) * unit
    p = tl.exp2(x)
    sums = tl.sum(p, 1)
    # Knuth's TwoSum keeps the rounding error of l: an error of l would be an error of lse, which later passes read.
    old = total * alpha
    total = old + sums
    share = total - old
    compensation = compensation * alpha + ((old - (total - share)) + (sums - share))
    return x, p, sums, log2_alpha, alpha, new, total, compensation


@triton.jit
def compute_lse(maximum, total, compensation, sinks, h, unit):
    """Return lse = m · unit · ln 2 + ln l in nats, float64; −∞ for a query without sink or visible key.

    `unit` is float64.
    """
    nothing = total == 0
    safe = tl.where(nothing, 1.0, total)
    base = tl.where(nothing, float("-inf"), maximum).to(tl.float64) * unit
    lse = base * LN_2 + tl.log(safe.to(tl.float64) + compensation.to(tl.float64))
    if sinks is not None:  # a sink beyond the range of the accumulator entered the softmax as its largest finite number
        sink = tl.load(sinks + h)
        lse = tl.where(lse < sink, sink, lse)
    return lse


@triton.jit
def load_lse(lse, head_index, first, n, unit, meta):
    """Return (high, low), (rows,) each: high + low = lse · log₂ e / unit is lse in the unit of the scores.

    Both numbers are 0 for a query whose lse is −∞.
    """
    rows = first + tl.arange(0, meta.rows)
    x = tl.load(lse + tl.cast(head_index, tl.int64) * n + rows, mask=rows < n, other=0.0) * (LOG2_E / unit)
    x = tl.where(x == float("-inf"), 0.0, x)
    high = clamp_finite(x, meta)
    return high, clamp_finite(tl.where(tl.abs(x) < float("inf"), x - high.to(tl.float64), 0.0), meta)


@triton.jit
def weight(s, unit, lse, NAN_SAFE: tl.constexpr = False):
    """Return P = 2^((s − lse) · unit) for scores s of `compute_scores`. `lse` is the pair of `load_lse`.

    The difference s − lse is exact for scores near lse, however large the scores are. If NAN_SAFE, P is 0 where s is
    −∞, also if lse is NaN.
    """
    high, low = lse
    p = tl.exp2(tl.minimum((s - high) - low, 0.0, propagate_nan=tl.PropagateNan.ALL) * unit)
    if NAN_SAFE:
        p = tl.where(s == float("-inf"), 0.0, p)
    return p


@triton.jit
def _unpack_word(number):
    """Return the 32-bit word that `launch.arguments.dropout_state` packed into a number."""
    return (tl.cast(number, tl.int64) >> 1) & 0xFFFFFFFF


@triton.jit
def dropout_mask(dropout_state, location, first, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return a matrix (ROWS, KEYS) that is True where dropout keeps the weight; see `sightline.reference.dropout`.

    `dropout_state` is that of `launch.arguments.dropout_state`. `first` is the first key, a multiple of 4.
    """
    quad = tl.broadcast_to((first // 4 + tl.arange(0, KEYS // 4))[None, :], (ROWS, KEYS // 4))
    none = tl.zeros_like(quad)
    low, high, dropped = _unpack_word(dropout_state[0]), _unpack_word(dropout_state[1]), _unpack_word(dropout_state[2])
    b = location.b + _unpack_word(dropout_state[3]).to(tl.int32) + none
    h = location.h + _unpack_word(dropout_state[4]).to(tl.int32) + none
    i = location.i + _unpack_word(dropout_state[5]).to(tl.int32) + none
    quad += _unpack_word(dropout_state[6]).to(tl.int32)
    w0, w1, w2, w3 = tl.philox((high << 32) | low, b, h, i, quad)
    uniform_words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # entry [..., a, c] is word 2 a + c
    return tl.reshape(uniform_words, (ROWS, KEYS)) > dropped.to(tl.uint32)
