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
from ..statistics import StatisticGradients
from .version import triton_version

__all__ = ["Triton"]

MAX_HEAD_WIDTH = 256  # of d_k and d_v: what a tile of each takes of registers and shared memory
MAX_FORMULA_NODES = 400  # parts of mask and score, each a line for the compiler
MIN_TRITON_VERSION, MIN_TRITON_VERSION_BY_DTYPE = (
    (3, 5),
    {"float64": (3, 8)},
)  # versions of triton that compile the kernels; 3.8 multiplies float64


class Triton(Kernel):
    """Forward and backward in every dtype, the formula compiled in.

    Parameters
    ----------
    architecture : "sm_90", "gfx942", ... of the tiles' sizes, the device's own if not given, and on the CPU for
        `aot.compile_kernels` alone; "interpreter" serves tensors on the CPU, where TRITON_INTERPRET=1 was set before triton
        was imported
    """

    name = "triton"
    description = "generated through Triton for this device, O(n) memory"

    def __init__(self, architecture: str | None = None) -> None:
        self.architecture = architecture

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Other devices and libraries, rows and formulas too large, and no triton or one too old."""
        device_type = problem.device.partition(":")[0]
        wanted = "cpu" if self.architecture == "interpreter" else "cuda"
        if problem.framework != "torch" or device_type != wanted:
            cure = _move_cure(wanted) if problem.framework == "torch" else f"torch tensors on {wanted}"
            yield Refusal(f"{problem.framework} arrays on {problem.device}", cure)
        elif device_type == "cuda" and _is_too_old(problem.query.device):
            yield Refusal("a GPU older than compute capability 8.0", "take one of 8.0 or later; streaming serves it")
        yield from _size_refusals(problem)
        if device_type == wanted and importlib.util.find_spec("triton") is None:
            yield Refusal("triton is not installed", "pip install triton")
        elif device_type == wanted and triton_version() < (
            minimum := MIN_TRITON_VERSION_BY_DTYPE.get(problem.dtype, MIN_TRITON_VERSION)
        ):
            minimum_text = ".".join(map(str, minimum))
            yield Refusal(
                f"{problem.dtype} by triton {'.'.join(map(str, triton_version()))}, which does not compile the kernels",
                f"take triton {minimum_text} or later, as later versions of torch bring; streaming serves it meanwhile",
            )

    def cost(self, problem: Problem) -> float:
        return 1.0

    def sources(self, problem: Problem) -> dict[str, str]:
        from .codegen.formula_source import render_sources

        return render_sources(problem)

    def run(self, problem: Problem, threads: int | None = None) -> Result:
        self._check_interpreter()
        from .launch.forward import run

        return run(problem, self.architecture)

    def refuses_backward(self, problem: Problem, wanted_tables: Collection[int] | None = None) -> Iterator[Refusal]:
        yield from self.refuses(problem) if self.architecture is None else _size_refusals(problem)
        if 0 in problem.extent or problem.d_v == 0:
            shape = f"(B, H, n, m) = {problem.extent}, d_v {problem.d_v}"
            yield Refusal(f"no pairs or no columns: {shape}", "give at least one of each")

    def backward(
        self,
        problem: Problem,
        d_output: Any,
        d_lse: Any,
        saved: tuple[Any, Any],
        wanted: Collection[int],
        threads: int | None = None,
        statistic_gradients: StatisticGradients | None = None,
    ) -> Gradients | None:
        if next(self.refuses_backward(problem, wanted), None) is not None:
            return None
        self._check_interpreter()
        from .launch.backward import backward

        return backward(
            problem, d_output, d_lse, saved, wanted, statistic_gradients or StatisticGradients(), self.architecture
        )

    def _check_interpreter(self) -> None:
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


def _size_refusals(problem: Problem) -> Iterator[Refusal]:
    """Rows too wide and formulas too long for any GPU."""
    if max(problem.d_k, problem.d_v) > MAX_HEAD_WIDTH:
        yield Refusal(
            f"d_k {problem.d_k}, d_v {problem.d_v}", f"widths up to {MAX_HEAD_WIDTH}; streaming serves wider ones"
        )
    num_nodes = sum(len(walk(formula)) for formula in (problem.mask, problem.score) if formula is not None)
    if num_nodes > MAX_FORMULA_NODES:
        yield Refusal(f"formulas of {num_nodes} parts would compile for long", "put what they compute into a table")


@lru_cache
def _move_cure(wanted: str) -> str:
    """What brings torch's tensors to where the kernels run."""
    import torch

    built = wanted == "cpu" or torch.version.cuda or torch.version.hip
    first = "" if built else f"install a torch built for CUDA or ROCm, which {torch.__version__} is not, and "
    return f"{first}move query, key and value: .to({wanted!r})"


@lru_cache
def _is_too_old(device: Any) -> bool:
    """Whether it multiplies neither bfloat16 nor float64 in matrices."""
    import torch

    return torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
