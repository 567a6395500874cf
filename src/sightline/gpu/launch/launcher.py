"""A kernel's call, made ready: what launches it on a device, and what compiles it for one that is not there."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from triton.runtime import JITFunction
from triton.runtime.errors import OutOfResources

from ..kernels.constexprs import Form, constants
from ..tuning.configurations import Configuration

__all__ = ["FEWER", "Call", "twin"]


def twin(plain: str, careful: str) -> Callable[[Any], str]:
    """What profilers call a kernel that is compiled twice: with PARTS for blocks that must be done again."""
    return lambda compiled: careful if compiled.constants["PARTS"] else plain


FEWER: dict[Hashable, int] = {}  # stages that memory had room for, where that was not as many as wanted


@dataclass(frozen=True, eq=False)
class Call:
    """One launch of a kernel."""

    kernel: Any  # a function of triton.jit
    programs: int
    arguments: dict[str, Any]  # by the kernel's names; None and tuples as they are
    configuration: Configuration
    sources: dict[str, str] = field(default_factory=dict)  # of the generated functions it is given, by name

    def options(self, stages: int) -> dict[str, Any]:
        """What the compiler is told. Masks decide as on every other backend: products are rounded before sums."""
        return {"num_warps": self.configuration.warps, "num_stages": stages, "enable_fp_fusion": False}

    def launch(self) -> None:
        """Run it on the current stream, with fewer stages where a formula's tables leave no memory for as many."""
        arguments, stages = self.arguments, self.configuration.stages
        if isinstance(self.kernel, JITFunction):  # the interpreter takes them as they are
            arguments = {name: constants(x) if isinstance(x, Form) else x for name, x in arguments.items()}
        if FEWER:
            stages = FEWER.get(self._alike(), stages)
        while True:
            try:
                self.kernel[(self.programs,)](**arguments, **self.options(stages))
            except OutOfResources:
                if stages == 1:
                    raise
                stages -= 1
                FEWER[self._alike()] = stages
            else:
                return

    def _alike(self) -> Hashable:
        """What calls have in common that take the same memory."""
        query = self.arguments["query"].start
        seen = (self.arguments.get(name) for name in ("form", "seams", "PARTS"))
        return self.kernel, self.configuration, query.dtype, query.device, *seen
