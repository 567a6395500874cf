"""A call of the forward kernel that is ready but for where query, key, value and output lie.

Everything else about it follows from shapes, strides, dtypes and formulas without tables, so a small call asked again
needs neither planning nor bounds. `sightline.again` says which calls are the same.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .arguments import FORWARD
from .processor import HOST, Processor
from .threads import count

__all__ = ["Prepared"]

LARGEST = 1 << 20  # bytes of runs and offsets a prepared call may hold
SCRATCH = 1 << 16  # bytes of words and lse above which they are allocated for each call
LINE = 8  # words in a cache line: threads count in one and read the words in others
QUERY, KEY, VALUE, OUTPUT, LSE, COUNTER = (
    list(FORWARD).index(name) for name in ("query", "key", "value", "output", "lse", "counter")
)
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Prepared:
    """The forward kernel's call for arrays of one layout.

    Parameters
    ----------
    kernel, words : as `Processor.call` takes them
    most : threads that find work, at most
    rows : (B, H, n) multiplied, the length of lse
    kept : memory the words point to that is the same in every call
    """

    def __init__(self, kernel: Any, words: Any, most: int, rows: int, kept: tuple[Any, ...]) -> None:
        self.kernel, self.most, self.kept = kernel, most, kept
        self.template = words
        self.function = _FUNCTION(kernel)
        self.counter = -(-words.size // LINE) * LINE
        self.lse = self.counter + LINE
        self.size = self.lse + rows
        self.idle: list[tuple[Any, Any, int]] = []  # words nobody uses now; pop and append are one step each

    @classmethod
    def of(
        cls, kernel: Any, words: Any, most: int, rows: int, kept: tuple[Any, ...], processor: Processor
    ) -> Prepared | None:
        """The call prepared, where it runs on this processor and what it keeps is small."""
        held = sum(array.nbytes for array in kept)
        return cls(kernel, words, most, rows, kept) if processor is HOST and held <= LARGEST else None

    def fits(self, query: int, key: int, value: int) -> bool:
        """Whether arrays at these addresses are those it was prepared with, not copies of them."""
        return bool((self.template[[QUERY, KEY, VALUE]] == [query, key, value]).all())

    def run(self, threads: int | None, query: int, key: int, value: int, output: int, arrays: tuple[Any, ...]) -> None:
        """The kernel on arrays at these addresses; `arrays` are they, held while threads of the pool may work."""
        try:
            used = self.idle.pop()
        except IndexError:
            used = self._words()
        whole, words, address = used
        words[QUERY], words[KEY], words[VALUE], words[OUTPUT] = query, key, value, output
        words[self.counter] = 0
        if self.most == 1:
            self.function(address)
        else:
            HOST.call(self.kernel, whole, min(count(threads), self.most), (arrays, self.kept))
        if whole.nbytes <= SCRATCH:
            self.idle.append(used)

    def _words(self) -> tuple[Any, Any, int]:
        """Words of their own with a counter and lse behind them: the array, a view of it, its address."""
        whole = np.empty(self.size, np.int64)
        whole[: self.template.size] = self.template
        address = int(whole.ctypes.data)
        whole[COUNTER], whole[LSE] = address + 8 * self.counter, address + 8 * self.lse
        return whole, whole.data, address
