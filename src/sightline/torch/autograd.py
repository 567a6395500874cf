"""Calls that torch takes gradients of, recorded by a plain function of its graph: the operator's road takes far longer.

The operator is for what looks at operators (torch.compile, transforms, modes), and for gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad

from ..errors import KernelRefusedError
from . import operator
from .operator_schema import OperatorArguments

__all__ = ["is_intercepted", "make_graph_attacher", "needs_gradients", "refuse_tangents"]


def make_graph_attacher(arguments: OperatorArguments) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Function of (query, key, value, output, lse): the output as torch's graph has it, for questions like this one."""
    other_arguments = arguments[3:]

    def attach_to_graph(query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor) -> Tensor:
        attached: Tensor = _Attention.apply(query, key, value, (output, lse), other_arguments)  # type: ignore[no-untyped-call]
        return attached

    return attach_to_graph


class _Attention(torch.autograd.Function):
    """An answer that is there already, joined to what it was made of."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        result: tuple[Tensor, Tensor],
        other_arguments: tuple[Any, ...],
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, *result)
        ctx.other_arguments = other_arguments
        return result[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        arguments = OperatorArguments(query, key, value, *ctx.other_arguments)
        needs_operator = (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or is_intercepted()
            or type(gradients[0]) is not Tensor
        )
        compute = operator.attention_backward if needs_operator else operator.compute_gradients
        input_gradients = compute(list(gradients), [0], [], output, lse, *arguments)
        return (*input_gradients, None, None)


def needs_gradients(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch is to take gradients with respect to any of these."""
    return (query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled()


def refuse_tangents(arguments: OperatorArguments) -> None:
    """Raise KernelRefusedError for forward derivatives: torch's operators of one's own drop them without a word."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    tensors = [*arguments[:3], *arguments.tables, *([] if arguments.sinks is None else [arguments.sinks])]
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise KernelRefusedError(
            "forward derivatives of attention, as of torch.func.jvp or forward_ad.make_dual",
            "derivatives backward, to any order",
            "torch.autograd.functional.jvp, which takes two of them",
        )


def is_intercepted() -> bool:
    """Whether a mode, a transform, a tracer or a forward derivative is at work in this thread."""
    return bool(
        _C._len_torch_function_stack()
        or _C._len_torch_dispatch_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )
