"""Forward derivatives of output and lse: the generated kernel and streaming, against a definition in float64."""

import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.func import jvp

import sightline
from fault_planting import Fault, plant
from sightline import h, i, j, s, table
from sightline.api.kernels import make_plan, push_forward
from sightline.call.kernel import Tangents
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.cpu.kernels.tangent import Tangent
from sightline.cpu.launch import forward as launch
from sightline.errors import DtypeError, ParameterError, ShapeError
from sightline.reference import streaming
from sightline.reference.definition import compute_stages
from sightline.reference.dropout import keep_factor
from sightline.reference.testing import assert_within_budget

pytestmark = pytest.mark.filterwarnings(r"ignore:.torch\.jit:DeprecationWarning")  # torch.func's own
# (B, H, G, n, m, d_k, d_v), options: a mask, a score with a learned table, sinks
CASES = {
    "plain": ((2, 4, 2, 70, 130, 16, 24), ()),
    "odd widths": ((1, 1, 1, 5, 7, 3, 5), ()),
    "causal": ((1, 3, 3, 67, 67, 33, 8), ("mask",)),
    "learned": ((2, 4, 1, 20, 70, 16, 8), ("mask", "score")),
    "sinks": ((2, 2, 2, 33, 40, 8, 8), ("mask", "score", "sinks")),
    "dropout": ((1, 2, 1, 21, 70, 8, 16), ("dropout",)),
    "a negative scale": ((1, 2, 1, 21, 70, 8, 16), ("negative",)),
    "a scale of 0": ((1, 2, 1, 21, 70, 8, 16), ("zero",)),
}
SCALES = {"negative": -0.3, "zero": 0.0}


class Drawn:
    """A problem with tangents of all inputs, and their definition in float64."""

    def __init__(self, rng, name, dtype):
        (B, H, G, n, m, d_k, d_v), self.options = CASES[name]
        shapes = {
            "query": (B, H, n, d_k),
            "key": (B, G, m, d_k),
            "value": (B, G, m, d_v),
            "bias": (H, n, m),
            "sinks": (H,),
        }
        self.inputs = {key: rng.normal(size=shape).astype(dtype) for key, shape in shapes.items()}
        self.directions = {key: rng.normal(size=shape).astype(dtype) for key, shape in shapes.items()}
        self.scale = next((scale for key, scale in SCALES.items() if key in self.options), d_k**-0.5)
        options = {"scale": self.scale}
        if "mask" in self.options:
            options["mask"] = i + m - n >= j
        if "score" in self.options:
            options["score"] = 3 * np.tanh(s + table(self.inputs["bias"])[h, i, j])
        if "sinks" in self.options:
            options["sinks"] = self.inputs["sinks"]
        if "dropout" in self.options:
            options |= {"dropout": 0.3, "seed": 5}
        self.problem = make_problem(*[self.inputs[key] for key in ("query", "key", "value")], **options)

    def tangents(self, names):
        given = {key: self.directions[key] for key in names if key in ("query", "key", "value")}
        tables = (self.directions["bias"],) if "score" in self.options and "bias" in names else ()
        sinks = self.directions["sinks"] if "sinks" in self.options and "sinks" in names else None
        return Tangents(**given, tables=tables, sinks=sinks)

    def define(self, names, dtype="float64", key_step=1):
        """Return the tangents of output and lse by the dense formula in this dtype; step −1 starts at the last key."""
        problem, group = self.problem, self.problem.group
        order = np.arange(problem.m)[::key_step].copy()
        keep = keep_factor(problem, np, slice(0, problem.n), slice(0, problem.m), np.float64)
        keep = torch.as_tensor(keep).expand(*problem.extent)[..., order].to(getattr(torch, dtype))

        def attend(query, key, value, bias, sinks):
            key, value = (x.repeat_interleave(group, 1)[:, :, order] for x in (key, value))
            scores = query @ key.mT * self.scale
            if "score" in self.options:
                scores = 3 * torch.tanh(scores + bias[..., order])
            if "mask" in self.options:
                visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(problem.m - problem.n)
                scores = scores.masked_fill(~visible[:, order], -torch.inf)
            column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
            joined = torch.cat([scores, column], -1) if "sinks" in self.options else scores
            lse = joined.logsumexp(-1)
            weights = (scores - lse[..., None]).exp()
            return weights * keep @ value, lse

        def read(array, factor=1):
            return torch.from_numpy(array.astype(np.float64) * factor).to(getattr(torch, dtype))

        directions = (read(x, key in names) for key, x in self.directions.items())
        return [x.double().numpy() for x in jvp(attend, tuple(map(read, self.inputs.values())), tuple(directions))[1]]

    def term_sizes(self, names):
        """Return bounds on the sums of the magnitudes of the terms of each tangent of output and lse."""

        def read(arrays, is_given):
            sizes = {key: np.abs(x.astype(np.float64)) * is_given(key) for key, x in arrays.items()}
            return [np.repeat(x, self.problem.group, 1) if k in (1, 2) else x for k, x in enumerate(sizes.values())]

        (query, key, value, *_), weights = read(self.inputs, lambda _: True), compute_stages(self.problem).weights
        d_query, d_key, d_value, d_bias, d_sinks = read(self.directions, names.__contains__)
        d_scores = abs(self.scale) * (d_query @ key.swapaxes(2, 3) + query @ d_key.swapaxes(2, 3))
        if "score" in self.options:
            d_scores = 3 * (d_scores + d_bias)  # 3 is the largest slope of 3 · tanh
        d_lse = (weights * d_scores).sum(-1) + (1 - weights.sum(-1)) * d_sinks[:, None]
        d_output = (weights * (d_scores + d_lse[..., None])) @ value + weights @ d_value
        return d_output / (1 - self.problem.dropout), d_lse


def by_kernel(problem, tangents, threads=None):
    problem = replace(problem, threads=threads)
    result = Cpu().run(problem)
    found = Cpu().tangent(problem, tangents, (result.output, result.lse))
    assert found is not None
    return found


def by_streaming(problem, tangents):
    result = Cpu().run(problem)
    return streaming.tangent(problem, tangents, (result.output, result.lse))


def check(drawn, compute, names):
    """Compare with float64. The budget is that of the dense computation in the problem's dtype, in two orders."""
    output, lse = compute(drawn.problem, drawn.tangents(names))
    found = output, lse.astype(drawn.problem.accumulator)  # computed in this dtype, and returned in float64
    baseline = map(np.stack, zip(*(drawn.define(names, drawn.problem.dtype, step) for step in (1, -1)), strict=True))
    for each in zip(found, drawn.define(names), baseline, ("output", "lse"), drawn.term_sizes(names), strict=True):
        assert_within_budget(*each)


ALL = ("query", "key", "value", "bias", "sinks")


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("compute", [by_kernel, by_streaming])
@pytest.mark.parametrize("name", CASES)
def test_tangents(rng, name, compute):
    check(Drawn(rng, name, np.float64), compute, ALL)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, np.float32) for name in ("plain", "sinks")),
        *((name, ml_dtypes.bfloat16) for name in ("plain", "odd widths", "dropout")),
        ("causal", np.float16),
    ],
)
def test_tangents_of_other_dtypes(rng, name, dtype):
    check(Drawn(rng, name, dtype), by_kernel, ALL)


@pytest.mark.parametrize(
    "names", [("query",), ("key",), ("value",), ("bias",), ("sinks",), ("query", "value"), ()], ids=str
)
@pytest.mark.parametrize("compute", [by_kernel, by_streaming])
def test_tangents_of_some_inputs(rng, names, compute):
    check(Drawn(rng, "sinks", np.float64), compute, names)


def test_any_number_of_threads_gives_the_same_bits(rng):
    drawn = Drawn(rng, "plain", np.float32)
    one, two = (by_kernel(drawn.problem, drawn.tangents(ALL), threads) for threads in (1, 2))
    assert all(np.array_equal(x, y) for x, y in zip(one, two, strict=True))


def test_strides_of_tangents(rng):
    drawn = Drawn(rng, "plain", np.float32)
    expected = by_kernel(drawn.problem, drawn.tangents(ALL))
    for key in ("query", "key", "value"):
        drawn.directions[key] = np.asfortranarray(drawn.directions[key])
    assert all(
        np.array_equal(x, y) for x, y in zip(by_kernel(drawn.problem, drawn.tangents(ALL)), expected, strict=True)
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_values_reach_no_tangent(rng, value):
    """The kernel refuses its own result, and streaming computes it."""
    drawn = Drawn(rng, "causal", np.float64)
    hidden = {"mask": j < 60, "scale": 0.3}
    q, k, v = (drawn.inputs[key] for key in ("query", "key", "value"))
    expected = by_kernel(make_problem(q, k, v, **hidden), drawn.tangents(ALL))
    for array in (k, v, drawn.directions["key"], drawn.directions["value"]):
        array[:, :, 60:] = value
    problem = make_problem(q, k, v, **hidden)
    result = Cpu().run(problem)
    saved = result.output, result.lse
    assert Cpu().tangent(problem, drawn.tangents(ALL), saved) is None
    found = push_forward(problem, make_plan(problem), drawn.tangents(ALL), saved)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


def test_queries_without_keys_have_tangent_0(rng):
    drawn = Drawn(rng, "causal", np.float32)
    problem = make_problem(*[drawn.inputs[key] for key in ("query", "key", "value")], mask=i > 3)
    for compute in (by_kernel, by_streaming):
        output, lse = compute(problem, drawn.tangents(ALL))
        assert not output[:, :, :4].any()
        assert not lse[:, :, :4].any()


FAULTS = {
    "no tangent of key": Fault(Tangent.process_tile, "self.dq_t is None", "True"),
    "no slope": Fault(Tangent.differentiate_weight, "tangent = tangent * slope.broadcast(self.lanes)", "pass"),
    "the sum without sinks": Fault(Tangent.store, "total = total + given.get()", "pass"),
    "the sum after dropout": Fault(
        Tangent.differentiate, "self.tile_sum[v].get() + d", "self.tile_sum[v].get() + 0.7 * d"
    ),
    "no tangent of tables": Fault(launch.tangent, "score_tangent", "(lambda *_: None)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(rng, fault, monkeypatch, fresh_kernels):
    plant(FAULTS[fault], monkeypatch)
    name = "dropout" if "dropout" in fault else "sinks"
    with pytest.raises(AssertionError, match="budget"):
        check(Drawn(rng, name, np.float64), by_kernel, ALL)


# -- the public function -----------------------------------------------------------------------------------------------


def test_attention_tangent_of_every_input(rng):
    drawn = Drawn(rng, "sinks", np.float64)
    bias = table(drawn.inputs["bias"])
    options = {"mask": i + drawn.problem.m - drawn.problem.n >= j, "score": 3 * np.tanh(s + bias[h, i, j])}
    arrays = [drawn.inputs[key] for key in ("query", "key", "value")]
    given = {key: drawn.directions[key] for key in ("query", "key", "value", "sinks")} | {
        bias: drawn.directions["bias"]
    }
    output, found = sightline.attention_tangent(*arrays, given, sinks=drawn.inputs["sinks"], **options)
    np.testing.assert_array_equal(output, sightline.attention(*arrays, sinks=drawn.inputs["sinks"], **options))
    np.testing.assert_allclose(found, drawn.define(ALL)[0], atol=1e-12)


def test_tangents_of_some_of_several_tables(rng):
    """The mask and the score read other tables before and after the one with a tangent."""
    q, k, v = (rng.normal(size=(1, 2, 5, 4)) for _ in range(3))
    rows, columns, direction = rng.normal(size=2), rng.normal(size=5), rng.normal(size=5)
    mask = table(np.arange(5))[j] <= i

    def attend(columns):
        return sightline.attention(q, k, v, mask=mask, score=s + table(rows)[h] * table(columns)[j])

    learned, step = table(columns), 1e-6
    _, found = sightline.attention_tangent(
        q, k, v, {learned: direction, "scale": 0}, mask=mask, score=s + table(rows)[h] * learned[j]
    )
    expected = (attend(columns + step * direction) - attend(columns - step * direction)) / (2 * step)
    np.testing.assert_allclose(found, expected, atol=1e-8)


@pytest.mark.parametrize("score", [None, lambda s, b, h, i, j: 3 * np.tanh(s)])
def test_the_tangent_of_the_scale(rng, score):
    q, k, v = (rng.normal(size=(3, 9, 8)) for _ in range(3))
    step = 1e-6
    _, found = sightline.attention_tangent(q, k, v, {"scale": 2.0}, scale=0.3, score=score)
    after, before = (sightline.attention(q, k, v, scale=0.3 + 2 * x, score=score) for x in (step, -step))
    np.testing.assert_allclose(found, (after - before) / (2 * step), atol=1e-8)


@pytest.mark.parametrize("shape", [(9, 8), (3, 9, 8), (2, 1, 3, 9, 8)], ids=str)
def test_shapes_of_attention_tangent(rng, shape):
    x, direction = rng.normal(size=shape), rng.normal(size=shape)
    output, found = sightline.attention_tangent(x, x, x, {"key": direction}, mask=i >= j)
    _, expected = jvp(
        lambda key: sightline.attention(torch.from_numpy(x), key, torch.from_numpy(x), mask=i >= j),
        (torch.from_numpy(x),),
        (torch.from_numpy(direction),),
    )
    assert output.shape == found.shape == shape
    np.testing.assert_allclose(found, expected, atol=1e-12)


WRONG = {
    "an unknown name": (lambda x: ((x, x, x, {"Q": x}), {}), ParameterError, "tangent of 'Q'"),
    "sinks that are not given": (
        lambda x: ((x, x, x, {"sinks": x[0, 0, :1]}), {}),
        ParameterError,
        "tangent of 'sinks'",
    ),
    "a table that nothing reads": (lambda x: ((x, x, x, {table(x[0, 0]): x[0, 0]}), {}), ParameterError, "tangent of"),
    "another shape": (lambda x: ((x, x, x, {"query": x[:, :, :3]}), {}), ShapeError, "tangent of query of shape"),
    "whole numbers": (lambda x: ((x, x, x, {"key": x.astype(int)}), {}), DtypeError, "tangent of key"),
    "no mapping": (lambda x: ((x, x, x, [("query", x)]), {}), ParameterError, "tangents is a list"),
    "None": (lambda x: ((x, x, x, {"query": None}), {}), DtypeError, "that is a NoneType"),
    "a masked array": (lambda x: ((x, x, x, {"query": np.ma.array(x)}), {}), DtypeError, "that is a MaskedArray"),
    "no threads": (lambda x: ((x, x, x, {}), {"threads": 0}), ParameterError, "threads=0"),
    "a tensor": (lambda x: ((torch.ones(2, 2),) * 3 + ({},), {}), DtypeError, "torch.func.jvp"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_of_attention_tangent(rng, case):
    make, error, message = WRONG[case]
    arguments, options = make(rng.normal(size=(1, 2, 5, 4)))
    with pytest.raises(error, match=message):
        sightline.attention_tangent(*arguments, **options)


def test_memory_does_not_grow_with_the_product_of_lengths(rng):
    """The tangents at n 8192 take less memory than a hundredth of one matrix of weights."""
    x = [rng.normal(size=(1, 1, 8192, 8)).astype(np.float32) for _ in range(3)]
    given = {"query": x[0], "key": x[1], "value": x[2]}
    sightline.attention_tangent(*[array[:, :, :64] for array in x], {k: array[:, :, :64] for k, array in given.items()})
    tracemalloc.start()
    sightline.attention_tangent(*x, given)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 8192**2 / 100
