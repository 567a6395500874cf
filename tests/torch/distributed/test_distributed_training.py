"""Gradients are finite differences, training equals that on one process; transfers and memory are measured."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sightline
from distributed_checks import (
    EXAMPLE,
    count_bytes,
    differentiate_largest_scores,
    differentiate_some_results,
    differentiate_twice,
    finite_differences,
    held_bytes,
    load_example,
    penalise_gradients,
    solve_dtensors,
    train_wrapped,
)
from distributed_ranks import Ranks
from sightline import i, j
from sightline.errors import ParameterError

pytestmark = pytest.mark.wide


@pytest.mark.parametrize(
    ("layout", "method"),
    [("contiguous", "ring"), ("zigzag", "ring"), pytest.param("zigzag", "heads", marks=pytest.mark.soak)],
)
def test_gradients_equal_finite_differences(ranks, layout, method):
    assert ranks.run(finite_differences, layout, method, size=2) == [True, True]


def test_second_derivatives_by_heads(ranks):
    assert ranks.run(penalise_gradients, "heads", size=2) == [[True] * 3] * 2


def test_second_derivatives_by_the_ring_raise_an_error(ranks):
    with pytest.raises(ParameterError, match='method="heads"'):
        ranks.run(penalise_gradients, "ring", size=2)


@pytest.mark.parametrize("read", [("output", "entropy"), ("lse", "output")], ids="-".join)
@pytest.mark.parametrize("method", ["ring", "heads"])
def test_losses_of_ranks_may_read_different_results(ranks, method, read):
    found = ranks.run(differentiate_some_results, method, list(read), size=2)
    whole = torch.randn(3, 1, 4, 16, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    given = [x.requires_grad_() for x in whole]
    see = {"entropy": sightline.entropy(), "lse": sightline.lse()}
    output, seen = sightline.attention(*given, mask=i >= j, see=see)
    results = {"output": output, "entropy": seen["entropy"][..., None], "lse": seen["lse"][..., None]}
    loss = sum(results[name].chunk(2, dim=-2)[rank].square().sum() for rank, name in enumerate(read))
    for shards, expected in zip(zip(*found, strict=True), torch.autograd.grad(loss, given), strict=True):
        torch.testing.assert_close(torch.cat(shards, dim=-2), expected, rtol=1e-4, atol=1e-5)


def test_largest_scores_beside_large_sinks_have_a_gradient(ranks):
    assert ranks.run(differentiate_largest_scores, size=2) == [True, True]


def test_unshard_has_a_second_derivative(ranks):
    """Each of the two ranks has the whole loss, so both derivatives are sums of two: 2 · 6 x."""
    for rank, found in enumerate(ranks.run(differentiate_twice, size=2)):
        torch.testing.assert_close(found, torch.full((4, 2), 12.0 * (1 + rank)))


def differ_by_rounding(losses, others, depth):
    """True if losses differ by `depth` roundings in a step at most: consecutive ones, each of half a unit."""
    return (abs(losses - others) <= depth * np.spacing(others.astype(np.float32))).all()


@pytest.fixture
def alone(monkeypatch):
    """The training function of examples/train_distributed.py with the attention of one process, without a group."""
    module = load_example()
    monkeypatch.setattr(module, "attention", lambda *heads, mask, layout: sightline.attention(*heads, mask=mask))
    monkeypatch.setattr(module, "shard", lambda x, **_: x)
    monkeypatch.setattr(module, "DistributedDataParallel", lambda model: model)
    monkeypatch.setattr(module, "dist", SimpleNamespace(all_reduce=lambda x: x, get_world_size=lambda: 1))
    return module


def run_example(steps):
    """Return the steps and losses that two ranks print, on the loopback interface."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [*launch, EXAMPLE, "--steps", str(steps)], env=environment, capture_output=True, text=True, timeout=560
    )
    assert ran.returncode == 0, ran.stderr
    assert "2 ranks, 256 of 512 positions on each" in ran.stdout
    found = re.findall(r"step +(\d+)  loss (\d+\.\d+)", ran.stdout)
    return np.array([int(step) for step, _ in found]), np.array([float(loss) for _, loss in found])


def test_the_example_trains_on_two_ranks(alone):
    steps, losses = run_example(4)
    assert steps.tolist() == [0, 1, 2, 3]
    assert differ_by_rounding(losses, np.array(alone.train(4)), alone.LAYERS * alone.CONTEXT)


@pytest.mark.soak
def test_two_ranks_reach_the_loss_of_one_process(alone):
    """After many steps the losses differ by less than those of two seeds."""
    steps, losses = run_example(200)
    own, other = (np.array(alone.train(200, seed))[steps] for seed in (0, 1))
    assert losses[-1] < losses[0]
    assert abs(losses[-4:].mean() - own[-4:].mean()) <= abs(own[-4:].mean() - other[-4:].mean())


@pytest.mark.soak
@pytest.mark.parametrize(("wrap", "steps"), [("fully_shard", 5), ("compile", 3)])
def test_training_of_wrapped_models(ranks, alone, wrap, steps):
    expected = np.array(alone.train(steps))
    for losses in ranks.run(train_wrapped, steps, wrap):
        assert differ_by_rounding(np.array(losses), expected, alone.LAYERS * alone.CONTEXT)


@pytest.mark.parametrize("is_nested", [False, True], ids=["one axis", "two axes"])
def test_dtensors_have_the_results_of_their_shards(ranks, is_nested):
    assert ranks.run(solve_dtensors, is_nested, size=4 if is_nested else 3) == [[True] * 5] * (4 if is_nested else 3)


def test_a_window_sends_fewer_bytes(ranks):
    every = ranks.run(count_bytes, None, size=4)
    window = ranks.run(count_bytes, 64, size=4)
    row_bytes = 2 * 2 * 8 * 4  # keys and values of 2 heads with 8 numbers of 4 bytes
    assert every == [3 * 256 * row_bytes] * 4
    assert window == [64 * row_bytes] * 3 + [0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
def test_memory_beside_the_shards():
    """A rank needs its shards and results, one shard of keys and values, and 64 MB.

    glibc keeps freed memory of some megabytes for later calls, unless a fixed threshold forbids it.
    """
    length, heads, width = 8192, 8, 64
    ranks = Ranks(2)
    try:
        shard = 2 * length // 2 * heads * width * 4  # keys and values
        for held in ranks.run(held_bytes, length, heads, width):
            assert held < shard + 64e6
    finally:
        ranks.close()
