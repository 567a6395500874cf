"""Backward passes against derivatives found another way: torch's through the dense computation, and differences."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from strategies import DTYPES, cases, to_torch

from sightline import weights
from sightline.arrays import dtype_name, to_numpy
from sightline.formula.expression import Lookup, walk
from sightline.streaming import backward as streaming_backward
from sightline.testing import assert_within_budget, dense, orders_of

NAMES = ("query", "key", "value")


def differentiated(problem, seeds, dtype, order):
    """Gradients of Σ seed ∘ result, by torch through the dense computation of one order in that dtype."""
    wide = torch.float64 if dtype == "float64" else None

    def leaf(array):
        tensor = to_torch(np.array(array))
        if not tensor.is_floating_point():
            return tensor
        return (tensor if wide is None else tensor.to(wide)).requires_grad_()

    arrays = {name: leaf(getattr(problem, name)) for name in NAMES}
    tables = [leaf(entry.array) for entry in problem.tables]
    sinks = None if problem.sinks is None else leaf(problem.sinks)
    posed = replace(problem.with_tables(tables), **arrays, sinks=sinks)
    results = dense(posed, dtype, order)
    seen = torch.isfinite(results[1])
    total = sum(
        (
            to_torch(seed).to(result.dtype) * (torch.where(seen, result, 0.0) if result.ndim == seen.ndim else result)
        ).sum()
        for seed, result in zip(seeds, results, strict=True)
    )
    inputs = [*arrays.values(), *(t for t in tables if t.requires_grad), *([] if sinks is None else [sinks])]
    found = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    return [to_numpy(g).astype(np.float64) for g in found]


def check(case, framework="numpy"):
    """Streaming's gradients of output, lse and weights together, within the budget."""
    problem = case.pose(see=[weights()])
    rng = np.random.default_rng(1)
    shapes = ((*problem.lead, problem.H, problem.n, problem.d_v), (*problem.lead, problem.H, problem.n))
    seeds = [rng.normal(size=shape).astype(np.float32) for shape in (*shapes, (*shapes[1], problem.m))]
    if np.isnan(dense(problem, "float64")[0]).any():
        return  # a score that is NaN
    oracle = differentiated(problem, seeds, "float64", 0)
    plain = [differentiated(problem, seeds, problem.dtype, order) for order in orders_of(problem)]
    given = case.as_torch().pose(see=[weights()]) if framework == "torch" else problem
    d_output, d_lse, d_weights = (to_torch(x) if framework == "torch" else x for x in seeds)
    with np.errstate(all="ignore"):
        found = streaming_backward(given, d_output, d_lse, (d_weights,))
    score_tables = () if problem.score is None else {id(x.table) for x in walk(problem.score) if isinstance(x, Lookup)}
    float_tables = [k for k, entry in enumerate(problem.tables) if entry.kind == "float"]
    for k, entry in enumerate(problem.tables):
        assert (found.tables[k] is not None) == (entry.kind == "float" and id(entry) in score_tables)
    answers = [found.query, found.key, found.value, *(found.tables[k] for k in float_tables), found.sinks]
    for what, answer, truth, *rough in itertools.zip_longest(
        [*NAMES, *(f"table {k}" for k in float_tables), "sinks"], answers, oracle, *plain
    ):
        if answer is not None:
            finer = what not in NAMES and dtype_name(answer) == "float64"  # than the sums it comes from
            judged = to_numpy(answer).astype(problem.accumulator) if finer else answer
            assert_within_budget(judged, truth, rough, f"gradient of {what}")


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_problems(dtype, framework):
    @settings(max_examples=80)
    @given(cases(dtypes=(dtype,), poison=False, layouts=("contiguous", "positions before heads"), largest=2000))
    def conforms(case):
        check(case, framework)

    conforms()
