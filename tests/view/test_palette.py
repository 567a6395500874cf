"""The palette: contrasts of text, the order of the weights' colours, and no colour that stands elsewhere."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from sightline.view.explorer.page_parts import style
from sightline.view.palette import LIGHT, THEMES, contrast, dark_twins, interpolate, luminance, rgb, text_on, to_hex

ROOT = Path(__file__).parents[2]
AA_TEXT, AA_GRAPHICS = 4.5, 3.0  # least contrasts of level AA of WCAG 2.2 (1.4.3 and 1.4.11)
COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b(?=[;\"'])|\brgba?\(\d")
ALLOWED = {  # shadows, and the default colour of a canvas
    "src/sightline/view/explorer/page/style.css": {"rgb(0", "rgb(1"},
    "src/sightline/view/explorer/page/vector.js": {"#000"},
}


def test_contrast_as_the_guidelines_define_it():
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    failure = contrast(rgb("#777777"), rgb("#ffffff"))  # a published example of a failure
    assert failure == pytest.approx(4.48, abs=0.005)
    assert (text_on((255, 255, 255)), text_on((0, 0, 0))) == ((0, 0, 0), (255, 255, 255))
    assert to_hex(rgb("#0b1a2c")) == "#0b1a2c"


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_texts_and_lines_are_readable(theme):
    for ground in (theme.ground, theme.raised):
        for name in ("ink", "muted", "blue", "orange"):
            assert contrast(rgb(getattr(theme, name)), rgb(ground)) >= AA_TEXT, name
        assert contrast(rgb(theme.cross), rgb(ground)) >= AA_GRAPHICS


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_lines_of_a_chart_are_readable(theme):
    assert len(set(theme.series)) == len(theme.series)
    for colour in theme.series[:4]:
        assert contrast(rgb(colour), rgb(theme.ground)) >= AA_TEXT


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_weights_are_ordered_by_lightness(theme):
    found = [luminance(interpolate(theme.weights, k / 40)) for k in range(41)]
    ordered = found if theme is not LIGHT else found[::-1]
    assert all(darker < lighter for darker, lighter in pairwise(ordered))
    assert contrast(rgb(theme.weights[0]), rgb(theme.hidden)) > 1.1  # a small weight differs from a hidden pair
    assert contrast(rgb(theme.weights[-1]), rgb(theme.hidden)) > 12


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_signed_colours_are_nearest_to_the_ground_at_zero(theme):
    found = [luminance(rgb(colour)) * (1 if theme is LIGHT else -1) for colour in theme.signed]
    assert all(a < b for a, b in pairwise(found[:4]))
    assert all(a > b for a, b in pairwise(found[3:]))


def test_the_explorer_page_has_the_themes():
    for name, theme in THEMES.items():
        assert f'data-theme="{name}"] {{ --ground: {theme.ground};' in style()
    assert not set(dark_twins()) & set(dark_twins().values())  # so colours that were replaced are not replaced again


def test_colours_stand_in_the_palette_alone():
    folders = {"src/sightline": ("py", "css", "js", "html"), "examples": ("py",), "docs": ("py", "css", "md")}
    found = {}
    for folder, endings in folders.items():
        for path in (path for ending in endings for path in (ROOT / folder).rglob(f"*.{ending}")):
            name = path.relative_to(ROOT).as_posix()
            if name != "src/sightline/view/palette.py" and "_build" not in name:
                found[name] = set(COLOUR.findall(path.read_text(encoding="utf-8"))) - ALLOWED.get(name, set())
    assert {name: colours for name, colours in found.items() if colours} == {}
