"""The attention layers of a transformers model, and their switch to `attn_implementation="sightline"`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import ParameterError
from ..torch.hooks import check_module, restore_on_exit
from .attention_interface import NAME

CROSS_ATTENTION_NAME = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)  # part of such layers' names


def find_attention_layers(model: Any) -> dict[str, nn.Module]:
    """Return the attention layers of a model by their path.

    Raises
    ------
    ParameterError
        `model` is not a module, or its attention does not use transformers' attention interface.
    """
    check_module(model)
    attention_classes = {kind for kind in set(map(type, model.modules())) if _uses_attention_interface(kind)}
    layers = {
        name or type(model).__name__: module
        for name, module in model.named_modules()
        if type(module) in attention_classes
    }
    if not layers or not any(submodel._can_set_attn_implementation() for submodel in submodels(model)):
        raise ParameterError(
            f"a {type(model).__name__} whose attention does not use transformers' attention interface",
            "models of transformers 5 that support attn_implementation",
            "sightline.torch.watch(model, ...) for torch's own attention layers",
        )
    return layers


def submodels(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models of transformers that the model contains, itself included."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


@contextmanager
def using_sightline(model: nn.Module) -> Iterator[None]:
    """Set `attn_implementation="sightline"` in the model and its submodels, and restore their own on exit."""
    with ExitStack() as exit_stack:
        for config in collect_configurations(model):
            exit_stack.enter_context(restore_on_exit(config, "_attn_implementation_internal"))
        for submodel in submodels(model):
            if submodel.config._attn_implementation != NAME:
                submodel.set_attn_implementation(NAME)
        yield


def _uses_attention_interface(kind: Any) -> bool:
    """True if a method of the module class, or of a base class, reads transformers' attention interface."""
    if issubclass(kind, PreTrainedModel):
        return False
    methods = [inspect.unwrap(method) for method in vars(kind).values() if inspect.isfunction(method)]
    own = any("ALL_ATTENTION_FUNCTIONS" in method.__code__.co_names for method in methods)
    return own or any(_uses_attention_interface(base) for base in kind.__bases__ if issubclass(base, nn.Module))


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """True for cross-attention.

    The attribute `is_cross_attention` of the layer says so; without it, the end of the layer's path and its class name.
    """
    declared = getattr(module, "is_cross_attention", None)
    if isinstance(declared, bool):
        return declared
    return any(CROSS_ATTENTION_NAME.search(part) for part in (*name.split(".")[-2:], type(module).__name__))


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
