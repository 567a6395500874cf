"""torch's signature: results and gradients of torch's own function, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from sightline import i, j
from sightline.errors import MaskError, ParameterError, ShapeError
from sightline.reference.testing import assert_within_budget
from sightline.torch import scaled_dot_product_attention
from torch_calls import calls, drawn, run_call

CALLS = {  # the shapes of query, key and value, and options; these numbers of axes differ, or E is 0
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


def check(shapes, options, mask=None):
    with sdpa_kernel(SDPBackend.MATH):
        truth, *gradients = run_call(functional.scaled_dot_product_attention, torch.float64, shapes, options, mask)
        (rough,) = run_call(functional.scaled_dot_product_attention, torch.float32, shapes, options, mask)
    (ours,) = run_call(scaled_dot_product_attention, torch.float32, shapes, options, mask)
    assert_within_budget(ours, truth, rough)
    found = run_call(scaled_dot_product_attention, torch.float64, shapes, options, mask)
    torch.testing.assert_close(found, (truth, *gradients))


@pytest.mark.wide
@given(calls())
@settings(max_examples=10, deadline=None)
def test_drawn_calls_agree_with_torch(call):
    check(*call)


@pytest.mark.parametrize("name", CALLS)
def test_agrees_with_torch(name):
    check(*CALLS[name])


@pytest.mark.parametrize("mask", [True, False, -0.5], ids=str)
def test_a_mask_without_axes(mask):
    x = torch.arange(24.0).reshape(3, 8) / 24
    found = scaled_dot_product_attention(x, x, x, torch.tensor(mask))
    expected = functional.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(found, 0 * expected if mask is False else expected)


@pytest.mark.parametrize("shapes", [((1, 8), (8,), (8,)), ((), (), ()), ((2, 4, 0), (2, 4, 3), (2, 4, 3))], ids=str)
def test_operands_that_torch_refuses_are_refused(shapes):
    with pytest.raises(ShapeError):
        scaled_dot_product_attention(*map(torch.ones, shapes))


def test_different_numbers_of_heads_need_enable_gqa():
    query, key, value = (drawn(2, heads, 5, 3, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    with pytest.raises(ShapeError, match="enable_gqa"):
        scaled_dot_product_attention(query, key, value)
    one = scaled_dot_product_attention(query, key[:, :1], value[:, :1])
    assert torch.equal(one, scaled_dot_product_attention(query, key[:, :1], value[:, :1], enable_gqa=True))


@pytest.mark.parametrize(
    ("mask", "is_causal", "message"),
    [
        (torch.ones(3, 3, dtype=torch.int64), False, "attn_mask is a tensor of int64\n(.|\n)*attn_mask=mask != 0"),
        (i >= j, False, r"attn_mask is a formula\n(.|\n)*sightline.attention\("),
        *[(mask, True, r"causal\(\) & dense") for mask in (torch.ones(3, 3), causal_lower_right(3, 3))],
    ],
)
def test_masks_that_are_refused(mask, is_causal, message):
    with pytest.raises((MaskError, ParameterError), match=message):
        scaled_dot_product_attention(*[torch.ones(1, 2, 3, 4)] * 3, attn_mask=mask, is_causal=is_causal)


def test_dropout_applies_outside_training_as_in_torch():
    x = torch.ones(1, 1, 4, 2)
    assert not scaled_dot_product_attention(x, x, x, dropout_p=1.0).any()
