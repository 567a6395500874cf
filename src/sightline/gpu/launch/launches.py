"""One launch of a kernel: its arguments, and its options for Triton's compiler."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from triton.runtime import JITFunction
from triton.runtime.errors import OutOfResources

from ..configurations import Configuration
from ..kernels.tile_ops import MetaParameters

# For kernels whose configured number of stages exceeds shared memory: the number of stages that fits, by
# `KernelLaunch._memory_key`.
REDUCED_STAGES: dict[Hashable, int] = {}


@dataclass(frozen=True, eq=False)
class KernelLaunch:
    """One launch of a kernel."""

    kernel: Any  # a function of triton.jit
    programs: int
    arguments: dict[str, Any]  # by the kernel's parameter names
    configuration: Configuration

    def options(self, stages: int) -> dict[str, Any]:
        """Return the compiler options.

        Fused multiply-add is off, because every backend must round the products of a formula before it adds them. So
        the masks of all backends agree exactly.
        """
        return {"num_warps": self.configuration.warps, "num_stages": stages, "enable_fp_fusion": False}

    def kernel_arguments(self) -> dict[str, Any]:
        """Return the arguments in the form that the kernel takes.

        For Triton's compiler, the compile-time constants are wrapped in `tl.constexpr`.
        """
        if not isinstance(self.kernel, JITFunction):  # Triton's interpreter
            return self.arguments
        metas = {name: x for name, x in self.arguments.items() if isinstance(x, MetaParameters)}
        return self.arguments | {name: _wrap(meta) for name, meta in metas.items()}

    def launch(self) -> Any:
        """Run the kernel on the current stream, with fewer stages if the configured number exceeds shared memory.

        Return the compiled kernel; None if Triton's interpreter ran the kernel.

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
        query = self.arguments["arrays"].query.start
        meta, formulas = self.arguments.get("meta"), self.arguments.get("formulas")
        return self.kernel, self.configuration, query.dtype, query.device, meta, formulas


@lru_cache(1024)
def _wrap(meta: MetaParameters) -> MetaParameters:
    """Return `meta` with every field as a `tl.constexpr`.

    Before version 3.9, Triton compiles numbers in a tuple as run-time arguments unless they are `tl.constexpr`.
    """
    return replace(meta, **{entry.name: tl.constexpr(getattr(meta, entry.name)) for entry in fields(meta)})


def run_launches(launches: Iterable[KernelLaunch], query: Any) -> list[tuple[KernelLaunch, Any]]:
    """Run the launches on the device of `query`. Return each with what `KernelLaunch.launch` returned for it."""
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        return [(launch, launch.launch()) for launch in launches]
