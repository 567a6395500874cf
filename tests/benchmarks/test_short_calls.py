"""The group "short calls" of `python -m benchmarks`: its calls, their inputs and their checks."""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from benchmarks.cases import TimedCall
from benchmarks.device import CpuDevice
from benchmarks.measure import Settings, run
from benchmarks.short_calls import (
    KINDS,
    OVERHEADS,
    SHORT_CALLS,
    InputPool,
    ShortCall,
    draw_lengths,
    infer,
    sightline_functions,
    train,
)

SHAPE = (2, 2, 9, 8)
BY_KIND, TRAINING = OVERHEADS


def share_of(case, contender, inputs):
    """Return the share of the budget that a contender uses; None if it is not checked."""
    reference = contender.reference(case)
    return None if reference is None else reference.share_of_budget(contender.prepare(case, inputs, 2), inputs)


def test_there_are_nine_kinds_of_eight_shapes():
    assert [len(group.cases) for group in SHORT_CALLS] == [8] * 9
    assert len({group.name for group in SHORT_CALLS}) == 9
    assert {group.group for group in SHORT_CALLS} == {"short calls"}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_contenders_are_right(name, dtype):
    """torch's dropout draws its own weights and is not checked."""
    case = ShortCall.of(name, SHAPE, dtype=dtype)
    inputs = case.make_inputs()
    ours, peer = (share_of(case, contender, inputs) for contender in case.contenders)
    assert ours <= 1
    assert (peer is None) == (name == "training dropout")
    assert peer is None or peer <= 1


@pytest.mark.parametrize("group", OVERHEADS, ids=lambda group: group.name)
def test_overheads_are_right(group):
    names = {"overhead by kind": ["sightline", "numpy", "torch"], "overhead training": ["sightline", "torch", "empty"]}
    for case in group.cases:
        assert case.small() == case
        assert [contender.name for contender in case.contenders] == names[group.name]
        inputs = case.make_inputs()
        shares = {contender.name: share_of(case, contender, inputs) for contender in case.contenders}
        assert shares.pop("empty", None) is None
        assert max(shares.values()) <= 1


def test_numpy_gets_arrays_and_torch_tensors():
    case = BY_KIND.cases[2]
    inputs = case.make_inputs()
    for contender, array_type in zip(case.contenders, ("Tensor", "ndarray", "Tensor"), strict=True):
        prepared = contender.prepare(case, inputs, 2)
        given = prepared.setup()
        assert {type(array).__name__ for array in given if array is not None} == {array_type}
        assert type(prepared.call(given)).__name__ == array_type


def test_the_empty_pair_returns_d_output_for_every_input():
    case = TRAINING.cases[0]
    prepared = case.contenders[-1].prepare(case, case.make_inputs(), 2)
    arguments = prepared.setup()
    output, gradients = prepared.call(arguments)
    assert output.shape == arguments[0].shape
    assert len(gradients) == 3
    assert all(torch.equal(gradient, arguments[4]) for gradient in gradients)


def test_the_empty_pair_is_timed():
    finding = run(TRAINING, Settings(CpuDevice(1), seconds=0.01, quick=True))
    assert (finding.peers, finding.beside) == (("torch", "empty"), "empty")
    for row in finding.rows:
        assert row.failed is None
        assert all(row.entry(name) for name in ("sightline", "torch", "empty"))


@pytest.mark.parametrize("name", KINDS)
def test_every_call_gets_other_tensors_with_other_contents(name):
    pool = InputPool(ShortCall.of(name, SHAPE), 4)
    calls = [pool.next() for _ in range(5)]
    for one, other in pairwise(calls):
        for tensor, next_tensor in zip(one, other, strict=True):
            assert (tensor is None) == (next_tensor is None)
            assert tensor is None or tensor is not next_tensor
        assert not torch.equal(one[0], other[0])
    assert calls[4][0] is calls[0][0]
    if "padding" in name or name == "bias":
        assert calls[4][3] is not calls[0][3]
        assert torch.equal(calls[4][3], calls[0][3])


def test_the_longest_text_of_a_batch_is_not_padded():
    for seed in range(20):
        lengths = draw_lengths(np.random.default_rng(seed), 4, 9)
        assert lengths.max() == 9
        assert lengths.min() >= 5
    assert draw_lengths(np.random.default_rng(0), 3, 1).tolist() == [1, 1, 1]


def remembering(function):
    """Return a faulty function that returns the result of its first call to every caller."""
    results = []

    def faulty(*arguments):
        results.append(results[0] if results else function(*arguments))
        return results[-1]

    return faulty


FAULTS = {
    "causal": lambda query, key, value, _: torch.nn.functional.scaled_dot_product_attention(query, key, value),
    "padding mask": lambda query, key, value, mask: torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask[:1]
    ),
    "entropy": lambda query, key, value, _: (
        torch.nn.functional.scaled_dot_product_attention(query, key, value),
        (torch.zeros(query.shape[:3]),),
    ),
}


def share_of_call(name, call):
    """Return the share of the budget that a call of a short call's pool uses."""
    case = ShortCall.of(name, SHAPE)
    inputs = case.make_inputs()
    return case.share_of_budget(TimedCall(call, setup=inputs.next), inputs)


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_result_is_found(name):
    assert not share_of_call(name, lambda arguments: infer(FAULTS[name], arguments)) <= 1


def test_a_result_for_earlier_contents_is_found():
    function = remembering(sightline_functions()["padding mask"])
    assert not share_of_call("padding mask", lambda arguments: infer(function, arguments)) <= 1


def test_a_wrong_gradient_and_another_seed_are_found():
    def wrong_gradient(arguments):
        output, (query, key, value) = train(sightline_functions()["causal"], arguments)
        return output, (query, key * 1.001, value)

    def another_seed(arguments):
        torch.manual_seed(5)
        return train(sightline_functions()["dropout"], arguments)

    assert not share_of_call("training causal", wrong_gradient) <= 1
    assert not share_of_call("training dropout", another_seed) <= 1


def test_small_versions_are_small_and_different():
    for group in SHORT_CALLS:
        cases = group.small().cases
        assert len(set(cases)) == len(cases) >= 5
        assert max(np.prod([case.B, case.H, case.n, case.d_k]) for case in cases) <= 2 * 2 * 20 * 64
    small = ShortCall.of("plain", (9, 9, 999, 8)).small()
    assert (small.name, small.extent, small.d_k) == ("2 × 2 × 20 × 8", (2, 2, 20, 20), 8)
