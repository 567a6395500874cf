"""The group "short calls" of `sightline bench`: its calls, their inputs and their checks."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from sightline.cli.bench import short_calls
from sightline.cli.bench.short_calls import (
    KINDS,
    POOL_SIZE,
    SHORT_CALLS,
    Pool,
    ShortCall,
    infer,
    share_of_pool,
    sightline_functions,
    train,
)

SHAPE = (2, 2, 9, 8)
KIND = {kind.name: kind for kind in KINDS}


def test_there_are_nine_kinds_of_eight_shapes():
    assert [len(group.cases) for group in SHORT_CALLS] == [8] * 9
    assert len({group.name for group in SHORT_CALLS}) == 9
    assert {group.group for group in SHORT_CALLS} == {"short calls"}


@pytest.mark.parametrize("name", KIND)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_contenders_are_right(name, dtype):
    """torch's dropout draws its own weights and is not checked."""
    ours, peer = ShortCall(KIND[name], SHAPE, dtype).contenders(2)
    assert ours.share_of_budget() <= 1
    assert (peer.share_of_budget is None) == (name == "training dropout")
    assert peer.share_of_budget is None or peer.share_of_budget() <= 1


@pytest.mark.parametrize("name", KIND)
def test_every_call_gets_other_tensors_with_other_contents(name):
    pool = Pool(ShortCall(KIND[name], SHAPE), 4)
    calls = [pool.next() for _ in range(5)]
    for one, other in pairwise(calls):
        for tensor, next_tensor in zip(one, other, strict=True):
            assert (tensor is None) == (next_tensor is None)
            assert tensor is None or tensor is not next_tensor
        assert not torch.equal(one[0], other[0])
    assert calls[4][0] is calls[0][0]
    if KIND[name].extra:
        assert calls[4][3] is not calls[0][3]
        assert torch.equal(calls[4][3], calls[0][3])


def test_the_longest_text_of_a_batch_is_not_padded():
    for seed in range(20):
        lengths = short_calls._draw_lengths(np.random.default_rng(seed), 4, 9)
        assert lengths.max() == 9
        assert lengths.min() >= 5
    assert short_calls._draw_lengths(np.random.default_rng(0), 3, 1).tolist() == [1, 1, 1]


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


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_result_is_found(name):
    pool = Pool(ShortCall(KIND[name], SHAPE), POOL_SIZE)
    assert not share_of_pool(lambda a: infer(FAULTS[name], a), pool, is_peer=False) <= 1


def test_a_result_for_earlier_contents_is_found():
    pool = Pool(ShortCall(KIND["padding mask"], SHAPE), POOL_SIZE)
    function = remembering(sightline_functions()["padding mask"])
    assert not share_of_pool(lambda a: infer(function, a), pool, is_peer=False) <= 1


def test_a_wrong_gradient_and_another_seed_are_found():
    def wrong_gradient(arguments):
        output, (query, key, value) = train(sightline_functions()["causal"], arguments)
        return output, (query, key * 1.001, value)

    pool = Pool(ShortCall(KIND["training causal"], SHAPE), POOL_SIZE)
    assert not share_of_pool(wrong_gradient, pool, is_peer=False) <= 1

    def another_seed(arguments):
        torch.manual_seed(5)
        return train(sightline_functions()["dropout"], arguments)

    pool = Pool(ShortCall(KIND["training dropout"], SHAPE), POOL_SIZE)
    assert not share_of_pool(another_seed, pool, is_peer=False) <= 1


def test_small_versions_are_small_and_different():
    for group in SHORT_CALLS:
        cases = group.small().cases
        assert len(set(cases)) == len(cases) >= 5
        assert max(np.prod(case.shape) for case in cases) <= 2 * 2 * 20 * 64
    assert replace(SHORT_CALLS[0].cases[0], shape=(9, 9, 999, 8)).small().shape == (2, 2, 20, 8)
