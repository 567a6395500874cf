"""A kernel's call, made ready: what launches it on a device, and what compiles it for one that is not there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from triton.runtime import JITFunction
from triton.runtime.errors import OutOfResources

from ..kernels.meta_parameters import MetaParameters, wrap_meta_parameters
from ..tuning.configurations import Configuration

__all__ = ["REDUCED_STAGES", "KernelLaunch"]

REDUCED_STAGES: dict[Hashable, int] = {}  # stages that memory had room for, where that was not as many as wanted


@dataclass(frozen=True, eq=False)
class KernelLaunch:
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
            arguments = {
                name: wrap_meta_parameters(x) if isinstance(x, MetaParameters) else x for name, x in arguments.items()
            }
        if REDUCED_STAGES:
            stages = REDUCED_STAGES.get(self._memory_key(), stages)
        while True:
            try:
                self.kernel[(self.programs,)](**arguments, **self.options(stages))
            except OutOfResources:
                if stages == 1:
                    raise
                stages -= 1
                REDUCED_STAGES[self._memory_key()] = stages
            else:
                return

    def _memory_key(self) -> Hashable:
        """What calls have in common that take the same memory."""
        query = self.arguments["query"].start
        constants = (self.arguments.get(name) for name in ("meta", "formulas", "SUBBLOCKS"))
        return self.kernel, self.configuration, query.dtype, query.device, *constants
