"""`masking` for Hugging Face models: a formula that hides keys, in addition to the model's own masks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..call.validation import read_mask
from ..errors import ParameterError, context
from ..formula.expression import Expression
from ..recording import select_names
from ..torch.hooks import registering
from ..torch.watcher import is_cross_attention
from .mask_interface import FormulaMask, position_formulas
from .model_layers import find_attention_layers, using_sightline


@dataclass
class AddedMask:
    """A mask that `masking` adds to layers: a formula of positions in the sequence, and how many calls have read it."""

    rule: Expression
    calls: int = 0


ADDED_MASKS: WeakKeyDictionary[nn.Module, tuple[AddedMask, ...]] = WeakKeyDictionary()


@context
def masking(model: nn.Module, mask: Any, *, layers: str | int | Sequence[str | int] | None = None) -> Generator[None]:
    """Hide keys in the self-attention of a transformers model by a formula.

    A query attends to a key if the formula and the model's own masks, such as causal and padding masks, all allow the
    pair. If contexts are nested, all formulas must allow the pair. Cross-attention is not changed. While the context
    lasts, the model uses `attn_implementation="sightline"`. On exit, also after an error, the model is restored. Layers
    that `torch.compile` compiled do not read the formula.

    Parameters
    ----------
    model : transformers.PreTrainedModel, or a module that contains such models
    mask : formula of b, h, i and j, function (b, h, i, j) or bool array
        As in `sightline.attention`. In the formula b is the batch entry, h the query head, and i and j are the
        positions of query and key in the text, from 0. Padding and, in generation, cached tokens have positions too.
    layers : path, pattern or number of an attention layer, or a list of them, default all
        As in `sightline.watch`; numbers count the layers in the order of the model's modules.

    Raises
    ------
    ParameterError
        `model` is not a module, its attention does not use transformers' attention interface, `layers` matches no layer
        or only cross-attention, or no layer has read the formula until the exit of the context.
    MaskError, FormulaError
        `mask` is no mask of `sightline.attention`.

    Examples
    --------
    >>> import torch, transformers, sightline, sightline.transformers
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = transformers.BertModel(transformers.BertConfig(vocab_size=10, **sizes)).eval()
    >>> two_texts = sightline.documents(lengths=[3, 2])
    >>> with torch.no_grad(), sightline.transformers.masking(model, two_texts):
    ...     output = model(torch.tensor([[1, 2, 3, 4, 5]])).last_hidden_state
    """
    found = find_attention_layers(model)
    names = found if layers is None else select_names(list(found), layers)
    modules = [found[name] for name in names if not is_cross_attention(name, found[name])]
    if not modules:
        raise ParameterError(f"layers={layers!r}, which are cross-attention", "self-attention", "leave out layers=")
    rule = read_mask(mask)
    if rule is None:
        raise ParameterError("mask=None", "a formula, such as sightline.causal()", "leave out `masking`")
    added = AddedMask(rule)
    with using_sightline(model), registering(ADDED_MASKS, modules, added):
        yield
        if not added.calls:
            what, cure = _explain_missing_calls(model)
            raise ParameterError(
                f"a mask for {len(modules)} attention layers that no layer read: {what}",
                "a model that calls one of these layers in the `with` block",
                cure,
            )


def _explain_missing_calls(model: nn.Module) -> tuple[str, str]:
    """Return the probable reason why no layer read the mask, and what to write instead, for an error message."""
    compiled = [module for module in model.modules() if getattr(module, "_compiled_call_impl", None) is not None]
    if compiled or hasattr(model, "_orig_mod"):
        return (
            "the model is compiled, and compiled code reads no added masks",
            'call the model in `with torch.compiler.set_stance("force_eager"):`, or compile it in `masking`',
        )
    return "none of them ran", "run the model inside the `with` block; layers= selects layers that run"


def add_masks(module: nn.Module, attention_mask: Any, query: Tensor, key: Tensor) -> Any:
    """Return the mask of a layer's call: the model's mask, joined with the masks that `masking` adds to the layer."""
    mask = attention_mask.formula if isinstance(attention_mask, FormulaMask) else attention_mask
    if not ADDED_MASKS or torch.compiler.is_compiling():
        return mask
    for added in ADDED_MASKS.get(module, ()):
        if isinstance(attention_mask, FormulaMask):
            formula = attention_mask.translate(added.rule, query.shape[1])
            mask = formula if mask is None else mask & formula
        else:
            cached = key.shape[-2] - query.shape[-2]
            formula = added.rule.rewrite(position_formulas(cached, 0, cached))
            mask = formula if mask is None else read_mask(mask) & formula
        added.calls += 1
    return mask
