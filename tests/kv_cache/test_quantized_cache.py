"""Quantised caches: the stored numbers against an oracle in Python floats, and attention against the stored numbers."""

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

import sightline
from fault_planting import broken
from sightline import KVCache, i, j, s
from sightline.arrays.operations import to_numpy
from sightline.arrays.row_formats import QUANTIZED, RowFormat
from sightline.cpu.codegen import packed_rows
from sightline.cpu.kernels import block, decode, quantize
from sightline.cpu.launch import decode as launch_decode
from sightline.cpu.launch import quantize as launch_quantize
from sightline.errors import DeviceError, DtypeError, KernelRefusedError, ParameterError, ShapeError
from sightline.problem.problem import make_problem
from sightline.reference.accuracy import compute_baseline, term_sizes
from sightline.reference.definition import compute_stages
from sightline.testing import assert_within_budget
from strategies import DTYPES, to_torch

GROUPS = {"int8": 128, "float8_e4m3fn": 128, "int4": 32}
WIDTHS = [1, 33, 64, 80, 96, 128, 160, 300]
PAIR = ("int8", "int4")


def random_arrays(rng, widths=(64, 64), length=150, batch=2, heads=(4, 2), kind="numpy", dtype="float32"):
    """Query, key and value, whose channels have different sizes, as those of trained models have."""
    shapes = [(batch, heads[0], length, widths[0]), *[(batch, heads[1], length, width) for width in widths]]
    found = [(rng.normal(size=x) * rng.uniform(0.2, 3, size=x[-1])).astype(DTYPES[dtype]) for x in shapes]
    return [to_torch(x) for x in found] if kind == "torch" else found


def filled_cache(dtype, key, value, **options):
    cache = KVCache(dtype=dtype)
    cache.append(key, value, **options)
    return cache


def assert_attends(output, query, key, value, **options):
    """Raise AssertionError unless `output` is attention on these float32 keys and values, within the budget.

    The query may be narrower than float32. The budget is that of its dtype: float32 sums, rounded once.
    """
    query, key, value = (to_numpy(x) for x in (query, key, value))
    narrow = output.dtype if isinstance(output, np.ndarray) else DTYPES[str(output.dtype).rpartition(".")[2]]
    whole = make_problem(query.astype(np.float32), key, value, **options)
    truth = compute_stages(whole)
    rough = compute_baseline(whole).output if narrow == np.float32 else truth.output.astype(narrow)
    assert_within_budget(output, truth.output, rough, terms=term_sizes(whole, truth.weights))


# -- the stored numbers ------------------------------------------------------------------------------------------------


def quantized(dtype, x):
    """The numbers that a cache stores for rows x (..., d), by the formulas of docs/decoding.md in NumPy, as float32."""
    if dtype in ("float32", "bfloat16"):
        return x
    groups = []
    for start in range(0, x.shape[-1], GROUPS[dtype]):
        group = np.asarray(x[..., start : start + GROUPS[dtype]], np.float32)
        low, high = group.min(-1, keepdims=True), group.max(-1, keepdims=True)
        span = high - low if dtype == "int4" else np.abs(group).max(-1, keepdims=True)
        scale = (span / np.float32({"int8": 127, "int4": 15}.get(dtype, 448))).astype(np.float16).astype(np.float32)
        offset = low.astype(np.float16).astype(np.float32) if dtype == "int4" else np.float32(0)
        ratio = (group - offset) * np.where(scale == 0, 0, 1 / np.where(scale == 0, 1, scale))
        if dtype == "float8_e4m3fn":
            codes = np.clip(ratio, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            codes = np.clip(np.rint(ratio), *((-127, 127) if dtype == "int8" else (0, 15)))
        groups.append(codes * scale + offset)
    return np.concatenate(groups, -1)


def check_row(dtype, given, stored):
    """Compare a row's stored numbers with the given ones, group by group: at most half a step of the codes apart."""
    for start in range(0, len(given), GROUPS[dtype]):
        x, found = (row[start : start + GROUPS[dtype]] for row in (given, stored))
        if not all(map(math.isfinite, x)):
            assert all(map(math.isnan, found))
            continue
        if dtype == "int4":
            offset = float(np.float16(min(x)))
            scale = float(np.float16(np.float32(np.float32(max(x)) - np.float32(min(x))) / np.float32(15)))
            steps = [scale] * len(x)
        else:
            scale = float(np.float16(np.float32(max(map(abs, x))) / np.float32({"int8": 127}.get(dtype, 448))))
            steps = [scale if dtype == "int8" else max(abs(one) / 8, scale / 512) for one in x]
            offset = 0.0
        # rounding scale and offset to float16 moves the largest number by up to 2⁻¹¹ of its size, or 2⁻²⁴
        slack = 2.0**-11 * max(map(abs, x)) + 2.0**-24 if dtype == "int4" else 0.0
        for one, other, step in zip(x, found, steps, strict=True):
            assert abs(one - other) <= step / 2 * (1 + 1e-5) + slack, (dtype, one, other, step)
            if dtype != "float8_e4m3fn" and scale:  # the stored number is one that a code stands for
                code = (other - offset) / scale
                assert abs(code - round(code)) < 1e-3 * max(abs(code), 1)
                assert (-127 if dtype == "int8" else 0) <= round(code) <= (127 if dtype == "int8" else 15)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("width", WIDTHS)
def test_stored_numbers_are_the_nearest_codes(rng, width, dtype, kind):
    _, key, value = random_arrays(rng, (width, 40), length=5, kind=kind)
    key[0, 0, 0], key[0, 0, 1] = 0, -3
    cache = filled_cache(dtype, key, value)
    for array, stored in zip((key, value), cache.dequantized(), strict=True):
        assert stored.shape == array.shape
        assert str(stored.dtype).endswith("float32")
        given, found = (to_numpy(x).reshape(-1, array.shape[-1]).tolist() for x in (array, stored))
        for rows in zip(given, found, strict=True):
            check_row(dtype, *rows)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_stored_numbers_are_those_of_the_formulas(rng, dtype):
    for widths in ((33, 64), (300, 128), (1, 96)):
        _, *arrays = random_arrays(rng, widths, length=40)
        for given, stored in zip(arrays, filled_cache(dtype, *arrays).dequantized(), strict=True):
            assert np.allclose(stored, quantized(dtype, given), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_appends_of_every_dtype_and_layout(rng, dtype, source):
    _, key, value = random_arrays(rng, (33, 64), length=7, dtype=source)
    expected = filled_cache(dtype, key.astype(np.float32), value.astype(np.float32)).dequantized()
    for change in (lambda x: x, lambda x: np.asfortranarray(x), lambda x: x[..., ::-1].copy()[..., ::-1]):
        for ours, theirs in zip(filled_cache(dtype, change(key), change(value)).dequantized(), expected, strict=True):
            assert np.array_equal(ours, theirs)


def test_float8_codes_are_those_of_ml_dtypes(rng):
    """A row whose largest number is 448 has scale 1; its codes are then the float8 nearest to its numbers."""
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = every[np.isfinite(every)]
    between = [np.nextafter((a + b) / 2, c) for a, b in itertools.pairwise(every) for c in (a, b, 500)]
    numbers = np.concatenate([every, np.float32(between), rng.uniform(-20, 20, 500).astype(np.float32)])
    numbers = numbers[np.abs(numbers) <= 448][: 10 * 127].reshape(-1, 1)[: 127 * 7].reshape(7, 127)
    rows = np.concatenate([numbers, np.full((7, 1), 448, np.float32)], 1)
    key, _ = filled_cache("float8_e4m3fn", rows, rows).dequantized()
    assert np.array_equal(key, rows.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_group_with_nan_or_infinity_is_nan_and_can_be_hidden(rng, dtype, wrong):
    query, key, value = random_arrays(rng)
    key[:, :, 3, 40] = value[:, :, 3, 5] = wrong
    cache = filled_cache(dtype, key, value)
    stored = cache.dequantized()
    for given, found in zip((key, value), stored, strict=True):
        for rows in zip(given.reshape(-1, 64).tolist(), found.reshape(-1, 64).tolist(), strict=True):
            check_row(dtype, *rows)
    for count in (1, 150):
        output = sightline.attention(query[:, :, :count], cache, mask=(j != 3) & (i >= 0))
        clean = [np.where(np.isnan(x), 0, x) for x in stored]
        assert_attends(output, query[:, :, :count], *clean, mask=j != 3)
    assert np.isnan(sightline.attention(query[:, :, :1], cache)).any()


@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_the_reported_error_is_that_of_the_stored_numbers(rng, dtype):
    _, key, value = random_arrays(rng, (96, 33))
    cache = KVCache(dtype=dtype)
    assert cache.error == (0.0, 0.0)
    cache.append(key[:, :, :30], value[:, :, :30])
    cache.append(key[:, :, 30:], value[:, :, 30:])
    for error, given, stored in zip(cache.error, (key, value), cache.dequantized(), strict=True):
        expected = np.sqrt(((given - stored).astype(np.float64) ** 2).sum() / (given.astype(np.float64) ** 2).sum())
        assert error == pytest.approx(expected, rel=1e-5)
    assert filled_cache("float32", key, value).error is None


def test_rows_take_the_bytes_that_the_page_promises():
    sizes = {dtype: RowFormat(dtype, 128).row_bytes for dtype in QUANTIZED}
    assert sizes == {"int8": 130, "float8_e4m3fn": 130, "int4": 80}
    cache = filled_cache(PAIR, *[np.ones((1, 2, 10, 128), np.float32)] * 2)
    assert cache.nbytes == 2 * 10 * (130 + 80)
    assert "int8 and int4" in repr(cache)
    assert cache.dtype == PAIR


# -- attention on them -------------------------------------------------------------------------------------------------

CALLS = {
    "one token": (1, {}),
    "three tokens": (3, {"mask": i >= j}),
    "a window": (1, {"mask": sightline.window(70)}),
    "a score": (2, {"mask": i >= j, "score": 5 * np.tanh(s / 5) - (i - j) / 50}),
    "a prompt": (100, {"mask": i >= j}),
    "many queries": (40, {"score": s - abs(i - j) / 9}),
    "sinks": (1, {"sinks": np.linspace(-1, 3, 4)}),
    "a scale": (5, {"scale": -0.3}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_attention_is_exact_on_the_stored_numbers(rng, dtype, call):
    count, options = CALLS[call]
    for widths in ((64, 64), (33, 80), (128, 1)):
        query, key, value = random_arrays(rng, widths, length=100)
        query = query[:, :, 100 - count :]
        cache = filled_cache(dtype, key, value)
        rows = {"i": i + (100 - count), "n": sightline.m}
        of_rows = {name: x.rewrite(rows) if hasattr(x, "rewrite") else x for name, x in options.items()}
        output = sightline.attention(query, cache, **options)
        assert_attends(output, query, *cache.dequantized(), **of_rows)
        for _ in range(3):  # the second call comes from the call cache, and a later one from generated code
            assert np.array_equal(sightline.attention(query, cache, **options), output)
        tensors = filled_cache(dtype, *map(to_torch, (key, value)))
        options = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        assert np.array_equal(to_numpy(sightline.attention(to_torch(query), tensors, **options)), output)


@pytest.mark.parametrize("count", [1, 150])
@pytest.mark.parametrize("query_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_narrow_queries(rng, dtype, query_dtype, count):
    query, key, value = random_arrays(rng, (128, 64), kind="torch")
    query = query[:, :, -count:].to(getattr(torch, query_dtype))
    cache = filled_cache(dtype, key, value)
    mask = None if count == 1 else i >= j
    output = sightline.attention(query, cache, mask=mask)
    assert output.dtype == query.dtype
    assert_attends(output, query.float(), *cache.dequantized(), mask=mask)


@pytest.mark.parametrize("kernel", ["cpu", "streaming", "reference"])
@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_every_kernel_reads_the_codes(rng, dtype, kernel):
    query, key, value = random_arrays(rng, (40, 33))
    cache = filled_cache(dtype, key, value)
    output = sightline.attention(query, cache, mask=i >= j, kernel=kernel)
    assert_attends(output, query, *cache.dequantized(), mask=i >= j)


STATISTICS = {
    "lse": sightline.lse(),
    "max_score": sightline.max_score(),
    "entropy": sightline.entropy(),
    "mass": sightline.mass(i - j < 9),
    "top_k": sightline.top_k(4),
    "received": sightline.received(),
    "pooled": sightline.pooled(4, 4),
    "weights": sightline.weights(),
    "scores": sightline.scores(),
    "weighted_sum": sightline.weights().mean("heads"),
}


@pytest.mark.parametrize("count", [1, 70])
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_statistics_are_those_of_the_stored_numbers(rng, dtype, statistic, count):
    query, key, value = random_arrays(rng)
    query = query[:, :, -count:]
    see = {"it": STATISTICS[statistic]}
    cache, plain = filled_cache(dtype, key, value), KVCache()
    plain.append(*cache.dequantized())
    found, expected = (sightline.attention(query, x, mask=i >= j, see=see)[1]["it"] for x in (cache, plain))
    pairs = [(found, expected)] if isinstance(found, np.ndarray) else zip(found, expected, strict=True)
    for ours, theirs in pairs:
        assert np.allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("count", [1, 3, 150])
@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_every_number_of_threads_gives_the_same_bits(rng, dtype, count):
    query, key, value = random_arrays(rng, (128, 128), length=1100)
    cache, see = filled_cache(dtype, key, value), [sightline.received()]
    results = [
        sightline.attention(query[:, :, -count:], cache, mask=i >= j, see=see, threads=threads)
        for threads in (1, 2, 5, 2)
    ]
    for output, (received,) in results[1:]:
        assert np.array_equal(output, results[0][0])
        assert np.array_equal(received, results[0][1][0])


@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_gradients_of_the_query(rng, dtype):
    query, key, value = random_arrays(rng, (64, 33), kind="torch")
    cache = filled_cache(dtype, key, value)
    stored, weight = cache.dequantized(), torch.randn((*query.shape[:-1], 33))
    for count in (1, 150, 150):
        rows = query[:, :, -count:].clone().requires_grad_(), query[:, :, -count:].clone().requires_grad_()
        for one, arguments in zip(rows, ((cache,), stored), strict=True):
            output = sightline.attention(one, *arguments, mask=(i >= j) if count > 1 else None)
            (output * weight[:, :, :count]).sum().backward()
        assert torch.allclose(rows[0].grad, rows[1].grad, rtol=1e-5, atol=1e-6)


def test_a_later_reorder_shows_in_the_backward_pass(rng):
    query, key, value = random_arrays(rng, kind="torch")
    cache = filled_cache("int8", key, value)
    output = sightline.attention(query.requires_grad_(), cache)
    cache.append(key[:, :, :1], value[:, :, :1])  # grows: the storage of the output stays as it was
    output.sum().backward()
    output = sightline.attention(query, cache)
    cache.append(key[:, :, :1], value[:, :, :1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# -- changes -----------------------------------------------------------------------------------------------------------


MASKS = [None, i >= j, sightline.window(4) & (i >= j)]


class Model:
    """A cache as lists: for each sequence, the rows of key and value that it has, as they were given."""

    def __init__(self, dtypes, kind, rng, widths, batch):
        self.cache, self.dtypes, self.kind = (
            KVCache(dtype=dtypes if dtypes[0] != dtypes[1] else dtypes[0]),
            dtypes,
            kind,
        )
        self.rng, self.widths, self.rows = rng, widths, [[] for _ in range(batch)]

    def draw(self, *shape):
        array = self.rng.normal(size=shape).astype(np.float32)
        return array, to_torch(array) if self.kind == "torch" else array

    def append(self, counts, padding="right", rows=None):
        t = rows or max(counts, default=0) + 1
        (key, *_), (value, *_) = new = [self.draw(len(self.rows), 2, t, d) for d in self.widths]
        self.cache.append(*[x[1] for x in new], lengths=counts, padding=padding)
        for b, count in enumerate(counts):
            real = range(count) if padding == "right" else range(t - count, t)
            self.rows[b] += [(key[b, :, r], value[b, :, r]) for r in real]

    def copy(self):
        found = copy.copy(self)
        found.cache, found.rows = copy.deepcopy(self.cache), [list(rows) for rows in self.rows]
        return found

    def check(self):
        """Compare what is stored, and attention with ragged lengths, with the lists."""
        assert self.cache.lengths.tolist() == list(map(len, self.rows))
        if not any(self.rows):
            return
        stored = self.cache.dequantized()
        query, given = self.draw(len(self.rows), 4, 1, self.widths[0])
        mask = MASKS[self.rng.integers(len(MASKS))]
        output = to_numpy(sightline.attention(given, self.cache, mask=mask))
        for b, rows in enumerate(self.rows):
            if not rows:
                assert not output[b].any()
                continue
            arrays = [np.stack([row[k] for row in rows], 1)[None] for k in range(2)]
            expected = [quantized(dtype, x) for dtype, x in zip(self.dtypes, arrays, strict=True)]
            for ours, theirs in zip(stored, expected, strict=True):
                assert np.allclose(to_numpy(ours)[b : b + 1, :, : len(rows)], theirs, rtol=1e-6, atol=1e-7)
            options = {} if mask is None else {"mask": mask.rewrite({"i": i + (len(rows) - 1)})}
            assert_attends(output[b : b + 1], query[b : b + 1], *expected, **options)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    data=st.data(),
    dtypes=st.tuples(st.sampled_from(QUANTIZED), st.sampled_from(QUANTIZED)),
    kind=st.sampled_from(["numpy", "torch"]),
    seed=st.integers(0, 99),
)
def test_drawn_changes_against_lists(data, dtypes, kind, seed):
    rng = np.random.default_rng(seed)
    widths, batch = data.draw(st.sampled_from([(32, 64), (33, 20), (1, 96), (160, 128)])), data.draw(st.integers(1, 3))
    model = Model(dtypes, kind, rng, widths, batch)
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
            model.cache.truncate(limits)
            model.rows = [rows[:limit] for rows, limit in zip(model.rows, limits, strict=True)]
        elif change == "reorder":
            order = [int(x) for x in rng.integers(0, count, data.draw(st.integers(1, 3)))]
            model.cache.reorder(order)
            model.rows = [list(model.rows[index]) for index in order]
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
    cache = filled_cache("int4", key, value)
    before, other = cache.error, copy.deepcopy(cache)
    other.append(100 * key, value)
    assert cache.error == before != other.error


def test_the_last_positions(rng):
    query, key, value = random_arrays(rng)
    cache = filled_cache("int8", key, value)
    part = cache.last(70)
    output = sightline.attention(query[:, :, -1:], part)
    assert_attends(output, query[:, :, -1:], *(x[:, :, -70:] for x in cache.dequantized()))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_decoding_loop(rng, kind):
    query, key, value = random_arrays(rng, kind=kind)
    cache, outputs = KVCache(dtype="int8"), []
    for t in range(150):
        rows = slice(t, t + 1)
        cache.append(key[:, :, rows], value[:, :, rows])
        outputs.append(to_numpy(sightline.attention(query[:, :, rows], cache, mask=sightline.causal())))
    assert_attends(np.concatenate(outputs, 2), query, *cache.dequantized(), mask=i >= j)


@pytest.mark.parametrize("axes", [2, 3])
def test_without_heads_or_batch(rng, axes):
    query, key, value = (x[(0, 0) if axes == 2 else (slice(None), 0)] for x in random_arrays(rng))
    cache = filled_cache("int4", key, value)
    stored = cache.dequantized()
    assert [x.shape for x in stored] == [key.shape, value.shape]
    output = sightline.attention(query, cache, mask=i >= j)
    assert output.shape == query.shape
    lead = (None,) * (4 - axes) if axes == 2 else (slice(None), None)
    assert_attends(output[lead], query[lead], *(x[lead] for x in stored), mask=i >= j)


def test_guard_pages_around_the_storage():
    """In a process of its own: one access outside the storage ends it."""
    program = """
import sys; sys.path.insert(0, sys.argv[1])
import numpy as np, sightline
from guard_pages import GuardedMemory
from sightline.kv_cache import storage as module
memory, past = GuardedMemory(), int(sys.argv[2])
def allocate(like, shape, dtype):
    return memory.zeros((*shape[:3], shape[3] - past), dtype)
module._allocate = allocate
rng = np.random.default_rng(0)
for at_end in (True, False):
    memory.at_end = at_end
    for dtype in ("int8", "int4", "float8_e4m3fn"):
        for d in (1, 33, 80, 128):
            cache = sightline.KVCache(dtype=dtype, capacity=70)
            cache.append(*[rng.normal(size=(1, 1, 70, d)).astype(np.float32) for _ in range(2)])
            for n in (1, 2, 70):
                query = rng.normal(size=(1, 2, n, d)).astype(np.float32)
                sightline.attention(query, cache, mask=sightline.causal(), see=[sightline.received()])
"""
    helpers = Path(__file__).parents[1] / "helpers"
    for past, code in ((0, 0), (1, -11)):
        done = subprocess.run(
            [sys.executable, "-c", program, str(helpers), str(past)], capture_output=True, check=False
        )
        assert done.returncode == code, done.stderr.decode()


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_errors_name_the_cure(rng):
    query, key, value = random_arrays(rng)
    cache = filled_cache("int8", key, value)
    before = cache.lengths.tolist(), cache.dequantized()[0]
    with pytest.raises(DtypeError, match="float32, bfloat16 or float16"):
        sightline.attention(query.astype(np.float64), cache)
    for read in (lambda: cache.key, lambda: cache.value):
        with pytest.raises(ParameterError, match="dequantized"):
            read()
    with pytest.raises(ParameterError, match=r"cache\.key"):
        filled_cache("float32", key, value).dequantized()
    with pytest.raises(DeviceError, match="torch on cpu"):
        cache.append(*map(to_torch, (key, value)))
    with pytest.raises(ShapeError, match=r"\(2, 2, t, 64\)"):
        cache.append(key[..., :40], value)
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


def test_transforms_of_torch_are_refused(rng):
    query, key, value = random_arrays(rng, kind="torch")
    cache = filled_cache("int8", key, value)
    with pytest.raises(KernelRefusedError, match=r"torch\.compiler\.disable"):
        torch.func.vmap(lambda q: sightline.attention(q[None], cache))(query)
    with pytest.raises(KernelRefusedError, match="kernel='triton'"):
        sightline.attention(query, cache, kernel="triton")


def test_explain_names_what_is_stored(rng):
    query, key, value = random_arrays(rng)
    text = str(sightline.explain(query, filled_cache(PAIR, key, value)))
    assert "float32 on cpu, keys in int8, values in int4" in text


# -- planted faults ----------------------------------------------------------------------------------------------------

FAULTS = {
    "the scale of the wrong group": (
        packed_rows,
        "group, place = column // size, column // size,",
        "group, place = column // size, column // size * 0,",
    ),
    "the scale of the wrong group in a tile": (
        packed_rows,
        "group + k * self.rows.num_groups",
        "k * self.rows.num_groups",
    ),
    "codes of neighbouring columns as a pair": (
        decode,
        "* width + d % self.lanes * 2 + d % width // self.lanes",
        "* width + d % width",
    ),
    "the scale of the next row": (decode, "scratch.at((key + k) *", "scratch.at((key + k + 1) *"),
    "a code without its sign": (packed_rows, "load(kind).to(INT32)", "load(kind).zero_extend(INT32)"),
    "the offset left out": (packed_rows, "fma(codes, scale, offset[0]) if", "fma(codes, scale, 0.0) if"),
    "the codes of a byte swapped": (packed_rows, "place // half * 4", "4 - place // half * 4"),
    "a float8 without its sign": (packed_rows, "((bits & 0x80) << 24)", "((bits & 0x00) << 24)"),
    "codes that are one too small": (quantize, "1.5 * 2.0**23", "1.5 * 2.0**23 - 1"),
    "the offset not subtracted": (quantize, "x - offsets[0] if", "x if"),
    "the scale of the largest number alone": (quantize, "builder.maximum(largest, -smallest)", "largest"),
    "the last number of a group left out": (quantize, "range(0, count, self.lanes)", "range(0, count - 1, self.lanes)"),
}


def check_cache(seed=3):
    """Stored numbers and attention of caches of every dtype, with several groups and odd widths."""
    rng = np.random.default_rng(seed)
    for dtype in QUANTIZED:
        for widths in ((160, 97), (64, 33), (96, 160)):
            query, key, value = random_arrays(rng, widths, length=70)
            cache = filled_cache(dtype, key, value)
            stored = cache.dequantized()
            for given, found in zip((key, value), stored, strict=True):
                rows = (x.reshape(-1, x.shape[-1]).tolist() for x in (given, found))
                for pair in zip(*rows, strict=True):
                    check_row(dtype, *pair)
            for count in (1, 70):
                output = sightline.attention(query[:, :, -count:], cache)
                assert_attends(output, query[:, :, -count:], *stored)
            narrow = query[:, :, -1:].astype(ml_dtypes.bfloat16)
            assert_attends(sightline.attention(narrow, cache), narrow.astype(np.float32), *stored)


def test_the_unchanged_cache_passes():
    check_cache()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(fault, monkeypatch, fresh_kernels):
    module, before, after = FAULTS[fault]
    faulty = broken(module, before, after)
    places = {
        packed_rows: [(block, "PackedFormat"), (quantize, "PackedFormat"), (decode, "PackedFormat")],
        quantize: [(launch_quantize, "Quantize")],
        decode: [(launch_decode, "Decode")],
    }
    for place, name in places[module]:
        monkeypatch.setattr(place, name, getattr(faulty, name))
    with pytest.raises(AssertionError):
        check_cache()
