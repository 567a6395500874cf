"""Cached calls: equal bits as an uncached call, keys that distinguish calls, and every state of torch is respected."""

import ctypes
import resource
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import sightline
from sample_calls import KINDS, all_bits, arrays, bits, draw_inputs
from sightline import b, h, i, j, m, n, s, table, where
from sightline.arrays import layouts as array_layouts
from sightline.arrays.layouts import parse
from sightline.cpu import Cpu
from sightline.cpu.calls.launcher import RecordCode
from sightline.cpu.calls.python_functions import launcher
from sightline.cpu.kernels.kernel_spec import min_decode_keys
from sightline.cpu.launch import prepared_call
from sightline.cpu.launch.decode import BoundDecode
from sightline.dispatch import call_cache, lookup
from sightline.dispatch.call_cache import ForwardEntry
from sightline.dispatch.call_request import describe
from sightline.errors import DtypeError, FormulaError, SightlineError, TableError
from sightline.problem.problem import make_problem
from sightline.reference.accuracy import compute_baseline, term_sizes
from sightline.reference.definition import compute_stages
from sightline.testing import assert_within_budget
from strategies import to_torch

OPERAND_BYTES = 8 * (1 + 2 * 4)  # of an operand with four axes in the layouts of `arrays.layouts`
FORMULAS = {
    "none": dict,
    "causal, written anew": lambda: {"mask": i >= j},
    "named": lambda: {"mask": sightline.causal("lower right")},
    "window": lambda: {"mask": (i >= j) & (i - j < 7)},
    "score": lambda: {"score": where(j < 3, s * 0.5, s - 1)},
    "both": lambda: {"mask": sightline.window(5, 2), "score": sightline.softcap(2.0)},
    "scale": lambda: {"scale": 0.3},
    "one thread": lambda: {"threads": 1, "kernel": "cpu"},
    "two threads": lambda: {"threads": 2},
}
NEVER = 10**9
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


@pytest.fixture(autouse=True)
def clear_cache():
    call_cache.clear()


def uncached(arrays, **options):
    """Return the result of a call with an empty call cache."""
    call_cache.clear()
    return sightline.attention(*arrays, **options)


def record_hits(monkeypatch):
    """Return a list that grows by one with every call that the cache answers. No call becomes direct."""
    monkeypatch.setattr(prepared_call, "RUNS_BEFORE_RECORD", NEVER)
    found, run = [], ForwardEntry.run

    def spy(*given):
        answer = run(*given)
        found.extend([1] * (answer is not None))
        return answer

    monkeypatch.setattr(ForwardEntry, "run", spy)
    return found


def key_of(query, key, value, **options):
    """The key of a call of `sightline.attention` with these arguments; None if the call cannot be cached."""
    nothing = dict.fromkeys(("mask", "score", "scale", "sinks", "seed", "see", "kernel", "threads")) | {"dropout": 0.0}
    description = describe(query, **(nothing | options))
    found = None if description is None else array_layouts.read_arrays(query, key, value, *description.arrays)
    return None if found is None else (found[0], description.structure)


# -- the same answer -----------------------------------------------------------------------------------------------


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


def test_many_threads_at_once(rng):
    """Each call has its own argument block: ten Python threads with two layouts all get their own results."""
    questions = [arrays(rng, shape) for shape in (((1, 4, 33, 16),) * 3, ((3, 4, 33, 16),) * 3) for _ in range(5)]
    expected = [bits(uncached(given, mask=i >= j)) for given in questions]
    start = threading.Barrier(len(questions))

    def ask(number):
        start.wait()
        return all(bits(sightline.attention(*questions[number], mask=i >= j)) == expected[number] for _ in range(200))

    with ThreadPoolExecutor(len(questions)) as pool:
        assert all(pool.map(ask, range(len(questions))))


def test_the_cache_has_a_limited_size(rng, monkeypatch):
    monkeypatch.setattr(lookup, "MAX_CACHED_CALLS", 3)
    q, k, v = arrays(rng)
    for stride in range(2, 5):
        sightline.attention(q, k, v, mask=i % stride == 0)
    sightline.attention(q, k, v, mask=i % 2 == 0)  # used again: the second is now the oldest
    sightline.attention(q, k, v, mask=i % 5 == 0)
    left = {(i % stride == 0, None) for stride in (4, 2, 5)}
    assert {key[1].formulas for key in call_cache.calls} == left


def test_cached_calls_do_not_keep_arrays_alive(rng):
    given = [torch.from_numpy(x) for x in arrays(rng)]
    watched = [weakref.ref(x) for x in given]
    sightline.attention(*given)
    sightline.attention(*given)
    del given
    assert [ref() for ref in watched] == [None] * 3


# -- tables, dropout, sinks and statistics ---------------------------------------------------------------------------


@settings(max_examples=15)
@given(st.sampled_from(KINDS), st.sampled_from([np.float32, np.float64]), st.booleans(), st.integers(0, 999))
def test_equal_bits_with_other_contents(kind, dtype, in_torch, seed):
    """The full dispatch is the oracle of cached calls: tables, numbers and seeds are other ones at each call."""
    rng = np.random.default_rng(seed)
    B, H, n, m = 2, 3, int(rng.integers(1, 150)), int(rng.integers(1, 150))
    convert = to_torch if in_torch else np.asarray
    given = [convert(x) for x in arrays(rng, ((B, H, n, 8), (B, H, m, 8), (B, H, m, 8)), dtype)]
    sightline.attention(*given, **draw_inputs(rng, kind, B, H, n, m, convert))
    with pytest.MonkeyPatch.context() as patch:
        found = record_hits(patch)
        for _ in range(2):
            options = draw_inputs(rng, kind, B, H, n, m, convert)
            answer = sightline.attention(*given, **options)
            assert all_bits(answer) == all_bits(uncached(given, **options))
            sightline.attention(*given, **options)
        assert found


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
    monkeypatch.setattr("sightline.api.functions.make_problem", None)
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


def test_contents_that_become_invalid_raise_the_error(rng, monkeypatch):
    """Two new contents are invalid: an index outside its table, and a whole number that is not exact in float64."""
    given, index = arrays(rng, ((1, 2, 9, 8),) * 3), rng.integers(0, 4, 9)

    def options():
        return {"score": s + table(np.arange(4.0))[table(index)[j]], "mask": table(index)[i] <= table(index)[j] + 4}

    sightline.attention(*given, **options())
    found = record_hits(monkeypatch)
    index[0] = 3
    assert all_bits(sightline.attention(*given, **options())) == all_bits(uncached(given, **options()))
    sightline.attention(*given, **options())
    assert found
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


def call_structures_from_threads(rng, calls):
    """Call eight structures from eight threads at once, and compare every answer with the answer of one thread."""
    kinds = KINDS[:8]
    given = arrays(rng, ((2, 3, 40, 8),) * 3)
    questions = [[draw_inputs(rng, kind, 2, 3, 40, 40) for _ in range(3)] for kind in kinds]
    expected = [[all_bits(uncached(given, **options)) for options in each] for each in questions]
    start = threading.Barrier(len(kinds))

    def ask(number):
        start.wait()
        return all(
            all_bits(sightline.attention(*given, **questions[number][k % 3])) == expected[number][k % 3]
            for k in range(calls)
        )

    with ThreadPoolExecutor(len(kinds)) as pool:
        assert all(pool.map(ask, range(len(kinds))))


def test_eight_structures_from_eight_threads(rng):
    call_structures_from_threads(rng, 30)


def test_one_structure_from_eight_threads(rng):
    """The threads compete for the buffer of one bound call; those that do not get it use another."""
    given = [arrays(rng) for _ in range(8)]
    options = [{"mask": sightline.padding(rng.integers(1, 10, 1)), "see": [sightline.top_k(2)]} for _ in given]
    expected = [all_bits(uncached(x, **more)) for x, more in zip(given, options, strict=True)]
    start = threading.Barrier(8)

    def ask(number):
        start.wait()
        return all(
            all_bits(sightline.attention(*given[number], **options[number])) == expected[number] for _ in range(200)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(8)))


def test_a_buffer_in_use_is_left_to_its_user(rng):
    given = arrays(rng)
    expected = bits(uncached(given))
    sightline.attention(*given)
    bound = next(iter(call_cache.calls.values())).prepared.call
    busy = bound.record.array
    busy[0] = 1
    assert bits(sightline.attention(*given)) == expected
    assert busy[0] == 1
    assert bound.launch(bound.record.address, *[0] * bound.num_words) is None
    busy[0] = 0
    assert bits(sightline.attention(*given)) == expected
    with pytest.raises(OverflowError):
        bound.launch(bound.record.address, *[2**70] * bound.num_words)
    assert busy[0] == 0
    assert bound.launch(bound.record.address, 0) is None  # another number of words


def test_a_workspace_that_is_not_cleared_is_found(rng, monkeypatch, fresh_kernels):
    """Planted fault: the kernel of the second launch finds the counter of the first, and computes nothing."""
    given = arrays(rng)
    expected = bits(sightline.attention(*given))
    monkeypatch.setattr(RecordCode, "clear_workspace", lambda self: None)
    launcher.cache_clear()
    try:
        answers = [sightline.attention(*given) for _ in range(3)]
        for answer in answers:
            answer[:] = np.where(np.isfinite(answer), answer, 0)
        assert any(bits(answer) != expected for answer in answers)
    finally:
        launcher.cache_clear()


def test_a_record_grows_with_the_number_of_tile_ranges(rng, monkeypatch):
    """The first contents need few tile ranges. Others need more than the record's buffer can have."""
    n = 64
    given = arrays(rng, ((1, 1, n, 8), (1, 1, 4096, 8), (1, 1, 4096, 8)))

    def mask(step):
        return table((np.arange(4096) // 64 % step == 0).astype(np.int64))[j] > 0

    sightline.attention(*given, mask=mask(64), threads=1)
    expected = bits(uncached(given, mask=mask(2), threads=1))
    call_cache.clear()
    sightline.attention(*given, mask=mask(64), threads=1)
    bound = next(iter(call_cache.calls.values())).prepared.call
    for _ in range(2):
        assert bits(sightline.attention(*given, mask=mask(2), threads=1)) == expected
    monkeypatch.setattr(type(bound), "find_tile_ranges", None)  # the grown record serves the call alone
    assert bits(sightline.attention(*given, mask=mask(2), threads=1)) == expected


@pytest.mark.soak
def test_ten_thousand_calls_from_eight_threads_keep_the_memory_flat(rng):
    call_structures_from_threads(rng, 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call_structures_from_threads(rng, 1250)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


@pytest.mark.parametrize("kind", ["padding", "boolean array", "bias"])
def test_a_cached_call_of_another_structure_is_found(rng, kind, monkeypatch):
    """Planted fault: the key does not have the layouts of tables, so a call reads a table with the wrong strides."""
    read = array_layouts.read_arrays

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
    monkeypatch.setattr(array_layouts, "read_arrays", without_layouts)
    monkeypatch.setattr(lookup, "find_or_run", lookup.find_in_python)
    monkeypatch.setattr(lookup, "use_generated_functions", lambda: None)
    with pytest.raises(AssertionError):
        compare()


# -- keys --------------------------------------------------------------------------------------------------------


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
        named_machine = {"query": X, "key": X[::-1].copy(), "value": np.roll(X, 1).copy()} | changes
        if library == "torch":
            named_machine = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in named_machine.items()}
        return named_machine

    first, second = map(given, DIFFERENT_CALLS[case])
    call_cache.clear()
    expected = sightline.attention(**second)
    call_cache.clear()
    before = sightline.attention(**first)
    assert bits(before) != bits(expected)
    assert bits(sightline.attention(**second)) == bits(expected)
    assert bits(sightline.attention(**first)) == bits(before)


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
    named_machine = dict(zip(("query", "key", "value"), arrays(rng), strict=True))
    for options in ({}, {"threads": 1}, {"kernel": "cpu"}):
        sightline.attention(**named_machine, **options)
    with pytest.raises(SightlineError):
        sightline.attention(**(named_machine | fault))


def test_tables_changed_in_place_are_read_again(rng, monkeypatch):
    given, values = arrays(rng), np.ones(9, bool)
    mask = sightline.table(values)[j]
    sightline.attention(*given, mask=mask)
    found = record_hits(monkeypatch)
    values[4:] = False
    changed = sightline.attention(*given, mask=mask)
    assert found
    assert bits(changed) == bits(uncached(given, mask=mask))


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


# -- planted faults ------------------------------------------------------------------------------------------------


PARTS = {  # the part of the key in which the calls of a case differ: in the layouts, or after them
    "query's shape": [0],
    "query's strides": [1],
    "key's shape": [3, 6],
    "key's strides": [4],
    "value's shape": [6],
    "value's strides": [7],
    "dtype": [2, 5, 8],
    **{key: [17] for key in ("mask", "no mask", "mask or score", "a whole number or a float", "the sign of nought")},
    **{key: [17] for key in ("order of arguments", "grouping")},
    **{key: [] for key in ("a mask's numbers", "a score's number")},  # numbers are arguments of one cached call
    **{key: [9] for key in ("scale", "scale's sign", "no scale")},
}


@pytest.mark.parametrize("case", DIFFERENT_CALLS)
def test_every_part_of_the_key_is_needed(case):
    """Without its part of the key, the two calls of a case have equal keys."""
    base = {"query": X, "key": X[::-1].copy(), "value": np.roll(X, 1).copy()}

    def key(changes):
        layouts, (options, *others, formulas, _wanted) = key_of(**({"mask": b >= 0} | base | changes))
        parts = [part for kind, shape, strides in parse(layouts) for part in (shape, strides, kind)]
        return [*parts, *options, *others, [*map(id, formulas)]]

    first, second = map(key, DIFFERENT_CALLS[case])
    assert [place for place, (x, y) in enumerate(zip(first, second, strict=True)) if x != y] == PARTS[case]


def test_a_stale_argument_block_is_found(rng, monkeypatch):
    """A cached call that does not reset the counter computes nothing, which the comparison of bits must find."""
    given = arrays(rng)
    expected = uncached(given)
    prepared = next(iter(call_cache.calls.values())).prepared.call
    output, lse = np.full_like(expected, np.nan), np.empty(expected.shape[:-1])
    operands = [x.ctypes.data for x in (*given, output, lse)]
    prepared.run(1, [*operands, 0, 0], (), given[1].shape[-2], ())
    assert bits(output) == bits(expected)
    _whole, words, address = prepared.buffers.unused[-1]
    assert words[prepared.buffers.offsets["counter"]] != 0
    output[...] = np.nan
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(prepared.kernel)(address)
    assert np.isnan(output).all()


# -- torch -----------------------------------------------------------------------------------------------------------


def tensors(rng, **options):
    return [torch.from_numpy(x).requires_grad_(**options) if options else torch.from_numpy(x) for x in arrays(rng)]


SEE = {
    "entropy before max_score": ([sightline.entropy(), sightline.max_score()], lambda seen: seen[0]),
    "max_score after entropy": ([sightline.entropy(), sightline.max_score()], lambda seen: seen[1][0]),
    "lse first": ([sightline.lse(), sightline.entropy()], lambda seen: seen[0]),
    "the second of two": ([sightline.entropy(), sightline.entropy()], lambda seen: seen[1]),
    "received": ([sightline.top_k(2), sightline.entropy(), sightline.received()], lambda seen: seen[2]),
    "entropy after top_k": ([sightline.top_k(2), sightline.entropy()], lambda seen: seen[1]),
    "pooled": ([sightline.max_score(), sightline.pooled(2, 3), sightline.lse()], lambda seen: seen[1]),
    "mass": ([sightline.entropy(), sightline.mass(j < 3), sightline.mass(i > j)], lambda seen: seen[2]),
}


@pytest.mark.parametrize("name", SEE)
def test_gradients_of_statistics_in_any_order(rng, name, monkeypatch):
    see, pick = SEE[name]
    given = tensors(rng, requires_grad=True)

    def gradients():
        _, seen = sightline.attention(*given, see=see)
        return [bits(x) for x in torch.autograd.grad(pick(seen).square().sum(), given[:2])]

    expected = gradients()
    found = record_hits(monkeypatch)
    assert gradients() == gradients() == expected
    assert len(found) == 2


@pytest.mark.parametrize(
    "see",
    [
        *(
            [sightline.scores()],
            [sightline.weights().mean("heads")],
            [sightline.top_k(300)],
            [sightline.lse().rows([1])],
        ),
        [sightline.mass(np.eye(9, 400) > 0)],
    ],
)
def test_statistics_that_no_bound_call_computes(rng, see):
    given = arrays(rng, ((1, 2, 9, 8), (1, 2, 400, 8), (1, 2, 400, 8)))
    expected = all_bits(uncached(given, see=see))
    assert all_bits(sightline.attention(*given, see=see)) == expected


@pytest.mark.parametrize("shape", [(9, 8), (3, 9, 8)], ids=str)
def test_statistics_of_arrays_without_heads(rng, shape):
    given = arrays(rng, (shape,) * 3)
    passes = [sightline.received(), sightline.top_k(2), sightline.pooled(3, 3), sightline.weights()]
    see = [*passes, sightline.entropy(), sightline.mass(j < 3), passes[0].mean("heads"), passes[2].mean("batch")]
    expected = all_bits(uncached(given, see=see))
    for _ in range(10):
        assert all_bits(sightline.attention(*given, see=see)) == expected
    assert len(call_cache.calls) == 1


def test_gradients_of_means(rng, monkeypatch):
    """torch computes the gradient of the mean itself, so the sums have another order."""
    given = tensors(rng, requires_grad=True)
    see = [sightline.lse().mean("batch"), sightline.entropy().mean("heads"), sightline.mass(j < 3).mean("heads")]

    def gradients():
        output, seen = sightline.attention(*given, see=see)
        return torch.autograd.grad(output.sum() + sum(x.square().sum() for x in seen), given)

    expected = gradients()
    found = record_hits(monkeypatch)
    for x, right in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(x, right, rtol=1e-5, atol=1e-6)
    assert found


def test_a_cached_call_keeps_no_table_of_a_condition_alive(rng):
    given, ids = arrays(rng), rng.random(9) < 0.5
    watched = weakref.ref(ids)
    sightline.attention(*given, see=[sightline.mass(table(ids)[j])])
    assert len(call_cache.calls) == 1
    del ids
    assert watched() is None


def test_parameters_of_statistics_are_parts_of_the_key(rng):
    given = arrays(rng)
    for see in (
        *([sightline.top_k(2)], [sightline.top_k(3)], [sightline.received()], [sightline.received(how="max")]),
        *([sightline.received().mean(axis)] for axis in ("heads", "batch")),
        *([sightline.mass(condition)] for condition in (j < 3, j < 4, j > 3)),
    ):
        sightline.attention(*given, see=see)
        assert all_bits(sightline.attention(*given, see=see)) == all_bits(uncached(given, see=see))
    x = [np.full_like(array, np.nan) for array in given]  # the bound call leaves scores that are NaN to the dispatch
    for see in ([sightline.top_k(2)], [sightline.received()]):
        expected = all_bits(uncached(x, see=see))
        sightline.attention(*given, see=see)
        assert all_bits(sightline.attention(*x, see=see)) == expected


@pytest.mark.parametrize("see", [[sightline.received()], [sightline.top_k(2)], [sightline.pooled(1, 4)]])
@pytest.mark.parametrize("mask", [None, j > 2])
def test_statistics_of_a_growing_cache(rng, see, mask):
    """A bound decoding call may serve any number of keys, but the weights passes of its statistics serve one."""
    q, k, v = decoding_arrays(rng, 600)
    lengths = (100, 101, 550, 551, 551, 100)
    expected = [all_bits(uncached((q, k[:, :, :m], v[:, :, :m]), see=see, mask=mask)) for m in lengths]
    call_cache.clear()
    for _ in range(2):
        for length, right in zip(lengths, expected, strict=True):
            given = q, k[:, :, :length], v[:, :, :length]
            assert all_bits(sightline.attention(*given, see=see, mask=mask)) == right


def test_hooks_may_change_the_layout_of_saved_tensors(rng):
    """A bound backward call reads the tensors that hooks return, which need not have the strides of the inputs."""
    given = [to_torch(x).transpose(1, 2).requires_grad_() for x in arrays(rng, ((2, 9, 4, 16),) * 3)]
    gradient = to_torch(rng.normal(size=(2, 4, 9, 16)).astype(np.float32))

    def gradients():
        return [bits(x) for x in torch.autograd.grad(sightline.attention(*given), given, gradient)]

    expected = gradients()
    assert gradients() == expected
    make_contiguous = torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
    )
    with make_contiguous:
        assert gradients() == expected
        assert gradients() == expected
    assert gradients() == expected


def test_gradients_are_computed_if_requested(rng):
    q, k, v = tensors(rng)
    sightline.attention(q, k, v, mask=i >= j)
    sightline.attention(q, k, v, mask=i >= j)
    for position in range(3):
        given = [x.clone().requires_grad_(place == position) for place, x in enumerate((q, k, v))]
        output = sightline.attention(*given, mask=i >= j)
        assert output.requires_grad
        output.sum().backward()
        assert given[position].grad is not None
        with torch.no_grad():
            assert not sightline.attention(*given, mask=i >= j).requires_grad
        with torch.inference_mode():
            assert sightline.attention(*given, mask=i >= j).is_inference()


def test_compiled_functions(rng):
    q, k, v = tensors(rng)
    expected = sightline.attention(q, k, v, mask=i >= j)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q, k, v):
        return sightline.attention(q, k, v, mask=i >= j)

    for _ in range(2):
        assert bits(compiled(q, k, v)) == bits(expected)


def test_autocast_is_respected(rng):
    q, k, v = tensors(rng)
    sightline.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert sightline.attention(q, k, v).dtype == torch.bfloat16


def test_negated_views(rng):
    q, k, v = tensors(rng)
    minus = torch.view_as_complex(torch.stack([k, k], -1)).conj().imag
    assert minus.is_neg()
    whole = minus.resolve_neg().contiguous()
    expected = uncached((q, whole, v))
    compute_baseline = torch.view_as_complex(torch.stack([k, k], -1)).imag
    sightline.attention(q, compute_baseline, v)
    assert bits(sightline.attention(q, minus, v)) == bits(expected)


@pytest.mark.filterwarnings(r"ignore:.torch\.jit:DeprecationWarning")  # raised by torch's jvp
def test_transforms_and_modes(rng):
    q, k, v = tensors(rng)
    expected = sightline.attention(q, k, v)
    keys = []

    def note(q):
        keys.append(key_of(q, k, v))
        return q.sum()

    note(q)
    torch.func.grad(note)(q)
    torch.func.vmap(note)(q[None])
    torch.func.jvp(note, (q,), (q,))
    with forward_ad.dual_level():
        note(forward_ad.make_dual(q, k))
    torch.jit.trace(note, q)
    assert [key is None for key in keys[:5]] == [False, True, True, True, True]
    assert keys[5] is None

    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert type(sightline.attention(*fake)) is type(fake[0])

    class Counting(TorchDispatchMode):
        names = []  # noqa: RUF012

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    with Counting():
        assert bits(sightline.attention(q, k, v)) == bits(expected)
    assert any("sightline" in name for name in Counting.names)


def test_tensor_subclasses_are_not_cached(rng):
    class Mine(torch.Tensor):
        pass

    q, k, v = tensors(rng)
    sightline.attention(q, k, v)
    before = len(call_cache.calls)
    for place in range(3):
        given = [x.as_subclass(Mine) if at == place else x for at, x in enumerate((q, k, v))]
        assert key_of(*given) is None
    assert len(call_cache.calls) == before


def test_other_devices(rng):
    q, k, v = tensors(rng)
    sightline.attention(q, k, v)
    assert sightline.attention(*(x.to("meta") for x in (q, k, v))).device.type == "meta"


def test_kernels_of_other_devices_are_not_cached(rng):
    from sightline.cpu.runtime.machine import named_machine
    from sightline.cpu.runtime.processor import Processor

    assert Cpu(Processor(named_machine("sse2"))).run(make_problem(*arrays(rng))).bound_call is None


# -- decoding ----------------------------------------------------------------------------------------------------------


def decoding_arrays(rng, m=700, dtype=np.float32, H=4, G=2):
    return arrays(rng, ((1, H, 1, 64), (1, G, m, 64), (1, G, m, 64)), dtype)


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
    monkeypatch.setattr(prepared_call, "RUNS_BEFORE_RECORD", NEVER)
    found, run = [], BoundDecode.run

    def spy(*given, is_first=False):
        status = run(*given, is_first=is_first)
        if not is_first:
            found.append(status is not None)
        return status

    monkeypatch.setattr(BoundDecode, "run", spy)
    return found


def test_few_keys_do_not_use_the_decoding_kernel(rng, monkeypatch):
    q, k, v = decoding_arrays(rng, 700)
    few = min_decode_keys(q.shape[2]) - 1
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
    mask = j < 600
    expected = bits(uncached((q, k, v), mask=mask))
    spoilt = v.copy()
    spoilt[:, :, 620] = np.nan
    found = decoded(monkeypatch)
    assert np.isfinite(sightline.attention(q, k, spoilt, mask=mask)).all()
    assert bits(sightline.attention(q, k, v, mask=mask)) == expected
    assert found == [False, True]


def test_decoding_from_many_threads_at_once(rng):
    """Each call has its own argument block, splits and flags: ten Python threads all get their own results."""
    q, k, v = decoding_arrays(rng, 1400)
    lengths = [600, 900, 1030, 1400] * 2
    expected = [bits(uncached((q, k[:, :, :m], v[:, :, :m]))) for m in lengths]
    start = threading.Barrier(len(lengths))

    def ask(number):
        length = lengths[number]
        start.wait()
        answers = (
            sightline.attention(q, k[:, :, :length], v[:, :, :length], threads=1 + number % 2) for _ in range(60)
        )
        return all(bits(answer) == expected[number] for answer in answers)

    with ThreadPoolExecutor(len(lengths)) as pool:
        assert all(pool.map(ask, range(len(lengths))))


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
        output = sightline.attention(q, cache, mask=cache.causal())
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
        return {"none": {}, "causal": {"mask": cache.causal()}, "another": {"mask": j >= 2}}[mask]

    for t in range(tokens):
        cache.append(k[:, :, 40 + t : 41 + t], v[:, :, 40 + t : 41 + t])
        if t == 2:
            monkeypatch.setattr("sightline.api.functions.make_problem", None)
        query = q[:, :, t : t + 1]
        output = sightline.attention(query, cache, **options())
        for entry, length in enumerate(cache.lengths):
            x = [array[entry : entry + 1, :, :length] for array in (cache.key, cache.value)]
            problem = make_problem(query[entry : entry + 1], *x, mask=j >= 2 if mask == "another" else None)
            truth, baseline = compute_stages(problem), compute_baseline(problem).output
            terms = term_sizes(problem, truth.weights)
            assert_within_budget(output[entry : entry + 1], truth.output, baseline, terms=terms)


def test_an_older_mask_of_a_cache_is_refused(rng):
    """A mask that `causal` returned before an append would hide the keys appended since. Its call is cached."""
    q, k, v = decoding_arrays(rng)
    cache = sightline.KVCache()
    cache.append(k[:, :, :699], v[:, :, :699])
    cache.append(k[:, :, 699:], v[:, :, 699:])
    old = cache.causal()
    expected = bits(sightline.attention(q, cache, mask=old))
    assert bits(sightline.attention(q, cache, mask=old)) == expected
    cache.append(np.full_like(k[:, :, :1], 9), v[:, :, :1])
    with pytest.raises(FormulaError, match="after every append"):
        sightline.attention(q, cache, mask=old)


# -- gradients and lse -------------------------------------------------------------------------------------------------


def outputs_and_gradients(given, direction, **options):
    """The bytes of the output and of the gradients of three fresh leaves."""
    leaves = [x.clone().requires_grad_() for x in given]
    output = sightline.attention(*leaves, **options)
    return [bits(output), *map(bits, torch.autograd.grad(output, leaves, direction))]


@pytest.mark.parametrize("formula", ["none", "causal, written anew", "both"])
@pytest.mark.parametrize("shape", [(1, 2, 9, 8), (9, 8), (1, 2, 600, 16)], ids=str)
def test_gradients_equal_those_of_the_operator(rng, formula, shape, monkeypatch):
    """The first call with gradients, the cached calls and the operator have equal bits."""
    first, other = ([torch.from_numpy(x) for x in arrays(rng, (shape,) * 3)] for _ in range(2))
    direction, options = torch.ones(shape), FORMULAS[formula]
    outputs_and_gradients(first, direction, **options())
    found = record_hits(monkeypatch)
    prepared = outputs_and_gradients(other, direction, **options())
    assert found or len(shape) < 4  # calls that are reshaped first are not cached
    call_cache.clear()
    assert outputs_and_gradients(other, direction, **options()) == prepared
    monkeypatch.setattr("sightline.api.functions.describe", lambda *given: None)
    assert outputs_and_gradients(other, direction, **options()) == prepared


@pytest.mark.parametrize("spread", ["heads", "queries", "columns", "a sum"])
def test_gradients_of_outputs_whose_gradient_is_expanded(rng, spread):
    """The gradient of a sum is a view whose stride is 0."""
    q, k, v = tensors(rng, requires_grad=True)
    weights = torch.from_numpy(rng.normal(size=q.shape).astype(np.float32))

    def differentiate():
        output = sightline.attention(q, k, v)
        if spread == "a sum":
            return torch.autograd.grad(output.sum(1).square().sum(), (q, k, v))
        axis = {"heads": 1, "queries": 2, "columns": 3}[spread]
        return torch.autograd.grad(output, (q, k, v), weights.narrow(axis, 0, 1).expand_as(output))

    def bits_of(gradients):
        return [bits(x) for x in gradients]

    expected = bits_of(differentiate())
    assert [bits_of(differentiate()) for _ in range(6)] == [expected] * 6
    call_cache.clear()
    for _ in range(5):  # other gradients are bound first
        torch.autograd.grad(sightline.attention(q, k, v), (q, k, v), weights)
    assert [bits_of(differentiate()) for _ in range(4)] == [expected] * 4


@pytest.mark.parametrize("kind", ["boolean array", "bias", "padding", "a learned bias"])
def test_tables_changed_before_the_backward_pass_are_an_error(rng, kind):
    q, k, v = tensors(rng, requires_grad=True)
    array = {
        "boolean array": torch.from_numpy(rng.random((1, 1, 9, 9)) < 0.7),
        "padding": torch.tensor([5]),
    }.get(kind, torch.from_numpy(rng.normal(size=(1, 2, 9, 9)).astype(np.float32)))
    array.requires_grad_(kind == "a learned bias")
    name = "mask" if kind in ("boolean array", "padding") else "score"
    formula = {"boolean array": lambda x: x, "padding": sightline.padding}.get(kind, sightline.bias)
    for _ in range(5):
        sightline.attention(q, k, v, **{name: formula(array)}).sum().backward()
        output = sightline.attention(q, k, v, **{name: formula(array)}).sum()
        with torch.no_grad():
            array[(-1,) * array.ndim] = 1
        with pytest.raises(RuntimeError, match=r"in place|inplace"):
            output.backward()


LEARNED = {  # options of a call whose tables, sinks or scale are learned, by what is learned
    "bias": lambda x: {"score": sightline.bias(x["bias"])},
    "an array of biases": lambda x: {"score": s + table(x["bias"])[0, h, i, j], "mask": i >= j},
    "slopes": lambda x: {"score": sightline.alibi(x["slopes"]), "mask": sightline.padding(x["lengths"])},
    "relative positions": lambda x: {"score": s + table(x["relative"])[h, i - j + 20]},
    "sinks": lambda x: {"sinks": x["sinks"]},
    "scale": lambda x: {"scale": x["scale"], "mask": i >= j},
    "everything": lambda x: {
        "score": s + table(x["relative"])[h, i - j + 20] + table(x["slopes"])[h] * i,
        **{name: x[name] for name in ("sinks", "scale")},
        "dropout": 0.2,
        "seed": 7,
    },
    "fixed sinks": lambda x: {"sinks": x["sinks"].detach()},
}


def draw_learned(rng, dtype):
    def draw(*shape):
        return torch.nn.Parameter(to_torch(rng.normal(size=shape).astype(dtype)))

    learned = {"bias": draw(1, 4, 20, 20), "slopes": draw(4), "relative": draw(4, 41), "sinks": draw(4)}
    return learned | {
        "scale": draw(1)[0].detach().requires_grad_(),
        "lengths": torch.from_numpy(rng.integers(1, 21, 2)),
    }


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize(
    "fixed", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["operands need gradients too", "fixed operands"]
)
def test_learned_tables_sinks_and_scales(rng, name, dtype, fixed, monkeypatch):
    """Other contents at each step; the oracle is the full dispatch."""
    if fixed and name == "fixed sinks":
        pytest.skip("nothing is learned")

    def differentiate(operands, learned):
        options = LEARNED[name](learned)
        wanted = [x for x in (*operands, *learned.values()) if x.requires_grad]
        output = sightline.attention(*operands, **options)
        gradients = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
        return [bits(output), *[None if x is None else bits(x) for x in gradients]]

    def draw():
        operands = [to_torch(x).requires_grad_(not fixed) for x in arrays(rng, ((2, 4, 20, 8),) * 3, dtype)]
        return operands, draw_learned(rng, dtype)

    steps = [draw() for _ in range(4)]
    expected = []
    for step in steps:
        call_cache.clear()
        expected.append(differentiate(*step))
    call_cache.clear()
    for step in [draw(), draw()]:
        differentiate(*step)
    monkeypatch.setattr("sightline.api.functions.make_problem", None)
    monkeypatch.setattr("sightline.torch.graph_attacher.make_problem", None)
    monkeypatch.setattr("sightline.torch.dispatch.parse", None)
    assert [differentiate(*step) for step in steps] == expected


def test_saved_tables_that_hooks_replace(rng):
    """The backward pass reads the tables that the hooks return, and not the memory of the first ones."""
    operands, learned = [to_torch(x) for x in arrays(rng, ((2, 4, 20, 8),) * 3)], draw_learned(rng, np.float32)

    def differentiate(bias):
        return torch.autograd.grad(sightline.attention(*operands, score=sightline.bias(bias)).square().sum(), bias)[0]

    expected = [differentiate(learned["bias"]) for _ in range(3)]

    def pack(x):
        return x.detach().clone()

    def unpack(x):
        return x.swapaxes(0, -1).contiguous().swapaxes(0, -1)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = sightline.attention(*operands, score=sightline.bias(learned["bias"])).square().sum()
    with torch.no_grad():
        saved = learned["bias"].clone()
        learned["bias"].mul_(0)
    found = torch.autograd.grad(output, learned["bias"])[0]
    torch.testing.assert_close(found, expected[-1])
    with torch.no_grad():
        learned["bias"].copy_(saved)
    assert bits(differentiate(learned["bias"])) == bits(expected[0])


def test_gradients_of_gradients_of_learned_tables(rng):
    operands, learned = (
        [to_torch(x) for x in arrays(rng, ((1, 2, 4, 3),) * 3, np.float64)],
        draw_learned(rng, np.float64),
    )

    def attend(slopes, sinks, scale):
        score = s + table(slopes)[h] * (i - j)
        return sightline.attention(*operands, score=score, sinks=sinks, scale=scale)

    given = [learned[name][:2].detach().requires_grad_() for name in ("slopes", "sinks")]
    given.append(learned["scale"])
    for _ in range(3):
        assert torch.autograd.gradcheck(attend, given)
        assert torch.autograd.gradgradcheck(attend, given)


def test_recomputed_gradients(rng):
    given, direction = tensors(rng), torch.ones(1, 2, 9, 8)
    expected = outputs_and_gradients(given, direction)
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in given]
        output = torch.utils.checkpoint.checkpoint(sightline.attention, *leaves, use_reentrant=False)
        assert [bits(output), *map(bits, torch.autograd.grad(output, leaves, direction))] == expected


def test_gradients_of_gradients_of_prepared_calls(rng):
    given = [torch.from_numpy(x).requires_grad_() for x in arrays(rng, ((1, 1, 3, 2),) * 3, np.float64)]
    sightline.attention(*given)
    assert torch.autograd.gradgradcheck(sightline.attention, given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 8), (1, 2, 9, 8)], ids=str)
@pytest.mark.parametrize("convert", [np.asarray, to_torch])
def test_lse_is_cached_too(rng, dtype, shape, convert, monkeypatch):
    first, other = ([convert(x) for x in arrays(rng, (shape,) * 3, dtype)] for _ in range(2))
    output, (expected,) = uncached(other, see=[sightline.lse()])
    uncached(first, see=[sightline.lse()])
    sightline.attention(*first)  # a different call, without lse
    found = record_hits(monkeypatch)
    again_output, (found_lse,) = sightline.attention(*other, see=[sightline.lse()])
    assert found
    assert bits(again_output) == bits(output)
    assert (found_lse.dtype, found_lse.shape, bits(found_lse)) == (expected.dtype, expected.shape, bits(expected))
    sightline.attention(*first, see=[sightline.lse()])
    assert bits(found_lse) == bits(expected)  # results do not share memory


def test_gradients_of_lse_equal_those_of_the_operator(rng):
    given = tensors(rng)
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in given]
        _, (lse,) = sightline.attention(*leaves, see=[sightline.lse()])
        assert torch.autograd.grad(lse.sum(), leaves[1])[0].abs().sum() > 0
