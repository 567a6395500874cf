"""Python functions that call generated machine code, like the functions of a C extension.

Python calls such a function in 0.05 µs. A call through ctypes takes 0.4 µs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

METH_FASTCALL = 0x80


class _MethodDefinition(ctypes.Structure):
    """The struct PyMethodDef of Python's C API."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def python_library() -> Any:
    """Return a new object for Python's C API. Types set on its functions do not affect users of `ctypes.pythonapi`."""
    return ctypes.PyDLL("python", handle=ctypes.pythonapi._handle)  # on Windows the name must be a text


def make_function(address: int, name: str, context: Any, keep_alive: Any) -> Callable[..., Any]:
    """Return a Python function that calls the machine code at the address.

    Parameters
    ----------
    address : address of `PyObject *function(PyObject *self, PyObject **arguments, Py_ssize_t count)`
    name : the name of the Python function
    context : a NumPy array, whose address is in the capsule `self`
    keep_alive : the objects that the context points to; never freed, since Python may call the function until it ends
    """
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
