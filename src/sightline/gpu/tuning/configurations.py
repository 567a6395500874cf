"""Sizes of tiles, warps and stages by architecture, dtype and width."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Configuration", "default_configuration", "shared_memory_of"]

SHARED_MEMORY_KIB = {  # KiB of shared memory a block of threads may have, by the beginning of the architecture's name
    "sm_80": 163,
    "sm_8": 99,
    "sm_90": 227,
    "sm_10": 227,
    "sm_12": 99,
    "gfx": 64,
}


@dataclass(frozen=True)
class Configuration:
    """How a kernel is cut and launched."""

    rows: int  # queries of a tile
    keys: int  # keys of a tile
    warps: int
    stages: int  # tiles of K and V on their way from memory
    widens_operands: bool = False  # factors widened before products: Triton's interpreter cannot multiply bfloat16
    specialised: bool = False  # by the kernel of `hopper`, its warps specialised


def default_configuration(architecture: str, kernel: str, dtype: str, width: int) -> Configuration:
    """The sizes for that architecture ("sm_90", "gfx942", "interpreter"), kernel, dtype and wider of d_k, d_v."""
    if architecture == "interpreter":  # small, so that small problems have several tiles
        return Configuration(16, 32, 1, 1, widens_operands=dtype == "bfloat16")
    if kernel in ("backward_queries", "backward_keys"):
        return _backward_configuration(architecture, kernel, dtype, width)
    if kernel == "decode":
        return Configuration(16, 64 if dtype in ("float16", "bfloat16") else 32, 4, 3 if width <= 128 else 2)
    if kernel == "weights_pass":  # registers hold scores, and top_k lists or pooled cells, but no output
        side = 32 if dtype in ("float32", "float64") else 64
        return Configuration(side, side, 4, 2)
    if dtype in ("float32", "float64"):  # without matrix units: larger tiles spill kilobytes
        rows = 64 if dtype == "float32" and width <= 64 else 32
        if architecture.startswith("gfx"):
            return Configuration(rows, 32, 4, 1)
        return Configuration(rows, 32, 8, 2 if dtype == "float32" else 1)
    if architecture.startswith("gfx"):
        return Configuration(128, 64, 4, 1)
    if architecture == "sm_90":
        if width <= 64:
            return Configuration(128, 128, 8, 2)
        return Configuration(128, 64, 8, 3) if width <= 128 else Configuration(128, 32, 8, 2)  # more keys: more spills
    return (
        Configuration(128, 64, 4 if width <= 64 else 8, 3 if width <= 64 else 2)
        if width <= 128
        else Configuration(64, 32, 4, 2)
    )


def shared_memory_of(architecture: str) -> int:
    """Bytes of shared memory that the threads of a block may have."""
    return (
        next(
            (kib for name, kib in SHARED_MEMORY_KIB.items() if architecture.startswith(name)),
            max(SHARED_MEMORY_KIB.values()),
        )
        << 10
    )


def _backward_configuration(architecture: str, kernel: str, dtype: str, width: int) -> Configuration:
    """Those of narrow floats are FlexAttention's in PyTorch 2.13, `torch/_inductor/template_heuristics/triton.py`, but
    for fewer queries at a time where these do not fit AMD's registers.
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
