"""A call of a kernel with every argument bound except addresses, the numbers of formulas and the seed.

The bound arguments follow from the structure of the call: shapes, strides, dtypes, and formulas without their tables
and numbers. So a repeated call needs no planning. The tile ranges of the first call are bound too; a call whose mask
reads a table, or has other numbers than the first call, searches for its tile ranges in generated code.
`sightline.call_cache` decides which calls may share a bound call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays import layout
from ..codegen.abi import call_words
from ..kernels.block import Block
from ..kernels.kernel_spec import CACHE_LINE_BYTES, KernelSpec, round_up
from ..kernels.tile_search import SEARCH_FIELDS
from ..runtime.processor import HOST, Processor
from ..runtime.thread_count import thread_count
from .arguments import KernelArguments, compile_kernel, convert_sinks, convert_table
from .tile_search import BoundSearch

__all__ = ["CALL_FIELDS", "BoundCall", "CallInputs", "first_inputs", "to_signed"]

MAX_CACHED_BYTES = 1 << 20  # the most bytes of tile ranges and offsets that a cached call may keep alive
MAX_POOLED_BYTES = 1 << 18  # a larger buffer is allocated for each call and not reused
WORDS_PER_CACHE_LINE = CACHE_LINE_BYTES // 8  # the counter has its own line: threads write it
# the fields that each forward or decoding call gives
CALL_FIELDS = ("query", "key", "value", "output", "lse", "sinks", "seed")
CAPACITY_INDEX = list(SEARCH_FIELDS).index("capacity")
TILE_RANGE_FIELDS = ("tile_range_start", "tile_range_first", "tile_range_last", "tile_range_full")
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class CallInputs(NamedTuple):
    """The arguments of one call that a `BoundCall` does not have.

    fields : the values of the call's `fields`, in their order
    numbers : the numbers of the formulas
    words : `abi.call_words`: the address of each table, the numbers, the address of each output that is no field
    num_keys : the number of keys
    keep_alive : the arrays at these addresses, which must stay alive while threads work
    """

    fields: Sequence[int]
    numbers: tuple[float, ...]
    words: Sequence[int]
    num_keys: int
    keep_alive: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        fields: Sequence[int],
        tables: Sequence[int],
        numbers: tuple[float, ...],
        outputs: Sequence[int],
        num_keys: int,
        keep_alive: tuple[Any, ...],
    ) -> CallInputs:
        """Return the inputs with these addresses of tables and outputs."""
        words = call_words(tables, numbers, outputs) if tables or numbers or outputs else ()
        return cls(fields, numbers, words, num_keys, keep_alive)


def first_inputs(
    call: BoundCall, arguments: KernelArguments, output: Any, lse: Any, outputs: Sequence[Any] = ()
) -> CallInputs:
    """Return the inputs of a forward or decoding call for the problem of `arguments`. They keep all arrays alive."""
    problem = arguments.problem
    query, key, value = arguments.arrays.values()
    return call.make_inputs(
        (layout(query)[0], layout(key)[0], layout(value)[0], layout(output)[0], lse.ctypes.data),
        problem.sinks,
        problem.seed,
        [table.ctypes.data for table in arguments.tables],
        arguments.numbers,
        [array.ctypes.data for array in outputs],
        problem.m,
        (*arguments.keep_alive, output, lse, *outputs),
    )


def to_signed(seed: int) -> int:
    """Return the signed 64-bit word with the bits of a seed."""
    return seed - (2**64 if seed >= 2**63 else 0)


class Buffers:
    """Buffers of one layout: argument blocks, and the workspace that they point to. Unused buffers are kept.

    Parameters
    ----------
    blocks : (argument block, its fields, its workspace) of each function of the call. The workspace has the fields that
        point into the buffer, and the length of each in 8-byte words.
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
        self.unused: list[tuple[Any, Any, int]] = []  # pop and append are atomic

    def acquire(self) -> tuple[Any, Any, int]:
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

    def release(self, buffer: tuple[Any, Any, int]) -> None:
        """Keep a buffer that no thread reads any more for the next call."""
        if 8 * self.size <= MAX_POOLED_BYTES:
            self.unused.append(buffer)


class BoundCall:
    """A call of one kernel for one structure.

    Parameters
    ----------
    arguments, spec, writer : what determines the kernel
    values : the values of the bound fields that `arguments` does not know
    fields : names of the fields that each call gives
    max_threads : the most threads that find work
    workspace : fields that point into a buffer of the call, and the length of each in 8-byte words
    zeroed : the fields of the workspace that are 0 when the kernel starts
    outputs : the stride of each output that is no field
    changing : arrays of `arguments.keep_alive` that each call gives, besides query, key and value

    Attributes
    ----------
    table_origins : `Table.origin` of each table of the call that this object was made for
    first_operands : the addresses of query, key and value in that call
    """

    has_dynamic_key_length = False  # True if the call serves any number of keys

    def __init__(
        self,
        arguments: KernelArguments,
        spec: KernelSpec,
        writer: type[Block],
        values: Mapping[str, Any],
        processor: Processor,
        *,
        fields: Sequence[str],
        max_threads: int,
        workspace: Mapping[str, int],
        zeroed: Sequence[str],
        outputs: Sequence[int] = (),
        changing: Sequence[Any] = (),
    ) -> None:
        self.processor, self.max_threads, self.numbers = processor, max_threads, arguments.numbers
        self.table_origins, self.accumulator = arguments.table_origins, arguments.problem.accumulator
        self.first_operands = tuple([layout(array)[0] for array in arguments.arrays.values()])
        self.kernel = compile_kernel(spec, arguments, writer, processor)
        self.function: Any = _FUNCTION(self.kernel) if isinstance(self.kernel, int) else None  # None for an emulator
        names = list(writer.fields)
        self.block_fields, self.workspace, self.zeroed = writer.fields, workspace, zeroed
        self.field_indices = [names.index(name) for name in fields]
        self.call_words_at = 8 * len(names)  # bytes from the start of the block to the words after the fields
        bound = {**dict.fromkeys(writer.fields, 0), **arguments.fields(spec), **values}
        self.template = arguments.pack(writer.fields, bound, [(0, stride) for stride in outputs])
        self.range_words = [(index, int(self.template[index])) for index in map(names.index, TILE_RANGE_FIELDS)]
        self.search = BoundSearch.of(arguments, spec, processor)
        self.may_leave_tables = any(spec.clamped)
        self.keep_alive = arguments.constant_arrays(*changing)
        if self.search is not None and self.search.reads_tables:  # only the first call reads the bound tile ranges
            ranges = {word for _, word in self.range_words}
            self.keep_alive = tuple(array for array in self.keep_alive if array.ctypes.data not in ranges)
        self.buffers = self.make_buffers()

    convert_table, to_signed, inputs_of = staticmethod(convert_table), staticmethod(to_signed), CallInputs.of

    @staticmethod
    def make_inputs(
        operands: Sequence[int],
        sinks: Any,
        seed: int,
        tables: Sequence[int],
        numbers: tuple[float, ...],
        outputs: Sequence[int],
        num_keys: int,
        keep_alive: tuple[Any, ...],
    ) -> CallInputs:
        """Return the inputs of a forward or decoding call.

        Parameters
        ----------
        operands : the addresses of query, key, value, output and lse
        sinks : array (H,), or None
        tables, outputs : the addresses of the tables and of the statistics' arrays
        keep_alive : the arrays at these addresses
        """
        converted = None if sinks is None else convert_sinks(sinks)
        fields = (*operands, 0 if converted is None else converted.ctypes.data, to_signed(seed))
        return CallInputs.of(fields, tables, numbers, outputs, num_keys, (*keep_alive, converted))

    def make_buffers(self) -> Buffers:
        blocks = [(self.template, self.block_fields, self.workspace)]
        if self.search is not None:
            blocks.append((self.search.packed, SEARCH_FIELDS, self.search.workspace()))
        return Buffers(*blocks)

    @property
    def is_cacheable(self) -> bool:
        """True if later calls may use this call.

        The call must run on the host's processor, and the memory that it keeps alive must be small. If an index may
        leave its table at hidden pairs, the hidden pairs must be the same in every call.
        """
        return (
            self.processor is HOST
            and sum(array.nbytes for array in self.keep_alive) <= MAX_CACHED_BYTES
            and (self.search is None or not self.may_leave_tables)
        )

    def run(self, threads: int | None, inputs: CallInputs, is_first: bool = False) -> int | None:
        """Run the kernel. Return 1 if the kernel set `imprecise_lse_flag`, else 0; None if its outputs are not valid.

        `is_first` is true for the call that this object was made for: its tile ranges are bound. If the outputs are not
        valid, the call needs the full dispatch.
        """
        buffer = self.buffers.acquire()
        search = None if is_first else self.search
        if search is not None:
            if search.reads_tables or inputs.numbers != self.numbers:
                found = self.find_tile_ranges(buffer, inputs)
                if found is None:
                    return None
                buffer = found
            else:
                for index, word in self.range_words:
                    buffer[1][index] = word
        array, view, address = buffer
        for index, word in zip(self.field_indices, inputs.fields, strict=True):
            view[index] = word
        write_words(array, self.call_words_at, inputs.words)
        for name in self.zeroed:
            start, length = self.buffers.offsets[name], self.workspace[name]
            if length == 1:
                view[start] = 0
            else:
                array[start : start + length] = 0
        max_threads = self.set_fields(buffer, inputs)
        if max_threads == 1 and self.function is not None:
            self.function(address)
        else:
            packed, keep_alive = array[: self.template.size], (inputs.keep_alive, self.keep_alive, array)
            self.processor.call(self.kernel, packed, min(thread_count(threads), max_threads), keep_alive)
        status = self.read_status(view)
        self.buffers.release(buffer)
        return status

    def set_fields(self, buffer: tuple[Any, Any, int], inputs: CallInputs) -> int:
        """Set the fields that follow from the call, and return the most threads that find work."""
        return self.max_threads

    def read_status(self, view: Any) -> int | None:
        """Return the result of `run` from the workspace of a finished call."""
        return int(view[self.buffers.offsets["imprecise_lse_flag"]])

    def find_tile_ranges(self, buffer: tuple[Any, Any, int], inputs: CallInputs) -> tuple[Any, Any, int] | None:
        """Write the tile ranges of the call into a buffer, and return the buffer; None if a check of the search fails.

        If the ranges need more memory than the buffer has, the result is a larger buffer.
        """
        search = self.search
        assert search is not None
        while True:
            array, view, address = buffer
            at = self.buffers.starts[1]
            write_words(array, 8 * (at + len(SEARCH_FIELDS)), inputs.words[: search.num_words])
            view[at + CAPACITY_INDEX] = search.capacity
            search.function(address + 8 * at)
            offsets = self.buffers.offsets
            count = view[offsets["count"]]
            if count < 0:
                self.buffers.release(buffer)
                return None
            if count <= search.capacity:
                for (index, _), name in zip(self.range_words, ("start", "first", "last", "full"), strict=True):
                    view[index] = address + 8 * offsets[name]
                return buffer
            search.capacity = 2 * count
            self.buffers = self.make_buffers()
            buffer = self.buffers.acquire()


def write_words(array: Any, offset: int, words: Sequence[int]) -> None:
    """Write 64-bit words into the array from this offset in bytes on."""
    struct.pack_into(f"{len(words)}q", array, offset, *words)
