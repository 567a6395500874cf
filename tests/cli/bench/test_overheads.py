"""The benchmarks of the time around the kernel: their contenders and checks."""

import pytest

pytest.importorskip("torch")

import torch

from sightline.cli.bench.device import Cpu
from sightline.cli.bench.measure import Settings, run
from sightline.cli.bench.overheads import KINDS, OVERHEADS, TRAINING_KINDS, CallOverhead, TrainingOverhead

BY_KIND, TRAINING = OVERHEADS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_calls_with_one_key_are_right(kind):
    contenders = list(CallOverhead(kind).contenders(2))
    assert [contender.name for contender in contenders] == ["sightline", "numpy", "torch"]
    for contender in contenders:
        assert contender.share_of_budget() <= 1


def test_numpy_gets_arrays_and_torch_tensors():
    ours, numpy, peer = CallOverhead(KINDS[2]).contenders(2)
    for contender, array_type in ((ours, "Tensor"), (numpy, "ndarray"), (peer, "Tensor")):
        given = contender.prepared.setup()
        assert {type(array).__name__ for array in given if array is not None} == {array_type}
        result = contender.prepared.call(given)
        assert type(result).__name__ == array_type


@pytest.mark.parametrize("kind", TRAINING_KINDS, ids=lambda kind: kind.name)
def test_training_with_one_key_is_right(kind):
    ours, peer, empty = TrainingOverhead(kind).contenders(2)
    assert ours.share_of_budget() <= 1
    assert peer.share_of_budget() <= 1
    assert empty.share_of_budget is None


def test_the_empty_pair_returns_d_output_for_every_input():
    *_, empty = TrainingOverhead(TRAINING_KINDS[0]).contenders(2)
    arguments = empty.prepared.setup()
    output, gradients = empty.prepared.call(arguments)
    assert output.shape == arguments[0].shape
    assert len(gradients) == 3
    assert all(torch.equal(gradient, arguments[4]) for gradient in gradients)


def test_the_empty_pair_is_timed_and_subtracted():
    finding = run(TRAINING, Settings(Cpu(1), seconds=0.01, quick=True))
    assert (finding.peers, finding.subtracted) == (("torch", "empty"), "empty")
    for case in finding.cases:
        assert case.failed is None
        assert all(case.entry(name) for name in ("sightline", "torch", "empty"))
