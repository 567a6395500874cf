"""Operands of torch's signature whose numbers of axes differ, or that have no components."""

import pytest
import torch
from torch.nn import functional

from sightline.errors import ShapeError
from sightline.torch import scaled_dot_product_attention

CALLS = {
    "key without batch and heads": (((2, 3, 4, 8), (5, 8), (5, 8)), {}),
    "query alone without batch": (((3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)), {}),
    "query without heads": (((4, 8), (2, 3, 5, 8), (2, 3, 5, 8)), {}),
    "value with more axes": (((2, 3, 4, 8), (3, 5, 8), (2, 3, 5, 8)), {}),
    "three and two": (((3, 4, 8), (5, 8), (5, 8)), {"is_causal": True}),
    "five and two": (((2, 4, 8), (3, 2, 1, 5, 8), (5, 8)), {}),
    "shared heads": (((2, 4, 4, 8), (2, 5, 8), (2, 5, 8)), {"enable_gqa": True}),
    "no components": (((2, 3, 4, 0), (2, 3, 5, 0), (2, 3, 5, 8)), {}),
    "no components without heads": (((4, 0), (5, 0), (5, 8)), {"is_causal": True}),
}


def run_call(function, shapes, options):
    """Return the output and the gradients of a call in float64."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).double().requires_grad_() for shape in shapes]
    output = function(*tensors, **options)
    return output.detach(), torch.autograd.grad(output.square().sum(), tensors)


@pytest.mark.parametrize("name", CALLS)
def test_agrees_with_torch(name):
    shapes, options = CALLS[name]
    expected, gradients = run_call(functional.scaled_dot_product_attention, shapes, options)
    output, found = run_call(scaled_dot_product_attention, shapes, options)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(found, gradients)


@pytest.mark.parametrize("mask", [True, False, -0.5], ids=str)
def test_a_mask_without_axes(mask):
    x = torch.arange(24.0).reshape(3, 8) / 24
    found = scaled_dot_product_attention(x, x, x, torch.tensor(mask))
    expected = functional.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(found, 0 * expected if mask is False else expected)


@pytest.mark.parametrize("shapes", [((1, 8), (8,), (8,)), ((2, 4, 0), (2, 4, 3), (2, 4, 3))], ids=str)
def test_operands_that_torch_refuses_are_refused(shapes):
    with pytest.raises(ShapeError):
        scaled_dot_product_attention(*map(torch.ones, shapes))
