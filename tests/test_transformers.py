"""Models of transformers, tiny and random: the same logits, weights and generation as their own code, and watching."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sightline.testing import assert_within_budget

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: E402

VOCABULARY, BATCH, LENGTH = 40, 3, 12
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
SPEECH = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 4,
    "max_source_positions": 10,
    "max_target_positions": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
TEXT = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
MADE = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Mistral, window 5": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 5}),
    "Gemma 2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "sliding_window": 5, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    ),
    "GPT-OSS": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **GROUPED,
            "sliding_window": 5,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "experts_implementation": "eager",
        },
    ),
    "BERT": ("BertForMaskedLM", "BertConfig", SIZES),
    "T5": ("T5ForConditionalGeneration", "T5Config", {**TEXT, "decoder_start_token_id": 1}),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", SPEECH),
}
WRITES = [name for name in MADE if name != "BERT"]  # models that generate


def made(name, **changes):
    """The model in float32, with weights large enough for its attention to prefer some keys."""
    model, config, sizes = MADE[name]
    torch.manual_seed(20170612)
    built = getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for weight in built.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            elif weight.shape == (4,):  # sinks
                weight.normal_()
    return built


@dataclass
class Given:
    """A model's arguments, and where its queries are real."""

    inputs: dict[str, Any]
    real: torch.Tensor


def given(name, padding):
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=rng)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for entry in range(1, BATCH):
        count = 3 * entry
        if padding == "left":
            mask[entry, :count] = 0
        elif padding == "right":
            mask[entry, -count:] = 0
    if name == "T5":
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids.flip(0), "use_cache": False}
        return Given({**inputs, "decoder_attention_mask": mask}, mask.bool())
    if name == "Whisper":
        features = torch.randn(BATCH, 4, 20, generator=rng)
        inputs = {"input_features": features, "decoder_input_ids": ids, "decoder_attention_mask": mask}
        return Given({**inputs, "use_cache": False}, mask.bool())
    return Given({"input_ids": ids, "attention_mask": mask}, mask.bool())


def definition(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
    """Attention as the papers write it, one stage a line, in whatever dtype it is given."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if options.get("softcap") is not None:
        scores = (scores / options["softcap"]).tanh() * options["softcap"]
    if options.get("position_bias") is not None:
        scores = scores + options["position_bias"]
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    if options.get("s_aux") is not None:
        sinks = options["s_aux"][:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : key.shape[-2]]
    return (weights @ value).transpose(1, 2), weights


@pytest.fixture
def by_definition(monkeypatch):
    """The definition under a name that models take."""

    def mask(*arguments, **options):
        return masking_utils.sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False})

    monkeypatch.setitem(AttentionInterface._global_mapping, "definition", definition)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "definition", mask)


def run(model, implementation, inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs, output_attentions=True)


def attentions(answer):
    found = {name: getattr(answer, name, None) for name in answer if name.endswith("attentions")}
    assert found
    return {f"{name} {k}": array for name, arrays in found.items() for k, array in enumerate(arrays)}


def wide(model, inputs):
    """The model and its arguments in float64."""
    floats = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in inputs.items()}
    return copy.deepcopy(model).double(), floats


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("padding", ["no", "left", "right"])
@pytest.mark.parametrize("name", MADE)
def test_logits_and_weights_are_those_of_the_model(name, padding):
    model, asked = made(name), given(name, padding)
    ours, theirs = (run(model, implementation, asked.inputs) for implementation in ("sightline", "eager"))
    deep, inputs = wide(model, asked.inputs)
    truth = run(deep, "definition", inputs)
    assert_within_budget(ours.logits[asked.real], truth.logits[asked.real], theirs.logits[asked.real], "logits")
    found, oracle, plain = attentions(ours), attentions(truth), attentions(theirs)
    assert found.keys() == oracle.keys() == plain.keys()
    for place, weights in found.items():
        assert weights.dtype == torch.float32
        real = asked.real[:, None].expand(weights.shape[:-1]) if weights.shape[-2] == LENGTH else ...
        assert_within_budget(weights[real], oracle[place][real], plain[place][real], place)


@pytest.mark.parametrize("name", WRITES)
def test_greedy_generation_is_that_of_the_model(name):
    model, asked = made(name), given(name, "left")
    names = ["input_features"] if name == "Whisper" else ["input_ids", "attention_mask"]
    inputs = {key: asked.inputs[key] for key in names}
    answers = []
    for implementation in ("sightline", "eager"):
        model.set_attn_implementation(implementation)
        answers.append(model.generate(**inputs, max_new_tokens=8, do_sample=False))
    assert torch.equal(*answers)
