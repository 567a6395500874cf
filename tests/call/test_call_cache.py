"""Cached calls have equal bits as uncached calls: with other contents, other lengths, and after errors."""

import weakref

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from cached_calls import FORMULAS, record_hits, uncached
from sample_calls import KINDS, all_bits, arrays, bits, draw_inputs
from sightline import b, i, j, p, s, table
from sightline.call import call_cache
from sightline.errors import DtypeError, FormulaError, SightlineError, TableError
from strategies import to_torch

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


@st.composite
def layouts(draw):
    """Matching shapes, and the memory layout of each array."""
    B, G, group, n, m = (draw(st.integers(1, top)) for top in (2, 2, 2, 20, 20))
    d_k, d_v = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    axes = draw(st.integers(2, 4))
    lead = ((B, G * group), (B, G), (B, G)) if axes == 4 else ((B,),) * 3 if axes == 3 else ((),) * 3
    shapes = [(*first, *last) for first, last in zip(lead, ((n, d_k), (m, d_k), (m, d_v)), strict=True)]
    return shapes, [draw(st.sampled_from(["whole", "turned", "gaps", "same rows"])) for _ in shapes]


def make_array(rng, shape, dtype, how):
    if how == "turned":
        return rng.normal(size=shape[::-1]).astype(dtype).T
    if how == "gaps":
        return rng.normal(size=(*shape[:-1], 2 * shape[-1])).astype(dtype)[..., ::2]
    if how == "same rows":
        return np.broadcast_to(rng.normal(size=(*shape[:-2], 1, shape[-1])).astype(dtype), shape)
    return rng.normal(size=shape).astype(dtype)


@settings(max_examples=24)
@given(layouts(), st.sampled_from(DTYPES), st.sampled_from(sorted(FORMULAS)), st.booleans(), st.integers(0, 99))
def test_equal_bits_as_an_uncached_call(layout, dtype, formula, in_torch, seed):
    rng = np.random.default_rng(seed)
    first, other = ([make_array(rng, shape, dtype, how) for shape, how in zip(*layout, strict=True)] for _ in range(2))
    if in_torch:
        first, other = ([to_torch(x) for x in given] for given in (first, other))
    options = FORMULAS[formula]
    expected = uncached(other, **options())
    uncached(first, **options())
    assert len(call_cache.calls) == 1
    with pytest.MonkeyPatch.context() as patch:
        found = record_hits(patch)
        output = sightline.attention(*other, **options())
        assert found
    assert (type(output), output.shape, output.dtype) == (type(expected), expected.shape, expected.dtype)
    assert bits(output) == bits(expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_large_calls_and_threads(rng, threads, convert, monkeypatch):
    given = [convert(x) for x in arrays(rng, ((2, 4, 300, 16),) * 3)]
    expected = uncached(given, mask=i >= j, threads=1)
    uncached(given, mask=i >= j)
    found = record_hits(monkeypatch)
    with sightline.threads(threads):
        assert bits(sightline.attention(*given, mask=i >= j)) == bits(expected)
    assert found


def test_cached_calls_read_the_arrays_of_the_call(rng):
    q, k, v = arrays(rng)
    sightline.attention(q, k, v)
    result = sightline.attention(q, k, v)
    copy = result.copy()
    v[...] = 1
    np.testing.assert_allclose(sightline.attention(q, k, v), 1, rtol=np.finfo(np.float32).eps)
    np.testing.assert_array_equal(result, copy)  # results do not share memory


def test_the_cache_has_a_limited_size(rng, monkeypatch):
    monkeypatch.setattr(call_cache, "MAX_CACHED_CALLS", 3)
    q, k, v = arrays(rng)
    for stride in range(2, 5):
        sightline.attention(q, k, v, mask=i % stride == 0)
    sightline.attention(q, k, v, mask=i % 2 == 0)  # used again: the second is now the oldest
    sightline.attention(q, k, v, mask=i % 5 == 0)
    left = {(i % stride == 0, None) for stride in (4, 2, 5)}
    assert {key[1].formulas for key in call_cache.calls} == left


STATISTICS = [None, [sightline.received()], [sightline.pooled(2, 3)], [sightline.max(p * table(np.ones(9))[j], over=i)]]


@pytest.mark.parametrize("see", [*STATISTICS, [sightline.top_k(2), sightline.weights().mean("heads")]], ids=str)
def test_cached_calls_do_not_keep_arrays_alive(rng, see):
    given = [torch.from_numpy(x) for x in arrays(rng)]
    watched = [weakref.ref(x) for x in given]
    sightline.attention(*given, see=see)
    sightline.attention(*given, see=see)
    del given
    assert [ref() for ref in watched] == [None] * 3


@settings(max_examples=15)
@given(st.sampled_from(KINDS), st.booleans(), st.integers(0, 999))
def test_equal_bits_with_other_lengths(kind, in_torch, seed):
    """Calls of one family have other lengths, other strides and other contents; the full dispatch is the oracle."""
    rng = np.random.default_rng(seed)
    B, H, n = 2, 4, int(rng.choice([1, 5, 70]))
    convert = to_torch if in_torch else np.asarray

    def draw(n, m):
        shapes = ((B, n, H, 16), (B, m, H, 16), (B, m, H, 16)) if rng.random() < 0.5 else None
        if shapes is None:
            return [convert(x) for x in arrays(rng, ((B, H, n, 16), (B, H, m, 16), (B, H, m, 16)))]
        return [convert(x).swapaxes(1, 2) for x in arrays(rng, shapes)]

    def call(n, m):
        sightline.attention(*draw(n, m), **draw_inputs(rng, kind, B, H, n, m, convert))

    numbers = int(rng.integers(2, 500)), int(rng.integers(512, 1200))
    for number in numbers:
        call(n, number)
    for _ in range(3):
        queries, keys = (n if n < 64 else int(rng.integers(64, 300))), int(rng.integers(2, 1400))
        given, options = draw(queries, keys), draw_inputs(rng, kind, B, H, queries, keys, convert)
        answer = all_bits(sightline.attention(*given, **options))
        assert answer == all_bits(uncached(given, **options))
        for number in numbers:  # `uncached` has cleared the cache
            call(n, number)


@pytest.mark.parametrize("kind", ["padding", "window", "boolean array", "sinks", "statistics"])
def test_other_lengths_need_no_dispatch(rng, kind, monkeypatch):
    def call(length):
        given = arrays(rng, ((1, 2, 4, 16), (1, 2, length, 16), (1, 2, length, 16)))
        sightline.attention(*given, **draw_inputs(rng, kind, 1, 2, 4, length))

    call(90)
    monkeypatch.setattr("sightline.api.functions.parse", None)
    call(91)
    call(200)


@pytest.mark.parametrize("queries", [1, 20, 70])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_other_lengths_that_do_not_fit_are_errors(rng, queries, convert):
    """Keys and values of different lengths, and sinks of other lengths, after calls with other lengths that fit."""

    def draw(m, values, sinks):
        given = arrays(rng, ((1, 4, queries, 16), (1, 4, m, 16), (1, 4, values, 16)))
        return [convert(x) for x in given], convert(rng.normal(size=sinks).astype(np.float32))

    for length in (80, 90, 700):
        for _ in range(2):
            given, sinks = draw(length, length, 4)
            sightline.attention(*given)
            sightline.attention(*given, sinks=sinks)
    for keys, values in ((95, 93), (95, 97), (8, 0), (700, 90), (90, 700)):
        for _ in range(3):
            given, sinks = draw(keys, values, 4)
            with pytest.raises(SightlineError):
                sightline.attention(*given)
            with pytest.raises(SightlineError):
                sightline.attention(*given, sinks=sinks)
    for length in (2, 3, 5):
        given, sinks = draw(101, 101, length)
        with pytest.raises(SightlineError):
            sightline.attention(*given, sinks=sinks)


def test_a_tensor_without_memory_is_an_error(rng):
    q, k, v = [torch.from_numpy(x).clone() for x in arrays(rng)]
    for _ in range(5):
        sightline.attention(q, k, v)
    v.untyped_storage().resize_(0)
    with pytest.raises(DtypeError, match=r"value of shape .* has no memory"):
        sightline.attention(q, k, v)


@pytest.mark.parametrize("are_direct", [False, True])
def test_contents_that_become_invalid_raise_the_error(rng, are_direct, monkeypatch):
    """Two new contents are invalid: an index outside its table, and a whole number that is not exact in float64."""
    given, index = arrays(rng, ((1, 2, 9, 8),) * 3), rng.integers(0, 4, 9)

    def options():
        return {"score": s + table(np.arange(4.0))[table(index)[j]], "mask": table(index)[i] <= table(index)[j] + 4}

    sightline.attention(*given, **options())
    found = [] if are_direct else record_hits(monkeypatch)
    index[0] = 3
    assert all_bits(sightline.attention(*given, **options())) == all_bits(uncached(given, **options()))
    for _ in range(4):
        sightline.attention(*given, **options())
    assert bool(found) != are_direct
    index[2] = 4
    with pytest.raises(TableError, match="reads outside its table"):
        sightline.attention(*given, **options())
    index[2] = 2**60
    with pytest.raises(FormulaError):
        sightline.attention(*given, **options())
    index[2] = 0
    assert all_bits(sightline.attention(*given, **options())) == all_bits(uncached(given, **options()))


def test_a_hidden_read_outside_of_a_table_is_decided_at_each_call(rng):
    """With the first lengths, the mask hides the pairs whose index leaves the table. With others it shows them."""
    given, slots = arrays(rng, ((2, 2, 9, 8),) * 3), np.arange(5.0)

    def call(lengths):
        return sightline.attention(*given, score=s + table(slots)[j], mask=j < table(np.array(lengths))[b])

    expected = bits(call([5, 3]))
    assert bits(call([5, 3])) == expected
    with pytest.raises(TableError):
        call([5, 6])
    assert bits(call([5, 3])) == expected


def test_reads_outside_of_a_table_at_hidden_pairs_are_repeated(rng, monkeypatch):
    """The mask and the number decide which pairs are hidden, whatever the tables contain."""
    given = arrays(rng)

    def call(number):
        mask = (j <= i + number) & (table(rng.random(9) < 0.8)[j])
        return {"mask": mask, "score": s + table(rng.random(14))[i - j + 5]}

    for number in (3, 4, 3):
        sightline.attention(*given, **call(number))
        for _ in range(8):  # the last ones are direct
            options = call(number)
            with monkeypatch.context() as patch:
                patch.setattr("sightline.api.functions.parse", None)
                answer = bits(sightline.attention(*given, **options))
            assert answer == bits(sightline.attention(*given, **options, kernel="cpu"))
    with pytest.raises(TableError):
        sightline.attention(*given, **call(6))


def test_tables_changed_in_place_are_read_again(rng, monkeypatch):
    given, values = arrays(rng), np.ones(9, bool)
    mask = sightline.table(values)[j]
    sightline.attention(*given, mask=mask)
    found = record_hits(monkeypatch)
    values[4:] = False
    changed = sightline.attention(*given, mask=mask)
    assert found
    assert bits(changed) == bits(uncached(given, mask=mask))
