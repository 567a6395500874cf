"""Exact attention over a sequence that is divided among the devices of an axis of `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np

from ..api.kernels import to_caller
from ..arrays.caching import cached_property
from ..arrays.operations import resolve_dtype
from ..call.foreign_arguments import refuse_arguments
from ..call.kernel import Result
from ..call.partition.needed_keys import Schedule, find_schedule
from ..call.partition.parts import Sums, add_parts, part_of, read_part, start
from ..call.partition.shards import ShardLayout, Shards, check_layout, divide
from ..call.problem import NUM_OPERANDS, Options, Problem, parse, validate
from ..call.validation import broadcast_inputs, read_statistics, split_names
from ..errors import ParameterError, ShapeError, TableError
from ..formula.expression import Expression, conjuncts, table_lookup
from ..formula.tables import Table
from ..statistics import Statistic
from .dispatch import solve
from .functional import read_array
from .options import check_tables, example, fold_traced_scale
from .primitives import vary_together


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_name: Any,
    mask: Any = None,
    score: Any = None,
    scale: Any = None,
    sinks: Any = None,
    see: Statistic | Sequence[Statistic] | dict[str, Statistic] | None = None,
    layout: ShardLayout = "contiguous",
    **unknown: Never,
) -> Any:
    """Compute exact attention over a sequence that is divided among the devices of an axis of `jax.shard_map`.

    Every device calls the function with its shard of query, key and value, inside `jax.shard_map`. `jax.lax.ppermute`
    sends blocks of keys and values from device to device, and each device merges the results of its queries on the
    blocks that it receives. A block that the mask hides from every query of a device is not sent to the device.

    Parameters
    ----------
    query : (..., H, n / R, d_k)
        The queries of this device, where R is the number of devices of the axis.
    key : (..., G, m / R, d_k)
        H is a multiple of G, as in `sightline.attention`.
    value : (..., G, m / R, d_v)
    axis_name : the name of the axis of the mesh along which the positions are divided
    mask, score : as in `sightline.attention`
        The symbols i, j, n and m, and the arrays with an axis of queries or keys, are those of the whole sequence. b
        and h count the batch entries and heads of the arrays that are passed. A table whose entries JAX traces, such as
        an array that enters `shard_map` as an argument, is not read before the program runs: a condition on such a
        table hides pairs, but saves no transfers.
    scale : float or array of one number, default 1/√d_k
    sinks : (H,) floats, optional
    see : list of statistics, or dict from names to statistics, or one statistic, optional
        `lse()`, `entropy()`, `max_score()`, `mass(condition)`, `sum(p * f, over=j)` and `top_k(k)`, and means of them.
    layout : {"contiguous", "zigzag"}
        "contiguous": device r holds the r-th of R parts of the sequence. "zigzag": the sequence has 2R parts, and
        device r holds the parts r and 2R − 1 − r, one after the other. Under a causal mask all devices then compute
        about equally many pairs. `order` returns the order of the positions.

    Returns
    -------
    output : (..., H, n / R, d_v), the dtype of the inputs
        The output for the queries of this device, as `sightline.attention` computes it on the whole sequence.
    seen : tuple, or dict if `see` is a dict; only if `see` is given
        The result of each statistic: (..., H, n / R), and (..., H, n / R, k) for top_k. A mean lacks its axis.

    JAX differentiates the function any number of times, forward and backward. A backward pass receives the blocks again
    and computes their scores again, so between the passes a device stores its shards, and a few numbers for each query
    and each block. No array of n × m entries exists. While a pass runs, XLA decides how many received blocks are in
    memory at once. On the CPU all of them are, so the memory of a device grows with the length of the whole sequence.

    Raises
    ------
    ShapeError
        The layout is "zigzag", and the devices have an odd number of positions.
    ParameterError
        `axis_name` is no axis of the enclosing `jax.shard_map`, `layout` is neither "contiguous" nor "zigzag", dropout
        is not 0, or a statistic is none of those above.
    SightlineError
        Any other error that `sightline.attention` raises. Errors that depend on the entries of traced tables are raised
        when the program runs.

    References
    ----------
    Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; Brandon et
    al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from functools import partial
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> from sightline import i, j
    >>> from sightline.jax.distributed import attention
    >>> mesh = Mesh(np.array(jax.devices()[:1]), "x")
    >>> spec = P(None, None, "x")  # the positions of (batch, heads, positions, width)
    >>> attend = jax.shard_map(partial(attention, axis_name="x", mask=i >= j), mesh=mesh, in_specs=spec, out_specs=spec)
    >>> q = jnp.ones((1, 2, 8, 4))
    >>> jax.jit(attend)(q, q, q).shape
    (1, 2, 8, 4)
    """
    if unknown:
        _refuse(unknown)
    names, statistics = split_names(see)
    statistics = read_statistics(statistics)
    _check_statistics(statistics)
    ranks = _read_axis(axis_name, layout)
    shards = [read_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    sinks = None if sinks is None else read_array("sinks", sinks)
    problem = ShardedProblem.of(shards, sinks, ranks, layout, Options(mask, score, statistics, scale))
    output, seen = _Exchange(problem, shards, axis_name).compute(statistics)
    if see is None:
        return output
    return output, seen if names is None else dict(zip(names, seen, strict=True))


def order(length: int, ranks: int, layout: ShardLayout = "contiguous") -> Any:
    """Return the positions of a sequence in the order in which `jax.shard_map` divides them among the devices.

    `x[..., order(n, R, "zigzag"), :]` puts the positions of an array into the order of the layout, and
    `y[..., np.argsort(order(n, R, "zigzag")), :]` puts a result into the order of the sequence.

    Parameters
    ----------
    length : int
        The number of positions of the whole sequence, n.
    ranks : int
        The number of devices of the axis, R.
    layout : {"contiguous", "zigzag"}
        As in `attention`.

    Returns
    -------
    positions : (n,) int64

    Raises
    ------
    ShapeError
        The length is no multiple of the number of devices, or of twice that number if the layout is "zigzag".
    ParameterError
        `layout` is neither "contiguous" nor "zigzag".

    Examples
    --------
    >>> from sightline.jax.distributed import order
    >>> order(8, 2, "zigzag")
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    check_layout(layout)
    if length % ranks:
        raise ShapeError(
            f"{length} positions on {ranks} devices",
            f"a number of positions that is a multiple of {ranks}",
            "pad the sequence, and hide the added positions with mask=",
        )
    spans = [span for own in divide_equally(length // ranks, ranks, layout).ranks for span in own]
    return np.concatenate([np.arange(span.start, span.stop) for span in spans])


def _refuse(unknown: dict[str, Any]) -> None:
    """Raise an error if `unknown` has an argument besides `dropout=0` and `seed`, which have no effect here."""
    others = {name: value for name, value in unknown.items() if name not in ("dropout", "seed")}
    if others:
        refuse_arguments("jax.distributed.attention", attention, (), others)
    if unknown.get("dropout", 0.0):
        raise ParameterError(
            f"dropout={unknown['dropout']!r} of a sequence on several devices",
            "dropout=0",
            "drop entries of the output: output * jax.random.bernoulli(key, 0.9, output.shape) / 0.9",
        )


def _check_statistics(see: Sequence[Statistic]) -> None:
    """Raise ParameterError for a statistic whose results on parts of the keys cannot be merged."""
    for statistic in see:
        if not statistic.computed.is_mergeable:
            raise ParameterError(
                f"see=[{statistic!r}] of a sequence on several devices",
                "lse(), entropy(), max_score(), mass(condition), sum(p * f, over=j) and top_k(k), and means of them",
                "sightline.attention on the whole sequence",
            )


def _read_axis(axis_name: Any, layout: Any) -> int:
    """Return the number of devices of the axis; raise ParameterError if there is no such axis or layout."""
    check_layout(layout)
    try:
        return int(jax.lax.axis_size(axis_name))
    except (NameError, TypeError) as error:
        raise ParameterError(
            f"axis_name={axis_name!r}",
            "the name of an axis of the mesh, inside jax.shard_map",
            'jax.shard_map(partial(attention, axis_name="x"), mesh=mesh, in_specs=P(None, None, "x"), ...)',
        ) from error


class _Exchange:
    """The computation of one device, which receives blocks of keys from the other devices, one after another.

    `Sums` are sums over the weights exp(S − shift), with a shift for each query. `separate` makes the shift a constant
    for JAX, and the shift's gradient flows through the sums. The factors by which `add_parts` multiplies sums are then
    constants too. So the result is linear in the sums, and a derivative stores only the factors.
    """

    def __init__(self, problem: ShardedProblem, shards: Sequence[Any], axis_name: Any) -> None:
        self.problem, self.shards, self.axis_name = problem, shards, axis_name
        self.size = len(problem.queries.ranks)
        self.rank = jax.lax.axis_index(axis_name)
        self.dtype = resolve_dtype(jnp, problem.whole.accumulator)

    def compute(self, see: Sequence[Statistic]) -> tuple[Any, tuple[Any, ...]]:
        """Return (output, seen) of this device's queries; `see` are the statistics that were requested."""
        whole = self.problem.whole
        sums = [self.start(len(span)) for span in self.problem.queries.ranks[0]]
        for distance in range(self.size):
            for index in range(len(self.problem.keys.ranks[0])):
                sums = self.add_block(sums, distance, index)
        finished = [add_parts([span_sums], whole.see, normalize=True) for span_sums in sums]
        axis = len(whole.batch_shape) + 1  # of the queries
        output, arrays = jax.tree.map(
            lambda *x: jnp.concatenate(x, axis), *[(span_sums.output, span_sums.seen) for span_sums in finished]
        )
        seen = tuple([statistic.build_result(parts) for statistic, parts in zip(whole.see, arrays, strict=True)])
        answer = to_caller(whole, Result(output.astype(whole.query.dtype), None, seen), see)
        leaves, structure = jax.tree.flatten(answer)
        result: tuple[Any, tuple[Any, ...]] = structure.unflatten(vary_together([*self.shards, *leaves])[NUM_OPERANDS:])
        return result

    def start(self, rows: int) -> Sums:
        whole = self.problem.whole
        output = jnp.zeros((*whole.batch_shape, whole.H, rows, whole.d_v), self.dtype)
        sinks = None if whole.sinks is None else whole.sinks[:, None]
        return self.separate(start(whole, output, sinks, self.dtype))

    def separate(self, sums: Sums) -> Sums:
        """Return equal sums whose shift has no gradient. The gradient of the shift flows through the other arrays."""
        return add_parts([sums], self.problem.whole.see, shift=jax.lax.stop_gradient(sums.shift))

    def add_block(self, sums: list[Sums], distance: int, index: int) -> list[Sums]:
        """Return the sums after one more block of keys: block `index` of the device `distance` before this device."""
        readers = self.problem.find_readers(distance, index)
        if not readers.any():
            return sums
        self.shards, sums = jax.lax.optimization_barrier((self.shards, sums))
        parts = jax.checkpoint(partial(self.compute_parts, distance, index, readers))(*self.shards)
        see = self.problem.whole.see
        return [
            span_sums if part is None else add_parts([span_sums, part], see)
            for span_sums, part in zip(sums, parts, strict=True)
        ]

    def compute_parts(self, distance: int, index: int, readers: Any, *shards: Any) -> list[Sums | None]:
        """Return the sums of each span of queries over the keys of one block; None if no device needs the block for it.

        `readers` is the result of `ShardedProblem.find_readers`.
        """
        query, key, value = shards
        rows = self.problem.keys.ranks[0][index].rows
        key, value = key[..., rows, :], value[..., rows, :]
        if distance:
            pairs = [((rank - distance) % self.size, rank) for rank in np.flatnonzero(readers.any(axis=1)).tolist()]
            key, value = (jax.lax.ppermute(x, self.axis_name, pairs) for x in (key, value))
        first_key = _first(self.problem.keys, (self.rank - distance) % self.size, index)
        parts: list[Sums | None] = [None] * readers.shape[1]
        for span in np.flatnonzero(readers.any(axis=0)).tolist():
            first_row = _first(self.problem.queries, self.rank, span)
            query_of_span = query[..., self.problem.queries.ranks[0][span].rows, :]
            arrays = broadcast_inputs({"query": query_of_span, "key": key, "value": value})
            result = solve(self.problem.part(arrays, first_row, first_key), Options())
            parts[span] = self.separate(read_part(result.output.astype(self.dtype), result.lse, result.seen, first_key))
        return parts


def _first(shards: Shards, rank: Any, index: int) -> Any:
    """Return the first position of span number `index` of device `rank`, a number that JAX may trace."""
    return jnp.asarray([spans[index].start for spans in shards.ranks])[rank]


def divide_equally(length: int, ranks: int, layout: ShardLayout) -> Shards:
    """Return the division of a sequence among `ranks` ranks that have `length` positions each.

    Raises
    ------
    ShapeError
        The layout is "zigzag", and `length` is odd.
    """
    if layout == "zigzag" and length % 2:
        raise ShapeError(
            f'{length} positions on each device, layout="zigzag"',
            "an even number, because a device has two parts of equal length",
            f"pad the sequence to {(length + 1) * ranks} positions, and hide the added ones with mask=",
        )
    return divide(length * ranks, ranks, layout, alignment=1)


@dataclass(frozen=True, eq=False)
class ShardedProblem:
    """The problem of the whole sequence, and the division of its positions.

    whole : the problem of the whole sequence; its query, key and value have only shapes and dtypes
    queries, keys : the division of the queries and of the keys
    """

    whole: Problem
    queries: Shards
    keys: Shards

    @classmethod
    def of(cls, shards: Sequence[Any], sinks: Any, ranks: int, layout: ShardLayout, options: Options) -> ShardedProblem:
        """Return the problem whose query, key and value on one rank are `shards`; `options` are those of `parse`."""
        query, key, value = shards
        local = parse(query, key, value, Options(sinks=sinks))
        query, key, value = (example((*x.shape[:-2], ranks * x.shape[-2], x.shape[-1]), x.dtype) for x in shards)
        problem = replace(parse(query, key, value, fold_traced_scale(options)), sinks=local.sinks)
        check_tables(problem)
        return cls(problem, *[divide_equally(length, ranks, layout) for length in (local.n, local.m)])

    @cached_property
    def schedule(self) -> Schedule:
        """Which spans of queries see which key blocks, by the mask's conditions that are known while JAX traces."""
        length = max(self.keys.lengths, default=0)
        return find_schedule(self._known_mask, self.whole.extent, self.queries, self.keys, max(length, 1))

    @property
    def _known_mask(self) -> Expression | None:
        """A mask that reads no traced table and hides only pairs that the problem hides; None if nothing is known."""
        whole = replace(self.whole, see=())
        formulas = [formula for formula in (whole.mask, whole.score) if formula is not None]
        if not all(map(_is_known, formulas)):
            known = [] if whole.mask is None else [each for each in conjuncts(whole.mask) if _is_known(each)]
            if not known:
                return None
            whole = replace(whole, mask=reduce(lambda x, y: x & y, known), score=None)
        try:
            return validate(whole.map_tables(np.asarray)).mask
        except TableError:
            if all(map(_is_known, formulas)):
                raise
            return None  # a condition on a traced table may hide the pairs whose lookup is outside a known table

    def find_readers(self, distance: int, index: int) -> Any:
        """Return (ranks, spans) booleans: True where a span of rank r sees key block `index` of rank r − `distance`."""
        ranks, spans = len(self.queries.ranks), len(self.queries.ranks[0])
        if 0 in self.whole.extent:
            return np.zeros((ranks, spans), bool)
        columns = np.roll(self.schedule.columns[:, index], distance)
        sees = self.schedule.seeing[1].reshape(ranks, spans, -1) > 0
        return sees[np.arange(ranks), :, columns]

    def part(self, arrays: Sequence[Any], first_row: Any, first_key: Any) -> Problem:
        """Return the problem of query, key and value in `arrays`, from query `first_row` and key `first_key` on."""
        row, key = Table(first_row[None])[0], Table(first_key[None])[0]
        whole = self._without_spans
        return part_of(whole, *arrays, first_row=row, first_key=key, see=whole.see)

    @cached_property
    def _without_spans(self) -> Problem:
        """The whole problem. Its tables may have more entries along queries and keys than a part has positions."""
        lookup = table_lookup(lambda table: table.without_axes("i", "j"))
        return self.whole.map_formulas(lambda formula: formula.rewrite(lookup=lookup))


def _is_known(formula: Expression) -> bool:
    """True if the entries of every table are known before the program runs."""
    arrays = [table.array for table in formula.tables]
    return not any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in arrays)
