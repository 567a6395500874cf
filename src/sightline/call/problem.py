"""The options of an attention call, as the caller gives them, and the problem: the checked arguments of the call.

The shape legend, used everywhere:

    B    batch: the product of the lengths of all leading axes; `b` counts their entries together, in C order
    H    number of query heads     G    number of key/value heads
    n    number of queries         m    number of keys
    d_k  width of query and key    d_v  width of value

    query (..., H, n, d_k)    key (..., G, m, d_k)    value (..., G, m, d_v)    output (..., H, n, d_v)

H is a multiple of G, and query head h reads key head h // (H / G). Leading axes are broadcast. Arrays without a head
axis, (n, d_k) or (B, n, d_k), are accepted too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from ..arrays import operations as arrays
from ..arrays.caching import cached_property
from ..arrays.row_formats import RowFormat
from ..arrays.unreadable import check_device
from ..errors import DeviceError
from ..formula.batch_axes import align_batch_axes
from ..formula.expression import Expression, conjoin, parse_text, specialize, table_lookup
from ..formula.formula_checks import Extent, check_formula, is_valid_for_all_entries
from ..formula.tables import Table, bounds_key
from ..formula.tensor_cache import UNVERSIONED_DEVICES, TensorCache, to_device
from ..formula.tile_ranges import hidden_condition
from ..statistics import Statistic
from . import validation

OPERANDS = ("query", "key", "value")  # the first arrays of every list of arguments
NUM_OPERANDS = len(OPERANDS)

_NORMALIZED = TensorCache(4096)
MAX_SMALL_FLOPS = 2**31  # the most FLOPs of a problem that is small on a GPU: 10 µs at 200 TFLOP/s
MIN_COUNTED_QUERIES = 64  # fewer queries count as this number: reading the keys takes time too


class Options(NamedTuple):
    """The arguments of a call besides query, key and value. torch.compile can trace a named tuple.

    mask, score, scale, sinks, dropout, seed, kernel, threads : as in `attention`
        `score` may also be an array (..., n, m), the bias that is added to the scores.
    see : the statistics; None if the caller gave none, and receives the output alone
    by_position : True if the arrays are views of arrays with the positions before the heads
        It changes no result. Compiled programs of JAX then make no copies.
    row_formats : how the rows of key and of value are quantised; None for arrays of floats
    row_mask : a condition that hides rows of a `KVCache` besides those that the mask hides
    """

    mask: Any = None
    score: Any = None
    see: Any = None
    scale: Any = None
    sinks: Any = None
    dropout: Any = 0.0
    seed: Any = None
    kernel: Any = None
    threads: Any = None
    by_position: Any = False
    row_formats: Any = None
    row_mask: Any = None

    def replace(self, **changes: Any) -> Options:
        """Return the options with these changes. torch.compile of torch 2.6 cannot trace `_replace`."""
        return Options(*map(changes.get, OPTION_NAMES, self))

    def with_formulas(self, mask: Any, score: Any, see: Any) -> Options:
        """Return the options with this mask, score and statistics, in less time than `replace` takes."""
        return Options(mask, score, see, *self[3:])


OPTION_NAMES = Options._fields


@dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of one attention call. `make_problem` makes a problem and checks it.

    `query`, `key` and `value` all have the broadcast leading axes `batch_shape` and a head axis.
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
    see: tuple[Statistic, ...]  # `Statistic.computed` of those that were requested
    heads_squeezed: bool  # True if the caller's arrays have no head axis
    # Dropout adds this position (b, h, i, j) of the first pair to its counter. It is not 0 if the problem is a part of
    # a larger one. Its j is a multiple of 4.
    dropout_origin: Extent = field(default=(0, 0, 0, 0), kw_only=True)
    # How the rows of key and of value are quantised; their last axis then has bytes. None for arrays of floats.
    row_formats: tuple[RowFormat, RowFormat] | None = field(default=None, kw_only=True)
    kernel: str | None = field(default=None, kw_only=True)
    threads: int | None = field(default=None, kw_only=True)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.query.shape[:-3])

    @property
    def B(self) -> int:
        return math.prod(self.batch_shape)

    @property
    def H(self) -> int:
        return cast(int, self.query.shape[-3])  # `int` would turn a symbol of torch.compile into a number

    @property
    def G(self) -> int:
        return cast(int, self.key.shape[-3])

    @property
    def group(self) -> int:
        """The number of query heads that share a key head."""
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
        return cast(int, self.value.shape[-1]) if self.row_formats is None else self.row_formats[1].width

    @property
    def extent(self) -> Extent:
        """(B, H, n, m): the ranges of b, h, i and j."""
        return self.B, self.H, self.n, self.m

    @property
    def is_small_on_gpu(self) -> bool:
        """True if a GPU should compute all pairs of the problem in less time than the host needs to plan the tiles."""
        rows = self.B * self.H * max(self.n, MIN_COUNTED_QUERIES)
        return 2 * rows * self.m * (self.d_k + self.d_v) <= MAX_SMALL_FLOPS

    @cached_property
    def dtype(self) -> str:
        return arrays.dtype_name(self.query)

    @property
    def accumulator(self) -> str:
        return arrays.accumulator(self.dtype)

    @cached_property
    def framework(self) -> arrays.Framework:
        return arrays.framework(self.query)

    @cached_property
    def device(self) -> str:
        return arrays.device(self.query)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that the mask or the score reads; a table that both read occurs once."""
        by_id = {id(t): t for f in (self.mask, self.score) if f is not None for t in f.tables}
        return tuple(by_id.values())

    @property
    def score_table_indices(self) -> tuple[int, ...]:
        """The index in `tables` of each table that the score reads, in the order of `score.tables`."""
        index = {id(table): k for k, table in enumerate(self.tables)}
        return () if self.score is None else tuple([index[id(table)] for table in self.score.tables])

    def with_statistics(self, *see: Statistic, value: Any = None) -> Problem:
        """Return the problem with these statistics alone, without dropout, and with another `value` if one is given."""
        return replace(self, see=see, value=self.value if value is None else value, dropout=0.0, seed=0)

    def positions(self, xp: Any, rows: slice, columns: slice) -> tuple[Any, Any, Any, Any]:
        """Return b, h, i, j of a tile as int64 arrays that broadcast to (*batch_shape, H, rows, columns)."""
        options = {"dtype": xp.int64} | ({} if xp is np else arrays.device_option(self.query))
        b = xp.reshape(xp.arange(self.B, **options), (*self.batch_shape, 1, 1, 1))
        h = xp.reshape(xp.arange(self.H, **options), (self.H, 1, 1))
        i = xp.reshape(xp.arange(rows.start, rows.stop, **options), (-1, 1))
        return b, h, i, xp.arange(columns.start, columns.stop, **options)

    def squeeze_heads(self, array: Any, trailing: int) -> Any:
        """Return the array without its head axis if the caller's arrays have no head axis, else the array unchanged.

        The head axis follows the batch axes. `trailing` is the number of axes after the head axis.
        """
        if not self.heads_squeezed:
            return array
        return array.reshape((*array.shape[: -trailing - 1], *array.shape[array.ndim - trailing :]))

    def with_tables(self, tables: Sequence[Any]) -> Problem:
        """Return the problem with these arrays in its tables; the arrays are in the order of `self.tables`."""
        new = {id(old): old.with_array(array) for old, array in zip(self.tables, tables, strict=True)}
        lookup = table_lookup(lambda old: new[id(old)])
        return self.map_formulas(lambda formula: formula.rewrite(lookup=lookup))

    def map_tables(self, change: Callable[[Any], Any]) -> Problem:
        """Return the problem with `change` applied to the array of each table. Shared tables stay shared."""
        lookup = table_lookup(lambda table: table.with_array(change(table.array)))
        return self.map_formulas(lambda formula: formula.rewrite(lookup=lookup) if formula.tables else formula)

    def map_formulas(self, change: Callable[[Expression], Expression]) -> Problem:
        """Return the problem with `change` applied to mask, score and the formulas of the statistics."""
        mask = None if self.mask is None else change(self.mask)
        score = None if self.score is None else change(self.score)
        return replace(self, mask=mask, score=score, see=tuple([each.map_formulas(change) for each in self.see]))


def make_problem(query: Any, key: Any, value: Any, **options: Any) -> Problem:
    """Return the problem that these arguments of `sightline.attention` describe, after every check of the arguments."""
    return validate(parse(query, key, value, Options(**options)))


def parse(query: Any, key: Any, value: Any, options: Options, warns: bool = True) -> Problem:
    """Return the problem after every check that needs only shapes, dtypes and parameters, not the entries of arrays.

    `parse` is the first half of `make_problem`. torch.compile traces it without warnings, so it uses only plain Python.
    """
    validation.check_choice(options.kernel, options.threads)
    named = {"query": query, "key": key, "value": value}
    validation.check_arrays(named, options.row_formats is not None)
    heads_squeezed = query.ndim < 4
    query, key, value = validation.broadcast_inputs(named, options.row_formats)
    lengths = query.shape[-2], key.shape[-2]
    formula = validation.read_score(options.score, warns)
    scale = specialize(options.scale)
    if getattr(scale, "requires_grad", False):
        formula, scale = validation.fold_scale(formula, scale, warns)
    tables: dict[int, Any] = {}

    def align(formula: Any) -> Any:
        """Return the formula with its mask or bias arrays broadcast to the batch axes; None for None."""
        return None if formula is None else align_batch_axes(formula, tuple(query.shape[:-3]), tables)

    problem = Problem(
        query,
        key,
        value,
        mask=conjoin(align(validation.read_mask(options.mask, lengths)), options.row_mask),
        score=align(formula),
        sinks=validation.read_sinks(options.sinks, query),
        scale=validation.read_scale(scale, query),
        dropout=validation.read_dropout(options.dropout),
        seed=validation.read_seed(options.seed, options.dropout),
        see=(),
        heads_squeezed=heads_squeezed,
        row_formats=options.row_formats,
        kernel=options.kernel,
        threads=options.threads,
    )
    see = [statistic.map_formulas(align) for statistic in validation.read_statistics(options.see, lengths)]
    for statistic in see:
        statistic.check(problem, (*problem.batch_shape, problem.H), problem.n)
    return replace(problem, see=tuple([statistic.computed for statistic in see]))


def validate(problem: Problem) -> Problem:
    """Return the problem with its tables on the query's device, and a mask that also hides what its score hides.

    These are the pairs at which `hidden_condition` finds that the score is −∞ for every s. `validate` checks that every
    formula reads inside its tables. It is the second half of `make_problem`.
    """
    if problem.tables and problem.device == "meta":
        given = "a query on the device meta, and tables in a formula"
        raise DeviceError(given, "a query that holds numbers", "pass a query on the CPU or a GPU")
    checked = _move_tables(problem)
    checked = _with_unknown_entries(checked) or checked

    normalize = _normalize_with_tables if checked.tables else _normalize_without_tables
    mask = normalize(checked.mask, checked.score, problem.extent)

    def check_factor(factor: Expression) -> Expression:
        """Return a statistic's formula; raise TableError if it reads outside of a table at a visible pair."""
        check_formula(factor, problem.extent, mask)
        return factor

    return replace(checked, mask=mask, see=tuple(each.map_formulas(check_factor) for each in checked.see))


def _move_tables(problem: Problem) -> Problem:
    """Return the problem with its tables on the query's device.

    If the query lies in host memory, NumPy arrays in tables stay as they are, even if the query is a tensor. Kernels of
    the CPU read the arrays' own memory, and torch cannot share the memory of some arrays.
    """

    def move(array: Any) -> Any:
        check_device("table", array, problem.query)
        return array if isinstance(array, np.ndarray) and problem.device == "cpu" else to_device(array, problem.query)

    return problem.map_tables(move)


def _with_unknown_entries(problem: Problem) -> Problem | None:
    """If the problem is small and on a GPU, return it with tables of unknown entries; else None.

    The host could read the entries, to skip empty tiles, only after all work that is queued on the GPU. For a small
    problem, it takes less time to compute every tile. The result is also None if only the entries can show that the
    formulas are valid.
    """
    if not problem.is_small_on_gpu or problem.device.startswith(UNVERSIONED_DEVICES):  # the host reads them at once
        return None
    lookup = table_lookup(Table.with_unknown_entries)
    formulas: list[Expression] = []

    def forget_entries(formula: Expression) -> Expression:
        formulas.append(formula.rewrite(lookup=lookup))
        return formulas[-1]

    rewritten = problem.map_formulas(forget_entries)
    are_valid = [is_valid_for_all_entries(formula, problem.extent) for formula in formulas if formula.tables]
    return rewritten if are_valid and all(are_valid) else None


def _normalize(mask: Expression | None, score: Expression | None, extent: Extent) -> Expression | None:
    """Check that mask and score read inside their tables. Return the mask that also hides what the score hides.

    The result is None if there is no mask and the score hides no pair.
    """
    check_formula(mask, extent)
    check_formula(score, extent, mask)
    hidden = None if score is None else hidden_condition(score, extent)
    return mask if hidden is None else conjoin(mask, ~hidden)


_normalize_without_tables = lru_cache(4096)(_normalize)  # formulas are interned, so they are keys


def _normalize_with_tables(mask: Expression | None, score: Expression | None, extent: Extent) -> Expression | None:
    """Return `_normalize(mask, score, extent)`, from a cache if all tables are on a device: see `tensor_cache`."""
    tables = [table for formula in (mask, score) if formula is not None for table in formula.tables]
    index = {id(table): k for k, table in enumerate(tables)}

    def join_masks() -> tuple[str, list[int]] | None:
        """Return the text of the mask of `_normalize` and the indices of its tables; None if there is no mask."""
        joined = _normalize(mask, score, extent)
        return None if joined is None else (joined.text, [index[id(table)] for table in joined.tables])

    texts = tuple(None if formula is None else formula.text for formula in (mask, score))
    # A table that mask and score share has one index, which occurs twice.
    indices = tuple([index[id(table)] for table in tables])
    tables_key, table_arrays = bounds_key(tables)
    cache_key = (texts, indices, tuple([table.axes for table in tables]), tables_key, extent)
    normalized = _NORMALIZED.get(cache_key, table_arrays, join_masks)
    return None if normalized is None else parse_text(normalized[0], [tables[k] for k in normalized[1]])
