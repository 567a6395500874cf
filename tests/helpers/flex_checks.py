"""Results of FlexAttention's functions by torch's own flex_attention, and their gradients by the dense definition."""

import warnings
from dataclasses import replace

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

from gradient_checks import NAMES, differentiated
from sightline.reference.accuracy import gradient_term_sizes
from sightline.testing import assert_within_budget


def extent_of(query, key):
    return *query.shape[:3], key.shape[2]


def by_torch(query, key, value, mask=None, score=None, **options):
    """Return the result of torch's own flex_attention, which computes it from dense scores."""
    extent, block_mask = extent_of(query, key), None
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")  # torch advises to compile flex_attention
        if mask is not None:  # torch takes plain functions, and no bound methods
            block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx), *extent, "cpu")
        return flex_attention(query, key, value, score, block_mask, enable_gqa=True, **options)


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
    extent = extent_of(query, key)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores if score is None else at_all_pairs(score, extent, scores)
    allowed = at_all_pairs(mask or noop_mask, extent).broadcast_to(extent)
    weights = torch.softmax(torch.where(allowed, scores, torch.finfo(scores.dtype).min), -1) * allowed
    return weights @ value


def gradients(attention, inputs, d_output, functions, learned):
    inputs = [x.detach().to(d_output.dtype).requires_grad_() for x in inputs]
    return torch.autograd.grad(attention(*inputs, **functions), [*inputs, *learned], d_output, retain_graph=True)


def check_gradients(attention, problem, inputs, d_output, functions, learned, definition):
    found = gradients(attention, inputs, d_output, functions, learned)
    truth = gradients(by_definition, inputs, d_output.double(), *definition)
    seed = (d_output.numpy(), *(np.zeros((*d_output.shape[:3], *shape)) for shape in ((), (problem.m,))))
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
