"""Ranks that make different calls, die or stall, or run a planted fault.

Every other rank raises an error that says what a rank does differently, and none hangs. Each fault, written into the
source that the ranks run, must make the checks fail.
"""

import re
import time

import numpy as np
import pytest
import torch

import sightline
from distributed_calls import Distributed, Division
from distributed_checks import FAULTS, with_fault
from distributed_mistakes import MISTAKES, call_in_first_rank, fail_in_call, make_mistake, make_valid_call
from distributed_ranks import Ranks
from sightline import i, j, s, table
from sightline.errors import ParameterError, RankError, SightlineError
from sightline.torch.distributed.agreement import describe_array, describe_formula, describe_number
from strategies import Case


@pytest.mark.parametrize("name", MISTAKES)
def test_different_calls_raise_on_every_rank(ranks, name):
    found = ranks.outcomes(make_mistake, name, size=3)
    for one in found[:2]:
        assert isinstance(one, RankError), one
        assert MISTAKES[name][1] in str(one)
        assert "rank 2" in str(one)
    assert isinstance(found[2], SightlineError)
    ranks.run(make_valid_call, size=3)  # the group still works


def test_a_group_of_other_ranks_is_refused(ranks):
    found = ranks.outcomes(call_in_first_rank, size=4)
    assert found[0] is None
    for one in found[1:]:
        assert isinstance(one, ParameterError)
        assert "does not belong to" in str(one)


@pytest.mark.wide
@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["forward", "backward"])
@pytest.mark.parametrize("how", ["dies", pytest.param("stalls", marks=pytest.mark.soak)])
def test_other_ranks_raise_an_error(how, backward):
    timeout = 10.0
    ranks = Ranks(3, timeout=timeout)
    try:
        ranks.run(make_valid_call)
        begin = time.monotonic()
        found = ranks.outcomes(fail_in_call, how, backward, 3 * timeout)
        for one in found[:2]:
            assert isinstance(one, RankError), one
            assert "rank" in str(one)
        assert any(re.search(r"with rank (\d, )?2 of 3", str(one)) for one in found[:2]), [str(x) for x in found]
        assert time.monotonic() - begin < 10 * timeout
    finally:
        ranks.close()


# -- descriptions of a call that the ranks compare ---------------------------------------------------------------------

LONG = s
for step in range(200):
    LONG = LONG + 0.5 * (i - j - step)

FORMULAS = {
    "a number beyond the printed digits": (s * 0.123456789012, s * 0.123456789013),
    "the end of a long formula": (LONG + 1, LONG + 2),
    "entries of a table": (s + table(np.zeros(3))[j], s + table(np.ones(3))[j]),
    "the dtype of a table": (s + table(np.zeros(3))[j], s + table(np.zeros(3, np.float32))[j]),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_other_formulas_have_other_descriptions(kind):
    first, second = map(describe_formula, FORMULAS[kind])
    assert first != second


def test_other_numbers_and_dtypes_have_other_descriptions():
    assert describe_number(0.1) != describe_number(np.nextafter(0.1, 1))
    assert describe_number(torch.tensor(0.5)) == describe_number(0.5)
    assert describe_array(torch.zeros(2, dtype=torch.bfloat16)) != describe_array(torch.zeros(2))


# -- planted faults ----------------------------------------------------------------------------------------------------


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


QUICK = ("offset of keys", "tile skipped")  # the other faults are planted in the soak tests


@pytest.mark.parametrize(
    "fault", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in FAULTS]
)
def test_every_fault_is_seen(ranks, fault):
    with pytest.raises(AssertionError, match=r"budget|twice"):
        check(Faulty(ranks, fault))
