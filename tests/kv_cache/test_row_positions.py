"""Formulas on a cache that take the row of a query for the query's position."""

import numpy as np
import pytest
import torch

import sightline
from sightline import b, h, i, j, m, n, s, table
from sightline.errors import FormulaError
from sightline.kv_cache.row_positions import compares_rows

B, H, D = 2, 3, 4
DOCUMENTS = torch.arange(24) // 4
SLOPES = np.array([0.5, 0.25, 0.125])
WRONG = {
    "causal": {"mask": sightline.causal()},
    "causal function": {"mask": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx},
    "window": {"mask": sightline.window(3)},
    "distance": {"mask": abs(i - j) < 3},
    "in an or": {"mask": (j < 2) | (j <= i)},
    "scaled distance": {"mask": 2 * (i - j) + 1 < 7},
    "relative bias": {"score": sightline.relative_bias(np.zeros((H, 5)))},
    "capped alibi": {"score": 5 * np.tanh(sightline.alibi(SLOPES) / 5)},
    "symmetric alibi": {"score": s - table(SLOPES)[h] * abs(i - j)},
    "alibi beside sinks": {"score": sightline.alibi(SLOPES), "sinks": np.zeros(H)},
    "alibi with its lse": {"score": sightline.alibi(SLOPES), "see": [sightline.lse()]},
    "alibi with a selected maximum": {"score": sightline.alibi(SLOPES), "see": [sightline.max_score().heads([1])]},
    "shifted key": {"mask": i >= j + 1},
    "shifted row": {"mask": i + 1 > j},
    "row as a float": {"mask": 1.0 * i >= j},
    "blocks": {"mask": i // 4 == j // 4},
    "smaller position": {"mask": np.minimum(i, j) < 2},
    "documents": {"mask": sightline.documents(np.arange(24) // 4)},
    "documents of a function": {"mask": lambda b, h, q_idx, kv_idx: DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]},
    "bias by position": {"score": s + table(np.zeros((24, 24)))[i, j]},
    "table of distances": {"mask": table(np.arange(48) % 2 == 0)[i - j + 24]},
    "condition of a statistic": {"see": [sightline.mass(i - j < 3)]},
    "condition of a mean": {"see": [sightline.mass(sightline.causal()).rows([0]).mean("heads")]},
    "distance times key": {"score": s - (i - j) * j},
}
RIGHT = {
    "keys alone": {"mask": j < 4},
    "lower right": {"mask": sightline.causal("lower right")},
    "alibi": {"score": sightline.alibi(SLOPES)},
    "shifted": {"mask": i + 5 >= j},
    "window of shifted rows": {"mask": i + 5 - j < 3},
    "blocks of shifted rows": {"mask": (i + 5) // 4 == j // 4},
    "shifted keys": {"mask": j - 5 <= i},
    "alibi with its entropy": {"score": sightline.alibi(SLOPES), "see": [sightline.entropy(), sightline.top_k(2)]},
    "shift by m": {"mask": i - j >= n - m},
    "shift by a table": {"mask": i + table(np.array([5, 5]))[b] >= j},
    "array of rows": {"mask": np.arange(6)[None] % 4 != 2},
    "table of rows": {"score": s + table(np.zeros((1, 24)))[i, j]},
    "sum of separate terms": {"score": s - 0.1 * (i // 4 - j // 4)},
    "conditions of keys": {"see": [sightline.mass(j < 2), sightline.mass(i + 5 - j < 3)]},
    "softcap": {"score": sightline.softcap(5.0)},
    "rows alone": {"mask": (i % 2 == 0) | (j < 3)},
}


def cache_of(rng, *lengths, padding="right"):
    """Return a cache after one append for each number of positions, or list of numbers."""
    cache = sightline.KVCache()
    for length in lengths:
        array = rng.normal(size=(B, H, np.max(length), D))
        cache.append(array, array, lengths=None if np.ndim(length) == 0 else length, padding=padding)
    return cache


def query_of(rng, count):
    return rng.normal(size=(B, H, count, D))


@pytest.mark.parametrize("name", WRONG)
def test_rows_in_place_of_positions_are_refused(rng, name):
    with pytest.raises(FormulaError, match=r"row 0 of 1 is at position 5(.|\n)*cache\.positions\(\)"):
        sightline.attention(query_of(rng, 1), cache_of(rng, 5, 1), **WRONG[name])


@pytest.mark.parametrize("name", RIGHT)
def test_formulas_that_do_not_need_positions_are_computed(rng, name):
    cache, query = cache_of(rng, 5, 1), query_of(rng, 1)
    found = sightline.attention(query, cache, **RIGHT[name])
    expected = sightline.attention(query, cache.key, cache.value, **RIGHT[name])
    np.testing.assert_equal(found, expected)


def test_the_cure_is_right(rng):
    cache, query = cache_of(rng, 5, 1), query_of(rng, 1)
    p = table(cache.positions())[b, i]
    output = sightline.attention(query, cache, mask=cache.causal() & (p - j < 3))
    np.testing.assert_array_equal(output, sightline.attention(query, cache, mask=j > 2))


@pytest.mark.parametrize("lengths", [5, [5, 3], [0, 5]], ids=str)
def test_a_prompt_from_position_0_takes_plain_masks(rng, lengths):
    cache, query = cache_of(rng, lengths), query_of(rng, 5)
    output = sightline.attention(query, cache, mask=sightline.causal())
    expected = sightline.attention(query, cache, mask=cache.causal())
    real = cache.positions() >= 0
    np.testing.assert_array_equal(output.swapaxes(1, 2)[real], expected.swapaxes(1, 2)[real])


def test_a_prompt_with_padding_before_it_is_refused(rng):
    with pytest.raises(FormulaError, match=r"positions \[0, -1\]"):
        sightline.attention(query_of(rng, 5), cache_of(rng, [5, 3], padding="left"), mask=sightline.causal())


def test_fewer_queries_than_the_newest_append(rng):
    cache = cache_of(rng, 5)
    with pytest.raises(FormulaError, match=r"cache\.causal\(2\)"):
        sightline.attention(query_of(rng, 2), cache, mask=sightline.causal())
    sightline.attention(query_of(rng, 2), cache, mask=cache.causal(2))


def test_all_positions_again(rng):
    cache = cache_of(rng, 3, 2)
    output = sightline.attention(query_of(rng, 5), cache, mask=sightline.causal())
    assert output.shape == (B, H, 5, D)


@pytest.mark.parametrize("name", sorted(WRONG.keys() - {"condition of a mean"}))  # which selects row 0
def test_no_queries_take_every_formula(rng, name):
    output = sightline.attention(query_of(rng, 0), cache_of(rng, 5, 1), **WRONG[name])
    output = output[0] if isinstance(output, tuple) else output
    assert output.shape == (B, H, 0, D)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_queries_of_an_empty_cache_take_every_formula(rng, count):
    """No query sees a key, whatever its position."""
    cache = cache_of(rng, 5, 2)
    cache.truncate(0)
    assert not sightline.attention(query_of(rng, count), cache, mask=sightline.causal()).any()


def test_rejected_rows_are_not_at_position_0(rng):
    """The rows of the newest append have no position after they were removed."""
    cache, query = cache_of(rng, 5, 2), query_of(rng, 2)
    cache.truncate(5)
    with pytest.raises(FormulaError, match=r"row 0 of 2 is at position 3(.|\n)*cache\.causal\(2\)"):
        sightline.attention(query, cache, mask=sightline.causal())
    output = sightline.attention(query, cache, mask=i + 3 >= j)
    np.testing.assert_array_equal(output, sightline.attention(query, cache, mask=cache.causal(2)))


def test_all_positions_beside_an_empty_sequence(rng):
    """No row of an empty sequence sees a key, so the other sequences decide."""
    cache, query = cache_of(rng, [3, 0], padding="left"), query_of(rng, 3)
    cache.append(query[:, :, :0], query[:, :, :0])
    output = sightline.attention(query, cache, mask=sightline.causal())
    np.testing.assert_array_equal(output, sightline.attention(query, cache, mask=cache.causal(3)))


def test_all_positions_again_after_rejected_rows(rng):
    cache, query = cache_of(rng, 5, 5), query_of(rng, 5)
    cache.truncate(5)
    output = sightline.attention(query, cache, mask=sightline.causal())
    np.testing.assert_array_equal(output, sightline.attention(query, cache, mask=cache.causal(5)))


@pytest.mark.parametrize("lengths", [[1, 0], [0, 1]], ids=str)
def test_a_sequence_that_has_ended_has_no_position(rng, lengths):
    """The shift of the other sequence makes positions of the rows."""
    cache, query = cache_of(rng, 5, lengths), query_of(rng, 1)
    going = lengths.index(1)
    output = sightline.attention(query, cache, mask=i + 5 - j < 3)[going]
    np.testing.assert_array_equal(output, sightline.attention(query, cache, mask=j > 2)[going])
    with pytest.raises(FormulaError, match=r"-1 is no position"):
        sightline.attention(query, cache, mask=i + 4 >= j)


def test_the_lower_right_corner_of_unequal_lengths_is_refused(rng):
    cache = cache_of(rng, [5, 3], 2)
    with pytest.raises(FormulaError, match=r"cache\.causal\(\)"):
        sightline.attention(query_of(rng, 2), cache, mask=i + (m - n) >= j)


def test_explain_and_other_queries_refuse_too(rng):
    cache, query = cache_of(rng, 5, 1), query_of(rng, 1)
    with pytest.raises(FormulaError, match="KVCache"):
        sightline.explain(query, cache, mask=sightline.causal())
    with pytest.raises(FormulaError, match="KVCache"):
        sightline.attention(np.asfortranarray(query), cache, mask=sightline.causal(), kernel="streaming")


@pytest.mark.parametrize("change", ["append", "truncate"])
def test_a_causal_mask_from_before_a_change_is_refused(rng, change):
    cache, query = cache_of(rng, 5, 1), query_of(rng, 1)
    mask = cache.causal()
    if change == "append":
        cache.append(query, query)
    else:
        cache.truncate(4)
    for outdated in (mask, mask & (j > 1)):
        with pytest.raises(FormulaError, match=r"call cache\.causal\(\) after every append"):
            sightline.attention(query, cache, mask=outdated)


def test_the_mask_of_one_cache_serves_another(rng):
    first, second = cache_of(rng, 5, 1), cache_of(rng, 5, 1)
    query, mask = query_of(rng, 1), first.causal()
    first.append(query, query)
    np.testing.assert_array_equal(
        sightline.attention(query, second, mask=mask), sightline.attention(query, second, mask=second.causal())
    )


def test_torch_refuses_too(rng):
    cache = sightline.KVCache()
    for count in (5, 1):
        cache.append(*torch.zeros(2, B, H, count, D))
    with pytest.raises(FormulaError, match="KVCache"):
        sightline.attention(torch.zeros(B, H, 1, D), cache, mask=sightline.window(3))


def test_a_linear_use_needs_a_coefficient_that_is_equal_for_all_keys():
    assert not compares_rows(s - (i - j) / 8.0 + j)
    assert compares_rows(s - (i - j) * s)
    assert compares_rows(s - 1.0 / (i - j))
    assert compares_rows(s - (i - j) * (i - j))
