"""A page keeps its limit for every kind of recording, and says what it leaves out."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sightline.view import explorer
from sightline.view.explorer import fitting, html_page
from sightline.view.explorer.data import Exploration, Links, ShownLayer, Text, top_links
from sightline.view.heatmaps import pooled

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
        cells = np.stack([pooled(head, SIDE) for head in p]).astype(np.float32)
        entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
        entropy, received = entropy.astype(np.float32), p.sum(1)
        looks = Links(*map(np.stack, zip(*(top_links(head, 8) for head in p), strict=True)))
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
