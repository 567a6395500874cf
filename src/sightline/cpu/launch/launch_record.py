"""Launch records with their memory, which generated code reads and writes; see `calls.launch_record`.

The tile ranges of a call are the runs of key blocks that each block of queries processes. A record has those of the
first call if they depend on no table, or else a search for tile ranges, with memory for a fixed number of them. A call
with other numbers than the first call, or with more ranges, needs a new record; see `BoundSearch.extend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..calls.launch_record import RECORD_FIELDS
from ..codegen.builder import CACHE_LINE_BYTES
from ..kernels.kernel_spec import round_up
from ..kernels.tile_search import SEARCH_FIELDS
from ..runtime.thread_count import thread_count

if TYPE_CHECKING:
    from .bound_call import BoundCall
    from .tile_search import BoundSearch

IS_BUSY, CAPACITY_INDEX = list(RECORD_FIELDS).index("is_busy"), list(SEARCH_FIELDS).index("capacity")
FLAGS = ("imprecise_lse_flag", "nonfinite_flag")  # fields of a workspace
MAX_KEPT_BYTES = 1 << 18  # a record with a larger buffer serves no later call
WORDS_PER_CACHE_LINE = CACHE_LINE_BYTES // 8  # each field begins on its own line, because threads write the counter


class Buffer:
    """The memory of one running call: the argument blocks of its functions, and the workspace that they point to.

    call : the bound call
    search : its search for tile ranges; None if the call has the tile ranges of the first call

    array : the words of the buffer
    addresses : the address of each field of the workspace
    starts : the index of each argument block
    capacity : the number of tile ranges for which the buffer has memory
    """

    def __init__(self, call: BoundCall, search: BoundSearch | None = None) -> None:
        self.starts, offsets, pointers, size = [], {}, {}, 0
        blocks, self.capacity = [(call.template, call.block_fields, call.workspace)], 0
        if search is not None:
            self.capacity = search.capacity
            blocks.append((search.packed, SEARCH_FIELDS, search.workspace(self.capacity)))
        for packed, fields, workspace in blocks:
            start = size
            self.starts.append(start)
            size += round_up(packed.size, WORDS_PER_CACHE_LINE)
            for name, length in workspace.items():
                pointers[start + list(fields).index(name)] = offsets[name] = size
                size += round_up(length, WORDS_PER_CACHE_LINE)
        self.array = np.empty(size, np.int64)
        self.address = int(self.array.ctypes.data)
        self.addresses = {name: self.address + 8 * offset for name, offset in offsets.items()}
        for start, (packed, *_) in zip(self.starts, blocks, strict=True):
            self.array[start : start + packed.size] = packed
        for index, offset in pointers.items():
            self.array[index] = self.address + 8 * offset
        if search is not None:
            self.array[self.starts[1] + CAPACITY_INDEX] = self.capacity
            for word, name in zip(call.range_words, ("start", "first", "last", "full"), strict=True):
                self.array[word] = self.addresses[name]

    def word(self, name: str) -> int:
        """Return the first word of a field of the workspace; 0 if there is no such field."""
        address = self.addresses.get(name)
        return 0 if address is None else int(self.array[(address - self.address) // 8])


class LaunchRecord:
    """A record and its buffer, which holds the argument block of the kernel. Only one call at a time uses a record.

    call : the bound call
    sources : of each word that a call gives, an index of the values of the call, or `UNCHANGED`

    address : the address of the record
    """

    def __init__(self, call: BoundCall, sources: Sequence[int]) -> None:
        assert len(sources) == call.num_words
        self.call, self.sources = call, np.array(sources, np.int64)
        self.array = np.zeros(len(RECORD_FIELDS), np.int64)
        self.address = int(self.array.ctypes.data)
        self.use_new_buffer()

    @property
    def can_be_kept(self) -> bool:
        """True if the record's memory is small."""
        return bool(self.buffer.array.nbytes <= MAX_KEPT_BYTES)

    def use_new_buffer(self) -> None:
        """Allocate a buffer, and write all fields of the record except `is_busy`."""
        call, search = self.call, self.call.search
        is_searched = search is not None and search.is_needed
        self.buffer = buffer = Buffer(call, search if is_searched else None)
        buffer.array[call.call_words] = 0
        addresses = buffer.addresses
        fields: dict[str, Any] = {
            "kernel": call.kernel,
            "block": buffer.address,
            "words": buffer.address + 8 * call.call_words.start,
            "num_words": call.num_words,
            "sources": self.sources.ctypes.data,
            "zeroed": addresses["counter"],
            "num_zeroed": call.num_zeroed,
        }
        fields |= {name: addresses[name] for name in FLAGS if name in addresses}
        if search is not None and is_searched:
            search_block = buffer.address + 8 * buffer.starts[1]
            fields |= {
                "search": search.address,
                "search_block": search_block,
                "search_words": search_block + 8 * len(SEARCH_FIELDS),
                "first_search_word": len(call.call_fields),
                "num_search_words": len(call.table_origins) + len(call.numbers),
                "count": addresses["count"],
                "capacity": buffer.capacity,
            }
        elif search is not None:
            fields |= {"first_numbers": search.first_numbers.ctypes.data, "num_numbers": len(call.numbers)}
        self.array[1:] = [fields.get(name, 0) for name in list(RECORD_FIELDS)[1:]]

    def run_on_team(self, max_threads: int, keep_alive: Any) -> None:
        """Run the kernel on several threads. Generated code calls this function while it uses the record."""
        call, buffer = self.call, self.buffer
        try:
            count = min(thread_count(call.threads), max_threads)
            block = buffer.array[: call.template.size]
            call.processor.call(call.kernel, block, count, (keep_alive, call, buffer))
        except BaseException:  # after an interrupt, threads of the pool may still use the buffer
            self.use_new_buffer()
            self.array[IS_BUSY] = 0
            raise
