"""Find attention that a model writes by hand, softmax(f(Q Kᵀ)) V, by following tensors through functions of torch.

Scores S are a product of two activations, a part of other scores, or what is computed from scores element by element.
Weights are a softmax of scores. Attention is a product of weights and another tensor. If only dropout, casts and
changes of shape stand between the softmax and the product, the weights are known exactly: softmax(S). The mark of a
tensor says what is known about the tensor.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.nn import Parameter, functional
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ...arrays.caching import cached_property


def _find_functions(names: str) -> set[Any]:
    """Return the functions with these names, those of torch and its modules and the methods of tensors."""
    owners = torch, Tensor, functional, torch.linalg, torch.special
    found = [getattr(owner, name, None) for owner in owners for name in names.split()]
    return {one for one in found if callable(one)}


PRODUCTS = _find_functions("matmul __matmul__ __rmatmul__ mm bmm baddbmm addmm einsum tensordot")
WITH_SUMMAND = _find_functions("baddbmm addmm")  # the first argument is added to the product
RESHAPES = _find_functions("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as")
MOVES = _find_functions("transpose permute swapaxes swapdims movedim moveaxis t adjoint")
MOVES |= {x.__get__ for x in (Tensor.mT, Tensor.T, Tensor.mH, Tensor.H)}  # type: ignore[attr-defined]
DIGITS = "0123456789"  # the axes of "..." in an equation
SOFTMAXES = _find_functions("softmax _softmax")
SAME_WEIGHTS = _find_functions(
    "dropout clone detach contiguous to type type_as cpu cuda float double half bfloat16 requires_grad_"
)
SAME_WEIGHTS |= {Tensor.data.__get__}  # type: ignore[attr-defined]
FILLS = _find_functions("where masked_fill nan_to_num")
OF_FIRST = SAME_WEIGHTS | RESHAPES | MOVES  # only the values of the first argument matter
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
CHANGED = "the {} are changed in place after the softmax"
NESTED = "the scores or weights are a nested tensor"
SKIPPED_FRAMES = ("torch.", "sightline.")


@dataclass(frozen=True)
class ScoresMark:
    """What is known about a tensor of scores.

    `shape` is the last shape of four axes that the scores had, if their last two axes have not changed since; else ().
    """

    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class WeightsMark:
    """What is known about a softmax of scores, or about a tensor that is computed from one.

    place : file and line of the softmax
    dtype : the dtype of the softmax's result
    version : how often the marked tensor had been changed in place when the mark was made
    keys : the axis of the keys, counted from 0; −1 for a part of the weights without this axis
    scores : the softmax's input, in the shape of the marked tensor or in one of four axes with the same last two axes;
        None if there is a `reason`, or if no watch records attention written by hand
    source, source_version : the softmax's input itself, None in the same cases as `scores`, and its version then
    reason : why the marked tensor is not known to hold the weights softmax(S), or ""
    softmax : one object for all marks that come from one call of a softmax
    """

    place: str
    dtype: torch.dtype
    version: int
    keys: int
    scores: Tensor | None = None
    source: Tensor | None = None
    source_version: int = 0
    reason: str = ""
    softmax: object = field(default_factory=object)

    def refuse(self, reason: str) -> WeightsMark:
        """Return this mark without scores, with a reason why the weights are not known. An earlier reason stays."""
        return replace(self, scores=None, source=None, reason=self.reason or reason)


_marks: Any = WeakTensorKeyDictionary()  # of tensors of all threads, because models pass tensors between them
_lock = threading.RLock()


def forget_tensors() -> None:
    """Forget all tensors, because no watch follows them any more."""
    with _lock:
        _marks.clear()


def find_handwritten(
    function: Any, inputs: tuple[Any, ...], options: dict[str, Any], result: Any, keeps_scores: bool
) -> WeightsMark | None:
    """Follow tensors through one call of a function. Return the mark of the weights if the call completes attention.

    If the mark has no `reason`, and `keeps_scores` was True at the softmax, then its `scores` have the axes
    (..., queries, keys).
    """
    function = _function_of(function)
    if not (_marks or function in PRODUCTS):
        return None
    result = inputs[0] if function is Tensor.__setitem__ else result
    results = [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, Tensor)]
    if not results and not _changes_inputs(function):
        return None
    with _lock:
        return _follow(TorchCall(function, inputs, options), results, keeps_scores)


def _function_of(function: Any) -> Any:
    """Return torch's function for an operator of an exported program, such as `torch.ops.aten.matmul.default`."""
    packet = getattr(function, "overloadpacket", function)
    if not isinstance(packet, OpOverloadPacket):
        return function
    candidates = [getattr(owner, packet.__name__, None) for owner in (Tensor, functional, torch)]
    return next((candidate for candidate in candidates if candidate is not None), function)


def _changes_inputs(function: Any) -> bool:
    """True for functions that change tensors in place and may return none of them."""
    name = getattr(function, "__name__", "")
    return function == SET_DATA or (name.startswith("_foreach") and name.endswith("_"))


def _follow(call: TorchCall, results: list[Tensor], keeps_scores: bool) -> WeightsMark | None:
    """Do what `find_handwritten` does, for the tensors among the results."""
    function, tensors = call.function, call.tensors
    marked = [(x, _marks[x]) for x in tensors if x in _marks]  # the last one decides: that of weights that are known
    ordered = sorted(
        marked, key=lambda pair: (isinstance(pair[1], WeightsMark), getattr(pair[1], "scores", None) is not None)
    )
    if function not in OF_FIRST:
        for x, _ in ordered:
            if _changes_inputs(function) or any(result is x for result in results):
                _refuse_changed(x)
    if function in PRODUCTS:
        read = [(x, _marks[x]) for x, _ in ordered if x is not call.options.get("out")]
        weights = [(x, mark) for x, mark in read if isinstance(mark, WeightsMark) and mark.keys >= 0]
        if weights:
            return _complete(call, weights)
        if not _is_projection(function, call.operands):
            _marks[results[0]] = ScoresMark(_four_axes(results[0]))
        return None
    first = call.inputs[0] if call.inputs else call.options.get("input")
    for x, mark in ordered:
        if function in OF_FIRST and x is not first:
            continue
        for result in results:
            new: ScoresMark | WeightsMark | None = None
            if isinstance(mark, WeightsMark):
                is_changed = result is x and function not in OF_FIRST
                new = None if is_changed else _follow_weights(call, x, mark, result)
            elif function in SOFTMAXES:
                new = _follow_softmax(call, x, mark, result, keeps_scores)
            elif function is not functional.linear and _is_similar(x, result):  # a projection has no scores
                new = ScoresMark(_four_axes(result) or _keep_shape(function, mark.shape, x, result))
            if new is not None:
                _marks[result] = new
    return None


def _is_projection(function: Any, operands: list[Tensor]) -> bool:
    """True if the right operand, or any of einsum, is a parameter or its transpose. A left parameter is queries."""
    for x in operands if function is torch.einsum else operands[1:]:
        base = x._base
        is_transpose = x.ndim == 2 and isinstance(base, Parameter) and x.stride() == base.stride()[::-1]
        if isinstance(x, Parameter) or is_transpose:
            return True
    return False


def _is_similar(x: Tensor, result: Tensor) -> bool:
    """True if the result may hold numbers of x: it is as large or larger, or has x's rows, last two axes or memory."""
    if x.is_nested or result.is_nested or result.numel() == x.numel():  # torch may have no shape of nested tensors
        return True
    has_rows = result.shape[:-1] == x.shape[:-1]  # a sink is one more column of scores
    is_part = has_rows or result.shape[-2:] == x.shape[-2:] or _share_memory(x, result)
    return result.is_floating_point() and (result.numel() > x.numel() or is_part)


def _share_memory(x: Tensor, other: Tensor) -> bool:
    return torch._C._is_alias_of(x, other)  # type: ignore[attr-defined,no-any-return]


def _four_axes(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape) if x.ndim == 4 and not x.is_nested else ()


def _keep_shape(function: Any, shape: tuple[int, ...], x: Tensor, result: Tensor) -> tuple[int, ...]:
    """Return `shape`, the four axes of the scores x, if it still fits the result of the function; else ()."""
    is_kept = shape and function not in MOVES and result.numel() == x.numel() and shape[-2:] == result.shape[-2:]
    return shape if is_kept else ()


def _follow_softmax(call: TorchCall, x: Tensor, mark: ScoresMark, result: Tensor, keeps_scores: bool) -> WeightsMark:
    """Return the mark of a softmax of the scores x."""
    last, inputs, options = x.ndim - 1, call.inputs, call.options
    weights = WeightsMark(_place_of_caller(), result.dtype, _version(result), last)
    if options.get("dim", inputs[1] if len(inputs) > 1 else None) not in (-1, last):
        return weights.refuse("the softmax is not over the last axis")
    if options.get("out") is not None:
        return weights.refuse("the softmax writes into out=, which may be its input")
    if not keeps_scores:
        return weights
    if x.is_nested:
        return weights.refuse(NESTED)
    source = x.clone() if x.is_inference() else x  # tensors of inference mode do not count their changes
    is_exact = torch.promote_types(x.dtype, result.dtype) == result.dtype
    scores = source if is_exact else source.to(result.dtype)  # as a softmax with dtype= does first
    scores = scores.reshape(mark.shape) if mark.shape else scores
    return replace(weights, scores=scores, source=source, source_version=_version(source))


def _follow_weights(call: TorchCall, x: Tensor, mark: WeightsMark, result: Tensor) -> WeightsMark | None:
    """Return the mark of the result of a function of the weights x; None if the result contains no weights."""
    function, is_alias = call.function, _share_memory(x, result)
    if not _is_similar(x, result) or (mark.keys < 0 and not is_alias):
        return None
    mark = replace(_check_versions(x, mark), version=_version(result))
    if x.is_nested or result.is_nested:
        return mark.refuse(NESTED)
    scores = mark.scores
    if mark.keys >= 0:
        if function in SAME_WEIGHTS and result.shape == x.shape and result.is_floating_point():
            return mark
        if function in FILLS and _has_filled(x, scores, result):
            return mark
        if function in RESHAPES and mark.keys == x.ndim - 1 and result.shape[-1:] == x.shape[-1:]:
            if scores is not None and (result.ndim == 4 or result.shape[-2:] != x.shape[-2:]):
                scores = scores.reshape(result.shape)
            return replace(mark, keys=result.ndim - 1, scores=scores)
        if function in MOVES:
            if scores is not None:
                scores = call.repeat(x, scores.reshape(x.shape))
            return replace(mark, keys=call.find_axis(mark.keys, x), scores=scores)
    keys = result.ndim - x.ndim + mark.keys if mark.keys >= 0 else -1
    has_keys = keys >= 0 and (result.shape[keys] > 1 or x.shape[mark.keys] == 1)
    is_mixed = function is functional.linear and result.numel() != x.numel()
    if not is_alias and (is_mixed or not has_keys):
        return None
    name = getattr(function, "__name__", repr(function))
    reason = f"{name} computes with the weights between softmax and product"
    if function in RESHAPES:
        reason = "a change of shape divides or joins the axis of the keys"
    return replace(mark.refuse(reason), keys=keys if has_keys else -1)


def _has_filled(x: Tensor, scores: Tensor | None, result: Tensor) -> bool:
    """True if the result is the weights x with 0 in place of NaN, and all NaN are weights of scores that are all −∞."""
    if scores is None or not torch.equal(result, x.nan_to_num(0.0)):
        return False
    return bool((scores.reshape(x.shape)[x.isnan()] == -torch.inf).all())


def _complete(call: TorchCall, weights: list[tuple[Tensor, WeightsMark]]) -> WeightsMark:
    """Return the mark of the weights of a product, with scores in the order (..., queries, keys).

    If the mark has scores, the tensors of its softmax are forgotten, so that one softmax is recorded once.
    """
    for x, old_mark in weights:
        mark, order = _check_versions(x, old_mark), call.order_axes(old_mark.keys, x)
        if mark.scores is None or order is None:
            continue
        if order != tuple(range(x.ndim)):
            mark = replace(mark, scores=mark.scores.reshape(x.shape).permute(order))
        for marked, mark_of_marked in list(_marks.items()):
            if isinstance(mark_of_marked, WeightsMark) and mark_of_marked.softmax is mark.softmax:
                del _marks[marked]
        return mark
    return _check_versions(*weights[0]).refuse("the product does not show which axes have its queries and keys")


def _refuse_changed(x: Tensor) -> None:
    """Note in the marks of weights that share memory with x, or whose scores do, that x has been changed in place."""
    for other, mark in list(_marks.items()):
        if isinstance(mark, WeightsMark):
            if _share_memory(other, x):
                _marks[other] = mark.refuse(CHANGED.format("weights"))
            elif mark.source is not None and _share_memory(mark.source, x):
                _marks[other] = mark.refuse(CHANGED.format("scores"))


def _check_versions(x: Tensor, mark: WeightsMark) -> WeightsMark:
    """Return the mark of x, with a reason if weights or scores have been changed in place since they were marked."""
    if _version(x) != mark.version:
        return mark.refuse(CHANGED.format("weights"))
    if mark.source is not None and _version(mark.source) != mark.source_version:
        return mark.refuse(CHANGED.format("scores"))
    return mark


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _place_of_caller() -> str:
    """Return "file:line" of the innermost code that is neither torch's nor this library's."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(SKIPPED_FRAMES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# -- where functions move the axes of weights, and over which axis a product sums --------------------------------------


@dataclass(frozen=True, eq=False)
class TorchCall:
    """A call of a function of torch, with its positional and its named arguments."""

    function: Any
    inputs: tuple[Any, ...]
    options: dict[str, Any]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [x for x in tree_leaves((self.inputs, self.options)) if isinstance(x, Tensor)]

    def repeat(self, x: Tensor, other: Tensor) -> Any:
        """Return the result of the call with the tensor `other` in place of x."""
        options = {name: other if option is x else option for name, option in self.options.items()}
        return self.function(*[other if given is x else given for given in self.inputs], **options)

    def find_axis(self, axis: int, x: Tensor) -> int:
        """Return the index of an axis of x in the result, found by a call on a tensor whose lengths all differ."""
        lengths = range(2, x.ndim + 2)
        moved = self.repeat(x, torch.empty(*lengths, device="meta"))
        return list(moved.shape).index(lengths[axis])

    @property
    def operands(self) -> list[Tensor]:
        """The tensors that the function, one of PRODUCTS, multiplies, from left to right."""
        if self.function is torch.einsum:
            return self.tensors
        operands = self.tensors[1:3] if self.function in WITH_SUMMAND else self.tensors[:2]
        return operands[::-1] if self.function is Tensor.__rmatmul__ else operands

    def order_axes(self, keys: int, x: Tensor) -> tuple[int, ...] | None:
        """Return the axes of the weights x in the order (..., queries, keys) in which the product reads them.

        `keys` is the axis of the keys, from 0. The result is None if the product does not sum over this axis alone, or
        if several axes may be the queries.
        """
        if self.function is torch.einsum:
            return _read_equation(keys, self.inputs[0], self.tensors, x)
        operands = self.operands
        if len(operands) < 2 or x.ndim < 2 or self.function is torch.tensordot:
            return None
        left, right = operands
        axes = tuple(range(x.ndim))
        if x is left and keys == axes[-1]:
            return axes
        if x is right and keys == axes[-2]:
            return (*axes[:-2], axes[-1], axes[-2])
        return None


def _read_equation(keys: int, equation: Any, tensors: list[Tensor], x: Tensor) -> tuple[int, ...] | None:
    """Return the result of `TorchCall.order_axes` for an equation of einsum such as "bhij,bhjd->bhid"."""
    if not isinstance(equation, str) or "->" not in equation or len(tensors) != 2:
        return None
    terms, output = equation.replace(" ", "").split("->")
    factors = terms.split(",")
    letters, other_letters = factors if tensors[0] is x else factors[::-1]
    leading = DIGITS[: x.ndim - len(letters.replace("...", ""))]
    letters, other_letters, output = (term.replace("...", leading) for term in (letters, other_letters, output))
    summed = [axis for axis, letter in enumerate(letters) if letter not in output]
    queries = [axis for axis, letter in enumerate(letters) if letter in output and letter not in other_letters]
    if len(set(letters)) != x.ndim or summed != [keys] or letters[keys] not in other_letters or len(queries) != 1:
        return None
    return (*[axis for axis in range(x.ndim) if axis not in (*queries, keys)], *queries, keys)
