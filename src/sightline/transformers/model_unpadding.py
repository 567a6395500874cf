"""`unpadded` for Hugging Face models: the layers compute only the real tokens of a padded batch, not its padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from transformers import Cache

from ..errors import ParameterError, context
from ..torch.hooks import wrapping
from ..torch.watcher import is_cross_attention
from .compatibility import collects
from .mask_interface import FormulaMask
from .model_layers import find_attention_layers, using_sightline
from .unpadding import Unpadding
from .wrapper_tensors import StoredTensor


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
        outside of self-attention, as a convolution does, or adds a bias that depends on places in the padded batch. The
        error names the part. A model of experts returns router logits.

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
    layers = [layer for layer in layers if not _has_cross_attention(layer)]
    for layer in layers:
        _check_layer(layer)
    if not layers:
        raise ParameterError(
            f"a {type(model).__name__} without a list of layers that have self-attention and no cross-attention",
            "an encoder or a decoder whose layers are in a torch.nn.ModuleList",
            "call the model without `unpadded`",
        )
    with ExitStack() as exit_stack:
        exit_stack.enter_context(using_sightline(model))
        for layer in layers:
            exit_stack.enter_context(wrapping(layer, "forward", _forward_without_padding))  # inside the layer's hooks
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


def _has_cross_attention(layer: nn.Module) -> bool:
    return any(is_cross_attention(name, module) for name, module in layer.named_modules())


def _check_layer(layer: nn.Module) -> None:
    """Raise ParameterError if the layer mixes tokens outside of attention, or adds a bias of places in the batch."""
    reason = None
    for name, module in layer.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase):
            reason = f"{name} is a {type(module).__name__}, which mixes neighbouring tokens"
        elif "position_bias" in inspect.signature(module.forward).parameters:
            reason = f"{name or 'the layer'} adds a bias that depends on places in the padded batch"
    if reason is not None:
        raise ParameterError(
            f"unpadded of a model with {type(layer).__name__}: {reason}",
            "layers that mix tokens only in self-attention, without position_bias=",
            "call the model without `unpadded`, with texts of similar length in a batch",
        )


def _forward_without_padding(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Run a layer's `forward` on real tokens alone if a mask among the arguments has `is_real`."""
    values = tree_flatten((inputs, options))[0]
    masks = [value.unpadded for value in values if isinstance(value, FormulaMask) and value.is_real is not None]
    unpadding = masks[0].unpadding if masks else None
    if unpadding is None or torch.compiler.is_compiling():
        return forward(*inputs, **options)
    if collects("router_logits", options):
        raise ParameterError(
            "output_router_logits=True in `unpadded`, where routers see no padding and models expect it",
            "output_router_logits=False",
            "call the model without `unpadded`, or with output_router_logits=False",
        )

    def flatten(value: Any) -> Any:
        if isinstance(value, FormulaMask):
            return value.unpadded if value.is_real is not None else value
        if isinstance(value, Tensor):
            return unpadding.flatten(value)
        return PaddingCache(value, unpadding) if isinstance(value, Cache) else value

    output = forward(*tree_map(flatten, inputs), **tree_map(flatten, options))
    return tree_map(lambda value: unpadding.pad(value) if isinstance(value, Tensor) else value, output)


class PaddingCache:
    """Stands for a transformers cache in a layer, and stores keys of real tokens in the places of the padded batch.

    Parameters
    ----------
    cache : transformers.Cache
    unpadding : Unpadding
    """

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
