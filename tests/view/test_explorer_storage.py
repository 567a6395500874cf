"""How the explorer page stores weights: levels of the square root, with a bound of the error, and compressed bytes."""

import base64
import zlib

import numpy as np
import pytest

from sightline.view import explorer
from sightline.view.explorer import html_page, page_parts


def from_levels(levels, count, scales):
    """The weights that levels stand for, as the page computes them."""
    return scales[:, None, None] * (levels.astype(np.float64) / count) ** 2


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("count", page_parts.LEVELS[::4])
def test_every_level_keeps_its_bound(count, relative, rng):
    """The bound is s (k + 1/4) / count²; float32 inputs are given, and the levels are read in float64."""
    weights = (rng.random((3, 40, 50)) ** 12).astype(np.float32)
    weights[1] *= np.float32(1e-3)
    weights[2, 3], weights[2, 4, 5] = 0, np.float32(1e-30)
    weights[0, 0, 0] = 1.5
    scales = page_parts.compute_scales(weights, relative=relative)
    levels = page_parts.to_levels(weights, count, scales)
    read = from_levels(levels, count, scales)
    bound = scales[:, None, None].astype(np.float64) * (levels + 0.25) / count**2
    rounding = 4 * np.finfo(np.float32).eps * weights  # the root and the quotient are computed in float32
    assert (abs(read - weights) <= bound + rounding).all()
    assert np.array_equal(read == 0, weights == 0)
    assert scales.tolist() == ([*map(float, weights.max((1, 2)))] if relative else [1.5, 1, 1])
    assert levels.dtype == (np.uint8 if count < 256 else np.uint16)


def test_a_head_of_zeros():
    weights = np.zeros((1, 2, 3), np.float32)
    scales = page_parts.compute_scales(weights, relative=True)
    assert not from_levels(page_parts.to_levels(weights, 255, scales), 255, scales).any()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float16", "float32", "int32"])
def test_packed_bytes_are_the_numbers(dtype, rng):
    array = rng.integers(0, 99, size=(2, 7, 5)).astype(dtype).swapaxes(1, 2)
    planes = zlib.decompress(base64.b64decode(page_parts.pack(array)), -15)
    little = np.dtype(dtype).newbyteorder("<")
    numbers = np.frombuffer(planes, np.uint8).reshape(little.itemsize, -1).T.copy().view(little)
    assert np.array_equal(numbers.reshape(array.shape), array)


def test_the_finest_levels_that_fit_are_chosen(rng):
    """A smaller limit never gives more levels, and the page stays within the limit."""
    n = 160
    weights = rng.dirichlet(np.full(n, 0.1), size=(6, n)).astype(np.float32)
    tokens, program = [str(i) for i in range(n)], len(html_page.program()) + len(html_page.style())
    chosen = []
    for limit in (10_000_000, 500_000 + program, 130_000 + program, 106_000 + program, 60_000 + program):
        data = explorer.from_weights(tokens, weights, limit=limit)
        layer = data.texts[0].layers[0]
        chosen.append(layer.levels if layer.how == "whole" else 0)
        assert len(explorer.html(data)) <= limit
        assert bool(data.notes) == (layer.levels is not None)
    assert chosen[:2] == [None, 65535]
    assert chosen[-1] == 0
    assert 0 < chosen[3] <= chosen[2] <= 255


def test_maps_of_512_tokens_fit_into_ten_megabytes(rng):
    """Four heads out of the 72 of a model with 12 layers of 6 heads, with the share of the limit that they have."""
    n, heads = 512, 4
    logits = rng.normal(size=(heads, n, 1)) + rng.normal(size=(heads, 1, n)) + rng.normal(size=(heads, n, n))
    weights = np.exp(1.5 * logits - 0.3 * abs(np.arange(n)[:, None] - np.arange(n)))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    share = 10_000_000 * heads // 72
    data = explorer.from_weights([str(i) for i in range(n)], weights, limit=share)
    layer = data.texts[0].layers[0]
    assert layer.how == "whole"
    assert layer.cells.shape == (heads, n, n)
    assert sum(map(len, html_page.serialise(data)[1])) <= share
