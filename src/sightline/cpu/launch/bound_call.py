"""A call of a kernel with every argument bound except addresses, the numbers of formulas and the seed.

The bound arguments follow from the structure of the call: shapes, strides, dtypes, and formulas without their tables
and numbers. So a repeated call needs no planning. The tile ranges of the first call are bound too: the blocks of keys
that each block of queries processes. Generated code searches for new tile ranges if the mask reads a table, or if the
formulas have other numbers than in the first call. `call.call_cache` decides which calls share a bound call.

A prepared call is a bound call with its inputs and results, which generated code repeats. `PreparedCall.run` computes
the words that are not bound and calls the generated function `launch`. If every word is the address of an array of the
caller, the address of a result, a number of a formula, or the same in every call, the call is direct: the generated
function `find_or_run` does all this from the third call on (`calls.direct_call`, `calls.xla_handler`). The call cache,
the backward passes, the weights passes and the custom call of XLA hold prepared calls.

A call family binds the call of one problem again for arrays with other lengths, such as the keys of a decoding loop,
without the checks and the planning of a new problem. The code of a kernel does not depend on the lengths n and m, on
strides, or on the lengths of tables. The new call always searches for its tile ranges in generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...arrays.layouts import addresses_of
from ...arrays.operations import address_of, memory_layout, numpy_address
from ...formula.expression import Lookup, walk
from ...formula.formula_checks import find_index_ranges
from ...formula.interval_arithmetic import compute_intervals
from ...formula.parameters import Structure
from ...formula.tables import Table
from ...formula.tile_ranges import make_box
from ..calls.launch_record import (
    FIRST_COMPUTED,
    FIRST_NUMBER,
    FIRST_RESULT,
    MAX_NUMBERS,
    MAX_RESULTS,
    UNCHANGED,
    Direct,
)
from ..calls.launcher import FAILED, SHORT
from ..calls.python_functions import is_supported, launcher
from ..codegen.abi import FORWARD_CALL_FIELDS, call_words, pack_fields, signed_word
from ..kernels.block import Block
from ..kernels.kernel_spec import round_up
from ..kernels.tile_search import has_arguments
from ..runtime.processor import HOST
from ..runtime.thread_count import thread_count
from .arguments import KernelArguments, compile_kernel, convert_sinks, convert_table, extent_in_bytes, has_unit_stride
from .launch_record import WORDS_PER_CACHE_LINE, Buffer, LaunchRecord
from .tile_search import BoundSearch

COUNTERS = ("counter", "imprecise_lse_flag", "nonfinite_flag")  # words that are 0 when a kernel starts
MAX_CACHED_BYTES = 1 << 20  # the most bytes of tile ranges and offsets that a cached call may keep alive
TILE_RANGE_FIELDS = ("tile_range_start", "tile_range_first", "tile_range_last", "tile_range_full")
MAX_LENGTH = 1 << 20  # the largest n and m of a family; whole numbers of its formulas fit 32 bits up to this length
MAX_INT32 = 2**31 - 1
COMPUTED_FIELDS = ("sinks", "d_lse", "seed")  # the fields whose words Python computes in each repeated call


class BoundCall:
    """A call of one kernel, which is repeated with other addresses, numbers of formulas and seeds.

    arguments, writer : what determines the kernel
    values : the values of the bound fields that `arguments` does not know
        `items` is the number of work items, the most threads that find work.
    scratch : fields that point into a buffer of the call, and the length of each in 8-byte words
    zeroed : fields like those of `scratch` that are 0 when the kernel starts, besides `COUNTERS`
    outputs : the stride of each output that is not among the kernel's fields; None if all are 0
    changing : arrays of `arguments.keep_alive` that each call gives, besides query, key and value

    table_origins : `Table.origin` of each table of the call that this object was made for
    table_layouts : the `memory_layout` of each table, which the arguments hold: only tables with the same layout fit
    first_operands : the addresses of query, key and value in that call; for a backward call also output and d_output
    """

    call_fields: tuple[str, ...] = FORWARD_CALL_FIELDS  # the last fields of the kernel, which each call gives
    length_fields: tuple[str, ...] = ()  # those among them that follow from the number of keys
    min_parallel_multiplications = 1 << 21  # with fewer multiplications a second thread costs more than it saves
    has_dynamic_key_length = False  # True if the call serves any number of keys
    family: CallFamily | None = None  # binds the call again for other lengths

    def __init__(
        self,
        arguments: KernelArguments,
        writer: type[Block],
        values: Mapping[str, Any],
        *,
        scratch: dict[str, int] | None = None,
        zeroed: dict[str, int] | None = None,
        outputs: Sequence[int] | None = None,
        changing: Sequence[Any] = (),
    ) -> None:
        problem, spec = arguments.problem, arguments.spec
        self.multiplications_per_key = problem.B * problem.H * problem.n * (spec.d_k + spec.d_v)
        self.processor, self.threads = arguments.processor, problem.threads
        self.items, self.numbers = values["items"], arguments.numbers
        self.table_origins = arguments.table_origins
        self.table_layouts = tuple(map(memory_layout, arguments.tables))
        self.first_operands = tuple([address_of(array) for array in arguments.arrays.values()])
        self.kernel = compile_kernel(arguments, writer)
        zeroed = {name: 1 for name in COUNTERS if name in writer.fields} | (zeroed or {})
        self.block_fields, self.workspace = writer.fields, {**zeroed, **(scratch or {})}  # begins with the counter
        self.num_zeroed = sum([round_up(length, WORDS_PER_CACHE_LINE) for length in zeroed.values()])
        outputs = [0] * spec.num_output_arrays if outputs is None else outputs
        bound = {**dict.fromkeys(writer.fields, 0), **arguments.fields(), **values}
        self.template = pack_fields(writer.fields, bound, arguments.tables, arguments.numbers, outputs)
        names, num_tables = list(writer.fields), len(arguments.tables) + len(arguments.numbers)
        self.range_words = [names.index(name) for name in TILE_RANGE_FIELDS]
        self.search = BoundSearch.of(arguments)
        given_anew, ranges = {id(array) for array in (*arguments.arrays.values(), *changing)}, set[int]()
        if self.search is not None and self.search.is_needed:  # only the first call reads the bound tile ranges
            ranges = {int(self.template[word]) for word in self.range_words}
        constant = [x for x in arguments.keep_alive if isinstance(x, np.ndarray) and id(x) not in given_anew]
        self.keep_alive = tuple([array for array in constant if array.ctypes.data not in ranges])
        # the words that each call gives: its fields, tables, numbers and outputs
        self.num_outputs = len(outputs)
        self.num_words = len(self.call_fields) + num_tables + self.num_outputs
        start = len(names) - len(self.call_fields)
        self.call_words = slice(start, start + self.num_words)

    def prepare(
        self,
        tables: Sequence[Any],
        structure: Structure,
        operands: Sequence[str],
        results: Sequence[str],
        makers: Sequence[Callable[[], Any]],
        num_keys: int,
        can_be_direct: bool = False,
    ) -> PreparedCall | None:
        """Return this call ready to be repeated for a caller's tables and numbers; None if it was made for others.

        The result is also None if the call was bound for other memory layouts than those of the tables.

        tables : the caller's tables, in the order of the structure of its formulas
        structure : the part of the structure of the caller's formulas that the kernel reads; see `Structure.first`
        operands, results, makers, num_keys, can_be_direct : see `PreparedCall`
        """
        origins = [table.origin for table in structure.tables]
        if not set(self.table_origins) <= set(origins) or self.numbers != structure.numbers:
            return None
        if len(self.numbers) > MAX_NUMBERS or len(results) + self.num_outputs > MAX_RESULTS:
            return None
        own_tables = [origins.index(origin) for origin in self.table_origins]
        pairs = zip(own_tables, self.table_layouts, strict=True)
        copied = [(table, layout) for table, layout in pairs if memory_layout(tables[table]) != layout]
        if any(memory_layout(convert_table(tables[table])) != layout for table, layout in copied):
            return None
        copied_tables = [table for table, _ in copied]
        return PreparedCall(self, own_tables, copied_tables, operands, results, tuple(makers), num_keys, can_be_direct)

    @property
    def is_cacheable(self) -> bool:
        """True if later calls may use this call.

        The call must run on the host's processor, generated code must be able to run it, and the memory that it keeps
        alive must be small.
        """
        return (
            self.processor is HOST
            and is_supported()
            and sum(array.nbytes for array in self.keep_alive) <= MAX_CACHED_BYTES
            and (self.search is None or self.search.can_repeat)
        )

    def find_length_words(self, num_keys: int) -> tuple[int, ...] | None:
        """Return the words of `length_fields`; None if the call does not serve this number of keys."""
        return ()

    def find_max_threads(self, num_keys: int) -> int:
        """Return the most threads that are useful."""
        return 1 if num_keys * self.multiplications_per_key < self.min_parallel_multiplications else self.items

    def run_first(
        self, arguments: KernelArguments, arrays: Mapping[str, Any], outputs: Sequence[Any] = ()
    ) -> int | None:
        """Run the kernel for the problem that this object was made for.

        Return 1 if the kernel set `imprecise_lse_flag`, else 0; None if its outputs are not valid.

        arrays : the arrays by their names in `call_fields`, besides query, key, value and sinks; None or left out for
            no array
        outputs : the arrays that are not among the fields
        """
        problem = arguments.problem
        lengths = self.find_length_words(problem.m)
        assert lengths is not None
        assert arrays.keys() <= {*self.call_fields}, f"{arrays.keys() - {*self.call_fields}} are no fields"
        sinks = None if problem.sinks is None else convert_sinks(problem.sinks)
        arrays = {**arguments.arrays, "sinks": sinks, **arrays}
        words = {name: address_of(array) for name, array in arrays.items() if array is not None}
        words |= dict(zip(self.length_fields, lengths, strict=True)) | {"seed": signed_word(problem.seed)}
        tables, results = ([address_of(array) for array in own] for own in (arguments.tables, outputs))
        buffer = Buffer(self)
        fields = [words.get(name, 0) for name in self.call_fields]
        buffer.array[self.call_words] = call_words(fields, tables, arguments.numbers, results)
        start = (buffer.addresses["counter"] - buffer.address) // 8
        buffer.array[start : start + self.num_zeroed] = 0
        count = min(thread_count(self.threads), self.find_max_threads(problem.m))
        keep_alive = arguments.keep_alive, *arrays.values(), outputs, self.keep_alive, buffer.array
        self.processor.call(self.kernel, buffer.array[: self.template.size], count, keep_alive)
        return None if buffer.word("nonfinite_flag") else buffer.word("imprecise_lse_flag")


@dataclass(eq=False)
class PreparedCall:
    """A bound call, to which each repetition gives only arrays, numbers and a seed.

    call : the bound call
    tables : for each table of the kernel, its index among the caller's tables
    copied_tables : those of these tables of which the kernel reads the copy that `convert_table` returns
    operands : the names of the fields of the caller's arrays that precede the tables
    results : the names of the fields of the first results; the other results have no fields
    makers : functions that allocate the results
    num_keys : the number of keys
    can_be_direct : False if Python must run every repetition, to compute the word of a field in `COMPUTED_FIELDS`

    records : the launch records, one for each thread that ran the call at the same time as others
    direct : what generated code reads; None if the call is not direct
        The tuple is never changed but replaced, because a thread may use it.
    """

    call: BoundCall
    tables: Sequence[int]
    copied_tables: Sequence[int]
    operands: Sequence[str]
    results: Sequence[str]
    makers: tuple[Callable[[], Any], ...]
    num_keys: int
    can_be_direct: bool

    def __post_init__(self) -> None:
        self.can_be_direct = self.can_be_direct and not self.copied_tables
        self.lengths = self.call.find_length_words(self.num_keys)
        self.sources = self.find_sources()
        self.records: list[LaunchRecord] = []
        self.direct: Direct | None = None

    def copy(self, num_keys: int) -> PreparedCall:
        """Return a copy of the call for `num_keys` keys. Both have the same list of records."""
        other = object.__new__(PreparedCall)  # in a fifth of the time of `copy.copy`
        lengths = self.call.find_length_words(num_keys)
        vars(other).update(vars(self), num_keys=num_keys, lengths=lengths, direct=None)
        return other

    def run(
        self,
        addresses: Sequence[int],
        tables: Sequence[Any],
        numbers: tuple[float, ...],
        keep_alive: tuple[Any, ...],
        sinks: Any = None,
        d_lse: Any = None,
        seed: int = 0,
    ) -> tuple[int | None, list[Any]]:
        """Return (status, arrays of the results).

        The status is 1 if the kernel set `imprecise_lse_flag`, else 0. It is None if the results are not valid: the
        call then needs the full dispatch.

        addresses : the addresses of the operands, and then of the tables
        tables, numbers : the tables and numbers of the caller
        keep_alive : the arrays at these addresses
        sinks : the sinks of the caller; None if there are none
        d_lse : the gradient of lse, a contiguous NumPy array of float64; None for 0
        seed : the seed of dropout
        """
        if self.lengths is None:
            return None, []
        results = [make() for make in self.makers]
        converted: list[Any] = []
        if self.copied_tables:
            converted = [convert_table(tables[table]) for table in self.copied_tables]
            addresses = list(addresses)
            for table, address in zip(self.copied_tables, addresses_of(converted), strict=True):
                addresses[len(self.operands) + table] = address
        numbers = numbers[: len(self.call.numbers)]
        sinks = None if sinks is None else convert_sinks(sinks)
        sinks_address = 0 if sinks is None else numpy_address(sinks)
        d_lse_address = 0 if d_lse is None else numpy_address(d_lse)
        computed = sinks_address, d_lse_address, signed_word(seed), *self.lengths
        arrays = keep_alive, sinks, d_lse, results, converted
        arguments = arrays, tuple(addresses), tuple(addresses_of(results)), numbers, computed
        return self._launch(arguments), results

    def _launch(self, arguments: tuple[Any, ...]) -> int | None:
        """Run the kernel with a record that no other thread uses. `arguments` are the others of `launch`."""
        search, known, status = self.call.search, iter(self.records[:]), None
        while status is None or status == SHORT:
            record = next(known, None) or LaunchRecord(self.call, self.sources)
            direct = self.describe(record)
            status = launcher()(direct, *arguments)
            if status == SHORT and search is not None:  # a new record has what this one lacks
                search.extend(record.buffer.word("count"))
                self._remove(record)
        if not record.can_be_kept:
            self._remove(record)
        elif record not in self.records:
            self.records.append(record)  # after its first use, so that no other thread has taken it
        self.direct = direct if self.can_be_direct and record.can_be_kept else None
        return None if status == FAILED or status >= 2 else status

    def _remove(self, record: LaunchRecord) -> None:
        self.records[:] = [other for other in self.records if other is not record]

    def describe(self, record: LaunchRecord) -> Direct:
        """Return what generated code reads, for a record."""
        max_threads = self.call.find_max_threads(self.num_keys)
        has_team = max_threads > 1 and self.call.threads != 1
        team = partial(record.run_on_team, max_threads) if has_team else None
        # without sinks, a seed and a gradient of lse, the words of `COMPUTED_FIELDS` are 0
        computed = *(0,) * len(COMPUTED_FIELDS), *(self.lengths or ())
        return Direct(record.address, self.makers, computed, team, record)

    def find_sources(self) -> list[int]:
        """Return the source of each word of the call."""
        place = {name: index for index, name in enumerate(self.operands)}
        place |= {name: FIRST_RESULT + index for index, name in enumerate(self.results)}
        computed = *COMPUTED_FIELDS, *self.call.length_fields
        place |= {name: FIRST_COMPUTED + index for index, name in enumerate(computed)}
        return call_words(
            [place.get(name, UNCHANGED) for name in self.call.call_fields],
            [len(self.operands) + table for table in self.tables],
            range(FIRST_NUMBER, FIRST_NUMBER + len(self.call.numbers)),
            range(FIRST_RESULT + len(self.results), FIRST_RESULT + len(self.makers)),
        )


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
