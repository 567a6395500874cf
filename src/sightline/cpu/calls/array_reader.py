"""Generated code that reads arrays of NumPy and torch, for functions that Python calls as functions of C.

The code reads the layouts (dtype, shape and strides of each array) as 64-bit words, and the address of each array. The
function returns None if the code cannot read an array; Python then makes all checks of a first call.
`sightline.arrays.layouts.read_arrays` does the same in Python. NumPy's arrays are read by the structs of NumPy's C API,
and tensors by the exchange functions of DLPack 1.3 (`DLPackExchangeAPI`).
"""

from __future__ import annotations

from typing import Any

from ...arrays.layouts import GPU_SHIFT, GRADIENT_BIT, MAX_ARRAYS, MAX_AXES, MAX_GPUS, TENSOR_BIT
from ..codegen.builder import Variable
from ..codegen.python_function import PythonFunction
from ..codegen.values import BOOL, BYTE, INT32, INT64, POINTER, VOID, Value
from .launch_record import NUM_VALUES

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


class ArrayReader(PythonFunction):
    """Builds a function that reads those of its arguments that are arrays: all from number `FIRST_ARRAY` on."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, name, CONTEXT_FIELDS)
        self.num_arrays = self.count - FIRST_ARRAY
        self.words = self.alloca_array(INT64, MAX_ARRAYS * (1 + 2 * MAX_AXES))
        self.addresses = self.alloca_array(POINTER, NUM_VALUES)  # the values of the call begin with these addresses
        self.tensor = self.alloca_array(INT64, 6)  # a DLTensor
        self.num_words = Variable(self, INT64, 0)
        self.grad_enabled = Variable(self, BOOL, False)

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

    def make_layouts(self) -> Value:
        """Return the words of all layouts as a new bytes object."""
        return self.call("PyBytes_FromStringAndSize", POINTER, self.words, self.num_words.get() * 8)

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
        return self.is_true(answer) != 0

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
        self.clear_error_if(status != 0)
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
