"""Kernels in Triton, for torch tensors on CUDA and ROCm devices. Triton loads when the first one is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

from ..errors import ParameterError
from ..formula.expression import walk
from ..kernel import Gradients, Kernel, Refusal, Result
from ..problem import Problem
from ..statistics import Slopes
from .version import triton_version

__all__ = ["Triton"]

WIDEST = 256  # of d_k and d_v: what a tile of each takes of registers and shared memory
LONGEST = 400  # parts of mask and score, each a line for the compiler
OLDEST, OLDEST_OF = (3, 5), {"float64": (3, 8)}  # versions of triton that compile the kernels; 3.8 multiplies float64


class Triton(Kernel):
    """Forward and backward in every dtype, the formula compiled in.

    Parameters
    ----------
    architecture : "sm_90", "gfx942", ... of the tiles' sizes, the device's own if not given, and on the CPU for
        `ahead.compiled` alone; "interpreter" serves tensors on the CPU, where TRITON_INTERPRET=1 was set before triton
        was imported
    """

    name = "triton"
    describes = "generated through Triton for this device, O(n) memory"

    def __init__(self, architecture: str | None = None) -> None:
        self.architecture = architecture

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Other devices and libraries, rows and formulas too large, and no triton or one too old."""
        place = problem.device.partition(":")[0]
        wanted = "cpu" if self.architecture == "interpreter" else "cuda"
        if problem.framework != "torch" or place != wanted:
            moved = _moved(wanted) if problem.framework == "torch" else f"torch tensors on {wanted}"
            yield Refusal(f"{problem.framework} arrays on {problem.device}", moved)
        elif place == "cuda" and _too_old(problem.query.device):
            yield Refusal("a GPU older than compute capability 8.0", "take one of 8.0 or later; streaming serves it")
        yield from _too_large(problem)
        if place == wanted and importlib.util.find_spec("triton") is None:
            yield Refusal("triton is not installed", "pip install triton")
        elif place == wanted and triton_version() < (oldest := OLDEST_OF.get(problem.dtype, OLDEST)):
            least = ".".join(map(str, oldest))
            yield Refusal(
                f"{problem.dtype} by triton {'.'.join(map(str, triton_version()))}, which does not compile the kernels",
                f"take triton {least} or later, as later versions of torch bring; streaming serves it meanwhile",
            )

    def cost(self, problem: Problem) -> float:
        return 1.0

    def sources(self, problem: Problem) -> dict[str, str]:
        from .codegen.formula_source import sources_of

        return sources_of(problem)

    def run(self, problem: Problem, threads: int | None = None) -> Result:
        self._check()
        from .launch.forward import run

        return run(problem, self.architecture)

    def gradients(
        self,
        problem: Problem,
        d_output: Any,
        d_lse: Any,
        saved: tuple[Any, Any],
        wanted: Collection[int],
        threads: int | None = None,
        slopes: Slopes | None = None,
    ) -> Gradients | None:
        reasons = self.refuses(problem) if self.architecture is None else _too_large(problem)  # as `run`: anywhere
        if 0 in problem.extent or problem.d_v == 0 or next(reasons, None) is not None:
            return None
        self._check()
        from .launch.backward import gradients

        return gradients(problem, d_output, d_lse, saved, wanted, slopes or Slopes(), self.architecture)

    def _check(self) -> None:
        """Raise where the interpreter is meant and triton was imported without it.

        Raises
        ------
        ParameterError
            Kernels are compiled in this process, since TRITON_INTERPRET was not set in time.
        """
        if self.architecture != "interpreter":
            return
        from triton.runtime.interpreter import InterpretedFunction

        from .kernels.forward import forward

        if not isinstance(forward, InterpretedFunction):
            raise ParameterError(
                "Triton('interpreter') in a process whose triton compiles",
                "a process that was told to interpret before it imported triton",
                "set TRITON_INTERPRET=1 before triton is imported",
            )


def _too_large(problem: Problem) -> Iterator[Refusal]:
    """Rows too wide and formulas too long for any GPU."""
    if max(problem.d_k, problem.d_v) > WIDEST:
        yield Refusal(f"d_k {problem.d_k}, d_v {problem.d_v}", f"widths up to {WIDEST}; streaming serves wider ones")
    parts = sum(len(walk(formula)) for formula in (problem.mask, problem.score) if formula is not None)
    if parts > LONGEST:
        yield Refusal(f"formulas of {parts} parts would compile for long", "put what they compute into a table")


@lru_cache
def _moved(wanted: str) -> str:
    """What brings torch's tensors to where the kernels run."""
    import torch

    built = wanted == "cpu" or torch.version.cuda or torch.version.hip
    first = "" if built else f"install a torch built for CUDA or ROCm, which {torch.__version__} is not, and "
    return f"{first}move query, key and value: .to({wanted!r})"


@lru_cache
def _too_old(device: Any) -> bool:
    """Whether it multiplies neither bfloat16 nor float64 in matrices."""
    import torch

    return torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
