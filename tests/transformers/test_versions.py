"""What each supported version of transformers must give: the tokens of each prompt alone, by transformers' own code.

`make test-versions` runs this file with each version, so it uses few models and little time.
"""

import copy
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers.generation import continuous_batching

import sightline
from sightline.errors import ParameterError
from sightline.eviction import SnapKV
from sightline.transformers import Cache, masking, unpadded, word_timestamps
from sightline.transformers.attention_interface import sightline_attention
from sightline.transformers.compatibility import CACHE
from speech import make_tiny_whisper
from tiny_models import VOCABULARY, make_assistant, make_inputs, make_model, prompt_of

NEW = 8
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": VOCABULARY}
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [11, 12], [21, 3, 21, 3, 21, 3]]


def generate(model, prompts, implementation, cache=None, **options):
    """Return the tokens of left-padded prompts, and those of each prompt alone with `implementation`'s own cache."""
    model.set_attn_implementation(implementation)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    given = {} if cache is None else {CACHE: cache}
    return model.generate(ids, attention_mask=real, **given, **GREEDY | options)


def generate_alone(model, prompts, **options):
    return [generate(model, [prompt], "eager", **options)[0, len(prompt) :].tolist() for prompt in prompts]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 2", "GPT-2"])
@pytest.mark.parametrize("way", [{}, {"num_beams": 3}])
def test_a_cache_gives_the_tokens_of_each_prompt_alone(name, way):
    model = make_model(name)
    alone = generate_alone(model, PROMPTS, **way)
    found = generate(model, PROMPTS, "sightline", Cache(config=model.config), **way)[:, 7:].tolist()
    assert found == alone


def test_drafts():
    model, prompt = make_model("Llama"), [PROMPTS[2] * 3]
    assistant = make_assistant(model)
    expected = generate_alone(model, prompt)
    for way in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        found = generate(model, prompt, "sightline", Cache(config=model.config), **way)
        assert found[:, len(prompt[0]) :][:, :NEW].tolist() == expected  # before 5.13, one token more


@pytest.mark.parametrize(
    "options", [{"dtype": "int8"}, {"dtype": "float64"}, {"evict": SnapKV(budget=64)}], ids=["int8", "float64", "evict"]
)
def test_other_caches_give_the_same_tokens(options):
    model = make_model("Llama")
    found = generate(model, PROMPTS, "sightline", Cache(**options))[:, 7:].tolist()
    if options.get("dtype") == "int8":  # other logits than those of stored floats
        alone = [generate(model, [one], "sightline", Cache(**options))[0, len(one) :].tolist() for one in PROMPTS]
    else:
        alone = generate_alone(model, PROMPTS)
    assert found == alone


def test_eviction_keeps_the_budget():
    model, prompt = make_model("Llama"), PROMPTS[0] * 4
    cache = Cache(evict=SnapKV(budget=8, last=4))
    generate(model, [prompt], "sightline", cache)
    assert cache.get_seq_length() == len(prompt) + NEW - 1
    assert cache.layers[0].cache.row_counts.max() == 8 + NEW - 1


@pytest.mark.parametrize("name", ["T5", "Whisper"])
def test_encoders_and_decoders(name):
    model = make_model(name)
    inputs, found = prompt_of(make_inputs(model, "no")), []
    for implementation, kind in (("eager", transformers.DynamicCache), ("sightline", Cache)):
        model.set_attn_implementation(implementation)
        cache = {CACHE: transformers.EncoderDecoderCache(kind(), kind())}
        found.append(model.generate(**inputs, **cache, **GREEDY))
    assert torch.equal(*found)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_continuous_batches_give_the_tokens_of_each_prompt_alone(name, monkeypatch):
    model = make_model(name)
    prompts = [[1, 2, 3], [4, 5], PROMPTS[0] * 3, [6]]
    expected = generate_alone(model, prompts)
    model.set_attn_implementation("sightline")
    memory = sys.modules[continuous_batching.PagedAttentionCache.__module__].PagedAttentionMemoryHandler
    monkeypatch.setattr(memory, "get_available_memory", staticmethod(lambda *_: 2**26))  # not known without a GPU
    config, sizes = transformers.GenerationConfig(**GREEDY), {"num_blocks": 64, "max_batch_tokens": 24}
    if hasattr(transformers, "ContinuousBatchingConfig"):
        given = {"continuous_batching_config": transformers.ContinuousBatchingConfig(**sizes)}
    else:
        given, config = {}, transformers.GenerationConfig(**GREEDY, **sizes, use_cuda_graph=False)
    found = model.generate_batch(prompts, generation_config=config, **given)
    assert model.config._attn_implementation in ("sightline", "paged|sightline")
    if name == "Gemma 2" and hasattr(continuous_batching.PagedAttentionCache, "get_seqlens_k"):
        assert not found or all("a sliding window" in output.error for output in found.values())  # wrong keys
        return
    of_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in found.values()}
    assert [of_prompt[tuple(prompt)] for prompt in prompts] == expected


@pytest.mark.parametrize("name", ["Llama", "BART"])
def test_a_watch_labels_every_step_of_generation(name):
    model = make_model(name)
    inputs = {"input_ids": torch.tensor([[3, 4, 5]])}
    words = WordLevel({f"w{k}": k for k in range(VOCABULARY)}, "w0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    with sightline.watch(model, sightline.received(), tokenizer=tokenizer) as seen:
        found = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 3})
    decoded = [f"w{k}" for k in found[0].tolist()][:-1]
    queries, keys = seen.labels(seen.of(kind="self")[-1])
    assert queries == decoded[-1:]
    assert keys == decoded
    if name == "BART":
        assert seen.labels(seen.of(kind="cross")[-1])[1] == ["w3", "w4", "w5"]


def test_unpadded_and_masking():
    model = make_model("Llama")
    inputs = make_inputs(model, "right")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**inputs.inputs).logits[inputs.real]
        with unpadded(model):
            found = model(**inputs.inputs).logits[inputs.real]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        ids = torch.tensor([[3, 4, 5, 6, 7]])
        with masking(model, sightline.documents(lengths=[3, 2])):
            joined = model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1]]), attention_mask=torch.ones(1, 5)).logits
        alone = torch.cat([model(ids[:, :3]).logits, model(ids[:, 3:]).logits], 1)
    torch.testing.assert_close(joined, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:__array_wrap__", "ignore:std")
def test_word_times_are_those_of_the_eager_path():
    model, processor = make_tiny_whisper(3, [(0, 1), (2, 3)])
    wave = np.random.default_rng(3).normal(size=20_000).astype(np.float32)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    options = {"return_tensors": "pt", "return_attention_mask": True, "truncation": False, "padding": "longest"}
    features = processor.feature_extractor([wave], sampling_rate=16_000, **options).to(dtype=model.dtype)
    times = {"return_timestamps": True, "return_token_timestamps": True, "return_segments": True, "language": "en"}
    (expected,) = eager.generate(**features, **times)["segments"]
    found = word_timestamps(model, processor, wave, 16_000, language="en")
    assert [segment.times for segment in found.segments] == [
        tuple(round(t, 2) for t in segment["token_timestamps"].tolist()) for segment in expected
    ]
    assert [segment.tokens for segment in found.segments] == [tuple(segment["tokens"].tolist()) for segment in expected]


def test_a_causal_layer_without_a_mask_raises():
    """A way of `generate_batch` that is not known here must not give the tokens of attention without a mask."""
    layer, x = make_model("Llama").model.layers[0].self_attn, torch.randn(1, 4, 3, 8)
    with pytest.raises(ParameterError, match=re.escape(f"transformers {transformers.__version__}")):
        sightline_attention(layer, x, x, x, None)
    assert sightline_attention(layer, x, x, x, None, is_causal=False)[0].shape == (1, 3, 4, 8)
    assert sightline_attention(layer, x[:, :, :1], x, x, None)[0].shape == (1, 1, 4, 8)


def test_one_file_reads_transformers_beyond_its_interface():
    names = r"masking_utils|cache_utils|_can_set_attn|\b_attn_|_with_fallback|\.compute_bias"
    private = re.compile(rf"(from|import) transformers\.|{names}")
    files = Path(sightline.transformers.__file__).parent.glob("*.py")
    assert [path.name for path in files if private.search(path.read_text())] == ["compatibility.py"]
