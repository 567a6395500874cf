"""Bound calls for other lengths and strides: a decoding loop has another number of keys at each step.

The code of a kernel does not depend on the lengths n and m, on strides, or on the lengths of tables. So the call of one
problem can be bound again for arrays with other lengths, without the checks and the planning of a new problem. The new
call always searches for its tile ranges in generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...formula.expression import Constant, Expression, Lookup, Symbol, walk
from ...formula.formula_checks import find_index_ranges
from ..kernels.kernel_spec import KernelSpec
from .arguments import KernelArguments, convert_table, extent_in_bytes, has_unit_stride

if TYPE_CHECKING:
    from .bound_call import BoundCall

MAX_LENGTH = 1 << 20  # the largest n and m of a family; whole numbers of its formulas fit 32 bits up to this length
MAX_INT32 = 2**31 - 1


class CallFamily:
    """The calls that differ from the call of one problem only in n, m, strides and the lengths of tables.

    Parameters
    ----------
    arguments, spec : those of the problem
    bind : function that returns the bound call of other arguments with the same spec
    """

    def __init__(
        self, arguments: KernelArguments, spec: KernelSpec, bind: Callable[[KernelArguments], BoundCall]
    ) -> None:
        self.spec, self.bind_arguments = spec, bind
        self.axes = [table.axes for table in arguments.problem_tables]
        self.tables = [TableForm.of(table) for table in arguments.tables]
        self.extent = arguments.problem.extent
        self.arguments = arguments.without_arrays()

    @classmethod
    def of(
        cls, arguments: KernelArguments, spec: KernelSpec, bind: Callable[[KernelArguments], BoundCall]
    ) -> CallFamily | None:
        """Return the family of a problem's call; None if other lengths may need other code or new checks.

        Whole numbers must fit 32 bits up to `MAX_LENGTH`. An index of a table must be a symbol, or depend on no length.
        """
        B, H, n, m = arguments.problem.extent
        extent = B, H, max(n, MAX_LENGTH), max(m, MAX_LENGTH)
        formulas = [formula for formula in arguments.problem_formulas if formula is not None]
        if spec.needs_int64 or any(spec.clamped) or not all(map(_has_simple_indices, formulas)):
            return None
        if any(find_index_ranges(formula, extent)[0] >= MAX_INT32 for formula in formulas):
            return None
        return cls(arguments, spec, bind)

    def bind(self, query: Any, key: Any, value: Any, tables: Sequence[Any]) -> BoundCall | None:
        """Return the bound call of arrays with other lengths; None if they are no member of the family.

        The arrays have the same batch and head axes as those of the problem.
        """
        B, H, _, _ = self.extent
        extent = B, H, query.shape[-2], key.shape[-2]
        if not (0 < extent[2] <= MAX_LENGTH and 0 < extent[3] <= MAX_LENGTH):
            return None
        lengths = dict(zip("bhij", extent, strict=True))
        tables = [convert_table(table) for table in tables]
        for table, axes, known in zip(tables, self.axes, self.tables, strict=True):
            spans = [lengths[name] if name else 0 for name in axes or ()]
            if any(span and length not in (1, span) for length, span in zip(table.shape, spans, strict=False)):
                return None
            if extent_in_bytes(table) >= MAX_INT32 or not known.fits(table):
                return None
        arguments = self.arguments.with_arrays(query, key, value, tables)
        if not self.are_indices_inside(arguments):
            return None
        return self.bind_arguments(arguments)

    def are_indices_inside(self, arguments: KernelArguments) -> bool:
        """True if each index of the formulas stays inside its table.

        The range of an index that is neither a symbol nor a constant depends on no length: `_has_simple_indices`. The
        index stayed inside the first table of its place, so it stays inside each table that is as long. Where its range
        depends on entries or numbers that have changed, the search for tile ranges checks it; see `tile_search`.
        """
        B, H, n, m = arguments.problem.extent
        largest = {"b": B - 1, "h": H - 1, "i": n - 1, "j": m - 1, "n": n, "m": m}
        for formula in arguments.formulas:
            for node in walk(formula) if formula is not None else ():
                if not isinstance(node, Lookup):
                    continue
                slot = node.table.slot  # type: ignore[attr-defined]
                lengths = zip(arguments.tables[slot].shape, self.tables[slot].shape, strict=True)
                for index, (length, known_length) in zip(node.arguments, lengths, strict=True):
                    if isinstance(index, Symbol):
                        is_inside = largest[index.name] < length
                    elif isinstance(index, Constant):
                        is_inside = index.value < length
                    else:
                        is_inside = known_length <= length
                    if not is_inside:
                        return False
        return True


@dataclass(frozen=True)
class TableForm:
    """What the kernel of a family knows of a table, and its shape in the problem of the family."""

    dtype: str
    shape: tuple[int, ...]
    has_adjacent_entries: bool  # see `KernelSpec.tile_lookups`

    @classmethod
    def of(cls, table: Any) -> TableForm:
        return cls(str(table.dtype), table.shape, has_unit_stride(table))

    def fits(self, table: Any) -> bool:
        """True if the kernel can read a table, which may have other lengths and strides."""
        other = TableForm.of(table)
        return self.dtype == other.dtype and self.has_adjacent_entries == other.has_adjacent_entries


def _has_simple_indices(formula: Expression) -> bool:
    """True if each index of a table is a symbol, a constant, or free of i, j, n and m."""
    return all(
        isinstance(index, Symbol | Constant) or index.free_symbols.isdisjoint("ijnm")
        for node in walk(formula)
        if isinstance(node, Lookup)
        for index in node.arguments
    )
