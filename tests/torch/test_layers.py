"""Tests of the layers against definitions in plain torch operations."""

import itertools
import math
import re

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sightline
from sightline import i, j, padding
from sightline.call.problem import make_problem
from sightline.errors import MaskError, ParameterError, ShapeError
from sightline.reference.accuracy import compute_baseline
from sightline.reference.testing import assert_within_budget
from sightline.torch import MultiHeadAttention, ScaledDotProductAttention, SelfAttention, functional
from torch_calls import drawn

pytestmark = pytest.mark.sampled(one_in=5)


def agrees(layer, tensors, mask, hide, scale=None):
    """Assert that output and weights in float32 are within the budget of the textbook definition."""
    truth = textbook(*(x.double() for x in tensors), hide, scale)
    allowed = ~hide.expand(truth[1].shape)
    allowed = allowed[:, None] if allowed.ndim == 3 else allowed
    rough = compute_baseline(make_problem(*tensors, mask=allowed, scale=scale))
    for found, oracle, worst in zip(layer(*tensors, mask), truth, (rough.output, rough.weights), strict=True):
        assert_within_budget(found, oracle, worst.reshape(-1, *oracle.shape))


def textbook(query, key, value, hide=None, scale=None):
    """Return softmax(Q Kᵀ · scale + M) V and the weights; both are 0 for a query without visible keys."""
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if hide is not None:
        scores = scores.masked_fill(hide, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return weights @ value, weights


# -- ScaledDotProductAttention -----------------------------------------------------------------------------------------

HEADS = (6, 4, 9, 8)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(9, 9), (6, 1, 9, 9), (6, 1, 1, 9), (6, 4, 9, 9)])
def test_a_mask_whose_zero_hides(kind, shape):
    mask = (drawn(*shape) > -0.5).to(kind)
    agrees(ScaledDotProductAttention(), [drawn(*HEADS, seed=k) for k in range(3)], mask, mask == 0)


def test_a_mask_whose_true_hides_and_a_scale():
    mask = drawn(6, 1, 9, 9) > 0
    mask[:, :, 3] = True
    layer = ScaledDotProductAttention(scale=1 / math.sqrt(32), mask_means="ignore")
    tensors = [drawn(*HEADS, seed=k) for k in range(3)]
    agrees(layer, tensors, mask, mask, 1 / math.sqrt(32))
    output, weights = layer(*tensors, mask)
    assert not output[:, :, 3].any()
    assert not weights[:, :, 3].any()


@pytest.mark.parametrize(("lead", "mask_lead"), [((6,), (6,)), ((3, 2, 4), (3, 1, 4))], ids=["no heads", "five axes"])
def test_other_leading_axes(lead, mask_lead):
    mask = drawn(*mask_lead, 9, 9) > 0
    tensors = [drawn(*lead, 9, width, seed=k) for k, width in enumerate((8, 8, 3))]
    agrees(ScaledDotProductAttention(), tensors, mask, ~mask)


def test_a_formula_as_mask_means_attend():
    x = drawn(*HEADS)
    for meaning in ("attend", "ignore"):
        output, _ = ScaledDotProductAttention(mask_means=meaning)(x, x, x, i >= j)
        assert torch.equal(output, sightline.attention(x, x, x, mask=i >= j))


def test_dropout_only_in_training_and_weights_before_dropout():
    layer, x = ScaledDotProductAttention(dropout=0.5), drawn(*HEADS)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(layer(x, x, x))
    evaluated = layer.eval()(x, x, x)
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert not torch.equal(outputs[0][0], outputs[2][0])
    assert not torch.equal(outputs[0][0], evaluated[0])
    for _, weights in outputs:
        torch.testing.assert_close(weights, evaluated[1])
    assert torch.equal(evaluated[0], layer(x, x, x)[0])


def test_weights_have_gradients():
    x = drawn(2, 5, 3).requires_grad_()
    _, weights = ScaledDotProductAttention()(x, x, x)
    assert torch.autograd.grad(weights.square().sum(), x)[0].any()


@pytest.mark.parametrize("given", [{"mask_means": "maybe"}, {"dropout": 64}, {"dropout": "0.1"}, {"dropout": True}])
def test_unknown_meanings_and_dropouts_that_are_no_probabilities_are_refused(given):
    ((name, value),) = given.items()
    with pytest.raises(ParameterError, match=f"{name}={value!r}\\n"):
        ScaledDotProductAttention(**given)


# -- SelfAttention -----------------------------------------------------------------------------------------------------


def rotated(x):
    """Return x with rotary positions."""
    n, d = x.shape[-2:]
    angles = torch.arange(n, dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(0, d, 2, dtype=torch.float64) / d
    )
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize(("heads", "rope", "causal"), [*itertools.product((1, 3), (True, False), (True, False))])
def test_self_attention(heads, rope, causal):
    torch.manual_seed(0)
    layer = SelfAttention(16, 8, 4, heads=heads, rope=rope, causal=causal)

    def by_hand(x):
        def split(projection):
            return (x @ projection.weight.T.to(x.dtype)).unflatten(-1, (heads, -1)).transpose(1, 2)

        query, key, value = split(layer.query), split(layer.key), split(layer.value)
        if rope:
            query, key = rotated(query), rotated(key)
        hide = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if causal else None
        return textbook(query, key, value, hide)[0].transpose(1, 2).flatten(2).detach()

    x = drawn(6, 9, 16)
    assert_within_budget(layer(x).detach(), by_hand(x.double()), by_hand(x))
    assert layer(x).shape == (6, 9, heads * 4)


def test_self_attention_has_gradients_and_glorot_normal_parameters():
    torch.manual_seed(0)
    layer = SelfAttention(64, 64, 64)
    layer(drawn(2, 5, 64)).sum().backward()
    assert all(parameter.grad.any() for parameter in layer.parameters())
    variance = layer.query.weight.detach().var() * (64 + 64) / 2
    assert 0.9 < variance < 1.1
    with pytest.raises(ParameterError, match="even"):
        SelfAttention(8, 3, 4)


# -- MultiHeadAttention ------------------------------------------------------------------------------------------------

CONFIGURATIONS = [
    {},
    {"batch_first": True, "bias": False},
    {"batch_first": True, "kdim": 5, "vdim": 7},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"batch_first": True, "add_bias_kv": True, "bias": False, "kdim": 5, "vdim": 7},
]
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] + [True] * 5])
BLOCKED = (drawn(4, 6) > 0.5) & (torch.arange(6) > 0)
MASKS = {
    "none": {},
    "attn_mask": {"attn_mask": BLOCKED},
    "floats": {"attn_mask": drawn(4, 6).double(), "average_attn_weights": False},
    "for each head": {"attn_mask": BLOCKED.repeat(6, 1, 1), "average_attn_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "both": {"attn_mask": BLOCKED, "key_padding_mask": PADDING},
    "both as floats": {
        "attn_mask": drawn(6, 4, 6).double(),
        "key_padding_mask": torch.zeros(3, 6).double().masked_fill(PADDING, -math.inf),
    },
}


def pair(**configuration):
    """Return torch's layer and ours with the same parameters, none of which is 0."""
    torch.manual_seed(0)
    theirs, ours = nn.MultiheadAttention(8, 2, **configuration), MultiHeadAttention(8, 2, **configuration)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    return theirs, ours


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_agrees_with_torchs_layer(configuration, mask):
    theirs, ours = (layer.double() for layer in pair(**configuration))
    tensors = [drawn(3, 4, 8), drawn(3, 6, configuration.get("kdim", 8)), drawn(3, 6, configuration.get("vdim", 8))]
    if not configuration.get("batch_first"):
        tensors = [x.transpose(0, 1) for x in tensors]
    tensors = [x.double().requires_grad_() for x in tensors]
    options = MASKS[mask]
    results = []
    for layer in (theirs, ours):
        with sdpa_kernel(SDPBackend.MATH):
            output, weights = layer(*tensors, **options)
            gradients = torch.autograd.grad(
                (output.square().sum() + weights.square().sum()), [*tensors, *layer.parameters()]
            )
        without, nothing = layer(*tensors, **options, need_weights=False)
        assert nothing is None
        results.append((output, weights, without, *gradients))
    torch.testing.assert_close(*reversed(results))


def test_inputs_without_a_batch_and_a_causal_mask():
    theirs, ours = (layer.double() for layer in pair())
    x = drawn(5, 8).double()
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(ours(x, x, x, is_causal=True), theirs(x, x, x, attn_mask=later))
    padding = torch.tensor([False, False, False, True, True])
    torch.testing.assert_close(ours(x, x, x, padding), theirs(x, x, x, padding))


def test_a_query_without_visible_keys_gets_the_projection_of_zero():
    _, ours = pair(batch_first=True)
    x = drawn(2, 3, 8)
    output, weights = ours(x, x, x, key_padding_mask=torch.ones(2, 3, dtype=torch.bool))
    assert not weights.any()
    assert torch.equal(output, ours.out_proj.bias.expand(2, 3, 8))


def test_dropout_in_training_only():
    _, ours = pair(dropout=0.5)
    x = drawn(5, 2, 8)
    torch.manual_seed(3)
    first = ours(x, x, x)[0]
    torch.manual_seed(3)
    assert torch.equal(first, ours(x, x, x)[0])
    assert not torch.equal(first, ours.eval()(x, x, x)[0])


def test_the_layer_works_in_torchs_encoder_layer():
    encoder = nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0).double()
    x = drawn(2, 5, 8).double()
    expected = encoder(x)
    ours = MultiHeadAttention(8, 2, batch_first=True).double()
    ours.load_state_dict(encoder.self_attn.state_dict())
    encoder.self_attn = ours
    torch.testing.assert_close(encoder(x), expected)


def test_unsuitable_masks_are_refused():
    _, ours = pair(batch_first=True)
    x = drawn(2, 3, 8)
    with pytest.raises(ShapeError):
        ours(x, x, x, attn_mask=torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(MaskError, match=r"attn_mask is a formula(.|\n)*torch.as_tensor\(~mask.array\(n, m\)\)"):
        ours(x, x, x, attn_mask=i >= j)
    with pytest.raises(MaskError, match=r"key_padding_mask is a formula") as refusal:
        ours(x, x, x, key_padding_mask=padding([3, 1]))
    cure = re.search(r"torch.as_tensor\(.+\(N, m\)\)", str(refusal.value)).group()
    written = eval(cure, {"torch": torch, "mask": padding([3, 1]), "N": 2, "m": 3})
    expected = torch.tensor([[False, False, False], [False, True, True]])
    assert torch.equal(written, expected)
    assert ours(x, x, x, key_padding_mask=written)[0].isfinite().all()
    with pytest.raises(MaskError, match=r"key_padding_mask is a tensor of int64(.|\n)*>= lengths\[:, None\]"):
        ours(x, x, x, key_padding_mask=torch.tensor([3, 1]))
    with pytest.raises(MaskError):
        functional.scaled_dot_product_attention(x, x, x, torch.ones(3, 3, dtype=torch.int32))


LAYERS = {
    "SelfAttention": lambda: SelfAttention(8, 4, 4, heads=2),
    "MultiHeadAttention": lambda: pair(batch_first=True)[1],
    "ScaledDotProductAttention": ScaledDotProductAttention,
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compile_to_one_graph(name):
    layer = LAYERS[name]()
    torch.compiler.reset()
    arguments = [drawn(2, 5, 8)] * (1 if isinstance(layer, SelfAttention) else 3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), layer(*arguments), rtol=0, atol=0)
