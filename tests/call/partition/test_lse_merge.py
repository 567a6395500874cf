"""`sightline.merge`: attention on parts of the keys, merged, against attention on all keys."""

import math
from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import sightline
from fault_planting import Fault, make_fault_test
from gradient_checks import NAMES, differentiated, seeds_of
from sightline import i, j, lse, merge
from sightline.api.kernels import solve
from sightline.arrays.operations import to_numpy
from sightline.call.kernel import Result
from sightline.call.partition.parts import add_parts
from sightline.call.problem import make_problem
from sightline.errors import DeviceError, DtypeError, ParameterError, ShapeError
from sightline.reference.accuracy import compute_baseline as plain_of
from sightline.reference.accuracy import summation_orders
from sightline.reference.definition import compute_stages
from sightline.reference.dropout import keep_factor
from sightline.reference.testing import assert_conforms, assert_within_budget
from strategies import DTYPES, cases, dense_mask, to_torch

SEE = [lse()]


def parts_of(problem, cuts):
    """(out, lse) for each part of the keys between cuts; the first part has the sink."""
    mask = None if problem.mask is None else dense_mask(problem)
    for place, (start, stop) in enumerate(pairwise([0, *cuts, problem.m])):
        part = replace(
            problem,
            key=problem.key[..., start:stop, :],
            value=problem.value[..., start:stop, :],
            mask=None if mask is None else sightline.dense(mask[..., start:stop]),
            sinks=problem.sinks if place == 0 else None,
        )
        result = solve(part)
        yield result.output, result.lse


def in_parts(*cuts):
    """A kernel's `run` that splits the keys at these cuts and merges the parts."""
    return lambda problem: Result(*merge(parts_of(problem, cuts)))


def check_merge():
    """Check conformance with scores that grow from part to part, so that every part rescales the earlier parts."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=size).astype(np.float32) for size in ((2, 4, 70, 16), (2, 2, 300, 16), (2, 2, 300, 9)))
    k *= np.linspace(0.1, 3, 300, dtype=np.float32)[:, None]
    assert_conforms(in_parts(50, 120, 299), make_problem(q, k, v))
    for sinks in (None, np.ones(4)):
        assert_conforms(in_parts(1, 200), make_problem(q, k, v, mask=(j > 3 * i) & (i > 4), sinks=sinks))


# -- values ------------------------------------------------------------------------------------------------------------


@given(st.data(), cases(dropout=False, poison=False, largest=4000))
@settings(max_examples=20)
def test_parts_of_any_problem_merge(data, case):
    """Every dtype, mask and shape; a part may have no key, and a query may attend to no key in some or all parts.

    Scores have their usual size: the rounding error of an lse is half a unit in its last place, so the weights of parts
    are less accurate for a large lse.
    """
    case.options.pop("score", None)
    case.options.pop("scale", None)
    problem = case.make_problem()
    cuts = sorted(data.draw(st.lists(st.integers(0, problem.m), max_size=4)))
    assert_conforms(in_parts(*cuts), problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_gives_the_result_of_numpy(rng, dtype):
    outs = [rng.normal(size=(2, 3, 5)).astype(DTYPES[dtype]) for _ in range(3)]
    lses = [rng.normal(size=(2, 3)).astype("float64" if dtype == "float64" else "float32") for _ in range(3)]
    expected = merge(zip(outs, lses, strict=True))
    found = merge([(to_torch(out), to_torch(part)) for out, part in zip(outs, lses, strict=True)])
    for given_, wanted in zip(found, expected, strict=True):
        assert str(given_.dtype) == f"torch.{wanted.dtype}"
        assert_within_budget(given_, wanted.astype(np.float64), wanted.astype(np.float64))


def test_scores_may_be_formulas(rng):
    """Each part counts its keys from 0, so the formula adds the position of the first key."""
    q, k, v = (rng.normal(size=(1, 2, 40, 8)).astype(np.float32) for _ in range(3))
    mask, score = (i >= j) & (i - j < 9), sightline.softcap(2.0)
    whole = make_problem(q, k, v, mask=mask, score=score)

    def run(problem):
        first = sightline.attention(q, k[..., :25, :], v[..., :25, :], mask=mask, score=score, see=SEE)
        shifted = (i >= j + 25) & (i - j - 25 < 9)
        return Result(
            *merge([first, sightline.attention(q, k[..., 25:, :], v[..., 25:, :], mask=shifted, score=score, see=SEE)])
        )

    assert_conforms(run, whole)


def test_one_part_is_unchanged(rng):
    out, own = rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=3).astype(np.float32)
    again, its = merge([(out, own)])
    assert np.array_equal(again, out)
    assert np.array_equal(its, own)


@pytest.mark.parametrize("count", [2, 100, 1000])
def test_many_parts_in_any_order(rng, count):
    """As many parts as keys: the value of a key is the output of its part, and the score its lse."""
    problem = make_problem(*(rng.normal(size=(rows, 3)).astype(np.float32) for rows in (6, count, count)))
    for order in (np.arange(count), rng.permutation(count)):
        parts = list(parts_of(problem, range(1, count)))
        assert_conforms(lambda _, parts=parts, order=order: Result(*merge([parts[k] for k in order])), problem)


def test_parts_with_dropout_merge(rng):
    """Dropout applies to the weights of each part with the part's seed; the normalisers are those without dropout."""
    q, k, v = (rng.normal(size=(1, 1, 30, 8)) for _ in range(3))
    drops = [make_problem(q, k[..., a:z, :], v[..., a:z, :], dropout=0.5, seed=z) for a, z in ((0, 13), (13, 30))]
    keep = np.concatenate([keep_factor(part, np, slice(0, 30), slice(0, part.m)) for part in drops], axis=-1)
    whole = make_problem(q, k, v)
    expected = (compute_stages(whole).weights * keep) @ v
    rough = [(compute_baseline * keep) @ v for compute_baseline in plain_of(whole).weights]
    out, _ = merge([(result.output, result.lse) for result in map(solve, drops)])
    assert_within_budget(out, expected, rough)


# -- rows without keys, and normalisers of any size --------------------------------------------------------------------


@pytest.mark.parametrize("filler", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_output_of_a_part_without_keys_is_not_read(rng, filler, kind):
    """The output may be anything; other libraries leave NaN there."""
    a, b = rng.normal(size=(2, 3, 4))
    own, other = np.array([0.5, -np.inf, -np.inf]), np.array([-np.inf, 2.0, -np.inf])
    a[1:], b[[0, 2]] = filler, filler
    parts = [(a, own), (b, other)]
    out, joined = merge(parts if kind == "numpy" else [tuple(map(torch.from_numpy, part)) for part in parts])
    assert np.array_equal(to_numpy(out), [a[0], b[1], np.zeros(4)])
    assert np.array_equal(to_numpy(joined), [0.5, 2.0, -np.inf])


@pytest.mark.parametrize("filler", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(("gap", "wide"), [(-1e4, "float32"), (-1e4, "float64"), (-200.0, "float64")])
def test_the_output_of_a_part_whose_factor_underflows_is_not_read(rng, filler, kind, gap, wide):
    """exp(gap) is 0 in float32, and for −200 not in float64. Attention over the union of the keys is finite too."""
    a, b = rng.normal(size=(2, 3, 4)).astype(np.float32)
    own, other = np.array([0.5, gap, 1.0], wide), np.array([gap, 2.0, 1.0], wide)
    a[1], b[0] = filler, filler
    parts = [(a, own), (b, other)]
    arrays = [torch.from_numpy(x).requires_grad_() for part in parts for x in part]
    out, joined = merge(parts if kind == "numpy" else [(arrays[0], arrays[1]), (arrays[2], arrays[3])])
    assert np.array_equal(to_numpy(out)[:2], [a[0], b[1]])
    assert np.array_equal(to_numpy(joined)[:2], [0.5, 2.0])
    if kind == "torch":
        d_a, d_own, d_b, d_other = torch.autograd.grad([out.sum(), joined.sum()], arrays)
        assert np.array_equal(to_numpy(d_a)[:2], [[1.0] * 4, [0.0] * 4])
        assert np.array_equal(to_numpy(d_b)[:2], [[0.0] * 4, [1.0] * 4])
        assert_within_budget(d_own[:2], np.array([1.0, 0.0]), np.array([1.0, 0.0]))
        assert_within_budget(d_other[:2], np.array([0.0, 1.0]), np.array([0.0, 1.0]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [-1e30, -1e4, 0.0, 1e4, 1e30, 1.5e38])
def test_normalisers_of_any_size(rng, size, dtype):
    """Two equal parts have half the weight each, though the rounded lse of large scores cannot show the second part."""
    a, b = rng.normal(size=(2, 3, 4)).astype(dtype)
    level = np.full(3, size, dtype)
    out, joined = merge([(a, level), (b, level)])
    assert_within_budget(out, (a.astype(np.float64) + b) / 2, (a + b) / 2)
    assert_within_budget(joined, level.astype(np.float64) + math.log(2), level + dtype(math.log(2)))


@pytest.mark.parametrize("size", [1e4, 1e30, 3e38])
def test_a_much_larger_normaliser_takes_all_weight(rng, size):
    a, b = rng.normal(size=(2, 3, 4)).astype(np.float32)
    level = np.full(3, size, np.float32)
    for parts in ([(a, level), (b, -level)], [(b, -level), (a, level)]):
        out, joined = merge(parts)
        assert np.array_equal(out, a)
        assert np.array_equal(joined, level)


def test_nan_and_infinite_normalisers_give_nan():
    """A NaN or ∞ score comes from the caller: its row is NaN, other rows are not."""
    out = np.ones((3, 2), np.float32)
    level = np.array([np.nan, np.inf, 0], np.float32)
    found, joined = merge([(out, level), (out, np.zeros(3, np.float32))])
    assert np.isnan(found).tolist() == [[True] * 2, [True] * 2, [False] * 2]
    assert np.isnan(joined).tolist() == [True, True, False]


# -- gradients ---------------------------------------------------------------------------------------------------------

BLIND = [[0.3, -math.inf, 1.0, -math.inf], [-1.0, 0.5, -math.inf, -math.inf], [2.0, 0.1, -math.inf, -math.inf]]


def finite_merge(*flat):
    """Outputs and lses in one tuple, without rows of lse −∞, whose differences are undefined."""
    out, joined = merge(zip(flat[: len(flat) // 2], flat[len(flat) // 2 :], strict=True))
    return out, torch.where(joined == -math.inf, 0.0, joined)


def inputs():
    generator = torch.Generator().manual_seed(1)
    outs = [torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in BLIND]
    return outs, [torch.tensor(level, dtype=torch.float64).requires_grad_() for level in BLIND]


def test_gradients_to_second_order():
    outs, lses = inputs()
    assert gradcheck(finite_merge, (*outs, *lses))
    assert gradgradcheck(finite_merge, (*outs, *lses))


def test_third_derivatives_are_finite_and_right():
    """If every part has keys, the derivatives are those of the textbook formula."""
    outs, lses = inputs()

    def third(function):
        value = sum((part**3).sum() for part in function(*outs, *lses))
        for _ in range(2):
            found = torch.autograd.grad(value, (*outs, *lses), create_graph=True, allow_unused=True)
            value = sum((g**2).sum() for g in found if g is not None)
        return torch.autograd.grad(value, (*outs, *lses))

    def textbook(*flat):
        outs, lses = torch.stack(flat[:3])[:, :1], torch.stack(flat[3:])[:, :1]
        joined = torch.logsumexp(lses, 0)
        return (torch.exp(lses - joined)[..., None] * outs).sum(0), joined

    seen = third(lambda *flat: tuple(part[:1] for part in finite_merge(*flat)))
    every = third(finite_merge)
    assert all(torch.isfinite(g).all() for g in every)
    for found, truth in zip(seen, third(textbook), strict=True):
        assert_within_budget(found[:1], to_numpy(truth)[:1], to_numpy(truth.float())[:1])


def test_rows_without_keys_have_no_gradient():
    outs, lses = inputs()
    out, joined = merge(zip(outs, lses, strict=True))
    found = torch.autograd.grad([out, joined], (*outs, *lses), [torch.ones_like(out), torch.ones_like(joined)])
    for part, level in zip(found[:3] * 2, [*lses, *lses], strict=False):
        assert not part[level == -math.inf].any()
    for gradient, level in zip(found[3:], lses, strict=True):
        assert not gradient[level == -math.inf].any()
        assert torch.isfinite(gradient).all()


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gradients_through_parts_equal_those_of_the_whole(rng, dtype):
    q, k, v = (rng.normal(size=(1, 2, 24, 8)).astype(DTYPES[dtype]) for _ in range(3))
    problem = make_problem(q, k, v, mask=(i >= j) & (i != 3), see=SEE)
    seeds = seeds_of(problem)
    seeds = [[d_output, d_lse, 0 * d_weights] for d_output, d_lse, d_weights in seeds]
    oracle, _ = differentiated(problem, seeds, "float64", 0)
    compute_baseline = [differentiated(problem, seeds, dtype, order)[0] for order in summation_orders(problem)]
    query, key, value = (to_torch(x).requires_grad_() for x in (q, k, v))
    parts = [
        sightline.attention(query, key[..., a:z, :], value[..., a:z, :], mask=(i >= j + a) & (i != 3), see=SEE)
        for a, z in ((0, 7), (7, 24))
    ]
    out, joined = merge(parts)
    d_output, d_lse = (to_torch(seed) for seed in seeds[0][:2])
    d_lse = torch.where(joined == -math.inf, 0.0, d_lse)
    found = torch.autograd.grad(
        [out, joined], [query, key, value], [d_output.to(out.dtype), d_lse.to(joined.dtype).reshape(joined.shape)]
    )
    for what, answer, truth, *rough in zip(NAMES, found, oracle, *compute_baseline, strict=True):
        assert_within_budget(answer, truth, rough, what)


def test_compiled_without_graph_breaks():
    torch.compiler.reset()
    compiled = torch.compile(finite_merge, fullgraph=True, backend="aot_eager")
    outs, lses = inputs()
    expected, found = finite_merge(*outs, *lses), compiled(*outs, *lses)
    for wanted, given_ in zip(expected, found, strict=True):
        assert torch.equal(given_, wanted)
    wanted, given_ = (torch.autograd.grad(sum(x.sum() for x in pair), (*outs, *lses)) for pair in (expected, found))
    for one, other in zip(wanted, given_, strict=True):
        assert_within_budget(other, to_numpy(one), to_numpy(one.float()))


# -- errors ------------------------------------------------------------------------------------------------------------

OUT, LSE = np.zeros((2, 4, 3), np.float32), np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("parts", "error", "says"),
    [
        (None, ParameterError, "merge of a NoneType"),
        (3.0, ParameterError, "an iterable of pairs"),
        (np.array(3.0), ParameterError, "merge of a ndarray"),
        (torch.tensor(3.0), ParameterError, "merge of a Tensor"),
        ([], ParameterError, "no parts"),
        ([None], ParameterError, "part 0 is a NoneType"),
        ("ab", ParameterError, "part 0 is a str"),
        ((OUT, LSE), ParameterError, "part 0 is a ndarray"),
        ([(None, LSE)], DtypeError, "out of part 0 is a NoneType"),
        ([(OUT, None)], DtypeError, "lse of part 0 is a NoneType"),
        ([OUT], ParameterError, "part 0 is a ndarray"),
        ([(OUT, LSE, LSE)], ParameterError, "pairs"),
        ([(OUT, 3.0)], DtypeError, "lse of part 0 is a float"),
        ([(OUT, [1, 2])], DtypeError, "lse of part 0 is a list"),
        ([(OUT.astype(int), LSE)], DtypeError, "int64"),
        ([(OUT, LSE), (OUT.astype(np.float64), LSE)], DtypeError, "out of part 1"),
        ([(OUT, LSE), (OUT, LSE.astype(np.float64))], DtypeError, "lse of part 1"),
        ([(OUT, LSE.astype(np.float16))], DtypeError, "float32 or float64"),
        ([(OUT.astype(np.float64), LSE)], DtypeError, "allowed: float64"),
        ([(OUT, LSE), (OUT[:1], LSE[:1])], ShapeError, "out of part 1"),
        ([(OUT, LSE[:1])], ShapeError, "part 0"),
        ([(OUT[0, 0], LSE[0, 0])], ShapeError, "part 0"),
        ([(OUT, LSE), (torch.zeros(2, 4, 3), torch.zeros(2, 4))], DeviceError, "out of part 1 is torch"),
        ([(OUT, torch.zeros(2, 4))], DeviceError, "lse of part 0"),
        ([(torch.zeros(2, 4, 3), torch.zeros(2, 4, device="meta"))], DeviceError, "meta"),
    ],
)
def test_errors_name_what_does_not_fit(parts, error, says):
    with pytest.raises(error, match=says):
        merge(parts)


def test_narrow_outputs_have_a_wide_lse():
    out = np.ones((4, 3), ml_dtypes.bfloat16)
    for dtype in (np.float32, np.float64):
        found, joined = merge([(out, np.zeros(4, dtype))] * 2)
        assert found.dtype == ml_dtypes.bfloat16
        assert joined.dtype == dtype


# -- planted faults ----------------------------------------------------------------------------------------------------

FAULTS = {
    "dropped rescale": Fault(add_parts, "weigh(xp.astype(factor, dtype)[..., None], part.output)", "part.output"),
    "shares not divided by their sum": Fault(add_parts, "factor / total", "factor"),
    "a part left out": Fault(
        add_parts, "list(zip(factors, parts, strict=True))", "list(zip(factors, parts, strict=True))[1:]"
    ),
    "lse without the shift": Fault(add_parts, "finite + xp.log(total)", "xp.log(total)"),
    "lse by the largest alone": Fault(add_parts, "finite + xp.log(total)", "finite"),
    "blind rows not told": Fault(
        add_parts, "xp.where(is_empty, -math.inf, finite + xp.log(total))", "finite + xp.log(total)"
    ),
}


test_faults = make_fault_test(FAULTS, check_merge, "budget")
