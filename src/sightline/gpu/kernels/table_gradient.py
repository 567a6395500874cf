"""What tables of the score gain: each entry Σ dS · d score / d entry over the pairs that read it, bit for bit again.

The generated `table_gradients_at` gives for every lookup d score / d entry and which entry a pair reads. A lookup has a kind:

    "pair"     its entries are a pair's own, as in t[h, i, j]: the program of the pair adds to them where they lie
    "query", "key", "head"     the entry is the same along a row, a column or a whole tile: summed there first
    "any"      anything else, as in t[h, i − j]

All but the first may be read by pairs of several programs, whose order nobody knows, so they are added as whole
numbers, whose sums do not depend on it: an entry has a slot for every 8 of a float32's exponents, and what is added to
it is the significand, shifted to the slot's unit. Within float32's range nothing is rounded, and 2³¹ additions fit
(Demmel and Nguyen, "Fast reproducible floating-point summation", 2013, have slots for another end). One slot more
counts what is not finite; shares of float64 beyond float32's range count as that.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["FIRST_SLOT_EXPONENT", "MAX_ADDITIONS", "SLOTS", "SLOT_BITS", "add"]

MAX_ADDITIONS = 2**31  # of one entry that its slots hold
SLOT_BITS = 8
SLOTS = tl.constexpr(33)
FIRST_SLOT_EXPONENT = -150  # of the first slot, a power of 2; the k-th's is 2^(8 k − 150)


@triton.jit
def add(ds, s, pairs, tables, sums, table_gradients_at, KINDS: tl.constexpr):
    """Add a tile's shares: `ds` is the gradient of the final scores, 0 at hidden pairs, `s` what the score reads."""
    b, h, i, j, n, m = pairs
    found = table_gradients_at(s, b, h, i, j, n, m, tables)
    for k in tl.static_range(len(KINDS)):
        contribution = tl.where(ds == 0, 0.0, ds * found[k][0])
        if KINDS[k] == "pair":
            location = sums[k] + tl.broadcast_to(tl.cast(found[k][1], tl.int64), contribution.shape)
            seen = contribution != 0
            tl.store(location, tl.load(location, mask=seen, other=0.0) + contribution, mask=seen)
        elif KINDS[k] == "query":
            add_exactly(sums[k], found[k][1], tl.sum(contribution, 1)[:, None])
        elif KINDS[k] == "key":
            add_exactly(sums[k], found[k][1], tl.sum(contribution, 0)[None, :])
        elif KINDS[k] == "head":
            add_exactly(sums[k], found[k][1], tl.sum(tl.sum(contribution, 1), 0))
        else:
            add_exactly(sums[k], tl.broadcast_to(found[k][1], contribution.shape), contribution)


@triton.jit
def add_exactly(slots, location, contribution):
    """Add shares to the slots of their entries; float64 in three parts, those beyond float32's range as ∞."""
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
        is_nonfinite = exponent == 255  # NaN or ∞
        slot_pointer = slots + tl.cast(location, tl.int64) * SLOTS + tl.where(is_nonfinite, SLOTS - 1, slot)
        tl.atomic_add(slot_pointer, tl.where(is_nonfinite, 1, number), mask=part != 0, sem="relaxed")
