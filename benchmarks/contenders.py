"""Contenders that compute in torch: Sightline and its variants, and torch's own functions.

All contenders get the same numbers. If a function has no option for a mask, it gets the mask as a dense array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sightline.api.functions import attention
from sightline.arrays.operations import resolve_dtype, to_numpy
from sightline.formula.library import bias
from sightline.formula.tables import Table
from sightline.statistics import arrays_of

from .attention import CAUSAL, Attention, Inputs
from .core import Call, Contender, Results

Forward = Callable[..., Any]  # function of query, key, value and, for a problem with a bias, the bias


def to_tensor(array: Any, dtype: str, device: str = "cpu") -> Any:
    """Return a NumPy array as a torch tensor of the given dtype on the given device."""
    import torch

    return torch.from_numpy(array).to(device, getattr(torch, dtype))


def to_float32(result: Any) -> Any:
    return np.asarray(to_numpy(result), np.float32)


def name_results(problem: Attention, result: Any) -> Results:
    """Return the `Results` of a contender.

    `result` is what the contender's function returned: the output alone; (output, statistics) if the problem has
    statistics; (output, gradients) if it has a backward pass. The gradients are those of query, key, value and, with a
    bias, of the bias.
    """
    if problem.passes != "forward":
        output, gradients = result
        names = ("query", "key", "value", "bias")[: len(gradients)]
        return {"output": to_float32(output.detach())} | dict(zip(names, map(to_float32, gradients), strict=True))
    output, statistics = result if problem.see else (result, ())
    return {"output": to_float32(output)} | {
        repr(statistic): tuple(map(to_float32, arrays_of(arrays)))
        for statistic, arrays in zip(problem.see, statistics, strict=True)
    }


def differentiate(problem: Attention, inputs: Inputs, forward: Forward) -> Call:
    """Return the call of a torch function for the passes of the problem, with gradients by torch.autograd.

    If the problem's passes are "backward", only torch.autograd.grad is timed, not the forward pass before it.
    """
    import torch

    arrays = [inputs.query, inputs.key, inputs.value, *([] if inputs.bias is None else [inputs.bias])]
    leaves = [to_tensor(array, problem.dtype, problem.device) for array in arrays]
    results = partial(name_results, problem)
    if problem.passes == "forward":
        return Call(lambda _: forward(*leaves), results)
    for leaf in leaves:
        leaf.requires_grad_()
    d_output = to_tensor(inputs.d_output, problem.dtype, problem.device)

    def gradients(output: Any) -> Any:
        return output.detach(), torch.autograd.grad(output, leaves, d_output)

    if problem.passes == "backward":
        return Call(gradients, results, lambda: forward(*leaves))
    return Call(lambda _: gradients(forward(*leaves)), results)


def prepare_sightline(
    problem: Attention, inputs: Inputs, threads: int, on_numpy: bool = False, kernel: str | None = None
) -> Call:
    """Prepare `sightline.attention`, called as a user calls it, on tensors or on NumPy arrays."""
    import torch

    inputs = inputs.contiguous() if problem.contiguous else inputs
    to_table = Table if problem.device == "cpu" else lambda x: Table(torch.as_tensor(x, device=problem.device))
    mask = problem.mask and problem.mask.of(problem.n, to_table)
    given: dict[str, Any] = {"mask": mask, "see": list(problem.see) or None, "threads": threads, "kernel": kernel}
    given |= {"dropout": problem.dropout, "seed": problem.seed} if problem.dropout else {}
    options = {name: value for name, value in given.items() if value is not None}

    def forward(query: Any, key: Any, value: Any, added: Any = None) -> Any:
        score = None if added is None else bias(added)
        return attention(query, key, value, score=score, **options)

    if on_numpy:
        kind = resolve_dtype(np, problem.dtype)
        arrays = [x.astype(kind) for x in (inputs.query, inputs.key, inputs.value)]
        return Call(lambda _: forward(*arrays), partial(name_results, problem))
    return differentiate(problem, inputs, forward)


def variant(name: str, on_numpy: bool = False, kernel: str | None = None, **changes: Any) -> Contender:
    """Return Sightline on NumPy arrays, with another kernel, or on the problem with these changed attributes."""
    prepare = partial(prepare_sightline, on_numpy=on_numpy, kernel=kernel)
    return Contender(name, prepare, is_ours=True, changes=changes, lacks=("backward pass",) * on_numpy)


SIGHTLINE = variant("Sightline")


def prepare_torch(problem: Attention, inputs: Inputs, threads: int, backend: str = "") -> Call:
    """Prepare scaled_dot_product_attention, with torch's name of the one fused kernel to use; "" for torch's choice."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend: Callable[..., Any] = torch.nn.functional.scaled_dot_product_attention
    if backend:
        attend = sdpa_kernel(getattr(SDPBackend, backend))(attend)
    allowed = problem.mask_array
    mask = None if allowed is None else torch.from_numpy(allowed).to(problem.device)
    given = {"dropout_p": problem.dropout, "is_causal": problem.mask is CAUSAL, "enable_gqa": problem.G != problem.H}
    options = {name: value for name, value in given.items() if value is not None}

    def forward(query: Any, key: Any, value: Any, bias: Any = mask) -> Any:
        return attend(query, key, value, bias, **options)

    return differentiate(problem, inputs, forward)


def prepare_flex(problem: Attention, inputs: Inputs, threads: int) -> Call:
    """Prepare torch's FlexAttention, compiled. On a CPU the compilation needs a C++ compiler."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    to_table = partial(torch.as_tensor, device=problem.device)
    torch.compiler.reset()  # drop the code compiled for earlier problems
    options: dict[str, Any] = {"enable_gqa": True} if problem.G != problem.H else {}
    if problem.mask is not None:
        allows, lengths = problem.mask.make(problem.n, to_table), (problem.n, problem.m)
        options["block_mask"] = create_block_mask(allows, None, None, *lengths, device=problem.device)
    compiled = torch.compile(flex_attention)
    return differentiate(problem, inputs, partial(compiled, **options))


TORCH = Contender("torch", prepare_torch)
FLEX = Contender("FlexAttention", prepare_flex, lacks=("dropout", "bias", "statistics"))
FLEX_ON_CPU = replace(FLEX, lacks=(*FLEX.lacks, "backward pass"))
