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
from .formula import implied_mask, validate
from .formula.expression import SYMBOLS, Expression, from_text
from .formula.tables import Table
from .formula.tensor_cache import Memory, near
from .kv_cache import opened
from .statistics import Statistic
from .validation import (
    Formula,
    check_arrays,
    check_device,
    one_number,
    read_dropout,
    read_mask,
    read_scale,
    read_score,
    read_seed,
    read_sinks,
    read_statistics,
    shaped,
)

__all__ = ["Problem", "ask", "checked", "examine", "pose", "read_mask", "read_score", "settle"]


_SETTLED = Memory(4096)


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
        scale beyond the floats scores are computed in, dropout outside [0, 1], a seed missing, an unknown statistic.
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
    key, value, beyond = opened(query, key, value, mask)
    named = {"query": query, "key": key, "value": value}
    check_arrays(named)
    headless = query.ndim < 4
    query, key, value = shaped(named)
    formula = read_score(score)
    if getattr(scale, "requires_grad", False):  # a learned scale: a table of one entry, whose gradient is its own
        scaled = SYMBOLS["s"] * one_number("scale", scale)
        formula, scale = scaled if formula is None else formula.with_scores(scaled), 1.0
    problem = Problem(
        query,
        key,
        value,
        mask=_both(read_mask(mask), beyond),
        score=formula,
        sinks=read_sinks(sinks, query),
        scale=read_scale(scale, query),
        dropout=read_dropout(dropout),
        seed=read_seed(seed, dropout),
        see=read_statistics(see),
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
        problem = problem.with_tables([near(t.array, problem.query) for t in problem.tables])
    mask, score = settle(problem.mask, problem.score, problem.extent)

    def placed(condition: Expression) -> Expression:
        """A statistic's condition with its tables next to the arrays, its reads checked."""
        tables = [Table(near(t.array, problem.query), t.axes) for t in condition.tables]
        return checked(condition.with_tables(tables), problem.extent)

    return replace(problem, mask=mask, score=score, see=tuple(statistic.mapped(placed) for statistic in problem.see))


def checked(condition: Expression, extent: tuple[int, int, int, int]) -> Expression:
    """A statistic's condition, every read of it checked."""
    validate.check_reads(condition, None, extent)
    return condition


def settle(
    mask: Expression | None, score: Expression | None, extent: tuple[int, int, int, int]
) -> tuple[Expression | None, Expression | None]:
    """Mask and score of a problem of these lengths: every read is checked, and what the score hides joins the mask.

    Done once for formulas without tables: such a formula is its text; and for tables on a device, once for what they
    hold: see `formula.memory`.
    """
    if any(formula is not None and formula.tables for formula in (mask, score)):
        return _settled_with_tables(mask, score, extent)
    texts = tuple(None if formula is None else formula.text for formula in (mask, score))
    return _kept(*texts, extent)


@lru_cache(4096)
def _kept(
    mask: str | None, score: str | None, extent: tuple[int, int, int, int]
) -> tuple[Expression | None, Expression | None]:
    built = [None if text is None else from_text(text, ()) for text in (mask, score)]
    return _settled(built[0], built[1], extent)


def _settled_with_tables(
    mask: Expression | None, score: Expression | None, extent: tuple[int, int, int, int]
) -> tuple[Expression | None, Expression | None]:
    every = [table for formula in (mask, score) if formula is not None for table in formula.tables]
    slot = {id(table): k for k, table in enumerate(every)}

    def spelled() -> tuple[str, list[int]] | None:
        """The mask that joins what the score hides, as its text and which of the tables it reads."""
        joined = _settled(mask, score, extent)[0]
        return None if joined is None else (joined.text, [slot[id(table)] for table in joined.tables])

    texts = tuple(None if formula is None else formula.text for formula in (mask, score))
    same = tuple([slot[id(table)] for table in every])
    question = (texts, same, tuple([table.axes for table in every]), extent)
    found = _SETTLED.get(question, [table.array for table in every], spelled)
    return None if found is None else from_text(found[0], [every[k] for k in found[1]]), score


def _settled(
    mask: Expression | None, score: Expression | None, extent: tuple[int, int, int, int]
) -> tuple[Expression | None, Expression | None]:
    validate.check_reads(mask, score, extent)
    if score is not None:
        hidden = implied_mask.hidden(score, extent)
        if hidden is not None:
            mask = ~hidden if mask is None else mask & ~hidden
    return mask, score


def _both(mask: Expression | None, other: Expression | None) -> Expression | None:
    if mask is None or other is None:
        return other if mask is None else mask
    return mask & other
