"""A generated function that runs a whole repeated call, and that Python calls as a function of C.

    run_or_find(entries, structure, numbers, operand, ..., table, ...)
        →  the result, or (entry, results, layouts, address of operand, ..., address of table, ...)

The operands are query, key and value; for the backward pass also output, d_output and lse. `entries` is a dict, as the
call cache has one. The layouts of all arrays and the structure are the key of an entry; see `dispatch.call_request`.
If the entry has a record for direct calls (`direct_record`, an address), the function allocates the results by the
functions of the tuple `makers`, writes all addresses and the numbers into the record's argument block, and runs the
kernel. `results` is a tuple. If there is only one result, the function returns it alone.

`results` is None, and Python runs the call, if there is no such record, if another thread uses it, if the search for
tile ranges fails, or if the kernel sets a flag. The entry is None if there is none. The function returns None if the
call needs the full dispatch; see `sightline.arrays.layouts`.
"""

from __future__ import annotations

from typing import Any

from ..codegen.builder import Variable
from ..codegen.values import BOOL, DOUBLE, INT32, INT64, POINTER, VOID, Value
from .array_reader import CONTEXT_FIELDS, ArrayFunction
from .launcher import RecordCode

DIRECT_CONTEXT = CONTEXT_FIELDS | {
    "direct_record": POINTER,  # the names of attributes of an entry, as Python objects
    "makers": POINTER,
    "float": POINTER,  # Python's type
}
FIRST_ARRAY = 3  # the arguments before the arrays are entries, structure and numbers


class DirectCall(ArrayFunction):
    """Builds the function."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name, DIRECT_CONTEXT, FIRST_ARRAY)

    def build(self) -> None:
        """Build the function."""
        self.read_arrays()
        layouts = self.make_layouts()
        self.return_null_if(layouts == self.null())
        entry = self.find_entry(layouts)
        record = RecordCode(self, self.record_of(entry))
        with self.if_then(record.record != self.null()):
            self.run(entry, layouts, record)
        self.call("Py_IncRef", VOID, self.context["none"])
        self.finish(self.make_tuple(entry, self.context["none"], layouts))

    def find_entry(self, layouts: Value) -> Value:
        """Return a new reference to the entry; to None if there is no entry."""
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

    def record_of(self, entry: Value) -> Value:
        """Return the address of the entry's record for direct calls; null if it has none."""
        address = Variable(self, POINTER, self.null())
        with self.if_then(entry != self.context["none"]):
            number = self.call("PyObject_GetAttr", POINTER, entry, self.context["direct_record"])
            address.set(self.call("PyLong_AsVoidPtr", POINTER, number))
            self.call("Py_DecRef", VOID, number)
        return address.get()

    def run(self, entry: Value, layouts: Value, record: RecordCode) -> None:
        """Run the call, and return its results. If it cannot run here, the code after this code follows."""
        with self.if_then(record.exchange_busy(1) == 0):
            makers = self.call("PyObject_GetAttr", POINTER, entry, self.context["makers"])
            count = self.call("PyTuple_Size", INT64, makers)
            results = self.call("PyTuple_New", POINTER, count)
            self.make_results(record, makers, results, count, (entry, layouts))
            self.release(makers)
            record.clear_workspace()
            succeeds = Variable(self, BOOL, record.find_tile_ranges())
            with self.if_then(succeeds.get()):
                succeeds.set(record.run_kernel() == 0)
            record.exchange_busy(0)
            with self.if_then(succeeds.get()):
                with self.if_then(count > 1):
                    self.return_(self.make_tuple(entry, results, layouts))
                only = self.call("PyTuple_GetItem", POINTER, results, self.value(0, INT64))
                self.call("Py_IncRef", VOID, only)
                self.release(results, entry, layouts)
                self.return_(only)
            self.release(results)

    def make_results(
        self, record: RecordCode, makers: Value, results: Value, count: Value, owned: tuple[Value, ...]
    ) -> None:
        """Write all words, allocate the results, and put them into the tuple `results`."""
        words, first, consecutive = record.field("words"), record.field("first_result"), record.field("num_results")
        outputs = self.write_words(record, words)
        with self.loop(0, count) as index:
            maker = self.call("PyTuple_GetItem", POINTER, makers, index)
            array = self.call("PyObject_CallNoArgs", POINTER, maker)
            self.return_if_failed(array, record, (results, makers, *owned))
            self.call("PyTuple_SetItem", INT32, results, index, array)
            is_field = index < consecutive
            word = self.where(is_field, words.at((first + index) * 8), outputs.at((index - consecutive) * 8))
            word.store(self.address_of_new(array))
        error = self.call("PyErr_Occurred", POINTER)  # set if a number does not fit 64 bits
        with self.if_then(error != self.null()):
            record.exchange_busy(0)
            self.release(results, makers, *owned)
            self.return_(self.null())

    def return_if_failed(self, result: Value, record: RecordCode, owned: tuple[Value, ...]) -> None:
        """Return with Python's error if an allocation failed. The references to the objects `owned` are released."""
        with self.if_then(result == self.null()):
            record.exchange_busy(0)
            self.release(*owned)
            self.return_(result)

    def release(self, *objects: Value) -> None:
        for x in objects:
            self.call("Py_DecRef", VOID, x)

    def write_words(self, record: RecordCode, words: Value) -> Value:
        """Write the addresses of the arguments, and the numbers of the formulas. The other words never change.

        The result is the place of the words that follow: the addresses of the arrays of statistics.
        """
        num_operands = record.field("num_operands")
        with self.loop(0, num_operands) as index:
            words.at(index * 8).store(self.address(index))
        tables = words.at(record.field("first_table") * 8)
        with self.loop(0, record.field("num_tables")) as index:
            tables.at(index * 8).store(self.address(index + num_operands))
        numbers = tables.at(record.field("num_tables") * 8)
        with self.loop(0, record.field("num_numbers")) as index:
            number = self.call("PyTuple_GetItem", POINTER, self.argument(2), index)
            with self.if_else(self.type_of(number) == self.context["float"]) as (yes, no):
                with yes:
                    numbers.at(index * 8).store(self.call("PyFloat_AsDouble", DOUBLE, number))
                with no:
                    numbers.at(index * 8).store(self.call("PyLong_AsLongLong", INT64, number))
        return numbers.at(record.field("num_numbers") * 8)

    def address(self, index: Any) -> Value:
        return self.addresses.at(self.value(index, INT64) * 8).load(POINTER)

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
