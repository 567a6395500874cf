"""`watch` for Hugging Face models: statistics of their attention layers, without a change to the model's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..recording import Seen, Tokens
from ..statistics import Statistic
from ..torch.hooks import explain_missing_calls, record_calls, select_modules
from .attention_interface import NAME
from .model_layers import collect_configurations, find_attention_layers, is_cross_attention, submodels, using_sightline
from .token_labels import Tokenizer, TokenRecorder


@contextmanager
def watch(
    model: nn.Module,
    see: Sequence[Statistic],
    *,
    layers: str | int | Sequence[str | int] | None = None,
    heads: Sequence[int] | None = None,
    tokens: Tokens | Sequence[str] | None = None,
    tokenizer: Any = None,
) -> Iterator[Seen]:
    """Record statistics of the attention layers of a transformers model, in forward passes, training and generation.

    While the context lasts, the model uses `attn_implementation="sightline"`. On exit the model is restored, after an
    error too. Contexts may be nested.

    Parameters
    ----------
    model : transformers.PreTrainedModel, or a module that contains such models
    see : list of statistics
        At least one, such as `sightline.weights()`; the statistics are computed for every call.
    layers : path, pattern or number of an attention layer, or a list of them, default all
        A path or pattern ("model.layers.*.self_attn") matches the layer's path in the model; a number counts the
        attention layers in the model's order.
    heads : list of int, optional
        The query heads to record, default all. Negative numbers count from the last head.
    tokens : labels of positions, optional
        For each batch entry a list of strings, or {"encoder": ..., "decoder": ...} with such a list for each side; see
        `sightline.recording.Seen`. By default they are the tokens of the model's `input_ids`.
    tokenizer : tokenizer of transformers, optional
        The tokenizer whose tokens label the positions, by default the one in the folder that the model was loaded from.
        Nothing is downloaded. Without a tokenizer, positions have no labels.

    Yields
    ------
    Seen
        The recording: one `Call` for every run of a layer. The results of differentiable statistics have gradients if
        gradients are enabled.

    Raises
    ------
    ParameterError
        `model` is not a module, its attention does not use transformers' attention interface, `layers` matches no
        layer, `see` is not a nonempty list of statistics, or `heads`, `tokens` or `tokenizer` has the wrong type. A
        call of a layer raises it for a head that the layer does not have. The exit of the context raises it for
        `tokens` of a wrong length, and if no call was recorded.

    Examples
    --------
    >>> import torch, transformers, sightline
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=10, **sizes))
    >>> with torch.no_grad(), sightline.transformers.watch(model, see=[sightline.lse()], layers=[0]) as seen:
    ...     _ = model(torch.arange(4)[None])
    >>> seen
    Seen: 1 calls of 1 layers
    layer               kind  step  queries  keys  heads  results
    layers.0.self_attn  self  0     4        4     2      lse() 1×2×4
    """
    modules = select_modules(find_attention_layers(model), see, layers, heads)
    with ExitStack() as exit_stack:
        exit_stack.enter_context(using_sightline(model))
        cross_layers = {name for name, module in modules.items() if is_cross_attention(name, module)}
        recorder = _token_recorder(submodels(model), tokenizer) if tokens is None else None
        if recorder is not None:
            exit_stack.enter_context(recorder.record())
        explain = partial(_explain_missing_calls, model)
        recording = record_calls(modules, see, heads, tokens, cross_layers, recorder, explain=explain)
        yield exit_stack.enter_context(recording)


def _explain_missing_calls(model: nn.Module) -> tuple[str, str]:
    """Return the reason why a watch of the model recorded no call, and the cure.

    One reason is that the model has changed its own attention implementation.
    """
    used = {config._attn_implementation for config in collect_configurations(model)} - {NAME, None}
    if not used:
        return explain_missing_calls(model)
    return (
        f"the model has switched to attn_implementation={', '.join(map(repr, sorted(used)))}, as `generate` of Whisper "
        "does for return_token_timestamps=True",
        "leave out the argument that asks the model for its own weights, such as output_attentions or "
        "return_token_timestamps; the watch records them",
    )


def _token_recorder(models: list[PreTrainedModel], tokenizer: Any) -> TokenRecorder | None:
    """Return a recorder of the tokens of the one model that contains all the others; None if there is no such model."""
    inner = {id(module) for model in models for module in model.modules() if module is not model}
    outermost = [model for model in models if id(model) not in inner]
    source = Tokenizer(tokenizer, outermost[0].config.name_or_path)
    return TokenRecorder(outermost[0], source) if len(outermost) == 1 else None
