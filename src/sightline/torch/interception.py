"""Which modes, transforms, tracers and forward derivatives of torch need to see a call. No call is replaced here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from ..errors import KernelRefusedError


def _has_function_mode_or_tangents() -> bool:
    """True if a mode of functions, but no default device, is active in this thread, or a forward derivative in any."""
    count = _C._len_torch_function_stack()  # a default device, below other modes, moves no tensor of named device
    is_mode = count and not isinstance(_C._get_function_stack_at(count - 1), DeviceContext)
    return bool(is_mode) or forward_ad._current_level >= 0


INTERCEPTIONS = (  # functions whose results are true if a mode, a transform, a tracer or a forward derivative is active
    _has_function_mode_or_tangents,
    _C._len_torch_dispatch_stack,
    _C._functorch.peek_interpreter_stack,
    _C._get_tracing_state,
)


def is_intercepted() -> bool:
    """True if a mode, a transform or a tracer is active in this thread, or a forward derivative in any thread."""
    if torch.compiler.is_compiling():
        return True
    for function in INTERCEPTIONS:  # noqa: SIM110 - in half the time of `any`
        if function():
            return True
    return False


def hides_entries() -> bool:
    """True if torch.compile or a transform of torch.func hides the entries of tensors."""
    return torch.compiler.is_compiling() or is_transformed()


def in_eager_code(function: Callable[..., Any], otherwise: Callable[..., Any] = lambda *_, **__: None) -> Any:
    """Return a function that does what `function` does, and what `otherwise` does while torch.compile traces."""

    @wraps(function)
    def choose(*inputs: Any, **options: Any) -> Any:
        return (otherwise if torch.compiler.is_compiling() else function)(*inputs, **options)

    return choose


def has_modes() -> bool:
    """True if a mode of functions is on in this thread, and torch.compile does not trace."""
    return not torch.compiler.is_compiling() and _C._is_torch_function_mode_enabled()


def is_transformed() -> bool:
    """True if a transform of torch.func is active in this thread, or a forward derivative in any thread.

    The function returns False while torch.compile traces, which does not read these states reliably.
    """
    if torch.compiler.is_compiling():
        return False
    return _C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def refuse_tangents() -> None:
    """Raise KernelRefusedError if torch.compile traces a forward derivative, which would be lost without an error."""
    if torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        given = "forward derivatives of attention inside a compiled function"
        raise KernelRefusedError(given, "forward derivatives in eager mode", "torch.func.jvp outside of torch.compile")


def refuse_functionalize() -> None:
    """Raise KernelRefusedError inside torch.func.functionalize: torch has no rule for autograd functions there."""
    levels = _C._functorch.get_interpreter_stack() or ()
    if any(level.key() == _C._functorch.TransformType.Functionalize for level in levels):
        given = "attention inside torch.func.functionalize"
        cure = "call attention outside of torch.func.functionalize, or in a function for torch.compile"
        raise KernelRefusedError(given, "the other transforms of torch.func, such as vmap, grad and jvp", cure)


def refuse_old_vmap(gradients: Sequence[Tensor | None]) -> None:
    """Raise KernelRefusedError for gradients of torch.autograd's older vmap, which takes no batching rule in Python."""
    if any(gradient is not None and _C._functorch.is_legacy_batchedtensor(gradient) for gradient in gradients):
        given = "gradients of attention with is_grads_batched=True or vectorize=True of torch.autograd"
        allowed = "the transforms of torch.func"
        raise KernelRefusedError(given, allowed, "torch.func.jacrev, or torch.vmap of torch.func.vjp")
