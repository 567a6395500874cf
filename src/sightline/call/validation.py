"""Checks and conversions of the arguments of attention, one function for each argument.

`sightline.call.problem` explains the letters of the shapes.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from types import FunctionType
from typing import Any, Literal

import numpy as np

from ..arrays import operations as arrays
from ..arrays.row_formats import RowFormat
from ..arrays.unreadable import check_device, check_kind, is_array
from ..errors import DeviceError, DtypeError, FormulaError, MaskError, ParameterError, ShapeError
from ..formula import from_function, library
from ..formula.derivative import ONE, derivative
from ..formula.expression import SYMBOLS, Expression, conjuncts, walk
from ..formula.printing import format_as_code
from ..formula.tables import learned_number
from ..formula.torch_masks import causal_bias_formula, is_block_mask, is_causal_bias
from ..statistics import STATISTICS, Statistic

Formula = Any  # an Expression, a function of the symbols, or for masks a boolean array
AxisOrder = Literal["BHND", "BNHD"]

MAX_SCALE = {name: float(np.finfo(name).max) for name in ("float32", "float64")}  # by the accumulator's dtype


def read_mask(mask: Formula, lengths: tuple[int, int] | None = None) -> Expression | None:
    """Return the mask as an expression; None if `mask` is None.

    A mask is given as a formula, a FlexAttention mask_mod, a CausalBias of torch or a boolean array, which
    `library.dense` converts. `lengths` is (n, m), and None if the sequences of the call have several lengths.
    """
    if mask is None:
        return None
    if is_causal_bias(mask):
        return causal_bias_formula(mask, lengths)
    if mask is False:
        raise MaskError("mask=False, which hides every pair", "a condition, True where a query attends", "mask=None")
    if is_array(mask):
        check_kind("mask", mask)
    if not isinstance(mask, Expression | bool) and hasattr(mask, "dtype") and tuple(getattr(mask, "shape", ())):
        if arrays.dtype_name(mask) not in ("bool", "bool_"):
            raise MaskError(
                f"mask is an array of {arrays.dtype_name(mask)}",
                "a condition, True where a query attends: a formula or a boolean array",
                "mask=array != 0 if it holds zeros and ones; score=sightline.bias(array) if it is added to the scores",
            )
        return library.dense(mask)
    if isinstance(mask, str | list | tuple):
        raise MaskError(
            f"mask is a {type(mask).__name__}",
            "a condition, True where a query attends: a formula or a boolean array",
            "mask=sightline.causal(), or numpy.asarray(mask) of True and False",
        )
    expression = from_function.to_formula(mask, "mask", "b h i j")
    if expression.kind != "bool":
        raise MaskError(
            f"mask is {expression}, which is a number",
            "a condition, True where a query attends",
            f"compare the number, as in ({expression}) != 0; to add a number to the scores, write score=s + ...",
        )
    _refuse_weights("mask", expression)
    if any(node is SYMBOLS["s"] for node in walk(expression)):
        raise MaskError(
            f"mask {expression} reads the score s", "conditions on b, h, i and j", "score=where(condition, s, -inf)"
        )
    return expression


def _refuse_weights(name: str, formula: Expression) -> None:
    if any(node is SYMBOLS["p"] for node in walk(formula)):
        cure = "request a statistic of p, see=[sightline.sum(p * ..., over=j)]"
        raise MaskError(f"{name} {formula} reads the weight p", "p in sum, max and min", cure)


def read_score(score: Formula, warns: bool = True) -> Expression | None:
    """Return the score, a formula or a FlexAttention score_mod, as an expression; None if `score` is None."""
    if score is None:
        return None
    if is_array(score):
        check_kind("score", score)
    if not isinstance(score, Expression) and tuple(getattr(score, "shape", ())) and not is_block_mask(score):
        raise FormulaError(
            f"score is a {type(score).__name__} of shape {tuple(score.shape)}",
            "a formula or a function (s, b, h, i, j)",
            "score=sightline.bias(array) adds it to the scores; score=s + table(array)[h, i - j] reads it by index",
        )
    expression = from_function.to_formula(score, "score", "s b h i j")
    if expression.kind == "bool":
        raise MaskError(f"score is {expression}, a condition", "a number", "pass conditions as mask=")
    _refuse_weights("score", expression)
    if warns:
        _warn_of_products(expression)
    return expression


def _warn_of_products(score: Expression) -> None:
    """Warn of a score that leaves out the products of query and key, or adds them twice."""
    if "s" not in score.free_symbols:
        given, cure = f"score {score} does not read s, so query and key have no effect", f"score=s + ({score})"
    elif sum(map(_adds_product, conjuncts(score, "add"))) > 1:
        given, cure = f"score {score} adds s twice", "one.with_scores(two) puts the score two in place of s in one"
    else:
        return
    warnings.warn(f"{given}\n  cure: {cure}", UserWarning, stacklevel=2)


def _adds_product(term: Expression) -> bool:
    """True if a term of a score is s plus a bias, or s with a soft cap: c · tanh(s / c)."""
    has_cap = term.free_symbols == {"s"} and any(getattr(node, "operator", "") == "tanh" for node in walk(term))
    return has_cap or derivative(term) is ONE


def to_heads_first(layout: Any, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Return query, key and value with their axes in the order (..., heads, positions, width), as views.

    A `KVCache` in place of key and value has this order already. Raise ParameterError for another layout than "BHND"
    and "BNHD", and ShapeError for an array of the layout "BNHD" without a head axis.
    """
    if layout == "BHND":
        return query, key, value
    if layout != "BNHD":
        raise ParameterError(
            f"layout={layout!r}", '"BHND" for (B, H, n, d), or "BNHD" for (B, n, H, d)', 'layout="BNHD"'
        )
    named = {"query": query} if value is None else {"query": query, "key": key, "value": value}
    shapes = {name: _read_shape(name, array) for name, array in named.items()}
    if any(len(shape) < 4 for shape in shapes.values()):
        raise ShapeError(
            f'layout="BNHD" with {_format_items(shapes)}',
            "arrays (B, n, H, d), with a batch axis and a head axis",
            "add the missing axis, as in query[None], or leave layout out for arrays without heads",
        )
    swapped = {name: arrays.swap_heads(array) for name, array in named.items()}
    return swapped["query"], swapped.get("key", key), swapped.get("value", value)


def _read_shape(name: str, array: Any) -> tuple[int, ...]:
    """Return the shape of an array; () for other objects. Raise DtypeError for an array of a kind without shape."""
    try:
        return tuple(getattr(array, "shape", ()))
    except RuntimeError:
        check_kind(name, array)
        raise


def check_arrays(named: dict[str, Any], are_quantized: bool = False) -> None:
    """Raise an error unless query, key and value are plain float arrays of one framework, one dtype and one device.

    If `are_quantized`, key and value are bytes of a quantised cache, and the cache has checked the query's dtype.
    """
    for name, array in named.items():
        check_kind(name, array)
        if name == "query" or not are_quantized:
            arrays.check_float_dtype(name, array)
    from array_api_compat import is_array_api_obj

    kinds, query = {name: arrays.framework(array).name for name, array in named.items()}, named["query"]
    if len(set(kinds.values())) > 1 or not (arrays.framework(query).is_native or is_array_api_obj(query)):
        raise DeviceError(
            _format_items(kinds),
            "query, key and value all from NumPy, torch or JAX, or from one library with the array API",
            "convert the arrays to one library first",
        )
    for what, error, describe in (("dtype", DtypeError, arrays.dtype_name), ("device", DeviceError, arrays.device)):
        values = {name: describe(array) for name, array in named.items()}
        if len(set(values.values())) > 1 and not (are_quantized and what == "dtype"):
            verb = "cast" if what == "dtype" else "move"
            raise error(
                f"{what} of {_format_items(values)}", f"one {what} for all", f"{verb} key and value to query's {what}"
            )


def broadcast_inputs(named: dict[str, Any], row_formats: tuple[RowFormat, RowFormat] | None = None) -> list[Any]:
    """Check the shapes, and return query, key and value with a head axis and with equal leading axes."""
    shapes = {name: tuple(array.shape) for name, array in named.items()}
    for name, row_format in zip(("key", "value"), row_formats or (), strict=False):
        shapes[name] = *shapes[name][:-1], row_format.width

    def refuse(what: str, cure: str) -> ShapeError:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        legend = "query (..., H, n, d_k), key (..., G, m, d_k), value (..., G, m, d_v), or all without heads"
        return ShapeError(f"{what}: {given}", legend, cure)

    axes = {len(shape) for shape in shapes.values()}
    if min(axes) < 2:
        raise refuse("fewer than two axes", "give each array at least (positions, width)")
    if len(axes) > 1 and min(axes) < 4:
        raise refuse("different numbers of axes", "give all three a head axis and a batch axis")
    if max(axes) < 4:
        named = {name: array[..., None, :, :] for name, array in named.items()}
    q, k, v = ((*array.shape[:-1], shapes[name][-1]) for name, array in named.items())
    if q[-1] != k[-1]:
        raise refuse(f"query is {q[-1]} wide and key {k[-1]}", "project both to the same d_k")
    if q[-1] == 0:
        raise refuse("d_k is 0", "give query and key at least one component")
    if k[-2] != v[-2]:
        raise refuse(f"{k[-2]} keys and {v[-2]} values", "give one value for every key")
    if k[-3] != v[-3]:
        raise refuse(f"{k[-3]} key heads and {v[-3]} value heads", "give key and value the same heads")
    if (k[-3] == 0 and q[-3] != 0) or (k[-3] and q[-3] % k[-3]):
        cure = "make H a multiple of G; if positions come before heads, swap the axes: query.swapaxes(-3, -2)"
        raise refuse(f"{q[-3]} query heads cannot share {k[-3]} key heads evenly", cure)
    if q[:-3] == k[:-3] == v[:-3]:
        return list(named.values())
    try:
        batch_shape = _broadcast_shapes(q[:-3], k[:-3], v[:-3])
    except ValueError:
        raise refuse("leading axes that do not broadcast", "make them equal, or 1") from None
    return [arrays.broadcast_to(x, (*batch_shape, *x.shape[-3:])) for x in named.values()]


def _broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which the shapes broadcast by NumPy's rules. Raise ValueError if they do not broadcast.

    Lengths may be symbols of torch.compile.
    """
    joined: list[int] = []
    for axis in range(-max(map(len, shapes)), 0):
        lengths = [shape[axis] for shape in shapes if len(shape) >= -axis]
        wide = [length for length in lengths if not arrays.is_one(length)]
        if any(length != wide[0] for length in wide):
            raise ValueError(f"lengths {lengths}")
        joined.append(wide[0] if wide else 1)
    return tuple(joined)


def read_sinks(sinks: Any, query: Any) -> Any:
    if sinks is None:
        return None
    if not is_array(sinks):
        sinks = np.asarray(sinks)
    check_kind("sinks", sinks)
    if tuple(sinks.shape) != (query.shape[-3],):
        raise ShapeError(
            f"sinks of shape {tuple(sinks.shape)}", f"(H,) = ({query.shape[-3]},)", "one logit per query head"
        )
    arrays.check_float_dtype("sinks", sinks)
    check_device("sinks", sinks, query)
    if isinstance(sinks, np.ndarray):
        sinks = sinks.copy()  # a backward pass reads them again, when the caller may have changed the array
    return arrays.convert(sinks, query)


def fold_scale(score: Any, scale: Any, warns: bool = True) -> tuple[Expression, float]:
    """Return a score that includes a learned scale, and 1.0 as the scale.

    A learned scale is a tensor that requires a gradient. It becomes a table of one entry. `score` is the argument of
    `attention`, or an array of biases.
    """
    if math.prod(scale.shape) != 1:
        raise ParameterError(
            f"scale of shape {tuple(scale.shape)}", "one number", "score=s * table(scale)[h] for one number per head"
        )
    if not _is_real(arrays.dtype_name(scale)):
        raise ParameterError(f"scale of dtype {arrays.dtype_name(scale)}", "one real number", "cast scale")
    formula = library.bias(score) if hasattr(score, "dtype") else read_score(score, warns)
    scaled = SYMBOLS["s"] * learned_number(scale)
    return scaled if formula is None else formula.with_scores(scaled), 1.0


def to_float(number: Any) -> float:
    """Return the number as a Python float; NaN if `number` is not a real number or exceeds the range of floats.

    Text, True and False, which Python's `float` accepts, also give NaN.
    """
    if isinstance(number, bool | str | bytes | bytearray):
        return math.nan
    # torch.compile cannot trace `hasattr` of a number that is a symbol
    if not isinstance(number, int | float) and hasattr(number, "dtype") and not _is_real(arrays.dtype_name(number)):
        return math.nan
    try:
        return float(number)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_real(dtype_name: str) -> bool:
    return dtype_name.startswith(("int", "uint", "float", "bfloat"))


def read_scale(scale: Any, query: Any) -> float:
    if scale is None:
        return 1 / math.sqrt(query.shape[-1])
    value = to_float(scale)
    largest = MAX_SCALE[arrays.accumulator(arrays.dtype_name(query))]
    if not abs(value) <= largest:
        raise ParameterError(
            f"scale={scale!r}", f"a finite number, at most ±{largest:.2g}", "leave scale=None for 1/√d_k"
        )
    return value


def read_dropout(dropout: Any) -> float:
    value = to_float(dropout)
    if not 0 <= value <= 1:
        raise ParameterError(f"dropout={dropout!r}", "a probability from 0 to 1", "dropout=0.1 drops a tenth")
    return value


def read_seed(seed: Any, dropout: float) -> int:
    if seed is None and dropout == 0:
        return 0
    value = _to_whole_number(seed)
    if not 0 <= value < 2**64:
        raise ParameterError(
            f"seed={seed!r} with dropout={dropout}", "a whole number from 0 to 2⁶⁴ − 1", "seed=0, for example"
        )
    return value


def _to_whole_number(number: Any) -> int:
    """Return the number as a Python int; −1 if `number` is not a whole number."""
    if isinstance(number, int):
        return -1 if isinstance(number, bool) else int(number)
    if hasattr(number, "dtype") and not arrays.dtype_name(number).startswith(("int", "uint")):
        return -1
    try:
        return operator.index(number)
    except (TypeError, RuntimeError):  # several numbers, or a tensor without memory
        return -1


def read_statistics(see: Any, lengths: tuple[int, int] | None = None) -> tuple[Statistic, ...]:
    """Return the statistics of `see`, with their masks as expressions. `lengths` is as in `read_mask`."""
    see = () if see is None else see
    listed = tuple(see) if isinstance(see, Sequence) and not isinstance(see, str) else (see,)
    for entry in listed:
        if not isinstance(entry, Statistic):
            allowed = "a list of statistics, or a dict from names to statistics"
            raise ParameterError(f"{entry!r} in see={see!r}", allowed, suggest_statistic(entry))
    return tuple([x.map_formulas(lambda f: f if isinstance(f, Expression) else read_mask(f, lengths)) for x in listed])


def suggest_statistic(entry: Any) -> str:
    """Return the cure for an entry of `see` that is not a statistic."""
    is_function = isinstance(entry, FunctionType) and entry.__module__.startswith("sightline.")
    name = entry.__name__ if is_function else entry
    if is_function or (isinstance(name, str) and name in STATISTICS):
        return f"call the function: see=[sightline.{name}(...)]"
    if isinstance(entry, Expression):
        return f"see=[sightline.sum({format_as_code(entry)}, over=j)]"
    return "see=[sightline.lse(), sightline.weights()]"


def split_names(see: Any) -> tuple[tuple[str, ...] | None, Any]:
    """Return (names, statistics) for a dict of statistics, else (None, see). One statistic becomes a list of one."""
    if isinstance(see, dict):
        return tuple(see), list(see.values())
    return None, [see] if isinstance(see, Statistic) else see


def check_choice(kernel: Any, threads: Any) -> None:
    """Raise ParameterError unless `kernel` is text or None, and `threads` is None or a number of threads."""
    if kernel is not None and not isinstance(kernel, str):
        raise ParameterError(f"kernel={kernel!r}", "a kernel's name, or None", 'kernel="cpu"')
    if threads is not None:
        check_threads("threads", threads)


def check_threads(name: str, number: Any) -> None:
    """Raise ParameterError unless the number of threads is a whole number from 1 to 2³¹ − 1."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**31:
        raise ParameterError(f"{name}={number!r}", "a whole number from 1 to 2³¹ − 1", f"{name}=1")


def _format_items(found: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in found.items())
