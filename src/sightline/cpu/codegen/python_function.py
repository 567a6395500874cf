"""Functions that Python calls directly, as it calls the functions of a C extension: the flag METH_FASTCALL.

    PyObject *function(PyObject *capsule, PyObject **arguments, Py_ssize_t count)

The capsule points to the function's context, an array of 64-bit words. A word is a number, or the address of a Python
object or of a C function. The generated code itself has no such address, so that it can be stored on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .builder import Builder
from .values import INT32, INT64, POINTER, VOID, Value

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


class PythonFunction(Builder):
    """Builds one function that Python calls directly. The context's first field is `none`, the object None.

    Parameters
    ----------
    fields : the names and types of the context's words
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
            self.return_none()

    def return_null_if(self, condition: Value) -> None:
        """If the condition is true, return null. Python then raises the error that is set already."""
        with self.if_then(condition):
            self.return_(self.null())

    def return_none(self) -> None:
        self.call("Py_IncRef", VOID, self.context["none"])
        self.return_(self.context["none"])

    def clear_error_if(self, condition: Value) -> None:
        with self.if_then(condition):
            self.call("PyErr_Clear", VOID)

    def is_true(self, answer: Value) -> Value:
        """Release a reference to the object. Return an INT32: 1 if the object is true, 0 if not, −1 after an error."""
        result = self.call("PyObject_IsTrue", INT32, answer)
        self.call("Py_DecRef", VOID, answer)
        return result
