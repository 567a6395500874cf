"""The arguments and results of the registered operator: tensors and plain values.

A formula becomes text, and the tables that it reads become tensors. torch.compile can trace
`OperatorArguments.from_problem`, so a compiled function may build formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formula.expression import Expression, Lookup, parse_text, walk
from ..formula.tables import Table
from ..formula.tensor_cache import to_device
from ..kernel import Result
from ..problem import Problem, validate
from ..statistics import Lse, Statistic, arrays_of, deserialize
from ..validation import check_device

__all__ = [
    "SCHEMA",
    "OperatorArguments",
    "build_result",
    "count_arrays",
    "flatten_result",
    "make_seed",
    "split_arrays",
    "to_text",
]

SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor[] tables, Tensor? sinks, Tensor? seed, "
    "str mask, str score, str table_axes, float scale, float dropout, str see, str? kernel, int? threads"
)


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
        """Return the validated problem."""
        mask = parse_text(self.mask, self._make_tables(0)) if self.mask else None
        score = parse_text(self.score, self._make_tables(1)) if self.score else None
        return validate(self.build_problem(mask, score, 0 if self.seed is None else int(self.seed) % 2**64))

    def build_problem(self, mask: Expression | None = None, score: Expression | None = None, seed: int = 0) -> Problem:
        """Return a problem with this mask, score and seed. The defaults suffice to infer shapes and read no tensor."""
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
            see=_parse_statistics(self.see, self._make_tables(2)),
            heads_squeezed=False,
        )

    def _make_tables(self, section: int) -> list[Table]:
        """Return the tables of the mask (section 0), of the score (1) or of the statistics (2)."""
        sections = self.table_axes.split("|")
        first = sum([before.count(",") for before in sections[:section]])
        tables = []
        for tensor, axes in zip(self.tables[first:], sections[section].split(",")[:-1], strict=False):
            names = [None if axis == "." else axis for axis in axes]
            tables.append(Table(tensor, None if axes == "-" else tuple(names)))
        return tables

    @property
    def differentiable_tables(self) -> list[int]:
        """The indices of the tables that may have gradients: tables of floats that the score reads."""
        masks, scores = self.score_offset, self.table_axes.split("|")[1].count(",")
        return [k for k in range(masks, masks + scores) if self.tables[k].is_floating_point()]

    @property
    def score_offset(self) -> int:
        """The index of the score's first table, which is the number of the mask's tables."""
        return self.table_axes.split("|")[0].count(",")

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
        """Return the gradients in the order of the operator's arguments; None for an argument without a gradient."""
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


def _parse_statistics(see: str, tables: list[Table]) -> tuple[Statistic, ...]:
    """Parse one statistic from each line of `see`."""

    def condition(text: str) -> Expression:
        """Parse "start count text": the condition reads `count` of the tables, from index `start`."""
        start, count, formula = text.split(" ")
        return parse_text(formula, tables[int(start) :][: int(count)])

    return tuple(deserialize(line.split("|"), condition) for line in see.splitlines())


def make_seed(seed: int | None) -> Tensor:
    """Return the seed as an int64 tensor. None draws a seed from torch's generator, which torch.manual_seed sets."""
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64)
    return torch.tensor(seed - (2**64 if seed >= 2**63 else 0), dtype=torch.int64)


# -- results -------------------------------------------------------------------------------------------------------


def count_arrays(statistic: Statistic) -> int:
    """Return how many arrays the statistic adds to the operator's results: none for `lse()`."""
    return 0 if isinstance(statistic, Lse) else len(statistic.fill_values)


def flatten_result(see: Sequence[Statistic], result: Result) -> list[Tensor]:
    """Return [output, lse, *arrays]: the arrays of every requested statistic except `lse()`."""
    seen = zip(see, result.seen, strict=True)
    others = [array for statistic, entry in seen if count_arrays(statistic) for array in arrays_of(entry)]
    return [result.output, result.lse, *others]


def split_arrays(see: Sequence[Statistic], results: Sequence[Any]) -> list[Sequence[Any]]:
    """Return each statistic's arrays, of values in the order of `flatten_result`."""
    shares, offset = [], 2
    for statistic in see:
        shares.append(results[offset : offset + count_arrays(statistic)])
        offset += count_arrays(statistic)
    return shares


def build_result(see: Sequence[Statistic], results: Sequence[Tensor]) -> Result:
    """Return the result that `flatten_result` flattened."""
    output, lse = results[:2]
    returned_lse = lse if output.dtype == torch.float64 else lse.float()
    seen = []
    for statistic, arrays in zip(see, split_arrays(see, results), strict=True):
        constant = [array.detach() for array in arrays]
        entry = statistic.build_result(arrays if statistic.is_differentiable else constant) if arrays else returned_lse
        seen.append(entry)
    return Result(output, lse, tuple(seen))
