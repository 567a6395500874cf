"""A generated function that finds a repeated call in a dictionary, and runs the call without Python if it can.

    find_or_run(entries, structure, numbers, operand, ..., table, ...)

Python calls this function of C. `entries` has an entry for each known call. `call.lookup` says what the function
returns. The operands are query, key and value; for the backward pass also output, d_output and lse. A call is direct if
`entry.prepared.direct` is a named tuple `Direct`. For a direct call, the function allocates the results, writes all
addresses and numbers into the argument block, and runs the kernel. Python runs the call if another thread uses the
record, if the record lacks the tile ranges, or if the kernel sets a flag.
"""

from __future__ import annotations

from ..codegen.builder import Variable
from ..codegen.values import INT32, INT64, POINTER, VOID, Value
from .array_reader import ArrayReader
from .launch_record import FIRST_COMPUTED, FIRST_NUMBER, FIRST_RESULT
from .launcher import PreparedCode


class DirectCall(ArrayReader):
    """Builds the function `find_or_run` that the module's docstring describes."""

    def build(self) -> None:
        self.read_arrays()
        layouts = self.make_layouts()
        self.return_null_if(layouts == self.null())
        entry = self.find_entry(layouts)
        direct = self.direct_of(entry, layouts)
        with self.if_then(direct != self.context["none"]):
            self.run(entry, layouts, direct)
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

    def direct_of(self, entry: Value, layouts: Value) -> Value:
        """Return a new reference to `entry.prepared.direct`, or to the object None if an object before it is None.

        If an attribute does not exist, the function returns with Python's error.
        """
        current = Variable(self, POINTER, entry)
        self.call("Py_IncRef", VOID, entry)
        for name in ("prepared", "direct"):
            with self.if_then(current.get() != self.context["none"]):
                owner = current.get()
                current.set(self.call("PyObject_GetAttr", POINTER, owner, self.context[name]))
                self.release(owner)
                with self.if_then(current.get() == self.null()):
                    self.release(entry, layouts)
                    self.return_(self.null())
        return current.get()

    def run(self, entry: Value, layouts: Value, direct: Value) -> None:
        """Write code that runs the call and returns its results. If the call cannot run, the code goes on after it."""
        results = Variable(self, POINTER, self.null())

        def release() -> None:
            self.release(entry, layouts, direct, results.get())

        prepared = PreparedCode(self, direct, self.addresses, release)
        with self.if_then(prepared.record.exchange_busy(1) == 0):
            count = self.allocate_results(prepared, results)
            prepared.store(self.argument(2), FIRST_NUMBER)
            prepared.store(prepared.member("computed"), FIRST_COMPUTED)
            status = prepared.run(lambda: self.hold_arrays(results.get()))
            with self.if_then(status == 0):
                self.release(direct)
                with self.if_then(count > 1):
                    self.return_(self.make_tuple(entry, results.get(), layouts))
                only = self.call("PyTuple_GetItem", POINTER, results.get(), self.value(0, INT64))
                self.call("Py_IncRef", VOID, only)
                self.release(results.get(), entry, layouts)
                self.return_(only)
            self.release(results.get())

    def allocate_results(self, prepared: PreparedCode, results: Variable) -> Value:
        """Allocate the results, put them into the new tuple `results`, and store their addresses. Return their number.

        If an allocation fails, the function returns with Python's error.
        """
        makers = prepared.member("makers")
        count = self.call("PyTuple_Size", INT64, makers)
        results.set(self.call("PyTuple_New", POINTER, count))
        prepared.fail_if(results.get() == self.null())
        with self.loop(0, count) as index:
            array = self.call("PyObject_CallNoArgs", POINTER, self.call("PyTuple_GetItem", POINTER, makers, index))
            prepared.fail_if(array == self.null())
            self.call("PyTuple_SetItem", INT32, results.get(), index, array)
            prepared.values.at((index + FIRST_RESULT) * 8).store(self.address_of_new(array))
        return count

    def hold_arrays(self, results: Value) -> Value:
        """Return a new tuple with the arguments and the results; null if there is no memory."""
        held = self.call("PyTuple_New", POINTER, self.count + 1)
        with self.if_then(held != self.null()):
            with self.loop(0, self.count) as index:
                self.call("Py_IncRef", VOID, self.argument(index))
                self.call("PyTuple_SetItem", INT32, held, index, self.argument(index))
            self.call("Py_IncRef", VOID, results)
            self.call("PyTuple_SetItem", INT32, held, self.count, results)
        return held

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
