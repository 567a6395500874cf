"""The short calls of `python -m benchmarks`: their inputs and their checks."""

from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("torch")

import torch

from benchmarks.core import Call
from benchmarks.short_calls import KINDS, Pool, set_seed, short_call, sightline_functions

SHAPE = (2, 2, 9, 8)


def share_of(problem, contender, inputs):
    changed = replace(problem, **contender.changes)
    return changed.error(contender.prepare(changed, inputs, 2), inputs)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_both_contenders_are_right(kind):
    """torch's dropout draws its own weights and is not checked."""
    problem = short_call(kind, SHAPE)
    inputs = problem.inputs()
    ours, peer = problem.contenders
    assert share_of(problem, ours, inputs) <= 1
    assert problem.dropout or share_of(problem, peer, inputs) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_gets_other_tensors_with_other_contents(kind):
    pool = Pool(short_call(kind, SHAPE), 4)
    calls = [pool.next() for _ in range(5)]
    for one, other in pairwise(calls):
        for tensor, next_tensor in zip(one, other, strict=True):
            assert (tensor is None) == (next_tensor is None)
            assert tensor is None or tensor is not next_tensor
        assert not torch.equal(one[0], other[0])
    assert calls[4][0] is calls[0][0]
    if "padding" in kind or kind == "bias":
        assert calls[4][4] is not calls[0][4]
        assert torch.equal(calls[4][4], calls[0][4])


def test_lengths_are_from_half_of_the_longest_text_which_is_not_padded():
    for tensors in Pool(short_call("padding formula", (4, 1, 9, 8))).tensors:
        assert tensors[4].max() == 9
        assert tensors[4].min() >= 5
    assert [tensors[4].tolist() for tensors in Pool(short_call("padding formula", (3, 1, 1, 8)), 1).tensors] == [
        [1] * 3
    ]


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


def share_of_call(kind, function, change=lambda result: result):
    """Return the share of the budget that a function uses as the contender of a short call."""
    problem = short_call(kind, SHAPE)
    inputs = problem.inputs()
    name = kind.removeprefix("training ")
    prepared = problem.contenders[0].prepare.func(problem, inputs, 2, lambda: {name: function})
    return problem.error(Call(lambda given: change(prepared.run(given)), setup=prepared.setup), inputs)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_wrong_result_is_found(kind):
    assert not share_of_call(kind, FAULTS[kind]) <= 1


def test_a_result_for_earlier_contents_is_found():
    assert not share_of_call("padding mask", remembering(sightline_functions()["padding mask"])) <= 1


def test_a_wrong_gradient_and_another_seed_are_found():
    def wrong_gradient(result):
        output, (query, key, value) = result
        return output, (query, key * 1.001, value)

    def another_seed(*arguments):
        set_seed(5)
        return sightline_functions()["dropout"](*arguments)

    assert not share_of_call("training causal", sightline_functions()["causal"], wrong_gradient) <= 1
    assert not share_of_call("training dropout", another_seed) <= 1


def test_small_versions_are_small():
    small = short_call("plain", (9, 9, 999, 8)).small()
    assert (small.extent, small.d_k) == ((2, 2, 20, 20), 8)
