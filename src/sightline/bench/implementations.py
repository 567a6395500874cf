"""The interface of contenders, and the variants of Sightline. Other libraries are in `peers`."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
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
    "PreparedCall",
    "Sightline",
    "WithoutStatistics",
    "name_results",
    "prepare_with_autograd",
    "set_threads",
    "to_tensor",
    "to_tensor_on",
]

# float32 NumPy arrays by name: "output", and the gradients "query", "key", "value", "bias", heads before positions;
# by the repr of a statistic the tuple of its arrays
Results = dict[str, Any]


@dataclass
class PreparedCall:
    """A contender that is ready to be called on its arrays.

    Parameters
    ----------
    call : the timed function of the result of `setup`
    results : converts the result of `call` to `Results`; not timed
    setup : run before every call, not timed; when the backward pass is timed, the forward pass
    threads : number of threads that torch uses during the call
    close : releases the contender's memory
    set_d_output : replaces d_output; None in forward passes and for contenders that cannot
    """

    call: Callable[[Any], Any]
    results: Callable[[Any], Results]
    setup: Callable[[], Any] = lambda: None
    threads: int = 1
    close: Callable[[], None] = lambda: None
    set_d_output: Callable[[Any], Any] | None = None


class Implementation(ABC):
    """A contender: a small class with an entry in `peers.PEERS` or `VARIANTS`."""

    name: str
    label: str
    packages: tuple[str, ...] = ()  # modules that must be installed
    pip: str = ""  # what pip installs for them
    note: str = ""  # remark on what is timed
    has_arena: bool = False  # reuses memory between calls, so that the peak of a call cannot be measured
    device: str = "cpu"  # torch's name of the device of the tensors

    def skip_reason(self) -> str | None:
        """Return why the contender cannot run here at all, or None."""
        missing = [package for package in self.packages if find_spec(package) is None]
        return f"not installed: pip install {self.pip}" if missing else None

    @abstractmethod
    def refuses(self, workload: Workload) -> str | None:
        """Return why the contender cannot run this workload, or None."""

    def reference_workload(self, workload: Workload) -> Workload | None:
        """Return the workload to check the output against; None if the output depends on the peer's random numbers."""
        return workload

    @abstractmethod
    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        """Do the work that is done once: conversion, compilation, layout."""


# -- torch ----------------------------------------------------------------------------------------------------------


def to_tensor(array: Any, dtype: str, device: str = "cpu") -> Any:
    """Return a NumPy array as a tensor of that dtype."""
    import torch

    return torch.from_numpy(array).to(device, getattr(torch, dtype))


def to_tensor_on(device: str) -> ToTable:
    """Return a function that makes an array a tensor on the device, which FlexAttention's functions can index."""
    import torch

    return lambda array: torch.as_tensor(array, device=device)


def to_float32(result: Any) -> Any:
    """Return a tensor or array as a float32 NumPy array."""
    return np.asarray(to_numpy(result), np.float32)


def name_results(workload: Workload, result: Any) -> Results:
    """Return the results of a forward pass from its output, or from (output, statistics) if the workload has some."""
    output, statistics = result if workload.see else (result, ())
    return {"output": to_float32(output)} | {
        repr(statistic): tuple(map(to_float32, arrays_of(arrays)))
        for statistic, arrays in zip(workload.see, statistics, strict=True)
    }


def prepare_with_autograd(
    workload: Workload, inputs: Inputs, forward: Callable[..., Any], threads: int, device: str = "cpu"
) -> PreparedCall:
    """Prepare `forward`, a function of tensors (query, key, value, bias or None), for the passes of the workload.

    For "backward" only torch.autograd.grad is timed; the forward pass before it is not.
    """
    import torch

    given = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    if inputs.bias is not None:
        given["bias"] = inputs.bias
    leaves = {name: to_tensor(array, workload.dtype, device) for name, array in given.items()}
    arguments = [leaves["query"], leaves["key"], leaves["value"], leaves.get("bias")]
    if workload.passes == "forward":
        return PreparedCall(lambda _: forward(*arguments), partial(name_results, workload), threads=threads)
    for leaf in leaves.values():
        leaf.requires_grad_()
    seed = to_tensor(inputs.d_output, workload.dtype, device).clone()  # a copy, since `set_d_output` writes to it

    def gradients(output: Any) -> Any:
        return output.detach(), torch.autograd.grad(output, list(leaves.values()), seed)

    def results(result: Any) -> Results:
        output, found = result
        return {"output": to_float32(output)} | dict(zip(leaves, map(to_float32, found), strict=True))

    def set_d_output(array: Any) -> None:
        seed.copy_(to_tensor(array, workload.dtype))

    if workload.passes == "backward":
        return PreparedCall(gradients, results, lambda: forward(*arguments), threads, set_d_output=set_d_output)
    return PreparedCall(lambda _: gradients(forward(*arguments)), results, threads=threads, set_d_output=set_d_output)


# -- Sightline ------------------------------------------------------------------------------------------------------


@dataclass
class Sightline(Implementation):
    """`sightline.attention`, called as a user calls it: on tensors if torch is installed, else on NumPy arrays."""

    name: str = "sightline"
    label: str = "Sightline"
    options: dict[str, Any] = field(default_factory=dict)  # more arguments of `attention`
    device: str = "cpu"

    def refuses(self, workload: Workload) -> str | None:
        """Backward passes without torch, since NumPy has no gradients."""
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
        """Prepare the forward pass on NumPy arrays."""
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
            options = {}  # the call as a user writes it: for tiny problems the arguments cost time
        call = partial(attention, query, key, value, threads=threads, **options)
        return PreparedCall(lambda _: call(), partial(name_results, workload), threads=threads)


class Numpy(Sightline):
    """Sightline on NumPy arrays."""

    def __init__(self) -> None:
        super().__init__("numpy", "Sightline on NumPy")

    def refuses(self, workload: Workload) -> str | None:
        """Backward passes."""
        return None if workload.passes == "forward" else "NumPy has no gradients"

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        return self.prepare_on_numpy(workload, inputs, threads)


class OneThread(Sightline):
    """An implementation: Sightline on one thread, whatever the workload's number of threads."""

    def __init__(self) -> None:
        super().__init__("one thread", "one thread")

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        return super().prepare(workload, inputs, 1)


class WithoutDropout(Sightline):
    """Sightline on the same workload without dropout."""

    def __init__(self) -> None:
        super().__init__("without dropout", "without dropout", {"dropout": 0.0, "seed": None})

    def reference_workload(self, workload: Workload) -> Workload:
        """Return the workload without dropout."""
        return replace(workload, dropout=0.0)


class WithoutStatistics(Sightline):
    """Sightline on the same workload without statistics."""

    def __init__(self, options: dict[str, Any] | None = None, device: str = "cpu") -> None:
        super().__init__("without statistics", "without statistics", options or {}, device)

    def reference_workload(self, workload: Workload) -> Workload:
        """Return the workload without statistics."""
        return replace(workload, see=())

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        return super().prepare(self.reference_workload(workload), inputs, threads)


VARIANTS: dict[str, Sightline] = {
    variant.name: variant for variant in (Sightline(), Numpy(), OneThread(), WithoutDropout(), WithoutStatistics())
}


def set_threads(threads: int) -> None:
    """Set torch's number of threads if torch is loaded; other libraries get theirs in `Implementation.prepare`."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
