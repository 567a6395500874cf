"""The reasons why the CPU kernels refuse a problem, forward and backward."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ..call.kernel import Refusal, refuse_no_pairs, refuse_sizes
from ..call.problem import Problem

# the largest d_k and the largest d_v: each component takes up to 1,280 bytes of a thread's scratch
MAX_HEAD_WIDTH = 1024


def refuse_forward(problem: Problem) -> Iterator[Refusal]:
    """Yield the reasons why the CPU kernels cannot serve a problem, each with a cure; nothing if they can.

    Arrays must be NumPy arrays, or torch tensors on the CPU. d_k, d_v and formulas must not be too large. llvmlite must
    be installed.
    """
    if not problem.framework.has_memory:
        yield Refusal(f"arrays of {problem.framework.name}", "convert them by numpy.asarray or torch.from_dlpack")
    elif problem.device != "cpu":
        yield Refusal(f"arrays on {problem.device}", "move them to the CPU")
    yield from refuse_sizes(
        problem, MAX_HEAD_WIDTH, f"use widths up to {MAX_HEAD_WIDTH}; the streaming kernel serves larger widths"
    )
    if importlib.util.find_spec("llvmlite") is None:
        yield Refusal("llvmlite is not installed", "pip install llvmlite")


def refuse_backward(problem: Problem) -> Iterator[Refusal]:
    """Yield the refusals of the forward pass, and a refusal for a problem without pairs or with d_v = 0."""
    yield from refuse_forward(problem)
    yield from refuse_no_pairs(problem)
