"""`jax.vmap` of attention: the mapped axis becomes a leading batch axis, so that one call serves all its elements.

`join` rewrites the formulas for the joined call. In four cases the elements of the mapped axis are computed one
after another: with dropout, with mapped sinks, with gradients of sinks, and with means over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from ..call.join import join_spec
from ..statistics import Mean
from .options import CallOptions


def batch(
    primitive: Primitive, inputs: Sequence[Any], axes: Sequence[int | None], options: CallOptions, **more: Any
) -> tuple[list[Any], list[int]]:
    """Return the results of a mapped call, and the mapped axis of each result, which is 0.

    Parameters
    ----------
    inputs : the arguments of the primitive
    axes : the mapped axis of each argument; None for an argument that is the same in every element
    options, more : the parameters of the primitive; those of a derivative have `wanted`, the indices of arguments
    """
    size = next(x.shape[axis] for x, axis in zip(inputs, axes, strict=True) if axis is not None)
    given = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(inputs, axes, strict=True)]
    is_mapped = [axis is not None for axis in axes]
    spec = options.spec
    tables = spec.table_places
    others = range(tables.stop, spec.num_arrays)  # sinks and seed
    wanted = more.get("wanted", ())
    element = [jax.ShapeDtypeStruct(x.shape[one:], x.dtype) for x, one in zip(given, is_mapped, strict=True)]
    old = options.examples(element)
    has_batch_means = any(isinstance(x, Mean) and x.over_batch for x in spec.statistics(old.tables))
    if any(is_mapped[k] or k in wanted for k in others) or spec.has_seed or has_batch_means:
        results = _compute_in_turn(primitive, given, is_mapped, options=options, **more)
        return results, [0] * len(results)
    for k in range(len(given)):
        # `vmap` returns a table's gradient for each element, so the joined call then needs a table for each element
        if not is_mapped[k] and k not in others and (k not in tables or k in wanted):
            given[k], is_mapped[k] = jnp.broadcast_to(given[k], (size, *given[k].shape)), True
    joined = join_spec(spec, old, options.examples(given).tables, [is_mapped[k] for k in tables])
    results = primitive.bind(*given, options=replace(options, spec=joined), **more)
    return results, [0] * len(results)


def _compute_in_turn(primitive: Primitive, given: list[Any], is_mapped: list[bool], /, **options: Any) -> list[Any]:
    """Return the results of the primitive, computed for one element of the mapped axis after another and stacked."""
    mapped = [x for x, one in zip(given, is_mapped, strict=True) if one]

    def compute(element: list[Any]) -> list[Any]:
        rest = iter(element)
        results: list[Any] = primitive.bind(
            *[next(rest) if one else x for x, one in zip(given, is_mapped, strict=True)], **options
        )
        return results

    results: list[Any] = jax.lax.map(compute, mapped)
    return results
