"""The arguments of the registered operator: tensors and plain values.

A formula becomes text, and the tables that it reads become tensors. torch.compile can trace
`OperatorArguments.from_problem`, so a compiled function may build formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formula.expression import Expression, Lookup, parse_text, walk
from ..formula.tables import Table
from ..formula.tensor_cache import to_device
from ..problem import Problem, check_condition, normalize
from ..statistics import Statistic, deserialize
from ..validation import check_device

__all__ = ["SCHEMA", "OperatorArguments", "make_seed", "to_text"]

SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor[] tables, Tensor? sinks, Tensor? seed, "
    "str mask, str score, str table_axes, float scale, float dropout, str see, str? kernel, int? threads"
)
Extent = tuple[int, int, int, int]
FormulaPair = tuple[Expression | None, Expression | None]


class OperatorArguments(NamedTuple):
    """The arguments of the operator, in the order of `SCHEMA`."""

    query: Tensor  # (*batch_shape, H, n, d_k), as in Problem
    key: Tensor
    value: Tensor
    tables: list[Tensor]  # the tables of the mask, then of the score, then of the statistics
    sinks: Tensor | None
    seed: Tensor | None  # int64; a tensor, so that torch's generator can draw it inside a compiled function
    mask: str  # Expression.text; "" without a mask
    score: str
    table_axes: (
        str  # the axes that each table spans: "hij,.j,|-,|" has a comma after each table and | after mask and score
    )
    scale: float
    dropout: float
    see: str  # Statistic.serialize: a line for each statistic, | between its parts
    kernel: str | None
    threads: int | None

    @classmethod
    def from_problem(
        cls, problem: Problem, seed: Tensor | None, kernel: str | None, threads: int | None
    ) -> OperatorArguments:
        """Return the arguments for a problem that `problem.parse` has checked. No table is read."""
        mask, mask_tables = to_text(problem.mask)
        score, score_tables = to_text(problem.score)
        statistic_tables: list[Table] = []
        lines = ["|".join(statistic.serialize(_text_writer(statistic_tables))) for statistic in problem.see]
        return cls(
            problem.query,
            problem.key,
            problem.value,
            [_to_tensor(table, problem.query) for table in [*mask_tables, *score_tables, *statistic_tables]],
            problem.sinks,
            seed,
            mask,
            score,
            _format_axes(mask_tables) + "|" + _format_axes(score_tables) + "|" + _format_axes(statistic_tables),
            problem.scale,
            problem.dropout,
            "\n".join(lines),
            kernel,
            threads,
        )

    def problem(self) -> Problem:
        """Return the validated problem. Formulas without tables are normalized once for the same lengths."""
        extent = self.build_problem().extent
        texts = self.mask, self.score, self.table_axes
        mask, score = (
            _normalize_formulas(texts, self.tables, extent) if self.tables else _normalize_cached(texts, extent)
        )
        problem = self.build_problem(mask, score, 0 if self.seed is None else int(self.seed) % 2**64)
        if self.statistic_tables:
            _validate_conditions(problem.see, extent)
        else:
            _validate_conditions_cached(self.see, extent)
        return problem

    def build_problem(self, mask: Expression | None = None, score: Expression | None = None, seed: int = 0) -> Problem:
        """Return a problem with this mask, score and seed. The defaults read no tensor and are enough for shapes."""
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
            see=_parse_statistics(self.see, self.statistic_tables)
            if self.statistic_tables
            else _parse_statistics_cached(self.see),
            heads_squeezed=False,
        )

    @property
    def statistic_tables(self) -> list[Table]:
        """The tables that the conditions of the statistics read."""
        return _make_tables(self.table_axes, self.tables, 2)

    @property
    def differentiable_tables(self) -> list[int]:
        """The indices of the tables that may have gradients: tables of floats that the score reads."""
        masks, scores = (section.count(",") for section in self.table_axes.split("|")[:2])
        return [k for k in range(masks, masks + scores) if self.tables[k].is_floating_point()]

    def inputs(self, wanted_tables: Sequence[int]) -> list[Tensor]:
        """Return the tensors that may have gradients: query, key, value, the tables at `wanted_tables`, the sinks."""
        tables = [self.tables[k] for k in wanted_tables]
        return [self.query, self.key, self.value, *tables, *([] if self.sinks is None else [self.sinks])]

    def with_inputs(self, inputs: Sequence[Tensor], wanted_tables: Sequence[int]) -> OperatorArguments:
        """Return the arguments with other tensors in place of `inputs`."""
        query, key, value, new, sinks, *_ = self.to_argument_order(inputs, wanted_tables)
        tables = [old if table is None else table for old, table in zip(self.tables, new, strict=True)]
        return self._replace(query=query, key=key, value=value, tables=tables, sinks=sinks)

    def to_argument_order(self, gradients: Sequence[Tensor | None], wanted_tables: Sequence[int]) -> tuple[Any, ...]:
        """Return the gradients in the order of the arguments: one entry for each argument, None without a gradient."""
        query, key, value, *rest = gradients
        tables: list[Tensor | None] = [None] * len(self.tables)
        for k in wanted_tables:
            tables[k] = rest.pop(0)
        return (query, key, value, tables, rest[0] if rest else None) + (None,) * (len(self) - 5)


def to_text(formula: Expression | None) -> tuple[str, list[Table]]:
    """Return `formula.text` and `formula.tables`. This function writes the text again for torch.compile to trace."""
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
        texts = [str(word) if isinstance(word, int) else f'"{word}"' for word in node.node_record(number, slot)]
        lines.append("[" + ",".join(texts) + "]")
    return "[" + ",".join(lines) + "]", tables


def _text_writer(tables: list[Table]) -> Callable[[Expression], str]:
    """Return a function that converts a statistic's condition to text that `_parse_statistics` reads.

    The function appends the tables of the condition to `tables`.
    """

    def write_text(condition: Expression) -> str:
        text, own = to_text(condition)
        start = len(tables)
        tables.extend(own)
        return f"{start} {len(own)} {text}"

    return write_text


def _format_axes(tables: list[Table]) -> str:
    return "".join(["-," if t.axes is None else "".join([axis or "." for axis in t.axes]) + "," for t in tables])


def _to_tensor(table: Table, query: Tensor) -> Tensor:
    if isinstance(table.array, Tensor):
        check_device("table", table.array, query)
        return table.array
    if torch.compiler.is_compiling():
        return torch.as_tensor(table.array, device=query.device)
    tensor: Tensor = to_device(table.array, query)
    return tensor


def _normalize_formulas(texts: tuple[str, str, str], tensors: list[Tensor], extent: Extent) -> FormulaPair:
    mask, score, table_axes = texts
    return normalize(
        parse_text(mask, _make_tables(table_axes, tensors, 0)) if mask else None,
        parse_text(score, _make_tables(table_axes, tensors, 1)) if score else None,
        extent,
    )


def _make_tables(table_axes: str, tensors: list[Tensor], section: int) -> list[Table]:
    """Return the tables of the mask (section 0), of the score (1) or of the statistics (2)."""
    sections = table_axes.split("|")
    first = sum([before.count(",") for before in sections[:section]])
    axes_by_table = [
        None if axes_text == "-" else _parse_axes(axes_text) for axes_text in sections[section].split(",")[:-1]
    ]
    own = tensors[first : first + len(axes_by_table)]
    return [Table(tensor, axes) for tensor, axes in zip(own, axes_by_table, strict=True)]


@lru_cache(maxsize=4096)
def _normalize_cached(texts: tuple[str, str, str], extent: Extent) -> FormulaPair:
    return _normalize_formulas(texts, [], extent)


def _parse_statistics(see: str, tables: list[Table]) -> tuple[Statistic, ...]:
    """Parse one statistic from each line of `see`."""

    def condition(text: str) -> Expression:
        """Parse "start count text": the condition reads `count` of the tables, from index `start`."""
        start, count, formula = text.split(" ")
        return parse_text(formula, tables[int(start) :][: int(count)])

    return tuple(deserialize(line.split("|"), condition) for line in see.splitlines())


@lru_cache(maxsize=4096)
def _parse_statistics_cached(see: str) -> tuple[Statistic, ...]:
    return _parse_statistics(see, [])


def _validate_conditions(see: Sequence[Statistic], extent: Extent) -> None:
    """Raise TableError if a condition reads outside its table at some pair."""
    for statistic in see:
        statistic.map_formulas(lambda condition: check_condition(condition, extent))


@lru_cache(maxsize=4096)
def _validate_conditions_cached(see: str, extent: Extent) -> None:
    _validate_conditions(_parse_statistics_cached(see), extent)


def _parse_axes(axes_text: str) -> tuple[str | None, ...]:
    return tuple(None if axis == "." else axis for axis in axes_text)


def make_seed(seed: int | None) -> Tensor:
    """Return the seed as an int64 tensor. None draws a seed from torch's generator, which torch.manual_seed sets."""
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64)
    return torch.tensor(seed - (2**64 if seed >= 2**63 else 0), dtype=torch.int64)
