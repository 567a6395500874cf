"""Calls after interrupts at any moment, and calls in children that are forked while other threads call."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from llvmlite.binding import ffi

import minimal_kernels
from sightline.cpu.runtime.machine import native_machine

HELPERS = Path(__file__).parent.parent / "helpers"
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and forks of POSIX")


def printed(program, *arguments, timeout):
    """Return what a program of the helpers prints."""
    command = [sys.executable, str(HELPERS / program), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert result.returncode == 0, result.stderr
    return result.stdout


# -- interrupts ----------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 300), *(pytest.param(seed, 10_000, marks=pytest.mark.soak) for seed in range(1, 5))]
)
def test_calls_work_after_interrupts_at_random_times(seed, count):
    assert printed("interrupted_calls.py", "timer", seed, count, timeout=1800) == f"interrupts: {count}\n"


@pytest.mark.parametrize(
    ("what", "instructions"), [("team", 100), pytest.param("attention", 2000, marks=pytest.mark.soak)]
)
def test_calls_work_after_an_interrupt_before_any_instruction(what, instructions):
    name, number = printed("interrupted_calls.py", "bytecode", what, timeout=3600).split()
    assert name == "interrupts:"
    assert int(number) > instructions


def compile_for_this_processor():
    native_machine.cache_clear()
    return minimal_kernels.number_of(minimal_kernels.kernel(1))


@pytest.mark.parametrize("calls_before", [0, 3, 10])
def test_an_interrupt_inside_llvmlite_does_not_stop_other_threads(calls_before, fresh_kernels):
    """llvmlite calls `interrupt` when it has just taken its lock."""
    remaining = calls_before

    def interrupt():
        nonlocal remaining
        remaining -= 1
        if remaining == -1:
            raise KeyboardInterrupt

    def do_nothing():
        pass

    ffi.register_lock_callback(interrupt, do_nothing)
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_for_this_processor()
    finally:
        ffi.unregister_lock_callback(interrupt, do_nothing)
    found = []
    thread = threading.Thread(target=lambda: found.append(compile_for_this_processor()), daemon=True)
    thread.start()
    thread.join(20)
    assert found == [1]


# -- forks ---------------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize(
    ("count", "seed", "packages"),
    [
        (10, 0, []),
        *(pytest.param(1000, seed, more, marks=pytest.mark.soak) for seed in (1, 2) for more in ([], ["torch"])),
    ],
)
def test_children_of_forks_call(count, seed, packages):
    assert printed("forked_calls.py", seed, count, *packages, timeout=3600) == f"children: {count}\n"


IMPORTS = """
import os, signal, sys, threading, time
import numpy as np, sightline
importing = threading.Event()
class SlowImport:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            importing.set()
            time.sleep(1)
sys.meta_path.insert(0, SlowImport())
x = np.ones((1, 2, 9, 8), np.float32)
def attend():
    return sightline.attention(x, x, x, kernel="cpu").sum()
thread = threading.Thread(target=attend)
thread.start()
assert importing.wait(20)
child = os.fork()
if child == 0:
    signal.alarm(10)
    os._exit(int(attend() != x.size))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
"""


@posix
@pytest.mark.parametrize("module", ["sightline.cpu.launch.forward", "llvmlite.binding"])
def test_a_fork_waits_for_the_imports_of_a_first_call(module):
    command = [sys.executable, "-c", IMPORTS, module]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode, result.stdout) == (0, "0\n"), result.stderr
