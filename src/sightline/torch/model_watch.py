"""`watch` for torch models: statistics of their attention layers, without a change to the model's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn

from ..errors import ParameterError
from ..recording import Seen, Tokens
from ..statistics import Statistic
from .hooks import check_module, explain_missing_calls, record_calls, restore_on_exit, select_modules
from .layers import MultiHeadAttention, ScaledDotProductAttention, SelfAttention

OWN_LAYERS = (MultiHeadAttention, ScaledDotProductAttention, SelfAttention)


@contextmanager
def watch(
    model: nn.Module,
    see: Sequence[Statistic],
    *,
    layers: str | int | Sequence[str | int] | None = None,
    heads: Sequence[int] | None = None,
    tokens: Tokens | Sequence[str] | None = None,
) -> Iterator[Seen]:
    """Record statistics of every `torch.nn.MultiheadAttention` and every layer of `sightline.torch` in a model.

    While the context lasts, this library computes torch's layers with their own parameters, with the differences that
    `sightline.torch.MultiHeadAttention` lists, and torch's fast path of encoder layers is off. On exit the model is
    restored, after an error too. Contexts may be nested.

    Parameters
    ----------
    model : torch.nn.Module
    see : list of statistics
        At least one, such as `sightline.weights()`; the statistics are computed for every call.
    layers : path, pattern or number of an attention layer, or a list of them, default all
        A path or pattern ("encoder.*.self_attn") matches the layer's path in the model; a number counts the attention
        layers in the model's order.
    heads : list of int, optional
        The query heads to record, default all. Negative numbers count from the last head.
    tokens : labels of positions, optional
        For each batch entry a list of strings; see `sightline.recording.Seen`.

    Yields
    ------
    Seen
        The recording: one `Call` for every run of a layer. The results of differentiable statistics have gradients if
        gradients are enabled.

    Raises
    ------
    ParameterError
        `model` is not a module or has no attention layer, `layers` matches no layer, `see` is not a nonempty list of
        statistics, or `heads` or `tokens` has the wrong type. The call of a layer raises the error for a head that the
        layer does not have, and the exit that for a watch that recorded no call.

    Examples
    --------
    >>> import torch, sightline
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with torch.no_grad(), sightline.torch.watch(model, see=[sightline.lse()]) as seen:
    ...     _ = model(torch.randn(1, 5, 8))
    >>> seen
    Seen: 1 calls of 1 layers
    layer      kind  step  queries  keys  heads  results
    self_attn  self  0     5        5     2      lse() 1×2×5
    """
    check_module(model)
    attention_modules: dict[str, nn.Module] = {
        name or type(model).__name__: module
        for name, module in model.named_modules()
        if isinstance(module, OWN_LAYERS) or type(module) is nn.MultiheadAttention
    }
    if not attention_modules:
        raise ParameterError(
            f"a {type(model).__name__} without attention layers",
            "a model with torch.nn.MultiheadAttention or layers of sightline.torch",
            "sightline.transformers.watch(model, ...) for a Hugging Face model; in a model of your own, call "
            "sightline.attention(..., see=...) in its layers",
        )
    modules = select_modules(attention_modules, see, layers, heads)
    with ExitStack() as exit_stack:
        for encoder in model.modules():  # an encoder makes nested tensors even if the fast path of its layers is off
            if hasattr(encoder, "use_nested_tensor"):
                exit_stack.enter_context(restore_on_exit(encoder, "use_nested_tensor"))
                encoder.use_nested_tensor = False  # type: ignore[assignment]  # the stubs type it as a module
        for module in modules.values():
            if isinstance(module, nn.MultiheadAttention):
                exit_stack.enter_context(restore_on_exit(module, "__class__"))
                if type(module) is nn.MultiheadAttention:
                    module.__class__ = MultiHeadAttention  # the same parameters and state
                # A module with a hook has no fast path.
                exit_stack.callback(module.register_forward_pre_hook(lambda *_: None).remove)
        explain = partial(explain_missing_calls, model)
        yield exit_stack.enter_context(record_calls(modules, see, heads, tokens, explain=explain))
