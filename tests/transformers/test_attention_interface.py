"""Tests that tiny random models of transformers compute the same with "sightline" as with their own attention."""

import itertools

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

import sightline
from sightline.errors import ParameterError
from sightline.reference.accuracy import budget_used
from sightline.reference.testing import assert_within_budget
from sightline.transformers import attention_interface as interface
from tiny_models import (
    BATCH,
    LENGTH,
    MODELS,
    MORE_MODELS,
    attentions,
    final_output,
    make_inputs,
    make_model,
    make_model_and_inputs,
    prompt_of,
    references,
    run,
    soak,
    to_float64,
)

GENERATIVE_MODELS = [name for name in MODELS if name != "BERT"]


@pytest.mark.sampled(one_in=4)
@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize(
    ("name", "padding"),
    [*itertools.product(MODELS, ["no", "either"]), *soak([*MODELS, *MORE_MODELS], ["no", "left", "right"])],
)
def test_output_and_weights_are_those_of_the_model(name, padding):
    """The output and weights with "sightline" are within the budget of the "eager" implementation."""
    model, batch = make_model_and_inputs(name, padding)
    output, (truth, eager) = run(model, "sightline", batch.inputs), references(model, batch.inputs)
    assert_within_budget(*[final_output(each)[batch.real] for each in (output, truth, eager)], "output")
    found, oracle, plain = attentions(output), attentions(truth), attentions(eager)
    assert found.keys() == oracle.keys() == plain.keys()
    for name_in_model, weights in found.items():
        assert weights.dtype == torch.float32
        real = ... if weights.shape[-2] != LENGTH else batch.real[:, None].expand(weights.shape[:-1])
        assert_within_budget(weights[real], oracle[name_in_model][real], plain[name_in_model][real], name_in_model)


def test_a_model_can_be_built_with_sightline():
    model, batch = make_model_and_inputs("Llama", "left")
    ours = AutoModelForCausalLM.from_config(model.config, attn_implementation="sightline").eval()
    ours.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(ours(**batch.inputs).logits, run(model, "sightline", batch.inputs).logits)


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about code of transformers
@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_a_compiled_model_generates_with_a_static_cache(name):
    """`generate` makes the masks outside the compiled code, which reads their arrays."""
    model, batch = make_model_and_inputs(name, "left")
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**batch.inputs, **options)
    model.set_attn_implementation("sightline")
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(**batch.inputs, **options, cache_implementation="static"), expected)


@pytest.mark.soak
@pytest.mark.usefixtures("by_definition")
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about code of transformers
def test_a_compiled_model_computes_the_same():
    model, batch = make_model_and_inputs("Llama", "left")
    expected = references(model, batch.inputs)
    model.set_attn_implementation("sightline")
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")(**batch.inputs)
    assert_within_budget(*[answer.logits[batch.real] for answer in (compiled, *expected)])


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"max_new_tokens": 8}) for name in GENERATIVE_MODELS),
        ("Mistral", {"max_new_tokens": 4, "cache_implementation": "static"}),
        ("Llama", {"max_new_tokens": 4, "num_beams": 3}),
    ],
)
def test_generation_is_that_of_the_model(name, options):
    model, found = make_model(name), []
    for implementation in ("sightline", "eager"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**prompt_of(make_inputs(model, "left")), do_sample=False, **options))
    assert torch.equal(*found)


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_missing_mask_is_detected(monkeypatch, padding):
    """Without a mask function for an attention implementation, transformers silently makes no mask."""
    model, batch = make_model_and_inputs("BERT", padding)
    expected = [output.logits[batch.real] for output in references(model, batch.inputs)]
    assert budget_used(run(model, "sightline", batch.inputs).logits[batch.real], *expected) <= 1
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "sightline")
    assert budget_used(run(model, "sightline", batch.inputs).logits[batch.real], *expected) > 1


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize(
    ("name", "part"), [("Gemma 2", "softcap"), ("GPT-OSS", "s_aux"), ("T5", "position_bias"), ("Llama", "scaling")]
)
def test_an_ignored_argument_is_detected(monkeypatch, name, part):
    model, batch = make_model_and_inputs(name, "no")
    truth, eager = references(model, batch.inputs)
    attention = AttentionInterface._global_mapping["sightline"]

    def ignore_argument(*arguments, **options):
        changed = {part: options[part] / 2} if part == "scaling" else {part: None}
        return attention(*arguments, **{**options, **changed})

    monkeypatch.setitem(AttentionInterface._global_mapping, "sightline", ignore_argument)
    assert budget_used(run(model, "sightline", batch.inputs).logits, truth.logits, eager.logits) > 1


@pytest.mark.parametrize("argument", interface.UNSUPPORTED_ARGUMENTS)
def test_unsupported_arguments_are_refused(argument):
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ParameterError, match=argument):
        interface.sightline_attention(torch.nn.Identity(), x, x, x, None, **{argument: x})


# -- training ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("name", ["GPT-OSS", pytest.param("T5", marks=pytest.mark.soak)])
def test_gradients_are_those_of_the_model(name):
    """The gradients of sinks and embeddings are sums over the batch, so every order of the batch is a baseline.

    The gradients of relative biases are sums whose terms cancel. Only a nonzero gradient is required here; the tests of
    tables check such gradients with a budget that includes the size of the terms.
    """
    model, batch = make_model_and_inputs(name, "right")
    model64, inputs = to_float64(model, batch.inputs)

    def gradients(of, implementation, arguments, order=None):
        order = order or list(range(BATCH))
        of.set_attn_implementation(implementation)
        of.zero_grad()
        taken = {name: x[order] if torch.is_tensor(x) else x for name, x in arguments.items()}
        of(**taken).logits[batch.real[order]].tanh().sum().backward()
        return {name: weight.grad.flatten() for name, weight in of.named_parameters() if weight.grad is not None}

    computed, truth = gradients(model, "sightline", batch.inputs), gradients(model64, "definition", inputs)
    orders = [
        gradients(model, "eager", batch.inputs, order) for order in map(list, itertools.permutations(range(BATCH)))
    ]
    assert computed.keys() == truth.keys() == orders[0].keys()
    for name_in_model, found in computed.items():
        if "relative_attention_bias" in name_in_model:
            assert found.abs().max() > 0
            continue
        assert_within_budget(
            found, truth[name_in_model], torch.stack([order[name_in_model] for order in orders]), name_in_model
        )


def test_dropout_in_training_only():
    model, batch = make_model_and_inputs("Llama", "no", attention_dropout=0.5, attn_implementation="sightline")

    def logits(training):
        torch.manual_seed(3)
        return model.train(training)(**batch.inputs).logits

    assert torch.equal(logits(True), logits(True))
    assert not torch.equal(logits(True), logits(False))


def test_positions_that_restart_under_a_mask_of_ones_warn():
    model = make_model("Llama", attn_implementation="sightline")
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    packed = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    ones = {"attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        for options in (ones, {}):  # a cache also keeps transformers from separating documents
            with pytest.warns(UserWarning, match="restart.*\n  cure: leave out attention_mask= and the cache"):
                model(ids, **packed, **options)
        alone = model(ids[:, 3:], **{key: x[:, 3:] for key, x in ones.items()}).logits
        model(ids, **packed, use_cache=False)
        with sightline.transformers.masking(model, sightline.documents(lengths=[3, 3])):
            found = model(ids, **packed, **ones).logits
    torch.testing.assert_close(found[:, 3:], alone)
