"""Select a kernel's configuration: from the current trial if there is one, else from the tuning cache.

The default table serves kernels whose configuration is not found there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from ...problem.problem import Problem
from . import cache
from .default_configurations import Configuration, default_configuration, shared_memory_of

MAX_SIZE = 1024  # largest number in any field of a configuration that is read from a file
MIN_TILE = 16  # fewest rows and fewest keys of a tile: the size of the smallest matrix product
MAX_TILE_KEYS = 128  # most keys of a tile: `classify_nonfinite` counts the keys of a tile in base 256
WIDE_HEAD = 128  # a head with larger d_k or d_v needs more warps
ROWS_PER_WARP = 16  # rows of the matrix product of one warp
MAX_REGISTERS = 255  # most registers of a thread
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


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
    """Return the name and the architecture of the GPU that holds a problem's tensors; on the CPU the architecture."""
    return f"{_name_of(problem.query.device)} ({architecture})" if problem.device.startswith("cuda") else architecture


@lru_cache
def _name_of(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_name(device))


def candidates(kernel: str, problem: Problem, architecture: str) -> list[Configuration]:
    """Return the configurations that tuning tries: by an estimate, their tiles fit registers and shared memory."""
    if architecture == "interpreter":
        widens_operands = default_configuration(architecture, "forward", problem.dtype, problem.d_k).widens_operands
        return [Configuration(rows, keys, 1, 1, widens_operands) for rows in (16, 32) for keys in (16, 32)]
    is_decode = kernel == "decode"  # memory bandwidth limits this kernel
    # Wide heads and wide dtypes need the registers of more warps than the rows of a tile can keep busy.
    crowded = max(problem.d_k, problem.d_v) > WIDE_HEAD or ITEMSIZE[problem.dtype] > 2
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

    The tiles are those that stay in shared memory and those that the pipeline loads ahead.
    """
    outer, inner = (sizes.keys, sizes.rows) if kernel == "backward_keys" else (sizes.rows, sizes.keys)
    d_k, d_v = problem.d_k, problem.d_v
    resident, tiles, sum_width = {  # width that stays in shared memory, number of score matrices, width of the sums
        "backward_queries": (d_k + d_v, 2, d_k),
        "backward_keys": (d_k + d_v, 2, d_k + d_v),
        "weights_pass": (d_k, 1, 0),
    }.get(kernel, (d_k, 1, d_v))
    read = d_k if kernel == "weights_pass" else d_k + d_v
    shared = (outer * resident + sizes.stages * inner * read) * ITEMSIZE[problem.dtype]
    threads = sizes.warps * (64 if architecture.startswith("gfx") else 32)
    return shared <= shared_memory_of(architecture) and outer * (tiles * inner + sum_width) // threads <= MAX_REGISTERS
