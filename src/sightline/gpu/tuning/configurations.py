"""The configurations of the kernels: tile sizes, warps and stages.

`select` takes a kernel's configuration from the current trial (`try_sizes`) if there is one, else from the tuning
cache. If it finds none, it takes the default for the architecture, the kernel, the dtype and the head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from ...arrays.operations import itemsize
from ...problem.problem import Problem
from . import cache

MAX_SIZE = 1024  # largest number in any field of a configuration that is read from a file
MIN_TILE = 16  # fewest rows and fewest keys of a tile: the size of the smallest matrix product
MAX_TILE_KEYS = 128  # most keys of a tile: `classify_nonfinite` counts the keys of a tile in base 256
WIDE_HEAD = 128  # a head with larger d_k or d_v needs more warps
ROWS_PER_WARP = 16  # rows of the matrix product of one warp
MAX_REGISTERS = 255  # most registers of a thread
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
    if trial is not None:
        found = trial.sizes.get(kernel)
    else:
        entry = cache.load(kernel, problem, device_of(problem, architecture))
        found = None if entry is None else parse_configuration(entry.get("configuration"))
    if found is None:
        found = default_configuration(architecture, kernel, problem.dtype, max(problem.d_k, problem.d_v))
    if trial is not None:
        trial.requested.setdefault(kernel, found)
        trial.architectures.add(architecture)
    return found


def selection_version() -> int | None:
    """Return a number that changes when `select` may return other configurations; None during a trial."""
    return cache.num_changes() if _trial.get() is None else None


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


def parse_configuration(values: Any) -> Configuration | None:
    """Return the configuration that a file's JSON value describes; None if it describes no valid configuration."""
    named = {entry.name: entry for entry in fields(Configuration)}
    if not isinstance(values, dict) or set(values) != set(named):
        return None
    for name, value in values.items():
        boolean = named[name].type in (bool, "bool")
        if boolean != isinstance(value, bool) or not isinstance(value, int) or not (boolean or 1 <= value <= MAX_SIZE):
            return None
    if any(values[name] & (values[name] - 1) for name in ("rows", "keys", "warps")):  # not a power of two
        return None
    if min(values["rows"], values["keys"]) < MIN_TILE or values["keys"] > MAX_TILE_KEYS:
        return None
    return Configuration(**values)


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


def device_of(problem: Problem, architecture: str) -> str:
    """Return the name and the architecture of the GPU of a problem's tensors; on the CPU the architecture alone."""
    return f"{_name_of(problem.query.device)} ({architecture})" if problem.device.startswith("cuda") else architecture


@lru_cache
def _name_of(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_name(device))


def candidates(kernel: str, problem: Problem, architecture: str) -> list[Configuration]:
    """Return the configurations that tuning tries: those whose tiles, by an estimate, fit registers and memory."""
    if architecture == "interpreter":
        widens_operands = default_configuration(architecture, "forward", problem.dtype, problem.d_k).widens_operands
        return [Configuration(rows, keys, 1, 1, widens_operands) for rows in (16, 32) for keys in (16, 32)]
    is_decode = kernel == "decode"  # memory bandwidth limits this kernel
    # Wide heads and wide dtypes need the registers of more warps than the rows of a tile can keep busy.
    crowded = max(problem.d_k, problem.d_v) > WIDE_HEAD or itemsize(problem.dtype) > 2
    found = [
        Configuration(*((inner, outer) if kernel == "backward_keys" else (outer, inner)), warps, stages)
        for outer in ((16,) if is_decode else (32, 64, 128) if crowded else (64, 128))
        for inner in (32, 64, 128)
        for warps in ((2, 4) if is_decode else (4, 8))
        for stages in ((1, 2) if architecture.startswith("gfx") else (2, 3, 4))
        if is_decode or crowded or outer >= ROWS_PER_WARP * warps
    ]
    return [sizes for sizes in found if _fits(kernel, sizes, problem, architecture)]


def _fits(kernel: str, sizes: Configuration, problem: Problem, architecture: str) -> bool:
    """Return True if a block's tiles fit shared memory, and its scores and sums fit the registers.

    Shared memory holds the tiles that the whole loop of a block uses, and the tiles that the pipeline loads ahead.
    """
    outer, inner = (sizes.keys, sizes.rows) if kernel == "backward_keys" else (sizes.rows, sizes.keys)
    d_k, d_v = problem.d_k, problem.d_v
    resident, tiles, sum_width = {  # width that stays in shared memory, number of score matrices, width of the sums
        "backward_queries": (d_k + d_v, 2, d_k),
        "backward_keys": (d_k + d_v, 2, d_k + d_v),
        "weights_pass": (d_k, 1, 0),
    }.get(kernel, (d_k, 1, d_v))
    read = d_k if kernel == "weights_pass" else d_k + d_v
    shared = (outer * resident + sizes.stages * inner * read) * itemsize(problem.dtype)
    threads = sizes.warps * (64 if architecture.startswith("gfx") else 32)
    return shared <= shared_memory_of(architecture) and outer * (tiles * inner + sum_width) // threads <= MAX_REGISTERS


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
