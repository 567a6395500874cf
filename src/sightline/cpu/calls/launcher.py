"""A generated function that runs a bound call on the calling thread, and that Python calls as a function of C.

    launch(address of the record, word, word, ...)  →  1 if the kernel set `imprecise_lse_flag`, plus 2 if it set
                                                       `nonfinite_flag`

A word is 64 bits of the kernel's argument block. The given words change from call to call: addresses, numbers and
the seed; see `launch.bound_call`. The record describes the other arguments, and the buffer with the block.

The result is None if the number of words is wrong, if another thread uses the buffer, or if the search for tile ranges
fails. The caller then runs the call without this function. Python's global lock is released while the kernel runs.
"""

from __future__ import annotations

from typing import Any

from ...arrays.layouts import MAX_ARRAYS
from ..codegen.builder import Builder, Variable
from ..codegen.python_function import PythonFunction
from ..codegen.values import BOOL, INT64, POINTER, VOID, Value

LAUNCH_CONTEXT = {"none": POINTER}
MAX_ZEROED = 4  # the most fields of a workspace that are set to 0
# The values of a direct call: addresses of arguments, then addresses of results, then numbers of formulas.
MAX_RESULTS, MAX_NUMBERS = 32, 32
FIRST_RESULT, FIRST_NUMBER, NUM_VALUES = MAX_ARRAYS, MAX_ARRAYS + MAX_RESULTS, MAX_ARRAYS + MAX_RESULTS + MAX_NUMBERS
UNCHANGED = -1  # the source of a word that is the same in every call
RECORD_FIELDS: dict[str, Any] = {
    "is_busy": INT64,  # 1 while a thread uses the buffer
    "kernel": POINTER,
    "block": POINTER,  # the kernel's argument block
    "words": POINTER,  # the address in the argument block at which the words of the call begin
    "num_words": INT64,
    # for direct calls, the source of each of these words: an index or `UNCHANGED`; see `RecordCode.write_words`
    "sources": POINTER,
    "imprecise_lse_flag": POINTER,  # null if the kernel does not set this flag
    "nonfinite_flag": POINTER,
    "search": POINTER,  # the function that searches for tile ranges; null if every call has those of the first call
    "search_block": POINTER,  # the argument block of the search
    "search_words": POINTER,  # the address in `search_block` of the words that the search takes from the call
    "first_search_word": INT64,  # the index of the first of these words among the words of the call
    "num_search_words": INT64,
    "count": POINTER,  # the number of tile ranges that the search found; negative if a check failed
    "capacity": INT64,  # the most tile ranges for which the buffer has memory
    "num_zeroed": INT64,  # how many of the following pairs are used: address and number of words that are set to 0
    **{f"{name}_{k}": kind for k in range(MAX_ZEROED) for name, kind in (("zeroed", POINTER), ("zeroed_words", INT64))},
}


class RecordCode:
    """Writes code that runs the kernel of a record, for `Launcher`, `DirectCall` and `XlaDirectCall`.

    Parameters
    ----------
    builder : the function that the code is part of
    record : the address of the record
    """

    def __init__(self, builder: Builder, record: Value) -> None:
        self.builder, self.record = builder, record

    def address_of(self, name: str) -> Value:
        return self.record.at(8 * list(RECORD_FIELDS).index(name))

    def field(self, name: str) -> Value:
        return self.address_of(name).load(RECORD_FIELDS[name], 8)

    def exchange_busy(self, new: int) -> Value:
        """Set `is_busy` to `new` and return its earlier value, in one atomic operation."""
        return self.builder.atomic_exchange(self.address_of("is_busy"), self.builder.value(new, INT64))

    def write_words(self, values: Value) -> None:
        """Write each word of a direct call that changes from call to call.

        The source of a word is an index of `values`, or `UNCHANGED`. `values` has `NUM_VALUES` words.
        """
        words, sources = self.field("words"), self.field("sources")
        with self.builder.loop(0, self.field("num_words")) as index:
            source = sources.at(index * 8).load(INT64)
            with self.builder.if_then(source >= 0):
                words.at(index * 8).store(values.at(source * 8).load(INT64))

    def clear_workspace(self) -> None:
        """Set the counter and the flags to 0, and the other memory of the buffer that the kernel expects to be 0."""
        pairs = self.address_of("zeroed_0")
        with self.builder.loop(0, self.field("num_zeroed")) as index:
            pair = pairs.at(index * 16)
            start = pair.load(POINTER)
            with self.builder.loop(0, pair.at(8).load(INT64)) as word:
                start.at(word * 8).store(self.builder.value(0, INT64))

    def find_tile_ranges(self) -> Value:
        """Run the search for tile ranges if the record has one. The result is false if the search fails."""
        builder, succeeds = self.builder, Variable(self.builder, BOOL, True)
        search, words = self.field("search"), self.field("words").at(self.field("first_search_word") * 8)
        with builder.if_then(search != builder.null()):
            target = self.field("search_words")
            with builder.loop(0, self.field("num_search_words")) as index:
                target.at(index * 8).store(words.at(index * 8).load(INT64))
            builder.call(search, VOID, self.field("search_block"))
            count = self.field("count").load(INT64)
            succeeds.set((count >= 0) & (count <= self.field("capacity")))
        return succeeds.get()

    def run_kernel(self, holds_lock: bool = True) -> Value:
        """Run the kernel without Python's global lock. Return `imprecise_lse_flag` + 2 · `nonfinite_flag`.

        `holds_lock` is True if the calling thread holds the global lock.
        """
        builder = self.builder
        state = builder.call("PyEval_SaveThread", POINTER) if holds_lock else None
        builder.call(self.field("kernel"), VOID, self.field("block"))
        status = self.flag("imprecise_lse_flag") + self.flag("nonfinite_flag") * 2
        if state is not None:
            builder.call("PyEval_RestoreThread", VOID, state)
        return status

    def flag(self, name: str) -> Value:
        """Return the value of a flag; 0 if the kernel has no such flag."""
        value, pointer = Variable(self.builder, INT64, 0), self.field(name)
        with self.builder.if_then(pointer != self.builder.null()):
            value.set(pointer.load(INT64))
        return value.get()


class Launcher(PythonFunction):
    """Builds the function `launch` that the module's docstring describes."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name, LAUNCH_CONTEXT)

    def build(self) -> None:
        self.record = record = RecordCode(self, self.call("PyLong_AsVoidPtr", POINTER, self.argument(0)))
        self.return_none_if(record.field("num_words") != self.count - 1)
        self.return_none_if(record.exchange_busy(1) != 0)
        self.write_words()
        record.clear_workspace()
        with self.if_then(~record.find_tile_ranges()):
            record.exchange_busy(0)
            self.return_none()
        status = record.run_kernel()
        record.exchange_busy(0)
        self.finish(self.call("PyLong_FromLongLong", POINTER, status))

    def write_words(self) -> None:
        """Write the given words into the block. Return with Python's error if a word is no integer of 64 bits."""
        words = self.record.field("words")
        with self.loop(0, self.record.field("num_words")) as index:
            words.at(index * 8).store(self.call("PyLong_AsLongLong", INT64, self.argument(index + 1)))
        with self.if_then(self.call("PyErr_Occurred", POINTER) != self.null()):
            self.record.exchange_busy(0)
            self.return_(self.null())
