"""The attention layers of a transformers model, and contexts that change what they compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from transformers import Cache, PreTrainedModel

from ..call.validation import read_mask
from ..errors import ParameterError, context
from ..formula.expression import Expression, conjoin
from ..statistics.recording import select_names
from ..torch.layer_calls import check_module, registering, restore_on_exit, wrapping
from ..torch.watching.call_recorder import is_cross_attention
from .compatibility import (
    NAME,
    STORED_IMPLEMENTATION,
    PreTrainedConfig,
    can_set_implementation,
    collects,
    read_implementation,
    uses_attention_interface,
)
from .decoding_cache import StoredTensor
from .masks_and_biases import FormulaMask, PositionBias, Unpadding, position_formulas
from .served_layers import LAYERS, is_served, serving_layers


def find_attention_layers(model: Any) -> dict[str, nn.Module]:
    """Return the attention layers of a model by their path, such as "model.layers.0.self_attn".

    Raise ParameterError if its attention neither uses transformers' attention interface nor is served.
    """
    check_module(model)
    kinds = {kind for kind in map(type, model.modules()) if uses_attention_interface(kind) or is_served(kind)}
    named = [(name, module) for name, module in model.named_modules() if type(module) in kinds]
    if not any(map(is_served, kinds)) and not (named and any(map(can_set_implementation, submodels(model)))):
        given = f"a {type(model).__name__} whose attention does not use transformers' attention interface"
        allowed = f"models of transformers that support attn_implementation, or have layers of {', '.join(LAYERS)}"
        cure = "sightline.torch.replacing() for timm, diffusers and others, or sightline.attention in the model's code"
        raise ParameterError(given, allowed, cure)
    return {name or type(model).__name__: module for name, module in named}


def submodels(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models of transformers that the model contains, itself included."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


@contextmanager
def using_sightline(model: nn.Module) -> Iterator[None]:
    """Set `attn_implementation="sightline"` in the submodels that allow it, and restore their own value on exit.

    Layers that write attention by hand are served; models of such layers make their masks for "sightline" too.

    Some models change the value themselves, as Whisper does to return the times of tokens. The value is then set again
    before the model runs.
    """
    configurations, able = collect_configurations(model), []
    with ExitStack() as exit_stack:
        for config in configurations:
            exit_stack.enter_context(restore_on_exit(config, STORED_IMPLEMENTATION))
        for submodel in submodels(model):
            kinds = set(map(type, submodel.modules()))
            if can_set_implementation(submodel) and any(map(uses_attention_interface, kinds)):
                able.append(submodel)
                if read_implementation(submodel.config) != NAME:
                    submodel.set_attn_implementation(NAME)
            elif any(map(is_served, kinds)):
                setattr(submodel.config, STORED_IMPLEMENTATION, NAME)
        exit_stack.enter_context(serving_layers(model))
        chosen = [(config, getattr(config, STORED_IMPLEMENTATION)) for config in configurations]

        def set_again(*_: Any) -> None:
            for config, implementation in chosen:
                if getattr(config, STORED_IMPLEMENTATION) != implementation:
                    setattr(config, STORED_IMPLEMENTATION, implementation)

        for submodel in able:
            exit_stack.callback(submodel.register_forward_pre_hook(set_again, prepend=True).remove)
        yield


def collect_configurations(model: nn.Module) -> list[Any]:
    """Return every configuration of the model and its submodels once."""
    by_id: dict[int, Any] = {}
    pending = [getattr(module, "config", None) for module in model.modules()]
    while pending:
        config = pending.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in by_id:
            by_id[id(config)] = config
            pending += [getattr(config, name, None) for name in config.sub_configs]
    return list(by_id.values())


@context
def serving(model: nn.Module) -> Generator[None]:
    """Compute the attention of a transformers model by this library, also where the model writes attention by hand.

    While the context lasts, the model uses `attn_implementation="sightline"`, and this library computes the layers of
    DeBERTa v2 and v3, MPNet, SAM and ViTDet. Their biases are tables of n · buckets numbers for each head, with
    gradients, and never n × m. Results are those of the model up to the order of sums, except that a query at padding
    attends to the real keys. On exit, also after an error, the model is restored. `masking` and `unpadded` serve such
    layers too. Code that `torch.compile` traces runs the model's own code of these layers.

    Parameters
    ----------
    model : transformers.PreTrainedModel, or a module that contains such models

    Raises
    ------
    ParameterError
        `model` is not a module, or its attention neither uses transformers' attention interface nor is served.

    Examples
    --------
    >>> import torch, transformers, sightline.transformers
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = transformers.DebertaV2Model(transformers.DebertaV2Config(vocab_size=10, **sizes)).eval()
    >>> with torch.no_grad(), sightline.transformers.serving(model):
    ...     output = model(torch.tensor([[1, 2, 3, 4, 5]])).last_hidden_state
    """
    find_attention_layers(model)
    with using_sightline(model):
        yield


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
    attention_layers = find_attention_layers(model)
    names = attention_layers if layers is None else select_names(list(attention_layers), layers)
    modules = [attention_layers[name] for name in names if not is_cross_attention(name, attention_layers[name])]
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
            given = f"a mask for {len(modules)} attention layers that no layer read: {what}"
            raise ParameterError(given, "a model that calls one of these layers in the `with` block", cure)


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
    for added in ADDED_MASKS.get(module, ()):
        if isinstance(attention_mask, FormulaMask):
            mask = conjoin(mask, attention_mask.translate(added.rule, query.shape[1]))
        else:
            cached = key.shape[-2] - query.shape[-2]
            formula = added.rule.rewrite(position_formulas(cached, 0, cached))
            mask = formula if mask is None else read_mask(mask) & formula
        added.calls += 1
    return mask


@context
def unpadded(model: nn.Module) -> Generator[None]:
    """Compute the layers of a transformers model only for the real tokens of a padded batch.

    While the context lasts, the model uses `attn_implementation="sightline"`, and the real tokens of a batch (B, n)
    pass through each layer as one sequence (1, tokens). A token attends to the tokens of its own batch entry, by
    `sightline.documents`. Positions are those of the padded batch. Outputs have the shape of the padded batch, with 0
    where the last layer's output is padding. Results at real tokens are those of the padded batch, up to the order of
    sums. Embeddings, poolers and heads compute the padded batch. A batch without padding, and a step of generation, are
    computed as without the context. On exit, also after an error, the model is restored.

    Parameters
    ----------
    model : transformers.PreTrainedModel, or a module that contains such models
        Encoders and decoders, in inference and in training. Layers with cross-attention compute the padded batch.
        `sightline.watch` records the statistics of the padded batch, without the queries at padding.

    Raises
    ------
    ParameterError
        `model` is not a module, its attention does not use transformers' attention interface, or a layer mixes tokens
        outside of self-attention, as a convolution does. The error names the part. A model of experts returns router
        logits.

    Examples
    --------
    >>> import torch, transformers, sightline, sightline.transformers
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = transformers.BertModel(transformers.BertConfig(vocab_size=10, **sizes)).eval()
    >>> real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    >>> with torch.no_grad(), sightline.transformers.unpadded(model):
    ...     output = model(torch.randint(1, 10, (2, 5)), attention_mask=real).last_hidden_state
    >>> output.shape, bool((output[1, 2:] == 0).all())
    (torch.Size([2, 5, 8]), True)
    """
    layers = _stacked_layers(model, set(find_attention_layers(model).values()))
    layers = [layer for layer in layers if not any(is_cross_attention(*named) for named in layer.named_modules())]
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase):
                raise ParameterError(
                    f"unpadded of a {type(layer).__name__} whose {name}, a {type(module).__name__}, mixes neighbours",
                    "layers that mix tokens only in self-attention",
                    "call the model without `unpadded`, with texts of similar length in a batch",
                )
    if not layers:
        given = f"a {type(model).__name__} without a list of layers that have self-attention and no cross-attention"
        allowed = "an encoder or a decoder whose layers are in a torch.nn.ModuleList"
        raise ParameterError(given, allowed, "call the model without `unpadded`")
    with using_sightline(model), ExitStack() as exit_stack:
        for layer in layers:  # inside the layer's hooks
            exit_stack.enter_context(wrapping(layer, "forward", _forward_without_padding, in_compiled_code=False))
        yield


def _stacked_layers(module: nn.Module, attention_layers: Collection[nn.Module]) -> list[nn.Module]:
    """Return the entries of `nn.ModuleList`s that contain attention layers, only those of the innermost lists."""
    if module in attention_layers:
        return []
    layers = []
    for child in module.children():
        inner = _stacked_layers(child, attention_layers)
        is_layer = isinstance(module, nn.ModuleList) and any(part in attention_layers for part in child.modules())
        layers += inner or ([child] if is_layer else [])
    return layers


def _forward_without_padding(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Run a layer's `forward` on real tokens alone if a mask among the arguments has `is_real`."""
    values = tree_flatten((inputs, options))[0]
    masks = [value.unpadded for value in values if isinstance(value, FormulaMask) and value.is_real is not None]
    unpadding = masks[0].unpadding if masks else None
    if unpadding is None:
        return forward(*inputs, **options)
    if collects("router_logits", options):
        given = "output_router_logits=True in `unpadded`, where routers see no padding and models expect it"
        allowed = "output_router_logits=False"
        raise ParameterError(given, allowed, "call the model without `unpadded`, or with output_router_logits=False")

    def flatten(value: Any) -> Any:
        if isinstance(value, FormulaMask):
            return value.unpadded if value.is_real is not None else value
        if isinstance(value, Tensor) and not isinstance(value, PositionBias):
            return unpadding.flatten(value)
        return PaddingCache(value, unpadding) if isinstance(value, Cache) else value

    output = forward(*tree_map(flatten, inputs), **tree_map(flatten, options))
    kept = PositionBias  # passed from layer to layer
    return tree_map(lambda x: unpadding.pad(x) if isinstance(x, Tensor) and not isinstance(x, kept) else x, output)


class PaddingCache:
    """Stands for a transformers cache in a layer, and stores keys of real tokens in the places of the padded batch."""

    def __init__(self, cache: Cache, unpadding: Unpadding) -> None:
        self.cache, self.unpadding = cache, unpadding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(self, key: Tensor, value: Tensor, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values (1, H, tokens, d) of a prompt. Return the keys and values that attention reads.

        The cache gets padded rows, with 0 at the padding. Attention reads the given keys and values. If the cache is a
        `sightline.transformers.Cache` that evicts keys or stores another dtype, attention reads what the cache stores.
        """
        padded = self.unpadding.pad(key), self.unpadding.pad(value)
        stored: tuple[Tensor, Tensor] = self.cache.update(*padded, *inputs, **options)
        return stored if isinstance(stored[0], StoredTensor) else (key, value)
