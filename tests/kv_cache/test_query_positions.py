"""On a cache, a formula means for each sequence what it means for the whole sequence without a cache."""

import weakref

import numpy as np
import pytest
import torch

import sightline
from cached_calls import cache_problem
from sightline import b, h, i, j, m, n, s, table
from sightline.call.problem import make_problem
from sightline.errors import ShapeError
from sightline.reference.definition import compute_stages
from strategies import to_torch

B, H, D, LONGEST = 2, 3, 4, 24
DOCUMENTS = torch.arange(LONGEST) // 4
SLOPES = np.array([0.5, 0.25, 0.125])
WINDOWS = [2, 4]
SINKS = np.array([0.5, -1.0, 0.0])
FORMULAS = {
    "causal": {"mask": sightline.causal()},
    "causal function": {"mask": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx},
    "lower right": {"mask": sightline.causal("lower right")},
    "window": {"mask": sightline.window(3)},
    "causal and window": {"mask": sightline.causal() & sightline.window(3)},
    "distance": {"mask": abs(i - j) < 3},
    "in an or": {"mask": (j < 2) | (j <= i)},
    "strictly before": {"mask": (i > j) | (j == 0)},
    "blocks": {"mask": i // 4 == j // 4},
    "documents": {"mask": sightline.documents(np.arange(LONGEST) // 4)},
    "documents of a function": {"mask": lambda b, h, q_idx, kv_idx: DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]},
    "the last keys": {"mask": m - j <= 3},
    "by the length": {"mask": (n - j <= 3) | (i == j)},
    "by sequence": {"mask": i - j < table(np.array(WINDOWS))[b]},
    "keys alone": {"mask": j < 4},
    "bias by position": {"score": s + table(np.linspace(-2, 2, LONGEST**2).reshape(LONGEST, -1))[i, j]},
    "relative bias": {"score": sightline.relative_bias(np.linspace(-1, 1, H * 5).reshape(H, 5))},
    "alibi": {"mask": i >= j, "score": sightline.alibi(SLOPES), "sinks": SINKS},
    "symmetric alibi": {"score": s - table(SLOPES)[h] * abs(i - j)},
}
PROMPTS_AND_STEPS = [[5], [5, 1, 1], [3, 2, 1], [[5, 3]], [[5, 3], 1], [[5, 3], [2, 1], [1, 0]], [[0, 4], [1, 0], 2]]


def of_sequences(cache, query, counts, padding):
    """Yield (entry, its real rows in the call, a query of the whole sequence, its keys, its values)."""
    total = query.shape[2]
    for entry, count in enumerate(counts):
        length = int(cache.lengths[entry])
        if count and length:
            real = slice(0, count) if padding == "right" else slice(total - count, total)
            whole = np.zeros((1, H, length, D))
            whole[0, :, length - count :] = query[entry, :, real]
            keys, values = (np.asarray(x)[entry : entry + 1, :, :length] for x in (cache.key, cache.value))
            yield entry, real, whole, keys, values


def steps_of(rng, steps, padding, kind="numpy"):
    """Append prompts and tokens, and yield (cache, query, the number of real rows of each sequence) after each."""
    cache = sightline.KVCache()
    for step in steps:
        counts = np.broadcast_to(step, B)
        query, key, value = rng.normal(size=(3, B, H, counts.max(), D))
        query, key, value = (to_torch(x) for x in (query, key, value)) if kind == "torch" else (query, key, value)
        cache.append(key, value, lengths=None if np.ndim(step) == 0 else counts, padding=padding)
        yield cache, query, counts


@pytest.mark.sampled(one_in=29)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("steps", PROMPTS_AND_STEPS, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_means_what_it_means_for_the_whole_sequence(rng, name, steps, padding, kind):
    for cache, query, counts in steps_of(rng, steps, padding, kind):
        output = np.asarray(sightline.attention(query, cache, **FORMULAS[name]))
        for entry, real, whole, keys, values in of_sequences(cache, np.asarray(query), counts, padding):
            options = {"mask": i - j < WINDOWS[entry]} if name == "by sequence" else FORMULAS[name]
            problem = make_problem(whole, keys, values, **options)
            expected = compute_stages(problem).output[0, :, cache.lengths[entry] - counts[entry] :]
            np.testing.assert_allclose(output[entry, :, real], expected, rtol=0, atol=1e-13)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("steps", PROMPTS_AND_STEPS, ids=str)
def test_statistics_are_of_positions(rng, steps, padding):
    condition = sightline.mass(i - j < 2)
    see = [sightline.weights(), condition, condition.mean("heads"), sightline.lse(), sightline.received()]
    score = sightline.alibi(SLOPES)
    for cache, query, counts in steps_of(rng, steps, padding):
        _, found = sightline.attention(query, cache, mask=sightline.causal(), score=score, see=see)
        weights, near, near_of_heads, lse, received = found
        np.testing.assert_allclose(received, weights.sum(2), atol=1e-12)
        for entry, real, whole, keys, values in of_sequences(cache, query, counts, padding):
            first = cache.lengths[entry] - counts[entry]
            stages = compute_stages(make_problem(whole, keys, values, mask=i >= j, score=score))
            expected = stages.weights[0, :, first:]
            np.testing.assert_allclose(weights[entry, :, real, : cache.lengths[entry]], expected, atol=1e-13)
            rows, columns = np.indices(expected.shape[-2:])
            of_near = np.where(rows + first - columns < 2, expected, 0).sum(-1)
            np.testing.assert_allclose(near[entry, :, real], of_near, atol=1e-13)
            np.testing.assert_allclose(near_of_heads[entry, real], of_near.mean(0), atol=1e-13)
            np.testing.assert_allclose(lse[entry, :, real], stages.lse[0, :, first:], atol=1e-13)


def cache_of(rng, *lengths, padding="right"):
    """Return a cache after one append for each number of positions, or list of numbers."""
    return list(steps_of(rng, lengths, padding))[-1][0]


def query_of(rng, count):
    return rng.normal(size=(B, H, count, D))


def test_padding_sees_no_key_under_a_formula_of_i(rng):
    cache, query = cache_of(rng, [5, 3], padding="left"), query_of(rng, 5)
    output = sightline.attention(query, cache, mask=sightline.window(2, 2))
    assert not output[1, :, :2].any()
    assert output[1, :, 2:].all()
    for counts in ([2, 0], [0, 0]):  # sequences that have ended, some or all
        cache.append(query_of(rng, 2), query_of(rng, 2), lengths=counts)
        output = sightline.attention(query_of(rng, 2), cache, mask=sightline.causal())
        assert [bool(one.any()) for one in output] == [count > 0 for count in counts]
        assert sightline.attention(query_of(rng, 2), cache).all()  # no formula reads i


def test_a_formula_of_keys_alone_serves_queries_of_another_sequence(rng):
    """As in cross-attention, where the queries are no positions of the cache, and as many as the padded keys."""
    cache, query = cache_of(rng, [5, 3]), query_of(rng, 5)
    for mask in (None, j < 4):
        output = sightline.attention(query, cache, mask=mask)
        for entry, length in enumerate([5, 3]):
            keys, values = (x[entry : entry + 1, :, :length] for x in (cache.key, cache.value))
            expected = sightline.attention(query[entry : entry + 1], keys, values, mask=mask)
            np.testing.assert_allclose(output[entry : entry + 1], expected, atol=1e-13)


def test_arrays_have_one_row_for_each_query(rng):
    cache, query = cache_of(rng, 5, 2), query_of(rng, 2)
    visible = rng.random((2, 7)) < 0.5
    visible[:, 0] = True
    bias = sightline.bias(rng.normal(size=(H, 2, 7)))
    causal = np.tri(2, 7, 5, bool)
    expected = sightline.attention(query, cache.key, cache.value, mask=visible & causal, score=bias)
    for mask in (visible & causal, (i >= j) & sightline.dense(visible)):
        output = sightline.attention(query, cache, mask=mask, score=bias)
        np.testing.assert_allclose(output, expected, atol=1e-13)


def test_fewer_queries_than_the_newest_append_are_the_last(rng):
    cache, query = cache_of(rng, 5), query_of(rng, 2)
    output = sightline.attention(query, cache, mask=sightline.causal())
    expected = sightline.attention(query, cache.key, cache.value, mask=i + 3 >= j)
    np.testing.assert_array_equal(output, expected)


def test_more_queries_than_positions_are_refused(rng):
    with pytest.raises(ShapeError, match=r"7 queries under a formula of i(.|\n)*5 positions(.|\n)*append the keys"):
        sightline.attention(query_of(rng, 7), cache_of(rng, 5), mask=sightline.causal())


@pytest.mark.parametrize("mask", [i >= j, j <= i, lambda b, h, q, k: q >= k, (i >= j) & (j - i <= 0)])
@pytest.mark.parametrize(
    ("steps", "rest"), [([5, 1], "None"), ([[5, 3], 1], "j < t[b]"), ([[5, 3], [1, 0]], "j < t[b, i]")], ids=str
)
def test_the_newest_query_has_no_mask_of_later_keys(rng, mask, steps, rest):
    """So that the decoding kernel needs no search for tiles."""
    assert repr(cache_problem(query_of(rng, 1), cache_of(rng, *steps), mask=mask).mask) == rest


def test_positions_of_removed_rows_are_the_last(rng):
    """The rows of the newest append have no position after they were removed."""
    cache, query = cache_of(rng, 5, 2), query_of(rng, 2)
    cache.truncate(5)
    output = sightline.attention(query, cache, mask=sightline.causal())
    np.testing.assert_array_equal(output, sightline.attention(query, cache.key, cache.value, mask=i + 3 >= j))
    cache.truncate(0)
    assert not sightline.attention(query_of(rng, 2), cache).any()


@pytest.mark.parametrize("name", FORMULAS)
def test_no_queries_take_every_formula(rng, name):
    assert sightline.attention(query_of(rng, 0), cache_of(rng, 5, 1), **FORMULAS[name]).shape == (B, H, 0, D)


def test_explain_shows_the_formula_of_rows(rng):
    explanation = sightline.explain(query_of(rng, 2), cache_of(rng, 5, 2), mask=sightline.causal())
    assert "i + m − n ≥ j" in str(explanation)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("steps", [[5, 1], [[5, 3], 1]], ids=str)
@pytest.mark.parametrize("part", ["mask", "score", "see"])
def test_a_cache_keeps_no_table_of_an_earlier_call(rng, steps, part):
    cache, watched = cache_of(rng, *steps), []
    for step in range(4):
        array = rng.normal(size=(B, 2 * LONGEST))
        watched.append(weakref.ref(array))
        read = table(array)[b, (j if step == 3 else i - j) + LONGEST]  # the last formula does not read i
        parts = {"mask": read > 0, "score": s + read, "see": [sightline.mass(read > 0)]}
        sightline.attention(query_of(rng, 1), cache, **{part: parts[part]})
    del array, read, parts
    assert not [one for one in watched if one() is not None]


def test_a_query_of_padding_beyond_the_longest_sequence_reads_no_table_outside():
    rng = np.random.default_rng(4)
    query, key, value = (rng.normal(size=(1, 2, 6, 8)).astype(np.float32) for _ in range(3))
    cache = sightline.KVCache()
    cache.append(key, value, lengths=[4])
    mask = sightline.documents([0, 0, 1, 1])
    output = sightline.attention(query, cache, mask=mask)
    expected = sightline.attention(query[:, :, :4], key[:, :, :4], value[:, :, :4], mask=mask)
    assert np.allclose(output[:, :, :4], expected, atol=1e-6)
    assert not output[:, :, 4:].any()
    array = np.ones((1, 2, 6, 4), bool)
    output = sightline.attention(query, cache, mask=array, score=sightline.s - sightline.i)  # the score reads i
    assert not output[:, :, 4:].any()
