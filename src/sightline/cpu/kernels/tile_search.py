"""The search for the tile ranges of a mask, in generated code, for tables and numbers that change from call to call.

A tile range is a run of key blocks that a block of queries must process. The search visits the same tiles as
`formula.tile_ranges`: it bisects the key axis where the bounds of the mask leave open whether all pairs are allowed or
all are hidden. First it computes the minimum and maximum (the extremes) of each block of the tables that the mask
reads. So its cost is one pass over these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from ...formula.expression import SYMBOLS, Apply, Constant, Expression, Lookup, Parameter, walk
from ...formula.interval_arithmetic import Interval
from ...formula.tile_ranges import SCORE_BOUND
from ..codegen.abi import LoadedArguments, slot_of
from ..codegen.builder import Builder, Module, Variable
from ..codegen.render_bounds import BoundsNamespace, BoundsRenderer, HiddenEntries, TableExtremes
from ..codegen.values import BOOL, BYTE, DOUBLE, INT64, POINTER, Value
from .kernel_spec import KEY_BLOCK

SEARCH_FIELDS: dict[str, Any] = {
    "B": INT64,
    "H": INT64,
    "n": INT64,
    "m": INT64,
    "batches": INT64,  # B if the mask depends on b, else 1
    "heads": INT64,
    "query_block": INT64,  # number of queries in a block
    "first_numbers": POINTER,  # the numbers of the formulas in the first call
    "start": POINTER,  # the arrays of TileRanges: int64, but `full` has one byte for each range
    "first": POINTER,
    "last": POINTER,
    "full": POINTER,
    "capacity": INT64,  # length of `first`, `last` and `full`
    "extremes": POINTER,  # workspace for the extremes of the tables
    "max_integer": DOUBLE,  # whole numbers that read a table must be smaller than this number
    "count": POINTER,  # number of ranges; those beyond `capacity` are not stored. −1 if a check failed
}


@dataclass(frozen=True)
class SearchSpec:
    """Everything that is compiled into a search."""

    mask: str  # the formulas are the structures of `formula.parameters`
    others: tuple[str, ...]  # the other formulas of the problem, whose whole numbers are checked
    tables: tuple[tuple[str, int], ...]  # dtype and number of axes of each table, by its slot
    # of each formula, the indices that may leave their table at hidden pairs; see `KernelSpec.clamped`
    clamped: tuple[tuple[tuple[int, int], ...], ...]


class TileSearch:
    """Write the search into a module.

    Parameters
    ----------
    mask, others : the formulas of the spec
    """

    def __init__(self, spec: SearchSpec, mask: Expression, others: Sequence[Expression]) -> None:
        self.spec, self.mask, self.formulas = spec, mask, (mask, *others)
        self.module = Module()

    def write(self, name: str) -> Any:
        self.builder = builder = Builder(self.module, name)
        self.args = LoadedArguments(builder, SEARCH_FIELDS, self.spec.tables, self.formulas)
        self.xp, self.key_blocks = BoundsNamespace(builder), (self.args.m + (KEY_BLOCK - 1)) // KEY_BLOCK
        self.prepare_tables()
        self.count = Variable(builder, INT64, 0)
        with builder.if_else(self.is_out_of_range()) as (yes, no):
            with yes:
                self.count.set(-1)
            with no:
                self.search()
        self.args.count.store(self.count.get())
        builder.finish()
        return self.module

    def prepare_tables(self) -> None:
        """Compute the extremes of the tables whose bounds are needed."""
        needed = tables_with_extremes(self.formulas)
        address, self.extremes = self.args.extremes, list[TableExtremes]()
        for slot, table in enumerate(self.args.tables):
            kind = TableExtremes if slot in needed else HiddenEntries
            extremes = kind(self.builder, table, address)
            extremes.compute()
            self.extremes.append(extremes)
            address = address.at(extremes.num_bytes) if slot in needed else address

    def is_out_of_range(self) -> Value:
        """True if an integer of `checked_nodes` may be too large, or an index may be outside of its table.

        Indices that may leave their table at hidden pairs are known to be inside for the numbers of the first call.
        """
        builder, args = self.builder, self.args
        pairs = zip(self.formulas, self.spec.clamped, strict=True)
        clamped = {(id(walk(formula)[position]), axis) for formula, places in pairs for position, axis in places}
        box = self.box(**{name: (builder.value(0, INT64), args_length - 1) for name, args_length in self.lengths()})
        renderer = BoundsRenderer(builder, checked_nodes(self.formulas), self.extremes, args.numbers)
        bounds = renderer.evaluate(box, {})
        violations = [builder.value(0, BOOL)]
        for node in checked_nodes(self.formulas):
            low, high = bounds[id(node)]
            if node.kind == "int":
                violations.append(~((low > -args.max_integer) & (high < args.max_integer)))
            if isinstance(node, Lookup):
                lengths = args.tables[slot_of(node)].lengths
                for axis, (index, length) in enumerate(zip(node.arguments, lengths, strict=True)):
                    if has_arguments(index) and (id(node), axis) not in clamped:
                        low, high = bounds[id(index)]
                        violations.append(~((low >= 0.0) & (high < length.to(DOUBLE))))
        for slot, number in enumerate(args.numbers if clamped else ()):
            violations.append(number != args.first_numbers.at(8 * slot).load(number.type))
        return reduce(or_, violations)

    def lengths(self) -> list[tuple[str, Value]]:
        args = self.args
        return [("b", args.B), ("h", args.H), ("i", args.n), ("j", args.m)]

    def box(self, **symbols: tuple[Value, Value]) -> dict[str, Interval]:
        """Return the intervals of the given symbols, and of n, m, s, p and ln p."""
        args, xp = self.args, self.xp
        others: dict[str, Any] = {"n": (args.n, args.n), "m": (args.m, args.m), "p": (0.0, 1.0)}
        others |= {"s": (-SCORE_BOUND, SCORE_BOUND), "ln p": (-2 * SCORE_BOUND, 0.0)}
        return {name: (xp.float64(low), xp.float64(high)) for name, (low, high) in (symbols | others).items()}

    # -- the search ------------------------------------------------------------------------------------------------
    def search(self) -> None:
        """Write the tile ranges of every row: a batch, a head or group of heads, and a block of queries."""
        builder, args = self.builder, self.args
        query_blocks = (args.n + (args.query_block - 1)) // args.query_block
        top = Variable(builder, INT64, 1)  # the smallest power of two that is at least the number of key blocks
        with builder.infinite_loop() as break_if:
            break_if(top.get() >= self.key_blocks)
            top.set(top.get() << 1)
        self.top = top.get()
        renderer = BoundsRenderer(builder, [self.mask], self.extremes, args.numbers)
        rows = args.batches * args.heads * query_blocks
        group = args.H // builder.maximum(args.heads, 1)  # the heads that have common ranges, if the mask reads h
        with builder.loop(0, rows) as row:
            args.start.at(row * 8).store(self.count.get())
            b, h = row // query_blocks // args.heads, row // query_blocks % args.heads
            i0 = row % query_blocks * args.query_block
            last_query = builder.minimum(i0 + args.query_block, args.n) - 1
            last_batch = b if self.reads("b") else args.B - 1
            box = self.box(b=(b, last_batch), h=(h * group, h * group + group - 1), i=(i0, last_query))
            known = renderer.evaluate(box, {})
            self.search_row(box, known, renderer)
        args.start.at(rows * 8).store(self.count.get())

    def reads(self, symbol: str) -> bool:
        return symbol in self.mask.free_symbols

    def search_row(self, box: dict[str, Interval], known: dict[int, Interval], renderer: BoundsRenderer) -> None:
        """Write the tile ranges of one row, in ascending order.

        The search looks at `width` tiles from the tile `first` on. `width` is a power of two that divides `first`.
        """
        builder = self.builder
        first, width = Variable(builder, INT64, 0), Variable(builder, INT64, self.top)
        self.open_first, self.open_last = Variable(builder, INT64, 0), Variable(builder, INT64, 0)
        self.open_full = Variable(builder, BOOL, False)
        with builder.infinite_loop() as break_if:
            at = first.get()
            break_if(at >= self.key_blocks)
            last = builder.minimum(at + width.get(), self.key_blocks)
            j = at * KEY_BLOCK, builder.minimum(last * KEY_BLOCK, self.args.m) - 1
            low, high = renderer.evaluate(box | self.box(j=j), known)[id(self.mask)]
            is_full, is_empty = low == 1.0, high == 0.0
            is_decided = is_full | is_empty | (width.get() == 1)
            with builder.if_else(is_decided) as (yes, no):
                with yes:
                    with builder.if_then(~is_empty):
                        self.append(at, last, is_full)
                    first.set(at + width.get())
                    # the widest aligned range at `first`
                    width.set(builder.minimum(self.top, first.get() & -first.get()))
                with no:
                    width.set(width.get() >> 1)
        self.close()

    def append(self, first: Value, last: Value, is_full: Value) -> None:
        """Add tiles to the open range, which is not stored yet. If they do not continue it, open a new range."""
        builder = self.builder
        continues = (self.open_last.get() == first) & ~(self.open_full.get() ^ is_full)
        with builder.if_then(~continues):
            self.close()
            self.open_first.set(first)
            self.open_full.set(is_full)
        self.open_last.set(last)

    def close(self) -> None:
        """Store the open range, if there is one."""
        builder, args, index = self.builder, self.args, self.count.get()
        with builder.if_then(self.open_last.get() > self.open_first.get()):
            with builder.if_then(index < args.capacity):
                args.first.at(index * 8).store(self.open_first.get())
                args.last.at(index * 8).store(self.open_last.get())
                args.full.at(index).store(self.open_full.get().zero_extend(BYTE))
            self.count.set(index + 1)


def checked_nodes(formulas: Sequence[Expression]) -> list[Expression]:
    """Return the nodes whose bounds depend on a table or a number and must be checked before the kernel runs.

    These are integers that depend on a table or a number, and lookups at such an index.
    """
    return [
        node
        for node in walk(*formulas)
        if (node.kind == "int" and has_arguments(node))
        or (isinstance(node, Lookup) and any(map(has_arguments, node.arguments)))
    ]


def has_arguments(formula: Expression) -> bool:
    """True if the formula reads a table or a number of the call, so that its bounds are not known before the call."""
    return any(isinstance(node, Lookup | Parameter) for node in walk(formula))


def tables_with_extremes(formulas: Sequence[Expression]) -> set[int]:
    """Return the slots of the tables of which the search computes extremes: minimum and maximum of each block.

    The first formula is the mask. A table of biases t[..., i, j] that the mask only compares with −∞ needs no extremes;
    see `HiddenEntries`. A table that only other formulas read needs extremes if its entries are integers.
    """
    mask, *others = formulas
    needed = {mask} if isinstance(mask, Lookup) else set[Lookup]()
    for node in walk(mask):
        if not _is_compared_to_hidden(node):
            needed |= {argument for argument in node.arguments if isinstance(argument, Lookup)}
    needed |= {node for node in walk(mask, *others) if isinstance(node, Lookup) and node.kind == "int"}
    return set(map(slot_of, needed))


def _is_compared_to_hidden(node: Expression) -> bool:
    """True if the node compares t[..., i, j], an entry of a table of floats, with −∞."""
    if not (isinstance(node, Apply) and node.operator == "equal"):
        return False
    lookup, constant = node.arguments
    return (
        isinstance(lookup, Lookup)
        and lookup.kind == "float"
        and isinstance(constant, Constant)
        and constant.value == -float("inf")
        and [*map(id, lookup.arguments[-2:])] == [id(SYMBOLS["i"]), id(SYMBOLS["j"])]
    )
