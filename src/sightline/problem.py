"""The question: everything attention was asked, checked.

The shape legend, used everywhere:

    B    batch: any number of leading axes, broadcast; `b` counts them together, in C order
    H    query heads            G    key/value heads; H is a multiple of G and head h reads group h // (H / G)
    n    queries                m    keys
    d_k  width of query and key d_v  width of value

    query (..., H, n, d_k)    key (..., G, m, d_k)    value (..., G, m, d_v)    output (..., H, n, d_v)

Without a head axis (n, d_k), and (B, n, d_k) as textbooks have it, work too. Every input error is raised here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np

from . import arrays
from .errors import DeviceError, DtypeError, MaskError, ParameterError, ShapeError
from .formula import checks, hiding, library, trace
from .formula.expression import SYMBOLS, Expression, from_text, walk
from .formula.table import Table
from .kv_cache import opened
from .observe import Statistic

__all__ = ["Problem", "ask", "checked", "examine", "pose", "read_mask", "read_score", "settle"]

Formula = Any  # an Expression, a function of the symbols, or for masks a boolean array


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention problem; make it with `pose`, which checks it.

    `query`, `key` and `value` all carry the broadcast leading axes `lead` and a head axis.
    """

    query: Any
    key: Any
    value: Any
    mask: Expression | None
    score: Expression | None
    sinks: Any | None
    scale: float
    dropout: float
    seed: int
    see: tuple[Statistic, ...]
    headless: bool  # the caller's arrays have no head axis

    @property
    def lead(self) -> tuple[int, ...]:
        return tuple(self.query.shape[:-3])

    @property
    def B(self) -> int:
        return math.prod(self.lead)

    @property
    def H(self) -> int:
        return cast(int, self.query.shape[-3])  # lengths stay as they are: symbols while torch compiles

    @property
    def G(self) -> int:
        return cast(int, self.key.shape[-3])

    @property
    def group(self) -> int:
        """Query heads to a key head."""
        return self.H // self.G if self.G else 1

    @property
    def n(self) -> int:
        return cast(int, self.query.shape[-2])

    @property
    def m(self) -> int:
        return cast(int, self.key.shape[-2])

    @property
    def d_k(self) -> int:
        return cast(int, self.query.shape[-1])

    @property
    def d_v(self) -> int:
        return cast(int, self.value.shape[-1])

    @property
    def extent(self) -> tuple[int, int, int, int]:
        """(B, H, n, m): the ranges of b, h, i and j."""
        return self.B, self.H, self.n, self.m

    @cached_property
    def dtype(self) -> str:
        return arrays.dtype_name(self.query)

    @property
    def accumulator(self) -> str:
        return arrays.accumulator(self.dtype)

    @cached_property
    def framework(self) -> str:
        return arrays.framework(self.query)

    @cached_property
    def device(self) -> str:
        return arrays.device(self.query)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of mask and score, each once."""
        found = {id(t): t for f in (self.mask, self.score) if f is not None for t in f.tables}
        return tuple(found.values())

    def asking(self, *see: Statistic, value: Any = None) -> Problem:
        """The same problem asked for these statistics alone, perhaps of other values; nothing is dropped."""
        return replace(self, see=see, value=self.value if value is None else value, dropout=0.0, seed=0)

    def positions(self, xp: Any, rows: slice, columns: slice) -> tuple[Any, Any, Any, Any]:
        """b, h, i, j of a tile as int64 arrays that broadcast to (*lead, H, rows, columns)."""
        options = {"dtype": xp.int64}
        if "torch" in xp.__name__:
            options["device"] = self.query.device
        b = xp.reshape(xp.arange(self.B, **options), (*self.lead, 1, 1, 1))
        h = xp.reshape(xp.arange(self.H, **options), (self.H, 1, 1))
        i = xp.reshape(xp.arange(rows.start, rows.stop, **options), (-1, 1))
        return b, h, i, xp.arange(columns.start, columns.stop, **options)

    def headed(self, array: Any, trailing: int) -> Any:
        """An array (*lead, H, `trailing` more axes) in the caller's layout: without the head axis if none came."""
        if not self.headless:
            return array
        return array.reshape((*array.shape[: -trailing - 1], *array.shape[array.ndim - trailing :]))

    def with_tables(self, tables: Sequence[Any]) -> Problem:
        """The same problem reading other arrays, in the order of `tables`."""
        new = {id(old): Table(array, old.axes) for old, array in zip(self.tables, tables, strict=True)}

        def swap(formula: Expression | None) -> Expression | None:
            return None if formula is None else formula.with_tables([new[id(t)] for t in formula.tables])

        return replace(self, mask=swap(self.mask), score=swap(self.score))


def pose(query: Any, key: Any, value: Any = None, **options: Any) -> Problem:
    """The problem these arguments of `sightline.attention` pose; every input error is raised by this one call.

    Raises
    ------
    DtypeError
        Arrays that are not float16, bfloat16, float32 or float64, or not all of one dtype.
    DeviceError
        Arrays of different frameworks or on different devices.
    ShapeError
        Shapes that do not fit the legend above.
    MaskError, FormulaError, TableError
        A mask that is no condition; a formula that cannot be meant; a formula that reads outside its table.
    ParameterError
        scale not finite, dropout outside [0, 1], a seed missing, an unknown statistic.
    """
    return examine(ask(query, key, value, **options))


def ask(
    query: Any,
    key: Any,
    value: Any = None,
    *,
    mask: Formula = None,
    score: Formula = None,
    scale: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    see: Sequence[Statistic] = (),
) -> Problem:
    """The first half of `pose`: what shapes, dtypes and parameters decide, no array's values.

    torch.compile follows it line by line, so it keeps to plain Python.
    """
    key, value, beyond = opened(query, key, value)
    named = {"query": query, "key": key, "value": value}
    _check_arrays(named)
    headless = query.ndim < 4
    query, key, value = _shaped(named)
    formula = read_score(score)
    if getattr(scale, "requires_grad", False):  # a learned scale: a table of one entry, whose gradient is its own
        scaled = SYMBOLS["s"] * _one_number("scale", scale)
        formula, scale = scaled if formula is None else formula.with_scores(scaled), 1.0
    problem = Problem(
        query,
        key,
        value,
        mask=_both(read_mask(mask), beyond),
        score=formula,
        sinks=_read_sinks(sinks, query),
        scale=_read_scale(scale, query.shape[-1]),
        dropout=_read_dropout(dropout),
        seed=_read_seed(seed, dropout),
        see=_read_statistics(see),
        headless=headless,
    )
    for statistic in problem.see:
        statistic.check(problem, (*problem.lead, problem.H), problem.n)
    return problem


def examine(problem: Problem) -> Problem:
    """The second half of `pose`: tables next to the arrays, what the score hides put into the mask, reads checked."""
    if problem.tables:
        if problem.device == "meta":
            raise DeviceError("a formula with tables, a query on meta", "arrays that hold numbers", "leave meta first")
        for entry in problem.tables:
            check_device("table", entry.array, problem.query)
        problem = problem.with_tables([arrays.convert(t.array, problem.query) for t in problem.tables])
    mask, score = settle(problem.mask, problem.score, problem.extent)

    def near(condition: Expression) -> Expression:
        """A statistic's condition with its tables next to the arrays, its reads checked."""
        tables = [Table(arrays.convert(t.array, problem.query), t.axes) for t in condition.tables]
        return checked(condition.with_tables(tables), problem.extent)

    return replace(problem, mask=mask, score=score, see=tuple(statistic.mapped(near) for statistic in problem.see))


def checked(condition: Expression, extent: tuple[int, int, int, int]) -> Expression:
    """A statistic's condition, every read of it checked."""
    checks.check_reads(condition, None, extent)
    return condition


def settle(
    mask: Expression | None, score: Expression | None, extent: tuple[int, int, int, int]
) -> tuple[Expression | None, Expression | None]:
    """Mask and score of a problem of these lengths: every read is checked, and what the score hides joins the mask.

    Done once for formulas without tables: such a formula is its text.
    """
    if any(formula is not None and formula.tables for formula in (mask, score)):
        return _settled(mask, score, extent)
    texts = tuple(None if formula is None else formula.text for formula in (mask, score))
    return _kept(*texts, extent)


@lru_cache(4096)
def _kept(
    mask: str | None, score: str | None, extent: tuple[int, int, int, int]
) -> tuple[Expression | None, Expression | None]:
    built = [None if text is None else from_text(text, ()) for text in (mask, score)]
    return _settled(built[0], built[1], extent)


def _settled(
    mask: Expression | None, score: Expression | None, extent: tuple[int, int, int, int]
) -> tuple[Expression | None, Expression | None]:
    checks.check_reads(mask, score, extent)
    if score is not None:
        hidden = hiding.hidden(score, extent)
        if hidden is not None:
            mask = ~hidden if mask is None else mask & ~hidden
    return mask, score


def read_mask(mask: Formula) -> Expression | None:
    """A mask as a formula: a formula, a FlexAttention mask_mod, or a boolean array (which means `dense`)."""
    if mask is None:
        return None
    if not isinstance(mask, Expression | bool) and hasattr(mask, "dtype") and tuple(getattr(mask, "shape", ())):
        if arrays.dtype_name(mask) not in ("bool", "bool_"):
            raise MaskError(
                f"mask is an array of {arrays.dtype_name(mask)}",
                "a condition, True attends: a formula or a boolean array",
                "mask=array != 0 if it holds zeros and ones; score=sightline.bias(array) if it is added to the scores",
            )
        return library.dense(mask)
    if isinstance(mask, str | list | tuple):
        raise MaskError(
            f"mask is a {type(mask).__name__}",
            "a condition, True attends: a formula or a boolean array",
            "mask=sightline.causal(), or numpy.asarray(mask) of True and False",
        )
    expression = trace.formula(mask, "mask", "b h i j")
    if expression.kind != "bool":
        raise MaskError(
            f"mask is {expression}, which is a number",
            "a condition, True attends",
            f"compare it, as in ({expression}) != 0; what is to be added to the scores goes into score=s + ...",
        )
    if any(node is SYMBOLS["s"] for node in walk(expression)):
        raise MaskError(
            f"mask {expression} reads the score s", "conditions on b, h, i and j", "score=where(condition, s, -inf)"
        )
    return expression


def _both(mask: Expression | None, other: Expression | None) -> Expression | None:
    if mask is None or other is None:
        return other if mask is None else mask
    return mask & other


def read_score(score: Formula) -> Expression | None:
    """A score as a formula: a formula or a FlexAttention score_mod."""
    if score is None:
        return None
    expression = trace.formula(score, "score", "s b h i j")
    if expression.kind == "bool":
        raise MaskError(f"score is {expression}, a condition", "a number", "pass conditions as mask=")
    return expression


def _check_arrays(named: dict[str, Any]) -> None:
    for name, array in named.items():
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            raise DtypeError(f"{name} is a {type(array).__name__}", "arrays", f"{name}=numpy.asarray({name})")
        if arrays.dtype_name(array) not in arrays.FLOATS:
            raise DtypeError(
                f"{name} has dtype {arrays.dtype_name(array)}", ", ".join(arrays.FLOATS), f"cast {name} to one of these"
            )
        if not arrays.strided(array):
            raise DtypeError(
                f"{name} is masked or sparse",
                "plain arrays",
                f"hide entries by mask=, and pass {name}.data or to_dense()",
            )
    kinds = {name: arrays.framework(array) for name, array in named.items()}
    if set(kinds.values()) - {"numpy", "torch"} or len(set(kinds.values())) > 1:
        raise DeviceError(_list(kinds), "query, key and value all from NumPy or all from torch", "convert them first")
    for what, error, describe in (
        ("dtype", DtypeError, arrays.dtype_name),
        ("device", DeviceError, arrays.device),
    ):
        found = {name: describe(array) for name, array in named.items()}
        if len(set(found.values())) > 1:
            raise error(f"{what} of {_list(found)}", f"one {what} for all", f"move key and value to query's {what}")


def _shaped(named: dict[str, Any]) -> list[Any]:
    """query, key and value with a head axis and one set of leading axes."""
    shapes = {name: tuple(array.shape) for name, array in named.items()}

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
    q, k, v = (tuple(array.shape) for array in named.values())
    if q[-1] != k[-1]:
        raise refuse(f"query is {q[-1]} wide and key {k[-1]}", "project both to the same d_k")
    if q[-1] == 0:
        raise refuse("d_k is 0", "give query and key at least one component")
    if k[-2] != v[-2]:
        raise refuse(f"{k[-2]} keys and {v[-2]} values", "give one value for every key")
    if k[-3] != v[-3]:
        raise refuse(f"{k[-3]} key heads and {v[-3]} value heads", "give key and value the same heads")
    if (k[-3] == 0 and q[-3] != 0) or (k[-3] and q[-3] % k[-3]):
        raise refuse(f"{q[-3]} query heads do not share {k[-3]} key heads evenly", "make H a multiple of G")
    if q[:-3] == k[:-3] == v[:-3]:
        return list(named.values())
    try:
        lead = _broadcast(q[:-3], k[:-3], v[:-3])
    except ValueError:
        raise refuse("leading axes that do not broadcast", "make them equal, or 1") from None
    return [_broadcast_to(x, (*lead, *x.shape[-3:])) for x in named.values()]


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy's broadcasting of shapes, for lengths that may be torch's symbols. ValueError where they do not fit."""
    joined: list[int] = []
    for axis in range(-max(map(len, shapes)), 0):
        lengths = [shape[axis] for shape in shapes if len(shape) >= -axis]
        wide = [length for length in lengths if length != 1]
        if any(length != wide[0] for length in wide):
            raise ValueError(f"lengths {lengths}")
        joined.append(wide[0] if wide else 1)
    return tuple(joined)


def _broadcast_to(array: Any, shape: tuple[int, ...]) -> Any:
    return array.expand(shape) if hasattr(array, "expand") else np.broadcast_to(array, shape)


def _read_sinks(sinks: Any, query: Any) -> Any:
    if sinks is None:
        return None
    if not hasattr(sinks, "dtype"):
        sinks = np.asarray(sinks)
    if tuple(sinks.shape) != (query.shape[-3],):
        raise ShapeError(
            f"sinks of shape {tuple(sinks.shape)}", f"(H,) = ({query.shape[-3]},)", "one logit per query head"
        )
    if arrays.dtype_name(sinks) not in arrays.FLOATS:
        raise DtypeError(f"sinks of dtype {arrays.dtype_name(sinks)}", ", ".join(arrays.FLOATS), "cast sinks")
    check_device("sinks", sinks, query)
    return arrays.convert(sinks, query)


def _one_number(what: str, array: Any) -> Expression:
    """A learned number as a formula, which keeps its gradient."""
    if math.prod(array.shape) != 1:
        raise ParameterError(
            f"{what} of shape {tuple(array.shape)}", "one number", f"score=s * table({what})[h] for one of each head"
        )
    return Table(array.reshape(1))[0]


def _read_scale(scale: Any, d_k: int) -> float:
    if scale is None:
        return 1 / math.sqrt(d_k)
    try:
        value = float(scale)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise ParameterError(f"scale={scale!r}", "a finite number", "leave scale=None for 1/√d_k")
    return value


def _read_dropout(dropout: Any) -> float:
    try:
        value = float(dropout)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0 <= value <= 1:
        raise ParameterError(f"dropout={dropout!r}", "a probability from 0 to 1", "dropout=0.1 drops a tenth")
    return value


def _read_seed(seed: Any, dropout: float) -> int:
    if seed is None and dropout == 0:
        return 0
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or not 0 <= seed.__index__() < 2**64:
        raise ParameterError(
            f"seed={seed!r} with dropout={dropout}", "a whole number from 0 to 2⁶⁴ − 1", "pass seed=0, say"
        )
    return int(seed)


def _read_statistics(see: Any) -> tuple[Statistic, ...]:
    listed = tuple(see) if isinstance(see, Sequence) and not isinstance(see, str) else (see,)
    for entry in listed:
        if not isinstance(entry, Statistic):
            raise ParameterError(f"see={see!r}", "a list of statistics", "see=[sightline.lse(), sightline.weights()]")
    return tuple([statistic.mapped(read_mask) for statistic in listed])


def check_choice(kernel: Any, threads: Any) -> None:
    """Raise ParameterError for a kernel that is no word, and for threads that are no whole number of at least 1."""
    if kernel is not None and not isinstance(kernel, str):
        raise ParameterError(f"kernel={kernel!r}", "a kernel's name, or None", 'kernel="cpu"')
    if threads is not None:
        check_threads("threads", threads)


def check_threads(name: str, number: Any) -> None:
    """Raise ParameterError for a number of threads that is no whole number of at least 1."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**31:
        raise ParameterError(f"{name}={number!r}", "a whole number of at least 1", f"{name}=1")


def check_device(what: str, array: Any, query: Any) -> None:
    """Raise DeviceError where the array is the query's framework's and lies elsewhere; other frameworks' are moved."""
    if arrays.framework(array) == arrays.framework(query) and arrays.device(array) != arrays.device(query):
        raise DeviceError(
            f"{what} on {arrays.device(array)}, query on {arrays.device(query)}", "one device", f"move the {what}"
        )


def _list(found: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in found.items())
