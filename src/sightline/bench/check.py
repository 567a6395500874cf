"""Whether an answer is right: against the float64 definition, within the budget of `sightline.testing`.

A problem too large to be computed densely is checked where it is sampled. Forward: rows drawn from the whole length, of
the first head and the last, with the keys any of them may see. Backward: one whole head, since the gradient of a key
sums over all queries. Both keep their places, so formulas and dropout see the i, j and h they have. Statistics: as
`seen` says for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from .. import reference
from ..arrays import namespace, resolve
from ..dropout import keep_factor
from ..formula.library import bias
from ..formula.render_array import evaluate
from ..observe import Received, Statistic
from ..problem import Problem
from ..testing import LOOPS, budget_used, dense, orders_of, plain, size_of_terms, sizes_of_gradients
from .races import SEED, Inputs, Race
from .seen import Expected, Matrix, Places, queries_of

__all__ = ["Sampled", "sample", "share_of_budget"]

Array = np.ndarray[Any, np.dtype[Any]]

ROWS = 64  # queries looked at in each head
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
    if race.passes == "forward":
        problem = sample(race, inputs)
        output = _forward(problem, answers["output"][:, problem.heads][:, :, problem.rows].astype(kind))
        return max([output, *(_expected(race, inputs, each).share(answers[repr(each)]) for each in race.see)])
    problem = sample(race, inputs, np.arange(race.n), heads=1)
    head = int(problem.heads[0])
    output = _forward(problem, answers["output"][:, [head]].astype(kind))
    seed = inputs.d_output
    assert seed is not None
    found = {name: array[:, [head]].astype(kind) for name, array in answers.items() if name != "output"}
    return max(output, *_backward(problem, found, seed[:, [head]].astype(kind)))


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
    score = None
    if inputs.bias is not None:
        score = bias(inputs.bias[:, taken][:, :, i][..., j].astype(kind))
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


def _backward(problem: Sampled, found: dict[str, Array], seed: Array) -> Iterator[float]:
    """Shares of the budget the gradients use, as torch finds them through the dense computation."""
    truth = _differentiated(problem, found, seed, "float64", 0)
    orders = [order for order in orders_of(problem) if order not in LOOPS]  # loops over these lengths take minutes
    rough = [_differentiated(problem, found, seed, problem.dtype, order) for order in orders]
    sizes = sizes_of_gradients(problem, seed, stages=_definition(problem))
    for name, gradient in found.items():
        size = sizes[0 if name == "bias" else name]  # the bias is the only table
        yield budget_used(gradient, truth[name], np.stack([each[name] for each in rough]), size)


def _differentiated(problem: Sampled, names: Any, seed: Array, dtype: str, order: int) -> dict[str, Array]:
    import torch

    def leaf(array: Array) -> Any:
        bits = torch.from_numpy(np.asarray(array, np.float32)).to(getattr(torch, problem.dtype))
        return (bits.double() if dtype == "float64" else bits).requires_grad_()

    arrays = {name: leaf(getattr(problem, name)) for name in NAMES}
    tables = {"bias": leaf(problem.tables[0].array)} if "bias" in names else {}
    posed = problem.with_tables(list(tables.values())) if tables else problem
    output, _, _ = dense(replace(posed, **arrays), dtype, order)
    leaves = {name: (arrays | tables)[name] for name in names}
    d_output = torch.from_numpy(np.asarray(seed, np.float32)).to(output.dtype)
    gradients = torch.autograd.grad(output, list(leaves.values()), d_output)
    return {name: found.double().numpy() for name, found in zip(leaves, gradients, strict=True)}
