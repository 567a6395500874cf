"""The policies of `sightline.eviction` keep the keys that dense weights choose."""

import numpy as np
import pytest
import torch

import sightline
from fault_planting import Fault, plant
from filled_caches import filled_cache
from sightline import eviction
from sightline.errors import ParameterError, ShapeError

B, H, G, N, D = 2, 4, 2, 40, 8
LENGTHS = [40, 31]


def dense_weights(query, key, length):
    """Return the causal weights (H, n, n) of a sequence of this length in float64, by NumPy."""
    key = np.repeat(key[:, :length].astype(np.float64), H // G, 0)
    scores = query[:, :length].astype(np.float64) @ key.transpose(0, 2, 1) / np.sqrt(D)
    scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def best(scores, count):
    """Return the positions with the largest scores, ascending."""
    return sorted(sorted(range(len(scores)), key=lambda position: -scores[position])[:count])


def by_snapkv(weights, budget, last, pool):
    chosen = []
    for head in weights.reshape(G, H // G, *weights.shape[1:]):
        length = head.shape[-1]
        observed = head[:, max(length - last, 0) :].mean((0, 1))
        before = [observed[k] if k < length - last else 0 for k in range(length)]
        pooled = [sum(before[max(k - pool // 2, 0) : k + pool // 2 + 1]) / pool for k in range(length)]
        chosen.append([*best(pooled[: length - last], budget - last), *range(length - last, length)])
    return chosen


def by_h2o(weights, budget, recent):
    chosen = []
    for head in weights.reshape(G, H // G, *weights.shape[1:]):
        total = head.mean(0).sum(0)
        chosen.append([*best(total[: len(total) - recent], budget - recent), *range(len(total) - recent, len(total))])
    return chosen


def by_tova(weights, budget):
    last = weights[:, -1].mean(0)
    return [[*best(last[:-1], budget - 1), len(last) - 1]] * G


def by_sinks(weights, budget, first):
    length = weights.shape[-1]
    return [[*range(first), *range(length - budget + first, length)]] * G


POLICIES = {
    "SnapKV": ({"last": 6, "pool": 3}, by_snapkv),
    "H2O": ({"recent": 5}, by_h2o),
    "TOVA": ({}, by_tova),
    "Sinks": ({"first": 3}, by_sinks),
}


def decide(name, kind="numpy", budget=12):
    """Return the positions that a policy keeps, and those that dense weights choose."""
    rng = np.random.default_rng(1)
    query, key, value = (3 * rng.normal(size=(B, heads, N, D)).astype(np.float32) for heads in (H, G, G))
    give = torch.from_numpy if kind == "torch" else np.asarray
    cache = filled_cache(give(key), give(value), lengths=LENGTHS)
    options, by_hand = POLICIES[name]
    policy = getattr(eviction, name)(budget, **options)
    found, expected = [], []
    for b, length in enumerate(LENGTHS):  # a sequence alone too: its queries are then the last rows
        one = filled_cache(give(key[b : b + 1, :, :length]), give(value[b : b + 1, :, :length]))
        asked, inputs = give(query[b : b + 1, :, :length]), []
        if policy.see is not None:
            _, inputs = sightline.attention(asked, one, mask=sightline.causal(), see=[policy.see])
        found.append(policy(one, *inputs)[0])
        expected.append(by_hand(dense_weights(query[b], key[b], length), budget, **options))
    return cache, np.stack(found), np.array(expected)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", POLICIES)
def test_decisions_are_those_of_dense_weights(name, kind):
    cache, found, expected = decide(name, kind)
    assert np.array_equal(found, expected)
    cache.keep(found)
    assert np.array_equal(cache.key_positions, found)


def test_ragged_sequences_and_budgets_that_keep_everything(rng):
    key = rng.normal(size=(2, G, 9, D))
    cache = filled_cache(key, key, lengths=[9, 3])
    assert eviction.Sinks(5, first=2)(cache)[:, 0].tolist() == [[0, 1, 6, 7, 8], [0, 1, 2, -1, -1]]
    query = rng.normal(size=(2, H, 1, D))
    _, (received,) = sightline.attention(query, cache, mask=sightline.causal(), see=[sightline.received(last=1)])
    everything = eviction.TOVA(99)(cache, received)
    assert everything[:, 0].tolist() == [[*range(9)], [0, 1, 2, *[-1] * 6]]


def test_a_second_eviction_counts_positions_of_the_text(rng):
    key = rng.normal(size=(1, G, 20, D))
    cache = filled_cache(key, key)
    cache.keep(eviction.Sinks(8, first=2)(cache))
    cache.append(key[:, :, :5], key[:, :, :5])
    cache.keep(eviction.Sinks(8, first=2)(cache))
    assert cache.key_positions[0].tolist() == [[0, 1, 19, 20, 21, 22, 23, 24]] * G
    query = rng.normal(size=(1, H, 1, D))
    _, (received,) = sightline.attention(query, cache, mask=sightline.causal(), see=[sightline.received(last=1)])
    kept = eviction.TOVA(3)(cache, received)[0, 0]
    rows = np.argsort(received[0].mean(0)[:-1])[-2:]
    assert kept.tolist() == sorted([*cache.key_positions[0, 0, rows], 24])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda cache, seen: eviction.SnapKV(4, last=5), ParameterError, "at least 5"),
        (lambda cache, seen: eviction.SnapKV(9, last=5, pool=4), ParameterError, "pool=5"),
        (lambda cache, seen: eviction.SnapKV(9, last=0), ParameterError, "last=4"),
        (lambda cache, seen: eviction.H2O(3, recent=4), ParameterError, "at least 4"),
        (lambda cache, seen: eviction.TOVA(0), ParameterError, "budget=0"),
        (lambda cache, seen: eviction.Sinks(4.5), ParameterError, "budget=4.5"),
        (lambda cache, seen: eviction.TOVA(4)(cache, seen[:, :, 1:]), ShapeError, r"\(1, a multiple of 2, 9\)"),
        (lambda cache, seen: eviction.TOVA(4)(cache, seen[:, :3]), ShapeError, "a multiple of 2"),
        (lambda cache, seen: eviction.TOVA(4)(cache, seen[0]), ShapeError, "before later appends"),
    ],
)
def test_mistakes_are_named(rng, call, error, message):
    key = rng.normal(size=(1, G, 9, D))
    with pytest.raises(error, match=message):
        call(filled_cache(key, key), np.ones((1, H, 9)))


FAULTS = {
    "SnapKV": Fault(eviction.SnapKV.rank, "(self.pool // 2, self.pool // 2)", "(0, self.pool - 1)"),
    "H2O": Fault(
        eviction._of_key_heads, "values.reshape(B, G, -1, rows)", "values.reshape(B, -1, G, rows).swapaxes(1, 2)"
    ),
    "TOVA": Fault(eviction.TOVA.rank, "seen.mean(1, keepdims=True)", "-seen.mean(1, keepdims=True)"),
    "Sinks": Fault(eviction.Sinks.rank, "positions < self.first", "positions > self.first"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(name, monkeypatch):
    plant(FAULTS[name], monkeypatch)
    _, found, expected = decide(name)
    assert not np.array_equal(found, expected)
