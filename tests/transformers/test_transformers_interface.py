"""Models of transformers, tiny and random: the same logits, weights, generation and gradients as by their own code."""

import itertools

import pytest
import torch

from sightline.accuracy import budget_used
from sightline.errors import ParameterError
from sightline.testing import assert_within_budget

pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from sightline.transformers import interface
from tiny_models import BATCH, LENGTH, MADE, MORE, answered, attentions, given, made, run, wide

WRITES = [name for name in MADE if name != "BERT"]  # models that generate


def assert_as_the_model(name, padding):
    model = made(name)
    asked = given(model, padding)
    ours, theirs = (run(model, implementation, asked.inputs) for implementation in ("sightline", "eager"))
    deep, inputs = wide(model, asked.inputs)
    truth = run(deep, "definition", inputs)
    assert_within_budget(*[answered(answer)[asked.real] for answer in (ours, truth, theirs)], "the answer")
    found, oracle, plain = attentions(ours), attentions(truth), attentions(theirs)
    assert found.keys() == oracle.keys() == plain.keys()
    for place, weights in found.items():
        assert weights.dtype == torch.float32
        real = ... if weights.shape[-2] != LENGTH else asked.real[:, None].expand(weights.shape[:-1])
        assert_within_budget(weights[real], oracle[place][real], plain[place][real], place)


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("padding", ["no", "either"])
@pytest.mark.parametrize("name", MADE)
def test_answers_and_weights_are_those_of_the_model(name, padding):
    assert_as_the_model(name, padding)


@pytest.mark.soak
@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("padding", ["no", "left", "right"])
@pytest.mark.parametrize("name", [*MADE, *MORE])
def test_answers_and_weights_are_those_of_more_models(name, padding):
    assert_as_the_model(name, padding)


def test_a_model_can_be_made_with_it():
    model = made("Llama")
    asked = given(model, "left")
    ours = AutoModelForCausalLM.from_config(model.config, attn_implementation="sightline").eval()
    ours.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(ours(**asked.inputs).logits, run(model, "sightline", asked.inputs).logits)


@pytest.mark.soak
@pytest.mark.usefixtures("by_definition")
@pytest.mark.filterwarnings("ignore")  # the compiler's, of what it meets in transformers
def test_a_compiled_model_answers_the_same():
    model = made("Llama")
    asked = given(model, "left")
    deep, inputs = wide(model, asked.inputs)
    judged = [run(deep, "definition", inputs), run(model, "eager", asked.inputs)]
    model.set_attn_implementation("sightline")
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")(**asked.inputs)
    assert_within_budget(*[answer.logits[asked.real] for answer in (compiled, *judged)])


def generated(model, inputs, **options):
    """What a model writes with this library and without."""
    for implementation in ("sightline", "eager"):
        model.set_attn_implementation(implementation)
        yield model.generate(**inputs, do_sample=False, **options)


@pytest.mark.parametrize("name", WRITES)
def test_greedy_generation_is_that_of_the_model(name):
    model = made(name)
    inputs = given(model, "left").inputs
    inputs = {key: inputs[key] for key in inputs if not key.startswith(("decoder", "use"))}
    assert torch.equal(*generated(model, inputs, max_new_tokens=8))


def test_a_static_cache_generates_the_same():
    model = made("Mistral")
    assert torch.equal(*generated(model, given(model, "left").inputs, max_new_tokens=4, cache_implementation="static"))


def test_beams_generate_the_same():
    model = made("Llama")
    assert torch.equal(*generated(model, given(model, "left").inputs, max_new_tokens=4, num_beams=3))


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_mask_that_is_lost_shows(monkeypatch, padding):
    """transformers makes no mask for an attention without a mask function, and says nothing."""
    model = made("BERT")
    asked = given(model, padding)
    theirs = run(model, "eager", asked.inputs)
    deep, inputs = wide(model, asked.inputs)
    truth = run(deep, "definition", inputs)
    judged = [x.logits[asked.real] for x in (truth, theirs)]
    assert budget_used(run(model, "sightline", asked.inputs).logits[asked.real], *judged) <= 1
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "sightline")
    assert budget_used(run(model, "sightline", asked.inputs).logits[asked.real], *judged) > 1


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize(
    ("name", "part"), [("Gemma 2", "softcap"), ("GPT-OSS", "s_aux"), ("T5", "position_bias"), ("Llama", "scaling")]
)
def test_an_argument_that_is_lost_shows(monkeypatch, name, part):
    model = made(name)
    asked = given(model, "no")
    theirs = run(model, "eager", asked.inputs)
    deep, inputs = wide(model, asked.inputs)
    truth = run(deep, "definition", inputs)
    whole = AttentionInterface._global_mapping["sightline"]

    def losing(*arguments, **options):
        changed = {part: options[part] / 2} if part == "scaling" else {part: None}
        return whole(*arguments, **{**options, **changed})

    monkeypatch.setitem(AttentionInterface._global_mapping, "sightline", losing)
    assert budget_used(run(model, "sightline", asked.inputs).logits, truth.logits, theirs.logits) > 1


@pytest.mark.parametrize("argument", interface.UNSUPPORTED_ARGUMENTS)
def test_arguments_it_would_have_to_ignore_are_refused(argument):
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ParameterError, match=argument):
        interface.sightline_attention(torch.nn.Identity(), x, x, x, None, **{argument: x})


# -- training ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("name", ["GPT-OSS", pytest.param("T5", marks=pytest.mark.soak)])
def test_gradients_are_those_of_the_model(name):
    """Sinks and embeddings learn the same. Their gradients are sums over the batch, so its order counts.

    Those of relative biases are sums that cancel: tests of tables judge them, which know the size of the terms.
    """
    model = made(name)
    asked = given(model, "right")
    deep, inputs = wide(model, asked.inputs)

    def gradients(of, implementation, arguments, order=None):
        order = order or list(range(BATCH))
        of.set_attn_implementation(implementation)
        of.zero_grad()
        taken = {name: x[order] if torch.is_tensor(x) else x for name, x in arguments.items()}
        of(**taken).logits[asked.real[order]].tanh().sum().backward()
        return {name: weight.grad.flatten() for name, weight in of.named_parameters() if weight.grad is not None}

    ours, truth = gradients(model, "sightline", asked.inputs), gradients(deep, "definition", inputs)
    orders = [
        gradients(model, "eager", asked.inputs, order) for order in map(list, itertools.permutations(range(BATCH)))
    ]
    assert ours.keys() == truth.keys() == orders[0].keys()
    for place, found in ours.items():
        if "relative_attention_bias" in place:
            assert found.abs().max() > 0
            continue
        assert_within_budget(found, truth[place], torch.stack([order[place] for order in orders]), place)


def test_dropout_is_for_training():
    model = made("Llama", attention_dropout=0.5)
    asked = given(model, "no")
    model.set_attn_implementation("sightline")

    def logits(training):
        torch.manual_seed(3)
        return model.train(training)(**asked.inputs).logits

    assert torch.equal(logits(True), logits(True))
    assert not torch.equal(logits(True), logits(False))
