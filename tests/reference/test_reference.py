"""The definition equals the papers' formulas: hand-computed cases, and torch's own attention."""

import math

import numpy as np
import pytest
import torch

from sightline import bias, causal, softcap, weights
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.reference.accuracy import compute_baseline
from sightline.reference.definition import compute_stages, forward, nan_safe_matmul
from sightline.reference.streaming import Streaming
from sightline.reference.testing import assert_within_budget


def test_a_case_worked_by_hand():
    """Scores 0 and ln 3 give weights ¼ and ¾."""
    query, key = np.array([[[1.0]]]), np.array([[[0.0], [math.log(3)]]])
    value = np.array([[[4.0, 0.0], [0.0, 8.0]]])
    stages = forward(query, key, value, scale=1.0)
    assert stages.weights == pytest.approx(np.array([[[0.25, 0.75]]]))
    assert stages.output == pytest.approx(np.array([[[1.0, 6.0]]]))
    assert stages.lse == pytest.approx(np.array([[math.log(4)]]))


def test_a_sink_takes_weight_and_adds_no_value():
    """A sink of ln 4 and scores whose exponentials sum to 4 share the weight equally."""
    query, key = np.array([[[1.0]]]), np.array([[[0.0], [math.log(3)]]])
    stages = forward(query, key, np.array([[[4.0], [8.0]]]), scale=1.0, sinks=np.array([math.log(4)]))
    assert stages.weights == pytest.approx(np.array([[[0.125, 0.375]]]))
    assert stages.output == pytest.approx(np.array([[[3.5]]]))
    assert stages.lse == pytest.approx(np.array([[math.log(8)]]))


def test_a_query_without_keys():
    x = np.ones((1, 2, 3))
    stages = forward(x, x, x * np.nan, scale=1.0, allowed=np.zeros((2, 2), bool))
    assert not stages.output.any()
    assert not stages.weights.any()
    assert (stages.lse == -np.inf).all()


def test_a_weight_of_0_adds_nothing_even_of_nan():
    weights, rows = np.array([[0.0, 1.0], [0.5, 0.5]]), np.array([[np.nan, np.inf], [1.0, 2.0]])
    found = nan_safe_matmul(weights, rows)
    assert np.array_equal(found, [[1.0, 2.0], [np.nan, np.inf]], equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kernel", [Streaming(), Cpu()], ids=lambda kernel: kernel.name)
def test_queries_whose_scores_are_all_huge(kernel, dtype, rng):
    """ln 5, the logarithm of the sum, is lost in an lse of the size of the scores, but not in the weights."""
    least, x = np.finfo(dtype).min, rng.normal(size=(1, 2, 5, 3)).astype(dtype)
    rows = [[least] * 5, [0.0] * 2 + [least] * 3, [1e20] * 5, [1e20] * 2 + [least] * 3, [-1e20] * 4 + [least]]
    problem = make_problem(x, x, x, score=bias(np.array(rows, dtype)), see=[weights()])
    oracle = compute_stages(problem).weights
    assert oracle[0, 0, 0] == pytest.approx(0.2)
    assert_within_budget(kernel.run(problem).seen[0], oracle, oracle.astype(dtype))


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("mask", [None, "causal", "dense"])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_agrees_with_torchs_attention(mask, scale, groups, rng):
    q, k, v = (rng.normal(size=shape) for shape in ((2, 6, 11, 5), (2, groups, 11, 5), (2, groups, 11, 4)))
    allowed = rng.random((2, 1, 11, 11)) < 0.6
    allowed[..., 0] = True  # torch differs from the definition on rows without allowed keys
    given = {None: None, "causal": causal(), "dense": allowed}[mask]
    problem = make_problem(q, k, v, mask=given, scale=scale)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, (q, k, v)),
        attn_mask=torch.from_numpy(allowed) if mask == "dense" else None,
        is_causal=mask == "causal",
        scale=scale,
        enable_gqa=True,
    ).numpy()
    assert_within_budget(theirs, compute_stages(problem).output, compute_baseline(problem).output)


def test_stages_are_named_in_order(rng):
    x = rng.normal(size=(1, 2, 7, 3))
    stages = compute_stages(make_problem(x, x, x, mask=causal(), score=softcap(1.5), scale=0.5))
    scores = x @ x.swapaxes(-1, -2)
    assert np.array_equal(stages.scores, scores)
    assert np.array_equal(stages.scaled, scores * 0.5)
    assert np.array_equal(stages.masked, np.where(np.tri(7), np.tanh(stages.scaled / 1.5) * 1.5, -np.inf))
    assert stages.weights.sum(-1) == pytest.approx(np.ones((1, 2, 7)))
    assert np.exp(stages.masked - stages.lse[..., None]) == pytest.approx(stages.weights)
