"""A call of a kernel that is ready but for where query, key, value and output lie.

Everything else about it follows from shapes, strides, dtypes and formulas without tables, so a small call asked again
needs neither planning nor bounds. `sightline.call_cache` says which calls are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..codegen.abi import FORWARD_FIELDS
from ..runtime.processor import HOST, Processor
from ..runtime.thread_team import thread_count

__all__ = ["BoundCall"]

MAX_CACHED_BYTES = 1 << 20  # bytes of runs and offsets a prepared call may hold
MAX_POOLED_BYTES = 1 << 18  # bytes of words and their room above which they are allocated for each call
WORDS_PER_CACHE_LINE = 8  # words in a cache line: threads count in one and read the words in others
# in every kernel's words
QUERY_INDEX, KEY_INDEX, VALUE_INDEX, OUTPUT_INDEX, LSE_INDEX = map(
    list(FORWARD_FIELDS).index, ("query", "key", "value", "output", "lse")
)
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class BoundCall:
    """The forward kernel's call for arrays of one layout.

    Parameters
    ----------
    kernel, argument_words : as `Processor.call` takes them
    max_threads : threads that find work, at most
    workspace : fields of the kernel that point to memory of the call's own, and how many words of it
    keep_alive : memory the words point to that is the same in every call
    """

    fields: Mapping[str, Any] = FORWARD_FIELDS
    has_dynamic_key_length = False  # whether calls with other numbers of keys are the same

    def __init__(
        self,
        kernel: Any,
        argument_words: Any,
        max_threads: int,
        workspace: Mapping[str, int],
        keep_alive: tuple[Any, ...],
    ) -> None:
        self.kernel, self.max_threads, self.keep_alive = kernel, max_threads, keep_alive
        self.template = argument_words
        self.function: Any = _FUNCTION(kernel) if isinstance(kernel, int) else None  # emulators call it themselves
        self.offsets: dict[str, int] = {}
        self.size = _round_to_cache_lines(argument_words.size)
        for name, length in workspace.items():
            self.offsets[name] = self.size
            self.size += _round_to_cache_lines(length)
        self.counter_offset, self.lse_offset = self.offsets["counter"], 8 * self.offsets["lse"]
        self.free_buffers: list[tuple[Any, Any, int]] = []  # words nobody uses now; pop and append are one step each

    def is_cacheable(self, processor: Processor) -> bool:
        """Whether it may be kept: where it runs on the processor at hand and what it keeps is small."""
        return processor is HOST and sum(array.nbytes for array in self.keep_alive) <= MAX_CACHED_BYTES

    def matches_addresses(self, query: int, key: int, value: int) -> bool:
        """Whether arrays at these addresses are those it was prepared with, not copies of them."""
        return bool((self.template[[QUERY_INDEX, KEY_INDEX, VALUE_INDEX]] == [query, key, value]).all())

    def run(
        self,
        threads: int | None,
        query: int,
        key: int,
        value: int,
        output: int,
        arrays: tuple[Any, ...],
        lse: int | None = None,
    ) -> bool:
        """The kernel on arrays at these addresses; `arrays` are they, held while threads of the pool may work.

        lse goes to room of the call's own where no address is given. Returns whether it answered.
        """
        buffer = self.acquire_buffer()
        buffer_array, buffer_view, address = buffer
        buffer_view[QUERY_INDEX], buffer_view[KEY_INDEX], buffer_view[VALUE_INDEX], buffer_view[OUTPUT_INDEX] = (
            query,
            key,
            value,
            output,
        )
        buffer_view[LSE_INDEX] = address + self.lse_offset if lse is None else lse
        buffer_view[self.counter_offset] = 0
        if self.max_threads == 1:
            self.function(address)
        else:
            HOST.call(
                self.kernel, buffer_array, min(thread_count(threads), self.max_threads), (arrays, self.keep_alive)
            )
        self.release_buffer(buffer)
        return True

    def acquire_buffer(self) -> tuple[Any, Any, int]:
        """Words of the call's own with their room behind them: the array, a view of it, its address."""
        try:
            return self.free_buffers.pop()
        except IndexError:
            pass
        buffer_array = np.empty(self.size, np.int64)
        buffer_array[: self.template.size] = self.template
        address = int(buffer_array.ctypes.data)
        for name, offset in self.offsets.items():
            buffer_array[list(self.fields).index(name)] = address + 8 * offset
        return buffer_array, buffer_array.data, address

    def release_buffer(self, buffer: tuple[Any, Any, int]) -> None:
        """Once no thread reads these words any more."""
        if buffer[0].nbytes <= MAX_POOLED_BYTES:
            self.free_buffers.append(buffer)


def _round_to_cache_lines(words: int) -> int:
    """As many words in whole cache lines."""
    return -(-words // WORDS_PER_CACHE_LINE) * WORDS_PER_CACHE_LINE
