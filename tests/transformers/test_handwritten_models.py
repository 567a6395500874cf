"""A watch of models of transformers that write attention out by hand."""

import pytest
import torch
import transformers

import sightline
from sightline import watch
from sightline.errors import ParameterError
from sightline.reference.testing import assert_within_budget
from softmax_capture import Softmaxes
from tiny_models import draw_weights

TEXT = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "pad_token_id": 0}
TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 40}
RELATIVE = {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
MODELS = {  # the class of the model, its sizes, and its class of attention
    "BLOOM": ("Bloom ForCausalLM", {"vocab_size": 30, "hidden_size": 16, "n_layer": 2, "n_head": 4}, "BloomAttention"),
    "MPT": ("Mpt ForCausalLM", {"vocab_size": 30, "d_model": 16, "n_layers": 2, "n_heads": 4}, "MptAttention"),
    "DeBERTa": ("Deberta Model", RELATIVE, "DisentangledSelfAttention"),
    "XGLM": (
        "XGLM ForCausalLM",
        {"vocab_size": 30, "d_model": 16, "ffn_dim": 16, "num_layers": 2, "attention_heads": 4},
        "XGLMAttention",
    ),
    "XLNet": ("XLNet Model", {"vocab_size": 30, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 16}, "XLNet.*"),
    "Swin V2": (
        "Swinv2 Model",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4},
        "Swinv2SelfAttention",
    ),
}


def make(name):
    class_name, sizes, _ = MODELS[name]
    family, head = class_name.split()
    torch.manual_seed(0)
    return draw_weights(getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**sizes)).eval())


def make_inputs(name):
    if name == "Swin V2":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0  # padding on the left
    return {"input_ids": torch.randint(2, 30, (2, 9)), "attention_mask": mask}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_models_softmax(name):
    model, inputs = make(name), make_inputs(name)
    see = [sightline.weights(), sightline.lse(), sightline.top_k(2)]
    with torch.no_grad():
        plain = model(**inputs)[0]
        with watch(model, see, handwritten=True) as seen, Softmaxes() as dense:
            returned = model(**inputs, output_attentions=True)
    torch.testing.assert_close(returned[0], plain)
    assert len(seen) == len(dense.plain) == 2
    heads = 2 if name == "Swin V2" else 4
    for call, oracle, baseline, scores in zip(seen, dense.oracles, dense.plain, dense.scores, strict=True):
        assert (call.kind, len(call.heads)) == ("self", heads)
        shape = call["weights"].shape
        assert_within_budget(call["weights"], oracle.reshape(shape), baseline.reshape(shape))
        lse = [array.logsumexp(-1).reshape(shape[:-1]) for array in (scores.double(), scores)]
        assert_within_budget(call["lse"], *lse)
    if name not in ("XLNet", "Swin V2"):  # one returns the weights with the batch last, one those of its last block
        for call, weights in zip(seen, returned.attentions, strict=True):
            torch.testing.assert_close(call["weights"], weights)


@pytest.mark.parametrize("name", ["BLOOM", "MPT", "DeBERTa"])
def test_gradients_reach_every_projection(name):
    model, inputs = make(name), make_inputs(name)
    with watch(model, sightline.entropy(), handwritten=True) as seen, Softmaxes() as dense:
        model(**inputs)
    logarithms = [torch.where(weights > 0, weights, 1.0).log() for weights in dense.oracles]
    entropies = [-(weights * each).sum() for weights, each in zip(dense.oracles, logarithms, strict=True)]
    parameters = [p for p in model.parameters() if p.requires_grad]
    found, expected = (
        torch.autograd.grad(sum(each), parameters, retain_graph=True, allow_unused=True)
        for each in ([entropy.sum() for entropy in seen["entropy"]], entropies)
    )
    assert sum(gradient is not None and bool(gradient.any()) for gradient in expected) > 4
    for gradient, truth in zip(found, expected, strict=True):
        assert (gradient is None) == (truth is None)
        if truth is not None:
            torch.testing.assert_close(gradient, truth, rtol=1e-3, atol=1e-5)


def test_generated_tokens_are_steps():
    model, inputs = make("BLOOM"), make_inputs("BLOOM")
    with watch(model, sightline.weights(), handwritten=True, layers=[0]) as seen:
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert [(call.n, call.m, call.step, call.kind, call.query_start) for call in seen] == [
        (9, 9, 0, "self", 0),
        (1, 10, 1, "self", 9),
        (1, 11, 2, "self", 10),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_without_the_keyword_an_error_names_file_and_line(name):
    model, inputs = make(name), make_inputs(name)
    message = rf"by hand in {MODELS[name][2]} \(.*modeling_.*\.py:\d+\)(.|\n)*handwritten=True"
    with pytest.raises(ParameterError, match=message), torch.no_grad(), watch(model, [sightline.lse()]):
        model(**inputs)
