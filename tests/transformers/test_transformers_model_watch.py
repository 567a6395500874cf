"""Tests of `sightline.transformers.watch`."""

import pytest
import torch

import sightline
from sightline.errors import ParameterError
from sightline.testing import assert_within_budget

pytest.importorskip("transformers")

import transformers

from sightline.torch import hooks
from sightline.transformers import watch
from tiny_models import BATCH, LENGTH, make_inputs, make_model, run, to_float64


def state(model):
    """Return everything that `watch` changes and must restore."""
    configs = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    counts = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    return configs, counts, dict(hooks._WATCHERS)


@pytest.mark.usefixtures("by_definition")
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_watched_weights_are_those_the_model_returns(name):
    model = make_model(name)
    batch = make_inputs(model, "right")
    eager = run(model, "eager", batch.inputs)
    model64, inputs = to_float64(model, batch.inputs)
    truth = run(model64, "definition", inputs)
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
    model = make_model("Llama")
    batch = make_inputs(model, "left")
    with watch(model, [sightline.lse()]) as seen:
        model.generate(**batch.inputs, max_new_tokens=3, do_sample=False)
    first, *later = seen.of(layer=0)
    assert (first.n, first.m, first.step, first.query_start) == (LENGTH, LENGTH, 0, 0)
    assert [(call.n, call.m, call.step, call.query_start) for call in later] == [
        (1, LENGTH + step, step, LENGTH + step - 1) for step in (1, 2)
    ]
    assert [call.layer for call in seen.of(step=-1)] == list(seen.layers)


def test_a_sliding_cache_records_the_start_of_its_keys():
    model = make_model("Mistral")
    batch = make_inputs(model, "no")
    with watch(model, [sightline.lse()], layers=[0]) as seen:
        model.generate(**batch.inputs, max_new_tokens=3, do_sample=False)
    seen.tokens = [[str(k) for k in range(LENGTH + 2)]] * BATCH
    last = seen[-1]
    assert (last.m, last.key_start, last.query_start) == (5, LENGTH - 3, 4)
    assert seen.labels(last) == ([str(LENGTH + 1)], [str(k) for k in range(LENGTH - 3, LENGTH + 2)])


@pytest.mark.parametrize("name", ["T5", "Whisper"])
def test_encoder_and_decoder_are_distinguished(name):
    model = make_model(name)
    batch = make_inputs(model, "no")
    sides = {"encoder": [["e"] * LENGTH] * BATCH, "decoder": [["d"] * LENGTH] * BATCH}
    with torch.no_grad(), watch(model, [sightline.lse()], tokens=sides) as seen:
        model(**batch.inputs)
    kinds = {(call.kind, "encoder" in call.layer.split(".")) for call in seen}
    assert kinds == {("self", True), ("self", False), ("cross", False)}
    cross = seen.of(kind="cross")[0]
    queries, keys = seen.labels(cross)
    assert (set(queries), keys[0], cross.query_start) == ({"d"}, "e", None)


@pytest.mark.parametrize("before", ["eager", "sdpa", "sightline"])
def test_the_model_is_restored(before):
    model = make_model("Llama")
    batch = make_inputs(model, "no")
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
    model = make_model("Llama")
    batch, original = make_inputs(model, "no"), state(model)
    first, second = watch(model, [sightline.lse()]), watch(model, [sightline.lse()])
    seen = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    with torch.no_grad():
        model(**batch.inputs)
    assert [len(one) for one in seen] == [0, 2]
    second.__exit__(None, None, None)
    assert state(model) == original


def test_recorded_statistics_have_gradients():
    model = make_model("Llama")
    batch = make_inputs(model, "no")
    with watch(model, [sightline.lse()]) as seen:
        model(**batch.inputs)
    sum(lse.sum() for lse in seen["lse"]).backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_layers_and_heads_are_selected():
    model = make_model("Llama")
    batch = make_inputs(model, "no")
    with (
        torch.no_grad(),
        watch(model, [sightline.lse()]) as every,
        watch(model, [sightline.lse()], layers="*.1.*", heads=[-1, 0]) as some,
    ):
        model(**batch.inputs)
    (call,) = some
    assert (call.layer, call.heads) == ("model.layers.1.self_attn", (3, 0))
    assert torch.equal(call["lse"], every["lse"][1][:, [3, 0]])


@pytest.mark.parametrize("heads", [None, [3, 1]])
@pytest.mark.parametrize(
    "see",
    [[sightline.weights()], [sightline.pooled(4, 4), sightline.top_k(3), sightline.entropy(), sightline.received()]],
    ids=["weights", "pooled"],
)
def test_a_recording_is_saved_as_html(see, heads, tmp_path):
    model = make_model("T5")
    batch = make_inputs(model, "right")
    sides = {side: [[f"{side[0]}{k}" for k in range(LENGTH)]] * BATCH for side in ("encoder", "decoder")}
    with torch.no_grad(), watch(model, see, heads=heads, tokens=sides) as seen:
        model(**batch.inputs)
    seen.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(text in page for text in (*seen.layers, "e11", "d11"))


def test_unsupported_models_and_arguments_are_refused():
    with pytest.raises(ParameterError, match="attention interface"), watch(torch.nn.Linear(2, 2), [sightline.lse()]):
        pass
    for family in ("Falcon", "Bloom", "Mpt"):
        config = getattr(transformers, f"{family}Config")(hidden_size=8, d_model=8, num_attention_heads=2, n_layers=1)
        model = getattr(transformers, f"{family}Model")(config)
        with pytest.raises(ParameterError, match="attention interface"), watch(model, [sightline.lse()]):
            pass
    model = make_model("Llama")
    for options in ({"see": []}, {"see": "lse"}, {"layers": [9]}, {"layers": "none"}, {"heads": [0.5]}):
        with pytest.raises(ParameterError), watch(model, **{"see": [sightline.lse()], **options}):
            pass
