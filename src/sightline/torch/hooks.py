"""The hook between modules and `sightline.attention`, through which `watch` requests and records statistics.

An attention module calls `attend`. If the module is watched, `attend` requests the statistics of the watchers together
with the module's own, and records the watchers' results.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..api.functions import attend as sightline_attend
from ..errors import ParameterError
from ..recording import Call, Kind, Seen, Total, map_arrays, select_names
from ..statistics import OverLayers, Statistic


class Watcher:
    """The statistics that one `watch` requests of its modules, and the recording of their results.

    Parameters
    ----------
    see : statistics requested of every call
    heads : query heads whose results are recorded; None for all
    seen : the recording, to which calls are appended
    names : the path of each watched module in the model
    cross_layers : paths of modules that are known to be cross-attention
    recorder : object whose `current` are the tokens of the model's inputs; None if they are unknown
    """

    def __init__(
        self,
        see: Sequence[Statistic],
        heads: Sequence[int] | None,
        seen: Seen,
        names: dict[nn.Module, str],
        cross_layers: Collection[str] = (),
        recorder: Any = None,
    ) -> None:
        self.see, self.heads, self.seen, self.names, self.cross_layers = tuple(see), heads, seen, names, cross_layers
        self.recorder = recorder
        requested = self.see if heads is None else tuple(statistic.heads(heads) for statistic in see)
        self.requested = {
            module: tuple(statistic.at_layer(k, len(names)) for statistic in requested)
            for k, module in enumerate(names)
        }
        seen.totals = tuple(Total(statistic) for statistic in see if isinstance(statistic, OverLayers))
        self.steps = dict.fromkeys(names.values(), 0)

    def record(
        self, module: nn.Module, results: Sequence[Any], heads: int, kind: Kind, query_start: int, **fields: Any
    ) -> None:
        """Append a call of the module to the recording; `fields` has the other attributes of the `Call`.

        The results of sums and means over layers are added to those of the calls before.
        """
        name, totals = self.names[module], iter(self.seen.totals)
        own = []
        for statistic, result in zip(self.see, results, strict=True):
            if isinstance(statistic, OverLayers):
                next(totals).add(name, result)
            else:
                own.append((statistic, result))
        is_cross = kind == "cross" or name in self.cross_layers
        call = Call(
            layer=name,
            kind="cross" if is_cross else "self",
            step=self.steps[name],
            query_start=None if is_cross else query_start,
            heads=tuple(range(heads)) if self.heads is None else tuple(head % heads for head in self.heads),
            statistics=tuple(statistic for statistic, _ in own),
            results=tuple(result for _, result in own),
            inputs=None if self.recorder is None else self.recorder.current,
            **fields,
        )
        self.steps[name] += 1
        self.seen.calls.append(call)


_lock = threading.Lock()
# the original value of an attribute, whether the object itself and not its class had it, and its open contexts
_ORIGINALS: dict[tuple[int, str], tuple[Any, bool, int]] = {}
_WATCHERS: WeakKeyDictionary[nn.Module, tuple[Watcher, ...]] = WeakKeyDictionary()


@contextmanager
def record_calls(
    modules: dict[str, nn.Module],
    see: Sequence[Statistic],
    heads: Any,
    tokens: Any,
    cross_layers: Collection[str] = (),
    recorder: Any = None,
    *,
    explain: Callable[[], tuple[str, str]],
) -> Iterator[Seen]:
    """Record the calls of these modules (by path) in the yielded `Seen` while the context lasts.

    `explain` returns what the model did instead of a call that was recorded, and the cure.

    Raises
    ------
    ParameterError
        At the exit: no call was recorded, or the tokens do not fit the recorded calls.
    """
    seen = Seen(tokens=tokens)
    watcher = Watcher(see, heads, seen, {module: name for name, module in modules.items()}, cross_layers, recorder)
    with registering(_WATCHERS, watcher.names, watcher):
        yield seen
        if not seen.calls:
            what, cure = explain()
            raise ParameterError(
                f"a watch of {len(modules)} attention layers ({', '.join(islice(modules, 3))}"
                + (", ...)" if len(modules) > 3 else ")")
                + f" that recorded no call: {what}",
                "a model that calls one of these layers in the `with` block",
                cure,
            )
    seen.check_tokens()


def explain_missing_calls(model: nn.Module) -> tuple[str, str]:
    """Return why a watch of the model recorded no call, as far as the model shows it, and the cure."""
    compiled = [module for module in model.modules() if getattr(module, "_compiled_call_impl", None) is not None]
    if compiled or hasattr(model, "_orig_mod"):
        return (
            "the model is compiled, and compiled code calls no watcher",
            'call the model in `with torch.compiler.set_stance("force_eager"):`, or watch it before torch.compile',
        )
    return "none of them ran", "run the model inside the `with` block; layers= selects layers that run"


@contextmanager
def registering(
    registry: WeakKeyDictionary[nn.Module, tuple[Any, ...]], modules: Collection[nn.Module], entry: Any
) -> Iterator[None]:
    """Add an entry to those of the modules in a registry while the context lasts."""
    for module in modules:
        registry[module] = (*registry.get(module, ()), entry)
    try:
        yield
    finally:
        for module in modules:
            remaining = tuple(other for other in registry.pop(module, ()) if other is not entry)
            if remaining:
                registry[module] = remaining


def is_watched(module: nn.Module) -> bool:
    """True if a `watch` records the calls of the module."""
    return module in _WATCHERS


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


def check_module(model: Any) -> None:
    """Raise ParameterError if a model is not a module but, for example, the model's name."""
    if not isinstance(model, nn.Module):
        raise ParameterError(
            f"a model that is a {type(model).__name__}",
            "a torch.nn.Module",
            "load the model first, for example by transformers.AutoModel.from_pretrained(path)",
        )


def select_modules(modules: dict[str, nn.Module], see: Any, layers: Any, heads: Any) -> dict[str, nn.Module]:
    """Validate `see` and `heads`, and return the modules that `layers` selects; all modules if `layers` is None.

    Raises
    ------
    ParameterError
        `see` is not a nonempty list of statistics, `heads` is not a list of integers, or `layers` selects no module.
    """
    if not isinstance(see, Sequence) or not see or not all(isinstance(entry, Statistic) for entry in see):
        is_dict = isinstance(see, dict)
        cure = "see=list(see.values()), then seen['entropy'] for entropy()" if is_dict else "see=[sightline.lse()]"
        raise ParameterError(f"see={see!r}", "a list of statistics", cure)
    if heads is not None and not (isinstance(heads, Sequence) and all(isinstance(head, int) for head in heads)):
        raise ParameterError(f"heads={heads!r}", "a list of integers", "heads=[0, 1]")
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
    """Return (output, the results of `see`) of `sightline.attention` for a module, and record the watchers' results.

    Parameters
    ----------
    module : the attention module
    kind, query_start, key_start : fields of `Call`
        If `query_start` is None, the last query of self-attention has the position of the last key.
    see, options : as in `sightline.attention`; `score` may also be an array of biases
    """
    own = list(see)
    # torch.compile sees no watchers
    watchers = _WATCHERS.get(module, ()) if _WATCHERS and not torch.compiler.is_compiling() else ()
    if not (own or watchers):
        output: Tensor = sightline_attend(query, key, value, **options)
        return output, ()
    requested = [*own, *(statistic for watcher in watchers for statistic in watcher.requested[module])]
    output, seen = sightline_attend(query, key, value, see=requested, **options)
    results = iter(seen)
    own_results = tuple(islice(results, len(own)))
    for watcher in watchers:
        watcher.record(
            module,
            [_flatten_batch(result, output) for result in islice(results, len(watcher.see))],
            output.shape[-3] if output.ndim > 3 else 1,
            kind=kind,
            query_start=key.shape[-2] - query.shape[-2] if query_start is None else query_start,
            key_start=key_start,
            n=query.shape[-2],
            m=key.shape[-2],
        )
    return output, own_results


def _flatten_batch(result: Any, output: Tensor) -> Any:
    """Return a statistic's arrays with exactly one batch axis and a head axis, for any leading axes of the call."""
    batch_shape = output.shape[: -3 if output.ndim > 3 else -2]
    heads = output.shape[-3] if output.ndim > 3 else 1
    axes = output.ndim - 2

    def flatten(array: Tensor) -> Tensor:
        if output.ndim == 4 or array.shape[:axes] != output.shape[:axes]:
            return array
        return array.reshape(math.prod(batch_shape), heads, *array.shape[axes:])

    return map_arrays(flatten, result)
