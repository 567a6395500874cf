"""`sightline.KVCache`: a decoding loop against attention on the whole sequence, memory, and errors.

`test_quantized_cache.py` compares drawn changes with Python lists, for caches of every dtype.
"""

import copy
import math

import numpy as np
import pytest
import torch

import sightline
from cached_calls import cache_problem
from fault_planting import Fault, make_fault_test
from filled_caches import assert_solves, filled_cache
from sightline import KVCache, i, j
from sightline.arrays.operations import to_numpy
from sightline.call.problem import make_problem
from sightline.errors import DeviceError, DtypeError, ParameterError, ShapeError
from sightline.kv_cache.storage import Storage, _grow, _write
from sightline.kv_cache.stored_rows import StoredRows
from strategies import DTYPES, to_torch

B, H, G, T, D_K, D_V = 3, 4, 2, 40, 16, 9
STEPS = (7, 1, 1, 1, 4, 1, 1, 24)  # positions per append


def arrays(rng, dtype="float32", kind="numpy", batch=B, length=T):
    """Queries, keys and values of whole sequences."""
    shapes = ((batch, H, length, D_K), (batch, G, length, D_K), (batch, G, length, D_V))
    found = [rng.normal(size=shape).astype(DTYPES[dtype]) for shape in shapes]
    return [to_torch(x) for x in found] if kind == "torch" else found


def assert_attends(output, query, key, value, mask, rows=slice(None)):
    """Raise AssertionError unless `output` has these rows of attention on the whole sequences, within the budget."""
    assert_solves(output, make_problem(query, key, value, mask=mask), rows)


def decode(cache, query, key, value, steps=STEPS, **options):
    """The outputs of a loop that appends some positions and attends with their queries, joined along n."""
    outputs, at = [], 0
    for t in steps:
        rows = slice(at, at := at + t)
        cache.append(key[..., rows, :], value[..., rows, :])
        outputs.append(sightline.attention(query[..., rows, :], cache, mask=sightline.causal(), **options))
    return (torch.cat if isinstance(query, torch.Tensor) else np.concatenate)(outputs, -2)


# -- decoding loops ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loop_gives_the_rows_of_causal_attention(rng, dtype, kind):
    cache, whole = KVCache(), arrays(rng, dtype, kind)
    output = decode(cache, *whole)
    assert output.dtype == whole[0].dtype
    assert_attends(output, *whole, mask=i >= j)
    assert cache.lengths.tolist() == [T] * B
    assert cache.dtype == dtype


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_without_heads_or_batch(rng, axes, kind):
    lead = {2: (0, 0), 3: (slice(None), 0)}[axes]
    query, key, value = (x[lead] for x in arrays(rng, kind=kind))
    cache = KVCache()
    output = decode(cache, query, key, value)
    assert output.ndim == axes
    assert cache.key.shape == key.shape
    parts = (x.reshape(-1, 1, *x.shape[-2:]) for x in (output, query, key, value))
    assert_attends(*parts, mask=i >= j)


@pytest.mark.parametrize("kernel", ["cpu", "streaming", "reference"])
def test_every_kernel_reads_a_cache(rng, kernel):
    whole = arrays(rng, "float64")
    assert_attends(decode(KVCache(), *whole, kernel=kernel), *whole, mask=i >= j)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_cache_of_a_narrower_dtype(rng, dtype, kind):
    """The cache rounds once; attention on the rounded keys and values is exact."""
    whole = arrays(rng, "float64", kind)
    cache = filled_cache(*whole[1:], dtype=dtype)
    cache.append(*whole[1:], lengths=[1, 3, 5])
    assert cache.dtype == dtype
    cast = [to_numpy(x).astype(DTYPES[dtype]) for x in whole]
    assert str(cache.key.dtype).endswith(dtype)
    stored = [to_numpy(x).astype(np.float64) for x in (cache.key, cache.value)]
    for found, x in zip(stored, cast[1:], strict=True):
        assert np.array_equal(found[:, :, :T], x.astype(np.float64))
        assert np.array_equal(found[2, :, T:], x.astype(np.float64)[2, :, :5])
    query = to_torch(cast[0]) if kind == "torch" else cast[0]
    cache.truncate(T)
    assert_attends(sightline.attention(query, cache), *cast, mask=None)


# -- sequences of different lengths ------------------------------------------------------------------------------------

LENGTHS = np.array([9, 4, 0])  # lengths of the prompts, which are padded to 10
PADDED = 10


def ragged(rng, padding, kind="numpy"):
    """(query, key, value) of whole sequences, and the prompts padded with NaN."""
    whole = arrays(rng, kind=kind)
    prompts = []
    for x in whole:
        prompt = x[:, :, :PADDED] * math.nan
        for b, count in enumerate(LENGTHS):
            real = slice(0, count) if padding == "right" else slice(PADDED - count, PADDED)
            prompt[b, :, real] = x[b, :, :count]
        prompts.append(prompt)
    return whole, prompts


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_prompts_of_different_lengths_then_one_token_each(rng, padding, kind):
    whole, (query, key, value) = ragged(rng, padding, kind)
    cache = filled_cache(key, value, lengths=LENGTHS, padding=padding)
    output = sightline.attention(query, cache, mask=sightline.causal())
    steps = 6
    after = []
    for t in range(steps):
        token = [np.stack([to_numpy(x)[b, :, c + t : c + t + 1] for b, c in enumerate(LENGTHS)]) for x in whole]
        token = [to_torch(x) for x in token] if kind == "torch" else token
        cache.append(*token[1:])
        after.append(to_numpy(sightline.attention(token[0], cache, mask=sightline.causal())))
    for b, count in enumerate(LENGTHS):
        one = [to_numpy(x)[b : b + 1] for x in whole]
        real = slice(0, count) if padding == "right" else slice(PADDED - count, PADDED)
        found = to_numpy(output)[b : b + 1]
        if count:
            assert_attends(found[:, :, real], *one, mask=i >= j, rows=slice(0, count))
        assert not np.delete(found, np.r_[real], axis=2).any()  # padding queries give 0, not NaN
        assert_attends(np.concatenate(after, 2)[b : b + 1], *one, mask=i >= j, rows=slice(count, count + steps))
    assert cache.lengths.tolist() == (LENGTHS + steps).tolist()


def test_the_last_token_of_each_prompt(rng):
    """Queries that are not as many as the rows of the newest append are at the last positions."""
    whole, (_, key, value) = ragged(rng, "right")
    cache = filled_cache(key, value, lengths=LENGTHS)
    last = np.stack([whole[0][b, :, max(count - 2, 0) : max(count, 2)] for b, count in enumerate(LENGTHS)])
    output = sightline.attention(last, cache, mask=sightline.causal())
    for b, count in enumerate(LENGTHS[:2]):
        one = [x[b : b + 1] for x in whole]
        assert_attends(output[b : b + 1], *one, mask=i >= j, rows=slice(count - 2, count))
    assert not output[2].any()
    assert cache.positions(2).tolist() == [[7, 8], [2, 3], [-1, -1]]


def test_stale_memory_is_never_read(rng):
    """Positions beyond a sequence's end are hidden even if they contain NaN, with and without a mask."""
    query, key, value = arrays(rng)
    cache = filled_cache(key * np.nan, value * np.nan)
    cache.truncate(0)
    cache.append(key[:, :, :9], value[:, :, :9], lengths=[9, 2, 5])
    for options in ({}, {"mask": np.ones((T, 9), bool)}, {"mask": lambda b, h, i, j: j >= 0}):
        output = sightline.attention(query, cache, **options)
        for b, count in enumerate([9, 2, 5]):
            one = query[b : b + 1], key[b : b + 1, :, :count], value[b : b + 1, :, :count]
            assert_attends(output[b : b + 1], *one, mask=None)


def test_many_queries_on_one_cached_prompt(rng):
    """A cache with a batch of 1 broadcasts, as keys and values do."""
    query, key, value = arrays(rng)
    cache = filled_cache(key[:1], value[:1])
    output = sightline.attention(query, cache, mask=sightline.causal())
    assert_attends(output, query, key[:1], value[:1], mask=i >= j)


# -- truncation and beams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_rejected_drafts_have_no_effect(rng, kind):
    """Speculative decoding: append drafts, attend, and truncate each sequence at its first wrong token."""
    query, key, value = arrays(rng, kind=kind)
    cache = filled_cache(key[:, :, :5], value[:, :, :5])
    drafts = [-x[:, :, 5:9] for x in (key, value)]
    for draft, x in zip(drafts, (key, value), strict=True):
        draft[0, :, :3] = x[0, :, 5:8]  # right guesses: 3 tokens in the first sequence, 1 in the second, 0 in the third
        draft[1, :, :1] = x[1, :, 5:6]
    cache.append(*drafts)
    cache.truncate([8, 6, 5])
    assert cache.positions().tolist() == [[5, 6, 7, -1], [5, -1, -1, -1], [-1] * 4]
    rest = [np.zeros((B, G, 7, x.shape[-1]), np.float32) for x in (key, value)]
    queries, counts = np.zeros((B, H, 7, D_K), np.float32), [4, 6, 7]
    for b, count in enumerate(counts):
        for new, x in zip((queries, *rest), (query, key, value), strict=True):
            new[b, :, :count] = to_numpy(x)[b, :, 12 - count : 12]
    queries, *rest = (to_torch(x) for x in (queries, *rest)) if kind == "torch" else (queries, *rest)
    cache.append(*rest, lengths=counts)
    output = to_numpy(sightline.attention(queries, cache, mask=sightline.causal()))
    for b, count in enumerate(counts):
        one = [to_numpy(x)[b : b + 1] for x in (query, key, value)]
        assert_attends(output[b : b + 1, :, :count], *one, mask=i >= j, rows=slice(12 - count, 12))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_beams(rng, kind):
    """One prompt becomes three beams; beams are reordered; two of them end."""
    query, key, value = arrays(rng, kind=kind)
    prompt = [x[:1, :, :6] for x in (key, value)]
    cache = filled_cache(*prompt)
    cache.reorder([0, 0, 0])
    cache.append(key[:, :, 6:8], value[:, :, 6:8])
    origin = np.array([2, 1, 2])
    cache.reorder(to_torch(origin) if kind == "torch" else origin)
    cache.append(key[:, :, 8:9], value[:, :, 8:9])
    output = sightline.attention(query[:, :, 8:9], cache, mask=sightline.causal())
    for b, of in enumerate(origin):
        history = [
            np.concatenate(
                [to_numpy(x)[:1, :, :6], to_numpy(x)[of : of + 1, :, 6:8], to_numpy(x)[b : b + 1, :, 8:9]], 2
            )
            for x in (key, value)
        ]
        assert_attends(to_numpy(output)[b : b + 1], to_numpy(query)[b : b + 1, :, 8:9], *history, mask=None)
    cache.reorder([1])
    again = sightline.attention(query[1:2, :, 8:9], cache, mask=sightline.causal())
    assert np.array_equal(to_numpy(again), to_numpy(output)[1:2])


def test_reorder_writes_only_sequences_that_move(rng):
    """The memory of the other sequences may be read-only."""
    _, key, value = arrays(rng)
    cache = filled_cache(key, value)
    own = cache.key
    before = own.copy()
    cache.storage.key[1].setflags(write=False)
    cache.reorder([2, 1, 0])
    assert np.shares_memory(cache.key, own)
    assert np.array_equal(cache.key, before[[2, 1, 0]])
    address = cache.key.ctypes.data
    cache.reorder([0, 1, 2])
    assert cache.key.ctypes.data == address


def test_reset_keeps_the_storage(rng):
    whole = arrays(rng)
    cache = KVCache()
    first = decode(cache, *whole)
    capacity, address = cache.capacity, cache.key.ctypes.data
    cache.reset()
    assert cache.lengths.tolist() == [0] * B
    assert np.array_equal(decode(cache, *whole), first)
    assert (cache.capacity, cache.key.ctypes.data) == (capacity, address)


def test_an_empty_cache_gives_0(rng):
    query, key, value = arrays(rng)
    cache = filled_cache(key[:, :, :0], value[:, :, :0])
    assert not sightline.attention(query, cache).any()
    assert not sightline.attention(query[:, :, :0], cache, mask=sightline.causal()).any()
    cache.append(key, value)
    cache.reorder([])
    assert sightline.attention(query[:0], cache, mask=sightline.causal()).shape == (0, H, T, D_V)


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_lengths_and_indices_of_every_integer_dtype(rng, dtype, kind):
    """A cache that was given other integers is the cache that was given int64, also in what follows."""
    _, key, value = arrays(rng, kind=kind)
    caches = []
    for given in (dtype, "int64"):
        cache = filled_cache(key, value, lengths=np.array([9, 3, 5], given))
        cache.truncate(np.array([7, 9, 2], given))
        cache.reorder(np.array([1, 0, 1], given))
        cache.truncate(np.array(6, given))
        cache.reorder(np.array([1, 0], given))
        cache.append(key[:2, :, :1], value[:2, :, :1])
        caches.append(cache)
    found, expected = caches
    assert found.lengths.dtype == found.positions(np.array(2, dtype)[()]).dtype == np.int64
    assert found.lengths.tolist() == expected.lengths.tolist() == [7, 4]
    assert found.positions(np.array(2, dtype)[()]).tolist() == [[5, 6], [2, 3]]
    for ours, theirs in ((found.key, expected.key), (found.value, expected.value)):
        assert np.array_equal(to_numpy(ours), to_numpy(theirs))


@pytest.mark.parametrize("largest", [2**63 - 1, 2**63, 2**64 - 1])
def test_truncation_to_the_largest_numbers_does_nothing(rng, largest):
    _, key, value = arrays(rng)
    cache = filled_cache(key, value, lengths=[9, 3, 5])
    before = cache.key.copy()
    cache.truncate(largest)
    cache.truncate(np.array([largest] * B, np.uint64))
    assert cache.lengths.tolist() == [9, 3, 5]
    assert np.array_equal(cache.key, before)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_cache_of_no_sequences_works_as_others(rng, count):
    query, key, value = (x[:, :, :count] for x in arrays(rng))
    cache = filled_cache(key, value)
    cache.reorder([])
    cache.truncate(cache.lengths.tolist())
    cache.append(key[:0], value[:0], lengths=[])
    assert cache.lengths.tolist() == []
    for mask in (None, i >= j):
        assert sightline.attention(query[:0], cache, mask=mask).shape == (0, H, count, D_V)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, 1, 100])
def test_storage_grows_rarely(rng, capacity):
    """2,000 single appends move the storage log₂ 256 + 3 + log₁.₂₅ 2 times; it has room for a quarter more, or 256."""
    _, key, value = arrays(rng, length=1)
    cache, tokens, places = KVCache(capacity=capacity), 2000, set()
    for t in range(1, tokens + 1):
        cache.append(key, value)
        places.add((cache.capacity, cache.key.ctypes.data))
        assert cache.capacity <= max(2 * t, capacity)
        assert cache.capacity <= max(t + max(256, t / 4), capacity)
    doublings = math.ceil(math.log2(256 / max(capacity, 1)))
    assert len(places) <= 1 + doublings + 3 + math.ceil(math.log(tokens / 1024, 1.25))
    assert cache.nbytes == B * G * cache.capacity * (D_K + D_V) * 4


def test_views_stay_valid_after_growth(rng):
    _, key, value = arrays(rng)
    cache = filled_cache(key[:, :, :5], value[:, :, :5])
    old, before = cache.key, cache.key.copy()
    cache.append(key[:, :, 5:], value[:, :, 5:])
    assert not np.shares_memory(old, cache.key)
    cache.truncate(0)
    cache.append(-key, -value)
    assert np.array_equal(old, before)


def test_an_append_during_attention_is_not_partly_read(rng, monkeypatch):
    query, key, value = arrays(rng)
    cache = filled_cache(key[:, :, :5], value[:, :, :5])
    before = sightline.attention(query, cache)
    rows, waiting = KVCache.rows, [True]

    def meanwhile(self):
        if waiting and waiting.pop():
            cache.append(key[:, :, 5:], value[:, :, 5:])
        return rows(self)

    monkeypatch.setattr(KVCache, "rows", meanwhile)
    assert np.array_equal(sightline.attention(query, cache), before)
    assert not waiting


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_attention_reads_the_storage_without_a_copy(rng, kind):
    query, key, value = arrays(rng, kind=kind)
    cache = filled_cache(key, value, lengths=[T, 3, 4], capacity=3 * T)
    problem = cache_problem(query, cache)
    for posed, storage in ((problem.key, cache.storage.key), (problem.value, cache.storage.value)):
        assert np.shares_memory(to_numpy(posed), to_numpy(storage))
        assert to_numpy(posed).strides == to_numpy(storage).strides
    rows = to_numpy(cache.key)[1, 1]
    assert rows.flags.c_contiguous  # the positions of a head are contiguous


def test_one_kernel_serves_prompt_and_tokens(rng):
    """Positions are tables, so that steps have equal formulas. A single query needs none."""
    query, key, value = arrays(rng)
    cache, texts = KVCache(), set()
    for t in range(1, 9):
        cache.append(key[:, :, :t], value[:, :, :t], lengths=[t, 1, t - 1])
        texts.add(cache_problem(query[:, :, :t], cache, mask=sightline.causal()).mask.text)
    assert len(texts) == 2


def test_tiles_follow_each_length(rng):
    """Keys beyond a sequence's end are not computed."""
    query, key, value = (np.zeros((2, 1, 1024, 8), np.float32) for _ in range(3))
    cache = filled_cache(key, value, lengths=[1024, 64])
    query = query[:, :, :64]
    told = sightline.explain(query, cache)
    assert told.tiles == {"empty": 15, "full": 17, "partial": 0}
    assert "j < t[b]" in str(told)


CHANGES = {
    "append": lambda cache, x: cache.append(x, x[..., :D_V]),
    "append after truncate": lambda cache, x: (cache.truncate(T - 3), cache.append(x, x[..., :D_V])),
    "append after reset": lambda cache, x: (cache.reset(), cache.append(x, x[..., :D_V])),
    "reorder": lambda cache, x: cache.reorder([2, 0, 0]),
    "select": lambda cache, x: cache.reorder([1, 2]),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("change", CHANGES)
def test_copies_share_their_storage_until_one_writes(rng, kind, change):
    _, key, value = arrays(rng, kind=kind)
    cache = filled_cache(key, value, capacity=3 * T)
    other = copy.deepcopy(cache)
    everyone = [cache, other, copy.deepcopy(cache), copy.deepcopy(other)]
    assert len({address(one) for one in everyone}) == 1
    for writer in everyone:
        others = [one for one in everyone if one is not writer]
        before = [(to_numpy(one.key).copy(), to_numpy(one.value).copy()) for one in others]
        CHANGES[change](writer, -key)
        for one, stored in zip(others, before, strict=True):
            assert np.array_equal(to_numpy(one.key), stored[0])
            assert np.array_equal(to_numpy(one.value), stored[1])
    assert len({address(one) for one in everyone}) == len(everyone)
    own = address(cache)
    cache.append(key[: len(cache.lengths), :, :1], value[: len(cache.lengths), :, :1])
    assert address(cache) == own  # its own storage is not copied again


def address(cache):
    return to_numpy(cache.key).__array_interface__["data"][0]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("capacity", [None, 0, 3 * T])
@pytest.mark.parametrize("lengths", [[T] * B, [T, 2, T - 1][:B]])
def test_the_last_positions(rng, kind, capacity, lengths):
    _, key, value = arrays(rng, kind=kind)
    cache = filled_cache(key, value, lengths=lengths)
    for count in (0, 3, T, T + 5):
        found = cache.last(count, capacity=capacity)
        first = max(T - count, 0)
        assert found.lengths.tolist() == [max(length - first, 0) for length in lengths]
        assert np.array_equal(to_numpy(found.key), to_numpy(cache.key)[:, :, first:])
        assert np.array_equal(to_numpy(found.value), to_numpy(cache.value)[:, :, first:])
        assert np.array_equal(found.positions(), np.maximum(cache.positions() - first, -1))
        if capacity is None:
            assert np.shares_memory(to_numpy(found.key), to_numpy(cache.key)) == (count > 0)
        else:
            assert found.capacity == max(capacity, found.max_length)
        before = to_numpy(cache.key).copy(), cache.lengths
        found.append(-key, -value)
        found.truncate(1)
        assert np.array_equal(to_numpy(cache.key), before[0])
        assert np.array_equal(cache.lengths, before[1])
    with pytest.raises(ParameterError, match="count=-1"):
        cache.last(-1)
    assert KVCache(dtype="float32").last(5, capacity=3).max_length == 0


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([5, 5, 5], "3 sequences of 5 positions each, capacity 6"),
        ([5, 0, 5], "3 sequences of 0 to 5 positions"),
        ([5, 2], "2 sequences of 5 and 2 positions"),
        ([2], "1 sequence of 2 positions"),
    ],
)
def test_repr(rng, lengths, says):
    _, key, value = arrays(rng, batch=len(lengths), length=5)
    cache = KVCache(capacity=6, dtype="bfloat16")
    assert repr(cache) == "KVCache: empty, capacity 6, the first append decides the rest"
    assert (cache.nbytes, cache.dtype, cache.capacity) == (0, "bfloat16", 6)
    cache.append(key, value, lengths=lengths)
    assert says in repr(cache)
    assert f"2 heads, d_k {D_K}, d_v {D_V}, bfloat16, numpy on cpu, " in repr(cache)
    cache = filled_cache(key[:, 0], value[:, 0])
    assert "no head axis" in repr(cache)


# -- torch -------------------------------------------------------------------------------------------------------------


def test_the_query_has_its_gradient(rng):
    query, key, value = arrays(rng, kind="torch", dtype="float64")
    cache = filled_cache(key, value)
    query.requires_grad_()
    (found,) = torch.autograd.grad(sightline.attention(query, cache, mask=sightline.causal()).sum(), query)
    (expected,) = torch.autograd.grad(sightline.attention(query, key, value, mask=i >= j).sum(), query)
    assert torch.equal(found, expected)


def test_a_write_after_attention_raises_in_backward(rng):
    """torch reports the changed storage when a gradient is computed."""
    query, key, value = arrays(rng, kind="torch")
    cache = filled_cache(key, value, capacity=2 * T)
    output = sightline.attention(query.requires_grad_(), cache)
    cache.append(key, value)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_projections_under_no_grad(rng, mode):
    layer, x = torch.nn.Linear(D_K, D_K), torch.ones(B, G, T, D_K)
    cache = KVCache()
    with mode():
        cache.append(layer(x), layer(x), lengths=[T, 4, 5])
        output = sightline.attention(x, cache, mask=sightline.causal())
    assert torch.isfinite(output).all()


def test_a_cache_of_inference_mode_is_written_outside_it(rng):
    query, key, value = arrays(rng, kind="torch")
    cache, plain = KVCache(capacity=2 * T), KVCache()
    with torch.inference_mode():
        cache.append(key + 0, value + 0)
    for changed in (cache, plain, copy.deepcopy(cache)):
        if changed is plain:
            changed.append(key, value)
        changed.append(key, value)
        changed.reorder([2, 1, 0])
        changed.append(key, value)
    assert torch.equal(cache.key, plain.key)
    sightline.attention(query.requires_grad_(), cache).sum().backward()
    assert query.grad is not None


def test_autocast_casts_the_query_to_the_cache(rng):
    whole = arrays(rng, kind="torch")
    cache = KVCache(dtype="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        output = decode(cache, *whole)
    assert_attends(output, *(x.bfloat16() for x in whole), mask=i >= j)
    cache = KVCache()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(DtypeError, match=r"KVCache\(dtype='bfloat16'\)"):
        decode(cache, *whole)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_compiled_loop_gives_the_same_outputs(rng, dtype):
    """Append and attention in a compiled function, whose graph breaks there, after calls that are direct."""
    torch.compiler.reset()
    query, key, value = arrays(rng, kind="torch")
    outputs = []
    for wrap in (lambda step: step, lambda step: torch.compile(step, backend="eager")):
        cache = KVCache(dtype=dtype)

        def step(query, key, value, cache=cache):
            cache.append(key, value)
            return sightline.attention(query, cache, mask=sightline.causal())

        run = wrap(step)
        outputs.append(torch.cat([run(*(x[:, :, t : t + 1] for x in (query, key, value))) for t in range(4)]))
    assert torch.equal(*outputs)


# -- errors ------------------------------------------------------------------------------------------------------------

X = np.zeros((2, 2, 5, 8), np.float32)


# keys and values that NumPy would broadcast to those of `full`
BROADCAST = [(X[:, :1], X[:, :1]), (X[..., :1], X), (X, X[:, :, :1]), (X[:, :, :1], X)]


def learned():
    return torch.zeros(1, 1, 2, 4).requires_grad_()


def full():
    return filled_cache(X, X)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: KVCache(capacity=-1), ParameterError, "capacity=-1"),
        (lambda: KVCache(capacity=2.5), ParameterError, "capacity=2.5"),
        (lambda: KVCache(dtype="int16"), DtypeError, "int16"),
        (lambda: KVCache().key, ParameterError, "nothing was appended"),
        (lambda: KVCache().append([1.0], X), DtypeError, "key is a list"),
        (lambda: KVCache().append(X, np.ma.array(X)), DtypeError, "a masked array of NumPy"),
        (lambda: KVCache().append(X.astype(int), X), DtypeError, "int64"),
        (lambda: KVCache().append(X, X.astype(np.float64)), DtypeError, "key of float32, value of float64"),
        (lambda: KVCache().append(X, X[:, :, :4]), ShapeError, "give one value for each key"),
        (lambda: KVCache().append(X[None], X[None]), ShapeError, r"\(B, G, t, d_k\)"),
        (lambda: KVCache().append(X[0, 0, 0], X[0, 0, 0]), ShapeError, "without heads"),
        (lambda: KVCache().append(X, torch.zeros(X.shape)), DeviceError, "value is torch"),
        (lambda: KVCache().append(X, X, lengths=[5]), ShapeError, r"\(2,\) whole numbers from 0 to 5"),
        (lambda: KVCache().append(X, X, lengths=[6, 1]), ShapeError, "from 0 to 5"),
        (lambda: KVCache().append(X, X, lengths=[-1, 1]), ShapeError, "from 0 to 5"),
        (lambda: KVCache().append(X, X, lengths=[1.0, 1.0]), ShapeError, "whole numbers"),
        (lambda: KVCache().append(X, X, padding="both"), ParameterError, "padding='both'"),
        (lambda: full().append(X[:1], X[:1]), ShapeError, r"\(2, 2, t, 8\), as in the first append"),
        (lambda: full().append(X, X[..., :4]), ShapeError, r"value \(2, 2, 5, 4\)"),
        (lambda: full().append(X[0], X[0]), ShapeError, r"\(2, 2, t, 8\)"),
        (lambda: full().append(X.astype(np.float64), X.astype(np.float64)), DtypeError, "which casts every append"),
        (lambda: full().append(torch.zeros(X.shape), torch.zeros(X.shape)), DeviceError, "numpy on cpu, as in the"),
        (lambda: full().truncate(-1), ShapeError, r"truncate\(-1\)"),
        (lambda: full().truncate([1, 2, 3]), ShapeError, "each of 2 sequences"),
        (lambda: full().truncate(1.5), ShapeError, "whole number"),
        (lambda: full().reorder([2]), ShapeError, "from 0 to 1"),
        (lambda: full().reorder([-1, 0]), ShapeError, "from 0 to 1"),
        (lambda: full().reorder([[0, 1]]), ShapeError, "one axis"),
        (lambda: full().reorder(["a"]), ShapeError, "whole numbers"),
        (lambda: full().positions(-1), ParameterError, "n=-1"),
        (lambda: full().positions(True), ParameterError, "n=True"),
        (lambda: full().positions(np.array([1, 2])), ParameterError, r"n=array\(\[1, 2\]\)"),
        (lambda: full().positions(torch.tensor(1.5)), ParameterError, r"n=tensor\(1.5"),
        (lambda: KVCache(capacity=np.zeros(2, int)), ParameterError, "capacity=array"),
        (lambda: full().truncate([[1], [1, 2]]), ShapeError, "each of 2 sequences"),
        (lambda: full().reorder([[1], [1, 2]]), ShapeError, "one axis"),
        (lambda: sightline.attention(X, X), ParameterError, "without value"),
        (lambda: sightline.attention(torch.zeros(X.shape), torch.zeros(X.shape)), ParameterError, "without value"),
        (lambda: sightline.attention(X, full(), X), ParameterError, "in place of both"),
        (lambda: sightline.attention(X, X, full()), ParameterError, "in place of both"),
        (lambda: sightline.attention(full(), X, X), DtypeError, "query is a KVCache"),
        (lambda: sightline.attention(X, KVCache()), ParameterError, "nothing was appended"),
        (lambda: sightline.attention(X.astype(np.float64), full()), DtypeError, r"query.astype\(cache.key.dtype\)"),
        (lambda: sightline.attention(torch.zeros(X.shape), full()), DeviceError, "query: torch, key: numpy"),
        (lambda: sightline.attention(X[0], full()), ShapeError, "different numbers of axes"),
        (lambda: sightline.attention(X[..., :4], full()), ShapeError, "d_k"),
        (lambda: sightline.explain(X, X), ParameterError, "without value"),
        (lambda: filled_cache(X[0, 0], X[0, 0]).reorder([0, 0]), ShapeError, "append"),
        (lambda: filled_cache(X[0], X[0]).append(X[0, ..., :3], X[0]), ShapeError, r"\(2, t, 8\)"),
        (lambda: filled_cache(X[0, 0], X[0, 0]).append(X[0, 0, ..., :3], X[0, 0]), ShapeError, r"\(t, 8\)"),
        (lambda: filled_cache(X[0], X[0]).append(X[:1, :1], X[:1, :1]), ShapeError, "as in the first append"),
        (lambda: filled_cache(X[0, 0], X[0, 0]).append(X[:1, :1], X[:1, :1]), ShapeError, "as in the first append"),
        *((lambda k=k, v=v: full().append(k, v), ShapeError, "cure") for k, v in BROADCAST),
        (lambda: filled_cache(learned(), learned()), ParameterError, r"key.detach\(\)"),
        (lambda: filled_cache(*torch.zeros(2, 1, 1, 2, 4)).append(*[learned()] * 2), ParameterError, r"key.detach\(\)"),
    ],
)
def test_errors_name_what_does_not_fit(call, error, says):
    with pytest.raises(error, match=says) as caught:
        call()
    assert caught.value.cure


def test_an_error_does_not_change_the_cache():
    cache = full()
    before = repr(cache), cache.positions().tolist(), cache.key.copy()
    for wrong in ({"lengths": [1, 9]}, {"padding": "no"}):
        with pytest.raises(sightline.errors.SightlineError):
            cache.append(X + 1, X + 1, **wrong)
    assert (repr(cache), cache.positions().tolist()) == before[:2]
    assert np.array_equal(cache.key, before[2])


def test_an_append_without_memory_leaves_the_cache_empty():
    cache = KVCache(capacity=2**50)
    with pytest.raises(MemoryError):
        cache.append(X, X)
    assert cache.dtype is None
    assert repr(cache).startswith("KVCache: empty")


# -- planted faults ----------------------------------------------------------------------------------------------------

FAULTS = {
    "written one too far": Fault(
        Storage.write,
        "array[:, :, rows : rows + numbers.shape[2]] = numbers",
        "array[:, :, rows + 1 : rows + 1 + numbers.shape[2]] = numbers",
    ),
    "ragged rows shifted": Fault(_write, "array[b, :, row]", "array[b, :, row - 1]"),
    "growth forgets": Fault(_grow, "new[:, :, :used] = array[:, :, :used]", "pass"),
    "left padding taken for right": Fault(KVCache.append, '0 if padding == "right" else (t - counts)[:, None]', "0"),
    "lengths not hidden": Fault(StoredRows.key_formulas, "library.padding(self.row_counts)", "j >= 0"),
    "rows of the last positions one too late": Fault(
        StoredRows.positions, "self._lengths[:, None] - n", "self._lengths[:, None] - n + 1"
    ),
    "the only query taken for the last": Fault(StoredRows.rewriting, "count == 1", "count"),
    "written from the first row": Fault(KVCache.append, "used[:, None] + rows", "rows"),
    "beams keep their lengths": Fault(KVCache.reorder, "self._lengths[order]", "self._lengths"),
    "truncation that does nothing": Fault(KVCache.truncate, "np.minimum(self._lengths, limits)", "self._lengths"),
}


def check_cache():
    """Ragged prompts, growth, beams, truncated drafts: each sequence against attention on its expected rows."""
    rng, cache = np.random.default_rng(5), KVCache()
    whole, (query, key, value) = ragged(rng, "left")
    whole, (query, key, value) = [x[:2] for x in whole], (x[:2] for x in (query, key, value))
    cache.append(key, value, lengths=LENGTHS[:2], padding="left")
    output = sightline.attention(query, cache, mask=sightline.causal())
    for b, count in enumerate(LENGTHS[:2]):
        one = [x[b : b + 1] for x in whole]
        assert_attends(output[b : b + 1, :, PADDED - count :], *one, mask=i >= j, rows=slice(0, count))
    last = sightline.attention(query[:, :, PADDED - 1 :], cache, mask=sightline.window(2))
    for b, count in enumerate(LENGTHS[:2]):
        one = [x[b : b + 1] for x in whole]
        assert_attends(last[b : b + 1], *one, mask=sightline.window(2), rows=slice(count - 1, count))
    seen = sightline.attention(query[:, :, PADDED - 1 :], cache)
    cache.reorder([1, 0])
    cache.append(whole[1][:, :, :3], whole[2][:, :, :3])  # drafts
    cache.truncate(LENGTHS[:2][::-1])
    swapped = sightline.attention(query[::-1, :, PADDED - 1 :], cache)
    for b, count in enumerate(LENGTHS[:2]):
        one = query[b : b + 1, :, PADDED - 1 :], *(x[b : b + 1, :, :count] for x in whole[1:])
        assert_attends(seen[b : b + 1], *one, mask=None)
        assert_attends(swapped[1 - b : 2 - b], *one, mask=None)
    cache.truncate(0)
    assert_attends(decode(cache, *whole), *whole, mask=i >= j)


test_faults = make_fault_test(FAULTS, check_cache, r"budget|broadcast|shape", (AssertionError, ValueError))
