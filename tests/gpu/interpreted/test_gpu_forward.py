"""The forward and decoding kernels in Triton conform to the float64 definition."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import sightline
from on_device import DEVICE
from sample_problems import arrays
from sightline import alibi, causal, dense, documents, h, i, j, lse, padding, s, softcap, table, top_k, where, window
from sightline.call import call_cache
from sightline.call.problem import make_problem
from sightline.gpu.launch.forward import uses_decode
from sightline.reference.testing import LAYOUTS, assert_conforms
from strategies import DTYPES, Case, cases


def nested(depth):
    """Return s, negated `depth` times."""
    score = s
    for _ in range(depth):
        score = -score
    return score


EXAMPLES = {"float32": 5, "bfloat16": 3, "float16": 2, "float64": 2}  # drawn problems
MANY_EXAMPLES = [pytest.param(dtype, 1000, marks=pytest.mark.soak) for dtype in DTYPES]
SINKS = np.array([-1.0, 0.0, 2.0, -np.inf], np.float32)


@pytest.mark.parametrize(("dtype", "examples"), [*EXAMPLES.items(), *MANY_EXAMPLES])
def test_drawn_problems(triton_kernel, dtype, examples):
    @settings(max_examples=examples)
    @given(cases(dtypes=(dtype,)))
    def conforms(case):
        assert_conforms(triton_kernel.run, case.as_torch().make_problem(see=[lse()]))

    conforms()


PROBLEMS = {
    "grouped, capped, sinks": (
        {"shape": (2, 4, 40, 16), "groups": 2, "m": 57},
        {"mask": window(10, 3), "score": softcap(20.0), "sinks": SINKS},
    ),
    "biased, dropout": (
        {"shape": (2, 2, 40, 16), "d_v": 20},
        {"score": alibi(2), "mask": documents(lengths=[1, 20, 19]), "dropout": 0.3, "seed": 2**40 + 1},
    ),
    "a sink beyond base 2, and the least sink": (
        {"shape": (1, 2, 20, 8), "m": 37},
        {"sinks": np.array([3e38, np.finfo(np.float32).min], np.float32), "mask": i != 3},
    ),
    "a scale beyond float32": (
        {"shape": (1, 2, 20, 8), "m": 37},
        {"scale": 1e-40, "sinks": np.array([0.3, -1.0], np.float32)},
    ),
    "a deeply nested formula": ({"shape": (1, 1, 4, 8)}, {"score": nested(300)}),
    "all dropped": ({"shape": (1, 1, 20, 16)}, {"dropout": 1.0, "seed": 1}),
    "scores beyond the last place of 1": ({"shape": (1, 1, 20, 16), "m": 70}, {"scale": 1e12}),
    "a negative scale": ({"shape": (1, 1, 20, 16), "m": 70}, {"scale": -0.5, "mask": causal()}),
    "whole numbers beyond 32 bits": ({"shape": (1, 1, 20, 16)}, {"mask": (i * 2**33 - j * 2**33) % 3 != 1}),
    "bits of whole numbers": (
        {"shape": (1, 1, 20, 16)},
        {"mask": ((i - 9) & (j | 5)) != 1, "score": s + ((i ^ j) & (2**33 + 6)) / 8},
    ),
    "wide": ({"shape": (1, 1, 17, 130), "d_v": 250}, {"mask": causal()}),
    "decoding": ({"shape": (2, 4, 1, 24), "groups": 2, "m": 130}, {"mask": padding([130, 1])}),
    "decoding by several queries, sinks": (
        {"shape": (1, 4, 5, 24), "groups": 1, "m": 131},
        {"mask": causal("lower right"), "sinks": SINKS, "score": s - table(np.arange(4.0))[h] * (j - i) / 99},
    ),
    "decoding, dropout": ({"shape": (1, 2, 3, 16), "m": 70}, {"dropout": 0.3, "seed": 2**63 + 5}),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_named_problems(any_kernel, name):
    shapes, options = PROBLEMS[name]
    problem = Case(*arrays(dtype="float32", **shapes), options).as_torch().make_problem(see=[lse()])
    assert uses_decode(problem) == name.startswith("decoding")
    assert_conforms(any_kernel.run, problem)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("backwards", "unaligned")])
def test_layouts(triton_kernel, layout):
    """Kernels read arrays of any layout without a copy; `to_torch` copies layouts that torch has no strides for."""
    x = [LAYOUTS[layout](array) for array in arrays((2, 4, 20, 8), "float32", d_v=20, groups=2, m=35)]
    case = Case(*x, {"mask": causal()}).as_torch()
    assert_conforms(triton_kernel.run, case.make_problem())


def test_leading_axes_that_do_not_lie_one_in_the_other(triton_kernel):
    query, key, value = (torch.from_numpy(x).permute(1, 0, 2, 3, 4) for x in arrays((3, 2, 1, 9, 8), "float32"))
    assert_conforms(
        triton_kernel.run, make_problem(query, key[:1].expand(2, -1, -1, -1, -1), value, mask=table([2, 9])[h] > j)
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(1, 2, 40, 16), (1, 2, 2, 16)], ids=["forward", "decoding"])
def test_what_a_mask_hides_reaches_nothing(any_kernel, shape, bad):
    """Every key is visible to some queries of a tile and hidden from others."""
    m = 75 if shape[2] < 16 else 40
    query, key, value = arrays(shape, "float32", m=m)
    key[..., 5, 0] = value[..., 3, :2] = value[..., 30, 1] = value[..., -1, 3:5] = bad
    value[..., 31, 1] = -bad
    seen = np.random.default_rng(3).random((shape[2], m)) < 0.3
    seen[0, [3, 5, 30, 31, -1]] = False
    seen[1] = np.arange(m) == 30
    case = Case(query, key, value, {"mask": dense(seen)}).as_torch()
    assert_conforms(any_kernel.run, case.make_problem(see=[lse()]))


@pytest.mark.parametrize("shape", [(1, 2, 40, 16), (1, 2, 2, 16)], ids=["forward", "decoding"])
@pytest.mark.parametrize(
    "options", [{"score": where(abs(s) > 1e-6, s, -np.inf)}, {"dropout": 0.5, "seed": 3}], ids=["by scores", "dropped"]
)
def test_weights_of_0_take_nothing_without_a_mask(any_kernel, shape, options):
    query, key, value = arrays(shape, "float32", m=75 if shape[2] < 16 else 40)
    key[..., 9, :] = key[..., 12, :] = 0.0
    value[..., 9, :3] = np.nan
    value[..., 12, 5] = -np.inf
    assert_conforms(any_kernel.run, Case(query, key, value, options).as_torch().make_problem(see=[lse()]))


@pytest.mark.parametrize("shape", [(1, 2, 40, 16), (1, 2, 2, 16)], ids=["forward", "decoding"])
def test_weights_of_0_by_an_infinite_key_take_nothing(any_kernel, shape):
    """The weight is 0 where Q Kᵀ is −∞, also without a formula."""
    query, key, value = arrays(shape, "float16", m=75 if shape[2] < 16 else 40)
    query[..., 0] = abs(query[..., 0]) + 1
    key[..., [9, 12], 0] = -np.inf
    value[..., 9, :3], value[..., 12, 5] = np.nan, np.inf
    problem = Case(query, key, value).as_torch().make_problem()
    assert torch.isfinite(any_kernel.run(problem).output).all()
    assert_conforms(any_kernel.run, problem)


@pytest.mark.parametrize("shape", [(1, 1, 20, 4), (1, 1, 1, 4)], ids=["forward", "decoding"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_too_small_for_float16_are_no_0(any_kernel, shape, bad):
    """A weight of e^−18 times the largest, which float16 rounds to 0."""
    query, key, value = np.ones(shape), np.zeros((1, 1, 600, 4)), np.zeros((1, 1, 600, 4))
    key[..., 5, :], value[..., 9, 0] = 9.0, bad
    problem = Case(*(x.astype(np.float16) for x in (query, key, value))).as_torch().make_problem()
    assert_conforms(any_kernel.run, problem)


def test_the_same_bits_every_time(triton_kernel):
    problem = Case(*arrays((2, 3, 33, 32), "float32", m=70), {"mask": causal("lower right")}).as_torch().make_problem()
    first, second = (triton_kernel.run(problem) for _ in range(2))
    assert torch.equal(first.output, second.output)
    assert torch.equal(first.lse, second.lse)


def test_dispatch_through_torch(triton_kernel, monkeypatch, fresh_calls):
    """`attention` runs the kernels through torch's operator and autograd, with statistics and a learned table."""
    dispatch = sys.modules["sightline.api.kernels"]
    x = [torch.from_numpy(a).to(DEVICE).requires_grad_() for a in arrays((2, 4, 21, 12), "float32", groups=2, m=35)]
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE, requires_grad=True)
    kernel = getattr(triton_kernel, "kernel", triton_kernel)
    options = {"mask": causal("lower right"), "score": s - table(slopes)[h] * (i - j), "see": [lse(), top_k(2)]}

    def compute(kernel=None):
        output, (normaliser, top) = sightline.attention(*x, kernel=kernel, **options)
        return [output, normaliser, top.weights, *torch.autograd.grad(output.sum() + normaliser.sum(), [*x, slopes])]

    expected = compute("streaming")
    kind, called = type(kernel), []
    run, backward = kind.run, kind.backward
    monkeypatch.setattr(kind, "run", lambda *given, **more: called.append("forward") or run(*given, **more))
    monkeypatch.setattr(kind, "backward", lambda *given, **more: called.append("backward") or backward(*given, **more))
    others = [other for other in dispatch.KERNELS if other.name != kernel.name]  # names are unique
    monkeypatch.setattr(dispatch, "KERNELS", (kernel, *others))
    call_cache.clear()  # the calls of other kernels
    for found, sound in zip(compute(), expected, strict=True):
        torch.testing.assert_close(found, sound)
    assert called == ["forward", "backward"]
