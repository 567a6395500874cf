"""The smallest kernels there are: each writes a number of its own."""

from ctypes import CFUNCTYPE, c_void_p

import numpy as np

from sightline.cpu.runtime import compile
from sightline.cpu.runtime.machine import host


def constant(number):
    """A kernel that writes the number where its argument points."""
    return f"define void @apply(ptr %words) {{\n  store i64 {number}, ptr %words\n  ret void\n}}\n"


def called(address, words):
    CFUNCTYPE(None, c_void_p)(address)(words.ctypes.data)
    return words


def number_of(address):
    return int(called(address, np.zeros(1, np.int64))[0])


def kernel(number, machine=None):
    return compile.get_or_compile(f"constant {number}", "apply", lambda: constant(number), machine or host())
