"""Attention on quantised caches against the definition on the stored numbers, and planted faults."""

import ml_dtypes
import numpy as np
import pytest
import torch

import sightline
from fault_planting import Fault, assert_found
from filled_caches import PAIR, assert_attends, assert_stores, filled_cache, random_arrays
from sightline import KVCache, i, j, s
from sightline.arrays.operations import to_numpy
from sightline.arrays.row_formats import QUANTIZED
from sightline.call.problem import make_problem
from sightline.cpu.codegen.formats import PackedFormat
from sightline.cpu.kernels.decode import Decode
from sightline.cpu.kernels.decode_rows import DecodeRows
from sightline.cpu.kernels.quantize import Quantize
from sightline.cpu.runtime.processor import HOST
from sightline.reference.definition import compute_stages
from strategies import DTYPES, to_torch

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


@pytest.mark.sampled(one_in=11)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_attention_is_exact_on_the_stored_numbers(rng, dtype, call):
    count, options = CALLS[call]
    for widths in ((64, 64), (33, 80), (128, 1)):
        query, key, value = random_arrays(rng, widths, length=100)
        query = query[:, :, 100 - count :]
        cache = filled_cache(key, value, dtype=dtype)
        rows = {"i": i + (100 - count), "n": sightline.m}
        of_rows = {name: x.rewrite(rows) if hasattr(x, "rewrite") else x for name, x in options.items()}
        output = sightline.attention(query, cache, **options)
        assert_attends(output, query, *cache.dequantized(), **of_rows)
        for _ in range(3):  # the second call comes from the call cache, and a later one from generated code
            assert np.array_equal(sightline.attention(query, cache, **options), output)
        tensors = filled_cache(*map(to_torch, (key, value)), dtype=dtype)
        options = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        assert np.array_equal(to_numpy(sightline.attention(to_torch(query), tensors, **options)), output)


@pytest.mark.sampled(one_in=7)
@pytest.mark.parametrize("count", [1, 150])
@pytest.mark.parametrize("query_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_narrow_queries(rng, dtype, query_dtype, count):
    query, key, value = random_arrays(rng, (128, 64), kind="torch")
    query = query[:, :, -count:].to(getattr(torch, query_dtype))
    cache = filled_cache(key, value, dtype=dtype)
    mask = None if count == 1 else i >= j
    output = sightline.attention(query, cache, mask=mask)
    assert output.dtype == query.dtype
    assert_attends(output, query.float(), *cache.dequantized(), mask=mask)


@pytest.mark.parametrize("large", [1, 30, 1000])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_errors_of_narrow_queries_are_bounded(rng, dtype, large):
    """Queries and weights of 16 bits have the errors of `decode_rows`, also where keys hide a large entry."""
    query, key, value = random_arrays(rng, (128, 64), length=500, heads=(2, 2))
    factors = np.where(np.arange(128) == 5, large, 1).astype(np.float32)
    narrow = to_torch((query[:, :, -1:] * factors).astype(DTYPES[dtype]))
    cache = filled_cache(*map(to_torch, (key / factors, value)), dtype="int8")
    output, (lse,) = sightline.attention(narrow, cache, see=[sightline.lse()])
    query, key, value = (to_numpy(x).astype(np.float64) for x in (narrow, *cache.dequantized()))
    truth, largest = compute_stages(make_problem(query, key, value)), np.abs(value).max()
    bound = 2.0**-16 * np.abs(query).max(-1) * np.abs(key).sum(-1).max(-1)[..., None] / np.sqrt(128) + 1e-5
    assert (np.abs(to_numpy(lse) - truth.lse) <= bound).all()
    allowed = np.expm1(2 * bound)[..., None] * largest + 2.0**-8 * np.abs(truth.output) + 2.0**-10 * largest
    assert (np.abs(to_numpy(output.float()) - truth.output) <= allowed).all()


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("kernel", ["cpu", "streaming", "reference"])
@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_every_kernel_reads_the_codes(rng, dtype, kernel):
    query, key, value = random_arrays(rng, (40, 33))
    cache = filled_cache(key, value, dtype=dtype)
    output = sightline.attention(query, cache, mask=i >= j, kernel=kernel)
    assert_attends(output, query, *cache.dequantized(), mask=i >= j)


STATISTICS = {
    "lse": sightline.lse(),
    "max_score": sightline.max_score(),
    "entropy": sightline.entropy(),
    "mass": sightline.mass(i - j < 9),
    "sum": sightline.sum(sightline.p * (i - j), over=j),
    "top_k": sightline.top_k(4),
    "received": sightline.received(),
    "pooled": sightline.pooled(4, 4),
    "weights": sightline.weights(),
    "scores": sightline.scores(),
    "weighted_sum": sightline.weights().mean("heads"),
}


@pytest.mark.sampled(one_in=19)
@pytest.mark.parametrize("count", [1, 70])
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_statistics_are_those_of_the_stored_numbers(rng, dtype, statistic, count):
    query, key, value = random_arrays(rng)
    query = query[:, :, -count:]
    see = {"it": STATISTICS[statistic]}
    cache, plain = filled_cache(key, value, dtype=dtype), KVCache()
    plain.append(*cache.dequantized())
    found, expected = (sightline.attention(query, x, mask=i >= j, see=see)[1]["it"] for x in (cache, plain))
    pairs = [(found, expected)] if isinstance(found, np.ndarray) else zip(found, expected, strict=True)
    for ours, theirs in pairs:
        assert np.allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("count", [1, 3, 150])
@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_every_number_of_threads_gives_the_same_bits(rng, dtype, count):
    query, key, value = random_arrays(rng, (128, 128), length=1100)
    cache, see = filled_cache(key, value, dtype=dtype), [sightline.received()]
    results = [
        sightline.attention(query[:, :, -count:], cache, mask=i >= j, see=see, threads=threads)
        for threads in (1, 2, 5, 2)
    ]
    for output, (received,) in results[1:]:
        assert np.array_equal(output, results[0][0])
        assert np.array_equal(received, results[0][1][0])


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("dtype", [*QUANTIZED, PAIR])
def test_gradients_of_the_query(rng, dtype):
    query, key, value = random_arrays(rng, (64, 33), kind="torch")
    cache = filled_cache(key, value, dtype=dtype)
    stored, weight = cache.dequantized(), torch.randn((*query.shape[:-1], 33))
    for count in (1, 150, 150):
        rows = query[:, :, -count:].clone().requires_grad_(), query[:, :, -count:].clone().requires_grad_()
        for one, arguments in zip(rows, ((cache,), stored), strict=True):
            output = sightline.attention(one, *arguments, mask=(i >= j) if count > 1 else None)
            (output * weight[:, :, :count]).sum().backward()
        assert torch.allclose(rows[0].grad, rows[1].grad, rtol=1e-5, atol=1e-6)


def test_a_later_reorder_shows_in_the_backward_pass(rng):
    query, key, value = random_arrays(rng, kind="torch")
    cache = filled_cache(key, value, dtype="int8")
    output = sightline.attention(query.requires_grad_(), cache)
    cache.append(key[:, :, :1], value[:, :, :1])  # grows: the storage of the output stays as it was
    output.sum().backward()
    output = sightline.attention(query, cache)
    cache.append(key[:, :, :1], value[:, :, :1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


FAULTS = {
    "the scale of the wrong group": Fault(
        PackedFormat.load_columns,
        "column // size, column // size, column % size",
        "column // size, column // size * 0, column % size",
    ),
    "the scale of the wrong group in a tile": Fault(
        PackedFormat._load_scales, "group + k * self.rows.num_groups", "k * self.rows.num_groups"
    ),
    "16 bits without their scale": Fault(Decode.softmax, "self.factor * query_scale.load(self.float)", "self.factor"),
    "the scale of another query's weights in 16 bits": Fault(
        Decode.accumulate_values, "self.weight_scales.at(row_index * tiles.itemsize)", "self.weight_scales"
    ),
    "whole numbers of 16 bits that are 15 too large": Fault(
        DecodeRows.store_factors, "x * inverse + rounding_constant", "x * inverse + (rounding_constant + 15)"
    ),
    "the scale of the next row": Fault(
        DecodeRows.load_scales,
        "builder.minimum(key + k, self.decode.num_keys - 1)",
        "builder.minimum(key + k + 1, self.decode.num_keys - 1)",
    ),
    "a code without its sign": Fault(
        PackedFormat.load_codes, "row.at(column).load(kind).to(INT32)", "row.at(column).load(kind).zero_extend(INT32)"
    ),
    "the offset left out": Fault(PackedFormat.load_columns, "offset[0]", "0.0"),
    "the offset of a bfloat16 left out": Fault(
        PackedFormat.load_bfloats,
        "builder.fma(builder.arange(half, INT32).to(FLOAT), scale, offset)",
        "builder.arange(half, INT32).to(FLOAT) * scale",
    ),
    "the codes of a byte swapped": Fault(PackedFormat.load_codes, "place // half * 4", "4 - place // half * 4"),
    "a float8 without its sign": Fault(PackedFormat.load_codes, "0xBF80", "0x3F80"),
    "codes that are one too small": tuple(
        Fault(Quantize.store_codes, f"divide({at}) + ROUNDING_CONSTANT", f"divide({at}) + (ROUNDING_CONSTANT - 1)")
        for at in ("at", "place")
    ),
    "the offset not subtracted": Fault(Quantize.store_codes, "x - offsets[0]", "x"),
    "the scale of the largest number alone": Fault(
        Quantize.write_group, "builder.maximum(largest, -smallest)", "largest"
    ),
    "the last number of a group left out": Fault(
        Quantize.write_group, "range(0, count, self.lanes)", "range(0, count - 1, self.lanes)"
    ),
}


def check_cache(seed=3):
    """Stored numbers and attention of caches of every dtype: several groups, odd widths, and rows that fill pairs."""
    rng = np.random.default_rng(seed)
    for dtype in QUANTIZED:
        for widths in ((160, 97), (96, 160), (64, 96)):
            query, key, value = random_arrays(rng, widths, length=70)
            cache = filled_cache(key, value, dtype=dtype)
            stored = cache.dequantized()
            for array, found in zip((key, value), stored, strict=True):
                assert_stores(dtype, found, array)
            for count in (1, 70):
                output = sightline.attention(query[:, :, -count:], cache)
                assert_attends(output, query[:, :, -count:], *stored)
            narrow = query[:, :, -1:].astype(ml_dtypes.bfloat16)
            assert_attends(sightline.attention(narrow, cache), narrow.astype(np.float32), *stored)


def test_the_unchanged_cache_passes():
    check_cache()


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(fault, monkeypatch, fresh_kernels):
    if ("16 bits" in fault and HOST.machine.vector_bytes < 32) or ("bf" in fault and not HOST.machine.has_bf16_dot):
        pytest.skip("this processor does not multiply such pairs")
    assert_found(FAULTS[fault], monkeypatch, check_cache)


@pytest.mark.parametrize("kernel", [None, "streaming", "reference"])
def test_weighted_sum_on_a_quantized_cache(rng, kernel):
    cache = sightline.KVCache(dtype="int8")
    query, key, value = (rng.normal(size=(1, 2, 9, 8)).astype(np.float32) for _ in range(3))
    cache.append(key, value)
    x = rng.normal(size=(9, 3)).astype(np.float32)
    _, (found,) = sightline.attention(query, cache, see=[sightline.weighted_sum(x)], kernel=kernel)
    expected = sightline.attention(query, cache.dequantized()[0], np.broadcast_to(x, (1, 2, 9, 3)))
    assert np.allclose(found, expected, atol=1e-6)
