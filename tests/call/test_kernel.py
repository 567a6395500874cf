"""The choice of a kernel, its reasons, and the text of `explain`."""

import dataclasses

import numpy as np
import pytest

import sightline
from sightline import alibi, causal, window
from sightline.api.kernels import KERNELS
from sightline.call.kernel import choose
from sightline.call.problem import make_problem
from sightline.errors import KernelRefusedError, ParameterError
from stub_kernel import Choosy

X = np.ones((2, 4, 96, 8), np.float32)


def test_the_kernel_with_the_lowest_cost_is_chosen():
    kernels = [Choosy("dear", 3.0), Choosy("cheap", 1.0, "wine", "song"), Choosy("fair", 2.0)]
    plan = choose(kernels, make_problem(X, X, X))
    assert plan.kernel.name == "fair"
    assert not plan.forced
    assert [str(reason) for reason in plan.refusals["cheap"]] == ["wine (no wine)", "song (no song)"]
    assert plan.refusals["dear"] == ()


def test_a_requested_kernel_runs_or_raises_all_its_refusals():
    kernels = [Choosy("dear", 3.0), Choosy("cheap", 1.0, "wine", "song")]
    assert choose(kernels, make_problem(X, X, X), "dear").forced
    with pytest.raises(KernelRefusedError, match=r"(?s)wine; song.*no wine; no song; or leave kernel=None"):
        choose(kernels, make_problem(X, X, X), "cheap")
    with pytest.raises(ParameterError, match="'dear', 'cheap'"):
        choose(kernels, make_problem(X, X, X), "dearest")


def test_names_are_unique_and_one_kernel_refuses_nothing():
    names = [kernel.name for kernel in KERNELS]
    assert len(names) == len(set(names))
    problem = make_problem(*[X.astype(np.float16)] * 3, mask=causal(), score=alibi(4), dropout=0.1, seed=1)
    able = [kernel.name for kernel in KERNELS if not list(kernel.refuses(problem))]
    assert "streaming" in able
    assert "reference" in able


REFUSED = {"cpu": ["d_k", "d_k", "no pairs"], "triton": ["numpy", "d_k", "numpy", "d_k", "no pairs"], "streaming": []}
REFUSED |= {"reference": ["reference has no backward pass"], "gather": ["no list of keys", "no pairs"] * 2}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_refusal_has_a_cure(kernel):
    """NumPy arrays of wide heads without pairs, which both generated kernels refuse, forward and backward."""
    problem = make_problem(*[np.zeros((1, 1, 0, 4096), np.float32)] * 3)
    refusals = [*kernel.refuses(problem), *kernel.refuses_backward(problem)]
    for refusal, reason in zip(refusals, REFUSED[kernel.name], strict=True):
        assert refusal.reason.startswith(reason)
        assert refusal.cure.strip()


def test_explain_counts_the_tiles_to_compute():
    explanation = sightline.explain(X, X, X, mask=causal())
    assert explanation.tiles == {"empty": 2 * 4, "full": 2 * 4 * 1, "partial": 2 * 4 * 2}
    assert explanation.dense_flops == 2 * 2 * 4 * 96 * 96 * 16
    assert explanation.flops == explanation.dense_flops * 3 // 4
    assert explanation.memory < explanation.dense_memory
    dense = sightline.explain(X, X, X, mask=np.tril(np.ones((96, 96), bool)))
    assert dense.memory - explanation.memory == 96 * 96  # the mask is read and counted


def test_explain_prints_every_part():
    explanation = sightline.explain(X, X, X, mask=window(5), score=alibi(4), sinks=np.zeros(4), dropout=0.25, seed=3)
    page = str(explanation)
    for part in (
        "2 × 4 heads on 4, 96 queries on 96 keys",
        "mask  i − j < 5 ∧ j − i ≤ 0",
        "score s − t[h]·(i − j)",
        "sinks, one per head",
        "dropout 0.25, seed 3",
        "kernel",
        "tiles",
        "FLOPs",
        "memory",
    ):
        assert part in page
    for kernel, reasons in explanation.refusals.items():
        assert all(reason in page for reason in reasons)
        assert (f"not {kernel}" in page) == bool(reasons)


def test_explain_says_how_each_statistic_is_computed():
    p, j = sightline.p, sightline.j
    see = [
        sightline.lse(),
        sightline.sum(p * j, over=j),
        sightline.sum(p * p, over=j).mean("heads"),
        sightline.top_k(8),
        sightline.weights().rows([-1]),
        sightline.scores().mean("heads"),
    ]
    explanation = sightline.explain(X, X, X, see=see)
    ways = ["computed with the output"] * 2 + ["a second pass over the tiles"] * 2
    ways += ["a call of its own", "array operations on tiles of weights: slow"]
    assert [*explanation.statistics.values()] == ways
    assert "statistic     sum(p·j, over=j): computed with the output\n" in str(explanation)
    by_streaming = sightline.explain(X, X, X, see=see[1], kernel="streaming")
    assert [*by_streaming.statistics.values()] == ways[-1:]


def test_explain_names_the_requested_kernel():
    explanation = sightline.explain(X, X, X, kernel="reference")
    assert explanation.forced
    assert explanation.kernel == "reference"
    assert "asked for by name" in str(explanation)
    assert dataclasses.asdict(explanation)["kernel"] == "reference"


@pytest.mark.parametrize("shape", [(1, 1, 0, 8), (0, 1, 4, 8)])
def test_explain_of_empty_problems(shape):
    x = np.ones(shape, np.float32)
    explanation = sightline.explain(x, x, x, mask=causal())
    assert explanation.flops == 0
    assert "0 empty" in str(explanation)
