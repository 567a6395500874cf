"""Gradients of statistics in repeated calls: bound calls of the backward kernel compute them."""

import math

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sightline
from fault_planting import Fault, assert_found
from sightline import i, j, s, table
from sightline.call import backward_calls, call_cache
from sightline.cpu.launch import backward
from sightline.statistics import reduction, weight_formulas
from sightline.torch import autograd
from sightline.torch.operator import make_seed

SHAPE = 2, 3, 9, 16
CONDITION = j < 4

# the statistics of a call, and functions that return the same from the weights P, the scores S and the lse
STATISTICS = {
    "lse": (sightline.lse, lambda P, S, lse: lse),
    "entropy": (sightline.entropy, lambda P, S, lse: -(P * P.clamp_min(torch.finfo(P.dtype).tiny).log()).sum(-1)),
    "mass": (lambda: sightline.mass(CONDITION), lambda P, S, lse: P[..., :4].sum(-1)),
    "sum": (
        lambda: sightline.sum(sightline.p * sightline.s * j, over=j),
        lambda P, S, lse: (P * S.clamp_min(-1e9) * torch.arange(S.shape[-1])).sum(-1),
    ),
    "squares": (
        lambda: sightline.sum(sightline.p**2 * (j + 1), over=j),
        lambda P, S, lse: (P * P * torch.arange(1, P.shape[-1] + 1)).sum(-1),
    ),
    "max_score": (sightline.max_score, lambda P, S, lse: S.max(-1).values),
    "received": (sightline.received, lambda P, S, lse: P.sum(-2)),
    "pooled": (
        lambda: sightline.pooled(3, 3),
        lambda P, S, lse: P.unflatten(-1, (3, 3)).unflatten(-3, (3, 3)).mean((-3, -1)),
    ),
    "weights": (sightline.weights, lambda P, S, lse: P),
}
PROBLEMS = {  # options of a call: (mask as a formula, score as a formula, does it learn a bias, has it sinks)
    "plain": (None, False, False),
    "causal": (i >= j, False, False),
    "a learned bias": (i >= j, True, False),
    "sinks": (i >= j, False, True),
}
USED = [
    *[(name,) for name in STATISTICS],
    ("lse", "entropy"),
    ("received", "lse", "pooled"),
    ("entropy", "mass", "max_score", "sum"),
    (),
]


def define(inputs, has_mask, used):
    """Return the results of a call in plain torch operations."""
    q, k, v, bias, sinks = inputs
    S = q @ k.mT / math.sqrt(q.shape[-1])
    if bias is not None:
        S = S + bias
    if has_mask:
        S = S.masked_fill(~torch.ones(S.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    joined = S if sinks is None else torch.cat([S, sinks[:, None, None].expand(*S.shape[:-1], 1)], -1)
    lse = joined.logsumexp(-1)
    P = (S - lse[..., None]).exp()
    return P @ v, [STATISTICS[name][1](P, S, lse) for name in used]


def combine(output, seen, factors):
    """Return a loss of the results, with other gradients for each factor."""
    return (output * factors[0]).sum() + sum((x * factor).sum() for x, factor in zip(seen, factors[1:], strict=True))


def defined_gradients(inputs, has_mask, used, factors, dtype):
    """Return the gradients of `add_parts` by plain torch operations in this dtype."""
    given = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    loss = combine(*define(given, has_mask, used), [factor.to(dtype) for factor in factors])
    return torch.autograd.grad(loss, [x for x in given if x is not None], allow_unused=True, materialize_grads=True)


def assert_right(found, inputs, has_mask, used, factors):
    """Compare gradients with the definition in float64. Their entries are about 1, and sums of larger terms."""
    for ours, oracle in zip(found, defined_gradients(inputs, has_mask, used, factors, torch.float64), strict=True):
        np.testing.assert_allclose(ours, oracle, atol=2e-5, rtol=1e-4)


def make_inputs(rng, has_bias, has_sinks, dtype=torch.float32):
    def draw(*shape):
        return torch.from_numpy(rng.normal(size=shape)).to(dtype).requires_grad_()

    bias = draw(SHAPE[1], SHAPE[2], SHAPE[2]) if has_bias else None
    return *[draw(*SHAPE) for _ in range(3)], bias, draw(SHAPE[1]) if has_sinks else None


def differentiate(inputs, mask, used, factors):
    q, k, v, bias, sinks = inputs
    score = None if bias is None else s + table(bias)[sightline.h, i, j]
    see = [STATISTICS[name][0]() for name in used]
    output, seen = sightline.attention(q, k, v, mask=mask, score=score, sinks=sinks, see=see)
    seen = [x.score if hasattr(x, "score") else x for x in seen]
    return torch.autograd.grad(combine(output, seen, factors), [x for x in inputs if x is not None])


def check(rng, problem, used):
    """Compare four calls of other contents, of which the last ones are bound, with the definition in float64."""
    mask, has_bias, has_sinks = PROBLEMS[problem]
    for _ in range(4):
        inputs = make_inputs(rng, has_bias, has_sinks)
        output, seen = define(inputs, mask is not None, used)
        factors = [torch.from_numpy(rng.normal(size=x.shape)).float() for x in (output, *seen)]
        assert_right(differentiate(inputs, mask, used, factors), inputs, mask is not None, used, factors)


@pytest.fixture(name="dispatched")
def record_dispatches(monkeypatch):
    """Return a list that grows with each backward pass that goes through the full dispatch."""
    passes, dispatch = [], autograd._differentiate
    monkeypatch.setattr(autograd, "_differentiate", lambda *given: passes.append(1) or dispatch(*given))
    return passes


# every statistic in the plain problem, and all together in each other problem
CASES = [("plain", used) for used in USED]
CASES += [(problem, used) for used in USED[-3:-1] for problem in PROBLEMS if problem != "plain"]


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(("problem", "used"), [*CASES, ("sinks", ("lse", "mass"))], ids=str)
def test_gradients_of_statistics(rng, problem, used, dispatched):
    check(rng, problem, used)
    if not (problem == "sinks" and "max_score" in used):
        assert len(dispatched) <= 2  # the first call, and the first call that the cache ran


@pytest.mark.parametrize("leading", [(), (3,)])
@pytest.mark.parametrize(
    "see", [[], [sightline.entropy(), sightline.lse()], [sightline.received(), sightline.weights()]]
)
def test_training_without_a_head_axis(rng, leading, see, dispatched):
    """The gradients are those of a head axis of one head."""
    for _ in range(4):
        inputs = [torch.from_numpy(rng.normal(size=(*leading, 9, 16))).float().requires_grad_() for _ in range(3)]
        gradients = []
        for has_heads in (False, True):
            given = [x.detach().unsqueeze(-3).requires_grad_() for x in inputs] if has_heads else inputs
            output, seen = sightline.attention(*given, mask=i >= j, see=see, kernel="streaming" if has_heads else None)
            factors = [torch.arange(x.numel()).reshape(x.shape).cos() for x in (output, *seen)]
            gradients.append(torch.autograd.grad(combine(output, seen, factors), given))
        for ours, expected in zip(*gradients, strict=True):
            np.testing.assert_allclose(ours, expected.squeeze(-3), atol=2e-5, rtol=1e-4)
    assert len(dispatched) <= 2 + 4  # streaming is always dispatched


def test_only_statistics_have_a_gradient(rng, dispatched):
    for _ in range(4):
        *given, _, _ = inputs = make_inputs(rng, False, False)
        _, (entropies, masses) = sightline.attention(*given, see=[sightline.entropy(), sightline.mass(CONDITION)])
        ours = torch.autograd.grad(entropies.sum() + masses.sum(), given, materialize_grads=True, allow_unused=True)
        factors = [torch.zeros(SHAPE), torch.ones(SHAPE[:-1]), torch.ones(SHAPE[:-1])]
        assert_right(ours, inputs, False, ("entropy", "mass"), factors)
    assert len(dispatched) <= 2


def test_some_statistics_have_a_gradient(rng, dispatched):
    """A statistic without a gradient, here a mass whose condition has a number and a table, changes nothing."""
    lengths = torch.tensor([3, 5])
    see = [sightline.mass(j < table(lengths)[sightline.b] - 1.5), sightline.entropy(), sightline.received()]
    for _ in range(4):
        *given, _, _ = inputs = make_inputs(rng, False, False)
        output, (_, entropies, _) = sightline.attention(*given, mask=i >= j, see=see)
        factors = [torch.from_numpy(rng.normal(size=x.shape)).float() for x in (output, entropies)]
        ours = torch.autograd.grad(combine(output, [entropies], factors), given)
        assert_right(ours, inputs, True, ("entropy",), factors)
    assert len(dispatched) <= 2


def test_means_and_batched_gradients(rng):
    *given, _, _ = make_inputs(rng, False, False)
    for _ in range(3):
        _, (mean, own) = sightline.attention(*given, see=[sightline.entropy().mean("heads"), sightline.entropy()])
        first = torch.autograd.grad(mean.sum(), given[0], retain_graph=True)[0]
        second = torch.autograd.grad(own.mean(1).sum(), given[0], retain_graph=True)[0]
        np.testing.assert_allclose(first, second, atol=1e-6)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            own.mul_(2).sum().backward(retain_graph=True)


READ = "BackwardInputs(operands, output, lse, d_output, {}, tables, numbers, structure, sinks, seed)"
FAULTS = {  # the fault, and the problem and the statistics that show it
    "a row sum of another statistic": (
        Fault(reduction.Reduction._known_weights_sum, "context.arrays[0] - 1", "context.arrays[0]"),
        "causal",
        ("entropy",),
    ),
    "a mass without its row sum": (
        Fault(
            reduction.Reduction._known_weights_sum,
            "context.gradient * context.arrays[0] * self.degree",
            "0 * context.gradient",
        ),
        "causal",
        ("mass",),
    ),
    "a product of another degree": (Fault(weight_formulas.degree_in, "d + e", "d"), "causal", ("squares",)),
    "a row sum that is not subtracted": (
        Fault(backward.BackwardEntry.run, "-sums", "0 * sums"),
        "causal",
        ("received",),
    ),
    "a row sum that is not subtracted from the gradient of lse": (
        Fault(backward.BackwardEntry.run, "d_lse - sums", "d_lse"),
        "causal",
        ("received", "lse", "pooled"),
    ),
    "a gradient of lse that is left out": (
        Fault(backward_calls.read_inputs, READ.format("d_lse"), READ.format("None")),
        "plain",
        ("lse",),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(rng, fault, monkeypatch):
    planted, problem, used = FAULTS[fault]
    assert_found(planted, monkeypatch, lambda: check(rng, problem, used), "Not equal to tolerance")


@pytest.mark.parametrize("see", [[], [sightline.entropy()]], ids=["no statistics", "entropy"])
@pytest.mark.parametrize("sinks", [None, torch.ones(2), torch.ones(2, requires_grad=True)], ids=str)
def test_a_checkpoint_whose_first_call_is_not_cached(sinks, see):
    call_cache.clear()
    query, key, value = torch.randn(3, 1, 2, 7, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def run(*arrays):
        return sightline.attention(*arrays, sinks=sinks, see=see)[0]

    arrays = query, key, value
    found = torch.autograd.grad(checkpoint(run, *arrays, use_reentrant=False).square().sum(), arrays)
    expected = torch.autograd.grad(run(*arrays).square().sum(), arrays)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("see", [[], [sightline.entropy()]], ids=["no statistics", "entropy"])
def test_a_checkpoint_that_draws_another_seed(see):
    """The gradients are those of the second run, as those of torch's dropout are."""
    arrays = torch.randn(3, 1, 2, 7, 4, generator=torch.Generator().manual_seed(0)).requires_grad_().unbind()
    weights = torch.arange(56.0).reshape(1, 2, 7, 4).cos()
    call_cache.clear()

    def run(*arrays, seed=None):
        return sightline.attention(*arrays, dropout=0.5, seed=seed, see=see)[0]

    for turn in range(4):  # the first call is not cached, and later backward passes are bound
        torch.manual_seed(turn)
        output = checkpoint(run, *arrays, use_reentrant=False, preserve_rng_state=False)
        found = torch.autograd.grad((output * weights).sum(), arrays)
        torch.manual_seed(turn)
        first, second = (int(make_seed(None)) for _ in range(2))
        assert torch.equal(output, run(*arrays, seed=first))
        expected = torch.autograd.grad((run(*arrays, seed=second) * weights).sum(), arrays)
        assert all(map(torch.equal, found, expected))
