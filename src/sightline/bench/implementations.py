"""What takes part in a race: the protocol, and our own entries. Peers are in `peers`."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..api import attention
from ..arrays import resolve_dtype, to_numpy
from ..formula.library import bias
from ..formula.tables import Table
from ..statistics import arrays_of
from .workloads import SEED, Inputs, ToTable, Workload

__all__ = [
    "VARIANTS",
    "Implementation",
    "Numpy",
    "OneThread",
    "PreparedCall",
    "Sightline",
    "WithoutDropout",
    "WithoutStatistics",
    "name_results",
    "prepare_with_autograd",
    "to_tensor",
    "to_tensor_on",
]

# by name: output, query, key, value, bias; float32 NumPy, heads before positions; a tuple of such for each statistic
Results = dict[str, Any]


@dataclass
class PreparedCall:
    """A contender with its arrays in hand.

    Parameters
    ----------
    call : what is timed, of what `setup` gave
    results : from what `call` gave to arrays by name, not timed: "output", and "query", "key", "value", "bias" for
        their gradients
    setup : run before every call, not timed: the forward pass where the backward pass is timed
    threads : torch's setting while it runs
    close : gives back what it holds
    set_d_output : puts another array in d_output's place, where a backward pass is timed and it can
    """

    call: Callable[[Any], Any]
    results: Callable[[Any], Results]
    setup: Callable[[], Any] = lambda: None
    threads: int = 1
    close: Callable[[], None] = lambda: None
    set_d_output: Callable[[Any], Any] | None = None


class Implementation(ABC):
    """One way to compute a race: a small class and a line in `peers.PEERS` or `VARIANTS`."""

    name: str
    label: str
    packages: tuple[str, ...] = ()  # that must be there to import
    pip: str = ""  # what brings them
    note: str = ""  # what else is worth knowing of what is timed
    has_arena: bool = False  # keeps memory of its own between calls, so that a call's peak cannot be seen from outside
    device: str = "cpu"  # torch's name of where its tensors are

    def skip_reason(self) -> str | None:
        """Why it cannot take part here, whatever the race."""
        missing = [package for package in self.packages if find_spec(package) is None]
        return f"not installed: pip install {self.pip}" if missing else None

    @abstractmethod
    def refuses(self, workload: Workload) -> str | None:
        """Why it cannot take part in this race."""

    def reference_workload(self, workload: Workload) -> Workload | None:
        """The race whose definition its answer must agree with; None where it draws what no one else can know."""
        return workload

    @abstractmethod
    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        """Everything that is done once: conversion, compilation, layout."""


# -- torch's ways, which ours share ---------------------------------------------------------------------------------


def to_tensor(array: Any, dtype: str, device: str = "cpu") -> Any:
    """A NumPy array as a tensor of that dtype."""
    import torch

    return torch.from_numpy(array).to(device, getattr(torch, dtype))


def to_tensor_on(device: str) -> ToTable:
    """Makes an array a tensor there, which formulas of torch's own language index."""
    import torch

    return lambda array: torch.as_tensor(array, device=device)


def to_float32(result: Any) -> Any:
    """A tensor or array as float32 NumPy."""
    return np.asarray(to_numpy(result), np.float32)


def name_results(workload: Workload, found: Any) -> Results:
    """The answers of a forward pass: of its output, or (output, seen) where statistics are asked for."""
    output, seen = found if workload.see else (found, ())
    arrays = zip(workload.see, seen, strict=True)
    return {"output": to_float32(output)} | {
        repr(statistic): tuple(to_float32(array) for array in arrays_of(answer)) for statistic, answer in arrays
    }


def prepare_with_autograd(
    workload: Workload, inputs: Inputs, forward: Callable[..., Any], threads: int, device: str = "cpu"
) -> PreparedCall:
    """A function of tensors (query, key, value, bias or None), timed the way the race says.

    "backward" is torch.autograd.grad of the output alone: the forward pass before it is not timed.
    """
    import torch

    given = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    if inputs.bias is not None:
        given["bias"] = inputs.bias
    leaves = {name: to_tensor(array, workload.dtype, device) for name, array in given.items()}
    arguments = [leaves["query"], leaves["key"], leaves["value"], leaves.get("bias")]
    if workload.passes == "forward":
        return PreparedCall(lambda _: forward(*arguments), lambda found: name_results(workload, found), threads=threads)
    for leaf in leaves.values():
        leaf.requires_grad_()
    seed = to_tensor(inputs.d_output, workload.dtype, device).clone()  # of its own: `set_d_output` writes there

    def gradients(output: Any) -> Any:
        return output.detach(), torch.autograd.grad(output, list(leaves.values()), seed)

    def results(found: Any) -> Results:
        return {"output": to_float32(found[0])} | {
            name: to_float32(gradient) for name, gradient in zip(leaves, found[1], strict=True)
        }

    def set_d_output(array: Any) -> None:
        seed.copy_(to_tensor(array, workload.dtype))

    if workload.passes == "backward":
        return PreparedCall(gradients, results, lambda: forward(*arguments), threads, set_d_output=set_d_output)
    return PreparedCall(lambda _: gradients(forward(*arguments)), results, threads=threads, set_d_output=set_d_output)


# -- ours -----------------------------------------------------------------------------------------------------------


@dataclass
class Sightline(Implementation):
    """`sightline.attention`, as a user calls it: on tensors where torch is installed, on NumPy arrays elsewhere."""

    name: str = "sightline"
    label: str = "Sightline"
    options: dict[str, Any] = field(default_factory=dict)  # to `attention`
    device: str = "cpu"

    def refuses(self, workload: Workload) -> str | None:
        """Backward passes without torch: NumPy has no gradients."""
        if workload.passes != "forward" and find_spec("torch") is None:
            return "gradients need torch: pip install torch"
        return None

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        if find_spec("torch") is None:
            return self.prepare_on_numpy(workload, inputs, threads)
        to_table = Table if self.device == "cpu" else self._device_table
        mask = None if workload.mask is None else workload.mask.formula(workload.n, to_table)
        scores = {} if workload.score is None else {0: workload.score.formula(workload.H, to_table)}
        seed = SEED if workload.dropout else None

        def forward(query: Any, key: Any, value: Any, added: Any) -> Any:
            if added is not None and not scores:
                scores[0] = bias(added)
            options: dict[str, Any] = {"mask": mask, "score": scores.get(0), "dropout": workload.dropout, "seed": seed}
            options |= {"see": list(workload.see) or None} | self.options
            return attention(query, key, value, threads=threads, **options)

        return prepare_with_autograd(workload, inputs, forward, threads, self.device)

    def _device_table(self, array: Any) -> Table:
        return Table(to_tensor_on(self.device)(array))

    def prepare_on_numpy(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        """The forward pass on NumPy arrays."""
        kind = resolve_dtype(np, workload.dtype)
        query, key, value = (x.astype(kind) for x in (inputs.query, inputs.key, inputs.value))
        score = inputs.score if workload.score is None else workload.score_formula
        options: dict[str, Any] = {
            "mask": workload.formula,
            "score": score,
            "dropout": workload.dropout,
            "seed": SEED,
            "see": list(workload.see) or None,
        } | self.options
        if workload.formula is None and score is None and not (workload.dropout or workload.see):
            options = {}  # as short as a user would write it, where a call is all overhead
        return PreparedCall(
            lambda _: attention(query, key, value, threads=threads, **options),
            lambda found: name_results(workload, found),
            threads=threads,
        )


class Numpy(Sightline):
    """The same on NumPy arrays."""

    def __init__(self) -> None:
        super().__init__("numpy", "Sightline on NumPy")

    def refuses(self, workload: Workload) -> str | None:
        """Gradients."""
        return None if workload.passes == "forward" else "NumPy has no gradients"

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        return self.prepare_on_numpy(workload, inputs, threads)


class OneThread(Sightline):
    """The same on one thread."""

    def __init__(self) -> None:
        super().__init__("one thread", "one thread")

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        return super().prepare(workload, inputs, 1)


class WithoutDropout(Sightline):
    """The same with every weight kept."""

    def __init__(self) -> None:
        super().__init__("without dropout", "without dropout", {"dropout": 0.0, "seed": None})

    def reference_workload(self, workload: Workload) -> Workload:
        """The same without dropout."""
        return replace(workload, dropout=0.0)


class WithoutStatistics(Sightline):
    """The same with nothing seen."""

    def __init__(self, options: dict[str, Any] | None = None, device: str = "cpu") -> None:
        super().__init__("without statistics", "without statistics", options or {}, device)

    def reference_workload(self, workload: Workload) -> Workload:
        """The same without statistics."""
        return replace(workload, see=())

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        return super().prepare(self.reference_workload(workload), inputs, threads)


VARIANTS: dict[str, Sightline] = {
    own.name: own for own in (Sightline(), Numpy(), OneThread(), WithoutDropout(), WithoutStatistics())
}


def set_threads(threads: int) -> None:
    """torch's setting, where torch is loaded; every other library was told when its contender was prepared."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def usable_processors() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
