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
from .operator_schema import Question

__all__ = ["recording", "refuse_tangents", "wants_gradients", "watched"]


def recording(question: Question) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Function of (query, key, value, output, lse): the output as torch's graph has it, for questions like this one."""
    words = question[3:]

    def record(query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor) -> Tensor:
        found: Tensor = _Attention.apply(query, key, value, (output, lse), words)  # type: ignore[no-untyped-call]
        return found

    return record


class _Attention(torch.autograd.Function):
    """An answer that is there already, joined to what it was made of."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, answer: tuple[Tensor, Tensor], words: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, *answer)
        ctx.words = words
        return answer[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        question = Question(query, key, value, *ctx.words)
        whole = (
            torch.is_grad_enabled() or torch.compiler.is_compiling() or watched() or type(gradients[0]) is not Tensor
        )
        taken = operator.attention_backward if whole else operator.gradient
        found = taken(list(gradients), [0], [], output, lse, *question)
        return (*found, None, None)


def wants_gradients(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch is to take gradients with respect to any of these."""
    return (query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled()


def refuse_tangents(question: Question) -> None:
    """Raise KernelRefusedError for forward derivatives: torch's operators of one's own drop them without a word."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    tensors = [*question[:3], *question.tables, *([] if question.sinks is None else [question.sinks])]
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise KernelRefusedError(
            "forward derivatives of attention, as of torch.func.jvp or forward_ad.make_dual",
            "derivatives backward, to any order",
            "torch.autograd.functional.jvp, which takes two of them",
        )


def watched() -> bool:
    """Whether a mode, a transform, a tracer or a forward derivative is at work in this thread."""
    return bool(
        _C._len_torch_function_stack()
        or _C._len_torch_dispatch_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )
