"""Tests of `sightline.transformers.masking`: a formula beside the masks of the model."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

import sightline
from sightline import b, h, i, j, watch
from sightline.errors import MaskError, ParameterError, ShapeError
from sightline.reference.testing import assert_within_budget
from sightline.transformers import masking, unpadded
from sightline.transformers.model_contexts import ADDED_MASKS
from tiny_models import BATCH, LENGTH, make_inputs, make_model, make_model_and_inputs, references

ALLOWED = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.manual_seed(0)) < 0.7
MASKS = {
    "window": i - j < 4,
    "entry and head": (j + b) % 3 + h % 2 < 3,
    "documents": sightline.documents(torch.arange(LENGTH) // 5),
    "documents by entry": sightline.documents(torch.arange(LENGTH)[None] // torch.tensor([[3], [4], [5]])),
    "lower right": sightline.causal("lower right"),
    "function": lambda b, h, q, k: (q - k).abs() < 3,
    "array": ALLOWED | torch.eye(LENGTH, dtype=torch.bool),
}


def dense_mask(model, mask, batch):
    """Return all masks of the model as one array (B, H, n, m)."""
    formula = sightline.dense(mask) if torch.is_tensor(mask) else mask(b, h, i, j) if callable(mask) else mask
    allowed = torch.from_numpy(np.array(formula.array(LENGTH, LENGTH, batch=BATCH, heads=4)))
    allowed = allowed & batch.inputs["attention_mask"].bool()[:, None, None]
    return allowed.tril() if type(model).__name__ == "LlamaForCausalLM" else allowed


@pytest.mark.sampled(one_in=17)
@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("padding", ["no", "left", "right"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_a_formula_restricts_the_masks_of_the_model(name, mask, padding, unpad):
    model, batch = make_model_and_inputs(name, padding)
    real = batch.inputs["attention_mask"].bool()
    dense = {**batch.inputs, "attention_mask": dense_mask(model, MASKS[mask], batch)}
    truth, plain = references(model, dense, "definition")
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), masking(model, MASKS[mask]), unpadded(model) if unpad else nullcontext():
        seen = model(**batch.inputs, output_attentions=True)
        logits = model(**batch.inputs).logits
    assert (model.config._attn_implementation, len(ADDED_MASKS)) == ("sdpa", 0)
    queries = real[:, None].expand(truth.attentions[0].shape[:-1])
    assert_within_budget(*[each.attentions[0][queries] for each in (seen, truth, plain)], "weights")
    assert_within_budget(logits[real], truth.logits[real], plain.logits[real], "logits")


def test_positions_go_on_in_a_generation():
    """The window of a Mistral model, given as a formula to a Llama model of the same parameters."""
    model, batch = make_model_and_inputs("Llama", "left")
    windowed = make_model("Mistral")
    windowed.load_state_dict(model.state_dict())
    expected = windowed.generate(**batch.inputs, max_new_tokens=6, do_sample=False)
    assert not torch.equal(model.generate(**batch.inputs, max_new_tokens=6, do_sample=False), expected)
    with masking(model, i - j < 5):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=6, do_sample=False), expected)
    with masking(model, i - j < 5), unpadded(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=6, do_sample=False), expected)


def test_layers_are_chosen_and_contexts_combine():
    model, batch = make_model_and_inputs("BERT", "no")
    with (
        torch.no_grad(),
        masking(model, i - j < 4),
        masking(model, j - i < 3, layers=[1]),
        watch(model, [sightline.weights()]) as seen,
    ):
        model(**batch.inputs)
    places = torch.arange(LENGTH)
    distance = places[:, None] - places
    assert torch.equal(seen[0]["weights"][0, 0] > 0, distance < 4)
    assert torch.equal(seen[1]["weights"][0, 0] > 0, (distance < 4) & (-distance < 3))


def test_cross_attention_is_not_changed():
    model, batch = make_model_and_inputs("BART", "no")
    with torch.no_grad(), masking(model, i == j), watch(model, [sightline.weights()]) as seen:
        model(**batch.inputs)
    for call in seen:
        hidden = call["weights"][0, 0].triu(1).count_nonzero() == 0
        assert hidden == (call.kind == "self"), call.layer
    with pytest.raises(ParameterError, match="cross-attention"), masking(model, i == j, layers=["*.encoder_attn"]):
        pass


def test_wrong_masks_are_refused():
    model = make_model("BERT")
    for wrong, error, match in [
        (None, ParameterError, "mask=None"),
        (i * 3, MaskError, "number"),
        (torch.ones(LENGTH, LENGTH), MaskError, "float32"),
    ]:
        with pytest.raises(error, match=match), masking(model, wrong):
            pass
    longer = torch.ones(LENGTH + 1, LENGTH + 1, dtype=torch.bool)
    for padding in ("no", "right"):
        with pytest.raises(ShapeError, match="length 13"), masking(model, longer), unpadded(model):
            model(**make_inputs(model, padding).inputs)


def test_a_mask_that_no_layer_reads_is_an_error():
    model = make_model("BERT")
    with pytest.raises(ParameterError, match="no layer read"), masking(model, i >= j):
        pass
    with pytest.raises(KeyError), masking(model, i >= j):
        raise KeyError
    assert not ADDED_MASKS


def test_a_formula_as_an_array_names_masking():
    model = make_model("BERT")
    inputs = make_inputs(model, "no").inputs | {"attention_mask": i >= j}
    with pytest.raises(AttributeError, match=r"sightline.transformers.masking\(model, mask\)"):
        model(**inputs)


WITHOUT_WITH = {
    "masking": lambda model: masking(model, sightline.causal()),
    "unpadded": unpadded,
    "pressing": lambda model: sightline.transformers.pressing(model, None),
    "replacing": lambda _: sightline.torch.replacing(),
    "watch": watch,
    "threads": lambda _: sightline.threads(4),
    "step": lambda model: sightline.AttentionMonitor(model).step(0),
}


@pytest.mark.parametrize("name", WITHOUT_WITH)
def test_a_context_without_with_warns(name):
    model = make_model("BERT")
    with pytest.warns(UserWarning, match=rf"{name}\(\.\.\.\) without `with` does nothing"):
        WITHOUT_WITH[name](model)
    with pytest.raises(ParameterError, match=rf"cure:    with {name}\(\.\.\.\) as result"):
        WITHOUT_WITH[name](model).served  # noqa: B018 - the error comes from the read


def test_a_context_as_a_decorator_does_not_warn(recwarn):
    assert sightline.threads(2)(lambda: 3)() == 3
    assert not recwarn.list
