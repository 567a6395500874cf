"""Whether an answer is right: against the float64 definition, within the budget of `sightline.testing`.

A problem too large to be computed densely is checked where it is sampled. Outputs: rows drawn from the whole length, of
the first head and the last, with the keys any of them may see. Gradients: one whole head, since that of a key sums over
all queries, or all whose d_output is not 0 (`Inputs.checked`); some queries at a time. Both keep their places, so
formulas and dropout see the i, j and h they have. Statistics: as `seen` says for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from .. import reference
from ..accuracy import budget_used, compute_baseline, dense_attention, gradient_term_sizes, term_sizes
from ..arrays import namespace, resolve_dtype
from ..dropout import keep_factor
from ..formula.library import bias
from ..formula.render_array import evaluate
from ..problem import Problem
from ..statistics import Received, Statistic
from .statistic_check import ExpectedStatistic, SampledPositions, WeightMatrix, queries_to_check
from .workloads import SEED, Inputs, Workload

__all__ = ["SampledProblem", "sample", "share_of_budget"]

Array = np.ndarray[Any, np.dtype[Any]]

SAMPLED_ROWS = 64  # queries looked at in each head
GRADIENT_CHUNK_ROWS = 1024  # queries whose gradients are worked out at once
INPUT_NAMES = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class SampledProblem(Problem):
    """Some heads, queries and keys of a problem, each with the position it has there."""

    heads: Array
    rows: Array
    columns: Array

    def positions(self, xp: Any, rows: slice, columns: slice) -> tuple[Any, Any, Any, Any]:
        """b, h, i, j as in the whole problem."""

        def at(array: Any, *shape: int) -> Any:
            return xp.reshape(xp.asarray(array, dtype=xp.int64), shape)

        b = at(np.arange(self.B), *self.batch_shape, 1, 1, 1)
        h, i = at(self.heads, self.H, 1, 1), at(self.rows[rows], -1, 1)
        return b, h, i, at(self.columns[columns], -1)

    @property
    def extent_kept(self) -> tuple[slice, slice]:
        return slice(0, self.n), slice(0, self.m)


def share_of_budget(workload: Workload, inputs: Inputs, results: dict[str, Any]) -> float:
    """The largest share of its budget of rounding errors that any of the answers uses; right is at most 1.

    Parameters
    ----------
    results : by name: "output" (B, H, n, d_v), and where a backward pass is timed the gradients "query", "key",
        "value", "bias"; float32 arrays that hold numbers of the race's dtype; and for each statistic of `see`, as
        it is written, a tuple of its arrays
    """
    kind = resolve_dtype(np, workload.dtype)
    shape = (workload.B, workload.H, workload.n, workload.d_v)
    if results["output"].shape != shape:
        raise ValueError(f"an output {results['output'].shape} where {shape} is due")
    problem = sample(workload, inputs)
    shares = [_output_share(problem, results["output"][:, problem.heads][:, :, problem.rows].astype(kind))]
    if workload.passes == "forward":
        shares += [_expected_statistic(workload, inputs, each).share(results[repr(each)]) for each in workload.see]
    else:
        for name, (truth, rough, size) in _expected_gradients(workload, inputs).items():
            head = slice(-1, None)  # the last query head, and what it reads
            shares.append(budget_used(results[name][:, head].astype(kind), truth, rough, size))
    return max(shares)


def sample(workload: Workload, inputs: Inputs, queries: Array | None = None, heads: int = 2) -> SampledProblem:
    """Some of a race as a problem of its own: these queries, or `SAMPLED_ROWS` that are drawn."""
    rng, kind = np.random.default_rng(SEED), resolve_dtype(np, workload.dtype)
    head_indices = np.unique([0, workload.H - 1] if heads > 1 else [workload.H - 1])
    i = np.sort(rng.choice(workload.n, min(SAMPLED_ROWS, workload.n), replace=False)) if queries is None else queries
    mask, j = workload.formula, np.arange(workload.m)
    if mask is not None:
        j = np.flatnonzero(_evaluate_mask(mask, head_indices, i, j, workload).any((0, 1, 2)))
    group = workload.H // workload.G
    key, value = (array[:, head_indices // group][:, :, j].astype(kind) for array in (inputs.key, inputs.value))
    score = workload.score_formula
    if inputs.bias is not None:
        score = bias(inputs.bias.astype(kind))
    return SampledProblem(
        inputs.query[:, head_indices][:, :, i].astype(kind),
        key,
        value,
        mask=mask,
        score=score,
        sinks=None,
        scale=float(1 / np.sqrt(workload.d_k)),
        dropout=workload.dropout,
        seed=SEED,
        see=(),
        heads_squeezed=False,
        heads=head_indices,
        rows=i,
        columns=j,
    )


def _evaluate_mask(mask: Any, heads: Array, i: Array, j: Array, workload: Workload) -> Array:
    """(1, heads, i, j): the mask's values at these places; no mask of the table reads b."""
    symbols = {"b": np.asarray(0), "h": heads[:, None, None], "i": i[:, None], "j": j, "n": workload.n, "m": workload.m}
    seen = evaluate(mask, symbols, xp=namespace(i), float_dtype=np.dtype("float64"), like=i)
    return np.broadcast_to(seen, (1, heads.size, i.size, j.size))


def _reference_stages(problem: SampledProblem) -> reference.Stages:
    rows, columns = problem.extent_kept
    b, h, i, j = problem.positions(np, rows, columns)
    symbols = {"b": b, "h": h, "i": i, "j": j, "n": problem.n, "m": problem.m}
    options = {"xp": np, "float_dtype": np.dtype("float64"), "like": i}
    allowed: Any = True if problem.mask is None else evaluate(problem.mask, symbols, **options)

    def score(scaled: Array) -> Array:
        if problem.score is None:
            return scaled
        added: Array = evaluate(problem.score, symbols | {"s": scaled}, **options)
        return added

    return reference.forward(
        problem.query,
        problem.key,
        problem.value,
        scale=problem.scale,
        score=score,
        allowed=allowed,
        keep=keep_factor(problem, np, rows, columns, np.float64),
    )


def _output_share(problem: SampledProblem, output: Array) -> float:
    stages = _reference_stages(problem)
    return budget_used(output, stages.output, compute_baseline(problem).output, term_sizes(problem, stages.weights))


@lru_cache(maxsize=8)  # the statistics of a race, for all who take part
def _expected_statistic(workload: Workload, inputs: Inputs, statistic: Statistic) -> ExpectedStatistic:
    problem = sample(
        workload,
        inputs,
        queries_to_check(statistic, workload, SAMPLED_ROWS),
        1 if isinstance(statistic, Received) else 2,
    )
    stages, at = _reference_stages(problem), SampledPositions(workload, problem.heads, problem.rows, problem.columns)
    return ExpectedStatistic.of(statistic, WeightMatrix(at, stages.weights, stages.masked, stages.lse), problem)


@lru_cache(maxsize=2)  # for all who take part
def _expected_gradients(workload: Workload, inputs: Inputs) -> dict[str, tuple[Array, Array, Array]]:
    """By name: gradients of the last head, as plain computations have them (orders first), and their terms' sizes."""
    assert inputs.d_output is not None
    assert workload.G == workload.H  # a key head's gradient is that of its one query head
    orders = 0, 1  # those after them are loops, which take minutes over these lengths
    lengths = {
        "query": (workload.n, workload.d_k),
        "key": (workload.m, workload.d_k),
        "value": (workload.m, workload.d_v),
    }
    lengths |= {"bias": (workload.n, workload.m)} if workload.bias else {}
    kinds = ["truth", *orders, "size"]
    wide = {kind: np.float32 if kind in orders else np.float64 for kind in kinds}
    sums = {
        name: {kind: np.zeros((workload.B, 1, *shape), wide[kind]) for kind in kinds} for name, shape in lengths.items()
    }
    contributing = np.flatnonzero(inputs.d_output[:, -1].any((0, -1)))  # queries that have a part in them
    for rows in np.array_split(contributing, -(-contributing.size // GRADIENT_CHUNK_ROWS)):
        problem = sample(workload, inputs, rows, heads=1)
        seed = inputs.d_output[:, problem.heads][:, :, rows]
        sizes = gradient_term_sizes(problem, seed, stages=_reference_stages(problem))
        parts: dict[Any, dict[str, Array]] = {"truth": _differentiate(problem, list(lengths), seed, "float64", 0)}
        parts |= {order: _differentiate(problem, list(lengths), seed, problem.dtype, order) for order in orders}
        parts["size"] = {name: sizes[0 if name == "bias" else name] for name in lengths}  # it is the only table
        places: dict[str, Any] = {"query": rows, "bias": slice(None)}  # of which every part is a whole table
        for kind, found in parts.items():
            for name, part in found.items():
                sums[name][kind][..., places.get(name, problem.columns), :] += part[:, -1:]
    narrow = resolve_dtype(np, workload.dtype)
    return {
        name: (of["truth"], np.stack([of[order].astype(narrow) for order in orders]), of["size"])
        for name, of in sums.items()
    }


def _differentiate(
    problem: SampledProblem, names: Sequence[str], seed: Array, dtype: str, order: int
) -> dict[str, Array]:
    """Gradients as torch finds them through the dense computation in that dtype, in the accumulator's."""
    import torch

    wide = torch.float64 if dtype == "float64" else getattr(torch, problem.accumulator)

    def leaf(array: Array) -> Any:
        return torch.from_numpy(np.asarray(array, np.float32)).to(wide).requires_grad_()

    arrays = {name: leaf(getattr(problem, name)) for name in INPUT_NAMES}
    tables = {"bias": leaf(problem.tables[0].array)} if "bias" in names else {}
    differentiated = problem.with_tables(list(tables.values())) if tables else problem
    output, _, _ = dense_attention(replace(differentiated, **arrays), dtype, order)
    d_output = torch.from_numpy(seed).to(output.dtype)
    leaves = arrays | tables
    gradients = torch.autograd.grad(output, [leaves[name] for name in names], d_output)
    return {name: found.numpy() for name, found in zip(names, gradients, strict=True)}
