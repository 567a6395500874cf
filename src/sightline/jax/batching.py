"""`jax.vmap` of attention: the mapped axis becomes a leading batch axis, so that one call serves all elements.

In the formulas, b counts the batches of one element. In the joined call, b counts those of all elements: b is replaced
by b mod B, where B is the number of batches of one element, and a mapped table is read at ⌊b / B⌋ in a new first axis.
The elements are computed one after another if a formula cannot express the call: with dropout, with mapped sinks, with
gradients of sinks, and with means over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from ..call_text import CallText
from ..formula.expression import SYMBOLS, Expression, Lookup, as_expression, intern, walk
from ..formula.tables import Table
from ..statistics import Mean
from .options import CallOptions

__all__ = ["batch"]


def batch(
    primitive: Primitive, inputs: Sequence[Any], axes: Sequence[int | None], options: CallOptions, **more: Any
) -> tuple[list[Any], list[int]]:
    """Return the results of a mapped call, and their mapped axes.

    Parameters
    ----------
    inputs : the arguments of the primitive
    axes : the mapped axis of each; None for an argument that is the same in every element
    """
    size = next(x.shape[axis] for x, axis in zip(inputs, axes, strict=True) if axis is not None)
    given = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(inputs, axes, strict=True)]
    is_mapped = [axis is not None for axis in axes]
    tables = options.table_places
    others = range(tables.stop, options.num_inputs)  # sinks and seed
    wanted = more.get("wanted", ())
    element = [jax.ShapeDtypeStruct(x.shape[one:], x.dtype) for x, one in zip(given, is_mapped, strict=True)]
    has_batch_means = any(isinstance(x, Mean) and x.over_batch for x in options.problem(element).see)
    if any(is_mapped[k] or k in wanted for k in others) or options.text.dropout or has_batch_means:
        results = _compute_in_turn(primitive, given, is_mapped, options=options, **more)
        return results, [0] * len(results)
    for k in range(len(given)):
        # `vmap` returns the table's gradient of every element, so the joined call needs one table for each element
        if not is_mapped[k] and k not in others and (k not in tables or k in wanted):
            given[k], is_mapped[k] = jnp.broadcast_to(given[k], (size, *given[k].shape)), True
    joined = _join_formulas(options, element, [is_mapped[k] for k in tables], given)
    results = primitive.bind(*given, options=joined, **more)
    return results, [0] * len(results)


def _compute_in_turn(primitive: Primitive, given: list[Any], is_mapped: list[bool], /, **options: Any) -> list[Any]:
    """Return the results of a call for each element."""
    mapped = [x for x, one in zip(given, is_mapped, strict=True) if one]

    def compute(element: list[Any]) -> list[Any]:
        rest = iter(element)
        results: list[Any] = primitive.bind(
            *[next(rest) if one else x for x, one in zip(given, is_mapped, strict=True)], **options
        )
        return results

    results: list[Any] = jax.lax.map(compute, mapped)
    return results


def _join_formulas(
    options: CallOptions, inputs: Sequence[Any], is_mapped: Sequence[bool], joined: Sequence[Any]
) -> CallOptions:
    """Return the options of the joined call. `inputs` have the types of one element, and `joined` those of the call."""
    batches = options.problem(inputs).B
    old, new = options.tables(inputs), options.tables(joined)
    place = {id(array): k for k, array in enumerate(old)}
    tables: dict[int, Table] = {}

    def read(table: Table, indices: tuple[Expression, ...]) -> Expression:
        """Return the read of the joined table for a read of the table of one element."""
        k = place[id(table.array)]
        if k not in tables:
            axes = None if table.axes is None else tuple([None if axis == "b" else axis for axis in table.axes])
            tables[k] = Table(new[k], (None, *axes) if axes is not None and is_mapped[k] else axes)
        element = (SYMBOLS["b"] // batches,) if is_mapped[k] else ()
        return intern(Lookup(tables[k], (*element, *indices)))

    def rewrite(formula: Expression) -> Expression:
        built: dict[int, Expression] = {}
        for node in walk(formula):
            arguments = tuple([built[id(argument)] for argument in node.arguments])
            if node is SYMBOLS["b"]:
                built[id(node)] = as_expression(node % batches if batches > 1 else 0)
            elif isinstance(node, Lookup):
                built[id(node)] = read(node.table, arguments)
            else:
                built[id(node)] = node.rebuild(arguments, {})
        return built[id(formula)]

    mask, score = (None if formula is None else rewrite(formula) for formula in options.text.formulas(old))
    see = tuple([statistic.map_formulas(rewrite) for statistic in options.text.statistics(old)])
    text, found = CallText.of(replace(options.problem(joined), mask=mask, score=score, see=see))
    if [id(table.array) for table in found] != list(map(id, new)):
        raise RuntimeError("the joined formulas read their tables in another order")
    return replace(options, text=text)
