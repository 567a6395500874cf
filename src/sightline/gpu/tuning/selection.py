"""The sizes a kernel runs with: those just being tried, else what `sightline.tune` found here, else the table's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from ...problem import Problem
from . import cache
from .configurations import Configuration, default_configuration, shared_memory_of

__all__ = ["Trial", "architecture_of", "candidates", "device_of", "parse_configuration", "select", "try_sizes"]

MAX_SIZE = 1024  # no size is larger
MIN_TILE, MAX_TILE_KEYS = 16, 128  # rows or keys of a tile: what a product takes, and a sum of a tile's marks holds
HOPPER = "sm_90"
WIDE_HEAD = 128  # of d_k and d_v
ROWS_PER_WARP = 16  # rows of a tile that a warp multiplies at once
MAX_REGISTERS = 255  # of a thread
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass
class Trial:
    """Sizes to be taken in place of all others, and which kernels asked for sizes meanwhile."""

    sizes: Mapping[str, Configuration]
    requested: dict[str, Configuration] = field(default_factory=dict)
    architectures: set[str] = field(default_factory=set)  # they asked for


_trial: ContextVar[Trial | None] = ContextVar("trial", default=None)


def select(kernel: str, problem: Problem, architecture: str) -> Configuration:
    """The sizes for a kernel ("forward", "backward", ...) of a problem, on tensors of that architecture."""
    trial = _trial.get()
    found = None if trial is None else trial.sizes.get(kernel)
    if found is None and trial is None:
        finding = cache.load(kernel, problem, device_of(problem, architecture))
        found = None if finding is None else parse_configuration(finding.get("configuration"))
    if found is None or (found.specialised and not _can_specialise(problem)):
        found = default_configuration(architecture, kernel, problem.dtype, max(problem.d_k, problem.d_v))
    if trial is not None:
        trial.requested.setdefault(kernel, found)
        trial.architectures.add(architecture)
    return found


@contextmanager
def try_sizes(sizes: Mapping[str, Configuration] | None = None) -> Iterator[Trial]:
    """Within, these sizes are taken by their kernels, or those of a trial around, and the table's by others."""
    outer_trial = _trial.get()
    trial = Trial(sizes if sizes is not None else outer_trial.sizes if outer_trial is not None else {})
    token = _trial.set(trial)
    try:
        yield trial
    finally:
        _trial.reset(token)


def parse_configuration(values: Any) -> Configuration | None:
    """A configuration from what a file says; None where that is none."""
    named = {entry.name: entry for entry in fields(Configuration)}
    if not isinstance(values, dict) or set(values) != set(named):
        return None
    for name, value in values.items():
        boolean = named[name].type in (bool, "bool")
        if boolean != isinstance(value, bool) or not isinstance(value, int) or not (boolean or 1 <= value <= MAX_SIZE):
            return None
    if any(values[name] & (values[name] - 1) for name in ("rows", "keys", "warps")):
        return None  # no powers of two
    if min(values["rows"], values["keys"]) < MIN_TILE or values["keys"] > MAX_TILE_KEYS:
        return None
    return Configuration(**values)


@lru_cache
def architecture_of(device: Any) -> str:
    """The device's architecture, "sm_90", "gfx942" and the like."""
    import torch

    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def device_of(problem: Problem, architecture: str) -> str:
    """The name of the device a problem's tensors lie on; the architecture's where that is no GPU."""
    return f"{_name_of(problem.query.device)} ({architecture})" if problem.device.startswith("cuda") else architecture


@lru_cache
def _name_of(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_name(device))


def candidates(kernel: str, problem: Problem, architecture: str, specialised: bool = False) -> list[Configuration]:
    """Sizes worth a trial: those whose tiles fit registers and shared memory, as far as can be reckoned beforehand.

    On Hopper the forward kernel whose warps are `specialised` is among them if asked, where it serves the problem.
    """
    if architecture == "interpreter":
        widens_operands = default_configuration(architecture, "forward", problem.dtype, problem.d_k).widens_operands
        return [Configuration(rows, keys, 1, 1, widens_operands) for rows in (16, 32) for keys in (16, 32)]
    is_decode = kernel == "decode"  # bound by reading, whoever multiplies
    # more warps than rows need, for their registers; wide floats have no matrix units to be fed
    crowded = max(problem.d_k, problem.d_v) > WIDE_HEAD or ITEMSIZE[problem.dtype] > 2
    found = [
        Configuration(*((inner, outer) if kernel == "backward_keys" else (outer, inner)), warps, stages)
        for outer in ((16,) if is_decode else (32, 64, 128) if crowded else (64, 128))
        for inner in (32, 64, 128)
        for warps in ((2, 4) if is_decode else (4, 8))
        for stages in ((1, 2) if architecture.startswith("gfx") else (2, 3, 4))
        if is_decode or crowded or outer >= ROWS_PER_WARP * warps
    ]
    fitting = [sizes for sizes in found if _fits(kernel, sizes, problem, architecture)]
    if specialised and kernel == "forward" and architecture == HOPPER and _can_specialise(problem):
        from .. import hopper

        fitting += [replace(sizes, specialised=True) for sizes in hopper.candidate_configurations(problem)]
    return fitting


def _can_specialise(problem: Problem) -> bool:
    """Whether the kernel whose warps are specialised serves a problem."""
    from .. import hopper

    return next(hopper.refuses(problem), None) is None


def _fits(kernel: str, sizes: Configuration, problem: Problem, architecture: str) -> bool:
    """Whether what a block holds and what is on its way fit shared memory, and its sums and scores the registers."""
    outer, inner = (sizes.keys, sizes.rows) if kernel == "backward_keys" else (sizes.rows, sizes.keys)
    d_k, d_v = problem.d_k, problem.d_v
    resident, tiles, sum_width = {  # widths of what stays in shared memory, matrices of scores, widths of sums
        "backward_queries": (d_k + d_v, 2, d_k),
        "backward_keys": (d_k + d_v, 2, d_k + d_v),
        "weights_pass": (d_k, 1, 0),
    }.get(kernel, (d_k, 1, d_v))
    read = d_k if kernel == "weights_pass" else d_k + d_v
    shared = (outer * resident + sizes.stages * inner * read) * ITEMSIZE[problem.dtype]
    threads = sizes.warps * (64 if architecture.startswith("gfx") else 32)
    return shared <= shared_memory_of(architecture) and outer * (tiles * inner + sum_width) // threads <= MAX_REGISTERS
