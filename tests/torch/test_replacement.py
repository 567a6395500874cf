"""`replacing`: attention of this library in programs that call torch's function."""

import pickle
import sys
import types

import pytest
import torch
from torch import nn
from torch.backends import mha
from torch.nn import functional

import sightline.torch
from sightline.torch.replacement import replacing_attend as replacement_function
from sightline.torch.replacement import torch_attention
from tiny_models import make_inputs, make_model

WIDTH, LENGTH = 16, 6


class Block(nn.Module):
    """Attention as vision transformers write it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, 4, C // 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = functional.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(B, N, C))


@pytest.fixture
def x():
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def test_a_model_that_calls_torchs_function(x):
    model = Block()
    expected = model(x)
    with sightline.torch.replacing() as replacement:
        output = model(x)
    torch.testing.assert_close(output, expected)
    assert replacement.served.total() == 1
    assert not replacement.left
    assert functional.scaled_dot_product_attention is torch_attention
    assert "1 served by sightline, 0 left to torch" in str(replacement)
    assert "float32 on cpu, gradients" in str(replacement)


@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_models_of_transformers(name):
    model = make_model(name, attn_implementation="sdpa")
    given = make_inputs(model, "right")
    with torch.no_grad():
        expected = model(**given.inputs).logits
        with sightline.torch.replacing() as replacement:
            output = model(**given.inputs).logits
    torch.testing.assert_close(output[given.real], expected[given.real])
    assert replacement.served.total() == model.config.num_hidden_layers
    assert not replacement.left


def test_gradients(x):
    model = Block()
    expected = torch.autograd.grad(model(x).square().sum(), model.parameters())
    with sightline.torch.replacing():
        found = torch.autograd.grad(model(x).square().sum(), model.parameters())
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [False, True])
def test_torchs_encoder_with_padding(x, nested):
    """At padding, torch's fast path with nested tensors gives 0, and the context what torch's other path gives."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [4]])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        with sightline.torch.replacing() as replacement:
            output = model(x, src_key_padding_mask=padding)
        mha.set_fastpath_enabled(False)
        slow = model(x, src_key_padding_mask=padding)
        mha.set_fastpath_enabled(True)
    torch.testing.assert_close(output[~padding], expected[~padding])
    torch.testing.assert_close(output, slow)
    assert bool((expected[padding] == 0).all()) == nested
    assert replacement.served.total() == 2
    assert mha.get_fastpath_enabled()


def test_modules_that_imported_the_function_by_name(x, monkeypatch):
    program = types.ModuleType("program")
    program.attention = torch_attention
    monkeypatch.setitem(sys.modules, "program", program)
    with sightline.torch.replacing() as replacement:
        program.attention(x, x, x)
    assert replacement.served.total() == 1
    assert program.attention is torch_attention


def test_all_is_restored_after_an_error(x):
    with pytest.raises(ZeroDivisionError), sightline.torch.replacing():
        raise ZeroDivisionError
    assert functional.scaled_dot_product_attention is torch_attention
    assert mha.get_fastpath_enabled()


def test_nested_contexts_both_count(x):
    with sightline.torch.replacing() as outer:
        with sightline.torch.replacing() as inner:
            functional.scaled_dot_product_attention(x, x, x)
        assert functional.scaled_dot_product_attention is replacement_function
        functional.scaled_dot_product_attention(x, x, x)
    assert (outer.served.total(), inner.served.total()) == (2, 1)
    assert functional.scaled_dot_product_attention is torch_attention


def test_contexts_end_in_any_order(x):
    first, second = sightline.torch.replacing(), sightline.torch.replacing()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert functional.scaled_dot_product_attention is replacement_function
    assert not mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert functional.scaled_dot_product_attention is torch_attention
    assert mha.get_fastpath_enabled()


def test_what_keeps_the_replacement_calls_torch_after_the_context(x, monkeypatch):
    monkeypatch.setitem(sys.modules, "imported_inside", types.ModuleType("imported_inside"))
    with sightline.torch.replacing() as replacement:
        kept = functional.scaled_dot_product_attention
        sys.modules["imported_inside"].attention = kept
        assert pickle.loads(pickle.dumps(kept)) is kept
    assert sys.modules["imported_inside"].attention is torch_attention
    assert torch.equal(kept(x, x, x), torch_attention(x, x, x))
    assert replacement.served.total() == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_operands_that_are_no_plain_tensors_go_to_torch(x):
    nested = torch.nested.nested_tensor([torch.ones(2, 3, 4), torch.ones(2, 5, 4)])
    with sightline.torch.replacing():
        functional.scaled_dot_product_attention(nested, nested, nested)
        traced = torch.fx.symbolic_trace(lambda x: functional.scaled_dot_product_attention(x, x, x))
        with pytest.raises(TypeError, match="argument 'key'"):
            functional.scaled_dot_product_attention(x, None, x)
    assert torch.equal(traced(x), torch_attention(x, x, x))


def test_what_no_generated_kernel_serves_is_left_to_torch(x):
    wide = torch.ones(1, 1, 2, 1025)
    with sightline.torch.replacing() as replacement:
        output = functional.scaled_dot_product_attention(wide, wide, wide)
    assert torch.equal(output, torch_attention(wide, wide, wide))
    ((call, reason),) = replacement.left
    assert call.shapes[0] == wide.shape
    assert "d_k 1025" in reason
    assert "left to torch:\n  1 × query (1, 1, 2, 1025)" in str(replacement)


def test_errors_of_torch_stay_those_of_torch(x):
    with sightline.torch.replacing() as replacement, pytest.raises(RuntimeError):
        functional.scaled_dot_product_attention(x, x[..., :3], x)
    assert replacement.left.total() == 1


def test_values_that_are_refused_here_are_left_to_torch(x):
    with sightline.torch.replacing() as replacement:
        functional.scaled_dot_product_attention(x, x, x, scale=0.5)
        functional.scaled_dot_product_attention(x, x, x, scale=float("inf"))
    assert replacement.served.total() == replacement.left.total() == 1
    assert "scale=inf" in str(replacement)


def test_a_model_compiled_inside_has_the_operator(x):
    targets = []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    model = torch.compile(Block(), backend=backend, fullgraph=True)
    with sightline.torch.replacing(), torch.no_grad():
        model(x)
    torch.compiler.reset()
    assert any("sightline" in target for target in targets)
    assert not any("scaled_dot" in target for target in targets)


def test_without_calls_the_report_says_so():
    with sightline.torch.replacing() as replacement:
        pass
    assert "no eager call was seen: the program may be compiled" in str(replacement)


def test_the_report_is_short():
    with sightline.torch.replacing() as replacement:
        for length in range(1, 16):
            functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, length, 4))
    assert str(replacement).splitlines()[-1] == "  and 3 other kinds of calls"
