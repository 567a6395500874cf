"""Caches without sequences, calls without queries, rows of drafts, copies, pickles, hundreds of forks, and latents."""

import copy
import pickle

import numpy as np
import pytest
import torch

import sightline
from filled_caches import assert_solves, filled_cache
from sightline import KVCache, i, j
from sightline.call.problem import make_problem
from sightline.errors import ParameterError

H, G, D = 4, 2, 16


def drawn(rng, batch, heads, count, kind="numpy"):
    array = rng.normal(size=(batch, heads, count, D)).astype(np.float32)
    return torch.from_numpy(array) if kind == "torch" else array


def filled(rng, change, kind="numpy"):
    """Return a cache of two sequences of 80 and 75 positions, plain, evicted or forked."""
    cache = filled_cache(*(drawn(rng, 2, G, 80, kind) for _ in "kv"), lengths=[80, 75])
    if change == "evicted":
        cache.keep([[[3, 10, 70], [5, 74, -1]]])
    elif change == "forked":
        cache.fork([1, 1])
    return cache


@pytest.mark.parametrize("change", ["plain", "evicted", "forked"])
def test_the_row_of_a_draft_has_the_position_of_the_draft(rng, change):
    cache = filled(rng, change)
    before = cache.key_positions
    cache.append(drawn(rng, 2, G, 4), drawn(rng, 2, G, 4), parents=[[-1, 0, 0, -1], [-1, -1, -1, 2]])
    found = cache.key_positions
    for sequence, drafts in enumerate(([80, 81, 81, 80], [75, 75, 75, 76])):
        first = (before[sequence, 0] >= 0).sum()
        assert np.array_equal(found[sequence, :, :first], before[sequence, :, :first])
        assert (found[sequence, :, first : first + 4] == drafts).all()
        assert (found[sequence, :, first + 4 :] == -1).all()


@pytest.mark.parametrize("change", ["plain", "evicted", "forked"])
def test_all_sequences_may_end(rng, change):
    cache = filled(rng, change)
    cache.fork(0)
    assert cache.lengths.shape == (0,)
    cache.append(drawn(rng, 0, G, 1), drawn(rng, 0, G, 1))
    output = sightline.attention(drawn(rng, 0, H, 1), cache, mask=sightline.causal())
    assert output.shape == (0, H, 1, D)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_call_without_queries_on_a_forked_cache(rng, kind):
    cache = filled(rng, "forked", kind)
    see = [sightline.lse(), sightline.top_k(3)]
    for mask in (None, i >= j):
        output, (lse, keys) = sightline.attention(drawn(rng, 2, H, 0, kind), cache, mask=mask, see=see)
        assert output.shape == (2, H, 0, D)
        assert lse.shape == (2, H, 0)
        assert keys.where.shape == (2, H, 0, 3)


@pytest.mark.parametrize("capacity", [-1, 2.5, "9", True])
def test_last_checks_its_capacity(rng, capacity):
    with pytest.raises(ParameterError, match="whole number"):
        filled(rng, "plain").last(3, capacity=capacity)


def test_a_fork_that_shares_nothing_any_more_has_last_positions(rng):
    cache = KVCache()
    cache.append(*[drawn(rng, 1, 2, 80, "numpy")] * 2)
    cache.fork(2)
    cache.truncate(0)
    cache.append(*[drawn(rng, 2, 2, 5, "numpy")] * 2)
    assert cache.last(3).lengths.tolist() == [3, 3]


@pytest.mark.parametrize("copied", [copy.copy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_copies_and_pickles_go_on_by_themselves(rng, kind, copied):
    """A pickle has no views, so values that are a part of the keys are one again after it."""
    cache, latents = KVCache(capacity=99), drawn(rng, 1, 1, 20, kind)
    cache.append(latents, latents[..., :8])
    other, new = copied(cache), [drawn(rng, 1, 1, 5, kind) for _ in range(2)]
    for one, latent in zip((cache, other), new, strict=True):
        one.append(latent, latent[..., :8])
    query = drawn(rng, 1, H, 1, kind)
    for one, latent in zip((cache, other), new, strict=True):
        whole = np.concatenate([latents, latent], 2)
        expected = sightline.attention(np.asarray(query), whole, whole[..., :8])
        assert np.allclose(sightline.attention(query, one), expected, atol=1e-6)


@pytest.mark.parametrize("change", ["truncate", "one", "select"])
def test_hundreds_of_forks_leave_few_prefixes(rng, change):
    """A search appends a step, forks, and goes on with one branch, or goes back to the prompt."""
    cache, new = KVCache(dtype="float16"), drawn(rng, 1, G, 100)
    steps = [new[:, :, :64] * factor for factor in rng.normal(size=300)]
    cache.append(new, new)
    rows = [new]
    for step in steps:
        cache.append(step, step)
        cache.fork(1 if change == "one" else 2)
        if change != "one":
            cache.reorder([1])
        if change == "truncate":
            cache.truncate(100)
        else:
            rows.append(step)
    whole = np.concatenate(rows, 2).astype(np.float16)
    assert np.array_equal(cache.joined().key, whole)
    assert cache.nbytes <= 2 * 1.3 * max(whole.nbytes, 164 * 2 * G * D)
    assert cache.prefix is None or len(cache.prefix.parts) <= 2 + np.log2(len(steps))
    query = drawn(rng, 1, H, 1).astype(np.float16)
    expected = sightline.attention(query, whole, whole)
    assert np.allclose(sightline.attention(query, cache), expected, atol=2e-3)


# -- latents, whose values are the first numbers of the keys -----------------------------------------------------------


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
