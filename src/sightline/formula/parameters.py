"""Formulas with parameters in place of their tables and numbers, so that formulas of one structure share a kernel.

`window(256)` and `window(300)` differ in one number: (i − j < p₀) ∧ (j − i ≤ 0) is the structure of both. A kernel is
compiled for the structure, and the numbers and tables are arguments of each call.

A template is the formula of a function such as `padding` for an example array. `from_template` puts the caller's array
in place of the example. `structure_of` then looks up the structure of the template, and visits no node of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import is_
from typing import Any, cast

import numpy as np

from ..arrays.operations import is_compiling
from ..caching import cached_property
from .expression import Apply, Constant, Expression, Lookup, Offset, Parameter, intern, walk
from .operators import Kind
from .tables import Table

# Operators whose constant operands stay in the code. The compiler turns a division by a constant into a multiplication,
# and the derivative of a power depends on the exponent.
OPERATORS_WITH_CONSTANTS = ("floor_divide", "remainder", "power")
MAX_STRUCTURES = 1024
EXAMPLE_DTYPES = {"bool": np.bool_, "int": np.int64, "float": np.float64}
CODE_CONSTANTS = (-1, 0, 1, math.inf, -math.inf)  # their values change the form of the code


@dataclass(frozen=True, eq=False)
class TableParameter:
    """The place of a table in the formulas of a `Structure`, whose table number `slot` belongs there."""

    slot: int
    kind: Kind

    def __repr__(self) -> str:
        return f"t{self.slot}"


@dataclass(frozen=True, eq=False)
class Structure:
    """Formulas whose tables and numbers are parameters, and the tables and numbers themselves.

    formulas : formulas with `TableParameter`s and `Parameter`s; equal structures share these objects
    tables : the table of each `TableParameter`, by its slot; the tables of the first formula come first
    numbers : the number of each `Parameter`, by its slot
    """

    formulas: tuple[Expression | None, ...]
    tables: tuple[Table, ...]
    numbers: tuple[float, ...]

    @cached_property
    def key(self) -> tuple[Any, ...] | None:
        """The part of a key of the call cache (`call.call_cache`) that describes this structure.

        The part is None if a table has `batch_axes`, because a cached call cannot broadcast them to its batch axes.
        """
        if any(table.batch_axes is not None for table in self.tables):
            return None
        return *self.formulas, *[table.axes for table in self.tables]

    def first(self, count: int) -> Structure:
        """Return the structure of the first `count` formulas, which keep their parameters.

        A structure of these formulas alone may have other numbers: a number is in the code of all formulas or of none.
        """
        formulas = self.formulas[:count]
        nodes = walk(*[formula for formula in formulas if formula is not None])
        num_tables = len({node.table for node in nodes if isinstance(node, Lookup)})
        num_numbers = len({node for node in nodes if isinstance(node, Parameter)})
        return Structure(formulas, self.tables[:num_tables], self.numbers[:num_numbers])


def structure_of(*formulas: Expression | None) -> Structure:
    """Return the structure of formulas that belong to one call.

    `walk` returns the nodes of a formula of the structure in the same order as those of the given formula.
    """
    given = [(formula, place) for place, formula in enumerate(formulas) if formula is not None]
    if not any(formula.tables for formula, _ in given):
        return _cached_structure(formulas)
    # A model passes one mask to all of its layers. So the structures of a single formula are stored with the formula.
    own, key = (given[0][0].structures, (len(formulas), given[0][1])) if len(given) == 1 else ({}, (0, 0))
    if key not in own:
        own[key] = _structure_of_templates(formulas) or _make_structure(formulas)
    return own[key]


def from_template(write: Callable[[Table], Expression], table: Table) -> Expression:
    """Return the formula `write(table)` with its attribute `template`, whose structure `structure_of` looks up.

    `write` may depend on which axes of the table have length 1, and on no other length. So a table with `batch_axes`
    has no template. `library` calls this function.
    """
    if is_compiling() or table.batch_axes is not None:
        return write(table)
    template = _template(write, table.kind, table.axes, tuple([min(length, 2) for length in table.shape]))
    filled = _replace_table(template, table)
    vars(filled).update(template=template, tables=(table,))
    return filled


@cache
def _template(
    write: Callable[[Table], Expression], kind: Kind, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> Expression:
    """Return the template: `write` of a table of zeros. `shape` has 2 for each axis of more than one entry."""
    return write(Table(np.zeros(shape, EXAMPLE_DTYPES[kind]), axes=axes))


def _replace_table(node: Expression, table: Table) -> Expression:
    """Return a template with this table in place of its only table, which has the same kind and axes."""
    if type(node) is Lookup:
        return Lookup(table, node.arguments)
    arguments = [_replace_table(argument, table) if argument.tables else argument for argument in node.arguments]
    return Apply(cast(Apply, node).operator, tuple(arguments), node.kind)


def _structure_of_templates(formulas: tuple[Expression | None, ...]) -> Structure | None:
    """Return the structure of formulas from that of their templates; None if a formula with tables has no template.

    A formula without tables is its own template. The result is also None if two formulas have the same template,
    because the template's table would stand for two tables.
    """
    templates: list[Expression | None] = []
    tables: dict[int, Table] = {}  # the table of each formula, by the id of its template's table
    for formula in formulas:
        template = formula
        if formula is not None and formula.tables:
            template = formula.template
            if template is None or id(template.tables[0]) in tables:
                return None
            tables[id(template.tables[0])] = formula.tables[0]
        templates.append(template)
    common = _cached_structure(tuple(templates))
    structure = Structure(common.formulas, tuple([tables[id(table)] for table in common.tables]), common.numbers)
    vars(structure)["key"] = common.key
    return structure


def _make_structure(formulas: tuple[Expression | None, ...]) -> Structure:
    """Return the structure of formulas. Nodes are interned, so formulas of one structure become the same objects."""
    nodes = walk(*[formula for formula in formulas if formula is not None])
    kept = _kept_constants(nodes)
    slots: dict[Table, int] = {}
    numbers: list[float] = []
    structure: dict[int, Expression] = {}  # what a node becomes, by the id of the node
    for node in nodes:
        arguments = tuple([structure[id(argument)] for argument in node.arguments])
        if type(node) is Lookup:
            slot = slots.setdefault(node.table, len(slots))
            new = intern(Lookup(cast(Any, _table_parameter(slot, node.kind)), arguments))
        elif type(node) is Apply and not all(map(is_, arguments, node.arguments)):
            new = intern(Apply(node.operator, arguments, node.kind))
        elif isinstance(node, Constant) and id(node) not in kept and _is_argument(node):
            new = intern(Parameter(len(numbers), node.kind))
            numbers.append(node.value)
        else:
            new = node
        structure[id(node)] = new
    built = tuple([None if formula is None else structure[id(formula)] for formula in formulas])
    return Structure(built, tuple(slots), tuple(numbers))


# For formulas without tables, and for templates, whose tables are never freed: the cache keeps all tables alive.
_cached_structure = lru_cache(MAX_STRUCTURES)(_make_structure)


def _kept_constants(nodes: list[Expression]) -> set[int]:
    """Return the ids of table indices and operands of `OPERATORS_WITH_CONSTANTS`: constants among them stay in code."""
    readers = [
        node
        for node in nodes
        if type(node) is Lookup or (type(node) is Apply and node.operator in OPERATORS_WITH_CONSTANTS)
    ]
    return {id(argument) for node in readers for argument in node.arguments}


def _is_argument(constant: Constant) -> bool:
    """True if a constant can be an argument of the kernel: its value does not change the form of the code."""
    return type(constant) is Offset or (constant.kind != "bool" and constant.value not in CODE_CONSTANTS)


_table_parameter = cache(TableParameter)
