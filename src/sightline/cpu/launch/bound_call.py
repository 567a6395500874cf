"""A call of a kernel that is ready but for where query, key, value and output lie.

Everything else about it follows from shapes, strides, dtypes and formulas without tables, so a small call asked again
needs neither planning nor bounds. `sightline.call_cache` says which calls are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..codegen.abi import FORWARD
from ..runtime.processor import HOST, Processor
from ..runtime.thread_team import count

__all__ = ["Prepared"]

LARGEST = 1 << 20  # bytes of runs and offsets a prepared call may hold
SCRATCH = 1 << 18  # bytes of words and their room above which they are allocated for each call
LINE = 8  # words in a cache line: threads count in one and read the words in others
# in every kernel's words
QUERY, KEY, VALUE, OUTPUT, LSE = map(list(FORWARD).index, ("query", "key", "value", "output", "lse"))
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Prepared:
    """The forward kernel's call for arrays of one layout.

    Parameters
    ----------
    kernel, words : as `Processor.call` takes them
    most : threads that find work, at most
    room : fields of the kernel that point to memory of the call's own, and how many words of it
    kept : memory the words point to that is the same in every call
    """

    fields: Mapping[str, Any] = FORWARD
    any_length = False  # whether calls with other numbers of keys are the same

    def __init__(self, kernel: Any, words: Any, most: int, room: Mapping[str, int], kept: tuple[Any, ...]) -> None:
        self.kernel, self.most, self.kept = kernel, most, kept
        self.template = words
        self.function: Any = _FUNCTION(kernel) if isinstance(kernel, int) else None  # emulators call it themselves
        self.places: dict[str, int] = {}
        self.size = _lines(words.size)
        for name, length in room.items():
            self.places[name] = self.size
            self.size += _lines(length)
        self.counter, self.own_lse = self.places["counter"], 8 * self.places["lse"]
        self.idle: list[tuple[Any, Any, int]] = []  # words nobody uses now; pop and append are one step each

    def kept_for(self, processor: Processor) -> bool:
        """Whether it may be kept: where it runs on the processor at hand and what it keeps is small."""
        return processor is HOST and sum(array.nbytes for array in self.kept) <= LARGEST

    def fits(self, query: int, key: int, value: int) -> bool:
        """Whether arrays at these addresses are those it was prepared with, not copies of them."""
        return bool((self.template[[QUERY, KEY, VALUE]] == [query, key, value]).all())

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
        used = self.words()
        whole, words, address = used
        words[QUERY], words[KEY], words[VALUE], words[OUTPUT] = query, key, value, output
        words[LSE] = address + self.own_lse if lse is None else lse
        words[self.counter] = 0
        if self.most == 1:
            self.function(address)
        else:
            HOST.call(self.kernel, whole, min(count(threads), self.most), (arrays, self.kept))
        self.give_back(used)
        return True

    def words(self) -> tuple[Any, Any, int]:
        """Words of the call's own with their room behind them: the array, a view of it, its address."""
        try:
            return self.idle.pop()
        except IndexError:
            pass
        whole = np.empty(self.size, np.int64)
        whole[: self.template.size] = self.template
        address = int(whole.ctypes.data)
        for name, place in self.places.items():
            whole[list(self.fields).index(name)] = address + 8 * place
        return whole, whole.data, address

    def give_back(self, used: tuple[Any, Any, int]) -> None:
        """Once no thread reads these words any more."""
        if used[0].nbytes <= SCRATCH:
            self.idle.append(used)


def _lines(words: int) -> int:
    """As many words in whole cache lines."""
    return -(-words // LINE) * LINE
