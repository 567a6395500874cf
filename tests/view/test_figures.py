"""Figures of weights and statistics show the given values, for 20 tokens and for 100,000."""

import re
from itertools import product

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

import sightline
from sightline import alibi, causal, window
from sightline.data import load
from sightline.errors import DtypeError, MaskError, ParameterError, ShapeError
from sightline.statistics.recording import Seen
from sightline.view import arcs, entropy_by_head, head_grid, heatmap, over_image, received_by_key, save, tile_map
from sightline.view.explorer.data import top_links
from sightline.view.palette import DARK, contrast, rgb
from sightline.view.plotting import new_figure
from sightline.view.styled_figure import dark_colours
from sightline.view.tile_maps import EMPTY, FULL, PARTIAL, tile_kinds
from sightline.view.token_charts import MAX_ARCS, MAX_POSITIONS

MANY = 100_000
SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture
def cat():
    """Weights of twelve heads on twenty tokens, and the tokens; one token is mathematics to matplotlib."""
    data = load("minilm_cat")
    tokens = list(data.tokens[1])
    tokens[3:5] = "$x_1$", "a b\n"
    return data.layers[3].weights[1], tokens


def image(axis):
    return np.asarray(axis.images[0].get_array().filled(0))


def written(labels):
    return [label.get_text() for label in labels]


def test_a_heat_map_of_twenty(cat):
    weights, tokens = cat
    axis = heatmap(weights[1], tokens, title="$5 and $6")
    assert np.array_equal(image(axis), weights[1])
    assert written(axis.get_yticklabels()) == [*tokens[:4], "a b⏎", *tokens[5:]]
    assert not any(label.get_parse_math() for label in [*axis.get_xticklabels(), *axis.get_yticklabels()])
    assert axis.get_title(loc="left") == "$5 and $6"


def test_a_heat_map_with_more_labels_than_fit(rng):
    seconds = [f"{k / 50:.2f} s" for k in range(200)]
    axis = heatmap(rng.random((3, 200)), (["Ġthe", "▁cat", "aĠb"], seconds))
    axis.figure.draw_without_rendering()
    shown = {
        round(float(place)): label.get_text()
        for place, label in zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)
    }
    inside = {place: text for place, text in shown.items() if 0 <= place < 200}
    assert len(inside) > 3
    assert inside == {place: seconds[place] for place in inside}
    assert written(axis.get_yticklabels()) == ["the", "cat", "a␣b"]


def test_weights_over_an_image(rng):
    weights, picture = rng.random((1, 2, 3)), rng.random((20, 30, 3))
    weights = 0.5 + weights / 100  # nearly equal weights use all of the light
    axis = over_image(torch.tensor(weights), torch.tensor(picture)[None], title="head 0")
    shown, shade = (np.asarray(one.get_array()) for one in axis.images)
    assert np.array_equal(shown, picture)
    assert np.allclose((1 - shade[..., 3] / 0.82) ** 2, (weights[0] - weights.min()) / np.ptp(weights))
    assert axis.images[0].get_extent() == axis.images[1].get_extent() == [0, 30, 20, 0]
    assert axis.get_title(loc="left") == "head 0"
    assert not over_image(np.ones((2, 3)), picture[..., 0]).images[1].get_array().any()
    with pytest.raises(ShapeError, match="permute"):
        over_image(weights, picture.transpose(2, 0, 1))
    with pytest.raises(ShapeError, match="unflatten"):
        over_image(weights[0, 0], picture)
    with pytest.raises(DtypeError, match=r"a str to draw(.|\n)*matplotlib\.image\.imread"):
        over_image(weights, "cat.png")
    for draw in (lambda: over_image(-weights, picture), lambda: heatmap(-weights[0]), lambda: head_grid([-weights])):
        with pytest.raises(ParameterError, match="numbers from 0"):
            draw()


def test_heads_over_an_image(rng):
    weights, picture = rng.random((8, 2, 3)), rng.random((20, 30, 3))
    axis = over_image(weights, picture)
    assert len(axis.images) == 16
    for number, shade in enumerate(axis.images[1::2]):
        head = weights[number] - weights[number].min()
        assert np.allclose((1 - shade.get_array()[..., 3] / 0.82) ** 2, head / head.max())
        left, right, bottom, top = shade.get_extent()
        assert axis.images[2 * number].get_extent() == [left, right, bottom, top]
        assert (left, bottom - top, right - left) == pytest.approx((number % 6 * 30 * 1.04, 20, 30))  # six in a row
        assert (top > 20) == (number >= 6)
    assert written(axis.texts) == [f"head {k}: {x.min():.2g} to {x.max():.2g}" for k, x in enumerate(weights)]


def test_a_heat_map_of_a_hundred_thousand(rng):
    rows = rng.random((3, MANY))
    cells = image(heatmap(rows))
    edges = np.arange(513) * MANY // 512
    assert cells.shape == (3, 512)
    assert np.allclose(cells[:, 7], rows[:, edges[7] : edges[8]].mean(1), rtol=MANY * np.finfo(float).eps)
    pooled = rng.random((40, 50))
    axis = heatmap(pooled, shape=(MANY, MANY))
    assert np.array_equal(image(axis), pooled)
    assert axis.get_xlim() == (-0.5, MANY - 0.5)
    assert not axis.texts
    assert "80,000" in written(axis.get_xticklabels())


def test_a_grid_of_heads(cat, rng):
    weights, _ = cat
    axis = head_grid([weights, torch.from_numpy(weights[None, :5])], names=["first", "second"], title="two")
    assert len(axis.images) == 17
    for drawn, head in zip(axis.images, [*weights, *weights[:5]], strict=True):
        assert np.array_equal(drawn.get_array().filled(0), head)
    assert axis.images[12].get_extent()[0] == 0
    assert axis.images[12].get_extent()[3] == 1
    assert written(axis.get_yticklabels()) == ["first", "second"]
    long = rng.random((1, 2, MANY))
    drawn = head_grid(long).images[0].get_array()
    edges = np.arange(65) * MANY // 64
    assert drawn.shape == (2, 64)
    assert np.allclose(drawn[:, 9], long[0, :, edges[9] : edges[10]].mean(1), rtol=MANY * np.finfo(float).eps)


def test_entropy_by_head(rng):
    layers = [rng.random((2, 4, 20)), rng.random((1, 3, MANY))]
    axis = entropy_by_head(layers)
    values = axis.images[0].get_array()
    assert np.allclose(values[0], layers[0].mean((0, 2)), rtol=MANY * np.finfo(float).eps)
    assert np.allclose(values[1, :3], layers[1].mean((0, 2)), rtol=MANY * np.finfo(float).eps)
    assert values.mask[1, 3]
    assert written(axis.texts)[4] == f"{layers[1][0, 0].mean():.2f}"
    assert np.array_equal(entropy_by_head(np.eye(3)).images[0].get_array(), np.eye(3))
    for draw, name in ((entropy_by_head, "entropy"), (head_grid, "weights")):
        with pytest.raises(ShapeError, match=rf'seen\["{name}"\]'):
            draw(Seen())


def test_received_by_key(cat, rng):
    weights, tokens = cat
    received = weights.astype(np.float64).sum(1)
    axis = received_by_key(received, tokens)
    assert np.array_equal([bar.get_height() for bar in axis.patches], received.mean(0))
    assert written(axis.get_xticklabels())[3] == "$x_1$"
    assert not axis.get_xticklabels()[3].get_parse_math()
    many = rng.random(MANY)
    axis = received_by_key(many)
    places, mean = axis.lines[0].get_data()
    assert np.allclose(mean, many.reshape(1000, 100).mean(1), rtol=100 * np.finfo(float).eps)
    assert np.array_equal(places, np.arange(1000) * 100 + 49.5)
    reach = axis.collections[0].get_paths()[0].vertices[:, 1].max()
    assert reach == many.max()


def curves(axis):
    return next(collection for collection in axis.collections if isinstance(collection, LineCollection))


def test_arcs_of_twenty(cat):
    weights, tokens = cat
    best, where = top_links(weights[1], 3)
    axis = arcs(best, where, tokens, least=0.1)
    drawn = curves(axis)
    ends = {(round(float(line[-1, 0])), round(float(line[0, 0]))) for line in drawn.get_segments()}
    expected = {(j, i) for i in range(20) for j in where[i] if weights[1][i, j] >= 0.1 and i != j}
    assert {(min(pair), max(pair)) for pair in ends} == {(min(pair), max(pair)) for pair in expected}
    heaviest = max((weights[1][i, j], i, j) for j, i in expected)
    last = drawn.get_segments()[-1]
    assert sorted(last[[0, -1], 0]) == sorted(heaviest[1:])
    assert (last[len(last) // 2, 1] > 0) == (heaviest[2] < heaviest[1])
    assert drawn.get_colors()[-1][3] == pytest.approx(0.08 + 0.92 * heaviest[0])
    assert written(axis.get_xticklabels())[3] == "$x_1$"


def test_arcs_of_a_hundred_thousand(rng):
    """1,000 queries attend to one distant key; their arcs in one cell add up to the same weight."""
    where = np.arange(MANY)[:, None] * np.ones((1, 2), np.int64)
    where[50_000:51_000, 1] = 100
    weights = np.tile([0.6, 0.0], (MANY, 1))
    weights[50_000:51_000, 1] = 0.4
    drawn = curves(arcs(weights, where))
    _, together = np.unique(np.arange(50_000, 51_000) * MAX_POSITIONS // MANY, return_counts=True)
    _, on_itself = np.unique(np.arange(MANY) * MAX_POSITIONS // MANY, return_counts=True)
    shares = np.sort(0.4 * together) / (0.6 * on_itself.max())
    assert np.allclose(drawn.get_colors()[:, 3], 0.08 + 0.92 * shares)
    assert all(abs(min(line[[0, -1], 0]) - 100) < MANY / MAX_POSITIONS for line in drawn.get_segments())
    everywhere = rng.integers(0, MANY, (MANY, 2))
    assert len(curves(arcs(rng.random((MANY, 2)), everywhere)).get_segments()) <= MAX_ARCS


@pytest.mark.parametrize("mask", [causal() & window(7), sightline.i % 3 == 0, sightline.i < 0])
def test_tile_maps_show_the_tiles_of_the_mask(mask):
    n, block = 40, 8
    whole = mask.array(n)
    share = whole.reshape(5, 8, 5, 8).mean((1, 3))
    kinds = tile_kinds(mask, n, n, block)
    assert np.array_equal(kinds == EMPTY, share == 0)
    assert np.array_equal(kinds == FULL, share == 1)
    axis = tile_map(mask, n, block=block)
    assert np.array_equal(np.asarray(axis.images[0].get_array()), kinds)
    assert f"empty {(share == 0).mean():.1%}" in written(axis.get_legend().get_texts())


def test_tiles_of_a_hundred_thousand():
    axis = tile_map(causal(), MANY)
    kinds = np.asarray(axis.images[0].get_array())
    assert kinds.shape == (391, 391)
    assert np.array_equal(kinds, np.triu(np.zeros((391, 391)), 1) + PARTIAL * np.eye(391) + FULL * np.tri(391, k=-1))
    assert "256 × 256" in axis.get_title(loc="left")
    assert axis.get_xlim() == (-0.5, MANY - 0.5)


def test_tiles_of_an_array_and_of_invalid_masks():
    assert tile_map(np.ones((8, 8), bool), 8).get_title(loc="left").startswith("t[i, j]")
    with pytest.raises(MaskError, match="mask=None"):
        tile_map(None, 8)
    with pytest.raises(ShapeError, match="stands for i"):
        tile_map(np.ones((8, 8), bool), 9)
    with pytest.raises(MaskError):
        tile_map(sightline.i + sightline.j, 8)
    with pytest.raises(ParameterError):
        tile_map(causal(), 0)


def test_files(cat, tmp_path):
    weights, tokens = cat
    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    top = top_links(weights[0], 2)
    drawn = (
        heatmap(weights[0], tokens, axes[0]),
        head_grid(weights, axes[1]),
        entropy_by_head([weights.sum(-1)], axes[2]),
        received_by_key(weights.sum(1), tokens, axes[3]),
        arcs(*top, tokens, axes[4]),
        tile_map(causal(), MANY, None, axes[5]),
    )
    assert all(one is axis for one, axis in zip(drawn, axes, strict=True))
    formulas = causal().show(100_000), alibi(8).show(10), causal().show(0)
    for (ending, start), picture in product(SIGNATURES.items(), (figure, *formulas)):
        assert save(picture, tmp_path / f"all.{ending}").read_bytes().startswith(start)


def test_dark_pictures_have_readable_text_and_leave_the_figure_as_it_is(cat, tmp_path):
    head, tokens = cat[0][0, :6, :6], cat[1][:6]
    figure = new_figure(8, 8)
    axes = figure.subplots(2, 2).ravel()
    cells = heatmap(head, tokens, axes[0]).texts
    tile_map(causal(), 100, axis=axes[1])
    received_by_key(head, tokens, axes[2])
    arcs(*top_links(head, 2), tokens, axes[3])
    texts = [text for text in figure.findobj(Text) if text not in cells]

    def colours():
        grounds = [figure.get_facecolor()] * len(texts) + list(axes[0].images[0].to_rgba(head.ravel()))
        pairs = zip([*texts, *cells], grounds, strict=True)
        return [(rgb(to_hex(text.get_color())), rgb(to_hex(ground))) for text, ground in pairs]

    before = colours()
    with dark_colours(figure):
        assert colours()[0][1] == rgb(DARK.ground)
        assert min(contrast(*pair) for pair in colours()) >= 4.5
    assert colours() == before
    for clear in (False, True):
        assert imread(save(figure, tmp_path / "a.png", dpi=20, dark=True, transparent=clear))[0, 0, 3] == 1 - clear


def test_the_error_of_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "map.png"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=re.escape(f"No space left on device: {str(path)!r}")):
        save(tile_map(causal(), 8), path)
    assert save(causal().show(8), tmp_path / "formula.svg").stat().st_size
    with pytest.raises(FileNotFoundError, match=re.escape(f"os.makedirs({str(tmp_path / 'none')!r})")):
        save(tile_map(causal(), 8), tmp_path / "none" / "map.png")
    with pytest.raises(ParameterError, match="save of a str"):
        save("map.png", tile_map(causal(), 8).figure)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: heatmap(np.ones(3)),
        lambda: heatmap(np.ones((2, 3, 3))),
        lambda: heatmap(np.ones((3, 3)), ["a"]),
        lambda: heatmap(np.ones((3, 2)), ["a", "b", "c"]),
        lambda: head_grid(np.ones((3, 3))),
        lambda: head_grid(np.ones((2, 1, 3, 3)), names=["one"]),
        lambda: entropy_by_head([np.ones(3)]),
        lambda: received_by_key(np.ones((2, 3, 4))),
        lambda: received_by_key(np.ones(3), ["a"]),
        lambda: arcs(np.ones(3), np.ones(3, int)),
        lambda: arcs(np.ones((3, 1)), np.ones((3, 2), int)),
        lambda: arcs(np.ones((3, 1)), np.ones((3, 1), int), ["a"]),
    ],
)
def test_shapes_that_do_not_fit(draw):
    with pytest.raises(ShapeError, match="cure"):
        draw()


def test_the_cures_for_one_head_draw_it():
    matrix = np.full((3, 3), 1 / 3)
    with pytest.raises(ShapeError, match=r"\[array\[None\]\] for one head"):
        head_grid(matrix)
    assert len(head_grid([matrix[None]]).figure.axes) == 1
    query, key, value = np.ones((3, 1, 2, 4, 8), np.float32)
    _, (top,) = sightline.attention(query, key, value, see=[sightline.top_k(1)])
    with pytest.raises(ShapeError, match=r"arcs\(top.weights\[0, head\], top.where\[0, head\], tokens\)"):
        arcs(top, list("abcd"))
    assert arcs(top.weights[0, 1], top.where[0, 1], list("abcd")).figure is not None
