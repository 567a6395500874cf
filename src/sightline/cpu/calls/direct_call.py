"""A generated function that finds a repeated call in a dictionary, and runs the call without Python if it can.

    find_or_run(entries, structure, numbers, operand, ..., table, ...)

Python calls this function of C. `entries` has an entry for each known call. `CallLookup` says what the function
returns. The operands are query, key and value; for the backward pass also output, d_output and lse.

The code reads the layouts (dtype, shape and strides of each array) as 64-bit words, and the address of each array, as
`sightline.arrays.layouts.read_arrays` does in Python. It returns None if it cannot read an array; Python then makes all
checks of a first call. NumPy's arrays are read by the structs of NumPy's C API, and tensors by the exchange functions
of DLPack 1.3 (`DLPackExchangeAPI`).

A call is direct if `entry.prepared.direct` is a named tuple `Direct`. For a direct call, the function allocates the
results, writes all addresses and numbers into the argument block, and runs the kernel. Python runs the call if another
thread uses the record, if the record lacks the tile ranges, or if the kernel sets a flag.
"""

from __future__ import annotations

from typing import Any

from ...arrays.layouts import GPU_SHIFT, GRADIENT_BIT, MAX_ARRAYS, MAX_AXES, MAX_GPUS, TENSOR_BIT
from ..codegen.builder import Variable
from ..codegen.values import BOOL, BYTE, INT32, INT64, POINTER, VOID, Value
from .launch_record import FIRST_COMPUTED, FIRST_NUMBER, FIRST_RESULT, NUM_VALUES
from .launcher import PreparedCode, PythonFunction

# bytes from the head of the Python object to the fields of NumPy's structs PyArrayObject and PyArray_Descr
ARRAY_OFFSETS = {"data": 0, "axes": 8, "shape": 16, "strides": 24, "dtype": 40}
DTYPE_OFFSETS = {"order": 10, "number": 12, "itemsize": 24}

FIRST_ARRAY = 3  # the arguments before the arrays are entries, structure and numbers
DLPACK_CPU, DLPACK_CUDA, DLPACK_ROCM = 1, 2, 10  # DLDeviceType kDLCPU, kDLCUDA and kDLROCM

CONTEXT_FIELDS = {  # the words that the function finds at the address in its argument `self`
    "none": POINTER,  # the object None
    "true": POINTER,  # the object True
    "head_size": INT64,  # bytes of the head of a Python object
    "ndarray": POINTER,  # the type of NumPy's arrays
    "tensor": POINTER,  # the types of tensors, or a type that no array has
    "parameter": POINTER,
    "read_tensor": POINTER,  # the function `dltensor_from_py_object_no_sync`
    "requires_grad": POINTER,  # the names of attributes, as Python objects
    "is_neg": POINTER,
    "is_grad_enabled": POINTER,  # a Python function without arguments
    "num_conditions": INT64,
    "conditions": POINTER,  # Python functions without arguments; if the result of one is true, tensors are not read
    "prepared": POINTER,  # the names of attributes, as Python objects
    "direct": POINTER,
    "float": POINTER,  # Python's type
}


class DirectCall(PythonFunction):
    """Builds the function `find_or_run`. All its arguments from number `FIRST_ARRAY` on are arrays."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name, CONTEXT_FIELDS)
        self.num_arrays = self.count - FIRST_ARRAY
        self.words = self.alloca_array(INT64, MAX_ARRAYS * (1 + 2 * MAX_AXES))
        self.addresses = self.alloca_array(POINTER, NUM_VALUES)  # the values of the call begin with these addresses
        self.tensor = self.alloca_array(INT64, 6)  # a DLTensor
        self.num_words = Variable(self, INT64, 0)
        self.grad_enabled = Variable(self, BOOL, False)

    def build(self) -> None:
        self.read_arrays()
        layouts = self.call("PyBytes_FromStringAndSize", POINTER, self.words, self.num_words.get() * 8)
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

    # -- layouts and addresses ---------------------------------------------------------------------------------------
    def read_arrays(self) -> None:
        """Write code that stores the words of all layouts, and all addresses; see the module's docstring."""
        self.return_none_if(self.num_arrays > MAX_ARRAYS)
        self.check_types()
        with self.loop(0, self.num_arrays) as index:
            array = self.array(index)
            with self.if_else(self.type_of(array) == self.context["ndarray"]) as (yes, no):
                with yes:
                    self.read_ndarray(array, index)
                with no:
                    self.read_tensor(array, index)

    def array(self, index: Any) -> Value:
        return self.argument(index + FIRST_ARRAY)

    def make_tuple(self, *objects: Value) -> Value:
        """Return a new tuple with these objects and the addresses. The tuple takes over the references of the objects.

        If there is no memory for the tuple, the generated function returns, and Python raises MemoryError.
        """
        result = self.call("PyTuple_New", POINTER, self.num_arrays + len(objects))
        with self.if_then(result == self.null()):
            self.return_(result)
        for place, member in enumerate(objects):
            self.call("PyTuple_SetItem", INT32, result, self.value(place, INT64), member)
        with self.loop(0, self.num_arrays) as index:
            number = self.call("PyLong_FromVoidPtr", POINTER, self.addresses.at(index * 8).load(POINTER))
            self.call("PyTuple_SetItem", INT32, result, index + len(objects), number)
        return result

    # -- conditions ------------------------------------------------------------------------------------------------
    def check_types(self) -> None:
        """Let the function return None if an array is neither NumPy's nor torch's, or if a condition is true.

        `CONTEXT_FIELDS` has the conditions. The function tests them only if an array is a tensor.
        """
        has_tensor = Variable(self, BOOL, False)
        with self.loop(0, self.num_arrays) as index:
            kind = self.type_of(self.array(index))
            is_tensor = (kind == self.context["tensor"]) | (kind == self.context["parameter"])
            self.return_none_if(~(is_tensor | (kind == self.context["ndarray"])))
            has_tensor.set(has_tensor.get() | is_tensor)
        with self.if_then(has_tensor.get()):
            with self.loop(0, self.context["num_conditions"]) as index:
                self.return_none_if(self.is_true_result(self.context["conditions"].at(index * 8).load(POINTER)))
            self.grad_enabled.set(self.is_true_result(self.context["is_grad_enabled"]))

    def is_true_result(self, function: Value) -> Value:
        """True if the Python function returns an object that is true.

        If the Python function raises an error, such as the KeyboardInterrupt of a signal handler, the generated
        function returns with this error.
        """
        answer = self.call("PyObject_CallNoArgs", POINTER, function)
        self.return_null_if(answer == self.null())
        result = self.call("PyObject_IsTrue", INT32, answer)  # −1 after an error
        self.call("Py_DecRef", VOID, answer)
        return result != 0

    # -- arrays ----------------------------------------------------------------------------------------------------
    def read_ndarray(self, array: Value, index: Value) -> None:
        """Read the struct PyArrayObject, and the struct PyArray_Descr of its dtype."""
        body = array.at(self.context["head_size"])
        data, shape, strides, dtype = (
            body.at(ARRAY_OFFSETS[name]).load(POINTER) for name in ("data", "shape", "strides", "dtype")
        )
        body_of_dtype = dtype.at(self.context["head_size"])
        order, number, itemsize = (
            body_of_dtype.at(DTYPE_OFFSETS[name]).load(kind)
            for name, kind in (("order", BYTE), ("number", INT32), ("itemsize", INT64))
        )
        head = (itemsize << 48) | (((number.zero_extend(INT64) << 8) | order.zero_extend(INT64)) << 16)
        self.store(index, data, head, body.at(ARRAY_OFFSETS["axes"]).load(INT32).to(INT64), shape, strides, 1)

    def read_tensor(self, array: Value, index: Value) -> None:
        """Read the tensor's DLTensor, and whether the tensor requires a gradient."""
        tensor, status = self.tensor, self.describe_tensor(array)
        name, owner, one = self.context["is_neg"], self.given.at((index + FIRST_ARRAY) * 8), self.value(1, INT64)
        answer = self.call("PyObject_VectorcallMethod", POINTER, name, owner, one, self.null())
        is_negative = self.is_true_object(answer)
        # a tensor without memory has no address; Python tells an empty tensor from one whose memory was freed
        has_no_address = tensor.load(POINTER) == self.null()
        device, gpu = tensor.at(8).load(INT32), tensor.at(12).load(INT32).zero_extend(INT64) + 1
        is_on_cpu, is_on_gpu = device == DLPACK_CPU, (device == DLPACK_CUDA) | (device == DLPACK_ROCM)
        is_known = is_on_cpu | (is_on_gpu & (gpu <= MAX_GPUS))
        self.return_none_if((status != 0) | ~is_known | is_negative | has_no_address)
        requires_gradient = Variable(self, BOOL, False)
        with self.if_then(self.grad_enabled.get()):
            answer = self.call("PyObject_GetAttr", POINTER, array, self.context["requires_grad"])
            requires_gradient.set(self.is_true_object(answer))
        needs_gradient = requires_gradient.get()
        axes, dtype = tensor.at(16).load(INT32).to(INT64), tensor.at(20).load(INT32).zero_extend(INT64)
        unit = tensor.at(21).load(BYTE).zero_extend(INT64) >> 3
        gpu = self.where(is_on_cpu, self.value(0, INT64), gpu)
        head = (unit << 48) | (dtype << 16) | (gpu << GPU_SHIFT) | needs_gradient.to(INT64) * GRADIENT_BIT | TENSOR_BIT
        shape, strides = tensor.at(24).load(POINTER), tensor.at(32).load(POINTER)
        self.store(index, self.tensor_address(), head, axes, shape, strides, unit)

    def describe_tensor(self, array: Value) -> Value:
        """Write the DLTensor of a tensor to `self.tensor`. The result is 0 if that succeeds."""
        status = self.call(self.context["read_tensor"], INT32, array, self.tensor)
        with self.if_then(status != 0):
            self.call("PyErr_Clear", VOID)
        return status

    def tensor_address(self) -> Value:
        """Return the address of the first entry of the tensor that `describe_tensor` read last."""
        return self.tensor.load(POINTER).at(self.tensor.at(40).load(INT64))

    def is_true_object(self, answer: Value) -> Value:
        """True if the answer of Python is the object True. The reference is released."""
        self.return_null_if(answer == self.null())
        self.call("Py_DecRef", VOID, answer)
        return answer == self.context["true"]

    def store(
        self, index: Value, address: Value, head: Value, axes: Value, shape: Value, strides: Value, unit: Any
    ) -> None:
        """Store the address of an array, and its words: the head, then each length, then each stride in bytes.

        `shape` and `strides` are addresses of 64-bit integers. The strides there count units of `unit` bytes.
        """
        self.return_none_if(axes > MAX_AXES)
        self.addresses.at(index * 8).store(address)
        start = self.num_words.get()
        self.words.at(start * 8).store(head | (axes << 8))
        with self.loop(0, axes) as axis:
            at = start + axis + 1
            self.words.at(at * 8).store(shape.at(axis * 8).load(INT64))
            self.words.at((at + axes) * 8).store(strides.at(axis * 8).load(INT64) * unit)
        self.num_words.set(start + axes * 2 + 1)
