"""A cache of latents: values that are the first numbers of the keys are stored once."""

import copy

import numpy as np
import pytest
import torch

import sightline
from filled_caches import assert_solves
from sightline import KVCache
from sightline.call.problem import make_problem

D_K, D_V = 24, 16


def latents(rng, kind, count, batch=2):
    """Return keys (B, 1, count, d_k), and values that are their first d_v numbers."""
    key = rng.normal(size=(batch, 1, count, D_K)).astype(np.float32)
    key = torch.from_numpy(key) if kind == "torch" else key
    return key, key[..., :D_V]


def assert_attends(output, query, key):
    """Raise AssertionError unless `output` is that of queries at the last positions of these keys."""
    mask = sightline.causal("lower right")
    assert_solves(output, make_problem(np.asarray(query), key, key[..., :D_V], mask=mask))


def queries(rng, kind, count, batch=2):
    query = rng.normal(size=(batch, 4, count, D_K)).astype(np.float32)
    return torch.from_numpy(query) if kind == "torch" else query


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_latents_are_stored_once(rng, kind):
    cache = KVCache()
    parts = [latents(rng, kind, count) for count in (5, 1, 300, 1)]  # the storage grows twice
    for key, value in parts:
        cache.append(key, value)
        query = queries(rng, kind, key.shape[2])
        output = sightline.attention(query, cache, mask=sightline.causal())
        whole = np.concatenate([np.asarray(one) for one, _ in parts], 2)[:, :, : cache.max_length]
        assert_attends(output, query, whole)
    assert cache.nbytes == 2 * cache.capacity * D_K * 4
    assert cache.value.shape == (2, 1, 307, D_V)
    cache.reorder([1, 1])
    assert np.array_equal(cache.key, whole[[1, 1]])
    assert np.array_equal(cache.value, whole[[1, 1]][..., :D_V])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_other_values_are_stored_apart(rng, kind):
    cache, (key, value) = KVCache(capacity=9), latents(rng, kind, 3)
    cache.append(key, value)
    shared, nbytes = copy.deepcopy(cache), cache.nbytes
    (later, _), (_, other) = latents(rng, kind, 2), latents(rng, kind, 2)
    cache.append(later, other)
    assert cache.nbytes == nbytes * (D_K + D_V) // D_K
    assert np.array_equal(cache.key, np.concatenate([np.asarray(key), np.asarray(later)], 2))
    assert np.array_equal(cache.value, np.concatenate([np.asarray(value), np.asarray(other)], 2))
    assert shared.nbytes == nbytes
    assert np.array_equal(shared.value, value)


def test_ragged_latents(rng):
    cache, (key, value) = KVCache(), latents(rng, "numpy", 4)
    cache.append(key, value, lengths=[4, 2], padding="left")
    cache.append(key[:, :, :1], value[:, :, :1])
    assert cache.nbytes == 2 * cache.capacity * D_K * 4
    query = queries(rng, "numpy", 1)
    output = sightline.attention(query, cache, mask=sightline.causal())
    for b, first in ((0, 0), (1, 2)):
        whole = np.concatenate([key[b : b + 1, :, first:], key[b : b + 1, :, :1]], 2)
        assert_attends(output[b : b + 1], query[b : b + 1], whole)
