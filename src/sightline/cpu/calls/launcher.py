"""Generated code that runs a prepared call, and a function of C with which Python runs one.

    launch(direct, keep_alive, arguments, results, numbers, computed)  →  status

The launch record (see `launch_record`) has the address of the kernel and of its argument block. The words of the block
that change from call to call are the values of the call: addresses of arrays, numbers of formulas, and words that
Python computes. `launch` gets them as tuples of numbers. `direct` is a tuple `Direct`.

The status is 1 if the kernel set `imprecise_lse_flag`, plus 2 if it set `nonfinite_flag`. It is −1 if a check of the
search for tile ranges fails, and None if another thread uses the record. Python's global lock is released while a
kernel runs on the calling thread. A kernel for several threads is run by a function of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...arrays.layouts import MAX_ARRAYS
from ..codegen.builder import Builder, Variable
from ..codegen.python_function import PythonFunction
from ..codegen.values import BOOL, DOUBLE, INT64, POINTER, VOID, Value

MAX_ZEROED = 4  # the most fields of a workspace that are set to 0
# the values of a call: addresses of arguments, addresses of results, numbers of formulas, and computed words
MAX_RESULTS, MAX_NUMBERS, MAX_COMPUTED = 64, 256, 8
FIRST_RESULT = MAX_ARRAYS
FIRST_NUMBER = FIRST_RESULT + MAX_RESULTS
FIRST_COMPUTED = FIRST_NUMBER + MAX_NUMBERS
NUM_VALUES = FIRST_COMPUTED + MAX_COMPUTED
RECORD, MAKERS, COMPUTED, TEAM, EXTEND = range(5)  # the members of a tuple `Direct`
UNCHANGED = -1  # the source of a word that is 0 in every call
FAILED = -1  # the status of a call whose search for tile ranges failed
RECORD_FIELDS: dict[str, Any] = {
    "is_busy": INT64,  # 1 while a thread uses the buffer
    "kernel": POINTER,
    "block": POINTER,  # the kernel's argument block
    "words": POINTER,  # the address in the argument block at which the words of the call begin
    "num_words": INT64,
    "sources": POINTER,  # of each of these words, an index of the values of a call, or `UNCHANGED`
    "imprecise_lse_flag": POINTER,  # null if the kernel does not set this flag
    "nonfinite_flag": POINTER,
    # without a search, the call has the tile ranges of the first call, as long as it has the same numbers
    "first_numbers": POINTER,  # the numbers of the first call; null if no number changes the ranges, or with a search
    "num_numbers": INT64,
    "numbers": POINTER,  # the numbers in the argument block
    "search": POINTER,  # the function that searches for tile ranges; null without a search
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
    """Writes code that runs the kernel of a record.

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
        """Write each word of the call that changes, from the `NUM_VALUES` words at the address `values`."""
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

    def find_tile_ranges(self) -> tuple[Value, Value]:
        """Run the search for tile ranges if the record has one.

        Return two booleans: false if a check of the search fails, and true if the record must first be extended. Then
        it lacks the search or memory for the ranges; see `LaunchRecord.extend`.
        """
        builder, search = self.builder, self.field("search")
        succeeds, is_short = Variable(builder, BOOL, True), Variable(builder, BOOL, False)
        with builder.if_else(search == builder.null()) as (yes, no):
            with yes:
                is_short.set(self.has_other_numbers())
            with no:
                words, target = self.field("words").at(self.field("first_search_word") * 8), self.field("search_words")
                with builder.loop(0, self.field("num_search_words")) as index:
                    target.at(index * 8).store(words.at(index * 8).load(INT64))
                builder.call(search, VOID, self.field("search_block"))
                count = self.field("count").load(INT64)
                succeeds.set(count >= 0)
                is_short.set(count > self.field("capacity"))
        return succeeds.get(), is_short.get()

    def has_other_numbers(self) -> Value:
        """True if the tile ranges of the first call may be wrong, because the call has other numbers."""
        builder, first = self.builder, self.field("first_numbers")
        is_other = Variable(builder, BOOL, False)
        with builder.if_then(first != builder.null()):
            own = self.field("numbers")
            with builder.loop(0, self.field("num_numbers")) as index:
                place = index * 8
                is_other.set(is_other.get() | (own.at(place).load(INT64) != first.at(place).load(INT64)))
        return is_other.get()

    def run_kernel(self) -> None:
        self.builder.call(self.field("kernel"), VOID, self.field("block"))

    def status(self) -> Value:
        """Return `imprecise_lse_flag` + 2 · `nonfinite_flag`."""
        return self.flag("imprecise_lse_flag") + self.flag("nonfinite_flag") * 2

    def flag(self, name: str) -> Value:
        """Return the value of a flag; 0 if the kernel has no such flag."""
        value, pointer = Variable(self.builder, INT64, 0), self.field(name)
        with self.builder.if_then(pointer != self.builder.null()):
            value.set(pointer.load(INT64))
        return value.get()


class PreparedCode:
    """Writes code that runs a prepared call in a function that Python calls.

    Parameters
    ----------
    function : the function that the code is part of
    direct : a tuple `Direct`, see `launch.prepared_call`
    values : the address of `NUM_VALUES` words
    release : writes code that releases the objects that the function owns; the code runs before the function returns
        with an error of Python
    """

    def __init__(self, function: PythonFunction, direct: Value, values: Value, release: Callable[[], None]) -> None:
        self.function, self.direct, self.values, self.release = function, direct, values, release
        self.record = RecordCode(function, function.call("PyLong_AsVoidPtr", POINTER, self.member(RECORD)))

    def member(self, index: int) -> Value:
        """Return a member of the tuple `Direct`."""
        return self.function.call("PyTuple_GetItem", POINTER, self.direct, self.function.value(index, INT64))

    def store(self, numbers: Value, first: int) -> None:
        """Store the members of a tuple, which are integers of 64 bits or floats, as the values from `first` on."""
        function, is_float = self.function, self.function.context["float"]
        with function.loop(0, function.call("PyTuple_Size", INT64, numbers)) as index:
            number = function.call("PyTuple_GetItem", POINTER, numbers, index)
            place = self.values.at((index + first) * 8)
            with function.if_else(function.type_of(number) == is_float) as (yes, no):
                with yes:
                    place.store(function.call("PyFloat_AsDouble", DOUBLE, number))
                with no:
                    place.store(function.call("PyLong_AsLongLong", INT64, number))
        error = function.call("PyErr_Occurred", POINTER)  # set if an integer needs more than 64 bits
        with function.if_then(error != function.null()):
            self.record.exchange_busy(0)
            self.fail()

    def fail(self) -> None:
        self.release()
        self.function.return_(self.function.null())

    def run(self, keep_alive: Callable[[], Value]) -> Value:
        """Write the words, run the kernel and return the status. The caller has stored the values.

        `keep_alive` returns a new reference to an object that holds all arrays of the call, for the other threads.
        After an error of Python the record stays busy, because threads may still use its buffer.
        """
        function, record, status = self.function, self.record, Variable(self.function, INT64, FAILED)
        record.write_words(self.values)
        succeeds = Variable(function, BOOL)
        with function.infinite_loop() as break_if:
            is_found, is_short = record.find_tile_ranges()
            succeeds.set(is_found)
            break_if(~is_short)
            self.check(function.call("PyObject_CallNoArgs", POINTER, self.member(EXTEND)))
        record.clear_workspace()
        with function.if_then(succeeds.get()):
            team = self.member(TEAM)
            with function.if_else(team == function.context["none"]) as (yes, no):
                with yes:
                    state = function.call("PyEval_SaveThread", POINTER)
                    record.run_kernel()
                    function.call("PyEval_RestoreThread", VOID, state)
                with no:
                    held = keep_alive()
                    with function.if_then(held == function.null()):
                        record.exchange_busy(0)
                        self.fail()
                    answer = function.call("PyObject_CallOneArg", POINTER, team, held)
                    function.call("Py_DecRef", VOID, held)
                    self.check(answer)
            status.set(record.status())
        record.exchange_busy(0)
        return status.get()

    def check(self, answer: Value) -> None:
        """Release the result of a function of Python; if it is null, return with Python's error."""
        with self.function.if_then(answer == self.function.null()):
            self.fail()
        self.function.call("Py_DecRef", VOID, answer)


LAUNCH_CONTEXT = {"none": POINTER, "float": POINTER, "head_size": INT64}


class Launcher(PythonFunction):
    """Builds the function `launch` that the module's docstring describes."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name, LAUNCH_CONTEXT)

    def build(self) -> None:
        prepared = PreparedCode(self, self.argument(0), self.alloca_array(INT64, NUM_VALUES), lambda: None)
        self.return_none_if(prepared.record.exchange_busy(1) != 0)
        for place, first in enumerate((0, FIRST_RESULT, FIRST_NUMBER, FIRST_COMPUTED)):
            prepared.store(self.argument(2 + place), first)
        status = prepared.run(self.hold_arrays)
        self.finish(self.call("PyLong_FromLongLong", POINTER, status))

    def hold_arrays(self) -> Value:
        self.call("Py_IncRef", VOID, self.argument(1))
        return self.argument(1)
