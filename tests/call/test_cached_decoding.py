"""Cached calls of the decoding kernel: one call serves every number of keys."""

import ml_dtypes
import numpy as np
import pytest
import torch

import sightline
from cached_calls import run_in_python, uncached
from sample_calls import arrays, bits, decoding_arrays
from sightline import h, i, j, m, n
from sightline.call import call_cache
from sightline.call.problem import make_problem
from sightline.cpu.launch.bound_call import PreparedCall
from sightline.cpu.launch.decode import BoundDecode, min_decode_keys
from sightline.reference.accuracy import compute_baseline, term_sizes
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from strategies import to_torch

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("convert", [np.asarray, to_torch])
@pytest.mark.parametrize("dtype", DTYPES)
def test_growing_keys_hit_one_cached_call(rng, dtype, convert, monkeypatch):
    """Views of one storage, one more key per step: a single entry serves them, across blocks and splits."""
    q, k, v = map(convert, decoding_arrays(rng, 2300, dtype))
    lengths = [600, *range(1023, 1027), 2050, 2300, 512, 600]
    expected = [bits(uncached((q, k[:, :, :m], v[:, :, :m]), threads=1)) for m in lengths]
    sightline.attention(q, k[:, :, :900], v[:, :, :900], threads=1)
    found = decoded(monkeypatch)
    for length, right in zip(lengths, expected, strict=True):
        assert bits(sightline.attention(q, k[:, :, :length], v[:, :, :length], threads=1)) == right
    assert found == [True] * len(lengths)
    assert count_calls() == 1


def count_calls():
    """The number of bound calls; a call may be stored under several keys."""
    return len({id(call.prepared.call) for call in call_cache.calls.values()})


def decoded(monkeypatch):
    """A list with the result of each cached call of the decoding kernel: True if it computed the output."""
    run_in_python(monkeypatch)
    found, run = [], PreparedCall.run

    def spy(self, *given, **named):
        status, results = run(self, *given, **named)
        found.extend([status is not None] * isinstance(self.call, BoundDecode))
        return status, results

    monkeypatch.setattr(PreparedCall, "run", spy)
    return found


def test_few_keys_do_not_use_the_decoding_kernel(rng, monkeypatch):
    q, k, v = decoding_arrays(rng)
    few = min_decode_keys(1) - 1
    expected = bits(uncached((q, k[:, :, :few], v[:, :, :few])))
    uncached((q, k, v))
    found = decoded(monkeypatch)
    assert bits(sightline.attention(q, k[:, :, :few], v[:, :, :few])) == expected
    assert found == [False]


@pytest.mark.parametrize("mask", [None, j < 600, (i + m - n >= j) & (j >= 40)])
def test_decoding_with_a_mask(rng, mask, monkeypatch):
    given, other = decoding_arrays(rng), decoding_arrays(rng)
    expected = bits(uncached(other, mask=mask))
    uncached(given, mask=mask)
    found = decoded(monkeypatch)
    for threads in (1, 2, 3):
        assert bits(sightline.attention(*other, mask=mask)) == expected
        with sightline.threads(threads):
            assert bits(sightline.attention(*other, mask=mask)) == expected
    assert found == [True] * 6
    shorter = [other[0], *(x[:, :, :650] for x in other[1:])]  # a formula may read the length
    assert bits(sightline.attention(*shorter, mask=mask)) == bits(uncached(shorter, mask=mask))


def test_a_hidden_nan_falls_back_and_the_next_call_hits(rng, monkeypatch):
    """The next call uses the same argument block: the flag that the NaN set is cleared."""
    q, k, v = decoding_arrays(rng)
    mask = (j < 600) | (h == 1)  # a key that no query row sees would not be read
    expected = bits(uncached((q, k, v), mask=mask))
    spoilt = v.copy()
    spoilt[:, :, 620] = np.nan
    found = decoded(monkeypatch)
    output = sightline.attention(q, k, spoilt, mask=mask)
    assert np.isfinite(np.delete(output, 1, axis=1)).all()
    assert np.isnan(output[:, 1]).all()
    assert bits(sightline.attention(q, k, v, mask=mask)) == expected
    assert found == [False, True]


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_a_decoding_loop_has_one_cached_call(rng, convert):
    """The newest token of a cache attends to every key: the same entry serves until the storage moves."""
    tokens = 40
    q, k, v = (convert(x) for x in decoding_arrays(rng, 600 + tokens))
    cache = sightline.KVCache(capacity=610)
    cache.append(k[:, :, :600], v[:, :, :600])
    expected = [bits(uncached((q, k[:, :, : t + 1], v[:, :, : t + 1]))) for t in range(600, 600 + tokens)]
    call_cache.clear()
    found = []
    for t, right in enumerate(expected, 600):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        output = sightline.attention(q, cache, mask=sightline.causal())
        assert bits(output) == right
        found.append(count_calls())
    assert found == [1] * 10 + [2] * 30  # the storage has space for 610


@pytest.mark.parametrize("mask", ["none", "causal", "another"])
def test_steps_of_sequences_of_different_lengths_need_no_dispatch(rng, mask, monkeypatch):
    """Positions beyond the end of a sequence are hidden; they hold NaN."""
    B, tokens = 3, 12
    q, k, v = arrays(rng, ((B, 2, tokens, 16), (B, 2, 40 + tokens, 16), (B, 2, 40 + tokens, 16)))
    k[:, :, :40][:, :, 25:], v[:, :, :40][:, :, 25:] = np.nan, np.nan
    cache = sightline.KVCache(capacity=64)
    cache.append(k[:, :, :40], v[:, :, :40], lengths=[25, 11, 3])

    def options():
        return {"none": {}, "causal": {"mask": sightline.causal()}, "another": {"mask": j >= 2}}[mask]

    for t in range(tokens):
        cache.append(k[:, :, 40 + t : 41 + t], v[:, :, 40 + t : 41 + t])
        if t == 2:
            monkeypatch.setattr("sightline.api.functions.parse", None)
        query = q[:, :, t : t + 1]
        output = sightline.attention(query, cache, **options())
        for entry, length in enumerate(cache.lengths):
            x = [array[entry : entry + 1, :, :length] for array in (cache.key, cache.value)]
            problem = make_problem(query[entry : entry + 1], *x, mask=j >= 2 if mask == "another" else None)
            truth, baseline = compute_stages(problem), compute_baseline(problem).output
            terms = term_sizes(problem, truth.weights)
            assert_within_budget(output[entry : entry + 1], truth.output, baseline, terms=terms)
