"""Attention that a model writes out by hand, softmax(f(Q Kᵀ)) V, found by the tensors that pass from step to step."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

PRODUCTS = {torch.matmul, torch.bmm, torch.baddbmm, torch.einsum}
PRODUCTS |= {Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.bmm, Tensor.baddbmm}
SOFTMAXES = {torch.softmax, functional.softmax, Tensor.softmax}
SCORES = "scores"  # the mark of a product of two activations, and of what is computed from it element by element
OWN_PACKAGES = ("torch.", "sightline.")


class _Marks(threading.local):
    """The mark of each tensor of a thread that may be part of attention: `SCORES`, or the place of a softmax of it."""

    def __init__(self) -> None:
        self.by_tensor: Any = WeakTensorKeyDictionary()


_marks = _Marks()


def find_handwritten(function: Any, inputs: tuple[Any, ...], options: dict[str, Any], result: Any) -> str | None:
    """Follow one call of a torch function. If it completes attention, return the file and line of its softmax."""
    marks = _marks.by_tensor
    if not isinstance(result, Tensor) or not (marks or function in PRODUCTS):
        return None
    tensors = [x for x in tree_leaves((inputs, options)) if isinstance(x, Tensor)]
    found = [(x, marks[x]) for x in tensors if x in marks]
    if function in PRODUCTS:
        places: list[str] = [mark for _, mark in found if mark is not SCORES]
        if not places and not any(isinstance(x, Parameter) for x in tensors):
            marks[result] = SCORES
        return places[0] if places else None
    if function is functional.linear:  # a projection has no scores
        return None
    for x, mark in found:
        has_rows = result.shape[:-1] == x.shape[:-1]  # a sink is one more column of scores
        if function in SOFTMAXES and mark is SCORES:
            marks[result] = _place_of_caller()
        elif has_rows or result.numel() == x.numel():
            marks[result] = mark
    return None


def _place_of_caller() -> str:
    """Return "file:line" of the innermost code that is neither torch's nor this library's."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OWN_PACKAGES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
