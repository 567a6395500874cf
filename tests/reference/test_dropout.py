"""Dropout by counter: published values of Philox, equal weights for any tiling and backend, and the drop rate."""

import numpy as np
import pytest
import torch

import sightline
from sightline import causal, weights
from sightline.api.kernels import KERNELS
from sightline.call.problem import make_problem
from sightline.reference.dropout import keep_factor, philox

# From Random123's known-answer file (kat_vectors), philox4x32-10: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_values(counter, key, words, library):
    seed = key[0] | key[1] << 32
    found = philox(seed, tuple(library.asarray([x], dtype=library.int64) for x in counter))
    assert tuple(word.item() for word in found) == words


def make(shape=(2, 3, 70, 4), **options):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return make_problem(x, x, x, **{"dropout": 0.3, "seed": 7} | options)


def whole(problem):
    return keep_factor(problem, np, slice(0, problem.n), slice(0, problem.m))


def test_tiles_equal_the_whole():
    problem = make()
    rows, columns = slice(13, 41), slice(5, 66)
    assert np.array_equal(keep_factor(problem, np, rows, columns), whole(problem)[..., rows, columns])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_drop_rate_is_p(p):
    """Within six standard deviations of the binomial distribution."""
    factor = np.broadcast_to(whole(make((4, 4, 100, 4), dropout=p)), (4, 4, 100, 100))
    dropped = factor == 0
    assert abs(dropped.mean() - p) <= 6 * np.sqrt(p * (1 - p) / dropped.size)
    assert np.array_equal(np.unique(factor[~dropped]), np.unique(np.float32([1 / (1 - p)] if p < 1 else [])))


def test_seed_batch_head_and_position_all_change_the_numbers():
    base = whole(make()) == 0
    assert (base != (whole(make(seed=8)) == 0)).any()
    assert (base != (whole(make(seed=7 + 2**40)) == 0)).any()
    for axis in range(4):
        first, second = np.take(base, 0, axis), np.take(base, 1, axis)
        assert (first != second).any()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_drops_the_same_weights(kernel, framework):
    """One-hot values show which weights reached each output."""
    q = np.random.default_rng(1).normal(size=(2, 2, 60, 8)).astype(np.float32)
    value = np.broadcast_to(np.eye(60, dtype=np.float32), (2, 2, 60, 60)).copy()
    arrays = [torch.from_numpy(x) if framework == "torch" else x for x in (q, q, value)]
    problem = make_problem(*arrays, mask=causal(), dropout=0.4, seed=2**63 + 5, see=[weights()])
    if list(kernel.refuses(problem)):
        pytest.skip("; ".join(map(str, kernel.refuses(problem))))
    result = kernel.run(problem)
    output, seen = np.asarray(result.output), np.asarray(result.seen[0])
    expected = whole(make_problem(q, q, value, mask=causal(), dropout=0.4, seed=2**63 + 5)) != 0
    assert np.array_equal(output != 0, expected & (seen != 0))


def test_the_weights_statistic_is_before_dropout(rng):
    x = rng.normal(size=(1, 1, 9, 4))
    _, (dropped,) = sightline.attention(x, x, x, dropout=0.5, seed=3, see=[weights()])
    _, (whole_,) = sightline.attention(x, x, x, see=[weights()])
    assert np.array_equal(dropped, whole_)


def test_dropout_1_gives_zero(rng):
    x = rng.normal(size=(1, 1, 9, 4))
    assert not sightline.attention(x, x, x, dropout=1.0, seed=0).any()
