"""Minimal kernels: each writes one constant."""

from ctypes import CFUNCTYPE, c_void_p

import numpy as np

from sightline.cpu.runtime import compile
from sightline.cpu.runtime.machine import host


def constant(number):
    """Return a kernel that writes the number to the address in its argument."""
    return f"define void @apply(ptr %target) {{\n  store i64 {number}, ptr %target\n  ret void\n}}\n"


def called(address, arguments):
    """Call the kernel with the address of an array, and return the array."""
    CFUNCTYPE(None, c_void_p)(address)(arguments.ctypes.data)
    return arguments


def number_of(address):
    """Return the constant that a kernel writes."""
    return int(called(address, np.zeros(1, np.int64))[0])


def kernel(number, machine=None):
    """Return the compiled kernel of a constant."""
    return compile.get_or_compile(f"constant {number}", "apply", lambda: constant(number), machine or host())
