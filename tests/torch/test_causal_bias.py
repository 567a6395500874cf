"""torch's CausalBias as a mask: the formula that it stands for, wherever masks are given."""

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sightline
from sightline.call.problem import make_problem
from sightline.errors import DtypeError, ParameterError, ShapeError
from sightline.reference.accuracy import compute_baseline, term_sizes
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from sightline.torch import ScaledDotProductAttention, replacing, scaled_dot_product_attention

pytestmark = [
    pytest.mark.sampled(one_in=12),
    pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs"),
]

VARIANTS = {"upper left": causal_upper_left, "lower right": causal_lower_right}
LENGTHS = [(5, 7), (7, 5), (6, 6), (1, 9), (9, 1)]
REPETITIONS = 9
B, H, D = 2, 4, 8


def draw(n, m, seed=0, heads=H, lead=(B,)):
    rng = np.random.default_rng(seed)
    shapes = (*lead, H, n, D), (*lead, heads, m, D), (*lead, heads, m, D)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def visible(align, n, m):
    """Return the pairs that torch documents for a variant, as a boolean array."""
    return np.tril(np.ones((n, m), bool), 0 if align == "upper left" else m - n)


def assert_defined(output, given, mask):
    """Raise AssertionError unless the output is that of the definition, with this boolean array as mask."""
    problem = make_problem(*given, mask=mask)
    stages, baseline = compute_stages(problem), compute_baseline(problem)
    found = np.asarray(output).reshape(stages.output.shape)
    assert_within_budget(found, stages.output, baseline.output, "output", term_sizes(problem, stages.weights))


def sdpa(q, k, v, mask, **options):
    return scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), mask, **options)


def replaced(q, k, v, mask):
    with replacing() as replacement:
        output = functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), mask)
    assert (replacement.served.total(), replacement.left.total()) == (1, 0)
    return output


def layer(mask_means):
    def call(*given):
        *arrays, mask = given
        return ScaledDotProductAttention(mask_means=mask_means)(*map(torch.from_numpy, arrays), mask)[0]

    return call


CALLS = {
    "torch's function": sdpa,
    "torch's function, replaced": replaced,
    "attention": lambda *given: sightline.attention(*map(torch.from_numpy, given[:3]), mask=given[3]),
    "attention of arrays": lambda *given: sightline.attention(*given[:3], mask=given[3]),
    "a layer": layer("attend"),
    "a layer whose masks hide": layer("ignore"),
}


@pytest.mark.parametrize("align", VARIANTS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_mask_is_its_formula(name, lengths, align):
    for repetition in range(REPETITIONS):
        given = draw(*lengths, repetition)
        output = CALLS[name](*given, VARIANTS[align](*lengths))
        assert_defined(output, given, visible(align, *lengths))


@pytest.mark.parametrize("align", VARIANTS)
@pytest.mark.parametrize("lead", [(), (2,), (3, 2)], ids=str)
def test_any_leading_axes(lead, align):
    given = draw(5, 7, lead=lead)
    joined = [x.reshape(-1, *x.shape[-3:]) for x in given]
    assert_defined(sdpa(*given, VARIANTS[align](5, 7)), joined, visible(align, 5, 7))


def test_shared_heads_and_is_causal():
    given = draw(5, 7, heads=2)
    output = sdpa(*given, causal_lower_right(5, 7), enable_gqa=True)
    assert_defined(output, given, visible("lower right", 5, 7))
    with pytest.raises(ParameterError, match="is_causal=True"):
        sdpa(*given, causal_lower_right(5, 7), is_causal=True, enable_gqa=True)


def test_gradients_equal_those_of_torch():
    tensors = [torch.from_numpy(x).double().requires_grad_() for x in draw(5, 7)]
    found, expected = [
        torch.autograd.grad(function(*tensors, causal_lower_right(5, 7)).square().sum(), tensors)
        for function in (scaled_dot_product_attention, functional.scaled_dot_product_attention)
    ]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("align", VARIANTS)
def test_the_condition_of_a_statistic(align):
    given = [torch.from_numpy(x) for x in draw(5, 7)]
    see = [sightline.mass(VARIANTS[align](5, 7)), sightline.mass(torch.from_numpy(visible(align, 5, 7)))]
    _, (found, expected) = sightline.attention(*given, see=see)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("align", VARIANTS)
def test_compiled_functions(align, dynamic, backend):
    """torch compiles no function that makes a CausalBias."""
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, backend=backend, dynamic=dynamic, fullgraph=True)
    for lengths in [(5, 7), (4, 9)]:
        given = draw(*lengths)
        output = compiled(*map(torch.from_numpy, given), VARIANTS[align](*lengths))
        assert_defined(output, given, visible(align, *lengths))
    torch._dynamo.reset()


@pytest.mark.parametrize("align", VARIANTS)
@pytest.mark.parametrize("name", [name for name in CALLS if "replaced" not in name])
def test_other_lengths_are_an_error(name, align):
    text = align.replace(" ", "_")
    with pytest.raises(
        ShapeError, match=rf"causal_{text}\(5, 8\), a CausalBias(.|\n)*5 queries and 7 keys(.|\n)*cure:"
    ):
        CALLS[name](*draw(5, 7), VARIANTS[align](5, 8))


def test_sequences_of_several_lengths_are_an_error():
    x = torch.nested.nested_tensor([torch.randn(n, H, D) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    for call, name in ((sightline.attention, "mask"), (scaled_dot_product_attention, "attn_mask")):
        with pytest.raises(ShapeError, match=r"CausalBias(.|\n)*several lengths(.|\n)*causal\('lower right'\)"):
            call(x, x, x, **{name: causal_lower_right(5, 5)})


@pytest.mark.parametrize("read", [sightline.table, sightline.bias, sightline.dense], ids=lambda read: read.__name__)
def test_it_has_no_entries(read):
    with pytest.raises(DtypeError, match=r"CausalBias of torch, which has no entries(.|\n)*mask="):
        read(causal_lower_right(5, 7))


def test_as_a_score_and_as_a_condition_of_other_lengths_it_is_an_error():
    given = [torch.from_numpy(x) for x in draw(5, 7)]
    with pytest.raises(DtypeError, match=r"score is a CausalBias(.|\n)*mask="):
        sightline.attention(*given, score=causal_lower_right(5, 7))
    with pytest.raises(ShapeError, match="CausalBias"):
        sightline.attention(*given, see=[sightline.mass(causal_upper_left(7, 7))])


# -- in the place of torch's function ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [causal_upper_left(5, 7), causal_lower_right(7, 7)], ids=["upper left", "square"])
def test_replaced_calls_of_other_lengths_are_those_of_torch(mask):
    """torch reads a CausalBias of the variant upper left, or of equal lengths, as is_causal of any lengths."""
    given = draw(4, 7)
    with replacing() as replacement:
        output = functional.scaled_dot_product_attention(*map(torch.from_numpy, given), mask)
    assert_defined(output, given, visible("upper left", 4, 7))
    (reason,) = [reason for _, reason in replacement.left]
    assert "CausalBias" in reason
    assert "CausalBias" in str(replacement)
