"""What the backward passes of several kernels share: gradients of tables and sinks, and limits and errors of lse."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.operations import convert, detach, dtype_name, namespace, resolve_dtype, to_numpy
from ..formula.expression import Lookup, walk
from .problem import Problem

MAX_LSE_DIFFERENCE = 2.0**-12  # of two computations of one lse; the weights then differ by less than half precision
MAX_LSE = {"float32": 2.0**23, "float64": 2.0**52}  # above this lse, adjacent floats of the dtype differ by 1 or more


def is_lse_too_large(lse: Any, accumulator: str, or_nonfinite: bool = False) -> bool:
    """True if a finite |lse| exceeds `MAX_LSE`, so that the weights exp(score − lse) of a query may not sum to 1.

    The scores of a later pass are then rounded differently from the scores that made the lse. With `or_nonfinite`, an
    lse of NaN or +∞ also gives True. The forward kernel sets `imprecise_lse_flag` in the same cases.
    """
    lse = to_numpy(lse)
    is_read = lse != -np.inf if or_nonfinite else np.isfinite(lse)
    return not bool(np.max(np.abs(lse), where=is_read, initial=0.0) <= MAX_LSE[accumulator])


def find_learned_lookups(problem: Problem, wanted_tables: Collection[int]) -> list[tuple[int, Lookup, int]]:
    """Return (index, node, slot) of each node of the score formula that reads a float table among `wanted_tables`.

    The index is that of the node in `walk(problem.score)`. The slot is that of the table in `Problem.tables`.
    """
    slots = {id(table): slot for slot, table in enumerate(problem.tables)}
    return [
        (index, node, slots[id(node.table)])
        for index, node in enumerate(() if problem.score is None else walk(problem.score))
        if isinstance(node, Lookup) and node.kind == "float" and slots[id(node.table)] in wanted_tables
    ]


def sum_by_table(terms: Iterable[tuple[int, Any]], tables: Mapping[int, Any]) -> dict[int, Any]:
    """Return, for each table, the sum of the gradients of its lookups, in the library and dtype of the table's array.

    A slot is an index in `Problem.tables`. `terms` are (slot, gradient) of each lookup. `tables` maps slots to arrays,
    and the result maps slots to sums.
    """
    totals: dict[int, Any] = {}
    for slot, term in terms:
        totals[slot] = totals[slot] + term if slot in totals else term
    return {
        slot: namespace(tables[slot]).astype(convert(total, tables[slot]), tables[slot].dtype, copy=False)
        for slot, total in totals.items()
    }


def sink_weights(sinks: Any, lse: Any) -> Any:
    """Return the weight of each sink for each query, exp(sink_h − lse), (..., H, n) in the dtype of lse."""
    xp = namespace(lse)
    finite_lse = xp.where(lse == -math.inf, xp.zeros_like(lse), lse)  # the sink is −∞ too, and its weight 0
    return xp.exp(xp.astype(sinks, lse.dtype)[:, None] - finite_lse)


def sum_sink_gradients(sinks: Any, lse: Any, delta: Any) -> Any:
    """Return dsink_h = −Σ exp(sink_h − lse) δ, summed over batches and queries in the dtype of δ, (H,) as the sinks."""
    xp = namespace(lse)
    sums = xp.sum(-xp.astype(sink_weights(sinks, lse), delta.dtype) * delta, axis=-1)
    return xp.astype(xp.sum(xp.reshape(sums, (-1, sinks.shape[0])), axis=0), sinks.dtype)


def differentiate_sinks(sinks: Any, d_output: Any, d_lse: Any, output: Any, lse: Any) -> Any:
    """Return dsink_h = −Σ exp(sink_h − lse) δ, summed over batches and queries, with δ = Σ dO ∘ O − d_lse.

    d_output and output are (..., H, n, d_v); lse and d_lse are (..., H, n).
    """
    sinks, output, lse, xp = detach(sinks), detach(output), detach(lse), namespace(output)
    wide = resolve_dtype(xp, "float64" if dtype_name(output) == "float64" else "float32")
    delta = xp.sum(xp.astype(d_output, wide) * xp.astype(output, wide), axis=-1)
    if d_lse is not None:
        delta = delta - xp.astype(d_lse, wide)
    return sum_sink_gradients(sinks, lse, delta)


def widen(*arrays: Any) -> list[Any]:
    """Return copies of arrays of half precision in float32."""
    return [namespace(x).astype(detach(x), resolve_dtype(namespace(x), "float32")) for x in arrays]


def subtract_rounding(d_lse: Any, d_output: Any, saved: Sequence[Any], exact: Sequence[Any]) -> Any:
    """Return d_lse − Σ dO ∘ (O − output), so that δ = Σ dO ∘ output − d_lse is that of the output O in float32.

    A rounded output changes the gradients of all pairs of a query alike. The gradient of a table is a sum over many
    pairs, whose terms may cancel. `saved` and `exact` are (output, lse). If they have different lse, the saved output
    belongs to the keys of other parts of a sequence too, and the result is d_lse.
    """
    d_output, output = widen(d_output, saved[0])
    rounding = np.asarray(to_numpy(namespace(output).sum(d_output * (exact[0] - output), axis=-1)), np.float64)
    with np.errstate(invalid="ignore"):  # −∞ − (−∞) for queries without keys
        is_own = np.abs(to_numpy(exact[1]) - to_numpy(saved[1])) < MAX_LSE_DIFFERENCE
    rounding = np.where(is_own, rounding, 0.0)
    return convert(-rounding if d_lse is None else to_numpy(d_lse) - rounding, output)
