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

from . import arrays
from .errors import DeviceError
from .formula import implied_mask
from .formula.expression import SYMBOLS, Expression, parse_text
from .formula.tables import Table
from .formula.tensor_cache import TensorCache, to_device
from .formula.validate import check_formulas
from .kv_cache import unpack_cache
from .statistics import Statistic
from .validation import (
    Formula,
    broadcast_inputs,
    check_arrays,
    check_device,
    read_dropout,
    read_mask,
    read_scale,
    read_score,
    read_seed,
    read_sinks,
    read_statistics,
    scalar_formula,
)

__all__ = ["Problem", "check_condition", "make_problem", "normalize", "parse", "read_mask", "read_score", "validate"]


_NORMALIZED = TensorCache(4096)


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention problem; make it with `make_problem`, which checks it.

    `query`, `key` and `value` all carry the broadcast leading axes `batch_shape` and a head axis.
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
    heads_squeezed: bool  # the caller's arrays have no head axis

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.query.shape[:-3])

    @property
    def B(self) -> int:
        return math.prod(self.batch_shape)

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

    def with_statistics(self, *see: Statistic, value: Any = None) -> Problem:
        """The same problem asked for these statistics alone, perhaps of other values; nothing is dropped."""
        return replace(self, see=see, value=self.value if value is None else value, dropout=0.0, seed=0)

    def positions(self, xp: Any, rows: slice, columns: slice) -> tuple[Any, Any, Any, Any]:
        """b, h, i, j of a tile as int64 arrays that broadcast to (*lead, H, rows, columns)."""
        options = {"dtype": xp.int64}
        if "torch" in xp.__name__:
            options["device"] = self.query.device
        b = xp.reshape(xp.arange(self.B, **options), (*self.batch_shape, 1, 1, 1))
        h = xp.reshape(xp.arange(self.H, **options), (self.H, 1, 1))
        i = xp.reshape(xp.arange(rows.start, rows.stop, **options), (-1, 1))
        return b, h, i, xp.arange(columns.start, columns.stop, **options)

    def squeeze_heads(self, array: Any, trailing: int) -> Any:
        """An array (*lead, H, `trailing` more axes) in the caller's layout: without the head axis if none came."""
        if not self.heads_squeezed:
            return array
        return array.reshape((*array.shape[: -trailing - 1], *array.shape[array.ndim - trailing :]))

    def with_tables(self, tables: Sequence[Any]) -> Problem:
        """The same problem reading other arrays, in the order of `tables`."""
        new = {id(old): Table(array, old.axes) for old, array in zip(self.tables, tables, strict=True)}

        def swap(formula: Expression | None) -> Expression | None:
            return None if formula is None else formula.with_tables([new[id(t)] for t in formula.tables])

        return replace(self, mask=swap(self.mask), score=swap(self.score))


def make_problem(query: Any, key: Any, value: Any = None, **options: Any) -> Problem:
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
        scale beyond the floats scores are computed in, dropout outside [0, 1], a seed missing, an unknown statistic.
    """
    return validate(parse(query, key, value, **options))


def parse(
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
    """The first half of `make_problem`: what shapes, dtypes and parameters decide, no array's values.

    torch.compile follows it line by line, so it keeps to plain Python.
    """
    key, value, length_mask = unpack_cache(query, key, value, mask)
    named = {"query": query, "key": key, "value": value}
    check_arrays(named)
    heads_squeezed = query.ndim < 4
    query, key, value = broadcast_inputs(named)
    formula = read_score(score)
    if getattr(scale, "requires_grad", False):  # a learned scale: a table of one entry, whose gradient is its own
        scaled = SYMBOLS["s"] * scalar_formula("scale", scale)
        formula, scale = scaled if formula is None else formula.with_scores(scaled), 1.0
    problem = Problem(
        query,
        key,
        value,
        mask=_conjoin(read_mask(mask), length_mask),
        score=formula,
        sinks=read_sinks(sinks, query),
        scale=read_scale(scale, query),
        dropout=read_dropout(dropout),
        seed=read_seed(seed, dropout),
        see=read_statistics(see),
        heads_squeezed=heads_squeezed,
    )
    for statistic in problem.see:
        statistic.check(problem, (*problem.batch_shape, problem.H), problem.n)
    return problem


def validate(problem: Problem) -> Problem:
    """The second half of `make_problem`: tables next to the arrays, what the score hides in the mask, reads checked."""
    if problem.tables:
        if problem.device == "meta":
            raise DeviceError("a formula with tables, a query on meta", "arrays that hold numbers", "leave meta first")
        for entry in problem.tables:
            check_device("table", entry.array, problem.query)
        problem = problem.with_tables([to_device(t.array, problem.query) for t in problem.tables])
    mask, score = normalize(problem.mask, problem.score, problem.extent)

    def place_tables(condition: Expression) -> Expression:
        """A statistic's condition with its tables next to the arrays, its reads checked."""
        tables = [Table(to_device(t.array, problem.query), t.axes) for t in condition.tables]
        return check_condition(condition.with_tables(tables), problem.extent)

    return replace(
        problem, mask=mask, score=score, see=tuple(statistic.map_formulas(place_tables) for statistic in problem.see)
    )


def check_condition(condition: Expression, extent: tuple[int, int, int, int]) -> Expression:
    """A statistic's condition, every read of it checked."""
    check_formulas(condition, None, extent)
    return condition


def normalize(
    mask: Expression | None, score: Expression | None, extent: tuple[int, int, int, int]
) -> tuple[Expression | None, Expression | None]:
    """Mask and score of a problem of these lengths: every read is checked, and what the score hides joins the mask.

    Done once for formulas without tables: such a formula is its text; and for tables on a device, once for what they
    hold: see `formula.memory`.
    """
    if any(formula is not None and formula.tables for formula in (mask, score)):
        return _normalize_with_tables(mask, score, extent)
    texts = tuple(None if formula is None else formula.text for formula in (mask, score))
    return _normalize_texts(*texts, extent)


@lru_cache(4096)
def _normalize_texts(
    mask: str | None, score: str | None, extent: tuple[int, int, int, int]
) -> tuple[Expression | None, Expression | None]:
    built = [None if text is None else parse_text(text, ()) for text in (mask, score)]
    return _normalize_formulas(built[0], built[1], extent)


def _normalize_with_tables(
    mask: Expression | None, score: Expression | None, extent: tuple[int, int, int, int]
) -> tuple[Expression | None, Expression | None]:
    every = [table for formula in (mask, score) if formula is not None for table in formula.tables]
    slot = {id(table): k for k, table in enumerate(every)}

    def join_masks() -> tuple[str, list[int]] | None:
        """The mask that joins what the score hides, as its text and which of the tables it reads."""
        joined = _normalize_formulas(mask, score, extent)[0]
        return None if joined is None else (joined.text, [slot[id(table)] for table in joined.tables])

    texts = tuple(None if formula is None else formula.text for formula in (mask, score))
    same = tuple([slot[id(table)] for table in every])
    cache_key = (texts, same, tuple([table.axes for table in every]), extent)
    found = _NORMALIZED.get(cache_key, [table.array for table in every], join_masks)
    return None if found is None else parse_text(found[0], [every[k] for k in found[1]]), score


def _normalize_formulas(
    mask: Expression | None, score: Expression | None, extent: tuple[int, int, int, int]
) -> tuple[Expression | None, Expression | None]:
    check_formulas(mask, score, extent)
    if score is not None:
        hidden = implied_mask.hidden_condition(score, extent)
        if hidden is not None:
            mask = ~hidden if mask is None else mask & ~hidden
    return mask, score


def _conjoin(mask: Expression | None, other: Expression | None) -> Expression | None:
    if mask is None or other is None:
        return other if mask is None else mask
    return mask & other
