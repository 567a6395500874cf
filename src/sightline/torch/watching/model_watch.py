"""`watch`: statistics of the attention in any torch model, without a change to the model's code."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from torch import nn

from ...errors import MissingExtraError, ParameterError, context
from ...statistics import OVERVIEW, Statistic
from ...statistics.recording import Seen, Tokens
from ..layer_calls import check_module
from .attention_finder import FINDER
from .call_recorder import Watcher
from .position_labels import PositionReader


@context
def watch(
    model: nn.Module,
    see: Statistic | Sequence[Statistic] | Mapping[str, Statistic] = OVERVIEW,
    *,
    layers: str | int | Sequence[str | int] | None = None,
    heads: Sequence[int] | None = None,
    tokens: Tokens | Sequence[str] | None = None,
    tokenizer: Any = None,
    handwritten: bool = False,
) -> Generator[Seen]:
    """Record statistics of the attention that a torch model computes, in forward passes, training and generation.

    These calls are recorded: transformers' attention interface, `torch.nn.MultiheadAttention`, torch's encoder layers,
    `torch.nn.functional.scaled_dot_product_attention`, `flex_attention` and this library. It does not matter how the
    model imported a function, or which thread runs a module. Masks, scale, grouped heads and autocast are those of the
    call. Statistics are those of the weights before dropout.

    This library computes the calls in O(n) memory. Outputs and gradients are exact, as those of `sightline.attention`.
    In a call with dropout, torch computes the output, so that the same weights are dropped as without a watch. In a
    call of `torch.nn.MultiheadAttention` with `need_weights=True`, torch computes output and weights. This library then
    computes only the statistics. Models of transformers use `attn_implementation="sightline"`, compiled models run
    their uncompiled code, and torch's fast path of encoder layers is off. When the context ends, also after an error,
    the model is restored. Contexts may be nested. If transformers is older than 4.57, its models are watched where they
    call `scaled_dot_product_attention`, as with `attn_implementation="sdpa"`.

    Parameters
    ----------
    model : torch.nn.Module
    see : statistic, list of statistics, or dict from names to statistics, default `sightline.OVERVIEW`
        The statistics that are computed for every call, such as `sightline.weights()`. The default is what
        `seen.save_html(path)` needs, in O(n) memory for each call. In a generation each token is a call.
    layers : path, pattern or number of a layer, or a list of them, default all
        A layer is the innermost module that runs when attention is called. A path or pattern ("blocks.*.attn") matches
        its path in the model; a number counts the layers in the order in which they first run. A negative number counts
        from the end: the statistics of all layers are then computed, and those of the others are dropped.
    heads : list of int, optional
        The query heads to record, default all. Negative numbers count from the last head.
    tokens : labels of positions, optional
        For each batch entry a list of strings, or {"encoder": ..., "decoder": ...} with such a list for each side; see
        `sightline.statistics.recording.Seen`. Default for a model of transformers: the tokens of its `input_ids`.
    tokenizer : tokenizer of transformers, optional
        The tokenizer whose tokens label the positions, by default the one in the folder that the model was loaded from.
        Nothing is downloaded. Without a tokenizer, the labels are the positions.
    handwritten : bool, default False
        True also records attention that the model writes out by hand: softmax(S) V, where S contains a product of two
        activations, or of learned queries and an activation. torch computes the output, as without a watch. The
        statistics are those of softmax(S), and `scores`, `lse` and `max_score` those of S, which has n × m numbers for
        each head, as in the model itself. If all scores of a query are −∞, its weights are 0. The page "Watch a model"
        lists what may stand between softmax and product, and which axes of S are the heads.

    Yields
    ------
    Seen
        The recording: one `Call` for every call of attention. The results of differentiable statistics have gradients
        if gradients are enabled.

    Raises
    ------
    ParameterError
        `model` is not a module, `layers` matches no module, `see` is not a statistic or a nonempty list or dict of
        statistics, or `heads`, `tokens` or `tokenizer` has the wrong type. A call raises this error for a head that the
        layer does not have, for nested tensors, and in transforms such as vmap. The exit of the context raises it for
        `tokens` of a wrong length, for numbers in `layers` that no layer has, and if no call was recorded. The message
        then says what the watch saw instead.
    SightlineError
        A call of attention that this library cannot compute exactly, such as a `score_mod` that is no formula.

    Warns
    -----
    UserWarning
        Some calls were recorded, but attention that the model writes out by hand was not. The warning names file and
        line and, with `handwritten=True`, the reason.

    Examples
    --------
    >>> import torch, sightline
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with torch.no_grad(), sightline.watch(model, see=[sightline.lse()]) as seen:
    ...     _ = model(torch.randn(1, 5, 8))
    >>> seen
    Seen: 1 call of 1 layer
    layer      kind  step  queries  keys  heads  results
    self_attn  self  0     5        5     2      lse() 1×2×5
    """
    check_module(model)
    watcher = Watcher(model, see, layers, heads, tokens, handwritten)
    with _read_inputs(model, tokenizer) as watcher.inputs, FINDER.serving(watcher):
        yield watcher.seen
    watcher.finish()
    if watcher.unrecorded:
        message = f"attention written by hand was not recorded: {watcher.list_handwritten()}"
        warnings.warn(f"{message}\n  cure: {watcher.cure_of_handwritten()}", UserWarning, stacklevel=3)


def _read_inputs(model: nn.Module, tokenizer: Any) -> Any:
    """Return a context that yields a reader of the model's inputs. Its `current` labels their positions.

    In the context, models of transformers 4.57 or later also compute attention with this library.
    """
    package = sys.modules.get("transformers")
    if package is not None and any(isinstance(module, package.PreTrainedModel) for module in model.modules()):
        with suppress(MissingExtraError):
            labels = import_module("sightline.transformers.token_labels")
            return labels.recording_tokens(model, tokenizer)
    if tokenizer is not None:
        given = f"tokenizer= for a {type(model).__name__}, which is not a model of transformers 4.57 or later"
        cure = "tokens=[tokenizer.convert_ids_to_tokens(row) for row in ids]"
        raise ParameterError(given, "the tokens themselves", cure)
    return PositionReader().record(model)
