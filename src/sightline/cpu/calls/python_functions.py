"""Makes the generated functions that Python calls as functions of C, unless this Python, NumPy or torch is unknown.

`calls.direct_call` and `calls.launcher` write their code. Python calls such a function in 0.05 µs. A call through
ctypes takes 0.4 µs.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ...arrays.layouts import MAX_ARRAYS, MAX_AXES, NoTensor, Tensors
from ..codegen.builder import Module
from ..runtime.processor import HOST
from .direct_call import ARRAY_OFFSETS, CONTEXT_FIELDS, DTYPE_OFFSETS, DirectCall
from .launcher import PYTHON_API, Launcher

READ_TENSOR_INDEX = 5  # of `dltensor_from_py_object_no_sync` among the words of DLPackExchangeAPI
DLPACK_MAJOR_VERSION = 1
METH_FASTCALL = 0x80  # a flag of Python's C API


def make_find_or_run(tensors: Tensors) -> Callable[..., Any] | None:
    """Return the function of `DirectCall`; None if this Python or this torch cannot be served.

    `CallLookup.find_in_python` does the same in Python, but runs no call.
    """
    read_tensor = None if tensors.exchange is None else _exchange_function(tensors.exchange)
    if not (is_supported() and _has_known_structs()) or (read_tensor is None and NoTensor not in tensors.types):
        return None
    conditions = list(tensors.conditions)
    names = ["requires_grad", "is_neg", "prepared", "direct"]
    addresses = np.array([id(condition) for condition in conditions], np.int64)
    values = {
        "none": id(None),
        "true": id(True),
        "head_size": object.__basicsize__,
        "ndarray": id(np.ndarray),
        "tensor": id(tensors.types[0]),
        "parameter": id(tensors.types[1]),
        "read_tensor": read_tensor or 0,
        **{name: id(name) for name in names},
        "is_grad_enabled": id(tensors.is_grad_enabled),
        "num_conditions": len(conditions),
        "conditions": addresses.ctypes.data,
        "float": id(float),
    }
    context = np.array([values[name] for name in CONTEXT_FIELDS], np.int64)
    limits, keep_alive = f"{MAX_ARRAYS} {MAX_AXES}", (tensors, conditions, names, addresses)
    return _make_function(DirectCall, "find_or_run", limits, context, keep_alive)


@cache
def launcher() -> Any:
    """Return the function `launch` of `calls.launcher`; None if this Python cannot be served."""
    if not is_supported():
        return None
    context = np.array([id(None), id(float), object.__basicsize__], np.int64)
    return _make_function(Launcher, "launch", "", context, ())


@cache
def is_supported() -> bool:
    """True if this is CPython with a global lock, and its C API has every function that generated code calls."""
    is_known = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
    return is_known and all(hasattr(python_library(), name) for name in PYTHON_API)


def python_library() -> Any:
    """Return a new object for Python's C API. Types set on its functions do not affect users of `ctypes.pythonapi`."""
    return ctypes.PyDLL("python", handle=ctypes.pythonapi._handle)  # on Windows the name must be a text


def _has_known_structs() -> bool:
    """True if NumPy's structs have the layout that `calls.direct_call` reads. Else arrays are read in Python.

    The check follows an address in a struct only if NumPy's Python interface gives the same address.
    """
    array = np.zeros((5, 7), np.complex64)[::2, ::-3]  # a dtype whose alignment is not its size
    body, of_dtype = (id(x) + object.__basicsize__ for x in (array, array.dtype))

    def read(kind: Any, address: int) -> int:
        return int(kind.from_address(address).value or 0)

    data, shape, strides, dtype = (
        read(ctypes.c_void_p, body + ARRAY_OFFSETS[name]) for name in ("data", "shape", "strides", "dtype")
    )
    is_known = (data, dtype) == (array.__array_interface__["data"][0], id(array.dtype)) and strides == shape + 16
    if not is_known or read(ctypes.c_int32, body + ARRAY_OFFSETS["axes"]) != array.ndim:
        return False
    lengths = tuple([read(ctypes.c_int64, shape + 8 * k) for k in range(4)])  # the strides follow the lengths
    kinds = {"order": ctypes.c_uint8, "number": ctypes.c_int32, "itemsize": ctypes.c_int64}
    facts = tuple([read(kind, of_dtype + DTYPE_OFFSETS[name]) for name, kind in kinds.items()])
    expected = ord(array.dtype.byteorder), array.dtype.num, array.itemsize
    return lengths == (*array.shape, *array.strides) and facts == expected


class _MethodDefinition(ctypes.Structure):
    """The struct PyMethodDef of Python's C API."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def _make_function(
    writer: type[DirectCall | Launcher], name: str, key: str, context: Any, keep_alive: Any
) -> Callable[..., Any]:
    """Return a Python function that runs the code of a writer.

    writer : builds `PyObject *function(PyObject *self, PyObject **arguments, Py_ssize_t count)`
    name : the name of the Python function
    key : what determines the code besides its sources
    context : a NumPy array, whose address is in the capsule `self`
    keep_alive : the objects that the context points to; never freed, since Python may call the function until it ends
    """

    def build() -> Any:
        module = Module()
        writer(module, f"sightline_{name}").build()
        return module

    address: Any = HOST.kernel(key, f"sightline_{name}", build)
    python = python_library()
    new_capsule, new_function = python.PyCapsule_New, python.PyCFunction_NewEx
    new_capsule.restype = new_function.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    new_function.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    definition = _MethodDefinition(name.encode(), address, METH_FASTCALL, None)
    _kept_alive.append((address, definition, context, keep_alive))
    function: Callable[..., Any] = new_function(
        ctypes.addressof(definition), new_capsule(context.ctypes.data, None, None), None
    )
    return function


_kept_alive: list[Any] = []


def _exchange_function(capsule: Any) -> int | None:
    """Return the address of the exchange function that describes a tensor; None if its version is not known."""
    get = python_library().PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    words = (ctypes.c_uint64 * (READ_TENSOR_INDEX + 1)).from_address(get(capsule, b"dlpack_exchange_api"))
    major = words[0] & 0xFFFFFFFF
    return int(words[READ_TENSOR_INDEX]) or None if major == DLPACK_MAJOR_VERSION else None
