"""Dropout by counter: known answers of Philox, the same weights dropped everywhere, the right share of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sightline
from sightline import weights
from sightline.dropout import philox
from sightline.problem import pose
from sightline.reference import stages_of
from sightline.streaming import Streaming, Work, forward


def words(*counter):
    return tuple(np.array([word], np.int64) for word in counter)


@pytest.mark.parametrize(
    ("seed", "counter", "expected"),
    [  # the known-answer vectors that come with Random123, the authors' own library
        (0, (0, 0, 0, 0), 0x6627E8D5),
        (0xFFFFFFFFFFFFFFFF, (0xFFFFFFFF,) * 4, 0x408F276D),
        (0x299F31D0_A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0xD16CFE09),
    ],
)
def test_known_answers(seed, counter, expected):
    assert int(philox(seed, words(*counter))[0]) == expected


def by_integers(seed, counter):
    """Philox 4x32-10 with Python's whole numbers, straight from the paper's section 3.3."""
    key, x = [seed & 0xFFFFFFFF, seed >> 32], list(counter)
    for _ in range(10):
        first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [second >> 32 ^ x[1] ^ key[0], second & 0xFFFFFFFF, first >> 32 ^ x[3] ^ key[1], first & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x[0]


@given(st.integers(0, 2**64 - 1), st.tuples(*[st.integers(0, 2**32 - 1)] * 4))
def test_words_of_64_bits_never_overflow(seed, counter):
    assert int(philox(seed, words(*counter))[0]) == by_integers(seed, counter)


def question(seed, dropout=0.3, n=150):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 3, n, 4)) for _ in range(2))
    return pose(q, k, np.broadcast_to(np.eye(n), (2, 3, n, n)), dropout=dropout, seed=seed, see=[weights()])


def test_tiles_drop_what_the_definition_drops(monkeypatch):
    """With V the identity the output is the dropped weights themselves."""
    problem = question(7)
    truth = stages_of(problem).output
    work = Work(problem)
    monkeypatch.setattr("sightline.streaming.TILE_ELEMENTS", 1 << 12)
    monkeypatch.setattr("sightline.streaming.KEY_BLOCK", 32)
    output, _ = forward(work)
    np.testing.assert_array_equal(output == 0, truth == 0)
    assert 0.29 < (output == 0).mean() < 0.31


def test_seeds_differ_and_repeat():
    outputs = [Streaming().run(question(seed)).output for seed in (1, 1, 2)]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert ((outputs[0] == 0) != (outputs[2] == 0)).mean() > 0.3


def test_weights_seen_are_those_before_dropout():
    result = Streaming().run(question(3))
    assert ((result.output == 0) & (result.seen[0] > 0)).any()
    np.testing.assert_array_equal(result.seen[0] > 0, np.ones_like(result.seen[0], bool))


def test_everything_dropped_gives_nothing():
    x = np.ones((1, 1, 3, 2))
    np.testing.assert_array_equal(sightline.attention(x, x, x, dropout=1.0, seed=0), np.zeros_like(x))
