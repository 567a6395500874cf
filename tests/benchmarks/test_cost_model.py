"""The cost of attention over several ranks, predicted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cost_model import Hardware, count_pairs, predict, predict_problem
from fault_planting import Fault, plant
from sharded_problems import received_keys
from sightline import causal, window
from sightline.call.problem import make_problem
from sightline.errors import ParameterError
from sightline.partition import needed_keys
from sightline.partition.shards import divide
from strategies import masks

FAST = Hardware(flops=1e9, bandwidth=1e30, latency=0)  # transfers take no time


def whole(n):
    """Return a problem of 8 heads on 4, with n queries and keys."""
    return make_problem(*(np.zeros((2, heads, n, d), np.float16) for heads, d in ((8, 32), (4, 32), (4, 16))))


def work_of(mask, n, ranks, layout="contiguous", block_length=None):
    """Return (schedule, number of pairs of each rank, problem). The problem gives the sizes of arrays."""
    shards, extent = divide(n, ranks, layout), (2, 8, n, n)
    found = needed_keys.find_schedule(mask, extent, shards, shards, block_length or n)
    return found, count_pairs(found, mask, extent), whole(1)


def test_one_rank_computes_everything_and_sends_nothing():
    prediction = predict(*work_of(causal(), 512, 1), Hardware(flops=1e9))
    for each in (prediction.forward, prediction.backward):
        assert each.sent.tolist() == each.received.tolist() == [0]
        assert each.time == each.ideal == each.flops.sum() / 1e9
    assert prediction.efficiency == prediction.imbalance == 1


def test_operations_and_bytes_are_those_of_the_pairs_keys_and_gradients():
    prediction = predict(*work_of(None, 512, 4))
    pairs = 2 * 8 * 128 * 512
    assert prediction.forward.flops.tolist() == [pairs * 2 * (32 + 16)] * 4
    assert prediction.backward.flops.tolist() == [pairs * 2 * (3 * 32 + 2 * 16)] * 4
    numbers = 2 * 4 * 384 * (32 + 16)  # of the keys and values of three other ranks
    assert prediction.forward.received.tolist() == prediction.forward.sent.tolist() == [numbers * 2] * 4
    assert prediction.backward.received.tolist() == prediction.backward.sent.tolist() == [numbers * (2 + 4)] * 4


def test_bytes_follow_the_schedule():
    work = work_of(causal() & window(100), 1024, 8)
    prediction = predict(*work)
    keys, width = received_keys(work[0]), 2 * 4 * (32 + 16)
    np.testing.assert_array_equal(prediction.forward.received, keys.sum(axis=1) * width * 2)
    np.testing.assert_array_equal(prediction.forward.sent, keys.sum(axis=0) * width * 2)
    expected = (2 * keys.sum(axis=1) + 4 * keys.sum(axis=0)) * width
    np.testing.assert_array_equal(prediction.backward.received, expected)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bounds_that_every_prediction_obeys(data):
    """What is sent is received; no rank is faster than its own work; no transfer makes the ranks faster."""
    n, ranks = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 9))
    mask = data.draw(masks((2, 8, n, n)))
    work = work_of(mask, n, ranks, data.draw(st.sampled_from(["contiguous", "zigzag"])), 64)
    slow, fast = (predict(*work, Hardware(1e9, rate, 1e-6)) for rate in (1e6, 1e12))
    for late, early in ((slow.forward, fast.forward), (slow.backward, fast.backward)):
        assert late.sent.sum() == late.received.sum()
        assert (late.seconds >= early.seconds).all()
        assert (early.seconds >= early.flops / 1e9 * (1 - 2**-40)).all()  # the sum of the rounds is rounded
        assert late.time <= early.flops.sum() / 1e9 + ranks * 64 * (1e-6 + late.sent.sum() / 1e6)
        assert 0 <= early.ideal <= early.time * (1 + 2**-40)
    assert fast.imbalance >= 1 - 2**-40


def test_the_slower_of_computation_and_transfer_decides_a_round():
    """Two ranks: both compute their own block while the other's block travels, and then compute the other's block."""
    work = work_of(None, 256, 2)
    compute = 2 * 8 * 128 * 128 * 2 * (32 + 16) / 1e9
    amount = 2 * 4 * 128 * (32 + 16) * 2
    for seconds in (0.1 * compute, 10 * compute):
        forward = predict(*work, Hardware(1e9, amount / seconds, 0.0)).forward
        np.testing.assert_allclose(forward.seconds, max(compute, seconds) + compute, rtol=1e-12)


def test_imbalance_is_lost_time():
    for layout in ("contiguous", "zigzag"):
        prediction = predict(*work_of(causal(), 4096, 4, layout), FAST)
        assert prediction.forward.ideal / prediction.forward.time <= 1 / prediction.imbalance * (1 + 2**-40)
    contiguous, zigzag = (predict(*work_of(causal(), 4096, 4, x), FAST) for x in ("contiguous", "zigzag"))
    assert contiguous.imbalance > 1.7 > 1.05 > zigzag.imbalance
    assert zigzag.efficiency > 1.5 * contiguous.efficiency


def test_partial_tiles_of_long_sequences_count_in_part():
    """Tiles of the count are as long as this window; about half of each partial one has no tile of a kernel."""
    n, width = 1 << 22, 2048
    assert 0.95 < work_of(causal() & window(width), n, 4)[1].sum() / (2 * 8 * n * width) < 1.1


def test_small_blocks_keep_the_ranks_of_a_zigzag_in_step(monkeypatch):
    """Blocks from both ends of the sequence are sent in turn: several of one end would make half of the ranks wait."""
    n = 16_384

    def efficiency():
        needed_keys._find_cached.cache_clear()
        return predict(*work_of(causal(), n, 8, "zigzag", 128), FAST).efficiency

    in_turn = efficiency()
    plant(Fault(needed_keys._cut, "zip_longest(*cut)", "cut"), monkeypatch)
    apart = efficiency()
    needed_keys._find_cached.cache_clear()
    assert apart < 0.8 < 0.98 < in_turn


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, "4"])
def test_a_wrong_number_of_ranks_is_refused(ranks):
    with pytest.raises(ParameterError, match="ranks="):
        predict_problem(whole(64), ranks, "contiguous")


def test_an_unknown_layout_is_refused():
    with pytest.raises(ParameterError, match="zigzag"):
        predict_problem(whole(64), 2, "striped")


@pytest.mark.parametrize("ranks", [1, 7, 100])
def test_an_empty_sequence_costs_nothing(ranks):
    prediction = predict_problem(whole(0), ranks, "zigzag")
    assert prediction.forward.time == prediction.backward.time == 0
    assert prediction.efficiency == 1
