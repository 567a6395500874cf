"""Kernels in Triton for torch tensors on CUDA and ROCm devices. Triton is imported by the first call of a kernel."""

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

MAX_HEAD_WIDTH = 256  # largest d_k and d_v: registers and shared memory hold a tile of each
MAX_FORMULA_NODES = 400  # nodes of mask and score together; the compiler gets about one line for each node
MIN_TRITON_VERSION = (3, 5)  # the oldest triton that compiles the kernels
MIN_TRITON_VERSION_BY_DTYPE = {"float64": (3, 8)}  # the oldest triton that multiplies float64 matrices


class Triton(Kernel):
    """Forward and backward pass in every dtype; mask and score are compiled into the kernels.

    Parameters
    ----------
    architecture : str, optional
        The architecture that tile sizes are chosen for: "sm_90", "gfx942", .... The default is the architecture of the
        tensors' device. Only `aot.compile_kernels` may combine a GPU architecture with tensors on the CPU.
        "interpreter" serves tensors on the CPU if TRITON_INTERPRET=1 was set before triton was imported.
    """

    name = "triton"
    description = "generated through Triton for this device, O(n) memory"

    def __init__(self, architecture: str | None = None) -> None:
        self.architecture = architecture

    def refuses(self, problem: Problem) -> Iterator[Refusal]:
        """Yield a refusal for other devices and frameworks, too large sizes, and a missing or too old triton or GPU."""
        device_type = problem.device.partition(":")[0]
        required = "cpu" if self.architecture == "interpreter" else "cuda"
        if problem.framework != "torch" or device_type != required:
            cure = _move_cure(required) if problem.framework == "torch" else f"torch tensors on {required}"
            yield Refusal(f"{problem.framework} arrays on {problem.device}", cure)
        elif device_type == "cuda" and _is_too_old(problem.query.device):
            cure = "use a GPU of compute capability 8.0 or later; the streaming kernel serves this GPU"
            yield Refusal("a GPU older than compute capability 8.0", cure)
        yield from _size_refusals(problem)
        if device_type != required:
            return
        minimum = MIN_TRITON_VERSION_BY_DTYPE.get(problem.dtype, MIN_TRITON_VERSION)
        if importlib.util.find_spec("triton") is None:
            yield Refusal("triton is not installed", "pip install triton")
        elif triton_version() < minimum:
            yield Refusal(
                f"triton {'.'.join(map(str, triton_version()))} does not compile the kernels in {problem.dtype}",
                f"install triton {'.'.join(map(str, minimum))} or later, which later versions of torch include; "
                "until then the streaming kernel serves this problem",
            )

    def cost(self, problem: Problem) -> float:
        return 1.0

    def sources(self, problem: Problem) -> dict[str, str]:
        from .codegen.problem_source import render_sources

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
        wanted_tables: Collection[int],
        threads: int | None = None,
        statistic_gradients: StatisticGradients | None = None,
    ) -> Gradients | None:
        if next(self.refuses_backward(problem, wanted_tables), None) is not None:
            return None
        self._check_interpreter()
        from .launch.backward import backward

        statistic_gradients = statistic_gradients or StatisticGradients()
        return backward(problem, d_output, d_lse, saved, wanted_tables, statistic_gradients, self.architecture)

    def _check_interpreter(self) -> None:
        """Raise ParameterError if the architecture is "interpreter" but triton was imported in its compiling mode."""
        if self.architecture != "interpreter":
            return
        from triton.runtime.interpreter import InterpretedFunction

        from .kernels.forward import forward

        if not isinstance(forward, InterpretedFunction):
            raise ParameterError(
                "Triton('interpreter') in a process whose triton compiles kernels",
                "a process in which TRITON_INTERPRET=1 was set before triton was imported",
                "set TRITON_INTERPRET=1 before triton is imported",
            )


def _size_refusals(problem: Problem) -> Iterator[Refusal]:
    """Yield a refusal for head widths and formulas that are too large for every GPU."""
    if max(problem.d_k, problem.d_v) > MAX_HEAD_WIDTH:
        cure = f"use widths up to {MAX_HEAD_WIDTH}; the streaming kernel serves larger widths"
        yield Refusal(f"d_k {problem.d_k}, d_v {problem.d_v}", cure)
    num_nodes = sum(len(walk(formula)) for formula in (problem.mask, problem.score) if formula is not None)
    if num_nodes > MAX_FORMULA_NODES:
        yield Refusal(f"formulas of {num_nodes} nodes would take long to compile", "put computed values into a table")


@lru_cache
def _move_cure(required_device: str) -> str:
    """Return the cure for torch tensors on another device than the kernels need."""
    import torch

    built = required_device == "cpu" or torch.version.cuda or torch.version.hip
    install = "" if built else f"install a torch built for CUDA or ROCm, which {torch.__version__} is not, and "
    return f"{install}move query, key and value: .to({required_device!r})"


@lru_cache
def _is_too_old(device: Any) -> bool:
    """True for NVIDIA GPUs before compute capability 8.0: their matrix units support neither bfloat16 nor float64."""
    import torch

    return torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
