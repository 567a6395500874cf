"""Published FlexAttention functions: results of torch's own flex_attention, and gradients of the dense definition."""

import functools

import pytest
import torch
from torch.nn.attention.flex_attention import noop_mask

import sightline
from flex_checks import by_torch, check_gradients
from flex_functions import MASKS, SCORES, SHAPES, B, D, H, N, Tensors
from sightline.call.problem import make_problem
from sightline.reference.accuracy import compute_baseline, term_sizes
from sightline.reference.definition import compute_stages
from sightline.testing import assert_within_budget

CASES = [("mask", name) for name in MASKS] + [("score", name) for name in SCORES]


@functools.cache
def arrays(n, m):
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(B, H, length, D, generator=generator) for length in (n, m, m, n)]


def made(role, name, dtype=torch.float32):
    """Return ({role: function}, the learned tensors that the function reads)."""
    tensors = Tensors(dtype)
    return {role: MASKS[name] if role == "mask" else SCORES[name](tensors)}, tensors.learned


@pytest.mark.parametrize(("role", "name"), CASES, ids=map(" ".join, CASES))
def test_published_functions(role, name):
    *inputs, d_output = arrays(*SHAPES.get(name, (N, N)))
    place = CASES.index((role, name))  # a third of the outputs and a ninth of the gradients come from generated kernels
    attention, differentiated_attention = (
        functools.partial(sightline.attention, kernel="streaming" if place % share else "cpu") for share in (3, 9)
    )
    functions, learned = made(role, name)
    problem = make_problem(*inputs, **functions)
    stages, baseline = compute_stages(problem), compute_baseline(problem)
    truth = by_torch(*(x.double() for x in inputs), **made(role, name, torch.float64)[0]).detach()
    sizes = term_sizes(problem, stages.weights)
    with torch.no_grad():
        assert_within_budget(attention(*inputs, **functions), truth.numpy(), baseline.output, "output", sizes)
    check_gradients(
        differentiated_attention, problem, inputs, d_output, functions, learned, made(role, name, torch.float64)
    )


def test_published_functions_compile_to_one_graph():
    """Reads of several axes, of a tensor of one number, and of entries whose values torch.compile does not know."""
    document, first, sinks = torch.tensor([[0, 0, 1], [0, 1, 1]]), torch.tensor([1]), torch.tensor([0, 2])

    def mask(b, h, q_idx, kv_idx):
        is_seen = (kv_idx >= first[0]) | torch.isin(kv_idx, sinks) & noop_mask(b, h, q_idx, kv_idx)
        return is_seen & (document[b, q_idx] == document[b, kv_idx])

    query, key, value = (torch.randn(2, 1, 3, 4) for _ in range(3))
    compiled = torch.compile(sightline.attention, backend="eager", fullgraph=True)
    found, expected = (call(query, key, value, mask=mask) for call in (compiled, sightline.attention))
    assert torch.equal(found, expected)


def test_enough_functions_are_tested():
    assert len(MASKS) >= 30
    assert len(SCORES) >= 30
