"""Every statistic, in every kernel, is the definition's within the budget of rounding errors; so are its gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observed import check, parts, statistics, usable
from strategies import DTYPES, cases
from torch.autograd import gradcheck, gradgradcheck

import sightline
from sightline import h, i, j, s, table
from sightline.attention import KERNELS
from sightline.observe import arrays_of

EXAMPLES = {"reference": 6, "streaming": 12, "cpu": 3}  # of each dtype; with the last most compile a kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_drawn_problems(kernel, dtype):
    @settings(max_examples=EXAMPLES[kernel.name])
    @given(st.data(), cases(dtypes=(dtype,), largest=8000))
    def conforms(data, case):
        problem = case.pose()
        if not usable(problem):
            return
        see = data.draw(statistics(problem))
        framework = data.draw(st.sampled_from(["numpy", "torch"]))
        check(kernel.run, (case.as_torch() if framework == "torch" else case).pose(see=see))

    conforms()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_drawn_parts(kernel):
    @settings(max_examples=2 * EXAMPLES[kernel.name])
    @given(st.data(), cases(largest=4000))
    def conforms(data, case):
        problem = case.pose()
        if usable(problem):
            check(kernel.run, case.pose(see=data.draw(parts(problem))))

    conforms()


# -- gradients ---------------------------------------------------------------------------------------------------------


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.tensor(np.random.default_rng(seed).normal(size=shape), dtype=dtype, requires_grad=True)


DIFFERENTIABLE = {
    "lse": lambda x: sightline.lse().mean("heads"),
    "max_score": lambda x: sightline.max_score(),
    "entropy": lambda x: sightline.entropy(),
    "mass": lambda x: sightline.mass((i + j) % 2 == h),
    "received": lambda x: sightline.received(),
    "received, mean of the last": lambda x: sightline.received("mean", last=2).mean("batch"),
    "received, max": lambda x: sightline.received("max"),
    "pooled": lambda x: sightline.pooled(2, 2, within=((0, 3), (1, 4))),
    "weights": lambda x: sightline.weights().mean("heads"),
    "scores": lambda x: sightline.scores(),
    "rows and heads": lambda x: sightline.weights().rows([-1, 0]).heads([1, 0]),
    "one head of a group": lambda x: sightline.entropy().heads([1]).mean("heads"),
    "applied": lambda x: sightline.applied(x),
    "applied, a part": lambda x: sightline.applied(x).rows(slice(1, None)).mean("heads"),
}


def question():
    """Query, key, value, biases, sinks, a scale and x, all with gradients: two heads on one."""
    return [
        drawn(1, 2, 3, 2, seed=1),
        drawn(1, 1, 4, 2, seed=2),
        drawn(1, 1, 4, 2, seed=3),
        drawn(2, 4, seed=4),
        drawn(2, seed=5),
        torch.tensor(0.7, dtype=torch.float64, requires_grad=True),
        drawn(1, 4, 2, seed=6),
    ]


def seen(name, kernel=None):
    """The statistic as a function of `question()`, where a query sees nothing and a weight is dropped."""

    def call(query, key, value, bias, sinks, scale, x):
        options = {"mask": (i >= j - 1) & (i != 1), "score": torch.tanh(s) + table(bias)[h, j], "sinks": sinks}
        options |= {"scale": scale, "dropout": 0.3, "seed": 1, "kernel": kernel}
        output, (found,) = sightline.attention(query, key, value, see=[DIFFERENTIABLE[name](x)], **options)
        first = found[0] if isinstance(found, tuple) else found
        return output, torch.where(torch.isinf(first), 0.0, first)

    return call


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_finite_differences(name):
    assert gradcheck(seen(name), question(), fast_mode=True)


@pytest.mark.parametrize("name", ["entropy", "mass", "max_score", "received, max", "applied, a part"])
def test_gradients_of_gradients_are_those_of_finite_differences(name):
    assert gradgradcheck(seen(name), question(), fast_mode=True)


@pytest.mark.parametrize("name", ["top_k", "pooled, max"])
def test_what_has_no_gradient_says_so(name):
    statistic = {"top_k": sightline.top_k(2), "pooled, max": sightline.pooled(2, 2, "max")}[name]
    query, key, value, *_ = question()
    _, (found,) = sightline.attention(query, key, value, see=[statistic])
    assert not any(array.requires_grad for array in arrays_of(found))


# -- compilation -------------------------------------------------------------------------------------------------------

COMPILED = {
    "several": lambda x: [sightline.max_score(), sightline.top_k(2), sightline.received("max"), sightline.lse()],
    "conditions": lambda x: [
        sightline.mass(lambda b, h, i, j: i >= j),
        sightline.mass(j < table(torch.tensor([2, 4]))[h]),
        sightline.mass(torch.ones(3, 4, dtype=torch.bool).tril()),
    ],
    "parts and means": lambda x: [
        sightline.pooled(2, 2).mean("heads"),
        sightline.received(last=2),
        sightline.heads([-1]).rows([0, -1]),
        sightline.applied(x).mean("batch"),
    ],
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole(name):
    torch.compiler.reset()

    def call(query, key, value, x):
        _, found = sightline.attention(query, key, value, mask=i >= j - 1, see=COMPILED[name](x))
        return [array for entry in found for array in arrays_of(entry)]

    query, key, value, *_, x = question()
    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        arrays = function(query, key, value, x)
        total = sum(array.square().sum() for array in arrays if array.requires_grad)
        results.append([*arrays, *torch.autograd.grad(total, [query, key, x], allow_unused=True)])
    for eager, compiled in zip(*results, strict=True):
        assert (eager is None and compiled is None) or torch.equal(eager, compiled)
