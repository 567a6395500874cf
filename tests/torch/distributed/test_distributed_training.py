"""Gradients equal finite differences, training on ranks equals training on one process, and transfers are counted."""

import pytest

from distributed_checks import count_bytes, finite_differences, train


@pytest.mark.parametrize(("layout", "method"), [("contiguous", "ring"), ("zigzag", "ring"), ("zigzag", "heads")])
def test_gradients_equal_finite_differences(ranks, layout, method):
    assert ranks.run(finite_differences, layout, method, size=2) == [True, True]


@pytest.mark.soak
@pytest.mark.parametrize(("wrap", "steps"), [("DistributedDataParallel", 200), ("fully_shard", 5), ("compile", 3)])
def test_training_reaches_the_loss_of_one_process(ranks, wrap, steps):
    for alone, together in ranks.run(train, steps, wrap, size=2):
        assert together == pytest.approx(alone, rel=1e-3)
        assert steps < 100 or together[-1] < together[0] / 2


def test_a_window_sends_fewer_bytes(ranks):
    every = ranks.run(count_bytes, None, size=4)
    window = ranks.run(count_bytes, 64, size=4)
    row_bytes = 2 * 2 * 8 * 4  # keys and values of 2 heads with 8 numbers of 4 bytes
    assert every == [3 * 256 * row_bytes] * 4
    assert window == [64 * row_bytes] * 3 + [0]
