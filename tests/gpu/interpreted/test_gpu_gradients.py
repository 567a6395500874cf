"""The backward kernels in Triton against torch's autograd through the dense computation."""

import math
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings

import sightline
import sightline.gpu.launch.backward
from fault_planting import Fault
from gradient_checks import NAMES, check
from on_device import DEVICE
from sample_problems import arrays
from sightline import alibi, b, causal, documents, entropy, h, i, j, padding, s, scores, softcap, table, weights, window
from sightline.api.kernels import solve
from sightline.arrays.operations import to_numpy
from sightline.call.kernel import GivenGradients
from sightline.gpu.kernels import backward, backward_keys, backward_queries, table_gradient, tile_loop, tile_ops
from sightline.gpu.launch import arguments
from sightline.reference.testing import assert_within_budget
from sightline.statistics import statistic_gradients
from strategies import DTYPES, Case, cases, to_torch

streaming = sys.modules["sightline.reference.streaming"]

PROBLEMS = {
    "plain": ("float16", {"shape": (1, 2, 20, 24)}, {}),
    "huge scores": ("float32", {"shape": (1, 1, 20, 8)}, {"scale": -1e7}),
    "a scale and a sink beyond float32": (
        "float32",
        {"shape": (1, 2, 20, 8), "m": 37},
        {"scale": 1e-40, "sinks": np.array([3e38, -1.0], np.float32), "mask": i != 3},
    ),
    "causal": ("bfloat16", {"shape": (2, 1, 40, 24)}, {"mask": causal()}),
    "grouped, capped, sinks": (
        "float32",
        {"shape": (1, 4, 20, 16), "groups": 2, "m": 57},
        {"mask": window(10, 3), "score": softcap(20.0), "sinks": np.array([-1.0, 0.0, 2.0, -np.inf], np.float32)},
    ),
    "grouped, a mask of each head": ("float32", {"shape": (1, 4, 40, 16), "groups": 2}, {"mask": i >= j + 5 * h - 9}),
    "biased, dropout": (
        "float64",
        {"shape": (2, 2, 20, 16), "d_v": 20},
        {"score": alibi(2), "mask": documents(lengths=[1, 10, 9]), "dropout": 0.3, "seed": 2**40 + 1},
    ),
}


def by(kernel):
    """Return a function that computes gradients by the kernel, from its own forward pass."""

    def differentiate(problem, d_output, d_lse, _):
        answer = kernel.run(problem)
        saved = answer.output, answer.lse
        found = kernel.backward(problem, GivenGradients(d_output, d_lse, saved, range(len(problem.tables))))
        assert found is not None or 0 in problem.extent or problem.d_v == 0  # `Streaming` serves
        return found

    return differentiate


@pytest.mark.parametrize("name", PROBLEMS)
def test_named_problems(any_kernel, name):
    dtype, shapes, options = PROBLEMS[name]
    check(Case(*arrays(dtype=dtype, **shapes), options), "torch", by(any_kernel))


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "huge scores"])  # gradients overflow
def test_named_problems_in_every_dtype(triton_kernel, name, dtype):
    if dtype == "bfloat16" and "beyond" in name:
        pytest.skip("the interpreter converts subnormal gradients to bfloat16 wrongly")
    _, shapes, options = PROBLEMS[name]
    check(Case(*arrays(dtype=dtype, **shapes), options), "torch", by(triton_kernel))


@pytest.mark.parametrize("examples", [2, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_problems(triton_kernel, dtype, examples):
    @settings(max_examples=examples)
    @given(cases(dtypes=(dtype,), poison=False, largest=2000))
    def conforms(case):
        check(case, "torch", by(triton_kernel))

    conforms()


TABLES = {  # scores that read tables, by the kind of their lookups in `table_gradient`
    "pair": lambda x: s + table(x)[h, i, j],
    "pair, shared by heads": lambda x: s * table(x[0])[i, j],
    "pair, keys first": lambda x: s + table(x.swapaxes(1, 2).copy())[h, j, i],
    "pair, twice": lambda x: (lambda t: s + t[0, i, j] * t[1, i, j])(table(x)),
    "pair and any": lambda x: (lambda t: s + t[i, j] - t[j % 20, i])(table(x[0])),
    "pair, in float64": lambda x: s + table(x.astype(np.float64))[h, i, j],
    "any": lambda x: s + table(x[0, 0])[np.clip(i - j + 9, 0, 30)],
    "query": lambda x: s * table(x[0, :, :2])[i, b],
    "key": lambda x: s + np.tanh(s) * table(x[:, 0])[h, j],
    "head": lambda x: s * table(x[0, 0, :2])[h] + table(x[0, 1, :1])[0],
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in TABLES), ("any", "float64")])
def test_gradients_of_tables(triton_kernel, name, dtype, rng):
    given = [rng.normal(size=(2, 2, length, 12)).astype(DTYPES[dtype]) for length in (20, 37, 37)]
    score = TABLES[name](rng.normal(size=(2, 20, 37)).astype(np.float32))
    mask = sightline.dense(rng.random((20, 37)) < 0.8)
    check(Case(*given, {"mask": mask, "score": score}), "torch", by(triton_kernel))


@triton.jit
def _add(slots, shares, COUNT: tl.constexpr):
    table_gradient.add_exactly(slots, tl.arange(0, COUNT) % 2, tl.load(shares + tl.arange(0, COUNT)))


def slotted(shares):
    """Return the sums of two entries: the summands go to one entry and the other alternately."""
    slots = torch.zeros((2, table_gradient.SLOTS.value), dtype=torch.int64, device=DEVICE)
    _add[(1,)](slots, shares.to(DEVICE), COUNT=len(shares))
    return sightline.gpu.launch.backward._sum_slots(slots).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_shares_are_exact_in_any_order(dtype, rng):
    shares = torch.tensor(rng.normal(size=512) * 10.0 ** rng.integers(-30, 30, 512), dtype=dtype)
    shares[:2] = 1e-40  # subnormal
    order = 2 * torch.tensor(rng.permutation(256))
    exact = torch.tensor([math.fsum(shares[k::2].tolist()) for k in (0, 1)], dtype=torch.float64)
    found, other = slotted(shares), slotted(torch.stack([shares[order], shares[order + 1]], -1).reshape(-1))
    assert torch.equal(found, other)
    assert torch.allclose(found, exact, rtol=torch.finfo(torch.float64).eps * table_gradient.SLOTS.value, atol=0)
    shares[3] = torch.inf
    assert torch.equal(slotted(shares).isnan(), torch.tensor([False, True]))


def gradients_with_statistics(kernel, arrays, options, see, rng):
    """Return the gradients of a call and its statistics by the kernel, and by `Streaming` in float64 and float32."""
    rough_problem, true_problem = (
        Case(*(x.astype(dtype) for x in arrays), options).as_torch().make_problem(see=see) for dtype in ("f4", "f8")
    )
    shapes = [(*rough_problem.query.shape[:-1], rough_problem.d_v), rough_problem.query.shape[:-1]]
    shapes += [one.outputs(rough_problem)[0][0] for one in see]
    d_output, d_lse, *d_seen = (to_torch(rng.normal(size=shape).astype("f4")) for shape in shapes)
    answer = kernel.run(rough_problem)
    added = statistic_gradients(
        rough_problem, answer.lse, d_seen, compute=lambda one: solve(rough_problem.with_statistics(one)).seen[0]
    )
    wanted_tables = range(len(rough_problem.tables))
    given = GivenGradients(d_output, d_lse, (answer.output, answer.lse), wanted_tables, added, d_seen)
    true, rough = (streaming.backward(p, given._replace(saved=None)) for p in (true_problem, rough_problem))
    return kernel.backward(rough_problem, given), true, rough


def test_gradients_of_statistics(triton_kernel, rng):
    """The terms that statistics add to dP, dS and dlse, against `Streaming` in float64."""
    shapes, options = (2, 4, 20, 12), {"mask": window(9, 20), "score": softcap(3.0)}
    see = [weights(), scores(), entropy()]
    x = [rng.normal(size=size) for size in (shapes, (2, 2, 37, 12), (2, 2, 37, 8))]
    found = gradients_with_statistics(triton_kernel, x, options, see, rng)
    for name in NAMES:
        assert_within_budget(*(to_numpy(getattr(one, name)) for one in found), name)


@pytest.mark.parametrize("name", ["pair", "any", "query", "key", "head"])
@pytest.mark.parametrize("odd", [False, True])
def test_gradients_of_tables_with_statistics(triton_kernel, name, odd, rng):
    """Rows past the last query (20 queries, blocks of 16) add nothing, nor does an infinite key, where 0 · ∞ is NaN."""
    given = [rng.normal(size=(2, 2, length, 12)).astype("f4") for length in (20, 37, 37)]
    given[1][0, 0, 5, 3] = np.inf if odd else 0.5
    given[0][..., 3] = -np.abs(given[0][..., 3])  # the infinite key has weight 0
    options, see = {"score": TABLES[name](rng.normal(size=(2, 20, 37)).astype(np.float32))}, [] if odd else [scores()]
    found = gradients_with_statistics(triton_kernel, given, options, see, rng)
    for each in zip(*(one.tables for one in found), strict=True):
        assert_within_budget(*map(to_numpy, each), name)


# -- hidden pairs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_hidden_reaches_no_gradient(any_kernel, bad, rng):
    """NaN in the padding gives the same bits as zeros; gradients of queries without a visible key are 0."""
    x = [rng.normal(size=(2, 2, 40, 8)).astype(np.float32) for _ in range(4)]
    options = {"mask": padding(np.array([37, 0])), "score": softcap(5.0), "sinks": np.zeros(2, np.float32)}
    found = []
    for filler in (0.0, bad):
        q, k, v, d_o = (array.copy() for array in x)
        for array in (k, v):
            array[0, :, 37:], array[1] = filler, filler
        problem = Case(q, k, v, options).as_torch().make_problem()
        found.append(by(any_kernel)(problem, to_torch(d_o), None, None))
    for clean, poisoned in ((getattr(g, name) for g in found) for name in (*NAMES, "sinks")):
        assert np.array_equal(to_numpy(clean), to_numpy(poisoned))
    assert not to_numpy(found[1].query)[1].any()
    assert not to_numpy(found[1].key)[0, :, 37:].any()


def test_what_is_visible_reaches_its_gradients(any_kernel, rng):
    """NaN in a query, in a key, in a value, and NaN and ∞ in dO, each in a separate head."""
    q, k, v, d_o = (rng.normal(size=(1, 4, 40, 8)).astype(np.float32) for _ in range(4))
    q[0, 0, 17, 3] = k[0, 1, 17, 3] = v[0, 2, 17, 3] = d_o[0, 3, 17, 3] = np.nan
    d_o[0, 3, 19, 4] = np.inf
    problem = Case(q, k, v, {"mask": causal()}).as_torch().make_problem()
    found = by(any_kernel)(problem, to_torch(d_o), None, None)
    query, key, value = (to_numpy(getattr(found, name))[0] for name in NAMES)
    rows = [np.arange(40) == 17, np.arange(40) >= 17, np.arange(40) >= 17, np.isin(np.arange(40), [17, 19])]
    for head, odd in enumerate(rows):
        seen = (odd[:, None] & np.tri(40, dtype=bool)).any(0)  # keys that those rows see
        assert np.array_equal(~np.isfinite(query[head]), np.repeat(odd[:, None], 8, 1))
        assert np.array_equal(~np.isfinite(key[head]), np.repeat(seen[:, None], 8, 1))
        if head < 2:
            assert np.array_equal(np.isnan(value[head]), np.repeat(seen[:, None], 8, 1))
    assert np.isfinite(value[2]).all()
    column = np.arange(40)[:, None], np.arange(8)
    assert np.array_equal(np.isnan(value[3]), (column[0] <= 17) & (column[1] == 3))
    assert np.array_equal(np.isposinf(value[3]), (column[0] <= 19) & (column[1] == 4))


def test_a_key_of_weight_0_reaches_no_gradient_without_a_mask(any_kernel, rng):
    """An infinite key with scores −∞, and the NaN of its value, act as if a mask hid them."""
    q, k, v, d_o = (rng.normal(size=(1, 2, 40, 8)).astype(np.float32) for _ in range(4))
    q[..., 0] = abs(q[..., 0]) + 1
    k[..., 9, 0], v[..., 9, 3] = -np.inf, np.nan
    found = [
        by(any_kernel)(Case(q, k, v, options).as_torch().make_problem(), to_torch(d_o), None, None)
        for options in ({}, {"mask": j != 9})
    ]
    for name in NAMES:
        plain, masked = (to_numpy(getattr(each, name)) for each in found)
        np.testing.assert_allclose(plain, masked, rtol=1e-5, atol=1e-6, equal_nan=False)
    for name in ("key", "value"):
        assert not to_numpy(getattr(found[0], name))[..., 9, :].any()


def test_weights_too_small_for_float16_are_no_0(any_kernel):
    """An infinite dO reaches dV through a weight of e^−18, which float16 rounds to 0."""
    q, k, v, d_o = (np.zeros((1, 1, 40, 4), np.float16) for _ in range(4))
    q[...], k[..., 5, :], d_o[..., 3, 1] = 1.0, 9.0, np.inf
    found = by(any_kernel)(Case(q, k, v).as_torch().make_problem(), to_torch(d_o), None, None)
    assert np.isposinf(to_numpy(found.value)[..., 1]).all()
    assert not to_numpy(found.value)[..., [0, 2, 3]].any()


# -- faults ------------------------------------------------------------------------------------------------------------

FAULTS = {
    "forgotten δ": Fault(backward.compute_d_scores, "dp - delta", "dp"),
    "forgotten dlse": Fault(backward.backward_preprocess, "arrays.d_lse is not None", "arrays.d_lse is None"),
    "forgotten derivative of the score": Fault(
        backward.compute_d_scores,
        "ds * formulas.score_derivative_at(raw, *pairs, tables)",
        "ds + 0 * formulas.score_derivative_at(raw, *pairs, tables)",
    ),
    "a range of a mask missed": Fault(tile_loop.loop_over_tiles, "range(middle, stop)", "range(middle, stop - 1)"),
    "a tile of keys missed": Fault(backward_queries.process_key_range, "range(first, last)", "range(first, last - 1)"),
    "wrong key head of a group": Fault(tile_ops.load_query_block, "h // args.group", "h % (args.H // args.group)"),
    "dropped weights in dP": Fault(
        backward_queries.process_key_range,
        "tl.where(keep, dp * queries.dropout_scale, 0.0)",
        "tl.where(keep, dp * queries.dropout_scale, dp)",
    ),
    "a tile of queries missed": Fault(
        backward_keys.process_query_range, "range(first, last)", "range(first + 1, last)"
    ),
    "a query head of a group missed": Fault(backward_keys.process_heads, "range(heads)", "range(heads - 1)"),
    "wrong query heads of a group": Fault(backward_keys.compute_block, "g * args.group + part", "g + part"),
    "dropped weights in dV": Fault(backward_keys.process_query_range, "tl.where(keep, p, 0.0)", "p"),
    "the mask half transposed": Fault(arguments._build_schedule, '"jimn"', '"jinm"'),
    "a slot too far": Fault(table_gradient.add_exactly, "exponent >> 3", "(exponent + 1) >> 3"),
    "a sign dropped": Fault(table_gradient.add_exactly, "tl.where(bits < 0, -number, number)", "number"),
}

RUN_BY_DEFAULT = ("forgotten δ", "wrong query heads of a group", "the mask half transposed", "a slot too far")


def check_everything(kernel):
    """Check the gradients of a small problem that uses every part of the kernels."""
    rng = np.random.default_rng(3)
    x = [rng.normal(size=size).astype(np.float32) for size in ((1, 4, 20, 8), (1, 2, 40, 8), (1, 2, 40, 8))]
    score = 4 * np.tanh(s / 4) + table(rng.normal(size=24).astype(np.float32))[np.clip(i - j + 12, 0, 23)]
    case = Case(*x, {"mask": causal("lower right"), "score": score, "dropout": 0.2, "seed": 3})
    check(case, "torch", by(kernel))


def test_what_faults_are_planted_in_passes(triton_kernel):
    check_everything(triton_kernel)


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in RUN_BY_DEFAULT else pytest.mark.soak) for name in FAULTS]
)
def test_every_fault_is_seen(fault, triton_kernel, plant):
    plant(FAULTS[fault])
    with pytest.raises(AssertionError, match=r"budget|not equal"):
        check_everything(triton_kernel)
