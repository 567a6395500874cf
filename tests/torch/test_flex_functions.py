"""Published FlexAttention functions: results of torch's own flex_attention, and gradients of the dense definition."""

import functools
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

import sightline
from flex_functions import MASKS, SCORES, SHAPES, B, D, H, N, Tensors
from gradient_checks import NAMES, differentiated
from sightline.problem.problem import make_problem
from sightline.reference.accuracy import compute_baseline, gradient_term_sizes, term_sizes
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
    return {role: (MASKS if role == "mask" else SCORES)[name](tensors)}, tensors.learned


def by_torch(query, key, value, mask=None, score=None):
    lengths, block_mask = (B, H, query.shape[-2], key.shape[-2]), None
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")  # torch advises to compile flex_attention
        if mask is not None:  # torch takes plain functions, and no bound methods
            block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx), *lengths, "cpu")
        return flex_attention(query, key, value, score_mod=score, block_mask=block_mask)


class IndexByTensors(torch.overrides.TorchFunctionMode):
    """Reads tensors at indices that torch.vmap batches."""

    def __torch_function__(self, function, types, inputs=(), kwargs=None):
        if function is torch.Tensor.__getitem__ and not isinstance(inputs[1], int | slice):
            index = inputs[1] if isinstance(inputs[1], tuple) else (inputs[1],)
            if all(isinstance(part, torch.Tensor) for part in index):
                return torch.ops.aten.index(inputs[0], index)
        return function(*inputs, **(kwargs or {}))


def at_all_pairs(function, extent, *scores):
    """Return the values of a mask or score function at all (b, h, i, j)."""
    for axis in (3, 2, 1, 0):
        index_dims = [None] * 4
        index_dims[axis] = 0
        function = torch.vmap(function, in_dims=(*[0] * len(scores), *index_dims))
    with IndexByTensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some functions have no rule of vmap's own
        return function(*scores, *map(torch.arange, extent))


def by_definition(query, key, value, mask=None, score=None):
    extent = (B, H, query.shape[-2], key.shape[-2])
    scores = query @ key.mT / D**0.5
    scores = scores if score is None else at_all_pairs(score, extent, scores)
    allowed = at_all_pairs(mask or noop_mask, extent).broadcast_to(extent)
    weights = torch.softmax(torch.where(allowed, scores, torch.finfo(scores.dtype).min), -1) * allowed
    return weights @ value


def gradients(attention, inputs, d_output, functions, learned):
    inputs = [x.detach().to(d_output.dtype).requires_grad_() for x in inputs]
    return torch.autograd.grad(attention(*inputs, **functions), [*inputs, *learned], d_output, retain_graph=True)


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


def check_gradients(attention, problem, inputs, d_output, functions, learned, definition):
    found = gradients(attention, inputs, d_output, functions, learned)
    truth = gradients(by_definition, inputs, d_output.double(), *definition)
    seed = (d_output.numpy(), *(np.zeros((B, H, d_output.shape[2], *shape)) for shape in ((), (problem.m,))))
    tables = [entry.array.detach().numpy() for entry in problem.tables]
    detached = replace(problem.with_tables(tables), **{name: x.numpy() for name, x in zip(NAMES, inputs, strict=True)})
    sizes = gradient_term_sizes(detached, seed[0])
    rough = [differentiated(detached, [seed], "float32", order)[0] for order in range(4)]
    for k, name in enumerate(NAMES):
        assert_within_budget(found[k], truth[k].numpy(), [one[k] for one in rough], name, sizes[name])
    floats = [k for k, entry in enumerate(problem.tables) if entry.kind == "float"]

    def of_learned(of_tables, leaf):
        """Return the gradient of a learned tensor from the gradients of the tables that were computed from it."""
        total = torch.zeros_like(leaf)
        for k, gradient in zip(floats, of_tables, strict=True):
            array = problem.tables[k].array
            if array.requires_grad:
                seed = torch.as_tensor(np.asarray(gradient), dtype=leaf.dtype)
                (one,) = torch.autograd.grad(array, leaf, seed, retain_graph=True, allow_unused=True)
                total = total if one is None else total + one
        return total.numpy()

    for place, leaf in enumerate(learned, 3):
        terms = of_learned([sizes[k] for k in floats], leaf)
        orders = [of_learned(one[3:], leaf) for one in rough]
        assert_within_budget(found[place], truth[place].double().numpy(), orders, "learned tensor", terms)


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
