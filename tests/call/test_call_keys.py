"""Keys of cached calls: they distinguish calls with different results, and every part of a key is needed."""

import ml_dtypes
import numpy as np
import pytest

import sightline
from cached_calls import key_of, record_hits, uncached
from sample_calls import all_bits, arrays, bits, draw_inputs
from sightline import b, i, j, s, where
from sightline.arrays.layouts import unpack
from sightline.call import call_cache
from sightline.call.call_cache import LOOKUP
from sightline.call.problem import make_problem
from sightline.call.request import describe
from sightline.cpu import Cpu
from sightline.errors import SightlineError
from strategies import to_torch

OPERAND_BYTES = 8 * (1 + 2 * 4)  # of an operand with four axes in the layouts of `arrays.layouts`
X = np.random.default_rng(7).normal(size=(2, 2, 6, 6)).astype(np.float32)
DIFFERENT_CALLS = {  # two calls whose results differ and whose keys differ in one part
    "query's shape": ({"query": X}, {"query": X[:, :, :5]}),
    "query's strides": ({"query": X}, {"query": X.swapaxes(2, 3)}),
    "key's shape": ({"key": X[:, :, :5], "value": X[:, :, :5]}, {}),
    "key's strides": ({"key": X}, {"key": X.swapaxes(2, 3)}),
    "value's shape": ({"value": X}, {"value": X[..., :5]}),
    "value's strides": ({"value": X}, {"value": X.swapaxes(2, 3)}),
    "dtype": tuple(
        dict.fromkeys(("query", "key", "value"), X.astype(kind)) for kind in (np.float16, ml_dtypes.bfloat16)
    ),
    "mask": ({"mask": i >= j}, {"mask": i > j}),
    "a mask's numbers": ({"mask": i - j < 2}, {"mask": i - j < 3}),
    "no mask": ({"mask": i >= j}, {}),
    "mask or score": ({"score": s + 1.0 * j}, {"mask": i >= j}),
    "a whole number or a float": ({"score": s * (j // 2)}, {"score": s * (j / 2)}),
    "the sign of nought": (
        {"score": s * (1.0 / where(j > 2, 0.0, 1.0))},
        {"score": s * (1.0 / where(j > 2, -0.0, 1.0))},
    ),
    "a score's number": ({"score": s * 2}, {"score": s * 3}),
    "order of arguments": ({"score": s + (i - j) * 1.0}, {"score": s + (j - i) * 1.0}),
    "grouping": ({"score": s + 1.0 * (i - (j - i))}, {"score": s + 1.0 * ((i - j) - i)}),
    "scale": ({"scale": 0.5}, {"scale": 0.25}),
    "scale's sign": ({"scale": 0.5}, {"scale": -0.5}),
    "no scale": ({"scale": 0.5}, {}),
}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("case", DIFFERENT_CALLS)
def test_keys_distinguish_calls(case, library):
    def given(changes):
        arguments = {"query": X, "key": X[::-1].copy(), "value": np.roll(X, 1).copy()} | changes
        if library == "torch":
            arguments = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
        return arguments

    first, second = map(given, DIFFERENT_CALLS[case])
    call_cache.clear()
    expected = sightline.attention(**second)
    call_cache.clear()
    before = sightline.attention(**first)
    assert bits(before) != bits(expected)
    assert bits(sightline.attention(**second)) == bits(expected)
    assert bits(sightline.attention(**first)) == bits(before)


PARTS = {  # the part of the key in which the calls of a case differ: in the layouts, or after them
    "query's shape": [0],
    "query's strides": [1],
    "key's shape": [3, 6],
    "key's strides": [4],
    "value's shape": [6],
    "value's strides": [7],
    "dtype": [2, 5, 8],
    **{key: [18] for key in ("mask", "no mask", "mask or score", "a whole number or a float", "the sign of nought")},
    **{key: [18] for key in ("order of arguments", "grouping")},
    **{key: [] for key in ("a mask's numbers", "a score's number")},  # numbers are arguments of one cached call
    **{key: [9] for key in ("scale", "scale's sign", "no scale")},
}


@pytest.mark.parametrize("case", DIFFERENT_CALLS)
def test_every_part_of_the_key_is_needed(case):
    """Without its part of the key, the two calls of a case have equal keys."""
    base = {"query": X, "key": X[::-1].copy(), "value": np.roll(X, 1).copy()}

    def key(changes):
        layouts, (options, *others, formulas, _wanted) = key_of(**({"mask": b >= 0} | base | changes))
        parts = [part for kind, shape, strides in unpack(layouts) for part in (shape, strides, kind)]
        return [*parts, *options, *others, [*map(id, formulas)]]

    first, second = map(key, DIFFERENT_CALLS[case])
    assert [place for place, (x, y) in enumerate(zip(first, second, strict=True)) if x != y] == PARTS[case]


@pytest.mark.parametrize("kind", ["padding", "boolean array", "bias"])
def test_a_cached_call_of_another_structure_is_found(rng, kind, monkeypatch):
    """Planted fault: the key does not have the layouts of tables, so a call reads a table with the wrong strides."""
    read = LOOKUP.read_arrays

    def without_layouts(*given):
        layouts, *addresses = read(*given)
        return layouts[: 3 * OPERAND_BYTES], *addresses

    def compare():
        given = arrays(rng, ((2, 3, 40, 8),) * 3)
        for convert in (np.asarray, lambda x: np.repeat(x, 2, axis=-1)[..., ::2]):
            options = draw_inputs(rng, kind, 2, 3, 40, 40, convert)
            answer = sightline.attention(*given, **options)
            monkeypatch.setattr("sightline.api.functions.describe", lambda *_: None)
            expected = sightline.attention(*given, **options)
            monkeypatch.setattr("sightline.api.functions.describe", describe)
            assert all_bits(answer) == all_bits(expected)

    compare()
    call_cache.clear()
    monkeypatch.setattr(LOOKUP, "read_arrays", without_layouts)
    monkeypatch.setattr(LOOKUP, "find_or_run", LOOKUP.find_in_python)
    with pytest.raises(AssertionError):
        compare()


def test_parameters_of_statistics_are_parts_of_the_key(rng):
    given = arrays(rng)
    for see in (
        *([sightline.top_k(2)], [sightline.top_k(3)], [sightline.received()], [sightline.received(how="max")]),
        *([sightline.received().mean(axis)] for axis in ("heads", "batch")),
        *([sightline.mass(condition)] for condition in (j < 3, j < 4, j > 3)),
        *([sightline.sum(sightline.p * x, over=j)] for x in (j, j * 2, j < 3, 0.0)),
    ):
        sightline.attention(*given, see=see)
        assert all_bits(sightline.attention(*given, see=see)) == all_bits(uncached(given, see=see))
    x = [np.full_like(array, np.nan) for array in given]  # the bound call leaves scores that are NaN to the dispatch
    for see in ([sightline.top_k(2)], [sightline.received()]):
        expected = all_bits(uncached(x, see=see))
        sightline.attention(*given, see=see)
        assert all_bits(sightline.attention(*x, see=see)) == expected


def test_equal_long_formulas_share_a_cached_call(rng, monkeypatch):
    def build_mask():
        mask = i >= j
        for shift in range(30):
            mask = mask | (i + shift == j)
        return mask

    given = arrays(rng)
    sightline.attention(*given, mask=build_mask())
    found = record_hits(monkeypatch)
    sightline.attention(*given, mask=build_mask())
    assert found


def test_a_requested_kernel_runs(rng):
    given = arrays(rng)
    sightline.attention(*given)
    again_cpu = sightline.attention(*given, kernel="cpu")
    np.testing.assert_array_equal(again_cpu, sightline.attention(*given))
    before = len(call_cache.calls)
    sightline.attention(*given, kernel="reference")
    sightline.attention(*given, kernel="streaming")
    assert len(call_cache.calls) == before  # other kernels neither are cached nor use a cached call


def test_a_call_for_another_machine_is_a_miss(rng, monkeypatch):
    given = arrays(rng)
    sightline.attention(*given)
    assert key_of(*given) in call_cache.calls
    monkeypatch.setenv("SIGHTLINE_CPU", "sse2")
    assert key_of(*given) not in call_cache.calls


def test_kernels_of_other_devices_are_not_cached(rng):
    from sightline.cpu.runtime.machine import named_machine
    from sightline.cpu.runtime.processor import Processor

    assert Cpu(Processor(named_machine("sse2"))).run(make_problem(*arrays(rng))).keep is None


def test_fresh_kernels_do_not_use_cached_calls(rng, fresh_kernels):
    assert not call_cache.calls


@pytest.mark.parametrize(
    "fault",
    [
        {"kernel": 3},
        {"threads": True},
        {"threads": 0},
        {"dropout": 2.0},
        {"scale": float("nan")},
        {"seed": -1},
        {"sinks": np.zeros(5)},
        {"see": "lse"},
        {"mask": "causal"},
        {"mask": np.zeros((3, 3))},
        {"score": i > j},
        {"kernel": "nobody's"},
        {"value": np.zeros((1, 2, 9, 8), np.float64)},
        {"key": np.zeros((1, 2, 9, 7), np.float32)},
        {"query": np.ma.zeros((1, 2, 9, 8), np.float32)},
        {"query": np.zeros((1, 2, 9, 8), ">f4")},
        {"key": None},
    ],
    ids=str,
)
def test_invalid_input_after_a_cached_call_is_an_error(rng, fault):
    operands = dict(zip(("query", "key", "value"), arrays(rng), strict=True))
    for options in ({}, {"threads": 1}, {"kernel": "cpu"}):
        sightline.attention(**operands, **options)
    with pytest.raises(SightlineError):
        sightline.attention(**(operands | fault))
