"""The interface of the benchmarks' contenders, and the variants of Sightline. `peers` has the other libraries."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...api.functions import attention
from ...arrays.operations import resolve_dtype, to_numpy
from ...formula.library import bias
from ...formula.tables import Table
from ...statistics import arrays_of
from .workloads import Inputs, ToTable, Workload

# The results of a contender by name, in float32 NumPy arrays with the axis of heads before the axis of positions:
# "output", and the gradients "query", "key", "value" and "bias". The repr of a statistic names the tuple of its arrays.
Results = dict[str, Any]


@dataclass
class PreparedCall:
    """A contender that is ready to be called on its arrays.

    Parameters
    ----------
    call : the timed function; its argument is the result of `setup`
    results : the function that converts the result of `call` to `Results`; it is not timed
    setup : the function that runs before every call; it is not timed. If only the backward pass is timed, `setup` runs
        the forward pass.
    threads : number of threads that torch uses during the call
    close : the function that releases the contender's memory
    set_d_output : the function that replaces d_output; None for forward passes, and if the contender cannot replace it
    includes_host : True if on a GPU the host's clock times consecutive calls, instead of CUDA's events
    """

    call: Callable[[Any], Any]
    results: Callable[[Any], Results]
    setup: Callable[[], Any] = lambda: None
    threads: int = 1
    close: Callable[[], None] = lambda: None
    set_d_output: Callable[[Any], Any] | None = None
    includes_host: bool = False


class Implementation(ABC):
    """A contender. Each contender is a small subclass with an instance in `VARIANTS` or among a device's peers."""

    name: str
    label: str
    packages: tuple[str, ...] = ()  # names of the modules that must be installed
    pip: str = ""  # arguments of `pip install` that install the modules in `packages`
    note: str = ""  # printed remark on what the times include
    has_arena: bool = False  # True if the library reuses memory between calls, which hides a call's peak memory
    device: str = "cpu"  # torch's name of the device that has the contender's tensors

    def skip_reason(self) -> str | None:
        """Return why the contender cannot run at all: a missing package. None if every package is installed."""
        missing = [package for package in self.packages if find_spec(package) is None]
        return f"not installed: pip install {self.pip}" if missing else None

    @abstractmethod
    def refuses(self, workload: Workload) -> str | None:
        """Return why the contender cannot compute this workload; None if it can."""

    def reference_workload(self, workload: Workload) -> Workload | None:
        """Return the workload whose true results the contender's results are checked against.

        None, for no check, if the results depend on random numbers of the peer.
        """
        return workload

    @abstractmethod
    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        """Do the work that is done once and not timed, such as conversion, compilation and layout; return the call."""


# -- torch ----------------------------------------------------------------------------------------------------------


def to_tensor(array: Any, dtype: str, device: str = "cpu") -> Any:
    """Return a NumPy array as a torch tensor of the given dtype on the given device."""
    import torch

    return torch.from_numpy(array).to(device, getattr(torch, dtype))


def to_tensor_on(device: str) -> ToTable:
    """Return a function from a NumPy array to a torch tensor on the device. FlexAttention's functions index tensors."""
    import torch

    return lambda array: torch.as_tensor(array, device=device)


def to_float32(result: Any) -> Any:
    """Return a tensor or array as a float32 NumPy array."""
    return np.asarray(to_numpy(result), np.float32)


def name_results(workload: Workload, result: Any) -> Results:
    """Return the `Results` of a forward pass.

    `result` is the output, or (output, statistics) if the workload has statistics.
    """
    output, statistics = result if workload.see else (result, ())
    return {"output": to_float32(output)} | {
        repr(statistic): tuple(map(to_float32, arrays_of(arrays)))
        for statistic, arrays in zip(workload.see, statistics, strict=True)
    }


def prepare_with_autograd(
    workload: Workload, inputs: Inputs, forward: Callable[..., Any], threads: int, device: str = "cpu"
) -> PreparedCall:
    """Prepare a torch function for the passes of the workload, with gradients by torch.autograd.

    `forward` is a function of the tensors (query, key, value, bias); the bias is None if the workload has no bias. If
    the workload's passes are "backward", only torch.autograd.grad is timed, not the forward pass before it.
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
    seed = to_tensor(
        inputs.d_output, workload.dtype, device
    ).clone()  # a copy of d_output, since `set_d_output` overwrites it

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
        """Refuse backward passes if torch is not installed, since Sightline has no gradients on NumPy arrays."""
        if workload.passes != "forward" and find_spec("torch") is None:
            return "gradients need torch: pip install torch"
        return None

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        if find_spec("torch") is None:
            return self.prepare_on_numpy(workload, inputs, threads)
        to_table = Table if self.device == "cpu" else self._device_table
        mask = None if workload.mask is None else workload.mask.formula(workload.n, to_table)
        scores = {} if workload.score is None else {0: workload.score.formula(workload.H, to_table)}
        seed = workload.seed if workload.dropout else None

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
        """Prepare Sightline's forward pass on NumPy arrays."""
        kind = resolve_dtype(np, workload.dtype)
        query, key, value = (x.astype(kind) for x in (inputs.query, inputs.key, inputs.value))
        score = inputs.score if workload.score is None else workload.score_formula
        options: dict[str, Any] = {
            "mask": workload.formula,
            "score": score,
            "dropout": workload.dropout,
            "seed": workload.seed,
            "see": list(workload.see) or None,
        } | self.options
        if workload.formula is None and score is None and not (workload.dropout or workload.see):
            options = {}  # a user would pass no options here, and passing them takes time that shows in tiny problems
        call = partial(attention, query, key, value, threads=threads, **options)
        return PreparedCall(lambda _: call(), partial(name_results, workload), threads=threads)


class Numpy(Sightline):
    """Sightline on NumPy arrays, even if torch is installed."""

    def __init__(self) -> None:
        super().__init__("numpy", "Sightline on NumPy")

    def refuses(self, workload: Workload) -> str | None:
        """Refuse backward passes, since Sightline has no gradients on NumPy arrays."""
        return None if workload.passes == "forward" else "NumPy has no gradients"

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        return self.prepare_on_numpy(workload, inputs, threads)


class OneThread(Sightline):
    """Sightline on one thread, whatever number of threads the other contenders use."""

    def __init__(self) -> None:
        super().__init__("one thread", "one thread")

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        return super().prepare(workload, inputs, 1)


class WithoutDropout(Sightline):
    """Sightline on a workload from which dropout is removed."""

    def __init__(self) -> None:
        super().__init__("without dropout", "without dropout", {"dropout": 0.0, "seed": None})

    def reference_workload(self, workload: Workload) -> Workload:
        """Return the given workload without dropout."""
        return replace(workload, dropout=0.0)


class WithoutStatistics(Sightline):
    """Sightline on a workload from which the statistics are removed."""

    def __init__(self, options: dict[str, Any] | None = None, device: str = "cpu") -> None:
        super().__init__("without statistics", "without statistics", options or {}, device)

    def reference_workload(self, workload: Workload) -> Workload:
        """Return the given workload without statistics."""
        return replace(workload, see=())

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        return super().prepare(self.reference_workload(workload), inputs, threads)


VARIANTS: dict[str, Sightline] = {
    variant.name: variant for variant in (Sightline(), Numpy(), OneThread(), WithoutDropout(), WithoutStatistics())
}


def set_threads(threads: int) -> None:
    """Set torch's number of threads if torch is loaded. `Implementation.prepare` sets that of other libraries."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
