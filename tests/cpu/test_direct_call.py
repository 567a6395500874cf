"""Direct calls: whole repeated calls in generated code, beside the same calls in Python."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from sample_calls import KINDS, all_bits, arrays, bits, draw_inputs
from sightline import h, i, j, s, table
from sightline.call import call_cache
from sightline.call.call_cache import LOOKUP
from sightline.cpu.calls.launch_record import FIRST_NUMBER
from sightline.cpu.calls.python_functions import launcher
from sightline.cpu.launch.bound_call import PreparedCall
from sightline.cpu.launch.launch_record import IS_BUSY, LaunchRecord
from sightline.cpu.runtime.processor import HOST
from sightline.errors import ParameterError
from sightline.reference.testing import with_guards
from strategies import to_torch

PYTHON_KINDS = ("dropout", "sinks", "everything")  # dropout and sinks need words that Python computes
CONVERTED_KINDS = ("padding of another dtype", "table of floats in half")  # the kernel reads a copy of the table
FIRST_DIRECT = 3  # the index of the first repetition that is direct
DIRECT_KINDS = [kind for kind in KINDS if kind not in (*PYTHON_KINDS, *CONVERTED_KINDS)]


@pytest.fixture(autouse=True)
def clear_cache():
    call_cache.clear()


class Spy:
    """Counts the direct calls in a `with` block."""

    def __enter__(self):
        self.count, self.function = 0, LOOKUP.find_or_run
        LOOKUP.find_or_run = self
        return self

    def __call__(self, *given):
        found = self.function(*given)
        self.count += found[1] is not None if type(found) is tuple else found is not None
        return found

    def __exit__(self, *_):
        LOOKUP.find_or_run = self.function


def make_direct(given, draw):
    """Repeat a call with other contents until it is direct."""
    for _ in range(FIRST_DIRECT):
        sightline.attention(*given, **draw())


def expect(calls):
    """The bits of every call through the full dispatch."""
    found = []
    for operands, options in calls:
        call_cache.clear()
        found.append(all_bits(sightline.attention(*operands, **options)))
    call_cache.clear()
    return found


@settings(max_examples=12)
@given(st.sampled_from(KINDS), st.sampled_from([np.float32, np.float64]), st.booleans(), st.integers(0, 999))
def test_equal_bits_with_other_contents(kind, dtype, in_torch, seed):
    """Tables, numbers and seeds are other ones at each call. The oracle is the full dispatch."""
    rng = np.random.default_rng(seed)
    B, H, n, m = 2, 3, int(rng.choice([1, 2, 9, 40, 140])), int(rng.integers(2, 150))
    convert = to_torch if in_torch else np.asarray

    def draw():
        return [convert(x) for x in arrays(rng, ((B, H, n, 8), (B, H, m, 8), (B, H, m, 8)), dtype)]

    def options():
        return draw_inputs(rng, kind, B, H, n, m, convert)

    calls = [(draw(), options()) for _ in range(7)]
    expected = expect(calls)
    found = [all_bits(sightline.attention(*given, **drawn)) for given, drawn in calls[:FIRST_DIRECT]]
    with Spy() as direct, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sightline.api.functions.parse", None)  # of the full dispatch
        found += [all_bits(sightline.attention(*given, **drawn)) for given, drawn in calls[FIRST_DIRECT:]]
    assert found == expected
    assert direct.count == (len(calls) - FIRST_DIRECT if kind in DIRECT_KINDS else 0)


@pytest.mark.parametrize("options", [{}, {"mask": i >= j}, {"see": []}, {"see": [sightline.entropy()]}], ids=str)
def test_gradients_and_outputs_in_a_graph(rng, options):
    given = [to_torch(x).requires_grad_() for x in arrays(rng)]

    def differentiate():
        answer = sightline.attention(*given, **options)
        assert (type(answer) is tuple) == ("see" in options)
        output, seen = answer if "see" in options else (answer, ())
        assert len(seen) == len(options.get("see", ()))
        return [bits(output), *[bits(x) for x in torch.autograd.grad(output.square().sum(), given)]]

    expected = differentiate()
    make_direct(given, lambda: options)
    with Spy() as direct:
        assert differentiate() == expected
    assert direct.count == 1


def test_other_seeds_after_seed_0(rng):
    """The seed is no part of the key, so no record may have one."""
    given = [to_torch(x).requires_grad_() for x in arrays(rng)]

    def differentiate(seed):
        output = sightline.attention(*given, dropout=0.4, seed=seed, threads=1)
        return [bits(x) for x in torch.autograd.grad(output.square().sum(), given)]

    expected = []
    for seed in (0, 5):
        call_cache.clear()
        expected.append(differentiate(seed))
    call_cache.clear()
    assert [differentiate(seed) for seed in (0, 0, 0, 0, 5, 5)] == [*[expected[0]] * 4, *[expected[1]] * 2]


def test_growing_caches_and_layers(rng):
    """Each step has another number of keys, and each of several layers makes the same call."""
    q, k, v = arrays(rng, ((1, 2, 1, 16), (1, 2, 40, 16), (1, 2, 40, 16)))
    lengths = range(20, 40)
    expected = expect([((q, k[:, :, :m], v[:, :, :m]), {}) for m in lengths])
    with Spy() as direct:
        for m, right in zip(lengths, expected, strict=True):
            for _ in range(4):
                assert all_bits(sightline.attention(q, k[:, :, :m], v[:, :, :m])) == right
    assert direct.count >= 2 * len(lengths)  # the second of the layers runs in Python


def test_a_busy_record_is_left_to_its_user(rng):
    given = arrays(rng)
    (expected,) = expect([(given, {})])
    make_direct(given, dict)
    (call,) = call_cache.calls.values()
    record = call.prepared.records[0].array
    record[IS_BUSY] = 1
    with Spy() as direct:
        assert all_bits(sightline.attention(*given)) == expected
        assert (direct.count, record[IS_BUSY], len(call.prepared.records)) == (0, 1, 2)
        described = call.prepared.describe(call.prepared.records[0])
        assert launcher()(described, None, (), (), (), ()) is None
        record[IS_BUSY] = 0
        assert all_bits(sightline.attention(*given)) == expected
        assert (direct.count, record[IS_BUSY]) == (1, 0)
    with pytest.raises(OverflowError):
        launcher()(described, None, (2**70,), (), (), ())
    assert record[IS_BUSY] == 0


LONG = (1, 1, 8, 8), (1, 1, 4096, 8), (1, 1, 4096, 8)


def blocks(step):
    """A mask with another number of tile ranges. With AVX2 the queries are two items, and a direct call one thread."""
    return {"mask": table((np.arange(4096) // 64 % step == 0).astype(np.int64))[j] > 0, "threads": 1}


def test_more_tile_ranges_than_the_record_has_memory_for(rng):
    given = arrays(rng, LONG)
    expected = expect([(given, blocks(2))])
    make_direct(given, lambda: blocks(64))
    with Spy() as direct:
        found = [all_bits(sightline.attention(*given, **blocks(2))) for _ in range(4)]
    assert found == expected * 4
    assert direct.count == 3  # Python gives the first of these calls a new record
    (call,) = call_cache.calls.values()
    assert len(call.prepared.records) == 1


def test_two_threads_need_records_at_once(rng, monkeypatch):
    """Both make a record. Then both find that it has too little memory for the tile ranges, and make another one."""
    given, meeting, start = arrays(rng, LONG), threading.Barrier(2, timeout=20), LaunchRecord.use_new_buffer
    expected = expect([(given, blocks(step)) for step in (64, 2)])
    sightline.attention(*given, **blocks(64))
    (call,) = call_cache.calls.values()
    monkeypatch.setattr(LaunchRecord, "use_new_buffer", lambda self: (meeting.wait(), start(self)))
    records = []
    with ThreadPoolExecutor(2) as pool:
        for step, right in zip((64, 2), expected, strict=True):
            answers = pool.map(lambda step: sightline.attention(*given, **blocks(step)), [step] * 2)
            assert list(map(all_bits, answers)) == [right] * 2
            records.append(set(call.prepared.records))
    assert list(map(len, records)) == [2, 2]
    assert records[0].isdisjoint(records[1])


ERRORS = {
    KeyboardInterrupt: lambda patch: patch.setattr(HOST, "call", Mock(side_effect=KeyboardInterrupt), raising=False),
    ParameterError: lambda patch: patch.setenv("SIGHTLINE_THREADS", "none"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_record_serves_calls_after_an_error_of_its_team(rng, error, monkeypatch):
    """The record then has a new buffer: after an interrupt, threads may still run the kernel on the old one."""
    given = arrays(rng, ((1, 8, 128, 64),) * 3)
    (expected,) = expect([(given, {})])
    make_direct(given, dict)
    (call,) = call_cache.calls.values()
    (record,) = call.prepared.records
    buffer = record.buffer
    with monkeypatch.context() as patch:
        ERRORS[error](patch)
        with pytest.raises(error):
            sightline.attention(*given)
    assert (record.array[IS_BUSY], record.buffer is buffer) == (0, False)
    with Spy() as direct:
        assert all_bits(sightline.attention(*given)) == expected
    assert (direct.count, call.prepared.records) == (1, [record])


def test_an_entry_without_a_prepared_call(rng):
    given = arrays(rng)
    make_direct(given, dict)
    layouts, *addresses = LOOKUP.read_arrays(*given)
    entry = SimpleNamespace(prepared=None)
    assert LOOKUP.find_or_run({(layouts, ()): entry}, (), (), *given) == (entry, None, layouts, *addresses)
    with pytest.raises(AttributeError, match="prepared"):
        LOOKUP.find_or_run({(layouts, ()): object()}, (), (), *given)


def test_hidden_values_that_are_not_finite(rng):
    """The kernel sets its flag, and Python runs the call."""
    q, k, v = arrays(rng, ((1, 2, 1, 16), (1, 1, 40, 16), (1, 1, 40, 16)))
    spoilt = v.copy()
    spoilt[:, :, 30:] = np.nan
    mask = (j < 30) | (h == 1)  # a key that no query row sees would not be read
    expected = expect([((q, k, spoilt), {"mask": mask}), ((q, k, v), {"mask": mask})])
    make_direct((q, k, v), lambda: {"mask": mask})
    with Spy() as direct:
        assert all_bits(sightline.attention(q, k, spoilt, mask=mask)) == expected[0]
        assert direct.count == 0
        assert all_bits(sightline.attention(q, k, v, mask=mask)) == expected[1]
        assert direct.count == 1


def test_a_failed_allocation_is_an_error(rng):
    def fail():
        raise MemoryError("no memory")

    given = arrays(rng)
    for see in (None, [sightline.entropy()]):
        call_cache.clear()
        make_direct(given, lambda see=see: {"see": see})
        (call,) = call_cache.calls.values()
        right, makers = call.prepared.direct, call.prepared.makers
        for place in range(len(makers)):
            call.prepared.direct = right._replace(makers=(*makers[:place], fail, *makers[place + 1 :]))
            with pytest.raises(MemoryError, match="no memory"):
                sightline.attention(*given, see=see)
            call.prepared.direct = right
            assert call.prepared.records[0].array[IS_BUSY] == 0
            with Spy() as direct:
                sightline.attention(*given, see=see)
            assert direct.count == 1


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("convert", [np.asarray, to_torch])
def test_references_are_balanced(rng, convert):
    given, see = [convert(x) for x in arrays(rng)], [sightline.entropy(), sightline.lse()]
    mask = i - j < 3
    for options in ({}, {"mask": mask}, {"see": see}):
        make_direct(given, lambda options=options: options)
    calls = list(call_cache.calls.values())
    objects = [
        *given,
        *calls,
        None,
        float,
        mask,
        *[x for call in calls for x in (call.prepared.direct, *call.prepared.makers)],
    ]

    def count():
        gc.collect()
        return [sys.getrefcount(x) for x in objects]

    before = count()
    for _ in range(1000):
        sightline.attention(*given)
        sightline.attention(*given, mask=mask)
        sightline.attention(*given, see=see)
    assert all(abs(x - y) < 100 for x, y in zip(count(), before, strict=True))


def test_no_byte_outside_is_read_or_written(rng):
    q, k, v = arrays(rng, ((1, 2, 9, 8),) * 3)
    make_direct((q, k, v), lambda: {"mask": i >= j})
    (k, k_unharmed), (v, v_unharmed) = with_guards(k), with_guards(v)
    with Spy() as direct:
        sightline.attention(q, k, v, mask=i >= j)
    assert direct.count == 1
    k_unharmed()
    v_unharmed()


WRONG_SOURCES = {  # the source of a word, and the wrong source: arguments are query, key, value and two tables
    "the keys as values": (2, 1),
    "the first table as the second": (4, 3),
    "the first number as the second": (FIRST_NUMBER + 1, FIRST_NUMBER),
}


@pytest.mark.parametrize("fault", WRONG_SOURCES)
def test_a_wrong_source_is_found(rng, fault, monkeypatch):
    """Planted fault: generated code writes another address or number."""
    given, find, (right, wrong) = arrays(rng), PreparedCall.find_sources, WRONG_SOURCES[fault]
    slopes, bias = rng.normal(size=(2, 9))
    options = {"score": s * 1.5 + 0.25 * table(slopes)[j] - table(bias)[j]}
    (expected,) = expect([(given, options)])
    monkeypatch.setattr(
        PreparedCall, "find_sources", lambda self: [wrong if source == right else source for source in find(self)]
    )
    make_direct(given, lambda: options)
    assert all_bits(sightline.attention(*given, **options)) != expected
