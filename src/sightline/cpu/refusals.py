"""The reasons why the CPU kernels refuse a problem, forward and backward."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ..formula.expression import walk
from ..problem.kernel import Refusal
from ..problem.problem import Problem

# the largest d_k and the largest d_v: each component takes 256 bytes of scratch on a thread's stack
MAX_HEAD_WIDTH = 1024
MAX_FORMULA_NODES = 400  # the most nodes of mask and score together: LLVM compiles a node in about 10 ms


def refuse_forward(problem: Problem) -> Iterator[Refusal]:
    """Yield a refusal if the arrays are not NumPy's or torch's on the CPU, d_k, d_v or a formula is too large, or
    llvmlite is missing.
    """
    if problem.framework not in ("numpy", "torch"):
        yield Refusal(f"arrays of {problem.framework}", "convert them, as with numpy.asarray or torch.from_dlpack")
    elif problem.device != "cpu":
        yield Refusal(f"arrays on {problem.device}", "move them to the CPU")
    if max(problem.d_k, problem.d_v) > MAX_HEAD_WIDTH:
        widths = f"d_k {problem.d_k}, d_v {problem.d_v}"
        yield Refusal(widths, f"widths up to {MAX_HEAD_WIDTH} fit a thread's stack")
    nodes = sum(len(walk(formula)) for formula in (problem.mask, problem.score) if formula is not None)
    if nodes > MAX_FORMULA_NODES:
        yield Refusal(f"formulas of {nodes} nodes take too long to compile", "store their values in a table")
    if importlib.util.find_spec("llvmlite") is None:
        yield Refusal("llvmlite is not installed", "pip install llvmlite")


def refuse_backward(problem: Problem) -> Iterator[Refusal]:
    """Yield the refusals of the forward pass, and a refusal for a problem without pairs or with d_v = 0."""
    yield from refuse_forward(problem)
    if 0 in problem.extent or problem.d_v == 0:
        shape = f"(B, H, n, m) = {problem.extent}, d_v {problem.d_v}"
        yield Refusal(f"no pairs or no columns: {shape}", "give at least one of each")
