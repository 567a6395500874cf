"""The configurations of the kernels: tile sizes, warps and stages.

`select` takes a kernel's configuration from the current trial (`try_sizes`) if it has one, else the default for the
architecture, the kernel, the dtype and the head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..call.problem import Problem

# KiB of shared memory for a block of threads, by the prefix of the architecture's name
SHARED_MEMORY_KIB = {"sm_80": 163, "sm_8": 99, "sm_90": 227, "sm_10": 227, "sm_12": 99, "gfx": 64}


@dataclass(frozen=True)
class Configuration:
    """The tile sizes and the launch options of a kernel."""

    rows: int  # queries of a tile
    keys: int  # keys of a tile
    warps: int  # number of warps in a block of threads
    stages: int  # number of stages of the software pipeline that loads tiles of K and V
    # True if the kernel widens the operands before products, since Triton's interpreter cannot multiply bfloat16.
    widens_operands: bool = False


@dataclass
class Trial:
    """Configurations that take precedence over all others, and a record of what `select` returned during the trial."""

    sizes: Mapping[str, Configuration]  # the configurations on trial, by the name of the kernel
    requested: dict[str, Configuration] = field(default_factory=dict)  # the first selected configuration of each kernel
    architectures: set[str] = field(default_factory=set)  # every architecture that `select` was called with


_trial: ContextVar[Trial | None] = ContextVar("trial", default=None)


def select(kernel: str, problem: Problem, architecture: str) -> Configuration:
    """Return the configuration of a kernel ("forward", "backward_keys", ...) for a problem on an architecture."""
    trial = _trial.get()
    found = None if trial is None else trial.sizes.get(kernel)
    if found is None:
        found = default_configuration(architecture, kernel, problem.dtype, max(problem.d_k, problem.d_v))
    if trial is not None:
        trial.requested.setdefault(kernel, found)
        trial.architectures.add(architecture)
    return found


def is_trial() -> bool:
    """Return True during a trial, whose launches must not be stored."""
    return _trial.get() is not None


@contextmanager
def try_sizes(sizes: Mapping[str, Configuration] | None = None) -> Iterator[Trial]:
    """Make `select` return the configurations `sizes` while the context lasts.

    For kernels that `sizes` lacks, `select` returns the default table's configurations. If `sizes` is None, the
    configurations of the surrounding trial apply, if there is a surrounding trial.
    """
    outer_trial = _trial.get()
    trial = Trial(sizes if sizes is not None else outer_trial.sizes if outer_trial is not None else {})
    token = _trial.set(trial)
    try:
        yield trial
    finally:
        _trial.reset(token)


def architecture_of(device: Any) -> str:
    """Return the architecture of a torch device: "sm_90", "gfx942" or the like for a GPU, "cpu" for the CPU.

    torch.compile traces this function. In torch 2.6 it can trace `get_device_properties`, but not
    `get_device_capability`.
    """
    import torch

    if device.type != "cuda":
        return str(device.type)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName.partition(":")[0])
    return f"sm_{properties.major}{properties.minor}"


# -- the default table -------------------------------------------------------------------------------------------------


def default_configuration(architecture: str, kernel: str, dtype: str, width: int) -> Configuration:
    """Return the configuration for an architecture ("sm_90", "gfx942", "interpreter"), a kernel and a dtype.

    `width` is the larger of d_k and d_v.
    """
    if architecture == "interpreter":  # small tiles, so that small problems have several tiles
        return Configuration(16, 32, 1, 1, widens_operands=dtype == "bfloat16")
    if kernel in ("backward_queries", "backward_keys"):
        return _backward_configuration(architecture, kernel, dtype, width)
    if kernel == "decode":
        return Configuration(16, 64 if dtype in ("float16", "bfloat16") else 32, 4, 3 if width <= 128 else 2)
    if kernel == "weights_pass":  # its registers hold scores, and lists of `top_k` or cells of `pooled`, but no output
        side = 32 if dtype in ("float32", "float64") else 64
        return Configuration(side, side, 4, 2)
    if dtype in ("float32", "float64"):  # no matrix units, and registers hold no larger tiles
        rows = 64 if dtype == "float32" and width <= 64 else 32
        if architecture.startswith("gfx"):
            return Configuration(rows, 32, 4, 1)
        return Configuration(rows, 32, 8, 2 if dtype == "float32" else 1)
    if architecture.startswith("gfx"):
        return Configuration(128, 64, 4, 1)
    if architecture == "sm_90":
        if width <= 64:
            return Configuration(128, 128, 8, 2)
        # Tiles of more keys would spill more registers.
        return Configuration(128, 64, 8, 3) if width <= 128 else Configuration(128, 32, 8, 2)
    if width <= 64:
        return Configuration(128, 64, 4, 3)
    return Configuration(128, 64, 8, 2) if width <= 128 else Configuration(64, 32, 4, 2)


def shared_memory_of(architecture: str) -> int:
    """Return the bytes of shared memory for a block of threads.

    For an unknown architecture the result is the largest known amount.
    """
    known = (kib for prefix, kib in SHARED_MEMORY_KIB.items() if architecture.startswith(prefix))
    return next(known, max(SHARED_MEMORY_KIB.values())) << 10


def _backward_configuration(architecture: str, kernel: str, dtype: str, width: int) -> Configuration:
    """Return the configuration of a backward kernel.

    The sizes for float16 and bfloat16 are those of FlexAttention in PyTorch 2.13
    (`torch/_inductor/template_heuristics/triton.py`), except for smaller tiles where the sizes of FlexAttention exceed
    AMD's registers.
    """
    if dtype in ("float32", "float64"):
        return Configuration(32, 32, 4 if width <= 64 else 8, 1)
    wide, narrow, warps, stages = 64, 64, 4 if width <= 128 else 8, 2
    if architecture.startswith("gfx"):
        stages = 1
        if 64 < width <= 128:
            wide, narrow = 128, 64 if kernel == "backward_queries" else 32
    elif architecture == "sm_90" and 64 <= width <= 128:
        wide, warps, stages = 128, 8, 3
    elif architecture != "sm_90" and width < 64:
        wide, narrow, stages = 128, 32, 3
    return Configuration(*((wide, narrow) if kernel == "backward_queries" else (narrow, wide)), warps, stages)
