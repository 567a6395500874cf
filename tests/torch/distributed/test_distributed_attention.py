"""Attention over shards equals the definition for the whole sequence: outputs, statistics and gradients."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sightline
from distributed_calls import Distributed, Division, is_available, solve_without_heads
from gradient_checks import check as check_gradients
from sightline import h, i, j, m, n, s, table
from sightline.reference.testing import assert_conforms, assert_within_budget
from sightline.statistics import arrays_of
from statistic_definitions import check as check_statistics
from statistic_definitions import statistics, usable
from strategies import DTYPES, Case, cases

pytestmark = pytest.mark.sampled(one_in=5)

FEW = settings(max_examples=2, phases=[Phase.generate])  # most drawn problems compile kernels on every rank
MANY = settings(FEW, max_examples=20)
DRAWN = pytest.mark.parametrize("drawn", [FEW, pytest.param(MANY, marks=pytest.mark.soak)], ids=["few", "many"])


@st.composite
def divisions(draw, problem):
    """A number of ranks, a layout and a method that the problem allows, and lengths of shards."""
    size = draw(st.integers(1, 4))
    method = draw(st.sampled_from(["ring", "ring", "heads"])) if size <= problem.G else "ring"
    layout = draw(st.sampled_from(["contiguous", "zigzag"]))
    weights = st.lists(st.integers(0, 5), min_size=size, max_size=size).map(tuple)
    uneven = (draw(weights), draw(weights)) if not problem.dropout and draw(st.booleans()) else ((), ())
    return Division(size, layout, method, *uneven, draw(st.sampled_from([None, 8, 64])))


@DRAWN
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_outputs(ranks, dtype, drawn):
    @drawn
    @given(st.data(), cases(dtypes=(dtype,), largest=4000))
    def conforms(data, case):
        problem = case.make_problem()
        assert_conforms(Distributed(ranks, data.draw(divisions(problem))).run, problem)

    conforms()


@DRAWN
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_drawn_statistics(ranks, dtype, drawn):
    @drawn
    @given(st.data(), cases(dtypes=(dtype,), largest=4000))
    def conforms(data, case):
        problem = case.make_problem()
        if usable(problem) and not problem.heads_squeezed:
            see = [one for one in data.draw(statistics(problem)) if is_available(one)]
            division = data.draw(divisions(problem))
            check_statistics(Distributed(ranks, division).run, case.make_problem(see=see))

    conforms()


@DRAWN
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_gradients(ranks, dtype, drawn):
    @drawn
    @given(st.data(), cases(dtypes=(dtype,), largest=3000, hides=False, poison=False))
    def conforms(data, case):
        division = data.draw(divisions(case.make_problem()))
        check_gradients(case, differentiate=Distributed(ranks, division).differentiate)

    conforms()


def small(dtype=np.float32, rows=70, columns=70, heads=(4, 2)):
    """Return query, key and value with 2 batches, groups of heads, and d_v ≠ d_k."""
    rng = np.random.default_rng(5)
    shapes = ((2, heads[0], rows, 8), (2, heads[1], columns, 8), (2, heads[1], columns, 5))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


OPTIONS = {
    "window": {"mask": (i >= j) & (i - j < 9), "sinks": np.array([0.1, -1.0, 2.0, 0.0], np.float32)},
    "learned": {
        "mask": i + m - n >= j,
        "score": 5 * np.tanh(s / 5) + table(np.linspace(-1, 1, 4, dtype=np.float32))[h] * abs(i - j) / 8,
    },
    "documents": {"mask": sightline.documents(np.arange(70) // 23) & (i >= j)},
    "dropout": {"mask": sightline.dense(np.random.default_rng(0).random((70, 70)) < 0.7), "dropout": 0.3, "seed": 5},
    "rows that see nothing": {"mask": (i >= j) & (i % 3 != 0), "score": s - abs(i - j) / 9},
}
DIVISIONS = [
    Division(1),
    Division(2, "zigzag", block_length=16),
    Division(3, "contiguous", "ring", block_length=8),
    Division(4, "zigzag"),
    Division(2, "contiguous", "heads"),
    Division(2, "zigzag", "heads"),
]
SEE = [
    sightline.lse(),
    sightline.entropy(),
    sightline.max_score(),
    sightline.mass(i - j < 5),
    sightline.sum(sightline.p * (i - j), over=j),
    sightline.top_k(3),
    sightline.received(),
    sightline.received("max"),
    sightline.pooled(4, 4),
    sightline.sum(sightline.p**2, over=j),
    sightline.sum(sightline.p**2 * i, over=i),
    sightline.min(s - j, over=(i, j)),
    sightline.sum(sightline.p**2, over=(h, j)),
    sightline.entropy().mean("heads"),
    sightline.received("mean").mean("batch"),
]


@pytest.mark.parametrize(("name", "division"), list(zip([*OPTIONS, "learned"], DIVISIONS, strict=True)), ids=str)
def test_outputs_statistics_and_gradients(ranks, name, division):
    Distributed(ranks, division).check(Case(*small(), OPTIONS[name]), SEE)


@pytest.mark.parametrize(("lengths", "layout"), [((3, 5), "zigzag"), ((70, 5), "contiguous"), ((1, 1), "zigzag")])
def test_fewer_positions_than_ranks(ranks, lengths, layout):
    see = [one for one in SEE if getattr(one, "axes", "") != "ij"]
    Distributed(ranks, Division(4, layout)).check(Case(*small(np.float32, *lengths), OPTIONS["learned"]), see)


def test_uneven_lengths(ranks):
    division = Division(3, query_weights=(5, 0, 1), key_weights=(1, 7, 3), block_length=16)
    Distributed(ranks, division).check(Case(*small(columns=50), OPTIONS["learned"]), SEE)


@pytest.mark.parametrize("method", ["ring", "heads"])
def test_equal_bits_in_two_runs(ranks, method):
    problem = Case(*small(), OPTIONS["learned"]).make_problem(see=SEE)
    run = Distributed(ranks, Division(2, "zigzag", method, block_length=16))
    d_output, d_lse = np.ones((2, 4, 70, 5), np.float32), np.ones((2, 4, 70), np.float32)
    arrays = []
    for _ in range(2):
        result, found = run.run(problem), run.differentiate(problem, d_output, d_lse)
        seen = [array for one in result.seen for array in arrays_of(one)]
        arrays.append([result.output, result.lse, *seen, found.query, found.key, found.value, *found.tables[:1]])
    for first, second in zip(*arrays, strict=True):
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("poisoned", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_hidden_keys_may_hold_anything(ranks, bad, poisoned):
    clean, mask = small(), (i >= j) & (j != 5) & (j < 60)
    arrays = [x.copy() for x in clean]
    arrays[poisoned][..., [5, *range(60, 70)], :] = bad
    run = Distributed(ranks, Division(3, "zigzag"))
    assert_conforms(run.run, Case(*arrays, {"mask": mask}).make_problem())
    d_output, d_lse = np.ones((2, 4, 70, 5), np.float32), np.ones((2, 4, 70), np.float32)
    wide = [x.astype(np.float64) for x in clean]
    gradients = [  # those found, in float64, and of clean arrays
        run.differentiate(Case(*one, {"mask": mask}).make_problem(), d_output, d_lse) for one in (arrays, wide, clean)
    ]
    for name in ("query", "key", "value"):
        assert_within_budget(*(getattr(one, name) for one in gradients), f"gradient of {name}")


def test_arrays_without_a_head_axis_have_results_without_one(ranks):
    arrays = small(heads=(1, 1))
    found = ranks.run(solve_without_heads, [x[:, 0] for x in arrays], size=2)
    expected = ranks.run(solve_without_heads, arrays, size=2)
    for x, y in zip(chain(*found), chain(*expected), strict=True):
        assert np.array_equal(x, y.reshape(x.shape))
        assert x.ndim == y.ndim - 1
