"""Attention that a model writes out by hand, softmax(f(Q Kᵀ)) V, found by the tensors that pass from step to step.

A product of two activations gives scores S, and so does what is computed from scores element by element. A softmax of
scores gives weights. A product of weights and another tensor is attention. If its weights are those of the softmax, up
to dropout, casts and changes of shape, the attention is known exactly: its weights are softmax(S).
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from .weight_axes import MOVES, PRODUCTS, RESHAPES, call_with, find_axis, order_axes

SOFTMAXES = {torch.softmax, torch.special.softmax, functional.softmax, Tensor.softmax}
SAME_WEIGHTS = {functional.dropout, torch.dropout, torch.clone, Tensor.clone, torch.detach, Tensor.detach}
SAME_WEIGHTS |= {Tensor.contiguous, Tensor.to, Tensor.type, Tensor.type_as, Tensor.cpu, Tensor.cuda}
SAME_WEIGHTS |= {Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16}
OF_FIRST = SAME_WEIGHTS | RESHAPES | MOVES  # of their arguments, the values of the first alone matter
PARTS = {Tensor.__getitem__, Tensor.select, torch.select, Tensor.narrow, torch.narrow, torch.index_select}
PARTS |= {Tensor.index_select}
OWN_PACKAGES = ("torch.", "sightline.")


@dataclass(frozen=True)
class ScoresMark:
    """The mark of scores. `shape` is their last shape of four axes, if they have the same last two axes now, or ()."""

    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Source:
    """The input of one softmax, and how often it had been changed in place."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class WeightsMark:
    """The mark of a softmax of scores, and of what is computed from it.

    Attributes
    ----------
    place : file and line of the softmax
    dtype : that of the softmax's result
    version : how often the marked tensor has been changed in place
    keys : the axis of the keys, counted from 0
    scores : the softmax's input, in the shape of the marked tensor or in one of four axes with the same last two axes;
        None if no watch records it
    source : the softmax's input itself; None if no watch records it
    reason : why the marked tensor is not known to hold the weights softmax(S), or ""
    softmax : one object for all marks that come from one call of a softmax
    """

    place: str
    dtype: torch.dtype
    version: int
    keys: int
    scores: Tensor | None = None
    source: _Source | None = None
    reason: str = ""
    softmax: object = field(default_factory=object)

    def refuse(self, reason: str) -> WeightsMark:
        """Return the mark of a tensor that is not known to hold the weights; the first reason stays."""
        return replace(self, scores=None, source=None, reason=self.reason or reason)


class _Marks(threading.local):
    """The marks of a thread's tensors."""

    def __init__(self) -> None:
        self.by_tensor: Any = WeakTensorKeyDictionary()


_marks = _Marks()


def find_handwritten(
    function: Any, inputs: tuple[Any, ...], options: dict[str, Any], result: Any, keeps_scores: bool
) -> WeightsMark | None:
    """Follow one call of a torch function. If it completes attention, return the mark of the weights.

    If the mark has no `reason`, and `keeps_scores` was True at the softmax, then its `scores` have the axes
    (..., queries, keys).
    """
    marks = _marks.by_tensor
    if not (marks or function in PRODUCTS):
        return None
    result = inputs[0] if function is Tensor.__setitem__ else result
    if not isinstance(result, Tensor):
        return None
    tensors = [x for x in tree_leaves((inputs, options)) if isinstance(x, Tensor)]
    found = sorted(((x, marks[x]) for x in tensors if x in marks), key=lambda pair: isinstance(pair[1], WeightsMark))
    if function in PRODUCTS:
        weights = [(x, mark) for x, mark in found if isinstance(mark, WeightsMark)]
        if weights:
            return _complete(function, inputs, tensors, weights)
        if not any(isinstance(x, Parameter) for x in tensors):
            marks[result] = ScoresMark(_four_axes(result))
        return None
    for x, mark in found:
        if function in OF_FIRST and x is not (inputs[0] if inputs else options.get("input")):
            continue
        has_rows = result.shape[:-1] == x.shape[:-1]  # a sink is one more column of scores
        is_linear = function is functional.linear  # a projection has no scores, but may mix the weights of heads
        if isinstance(mark, WeightsMark):
            _refuse_aliases(function, x, mark, result)
            if result.numel() == x.numel() or (has_rows and not is_linear) or function in PARTS:
                marks[result] = _follow_weights(function, inputs, options, x, mark, result)
        elif function in SOFTMAXES:
            marks[result] = _follow_softmax(inputs, options, x, mark, result, keeps_scores)
        elif not is_linear and (has_rows or result.numel() == x.numel()):
            marks[result] = ScoresMark(_four_axes(result) or _keep_shape(function, mark.shape, x, result))
    return None


def _four_axes(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape) if x.ndim == 4 else ()


def _keep_shape(function: Any, shape: tuple[int, ...], x: Tensor, result: Tensor) -> tuple[int, ...]:
    """Return the shape of four axes after a function, or () if it is no shape of the result."""
    is_kept = function not in MOVES and result.numel() == x.numel() and shape[-2:] == result.shape[-2:]
    return shape if is_kept else ()


def _follow_softmax(
    inputs: tuple[Any, ...], options: dict[str, Any], x: Tensor, mark: ScoresMark, result: Tensor, keeps_scores: bool
) -> WeightsMark:
    """Return the mark of a softmax of the scores x."""
    last = x.ndim - 1
    weights = WeightsMark(_place_of_caller(), result.dtype, _version(result), last)
    if options.get("dim", inputs[1] if len(inputs) > 1 else None) not in (-1, last):
        return weights.refuse("the softmax is not over the last axis")
    if options.get("out") is not None:
        return weights.refuse("the softmax writes into out=, which may be its input")
    if not keeps_scores:
        return weights
    if x.is_nested:
        return weights.refuse("the scores are a nested tensor")
    source = x.clone() if x.is_inference() else x  # tensors of inference mode do not count their changes
    is_exact = torch.promote_types(x.dtype, result.dtype) == result.dtype
    scores = source if is_exact else source.to(result.dtype)  # as a softmax with dtype= does first
    scores = scores.reshape(mark.shape) if mark.shape else scores
    return replace(weights, scores=scores, source=_Source(source, _version(source)))


def _follow_weights(
    function: Any, inputs: tuple[Any, ...], options: dict[str, Any], x: Tensor, mark: WeightsMark, result: Tensor
) -> WeightsMark:
    """Return the mark of the result of a function of the weights x."""
    mark = replace(_check_versions(x, mark), version=_version(result))
    scores = mark.scores
    if function in SAME_WEIGHTS and result.shape == x.shape and result.is_floating_point():
        return mark
    if function in RESHAPES and result.dtype == x.dtype:
        if mark.keys != x.ndim - 1 or result.shape[-1:] != x.shape[-1:]:
            return mark.refuse("a change of shape divides or joins the axis of the keys")
        if scores is not None and (result.ndim == 4 or result.shape[-2:] != x.shape[-2:]):
            scores = scores.reshape(result.shape)
        return replace(mark, keys=result.ndim - 1, scores=scores)
    if function in MOVES:
        if scores is not None:
            scores = call_with(scores.reshape(x.shape), function, inputs, options, x)
        return replace(mark, keys=find_axis(mark.keys, function, inputs, options, x), scores=scores)
    if function in PARTS:
        return mark.refuse("a part of the weights is taken between softmax and product")
    name = getattr(function, "__name__", repr(function))
    return mark.refuse(f"{name} computes with the weights between softmax and product")


def _complete(
    function: Any, inputs: tuple[Any, ...], tensors: list[Tensor], weights: list[tuple[Tensor, WeightsMark]]
) -> WeightsMark:
    """Return the mark of the weights of a product, with scores in the order (..., queries, keys).

    If it has scores, no tensor of this softmax is followed any more: one softmax is recorded once.
    """
    for x, given in weights:
        mark, order = _check_versions(x, given), order_axes(given.keys, function, inputs, tensors, x)
        if mark.scores is None or order is None:
            continue
        if order != tuple(range(x.ndim)):
            mark = replace(mark, scores=mark.scores.reshape(x.shape).permute(order))
        for other, _ in _of_softmax(mark):
            del _marks.by_tensor[other]
        return mark
    return _check_versions(*weights[0]).refuse("the product does not show which axes have its queries and keys")


def _refuse_aliases(function: Any, x: Tensor, mark: WeightsMark, result: Tensor) -> None:
    """Refuse all weights of a softmax if a function may change them and their versions do not show it.

    This is so in inference mode, where tensors have no versions: a function changes x in place, or returns a part of x
    that another function may change.
    """
    if not x.is_inference() or function in OF_FIRST:
        return
    if result is x or result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        name = getattr(function, "__name__", repr(function))
        for other, of in _of_softmax(mark):
            _marks.by_tensor[other] = of.refuse(f"{name} may change the weights in inference mode")


def _of_softmax(mark: WeightsMark) -> list[tuple[Tensor, WeightsMark]]:
    """Return the tensors and marks that come from the softmax of this mark."""
    marks = _marks.by_tensor.items()
    return [(x, other) for x, other in marks if isinstance(other, WeightsMark) and other.softmax is mark.softmax]


def _check_versions(x: Tensor, mark: WeightsMark) -> WeightsMark:
    """Refuse weights or scores that have been changed in place since they were marked."""
    if _version(x) != mark.version:
        return mark.refuse("the weights are changed in place after the softmax")
    if mark.source is not None and _version(mark.source.tensor) != mark.source.version:
        return mark.refuse("the scores are changed in place after the softmax")
    return mark


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _place_of_caller() -> str:
    """Return "file:line" of the innermost code that is neither torch's nor this library's."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OWN_PACKAGES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
