"""The attention layers of a transformers model, and a context in which they use `attn_implementation="sightline"`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import ParameterError
from ..torch.hooks import check_module, restore_on_exit
from .compatibility import (
    NAME,
    STORED_IMPLEMENTATION,
    PreTrainedConfig,
    can_set_implementation,
    read_implementation,
    uses_attention_interface,
)


def find_attention_layers(model: Any) -> dict[str, nn.Module]:
    """Return the attention layers of a model in a dict by their path, such as "model.layers.0.self_attn".

    Raises
    ------
    ParameterError
        `model` is not a module, or its attention does not use transformers' attention interface.
    """
    check_module(model)
    attention_classes = {kind for kind in set(map(type, model.modules())) if uses_attention_interface(kind)}
    layers = {
        name or type(model).__name__: module
        for name, module in model.named_modules()
        if type(module) in attention_classes
    }
    if not layers or not any(map(can_set_implementation, submodels(model))):
        raise ParameterError(
            f"a {type(model).__name__} whose attention does not use transformers' attention interface",
            "models of transformers that support attn_implementation",
            "sightline.attention(..., mask=...) in the model's code",
        )
    return layers


def submodels(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models of transformers that the model contains, itself included."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


@contextmanager
def using_sightline(model: nn.Module) -> Iterator[None]:
    """Set `attn_implementation="sightline"` in the submodels that allow it, and restore their own value on exit.

    Some models change the value themselves, as Whisper does to return the times of tokens. The value is then set again
    before the model runs.
    """
    configurations = collect_configurations(model)
    able = [
        submodel
        for submodel in submodels(model)
        if can_set_implementation(submodel) and any(map(uses_attention_interface, map(type, submodel.modules())))
    ]
    with ExitStack() as exit_stack:
        for config in configurations:
            exit_stack.enter_context(restore_on_exit(config, STORED_IMPLEMENTATION))
        for submodel in able:
            if read_implementation(submodel.config) != NAME:
                submodel.set_attn_implementation(NAME)
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
