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
from ..recording import Call, Kind, Seen, chosen, each
from ..statistics import Statistic

__all__ = ["Watcher", "attend", "check_module", "restored", "wanted", "watching"]


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
        crossing: Collection[str] = (),
    ) -> None:
        self.see, self.heads, self.seen, self.names, self.crossing = tuple(see), heads, seen, names, crossing
        self.asked = self.see if heads is None else tuple(statistic.heads(heads) for statistic in see)
        self.steps = dict.fromkeys(names.values(), 0)

    def record(
        self, module: nn.Module, results: Sequence[Any], heads: int, kind: Kind, query_start: int, **place: int
    ) -> None:
        """Add a call of the module; `place` holds the other fields of `Call`."""
        name = self.names[module]
        crosses = kind == "cross" or name in self.crossing
        call = Call(
            layer=name,
            kind="cross" if crosses else "self",
            step=self.steps[name],
            query_start=None if crosses else query_start,
            heads=tuple(range(heads)) if self.heads is None else tuple(head % heads for head in self.heads),
            statistics=self.see,
            results=tuple(results),
            **place,
        )
        self.steps[name] += 1
        self.seen.calls.append(call)


_guard = threading.Lock()
_FOUND: dict[tuple[int, str], tuple[Any, int]] = {}  # what attributes were, and how many hold them changed
_WATCHERS: WeakKeyDictionary[nn.Module, tuple[Watcher, ...]] = WeakKeyDictionary()


@contextmanager
def watching(
    modules: dict[str, nn.Module], see: Sequence[Statistic], heads: Any, tokens: Any, crossing: Collection[str] = ()
) -> Iterator[Seen]:
    """While the context lasts, calls of these modules (by path) are recorded in the `Seen` it gives."""
    seen = Seen(tokens=tokens)
    watcher = Watcher(see, heads, seen, {module: name for name, module in modules.items()}, crossing)
    with ExitStack() as leaving:
        for module in watcher.names:
            _WATCHERS[module] = (*_WATCHERS.get(module, ()), watcher)
            leaving.callback(_forget, module, watcher)
        yield seen


def _forget(module: nn.Module, watcher: Watcher) -> None:
    rest = tuple(other for other in _WATCHERS.pop(module, ()) if other is not watcher)
    if rest:
        _WATCHERS[module] = rest


@contextmanager
def restored(owner: Any, name: str) -> Iterator[None]:
    """An attribute that watchers change: it is as it was once the last of them leaves, in whatever order they do."""
    place = id(owner), name
    with _guard:
        found, count = _FOUND.get(place, (getattr(owner, name), 0))
        _FOUND[place] = found, count + 1
    try:
        yield
    finally:
        with _guard:
            found, count = _FOUND.pop(place)
            if count > 1:
                _FOUND[place] = found, count - 1
            else:
                setattr(owner, name, found)


def check_module(model: Any) -> None:
    """Raise ParameterError where a model is no module, as where its name was given."""
    if not isinstance(model, nn.Module):
        raise ParameterError(
            f"a model that is a {type(model).__name__}",
            "a torch.nn.Module",
            "load it first, as by transformers.AutoModel.from_pretrained(path)",
        )


def wanted(modules: dict[str, nn.Module], see: Any, layers: Any, heads: Any) -> dict[str, nn.Module]:
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
    return modules if layers is None else {name: modules[name] for name in chosen(list(modules), layers)}


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
    asked = [*own, *(statistic for watcher in watchers for statistic in watcher.asked)]
    output, seen = attention(query, key, value, see=asked, **options)
    rest = iter(seen)
    answers = tuple(islice(rest, len(own)))
    for watcher in watchers:
        watcher.record(
            module,
            [_flat(result, output) for result in islice(rest, len(watcher.see))],
            output.shape[-3] if output.ndim > 3 else 1,
            kind=kind,
            query_start=key.shape[-2] - query.shape[-2] if query_start is None else query_start,
            key_start=key_start,
            n=query.shape[-2],
            m=key.shape[-2],
        )
    return output, answers


def _flat(result: Any, output: Tensor) -> Any:
    """A statistic's arrays with one batch axis and a head axis, whatever leading axes the call had."""
    lead = output.shape[: -3 if output.ndim > 3 else -2]
    heads = output.shape[-3] if output.ndim > 3 else 1
    axes = output.ndim - 2

    def flat(array: Tensor) -> Tensor:
        if output.ndim == 4 or array.shape[:axes] != output.shape[:axes]:
            return array
        return array.reshape(math.prod(lead), heads, *array.shape[axes:])

    return each(flat, result)
