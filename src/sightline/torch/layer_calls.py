"""What layers and watches share: `attend_for_layer`, which names the layer, and contexts that undo their changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.backends import mha
from torch.overrides import handle_torch_function

from ..api import functions
from ..call.problem import Options
from ..errors import ParameterError
from ..statistics.recording import AttentionKind
from .interception import has_modes, in_eager_code


@dataclass(frozen=True)
class LayerCall:
    """What a layer knows of its own call: fields of `recording.Call`. None if the shapes of the arrays tell it."""

    kind: AttentionKind | None = None
    query_start: int | None = None
    key_start: int = 0


def attend_for_layer(
    query: Tensor, key: Tensor, value: Tensor, call: LayerCall, options: Options
) -> tuple[Tensor, tuple[Any, ...]]:
    """Return (output, the results of the statistics) of `sightline.attention` for a layer. Watches read `call`."""
    if functions.OBSERVERS and has_modes():
        return handle_torch_function(attend_for_layer, (), query, key, value, call, options)
    answer = functions.attend(query, key, value, options)
    return (answer, ()) if options.see is None else answer


_lock = threading.Lock()
# the original value of an attribute, whether the object itself and not its class had it, and its open contexts
_ORIGINALS: dict[tuple[int, str], tuple[Any, bool, int]] = {}
_FAST_PATHS: list[bool] = []  # torch's setting when each open context of `without_fast_path` began


@contextmanager
def registering(
    registry: WeakKeyDictionary[nn.Module, tuple[Any, ...]], modules: Collection[nn.Module], entry: Any
) -> Iterator[None]:
    """Add `entry` to the entries that the registry has for each module, while the context lasts."""
    for module in modules:
        registry[module] = (*registry.get(module, ()), entry)
    try:
        yield
    finally:
        for module in modules:
            remaining = tuple(other for other in registry.pop(module, ()) if other is not entry)
            if remaining:
                registry[module] = remaining


@contextmanager
def restore_on_exit(owner: Any, name: str) -> Iterator[None]:
    """Restore an attribute on exit. If several contexts hold the attribute, the last one to exit restores it."""
    key = id(owner), name
    with _lock:
        original, is_own, count = _ORIGINALS.get(key, (getattr(owner, name), name in vars(owner), 0))
        _ORIGINALS[key] = original, is_own, count + 1
    try:
        yield
    finally:
        with _lock:
            original, is_own, count = _ORIGINALS.pop(key)
            if count > 1:
                _ORIGINALS[key] = original, is_own, count - 1
            elif not is_own and name in vars(owner):
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Switch off torch's fast path of encoder layers. The last of these contexts to exit restores the setting."""
    with _lock:
        _FAST_PATHS.append(mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _lock:
            mha.set_fastpath_enabled(_FAST_PATHS.pop())


@contextmanager
def wrapping(owner: Any, name: str, wrapper: Callable[..., Any], in_compiled_code: bool = True) -> Iterator[None]:
    """While the context lasts, calls of `owner.name` call `wrapper(that function, *inputs, **options)` instead.

    If `in_compiled_code` is False, code that torch.compile traces calls the function itself.
    """
    with restore_on_exit(owner, name):
        own = getattr(owner, name)

        @wraps(own)
        def wrapped(*inputs: Any, **options: Any) -> Any:
            return wrapper(own, *inputs, **options)

        setattr(owner, name, wrapped if in_compiled_code else in_eager_code(wrapped, own))
        yield


def check_module(model: Any) -> None:
    """Raise ParameterError if a model is not a module but, for example, the model's name."""
    if not isinstance(model, nn.Module):
        cure = (
            "load a name, by AutoModel.from_pretrained(name) for example, or make a function the `forward` of a module"
        )
        raise ParameterError(f"a model that is a {type(model).__name__}", "a torch.nn.Module", cure)
