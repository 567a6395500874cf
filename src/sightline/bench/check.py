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
from ..accuracy import budget_used, dense, plain, size_of_terms, sizes_of_gradients
from ..arrays import namespace, resolve
from ..dropout import keep_factor
from ..formula.library import bias
from ..formula.render_array import evaluate
from ..problem import Problem
from ..statistics import Received, Statistic
from .races import SEED, Inputs, Race
from .seen import Expected, Matrix, Places, queries_of

__all__ = ["Sampled", "sample", "share_of_budget"]

Array = np.ndarray[Any, np.dtype[Any]]

ROWS = 64  # queries looked at in each head
CHUNK = 1024  # queries whose gradients are worked out at once
NAMES = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class Sampled(Problem):
    """Some heads, queries and keys of a problem, each with the position it has there."""

    heads: Array
    rows: Array
    columns: Array

    def positions(self, xp: Any, rows: slice, columns: slice) -> tuple[Any, Any, Any, Any]:
        """b, h, i, j as in the whole problem."""

        def at(array: Any, *shape: int) -> Any:
            return xp.reshape(xp.asarray(array, dtype=xp.int64), shape)

        b = at(np.arange(self.B), *self.lead, 1, 1, 1)
        h, i = at(self.heads, self.H, 1, 1), at(self.rows[rows], -1, 1)
        return b, h, i, at(self.columns[columns], -1)

    @property
    def extent_kept(self) -> tuple[slice, slice]:
        return slice(0, self.n), slice(0, self.m)


def share_of_budget(race: Race, inputs: Inputs, answers: dict[str, Any]) -> float:
    """The largest share of its budget of rounding errors that any of the answers uses; right is at most 1.

    Parameters
    ----------
    answers : by name: "output" (B, H, n, d_v), and where a backward pass is timed the gradients "query", "key",
        "value", "bias"; float32 arrays that hold numbers of the race's dtype; and for each statistic of `race.see`, as
        it is written, a tuple of its arrays
    """
    kind = resolve(np, race.dtype)
    shape = (race.B, race.H, race.n, race.d_v)
    if answers["output"].shape != shape:
        raise ValueError(f"an output {answers['output'].shape} where {shape} is due")
    problem = sample(race, inputs)
    shares = [_forward(problem, answers["output"][:, problem.heads][:, :, problem.rows].astype(kind))]
    if race.passes == "forward":
        shares += [_expected(race, inputs, each).share(answers[repr(each)]) for each in race.see]
    else:
        for name, (truth, rough, size) in _gradients(race, inputs).items():
            head = slice(-1, None)  # the last query head, and what it reads
            shares.append(budget_used(answers[name][:, head].astype(kind), truth, rough, size))
    return max(shares)


def sample(race: Race, inputs: Inputs, queries: Array | None = None, heads: int = 2) -> Sampled:
    """Some of a race as a problem of its own: these queries, or `ROWS` that are drawn."""
    rng, kind = np.random.default_rng(SEED), resolve(np, race.dtype)
    taken = np.unique([0, race.H - 1] if heads > 1 else [race.H - 1])
    i = np.sort(rng.choice(race.n, min(ROWS, race.n), replace=False)) if queries is None else queries
    mask, j = race.formula, np.arange(race.m)
    if mask is not None:
        j = np.flatnonzero(_allowed(mask, taken, i, j, race).any((0, 1, 2)))
    group = race.H // race.G
    key, value = (array[:, taken // group][:, :, j].astype(kind) for array in (inputs.key, inputs.value))
    score = race.formula_of_score
    if inputs.bias is not None:
        score = bias(inputs.bias.astype(kind))
    return Sampled(
        inputs.query[:, taken][:, :, i].astype(kind),
        key,
        value,
        mask=mask,
        score=score,
        sinks=None,
        scale=float(1 / np.sqrt(race.d_k)),
        dropout=race.dropout,
        seed=SEED,
        see=(),
        headless=False,
        heads=taken,
        rows=i,
        columns=j,
    )


def _allowed(mask: Any, heads: Array, i: Array, j: Array, race: Race) -> Array:
    """(1, heads, i, j): the mask's values at these places; no mask of the table reads b."""
    symbols = {"b": np.asarray(0), "h": heads[:, None, None], "i": i[:, None], "j": j, "n": race.n, "m": race.m}
    seen = evaluate(mask, symbols, xp=namespace(i), float_dtype=np.dtype("float64"), like=i)
    return np.broadcast_to(seen, (1, heads.size, i.size, j.size))


def _definition(problem: Sampled) -> reference.Stages:
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


def _forward(problem: Sampled, output: Array) -> float:
    stages = _definition(problem)
    return budget_used(output, stages.output, plain(problem).output, size_of_terms(problem, stages.weights))


@lru_cache(maxsize=8)  # the statistics of a race, for all who take part
def _expected(race: Race, inputs: Inputs, statistic: Statistic) -> Expected:
    problem = sample(race, inputs, queries_of(statistic, race, ROWS), 1 if isinstance(statistic, Received) else 2)
    stages, at = _definition(problem), Places(race, problem.heads, problem.rows, problem.columns)
    return Expected.of(statistic, Matrix(at, stages.weights, stages.masked, stages.lse), problem)


@lru_cache(maxsize=2)  # for all who take part
def _gradients(race: Race, inputs: Inputs) -> dict[str, tuple[Array, Array, Array]]:
    """By name: gradients of the last head, as plain computations have them (orders first), and their terms' sizes."""
    assert inputs.d_output is not None
    assert race.G == race.H  # a key head's gradient is that of its one query head
    orders = 0, 1  # those after them are loops, which take minutes over these lengths
    lengths = {"query": (race.n, race.d_k), "key": (race.m, race.d_k), "value": (race.m, race.d_v)}
    lengths |= {"bias": (race.n, race.m)} if race.bias else {}
    kinds = ["truth", *orders, "size"]
    wide = {kind: np.float32 if kind in orders else np.float64 for kind in kinds}
    sums = {
        name: {kind: np.zeros((race.B, 1, *shape), wide[kind]) for kind in kinds} for name, shape in lengths.items()
    }
    weighed = np.flatnonzero(inputs.d_output[:, -1].any((0, -1)))  # queries that have a part in them
    for rows in np.array_split(weighed, -(-weighed.size // CHUNK)):
        problem = sample(race, inputs, rows, heads=1)
        seed = inputs.d_output[:, problem.heads][:, :, rows]
        sizes = sizes_of_gradients(problem, seed, stages=_definition(problem))
        parts: dict[Any, dict[str, Array]] = {"truth": _differentiated(problem, list(lengths), seed, "float64", 0)}
        parts |= {order: _differentiated(problem, list(lengths), seed, problem.dtype, order) for order in orders}
        parts["size"] = {name: sizes[0 if name == "bias" else name] for name in lengths}  # it is the only table
        places: dict[str, Any] = {"query": rows, "bias": slice(None)}  # of which every part is a whole table
        for kind, found in parts.items():
            for name, part in found.items():
                sums[name][kind][..., places.get(name, problem.columns), :] += part[:, -1:]
    narrow = resolve(np, race.dtype)
    return {
        name: (of["truth"], np.stack([of[order].astype(narrow) for order in orders]), of["size"])
        for name, of in sums.items()
    }


def _differentiated(problem: Sampled, names: Sequence[str], seed: Array, dtype: str, order: int) -> dict[str, Array]:
    """Gradients as torch finds them through the dense computation in that dtype, in the accumulator's."""
    import torch

    wide = torch.float64 if dtype == "float64" else getattr(torch, problem.accumulator)

    def leaf(array: Array) -> Any:
        return torch.from_numpy(np.asarray(array, np.float32)).to(wide).requires_grad_()

    arrays = {name: leaf(getattr(problem, name)) for name in NAMES}
    tables = {"bias": leaf(problem.tables[0].array)} if "bias" in names else {}
    posed = problem.with_tables(list(tables.values())) if tables else problem
    output, _, _ = dense(replace(posed, **arrays), dtype, order)
    d_output = torch.from_numpy(seed).to(output.dtype)
    leaves = arrays | tables
    gradients = torch.autograd.grad(output, [leaves[name] for name in names], d_output)
    return {name: found.numpy() for name, found in zip(names, gradients, strict=True)}
