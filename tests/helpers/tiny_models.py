"""Tiny random models of transformers, their inputs, and attention as the papers define it."""

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import transformers

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
TEXT |= {"decoder_start_token_id": 1}
BOTH = {name: size for name, size in SPEECH.items() if not name.startswith(("num_mel", "max"))}
BOTH |= {"max_position_embeddings": 64}
PICTURE = {
    name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
PICTURE |= {"image_size": 16, "patch_size": 4}
TYPES = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "first_k_dense_replace": 2}  # no layer has experts
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}

Sizes = dict[str, Any]
MODELS: dict[str, tuple[str, Sizes]] = {  # "Llama ForCausalLM" is LlamaForCausalLM with a LlamaConfig of these sizes
    "Llama": ("Llama ForCausalLM", GROUPED),
    "Mistral": ("Mistral ForCausalLM", {**GROUPED, "sliding_window": 5}),
    "Gemma 2": (
        "Gemma2 ForCausalLM",
        {**GROUPED, "sliding_window": 5, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    ),
    "GPT-OSS": ("GptOss ForCausalLM", {**GROUPED, **EXPERTS, **PLAIN_ROPE, "sliding_window": 5}),
    "GPT-2": (  # its layers get no output_attentions argument
        "GPT2 LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0, "eos_token_id": None},
    ),
    "BERT": ("Bert ForMaskedLM", SIZES),
    "T5": ("T5 ForConditionalGeneration", TEXT),
    "Whisper": ("Whisper ForConditionalGeneration", SPEECH),
}
MORE_MODELS: dict[str, tuple[str, Sizes]] = {
    "Gemma 3": ("Gemma3Text ForCausalLM", {**GROUPED, **TYPES, "query_pre_attn_scalar": 8}),
    "Qwen 2": ("Qwen2 ForCausalLM", GROUPED),
    "Qwen 3": ("Qwen3 ForCausalLM", GROUPED),
    "Qwen 3 MoE": ("Qwen3Moe ForCausalLM", {**GROUPED, **EXPERTS, "num_experts": 2, "moe_intermediate_size": 16}),
    "Mixtral": ("Mixtral ForCausalLM", {**GROUPED, **EXPERTS}),
    "Phi 3": ("Phi3 ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "Llama 4": (
        "Llama4Text ForCausalLM",
        {**GROUPED, "attention_chunk_size": 5, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 5},
    ),
    "Cohere 2": ("Cohere2 ForCausalLM", {**GROUPED, **TYPES}),
    "DeepSeek V3": ("DeepseekV3 ForCausalLM", {**SIZES, **LATENT}),
    "GPT-NeoX": ("GPTNeoX ForCausalLM", SIZES),
    "OPT": ("OPT ForCausalLM", {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 32}),
    "OLMo 2": ("Olmo2 ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "Granite": ("Granite ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "StarCoder 2": ("Starcoder2 ForCausalLM", {**SIZES, "num_key_value_heads": 2, "sliding_window": 5}),
    "RoBERTa": ("Roberta ForMaskedLM", SIZES),
    "ModernBERT": ("ModernBert ForMaskedLM", {**SIZES, "local_attention": 6, "global_attn_every_n_layers": 2}),
    "DistilBERT": (
        "DistilBert ForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 32},
    ),
    "ELECTRA": ("Electra ForMaskedLM", {**SIZES, "embedding_size": 32}),
    "mT5": ("MT5 ForConditionalGeneration", TEXT),
    "BART": ("Bart ForConditionalGeneration", BOTH),
    "Pegasus": ("Pegasus ForConditionalGeneration", BOTH),
    "ViT": ("ViT ForImageClassification", PICTURE),
    "DINOv2": ("Dinov2 Model", PICTURE),
    "SigLIP": ("SiglipVision Model", PICTURE),
    "CLIP's text": ("CLIPText Model", {**SIZES, "eos_token_id": VOCABULARY - 1}),
    "Wav2Vec2": (
        "Wav2Vec2 Model",
        {
            **{name: SIZES[name] for name in list(SIZES)[1:5]},
            "conv_dim": (8, 8),
            "conv_stride": (2, 2),
            "conv_kernel": (3, 3),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
}


def make_model(name, **changes):
    """Return the model in float32, with parameters large enough for its attention to prefer some keys."""
    class_name, sizes = (MODELS | MORE_MODELS)[name]
    family, head = class_name.split()
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    torch.manual_seed(20170612)
    return draw_weights(getattr(transformers, family.removesuffix("Text" * (head != "Model")) + head)(config).eval())


@torch.no_grad()
def draw_weights(model):
    """Draw the entries of matrices and of sinks, and return the model."""
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(std=weight.shape[-1] ** -0.5)
        elif weight.shape == (4,):  # sinks
            weight.normal_()
    return model


@torch.no_grad()
def make_assistant(model):
    """Return a model that drafts tokens for this one, with nearly the same parameters."""
    assistant = copy.deepcopy(model)
    for weight in assistant.parameters():
        weight.mul_(1 + 0.2 * torch.randn_like(weight))
    return assistant


@dataclass
class Inputs:
    """The arguments of a model, and an index of the outputs that are not padding."""

    inputs: dict[str, Any]
    real: Any


def make_inputs(model, padding):
    """Return inputs without padding ("no"), or with padding on the "left", the "right" or, by entry, "either" side."""
    rng = torch.Generator().manual_seed(1)
    config, ids = model.config, torch.randint(3, VOCABULARY - 1, (BATCH, LENGTH), generator=rng)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for entry in range(1, BATCH):
        if padding != "no":
            mask[entry, : 3 * entry] = 0
    if padding in ("right", "either"):
        flipped = slice(None) if padding == "right" else slice(-1, None)
        mask[flipped] = mask[flipped].flip(1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.main_input_name == "pixel_values":
        return Inputs({"pixel_values": torch.randn(BATCH, 3, config.image_size, config.image_size, generator=rng)}, ...)
    if model.main_input_name == "input_values":
        return Inputs({"input_values": torch.randn(BATCH, 60, generator=rng)}, ...)
    if model.main_input_name == "input_features":
        frames = 2 * config.max_source_positions
        inputs = {"input_features": torch.randn(BATCH, config.num_mel_bins, frames, generator=rng)}
    if config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": ids.flip(0), "decoder_attention_mask": mask, "use_cache": False}
    return Inputs(inputs, mask.bool())


def make_model_and_inputs(name, padding, **changes):
    """Return a model of `make_model` and its inputs of `make_inputs`."""
    model = make_model(name, **changes)
    return model, make_inputs(model, padding)


def soak(names, paddings):
    """Return the parameters of long tests: every name with every padding."""
    return [pytest.param(*case, marks=pytest.mark.soak) for case in product(names, paddings)]


def prompt_of(batch):
    """Return the arguments of `generate`: the inputs without those of the decoder."""
    return {name: x for name, x in batch.inputs.items() if not name.startswith(("decoder", "use"))}


def definition(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
    """Return attention as the papers define it, computed in the dtype of the inputs."""
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


def run(model, implementation, inputs):
    """Return the model's output with an attention implementation, weights included."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs, output_attentions=True)


def references(model, inputs, plain="eager"):
    """Return the outputs with attention by its definition in float64, and with another implementation in float32."""
    wide, floats = to_float64(model, inputs)
    return run(wide, "definition", floats), run(model, plain, inputs)


def final_output(output):
    """Return the logits, or the last hidden state of a model without logits."""
    return output["logits" if "logits" in output else "last_hidden_state"]


def attentions(output):
    """Return every array of weights in a model's output, by field and layer."""
    found = {name: output[name] for name in output if name.endswith("attentions")}
    assert found
    return {f"{name} {k}": array for name, arrays in found.items() for k, array in enumerate(arrays)}


def to_float64(model, inputs):
    """Return the model and its arguments in float64."""
    floats = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in inputs.items()}
    return copy.deepcopy(model).double(), floats
