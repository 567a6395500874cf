"""A problem as an operator can take it: tensors and plain values. Formulas travel as text, what they read as tensors.

`Question.of` is plain Python that torch.compile follows, so formulas may be built inside a compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formula.expression import Expression, Lookup, from_text, walk
from ..formula.tables import Table
from ..formula.tensor_cache import near
from ..problem import Problem, checked, settle
from ..statistics import Statistic, from_words
from ..validation import check_device

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
    tables: list[Tensor]  # the mask's, then the score's, then the statistics'
    sinks: Tensor | None
    seed: Tensor | None  # int64: torch's generator draws it inside a compiled function too
    mask: str  # Expression.text, "" for none
    score: str
    spans: str  # the axes each table promises to span, "hij,.j,|-,|" : one comma a table, | between the three
    scale: float
    dropout: float
    see: str  # Statistic.words, | between them, a line each
    kernel: str | None
    threads: int | None

    @classmethod
    def of(cls, problem: Problem, seed: Tensor | None, kernel: str | None, threads: int | None) -> Question:
        """The question a problem asks. What `problem.ask` checks is checked; tables are not read."""
        mask, its_tables = spelled(problem.mask)
        score, more_tables = spelled(problem.score)
        seen_tables: list[Table] = []
        lines = ["|".join(statistic.words(_spelling(seen_tables))) for statistic in problem.see]
        return cls(
            problem.query,
            problem.key,
            problem.value,
            [_tensor(table, problem.query) for table in [*its_tables, *more_tables, *seen_tables]],
            problem.sinks,
            seed,
            mask,
            score,
            _spans(its_tables) + "|" + _spans(more_tables) + "|" + _spans(seen_tables),
            problem.scale,
            problem.dropout,
            "\n".join(lines),
            kernel,
            threads,
        )

    def problem(self) -> Problem:
        """The problem. Formulas without tables are settled once for the same lengths, the others every time."""
        extent = self.outline().extent
        words = self.mask, self.score, self.spans
        mask, score = _settled(words, self.tables, extent) if self.tables else _kept(words, extent)
        problem = self.outline(mask, score, 0 if self.seed is None else int(self.seed) % 2**64)
        if self.seen_tables:
            _check(problem.see, extent)
        else:
            _check_kept(self.see, extent)
        return problem

    def outline(self, mask: Expression | None = None, score: Expression | None = None, seed: int = 0) -> Problem:
        """The problem with these for what must be read from tensors: without them enough for shapes."""
        return Problem(
            self.query,
            self.key,
            self.value,
            mask=mask,
            score=score,
            sinks=self.sinks,
            scale=self.scale,
            dropout=self.dropout,
            seed=seed,
            see=_read(self.see, self.seen_tables) if self.seen_tables else _read_kept(self.see),
            headless=False,
        )

    @property
    def seen_tables(self) -> list[Table]:
        """The tables of the statistics' conditions."""
        return _tables(self.spans, self.tables, 2)

    @property
    def gaining(self) -> list[int]:
        """The tables that may have gradients: floats read by the score."""
        masks, scores = (part.count(",") for part in self.spans.split("|")[:2])
        return [k for k in range(masks, masks + scores) if self.tables[k].is_floating_point()]

    def inputs(self, wanted: Sequence[int]) -> list[Tensor]:
        """The tensors that may have gradients: query, key, value, the tables `wanted` names, sinks."""
        tables = [self.tables[k] for k in wanted]
        return [self.query, self.key, self.value, *tables, *([] if self.sinks is None else [self.sinks])]

    def with_inputs(self, inputs: Sequence[Tensor], wanted: Sequence[int]) -> Question:
        """The question with others in the places of `inputs`."""
        query, key, value, new, sinks, *_ = self.places(inputs, wanted)
        tables = [old if table is None else table for old, table in zip(self.tables, new, strict=True)]
        return self._replace(query=query, key=key, value=value, tables=tables, sinks=sinks)

    def places(self, gradients: Sequence[Tensor | None], wanted: Sequence[int]) -> tuple[Any, ...]:
        """Gradients of `inputs` as torch wants them: one entry an argument, None where there is none."""
        query, key, value, *rest = gradients
        tables: list[Tensor | None] = [None] * len(self.tables)
        for k in wanted:
            tables[k] = rest.pop(0)
        return (query, key, value, tables, rest[0] if rest else None) + (None,) * (len(self) - 5)


def spelled(formula: Expression | None) -> tuple[str, list[Table]]:
    """`formula.text` and `formula.tables`; under torch.compile without json and cached properties, closed to it."""
    if formula is None:
        return "", []
    if not torch.compiler.is_compiling():
        return formula.text, list(formula.tables)
    nodes = walk(formula)
    number = {id(node): k for k, node in enumerate(nodes)}
    tables = list({id(node.table): node.table for node in nodes if isinstance(node, Lookup)}.values())
    slot = {id(table): k for k, table in enumerate(tables)}
    lines = []
    for node in nodes:
        words = [str(word) if isinstance(word, int) else f'"{word}"' for word in node.record(number, slot)]
        lines.append("[" + ",".join(words) + "]")
    return "[" + ",".join(lines) + "]", tables


def _spelling(tables: list[Table]) -> Callable[[Expression], str]:
    """How a statistic's condition is written, its tables put after those there are; `_read` reads it."""

    def spell(condition: Expression) -> str:
        text, own = spelled(condition)
        start = len(tables)
        tables.extend(own)
        return f"{start} {len(own)} {text}"

    return spell


def _spans(tables: list[Table]) -> str:
    return "".join(["-," if t.axes is None else "".join([axis or "." for axis in t.axes]) + "," for t in tables])


def _tensor(table: Table, query: Tensor) -> Tensor:
    if isinstance(table.array, Tensor):
        check_device("table", table.array, query)
        return table.array
    if torch.compiler.is_compiling():
        return torch.as_tensor(table.array, device=query.device)
    tensor: Tensor = near(table.array, query)
    return tensor


def _settled(words: tuple[str, str, str], tensors: list[Tensor], extent: Extent) -> Pair:
    mask, score, spans = words
    return settle(
        from_text(mask, _tables(spans, tensors, 0)) if mask else None,
        from_text(score, _tables(spans, tensors, 1)) if score else None,
        extent,
    )


def _tables(spans: str, tensors: list[Tensor], part: int) -> list[Table]:
    """The tables of the mask (part 0), the score (1) or the statistics (2)."""
    parts = spans.split("|")
    first = sum([before.count(",") for before in parts[:part]])
    promised = [None if span == "-" else _axes(span) for span in parts[part].split(",")[:-1]]
    own = tensors[first : first + len(promised)]
    return [Table(tensor, axes) for tensor, axes in zip(own, promised, strict=True)]


@lru_cache(maxsize=4096)
def _kept(words: tuple[str, str, str], extent: Extent) -> Pair:
    return _settled(words, [], extent)


def _read(see: str, tables: list[Table]) -> tuple[Statistic, ...]:
    """The statistics that these lines spell."""

    def condition(text: str) -> Expression:
        """Where its tables start among theirs, how many they are, and the formula's text."""
        start, count, formula = text.split(" ")
        return from_text(formula, tables[int(start) :][: int(count)])

    return tuple(from_words(line.split("|"), condition) for line in see.splitlines())


@lru_cache(maxsize=4096)
def _read_kept(see: str) -> tuple[Statistic, ...]:
    return _read(see, [])


def _check(see: Sequence[Statistic], extent: Extent) -> None:
    """Raise where a condition cannot be read at some pair."""
    for statistic in see:
        statistic.mapped(lambda condition: checked(condition, extent))


@lru_cache(maxsize=4096)
def _check_kept(see: str, extent: Extent) -> None:
    _check(_read_kept(see), extent)


def _axes(span: str) -> tuple[str | None, ...]:
    return tuple(None if axis == "." else axis for axis in span)
