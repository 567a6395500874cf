"""Run presses of the library kvpress, which evict cached keys by their weights, without eager attention."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ParameterError, context
from ..statistics import Statistic, received, weights
from ..torch.layer_calls import registering, wrapping
from .compatibility import CACHE, cache_of, read_implementation

# by layer: functions from the number of queries to the statistic that a press reads, of which the last one counts
OBSERVED: WeakKeyDictionary[nn.Module, tuple[Callable[[int], Statistic], ...]] = WeakKeyDictionary()


def _last_rows(press: Any, n: int) -> Statistic:
    """Return the weights of the press's window, or of a shorter prompt, for which the press raises its own error."""
    return weights().rows(range(-min(press.window_size, n), 0))


# by the press's class: the statistic whose rows the press gets in place of the weights (B, H, n, m)
PRESS_STATISTICS: dict[str, Callable[[Any, int], Statistic]] = {
    "ObservedAttentionPress": lambda _, n: received(),  # the sum of all rows, as one row
    "SnapKVPress": _last_rows,
    "PyramidKVPress": _last_rows,
    "TOVAPress": lambda _, n: weights().rows([-1]),
}


@context
def pressing(model: PreTrainedModel, press: Any) -> Generator[None]:
    """Apply a press of kvpress to a model, with exact weights of this library in place of eager attention's.

    Some presses read the weights P of a layer, (B, H, n, m), and sum them or take their last rows. Here such a press
    gets only these sums or rows, in O(n + m) memory, and keeps the same keys. So `ObservedAttentionPress` needs no
    eager attention. Presses also read `cache_position`, which transformers no longer passes to layers, so it is passed
    here. kvpress 0.5 asks for transformers below 5.3, so install it by `pip install --no-deps kvpress`.

    Parameters
    ----------
    model : model of transformers with `attn_implementation="sightline"`
    press : ObservedAttentionPress, SnapKVPress, PyramidKVPress or TOVAPress of kvpress, or a press that has one of them
        as its attribute `press`

    Raises
    ------
    ParameterError
        The press is none of these, or the model has another `attn_implementation`.

    Examples
    --------
    >>> from kvpress import ObservedAttentionPress  # doctest: +SKIP
    >>> with sightline.transformers.pressing(model, ObservedAttentionPress(compression_ratio=0.5)):  # doctest: +SKIP
    ...     model(ids, cache=cache)

    References
    ----------
    Devoto, Jeblick and Jégou, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution" (arXiv:2510.00636), for kvpress.
    """
    inner = press
    while type(inner).__name__ not in PRESS_STATISTICS and hasattr(inner, "press"):
        inner = inner.press
    name = type(inner).__name__
    if name not in PRESS_STATISTICS:
        cure = "with press(model): ..., as kvpress documents, for a press that reads no weights"
        raise ParameterError(f"pressing with {name}", f"{', '.join(PRESS_STATISTICS)}", cure)
    implementation = read_implementation(model.config)
    if implementation != "sightline":
        given = f'pressing of a model with attn_implementation="{implementation}"'
        raise ParameterError(given, 'attn_implementation="sightline"', 'model.set_attn_implementation("sightline")')
    layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "o_proj")]
    with ExitStack() as hooks, press(model), registering(OBSERVED, layers, partial(PRESS_STATISTICS[name], inner)):
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(add_arguments, with_kwargs=True).remove)
            hooks.enter_context(wrapping(layer, "forward", _forward_without_alias))
        yield


def add_arguments(layer: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add what kvpress reads among a layer's arguments: `cache_position`, the positions (n,) of the new tokens, and the
    cache as `past_key_values`, its name before transformers 5.24.
    """
    hidden, cache = options.get("hidden_states"), cache_of(options)
    if hidden is None or cache is None or "cache_position" in options:
        return inputs, options
    positions = torch.arange(hidden.shape[1], device=hidden.device) + cache.get_seq_length(layer.layer_idx)
    return inputs, options | {"cache_position": positions, "past_key_values": cache}


def _forward_without_alias(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Run a layer's `forward` without the second name of the cache, against which transformers warns."""
    alias = options.pop("past_key_values", None)
    return forward(*inputs, **{CACHE: alias} | options if alias is not None else options)
