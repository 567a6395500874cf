"""Device functions that the kernels share: rows of a matrix, a tile's scores and weights, what dropout keeps.

`formulas` is a `formulas.FormulaFunctions`, `meta` a `meta.MetaParameters`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = [
    *(
        "FLOAT32_MAX",
        "LN_2",
        "LOG2_E",
        "NO_KEY",
        "Array",
        "Head",
        "BlockLocation",
        "clamp_finite",
        "query_indices",
        "shifted_exponents",
    ),
    *(
        "zero_nonfinite",
        "gather_rows",
        "locate_head",
        "dropout_mask",
        "load_rows_transposed",
        "normaliser",
        "scalar",
        "load_queries",
        "load_rows",
        "compute_scores",
    ),
    *("apply_sign", "weight"),
]

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
NO_KEY = tl.constexpr(2147483647)  # above every key


class Array(NamedTuple):
    """(*lead, heads, rows, columns) as a kernel's argument, see `operands.operand`; steps in entries."""

    start: Any
    lengths: Any  # of the leading axes
    strides: Any  # of the leading axes
    head: Any  # steps of the others
    row: Any
    column: Any


class Head(NamedTuple):
    """The rows of one head of an array, or of a block of heads, whose `start` is a block of pointers."""

    start: Any
    row: Any
    column: Any


class BlockLocation(NamedTuple):
    """Where a block of queries is: i a column (rows, 1), none past the last; h may be a column too."""

    b: Any
    h: Any
    i: Any
    n: Any
    m: Any


@triton.jit
def scalar(x, dtype: tl.constexpr):
    """A number of the call in that type, without a detour through a narrower one."""
    return tl.full((), x, dtype)


@triton.jit
def clamp_finite(x, meta):
    """A float64 in the type of scores; where finite, at most their largest number in size."""
    if meta.accumulator == tl.float32:
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -FLOAT32_MAX), FLOAT32_MAX), x)
    return x.to(meta.accumulator)


@triton.jit
def apply_sign(x, sign, meta):
    """Queries or keys times the sign of the scale: nothing is rounded."""
    return (x * scalar(sign, meta.accumulator)).to(x.dtype)


@triton.jit
def zero_nonfinite(x):
    """The block with 0 for NaN and ∞."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def locate_head(array, b, head):
    """A head of an array; `head` may be a block of heads."""
    offset = tl.cast(head, tl.int64) * array.head
    for k in tl.static_range(len(array.lengths)):
        length = array.lengths[len(array.lengths) - 1 - k]
        offset += tl.cast(b % length, tl.int64) * array.strides[len(array.lengths) - 1 - k]
        b = b // length
    return Head(array.start + offset, array.row, array.column)


@triton.jit
def load_rows(
    head, first, ROWS: tl.constexpr, count, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BOUND: tl.constexpr, meta
):
    """Rows first ... first + ROWS − 1 of a head, (ROWS, LANES): 0 past the width and, where BOUND, from row `count`."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED_WIDTH)[None, :]
    return _load(head, first, row, column, count, WIDTH, PADDED_WIDTH, BOUND, meta)


@triton.jit
def load_rows_transposed(
    head, first, ROWS: tl.constexpr, count, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BOUND: tl.constexpr, meta
):
    """The same rows as columns, (LANES, ROWS)."""
    row, column = tl.arange(0, ROWS)[None, :], tl.arange(0, PADDED_WIDTH)[:, None]
    return _load(head, first, row, column, count, WIDTH, PADDED_WIDTH, BOUND, meta)


@triton.jit
def load_queries(query, b, h, first, n, sign, meta):
    """A head's queries from `first` on, times the sign of the scale."""
    return apply_sign(
        load_rows(locate_head(query, b, h), first, meta.rows, n, meta.d_k, meta.padded_d_k, True, meta), sign, meta
    )


@triton.jit
def gather_rows(heads, row, inside, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, meta):
    """Rows of several heads, (rows, LANES): where heads start and which of their rows are columns."""
    column = tl.arange(0, PADDED_WIDTH)[None, :]
    pointers = heads.start + tl.cast(row, tl.int64) * heads.row + column.to(meta.index_type) * heads.column
    block = tl.load(pointers, mask=inside & (column < WIDTH), other=0.0)
    if meta.widens_operands:
        block = block.to(meta.accumulator)
    return block


@triton.jit
def _load(head, first, row, column, count, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BOUND: tl.constexpr, meta):
    offsets = row.to(meta.index_type) * head.row + column.to(meta.index_type) * head.column
    pointers = head.start + tl.cast(first, tl.int64) * head.row + offsets
    if BOUND and PADDED_WIDTH != WIDTH:
        block = tl.load(pointers, mask=(row < count - first) & (column < WIDTH), other=0.0)
    elif BOUND:
        block = tl.load(pointers, mask=row < count - first, other=0.0)
    elif PADDED_WIDTH != WIDTH:
        block = tl.load(pointers, mask=column < WIDTH, other=0.0)
    else:
        block = tl.load(pointers)
    if meta.widens_operands:
        block = block.to(meta.accumulator)
    return block


@triton.jit
def query_indices(first, n, meta):
    """The queries of a block, (rows, 1), none past the last."""
    return tl.minimum(first + tl.arange(0, meta.rows), n - 1)[:, None]


@triton.jit
def compute_scores(products, location, first, scale, tables, formulas, PARTIAL: tl.constexpr, meta):
    """Final scores of a tile of keys from its Q · K: −∞ where a partial tile hides the pair or the keys end.

    With a score formula in nats; without one not yet scaled, so that scale and shift are one rounding.
    """
    b, h, i, n, m = location
    s = products
    j = first + tl.arange(0, meta.keys)[None, :]
    at = j
    if PARTIAL and not meta.even:
        at = tl.minimum(j, m - 1)
    if formulas.score_at is not None:
        s = tl.broadcast_to(formulas.score_at(s * scale, b, h, i, at, n, m, tables), s.shape)
    if PARTIAL:
        if formulas.mask_at is not None:
            s = tl.where(formulas.mask_at(b, h, i, at, n, m, tables), s, float("-inf"))
        if not meta.even:
            s = tl.where(j < m, s, float("-inf"))
    return s


@triton.jit
def normaliser(lse, position, first, n, unit, meta):
    """lse of a head's queries from `first` on in the scores' unit, high + low, (rows,); 0 where nothing is seen."""
    rows = first + tl.arange(0, meta.rows)
    x = tl.load(lse + tl.cast(position, tl.int64) * n + rows, mask=rows < n, other=0.0) * (LOG2_E / unit)
    x = tl.where(x == float("-inf"), 0.0, x)
    high = clamp_finite(x, meta)
    return high, clamp_finite(tl.where(tl.abs(x) < float("inf"), x - high.to(tl.float64), 0.0), meta)


@triton.jit
def weight(s, unit, normaliser):
    """P = 2^((s − lse) · unit) of scores as `compute_scores` has them: near the maximum exact, however large they are."""
    high, low = normaliser
    x = tl.minimum((s - high) - low, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(x * unit)


@triton.jit
def shifted_exponents(s, unit, shift):
    """(s − shift) · unit. Near the maximum, as shift, the difference is exact, however large the scores are."""
    return (s - shift[:, None]) * unit


@triton.jit
def _unpack_word(scalar):
    """The 32 bits in a number of `Operands.dropout_state`."""
    return (tl.cast(scalar, tl.int64) >> 1) & 0xFFFFFFFF


@triton.jit
def dropout_mask(dropout_state, location, first, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Which weights dropout keeps, (ROWS, KEYS): `sightline.dropout`. `first` is a multiple of 4.

    `dropout_state` is of `Operands.dropout_state`.
    """
    quad = tl.broadcast_to((first // 4 + tl.arange(0, KEYS // 4))[None, :], (ROWS, KEYS // 4))
    none = tl.zeros_like(quad)
    low, high, dropped = _unpack_word(dropout_state[0]), _unpack_word(dropout_state[1]), _unpack_word(dropout_state[2])
    w0, w1, w2, w3 = tl.philox((high << 32) | low, location.b + none, location.h + none, location.i + none, quad)
    uniform_words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # word 2 a + c at [.., a, c]
    return tl.reshape(uniform_words, (ROWS, KEYS)) > dropped.to(tl.uint32)
