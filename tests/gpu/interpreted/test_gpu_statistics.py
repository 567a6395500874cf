"""Every statistic of the Triton kernels equals its definition within the budget of rounding errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from fault_planting import Fault
from sample_problems import arrays
from sightline import causal, h, i, j, s, softcap, table, where, window
from sightline.arrays.operations import to_numpy
from sightline.gpu.kernels import fused_statistics, tile_ops, weights_pass, weights_pooled, weights_top_k
from sightline.gpu.launch import weights_pass as launch_weights_pass
from sightline.gpu.launch.arguments import make_schedule
from sightline.gpu.launch.weights_pass import MAX_TOP_K, can_serve
from sightline.reference.definition import compute_stages
from sightline.reference.streaming import Streaming
from sightline.statistics import arrays_of
from statistic_definitions import EQUAL_WEIGHTS, check, check_equal_weights, parts, statistics, usable
from strategies import DTYPES, Case, cases

RED = "budget|shape"
PROBLEMS = {
    "plain": ({"shape": (1, 2, 16, 8), "m": 40}, {}),
    "shared heads, a window, sinks": (
        {"shape": (1, 4, 20, 12), "groups": 2, "m": 40},
        {"mask": window(6, 12), "score": softcap(5.0), "sinks": np.array([0.5, -2.0, 0.0, -np.inf])},
    ),
    "a batch, dropout": ({"shape": (2, 1, 20, 8), "d_v": 5}, {"mask": causal(), "dropout": 0.3, "seed": 1}),
}
OF_DTYPES = [("float32", name) for name in PROBLEMS]
OF_DTYPES += [(dtype, "shared heads, a window, sinks") for dtype in ["bfloat16"]]


def every(n, m):
    """Return every statistic, for n queries and m keys, and the means that kernels compute."""
    own = [
        sightline.lse(),
        sightline.max_score(),
        sightline.entropy(),
        sightline.mass(i >= j),
        sightline.sum(sightline.p * (i - j) * s, over=j),
        sightline.mass(table(np.arange(m) % 3 == 0)[j] & (h != 1)),
        sightline.top_k(5),
        *(sightline.received(how) for how in ("sum", "mean", "max")),
        sightline.pooled(3, 7),
        sightline.pooled(2, 3, "max", within=((n // 3, n - 1), (m // 4, m))),
        sightline.weights(),
        sightline.scores(),
    ]
    means = [sightline.weights().mean("heads"), sightline.weights().sum("heads"), sightline.entropy().mean("batch")]
    return [*own, *means]


def several():
    """Return one statistic of each kernel, whose bits depend on the order of sums."""
    fused = sightline.max_score(), sightline.entropy(), sightline.mass(i >= j)
    return [*fused, sightline.received(), sightline.top_k(3), sightline.pooled(3, 2), sightline.weights().mean("heads")]


@pytest.mark.parametrize(("dtype", "name"), OF_DTYPES)
def test_named_problems(triton_kernel, dtype, name):
    shapes, options = PROBLEMS[name]
    case = Case(*arrays(dtype=dtype, **shapes), options).as_torch()
    problem = case.make_problem()
    see = every(problem.n, problem.m) if dtype == "float32" else [*several(), sightline.weights(), sightline.scores()]
    check(triton_kernel.run, case.make_problem(see=see))


def test_parts(triton_kernel):
    """Statistics of some rows or heads are computed as separate problems, whose tables are read at their positions."""
    case = Case(*arrays((2, 4, 20, 8), "float32", groups=2, m=40), {"mask": i + 15 >= j, "score": s - abs(i - j) / 8})
    of = sightline.entropy().rows([-1, 3, 3]).heads([2, 0])
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    see = [
        of,
        sightline.received("max", last=7),
        sightline.weights().rows([0, -1]).mean("heads"),
        sightline.weighted_sum(x),
    ]
    check(triton_kernel.run, case.as_torch().make_problem(see=see))


def test_many_small_cells(triton_kernel):
    """Grids with a cell for each pair, without cells, and with more columns of cells than a program has."""
    case = Case(*arrays((1, 1, 20, 8), "float32", m=70), {"mask": (i * 4 >= j) & (i != 5)}).as_torch()
    see = [sightline.pooled(99, 71), sightline.pooled(1, 69, "max"), sightline.pooled(20, 1)]
    check(triton_kernel.run, case.make_problem(see=see))
    empty = sightline.pooled(3, 3, within=((5, 5), (0, 70)))
    assert triton_kernel.run(case.make_problem(see=[empty])).seen[0].shape == (1, 1, 0, 3)


MANY_EXAMPLES = [(dtype, *drawn) for dtype in DTYPES for drawn in ((statistics, 60), (parts, 20))]


@pytest.mark.parametrize(
    ("dtype", "of", "examples"),
    [("float32", statistics, 2), *(pytest.param(*given, marks=pytest.mark.soak) for given in MANY_EXAMPLES)],
)
def test_drawn_problems(triton_kernel, dtype, of, examples):
    @settings(max_examples=examples)
    @given(st.data(), cases(dtypes=(dtype,), largest=1000))
    def conforms(data, case):
        problem = case.make_problem()
        if usable(problem):
            check(triton_kernel.run, case.as_torch().make_problem(see=data.draw(of(problem))))

    conforms()


# -- exact answers -----------------------------------------------------------------------------------------------------


def answers(kernel, case, *see):
    """Return the arrays of the kernel's statistics as NumPy arrays."""
    seen = kernel.run(case.as_torch().make_problem(see=list(see))).seen
    return [to_numpy(array) for entry in seen for array in arrays_of(entry)]


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_of_equal_scores_the_smaller_key_comes_first(triton_kernel, scale):
    """Integers tie exactly. Partial tiles lie before, between and after full tiles, which are visited first."""
    rng = np.random.default_rng(4)
    q, k = (rng.integers(-1, 2, (1, 1, rows, 3)).astype(np.float32) for rows in (16, 150))
    mask = (j >= 3) & (j < 140) & (j != 70) & (i != 5) & (j != 100 + i)
    case = Case(q, k, k, {"mask": mask, "scale": scale})
    truth = compute_stages(case.make_problem())
    seen = np.isfinite(truth.masked)
    order = np.argsort(-truth.masked, axis=-1, kind="stable")[..., :20]
    expected = np.where(np.take_along_axis(seen, order, -1), order, -1)
    score, first, weights, keys = answers(triton_kernel, case, sightline.max_score(), sightline.top_k(20))
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(first, expected[..., 0])
    np.testing.assert_array_equal(score, truth.masked.max(-1))
    assert not weights[..., 5, :].any()


@pytest.mark.parametrize("by_formula", [True, False])
@pytest.mark.parametrize("name", EQUAL_WEIGHTS)
def test_of_equal_weights_the_smaller_key_comes_first(triton_kernel, name, by_formula):
    check_equal_weights(triton_kernel.run, name, "float32", by_formula)


def test_the_first_of_equal_keys_is_found(triton_kernel):
    query, key = np.ones((1, 1, 3, 2), np.float32), np.ones((1, 1, 70, 2), np.float32)
    case = Case(query, key, key, {"mask": (j > i) & (i < 2)})
    score, first, weights, keys = answers(triton_kernel, case, sightline.max_score(), sightline.top_k(3))
    assert first.tolist() == [[[1, 2, -1]]]
    assert keys.tolist() == [[[[1, 2, 3], [2, 3, 4], [-1, -1, -1]]]]
    assert np.isneginf(score[0, 0, 2])
    assert not weights[0, 0, 2].any()


def test_weights_do_not_take_on_the_rounding_of_lse(triton_kernel):
    """4096 added to every score, an integer, adds 4096 to lse and changes each weight by at most a few ulp.

    S − lse is rounded in its low part and in the conversion to base 2; its high part is exact.
    """
    rng = np.random.default_rng(5)
    q, k = (rng.integers(-2, 3, (1, 1, rows, 3)).astype(np.float32) for rows in (16, 70))
    plain = Case(q, k, k, {"scale": 1.0, "score": s + 0})
    truth = compute_stages(plain.make_problem())
    x = np.abs(truth.masked - truth.lse[..., None]) * np.log2(np.e)
    unit = 2 * np.spacing(x.astype(np.float32)) + 2 * np.finfo(np.float32).eps
    for case in (plain, Case(q, k, k, {"scale": 1.0, "score": s + 4096})):
        (found,) = answers(triton_kernel, case, sightline.weights())
        assert (abs(found - truth.weights) <= unit * truth.weights).all()


def test_more_keys_than_lists_hold_are_found_by_the_plain_tiles(triton_kernel):
    case = Case(*arrays((1, 1, 2, 4), "float32", m=MAX_TOP_K + 20)).as_torch()
    assert not can_serve(case.make_problem(), sightline.top_k(MAX_TOP_K + 1), "sm_90")
    assert not can_serve(case.make_problem(), sightline.weights().mean("heads"), "gfx942")
    check(triton_kernel.run, case.make_problem(see=[sightline.top_k(MAX_TOP_K + 1)]))


def test_the_same_bits_every_time(triton_kernel):
    case = Case(*arrays((1, 2, 20, 8), "float32", m=40), {"mask": i + 25 >= j})
    first, again = (answers(triton_kernel, case, *several()) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_hidden_reaches_nothing(triton_kernel):
    """NaN at hidden keys gives the same bits as zeros."""
    found = []
    for filler in (0.0, np.nan):
        q, k, v = arrays((1, 1, 20, 4), "float32", m=70)
        k[:, :, 51:] = filler
        found.append(answers(triton_kernel, Case(q, k, v, {"mask": j < 51}), *several()))
    for clean, poisoned in zip(*found, strict=True):
        np.testing.assert_array_equal(clean, poisoned)


def test_a_visible_nan_shows(triton_kernel):
    """NaN fills its row, and the maxima and sums over the row; keys are those that `Streaming` finds."""
    q, k, v = arrays((1, 1, 40, 4), "float32", m=70)
    q[0, 0, 7] = np.nan
    k[0, 0, 60] = np.nan  # and larger scores before it in its tile
    case = Case(q, k, v, {"mask": (j < 33) | (i // 2 == 10)})
    see = [sightline.max_score(), sightline.entropy(), sightline.mass(i >= j), sightline.top_k(3)]
    found, expected = (answers(kernel, case, *see) for kernel in (triton_kernel, Streaming()))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
    for one, other in ((found[1], expected[1]), (found[5], expected[5])):
        np.testing.assert_array_equal(one, other)
    for received in answers(triton_kernel, case, sightline.received(), sightline.received("max")):
        assert np.isnan(received[0, 0, :33]).all()
    assert np.isnan(answers(triton_kernel, case, sightline.pooled(1, 1, "max"))).all()


@pytest.mark.parametrize("extent", [(0, 2, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)])
def test_no_pairs(triton_kernel, extent):
    B, H, n, m = extent
    case = Case(*(np.zeros((B, H, rows, 3), np.float32) for rows in (n, m, m)))
    see = [sightline.max_score(), sightline.top_k(2), sightline.received(), sightline.weights()]
    check(triton_kernel.run, case.as_torch().make_problem(see=see))


@pytest.mark.parametrize("heads", [False, True])
def test_the_schedule_of_keys_is_that_of_queries_turned(heads):
    """The schedule of keys has exactly the tiles of the schedule of queries."""
    x = torch.zeros(1, 3, 70, 4), torch.zeros(1, 3, 150, 4)
    mask = (j <= 2 * i) & (j >= i // 2 - (h * 9 if heads else 5)) & (i != 40)
    problem = sightline.call.problem.make_problem(x[0], x[1], x[1], mask=mask)
    found = []
    for of_keys in (False, True):
        rows, runs, _, head = (to_numpy(x) for x in make_schedule(problem, 16, 32, of_keys))
        count = head if heads else rows.size // 3  # blocks of a head, the last of them none
        assert (head > 0) == heads
        pairs = set()
        for row, (start, _, stop) in enumerate(rows.reshape(-1, 3)):
            for first, last in runs.reshape(-1, 2)[start:stop]:
                pairs |= {
                    (row // count, *((t, row % count) if of_keys else (row % count, t))) for t in range(first, last)
                }
        found.append(pairs)
    assert found[0] == found[1]


# -- broken on purpose -------------------------------------------------------------------------------------------------

TALL = arrays((1, 4, 20, 8), "float32", groups=2, m=40)
OPTIONS = {"mask": (i * 2 >= j) & (i != 3), "score": where(j > 30, s * 2, s), "sinks": np.linspace(-1, 1, 4)}
LAST_CELL = "cell_index(tl.minimum(j0 + meta.keys, keys.last) - 1, keys.start, keys.stop, keys.cells) - keys.cell"
SCORES = "tile_ops.compute_scores(products, location, j, scale, args.arrays.tables, formulas, {}, meta)"
FAULTS = {  # the fault, and the statistic that shows it
    "the last tile's maximum": (Fault(fused_statistics.update, "above", "(max_score == max_score)"), "max_score()"),
    "a key of its tile": (
        Fault(fused_statistics.update, "tl.where(s < tile_max[:, None], tile_ops.NO_KEY, j)",
            "tl.where(s < tile_max[:, None], tile_ops.NO_KEY, j % meta.keys)"), "max_score()",
    ),
    "powers that are not shifted": (
        Fault(fused_statistics.update, "tl.maximum(log2_alpha, MIN_POWER)", "0"), "entropy()",
    ),
    "powers that are not rescaled": (
        Fault(fused_statistics.update, "(power_sum + tl.maximum(log2_alpha, MIN_POWER) * mass) * alpha",
            "power_sum + tl.maximum(log2_alpha, MIN_POWER) * mass"), "entropy()",
    ),
    "the sink's own term": (Fault(fused_statistics.store, "mass.to(tl.float64)", "wide"), "entropy()"),
    "a sum that is not rescaled": (Fault(fused_statistics.update, "sums[k] * alpha", "sums[k]"), "mass(i >= j)"),
    "a condition one key on": (
        Fault(fused_statistics.update, "tl.minimum(j, m - 1)", "tl.minimum(j + 1, m - 1)"), "mass(i == j)",
    ),
    "a sum that is not divided": (Fault(fused_statistics.store, "sums[k] / safe", "sums[k]"), "mass(i >= j)"),
    "the lse of another head": (Fault(weights_pass.load_block, "b * args.H + h", "b * args.H"), "weights()"),
    "a wrong head of keys": (
        Fault(tile_ops.load_query_block, "h // args.group", "h % (args.H // args.group)"), "weights()",
    ),
    "lse in another base": (Fault(tile_ops.load_lse, "LOG2_E", "1.0"), "weights()"),
    "a tile missed": (Fault(weights_pass.store_range, "range(first, last)", "range(first, last - 1)"), "weights()"),
    "scores without scale": (Fault(weights_pass.store_range, "block.queries.scale", "1.0"), "bare scores()"),
    "a mean of one head": (Fault(weights_pass.dense_weights, "batches * heads", "1"), "weights().mean('heads')"),
    "the last weights": (Fault(weights_pass.store_range, "total", "0 * total"), "weights().mean('heads')"),
    "a list never full": (Fault(weights_top_k.keep_largest, "keys == least_key", "keys >= least_key"), "top_k(3)"),
    "a key found twice": (Fault(weights_top_k.keep_largest, "j == key", "j == key + 1"), "top_k(3)"),
    "lists in no order": (Fault(weights_top_k.top_k, "tl.max", "tl.min"), "top_k(3)"),
    "an off-by-one cell": (
        Fault(weights_pooled.cell_index, "position - start + 1", "position - start"), "pooled(6, 11)",
    ),
    "cells of all keys": (
        Fault(weights_pooled.cell_index, "position - start", "position"), "pooled(2, 3, within=((9, 19), (9, 39)))",
    ),
    "a cell missed": (Fault(weights_pooled.pool_range, f"{LAST_CELL} + 1", LAST_CELL), "pooled(6, 11)"),
    "queries past the end": (Fault(weights_pass.receive_range, "0.0", "p"), "received()"),
    "a block of queries missed": (
        Fault(weights_pass.receive_range, "range(first, last)", "range(first + 1, last)"), "received()",
    ),
    "partial tiles as full": (
        Fault(weights_pass.receive_range, SCORES.format("PARTIAL"), SCORES.format("False")), "received()",
    ),
    "a maximum that is a sum": (
        Fault(launch_weights_pass.statistic_launch, 'statistic.how == "max"', 'statistic.how == ""'), "received('max')",
    ),
    "a sum for a mean": (
        Fault(launch_weights_pass.run_weights_pass, "statistic.divisor(problem)", "1"),
        "weights().mean('heads')",
    ),
    "ranges of queries for keys": (
        Fault(launch_weights_pass.statistic_launch, "kernel is received", "False"), "received()",
    ),
}  # fmt: skip


def requested(statistic):
    """Return a problem that requests a statistic; a "bare" statistic has no score formula."""
    see = [eval("sightline." + statistic.removeprefix("bare "), {"sightline": sightline, "i": i, "j": j})]
    options = OPTIONS | ({"score": None} if statistic.startswith("bare") else {})
    return Case(*TALL, options).as_torch().make_problem(see=see)


RUN_BY_DEFAULT = {  # one fault per kernel
    "a key of its tile", "powers that are not rescaled", "a sum that is not rescaled", "a wrong head of keys",
    "a list never full", "an off-by-one cell", "a block of queries missed", "ranges of queries for keys",
}  # fmt: skip


@pytest.mark.parametrize("statistic", sorted({statistic for _, statistic in FAULTS.values()}))
def test_what_faults_are_planted_in_passes(statistic, triton_kernel):
    check(triton_kernel.run, requested(statistic))


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in RUN_BY_DEFAULT else pytest.mark.soak) for name in FAULTS]
)
def test_every_fault_is_seen(fault, triton_kernel, plant):
    planted, statistic = FAULTS[fault]
    plant(planted)
    with pytest.raises(AssertionError, match=RED):
        check(triton_kernel.run, requested(statistic))
