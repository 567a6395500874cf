"""Check and time the contenders of a problem.

In a round each contender has one timed turn. Rounds follow one another until the problem's time is used.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from sightline.cli.info_command import processor_name
from sightline.cli.timing import Turn, interleave, time_calls

from .core import Call, Contender, Measurement, Problem
from .peak_memory import peak_memory
from .peaks import kernel_instructions

MIN_ROUNDS, QUICK_ROUNDS = 5, 2
CALIBRATION_TRIES = 3  # untimed turns that decide how often a call is repeated in a turn; the fastest counts
SHORT_PAUSE = 0.02  # seconds of sleep before a turn in a table of several problems, which all use torch's threads


class Cpu:
    """The CPU as the device of a run: its clock, and its counter of memory. `cuda.Gpu` replaces them."""

    pause = 0.25  # seconds before a turn: after a call, threads of other libraries wait in a loop for up to 0.2 s
    seconds = 10.0  # time of one table

    def __init__(self, threads: int) -> None:
        self.threads = threads

    @property
    def description(self) -> str:
        threads = f"{self.threads} threads" if self.threads > 1 else "one thread"
        return f"{processor_name()}, {kernel_instructions()} kernels, {threads}"

    def time(self, call: Call, repeats: int) -> float:
        """Return the mean seconds of one call."""
        return time_calls(call.run, repeats, call.setup)

    def memory(self, call: Call) -> int | None:
        """Return the peak bytes of a call beyond those before it, outputs included; None if unknown."""
        return peak_memory(call.run, call.setup)

    def synchronize(self) -> None:
        """Wait until the device has finished all work that was queued."""


def measure(problem: Problem, device: Cpu, seconds: float, is_quick: bool = False) -> list[Measurement]:
    """Return the measurements of a problem's contenders, in their order, those of Sightline first.

    A result of Sightline that is wrong, or an error, ends the problem. Then no contender has times, and the measurement
    of the one that failed has the reason.
    """
    inputs, turns = problem.inputs(), dict[str, Turn]()
    found = [Measurement(contender.name, contender.is_ours) for contender in problem.contenders]
    pause = SHORT_PAUSE if is_quick or problem.table else device.pause
    each = found[0]
    with ExitStack() as stack:
        try:
            for contender, each in zip(problem.contenders, found, strict=True):
                each.reason = contender.refusal(problem)
                if not each.reason:
                    try:
                        turns[each.contender] = _prepare(contender, problem, inputs, device, each, stack, pause)
                    except Exception as error:  # libraries raise many kinds of errors
                        if contender.is_ours:
                            raise
                        each.reason = format_error(error)
                elif each is found[0]:
                    return found
            each = found[0]
            tries = CALIBRATION_TRIES if problem.table else 1
            times = interleave(turns, QUICK_ROUNDS if is_quick else MIN_ROUNDS, seconds, tries)
        except Exception as error:  # the run goes on with the other problems
            each.reason, each.has_failed = format_error(error), True
            return found
    for each in found:
        each.seconds = times.get(each.contender, [])
    return found


def _prepare(
    contender: Contender, problem: Problem, inputs: Any, device: Cpu, found: Measurement, stack: ExitStack, pause: float
) -> Turn:
    """Return the contender's turn, after a first call and a check of its results.

    Memory and error are stored in `found`. `stack` gets the function that releases what the contender holds.
    """
    import torch

    problem, threads = replace(problem, **contender.changes), contender.threads or device.threads
    torch.set_num_threads(threads)
    call = contender.prepare(problem, inputs, threads)
    stack.callback(call.close)
    if call.seconds is not None:
        own_clock = call.seconds
        return lambda repeats: own_clock()
    call.run(call.setup())
    device.synchronize()
    if not contender.has_arena and (problem.is_series or not problem.table):
        found.memory = device.memory(call)
    if contender.is_checked and (contender.is_ours or not problem.dropout):
        found.error = problem.error(call, inputs)
    if found.is_wrong and contender.is_ours:
        raise AssertionError(f"the results use {found.error:.3g} times the budget of rounding errors")

    def turn(repeats: int) -> float:
        torch.set_num_threads(threads)
        time.sleep(pause)
        return device.time(call, repeats) * call.factor

    return turn


def format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"
