"""Models of transformers, tiny and random: the same logits, weights and generation as their own code, and watching."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from sightline.errors import ParameterError
from sightline.testing import assert_within_budget, budget_used

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: E402

import sightline  # noqa: E402
from sightline.torch import watching  # noqa: E402
from sightline.transformers import interface, watch  # noqa: E402
from sightline.transformers.mask import FormulaMask, sightline_mask  # noqa: E402

VOCABULARY, BATCH, LENGTH = 40, 3, 12
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
SPEECH = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 4,
    "max_source_positions": 10,
    "max_target_positions": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
TEXT = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
MADE = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Mistral, window 5": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 5}),
    "Gemma 2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "sliding_window": 5, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    ),
    "GPT-OSS": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **GROUPED,
            "sliding_window": 5,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "experts_implementation": "eager",
        },
    ),
    "BERT": ("BertForMaskedLM", "BertConfig", SIZES),
    "T5": ("T5ForConditionalGeneration", "T5Config", {**TEXT, "decoder_start_token_id": 1}),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", SPEECH),
}
WRITES = [name for name in MADE if name != "BERT"]  # models that generate


def made(name, **changes):
    """The model in float32, with weights large enough for its attention to prefer some keys."""
    model, config, sizes = MADE[name]
    torch.manual_seed(20170612)
    built = getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for weight in built.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            elif weight.shape == (4,):  # sinks
                weight.normal_()
    return built


@dataclass
class Given:
    """A model's arguments, and where its queries are real."""

    inputs: dict[str, Any]
    real: torch.Tensor


def given(name, padding):
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=rng)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for entry in range(1, BATCH):
        count = 3 * entry
        if padding == "left":
            mask[entry, :count] = 0
        elif padding == "right":
            mask[entry, -count:] = 0
    if name == "T5":
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids.flip(0), "use_cache": False}
        return Given({**inputs, "decoder_attention_mask": mask}, mask.bool())
    if name == "Whisper":
        features = torch.randn(BATCH, 4, 20, generator=rng)
        inputs = {"input_features": features, "decoder_input_ids": ids, "decoder_attention_mask": mask}
        return Given({**inputs, "use_cache": False}, mask.bool())
    return Given({"input_ids": ids, "attention_mask": mask}, mask.bool())


def definition(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
    """Attention as the papers write it, one stage a line, in whatever dtype it is given."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if options.get("softcap") is not None:
        scores = (scores / options["softcap"]).tanh() * options["softcap"]
    if options.get("position_bias") is not None:
        scores = scores + options["position_bias"]
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    if options.get("s_aux") is not None:
        sinks = options["s_aux"][:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : key.shape[-2]]
    return (weights @ value).transpose(1, 2), weights


@pytest.fixture
def by_definition(monkeypatch):
    """The definition under a name that models take."""

    def mask(*arguments, **options):
        return masking_utils.sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False})

    monkeypatch.setitem(AttentionInterface._global_mapping, "definition", definition)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "definition", mask)


def run(model, implementation, inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs, output_attentions=True)


def attentions(answer):
    found = {name: getattr(answer, name, None) for name in answer if name.endswith("attentions")}
    assert found
    return {f"{name} {k}": array for name, arrays in found.items() for k, array in enumerate(arrays)}


def wide(model, inputs):
    """The model and its arguments in float64."""
    floats = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in inputs.items()}
    return copy.deepcopy(model).double(), floats


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("padding", ["no", "left", "right"])
@pytest.mark.parametrize("name", MADE)
def test_logits_and_weights_are_those_of_the_model(name, padding):
    model, asked = made(name), given(name, padding)
    ours, theirs = (run(model, implementation, asked.inputs) for implementation in ("sightline", "eager"))
    deep, inputs = wide(model, asked.inputs)
    truth = run(deep, "definition", inputs)
    assert_within_budget(ours.logits[asked.real], truth.logits[asked.real], theirs.logits[asked.real], "logits")
    found, oracle, plain = attentions(ours), attentions(truth), attentions(theirs)
    assert found.keys() == oracle.keys() == plain.keys()
    for place, weights in found.items():
        assert weights.dtype == torch.float32
        real = asked.real[:, None].expand(weights.shape[:-1]) if weights.shape[-2] == LENGTH else ...
        assert_within_budget(weights[real], oracle[place][real], plain[place][real], place)


@pytest.mark.parametrize("name", WRITES)
def test_greedy_generation_is_that_of_the_model(name):
    model, asked = made(name), given(name, "left")
    names = ["input_features"] if name == "Whisper" else ["input_ids", "attention_mask"]
    inputs = {key: asked.inputs[key] for key in names}
    answers = []
    for implementation in ("sightline", "eager"):
        model.set_attn_implementation(implementation)
        answers.append(model.generate(**inputs, max_new_tokens=8, do_sample=False))
    assert torch.equal(*answers)


# -- masks ---------------------------------------------------------------------------------------------------------

KEYS = 20
ENTRIES = torch.arange(KEYS) // 6
BLOCKS = torch.where(torch.arange(KEYS) % 7 < 3, torch.arange(KEYS) // 7, -1)
RESTARTS = torch.stack([torch.arange(KEYS) % 8, torch.arange(KEYS)])  # positions of packed sequences
FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(5),
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": masking_utils.chunked_causal_mask_function(6, torch.tensor([3, 0])),
    "packed": masking_utils.packed_sequence_compatibility_function(
        masking_utils.causal_mask_function, RESTARTS, ENTRIES.expand(2, -1)
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
def test_formulas_are_the_masks_transformers_writes(name, padding, n, m, q_offset, kv_offset):
    mask = sightline_mask(2, n, m, q_offset, kv_offset, FUNCTIONS[name], padded(padding))
    if not isinstance(mask, FormulaMask):
        assert name == "bidirectional"
        assert mask.all()
        return
    assert mask.shape == (2, 1, n, m)
    np.testing.assert_array_equal(dense_of(mask), mask.dense().expand(mask.shape).numpy())
    assert (mask.query_start, mask.key_start) == (int(q_offset) - kv_offset, kv_offset)


@pytest.mark.parametrize(
    ("given", "formula"),
    [
        ((FUNCTIONS["causal"], None), "j ≤ i"),
        ((FUNCTIONS["window"], None), "j > i − 5 ∧ j ≤ i"),
        ((FUNCTIONS["causal"], padded("right")), "j ≤ i ∧ j < t[b]"),
        ((FUNCTIONS["causal"], padded("left")), "j ≤ i ∧ j ≥ t[b]"),
        ((FUNCTIONS["bidirectional"], padded("both")), "j ≥ t₁[b] ∧ j < t₂[b]"),
    ],
)
def test_masks_are_written_as_a_person_would(given, formula):
    assert str(sightline_mask(2, KEYS, KEYS, 0, 0, *given).formula) == formula


def test_a_growing_cache_keeps_one_formula():
    """Another formula would be another kernel, for every token."""
    texts = {sightline_mask(1, 1, held + 1, held).formula.text for held in range(3, 9)}
    assert len(texts) == 1
    slid = {sightline_mask(1, 1, 5, held, held - 4, FUNCTIONS["window"]).formula.text for held in range(5, 9)}
    assert len(slid) == 1


def test_scattered_padding_is_a_table():
    real = torch.arange(KEYS).expand(2, -1) % 3 > 0
    mask = sightline_mask(2, KEYS, KEYS, attention_mask=real)
    np.testing.assert_array_equal(dense_of(mask), mask.dense().numpy())


def test_what_formulas_have_no_word_for_is_a_dense_mask():
    def odd(b, h, q, k):
        return (q - k).remainder(3).bool() & (k <= q)

    mask = sightline_mask(2, KEYS, KEYS, mask_function=odd)
    assert not isinstance(mask, FormulaMask)
    assert torch.equal(mask, masking_utils.sdpa_mask(2, KEYS, KEYS, mask_function=odd, allow_is_causal_skip=False))


def test_what_a_model_does_to_a_mask_is_done_to_the_dense_one():
    mask = sightline_mask(2, KEYS, KEYS, mask_function=FUNCTIONS["window"])
    assert isinstance(mask.contiguous(), FormulaMask)
    whole = mask.dense()
    assert torch.equal(~mask[:, :, 2:5], ~whole[:, :, 2:5])
    assert torch.equal(torch.where(mask, 1.0, 2.0), torch.where(whole, 1.0, 2.0))


def test_a_sliding_window_skips_tiles(monkeypatch):
    """What reaches attention leaves most tiles out; none of the rest is searched."""
    model, asked = made("Mistral, window 5", sliding_window=64, max_position_embeddings=1024, num_hidden_layers=1), []
    attention = watching.attention

    def noting(query, key, value, **options):
        asked.append(sightline.explain(query, key, value, mask=options["mask"]))
        return attention(query, key, value, **options)

    monkeypatch.setattr(watching, "attention", noting)
    run_length = 1024
    model.set_attn_implementation("sightline")
    with torch.no_grad():
        model(torch.randint(3, VOCABULARY, (1, run_length)))
    (explanation,) = asked
    blocks = run_length // 64
    heads = model.config.num_attention_heads
    assert explanation.tiles["full"] + explanation.tiles["partial"] == heads * (2 * blocks - 1)
    assert explanation.tiles["empty"] == heads * (blocks**2 - 2 * blocks + 1)
    assert explanation.formulas[1] == "mask  j > i − 64 ∧ j ≤ i"


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_mask_that_is_lost_shows(monkeypatch, padding):
    """transformers makes no mask for an attention without a mask function, and says nothing."""
    model, asked = made("BERT"), given("BERT", padding)
    theirs = run(model, "eager", asked.inputs)
    deep, inputs = wide(model, asked.inputs)
    truth = run(deep, "definition", inputs)
    judged = [x.logits[asked.real] for x in (truth, theirs)]
    assert budget_used(run(model, "sightline", asked.inputs).logits[asked.real], *judged) <= 1
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "sightline")
    assert budget_used(run(model, "sightline", asked.inputs).logits[asked.real], *judged) > 1


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize(
    ("name", "part"), [("Gemma 2", "softcap"), ("GPT-OSS", "s_aux"), ("T5", "position_bias"), ("Llama", "scaling")]
)
def test_an_argument_that_is_lost_shows(monkeypatch, name, part):
    model, asked = made(name), given(name, "no")
    theirs = run(model, "eager", asked.inputs)
    deep, inputs = wide(model, asked.inputs)
    truth = run(deep, "definition", inputs)
    whole = AttentionInterface._global_mapping["sightline"]

    def losing(*arguments, **options):
        changed = {part: options[part] / 2} if part == "scaling" else {part: None}
        return whole(*arguments, **{**options, **changed})

    monkeypatch.setitem(AttentionInterface._global_mapping, "sightline", losing)
    assert budget_used(run(model, "sightline", asked.inputs).logits, truth.logits, theirs.logits) > 1


@pytest.mark.parametrize("argument", interface.UNREAD)
def test_arguments_it_would_have_to_ignore_are_refused(argument):
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ParameterError, match=argument):
        interface.sightline_attention(torch.nn.Identity(), x, x, x, None, **{argument: x})


# -- caches --------------------------------------------------------------------------------------------------------


def test_a_static_cache_generates_the_same():
    model, asked = made("Mistral, window 5"), given("Llama", "left")
    answers = []
    for implementation in ("sightline", "eager"):
        model.set_attn_implementation(implementation)
        answers.append(model.generate(**asked.inputs, max_new_tokens=4, do_sample=False, cache_implementation="static"))
    assert torch.equal(*answers)


def test_beams_generate_the_same():
    model, asked = made("Llama"), given("Llama", "left")
    answers = []
    for implementation in ("sightline", "eager"):
        model.set_attn_implementation(implementation)
        answers.append(model.generate(**asked.inputs, max_new_tokens=4, do_sample=False, num_beams=3))
    assert torch.equal(*answers)


# -- training ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("name", ["GPT-OSS", "T5"])
def test_gradients_are_those_of_the_model(name):
    """Sinks, relative biases and embeddings learn the same."""
    model, asked = made(name), given(name, "right")
    deep, inputs = wide(model, asked.inputs)

    def gradients(of, implementation, arguments):
        of.set_attn_implementation(implementation)
        of.zero_grad()
        of(**arguments).logits[asked.real].tanh().sum().backward()
        return {name: weight.grad for name, weight in of.named_parameters() if weight.grad is not None}

    ours, theirs = (gradients(model, implementation, asked.inputs) for implementation in ("sightline", "eager"))
    truth = gradients(deep, "definition", inputs)
    assert ours.keys() == theirs.keys() == truth.keys()
    for place, found in ours.items():
        assert_within_budget(found.flatten(), truth[place].flatten(), theirs[place].flatten(), place)


def test_dropout_is_for_training():
    model, asked = made("Llama", attention_dropout=0.5), given("Llama", "no")
    model.set_attn_implementation("sightline")

    def logits(training):
        torch.manual_seed(3)
        return model.train(training)(**asked.inputs).logits

    assert torch.equal(logits(True), logits(True))
    assert not torch.equal(logits(True), logits(False))


# -- watching ------------------------------------------------------------------------------------------------------


# -- watching ------------------------------------------------------------------------------------------------------


def state(model):
    """All that a watch might leave behind."""
    configs = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    return configs, hooks, dict(watching._WATCHERS)


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("name", ["Gemma 2", "BERT", "T5"])
def test_watched_weights_are_those_the_model_returns(name):
    model, asked = made(name), given(name, "right")
    theirs = run(model, "eager", asked.inputs)
    deep, inputs = wide(model, asked.inputs)
    truth = run(deep, "definition", inputs)
    with torch.no_grad(), watch(model, [sightline.weights()]) as seen:
        model(**asked.inputs)
    for part in [part for part in truth if part.endswith("attentions")]:
        calls = seen.of(kind="cross") if part == "cross_attentions" else seen.of(kind="self")
        side = part.split("_")[0] + "." if part.startswith(("encoder", "decoder")) else ""
        weights = [call["weights"] for call in calls if call.layer.startswith(side)]
        assert len(weights) == len(truth[part])
        for found, oracle, plain in zip(weights, truth[part], theirs[part], strict=True):
            assert_within_budget(
                found[asked.real[:, None].expand(found.shape[:-1])],
                *[array[asked.real[:, None].expand(found.shape[:-1])] for array in (oracle, plain)],
                part,
            )


def test_generation_is_seen_step_by_step():
    model, asked = made("Llama"), given("Llama", "left")
    with watch(model, [sightline.lse()]) as seen:
        model.generate(**asked.inputs, max_new_tokens=3, do_sample=False)
    first, *later = seen.of(layer=0)
    assert (first.n, first.m, first.step, first.query_start) == (LENGTH, LENGTH, 0, 0)
    assert [(call.n, call.m, call.step, call.query_start) for call in later] == [
        (1, LENGTH + step, step, LENGTH + step - 1) for step in (1, 2)
    ]
    assert [call.layer for call in seen.of(step=-1)] == list(seen.layers)


def test_a_sliding_cache_says_where_its_keys_start():
    model, asked = made("Mistral, window 5"), given("Llama", "no")
    with watch(model, [sightline.lse()], layers=[0]) as seen:
        model.generate(**asked.inputs, max_new_tokens=3, do_sample=False)
    seen.tokens = [[str(k) for k in range(LENGTH + 2)]] * BATCH
    last = seen[-1]
    assert (last.m, last.key_start, last.query_start) == (5, LENGTH - 3, 4)
    assert seen.labels(last) == ([str(LENGTH + 1)], [str(k) for k in range(LENGTH - 3, LENGTH + 2)])


@pytest.mark.parametrize("name", ["T5", "Whisper"])
def test_encoder_and_decoder_are_told_apart(name):
    model, asked = made(name), given(name, "no")
    sides = {"encoder": [["e"] * LENGTH] * BATCH, "decoder": [["d"] * LENGTH] * BATCH}
    with torch.no_grad(), watch(model, [sightline.lse()], tokens=sides) as seen:
        model(**asked.inputs)
    kinds = {(call.kind, "encoder" in call.layer.split(".")) for call in seen}
    assert kinds == {("self", True), ("self", False), ("cross", False)}
    cross = seen.of(kind="cross")[0]
    queries, keys = seen.labels(cross)
    assert (set(queries), keys[0], cross.query_start) == ({"d"}, "e", None)


@pytest.mark.parametrize("before", ["eager", "sdpa", "sightline"])
def test_a_model_is_left_as_it_was(before):
    model, asked = made("Llama"), given("Llama", "no")
    model.set_attn_implementation(before)
    untouched = state(model)
    with torch.no_grad(), watch(model, [sightline.lse()]) as outer:
        model(**asked.inputs)
        with watch(model, [sightline.weights()], layers=[-1]) as inner:
            model(**asked.inputs)
        model(**asked.inputs)
    assert (len(outer), len(inner)) == (6, 1)
    assert state(model) == untouched
    with pytest.raises(RuntimeError, match="out of it"), watch(model, [sightline.lse()]):
        raise RuntimeError("out of it")
    assert state(model) == untouched


def test_what_was_seen_has_gradients():
    model, asked = made("Llama"), given("Llama", "no")
    with watch(model, [sightline.lse()]) as seen:
        model(**asked.inputs)
    sum(lse.sum() for lse in seen["lse"]).backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_some_layers_and_heads():
    model, asked = made("Llama"), given("Llama", "no")
    with (
        torch.no_grad(),
        watch(model, [sightline.lse()]) as every,
        watch(model, [sightline.lse()], layers="*.1.*", heads=[-1, 0]) as some,
    ):
        model(**asked.inputs)
    (call,) = some
    assert (call.layer, call.heads) == ("model.layers.1.self_attn", (3, 0))
    assert torch.equal(call["lse"], every["lse"][1][:, [3, 0]])


def test_models_that_cannot_be_watched_are_refused():
    with pytest.raises(ParameterError, match="attention interface"), watch(torch.nn.Linear(2, 2), [sightline.lse()]):
        pass
    model = made("Llama")
    for options in ({"see": []}, {"see": "lse"}, {"layers": [9]}, {"layers": "none"}, {"heads": [0.5]}):
        with pytest.raises(ParameterError), watch(model, **{"see": [sightline.lse()], **options}):
            pass
