"""Dropout's random words on lanes: Philox 4x32-10, as `sightline.dropout` defines it.

Words live in the low halves of 64-bit lanes, so that a product of two words is one multiplication.
"""

from __future__ import annotations

from ...dropout import MULTIPLIERS, ROUNDS, WEYL
from .builder import Code, Value

__all__ = ["words"]

LOW = 0xFFFFFFFF


def words(code: Code, seed: Value, counter: tuple[Value, Value, Value, Value]) -> list[Value]:
    """The four words at a counter of 64-bit lanes or scalars below 2³²."""
    keys = [seed & LOW, seed >> 32]
    x0, x1, x2, x3 = counter
    for _ in range(ROUNDS):
        first, second = (x0 & LOW) * MULTIPLIERS[0], (x2 & LOW) * MULTIPLIERS[1]
        x0, x1, x2, x3 = (second >> 32) ^ x1 ^ keys[0], second, (first >> 32) ^ x3 ^ keys[1], first
        keys = [(key + weyl) & LOW for key, weyl in zip(keys, WEYL, strict=True)]
    return [x & LOW for x in (x0, x1, x2, x3)]
