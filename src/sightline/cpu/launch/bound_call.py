"""A call of a kernel with every argument bound except addresses, the numbers of formulas and the seed.

The bound arguments follow from the structure of the call: shapes, strides, dtypes, and formulas without their tables
and numbers. So a repeated call needs no planning. The tile ranges of the first call are bound too: the blocks of keys
that each block of queries processes. Generated code searches for new tile ranges if the mask reads a table, or if the
formulas have other numbers than in the first call. `call.call_cache` decides which calls share a bound call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from ...arrays.operations import layout, memory_layout
from ...caching import cached_property
from ...formula.parameters import Structure
from ..calls.launch_record import FLAGS, LaunchRecord
from ..calls.python_functions import launcher
from ..codegen.abi import FORWARD_CALL_FIELDS, call_words, signed_word
from ..codegen.builder import CACHE_LINE_BYTES
from ..kernels.block import Block
from ..kernels.kernel_spec import KernelSpec, round_up
from ..kernels.tile_search import SEARCH_FIELDS
from ..runtime.processor import HOST, Processor
from ..runtime.thread_count import thread_count
from .arguments import KernelArguments, compile_kernel, convert_sinks, convert_table
from .call_family import CallFamily
from .prepared_call import KernelInputs, PreparedCall
from .tile_search import BoundSearch

MAX_CACHED_BYTES = 1 << 20  # the most bytes of tile ranges and offsets that a cached call may keep alive
MAX_POOLED_BYTES = 1 << 18  # a larger buffer is allocated for each call and not reused
WORDS_PER_CACHE_LINE = CACHE_LINE_BYTES // 8  # each field begins on its own line, because threads write the counter
CAPACITY_INDEX = list(SEARCH_FIELDS).index("capacity")
TILE_RANGE_FIELDS = ("tile_range_start", "tile_range_first", "tile_range_last", "tile_range_full")
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

Buffer = tuple[Any, Any, int]  # an array of 64-bit words, a view of it, and its address


class Buffers:
    """Buffers for one bound call: argument blocks, and the workspace that they point to. Unused buffers are kept.

    Parameters
    ----------
    blocks : (argument block, its fields, its workspace) of each function: kernel, search for tile ranges. The workspace
        has the fields that point into the buffer, and the length of each in 8-byte words.
    """

    def __init__(self, *blocks: tuple[Any, Mapping[str, Any], Mapping[str, int]]) -> None:
        self.offsets: dict[str, int] = {}  # of each field of the workspace, in words from the start of a buffer
        self.starts: list[int] = []  # of each argument block
        self.size = 0
        self.blocks = []
        for packed, fields, workspace in blocks:
            start, pointers = self.size, {}
            self.size += round_up(packed.size, WORDS_PER_CACHE_LINE)
            for name, length in workspace.items():
                pointers[start + list(fields).index(name)] = self.offsets[name] = self.size
                self.size += round_up(length, WORDS_PER_CACHE_LINE)
            self.starts.append(start)
            self.blocks.append((start, packed, pointers))
        self.unused: list[Buffer] = []  # pop and append are atomic

    def acquire(self) -> Buffer:
        """Return a buffer with the bound arguments: the array, a view of it, and its address."""
        try:
            return self.unused.pop()
        except IndexError:
            array = np.empty(self.size, np.int64)
        address = int(array.ctypes.data)
        for start, packed, pointers in self.blocks:
            array[start : start + packed.size] = packed
            for index, offset in pointers.items():
                array[index] = address + 8 * offset
        return array, array.data, address

    def release(self, buffer: Buffer) -> None:
        """Keep the buffer for a later call, unless it is too large. No thread may use it any more."""
        if 8 * self.size <= MAX_POOLED_BYTES:
            self.unused.append(buffer)


class BoundCall:
    """A call of one kernel, which is repeated with other addresses, numbers of formulas and seeds.

    Parameters
    ----------
    arguments, spec, writer : what determines the kernel
    values : the values of the bound fields that `arguments` does not know
    max_threads : the most threads that find work
    workspace : fields that point into a buffer of the call, and the length of each in 8-byte words
    zeroed : the fields of the workspace that are 0 when the kernel starts
    outputs : the stride of each output that is not among the kernel's fields
    changing : arrays of `arguments.keep_alive` that each call gives, besides query, key and value

    Attributes
    ----------
    table_origins : `Table.origin` of each table of the call that this object was made for
    table_layouts : the `memory_layout` of each table, which the arguments hold: only tables with the same layout fit
    first_operands : the addresses of query, key and value in that call; for a backward call also output and d_output
    """

    call_fields: tuple[str, ...] = FORWARD_CALL_FIELDS  # the last fields of the kernel, which each call gives
    has_dynamic_key_length = False  # True if the call serves any number of keys
    family: CallFamily | None = None  # binds the call again for other lengths
    convert_table, convert_sinks = staticmethod(convert_table), staticmethod(convert_sinks)

    def __init__(
        self,
        arguments: KernelArguments,
        spec: KernelSpec,
        writer: type[Block],
        values: Mapping[str, Any],
        processor: Processor,
        *,
        max_threads: int,
        workspace: Mapping[str, int],
        zeroed: Sequence[str],
        outputs: Sequence[int] = (),
        changing: Sequence[Any] = (),
    ) -> None:
        self.processor, self.max_threads, self.numbers = processor, max_threads, arguments.numbers
        self.table_origins = arguments.table_origins
        self.table_layouts = tuple(map(memory_layout, arguments.tables))
        self.first_operands = tuple([layout(array)[0] for array in arguments.arrays.values()])
        self.kernel = compile_kernel(spec, arguments, writer, processor)
        self.function: Any = _FUNCTION(self.kernel) if isinstance(self.kernel, int) else None  # None for an emulator
        self.block_fields, self.workspace = writer.fields, workspace
        self.zeroed = [(name, workspace[name]) for name in zeroed]
        bound = {**dict.fromkeys(writer.fields, 0), **arguments.fields(spec), **values}
        self.template = arguments.pack(writer.fields, bound, [(0, stride) for stride in outputs])
        names, num_tables = list(writer.fields), len(arguments.tables) + len(arguments.numbers)
        self.range_words = [(index, int(self.template[index])) for index in map(names.index, TILE_RANGE_FIELDS)]
        self.search = BoundSearch.of(arguments, spec, processor)
        self.keep_alive = arguments.constant_arrays(*changing)
        if self.search is not None and self.search.runs_always:  # only the first call reads the bound tile ranges
            ranges = {word for _, word in self.range_words}
            self.keep_alive = tuple(array for array in self.keep_alive if array.ctypes.data not in ranges)
        self.buffers = self.make_buffers()
        # the words that each call gives, as one run of the argument block, and those among them that the search takes
        self.num_outputs = len(outputs)
        self.num_words = len(self.call_fields) + num_tables + self.num_outputs
        self.write_words = struct.Struct(f"{self.num_words}q").pack_into
        self.words_at = 8 * (len(names) - len(self.call_fields))
        self.search_words = slice(len(self.call_fields), len(self.call_fields) + num_tables)
        self.write_search_words = struct.Struct(f"{num_tables}q").pack_into
        self.no_fields, self.select_fields = dict.fromkeys(self.call_fields, 0), itemgetter(*self.call_fields)

    def make_words(
        self,
        fields: dict[str, int],
        tables: Sequence[int] = (),
        numbers: Sequence[float] = (),
        outputs: Sequence[int] = (),
        seed: int = 0,
    ) -> list[int]:
        """Return the 64-bit words that each call gives, in the order of the argument block.

        Parameters
        ----------
        fields : the addresses of arrays by their names in `call_fields`; a field that is left out is 0
        tables, outputs : the addresses of the tables, and of the outputs that are not among the fields
        numbers : the numbers of the formulas
        seed : the seed of dropout
        """
        given = self.no_fields | fields
        assert len(given) == len(self.no_fields), f"{fields.keys() - self.no_fields.keys()} are no fields"
        if seed:
            given["seed"] = signed_word(seed)
        return [*self.select_fields(given), *(call_words(tables, numbers, outputs) if numbers else (*tables, *outputs))]

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

        `KernelInputs.bind` and `PreparedCall` describe the parameters.
        """
        inputs = KernelInputs.bind(self, tables, structure)
        if inputs is None:
            return None
        return PreparedCall(self, inputs, operands, results, makers, num_keys, can_be_direct)

    def make_buffers(self) -> Buffers:
        blocks = [(self.template, self.block_fields, self.workspace)]
        if self.search is not None:
            self.search.packed[CAPACITY_INDEX] = self.search.capacity
            blocks.append((self.search.packed, SEARCH_FIELDS, self.search.workspace()))
        return Buffers(*blocks)

    @property
    def is_cacheable(self) -> bool:
        """True if later calls may use this call.

        The call must run on the host's processor, and the memory that it keeps alive must be small.
        """
        return (
            self.processor is HOST
            and sum(array.nbytes for array in self.keep_alive) <= MAX_CACHED_BYTES
            and (self.search is None or self.search.can_repeat)
        )

    def run(
        self,
        threads: int | None,
        words: Sequence[int],
        numbers: tuple[float, ...],
        num_keys: int,
        keep_alive: tuple[Any, ...],
        is_first: bool = False,
    ) -> int | None:
        """Run the kernel. Return 1 if the kernel set `imprecise_lse_flag`, else 0; None if its outputs are not valid.

        If the outputs are not valid, the call needs the full dispatch: all checks and the choice of a kernel.

        Parameters
        ----------
        words : the result of `make_words`
        numbers : the numbers of the formulas
        num_keys : the number of keys, which a decoding call divides into splits
        keep_alive : the arrays at the addresses among the words, which must stay alive while threads work
        is_first : True for the call that this object was made for, whose tile ranges are bound
        """
        searches = not is_first and self.search is not None and (self.search.runs_always or numbers != self.numbers)
        if not is_first and (self.max_threads == 1 or threads == 1) and self.launch is not None:
            record = self.searching_record if searches else self.record
            status = self.launch(record.address, *words)
            if status is not None:
                return None if status >= 2 else status
        buffers = self.buffers  # another thread may replace them
        buffer = buffers.acquire()
        if self.search is not None:
            if searches:
                found = self.find_tile_ranges(buffers, buffer, words)
                if found is None:
                    return None
                buffers, buffer = found
            else:
                for index, word in self.range_words:
                    buffer[1][index] = word
        array, view, address = buffer
        self.write_words(view, self.words_at, *words)
        for name, length in self.zeroed:
            start = buffers.offsets[name]
            if length == 1:
                view[start] = 0
            else:
                array[start : start + length] = 0
        if self.max_threads == 1 and self.function is not None:
            self.function(address)
        else:
            packed, keep_alive = array[: self.template.size], (keep_alive, self.keep_alive, array)
            self.processor.call(self.kernel, packed, min(thread_count(threads), self.max_threads), keep_alive)
        status = self.read_status(view, buffers.offsets)
        buffers.release(buffer)
        return status

    def read_status(self, view: Any, offsets: Mapping[str, int]) -> int | None:
        """Return the result of `run` from the workspace of a finished call."""
        imprecise, nonfinite = (view[offsets[name]] if name in offsets else 0 for name in FLAGS)
        return None if nonfinite else imprecise

    @cached_property
    def launch(self) -> Any:
        """The generated function of `calls.launcher`, which runs the call; None if Python must run the call."""
        return launcher() if self.processor is HOST else None

    @cached_property
    def record(self) -> LaunchRecord:
        """The record with which generated code runs calls that have the tile ranges of the first call."""
        return LaunchRecord(self, searches=False)

    @cached_property
    def searching_record(self) -> LaunchRecord:
        """The record with which generated code runs calls that search for their tile ranges."""
        return LaunchRecord(self, searches=True)

    def make_direct_record(self, threads: int | None, num_keys: int, sources: Sequence[int]) -> LaunchRecord | None:
        """Return a record for calls with `num_keys` keys that generated code runs as a whole (direct calls).

        The result is None if more than one thread would work. `sources` are those of `LaunchRecord`.
        """
        words = self.constant_words(threads, num_keys)
        if words is None or self.launch is None:
            return None
        searches = self.search is not None and (self.search.runs_always or len(self.numbers) > 0)
        return LaunchRecord(self, searches, words, sources)

    def constant_words(self, threads: int | None, num_keys: int) -> Sequence[int] | None:
        """Return the words of a call, with 0 for each address and for the seed; None if several threads work."""
        if self.max_threads > 1 and threads != 1:
            return None
        return self.make_words({}, (0,) * len(self.table_origins), self.numbers, (0,) * self.num_outputs)

    def find_tile_ranges(self, buffers: Buffers, buffer: Buffer, words: Sequence[int]) -> tuple[Buffers, Buffer] | None:
        """Write the call's tile ranges into the buffer. Return (buffers, buffer); None if a check of the search fails.

        If the ranges need more memory than the buffer has, the result has a larger buffer and new `Buffers`.
        """
        search = self.search
        assert search is not None
        while True:
            _, view, address = buffer
            at, offsets = buffers.starts[1], buffers.offsets
            self.write_search_words(view, 8 * (at + len(SEARCH_FIELDS)), *words[self.search_words])
            search.function(address + 8 * at)
            count = view[offsets["count"]]
            if 0 <= count <= view[at + CAPACITY_INDEX]:
                if view[self.range_words[0][0]] != address + 8 * offsets["start"]:  # else the ranges are used already
                    self.use_found_ranges(view, {name: address + 8 * offset for name, offset in offsets.items()})
                return buffers, buffer
            buffers.release(buffer)
            if count < 0:
                return None
            search.capacity = 2 * count
            buffers = self.buffers = self.make_buffers()
            vars(self).pop("searching_record", None)  # the next record has memory for as many tile ranges
            buffer = buffers.acquire()

    def use_found_ranges(self, view: Any, addresses: Mapping[str, int]) -> None:
        """Let the kernel read the tile ranges that the search writes into the buffer's workspace."""
        for (index, _), name in zip(self.range_words, ("start", "first", "last", "full"), strict=True):
            view[index] = addresses[name]


def run_first(
    call: BoundCall,
    arguments: KernelArguments,
    output: Any,
    lse: Any,
    threads: int | None,
    outputs: Sequence[Any] = (),
) -> int | None:
    """Run a forward or decoding call for the problem of `arguments`, and return the result of `BoundCall.run`."""
    problem = arguments.problem
    sinks = None if problem.sinks is None else convert_sinks(problem.sinks)
    fields = {name: layout(array)[0] for name, array in (arguments.arrays | {"output": output}).items()}
    fields |= {"lse": lse.ctypes.data, "sinks": 0 if sinks is None else sinks.ctypes.data}
    tables, addresses = ([array.ctypes.data for array in arrays] for arrays in (arguments.tables, outputs))
    words = call.make_words(fields, tables, arguments.numbers, addresses, problem.seed)
    keep_alive = (*arguments.keep_alive, output, lse, sinks, *outputs)
    thread_count(threads)  # raises an error if a setting is wrong, even if one thread suffices
    return call.run(threads, words, arguments.numbers, problem.m, keep_alive, is_first=True)
