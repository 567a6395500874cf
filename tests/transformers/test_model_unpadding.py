"""Tests that `sightline.transformers.unpadded` gives the results of the padded batch, and computes no padding."""

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
import transformers

import sightline
from sightline import watch
from sightline.errors import ParameterError
from sightline.eviction import SnapKV
from sightline.reference.testing import assert_within_budget
from sightline.transformers import Cache, unpadded
from sightline.transformers.compatibility import CACHE
from tiny_models import (
    BATCH,
    LENGTH,
    MODELS,
    MORE_MODELS,
    SIZES,
    final_output,
    make_inputs,
    make_model,
    make_model_and_inputs,
    references,
    soak,
    to_float64,
)

ENCODERS = ["BERT", "RoBERTa", "ModernBERT", "DistilBERT", "ELECTRA"]
DECODERS = [name for name, (head, _) in (MODELS | MORE_MODELS).items() if head.endswith(("CausalLM", "LMHeadModel"))]


def tokens_per_linear(model, inputs):
    """Return the numbers of rows that the linear layers inside the model's list of layers get."""
    rows, handles = set(), []
    for layers in [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]:
        for module in [part for part in layers.modules() if isinstance(part, torch.nn.Linear)]:
            handles.append(module.register_forward_pre_hook(lambda _, x: rows.add(x[0].shape[:-1].numel())))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return rows


@pytest.mark.sampled(one_in=3)
@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize(
    ("name", "padding"),
    [
        *product(["BERT", "RoBERTa", "ModernBERT", "Llama", "Gemma 2", "GPT-2"], ["left", "right"]),
        *soak([*ENCODERS, *DECODERS], ["left", "right", "either"]),
    ],
)
def test_real_tokens_have_the_results_of_the_padded_batch(name, padding):
    model, batch = make_model_and_inputs(name, padding)
    real = batch.inputs["attention_mask"].bool()
    truth, eager = references(model, batch.inputs)
    with torch.no_grad(), unpadded(model):
        plain = model(**batch.inputs)
        output = model(**batch.inputs, output_attentions=True, output_hidden_states=True)
    assert model.config._attn_implementation == "eager"
    for found in (plain, output):
        assert_within_budget(*[final_output(each)[real] for each in (found, truth, eager)], "output")
    assert len(output.hidden_states) > 2
    assert all(hidden.shape[:2] == (BATCH, LENGTH) for hidden in output.hidden_states)
    queries = real[:, None].expand(output.attentions[0].shape[:-1])
    for k, weights in enumerate(output.attentions):
        assert_within_budget(*[each[queries] for each in (weights, truth.attentions[k], eager.attentions[k])], k)
        assert not weights[~queries].any()


@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_layers_compute_no_padding(name):
    model, batch = make_model_and_inputs(name, "right")
    assert tokens_per_linear(model, batch.inputs) == {BATCH * LENGTH}
    with unpadded(model):
        assert tokens_per_linear(model, batch.inputs) == {int(batch.real.sum())}
        assert tokens_per_linear(model, make_inputs(model, "no").inputs) == {BATCH * LENGTH}
    assert tokens_per_linear(model, batch.inputs) == {BATCH * LENGTH}


def test_the_last_layer_has_zeros_at_padding():
    model = make_model("BERT").bert
    batch = make_inputs(model, "right")
    with torch.no_grad(), unpadded(model):
        hidden = model(**batch.inputs).last_hidden_state
    assert hidden[batch.real].ne(0).all()
    assert not hidden[~batch.real].any()


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 1]]),  # padding between real tokens
        torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]]),  # an entry without real tokens
        torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]),
        torch.tensor([[1, 1, 1, 0, 0, 0]]),
    ],
)
@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("name", ["BERT", "Mistral"])
def test_masks_of_any_form(name, mask):
    model = make_model(name)
    inputs = {"input_ids": torch.arange(3, 9).expand(len(mask), -1), "attention_mask": mask}
    truth, eager = references(model, inputs)
    with torch.no_grad(), unpadded(model):
        found = model(**inputs)
    assert_within_budget(*[each.logits[mask.bool()] for each in (found, truth, eager)])


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_padded_batch(checkpointing):
    model, batch = make_model_and_inputs("BERT", "right")

    def gradients(module, inputs, implementation):
        module.set_attn_implementation(implementation)
        module.zero_grad()
        module(**inputs).logits[batch.real].sin().sum().backward()
        return {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}

    model64, inputs = to_float64(model, batch.inputs)
    truth, eager = gradients(model64, inputs, "definition"), gradients(copy.deepcopy(model), batch.inputs, "eager")
    if checkpointing:
        model.activation_checkpointing_enable()
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    with unpadded(model):
        found = gradients(model, batch.inputs, "sightline")
    assert found.keys() == truth.keys() == eager.keys()
    largest = {name: gradient.abs().max() for name, gradient in truth.items()}
    # A bias of the keys adds one number to all scores of a query, which changes no weight: its gradient is 0.
    zero = 1e-9 * max(largest.values())
    scales = {name: one if one > zero else max(largest.values()) for name, one in largest.items()}
    scaled = [torch.cat([(each[name] / scales[name]).flatten() for name in truth]) for each in (found, truth, eager)]
    assert_within_budget(*scaled, "gradients, each as a share of its largest entry")


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 2"])
def test_a_prompt_fills_the_cache_of_the_padded_batch(name):
    model, batch = make_model_and_inputs(name, "left")
    model.set_attn_implementation("sightline")
    expected = model.generate(**batch.inputs, max_new_tokens=6, do_sample=False)
    with unpadded(model):
        assert torch.equal(model.generate(**batch.inputs, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.usefixtures("by_definition")
def test_a_watch_records_the_entries_of_the_batch():
    model, batch = make_model_and_inputs("BERT", "right")
    truth, eager = references(model, batch.inputs)
    with torch.no_grad(), unpadded(model), watch(model, [sightline.weights(), sightline.received()]) as seen:
        model(**batch.inputs)
    real = batch.real[:, None, :, None]
    for call, *weights in zip(seen, truth.attentions, eager.attentions, strict=True):
        oracle, plain = (each * real for each in weights)
        assert_within_budget(call["weights"], oracle, plain, "weights")
        assert_within_budget(call["received"], oracle.sum(-2), plain.sum(-2), "received")


@pytest.mark.usefixtures("by_definition")
def test_the_layers_of_an_encoder_are_unpadded_and_those_with_cross_attention_are_not():
    model, batch = make_model_and_inputs("BART", "right")
    inputs = batch.inputs | {"attention_mask": batch.real.long()}
    truth, eager = references(model, inputs)
    with torch.no_grad(), unpadded(model):
        logits = model(**inputs).logits
        source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        assert tokens_per_linear(model.get_encoder(), source) == {int(batch.real.sum())}
    assert_within_budget(*[each[batch.real] for each in (logits, truth.logits, eager.logits)])


def test_contexts_may_be_nested_and_leave_nothing_behind():
    model, batch = make_model_and_inputs("BERT", "right")
    with unpadded(model), unpadded(model):
        assert tokens_per_linear(model, batch.inputs) == {int(batch.real.sum())}
    with pytest.raises(KeyError), unpadded(model):
        raise KeyError
    assert not any("forward" in vars(module) for module in model.modules())


def test_threads_share_a_model():
    """A context that ends first leaves the layers of the others as they are."""
    model, batch = make_model_and_inputs("BERT", "right")
    with torch.no_grad(), unpadded(model):
        expected = model(**batch.inputs).logits

    def run_often(_):
        for _ in range(5):
            with torch.no_grad(), unpadded(model):
                found = model(**batch.inputs).logits
        return torch.equal(found, expected)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run_often, range(3)))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.nn.Linear(2, 2), "attention interface"),
        (lambda: transformers.BloomModel(transformers.BloomConfig(hidden_size=8, n_layer=1, n_head=2)), "interface"),
        (lambda: with_convolution(make_model("BERT")), "Conv1d"),
        (lambda: make_model("BERT").bert.encoder.layer[0], "interface"),
    ],
)
def test_models_that_cannot_be_unpadded_are_refused(make, reason):
    with pytest.raises(ParameterError, match=reason), unpadded(make()):
        pass


def test_a_dense_bias_of_places_is_refused_when_a_layer_runs(monkeypatch):
    model = make_model("T5")
    layer = model.encoder.block[0].layer[0].SelfAttention
    monkeypatch.setattr(layer, "compute_bias", lambda *_, **options: torch.zeros(1, 4, LENGTH, LENGTH))
    with unpadded(model), pytest.raises(ParameterError, match="position_bias= of T5Attention"):
        model(**make_inputs(model, "right").inputs)


def with_convolution(model):
    model.bert.encoder.layer[1].mixer = torch.nn.Conv1d(SIZES["hidden_size"], 4, 3)
    return model


@pytest.mark.parametrize("options", [{"evict": SnapKV(budget=6, last=3)}, {"dtype": "int4"}])
def test_a_cache_that_changes_the_keys_gives_its_own_tokens(options):
    """The prompt attends to what such a cache stores, and evicting caches keep their budget."""
    model, batch = make_model_and_inputs("Llama", "left", attn_implementation="sightline")
    found = []
    for context in (contextlib.nullcontext(), unpadded(model)):
        cache = Cache(**options)
        with context:
            ids = model.generate(**batch.inputs, **{CACHE: cache}, max_new_tokens=6, do_sample=False)
        found.append([ids.tolist(), cache.layers[0].cache.row_counts.tolist()])
    assert found[0] == found[1]


def test_router_logits_are_refused():
    model, batch = make_model_and_inputs("Mixtral", "right")
    with torch.no_grad(), unpadded(model):
        model(**batch.inputs, labels=batch.inputs["input_ids"])
        with pytest.raises(ParameterError, match="output_router_logits=True in `unpadded`"):
            model(**batch.inputs, labels=batch.inputs["input_ids"], output_router_logits=True)
