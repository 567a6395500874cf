"""Tests of transformers' masks as formulas: equal entries, simple formulas and skipped tiles."""

import numpy as np
import pytest
import torch
from transformers import masking_utils

import sightline
from sightline.api import functions
from sightline.transformers.masks_and_biases import FormulaMask, sightline_mask
from tiny_models import VOCABULARY, make_model

pytestmark = pytest.mark.sampled(one_in=5)

KEYS = 20
ENTRIES = torch.arange(KEYS) // 6
BLOCKS = torch.where(torch.arange(KEYS) % 7 < 3, torch.arange(KEYS) // 7, -1)
RESTARTS = torch.stack([torch.arange(KEYS) % 8, torch.arange(KEYS)])  # the positions in packed sequences
FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(5),
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": masking_utils.chunked_causal_mask_function(6, torch.tensor([3, 0])),
    "packed": masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(ENTRIES.expand(2, -1)),
        masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, RESTARTS),
    ),
    "blocks": masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(BLOCKS.expand(2, -1))
    ),
}
PADDINGS = {
    "no": None,
    "none hidden": [(0, KEYS), (0, KEYS)],
    "left": [(0, KEYS), (6, KEYS)],
    "right": [(0, KEYS), (0, 9)],
    "both": [(2, KEYS), (3, 15)],
    "nothing real": [(0, KEYS), (0, 0)],
}


def padded(name):
    if PADDINGS[name] is None:
        return None
    real = torch.zeros(2, KEYS, dtype=torch.bool)
    for entry, (first, last) in enumerate(PADDINGS[name]):
        real[entry, first:last] = True
    return real


def dense_of(mask):
    B, _, n, m = mask.shape
    if mask.formula is None:  # hides nothing
        return np.ones((B, 1, n, m), bool)
    return mask.formula.array(n, m, batch=B).reshape(B, 1, n, m)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("n", "m", "q_offset", "kv_offset"),
    [
        (KEYS, KEYS, 0, 0),
        (3, KEYS, KEYS - 3, 0),
        (1, 9, KEYS - 1, KEYS - 9),
        (4, KEYS, 7, 0),
        (4, KEYS, torch.tensor(7), 0),
    ],
    ids=["all at once", "after a cache", "after a sliding cache", "in a static cache", "in a static cache, by tensor"],
)
def test_formulas_equal_the_masks_of_transformers(name, padding, n, m, q_offset, kv_offset):
    mask = sightline_mask(2, n, m, q_offset, kv_offset, FUNCTIONS[name], padded(padding))
    if not isinstance(mask, FormulaMask):
        assert name == "bidirectional"
        assert mask.all()
        return
    assert mask.shape == (2, 1, n, m)
    np.testing.assert_array_equal(dense_of(mask), mask.dense().expand(mask.shape).numpy())
    assert (mask.query_start, mask.key_start) == (int(q_offset) - kv_offset, kv_offset)


@pytest.mark.parametrize(
    ("arguments", "formula"),
    [
        ((FUNCTIONS["causal"], None), "j ≤ i"),
        ((FUNCTIONS["window"], None), "j > i − 5 ∧ j ≤ i"),
        ((FUNCTIONS["blocks"], None), "j ≤ i ∨ t[b, i] = t[b, j] ∧ t[b, i] ≥ 0"),
        ((FUNCTIONS["causal"], padded("right")), "j ≤ i ∧ j < t[b]"),
        ((FUNCTIONS["causal"], padded("left")), "j ≤ i ∧ j ≥ t[b]"),
        ((FUNCTIONS["bidirectional"], padded("both")), "j ≥ t₁[b] ∧ j < t₂[b]"),
    ],
)
def test_masks_have_simple_formulas(arguments, formula):
    assert str(sightline_mask(2, KEYS, KEYS, 0, 0, *arguments).formula) == formula


def test_a_growing_cache_keeps_one_formula():
    """A formula that changed with the length would need a new kernel for every token."""
    growing = {sightline_mask(1, 2, cached + 2, cached).formula.text for cached in range(3, 9)}
    assert len(growing) == 1
    assert sightline_mask(1, 1, 9, 8).formula is None  # no key is later than the newest query
    window = FUNCTIONS["window"]
    sliding = {sightline_mask(1, 1, 5, cached, cached - 4, window).formula.text for cached in range(5, 9)}
    assert len(sliding) == 1


def test_scattered_padding_is_a_table():
    real = torch.arange(KEYS).expand(2, -1) % 3 > 0
    mask = sightline_mask(2, KEYS, KEYS, attention_mask=real)
    np.testing.assert_array_equal(dense_of(mask), mask.dense().numpy())


def test_a_mask_function_with_unsupported_operations_gives_a_dense_mask():
    def odd(b, h, q, k):
        return (torch.erf(q - k) < 0.5) & (k <= q)

    mask = sightline_mask(2, KEYS, KEYS, mask_function=odd)
    assert not isinstance(mask, FormulaMask)
    assert torch.equal(mask, masking_utils.sdpa_mask(2, KEYS, KEYS, mask_function=odd, allow_is_causal_skip=False))


def test_an_own_mask_function_gives_a_formula():
    hidden = torch.arange(KEYS) % 5 == 0

    def own(b, h, q, k):
        return (q - k).remainder(3).bool() & (k <= q) & ~hidden[k]

    mask = sightline_mask(2, 4, KEYS, 7, mask_function=own)
    np.testing.assert_array_equal(dense_of(mask), mask.dense().expand(mask.shape).numpy())


def test_tensor_operations_on_a_mask_run_on_the_dense_mask():
    mask = sightline_mask(2, KEYS, KEYS, mask_function=FUNCTIONS["window"])
    assert isinstance(mask.contiguous(), FormulaMask)
    dense = mask.dense()
    assert torch.equal(~mask[:, :, 2:5], ~dense[:, :, 2:5])
    assert torch.equal(torch.where(mask, 1.0, 2.0), torch.where(dense, 1.0, 2.0))


def test_a_sliding_window_skips_tiles(monkeypatch):
    """The mask that reaches `attention` makes most tiles empty."""
    model = make_model("Mistral", sliding_window=64, max_position_embeddings=1024, num_hidden_layers=1)
    explanations, attend = [], functions.attend

    def explain_and_run(query, key, value, options):
        explanations.append(sightline.explain(query, key, value, mask=options.mask))
        return attend(query, key, value, options)

    monkeypatch.setattr(functions, "attend", explain_and_run)
    model.set_attn_implementation("sightline")
    with torch.no_grad():
        model(torch.randint(3, VOCABULARY, (1, 1024)))
    (explanation,) = explanations
    blocks, heads = 1024 // 64, model.config.num_attention_heads
    assert explanation.tiles["full"] + explanation.tiles["partial"] == heads * (2 * blocks - 1)
    assert explanation.tiles["empty"] == heads * (blocks**2 - 2 * blocks + 1)
    assert explanation.formulas[1] == "mask  j > i − 64 ∧ j ≤ i"
