"""Device functions that the kernels share: rows of a matrix, a tile's scores and weights, what dropout keeps.

`seams` is a `seams.Seams`, `form` a `form.Form`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = [
    *("FLOAT32_MAX", "LN_2", "LOG2_E", "NO_KEY", "Array", "Head", "Place", "bounded", "column_of", "exponents"),
    *("finite", "gathered", "head_of", "keep", "keys_of", "normaliser", "number", "queries_of", "rows_of", "scores"),
    *("signed", "weight"),
]

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
NO_KEY = tl.constexpr(2147483647)  # above every key


class Array(NamedTuple):
    """(*lead, heads, rows, columns) as a kernel's argument, see `operands.operand`; steps in entries."""

    start: Any
    lengths: Any  # of the leading axes
    steps: Any  # of the leading axes
    head: Any  # steps of the others
    row: Any
    column: Any


class Head(NamedTuple):
    """The rows of one head of an array, or of a block of heads, whose `start` is a block of pointers."""

    start: Any
    row: Any
    column: Any


class Place(NamedTuple):
    """Where a block of queries is: i a column (rows, 1), none past the last; h may be a column too."""

    b: Any
    h: Any
    i: Any
    n: Any
    m: Any


@triton.jit
def number(x, dtype: tl.constexpr):
    """A number of the call in that type, without a detour through a narrower one."""
    return tl.full((), x, dtype)


@triton.jit
def bounded(x, form):
    """A float64 in the type of scores; where finite, at most their largest number in size."""
    if form.total == tl.float32:
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -FLOAT32_MAX), FLOAT32_MAX), x)
    return x.to(form.total)


@triton.jit
def signed(x, sign, form):
    """Queries or keys times the sign of the scale: nothing is rounded."""
    return (x * number(sign, form.total)).to(x.dtype)


@triton.jit
def finite(x):
    """The block with 0 for NaN and ∞."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def head_of(array, b, head):
    """A head of an array; `head` may be a block of heads."""
    offset = tl.cast(head, tl.int64) * array.head
    for k in tl.static_range(len(array.lengths)):
        length = array.lengths[len(array.lengths) - 1 - k]
        offset += tl.cast(b % length, tl.int64) * array.steps[len(array.lengths) - 1 - k]
        b = b // length
    return Head(array.start + offset, array.row, array.column)


@triton.jit
def rows_of(
    head, first, ROWS: tl.constexpr, count, WIDTH: tl.constexpr, LANES: tl.constexpr, BOUND: tl.constexpr, form
):
    """Rows first ... first + ROWS − 1 of a head, (ROWS, LANES): 0 past the width and, where BOUND, from row `count`."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    return _read(head, first, row, column, count, WIDTH, LANES, BOUND, form)


@triton.jit
def keys_of(
    head, first, ROWS: tl.constexpr, count, WIDTH: tl.constexpr, LANES: tl.constexpr, BOUND: tl.constexpr, form
):
    """The same rows as columns, (LANES, ROWS)."""
    row, column = tl.arange(0, ROWS)[None, :], tl.arange(0, LANES)[:, None]
    return _read(head, first, row, column, count, WIDTH, LANES, BOUND, form)


@triton.jit
def queries_of(query, b, h, first, n, sign, form):
    """A head's queries from `first` on, times the sign of the scale."""
    return signed(rows_of(head_of(query, b, h), first, form.rows, n, form.d_k, form.lanes_k, True, form), sign, form)


@triton.jit
def gathered(heads, row, inside, WIDTH: tl.constexpr, LANES: tl.constexpr, form):
    """Rows of several heads, (rows, LANES): where heads start and which of their rows are columns."""
    column = tl.arange(0, LANES)[None, :]
    pointers = heads.start + tl.cast(row, tl.int64) * heads.row + column.to(form.index) * heads.column
    found = tl.load(pointers, mask=inside & (column < WIDTH), other=0.0)
    if form.widened:
        found = found.to(form.total)
    return found


@triton.jit
def _read(head, first, row, column, count, WIDTH: tl.constexpr, LANES: tl.constexpr, BOUND: tl.constexpr, form):
    offsets = row.to(form.index) * head.row + column.to(form.index) * head.column
    pointers = head.start + tl.cast(first, tl.int64) * head.row + offsets
    if BOUND and LANES != WIDTH:
        found = tl.load(pointers, mask=(row < count - first) & (column < WIDTH), other=0.0)
    elif BOUND:
        found = tl.load(pointers, mask=row < count - first, other=0.0)
    elif LANES != WIDTH:
        found = tl.load(pointers, mask=column < WIDTH, other=0.0)
    else:
        found = tl.load(pointers)
    if form.widened:
        found = found.to(form.total)
    return found


@triton.jit
def column_of(first, n, form):
    """The queries of a block, (rows, 1), none past the last."""
    return tl.minimum(first + tl.arange(0, form.rows), n - 1)[:, None]


@triton.jit
def scores(products, place, first, scale, tables, seams, PARTIAL: tl.constexpr, form):
    """Final scores of a tile of keys from its Q · K: −∞ where a partial tile hides the pair or the keys end.

    With a score formula in nats; without one not yet scaled, so that scale and shift are one rounding.
    """
    b, h, i, n, m = place
    s = products
    j = first + tl.arange(0, form.keys)[None, :]
    at = j
    if PARTIAL and not form.even:
        at = tl.minimum(j, m - 1)
    if seams.score_at is not None:
        s = tl.broadcast_to(seams.score_at(s * scale, b, h, i, at, n, m, tables), s.shape)
    if PARTIAL:
        if seams.mask_at is not None:
            s = tl.where(seams.mask_at(b, h, i, at, n, m, tables), s, float("-inf"))
        if not form.even:
            s = tl.where(j < m, s, float("-inf"))
    return s


@triton.jit
def normaliser(lse, position, first, n, unit, form):
    """lse of a head's queries from `first` on in the scores' unit, high + low, (rows,); 0 where nothing is seen."""
    rows = first + tl.arange(0, form.rows)
    x = tl.load(lse + tl.cast(position, tl.int64) * n + rows, mask=rows < n, other=0.0) * (LOG2_E / unit)
    x = tl.where(x == float("-inf"), 0.0, x)
    high = bounded(x, form)
    return high, bounded(tl.where(tl.abs(x) < float("inf"), x - high.to(tl.float64), 0.0), form)


@triton.jit
def weight(s, unit, normaliser):
    """P = 2^((s − lse) · unit) of scores as `scores` has them: near the maximum exact, however large they are."""
    high, low = normaliser
    x = tl.minimum((s - high) - low, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(x * unit)


@triton.jit
def exponents(s, unit, shift):
    """(s − shift) · unit. Near the maximum, as shift, the difference is exact, however large the scores are."""
    return (s - shift[:, None]) * unit


@triton.jit
def _word(number):
    """The 32 bits in a number of `Operands.random`."""
    return (tl.cast(number, tl.int64) >> 1) & 0xFFFFFFFF


@triton.jit
def keep(random, place, first, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Which weights dropout keeps, (ROWS, KEYS): `sightline.dropout`. `first` is a multiple of 4.

    `random` is of `Operands.random`.
    """
    quad = tl.broadcast_to((first // 4 + tl.arange(0, KEYS // 4))[None, :], (ROWS, KEYS // 4))
    none = tl.zeros_like(quad)
    low, high, dropped = _word(random[0]), _word(random[1]), _word(random[2])
    w0, w1, w2, w3 = tl.philox((high << 32) | low, place.b + none, place.h + none, place.i + none, quad)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # word 2 a + c at [.., a, c]
    return tl.reshape(words, (ROWS, KEYS)) > dropped.to(tl.uint32)
