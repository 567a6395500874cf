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
from functools import cache
from typing import Any, cast

import numpy as np

from ..arrays.caching import cached_property, store_entry
from ..arrays.operations import is_traced
from .expression import Apply, Constant, Expression, Indices, Lookup, Offset, Parameter, intern, walk
from .operators import Kind
from .tables import Table

# Operators whose constant operands stay in the code. The compiler turns a division by a constant into a multiplication,
# and the derivative of a power depends on the exponent.
OPERATORS_WITH_CONSTANTS = ("floor_divide", "remainder", "power")
MAX_STRUCTURES = 1024  # the oldest structure is dropped beyond this number
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
    structure = _STRUCTURES.get(formulas)
    if structure is not None:
        return structure
    # A model passes one mask to all of its layers. So the structures of a single formula are stored with the formula.
    present = [(formula, place) for place, formula in enumerate(formulas) if formula is not None]
    stored, key = (present[0][0].structures, (len(formulas), present[0][1])) if len(present) == 1 else ({}, (0, 0))
    if key in stored:
        return stored[key]
    stored[key] = structure = _structure_of_templates(formulas) or _make_structure(formulas)
    if not structure.tables:  # `_STRUCTURES` would keep the tables alive
        store_entry(_STRUCTURES, formulas, structure, MAX_STRUCTURES)
    return structure


def from_template(write: Callable[[Table], Expression], table: Table) -> Expression:
    """Return the formula `write(table)` with its attribute `template`, whose structure `structure_of` looks up.

    `write` may depend on which axes of the table have length 1, and on no other length. So a table with `batch_axes`
    has no template. `library` calls this function.
    """
    if is_traced(table.array) or table.batch_axes is not None:
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

    A formula without tables is its own template. The result is also None if no formula has tables, or if two formulas
    have the same template, because the template's table would stand for two tables.
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
    if not tables:
        return None
    key = tuple(templates)
    common = _STRUCTURES.get(key)
    if common is None:
        common = _make_structure(key)
        store_entry(_STRUCTURES, key, common, MAX_STRUCTURES)  # its tables are those of templates, never freed
    structure = Structure(common.formulas, tuple([tables[id(table)] for table in common.tables]), common.numbers)
    vars(structure)["key"] = common.key
    return structure


def _make_structure(formulas: tuple[Expression | None, ...]) -> Structure:
    """Return the structure of formulas. Formulas with the same signature have the same formulas in their structure.

    The signature has one entry for each node: what the node is, and the positions of its arguments in `walk`.
    """
    nodes = walk(*[formula for formula in formulas if formula is not None])
    index: dict[int, int] = {}
    slots: dict[int, int] = {}
    tables: list[Table] = []
    numbers: list[float] = []
    signature: list[Any] = []
    kept = _kept_constants(nodes)
    for node in nodes:
        kind = type(node)
        if kind is Apply:
            signature.append((node.operator, *[index[id(argument)] for argument in node.arguments]))  # type: ignore[attr-defined]
        elif kind is Lookup:
            table = node.table  # type: ignore[attr-defined]
            slot = slots.setdefault(id(table), len(tables))
            if slot == len(tables):
                tables.append(table)
            signature.append((slot, table.kind, *[index[id(argument)] for argument in node.arguments]))
        elif isinstance(node, Constant) and id(node) not in kept and _is_argument(node):
            signature.append(node.kind)
            numbers.append(node.value)
        else:
            signature.append(node)
        index[id(node)] = len(index)
    roots = [None if formula is None else index[id(formula)] for formula in formulas]
    key = (*signature, *roots)
    built = _BUILT.get(key)
    if built is None:
        built = _build(formulas, kept)
        store_entry(_BUILT, key, built, MAX_STRUCTURES)
    return Structure(built, tuple(tables), tuple(numbers))


def _kept_constants(nodes: list[Expression]) -> set[int]:
    """Return the ids of table indices and operands of `OPERATORS_WITH_CONSTANTS`: constants among them stay in code."""
    readers = [
        node
        for node in nodes
        if type(node) is Lookup or (type(node) is Apply and node.operator in OPERATORS_WITH_CONSTANTS)
    ]
    return {id(argument) for node in readers for argument in node.arguments}


def _build(formulas: tuple[Expression | None, ...], kept: set[int]) -> tuple[Expression | None, ...]:
    """Return the formulas with parameters in place of tables and numbers."""
    slots: dict[int, int] = {}
    numbers: dict[int, int] = {}

    def lookup(table: Table, indices: Indices) -> Expression:
        slot = slots.setdefault(id(table), len(slots))
        return intern(Lookup(cast(Any, _table_parameter(slot, table.kind)), indices))

    def constant(node: Constant) -> Expression:
        if id(node) in kept or not _is_argument(node):
            return node
        return intern(Parameter(numbers.setdefault(id(node), len(numbers)), node.kind))

    return tuple([None if formula is None else formula.rewrite({}, lookup, constant) for formula in formulas])


_STRUCTURES: dict[tuple[Expression | None, ...], Structure] = {}  # formulas are interned, so they are keys
_BUILT: dict[tuple[Any, ...], tuple[Expression | None, ...]] = {}  # the formulas of structures by their signature


def _is_argument(constant: Constant) -> bool:
    """True if a constant can be an argument of the kernel: its value does not change the form of the code."""
    return type(constant) is Offset or (constant.kind != "bool" and constant.value not in CODE_CONSTANTS)


_table_parameter = cache(TableParameter)
