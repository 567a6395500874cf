"""`sightline.torch.qk_clip` on models of transformers: the clipped head of the first layer is scaled exactly."""

import pytest
import torch

import sightline
from sightline.errors import ParameterError
from sightline.torch import qk_clip
from tiny_models import make_inputs, make_model

HEAD = 1
CLIPPED = ("Llama", "Mistral", "GPT-OSS", "BERT", "Whisper", "Qwen 2", "DeepSeek V3", "OPT", "DistilBERT", "BART")
CLIPPED += ("ViT", "CLIP's text", "DeepSeek V3 without q_lora_rank")


def record(model, inputs):
    """Return the recording of the largest scores."""
    with torch.no_grad(), sightline.watch(model, see=sightline.max_score()) as seen:
        model(**inputs)
    return seen


def make(name):
    name, _, without = name.partition(" without ")
    model = make_model(name, **({without: None} if without else {}))
    return model, make_inputs(model, "no").inputs


@pytest.mark.parametrize("name", CLIPPED)
def test_one_head_is_scaled_exactly_and_the_others_keep_their_bits(name):
    """With γ = 1/4 all products are scaled by powers of two, so the largest score is exactly the limit."""
    model, inputs = make(name)
    call = record(model, inputs)[0]
    scores = call["max_score"].score.amax((0, 2))
    given = torch.full_like(scores, -torch.inf)
    given[HEAD] = scores[HEAD]
    assert qk_clip(model, {call.layer: given}, float(scores[HEAD]) / 4) == {call.layer: {HEAD: 0.25}}
    scores[HEAD] /= 4
    assert torch.equal(record(model, inputs)[0]["max_score"].score.amax((0, 2)), scores)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen 3", "q_norm, k_norm"),
        ("Gemma 3", "q_norm, k_norm"),
        ("OLMo 2", "q_norm, k_norm"),
        ("Gemma 2", "attn_logit_softcapping"),
        ("T5", "has_relative_attention_bias"),
        ("GPT-NeoX", "query_key_value"),
        ("GPT-2", "c_attn"),
        ("Phi 3", "qkv_proj"),
        ("ModernBERT", "Wqkv"),
    ],
)
def test_models_whose_scores_do_not_follow_their_projections_are_refused(name, message):
    model, inputs = make(name)
    with pytest.raises(ParameterError, match=message):
        qk_clip(model, record(model, inputs), 1e-6)
