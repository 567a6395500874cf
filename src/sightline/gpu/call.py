"""A kernel's call, made ready: what launches it on a device, and what compiles it for one that is not there."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from triton.runtime import JITFunction
from triton.runtime.errors import OutOfResources

from .configurations import Configuration
from .form import Form, constants

__all__ = ["Call", "twin"]


def twin(plain: str, careful: str) -> Callable[[Any], str]:
    """What profilers call a kernel that is compiled twice: with PARTS for blocks that must be done again."""
    return lambda compiled: careful if compiled.constants["PARTS"] else plain


_STAGES: dict[Hashable, int] = {}


@dataclass(frozen=True, eq=False)
class Call:
    """One launch of a kernel."""

    kernel: Any  # a function of triton.jit
    programs: int
    arguments: dict[str, Any]  # by the kernel's names; None and tuples as they are
    configuration: Configuration
    sources: dict[str, str] = field(default_factory=dict)  # of the generated functions it is given, by name

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told. Masks decide as on every other backend: products are rounded before sums."""
        sizes = self.configuration
        return {"num_warps": sizes.warps, "num_stages": sizes.stages, "enable_fp_fusion": False}

    def launch(self) -> None:
        """Run it on the current stream, with fewer stages where a formula's tables leave no memory for as many."""
        arguments = self.arguments
        if isinstance(self.kernel, JITFunction):  # the interpreter takes them as they are
            arguments = {name: constants(x) if isinstance(x, Form) else x for name, x in arguments.items()}
        alike = (self.kernel, self.configuration, *(arguments.get(name) for name in ("form", "seams", "PARTS")))
        for stages in range(_STAGES.get(alike, self.configuration.stages), 0, -1):
            try:
                self.kernel[(self.programs,)](**arguments, **(self.options | {"num_stages": stages}))
            except OutOfResources:
                if stages == 1:
                    raise
                _STAGES[alike] = stages - 1  # the compiler would find it out anew each time
            else:
                return
