"""The watcher of one model: which calls it records and as what, self- or cross-attention, and why it recorded none."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...call.validation import suggest_statistic
from ...errors import ParameterError
from ...statistics import Mean, OverLayers, Selection, Statistic
from ...statistics.recording import AttentionKind, Call, Seen, Total, map_arrays, select_names
from ..layer_calls import LayerCall
from .running_modules import Running, RunningModules

CROSS_ATTENTION_NAME = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)  # part of such layers' names


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """True if the layer computes cross-attention.

    The layer's attribute `is_cross_attention` decides, or else the last two names of its path and its class name.
    """
    declared = getattr(module, "is_cross_attention", None)
    if isinstance(declared, bool):
        return declared
    return any(CROSS_ATTENTION_NAME.search(part) for part in (*name.split(".")[-2:], type(module).__name__))


@dataclass
class CalledLayer:
    """What a watcher remembers of a layer: the run, step and number of its last call, and its number of keys."""

    is_cross: bool
    run: int = -1
    step: int = -1
    call: int = 0
    keys: int = 0


class Watcher:
    """The statistics that one `watch` requests of the attention in a model, and their recording."""

    def __init__(
        self,
        model: nn.Module,
        see: Any,
        layers: Any = None,
        heads: Any = None,
        tokens: Any = None,
        handwritten: bool = False,
    ) -> None:
        names, statistics = _read_statistics(see)
        if heads is not None:
            if not (isinstance(heads, Sequence) and all(isinstance(head, int | np.integer) for head in heads)):
                raise ParameterError(f"heads={heads!r}", "a list of integers", "heads=[0, 1]")
            heads = [int(head) for head in heads]
        self.names, self.see, self.heads = names, statistics, heads
        self.requested = statistics if heads is None else tuple(statistic.heads(heads) for statistic in statistics)
        self.model, self.modules = model, RunningModules(model)
        self.by_path = {path: module for module, path in self.modules.paths.items()}
        self.asked = _read_layers(layers, tuple(self.by_path))
        # of each statistic the sum or mean over layers; None if the results of its calls are kept
        self.totals = [
            Total(statistic, name) if isinstance(statistic, OverLayers) else None
            for statistic, name in zip(statistics, names or [""] * len(statistics), strict=True)
        ]
        if any(self.totals) and self._counts_from_end():
            allowed = "paths, patterns and numbers from 0 on, since calls of a layer cannot be dropped from a sum later"
            raise ParameterError(f"layers={layers!r} with a sum or mean over layers", allowed, 'layers=["*.self_attn"]')
        self.seen = Seen(tokens=tokens, totals=[total for total in self.totals if total is not None])
        folder = getattr(getattr(model, "config", None), "name_or_path", "")  # of a model of transformers
        self.seen.model = PurePath(str(folder)).name or type(model).__name__
        self.inputs: Any = None  # an object whose `current` has the tokens of the model's inputs
        self.layers: dict[str, CalledLayer] = {}  # every layer that called attention, in the order of the first calls
        self.numbers: dict[str, int] = {}  # of each layer that `layers` may select, among these
        # of the last self-attention: the run, the number of queries, the first one's position
        self.last_self = (-1, 0, 0)
        self.records_handwritten = handwritten
        # for each place of a softmax: the class of the module that ran, why the attention was not recorded, the softmax
        self.unrecorded: dict[str, tuple[str, str, object]] = {}
        self.lock = threading.Lock()

    def recorder(self) -> Recorder | None:
        """Return the recorder of a call of the module that runs in this thread; None if no call of it is recorded."""
        running = self.modules.current()
        if running is None:
            return None
        with self.lock:
            if running.path not in self.layers:
                self.layers[running.path] = CalledLayer(is_cross_attention(running.path, self.by_path[running.path]))
                wanted = [path for k, path in enumerate(self.layers) if self._wants(path, k, len(self.layers))]
                if self._counts_from_end():  # layers that ran before this one may no longer be among the last ones
                    self.seen.calls = [call for call in self.seen.calls if call.layer in wanted]
                self.numbers = {path: number for number, path in enumerate(wanted)}
            number = self.numbers.get(running.path)
        return None if number is None else Recorder(self, running, number)

    def _wants(self, path: str, rank: int, count: int) -> bool:
        """True if `layers` may select the layer of this path, the `rank`-th of the `count` layers that ran so far."""
        if self.asked is None:
            return True
        return any(
            fnmatchcase(path, one) if isinstance(one, str) else rank == one if one >= 0 else rank >= count + one
            for one in self.asked
        )

    def _counts_from_end(self) -> bool:
        return any(not isinstance(one, str) and one < 0 for one in self.asked or ())

    def note_handwritten(self, place: str, softmax: object, reason: str) -> None:
        """Note attention written by hand in the module that runs, and if asked for, the reason why it is not recorded.

        `softmax` is one object for each call of a softmax.
        """
        running = self.modules.current()
        if running is not None and (
            self.asked is None or any(not isinstance(one, str) or fnmatchcase(running.path, one) for one in self.asked)
        ):
            noted = running.kind.__name__, reason * self.records_handwritten, softmax
            self.unrecorded.setdefault(place, noted)

    def forget_handwritten(self, place: str, softmax: object) -> None:
        """Forget the note about a softmax, because a later product with its weights is recorded."""
        if self.unrecorded.get(place, (None,))[-1] is softmax:
            del self.unrecorded[place]

    def finish(self) -> None:
        """Keep the calls that `layers` selects, and raise ParameterError if there are none."""
        if self.asked is not None and self.layers:
            selected = select_names(tuple(self.layers), self.asked)
            self.seen.calls = [call for call in self.seen.calls if call.layer in selected]
        if not self.seen.calls:
            what, cure = self._explain()
            raise ParameterError(
                f"a watch of {type(self.model).__name__} that recorded no call: {what}",
                "attention by torch's functions, an interface of transformers, or this library, in the `with` block",
                cure,
            )
        for statistic in self.see:
            _check_layers(statistic, len(self.seen.layers), is_end=True)
        self.seen.check_tokens()

    def _explain(self) -> tuple[str, str]:
        """Return what the model did instead of a call that can be recorded, and the cure."""
        if self.unrecorded:
            return f"attention is written by hand in {self.list_handwritten()}", self.cure_of_handwritten()
        compiled = [path for path, module in self.by_path.items() if isinstance(module, torch.jit.ScriptModule)]
        if compiled:
            return (
                f"{compiled[0]} is compiled by torch.jit, and compiled code shows no calls",
                "watch the model before torch.jit.script or torch.jit.trace",
            )
        if not self.modules.has_run:
            return "none of its modules ran", "run the model inside the `with` block"
        return (
            "its modules ran, and called none of the functions below",
            "sightline.attention(..., see=...) in the code that computes attention, or the model's own eager form",
        )

    def list_handwritten(self) -> str:
        """Return the classes and places of attention that is written by hand, and why it was not recorded."""
        return ", ".join(
            f"{kind} ({place})" + f", where {reason}" * bool(reason)
            for place, (kind, reason, _) in self.unrecorded.items()
        )

    def cure_of_handwritten(self) -> str:
        """Return the cure of an error or warning about the attention that `list_handwritten` lists."""
        switch = (
            "call torch.nn.functional.scaled_dot_product_attention there in place of softmax(Q Kᵀ) V; many libraries "
            'have a switch for it, such as fused_attn=True or attn_implementation="sdpa"'
        )
        return switch if self.records_handwritten else f"sightline.watch(..., handwritten=True); or {switch}"


@dataclass(frozen=True)
class Recorder:
    """Appends one call of a module to the recording of one watcher."""

    watcher: Watcher
    running: Running
    layer_number: int  # among the recorded layers, in the order in which they first ran

    def requested(self) -> tuple[Statistic, ...]:
        """Return the statistics of this call. Raise ParameterError if a statistic has factors for too few layers."""
        for statistic in self.watcher.requested:
            _check_layers(statistic, self.layer_number + 1)
        return tuple([_at_layer(statistic, self.layer_number) for statistic in self.watcher.requested])

    def record(self, results: Sequence[Any], output: Tensor, given: LayerCall, n: int, m: int) -> None:
        """Append the call, of n queries on m keys, to the recording. Add its part of sums and means over layers."""
        watcher, heads = self.watcher, output.shape[-3] if output.ndim > 3 else 1
        inputs = None if watcher.inputs is None else watcher.inputs.current
        results = [_flatten_batch(result, output) for result in results]
        kept = [k for k, total in enumerate(watcher.totals) if total is None]
        for total, result in zip(watcher.totals, results, strict=True):
            if total is not None:
                total.add(self.running.path, result)
        with watcher.lock:
            layer = watcher.layers[self.running.path]
            layer.call = layer.call + 1 if layer.run == self.running.run else 0
            layer.step += layer.run != self.running.run
            layer.run = self.running.run
            kind: AttentionKind = (
                "cross" if layer.is_cross else given.kind or ("self" if m in (n, layer.keys + n) else "cross")
            )
            layer.keys = m
            if kind == "self":
                query_start = m - n if given.query_start is None else given.query_start
                watcher.last_self = layer.run, n, given.key_start + query_start
            elif watcher.last_self[:2] == (layer.run, n):  # cross-attention follows the self-attention of its queries
                query_start = watcher.last_self[2]
            else:
                query_start = 0 if inputs is None else inputs.start
            watcher.seen.calls.append(
                Call(
                    layer=self.running.path,
                    kind=kind,
                    step=layer.step,
                    call=layer.call,
                    query_start=query_start,
                    key_start=given.key_start,
                    n=n,
                    m=m,
                    heads=tuple(range(heads) if watcher.heads is None else (head % heads for head in watcher.heads)),
                    statistics=tuple([watcher.see[k] for k in kept]),
                    names=tuple([watcher.names[k] for k in kept]) if watcher.names else (),
                    results=tuple([results[k] for k in kept]),
                    inputs=inputs,
                )
            )


def _read_statistics(see: Any) -> tuple[tuple[str, ...], tuple[Statistic, ...]]:
    """Return (the names of a dict, the statistics) of `see`."""
    names = tuple(see) if isinstance(see, Mapping) else ()
    statistics = (see,) if isinstance(see, Statistic) else tuple(see.values()) if names else see
    listed = statistics if isinstance(statistics, Sequence) and not isinstance(statistics, str) else [statistics]
    others = [entry for entry in listed if not isinstance(entry, Statistic)]
    if others or not listed:
        cure = suggest_statistic(*others[:1] or [None])
        raise ParameterError(f"see={see!r}", "a statistic, or a list or dict of statistics", cure)
    return names, tuple(statistics)


def _factors_by_layer(statistic: Statistic) -> tuple[Any, ...]:
    """Return the factors of the heads for each layer; () if all layers have the same factors."""
    while isinstance(statistic, OverLayers | Selection):
        statistic = statistic.of
    rows = statistic.factors if isinstance(statistic.factors, tuple) else ()
    return rows if rows and isinstance(rows[0], tuple) else ()


def _at_layer(statistic: Statistic, layer: int) -> Statistic:
    """Return the statistic to request of the layer with this number."""
    statistic = statistic.of if isinstance(statistic, OverLayers) else statistic
    if isinstance(statistic, Selection):
        return replace(statistic, of=_at_layer(statistic.of, layer))
    rows = _factors_by_layer(statistic)
    return replace(statistic, factors=rows[layer]) if rows and isinstance(statistic, Mean) else statistic


def _check_layers(statistic: Statistic, count: int, is_end: bool = False) -> None:
    """Raise ParameterError if the statistic has one row of factors for each layer, and fewer rows than `count`.

    If `is_end`, a watch of `count` layers has ended, and more rows than `count` are an error, too.
    """
    rows = len(_factors_by_layer(statistic))
    if rows and (rows < count or (is_end and rows != count)):
        given = f"weights of {rows} layers, in a watch of {'' if is_end else 'at least '}{count} layers"
        allowed = "a row of weights for each layer"
        raise ParameterError(given, allowed, "a row for each watched layer; layers=... of the watch selects layers")


def _read_layers(layers: Any, paths: tuple[str, ...]) -> tuple[str | int, ...] | None:
    """Return `layers` as a tuple; None selects all. A path or pattern must match a module."""
    if layers is None:
        return None
    asked = (layers,) if isinstance(layers, str) or not isinstance(layers, Sequence) else tuple(layers)
    asked = tuple([int(one) if isinstance(one, np.integer) else one for one in asked])
    if not asked:
        raise ParameterError(f"layers={layers!r}", "at least one layer", 'layers=["*.self_attn"], or None for all')
    for one in asked:
        if isinstance(one, bool) or not isinstance(one, int):
            select_names(paths, [one], "modules")
    return asked


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
