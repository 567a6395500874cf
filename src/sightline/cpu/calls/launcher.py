"""Generated code that runs a launch record, and a function of C with which Python runs one.

    launch(direct, keep_alive, arguments, results, numbers, computed)  →  status

`direct` is a tuple `Direct`. The other tuples have the values of the call (see `launch_record`): addresses of arrays,
numbers of formulas, and words that Python computes.

The status is 1 if the kernel set `imprecise_lse_flag`, plus 2 if it set `nonfinite_flag`. It is `FAILED` if a check of
the search for tile ranges fails, `SHORT` if the record lacks the search or memory for its ranges, and None if another
thread uses the record. Python's global lock is released while a kernel runs on the calling thread. A kernel for several
threads is run by a function of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..codegen.builder import Builder, Variable
from ..codegen.values import BOOL, DOUBLE, INT64, POINTER, VOID, Value
from .launch_record import FIRST_COMPUTED, FIRST_NUMBER, FIRST_RESULT, NUM_VALUES, RECORD_FIELDS, Direct

FAILED, SHORT = -1, -2  # statuses of a call whose kernel did not run
# The functions of Python's C API that generated functions call. LLVM ends the process if one does not exist.
PYTHON_API = frozenset(
    {
        *("PyBytes_FromStringAndSize", "PyCapsule_GetPointer", "PyDict_GetItem", "PyErr_Clear", "PyErr_Occurred"),
        *("PyEval_RestoreThread", "PyEval_SaveThread", "PyFloat_AsDouble", "PyLong_AsLongLong", "PyLong_AsVoidPtr"),
        *("PyLong_FromLongLong", "PyLong_FromVoidPtr", "PyObject_CallNoArgs", "PyObject_CallOneArg"),
        *("PyObject_GetAttr", "PyObject_IsTrue", "PyObject_VectorcallMethod", "PyTuple_GetItem", "PyTuple_New"),
        *("PyTuple_SetItem", "PyTuple_Size", "Py_DecRef", "Py_IncRef"),
    }
)


class RecordCode:
    """Writes code that runs the kernel of a record.

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
        start = self.field("zeroed")
        with self.builder.loop(0, self.field("num_zeroed")) as word:
            start.at(word * 8).store(self.builder.value(0, INT64))

    def find_tile_ranges(self, values: Value) -> Value:
        """Run the search for tile ranges if the record has one. Return 0 if the kernel can run, `FAILED` or `SHORT`."""
        builder, search = self.builder, self.field("search")
        status = Variable(builder, INT64, 0)
        with builder.if_else(search == builder.null()) as (yes, no):
            with yes, builder.if_then(self.has_other_numbers(values)):
                status.set(SHORT)
            with no:
                words, target = self.field("words").at(self.field("first_search_word") * 8), self.field("search_words")
                with builder.loop(0, self.field("num_search_words")) as index:
                    target.at(index * 8).store(words.at(index * 8).load(INT64))
                builder.call(search, VOID, self.field("search_block"))
                count = self.field("count").load(INT64)
                with builder.if_then(count > self.field("capacity")):
                    status.set(SHORT)
                with builder.if_then(count < 0):
                    status.set(FAILED)
        return status.get()

    def has_other_numbers(self, values: Value) -> Value:
        """True if the tile ranges of the first call may be wrong, because the call has other numbers."""
        builder, first = self.builder, self.field("first_numbers")
        is_other = Variable(builder, BOOL, False)
        with builder.if_then(first != builder.null()), builder.loop(0, self.field("num_numbers")) as index:
            number = values.at((index + FIRST_NUMBER) * 8).load(INT64)
            is_other.set(is_other.get() | (number != first.at(index * 8).load(INT64)))
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


class PythonFunction(Builder):
    """Builds one function that Python calls directly, as a function of a C extension: the flag METH_FASTCALL.

        PyObject *function(PyObject *capsule, PyObject **arguments, Py_ssize_t count)

    The capsule points to the function's context, an array of 64-bit words. A word is a number, or the address of a
    Python object or of a C function. The generated code itself has no such address, so that it can be stored on disk.

    fields : the names and types of the context's words; the first one is `none`, the object None
    """

    def __init__(self, module: Any, name: str, fields: Mapping[str, Any]) -> None:
        super().__init__(module, name, (POINTER, POINTER, INT64), POINTER)
        capsule, self.given, self.count = self.arguments
        context = self.call("PyCapsule_GetPointer", POINTER, capsule, self.null())
        self.context = {name: context.at(8 * k).load(kind) for k, (name, kind) in enumerate(fields.items())}

    def call(self, function: str | Value, result: Any, *values: Value) -> Value:
        assert isinstance(function, Value) or function in PYTHON_API, function
        return super().call(function, result, *values)

    def argument(self, index: Any) -> Value:
        """Return the address of a Python object, one of the function's arguments."""
        return self.given.at(self.value(index, INT64) * 8).load(POINTER)

    def type_of(self, object_: Value) -> Value:
        """Return the type of a Python object: the last field of the object's head, whose size is in the context."""
        return object_.at(self.context["head_size"] - 8).load(POINTER)

    def return_none_if(self, condition: Value) -> None:
        with self.if_then(condition):
            self.call("Py_IncRef", VOID, self.context["none"])
            self.return_(self.context["none"])

    def return_null_if(self, condition: Value) -> None:
        """If the condition is true, return null. Python then raises the error that is set already."""
        with self.if_then(condition):
            self.return_(self.null())


class PreparedCode:
    """Writes code that runs a prepared call in a function that Python calls.

    function : the function that the code is part of
    direct : a tuple `Direct`
    values : the address of `NUM_VALUES` words
    release : writes code that releases the objects that the function owns; the code runs before the function returns
        with an error of Python
    """

    def __init__(self, function: PythonFunction, direct: Value, values: Value, release: Callable[[], None]) -> None:
        self.function, self.direct, self.values, self.release = function, direct, values, release
        self.record = RecordCode(function, function.call("PyLong_AsVoidPtr", POINTER, self.member("address")))

    def member(self, name: str) -> Value:
        """Return a member of the tuple `Direct`."""
        index = self.function.value(Direct._fields.index(name), INT64)
        return self.function.call("PyTuple_GetItem", POINTER, self.direct, index)

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
        self.fail_if(error != function.null())

    def fail_if(self, condition: Value, is_busy: bool = True) -> None:
        """If the condition is true, return with Python's error, and release the record if it is still in use."""
        with self.function.if_then(condition):
            if is_busy:
                self.record.exchange_busy(0)
            self.release()
            self.function.return_(self.function.null())

    def run(self, keep_alive: Callable[[], Value]) -> Value:
        """Write the words, run the kernel and return the status. The caller has stored the values.

        `keep_alive` returns a new reference to an object that holds all arrays of the call, for the other threads.
        """
        function, record = self.function, self.record
        record.write_words(self.values)
        found = record.find_tile_ranges(self.values)
        status = Variable(function, INT64, found)
        with function.if_then(found == 0):
            record.clear_workspace()
            team = self.member("run_on_team")
            with function.if_else(team == function.context["none"]) as (yes, no):
                with yes:
                    state = function.call("PyEval_SaveThread", POINTER)
                    record.run_kernel()
                    function.call("PyEval_RestoreThread", VOID, state)
                with no:
                    held = keep_alive()
                    self.fail_if(held == function.null())
                    answer = function.call("PyObject_CallOneArg", POINTER, team, held)
                    function.call("Py_DecRef", VOID, held)
                    self.fail_if(answer == function.null(), is_busy=False)  # `run_on_team` has released the record
                    function.call("Py_DecRef", VOID, answer)
            status.set(record.status())
        record.exchange_busy(0)
        return status.get()


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
