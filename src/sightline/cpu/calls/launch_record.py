"""The launch record: a table of addresses and lengths with which generated code runs a bound call.

A bound call lacks only addresses of arrays, numbers of formulas and words such as the seed. `calls.launcher` describes
the record. The tile ranges of a call are the runs of key blocks that each block of queries processes. A record begins
with the ranges of the first call if they depend on no table. It gets a search for tile ranges when a call has other
numbers than the first call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..codegen.builder import CACHE_LINE_BYTES
from ..kernels.kernel_spec import round_up
from ..kernels.tile_search import SEARCH_FIELDS
from ..runtime.thread_count import thread_count
from .launcher import MAX_ZEROED, RECORD_FIELDS

if TYPE_CHECKING:
    from ..launch.bound_call import BoundCall

FLAGS = ("imprecise_lse_flag", "nonfinite_flag")  # fields of a workspace
MAX_KEPT_BYTES = 1 << 18  # a record with a larger buffer serves no later call
WORDS_PER_CACHE_LINE = CACHE_LINE_BYTES // 8  # each field begins on its own line, because threads write the counter


class Buffer:
    """The memory of one running call: argument blocks, and the workspace that they point to.

    Parameters
    ----------
    blocks : (argument block, its fields, its workspace) of each function: kernel, search for tile ranges. The workspace
        has the fields that point into the buffer, and the length of each in 8-byte words.

    Attributes
    ----------
    array, view : the words of the buffer, as an array and as a view of the array
    addresses : the address of each field of the workspace
    starts : the index of each argument block
    """

    def __init__(self, *blocks: tuple[Any, Mapping[str, Any], Mapping[str, int]]) -> None:
        self.starts, offsets, pointers, size = [], {}, {}, 0
        for packed, fields, workspace in blocks:
            start = size
            self.starts.append(start)
            size += round_up(packed.size, WORDS_PER_CACHE_LINE)
            for name, length in workspace.items():
                pointers[start + list(fields).index(name)] = offsets[name] = size
                size += round_up(length, WORDS_PER_CACHE_LINE)
        self.array = np.empty(size, np.int64)
        self.view, self.address = self.array.data, int(self.array.ctypes.data)
        self.addresses = {name: self.address + 8 * offset for name, offset in offsets.items()}
        for start, (packed, *_) in zip(self.starts, blocks, strict=True):
            self.array[start : start + packed.size] = packed
        for index, offset in pointers.items():
            self.array[index] = self.address + 8 * offset

    def word(self, name: str) -> int:
        """Return the first word of a field of the workspace; 0 if there is no such field."""
        address = self.addresses.get(name)
        return 0 if address is None else int(self.view[(address - self.address) // 8])


class LaunchRecord:
    """One record, and the buffer with the argument block of its kernel. One call uses it at a time.

    Parameters
    ----------
    call : the bound call
    sources : of each word that a call gives, an index of the values of the call, or `UNCHANGED`; see `calls.launcher`

    Attributes
    ----------
    address : the address of the record
    capacity : the number of tile ranges for which the buffer has memory; None without a search
    """

    def __init__(self, call: BoundCall, sources: Sequence[int]) -> None:
        assert len(call.zeroed) <= MAX_ZEROED
        assert len(sources) == call.num_words
        self.call, self.sources = call, np.array(sources, np.int64)
        search = call.search
        self.capacity = search.capacity if search is not None and search.runs_always else None
        self.array = np.zeros(len(RECORD_FIELDS), np.int64)
        self.address = int(self.array.ctypes.data)
        self.use_new_buffer()

    @property
    def can_be_kept(self) -> bool:
        """True if the record's memory is small."""
        return bool(self.buffer.array.nbytes <= MAX_KEPT_BYTES)

    def extend(self) -> None:
        """Give the record a search for tile ranges. If it has one, give it memory for the ranges that were found.

        Generated code calls this function while it uses the record. The words of the call are kept.
        """
        search, old = self.call.search, self.buffer
        assert search is not None
        self.capacity = search.capacity if self.capacity is None else 2 * old.word("count")
        search.capacity = max(search.capacity, self.capacity)  # new records begin with as much memory
        self.use_new_buffer()
        words = self.call.call_words
        self.buffer.array[words] = old.array[words]

    def use_new_buffer(self) -> None:
        """Allocate a buffer, and write all fields of the record except `is_busy`."""
        call, search = self.call, self.call.search
        self.buffer = buffer = call.make_buffer(self.capacity)
        buffer.array[call.call_words] = 0
        words, addresses = buffer.address + 8 * call.call_words.start, buffer.addresses
        fields: dict[str, Any] = {
            "kernel": call.kernel,
            "block": buffer.address,
            "words": words,
            "num_words": call.num_words,
            "sources": self.sources.ctypes.data,
            "num_zeroed": len(call.zeroed),
        }
        fields |= {name: addresses[name] for name in FLAGS if name in addresses}
        for k, (name, length) in enumerate(call.zeroed):
            fields |= {f"zeroed_{k}": addresses[name], f"zeroed_words_{k}": length}
        first = len(call.call_fields)  # the search takes tables and numbers
        if self.capacity is not None and search is not None:
            search_block = buffer.address + 8 * buffer.starts[1]
            fields |= {
                "search": search.address,
                "search_block": search_block,
                "search_words": search_block + 8 * len(SEARCH_FIELDS),
                "first_search_word": first,
                "num_search_words": len(call.table_origins) + len(call.numbers),
                "count": addresses["count"],
                "capacity": self.capacity,
            }
        elif search is not None:
            fields |= {
                "first_numbers": search.first_numbers.ctypes.data,
                "num_numbers": len(call.numbers),
                "numbers": words + 8 * (first + len(call.table_origins)),
            }
        self.array[1:] = [fields.get(name, 0) for name in list(RECORD_FIELDS)[1:]]

    def run_on_team(self, max_threads: int, threads: int | None, keep_alive: Any) -> None:
        """Run the kernel on several threads. Generated code calls this function while it uses the record."""
        try:
            count = min(thread_count(threads), max_threads)
        except BaseException:  # a setting is wrong; no thread uses the buffer
            self.array[0] = 0
            raise
        call = self.call
        call.processor.call(call.kernel, self.buffer.array[: call.template.size], count, (keep_alive, self))
