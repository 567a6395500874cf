"""A generated function that runs a bound call on the calling thread, and that Python calls as a function of C.

    launch(address of the record, word, word, ...)  →  1 if the kernel set `imprecise_lse_flag`, plus 2 if it set
                                                       `nonfinite_flag`

The words are those that each call gives; see `launch.bound_call`. The record describes the call and its buffer. The
result is None, and the caller runs the call without this function, if another thread uses the buffer, or if the search
for tile ranges fails. Python's global lock is released while the kernel runs.
"""

from __future__ import annotations

from typing import Any

from ..codegen.builder import Variable
from ..codegen.python_function import PythonFunction
from ..codegen.values import INT64, POINTER, VOID, Value

__all__ = ["LAUNCH_CONTEXT", "MAX_ZEROED", "RECORD_FIELDS", "Launcher"]

LAUNCH_CONTEXT = {"none": POINTER}
MAX_ZEROED = 4  # the most fields of a workspace that are set to 0
RECORD_FIELDS: dict[str, Any] = {
    "is_busy": INT64,  # 1 while a thread uses the buffer
    "kernel": POINTER,
    "block": POINTER,  # the kernel's argument block
    "words": POINTER,  # where the words of the call begin in it
    "num_words": INT64,
    "imprecise_lse_flag": POINTER,  # null if the kernel does not set this flag
    "nonfinite_flag": POINTER,
    "search": POINTER,  # the search for tile ranges; 0 if the tile ranges are bound
    "search_block": POINTER,  # the argument block of the search
    "search_words": POINTER,  # where the words that the search takes begin in it
    "first_search_word": INT64,  # the first of these words among the words of the call
    "num_search_words": INT64,
    "count": POINTER,  # the number of tile ranges that the search found; negative if a check failed
    "capacity": INT64,  # the most tile ranges for which the buffer has memory
    "num_zeroed": INT64,  # how many of the following pairs are used: address and number of words that are set to 0
    **{f"{name}_{k}": kind for k in range(MAX_ZEROED) for name, kind in (("zeroed", POINTER), ("zeroed_words", INT64))},
}


class Launcher(PythonFunction):
    """Builds the function."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name, LAUNCH_CONTEXT)

    def build(self) -> None:
        """Build the function."""
        self.record = self.call("PyLong_AsVoidPtr", POINTER, self.argument(0))
        self.return_none_if(self.field("num_words") != self.count - 1)
        self.return_none_if(self.exchange_busy(1) != 0)
        self.write_words()
        self.clear_workspace()
        self.find_tile_ranges()
        state = self.call("PyEval_SaveThread", POINTER)
        self.call(self.field("kernel"), VOID, self.field("block"))
        status = self.flag("imprecise_lse_flag") + self.flag("nonfinite_flag") * 2
        self.call("PyEval_RestoreThread", VOID, state)
        self.exchange_busy(0)
        self.finish(self.call("PyLong_FromLongLong", POINTER, status))

    def address_of(self, name: str) -> Value:
        return self.record.at(8 * list(RECORD_FIELDS).index(name))

    def field(self, name: str) -> Value:
        return self.address_of(name).load(RECORD_FIELDS[name], 8)

    def flag(self, name: str) -> Value:
        """Return the value of a flag of the workspace; 0 if there is none."""
        value, pointer = Variable(self, INT64, 0), self.field(name)
        with self.if_then(pointer != self.null()):
            value.set(pointer.load(INT64))
        return value.get()

    def exchange_busy(self, new: int) -> Value:
        """Set `is_busy` and return its value before that, in one atomic operation."""
        return self.atomic_exchange(self.address_of("is_busy"), self.value(new, INT64))

    def write_words(self) -> None:
        """Write the arguments into the block. Return with Python's error if an argument is no integer of 64 bits."""
        words = self.field("words")
        with self.loop(0, self.field("num_words")) as index:
            words.at(index * 8).store(self.call("PyLong_AsLongLong", INT64, self.argument(index + 1)))
        with self.if_then(self.call("PyErr_Occurred", POINTER) != self.null()):
            self.exchange_busy(0)
            self.return_(self.null())

    def clear_workspace(self) -> None:
        """Set the fields of the workspace to 0 that the kernel expects to be 0."""
        pairs = self.address_of("zeroed_0")
        with self.loop(0, self.field("num_zeroed")) as index:
            pair = pairs.at(index * 16)
            start = pair.load(POINTER)
            with self.loop(0, pair.at(8).load(INT64)) as word:
                start.at(word * 8).store(self.value(0, INT64))

    def find_tile_ranges(self) -> None:
        """Run the search for tile ranges, if there is one. Return None if it fails."""
        search, words = self.field("search"), self.field("words").at(self.field("first_search_word") * 8)
        with self.if_then(search != self.null()):
            target = self.field("search_words")
            with self.loop(0, self.field("num_search_words")) as index:
                target.at(index * 8).store(words.at(index * 8).load(INT64))
            self.call(search, VOID, self.field("search_block"))
            count = self.field("count").load(INT64)
            with self.if_then((count < 0) | (count > self.field("capacity"))):
                self.exchange_busy(0)
                self.return_none()
