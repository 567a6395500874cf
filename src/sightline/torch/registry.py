"""The implementation "sightline" in torch's registry of attention implementations, `torch.nn.attention`.

While it is activated, torch's dispatcher calls this library on CPU tensors: for the operator SDPA in eager mode, with
gradients of every order, and for the operator FLASH, which torch.compile and transforms of torch.func make of SDPA, and
its backward pass. Tracers see torch's operators. So a program that was compiled or exported before is served too, and
one that was compiled during the activation calls torch's kernels after it. `_or_torch` gives a call that this library
refuses to torch's kernel. A call with dropout, with d_v ≠ d_k, with a mask that needs gradients or with fewer than four
axes is served in eager mode alone: torch.compile and transforms make products and a softmax of it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from warnings import catch_warnings

import torch
from torch import _C, Tensor
from torch.library import Library
from torch.nn import Parameter, attention

from ..api.functions import attend
from ..api.kernels import differentiate, make_plan
from ..arrays.caching import store_entry
from ..call.backward_calls import BackwardInputs, BackwardPasses
from ..call.kernel import GivenGradients, Gradients
from ..call.problem import NUM_OPERANDS, parse, validate
from ..call.request import machine_setting
from ..call.validation import read_mask, read_score
from ..errors import KernelRefusedError, SightlineError
from ..formula.library import bias
from ..formula.parameters import structure_of
from ..statistics import lse
from .functional import convert_arguments
from .interception import is_intercepted
from .layer_calls import without_fast_path
from .operator import autocast_disabled

SDPA, FLASH = "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"
DEFAULTS: tuple[Any, ...] = None, 0.0, False  # of attn_mask, dropout_p and is_causal
PLAIN = {Tensor, Parameter}
_PASSES: dict[Any, BackwardPasses] = {}  # by the formulas and the scale of a call, and the setting of the machine


class ActiveOverrides:
    """The functions in the place of torch's kernels and of its fast path of layers, until `remove` is called."""

    def __init__(self) -> None:
        self.fast_path = ExitStack()
        self.library: Library | None = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        add: Any = self.library.impl
        traced = [(FLASH, "CPU", _attend_below_autograd), (f"{FLASH}_backward", "CPU", _differentiate)]
        with catch_warnings(action="ignore"):  # torch warns that its own kernels are overridden
            for name, dispatch_key, compute in ((SDPA, "AutogradCPU", _run_sdpa), (SDPA, "CPU", _run_sdpa), *traced):
                kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
                add(name, _or_torch(compute, kernel), dispatch_key, with_keyset=True)
        self.fast_path.enter_context(without_fast_path())

    def remove(self) -> None:
        self.library = None
        self.fast_path.close()


def _or_torch(compute: Any, kernel: Any) -> Any:
    """Return a function that calls `compute`, or torch's kernel if `compute` refuses the call or torch must see it."""

    def run(keys: Any, *inputs: Any, **options: Any) -> Any:
        if PLAIN.issuperset(map(type, inputs[:NUM_OPERANDS])) and not is_intercepted() and _C._get_flash_sdp_enabled():
            try:
                return compute(*inputs, **options)
            except SightlineError:  # torch computes the call, or raises its own error
                pass
        return kernel.call_boxed(keys, *inputs, **options)

    return run


def _run_sdpa(*inputs: Any, scale: float | None = None, enable_gqa: bool = False) -> Any:
    """Return the output. `inputs` are query, key, value, attn_mask, dropout_p and is_causal, without last defaults."""
    inputs = *inputs, *DEFAULTS[len(inputs) - NUM_OPERANDS :], scale, enable_gqa, "cpu"
    operands, options, without_batch = convert_arguments(*inputs)
    output = attend(*operands, options)
    return output[0] if without_batch else output


def _attend_below_autograd(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **named: Any
) -> tuple[Tensor, Tensor]:
    """Return output and lse (B, H, n) in the order of memory that torch's kernel promises to compiled programs."""
    if dropout_p > 0 or query.shape[-1] != value.shape[-1]:
        cure = f"torch.nn.functional.{SDPA}"
        raise KernelRefusedError("dropout, or d_v unlike d_k", "what torch's kernel serves", cure)
    with torch.no_grad(), autocast_disabled(query):
        options = _read(query, key, value, is_causal, **named).replace(see=(lse(),), kernel="cpu")
        output, (sums,) = attend(query, key, value, options)
    if output.stride() != torch.empty_like(query, device="meta").stride():
        output = torch.empty_like(query).copy_(output)
    sums = sums.masked_fill(sums == -torch.inf, 0.0)  # as torch does for a row whose keys are all hidden
    return output, _order_heads_last(sums[..., None])[..., 0]


def _differentiate(d_output: Tensor, *inputs: Any, **named: Any) -> list[Tensor]:
    """Return the gradients of query, key and value. `inputs` are these, the results, dropout_p and is_causal."""
    query, key, value, output, sums, _, is_causal = inputs
    options = _read(query, key, value, is_causal, **named).replace(seed=0, kernel="cpu")
    formulas, lse = (read_mask(options.mask), read_score(options.score)), sums.double().contiguous()
    structure = structure_of(*formulas)
    tables = tuple([table.array for table in structure.tables])
    call_key = structure.formulas, options.scale, machine_setting()

    def dispatch() -> tuple[Gradients, Any]:
        problem = validate(parse(query, key, value, options))
        given = GivenGradients(d_output, saved=(output, lse))
        return differentiate(problem, make_plan(problem), given), formulas

    with torch.no_grad(), autocast_disabled(output):
        if call_key not in _PASSES:
            problem = validate(parse(query, key, value, options))
            store_entry(_PASSES, call_key, BackwardPasses.of(problem, formulas, (), False), limit=64)
        arrays = (query, key, value), output, lse, d_output.contiguous(), None, tables
        gradients = _PASSES[call_key].differentiate(BackwardInputs(*arrays, structure.numbers, ()), dispatch)
    return [_order_heads_last(gradient) for gradient in gradients]


def _read(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, attn_mask: Any = None, scale: Any = None) -> Any:
    _, options, _ = convert_arguments(query, key, value, attn_mask, 0.0, is_causal, scale, True)
    return options if options.score is None else options.replace(score=bias(options.score))


def _order_heads_last(array: Tensor) -> Tensor:
    """Return the array (B, H, n, d) in the order (B, n, H, d) of memory."""
    return array.transpose(1, 2).contiguous().transpose(1, 2)


if hasattr(attention, "restore_flash_attention_impl"):  # this version of torch has the registry
    attention.register_flash_attention_impl("sightline", register_fn=ActiveOverrides)
