"""A call of a kernel with every argument bound except the addresses of query, key, value and output.

The other arguments follow from shapes, strides, dtypes and formulas without tables. A repeated small call therefore
needs no planning and no new tile ranges. `sightline.call_cache` decides which calls may share a bound call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..codegen.abi import FORWARD_FIELDS
from ..kernels.kernel_spec import CACHE_LINE_BYTES, round_up
from ..runtime.processor import HOST, Processor
from ..runtime.thread_count import thread_count

__all__ = ["BoundCall"]

MAX_CACHED_BYTES = 1 << 20  # the most bytes of tile ranges and offsets that a cached call may keep alive
MAX_POOLED_BYTES = 1 << 18  # a larger buffer is allocated for each call and not reused
WORDS_PER_CACHE_LINE = CACHE_LINE_BYTES // 8  # the counter has its own line: threads write it
# Indices of these fields in FORWARD_FIELDS. DECODE_FIELDS has the same indices, since it begins with FORWARD_FIELDS.
QUERY_INDEX, KEY_INDEX, VALUE_INDEX, OUTPUT_INDEX, LSE_INDEX = map(
    list(FORWARD_FIELDS).index, ("query", "key", "value", "output", "lse")
)
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class BoundCall:
    """A call of the forward kernel for arrays of one layout.

    Parameters
    ----------
    kernel, packed : kernel and packed arguments as `Processor.call` takes them
    max_threads : the most threads that find work
    workspace : fields of the kernel that point into a buffer of the call, and the length of each in 8-byte words
    keep_alive : the memory that the arguments point to and that is the same in every call
    """

    fields: Mapping[str, Any] = FORWARD_FIELDS
    has_dynamic_key_length = False  # True if the call serves any number of keys

    def __init__(
        self, kernel: Any, packed: Any, max_threads: int, workspace: Mapping[str, int], keep_alive: tuple[Any, ...]
    ) -> None:
        self.kernel, self.max_threads, self.keep_alive = kernel, max_threads, keep_alive
        self.template = packed
        self.function: Any = _FUNCTION(kernel) if isinstance(kernel, int) else None  # None for a test's emulator
        self.offsets: dict[str, int] = {}
        self.size = round_up(packed.size, WORDS_PER_CACHE_LINE)
        for name, length in workspace.items():
            self.offsets[name] = self.size
            self.size += round_up(length, WORDS_PER_CACHE_LINE)
        self.counter_offset, self.lse_offset = self.offsets["counter"], 8 * self.offsets["lse"]
        self.free_buffers: list[tuple[Any, Any, int]] = []  # unused buffers; pop and append are atomic

    def is_cacheable(self, processor: Processor) -> bool:
        """True if the call may be cached: it runs on the host's processor, and the memory it keeps alive is small."""
        return processor is HOST and sum(array.nbytes for array in self.keep_alive) <= MAX_CACHED_BYTES

    def matches_addresses(self, query: int, key: int, value: int) -> bool:
        """True if the call was prepared with these addresses, so that the arrays are not copies of the originals."""
        return bool((self.template[[QUERY_INDEX, KEY_INDEX, VALUE_INDEX]] == [query, key, value]).all())

    def run(
        self, threads: int | None, q: int, k: int, v: int, output: int, arrays: tuple[Any, ...], lse: int | None = None
    ) -> bool:
        """Run the kernel on query, key and value at the addresses `q`, `k` and `v`; return True: the output is valid.

        `arrays` are query, key, value and any other arrays that must stay alive while threads work. If `lse` is None,
        the lse is written into the call's buffer.
        """
        buffer = self.acquire_buffer(q, k, v, output, lse)
        if self.max_threads == 1:
            self.function(buffer[2])
        else:
            keep_alive = (arrays, self.keep_alive)
            HOST.call(self.kernel, buffer[0], min(thread_count(threads), self.max_threads), keep_alive)
        self.release_buffer(buffer)
        return True

    def acquire_buffer(self, q: int, k: int, v: int, output: int, lse: int | None) -> tuple[Any, Any, int]:
        """Return a buffer with the packed arguments and the workspace: the array, a view of it, and its address."""
        try:
            buffer = self.free_buffers.pop()
        except IndexError:
            array = np.empty(self.size, np.int64)
            array[: self.template.size] = self.template
            buffer = array, array.data, int(array.ctypes.data)
            for name, offset in self.offsets.items():
                array[list(self.fields).index(name)] = buffer[2] + 8 * offset
        _, view, address = buffer
        view[QUERY_INDEX], view[KEY_INDEX], view[VALUE_INDEX], view[OUTPUT_INDEX] = q, k, v, output
        view[LSE_INDEX] = address + self.lse_offset if lse is None else lse
        view[self.counter_offset] = 0
        return buffer

    def release_buffer(self, buffer: tuple[Any, Any, int]) -> None:
        """Return a buffer that no thread reads any more to the pool."""
        if buffer[0].nbytes <= MAX_POOLED_BYTES:
            self.free_buffers.append(buffer)
