"""A generated function that finds a repeated call in a dictionary, and runs the call without Python if it can.

    find_or_run(entries, structure, numbers, operand, ..., table, ...)

Python calls this function of C. `entries` has an entry for each known call. `call.lookup` says what the function
returns. The operands are query, key and value; for the backward pass also output, d_output and lse. A call is
direct if its entry has a record (`entry.prepared.direct`): the kernel's address and a buffer with its argument block.
For a direct call, the function allocates the results, writes all addresses and numbers into the argument block, and
runs the kernel. Python runs the call if another thread uses the record, if the search for tile ranges fails, or if the
kernel sets a flag.
"""

from __future__ import annotations

from typing import Any

from ..codegen.builder import Variable
from ..codegen.values import BOOL, DOUBLE, INT32, INT64, POINTER, VOID, Value
from .array_reader import CONTEXT_FIELDS, ArrayFunction
from .launcher import FIRST_NUMBER, FIRST_RESULT, NUM_VALUES, RecordCode

DIRECT_CONTEXT = CONTEXT_FIELDS | {
    "prepared": POINTER,  # the names of attributes, as Python objects
    "direct": POINTER,
    "float": POINTER,  # Python's type
}
FIRST_ARRAY = 3  # the arguments before the arrays are entries, structure and numbers


class DirectCall(ArrayFunction):
    """Builds the function `find_or_run` that the module's docstring describes."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name, DIRECT_CONTEXT, FIRST_ARRAY)
        self.addresses = self.alloca_array(POINTER, NUM_VALUES)

    def build(self) -> None:
        self.read_arrays()
        layouts = self.make_layouts()
        self.return_null_if(layouts == self.null())
        entry = self.find_entry(layouts)
        direct = self.direct_of(entry)
        with self.if_then(direct != self.context["none"]):
            address = self.call("PyTuple_GetItem", POINTER, direct, self.value(0, INT64))
            self.run(entry, layouts, direct, RecordCode(self, self.call("PyLong_AsVoidPtr", POINTER, address)))
        self.release(direct)
        self.call("Py_IncRef", VOID, self.context["none"])
        self.finish(self.make_tuple(entry, self.context["none"], layouts))

    def find_entry(self, layouts: Value) -> Value:
        """Return a new reference to the entry, or to the object None if there is no entry."""
        key = self.call("PyTuple_New", POINTER, self.value(2, INT64))
        self.return_null_if(key == self.null())
        for index, member in enumerate((layouts, self.argument(1))):
            self.call("Py_IncRef", VOID, member)
            self.call("PyTuple_SetItem", INT32, key, self.value(index, INT64), member)
        found = self.call("PyDict_GetItem", POINTER, self.argument(0), key)
        entry = self.where(found == self.null(), self.context["none"], found)
        self.call("Py_IncRef", VOID, entry)
        self.call("Py_DecRef", VOID, key)
        return entry

    def direct_of(self, entry: Value) -> Value:
        """Return a new reference to `entry.prepared.direct`, or to the object None if there is no entry."""
        direct = Variable(self, POINTER, self.context["none"])
        with self.if_else(entry == self.context["none"]) as (yes, no):
            with yes:
                self.call("Py_IncRef", VOID, entry)
            with no:
                prepared = self.call("PyObject_GetAttr", POINTER, entry, self.context["prepared"])
                direct.set(self.call("PyObject_GetAttr", POINTER, prepared, self.context["direct"]))
                self.release(prepared)
        return direct.get()

    def run(self, entry: Value, layouts: Value, direct: Value, record: RecordCode) -> None:
        """Write code that runs the call and returns its results. If the call cannot run, the code goes on after it."""
        with self.if_then(record.exchange_busy(1) == 0):
            makers = self.call("PyTuple_GetItem", POINTER, direct, self.value(1, INT64))
            count = self.call("PyTuple_Size", INT64, makers)
            results = self.call("PyTuple_New", POINTER, count)
            self.find_values(record, makers, results, count, (entry, layouts, direct))
            record.write_words(self.addresses)
            record.clear_workspace()
            succeeds = Variable(self, BOOL, record.find_tile_ranges())
            with self.if_then(succeeds.get()):
                succeeds.set(record.run_kernel() == 0)
            record.exchange_busy(0)
            with self.if_then(succeeds.get()):
                self.release(direct)
                with self.if_then(count > 1):
                    self.return_(self.make_tuple(entry, results, layouts))
                only = self.call("PyTuple_GetItem", POINTER, results, self.value(0, INT64))
                self.call("Py_IncRef", VOID, only)
                self.release(results, entry, layouts)
                self.return_(only)
            self.release(results)

    def find_values(
        self, record: RecordCode, makers: Value, results: Value, count: Value, owned: tuple[Value, ...]
    ) -> None:
        """Allocate the results, put them into the tuple `results`, and store their addresses and the numbers.

        `self.addresses` already has the addresses of the arguments. `owned` are the objects to release after an error.
        """
        with self.loop(0, count) as index:
            maker = self.call("PyTuple_GetItem", POINTER, makers, index)
            array = self.call("PyObject_CallNoArgs", POINTER, maker)
            self.return_if_failed(array, record, (results, *owned))
            self.call("PyTuple_SetItem", INT32, results, index, array)
            self.addresses.at((index + FIRST_RESULT) * 8).store(self.address_of_new(array))
        with self.loop(0, self.call("PyTuple_Size", INT64, self.argument(2))) as index:
            number = self.call("PyTuple_GetItem", POINTER, self.argument(2), index)
            place = self.addresses.at((index + FIRST_NUMBER) * 8)
            with self.if_else(self.type_of(number) == self.context["float"]) as (yes, no):
                with yes:
                    place.store(self.call("PyFloat_AsDouble", DOUBLE, number))
                with no:
                    place.store(self.call("PyLong_AsLongLong", INT64, number))
        error = self.call("PyErr_Occurred", POINTER)  # set if an integer needs more than 64 bits
        with self.if_then(error != self.null()):
            record.exchange_busy(0)
            self.release(results, *owned)
            self.return_(self.null())

    def return_if_failed(self, result: Value, record: RecordCode, owned: tuple[Value, ...]) -> None:
        """Return with Python's error if an allocation failed, after freeing `record` and releasing `owned`."""
        with self.if_then(result == self.null()):
            record.exchange_busy(0)
            self.release(*owned)
            self.return_(result)

    def release(self, *objects: Value) -> None:
        for x in objects:
            self.call("Py_DecRef", VOID, x)

    def address_of_new(self, array: Value) -> Value:
        """Return the address of the first entry of a new array."""
        address = Variable(self, POINTER)
        with self.if_else(self.type_of(array) == self.context["ndarray"]) as (yes, no):
            with yes:
                address.set(array.at(self.context["head_size"]).load(POINTER))
            with no:
                status = self.describe_tensor(array)
                address.set(self.where(status == 0, self.tensor_address(), self.null()))
        return address.get()
