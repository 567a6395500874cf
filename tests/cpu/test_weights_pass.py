"""The weights pass against statistics of dense float64 weights, within the error budget of `reference.testing`."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sample_problems import PROBLEMS, arrays
from sightline import alibi, causal, i, j, padding, s, table, where
from sightline.arrays.operations import TORCH, dtype_name, framework, to_numpy
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.cpu.launch.weights_pass import MAX_TOP_K, bind_passes
from sightline.reference.definition import compute_stages
from sightline.reference.testing import with_guards
from sightline.statistics import TopK, pooled, received, weights
from strategies import DTYPES, Case, cases
from weights_pass_checks import check, check_everything, compute, several, weight_sums

# -- problems --------------------------------------------------------------------------------------------------------

EXAMPLES = [20, pytest.param(800, marks=pytest.mark.soak)]  # the number of drawn problems of each dtype


@st.composite
def requests(draw, problem):
    """Weights or the cells of a rectangle, alone, or up to four statistics that can share passes."""
    lengths, hows = (problem.n, problem.m), st.sampled_from(["mean", "max"])
    down, across = (st.integers(1, max(min(length, 40), 1)) for length in lengths)
    kinds = [
        st.builds(received, st.sampled_from(["sum", "mean", "max"])),
        st.builds(pooled, down, across | st.just(max(problem.m, 1)), hows),
        st.builds(TopK, st.integers(1, 12)),
    ]
    if 0 in problem.extent:
        return [draw(st.one_of(*kinds, st.just(weights())))]
    spans = [st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True).map(sorted) for length in lengths]
    cells = st.builds(pooled, down, across, hows, st.tuples(*spans))
    alone = st.one_of(st.just(weights()), cells).map(lambda one: [one])
    return draw(st.lists(st.one_of(kinds), min_size=1, max_size=4) | alone)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_problems(dtype, examples):
    @settings(max_examples=examples)
    @given(cases(dtypes=(dtype,), largest=15_000), st.data())
    def conforms(case, data):
        problem = case.make_problem()
        check(problem, data.draw(requests(problem)))

    conforms()


NAMED = {
    "shared heads, causal": ({"shape": (2, 4, 131, 23), "groups": 2, "m": 203}, {"mask": causal("lower right")}),
    "window, soft cap, sinks": PROBLEMS["window, soft cap, sinks"],
    "padding, slopes": ({"shape": (2, 2, 70, 8), "m": 140}, {"score": alibi(2), "mask": padding([130, 0])}),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", NAMED)
def test_named_problems(name):
    """The statistics are computed from the forward kernel's lse."""
    shapes, options = NAMED[name]
    problem = make_problem(*arrays(dtype="float32", **shapes), **options)
    check_everything(problem, lse=Cpu().run(problem).lse)


@pytest.mark.wide
def test_wide_heads():
    check_everything(make_problem(*arrays((1, 4, 33, 576), "bfloat16", d_v=512, groups=1, m=201), mask=i + 170 >= j))


def test_any_number_of_threads_gives_the_same_bits():
    problem = make_problem(*arrays((1, 2, 1217, 20), "float32", m=700), mask=i + 90 >= j)
    lse = Cpu().run(problem).lse
    calls = [
        partial(compute, problem, lse, *group)
        for group in (
            *([received()], [received("max")], [pooled(1217, 200, "max")], [pooled(1, 3)], [TopK(6)], [weights()]),
            several(problem),
        )
    ]
    for call in calls:
        once = call(threads=1)
        for threads in (2, 3, 7):
            for found, expected in zip(flat(call(threads=threads)), flat(once), strict=True):
                np.testing.assert_array_equal(found, expected)


def flat(result):
    """Return the arrays of a result, which may be a tuple or a list of results."""
    return [array for one in result for array in flat(one)] if isinstance(result, tuple | list) else [result]


def test_statistics_share_passes():
    """Each pass computes received, pooled and top_k at most once; weights and a pooled rectangle are computed alone."""
    problem = make_problem(*arrays((1, 2, 70, 8), "float32"))
    statistics = [TopK(2), pooled(2, 2, "mean", ((0, 9), (0, 9))), weights(), received("max"), pooled(3, 3), TopK(3)]
    passes = [bound_pass for _, bound_pass in bind_passes(problem.with_statistics(*statistics))]
    assert [bound_pass.indices for bound_pass in passes] == [(0, 3, 4), (1,), (2,), (5,)]
    assert bind_passes(problem.with_statistics(TopK(MAX_TOP_K + 1))) != []  # there are only 70 keys


def test_torch_gets_the_same_bits_as_tensors():
    case = Case(*arrays((2, 70, 16), "float32", m=90), {"mask": causal()})
    lse = compute_stages(case.make_problem()).lse
    problem = case.make_problem()
    for group in ([received()], [pooled(3, 4)], [TopK(95)], [weights()], [weight_sums(problem)], several(problem)):
        ours, theirs = compute(problem, lse, *group), compute(case.as_torch().make_problem(), lse, *group)
        for array, tensor in zip(flat(ours), flat(theirs), strict=True):
            assert framework(tensor) is TORCH
            assert dtype_name(array) == dtype_name(tensor)
            np.testing.assert_array_equal(to_numpy(tensor), array)


# -- exact results ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_of_equal_scores_the_smaller_key_comes_first(dtype, rng):
    """Products of integers are not rounded, so that scores tie exactly. With scale 0 every score is 0."""
    q, k = (rng.integers(-2, 3, (1, 2, rows, 3)).astype(dtype) for rows in (70, 333))
    for scale in (1.0, 0.0):
        problem = make_problem(q, k, k, scale=scale, mask=(i + j) % 5 != 0)
        truth = compute_stages(problem)
        order = np.argsort(-truth.masked, axis=-1, kind="stable")[..., :40]
        ((_, where),) = compute(problem, truth.lse, TopK(40))
        np.testing.assert_array_equal(where, order)


def test_a_score_of_minus_infinity_is_not_listed(rng):
    """A visible score of −∞ is no key of `top_k`, whether or not the pass computes other statistics."""
    q, k = (rng.normal(size=(1, 1, rows, 3)) for rows in (40, 70))
    problem = make_problem(q, k, k, score=where(j % 9 == 0, s, -math.inf))
    lse = compute_stages(problem).lse
    (alone,) = compute(problem, lse, TopK(10))
    together, _ = compute(problem, lse, TopK(10), received())
    assert (alone[1] >= 0).sum(-1).tolist() == [[[8] * 40]]
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_do_not_take_on_the_rounding_of_lse(rng):
    """Adding 4096 to every score, an integer, adds 4096 to lse and changes weights by a few units in the last place.

    S − lse is computed as S − high − low: the first difference is exact, and the second is rounded once.
    """
    q, k = (rng.integers(-2, 3, (1, 1, rows, 3)).astype(np.float32) for rows in (40, 150))
    plain, moved = make_problem(q, k, k, scale=1.0, score=s + 0), make_problem(q, k, k, scale=1.0, score=s + 4096)
    truth = compute_stages(plain)
    (one,), (other,) = compute(plain, truth.lse, weights()), compute(moved, truth.lse + 4096, weights())
    unit = np.spacing(np.abs(truth.masked - truth.lse[..., None]).astype(np.float32)) + 2 * np.finfo(np.float32).eps
    assert (abs(one - truth.weights) <= unit * truth.weights).all()
    assert (abs(other - truth.weights) <= unit * truth.weights).all()


def test_the_error_of_sums_does_not_grow_with_their_length():
    """A plain sum of so many equal weights would drift; each key receives the exact sum, rounded once."""
    n, m = 1 << 16, 3
    problem = make_problem(np.zeros((32, n, 1), np.float32), *(np.zeros((32, m, 1), np.float32) for _ in range(2)))
    lse = np.full((32, 1, n), np.log(m))
    one = compute(problem, lse, weights())[0][:, :, 0].astype(np.float64)
    np.testing.assert_array_equal(compute(problem, lse, received())[0], (one * n).astype(np.float32))
    together, mean = compute(problem, lse, received(), pooled(1, m))
    np.testing.assert_array_equal(together, (one * n).astype(np.float32))
    np.testing.assert_array_equal(mean, one[..., None, :].astype(np.float32))


def test_more_keys_requested_than_there_are(rng):
    problem = make_problem(*(rng.normal(size=(1, 9, 4)) for _ in range(3)), mask=i >= j + 2)
    ((found, where),) = compute(problem, compute_stages(problem).lse, TopK(11))
    assert found.shape == where.shape == (1, 1, 9, 11)
    seen = np.arange(11) < np.maximum(np.arange(9)[:, None] - 1, 0)
    np.testing.assert_array_equal(where[0, 0] >= 0, seen)
    assert (where[0, 0][~seen] == -1).all()
    assert (found[0, 0][~seen] == 0).all()


def test_no_pass_has_longer_lists_than_the_limit(rng):
    x = rng.normal(size=(1, MAX_TOP_K + 1, 4))
    problem = make_problem(x[:, :3], x, x)
    assert compute(problem, compute_stages(problem).lse, TopK(MAX_TOP_K + 1)) is None


# -- inputs the weights pass does not serve --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_visible_nonfinite_scores_return_none(bad):
    """If the mask hides the nonfinite scores, the results equal, bit for bit, the results with zeros in their place."""
    for filler in (0.0, bad):
        q, k, v = arrays((1, 2, 20, 4), "float32", m=70)
        k[:, :, 64:] = filler
        with np.errstate(all="ignore"):
            problem = make_problem(q, k, v, mask=j < 64)
            found = [to_numpy(x) for x in check_everything(problem)]
            if filler == 0.0:
                clean = found
            for one, other in zip(clean, found, strict=True):
                np.testing.assert_array_equal(one, other)
    unmasked = make_problem(q, k, v)
    lse = compute_stages(unmasked).lse
    for statistic in (received(), pooled(1, 1), TopK(1), weights()):
        assert compute(unmasked, lse, statistic) is None


@pytest.mark.parametrize("extent", [(0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)])
def test_no_pairs(extent):
    B, H, n, m = extent
    q, k = (np.zeros((B, H, rows, 3), np.float32) for rows in (n, m))
    see = [received(), TopK(2), weights(), pooled(1, 1)]
    sums, (found, where), matrix, cells = Cpu().run(make_problem(q, k, k, see=see)).seen
    assert sums.tolist() == np.zeros((B, H, m)).tolist()
    assert found.tolist() == np.zeros((B, H, n, 2)).tolist()
    assert where.tolist() == np.full((B, H, n, 2), -1).tolist()
    assert matrix.shape == (B, H, n, m)
    assert cells.shape == (B, H, min(n, 1), min(m, 1))


def test_no_byte_outside_an_array_is_written(monkeypatch):
    """Guard bytes surround the arrays that are read and written; guard_pages.py uses inaccessible pages instead."""
    checks, plain_empty = [], np.empty

    def around(array):
        array, unharmed = with_guards(array)
        checks.append(unharmed)
        return array

    guarded = [with_guards(x) for x in arrays((1, 2, 77, 9), "float32", m=131)]
    problem = make_problem(
        *(array for array, _ in guarded), mask=i + 50 >= j, score=s + table(np.linspace(-1, 1, 77))[i]
    )
    monkeypatch.setattr(np, "empty", lambda *given, **more: around(np.full_like(plain_empty(*given, **more), -1)))
    check_everything(problem, maxima=True)
    assert checks
    for unharmed in (*checks, *(unharmed for _, unharmed in guarded)):
        unharmed()
