"""A problem as an operator can take it: tensors and plain values. Formulas travel as text, what they read as tensors.

`Question.of` is plain Python that torch.compile follows, so formulas may be built inside a compiled function.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..arrays import convert
from ..formula.expression import Expression, Lookup, Table, from_text, walk
from ..observe import STATISTICS
from ..problem import Problem, settle

__all__ = ["SCHEMA", "Question", "spelled"]

SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor[] tables, Tensor? sinks, Tensor? seed, "
    "str mask, str score, str spans, float scale, float dropout, str see, str? kernel, int? threads"
)
Extent = tuple[int, int, int, int]
Pair = tuple[Expression | None, Expression | None]


class Question(NamedTuple):
    """The arguments of the operator, in the order of `SCHEMA`."""

    query: Tensor  # with all leading axes and a head axis, as Problem has it
    key: Tensor
    value: Tensor
    tables: list[Tensor]  # the mask's, then the score's
    sinks: Tensor | None
    seed: Tensor | None  # int64: torch's generator draws it inside a compiled function too
    mask: str  # Expression.text, "" for none
    score: str
    spans: str  # the axes each table promises to span, "hij,.j,|-," : one comma a table, | before the score's
    scale: float
    dropout: float
    see: str  # names of statistics
    kernel: str | None
    threads: int | None

    @classmethod
    def of(cls, problem: Problem, seed: Tensor | None, kernel: str | None, threads: int | None) -> Question:
        """The question a problem asks. What `problem.ask` checks is checked; tables are not read."""
        mask, its_tables = spelled(problem.mask)
        score, more_tables = spelled(problem.score)
        return cls(
            problem.query,
            problem.key,
            problem.value,
            [_tensor(table, problem.query) for table in [*its_tables, *more_tables]],
            problem.sinks,
            seed,
            mask,
            score,
            _spans(its_tables) + "|" + _spans(more_tables),
            problem.scale,
            problem.dropout,
            " ".join([statistic.name for statistic in problem.see]),
            kernel,
            threads,
        )

    def outline(self) -> Problem:
        """The problem without its formulas: enough for shapes."""
        return Problem(
            self.query,
            self.key,
            self.value,
            mask=None,
            score=None,
            sinks=self.sinks,
            scale=self.scale,
            dropout=self.dropout,
            seed=0 if self.seed is None else int(self.seed) % 2**64,
            see=tuple(STATISTICS[name]() for name in self.see.split()),
            headless=False,
        )

    def problem(self) -> Problem:
        """The problem, its formulas settled: without tables once for given lengths, else by reading the tables."""
        words = self.mask, self.score, self.spans
        outline = self.outline()
        mask, score = _settled(words, self.tables, outline.extent) if self.tables else _kept(words, outline.extent)
        return replace(outline, mask=mask, score=score)

    @property
    def gaining(self) -> list[int]:
        """The tables that may have gradients: floats read by the score."""
        first = self.spans.partition("|")[0].count(",")
        return [k for k, table in enumerate(self.tables) if k >= first and table.is_floating_point()]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that may have gradients."""
        tables = [self.tables[k] for k in self.gaining]
        return [self.query, self.key, self.value, *tables, *([] if self.sinks is None else [self.sinks])]

    def arranged(self, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Gradients of `inputs` in the places of the arguments, None for the others."""
        query, key, value, *others = gradients
        tables: list[Tensor | None] = [None] * len(self.tables)
        for k in self.gaining:
            tables[k] = others.pop(0)
        sinks = others[0] if others else None
        return (query, key, value, tables, sinks) + (None,) * (len(self) - 5)

    def reading(self, inputs: Sequence[Tensor]) -> Question:
        """The same question of other tensors in the places of `inputs`."""
        query, key, value, tables, sinks, *_ = self.arranged(inputs)
        ...
