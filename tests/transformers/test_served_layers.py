"""Layers that write attention by hand give the same results and gradients when this library computes them."""

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sightline
from fault_planting import Fault, assert_found
from sightline import watch
from sightline.errors import ParameterError
from sightline.transformers import masking, served_layers, serving, unpadded
from sightline.transformers.compatibility import uses_attention_interface
from tiny_models import draw_weights

HEADS, LENGTH = 4, 70
TEXT = {"vocab_size": 30, "hidden_size": 48, "intermediate_size": 16, "pad_token_id": 0}
TEXT |= {"num_hidden_layers": 2, "num_attention_heads": HEADS, "max_position_embeddings": 400}
# 3 times the width of a head is a square number: transformers rounds the square root to float32
RELATIVE = {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 40}
BUCKETS = {"position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3}
IMAGE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS, "image_size": 32, "patch_size": 4}
IMAGE |= {"window_size": 5}
MODELS = {  # the model, and the sizes of its configuration
    "DeBERTa v2": ("DebertaV2Model", RELATIVE),
    "DeBERTa v3": ("DebertaV2Model", RELATIVE | BUCKETS | {"conv_act": "gelu"}),
    "DeBERTa, plain": ("DebertaV2Model", {**TEXT, "hidden_size": 64}),
    "MPNet": ("MPNetModel", TEXT),
    "T5": ("T5EncoderModel", {"vocab_size": 30, "d_model": 32, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 4}),
    "SAM": ("SamVisionModel", IMAGE | {"mlp_dim": 16, "output_channels": 8, "global_attn_indexes": [1]}),
    "ViTDet": (
        "VitDetModel",
        IMAGE | {"pretrain_image_size": 32, "window_block_indices": [0], "use_relative_position_embeddings": True},
    ),
}
TEXTS = ["DeBERTa v2", "DeBERTa v3", "DeBERTa, plain", "MPNet", "T5"]
if not uses_attention_interface(transformers.models.t5.modeling_t5.T5Attention):  # as in 4.57
    del MODELS[TEXTS.pop()]


def make(name, dtype=torch.float64, **more):
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    kind = getattr(transformers, kind)
    return draw_weights(kind(kind.config_class(**sizes, **more)).to(dtype).eval())


def make_inputs(name, padded=True):
    if name not in TEXTS:
        return {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)}
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    if padded:
        mask[1, 50:], mask[2, :30] = 0, 0
    return {"input_ids": torch.randint(2, 30, mask.shape), "attention_mask": mask}


def check(name, context=serving, padded=True):
    """Check the output at real tokens, and every gradient."""
    model, inputs = make(name), make_inputs(name, padded)

    def run():
        output = model(**inputs)[0]
        if name in TEXTS:
            output = output * inputs["attention_mask"][..., None]
        gradients = torch.autograd.grad(output.sin().sum(), list(model.parameters()), allow_unused=True)
        return [output, *(x for x in gradients if x is not None)]

    own = run()
    with context(model):
        found = run()
    for one, other in zip(found, own, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert not {"forward", "get_rel_pos", "compute_position_bias"} & {x for m in model.modules() for x in vars(m)}


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [True, False])
def test_results_and_gradients_are_those_of_the_model(name, padded):
    check(name, padded=padded)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", TEXTS)
def test_real_tokens_alone(name):
    check(name, unpadded)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", ["DeBERTa v3", "MPNet", "ViTDet"])
@pytest.mark.parametrize("context", [serving, unpadded])
def test_weights_are_seen(name, context):
    model, inputs = make(name), make_inputs(name, padded=False)
    with torch.no_grad(), context(model), watch(model, [sightline.entropy()]) as seen:
        weights = model(**inputs, output_attentions=True).attentions
    assert len(seen) == len(weights) == 2
    for call, p in zip(seen, weights, strict=True):
        torch.testing.assert_close(call["entropy"], -torch.xlogy(p, p).sum(-1).reshape(call["entropy"].shape))
    with torch.no_grad(), masking(model, sightline.j == 0), serving(model):
        first = model(**inputs, output_attentions=True).attentions[-1]
    assert bool((first[..., 0] == 1).all())


class LargestArray(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, function, types, inputs=(), options=None):
        found = function(*inputs, **options or {})
        sizes = [x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return found


@pytest.mark.parametrize(("name", "limit"), [("DeBERTa v3", HEADS * 300 * 33), ("MPNet", 300 * 48)])
def test_no_array_has_a_number_for_each_pair(name, limit):
    model, tokens = make(name), torch.ones(1, 300, dtype=torch.long)
    with torch.no_grad(), serving(model), LargestArray() as largest:
        model(tokens, attention_mask=torch.ones_like(tokens))
    assert largest.numbers <= limit


def test_what_is_not_served():
    """The model's own code runs for distances of the caller and in compiled code. Other models raise an error."""
    model, inputs = make("DeBERTa v2"), make_inputs("DeBERTa v2", padded=False)
    x, rows = torch.randn(1, 9, 48, dtype=torch.float64), torch.arange(9)
    distances = ((rows[:, None] - rows) % 5)[None]
    visible = torch.ones(1, 9, 9)
    own = model.encoder(x, visible, relative_pos=distances)[0]
    with serving(model):
        torch.testing.assert_close(model.encoder(x, visible, relative_pos=distances)[0], own)
        compiled = torch.compile(model, backend="aot_eager")(**inputs)[0]
    torch.testing.assert_close(compiled, model(**inputs)[0])
    other = transformers.XLNetModel(transformers.XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8))
    with pytest.raises(ParameterError, match=r"XLNetModel.*\n.*mpnet\.MPNetSelfAttention"), serving(other):
        pass


ATTEND = served_layers._attend_disentangled
FAULTS = {
    "DeBERTa v2": Fault(ATTEND, '("p2c", key, j, "pos_query_proj")', '("p2c", key, i, "pos_query_proj")'),
    "DeBERTa v3": Fault(ATTEND, "buckets - buckets[0]", "(buckets - buckets[0]).flip(0)"),
    "SAM": Fault(served_layers._attend_image, "j % width", "j // width"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name, monkeypatch):
    assert_found(FAULTS[name], monkeypatch, lambda: check(name), "not close")
