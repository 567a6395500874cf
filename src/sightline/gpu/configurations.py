"""The configurations of the kernels: tile sizes, warps and stages, from a table by architecture, dtype and width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..call.problem import Problem


@dataclass(frozen=True)
class Configuration:
    """The tile sizes and the launch options of a kernel."""

    rows: int  # queries of a tile
    keys: int  # keys of a tile
    warps: int  # number of warps in a block of threads
    stages: int  # number of stages of the software pipeline that loads tiles of K and V
    # True if the kernel widens the operands before products, since Triton's interpreter cannot multiply bfloat16.
    widens_operands: bool = False


def select(kernel: str, problem: Problem, architecture: str) -> Configuration:
    """Return the configuration of a kernel ("forward", "backward_keys", ...) for a problem on an architecture."""
    return find_configuration(architecture, kernel, problem.dtype, max(problem.d_k, problem.d_v))


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


def find_configuration(architecture: str, kernel: str, dtype: str, width: int) -> Configuration:
    """Return the configuration for an architecture ("sm_90", "gfx942", "interpreter"), a kernel and a dtype.

    `width` is the larger of d_k and d_v.
    """
    if architecture == "interpreter":  # small tiles, so that small problems have several tiles
        return Configuration(16, 32, 1, 1, widens_operands=dtype == "bfloat16")
    if kernel in ("backward_queries", "backward_keys"):
        return _backward_configuration(architecture, kernel, dtype, width)
    if kernel == "decode":
        return Configuration(16, 64 if dtype in ("float16", "bfloat16") else 32, 4, 2)
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
        # One group of four warps: while it computes a softmax, the matrix units serve another block of the processor.
        if width <= 128:
            return Configuration(64, 128 if width <= 64 else 64, 4, 3)
        return Configuration(128, 32, 8, 2)  # tiles of more keys would spill more registers
    if width <= 64:
        return Configuration(128, 64, 4, 3)
    return Configuration(128, 64, 8, 2) if width <= 128 else Configuration(64, 32, 4, 2)


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
        stages = 3
        if kernel == "backward_queries" and width > 64:
            wide, warps = 128, 8
        elif width > 64:  # tiles of 64 queries would spill registers
            narrow = 32
    elif architecture != "sm_90" and width < 64:
        wide, narrow, stages = 128, 32, 3
    return Configuration(*((wide, narrow) if kernel == "backward_queries" else (narrow, wide)), warps, stages)
