"""Attention on a KV cache whose sequences share a prefix: one call for each part of the keys, merged exactly.

The queries of all sequences that share a prefix are rows of one call, so the prefix is read once for all sequences
(Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes", arXiv:2402.05099, 2024, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from ..arrays.operations import accumulator, device_option, dtype_name, namespace, resolve_dtype
from ..call.partition.parts import Sums, add_parts, read_part
from ..call.problem import Options
from ..formula.expression import Expression, Lookup, walk
from ..kv_cache import KVCache, needs_no_conversion
from ..kv_cache.query_positions import free_symbols, rewrite, rewrite_for_prefix
from ..kv_cache.row_positions import SharedPrefix
from ..statistics import Statistic, arrays_of, lse

LSE = lse()
Attend = Callable[[Any, Any, Any, Options], tuple[Any, Any]]


def can_merge(query: Any, cache: KVCache, options: Options) -> bool:
    """True if a call on a cache with a prefix can be merged from one call on the prefix and one on the other keys.

    Otherwise each sequence needs all its keys in one array, which is a copy (`KVCache.joined`).
    """
    stored = cache.rows()[0]
    return (
        needs_no_conversion(query, cache)
        and query.ndim == stored.ndim
        and query.shape[:-3] == stored.shape[:-3]
        and not options.dropout
        and all(
            formula is None or (isinstance(formula, Expression) and not _has_pairs(formula))
            for formula in (options.mask, options.score)
        )
        and (options.see is None or isinstance(options.see, tuple))
        and all(isinstance(statistic, Statistic) and statistic.is_mergeable for statistic in options.see or ())
    )


def _has_pairs(formula: Expression) -> bool:
    """True if a table of the formula has an entry for each pair (i, j), such as a mask array or a list of blocks."""
    tables = [node.table for node in walk(formula) if isinstance(node, Lookup)]
    return any({"i", "j"} <= {axis[0] for axis in table.axes or () if axis} for table in tables)


def attend_in_parts(query: Any, cache: KVCache, options: Options, attend: Attend) -> tuple[Any, tuple[Any, ...]]:
    """Return the output and the statistics of attention on a cache with a prefix.

    `attend(query, key, value, options)` returns output and statistics of one call, whose arrays have four axes.
    """
    squeezed = query.ndim
    query = query if squeezed == 4 else query[:, None] if squeezed == 3 else query[None, None]
    see = options.see or ()
    asked = options.replace(see=(LSE, *see), sinks=None, dropout=0.0, seed=None, by_position=False)
    assert cache.prefix is not None
    parts = [_attend_to_prefix(query, cache, prefix, asked, attend) for prefix in cache.prefix.parts]
    key, value = cache.stored_rows()
    if key.shape[2]:
        rewriting = cache.rewriting(query.shape[2], "i" in free_symbols(asked), query.shape[1])
        answer = attend(query, key, value, rewrite(asked, rewriting).replace(row_formats=cache.row_formats))
        parts.append(_read(*answer, cache.prefix.row_counts))
    merged = _merge(parts, see, options.sinks)
    output = namespace(query).astype(merged.output, query.dtype)
    arrays = [output, *[array for result in merged.seen for array in result]]
    output, *arrays = [x if squeezed == 4 else x[:, 0] if squeezed == 3 else x[0, 0] for x in arrays]
    pairs = zip(see, merged.seen, strict=True)
    seen = [statistic.build_result([arrays.pop(0) for _ in result]) for statistic, result in pairs]
    return output, tuple(seen)


def _attend_to_prefix(query: Any, cache: KVCache, prefix: SharedPrefix, asked: Options, attend: Attend) -> Sums:
    """Return the sums over the keys of one prefix.

    Batch entry k of the call has as rows the queries of all sequences that begin with sequence k of `prefix.cache`.
    """
    xp, (B, H, n, d) = namespace(query), query.shape
    groups, (count, most) = prefix.groups, prefix.groups.shape
    key, value = prefix.cache.stored_rows()
    options = rewrite_for_prefix(cache, prefix, n, asked, H // key.shape[1])
    grouped = _take(query, groups.ravel()).reshape(count, most, H, n, d)
    rows = xp.permute_dims(grouped, (0, 2, 1, 3, 4)).reshape(count, H, most * n, d)
    output, seen = attend(rows, key, value, options.replace(row_formats=prefix.cache.row_formats))
    places = np.zeros(B, np.int64)
    places[groups[groups >= 0]] = np.flatnonzero(groups >= 0)

    def ungroup(array: Any) -> Any:
        split = array.reshape(count, H, most, n, *array.shape[3:])
        order = (0, 2, 1, *range(3, split.ndim))
        return _take(xp.permute_dims(split, order).reshape(count * most, H, n, *array.shape[3:]), places)

    results = [type(result)(*map(ungroup, result)) if isinstance(result, tuple) else ungroup(result) for result in seen]
    return _read(ungroup(output), results, prefix.row_counts - prefix.own_row_counts)


def _take(array: Any, indices: Any) -> Any:
    """Return array[indices], without a copy if the indices are 0, 1, 2, ... up to the end of the first axis."""
    return array if (indices.size == len(array) and (indices == np.arange(len(array))).all()) else array[indices]


def _read(output: Any, seen: Any, first_rows: Any) -> Sums:
    """Return the `Sums` of a part, whose row 0 is row first_rows[b] of sequence b. `seen` begins with the lse."""
    lse, *others = seen
    xp = namespace(output)

    def shift(result: Any) -> Any:
        array, *keys = arrays_of(result)
        first = [xp.asarray(first_rows.reshape(-1, *[1] * (key.ndim - 1)), **device_option(output)) for key in keys]
        return array, *[xp.where(key < 0, key, key + rows) for key, rows in zip(keys, first, strict=True)]

    wide = xp.astype(output, resolve_dtype(xp, accumulator(dtype_name(output))))
    return read_part(wide, lse, [shift(one) for one in others], 0)


def _merge(parts: Sequence[Sums], see: Sequence[Statistic], sinks: Any) -> Sums:
    """Return the sums over all keys. A sink adds to the total weight, and nothing to the output."""
    xp = namespace(parts[0].output)
    shifts = [part.shift.detach() if hasattr(part.shift, "detach") else part.shift for part in parts]
    with np.errstate(all="ignore"):  # ∞ and NaN in the parts propagate without warnings
        merged = add_parts(parts, see, normalize=True, shift=reduce(xp.maximum, shifts))
        if sinks is None:
            return merged
        lse = xp.logaddexp(merged.shift, xp.astype(sinks, merged.shift.dtype)[:, None])
        return add_parts([merged], see, shift=lse)
