"""Position biases of T5 and its relatives reach the kernel as a table of distances."""

import pytest
import torch
import transformers
from transformers import AttentionInterface

import sightline.transformers  # noqa: F401  registers "sightline"
from sightline.transformers.compatibility import CACHE
from sightline.transformers.masks_and_biases import PositionBias
from tiny_models import TEXT, VOCABULARY

SIZES = {**TEXT, "num_decoder_layers": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
SIZES |= {"pad_token_id": 0, "eos_token_id": 2}
MODELS = ("T5", "MT5", "UMT5", "LongT5")


def make(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **({"local_radius": 4} if name == "LongT5" else {}))
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).double().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return model


def make_inputs():
    tokens, real = torch.randint(3, VOCABULARY, (2, 45)), torch.ones(2, 45, dtype=torch.long)
    real[0, 30:] = 0
    return {"input_ids": tokens, "attention_mask": real, "decoder_input_ids": torch.randint(3, VOCABULARY, (2, 37))}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_dense_bias(name, monkeypatch):
    model, inputs, results, biases = make(name), make_inputs(), {}, []
    attention = AttentionInterface._global_mapping["sightline"]

    def record(*arguments, **options):
        biases.append(options["position_bias"])
        return attention(*arguments, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sightline", record)
    for implementation in ("eager", "sightline"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(**inputs).logits
        logits.tanh().sum().backward()
        gradients = {key: weight.grad for key, weight in model.named_parameters() if "relative" in key}
        results[implementation] = logits.detach(), gradients
    torch.testing.assert_close(results["sightline"], results["eager"])
    assert results["eager"][1]
    own = [bias for bias in biases if bias.shape[-1] == 37]  # the decoder's attention to itself; all others may differ
    assert own
    assert all(isinstance(bias, PositionBias) for bias in own)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("name", ["T5", "UMT5"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}])
def test_generated_tokens_are_those_of_the_dense_bias(name, options):
    model, inputs = make(name), make_inputs()
    del inputs["decoder_input_ids"]
    found = []
    for implementation in ("eager", "sightline"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**inputs, max_new_tokens=12, do_sample=False, **options).tolist())
    assert found[0] == found[1]


def test_no_dense_bias_is_made(monkeypatch):
    model, asked = make("T5"), []
    layer = model.encoder.block[0].layer[0].SelfAttention
    embed = layer.relative_attention_bias.forward
    monkeypatch.setattr(layer.relative_attention_bias, "forward", lambda x: asked.append(x.numel()) or embed(x))
    for implementation in ("sightline", "eager", "sightline"):
        model.set_attn_implementation(implementation)
        model.encoder(input_ids=torch.ones(1, 200, dtype=torch.long))
    assert asked == [21, 200 * 200, 21]  # 2 · relative_attention_max_distance + 1 distances


def test_other_operations_read_the_dense_bias():
    layer = make("T5").decoder.block[0].layer[0].SelfAttention
    layer.config._attn_implementation = "eager"
    expected = layer.compute_bias(5, 9, past_seen_tokens=4)
    layer.config._attn_implementation = "sightline"
    transformers.masking_utils.create_causal_mask(layer.config, torch.ones(1, 5, 16), None, **{CACHE: None})
    bias = layer.compute_bias(5, 9, past_seen_tokens=4)
    assert type(bias) is PositionBias
    assert bias.shape == expected.shape == (1, 4, 5, 9)
    assert bias.dtype == expected.dtype
    changed = bias + 1
    assert type(changed) is torch.Tensor
    assert torch.equal(changed, expected + 1)
    assert changed.requires_grad
