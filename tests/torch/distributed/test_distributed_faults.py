"""Planted faults: each fault, written into the source that the ranks run, must make the checks fail."""

import numpy as np
import pytest

import sightline
from distributed_calls import Distributed, Division
from distributed_checks import FAULTS, with_fault
from sightline import i, j
from strategies import Case


class Faulty:
    """Ranks that run every function with a fault."""

    def __init__(self, ranks, fault):
        self.ranks, self.fault = ranks, fault

    def run(self, function, *arguments, size):
        return self.ranks.run(with_fault, self.fault, function, *arguments, size=size)


def check(ranks):
    rng = np.random.default_rng(2)
    arrays = [rng.normal(size=(1, 2, 150, width)).astype(np.float32) for width in (8, 8, 4)]
    see = [sightline.entropy(), sightline.mass(i - j < 9), sightline.max_score(), sightline.top_k(2)]
    Distributed(ranks, Division(3, block_length=32)).check(Case(*arrays, {"mask": i >= j}), see)


def test_sound_ranks_pass(ranks):
    check(ranks)


QUICK = ("offset of keys", "tile skipped")  # the soak tests plant the others


@pytest.mark.parametrize(
    "fault", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in FAULTS]
)
def test_every_fault_is_seen(ranks, fault):
    with pytest.raises(AssertionError, match=r"budget|twice"):
        check(Faulty(ranks, fault))
