"""The output has the order of query in memory: all heads of a position side by side, or one head after another."""

import numpy as np
import pytest
import torch

import sightline
from sample_calls import bits
from sightline import i, j

LENGTHS = {"forward": (70, 70), "decode": (3, 300), "one query": (1, 300)}


def make(rng, heads_in_rows, positions, heads, width):
    rows = rng.standard_normal((2, positions, heads, width), np.float32)
    return rows.swapaxes(1, 2) if heads_in_rows else np.ascontiguousarray(rows.swapaxes(1, 2))


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads_in_rows", [False, True])
@pytest.mark.parametrize("kernel", LENGTHS)
def test_output_has_the_order_of_query(rng, kernel, heads_in_rows, masked, is_tensor):
    n, m = LENGTHS[kernel]
    arrays = [make(rng, heads_in_rows, n, 4, 32), make(rng, False, m, 2, 32), make(rng, False, m, 2, 16)]
    options = {"mask": j <= i + (m - n)} if masked else {}
    expected = bits(sightline.attention(*map(np.ascontiguousarray, arrays), **options))
    if is_tensor:
        arrays = [torch.from_numpy(array) for array in arrays]
    for _ in range(9):  # the full dispatch, then a bound call, and at last generated code alone
        output = sightline.attention(*arrays, **options)
        assert bits(output) == expected
        by_position = output.swapaxes(1, 2)
        is_contiguous = by_position.is_contiguous() if is_tensor else by_position.flags.c_contiguous
        assert is_contiguous == (heads_in_rows or n == 1)


def test_lengths_of_one_family(rng):
    """A call that is bound for other lengths has strides of its own."""
    for n in (80, 70, 90):
        arrays = [make(rng, True, n, 4, 32) for _ in range(3)]
        expected = bits(sightline.attention(*map(np.ascontiguousarray, arrays)))
        for _ in range(3):
            output = sightline.attention(*arrays)
            assert bits(output) == expected
            assert output.swapaxes(1, 2).flags.c_contiguous


@pytest.mark.parametrize("kernel", ["cpu", "streaming"])
def test_compiled_output_has_the_order_of_query(rng, kernel):
    query = torch.from_numpy(make(rng, True, 70, 4, 32))
    compiled = torch.compile(lambda x: sightline.attention(x, x, x, kernel=kernel), backend="aot_eager", fullgraph=True)
    output = compiled(query)
    assert output.transpose(1, 2).is_contiguous()
    assert bits(output) == bits(sightline.attention(query, query, query, kernel=kernel))
