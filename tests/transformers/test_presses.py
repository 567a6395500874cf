"""Presses of kvpress on exact statistics keep the keys that they keep with eager attention.

kvpress is not a package of the tests. The presses here read the weights as its presses do, by their documented rules.
"""

import contextlib
import importlib.util

import pytest
import torch
from transformers import DynamicCache

from sightline.errors import ParameterError
from sightline.transformers import pressing
from sightline.transformers.compatibility import CACHE
from sightline.transformers.presses import add_arguments
from tiny_models import make_model

pytestmark = pytest.mark.filterwarnings("ignore:'pipes'", "ignore:Both `past_key_values`:FutureWarning")  # of kvpress
LENGTH, KEPT, WINDOW = 60, 20, 8


class Press:
    """A hook on each layer that keeps the keys with the largest scores."""

    @contextlib.contextmanager
    def __call__(self, model):
        hooks = [layer.self_attn.register_forward_hook(self.compress, with_kwargs=True) for layer in model.model.layers]
        yield
        for hook in hooks:
            hook.remove()

    def compress(self, module, inputs, options, output):
        layer = options[CACHE].layers[module.layer_idx]
        if options["hidden_states"].shape[1] > 1:
            scores = self.score(output[1]).double()
            by_key_head = scores.unflatten(1, (layer.keys.shape[1], -1)).mean(2)
            chosen = by_key_head.topk(KEPT).indices.sort().values[..., None].expand(-1, -1, -1, module.head_dim)
            layer.keys, layer.values = layer.keys.gather(2, chosen), layer.values.gather(2, chosen)


class ObservedAttentionPress(Press):
    def score(self, attentions):
        return attentions.sum(2) / torch.arange(LENGTH, 0, -1)


class SnapKVPress(Press):
    window_size = WINDOW

    def score(self, attentions):
        seen = attentions[..., -WINDOW:, :-WINDOW].mean(2)
        pooled = torch.nn.functional.avg_pool1d(seen, 5, 1, 2)
        return torch.nn.functional.pad(pooled, (0, WINDOW), value=9)


class TOVAPress(Press):
    def score(self, attentions):
        return torch.nn.functional.pad(
            attentions[..., -1:, :-1].mean(1, keepdim=True)[:, :, 0], (0, 1), value=9
        ).expand(-1, attentions.shape[1], -1)


class PositionsPress(TOVAPress):
    """Reads the positions of new tokens, as every press of kvpress does to find the end of a prompt."""

    def __init__(self):
        self.press, self.found = TOVAPress(), []

    def compress(self, module, inputs, options, output):
        self.found.append(options["cache_position"].tolist())


class Composed(Press):
    def __init__(self, press):
        self.press, self.score = press, press.score


def run_both_ways(model, press):
    """Return the caches of a prompt with eager attention, and with that of this library."""
    ids = torch.randint(3, 40, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    for implementation in ("eager", "sightline"):
        model.set_attn_implementation(implementation)
        cache, hooks = DynamicCache(), []
        if implementation == "eager":  # kvpress reads arguments that transformers no longer passes
            hooks = [
                layer.self_attn.register_forward_pre_hook(add_arguments, with_kwargs=True)
                for layer in model.model.layers
            ]
        with torch.no_grad(), press(model) if implementation == "eager" else pressing(model, press):
            model(ids, **{CACHE: cache})
            yield cache
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Phi 3"])
@pytest.mark.parametrize("press", [ObservedAttentionPress(), SnapKVPress(), TOVAPress(), Composed(TOVAPress())])
def test_a_press_keeps_the_keys_that_it_keeps_with_eager_attention(name, press):
    model, caches = make_model(name).double(), []
    for cache in run_both_ways(model, press):
        model(torch.tensor([[3], [4]]), **{CACHE: cache}, position_ids=torch.tensor([[LENGTH]] * 2))
        assert cache.layers[0].keys.shape[2] == KEPT + 1
        caches.append(cache)
    for eager, ours in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(ours.keys, eager.keys, rtol=1e-4, atol=1e-4)  # eager's softmax is float32
        torch.testing.assert_close(ours.values, eager.values, rtol=1e-4, atol=1e-4)


def test_presses_get_the_positions_of_new_tokens():
    model, press, cache = make_model("Llama", attn_implementation="sightline"), PositionsPress(), DynamicCache()
    with torch.no_grad(), pressing(model, press):
        model(torch.tensor([[3, 4, 5]]), **{CACHE: cache})
        model(torch.tensor([[6]]), **{CACHE: cache})
    layers = len(cache.layers)
    assert press.found == [[0, 1, 2]] * layers + [[3]] * layers
    model(torch.tensor([[7]]), **{CACHE: cache})
    assert len(press.found) == 2 * layers
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)


def test_what_pressing_refuses():
    model = make_model("Llama")
    with pytest.raises(ParameterError, match="KnormPress"), pressing(model, type("KnormPress", (Press,), {})()):
        pass
    model.set_attn_implementation("sdpa")
    with pytest.raises(ParameterError, match="set_attn_implementation"), pressing(model, TOVAPress()):
        pass


def test_a_prompt_shorter_than_the_window_is_left_to_the_press():
    model, press = make_model("Llama", attn_implementation="sightline"), SnapKVPress()
    press.score = lambda attentions: pytest.fail(f"{attentions.shape[2]} rows")
    with pytest.raises(pytest.fail.Exception, match="3 rows"), torch.no_grad(), pressing(model, press):
        model(torch.tensor([[3, 4, 5]]), **{CACHE: DynamicCache()})


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")
@pytest.mark.parametrize("name", ["ObservedAttentionPress", "SnapKVPress", "TOVAPress"])
def test_presses_of_kvpress(name):
    import kvpress

    press = getattr(kvpress, name)(compression_ratio=0.5, **({"window_size": 8} if name == "SnapKVPress" else {}))
    caches = run_both_ways(make_model("Llama").double(), press)
    found = [[layer.keys.sum((2, 3)) for layer in cache.layers] for cache in caches]  # kvpress orders keys by score
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
