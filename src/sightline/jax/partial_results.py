"""Merge attention over disjoint sets of keys, one set after the other, by operations that JAX differentiates.

A sum over the parts p has the factors exp(lse_p − shift), where the shift is the largest lse so far. Neither the shift
nor the factors have gradients: the parts have numbers `unit`, exp(lse_p − lse_p) = 1, whose gradient is that of lse_p.
So the sums are linear in what has a gradient, and a derivative stores no more than the factors: one number for each
query and part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import ParameterError
from ..statistics import Entropy, Lse, Mass, MaxScore, Statistic
from ..statistics.per_query import MaxScoreResult

MERGED = (Lse, Entropy, Mass, MaxScore)


class Part(NamedTuple):
    """The result of attention over one set of keys, as `add` takes it.

    lse : without gradient; −∞ for a query that sees no key of the part
    unit : 1 with the gradient of lse, or 0 for a query that sees no key
    output : times `unit`
    seen : for each statistic its arrays
    """

    lse: Any
    unit: Any
    output: Any
    seen: tuple[Any, ...]


class Sums(NamedTuple):
    """Sums over the parts so far.

    shift : the largest lse, without gradient
    total : Σ exp(lse_p − shift), the sink included
    keys : the same without the sink
    output : Σ exp(lse_p − shift) output_p
    seen : for each statistic its sum, or the largest score and its key
    """

    shift: Any
    total: Any
    keys: Any
    output: Any
    seen: tuple[Any, ...]


def check_statistics(see: Sequence[Statistic]) -> None:
    """Raise ParameterError if a statistic does not follow from the statistics of the parts."""
    for statistic in see:
        if type(statistic) not in MERGED:
            raise ParameterError(
                f"see=[{statistic!r}] of a sequence on several devices",
                "lse(), entropy(), max_score() and mass(condition), without reductions",
                "jnp.mean(result, axis=-2) for a mean over the heads; sightline.attention on the whole sequence for "
                "other statistics",
            )


def start(rows: tuple[int, ...], width: int, dtype: Any, sinks: Any, see: Sequence[Statistic]) -> Sums:
    """Return the sums before the first part. `rows` is the shape of lse; `sinks` broadcast to it, or are None."""
    zeros = jnp.zeros(rows, dtype)
    shift, total = jnp.full(rows, -math.inf, dtype), zeros
    if sinks is not None:
        sinks = sinks.astype(dtype)
        shift, total = zeros + jax.lax.stop_gradient(sinks), zeros + _unit(sinks)
    return Sums(shift, total, zeros, jnp.zeros((*rows, width), dtype), tuple([_start_one(each, zeros) for each in see]))


def _start_one(statistic: Statistic, zeros: Any) -> Any:
    if isinstance(statistic, MaxScore):
        return MaxScoreResult(jnp.full_like(zeros, -math.inf), jnp.full(zeros.shape, -1, int))
    return zeros


def prepare(output: Any, seen: Sequence[Any], see: Sequence[Statistic], first_key: Any, dtype: Any) -> Part:
    """Return the part with this output and these results of [lse(), *see]. `first_key` is the position of its key 0."""
    lse, *others = seen
    unit = _unit(lse)
    output = output.astype(dtype) * unit[..., None]
    arrays: list[Any] = []
    for statistic, own in zip(see, others, strict=True):
        if isinstance(statistic, MaxScore):
            arrays.append(MaxScoreResult(own.score, jnp.where(own.where < 0, -1, own.where + first_key)))
        elif isinstance(statistic, Entropy):  # Σ P S = lse − H, of which `add` takes the shift
            hidden = lse == -math.inf
            arrays.append((own - jnp.where(hidden, 0, lse - jax.lax.stop_gradient(lse))) * unit)
        else:
            arrays.append(own * unit)
    return Part(jax.lax.stop_gradient(lse), unit, output, tuple(arrays))


def _unit(lse: Any) -> Any:
    """Return exp(lse − lse) with the gradient of the first lse; 0 without gradient where lse is −∞."""
    hidden = lse == -math.inf
    shown = jnp.where(hidden, 0, lse)
    return jnp.where(hidden, 0, jnp.exp(shown - jax.lax.stop_gradient(shown)))


def add(sums: Sums, part: Part, see: Sequence[Statistic]) -> Sums:
    """Return the sums with one more part."""
    shift = jnp.maximum(sums.shift, part.lse)
    safe = jnp.where(shift == -math.inf, 0, shift)
    old, new = jnp.exp(sums.shift - safe), jnp.exp(part.lse - safe)
    seen = []
    for statistic, before, own in zip(see, sums.seen, part.seen, strict=True):
        if isinstance(statistic, MaxScore):
            seen.append(_larger(before, own))
        elif isinstance(statistic, Entropy):
            moved = before + _finite(safe - sums.shift) * sums.keys
            seen.append(_weigh(old, moved) + _weigh(new, own + _finite(safe - part.lse) * part.unit))
        else:
            seen.append(_weigh(old, before) + _weigh(new, own))
    return Sums(
        shift,
        old * sums.total + new * part.unit,
        old * sums.keys + new * part.unit,
        _weigh(old[..., None], sums.output) + _weigh(new[..., None], part.output),
        tuple(seen),
    )


def _weigh(factor: Any, array: Any) -> Any:
    """Return the product. A factor of 0 gives 0, even if the array has NaN or ∞."""
    return factor * jnp.where(factor == 0, 0, array)


def _finite(difference: Any) -> Any:
    """Return the difference of two shifts, 0 where one of them is −∞."""
    return jnp.where(jnp.isinf(difference), 0, difference)


def _larger(one: MaxScoreResult, two: MaxScoreResult) -> MaxScoreResult:
    """Return the larger score and its key; of two equal scores, that of the smaller key."""
    nan = jnp.isnan(one.score), jnp.isnan(two.score)
    is_equal = (one.score == two.score) | (nan[0] & nan[1])
    is_first = is_equal & (two.where >= 0) & (two.where < one.where)
    is_new = (two.score > one.score) | (nan[1] & ~nan[0]) | is_first
    return MaxScoreResult(jnp.where(is_new, two.score, one.score), jnp.where(is_new, two.where, one.where))


def finish(sums: Sums, see: Sequence[Statistic]) -> tuple[Any, tuple[Any, ...]]:
    """Return (output, seen) in the dtype of the sums; 0 and −∞ for a query that sees no key and has no sink."""
    is_empty = sums.shift == -math.inf
    total = jnp.where(is_empty, 1, sums.total)
    log_total = jnp.log(total)
    seen: list[Any] = []
    for statistic, own in zip(see, sums.seen, strict=True):
        if isinstance(statistic, Lse):
            seen.append(jnp.where(is_empty, -math.inf, log_total + jnp.where(is_empty, 0, sums.shift)))
        elif isinstance(statistic, Entropy):
            seen.append((own + log_total * sums.keys) / total)
        elif isinstance(statistic, MaxScore):
            seen.append(own)
        else:
            seen.append(own / total)
    return sums.output / total[..., None], tuple(seen)
