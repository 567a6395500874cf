"""Tests of `sightline.watch` for models of transformers."""

import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import sightline
import sightline.transformers
from sightline import watch
from sightline.errors import MissingExtraError, ParameterError
from sightline.reference.testing import assert_within_budget
from sightline.torch.watching.attention_finder import FINDER
from sightline.transformers.compatibility import CACHE
from sightline.view import explorer
from tiny_models import BATCH, LENGTH, VOCABULARY, make_model, make_model_and_inputs, references, run, to_float64


def state(model):
    """Return everything that `watch` changes and must restore."""
    configs = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    counts = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    return configs, counts, FINDER.watchers, "prepare_inputs_for_generation" in vars(model)


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_watched_weights_are_those_the_model_returns(name):
    model, batch = make_model_and_inputs(name, "right")
    truth, eager = references(model, batch.inputs)
    with torch.no_grad(), watch(model, [sightline.weights()]) as seen:
        model(**batch.inputs)
    for part in [part for part in truth if part.endswith("attentions")]:
        calls = seen.of(kind="cross") if part == "cross_attentions" else seen.of(kind="self")
        side = part.split("_")[0] + "." if part.startswith(("encoder", "decoder")) else ""
        weights = [call["weights"] for call in calls if call.layer.startswith(side)]
        assert len(weights) == len(truth[part])
        for found, oracle, plain in zip(weights, truth[part], eager[part], strict=True):
            assert_within_budget(
                found[batch.real[:, None].expand(found.shape[:-1])],
                *[array[batch.real[:, None].expand(found.shape[:-1])] for array in (oracle, plain)],
                part,
            )


def test_generation_is_recorded_step_by_step():
    model, batch = make_model_and_inputs("Llama", "left")
    with watch(model, [sightline.lse()]) as seen:
        model.generate(**batch.inputs, max_new_tokens=3, do_sample=False)
    first, *later = seen.of(layer=0)
    assert (first.n, first.m, first.step, first.query_start) == (LENGTH, LENGTH, 0, 0)
    assert [(call.n, call.m, call.step, call.query_start) for call in later] == [
        (1, LENGTH + step, step, LENGTH + step - 1) for step in (1, 2)
    ]
    assert [call.layer for call in seen.of(step=-1)] == list(seen.layers)


def test_a_sliding_cache_records_the_start_of_its_keys():
    model, batch = make_model_and_inputs("Mistral", "no")
    with watch(model, [sightline.lse()], layers=[0]) as seen:
        model.generate(**batch.inputs, max_new_tokens=3, do_sample=False)
    seen.tokens = [[str(k) for k in range(LENGTH + 2)]] * BATCH
    last = seen[-1]
    assert (last.m, last.key_start, last.query_start) == (5, LENGTH - 3, 4)
    assert seen.labels(last) == ([str(LENGTH + 1)], [str(k) for k in range(LENGTH - 3, LENGTH + 2)])


@pytest.mark.parametrize("name", ["T5", "Whisper"])
def test_encoder_and_decoder_are_distinguished(name):
    model, batch = make_model_and_inputs(name, "no")
    encoded = model.config.max_source_positions if name == "Whisper" else LENGTH
    sides = {"encoder": [["e"] * encoded] * BATCH, "decoder": [["d"] * LENGTH] * BATCH}
    with torch.no_grad(), watch(model, [sightline.lse()], tokens=sides) as seen:
        model(**batch.inputs)
    kinds = {(call.kind, "encoder" in call.layer.split(".")) for call in seen}
    assert kinds == {("self", True), ("self", False), ("cross", False)}
    cross = seen.of(kind="cross")[0]
    queries, keys = seen.labels(cross)
    assert (set(queries), keys[0], cross.query_start) == ({"d"}, "e", 0)


def test_models_of_older_transformers_are_watched_as_any_model(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.56.2")
    for name in [name for name in sys.modules if name.startswith("sightline.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    model, batch = make_model_and_inputs("BERT", "right")
    inputs, real = batch.inputs, batch.real
    eager = run(model, "eager", inputs)["attentions"]
    model64, inputs64 = to_float64(model, inputs)
    truth = run(model64, "eager", inputs64)["attentions"]
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), watch(model, sightline.weights()) as seen:
        model(**inputs)
        assert model.config._attn_implementation == "sdpa"
    for found, oracle, plain in zip(seen["weights"], truth, eager, strict=True):
        rows = real[:, None].expand(found.shape[:-1])
        assert_within_budget(found[rows], oracle[rows], plain[rows])
    model.set_attn_implementation("eager")
    with pytest.raises(ParameterError, match='attn_implementation="sdpa"'), watch(model, sightline.lse()):
        model(**inputs)
    with (
        pytest.raises(ParameterError, match=r"not a model of transformers 4\.57"),
        watch(model, sightline.lse(), tokenizer=1),
    ):
        pass
    with pytest.raises(MissingExtraError, match=r"transformers 4\.56\.2 is older than 4\.57"):
        import_module("sightline.transformers")


@pytest.mark.parametrize("before", ["eager", "sdpa", "sightline"])
def test_the_model_is_restored(before):
    model, batch = make_model_and_inputs("Llama", "no")
    model.set_attn_implementation(before)
    original = state(model)
    with torch.no_grad(), watch(model, [sightline.lse()]) as outer:
        model(**batch.inputs)
        with watch(model, [sightline.weights()], layers=[-1]) as inner:
            model(**batch.inputs)
        model(**batch.inputs)
    assert (len(outer), len(inner)) == (6, 1)
    assert state(model) == original
    with pytest.raises(RuntimeError, match="inside watch"), watch(model, [sightline.lse()]):
        raise RuntimeError("inside watch")
    assert state(model) == original


def test_watch_contexts_exit_in_any_order():
    model, batch = make_model_and_inputs("Llama", "no")
    original = state(model)
    first, second = watch(model, [sightline.lse()]), watch(model, [sightline.lse()])
    seen = first.__enter__(), second.__enter__()
    with torch.no_grad():
        model(**batch.inputs)
        first.__exit__(None, None, None)
        model(**batch.inputs)
    assert [len(one) for one in seen] == [2, 4]
    second.__exit__(None, None, None)
    assert state(model) == original


def test_recorded_statistics_have_gradients():
    model, batch = make_model_and_inputs("Llama", "no")
    with watch(model, [sightline.lse()]) as seen:
        model(**batch.inputs)
    sum(lse.sum() for lse in seen["lse"]).backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_layers_and_heads_are_selected():
    model, batch = make_model_and_inputs("Llama", "no")
    with (
        torch.no_grad(),
        watch(model, [sightline.lse()]) as every,
        watch(model, [sightline.lse()], layers="*.1.*", heads=[-1, 0]) as some,
    ):
        model(**batch.inputs)
    (call,) = some
    assert (call.layer, call.heads) == ("model.layers.1.self_attn", (3, 0))
    assert torch.equal(call["lse"], every["lse"][1][:, [3, 0]])


@pytest.fixture(scope="module")
def words():
    """A tokenizer of the tiny models' vocabulary, without a download: token 7 is "w7"."""
    vocabulary = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def written(ids):
    return [[f"w{number}" for number in row] for row in ids.tolist()]


def test_tokens_come_from_the_tokenizer_beside_the_model(words, tmp_path):
    model, batch = make_model_and_inputs("Llama", "right")
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad(), watch(loaded, [sightline.weights()]) as seen:
        loaded(batch.inputs["input_ids"], batch.inputs["attention_mask"])
    expected = written(batch.inputs["input_ids"])
    lengths = batch.inputs["attention_mask"].sum(-1).tolist()
    assert seen.tokens == [
        row[:length] + [""] * (LENGTH - length) for row, length in zip(expected, lengths, strict=True)
    ]
    assert seen.labels(seen[0], 1) == (seen.tokens[1], seen.tokens[1])
    layer = explorer.from_seen(seen).texts[1].layers[0]
    assert layer.queries == tuple(expected[1][: lengths[1]])
    seen.tokens = [["x"] * LENGTH] * BATCH
    assert seen.labels(seen[0])[0] == ["x"] * LENGTH


def test_without_a_tokenizer_the_labels_are_positions(tmp_path):
    model, batch = make_model_and_inputs("Llama", "no")
    for name in ("", "no/model", str(tmp_path), "not a name"):
        model.config.name_or_path = name
        with torch.no_grad(), watch(model, [sightline.lse()]) as seen:
            model(**batch.inputs)
        assert seen.tokens is None
        assert seen.labels(seen[0]) == ([str(k) for k in range(LENGTH)],) * 2
    with (
        pytest.raises(ParameterError, match="tokenizer of type str"),
        watch(model, [sightline.lse()], tokenizer="bert"),
    ):
        pass


@pytest.mark.parametrize("beams", [1, 3])
def test_tokens_of_a_generation(words, beams):
    """With beams, entries of the batch change places; the labels follow."""
    model, batch = make_model_and_inputs("Llama", "left")
    with watch(model, [sightline.lse()], tokenizer=words) as seen:
        ids = model.generate(**batch.inputs, max_new_tokens=5, do_sample=False, num_beams=beams)
    last = seen[-1]
    entries = [seen.labels(last, entry) for entry in range(BATCH * beams)]
    assert all(queries == keys[-1:] and len(keys) == LENGTH + 4 for queries, keys in entries)
    for entry, row in enumerate(written(ids[:, :-1])):
        assert row in [keys for _, keys in entries[entry * beams : (entry + 1) * beams]]
    assert seen.labels(seen[0])[1] == written(batch.inputs["input_ids"])[0]


def test_tokens_after_a_cache_that_the_watch_did_not_see(words):
    model, batch = make_model_and_inputs("Llama", "no")
    ids = batch.inputs["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        with watch(model, [sightline.lse()], tokenizer=words) as seen:
            model(ids[:, 8:10], **{CACHE: cache})
            model(ids[:, 10:], **{CACHE: cache})
    positions = [str(k) for k in range(8)]
    assert seen.labels(seen[-1], 2) == (written(ids)[2][10:], positions + written(ids)[2][8:])


def test_tokens_of_encoder_and_decoder(words):
    for name in ("T5", "Whisper"):
        model, batch = make_model_and_inputs(name, "no")
        with torch.no_grad(), watch(model, [sightline.lse()], tokenizer=words) as seen:
            model(**batch.inputs)
        assert set(seen.tokens) == {"encoder", "decoder"}
        decoded = written(batch.inputs["decoder_input_ids"])[1]
        encoded = written(batch.inputs["input_ids"])[1] if name == "T5" else [f"{k / 50:.2f} s" for k in range(10)]
        assert seen.labels(seen.of(kind="cross")[0], 1) == (decoded, encoded)
        own = {call.layer: seen.labels(call, 1)[0] for call in seen.of(kind="self")}
        assert {tuple(labels) for layer, labels in own.items() if "encoder" in layer} == {tuple(encoded)}
        assert {tuple(labels) for layer, labels in own.items() if "decoder" in layer} == {tuple(decoded)}


@pytest.mark.parametrize("layers", [None, ["*encoder_attn*", "*EncDecAttention*"]])
@pytest.mark.parametrize("name", ["T5", "Whisper"])
def test_cross_attention_in_a_generation_has_the_positions_of_its_queries(words, name, layers):
    """Each generated token is a query of its own; without a tokenizer its label is its position."""
    model, batch = make_model_and_inputs(name, "no")
    layers = layers and [one for one in layers if ("Enc" in one) == (name == "T5")]
    for tokenizer in (words, None):
        with watch(model, [sightline.lse()], layers=layers, tokenizer=tokenizer) as seen:
            for _ in range(2):
                ids = generate(model, batch.inputs, 4)
        cross = seen.of(-1, kind="cross")
        starts = [call.query_start for call in cross]
        assert starts == [start for start, _ in enumerate(starts[: len(starts) // 2])] * 2
        labels = [label for call in cross for label in seen.labels(call, 1)[0]]
        tokens = written(ids)[1] if name == "T5" else ["w1", *written(ids)[1]]  # Whisper returns no start token
        half = len(labels) // 2
        assert labels == (tokens[:half] if tokenizer else [str(k) for k in range(half)]) * 2
        audio = [f"{k / 50:.2f} s" for k in range(10)]
        text = written(batch.inputs["input_ids"])[1] if name == "T5" else []
        positions = [str(k) for k in range(LENGTH)]
        assert seen.labels(cross[-1], 1)[1] == (audio if name == "Whisper" else text if tokenizer else positions)


@pytest.mark.soak
def test_a_compiled_model_is_recorded():
    model, batch = make_model_and_inputs("Llama", "no")
    compiled = torch.compile(model, backend="eager")
    compiled(**batch.inputs)
    with torch.no_grad(), watch(compiled, [sightline.lse()]) as seen:
        compiled(**batch.inputs)
    assert [call.layer for call in seen] == [f"model.layers.{k}.self_attn" for k in range(2)]


def test_patches_of_images_are_labelled(words):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    grid = {"patch_size": 4, "image_size": 8}
    config = transformers.Dinov2WithRegistersConfig(**sizes, **grid, num_register_tokens=2)
    model = transformers.Dinov2WithRegistersModel(config).eval()
    with torch.no_grad(), watch(model, [sightline.lse()]) as seen:
        model(pixel_values=torch.randn(2, 3, 4, 8))
    labels = ["class", "register 1", "register 2", "0,0", "0,1"]
    assert seen.labels(seen[0], 1) == (labels, labels)
    text = {**sizes, "vocab_size": VOCABULARY}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=sizes | grid)).eval()
    with torch.no_grad(), watch(model, [sightline.lse()], tokenizer=words) as seen:
        model(torch.arange(6)[None] + 3, torch.randn(1, 3, 8, 8))
    by_layer = {call.layer.split("_")[0]: seen.labels(call)[0] for call in seen}
    assert by_layer == {"vision": list("01234"), "text": written(torch.arange(6)[None] + 3)[0]}


def test_sequences_of_other_lengths_have_no_tokens(words):
    """An image's patches are no tokens, although the model also got token ids."""
    model = make_model("CLIP's text")
    ids = torch.arange(6)[None] + 3
    with torch.no_grad(), watch(model, [sightline.lse()], tokenizer=words) as seen:
        model(ids)
    patches = replace(seen[0], n=9, m=9)
    assert seen.labels(seen[0])[0] == written(ids)[0]
    assert seen.labels(patches) == ([str(k) for k in range(9)],) * 2


@pytest.mark.parametrize("heads", [None, [3, 1]])
@pytest.mark.parametrize(
    "see",
    [[sightline.weights()], [sightline.pooled(4, 4), sightline.top_k(3), sightline.entropy(), sightline.received()]],
    ids=["weights", "pooled"],
)
def test_a_recording_is_saved_as_html(see, heads, tmp_path):
    model, batch = make_model_and_inputs("T5", "right")
    sides = {side: [[f"{side[0]}{k}" for k in range(LENGTH)]] * BATCH for side in ("encoder", "decoder")}
    with torch.no_grad(), watch(model, see, heads=heads, tokens=sides) as seen:
        model(**batch.inputs)
    seen.save_html(tmp_path / "page.html", title="A title")
    page = (tmp_path / "page.html").read_text()
    assert all(text in page for text in (*seen.layers, "e11", "d11", "<title>A title</title>"))


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "BERT", "T5", "Whisper", "ViT"])
def test_the_default_statistics_have_every_weight_of_short_texts(name, tmp_path):
    """The page is the one that `weights()` makes, of a forward pass and of a generation."""
    model, batch = make_model_and_inputs(name, "left" if name == "Llama" else "no")
    runs = [lambda: model(**batch.inputs)]
    if model.can_generate():
        runs.append(lambda: generate(model, batch.inputs, 3))
    for make in runs:
        with torch.no_grad(), watch(model) as seen, watch(model, sightline.weights()) as dense:
            make()
        seen.save_html(tmp_path / "page.html")
        found, expected = explorer.from_seen(seen), explorer.from_seen(dense)
        assert found.notes == expected.notes == ()
        for one, other in zip(found.texts, expected.texts, strict=True):
            for layer, same in zip(one.layers, other.layers, strict=True):
                assert (layer.name, layer.queries, layer.keys, layer.how) == (
                    same.name,
                    same.queries,
                    same.keys,
                    "whole",
                )
                assert_close(layer.cells, same.cells)


def test_the_default_statistics_of_long_texts_in_a_generation(tmp_path):
    """Tokens generated after a prompt of more tokens than cells have exact weights, in the joined cells."""
    model = make_model("Llama")
    ids = torch.arange(100)[None] % (VOCABULARY - 3) + 3
    with torch.no_grad(), watch(model) as seen, watch(model, sightline.weights()) as dense:
        generate(model, {"input_ids": ids}, 29)
    seen.save_html(tmp_path / "page.html")
    for layer, same in zip(*(explorer.from_seen(one).texts[0].layers for one in (seen, dense)), strict=True):
        assert (layer.cells.shape[1:], layer.how, layer.queries) == ((64, 64), "mean", same.queries)
        expected = same.cells.reshape(4, 64, 2, 64, 2).mean((2, 4))
        assert_close(layer.cells[:, 50:], expected[:, 50:])
        assert_close(layer.cells.sum((1, 2)), expected.sum((1, 2)))
        assert_close(layer.received, same.received)
        assert_close(layer.entropy, same.entropy)
        assert_close(layer.looks.weights[:, -1, 0], same.cells[:, -1].max(-1))


def generate(model, inputs, count):
    """Return the ids that the model has got and written after `count` further tokens."""
    given = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    model.generation_config.suppress_tokens = [0, 1, 2]  # special tokens, such as the one that ends a text
    options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "use_cache": True}
    return model.generate(**{**given, **options})


def assert_close(found, expected):
    """Compare two ways of this library to compute weights."""
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-5, atol=1e-6)


def test_attention_outside_of_the_interface():
    """Falcon calls torch's function."""
    config = transformers.FalconConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    model = transformers.FalconModel(config).eval()
    with torch.no_grad(), watch(model, [sightline.weights()]) as seen:
        model(torch.arange(6)[None] + 3)
    assert not seen[0]["weights"].triu(1).any()


def test_layers_that_do_not_exist_are_refused():
    model, batch = make_model_and_inputs("Llama", "no")
    for layers in ([9], "none", [-3]):
        with pytest.raises(ParameterError, match="layer"), watch(model, [sightline.lse()], layers=layers):
            model(**batch.inputs)


def test_a_shared_layer_has_numbered_calls():
    config = transformers.AlbertConfig(
        vocab_size=50,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=16,
        embedding_size=8,
        num_hidden_layers=4,
    )
    model = transformers.AlbertModel(config).eval()
    ids = torch.arange(6)[None] + 3
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(ids, output_attentions=True).attentions
        with watch(model, [sightline.weights()]) as seen:
            model(ids)
            model(ids)
    assert [(call.step, call.call) for call in seen] == [(step, k) for step in range(2) for k in range(4)]
    assert len(seen.layers) == 1
    for k in range(4):
        assert torch.allclose(seen.of(call=k, step=-1)[0]["weights"], eager[k], atol=1e-6)
    assert seen.of(call=-1)[0].name.endswith("attention (call 3)")
    assert [layer.name for layer in explorer.from_seen(seen).texts[0].layers] == [call.name for call in seen.of(step=0)]


def test_a_model_that_switches_to_another_implementation_stays_on_this_library():
    """`generate` of Whisper switches to eager attention for return_token_timestamps=True."""
    model, batch = make_model_and_inputs("Whisper", "no")
    model.generation_config.alignment_heads, model.generation_config.suppress_tokens = [[0, 1], [1, 2]], [0, 1, 2]
    inputs = batch.inputs["input_features"]
    options = {"return_token_timestamps": True, "max_new_tokens": 5, "num_frames": torch.tensor([20] * BATCH)}
    expected = model.generate(inputs, **options)
    model.set_attn_implementation("sdpa")
    original = state(model)
    with torch.no_grad(), watch(model, [sightline.weights()]) as seen:
        found = model.generate(inputs, **options)
    assert state(model) == original
    assert torch.equal(found["sequences"], expected["sequences"])
    assert torch.equal(found["token_timestamps"], expected["token_timestamps"])
    cross = seen.of("model.decoder.layers.1.encoder_attn")
    assert (len(cross), cross[0].kind, cross[0].m) == (5, "cross", 10)
