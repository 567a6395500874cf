"""A call without its arrays, and the arrays of a call.

A compiled program, of torch.compile or of JAX, holds the `CallSpec` and passes the `Arrays` at each execution. The
formulas of a `CallSpec` are text, and the tables that they read are arrays. torch.compile can trace `CallSpec.of`, so a
compiled function may build formulas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..arrays.operations import framework, namespace
from ..formula.expression import Expression, parse_text, to_text
from ..formula.tables import Table
from ..statistics import Statistic, arrays_of, deserialize
from .kernel import GivenGradients, Result, Tangents
from .problem import NUM_OPERANDS, Problem

AXIS = re.compile(r"\.|[bhij](?:/\d+)?")


class Arrays(NamedTuple):
    """The arrays of a call: (*batch_shape, H, n, d_k), ... as in `Problem`.

    tables : the tables of the mask, then of the score, then of the statistics
    sinks : None if there are none
    seed : the seed of dropout in the form of the framework; None without dropout
    """

    query: Any
    key: Any
    value: Any
    tables: Sequence[Any] = ()
    sinks: Any = None
    seed: Any = None

    def flatten(self) -> list[Any]:
        """Return the arrays in one list, which `CallSpec.unflatten` reads."""
        optional = [array for array in (self.sinks, self.seed) if array is not None]
        return [self.query, self.key, self.value, *self.tables, *optional]


class CallSpec(NamedTuple):
    """What a call is besides its arrays, as plain values: an operator of torch takes each as an argument of its own.

    mask, score : `Expression.text`; "" if there is none
    table_axes : `Table.axes` of all tables: "hij,.j,|-,|" has a comma after each table, and | after mask and score; "."
        is an axis without a symbol, and "-" a table without `axes`
    scale, dropout : as in `attention`
    see : a line for each statistic, its `Statistic.serialize` with | between the parts
    has_sinks : True if the call has sinks
    kernel, threads : as in `attention`
    """

    mask: str
    score: str
    table_axes: str
    scale: float
    dropout: float
    see: str
    has_sinks: bool
    kernel: str | None
    threads: int | None

    @classmethod
    def of(cls, problem: Problem) -> tuple[CallSpec, list[Table]]:
        """Return the specification of a problem that `problem.parse` has checked, and its tables. No table is read.

        The tables are in the order of `Arrays.tables`.
        """
        mask, mask_tables = to_text(problem.mask)
        score, score_tables = to_text(problem.score)
        statistic_tables: list[Table] = []
        lines = ["|".join(statistic.serialize(_text_writer(statistic_tables))) for statistic in problem.see]
        axes = "|".join([_format_axes(mask_tables), _format_axes(score_tables), _format_axes(statistic_tables)])
        numbers, see, has_sinks = (problem.scale, problem.dropout), "\n".join(lines), problem.sinks is not None
        spec = cls(mask, score, axes, *numbers, see, has_sinks, problem.kernel, problem.threads)
        return spec, [*mask_tables, *score_tables, *statistic_tables]

    def formulas(self, tables: Sequence[Any]) -> tuple[Expression | None, Expression | None]:
        """Return mask and score as formulas that read these arrays; None for one that the call does not have."""
        mask = parse_text(self.mask, self._tables(tables, 0)) if self.mask else None
        return mask, parse_text(self.score, self._tables(tables, 1)) if self.score else None

    def statistics(self, tables: Sequence[Any]) -> tuple[Statistic, ...]:
        """Return the statistics, with their tables. `tables` are the arrays of all tables of the call."""
        own = self._tables(tables, 2)

        def condition(text: str) -> Expression:
            """Parse "start count text": the condition reads `count` of the tables, from index `start`."""
            start, count, formula = text.split(" ")
            return parse_text(formula, own[int(start) :][: int(count)])

        return tuple(deserialize(line.split("|"), condition) for line in self.see.splitlines())

    def problem(
        self, arrays: Arrays, formulas: tuple[Expression | None, Expression | None] = (None, None), seed: int = 0
    ) -> Problem:
        """Return the problem, without a check.

        `formulas` is the result of the method `formulas`. The defaults suffice to infer shapes. No array is read.
        """
        inputs = arrays.query, arrays.key, arrays.value, *formulas, arrays.sinks
        numbers = self.scale, self.dropout, seed, self.statistics(arrays.tables)
        return Problem(*inputs, *numbers, heads_squeezed=False, kernel=self.kernel, threads=self.threads)

    def _tables(self, arrays: Sequence[Any], section: int) -> list[Table]:
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
        """The indices of the score's tables in `Arrays.tables`."""
        masks, scores, _ = [section.count(",") for section in self.table_axes.split("|")]
        return range(masks, masks + scores)

    def table_slots(self, problem: Problem) -> dict[int, int]:
        """Return the index in `Problem.tables` of each of the score's tables, by its index in `Arrays.tables`."""
        return dict(zip(self.score_tables, problem.score_table_indices, strict=True))

    # -- the order of the arrays in one list ---------------------------------------------------------------------------
    def unflatten(self, arrays: Sequence[Any]) -> Arrays:
        """Return the arrays that `Arrays.flatten` has put into a list."""
        query, key, value, *rest = arrays
        tables, rest = rest[: self.num_tables], rest[self.num_tables :]
        sinks, seed = rest[0] if self.has_sinks else None, rest[-1] if self.has_seed else None
        return Arrays(query, key, value, tables, sinks, seed)

    def place(self, places: Sequence[int], arrays: Sequence[Any]) -> Arrays:
        """Return `arrays` as the arrays at these indices of the list, None for the other arrays."""
        by_place = dict(zip(places, arrays, strict=True))
        return self.unflatten([by_place.get(k) for k in range(self.num_arrays)])

    @property
    def has_seed(self) -> bool:
        return self.dropout != 0

    @property
    def num_tables(self) -> int:
        return self.table_axes.count(",")

    @property
    def num_arrays(self) -> int:
        """The number of all arrays of the call."""
        return self.table_places.stop + self.has_sinks + self.has_seed

    @property
    def table_places(self) -> range:
        """The indices of the tables in the list."""
        return range(NUM_OPERANDS, NUM_OPERANDS + self.num_tables)

    def tangents(self, problem: Problem, places: Sequence[int], directions: Sequence[Any]) -> Tangents:
        """Return the tangents of a problem's inputs: `directions` for the arrays at these indices of the list."""
        query, key, value, own, sinks, _ = self.place(places, directions)
        by_slot = {slot: own[table] for table, slot in self.table_slots(problem).items()}
        return Tangents(query, key, value, tuple([by_slot.get(slot) for slot in range(len(problem.tables))]), sinks)

    def find_places(self, tables: Sequence[int]) -> list[int]:
        """Return the indices of query, key, value, these of the tables, and the sinks in the list."""
        sinks = [self.table_places.stop] if self.has_sinks else []
        return [*range(NUM_OPERANDS), *[NUM_OPERANDS + table for table in tables], *sinks]


def _text_writer(tables: list[Table]) -> Callable[[Expression], str]:
    """Return a function that converts a statistic's condition to text that `CallSpec.statistics` reads.

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


def flatten_result(see: Sequence[Statistic], result: Result) -> list[Any]:
    """Return [output, lse, *arrays], where `arrays` are those of every requested statistic except `lse()`."""
    seen = zip(see, result.seen, strict=True)
    others = [array for statistic, entry in seen if statistic.num_arrays for array in arrays_of(entry)]
    return [result.output, result.lse, *others]


def build_seen(see: Iterable[Statistic], results: Sequence[Any], detach: Any = None) -> tuple[Any, ...]:
    """Return the result of each statistic. `results` are in the order of `flatten_result`.

    `detach` takes an array out of the graph of gradients, for statistics without gradients; None if there is no graph.
    """
    seen, start = [], 2
    for statistic in see:
        own = results[start : start + statistic.num_arrays] or [
            framework(results[0]).finish_lse(results[1], results[0])
        ]
        start += statistic.num_arrays
        if detach is not None and not statistic.is_differentiable:
            own = [detach(array) for array in own]
        seen.append(statistic.build_result(own))
    return tuple(seen)


def locate_arrays(see: Sequence[Statistic], first: int = 2) -> list[range]:
    """Return the indices of each statistic's arrays in `flatten_result`, if the first array has the index `first`."""
    places, start = [], first
    for statistic in see:
        places.append(range(start, start + statistic.num_arrays))
        start += statistic.num_arrays
    return places


def split_arrays(see: Sequence[Statistic], results: Sequence[Any], first: int = 2) -> list[Sequence[Any]]:
    """Return each statistic's part of `results`, which are in the order of `flatten_result`, from index `first` on."""
    return [results[places.start : places.stop] for places in locate_arrays(see, first)]


def unflatten_gradients(
    see: Sequence[Statistic],
    gradients: Mapping[int, Any],
    results: Sequence[Any] | None,
    wanted_tables: Collection[int] = (),
    first: int = 2,
) -> GivenGradients:
    """Return what a backward pass reads.

    gradients : the gradients of results by their indices in `flatten_result`, if the first array has the index `first`
    results : the saved results in the order of `flatten_result`, or only output and lse; None if nothing is saved
    wanted_tables : see `GivenGradients`
    """
    d_output, saved = gradients.get(0), None if results is None else tuple(results[:2])
    if d_output is None and saved is not None:
        d_output = namespace(saved[0]).zeros_like(saved[0])
    d_seen = [gradients.get(places.start) if places else None for places in locate_arrays(see, first)]
    arrays = split_arrays(see, results or ())
    return GivenGradients(d_output, gradients.get(1), saved, wanted_tables, d_seen=d_seen, arrays=arrays)


def find_differentiable_results(see: Sequence[Statistic], first: int = 2) -> list[int]:
    """Return the indices of the results that have gradients: output, lse and the first array of some statistics.

    The arrays of the statistics have the indices of `locate_arrays`.
    """
    pairs = zip(see, locate_arrays(see, first), strict=True)
    return [0, 1, *[places[0] for statistic, places in pairs if places and statistic.is_differentiable]]
