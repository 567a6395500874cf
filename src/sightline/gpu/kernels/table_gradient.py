"""Gradients of the tables that a score reads: Σ dS · d score / d entry over the pairs that read the entry.

Equal inputs give equal bits. The generated function `table_gradients_at` returns, for every lookup in a table,
d score / d entry and the index of the entry that a pair reads. A lookup has one of these kinds:

    "pair"     each pair of a head reads its own entry, as in t[h, i, j]: the program of the pair adds to it directly
    "query", "key", "head"     all pairs of a tile's row, of its column or of the whole tile read one entry: the kernel
               sums their contributions before it adds to the entry
    "any"      any other lookup, as in t[h, i − j]

Except for "pair", several programs may add to an entry, in an unknown order. They add integers, whose sum does not
depend on the order: an entry has one 64-bit slot for every 8 exponents of float32. A summand adds its significand,
shifted to the unit of the slot. No summand within the range of float32 is rounded, and 2³¹ summands do
not overflow a slot. One further slot of each entry counts summands that are NaN, infinite, or too large for float32.
(Compare Demmel and Nguyen, "Fast reproducible floating-point summation", 2013.)
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_ADDITIONS = 2**31  # most summands of one entry: with so many the entry's slots cannot overflow
SLOT_BITS = 8  # number of exponents of float32 that share a slot
SLOTS = tl.constexpr(33)  # number of slots of an entry: 32 for sums, and one that counts summands that are not finite
FIRST_SLOT_EXPONENT = -150  # the unit of slot k is 2^(8 k − 150)


@triton.jit
def add(ds, s, pairs, tables, sums, table_gradients_at, KINDS: tl.constexpr):
    """Add the contributions of a tile to the table gradients in `sums`.

    Parameters
    ----------
    ds : the gradient of the final scores, 0 at hidden pairs
    s : the scaled scores that the score formula reads
    sums, KINDS : for each lookup the array to which the kernel adds, and the kind
    """
    table_gradients = table_gradients_at(s, *pairs, tables)
    for k in tl.static_range(len(KINDS)):
        contribution = tl.where(ds == 0, 0.0, ds * table_gradients[k][0])
        if KINDS[k] == "pair":
            pointers = sums[k] + tl.broadcast_to(tl.cast(table_gradients[k][1], tl.int64), contribution.shape)
            seen = contribution != 0
            tl.store(pointers, tl.load(pointers, mask=seen, other=0.0) + contribution, mask=seen)
        elif KINDS[k] == "query":
            add_exactly(sums[k], table_gradients[k][1], tl.sum(contribution, 1)[:, None])
        elif KINDS[k] == "key":
            add_exactly(sums[k], table_gradients[k][1], tl.sum(contribution, 0)[None, :])
        elif KINDS[k] == "head":
            add_exactly(sums[k], table_gradients[k][1], tl.sum(tl.sum(contribution, 1), 0))
        else:
            add_exactly(sums[k], tl.broadcast_to(table_gradients[k][1], contribution.shape), contribution)


@triton.jit
def add_exactly(slots, entry, contribution):
    """Add each number of `contribution` to the slots of the table entry whose index is `entry`.

    A float64 number is added as three float32 numbers, and as ∞ if it is beyond the range of float32.
    """
    for _ in tl.static_range(3 if contribution.dtype == tl.float64 else 1):
        part = contribution.to(tl.float32)
        contribution -= part.to(contribution.dtype)
        bits = part.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 255
        significand = tl.where(exponent == 0, bits & 0x7FFFFF, (bits & 0x7FFFFF) | 0x800000).to(tl.int64)
        exponent = tl.maximum(exponent, 1)
        number = significand << (exponent & 7).to(tl.int64)
        number = tl.where(bits < 0, -number, number)
        slot = exponent >> 3
        is_nonfinite = exponent == 255
        slot_pointer = slots + tl.cast(entry, tl.int64) * SLOTS + tl.where(is_nonfinite, SLOTS - 1, slot)
        tl.atomic_add(slot_pointer, tl.where(is_nonfinite, 1, number), mask=part != 0, sem="relaxed")
