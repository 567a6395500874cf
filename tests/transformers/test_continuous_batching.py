"""Continuous batching of transformers with "sightline": the tokens of each request are those of `generate` alone."""

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import sightline
from sightline.errors import ParameterError
from sightline.transformers import attention_interface, masking
from tiny_models import VOCABULARY, make_model

NEW = 8
# 24 tokens in a step: longer prompts enter in parts, requests join others that generate, and windows of 5 keys slide
CONFIG = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=24, return_logprobs=True)
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=VOCABULARY, pad_token_id=0)


def make_prompts():
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=rng).tolist() for length in (3, 17, 30, 9, 1)]


def generate_alone(model, prompt):
    """Return the tokens and their log probabilities."""
    options = {"output_scores": True, "return_dict_in_generate": True, "generation_config": GREEDY}
    found = model.generate(torch.tensor([prompt]), **options)
    scores = torch.cat(found.scores).log_softmax(1)
    tokens = found.sequences[0, len(prompt) :]
    return tokens.tolist(), scores.gather(1, tokens[:, None])[:, 0]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 2", "Gemma 3", "GPT-OSS", "GPT-2"])
def test_batches_generate_as_alone(name):
    model = make_model(name, attn_implementation="eager")
    expected = [generate_alone(model, prompt) for prompt in make_prompts()]
    model.set_attn_implementation("sightline")
    found = model.generate_batch(make_prompts(), generation_config=GREEDY, continuous_batching_config=CONFIG)
    assert model.config._attn_implementation == "sightline"
    for output, (tokens, scores) in zip(found.values(), expected, strict=True):
        assert output.error is None
        assert output.generated_tokens == tokens
        torch.testing.assert_close(torch.tensor(output.logprobs), scores, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The `paged|` prefix:FutureWarning")  # transformers removes the prefix
def test_requests_with_one_new_token_each_become_the_batch(monkeypatch):
    """Its entries share one array of keys, so that a query computes no tile of another request's keys."""
    shapes, model, read = [], make_model("Llama"), attention_interface.read_paged_cache

    def record(*inputs):
        query, key, value, mask = read(*inputs)
        shapes.append((len(query), query.shape[2], key.stride(0) == 0))
        return query, key, value, mask

    monkeypatch.setattr(attention_interface, "read_paged_cache", record)
    model.set_attn_implementation("paged|sightline")
    assert model.config._attn_implementation == "sightline"
    model.generate_batch(make_prompts(), generation_config=GREEDY, continuous_batching_config=CONFIG)
    assert (1, 24, True) not in shapes
    assert {batch for batch, length, shared in shapes if length == 1 and shared} >= {2, 5}


def test_masks_of_positions_are_refused():
    model, found = make_model("Llama"), {}
    options = {"generation_config": GREEDY, "continuous_batching_config": CONFIG}
    with pytest.raises(ParameterError, match="no layer read"), masking(model, sightline.window(4)):
        found |= model.generate_batch(make_prompts(), **options)
    assert "masking(...) in continuous batching" in found["req_0"].error
