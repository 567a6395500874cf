"""Pictures of formulas: cells against the values, any length, terminals with and without colours, and files."""

import re
import sys

import numpy as np
import pytest

from sightline import alibi, bias, causal, dense, documents, i, j, padding, s, softcap, where, window
from sightline.errors import MissingExtraError, ParameterError, ShapeError
from sightline.view import Picture, heatmap, received_by_key
from sightline.view.heatmaps import pool_cells
from sightline.view.palette import DARK, rgb
from sightline.view.terminal import colour_of, has_true_colour

MASKS = {
    "causal": causal(),
    "window": causal() & window(3),
    "documents": documents(np.repeat(np.arange(29), [3, 5, 4] + [2] * 26)),
    "stripes": (i * j) % 7 == 0,
    "nothing": i < 0,
    "everything": i >= 0,
}


@pytest.mark.parametrize("name", MASKS)
def test_short_masks_are_exact(name):
    mask = MASKS[name]
    picture = mask.show(12)
    assert np.array_equal(picture.cells(12, 12), mask.array(12).astype(float))
    lines = picture.text(colour=False).splitlines()
    drawn = np.array([[cell == "█" for cell in line.split("│")[1][::2]] for line in lines if "│" in line])
    assert np.array_equal(drawn, mask.array(12))
    assert f"{mask.array(12).sum()} of 144 pairs" in lines[0] + lines[1]


@pytest.mark.parametrize("name", MASKS)
def test_cells_of_long_masks_are_empty_full_or_partial(name):
    mask, n = MASKS[name], 64
    cells = mask.show(n).cells(4, 3)  # 16 positions per cell: samples miss some pairs, so bounds must decide
    whole = mask.array(n).reshape(4, 16, 2, 32).mean(axis=(1, 3))
    sure = (cells == 0) | (cells == 1)
    assert np.array_equal(cells[sure], whole[sure])
    if name not in ("stripes", "documents"):
        assert np.array_equal(sure, (whole == 0) | (whole == 1))
    fine = mask.show(n).cells(8, 8)
    assert np.array_equal(fine, mask.array(n).reshape(8, 8, 8, 8).mean(axis=(1, 3)))


def test_a_million_by_a_million():
    picture = (causal() & window(4096) | (j < 100)).show(1_000_000)
    cells = picture.cells(64, 64)
    off_diagonal = np.abs(np.subtract.outer(*[np.arange(len(cells))] * 2)) > 1
    off_diagonal[:, 0] = False
    assert not cells[off_diagonal].any()
    assert cells.diagonal().all()
    assert "1,000,000 queries × 1,000,000 keys" in str(picture)
    assert "999,999" in str(picture)


def test_batches_and_heads():
    mask = padding([3, 5])
    assert mask.show(5, batch=0).cells(5, 5).sum() == 15
    assert mask.show(5, batch=1).cells(5, 5).sum() == 25
    assert "at b = 1" in str(mask.show(5, batch=1))
    with pytest.raises(ShapeError, match="stands for b"):
        mask.show(5, batch=2)
    whole = np.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4) % 5 == 0
    assert np.array_equal(dense(whole).show(4, batch=1, head=2).cells(4, 4), whole[1, 2].astype(float))
    with pytest.raises(ShapeError):
        dense(whole).show(5)
    with pytest.raises(ParameterError):
        mask.show(-1)


def test_scores_show_the_values_they_add(rng):
    added = rng.normal(size=(6, 6))
    added[0, 3] = -np.inf
    cells = bias(added).show(6).cells(6, 6)
    assert np.array_equal(cells, np.where(np.isinf(added), np.nan, added), equal_nan=True)
    picture = alibi(8).show(9, head=1)
    assert np.array_equal(picture.cells(9, 9), -0.25 * np.subtract.outer(np.arange(9), np.arange(9)))
    assert "−2 ░▒▓█ 2" in picture.text(colour=False)
    assert "at h = 1, s = 0" in picture.text(colour=False)
    assert "0 ░▒▓█ 0" in softcap(30.0).show(4).text(colour=False)
    assert "all hidden" in where(i >= 0, -np.inf, s).show(4).text(colour=False)


def test_lines_fit_80_columns_and_pipes_get_no_escapes():
    for picture in (causal().show(8), window(9, 9).show(300, 17), alibi(4).show(1000), causal().show(40)):
        plain, coloured = picture.text(colour=False), picture.text(colour=True)
        assert "\x1b" not in plain
        assert max(map(len, plain.splitlines())) <= 80
        stripped = re.sub("\x1b\\[[0-9;]*m", "", coloured)
        assert "48;2;" in coloured
        assert max(map(len, stripped.splitlines())) <= 80
    assert repr(causal().show(3)) == str(causal().show(3))
    assert "0 queries" in str(causal().show(0))


def test_colours_only_in_a_terminal_with_colours(monkeypatch):
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert has_true_colour()
    assert "\x1b[48;2;" in str(causal().show(4))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_true_colour()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("COLORTERM", "")
    assert not has_true_colour()
    assert colour_of(0.0) == rgb(DARK.weights[0])
    assert colour_of(1.0) == rgb(DARK.weights[-1])


def test_notebooks():
    picture = causal().show(5)
    assert isinstance(picture, Picture)
    assert picture._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ParameterError, match=r"\.png, \.svg, \.pdf"):
        picture.save("picture.bmp")


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = causal().show(5)
    assert "██" in repr(picture)
    assert picture._repr_png_() is None
    for draw in (lambda: picture.save("picture.png"), lambda: received_by_key(np.ones(3))):
        with pytest.raises(MissingExtraError, match=r'pip install "sightline-attention\[plot\]"'):
            draw()


def test_heatmap_annotates_small_matrices(rng):
    weights = np.tril(rng.uniform(size=(4, 4)))
    axis = heatmap(weights, ["the", " ", "4.3 s", "at "], title="four tokens")
    written = [text.get_text() for text in axis.texts]
    assert written.count("0") == 6
    assert len(written) == 16
    assert [label.get_text() for label in axis.get_xticklabels()] == ["the", "␣", "4.3 s", "at␣"]
    assert axis.get_title(loc="left") == "four tokens"
    large = heatmap(rng.uniform(size=(1, 1, 40, 30)), (["q"] * 40, ["k"] * 30))
    assert not large.texts
    assert len(large.get_xticklabels()) == 30


def test_weights_are_pooled_along_both_axes():
    assert np.array_equal(pool_cells(np.arange(12.0).reshape(4, 3), 2), [[1.5, 3.0], [7.5, 9.0]])
