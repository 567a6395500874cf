"""Device functions that the kernels share: rows of a matrix, a tile's scores and weights, what dropout keeps.

An array is (pointer, lengths of the leading axes, their strides, stride of a head, of a row, of a column), strides in
entries; see `operands.operand`. `place` is (b, h, i, n, m): b and h of the kernel's head (h may be a column of heads),
i a column (rows, 1) of queries, none past the last. `form` is a `form.Form`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["bounded", "exponents", "gathered", "head_of", "keep", "keys_of", "number", "rows_of", "scores"]

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def number(x, dtype: tl.constexpr):
    """A number of the call in that type, without a detour through a narrower one."""
    return tl.full((), x, dtype)


@triton.jit
def bounded(x, form: tl.constexpr):
    """A float64 in the type of scores; where finite, at most their largest number in size."""
    if form.total == tl.float32:
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -LARGEST), LARGEST), x)
    return x.to(form.total)


@triton.jit
def head_of(array, b, head):
    """Where a head of an array starts; `head` may be a block of heads."""
    lengths, strides = array[1], array[2]
    offset = tl.cast(head, tl.int64) * array[3]
    for k in tl.static_range(len(lengths)):
        offset += tl.cast(b % lengths[len(lengths) - 1 - k], tl.int64) * strides[len(lengths) - 1 - k]
        b = b // lengths[len(lengths) - 1 - k]
    return array[0] + offset


@triton.jit
def rows_of(
    start,
    array,
    first,
    ROWS: tl.constexpr,
    count,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BOUND: tl.constexpr,
    form: tl.constexpr,
):
    """Rows first ... first + ROWS − 1 of a head, (ROWS, LANES): 0 past the width and, where BOUND, from row `count`."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    return _read(start, array, first, row, column, count, WIDTH, LANES, BOUND, form)


@triton.jit
def gathered(start, array, row, inside, WIDTH: tl.constexpr, LANES: tl.constexpr, form: tl.constexpr):
    """Rows of several heads, (rows, LANES): `start` and `row` are columns, of where heads start and of their rows."""
    column = tl.arange(0, LANES)[None, :]
    pointers = start + tl.cast(row, tl.int64) * array[4] + column.to(form.index) * array[5]
    found = tl.load(pointers, mask=inside & (column < WIDTH), other=0.0)
    if form.widened:
        found = found.to(form.total)
    return found


@triton.jit
def keys_of(
    start,
    array,
    first,
    ROWS: tl.constexpr,
    count,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BOUND: tl.constexpr,
    form: tl.constexpr,
):
    """The same rows as columns, (LANES, ROWS)."""
    row, column = tl.arange(0, ROWS)[None, :], tl.arange(0, LANES)[:, None]
    return _read(start, array, first, row, column, count, WIDTH, LANES, BOUND, form)


@triton.jit
def _read(
    start,
    array,
    first,
    row,
    column,
    count,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BOUND: tl.constexpr,
    form: tl.constexpr,
):
    offsets = row.to(form.index) * array[4] + column.to(form.index) * array[5]
    pointers = start + tl.cast(first, tl.int64) * array[4] + offsets
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
def scores(
    products,
    place,
    first,
    scale,
    tables,
    mask_at: tl.constexpr,
    score_at: tl.constexpr,
    PARTIAL: tl.constexpr,
    form: tl.constexpr,
):
    """Final scores of a tile of keys from its Q · K: −∞ where a partial tile hides the pair or the keys end.

    With a score formula in nats; without one not yet scaled, so that scale and shift are one rounding.
    """
    b, h, i, n, m = place
    s = products
    j = first + tl.arange(0, form.keys)[None, :]
    at = j
    if PARTIAL and not form.even:
        at = tl.minimum(j, m - 1)
    if score_at is not None:
        s = tl.broadcast_to(score_at(s * scale, b, h, i, at, n, m, tables), s.shape)
    if PARTIAL:
        if mask_at is not None:
            s = tl.where(mask_at(b, h, i, at, n, m, tables), s, float("-inf"))
        if not form.even:
            s = tl.where(j < m, s, float("-inf"))
    return s


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
    b, h, i, _, _ = place
    quad = tl.broadcast_to((first // 4 + tl.arange(0, KEYS // 4))[None, :], (ROWS, KEYS // 4))
    none = tl.zeros_like(quad)
    low, high, dropped = _word(random[0]), _word(random[1]), _word(random[2])
    w0, w1, w2, w3 = tl.philox((high << 32) | low, b + none, h + none, i + none, quad)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # word 2 a + c at [.., a, c]
    return tl.reshape(words, (ROWS, KEYS)) > dropped.to(tl.uint32)
