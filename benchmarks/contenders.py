"""The variants of Sightline that the benchmarks time, and functions that the other libraries (`peers`) use, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from sightline.api.functions import attention
from sightline.arrays.operations import resolve_dtype, to_numpy
from sightline.formula.library import bias
from sightline.formula.tables import Table
from sightline.statistics import arrays_of

from .cases import Contender, Results, TimedCall
from .workloads import Inputs, ToTable, Workload


class Peer(Contender):
    """A contender that is another library."""

    lacks: tuple[str, ...] = ()  # names of the missing features, as in `Workload.features`
    dtypes: tuple[str, ...] = ()  # names of the dtypes that the library has; () for every dtype

    def refuses(self, workload: Workload) -> str | None:
        if self.dtypes and workload.dtype not in self.dtypes:
            return f"no {workload.dtype} on CPUs"
        return next((f"no {feature}" for feature in workload.features if feature in self.lacks), None)


# -- torch ----------------------------------------------------------------------------------------------------------


def to_tensor(array: Any, dtype: str, device: str = "cpu") -> Any:
    """Return a NumPy array as a torch tensor of the given dtype on the given device."""
    import torch

    return torch.from_numpy(array).to(device, getattr(torch, dtype))


def to_tensor_on(device: str) -> ToTable:
    """Return a function that converts a NumPy array to a torch tensor on the device. FlexAttention reads tensors."""
    import torch

    return lambda array: torch.as_tensor(array, device=device)


def to_float32(result: Any) -> Any:
    """Return a tensor or array as a float32 NumPy array."""
    return np.asarray(to_numpy(result), np.float32)


def name_results(workload: Workload, result: Any) -> Results:
    """Return the `Results` of a contender.

    `result` is what the contender's function returned: the output alone; (output, statistics) if the workload has
    statistics; (output, tangent) if it has tangents; (output, gradients) if it has a backward pass. The gradients are
    those of query, key, value and, with a bias, of the bias.
    """
    if workload.passes != "forward":
        output, gradients = result
        names = ("query", "key", "value", "bias")[: len(gradients)]
        return {"output": to_float32(output.detach())} | dict(zip(names, map(to_float32, gradients), strict=True))
    if workload.tangents:
        return dict(zip(("output", "tangent"), map(to_float32, result), strict=True))
    output, statistics = result if workload.see else (result, ())
    return {"output": to_float32(output)} | {
        repr(statistic): tuple(map(to_float32, arrays_of(arrays)))
        for statistic, arrays in zip(workload.see, statistics, strict=True)
    }


def prepare_with_autograd(
    workload: Workload, inputs: Inputs, forward: Callable[..., Any], threads: int, device: str = "cpu"
) -> TimedCall:
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
    results = partial(name_results, workload)
    if workload.tangents:
        tangents = tuple(to_tensor(array, workload.dtype, device) for array in inputs.tangents)

        def of_operands(*operands: Any) -> Any:
            return forward(*(leaves | dict(zip(workload.tangents, operands, strict=True))).values(), None)

        operands = tuple(leaves[name] for name in workload.tangents)
        return TimedCall(lambda _: torch.func.jvp(of_operands, operands, tangents), results, threads=threads)
    if workload.passes == "forward":
        return TimedCall(lambda _: forward(*arguments), results, threads=threads)
    for leaf in leaves.values():
        leaf.requires_grad_()
    seed = to_tensor(inputs.d_output, workload.dtype, device).clone()  # a copy, since `set_d_output` overwrites it

    def gradients(output: Any) -> Any:
        return output.detach(), torch.autograd.grad(output, list(leaves.values()), seed)

    def set_d_output(array: Any) -> None:
        seed.copy_(to_tensor(array, workload.dtype))

    if workload.passes == "backward":
        return TimedCall(gradients, results, lambda: forward(*arguments), threads, set_d_output=set_d_output)
    return TimedCall(lambda _: gradients(forward(*arguments)), results, threads=threads, set_d_output=set_d_output)


# -- Sightline ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Sightline(Contender):
    """`sightline.attention`, called as a user calls it: on tensors if torch is installed, else on NumPy arrays."""

    name: str = "sightline"
    label: str = "Sightline"
    options: dict[str, Any] = field(default_factory=dict)  # more arguments of `attention`
    device: str = "cpu"
    changes: dict[str, Any] = field(default_factory=dict)  # attributes of the workload that the variant replaces
    threads: int | None = None  # None for as many as the other contenders use
    on_numpy: bool = False  # True for NumPy arrays even if torch is installed
    is_peer = False

    def refuses(self, workload: Workload) -> str | None:
        """Return why Sightline cannot compute a backward pass, on NumPy arrays or without torch; None if it can."""
        if workload.passes == "forward":
            return None
        if self.on_numpy:
            return "NumPy has no gradients"
        return None if find_spec("torch") else "gradients need torch: pip install torch"

    def reference(self, workload: Workload) -> Workload:
        return replace(workload, **self.changes)

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> TimedCall:
        workload, threads = self.reference(workload), self.threads or threads
        inputs = inputs.contiguous if workload.contiguous else inputs
        on_numpy = self.on_numpy or find_spec("torch") is None
        on_cpu = on_numpy or self.device == "cpu"
        to_table: ToTable = Table if on_cpu else lambda array: Table(to_tensor_on(self.device)(array))
        given: dict[str, Any] = {
            "mask": workload.mask and workload.mask.formula(workload.n, to_table),
            "score": workload.score and workload.score.formula(workload.H, to_table),
            "dropout": workload.dropout or None,
            "seed": workload.seed if workload.dropout else None,
            "see": list(workload.see) or None,
            "threads": threads,
        }
        options = {name: value for name, value in given.items() if value is not None} | self.options

        if on_numpy:
            kind = resolve_dtype(np, workload.dtype)
            query, key, value = (x.astype(kind) for x in (inputs.query, inputs.key, inputs.value))
            if inputs.bias is not None:
                options["score"] = bias(inputs.bias)
            call = partial(attention, query, key, value, **options)
            return TimedCall(lambda _: call(), partial(name_results, workload), threads=threads)

        def forward(query: Any, key: Any, value: Any, added: Any) -> Any:
            if added is not None and "score" not in options:
                options["score"] = bias(added)
            return attention(query, key, value, **options)

        return prepare_with_autograd(workload, inputs, forward, threads, self.device)


VARIANTS: dict[str, Contender] = {
    variant.name: variant
    for variant in (
        Sightline(),
        Sightline("numpy", "Sightline on NumPy", on_numpy=True),
        Sightline("contiguous", "contiguous", changes={"contiguous": True}),
        Sightline("one thread", "one thread", threads=1),
        Sightline("without tangents", "output alone", changes={"tangents": ()}),
        Sightline("without dropout", "without dropout", changes={"dropout": 0.0}),
        Sightline("without statistics", "without statistics", changes={"see": ()}),
    )
}


def set_threads(threads: int) -> None:
    """Set torch's number of threads if torch is loaded.

    The numbers of threads of other libraries are set once, by `Contender.prepare`.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
