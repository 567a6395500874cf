"""`sightline.transformers.Cache` against transformers' `DynamicCache`: tokens, logits, and programs of changes."""

import copy
import threading
from functools import partial

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

import sightline
from sightline.errors import DtypeError, ParameterError
from sightline.transformers import Cache
from sightline.transformers.compatibility import CACHE
from sightline.transformers.masks_and_biases import FormulaMask, sightline_mask
from tiny_models import MODELS, MORE_MODELS, SIZES, make_assistant, make_inputs, make_model, prompt_of

DECODERS = [name for name, (kind, _) in (MODELS | MORE_MODELS).items() if kind.split()[1][-2:] in ("LM", "on")]
DECODERS = [name for name in DECODERS if not name.endswith(("BERT", "ELECTRA", "BERTa", "ViT"))]
SLIDING = ["Mistral", "Gemma 2", "Gemma 3", "Llama 4", "StarCoder 2", "GPT-OSS", "Cohere 2"]
TOLERANCE = {"rtol": 0, "atol": 1e-11}  # of float64 logits near 1, from two orders of summation


def make_cache(kind, model, **options):
    made = [kind(**options) for _ in range(1 + model.config.is_encoder_decoder)]
    return EncoderDecoderCache(*made) if len(made) > 1 else made[0]


def make_decoder(name, implementation="sightline", padding="left"):
    """Return a model in float64 and the inputs of a generation."""
    model = make_model(name).double()
    model.set_attn_implementation(implementation)
    inputs = prompt_of(make_inputs(model, padding))
    return model, {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}


def continued(inputs, tokens):
    """Return the inputs of a generation that goes on after these real tokens (B, count), which follow the prompt."""
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, tokens.shape[1]), value=1)
    return {"input_ids": torch.cat([inputs["input_ids"], tokens], 1), "attention_mask": mask}


def generate(model, inputs, cache, **options):
    torch.manual_seed(5)
    options = {"do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True, **options}
    return model.generate(**inputs, **{CACHE: cache}, **{"output_logits": True, **options})


def assert_generates_the_same(model, inputs, with_config=False, **options):
    """Generate with `Cache` and with `DynamicCache`, and assert that tokens and logits are equal. Return the `Cache`.

    For Whisper, which returns no logits, only tokens are compared.
    """
    of_cache = {"config": model.config} if with_config else {}
    expected = generate(model, inputs, make_cache(DynamicCache, model, **of_cache), **options)
    cache = make_cache(Cache, model, **of_cache)
    found = generate(model, inputs, cache, **options)
    assert torch.equal(found["sequences"], expected["sequences"])
    if options.get("output_logits", True):
        torch.testing.assert_close(torch.stack(found["logits"]), torch.stack(expected["logits"]), **TOLERANCE)
    assert cache.get_seq_length() > 0
    return cache


# -- generation ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=7)
@pytest.mark.parametrize("with_config", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_generation_is_that_of_dynamic_cache(name, with_config):
    assert_generates_the_same(*make_decoder(name), with_config, output_logits=name != "Whisper")


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("way", [{"num_beams": 3}, {"do_sample": True}, {"num_beams": 2, "do_sample": True}])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-OSS", "DeepSeek V3", "T5", "BART"])
def test_beams_and_samples_are_those_of_dynamic_cache(name, way):
    assert_generates_the_same(*make_decoder(name), with_config=True, **way)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("way", [{"prefill_chunk_size": 4}, {"num_beams": 3, "max_new_tokens": 20}])
def test_sliding_windows(name, way):
    """The prompt of 12 tokens is longer than the window, and one chunk of it shorter."""
    assert_generates_the_same(*make_decoder(name), with_config=True, **way)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT-2", "T5", "Qwen 3 MoE"])
def test_other_attention_implementations_read_the_views(name, implementation):
    padding = "no" if implementation == "eager" else "left"  # a padded row of "eager" is NaN in float64
    assert_generates_the_same(*make_decoder(name, implementation, padding), with_config=True, num_beams=2)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("drafts", ["assistant", "prompt lookup"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 3"])
def test_drafts_are_rejected_as_in_dynamic_cache(name, drafts):
    """An assistant with other weights, and a prompt that repeats itself, draft tokens of which some are rejected."""
    model, inputs = make_decoder(name)
    inputs = {key: x[:1] for key, x in inputs.items()}
    if drafts == "prompt lookup":
        inputs = {key: x.repeat(1, 3) for key, x in inputs.items()}
        options = {"prompt_lookup_num_tokens": 3}
    else:
        options = {"assistant_model": make_assistant(model)}
    cache = assert_generates_the_same(model, inputs, True, max_new_tokens=25, **options)
    plain = generate(model, inputs, Cache(config=model.config), max_new_tokens=25)
    assert torch.equal(
        plain["sequences"],
        generate(model, inputs, Cache(config=model.config), max_new_tokens=25, **options)["sequences"],
    )
    assert cache.get_seq_length() == plain["sequences"].shape[1] - 1


def test_a_conversation_continues_its_cache():
    model, inputs = make_decoder("Mistral")
    caches = [kind(config=model.config) for kind in (Cache, DynamicCache)]
    answers = []
    for cache in caches:
        turns = inputs
        for _ in range(3):
            ids = torch.cat([generate(model, turns, cache)["sequences"], torch.full((3, 2), 7)], 1)
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - 12), value=1)
            turns = {"input_ids": ids, "attention_mask": mask}
        answers.append(ids)
    assert torch.equal(*answers)


def test_a_cache_of_inference_mode_is_continued_outside_it():
    model, inputs = make_decoder("Mistral", padding="no")
    answers = []
    for kind in (Cache, DynamicCache):
        cache = kind(config=model.config)
        with torch.inference_mode():
            ids = generate(model, inputs, cache)["sequences"]
        ids = torch.nn.functional.pad(ids, (0, 2), value=7)
        answers.append(generate(model, {"input_ids": ids}, cache)["sequences"])
    assert torch.equal(*answers)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("implementation", ["sightline", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "T5"])
def test_autocast(name, implementation, dtype):
    """Rotary keys are in float32, values in bfloat16, and attention in bfloat16."""
    model, inputs = make_decoder(name, implementation)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        found = generate(model, inputs, make_cache(Cache, model, dtype=dtype))
        expected = generate(model, inputs, make_cache(DynamicCache, model))
    assert torch.equal(found["sequences"], expected["sequences"])
    assert torch.equal(torch.stack(found["logits"]), torch.stack(expected["logits"]))


# -- what is stored --------------------------------------------------------------------------------------------------


def test_a_step_copies_no_stored_position():
    model, inputs = make_decoder("Llama")
    cache = Cache()
    generate(model, inputs, cache, max_new_tokens=4)
    addresses = [layer.cache.key.data_ptr() for layer in cache.layers]
    assert all(layer.cache.capacity >= 24 for layer in cache.layers)
    x = torch.ones(3, 2, 1, 8, dtype=torch.double)
    for layer, address in zip(cache.layers, addresses, strict=True):
        for _ in range(5):
            keys, values = layer.update(x, x)
            assert keys.data_ptr() == address == layer.cache.key.data_ptr()
            assert values.data_ptr() == layer.cache.value.data_ptr()


@pytest.mark.parametrize(("length", "formula"), [(1, "None"), (2, "i + m − n ≥ j")])
def test_the_newest_query_has_no_condition_on_later_keys(length, formula):
    """Then a step of decoding searches no tiles, and the decode kernel is called as it was bound."""
    mask = sightline_mask(1, length, 7, q_offset=7 - length)
    assert isinstance(mask, FormulaMask)
    assert str(mask.formula) in (formula, "j ≤ i + m − n")
    assert torch.equal(mask.dense(), torch.ones(7, 7).tril().bool()[-length:][None, None])


def test_a_query_that_is_not_the_newest_keeps_its_condition():
    mask = sightline_mask(1, 1, 7, q_offset=4)
    assert mask.formula is not None
    x = torch.randn(1, 1, 7, 4, dtype=torch.double)
    found = sightline.attention(x[:, :, :1], x, x, mask=mask.formula)
    torch.testing.assert_close(found, sightline.attention(x[:, :, :1], x[:, :, :5], x[:, :, :5]), **TOLERANCE)


def test_a_sliding_layer_stores_no_more_than_its_window():
    model, inputs = make_decoder("Mistral")
    window = 16
    model.config.sliding_window = window
    cache = Cache(config=model.config)
    generate(model, {key: x.repeat(1, 10) for key, x in inputs.items()}, cache, max_new_tokens=60)
    assert cache.get_seq_length() == 179
    for layer in cache.layers:
        assert layer.keys.shape[2] == window - 1
        assert layer.cache.capacity <= 1.25 * window + 1


def generate_beside(other, name, with_config, dtype, **options):
    """Generate with a `Cache` of this dtype and with the other cache, and assert that the tokens are equal.

    Return the differences of the logits, as shares of the largest logit, and the layers of the `Cache`.
    """
    model, inputs = make_decoder(name)
    of_cache = {"config": model.config} if with_config else {}
    expected = generate(model, inputs, make_cache(other, model, **of_cache), **options)
    cache = make_cache(Cache, model, dtype=dtype, **of_cache)
    found = generate(model, inputs, cache, **options)
    assert torch.equal(found["sequences"], expected["sequences"])
    ours, theirs = (torch.stack(answer["logits"]) for answer in (found, expected))
    assert ours.dtype in (torch.float32, torch.float64)
    layers = getattr(cache, "self_attention_cache", cache).layers
    assert {layer.cache.dtype for layer in layers} == {dtype}
    return (ours - theirs).abs() / theirs.abs().max(), layers


@pytest.mark.sampled(one_in=11)
@pytest.mark.parametrize("way", [{"num_beams": 3, "max_new_tokens": 4}, {"prefill_chunk_size": 5}])
@pytest.mark.parametrize("with_config", [False, True])
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in ("Whisper", "DeepSeek V3")])
def test_another_dtype_reaches_attention_as_it_is_stored(name, with_config, way):
    """Models in float64, keys and values in float32: logits near float32's roundings, with masks, biases and sinks."""
    if "prefill_chunk_size" in way and name in ("T5", "mT5", "BART", "Pegasus"):
        way = {}
    differences, layers = generate_beside(DynamicCache, name, with_config, "float32", **way)
    assert 1e-10 < differences.max() < 1e-5
    assert {layer.keys.dtype for layer in layers} == {torch.float64}


class RoundedCache(DynamicCache):
    """A `DynamicCache` of the numbers that a quantised `KVCache` stands for."""

    def __init__(self, dtype, **options):
        super().__init__(**options)
        self.dtype = dtype

    def update(self, key_states, value_states, *arguments, **options):
        stored = sightline.KVCache(dtype=self.dtype)
        stored.append(key_states, value_states)
        return super().update(*(x.to(key_states.dtype) for x in stored.dequantized()), *arguments, **options)


@pytest.mark.sampled(one_in=17)
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", ("int8", "int4")])
@pytest.mark.parametrize("with_config", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 2", "GPT-OSS", "GPT-2", "T5"])
def test_quantised_keys_and_values(name, with_config, dtype):
    """Models in float64, and attention in float32 on the stored numbers: logits near float32's roundings.

    A rounding of one layer may change a code of the next layer by 1, and then logits of later tokens by more.
    """
    differences, layers = generate_beside(partial(RoundedCache, dtype), name, with_config, dtype, num_beams=2)
    assert 1e-10 < differences.quantile(0.9) < 1e-5
    assert differences.max() < 1e-2
    assert all(0 < max(layer.cache.quantization_error) < 0.2 for layer in layers)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_quantised_caches_take_drafts_copies_and_chunks(kind):
    model, inputs = make_decoder("Mistral")
    model, inputs = model.to(kind), {key: x[:1].repeat(1, 3) for key, x in inputs.items()}
    answers = []
    for way in ({}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 5}):
        cache = Cache(config=model.config, dtype=("int8", "int4"))
        answers.append(generate(model, inputs, copy.deepcopy(cache), max_new_tokens=25, **way)["sequences"])
    if kind == torch.float32:  # in bfloat16, logits are equal often
        assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert all(answer.shape[1] == answers[0].shape[1] for answer in answers)


def test_half_the_memory():
    model, inputs = make_decoder("Llama")
    model.float()
    caches = [Cache(), Cache(dtype="bfloat16")]
    for cache in caches:
        generate(model, inputs, cache, max_new_tokens=3)
    assert caches[0].layers[0].cache.nbytes == 2 * caches[1].layers[0].cache.nbytes


def test_errors():
    with pytest.raises(DtypeError, match="int7"):
        Cache(dtype="int7")
    model, inputs = make_decoder("Llama")
    with pytest.raises(ParameterError, match="no_grad"):
        model(**inputs, **{CACHE: Cache()})
    model.set_attn_implementation("sdpa")
    with pytest.raises(ParameterError, match="stores int8"):
        generate(model, inputs, Cache(dtype="int8"))
    with pytest.raises(ParameterError, match="stores bfloat16") as caught:
        generate(model, inputs, Cache(dtype="bfloat16"))
    assert 'set_attn_implementation("sightline")' in caught.value.cure


def test_the_cure_where_a_model_computes_with_the_stored_keys():
    model, ids = make_decoder("DeepSeek V3", "sightline")[0], torch.arange(90)[None] % 37 + 1
    cache, forked, steps = Cache(), Cache(), torch.tensor([[8], [9]])
    with pytest.raises(ParameterError, match="view"):
        generate(*make_decoder("DeepSeek V3"), Cache(dtype="float32"))
    with torch.no_grad():
        for one in (cache, forked):
            model(ids, **{CACHE: one})
        forked.fork(2)
        with pytest.raises(ParameterError, match="view") as caught:
            model(steps, **{CACHE: forked})
        assert "cache.batch_repeat_interleave(count) in place of fork(count)" in caught.value.cure
        cache.batch_repeat_interleave(2)
        found = model(steps, **{CACHE: cache}).logits[:, -1]
        expected = torch.stack([model(torch.cat([ids, step[None]], 1)).logits[0, -1] for step in steps])
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_model_with_layers_of_other_kinds_needs_its_config():
    """Layer 0 of this LFM2 is a convolution."""
    config = transformers.Lfm2Config(**SIZES, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    torch.manual_seed(3)
    model = transformers.Lfm2ForCausalLM(config).double().eval()
    model.set_attn_implementation("sightline")
    inputs = make_inputs(model, "left").inputs
    assert_generates_the_same(model, inputs, True, num_beams=2)
    with pytest.raises(ParameterError, match="layer 0 without keys") as caught:
        generate(model, inputs, Cache())
    assert caught.value.cure == "Cache(config=model.config)"
    with pytest.raises(ParameterError, match="config= of type Lfm2ForCausalLM"):
        Cache(config=model)
    with pytest.raises(ParameterError, match="layer 0 without keys"):  # as RecurrentGemma, whose past would be ignored
        Cache().update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 2)
    model, inputs = make_decoder("Llama")
    with pytest.raises(ParameterError, match="layer 1 of a model, and a Cache whose config= has 1 layers"):
        generate(model, inputs, Cache(config=make_model("Llama", num_hidden_layers=1).config))


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_keys_that_a_program_selects(name, dtype):
    """A program that keeps some positions of a prompt assigns them to the layers, as it does with `DynamicCache`."""
    model, inputs = make_decoder(name, padding="no")
    answers = []
    for kind in (Cache, DynamicCache):
        cache = kind(config=model.config, **({"dtype": dtype} if kind is Cache else {}))
        prompt = DynamicCache(config=model.config)
        ids = generate(model, inputs, prompt, max_new_tokens=1)["sequences"]
        generate(model, inputs, cache, max_new_tokens=1)
        for layer, whole in zip(cache.layers, prompt.layers, strict=True):
            layer.keys, layer.values = whole.keys[:, :, 1:], whole.values[:, :, 1:]
        copied = copy.deepcopy(cache)
        copied.reorder_cache(torch.tensor([2, 1, 0]))
        copied.reorder_cache(torch.tensor([2, 1, 0]))
        with torch.no_grad():
            outputs = [model(ids[:, -1:], **{CACHE: each}).logits for each in (cache, copied)]
        assert torch.equal(*outputs)
        answers.append(outputs[0])
    tolerance = TOLERANCE if dtype is None else {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(*answers, check_dtype=False, **tolerance)


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_a_single_cache_of_an_encoder_decoder_model_is_refused(name):
    with pytest.raises(ParameterError, match=r"EncoderDecoderCache\(Cache\(\), Cache\(\)\)"):
        generate(*make_decoder(name), Cache())


# -- saved prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_config", [False, True])
def test_copies_of_a_prompt_share_its_keys_and_are_independent(with_config):
    model, inputs = make_decoder("Gemma 2")
    cache = Cache(**({"config": model.config} if with_config else {}))
    generate(model, inputs, cache, max_new_tokens=1)
    stored = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    for token in (3, 9, 3):
        following = continued(inputs, torch.full((3, 2), token))
        copied = copy.deepcopy(cache)
        for own, other in zip(copied.layers, cache.layers, strict=True):
            assert own.keys.data_ptr() == other.keys.data_ptr()
        found, expected = (generate(model, following, each) for each in (copied, DynamicCache()))
        assert torch.equal(found["sequences"], expected["sequences"])
        for layer, (keys, values) in zip(cache.layers, stored, strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("with_config", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-OSS"])
def test_forks_of_a_prompt_generate_as_copies(name, with_config, monkeypatch):
    monkeypatch.setattr("sightline.kv_cache.cache.MIN_SHARED_ROWS", 1)
    model, inputs = make_decoder(name)
    found = []
    for kind in (Cache, DynamicCache):
        cache = kind(config=model.config) if with_config else kind()
        with torch.no_grad():
            model(**inputs, **{CACHE: cache})
        if kind is Cache:
            cache.fork([1, 0, 3])
            assert any(layer.cache.prefix for layer in cache.layers)
        else:
            cache.reorder_cache(torch.tensor([0, 2, 2, 2]))
        chosen = {key: x[[0, 2, 2, 2]] for key, x in inputs.items()}
        following = continued(chosen, torch.tensor([[5], [6], [7], [8]]))
        found.append(generate(model, following, cache)["sequences"])
    assert torch.equal(*found)


def test_threads_continue_one_prompt():
    model, inputs = make_decoder("Mistral")
    cache = Cache(config=model.config)
    generate(model, inputs, cache, max_new_tokens=1)
    answers = {}

    def continue_with(token):
        options = {"do_sample": False, "max_new_tokens": 12, CACHE: copy.deepcopy(cache)}
        answers[token] = model.generate(**continued(inputs, torch.full((3, 1), token)), **options)

    threads = [threading.Thread(target=continue_with, args=(token,)) for token in range(3, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(answers)
    for token in range(3, 9):
        continue_with(token)
        assert torch.equal(together[token], answers[token])


# -- watches -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("dtype", [None, "float32", "int8"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "T5"])
def test_a_watch_records_the_statistics_of_dynamic_cache(name, dtype):
    model, inputs = make_decoder(name)
    see = [sightline.entropy(), sightline.received(), sightline.weights()]
    seen = []
    for kind in (Cache, RoundedCache if dtype == "int8" else DynamicCache):
        with sightline.watch(model, see=see) as recording:
            of_cache = {"config": model.config} | ({"dtype": dtype} if kind is not DynamicCache else {})
            generate(model, inputs, make_cache(kind, model, **of_cache), max_new_tokens=5)
        seen.append(recording.calls)
    assert len(seen[0]) == len(seen[1]) > 8
    for found, expected in zip(*seen, strict=True):
        assert repr(found) == repr(expected)
        assert (found.query_start, found.key_start) == (expected.query_start, expected.key_start)
        for one, other in zip(found.results, expected.results, strict=True):
            torch.testing.assert_close(
                one.double(), other, **(TOLERANCE if dtype is None else {"rtol": 0, "atol": 1e-4})
            )
