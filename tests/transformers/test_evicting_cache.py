"""`Cache(evict=...)`: a model generates as with all keys of which the evicted ones are hidden."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import transformers

import sightline
from sightline import eviction
from sightline.errors import ParameterError
from sightline.transformers import Cache
from sightline.transformers.compatibility import CACHE
from tiny_models import VOCABULARY, make_model

BUDGET, PROMPT, STEPS = 8, 14, 6
POLICIES = {
    "SnapKV": eviction.SnapKV(BUDGET, last=3, pool=3),
    "H2O": eviction.H2O(BUDGET, recent=3),
    "TOVA": eviction.TOVA(BUDGET),
    "Sinks": eviction.Sinks(BUDGET, first=2),
}


def make_llama(implementation, layers=1):
    model = make_model("Llama", num_hidden_layers=layers)
    model.set_attn_implementation(implementation)
    return model


def prompts(batch=2):
    return torch.from_numpy(np.random.default_rng(0).integers(1, VOCABULARY, (batch, PROMPT)))


def hidden_mask(positions, count, length):
    """Return logits (B, H, count, length) that hide later keys, and those that are not in `positions` (B, G, rows)."""
    rows = np.arange(length - count, length)[:, None]
    allowed = np.zeros((len(positions), 4, count, length), bool)
    for b, heads in enumerate(positions):
        for h in range(4):
            held = heads[h // 2][heads[h // 2] >= 0]
            allowed[b, h][:, held] = rows >= held
    return torch.where(torch.from_numpy(allowed), 0.0, -np.inf)


@pytest.mark.parametrize("dtype", [None, "float64"])
@pytest.mark.parametrize("name", POLICIES)
def test_steps_are_those_of_hidden_keys(name, dtype):
    ours, dense, ids = make_llama("sightline"), make_llama("eager"), prompts()
    cache, whole = Cache(evict=POLICIES[name], dtype=dtype), transformers.DynamicCache()
    sizes = []
    with torch.no_grad():
        found = ours(ids, **{CACHE: cache}).logits
        expected = dense(ids, **{CACHE: whole}).logits
        for step in range(STEPS):
            assert torch.allclose(found, expected, atol=2e-5), step
            assert cache.get_seq_length() == whole.get_seq_length() == PROMPT + step
            ids = found[:, -1:].argmax(-1)
            own = cache.layers[0].cache
            sizes.append(own.key_positions.shape[-1])
            new = np.full((2, 2, 1), PROMPT + step)
            mask = hidden_mask(np.concatenate([own.key_positions, new], -1), 1, PROMPT + step + 1)
            found = ours(ids, **{CACHE: cache}).logits
            expected = dense(ids, **{CACHE: whole}, attention_mask=mask).logits
    assert sizes == ([BUDGET + step for step in range(STEPS)] if name == "SnapKV" else [BUDGET] * STEPS)


@pytest.mark.parametrize("options", [{"evict": POLICIES["SnapKV"]}, {"dtype": "int8"}], ids=["evict", "int8"])
def test_a_compiled_layer_gives_the_tokens_of_one_that_is_not_compiled(options):
    """A compiled model has dense masks, whose columns are the positions of the text."""
    model, ids, real = make_llama("sightline"), prompts(), torch.ones(2, PROMPT)
    real[1, :3] = 0
    layer, found = model.model.layers[0].self_attn, []
    for compiled in (False, True):
        if compiled:
            layer.forward = torch.compile(layer.forward, backend="eager")
        cache = {CACHE: Cache(**options)}
        found.append(model.generate(ids, attention_mask=real, **cache, max_new_tokens=4, do_sample=False))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", POLICIES)
def test_generate(name):
    model, ids = make_llama("sightline", layers=2), prompts()
    options = {"max_new_tokens": STEPS, "do_sample": False}
    cache = Cache(config=model.config, evict=POLICIES[name])
    text = model.generate(ids, **{CACHE: cache}, **options)
    assert text.shape == (2, PROMPT + STEPS)
    one = [model.generate(row[None], **{CACHE: Cache(evict=POLICIES[name])}, **options)[0] for row in ids]
    assert torch.equal(text, torch.stack(one))
    everything = {"SnapKV": eviction.SnapKV(99), "Sinks": eviction.Sinks(99), "TOVA": eviction.TOVA(99)}
    policy = everything.get(name, eviction.H2O(99, recent=9))
    assert torch.equal(model.generate(ids, **{CACHE: Cache(evict=policy)}, **options), model.generate(ids, **options))
    beams = model.generate(ids, **{CACHE: Cache(evict=POLICIES[name])}, num_beams=3, **options)
    assert beams.shape == (2, PROMPT + STEPS)


def test_decisions_are_those_of_dense_weights():
    ours, dense, ids = make_llama("sightline"), make_llama("eager"), prompts()
    cache = Cache(evict=POLICIES["SnapKV"])
    with torch.no_grad():
        ours(ids, **{CACHE: cache})
        weights = dense(ids, output_attentions=True).attentions[0].double()
    observed = weights[:, :, -3:].mean(2).reshape(2, 2, 2, PROMPT).mean(2)
    pooled = torch.nn.functional.avg_pool1d(observed[..., :-3], 3, padding=1, stride=1)
    best = pooled.topk(BUDGET - 3).indices.sort().values
    expected = torch.cat([best, torch.arange(PROMPT - 3, PROMPT).expand(2, 2, 3)], -1)
    assert np.array_equal(cache.layers[0].cache.key_positions, expected)


def test_padding_on_the_left():
    model, ids = make_llama("sightline", layers=2), prompts()
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :3], mask[1, :3] = 0, 0
    options = {"max_new_tokens": STEPS, "do_sample": False}
    text = model.generate(padded, attention_mask=mask, **{CACHE: Cache(evict=POLICIES["SnapKV"])}, **options)
    alone = model.generate(ids[1:, 3:], **{CACHE: Cache(evict=POLICIES["SnapKV"])}, **options)
    assert torch.equal(text[1, 3:], alone[0])
    with pytest.raises(ParameterError, match="texts with padding"):
        model.generate(padded, attention_mask=mask, **{CACHE: Cache(evict=POLICIES["Sinks"])}, **options)


def test_a_saved_prompt_and_windows():
    model, ids = make_llama("sightline", layers=2), prompts(1)
    saved = Cache(evict=POLICIES["H2O"])
    with torch.no_grad():
        model(ids, **{CACHE: saved})
        first = model(ids[:, :1], **{CACHE: copy.deepcopy(saved)}).logits
        model(ids[:, 1:2], **{CACHE: copy.deepcopy(saved)})
        assert torch.equal(model(ids[:, :1], **{CACHE: copy.deepcopy(saved)}).logits, first)
    mistral = make_model("Mistral", num_hidden_layers=1, attn_implementation="sightline")
    cache = Cache(config=mistral.config, evict=POLICIES["TOVA"])
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(mistral.generate(ids, **{CACHE: cache}, **options), mistral.generate(ids, **options))


@pytest.mark.parametrize("name", ["H2O", "TOVA", "Sinks", "SnapKV"])
def test_branches_of_a_fork_evict_as_texts_alone(name):
    """The prompt has enough tokens to be shared. The later steps evict some of its keys."""
    policy = dataclasses.replace(POLICIES[name], budget=80)
    model, ids = make_llama("sightline"), torch.arange(90)[None] % (VOCABULARY - 1) + 1
    steps = torch.arange(9).reshape(3, 3) + 1
    forked = Cache(evict=policy)
    with torch.no_grad():
        model(ids, **{CACHE: forked})
        alone = [copy.deepcopy(forked) for _ in steps]
        forked.fork(3)
        for step in range(3):
            found = model(steps[:, step : step + 1], **{CACHE: forked}).logits
            for b, cache in enumerate(alone):
                expected = model(steps[b : b + 1, step : step + 1], **{CACHE: cache}).logits
                assert torch.allclose(found[b : b + 1], expected, atol=1e-5)
    positions = np.concatenate([cache.layers[0].cache.key_positions for cache in alone])
    assert np.array_equal(forked.layers[0].cache.key_positions, positions)


def test_what_is_refused():
    with pytest.raises(ParameterError, match="SnapKV"):
        Cache(evict=1024)
    ids = prompts(1)
    with torch.no_grad(), pytest.raises(ParameterError, match="evicts keys"):
        make_llama("sdpa")(ids, **{CACHE: Cache(evict=POLICIES["TOVA"])})
    model = make_llama("sightline")
    repeated, cache = torch.arange(1, 8).repeat(2)[None], Cache(evict=POLICIES["TOVA"])
    with pytest.raises(ParameterError, match="without drafts"):
        model.generate(repeated, **{CACHE: cache}, prompt_lookup_num_tokens=2, max_new_tokens=5)


def test_layers_return_weights_only_if_the_model_asks_for_them():
    """What the policy reads of a call is not returned as weights."""
    model, ids, returned = make_llama("sightline"), prompts(1), []
    model.model.layers[0].self_attn.register_forward_hook(lambda layer, inputs, results: returned.append(results[1]))
    with torch.no_grad():
        model(ids, **{CACHE: Cache(evict=POLICIES["SnapKV"])})
        model(ids, **{CACHE: Cache(evict=POLICIES["SnapKV"])}, output_attentions=True)
    assert returned[0] is None
    assert returned[1].shape == (1, 4, PROMPT, PROMPT)


def test_the_watch_records_the_rows_that_are_left():
    model, ids = make_llama("sightline"), prompts(1)
    cache = Cache(evict=POLICIES["TOVA"])
    with torch.no_grad(), sightline.watch(model, see=[sightline.lse()]) as seen:
        model(ids, **{CACHE: cache})
        model(ids[:, :1], **{CACHE: cache})
    assert [call["lse"].shape for call in seen] == [(1, 4, PROMPT), (1, 4, 1)]
