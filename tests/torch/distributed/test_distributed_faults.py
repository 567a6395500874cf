"""Planted faults: each fault, written into the source that the ranks run, must make the checks fail."""

import numpy as np
import pytest

import sightline
from distributed_calls import Distributed, Division
from distributed_checks import FAULTS, with_fault
from gradient_checks import check as check_gradients
from sightline import i, j
from sightline.testing import assert_conforms
from statistic_definitions import check as check_statistics
from strategies import Case


class Faulty:
    """Ranks that run every function with a fault."""

    def __init__(self, ranks, fault):
        self.ranks, self.fault = ranks, fault

    def run(self, function, *arguments, size):
        return self.ranks.run(with_fault, self.fault, function, *arguments, size=size)


def check(run):
    rng = np.random.default_rng(2)
    arrays = [rng.normal(size=(1, 2, 150, width)).astype(np.float32) for width in (8, 8, 4)]
    case = Case(*arrays, {"mask": i >= j})
    see = [sightline.entropy(), sightline.mass(i - j < 9), sightline.max_score(), sightline.top_k(2)]
    assert_conforms(run.run, case.make_problem())
    check_statistics(run.run, case.make_problem(see=see))
    check_gradients(case, differentiate=run.differentiate)


DIVISION = Division(3, block_length=32)


def test_sound_ranks_pass(ranks):
    check(Distributed(ranks, DIVISION))


QUICK = ("offset of keys", "tile skipped")  # the soak tests plant the others


@pytest.mark.parametrize(
    "fault", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in FAULTS]
)
def test_every_fault_is_seen(ranks, fault):
    with pytest.raises(AssertionError, match=r"budget|twice"):
        check(Distributed(Faulty(ranks, fault), DIVISION))
