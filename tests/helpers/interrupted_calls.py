"""A program that interrupts attention calls of two threads, and then checks that such calls still work.

    python interrupted_calls.py timer SEED COUNT
    python interrupted_calls.py bytecode team|attention

`timer` raises KeyboardInterrupt COUNT times from a signal handler, after random times. `bytecode` raises
KeyboardInterrupt once before every bytecode instruction that the calling thread executes in `thread_team.call` (`team`)
or in `attention` (`attention`). A call that hangs ends the program with all stacks. It prints the number of interrupts.
"""

import faulthandler
import signal
import sys
import threading
import time

import numpy as np

import sightline
from minimal_kernels import count_calls
from sightline.cpu.launch.bound_call import BoundCall
from sightline.cpu.runtime import thread_team

MAX_CALL_SECONDS = 20.0

BoundCall.min_parallel_multiplications = 0  # small calls use two threads too
rng = np.random.default_rng(0)
SHORT, LONG = (rng.normal(size=(1, 2, n, 16)).astype(np.float32) for n in (40, 600))


def attend(x):
    """Return the results of a call that is found in the call cache and of a call that takes the full dispatch."""
    cached = sightline.attention(x, x, x, mask=sightline.causal(), kernel="cpu", threads=2)
    output, (received,) = sightline.attention(x, x, x, kernel="cpu", threads=2, see=[sightline.received()])
    return np.concatenate([cached.ravel(), output.ravel(), received.ravel()])


EXPECTED = attend(SHORT)
INTERRUPTED = {"team": thread_team.call, "attention": attend}  # functions by the name on the command line


def check_results():
    np.testing.assert_array_equal(attend(SHORT), EXPECTED)


def check_all():
    """Check calls of this thread and of a new thread. The program ends if they take too long."""
    faulthandler.dump_traceback_later(MAX_CALL_SECONDS, exit=True)
    check_results()
    assert count_calls(2) == 2  # a call still has two threads
    finished = []
    thread = threading.Thread(target=lambda: finished.append(check_results()), daemon=True)
    thread.start()
    thread.join()
    assert finished == [None]
    faulthandler.cancel_dump_traceback_later()


def by_timer(seed, count):
    """Interrupt calls `count` times."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # raises KeyboardInterrupt
    times, arrived = np.random.default_rng(int(seed)), 0
    while arrived < int(count):
        faulthandler.dump_traceback_later(MAX_CALL_SECONDS, exit=True)
        x = LONG if times.integers(4) == 0 else SHORT
        try:
            signal.setitimer(signal.ITIMER_REAL, times.uniform(1e-5, 2e-3))
            end = time.monotonic() + 0.1  # an interrupt inside a destructor is reported and not raised
            while time.monotonic() < end:
                attend(x)
        except KeyboardInterrupt:
            arrived += 1
        if arrived % 100 == 0:
            check_all()
    return arrived


def by_bytecode(name):
    """Interrupt calls of a function before each of the instructions executed in it, one instruction in each call."""
    interrupts = 0
    while is_interrupted(INTERRUPTED[name].__code__, interrupts):
        interrupts += 1
        check_all()
    return interrupts


def is_interrupted(code, number):
    """Interrupt the instruction of this number in calls of a function and of what it calls; False if there is none."""
    remaining = number

    def trace(frame, event, _):
        nonlocal remaining
        if event == "call" and frame.f_code is not code and frame.f_back.f_trace is None:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            remaining -= 1
            if remaining < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    faulthandler.dump_traceback_later(MAX_CALL_SECONDS, exit=True)
    try:
        sys.settrace(trace)
        attend(SHORT)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return remaining < 0


def main(how, *arguments):
    arrived = {"timer": by_timer, "bytecode": by_bytecode}[how](*arguments)
    check_all()
    print("interrupts:", arrived)


if __name__ == "__main__":
    main(*sys.argv[1:])
