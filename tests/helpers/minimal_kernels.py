"""Minimal kernels: kernels that write one constant, and a kernel that counts the threads that call it."""

from ctypes import CFUNCTYPE, c_void_p

import numpy as np

from sightline.cpu.runtime import compile, thread_team
from sightline.cpu.runtime.machine import host

# arguments: number of threads that have called, number of threads to wait for
MEETING = """
define void @meet(ptr %arguments) {
entry:
  %second = getelementptr i8, ptr %arguments, i64 8
  %wanted = load i64, ptr %second
  %before = atomicrmw add ptr %arguments, i64 1 seq_cst
  br label %wait
wait:
  %iteration = phi i64 [ 0, %entry ], [ %next, %again ]
  %called = load atomic i64, ptr %arguments seq_cst, align 8
  %all = icmp sge i64 %called, %wanted
  br i1 %all, label %done, label %again
again:
  %next = add i64 %iteration, 1
  %expired = icmp sgt i64 %next, 3000000000
  br i1 %expired, label %done, label %wait
done:
  ret void
}
"""


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


def count_calls(number, expected=None):
    """Return how many threads called a kernel that waits for `expected` threads."""
    address = compile.get_or_compile("meeting", "meet", lambda: MEETING, host())
    arguments = np.array([0, number if expected is None else expected], np.int64)
    thread_team.call(address, arguments, number, ())
    return int(arguments[0])
