"""One launch of a kernel: its arguments, its grid and its compiler options."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import triton.language as tl
from triton.runtime import JITFunction
from triton.runtime.errors import OutOfResources

from ..kernels.tile_ops import MetaParameters
from ..tuning.default_configurations import Configuration

# By `KernelLaunch._memory_key`: the number of stages that fits shared memory, for kernels whose configured number does
# not.
REDUCED_STAGES: dict[Hashable, int] = {}


@dataclass(frozen=True, eq=False)
class KernelLaunch:
    """One launch of a kernel."""

    kernel: Any  # a function of triton.jit
    programs: int
    arguments: dict[str, Any]  # by the kernel's parameter names
    configuration: Configuration
    sources: dict[str, str] = field(default_factory=dict)  # the source of each generated function, by its name

    def options(self, stages: int) -> dict[str, Any]:
        """Return the compiler options.

        Fused multiply-add is off: every backend rounds the products of a formula before it adds them, so the masks of
        all backends agree exactly.
        """
        return {"num_warps": self.configuration.warps, "num_stages": stages, "enable_fp_fusion": False}

    def kernel_arguments(self) -> dict[str, Any]:
        """Return the arguments as the kernel takes them: Triton's compiler needs wrapped compile-time constants."""
        if not isinstance(self.kernel, JITFunction):  # Triton's interpreter
            return self.arguments
        metas = {name: x for name, x in self.arguments.items() if isinstance(x, MetaParameters)}
        return self.arguments | {name: _wrap(meta) for name, meta in metas.items()}

    def launch(self) -> Any:
        """Run the kernel on the current stream, with fewer stages if the configured number exceeds shared memory.

        The result is the compiled kernel, and None in Triton's interpreter.

        Raises
        ------
        triton.OutOfResources
            The kernel does not fit even with one stage.
        """
        arguments, stages = self.kernel_arguments(), self.configuration.stages
        if REDUCED_STAGES:
            stages = REDUCED_STAGES.get(self._memory_key(), stages)
        while True:
            try:
                return self.kernel[(self.programs,)](**arguments, **self.options(stages))
            except OutOfResources:
                if stages == 1:
                    raise
                stages -= 1
                REDUCED_STAGES[self._memory_key()] = stages

    def _memory_key(self) -> Hashable:
        """Return the cache key of `REDUCED_STAGES`: launches with equal keys need the same shared memory."""
        query = self.arguments["query"].start
        constants = (self.arguments.get(name) for name in ("meta", "formulas", "SUBBLOCKS"))
        return self.kernel, self.configuration, query.dtype, query.device, *constants


@lru_cache(1024)
def _wrap(meta: MetaParameters) -> MetaParameters:
    """Return `meta` with every field as a `tl.constexpr`.

    Before version 3.9, Triton compiles numbers in a tuple as run-time arguments unless they are `tl.constexpr`.
    """
    return replace(meta, **{entry.name: tl.constexpr(getattr(meta, entry.name)) for entry in fields(meta)})
