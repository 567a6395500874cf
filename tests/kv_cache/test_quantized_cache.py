"""Quantised caches: the stored numbers against formulas in NumPy, changes against lists, and what is refused.

The changes are drawn for caches of floats too.
"""

import copy
import itertools
import math
import subprocess
import sys
from pathlib import Path

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import sightline
from filled_caches import PAIR, assert_attends, assert_stores, filled_cache, quantized, random_arrays
from sightline import KVCache, i, j
from sightline.arrays.operations import to_numpy
from sightline.arrays.row_formats import QUANTIZED, RowFormat
from sightline.call import call_cache
from sightline.cpu.kernels import quantize
from sightline.errors import DeviceError, DtypeError, KernelRefusedError, ParameterError, ShapeError
from strategies import DTYPES, to_torch

WIDTHS = [1, 33, 64, 80, 96, 128, 160, 300]


# -- the stored numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("width", WIDTHS)
def test_stored_numbers_are_those_of_the_formulas(rng, width, dtype, kind):
    _, key, value = random_arrays(rng, (width, 40), length=5, kind=kind)
    key[0, 0, 0], key[0, 0, 1], key[0, 0, 2] = 0, -3, 1e-7
    for array, stored in zip((key, value), filled_cache(key, value, dtype=dtype).dequantized(), strict=True):
        assert_stores(dtype, stored, array)


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_appends_of_every_dtype_and_layout(rng, dtype, source):
    _, key, value = random_arrays(rng, (33, 64), length=7, dtype=source)
    expected = filled_cache(key.astype(np.float32), value.astype(np.float32), dtype=dtype).dequantized()
    for change in (lambda x: x, lambda x: np.asfortranarray(x), lambda x: x[..., ::-1].copy()[..., ::-1]):
        found = filled_cache(change(key), change(value), dtype=dtype).dequantized()
        for ours, theirs in zip(found, expected, strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), ("int4", 15), ("float8_e4m3fn", 448)])
def test_numbers_halfway_between_two_codes_get_the_even_code(rng, dtype, largest):
    scales = rng.uniform(0.1, 0.2, (1, 1, 300, 1)).astype(np.float16).astype(np.float32)
    quotients = rng.integers(0, 15, (1, 1, 300, 32)) + np.float32(0.5)
    quotients = quotients * 2 + 16 if dtype == "float8_e4m3fn" else quotients
    quotients[..., -2:] = 0, largest
    codes = quotients.astype(ml_dtypes.float8_e4m3fn) if dtype == "float8_e4m3fn" else np.rint(quotients)
    stored = filled_cache(*[quotients * scales] * 2, dtype=dtype).dequantized()[0]
    assert np.array_equal(stored, codes.astype(np.float32) * scales)


def test_float8_codes_are_those_of_ml_dtypes(rng):
    """A row whose largest number is 448 has scale 1; its codes are then the float8 nearest to its numbers."""
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = every[np.isfinite(every)]
    between = [np.nextafter((a + b) / 2, c) for a, b in itertools.pairwise(every) for c in (a, b, 500)]
    numbers = np.concatenate([every, np.float32(between), rng.uniform(-20, 20, 500).astype(np.float32)])
    numbers = numbers[np.abs(numbers) <= 448][: 10 * 127].reshape(-1, 1)[: 127 * 7].reshape(7, 127)
    rows = np.concatenate([numbers, np.full((7, 1), 448, np.float32)], 1)
    key, _ = filled_cache(rows, rows, dtype="float8_e4m3fn").dequantized()
    assert np.array_equal(key, rows.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_group_with_nan_or_infinity_is_nan_and_can_be_hidden(rng, dtype, wrong):
    query, key, value = random_arrays(rng)
    key[:, :, 3, 40] = value[:, :, 3, 5] = wrong
    cache = filled_cache(key, value, dtype=dtype)
    stored = cache.dequantized()
    for array, found in zip((key, value), stored, strict=True):
        assert_stores(dtype, found, array)
    for count in (1, 150):
        output = sightline.attention(query[:, :, :count], cache, mask=(j != 3) & (i >= 0))
        clean = [np.where(np.isnan(x), 0, x) for x in stored]
        assert_attends(output, query[:, :, :count], *clean, mask=j != 3)
    assert np.isnan(sightline.attention(query[:, :, :1], cache)).any()


@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_the_reported_error_is_that_of_the_stored_numbers(rng, dtype):
    _, key, value = random_arrays(rng, (96, 33))
    cache = KVCache(dtype=dtype)
    assert cache.quantization_error == (0.0, 0.0)
    cache.append(key[:, :, :30], value[:, :, :30])
    cache.append(key[:, :, 30:], value[:, :, 30:])
    for error, given, stored in zip(cache.quantization_error, (key, value), cache.dequantized(), strict=True):
        expected = np.sqrt(((given - stored).astype(np.float64) ** 2).sum() / (given.astype(np.float64) ** 2).sum())
        assert error == pytest.approx(expected, rel=1e-5)
    assert filled_cache(key, value, dtype="float32").quantization_error is None


def test_rows_take_the_bytes_that_the_page_promises():
    sizes = {dtype: RowFormat(dtype, 128).row_bytes for dtype in QUANTIZED}
    assert sizes == {"int8": 130, "float8_e4m3fn": 130, "int4": 80}
    cache = filled_cache(*[np.ones((1, 2, 10, 128), np.float32)] * 2, dtype=PAIR)
    assert cache.nbytes == 2 * 10 * (130 + 80)
    assert "int8 and int4" in repr(cache)
    assert cache.dtype == PAIR


# -- changes -----------------------------------------------------------------------------------------------------------


MASKS = [None, i >= j, sightline.window(4) & (i >= j)]


def stored_numbers(dtype, x):
    """Return what a cache of this dtype stores of the rows x, as float32."""
    return quantized(dtype, x) if dtype in QUANTIZED else x.astype(DTYPES[dtype]).astype(np.float32)


class Model:
    """A model of a cache. For each sequence, it has a list of the rows of key and value that were appended.

    `dtypes` are those of the keys and of the values: quantised ones, or two equal dtypes of floats.
    """

    def __init__(self, dtypes, kind, rng, widths, batch, capacity):
        self.cache = KVCache(dtype=dtypes if dtypes[0] != dtypes[1] else dtypes[0], capacity=capacity)
        self.dtypes, self.kind = dtypes, kind
        self.rng, self.widths, self.rows = rng, widths, [[] for _ in range(batch)]

    def draw(self, *shape):
        array = self.rng.normal(size=shape).astype(np.float32)
        return array, to_torch(array) if self.kind == "torch" else array

    def append(self, counts, padding="right", rows=None):
        """Append padded rows, of which `counts` are real. If `rows` is given, there are so many, and all are real."""
        t = rows or max(counts, default=0) + 2  # one query alone is then no row of this append, which may be padding
        (key, *_), (value, *_) = new = [self.draw(len(self.rows), 2, t, d) for d in self.widths]
        self.cache.append(*[x[1] for x in new], lengths=None if rows else counts, padding=padding)
        positions = np.full((len(counts), t), -1)
        for b, count in enumerate(counts):
            real = range(count) if padding == "right" else range(t - count, t)
            positions[b, real] = range(len(self.rows[b]), len(self.rows[b]) + count)
            self.rows[b] += [(key[b, :, r], value[b, :, r]) for r in real]
        assert np.array_equal(self.cache.positions(), positions)

    def reorder(self, order):
        before = self.cache.positions()
        self.cache.reorder(order)
        self.rows = [list(self.rows[index]) for index in order]
        assert np.array_equal(self.cache.positions(), before[order])

    def copy(self):
        found = copy.copy(self)
        found.cache, found.rows = copy.deepcopy(self.cache), [list(rows) for rows in self.rows]
        return found

    def check(self):
        """Compare what is stored, and attention with ragged lengths, with the lists."""
        assert self.cache.lengths.tolist() == list(map(len, self.rows))
        assert self.cache.capacity >= self.cache.max_length == max(map(len, self.rows))
        if not any(self.rows):
            return
        is_quantized = self.dtypes[0] in QUANTIZED
        stored = self.cache.dequantized() if is_quantized else (self.cache.key, self.cache.value)
        query, given = self.draw(len(self.rows), 4, 1, self.widths[0])
        if not is_quantized:
            query, given = (x.astype(DTYPES[self.dtypes[0]]) for x in (query, to_numpy(given)))
            given = to_torch(given) if self.kind == "torch" else given
            query = query.astype(np.float32)
        mask = MASKS[self.rng.integers(len(MASKS))]
        output = sightline.attention(given, self.cache, mask=mask)
        for b, rows in enumerate(self.rows):
            if not rows:
                assert not output[b].any()
                continue
            arrays = [np.stack([row[k] for row in rows], 1)[None] for k in range(2)]
            expected = [stored_numbers(dtype, x) for dtype, x in zip(self.dtypes, arrays, strict=True)]
            for ours, theirs in zip(stored, expected, strict=True):
                own = to_numpy(ours)[b : b + 1, :, : len(rows)].astype(np.float32)
                assert np.allclose(own, theirs, rtol=1e-6 * is_quantized, atol=1e-7 * is_quantized)
            options = {} if mask is None else {"mask": mask.rewrite({"i": i + (len(rows) - 1)})}
            assert_attends(output[b : b + 1], query[b : b + 1], *expected, **options)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    data=st.data(),
    dtypes=st.tuples(st.sampled_from(QUANTIZED), st.sampled_from(QUANTIZED))
    | st.sampled_from(["float32", "bfloat16"]).map(lambda dtype: (dtype, dtype)),
    kind=st.sampled_from(["numpy", "torch"]),
    seed=st.integers(0, 99),
)
def test_drawn_changes_against_lists(data, dtypes, kind, seed):
    rng = np.random.default_rng(seed)
    widths, batch = data.draw(st.sampled_from([(32, 64), (33, 20), (1, 96), (160, 128)])), data.draw(st.integers(1, 3))
    model = Model(dtypes, kind, rng, widths, batch, data.draw(st.integers(0, 9)))
    model.append([int(x) for x in rng.integers(0, 9, batch)])
    for _ in range(data.draw(st.integers(1, 6))):
        change = data.draw(st.sampled_from(["ragged", "left", "all", "many", "truncate", "reorder", "reset", "copy"]))
        count, other = len(model.rows), None
        if change in ("ragged", "left"):
            model.append([int(x) for x in rng.integers(0, 6, count)], "left" if change == "left" else "right")
        elif change in ("all", "many"):
            t = 1 if change == "all" else 90
            model.append([t] * count, rows=t)
        elif change == "truncate":
            limits = [int(x) for x in rng.integers(0, 12, count)]
            limits = [limits[0]] * count if data.draw(st.booleans()) else limits
            model.cache.truncate(limits[0] if len(set(limits)) == 1 else limits)
            model.rows = [rows[:limit] for rows, limit in zip(model.rows, limits, strict=True)]
        elif change == "reorder":
            model.reorder([int(x) for x in rng.integers(0, count, data.draw(st.integers(1, 3)))])
        elif change == "reset":
            model.cache.reset()
            model.rows = [[] for _ in model.rows]
        else:
            other = model.copy()
            other.append([1] * count, rows=1)
            model.append([2] * count, rows=2)
            other.check()
        model.check()


def test_a_copy_counts_its_own_error(rng):
    _, key, value = random_arrays(rng)
    cache = filled_cache(key, value, dtype="int4")
    before, other = cache.quantization_error, copy.deepcopy(cache)
    other.append(100 * key, value)
    assert cache.quantization_error == before != other.quantization_error


def test_the_last_positions(rng):
    query, key, value = random_arrays(rng)
    cache = filled_cache(key, value, dtype="int8")
    part = cache.last(70)
    output = sightline.attention(query[:, :, -1:], part)
    assert_attends(output, query[:, :, -1:], *(x[:, :, -70:] for x in cache.dequantized()))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_decoding_loop(rng, kind, monkeypatch):
    """Only an append that follows a growth of the storage, to 1, 2, 4, ... or 256 rows, is bound anew."""
    call_cache.clear()
    bound, make_function = [], quantize.KERNEL_FUNCTION
    monkeypatch.setattr(quantize, "KERNEL_FUNCTION", lambda address: bound.append(1) or make_function(address))
    query, key, value = random_arrays(rng, kind=kind)
    cache, outputs = KVCache(dtype="int8"), []
    for t in range(150):
        rows = slice(t, t + 1)
        cache.append(key[:, :, rows], value[:, :, rows])
        outputs.append(to_numpy(sightline.attention(query[:, :, rows], cache, mask=sightline.causal())))
    assert_attends(np.concatenate(outputs, 2), query, *cache.dequantized(), mask=i >= j)
    assert len(bound) == 9


@pytest.mark.parametrize("axes", [2, 3])
def test_without_heads_or_batch(rng, axes):
    query, key, value = (x[(0, 0) if axes == 2 else (slice(None), 0)] for x in random_arrays(rng))
    cache = filled_cache(key, value, dtype="int4")
    stored = cache.dequantized()
    assert [x.shape for x in stored] == [key.shape, value.shape]
    output = sightline.attention(query, cache, mask=i >= j)
    assert output.shape == query.shape
    lead = (None,) * (4 - axes) if axes == 2 else (slice(None), None)
    assert_attends(output[lead], query[lead], *(x[lead] for x in stored), mask=i >= j)


WIDTHS = {"int8": 1, "int4": 33, "float8_e4m3fn": 128, "float32": 80}
OTHER_WIDTHS = {"int8": 128, "int4": 80, "float8_e4m3fn": 33, "float32": 1}


@pytest.mark.parametrize("widths", [WIDTHS, pytest.param(OTHER_WIDTHS, marks=pytest.mark.wide)], ids=str)
def test_guard_pages_around_the_storage(widths):
    """In a process of its own: one access outside the storage ends it."""
    program = """
import sys; sys.path.insert(0, sys.argv[1])
import numpy as np, sightline
from guard_pages import GuardedMemory
from sightline.kv_cache import storage as module
memory, past, widths = GuardedMemory(), int(sys.argv[2]), eval(sys.argv[3])
def allocate(like, shape, dtype):
    return memory.zeros((*shape[:3], shape[3] - past), dtype)
module._allocate = allocate
rng = np.random.default_rng(0)
for at_end in (True, False):
    memory.at_end = at_end
    for dtype, d in widths.items():
        cache = sightline.KVCache(dtype=dtype, capacity=70)
        cache.append(*[rng.normal(size=(1, 1, 70, d)).astype(np.float32) for _ in range(2)])
        for n in (1, 2, 70):
            query = rng.normal(size=(1, 2, n, d)).astype(np.float32)
            sightline.attention(query, cache, mask=sightline.causal(), see=[sightline.received()])
        cache.fork(3)
        cache.append(*[rng.normal(size=(3, 1, 2, d)).astype(np.float32) for _ in range(2)])
        cache.truncate([72, 50, 71])
        for parents in ([-1], [-1, 0, 0, -1]):
            new = [rng.normal(size=(3, 1, len(parents), d)).astype(np.float32) for _ in range(2)]
            cache.append(*new, parents=parents)
            query = rng.normal(size=(3, 2, len(parents), d)).astype(np.float32)
            for mask in (None, sightline.causal() & sightline.window(40)):
                sightline.attention(query, cache, mask=mask)
            cache.accept([0])
"""
    helpers = Path(__file__).parents[1] / "helpers"
    for past, code in ((0, 0), (1, -11)):
        done = subprocess.run(
            [sys.executable, "-c", program, str(helpers), str(past), str(widths)], capture_output=True, check=False
        )
        assert done.returncode == code, done.stderr.decode()


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_errors_name_the_cure(rng):
    query, key, value = random_arrays(rng)
    cache = filled_cache(key, value, dtype="int8")
    before = cache.lengths.tolist(), cache.dequantized()[0]
    with pytest.raises(DtypeError, match="float32, bfloat16 or float16"):
        sightline.attention(query.astype(np.float64), cache)
    for read in (lambda: cache.key, lambda: cache.value):
        with pytest.raises(ParameterError, match="dequantized"):
            read()
    with pytest.raises(ParameterError, match=r"cache\.key"):
        filled_cache(key, value, dtype="float32").dequantized()
    with pytest.raises(DeviceError, match="torch on cpu"):
        cache.append(*map(to_torch, (key, value)))
    with pytest.raises(ShapeError, match=r"\(2, 2, t, 64\)"):
        cache.append(key[..., :40], value)
    with pytest.raises(ShapeError, match=r"\(2,\) whole numbers from 0 to 150"):
        cache.append(key, value, lengths=[1, 151])
    with pytest.raises(ShapeError, match="32 wide and key 64"):
        sightline.attention(query[..., :32], cache)
    for wrong in ("int3", ("int8", "float32"), ("int8",), ["int4"] * 3):
        with pytest.raises(DtypeError, match=r'dtype=\("int8", "int4"\)'):
            KVCache(dtype=wrong)
    assert (cache.lengths.tolist(), True) == (before[0], np.array_equal(cache.dequantized()[0], before[1]))


def test_other_devices_are_refused_before_anything_changes():
    cache = KVCache(dtype="int4")
    with pytest.raises(DeviceError, match='KVCache\\(dtype="bfloat16"\\) on a GPU'):
        cache.append(*[torch.zeros((1, 1, 2, 8), device="meta")] * 2)
    assert cache.lengths.tolist() == []
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(DtypeError, match="programs of JAX"):
        cache.append(*[jnp.zeros((1, 1, 2, 8))] * 2)
    cache.append(*[np.zeros((1, 1, 2, 8), np.float32)] * 2)
    with pytest.raises(DeviceError, match="jax"):
        sightline.attention(jnp.zeros((1, 1, 2, 8)), cache)


def test_gradients_of_keys_are_refused_before_anything_changes(rng):
    _, key, value = random_arrays(rng, kind="torch")
    cache = filled_cache(key, value, dtype="int8")
    before = cache.quantization_error
    with pytest.raises(ParameterError, match="key requires a gradient"):
        cache.append(key.requires_grad_(), value)
    assert cache.lengths.tolist() == [150, 150]
    assert cache.quantization_error == before


def test_transforms_of_torch_are_refused(rng):
    query, key, value = random_arrays(rng, kind="torch")
    cache = filled_cache(key, value, dtype="int8")
    with pytest.raises(KernelRefusedError, match="a quantised KVCache in a transform"):
        torch.func.vmap(lambda q: sightline.attention(q[None], cache))(query)
    with pytest.raises(KernelRefusedError, match="kernel='triton'"):
        sightline.attention(query, cache, kernel="triton")
    with FakeTensorMode(), pytest.raises(DtypeError, match="has no memory, because it is a FakeTensor"):
        cache.append(torch.ones(2, 2, 1, 64), torch.ones(2, 2, 1, 64))


def test_explain_names_what_is_stored(rng):
    query, key, value = random_arrays(rng)
    text = str(sightline.explain(query, filled_cache(key, value, dtype=PAIR)))
    assert "float32 on cpu, keys in int8, values in int4" in text
    assert "multiplied with keys in float32, weights with values in float32" in text


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_weighted_sum_of_other_numbers(rng, dtype):
    query, key, value = random_arrays(rng)
    cache = filled_cache(key, value, dtype=dtype)
    x = rng.normal(size=(*key.shape[:-1], 3)).astype(np.float32)
    _, (found,) = sightline.attention(query, cache, mask=i >= j, see=[sightline.weighted_sum(x)])
    _, (other,) = sightline.attention(
        query, *cache.dequantized(), mask=i >= j, see=[sightline.weighted_sum(x)], kernel="reference"
    )
    assert np.abs(found - other).max() < 1e-5
