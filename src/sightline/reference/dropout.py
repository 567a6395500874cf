"""Dropout by counter: one seed drops the same weights on every backend, for any tiling, in forward and backward passes.

The random numbers come from Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
Philox's own key is the 64-bit seed, and its counter is (b, h, i, ⌊j / 4⌋), where `Problem.dropout_origin` is added to
the positions of the problem. Each counter gives four 32-bit words, one for each of four neighbouring key positions j. A
weight is dropped if word j mod 4, divided by 2³², is less than p. `keep_factor` does this for a tile of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..arrays.operations import resolve_dtype

if TYPE_CHECKING:
    from ..call.problem import Problem

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW_32_BITS = 0xFFFFFFFF


def philox(seed: int, counter: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Return the four 32-bit words that Philox 4x32-10 makes of a seed and each counter.

    The counter and the result are four int64 arrays (NumPy or torch) of words below 2³².
    """
    key = seed & LOW_32_BITS, seed >> 32 & LOW_32_BITS
    return philox_rounds(key, counter, _multiply_wide, lambda word, weyl: (word + weyl) & LOW_32_BITS)


def philox_rounds(
    key: tuple[Any, Any],
    counter: Sequence[Any],
    multiply_wide: Callable[[int, Any], tuple[Any, Any]],
    add: Callable[[Any, int], Any],
) -> tuple[Any, Any, Any, Any]:
    """Return the words of Philox 4x32-10 for any type of word that has the operator ^.

    Parameters
    ----------
    key : the low and the high word of the seed
    counter : four words
    multiply_wide : (constant, word) → (high word, low word) of their product
    add : (word, constant) → their sum modulo 2³²
    """
    x0, x1, x2, x3 = counter
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = multiply_wide(MULTIPLIERS[0], x0), multiply_wide(MULTIPLIERS[1], x2)
        x0, x1, x2, x3 = high1 ^ x1 ^ key[0], low1, high0 ^ x3 ^ key[1], low0
        key = add(key[0], WEYL[0]), add(key[1], WEYL[1])
    return x0, x1, x2, x3


def threshold(problem: Problem) -> int:
    """Return p · 2³² for the dropout probability p. A weight is dropped if its random word is below this number."""
    return round(problem.dropout * 2**32)


def _multiply_wide(constant: int, x: Any) -> tuple[Any, Any]:
    """Return the high and low 32-bit words of constant · x.

    The constant is split into 16-bit halves so that int64 never overflows.
    """
    low_part = (constant & 0xFFFF) * x
    high_part = (constant >> 16) * x + (low_part >> 16)
    return high_part >> 16, (high_part << 16 | low_part & 0xFFFF) & LOW_32_BITS


def keep_factor(problem: Problem, xp: Any, rows: slice, columns: slice, dtype: Any = None) -> Any:
    """Return the dropout factors of a tile's weights: 0 for a weight that is dropped, else 1/(1 − p).

    The result is an array (*batch_shape, H, rows, columns) of `dtype`, by default the accumulator's dtype. If p = 0 it
    is the number 1.0, and if p = 1 it is the number 0.0.
    """
    p = problem.dropout
    if p == 0:
        return 1.0
    if p == 1:
        return 0.0
    first, last = columns.start // 4, -(-columns.stop // 4)
    b, h, i, quad = problem.positions(xp, rows, slice(first, last))
    first_b, first_h, first_i, first_j = problem.dropout_origin
    counter = (b + first_b, h + first_h, i + first_i, quad + first_j // 4)
    words = xp.stack(xp.broadcast_arrays(*philox(problem.seed, counter)), axis=-1)
    words = xp.reshape(words, (*words.shape[:-2], 4 * (last - first)))
    is_kept = words[..., columns.start - 4 * first : columns.stop - 4 * first] >= threshold(problem)
    return xp.astype(is_kept, resolve_dtype(xp, problem.accumulator) if dtype is None else dtype) * (1 / (1 - p))
