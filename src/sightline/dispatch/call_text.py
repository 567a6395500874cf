"""A call as text: its formulas and options as plain values, and the tables that its formulas read as arrays.

A compiled program, of torch.compile or of JAX, holds the text and passes the arrays at each execution. torch.compile
can trace `CallText.of`, so a compiled function may build formulas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..formula.expression import Expression, Lookup, is_compiling, node_record, parse_text, walk
from ..formula.tables import Table
from ..problem.kernel import Result
from ..problem.problem import Problem
from ..statistics import Lse, Statistic, arrays_of, deserialize

AXIS = re.compile(r"\.|[bhij](?:/\d+)?")


class CallText(NamedTuple):
    """The plain values of a call.

    mask, score : `Expression.text`; "" if there is none
    table_axes : `Table.axes` of all tables: "hij,.j,|-,|" has a comma after each table, and | after mask and score; "."
        is an axis without a symbol, and "-" a table without `axes`
    scale, dropout : as in `attention`
    see : a line for each statistic, its `Statistic.serialize` with | between the parts
    """

    mask: str
    score: str
    table_axes: str
    scale: float
    dropout: float
    see: str

    @classmethod
    def of(cls, problem: Problem) -> tuple[CallText, list[Table]]:
        """Return the text of a problem that `problem.parse` has checked, and its tables. No table is read.

        The tables are those of the mask, then those of the score, then those of the statistics.
        """
        mask, mask_tables = to_text(problem.mask)
        score, score_tables = to_text(problem.score)
        statistic_tables: list[Table] = []
        lines = ["|".join(statistic.serialize(_text_writer(statistic_tables))) for statistic in problem.see]
        axes = "|".join([_format_axes(mask_tables), _format_axes(score_tables), _format_axes(statistic_tables)])
        text = cls(mask, score, axes, problem.scale, problem.dropout, "\n".join(lines))
        return text, [*mask_tables, *score_tables, *statistic_tables]

    def formulas(self, arrays: Sequence[Any]) -> tuple[Expression | None, Expression | None]:
        """Return mask and score as formulas whose tables hold `arrays`; None for one that the call does not have.

        `arrays` are in the order of the tables that `of` returns.
        """
        mask = parse_text(self.mask, self.tables(arrays, 0)) if self.mask else None
        return mask, parse_text(self.score, self.tables(arrays, 1)) if self.score else None

    def statistics(self, arrays: Sequence[Any]) -> tuple[Statistic, ...]:
        """Return the statistics, with their tables. `arrays` are the arrays of all tables of the call."""
        tables = self.tables(arrays, 2)

        def condition(text: str) -> Expression:
            """Parse "start count text": the condition reads `count` of the tables, from index `start`."""
            start, count, formula = text.split(" ")
            return parse_text(formula, tables[int(start) :][: int(count)])

        return tuple(deserialize(line.split("|"), condition) for line in self.see.splitlines())

    def problem(
        self,
        operands: tuple[Any, Any, Any],
        arrays: Sequence[Any],
        formulas: tuple[Expression | None, Expression | None] = (None, None),
        sinks: Any = None,
        seed: int = 0,
    ) -> Problem:
        """Return the problem of query, key and value, without a check.

        `arrays` are the arrays of all tables, and `formulas` is the result of the method `formulas`. To infer shapes,
        the defaults suffice. No array is read.
        """
        mask, score = formulas
        see = self.statistics(arrays)
        return Problem(*operands, mask, score, sinks, self.scale, self.dropout, seed, see, heads_squeezed=False)

    def tables(self, arrays: Sequence[Any], section: int) -> list[Table]:
        """Return the tables of the mask (section 0), the score (1) or the statistics (2) with their arrays."""
        sections = self.table_axes.split("|")
        first = sum([before.count(",") for before in sections[:section]])
        tables = []
        for array, axes in zip(arrays[first:], sections[section].split(",")[:-1], strict=False):
            names = [None if axis == "." else axis for axis in AXIS.findall(axes)]
            tables.append(Table(array, None if axes == "-" else tuple(names)))
        return tables

    @property
    def score_tables(self) -> range:
        """The indices of the score's tables among all tables."""
        masks, scores, _ = [section.count(",") for section in self.table_axes.split("|")]
        return range(masks, masks + scores)


def to_text(formula: Expression | None) -> tuple[str, list[Table]]:
    """Return `formula.text` and `formula.tables`. If torch.compile traces the call, write the text by plain code."""
    if formula is None:
        return "", []
    if not is_compiling():
        return formula.text, list(formula.tables)
    nodes = walk(formula)
    number = {id(node): k for k, node in enumerate(nodes)}
    tables = list({id(node.table): node.table for node in nodes if isinstance(node, Lookup)}.values())
    slot = {id(table): k for k, table in enumerate(tables)}
    lines = []
    for node in nodes:
        texts = [str(word) if isinstance(word, int) else f'"{word}"' for word in node_record(node, number, slot)]
        lines.append("[" + ",".join(texts) + "]")
    return "[" + ",".join(lines) + "]", tables


def _text_writer(tables: list[Table]) -> Callable[[Expression], str]:
    """Return a function that converts a statistic's condition to text that `CallText.statistics` reads.

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


# -- results -------------------------------------------------------------------------------------------------------


def count_arrays(statistic: Statistic) -> int:
    """Return how many arrays the statistic adds to `flatten_result`: none for `lse()`."""
    return 0 if isinstance(statistic, Lse) else len(statistic.fill_values)


def flatten_result(see: Sequence[Statistic], result: Result) -> list[Any]:
    """Return [output, lse, *arrays], where `arrays` are those of every requested statistic except `lse()`."""
    seen = zip(see, result.seen, strict=True)
    others = [array for statistic, entry in seen if count_arrays(statistic) for array in arrays_of(entry)]
    return [result.output, result.lse, *others]


def locate_arrays(see: Sequence[Statistic], first: int = 2) -> list[range]:
    """Return the indices of each statistic's arrays in `flatten_result`, if the first array has the index `first`."""
    places, start = [], first
    for statistic in see:
        places.append(range(start, start + count_arrays(statistic)))
        start += count_arrays(statistic)
    return places


def split_arrays(see: Sequence[Statistic], results: Sequence[Any], first: int = 2) -> list[Sequence[Any]]:
    """Return each statistic's part of `results`, which are in the order of `flatten_result`, from index `first` on."""
    return [results[places.start : places.stop] for places in locate_arrays(see, first)]


def find_differentiable_results(see: Sequence[Statistic], first: int = 2) -> list[int]:
    """Return the indices of the results that have gradients: output, lse and the first array of some statistics.

    The arrays of the statistics have the indices of `locate_arrays`.
    """
    pairs = zip(see, locate_arrays(see, first), strict=True)
    return [0, 1, *[places[0] for statistic, places in pairs if places and statistic.is_differentiable]]
