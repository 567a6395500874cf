"""The buffers of cached calls: calls from many threads, buffers in use, and buffers that grow or must be cleared."""

import ctypes
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import sightline
from cached_calls import uncached
from sample_calls import KINDS, all_bits, arrays, bits, decoding_arrays, draw_inputs
from sightline import i, j
from sightline.call import call_cache
from sightline.cpu.calls.launcher import RecordCode
from sightline.cpu.calls.python_functions import launcher


def ask_at_once(questions, calls):
    """Ask from one thread for each question, and compare every answer with the first answer of a single thread.

    A question is a list of (arrays, options), which the thread asks in turn.
    """
    expected = [[all_bits(uncached(given[0], **given[1])) for given in each] for each in questions]
    start = threading.Barrier(len(questions))

    def ask(each, right):
        start.wait()
        turns = (k % len(each) for k in range(calls))
        return all(all_bits(sightline.attention(*each[k][0], **each[k][1])) == right[k] for k in turns)

    with ThreadPoolExecutor(len(questions)) as pool:
        assert all(pool.map(ask, questions, expected))


def test_two_layouts_from_ten_threads(rng):
    """Each call has its own argument block, so that every thread gets its own results."""
    shapes = [((1, 4, 33, 16),) * 3, ((3, 4, 33, 16),) * 3] * 5
    ask_at_once([[(arrays(rng, shape), {"mask": i >= j})] for shape in shapes], 200)


def ask_structures(rng, calls):
    """Ask eight structures from eight threads at once."""
    given = arrays(rng, ((2, 3, 40, 8),) * 3)
    ask_at_once([[(given, draw_inputs(rng, kind, 2, 3, 40, 40)) for _ in range(3)] for kind in KINDS[:8]], calls)


def test_eight_structures_from_eight_threads(rng):
    ask_structures(rng, 30)


def test_one_structure_from_eight_threads(rng):
    """The threads compete for the buffer of one bound call; those that do not get it use another."""
    options = [{"mask": sightline.padding(rng.integers(1, 10, 1)), "see": [sightline.top_k(2)]} for _ in range(8)]
    ask_at_once([[(arrays(rng), more)] for more in options], 200)


@pytest.mark.soak
def test_ten_thousand_calls_from_eight_threads_keep_the_memory_flat(rng):
    ask_structures(rng, 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ask_structures(rng, 1250)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


def test_decoding_from_many_threads_at_once(rng):
    """Each call has its own argument block, splits and flags."""
    q, k, v = decoding_arrays(rng, 1400)
    given = [((q, k[:, :, :m], v[:, :, :m]), {"threads": 1 + t % 2}) for t, m in enumerate([600, 900, 1030, 1400] * 2)]
    ask_at_once([[one] for one in given], 60)


def test_a_workspace_that_is_not_cleared_is_found(rng, monkeypatch, fresh_kernels):
    """Planted fault: the kernel of the second launch finds the counter of the first, and computes nothing."""
    given, options = arrays(rng), {"sinks": np.zeros(2, np.float32)}  # with sinks, `launch` runs each repetition
    expected = bits(sightline.attention(*given, **options))
    monkeypatch.setattr(RecordCode, "clear_workspace", lambda self: None)
    launcher.cache_clear()
    try:
        answers = [sightline.attention(*given, **options) for _ in range(3)]
        for answer in answers:
            answer[:] = np.where(np.isfinite(answer), answer, 0)
        assert any(bits(answer) != expected for answer in answers)
    finally:
        launcher.cache_clear()


def test_a_stale_argument_block_is_found(rng):
    """A cached call that does not reset the counter computes nothing, which the comparison of bits must find."""
    given = arrays(rng)
    expected = uncached(given)
    output = sightline.attention(*given)
    assert bits(output) == bits(expected)
    buffer = next(iter(call_cache.calls.values())).prepared.records[0].buffer
    assert buffer.word("counter") != 0
    output[...] = np.nan
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(next(iter(call_cache.calls.values())).prepared.call.kernel)(buffer.address)
    assert np.isnan(output).all()
