"""`replacing`: this library's attention in place of torch's, in programs that one cannot edit."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import handle_torch_function, has_torch_function

from ..arrays.caching import store_entry
from ..call.kernel import choose
from ..call.problem import parse, validate
from ..errors import SightlineError, context
from ..formula.library import bias
from ..formula.torch_masks import is_causal_bias
from ..reference.streaming import Streaming
from .dispatch import kernels
from .functional import check_operands, convert_arguments, scaled_dot_product_attention
from .fused import Fused
from .layer_calls import without_fast_path
from .nested import is_nested

SDPA_NAME = "scaled_dot_product_attention"
EXCLUDED_MODULES = ("sightline", "torch._C")  # modules that keep torch's function
MAX_LISTED_CALLS = 12  # a printed `Replacement` lists this many different calls
SdpaArguments = tuple[Any, ...]  # the eight arguments of torch's function, in the order of its signature


class ReplacedCall(NamedTuple):
    """What decides whether this library serves a call of torch's function; `str` describes the call."""

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    mask: tuple[Any, ...] | None  # shape and dtype; lengths and variant of a CausalBias
    kinds: tuple[Any, ...]  # the class and the layout of each tensor
    is_causal: bool
    has_dropout: bool
    enable_gqa: bool
    needs_gradients: bool

    @classmethod
    def of(cls, arguments: SdpaArguments) -> ReplacedCall:
        """Return the description of a call with these arguments."""
        query, key, value, attn_mask, dropout_p, is_causal, _, enable_gqa = arguments
        mask = None if attn_mask is None else (attn_mask.shape, attn_mask.dtype)
        if is_causal_bias(attn_mask):
            mask = (attn_mask.seq_len_q, attn_mask.seq_len_kv), attn_mask.variant
        tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        shapes = query.shape, key.shape, value.shape
        kinds = tuple([(type(x), x.layout) for x in tensors])
        return cls(
            shapes, query.dtype, query.device, mask, kinds, is_causal, dropout_p > 0, enable_gqa, needs_gradients
        )

    def __str__(self) -> str:
        shapes = zip(("query", "key", "value"), self.shapes, strict=True)
        features = [
            "" if self.mask is None else f"{_name(self.mask[1])} mask {tuple(self.mask[0])}",
            "causal" * self.is_causal,
            "dropout" * self.has_dropout,
            "gradients" * self.needs_gradients,
        ]
        operands = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes)
        return ", ".join([operands, f"{_name(self.dtype)} on {self.device}", *filter(None, features)])


@dataclass(eq=False, repr=False)
class Replacement:
    """What `replacing` did: the calls that this library served, and those that it left to torch.

    `print` shows both. Calls in a model that torch.compile has compiled are not counted.

    Attributes
    ----------
    served : Counter
        For the description of a call, the number of such calls.
    left : Counter
        For (description of a call, reason), the number of such calls that torch computed.

    Examples
    --------
    >>> import torch, sightline.torch
    >>> x = torch.ones(1, 2, 5, 4)
    >>> with sightline.torch.replacing() as replacement:
    ...     _ = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> replacement.served.total(), replacement.left.total()
    (1, 0)
    """

    served: Counter[ReplacedCall] = field(default_factory=Counter)
    left: Counter[tuple[ReplacedCall, str]] = field(default_factory=Counter)

    def __repr__(self) -> str:
        served, left = self.served.total(), self.left.total()
        lines = [f"calls of {SDPA_NAME}: {served:,} served by sightline, {left:,} left to torch"]
        lines += _format_counts(Counter({str(call): count for call, count in self.served.items()}))
        if left:
            reasons = Counter({f"{call}\n      {reason}": count for (call, reason), count in self.left.items()})
            lines += ["left to torch:", *_format_counts(reasons)]
        if not served + left:
            lines.append("  no eager call was seen: the program may be compiled, or not call this function")
        return "\n".join(lines)


def _format_counts(counts: Counter[str]) -> list[str]:
    """Return one line for each of the most frequent entries, and one for the number of the others."""
    lines = [f"  {count:,} × {text}" for text, count in counts.most_common(MAX_LISTED_CALLS)]
    others = len(counts) - len(lines)
    return lines + [f"  and {others} other kinds of calls"] * (others > 0)


def _name(kind: Any) -> str:
    """Return the name of a dtype or of a variant of CausalBias."""
    return f"CausalBias {kind.name}" if hasattr(kind, "name") else str(kind).removeprefix("torch.")


_lock = threading.Lock()
_active: list[Replacement] = []
_reasons: dict[ReplacedCall, str | None] = {}  # the results of `_reason_to_leave`


@context
def replacing() -> Generator[Replacement]:
    """Compute `torch.nn.functional.scaled_dot_product_attention` by this library while the context lasts.

    Use the context for programs that you cannot edit, such as models of timm, diffusers, open_clip, and transformers
    with attn_implementation="sdpa", and `torch.nn.TransformerEncoder`.

    The function is replaced in torch.nn.functional and in every loaded module that has imported it by name. torch's
    fast path of encoder layers does not call the function, so the context switches the fast path off. At padding,
    outputs are then those of torch's other path, where the fast path with nested tensors gives 0.

    torch computes a call if no generated kernel can, or if this library raises an error for the call. On exit, after an
    error too, everything is restored. Contexts may be nested.

    Yields
    ------
    Replacement
        The calls that were served, and those that were left to torch, with the reasons. Print the object at the end.

    Notes
    -----
    `torch.nn.MultiheadAttention` with need_weights=True does not call the function; `sightline.watch` records
    its weights. `torch.compile` keeps the function that it has traced: compile inside the context, and call
    `torch.compiler.reset()` after it. `torch.jit.script` cannot compile the replacement. An object that is no module
    may have stored the replacement. After the context, the replacement calls torch's function.

    Examples
    --------
    >>> import torch, sightline.torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with torch.no_grad(), sightline.torch.replacing() as replacement:
    ...     _ = layer(torch.ones(1, 5, 8))
    >>> replacement
    calls of scaled_dot_product_attention: 1 served by sightline, 0 left to torch
      1 × query (1, 2, 5, 4), key (1, 2, 5, 4), value (1, 2, 5, 4), float32 on cpu
    """
    replacement = Replacement()
    try:
        with _lock:
            _active.append(replacement)
            _set_references(torch_attention, replacing_attend)
        with without_fast_path():
            yield replacement
    finally:
        with _lock:
            _active.remove(replacement)
            if not _active:  # contexts of several threads may end in any order
                _set_references(replacing_attend, torch_attention)


def _set_references(old: Any, new: Any) -> None:
    """Set every attribute of a loaded module that is the function `old` to `new`."""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(EXCLUDED_MODULES):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is old:
                    setattr(module, name, new)


@wraps(scaled_dot_product_attention, assigned=("__name__", "__doc__"))  # pickle needs this function's own place
def replacing_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    tensors = (query, key, value) if attn_mask is None else arguments[:4]
    if not _active or not all(map(_is_tensor, tensors)):
        return torch_attention(*arguments[:6], scale=scale, enable_gqa=enable_gqa)
    if torch.compiler.is_compiling():
        return scaled_dot_product_attention(*arguments)
    if not is_causal_bias(attn_mask) and has_torch_function(tensors):
        return _ask_classes(tensors, arguments)
    call = ReplacedCall.of(arguments)
    if call not in _reasons:
        store_entry(_reasons, call, _reason_to_leave(arguments), limit=4096)
    reason = _reasons[call]
    if reason is None:
        try:
            output = scaled_dot_product_attention(*arguments)
        except SightlineError as error:  # for a value that `call` does not have, such as a scale that is not finite
            reason = error.given
        else:
            for replacement in _active:
                replacement.served[call] += 1
            return output
    for replacement in _active:
        replacement.left[call, reason] += 1
    if is_causal_bias(attn_mask):
        return _ask_classes(tensors, arguments)
    return torch_attention(*arguments[:6], scale=scale, enable_gqa=enable_gqa)


def _ask_classes(tensors: Sequence[Any], arguments: SdpaArguments) -> Tensor:
    """Return the result of the `__torch_function__` of the tensors' classes.

    The classes receive `replacing_attend`, because CausalBias compares it with the function in torch.nn.functional. The
    default `__torch_function__` calls `replacing_attend` again, and torch then does not ask the classes.
    """
    output: Tensor = handle_torch_function(replacing_attend, tensors, *arguments)
    return output


def _is_tensor(array: Any) -> bool:
    """True for tensors with a shape. Calls with others, such as proxies of torch.fx, are left to torch."""
    has_shape = isinstance(array, Tensor) and not isinstance(array, UninitializedTensorMixin)
    return has_shape and not (array.is_nested and array.layout is torch.strided)


def _reason_to_leave(arguments: SdpaArguments) -> str | None:
    """Return why torch should compute the call; None if a generated kernel can."""
    try:
        check_operands(*arguments[:3])
        operands, options, _ = convert_arguments(*arguments)
        if is_nested(*operands):
            return None  # a generated kernel computes the packed values
        score = None if options.score is None else bias(options.score)
        problem = validate(parse(*operands, options.replace(score=score, seed=0)))
    except SightlineError as error:
        return error.given
    plan = choose(kernels(), problem)
    if isinstance(plan.kernel, Streaming):
        refusals = {name: ", ".join(map(str, reasons)) for name, reasons in plan.refusals.items() if reasons}
        return "; ".join(f"{name}: {reasons}" for name, reasons in refusals.items())
    if isinstance(plan.kernel, Fused):
        return "torch's own kernel is the cheapest"
    if torch.is_grad_enabled() and plan.backward_refusals:
        return "gradients: " + ", ".join(map(str, plan.backward_refusals))
    return None
