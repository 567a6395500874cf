"""The random words of dropout, on vectors: Philox 4x32-10, as in `sightline.reference.dropout`.

A word is in the low half of a 64-bit lane, so that the product of two words is one multiplication.
"""

from __future__ import annotations

from ...reference.dropout import MULTIPLIERS, ROUNDS, WEYL
from .builder import Builder
from .values import Value

LOW_32_BITS = 0xFFFFFFFF


def random_words(builder: Builder, seed: Value, counter: tuple[Value, Value, Value, Value]) -> list[Value]:
    """Return the four random words of a counter. Its parts are 64-bit scalars or vectors of numbers below 2³²."""
    keys = [seed & LOW_32_BITS, seed >> 32]
    x0, x1, x2, x3 = counter
    for _ in range(ROUNDS):
        first, second = (x0 & LOW_32_BITS) * MULTIPLIERS[0], (x2 & LOW_32_BITS) * MULTIPLIERS[1]
        x0, x1, x2, x3 = (second >> 32) ^ x1 ^ keys[0], second, (first >> 32) ^ x3 ^ keys[1], first
        keys = [(key + weyl) & LOW_32_BITS for key, weyl in zip(keys, WEYL, strict=True)]
    return [x & LOW_32_BITS for x in (x0, x1, x2, x3)]
