"""Statistics of cached calls, and their gradients."""

import weakref
from functools import partial

import numpy as np
import pytest
import torch

import sightline
from cached_calls import record_hits, uncached
from sample_calls import all_bits, arrays, bits, decoding_arrays, tensors
from sightline import h, i, j, p, s, table
from sightline.call import call_cache
from sightline.reference.testing import assert_within_budget

SEE = {
    "entropy before max_score": ([sightline.entropy(), sightline.max_score()], lambda seen: seen[0]),
    "max_score after entropy": ([sightline.entropy(), sightline.max_score()], lambda seen: seen[1][0]),
    "lse first": ([sightline.lse(), sightline.entropy()], lambda seen: seen[0]),
    "the second of two": ([sightline.entropy(), sightline.entropy()], lambda seen: seen[1]),
    "received": ([sightline.top_k(2), sightline.entropy(), sightline.received()], lambda seen: seen[2]),
    "entropy after top_k": ([sightline.top_k(2), sightline.entropy()], lambda seen: seen[1]),
    "pooled": ([sightline.max_score(), sightline.pooled(2, 3), sightline.lse()], lambda seen: seen[1]),
    "sum": ([sightline.sum(p * abs(i - j), over=j), sightline.sum(p * s, over=j)], lambda seen: seen[1]),
    "cubes": ([sightline.sum(p * p, over=i), sightline.entropy(), sightline.sum(p**3, over=j)], lambda seen: seen[2]),
    "mass": ([sightline.entropy(), sightline.mass(j < 3), sightline.mass(i > j)], lambda seen: seen[2]),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", SEE)
def test_gradients_of_statistics_in_any_order(rng, name, monkeypatch):
    see, pick = SEE[name]
    given = tensors(rng, requires_grad=True)

    def gradients():
        _, seen = sightline.attention(*given, see=see)
        return [bits(x) for x in torch.autograd.grad(pick(seen).square().sum(), given[:2])]

    expected = gradients()
    found = record_hits(monkeypatch)
    assert gradients() == gradients() == expected
    assert len(found) == 2


@pytest.mark.parametrize("one", [sightline.scores(), sightline.weights().mean("heads"), sightline.top_k(300)])
def test_statistics_that_no_bound_call_computes(rng, one):
    given = arrays(rng, ((1, 2, 9, 8), (1, 2, 400, 8), (1, 2, 400, 8)))
    for see in ([one], [sightline.mass(np.eye(9, 400) > 0)]):
        expected = all_bits(uncached(given, see=see))
        assert all_bits(sightline.attention(*given, see=see)) == expected


@pytest.mark.parametrize("draw", [arrays, partial(tensors, requires_grad=True)])
def test_selections_are_cached_calls(rng, draw, monkeypatch):
    """There is one call for each selection, and one for the output and the other statistics."""
    given, received, (bias, x, _) = draw(rng), sightline.received(), draw(rng)
    see = [received.heads([1, 0]), sightline.entropy(), received.rows([-1]), sightline.weights().heads([0]).rows([2])]
    options = {"see": [*see, sightline.weighted_sum(x)], "mask": i >= j, "score": s + table(bias)[0, h, i, j % 8]}

    def read(answer):
        loss = sum([(one * one).sum() for one in answer[1]], answer[0].sum())
        gradients = [] if draw is arrays else torch.autograd.grad(loss, [*given, bias, x])
        return all_bits(answer), [bits(gradient) for gradient in gradients]

    found = record_hits(monkeypatch)
    first, *others = [read(sightline.attention(*given, **options)) for _ in range(3)]
    assert (others, len(found)) == ([first, first], 10)


def test_a_growing_cache_has_more_cells_at_each_step(rng):
    """A decoding loop passes the number of cells: each step has a cell for each key, and then eight cells."""
    query, key, value = arrays(rng, ((1, 2, 1, 8), (1, 2, 12, 8), (1, 2, 12, 8)))
    for m in range(1, 13):
        given, see = (query, key[..., :m, :], value[..., :m, :]), [sightline.pooled(8, 8), sightline.weights()]
        _, (cells, weights) = sightline.attention(*given, see=see)
        edges = np.arange(min(m, 8) + 1) * m // min(m, 8)
        expected = np.add.reduceat(weights, edges[:-1], axis=-1) / np.diff(edges)
        np.testing.assert_allclose(cells, expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(9, 8), (3, 9, 8)], ids=str)
def test_statistics_of_arrays_without_heads(rng, shape):
    given = arrays(rng, (shape,) * 3)
    passes = [sightline.received(), sightline.top_k(2), sightline.pooled(3, 3), sightline.weights()]
    see = [*passes, sightline.entropy(), sightline.mass(j < 3), passes[0].mean("heads"), passes[2].mean("batch")]
    expected = all_bits(uncached(given, see=see))
    for _ in range(10):
        assert all_bits(sightline.attention(*given, see=see)) == expected
    assert len(call_cache.calls) == 1


def test_gradients_of_means(rng, monkeypatch):
    """torch computes the gradient of the mean itself, so the sums have another order than in the first call."""
    given = tensors(rng, requires_grad=True)
    see = [sightline.lse().mean("batch"), sightline.entropy().mean("heads"), sightline.mass(j < 3).mean("heads")]

    def differentiate(output, seen, inputs):
        return torch.autograd.grad(output.sum() + sum(x.square().sum() for x in seen), inputs)

    def define(dtype):
        query, key, value = inputs = [x.detach().to(dtype).requires_grad_() for x in given]
        scores = query @ key.mT / key.shape[-1] ** 0.5
        weights = scores.softmax(-1)
        entropy, mass = torch.special.entr(weights).sum(-1), weights[..., :3].sum(-1)
        return differentiate(weights @ value, (scores.logsumexp(-1).mean(0), entropy.mean(1), mass.mean(1)), inputs)

    def check():
        own = differentiate(*sightline.attention(*given, see=see), given)
        for gradient, right, plain in zip(own, *map(define, (torch.float64, torch.float32)), strict=True):
            assert_within_budget(gradient, right, plain, "gradient")

    check()
    found = record_hits(monkeypatch)
    check()
    assert found


def test_a_cached_call_keeps_no_table_of_a_condition_alive(rng):
    given, ids = arrays(rng), rng.random(9) < 0.5
    watched = weakref.ref(ids)
    sightline.attention(*given, see=[sightline.mass(table(ids)[j])])
    assert len(call_cache.calls) == 1
    del ids
    assert watched() is None


@pytest.mark.parametrize("see", [[sightline.received()], [sightline.top_k(2)], [sightline.pooled(1, 4)]])
@pytest.mark.parametrize("mask", [None, j > 2])
def test_statistics_of_a_growing_cache(rng, see, mask):
    """A bound decoding call may serve any number of keys, but the weights passes of its statistics serve one."""
    q, k, v = decoding_arrays(rng, 600)
    lengths = (100, 101, 550, 551, 551, 100)
    expected = [all_bits(uncached((q, k[:, :, :m], v[:, :, :m]), see=see, mask=mask)) for m in lengths]
    call_cache.clear()
    for _ in range(2):
        for length, right in zip(lengths, expected, strict=True):
            given = q, k[:, :, :length], v[:, :, :length]
            assert all_bits(sightline.attention(*given, see=see, mask=mask)) == right
