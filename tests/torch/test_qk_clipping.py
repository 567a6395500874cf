"""`sightline.torch.qk_clip`: scores of the clipped heads are multiplied by γ, and nothing else changes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import sightline
from fault_planting import Fault, assert_found
from monitored_models import CausalModel, define, make_batch
from sightline.errors import ParameterError
from sightline.torch import MultiHeadAttention, SelfAttention, qk_clip, qk_clipping
from watched_modules import record

HEAD = 1


def largest_scores(model, *inputs):
    """Return for each layer the largest score of each head."""
    seen = record(model, sightline.max_score(), *inputs)
    return {call.layer: call["max_score"].score.amax((0, 2)) for call in seen}


class Fused(nn.Module):
    """One projection to queries, keys and values."""

    def __init__(self, norm=nn.Identity):
        super().__init__()
        self.num_heads, self.qkv, self.q_norm = 4, nn.Linear(16, 48), norm(4)

    def forward(self, x):
        query, key, value = (y.transpose(1, 2) for y in self.qkv(x).unflatten(-1, (3, 4, 4)).unbind(-3))
        return nn.functional.scaled_dot_product_attention(self.q_norm(query), key, value)


class Renamed(nn.Module):
    """A layer whose projections have names of their own."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        query, key = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.left, self.right))
        return nn.functional.scaled_dot_product_attention(query, key, key)


class MultiHead(nn.Module):
    """Torch's layer, or ours, on keys and values of a width of their own."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(16, 4, batch_first=True, **options)

    def forward(self, x):
        keys = x[..., : self.layer.kdim]
        return self.layer(x, keys, keys, need_weights=False)[0]


LAYERS = {
    "separate, with biases": CausalModel,
    "grouped": lambda: CausalModel(key_heads=2),
    "torch's": lambda: MultiHead(nn.MultiheadAttention),
    "ours": lambda: MultiHead(MultiHeadAttention),
    "torch's, with a learned key": lambda: MultiHead(nn.MultiheadAttention, add_bias_kv=True),
    "torch's, with other keys": lambda: MultiHead(nn.MultiheadAttention, kdim=12, vdim=12),
    "one projection": lambda: MultiHead(nn.MultiheadAttention, bias=False),
    "rotary": lambda: SelfAttention(16, 4, 4, heads=4),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_one_head_is_scaled_exactly_and_the_others_keep_their_bits(name):
    """With γ = 1/4 all products are scaled by powers of two, so the largest score is exactly the limit."""
    torch.manual_seed(0)
    model = LAYERS[name]().eval()
    for parameter in model.parameters():
        parameter.normal_()
    x = make_batch(1).detach().to(next(model.parameters()).dtype)
    before = largest_scores(model, x)
    layer, scores = next(iter(before.items()))
    limit = float(scores[HEAD]) / 4
    given = torch.full_like(scores, -torch.inf)
    given[HEAD] = scores[HEAD]
    assert qk_clip(model, {layer: given}, limit) == {layer: {HEAD: 0.25}}
    expected = scores.clone()
    expected[HEAD] = limit
    assert torch.equal(largest_scores(model, x)[layer], expected)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_after_a_clip_the_largest_score_of_the_definition_is_the_limit(key_heads):
    """The scores of the second layer change with the output of the first, so the layers are clipped in turn."""
    model, batches = CausalModel(key_heads=key_heads), [make_batch(1), make_batch(2)]
    for layer in ("layers.0", "layers.1"):
        with torch.no_grad(), sightline.watch(model, see=[sightline.max_score(), sightline.lse()]) as seen:
            for batch in batches:
                model(batch)
        before = define(model, batches)[layer][0]
        limit = float(np.median(before))
        factors = qk_clip(model, seen.of(layer=layer), limit)
        assert set(factors[layer]) == set(np.flatnonzero(before > limit))
        np.testing.assert_allclose(define(model, batches)[layer][0], np.minimum(before, limit), rtol=1e-12)


FAULTS = {
    "keys stay": Fault(qk_clipping._with_powers, "(*queries, *keys)", "queries"),
    "biases stay": Fault(qk_clipping._rows, '"bias" in parameters', "False"),
    "a shared key head": Fault(qk_clipping._with_powers, "ScaledView(view, 1.0)", "ScaledView(view, 0.5)"),
    "other heads too": Fault(qk_clipping.qk_clip, "factors.get(head, 1.0)", "factors.get(head, 0.5)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, monkeypatch):
    key_heads = 2 if fault == "a shared key head" else 4
    check = test_after_a_clip_the_largest_score_of_the_definition_is_the_limit
    assert_found(FAULTS[fault], monkeypatch, lambda: check(key_heads), "Not equal to tolerance")


@torch.no_grad()
def test_projections_are_named_or_returned_by_a_function():
    torch.manual_seed(0)
    model, x = Renamed(), torch.randn(2, 5, 16)
    scores = largest_scores(model, x)["Renamed"]
    with pytest.raises(ParameterError, match="projections are not known"):
        qk_clip(model, {"Renamed": scores}, 1e-3)
    with pytest.raises(ParameterError, match=r"projections=\('left', 'rigth'\) of Renamed, .* \(it has left, right"):
        qk_clip(model, {"Renamed": scores}, 1e-3, projections=("left", "rigth"))

    def find_views(layer):
        return [
            [part.unflatten(0, (4, 4)) for part in projection.parameters()] for projection in (layer.left, layer.right)
        ]

    for number, named in enumerate([("left", "right"), find_views]):
        given, limit = torch.full((4,), -torch.inf), scores[number] / 4
        given[number] = scores[number]
        qk_clip(model, {"Renamed": given}, float(limit), projections=named)
        assert largest_scores(model, x)["Renamed"][number] == limit


@torch.no_grad()
def test_a_function_returns_views_of_one_projection_to_queries_keys_and_values():
    torch.manual_seed(0)
    model, x = Fused(), torch.randn(2, 5, 16)
    scores = largest_scores(model, x)["Fused"]

    def find_views(layer):
        queries, keys, _ = zip(*(part.unflatten(0, (3, 4, 4)) for part in layer.qkv.parameters()), strict=True)
        return queries, keys

    given = torch.full((4,), -torch.inf)
    given[HEAD], values = scores[HEAD], model.qkv.weight[32:].clone()
    qk_clip(model, {"Fused": given}, float(scores[HEAD] / 4), projections=find_views)
    assert largest_scores(model, x)["Fused"][HEAD] == scores[HEAD] / 4
    assert torch.equal(model.qkv.weight[32:], values)


@torch.no_grad()
def test_the_largest_score_of_all_calls_and_only_the_recorded_heads_count():
    model = CausalModel()
    with sightline.watch(model, see={"largest": sightline.max_score()}, heads=[0, -1], layers=[0]) as seen:
        for seed in range(3):
            model(make_batch(seed))
    expected = define(model, map(make_batch, range(3)))["layers.0"][0]
    factors = qk_clip(model, seen, 1e-6)["layers.0"]
    assert list(factors) == [0, 3]
    np.testing.assert_allclose([*factors.values()], 1e-6 / expected[[0, 3]], rtol=1e-12)


def test_bfloat16_parameters_are_rounded_once_and_have_gradients():
    model = CausalModel().bfloat16()
    weight = model.layers[0].q_proj.weight.detach().clone()
    qk_clip(model, {"layers.0": torch.full((4,), 3.0)}, 1.0)
    expected = (weight.float() * (1 / 3) ** 0.5).bfloat16()
    assert torch.equal(model.layers[0].q_proj.weight, expected)
    model(make_batch(1).bfloat16()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Adapted(nn.Linear):
    """A projection with an adapter."""

    def __init__(self):
        super().__init__(16, 16)
        self.adapter = nn.Linear(16, 16)


def with_projection(projection, **parameters):
    vars(projection)["_parameters"].update(parameters)
    model = CausalModel()
    model.layers[1].q_proj = projection
    return model


def with_attribute(**attributes):
    model = CausalModel()
    vars(model.layers[1]).update(attributes)
    return model


INTEGERS = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
ONE = {"layers.0": torch.ones(4), "layers.1": torch.ones(4)}
REFUSED = {
    "no recording": (CausalModel, [1.0], 0.5, "a dict from layers"),
    "a limit of 0": (CausalModel, ONE, 0, "above 0"),
    "an infinite limit": (CausalModel, ONE, torch.inf, "above 0"),
    "NaN": (CausalModel, {**ONE, "layers.1": torch.tensor([1, 1, torch.nan, 1])}, 0.5, "head 2 of layers.1"),
    "infinity": (CausalModel, {**ONE, "layers.1": torch.tensor([1, 1, torch.inf, 1])}, 0.5, "finite scores"),
    "another layer": (CausalModel, {**ONE, "layers.2": torch.ones(4)}, 0.5, "does not have"),
    "other heads": (CausalModel, {**ONE, "layers.1": torch.ones(5)}, 0.5, "5 heads"),
    "a number for each query": (CausalModel, {**ONE, "layers.1": torch.ones(2, 4)}, 0.5, r"\(H,\)"),
    "an adapter": (lambda: with_projection(Adapted()), ONE, 0.5, "adapters"),
    "integers": (lambda: with_projection(nn.Linear(16, 16), weight=INTEGERS), ONE, 0.5, "int8"),
    "no linear layer": (lambda: with_projection(nn.Conv1d(16, 16, 1)), ONE, 0.5, "torch.nn.Linear"),
    "a norm of all heads": (lambda: Fused(nn.RMSNorm), {"Fused": torch.ones(4)}, 0.5, "normalises or clips queries"),
    "one projection": (Fused, {"Fused": torch.ones(4)}, 0.5, "are not known"),
    "cosine attention": (lambda: with_attribute(logit_scale=torch.ones(4, 1, 1)), ONE, 0.5, "logit_scale"),
    "clipped projections": (lambda: with_attribute(clip_qkv=8.0), ONE, 0.5, "clip_qkv"),
    "a configuration": (lambda: with_attribute(config=SimpleNamespace(clip_qkv=8.0)), ONE, 0.5, r"config\.clip_qkv"),
    "a table of biases": (lambda: with_attribute(relative_position_bias_table=torch.ones(4)), ONE, 0.5, "_table"),
    "a soft cap": (lambda: with_attribute(attn_logit_softcapping=50.0), ONE, 0.5, "attn_logit_softcapping"),
    "rows that do not divide": (lambda: with_attribute(heads=7), ONE, 0.5, "rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_clipped_is_refused_and_nothing_is_changed(name):
    make, scores, limit, message = REFUSED[name]
    model = make()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ParameterError, match=message):
        qk_clip(model, scores, limit)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_recording_without_largest_scores_is_refused():
    model = CausalModel()
    with pytest.raises(ParameterError, match="max_score"):
        qk_clip(model, record(model, sightline.entropy(), make_batch(1)), 1.0)
