"""The generated function that reads arrays, as a function of Python; see `kernels.array_reader`."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from llvmlite import ir

from ...array_layouts import MAX_ARRAYS, MAX_AXES, MAX_GRADIENTS, Tensors
from ..kernels.array_reader import CONTEXT_FIELDS, ArrayReader
from ..runtime.processor import HOST
from ..runtime.python_function import make_function, python_library

__all__ = ["make_array_reader"]

NAME = "sightline_read_arrays"
READ_TENSOR_INDEX = 5  # of `dltensor_from_py_object_no_sync` among the words of DLPackExchangeAPI
DLPACK_MAJOR_VERSION = 1


def make_array_reader(tensors: Tensors) -> Any:
    """Return `array_layouts.read_in_python` in generated code; None if this Python or this torch cannot be served."""
    read_tensor = None if tensors.exchange is None else _exchange_function(tensors.exchange)
    if sys.implementation.name != "cpython" or (read_tensor is None and tensors.exchange is not None):
        return None
    conditions = list(tensors.conditions)
    names = ["requires_grad", "is_neg"]
    addresses = np.array([id(condition) for condition in conditions], np.int64)
    values = {
        "none": id(None),
        "true": id(True),
        "head_size": object.__basicsize__,
        "ndarray": id(np.ndarray),
        "tensor": id(tensors.type),
        "read_tensor": read_tensor or 0,
        **{name: id(name) for name in names},
        "is_grad_enabled": id(tensors.is_grad_enabled),
        "num_conditions": len(conditions),
        "conditions": addresses.ctypes.data,
    }
    context = np.array([values[name] for name in CONTEXT_FIELDS], np.int64)
    kernel = HOST.kernel(f"{MAX_ARRAYS} {MAX_AXES} {MAX_GRADIENTS}", NAME, _build)
    return make_function(kernel, "read_arrays", context, (tensors, conditions, names, addresses))


def _build() -> Any:
    module = ir.Module(NAME)
    ArrayReader(module, NAME).build()
    return module


def _exchange_function(capsule: Any) -> int | None:
    """Return the address of the exchange function that describes a tensor; None if its version is not known."""
    get = python_library().PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    words = (ctypes.c_uint64 * (READ_TENSOR_INDEX + 1)).from_address(get(capsule, b"dlpack_exchange_api"))
    major = words[0] & 0xFFFFFFFF
    return int(words[READ_TENSOR_INDEX]) or None if major == DLPACK_MAJOR_VERSION else None
