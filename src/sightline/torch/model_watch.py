"""Watching a torch model: statistics of its attentions, from the model as it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ..errors import ParameterError
from ..recording import Seen, Tokens
from ..statistics import Statistic
from .hooks import check_module, record_calls, restore_on_exit, select_modules
from .layers import MultiHeadAttention, ScaledDotProductAttention, SelfAttention

__all__ = ["watch"]

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
    """Watch every `torch.nn.MultiheadAttention` and every layer of `sightline.torch` in a model.

    While the context lasts torch's layers compute here, with the same parameters, as
    `sightline.torch.MultiHeadAttention` describes; torch's fast path around them is off. Afterwards the model is as
    it was, after an error too. Watches nest.

    Parameters
    ----------
    model : torch.nn.Module
    see : list of statistics
    layers : paths, patterns or numbers of attention layers, default all
    heads : list of query heads, default all
    tokens : labels of positions, optional
        For each batch entry a list of strings; see `sightline.recording.Seen`.

    Yields
    ------
    Seen
        One call for every time a layer ran. Where gradients are on, results carry them.

    Raises
    ------
    ParameterError
        No module, no attention layer in the model, no such layer or head, no statistics.

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
            "torch.nn.MultiheadAttention or layers of sightline.torch in it",
            "sightline.transformers.watch(model, ...) for a Hugging Face model",
        )
    modules = select_modules(attention_modules, see, layers, heads)
    with ExitStack() as exit_stack:
        for encoder in model.modules():  # it makes nested tensors for the fast path of its layers, whatever they say
            if hasattr(encoder, "use_nested_tensor"):
                exit_stack.enter_context(restore_on_exit(encoder, "use_nested_tensor"))
                encoder.use_nested_tensor = False  # type: ignore[assignment]  # stubs know no attributes but modules'
        for module in modules.values():
            if isinstance(module, nn.MultiheadAttention):
                exit_stack.enter_context(restore_on_exit(module, "__class__"))
                if type(module) is nn.MultiheadAttention:
                    module.__class__ = MultiHeadAttention  # the same parameters and state
                exit_stack.callback(module.register_forward_pre_hook(_do_nothing).remove)  # the fast path heeds hooks
        yield exit_stack.enter_context(record_calls(modules, see, heads, tokens))


def _do_nothing(*_: Any) -> None:
    """A hook that does nothing."""
