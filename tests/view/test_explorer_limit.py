"""A page keeps its limit for every kind of recording, says what it leaves out, and stores weights as rounded roots."""

import base64
import zlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sightline.view import explorer
from sightline.view.explorer import fitting, html_page, page_parts
from sightline.view.explorer.data import Exploration, Links, ShownLayer, Text, top_links
from sightline.view.heatmaps import pool_cells

N, HEADS, SIDE = 180, 3, 32
PROGRAM = len(html_page.program()) + len(html_page.style())


@pytest.fixture(scope="module")
def recorded():
    """Two layers as a recording has them, and their weights: causal, with heavy first keys."""
    rng, tokens = np.random.default_rng(3), tuple(f"t{i}" for i in range(N))
    logits = 2 * rng.normal(size=(2, HEADS, N, N)) + 4 * (np.arange(N) == 0)
    weights = np.where(np.tri(N, dtype=bool), np.exp(logits), 0)
    weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    layers = []
    for number, p in enumerate(weights):
        cells = np.stack([pool_cells(head, SIDE) for head in p]).astype(np.float32)
        entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
        entropy, received = entropy.astype(np.float32), p.sum(1)
        looks = Links(*top_links(p, 8))
        layers.append(ShownLayer(f"layer.{number}", tokens, tokens, cells, "mean", entropy, received, looks))
    return weights, Exploration("Recorded", (Text("t", tuple(layers)),))


def test_a_smaller_limit_stores_less_and_is_kept(recorded):
    """Each further reduction makes the page smaller, and a page is never larger than its limit."""
    data = recorded[1]
    options = list(fitting.details(8))
    sizes = [fitting.count_bytes(fitting._reduced(data, option)) for option in options]
    assert sizes == sorted(sizes, reverse=True)
    assert [option.count for option in options] == sorted((option.count for option in options), reverse=True)
    for larger, smaller in pairwise(sizes):
        limit = (smaller + larger) / 2 + 200
        assert sizes[-1] < len(explorer.html(fitting.fit(data, limit)).encode()) <= limit
    assert fitting.fit(data, 10_000_000) == data


def test_the_notes_name_what_was_reduced(recorded):
    _, data = recorded
    least = fitting.fit(data, 1000)
    assert "stores none of the 8 heaviest keys of each query, maps of at most 8 × 8 cells" in least.notes[0]
    assert "No page is smaller than this, of 0." in least.notes[1]
    assert least.texts[0].layers[0].looks is None
    middle = fitting.fit(data, PROGRAM + 26_000)
    kept = middle.texts[0].layers[0].looks.weights.shape[-1]
    assert 1 <= kept < 8
    assert f"{kept} of the 8 heaviest keys" in middle.notes[0]
    assert len(middle.notes) == 1


def test_halved_maps_are_means_and_maxima_of_their_pairs(recorded):
    p = recorded[0][0][0]
    for how, function in (("mean", np.mean), ("max", np.max)):
        edges = np.arange(SIDE + 1) * N // SIDE
        spans = list(pairwise(edges))
        cells = np.array([[function(p[a:b, c:d]) for c, d in spans] for a, b in spans])[None]
        half = fitting.halve(cells, N, N, how)
        spans = list(pairwise(edges[::2]))
        assert np.allclose(half[0], [[function(p[a:b, c:d]) for c, d in spans] for a, b in spans], rtol=1e-6)
    assert fitting.halve(cells[:, :31], N, N, "max").shape == (1, 31, SIDE // 2)


@pytest.mark.parametrize("place", [0, 2, 4, 8, -2])
def test_the_page_reads_reduced_data(chromium, recorded, place, tmp_path):
    """Every number that the page writes is within the error that it writes; queries of a key follow from the keys."""
    weights, data = recorded
    option = list(fitting.details(8))[place]
    made = replace(fitting._reduced(data, option), notes=("Told.",))
    chromium.open(explorer.save_html(made, tmp_path / "page.html"))
    p = weights[1][2].astype(np.float64)
    for name, values in (("entropy", data.texts[0].layers[1].entropy[2]), ("received", p.sum(0))):
        numbers = chromium.js(
            f"[...sightline.layers[1].{name}(2)].map((x) => formatNumber(sightline.layers[1].stored.{name}, 2, x))"
        )
        assert_within(numbers, values)
    stored = chromium.js("[3, 90, 179].map((i) => sightline.layers[1].row(2, i, Infinity))")
    for i, row in zip((3, 90, 179), stored, strict=True):
        assert [entry["at"] for entry in row] == np.argsort(-p[i], kind="stable")[: min(option.count, i + 1)].tolist()
        numbers = chromium.js(f"{[e['weight'] for e in row]}.map((x) => sightline.layers[1].formatWeight(2, x))")
        assert_within(numbers, [p[i, entry["at"]] for entry in row])
        hidden = chromium.js(f"sightline.layers[1].weight(2, {i}, 1)")
        assert p[i, 1] <= hidden.get("value", hidden.get("below")) * (1 + 1e-2)
    queries = chromium.js("sightline.layers[1].column(2, 0, Infinity).map(({ at }) => at).sort((a, z) => a - z)")
    order = np.argsort(-p, axis=-1, kind="stable")[:, : option.count]
    assert queries == [i for i in range(N) if 0 in order[i] and p[i, 0] > 0]
    assert chromium.complaints() == []


def assert_within(numbers, values):
    for (number, error), value in zip(numbers, values, strict=True):
        if number.startswith("≤"):
            assert 0 <= value <= float(number[1:].replace("e−", "e-"))
        else:
            assert abs(float(number.replace(",", "")) - value) <= float(error or 0.006 * value)


# -- how weights are stored --------------------------------------------------------------------------------------------


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
    planes = zlib.decompress(base64.b64decode(page_parts.encode_array(array)), -15)
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
