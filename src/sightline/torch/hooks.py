"""Watching modules: what is asked of their attention beside what they ask themselves, and where the answers go."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..api import attention
from ..errors import ParameterError
from ..recording import Call, Kind, Seen, map_arrays, select_names
from ..statistics import Statistic

__all__ = ["Watcher", "attend", "check_module", "record_calls", "restore_on_exit", "select_modules"]


class Watcher:
    """Someone who watches modules: what they ask, and what they have seen.

    Parameters
    ----------
    see : the statistics asked of every call
    heads : the query heads whose results are asked for; every one if None
    seen : where calls are added
    names : the path of each module watched
    crossing : the paths of those known to look across sequences
    """

    def __init__(
        self,
        see: Sequence[Statistic],
        heads: Sequence[int] | None,
        seen: Seen,
        names: dict[nn.Module, str],
        cross_layers: Collection[str] = (),
    ) -> None:
        self.see, self.heads, self.seen, self.names, self.cross_layers = tuple(see), heads, seen, names, cross_layers
        self.requested = self.see if heads is None else tuple(statistic.heads(heads) for statistic in see)
        self.steps = dict.fromkeys(names.values(), 0)

    def record(
        self, module: nn.Module, results: Sequence[Any], heads: int, kind: Kind, query_start: int, **fields: int
    ) -> None:
        """Add a call of the module; `fields` holds the other fields of `Call`."""
        name = self.names[module]
        is_cross = kind == "cross" or name in self.cross_layers
        call = Call(
            layer=name,
            kind="cross" if is_cross else "self",
            step=self.steps[name],
            query_start=None if is_cross else query_start,
            heads=tuple(range(heads)) if self.heads is None else tuple(head % heads for head in self.heads),
            statistics=self.see,
            results=tuple(results),
            **fields,
        )
        self.steps[name] += 1
        self.seen.calls.append(call)


_lock = threading.Lock()
_ORIGINALS: dict[tuple[int, str], tuple[Any, int]] = {}  # what attributes were, and how many hold them changed
_WATCHERS: WeakKeyDictionary[nn.Module, tuple[Watcher, ...]] = WeakKeyDictionary()


@contextmanager
def record_calls(
    modules: dict[str, nn.Module], see: Sequence[Statistic], heads: Any, tokens: Any, cross_layers: Collection[str] = ()
) -> Iterator[Seen]:
    """While the context lasts, calls of these modules (by path) are recorded in the `Seen` it gives."""
    seen = Seen(tokens=tokens)
    watcher = Watcher(see, heads, seen, {module: name for name, module in modules.items()}, cross_layers)
    with ExitStack() as exit_stack:
        for module in watcher.names:
            _WATCHERS[module] = (*_WATCHERS.get(module, ()), watcher)
            exit_stack.callback(_remove_watcher, module, watcher)
        yield seen


def _remove_watcher(module: nn.Module, watcher: Watcher) -> None:
    rest = tuple(other for other in _WATCHERS.pop(module, ()) if other is not watcher)
    if rest:
        _WATCHERS[module] = rest


@contextmanager
def restore_on_exit(owner: Any, name: str) -> Iterator[None]:
    """An attribute that watchers change: it is as it was once the last of them leaves, in whatever order they do."""
    key = id(owner), name
    with _lock:
        original, count = _ORIGINALS.get(key, (getattr(owner, name), 0))
        _ORIGINALS[key] = original, count + 1
    try:
        yield
    finally:
        with _lock:
            original, count = _ORIGINALS.pop(key)
            if count > 1:
                _ORIGINALS[key] = original, count - 1
            else:
                setattr(owner, name, original)


def check_module(model: Any) -> None:
    """Raise ParameterError where a model is no module, as where its name was given."""
    if not isinstance(model, nn.Module):
        raise ParameterError(
            f"a model that is a {type(model).__name__}",
            "a torch.nn.Module",
            "load it first, as by transformers.AutoModel.from_pretrained(path)",
        )


def select_modules(modules: dict[str, nn.Module], see: Any, layers: Any, heads: Any) -> dict[str, nn.Module]:
    """The modules asked for by `layers`, once it is sure that what is asked can be meant.

    Raises
    ------
    ParameterError
        No attention among the modules, no such layer, statistics or heads that are none.
    """
    if not isinstance(see, Sequence) or not see or not all(isinstance(entry, Statistic) for entry in see):
        raise ParameterError(f"see={see!r}", "a list of statistics", "see=[sightline.lse()]")
    if heads is not None and not (isinstance(heads, Sequence) and all(isinstance(head, int) for head in heads)):
        raise ParameterError(f"heads={heads!r}", "a list of whole numbers", "heads=[0, 1]")
    return modules if layers is None else {name: modules[name] for name in select_names(list(modules), layers)}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kind: Kind = "self",
    query_start: int | None = None,
    key_start: int = 0,
    see: Iterable[Statistic] = (),
    **options: Any,
) -> tuple[Tensor, tuple[Any, ...]]:
    """`sightline.attention` as a module asks it, and as its watchers do: (output, the module's own statistics).

    Parameters
    ----------
    module : the module whose attention it is
    kind, query_start, key_start : as `Call` has them; without `query_start` the last query of self-attention is taken
        to stand at the last key
    see, options : as `sightline.attention` has them
    """
    own = list(see)
    watchers = () if torch.compiler.is_compiling() else _WATCHERS.get(module, ())
    requested = [*own, *(statistic for watcher in watchers for statistic in watcher.requested)]
    output, seen = attention(query, key, value, see=requested, **options)
    rest = iter(seen)
    own_results = tuple(islice(rest, len(own)))
    for watcher in watchers:
        watcher.record(
            module,
            [_flatten_batch(result, output) for result in islice(rest, len(watcher.see))],
            output.shape[-3] if output.ndim > 3 else 1,
            kind=kind,
            query_start=key.shape[-2] - query.shape[-2] if query_start is None else query_start,
            key_start=key_start,
            n=query.shape[-2],
            m=key.shape[-2],
        )
    return output, own_results


def _flatten_batch(result: Any, output: Tensor) -> Any:
    """A statistic's arrays with one batch axis and a head axis, whatever leading axes the call had."""
    batch_shape = output.shape[: -3 if output.ndim > 3 else -2]
    heads = output.shape[-3] if output.ndim > 3 else 1
    axes = output.ndim - 2

    def flatten(array: Tensor) -> Tensor:
        if output.ndim == 4 or array.shape[:axes] != output.shape[:axes]:
            return array
        return array.reshape(math.prod(batch_shape), heads, *array.shape[axes:])

    return map_arrays(flatten, result)
