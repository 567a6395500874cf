"""The models of `python -m benchmarks`: their batches, contenders and checks."""

from contextlib import contextmanager
from itertools import pairwise

import pytest

pytest.importorskip("transformers")

import torch

import sightline
from benchmarks import models
from benchmarks.models import MODELS, Encoding

CASES = [case.small() for case in MODELS]


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_contender_is_right(case):
    inputs = case.inputs()
    is_padded_encoder = isinstance(case, Encoding) and len(case.lengths) > 1
    names = ["Sightline", "watched", "sdpa", *["unpadded"] * is_padded_encoder]
    assert [contender.name for contender in case.contenders] == names
    for contender in case.contenders:
        call = contender.prepare(case, inputs, 2)
        call.run(call.setup())
        assert case.error(call, inputs) <= 1
        call.close()


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
    inputs = CASES[1].inputs()
    call = CASES[1].contenders[0].prepare(CASES[1], inputs, 1)
    batches = [call.setup() for _ in range(len(inputs) + 1)]
    assert not torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])
    for name in batches[0]:
        assert batches[0][name] is not batches[-1][name]
        assert torch.equal(batches[0][name], batches[-1][name])


@pytest.fixture
def wrong(monkeypatch):
    """Return a function of (case, change) that returns the error of Sightline after a change of its model."""

    def error_after(case, change):
        made, copy = [], models.copy_with_attention
        monkeypatch.setattr(models, "copy_with_attention", lambda *given: made.append(copy(*given)) or made[-1])
        inputs = case.inputs()
        call = case.contenders[0].prepare(case, inputs, 1)
        change(made[0])
        return case.error(call, inputs)

    return error_after


@pytest.mark.parametrize("case", [CASES[1], CASES[-2]], ids=lambda case: case.name)
def test_other_weights_are_found(case, wrong):
    assert not wrong(case, lambda model: next(model.parameters()).data.mul_(1.001)) <= 1


def test_a_mask_that_is_not_applied_is_found(wrong):
    def change(model):
        forward = model.forward
        model.forward = lambda attention_mask, **given: forward(**given)

    assert not wrong(CASES[1], change) <= 1


def test_a_wrong_gradient_is_found(wrong):
    def change(model):
        model.model.layers[0].self_attn.q_proj.weight.register_hook(lambda gradient: gradient * 1.001)

    assert not wrong(CASES[-1], change) <= 1


def test_a_watched_model_records_one_call_of_each_layer(monkeypatch):
    recordings, watch = [], sightline.watch

    @contextmanager
    def remember(*given, **options):
        with watch(*given, **options) as seen:
            recordings.append(seen)
            yield seen

    monkeypatch.setattr(sightline, "watch", remember)
    call = CASES[0].contenders[1].prepare(CASES[0], CASES[0].inputs(), 1)
    for _ in range(2):
        call.run(call.setup())
        assert len(recordings[0]["entropy"]) == models.make_encoder().config.num_hidden_layers
    call.close()
