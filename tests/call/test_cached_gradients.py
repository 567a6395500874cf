"""Gradients of cached calls: operands, learned tables, sinks and scales, and tensors that hooks replace."""

import numpy as np
import pytest
import torch

import sightline
from cached_calls import FORMULAS, record_hits
from sample_calls import arrays, bits, tensors
from sightline import h, i, j, s, table
from sightline.call import call_cache
from strategies import to_torch


def outputs_and_gradients(given, direction, **options):
    """The bytes of the output and of the gradients of three fresh leaves."""
    leaves = [x.clone().requires_grad_() for x in given]
    output = sightline.attention(*leaves, **options)
    return [bits(output), *map(bits, torch.autograd.grad(output, leaves, direction))]


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("formula", ["none", "causal, written anew", "both"])
@pytest.mark.parametrize("shape", [(1, 2, 9, 8), (9, 8), (1, 2, 600, 16)], ids=str)
def test_gradients_equal_those_of_the_operator(rng, formula, shape, monkeypatch):
    """The first call with gradients, the cached calls and the operator have equal bits."""
    first, other = ([torch.from_numpy(x) for x in arrays(rng, (shape,) * 3)] for _ in range(2))
    direction, options = torch.ones(shape), FORMULAS[formula]
    outputs_and_gradients(first, direction, **options())
    found = record_hits(monkeypatch)
    prepared = outputs_and_gradients(other, direction, **options())
    assert found or len(shape) < 4  # calls that are reshaped first are not cached
    call_cache.clear()
    assert outputs_and_gradients(other, direction, **options()) == prepared
    monkeypatch.setattr("sightline.api.functions.describe", lambda *given: None)
    assert outputs_and_gradients(other, direction, **options()) == prepared


@pytest.mark.parametrize("spread", ["heads", "queries", "columns", "a sum"])
def test_gradients_of_outputs_whose_gradient_is_expanded(rng, spread):
    """The gradient of a sum is a view whose stride is 0."""
    q, k, v = tensors(rng, requires_grad=True)
    weights = torch.from_numpy(rng.normal(size=q.shape).astype(np.float32))

    def differentiate():
        output = sightline.attention(q, k, v)
        if spread == "a sum":
            return torch.autograd.grad(output.sum(1).square().sum(), (q, k, v))
        axis = {"heads": 1, "queries": 2, "columns": 3}[spread]
        return torch.autograd.grad(output, (q, k, v), weights.narrow(axis, 0, 1).expand_as(output))

    def bits_of(gradients):
        return [bits(x) for x in gradients]

    expected = bits_of(differentiate())
    assert [bits_of(differentiate()) for _ in range(6)] == [expected] * 6
    call_cache.clear()
    for _ in range(5):  # other gradients are bound first
        torch.autograd.grad(sightline.attention(q, k, v), (q, k, v), weights)
    assert [bits_of(differentiate()) for _ in range(4)] == [expected] * 4


def test_gradients_are_computed_if_requested(rng):
    q, k, v = tensors(rng)
    sightline.attention(q, k, v, mask=i >= j)
    sightline.attention(q, k, v, mask=i >= j)
    for position in range(3):
        given = [x.clone().requires_grad_(place == position) for place, x in enumerate((q, k, v))]
        output = sightline.attention(*given, mask=i >= j)
        assert output.requires_grad
        output.sum().backward()
        assert given[position].grad is not None
        with torch.no_grad():
            assert not sightline.attention(*given, mask=i >= j).requires_grad
        with torch.inference_mode():
            assert sightline.attention(*given, mask=i >= j).is_inference()


@pytest.mark.parametrize("kind", ["boolean array", "bias", "padding", "a learned bias"])
def test_tables_changed_before_the_backward_pass_are_an_error(rng, kind):
    q, k, v = tensors(rng, requires_grad=True)
    array = {"boolean array": torch.from_numpy(rng.random((1, 1, 9, 9)) < 0.7), "padding": torch.tensor([5])}.get(
        kind, torch.from_numpy(rng.normal(size=(1, 2, 9, 9)).astype(np.float32))
    )
    array.requires_grad_(kind == "a learned bias")
    name = "mask" if kind in ("boolean array", "padding") else "score"
    formula = {"boolean array": lambda x: x, "padding": sightline.padding}.get(kind, sightline.bias)
    for _ in range(5):
        sightline.attention(q, k, v, **{name: formula(array)}).sum().backward()
        output = sightline.attention(q, k, v, **{name: formula(array)}).sum()
        with torch.no_grad():
            array[(-1,) * array.ndim] = 1
        with pytest.raises(RuntimeError, match=r"in place|inplace"):
            output.backward()


LEARNED = {  # options of a call whose tables, sinks or scale are learned, by what is learned
    "bias": lambda x: {"score": sightline.bias(x["bias"])},
    "an array of biases": lambda x: {"score": s + table(x["bias"])[0, h, i, j], "mask": i >= j},
    "slopes": lambda x: {"score": sightline.alibi(x["slopes"]), "mask": sightline.padding(x["lengths"])},
    "relative positions": lambda x: {"score": s + table(x["relative"])[h, i - j + 20]},
    "sinks": lambda x: {"sinks": x["sinks"]},
    "scale": lambda x: {"scale": x["scale"], "mask": i >= j},
    "everything": lambda x: {
        "score": s + table(x["relative"])[h, i - j + 20] + table(x["slopes"])[h] * i,
        **{name: x[name] for name in ("sinks", "scale")},
        "dropout": 0.2,
        "seed": 7,
    },
    "fixed sinks": lambda x: {"sinks": x["sinks"].detach()},
}


def draw_learned(rng, dtype):
    def draw(*shape):
        return torch.nn.Parameter(to_torch(rng.normal(size=shape).astype(dtype)))

    learned = {"bias": draw(1, 4, 20, 20), "slopes": draw(4), "relative": draw(4, 41), "sinks": draw(4)}
    return learned | {
        "scale": draw(1)[0].detach().requires_grad_(),
        "lengths": torch.from_numpy(rng.integers(1, 21, 2)),
    }


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize(
    "fixed", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["operands need gradients too", "fixed operands"]
)
def test_learned_tables_sinks_and_scales(rng, name, dtype, fixed, monkeypatch):
    """Other contents at each step; the oracle is the full dispatch."""
    if fixed and name == "fixed sinks":
        pytest.skip("nothing is learned")

    def differentiate(operands, learned):
        options = LEARNED[name](learned)
        wanted = [x for x in (*operands, *learned.values()) if x.requires_grad]
        output = sightline.attention(*operands, **options)
        gradients = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
        return [bits(output), *[None if x is None else bits(x) for x in gradients]]

    def draw():
        operands = [to_torch(x).requires_grad_(not fixed) for x in arrays(rng, ((2, 4, 20, 8),) * 3, dtype)]
        return operands, draw_learned(rng, dtype)

    steps = [draw() for _ in range(4)]
    expected = []
    for step in steps:
        call_cache.clear()
        expected.append(differentiate(*step))
    call_cache.clear()
    for step in [draw(), draw()]:
        differentiate(*step)
    monkeypatch.setattr("sightline.api.functions.parse", None)
    monkeypatch.setattr("sightline.torch.autograd.make_problem", None)
    monkeypatch.setattr("sightline.torch.dispatch.parse", None)
    assert [differentiate(*step) for step in steps] == expected


def test_saved_tables_that_hooks_replace(rng):
    """The backward pass reads the tables that the hooks return, and not the memory of the first ones."""
    operands, learned = [to_torch(x) for x in arrays(rng, ((2, 4, 20, 8),) * 3)], draw_learned(rng, np.float32)

    def differentiate(bias):
        return torch.autograd.grad(sightline.attention(*operands, score=sightline.bias(bias)).square().sum(), bias)[0]

    expected = [differentiate(learned["bias"]) for _ in range(3)]

    def pack(x):
        return x.detach().clone()

    def unpack(x):
        return x.swapaxes(0, -1).contiguous().swapaxes(0, -1)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = sightline.attention(*operands, score=sightline.bias(learned["bias"])).square().sum()
    with torch.no_grad():
        saved = learned["bias"].clone()
        learned["bias"].mul_(0)
    found = torch.autograd.grad(output, learned["bias"])[0]
    torch.testing.assert_close(found, expected[-1])
    with torch.no_grad():
        learned["bias"].copy_(saved)
    assert bits(differentiate(learned["bias"])) == bits(expected[0])


def test_hooks_may_change_the_layout_of_saved_tensors(rng):
    """A bound backward call reads the tensors that hooks return, which need not have the strides of the inputs."""
    given = [to_torch(x).transpose(1, 2).requires_grad_() for x in arrays(rng, ((2, 9, 4, 16),) * 3)]
    gradient = to_torch(rng.normal(size=(2, 4, 9, 16)).astype(np.float32))

    def gradients():
        return [bits(x) for x in torch.autograd.grad(sightline.attention(*given), given, gradient)]

    expected = gradients()
    assert gradients() == expected
    make_contiguous = torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
    )
    with make_contiguous:
        assert gradients() == expected
        assert gradients() == expected
    assert gradients() == expected


def test_gradients_of_gradients_of_learned_tables(rng):
    learned, operands = draw_learned(rng, np.float64), arrays(rng, ((1, 2, 3, 2),) * 3, np.float64)

    def attend(slopes, sinks, scale, *operands):
        score = s + table(slopes)[h] * (i - j)
        return sightline.attention(*operands, score=score, sinks=sinks, scale=scale)

    given = [learned[name][:2].detach().requires_grad_() for name in ("slopes", "sinks")]
    given += [learned["scale"], *[to_torch(x).requires_grad_() for x in operands]]
    for _ in range(3):
        assert torch.autograd.gradcheck(attend, given, fast_mode=True)
        assert torch.autograd.gradgradcheck(attend, given, fast_mode=True)


def test_recomputed_gradients(rng):
    given, direction = tensors(rng), torch.ones(1, 2, 9, 8)
    expected = outputs_and_gradients(given, direction)
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in given]
        output = torch.utils.checkpoint.checkpoint(sightline.attention, *leaves, use_reentrant=False)
        assert [bits(output), *map(bits, torch.autograd.grad(output, leaves, direction))] == expected
