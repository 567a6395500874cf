"""Bound calls (calls prepared for repetition) for other lengths: a decoding loop has more keys at each step.

The code of a kernel does not depend on the lengths n and m, on strides, or on the lengths of tables. So the call of one
problem can be bound again for arrays with other lengths, without the checks and the planning of a new problem. The new
call always searches for its tile ranges in generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...formula.expression import Lookup, walk
from ...formula.formula_checks import find_index_ranges
from ...formula.interval_arithmetic import compute_intervals
from ...formula.tables import Table
from ...formula.tile_ranges import make_box
from ..kernels.tile_search import has_arguments
from .arguments import KernelArguments, convert_table, extent_in_bytes, has_unit_stride

if TYPE_CHECKING:
    from .bound_call import BoundCall

MAX_LENGTH = 1 << 20  # the largest n and m of a family; whole numbers of its formulas fit 32 bits up to this length
MAX_INT32 = 2**31 - 1


class CallFamily:
    """The calls that differ from the call of one problem only in n, m, strides and the lengths of tables.

    arguments : the kernel arguments of the problem
    bind : function that returns the bound call of other arguments with the same spec
    """

    def __init__(self, arguments: KernelArguments, bind: Callable[[KernelArguments], BoundCall]) -> None:
        self.bind_arguments = bind
        self.axes = [table.axes for table in arguments.problem_tables]
        self.table_forms = [_form(table) for table in arguments.tables]
        self.extent = arguments.problem.extent
        self.arguments = arguments.without_arrays()

    @classmethod
    def of(cls, arguments: KernelArguments, bind: Callable[[KernelArguments], BoundCall]) -> CallFamily | None:
        """Return the family of a problem's call; None if other lengths may need other code or new checks.

        The integers in formulas must fit 32 bits for lengths up to `MAX_LENGTH`.
        """
        B, H, n, m = arguments.problem.extent
        extent = B, H, max(n, MAX_LENGTH), max(m, MAX_LENGTH)
        formulas = [formula for formula in arguments.problem_formulas if formula is not None]
        if arguments.spec.needs_int64 or any(arguments.spec.clamped):
            return None
        if any(find_index_ranges(formula, extent)[0] >= MAX_INT32 for formula in formulas):
            return None
        return cls(arguments, bind)

    def bind(self, query: Any, key: Any, value: Any, tables: Sequence[Any]) -> BoundCall | None:
        """Return the bound call for arrays with other lengths; None if the family does not contain this call.

        The arrays have the same batch and head axes as the arrays of the problem.
        """
        B, H, _, _ = self.extent
        extent = B, H, query.shape[-2], key.shape[-2]
        if not (0 < extent[2] <= MAX_LENGTH and 0 < extent[3] <= MAX_LENGTH):
            return None
        spans = dict(zip("bhij", extent, strict=True))
        tables = [convert_table(table) for table in tables]
        for table, axes, known in zip(tables, self.axes, self.table_forms, strict=True):
            lengths = zip(axes or (), table.shape, strict=False)
            if any(axis and not Table.fits_axis(axis, length, spans[axis[0]]) for axis, length in lengths):
                return None
            if extent_in_bytes(table) >= MAX_INT32 or _form(table) != known:
                return None
        arguments = self.arguments.with_arrays(query, key, value, tables)
        if not self.are_indices_inside(arguments):
            return None
        return self.bind_arguments(arguments)

    def are_indices_inside(self, arguments: KernelArguments) -> bool:
        """True if each index of the formulas stays inside its table.

        An index that depends on table entries or numbers is not checked here, but in `kernels.tile_search`.
        """
        box = make_box(arguments.problem.extent)
        for formula in arguments.formulas:
            for node in walk(formula) if formula is not None else ():
                if not isinstance(node, Lookup):
                    continue
                lengths = arguments.tables[node.table.slot].shape  # type: ignore[attr-defined]
                for index, length in zip(node.arguments, lengths, strict=True):
                    if has_arguments(index):
                        continue
                    low, high = compute_intervals(index, box)[id(index)]
                    if low < 0 or high >= length:
                        return False
        return True


def _form(table: Any) -> tuple[str, bool]:
    """Return what is compiled into a kernel for a table: its dtype, and whether its entries are adjacent."""
    return str(table.dtype), has_unit_stride(table)
