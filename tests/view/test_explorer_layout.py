"""The explorer page in a desktop window and on a phone, light and dark; and the weights that it stores rounded."""

import json

import numpy as np
import pytest

from sightline.data import load
from sightline.view import explorer
from sightline.view.explorer import html_page, page_parts
from sightline.view.explorer.data import ShownLayer

DESKTOP, PHONE = (1360, 860), (420, 800)
FINGER = 40  # CSS pixels
PROGRAM = len(html_page.program()) + len(html_page.style())
FEW = (1, 6)  # layers and heads of the page of 512 tokens
# Elements whose content is wider or higher than they are, although they have no scrollbar.
CLIPPED = """[...document.querySelectorAll('.sl *')].filter((node) => {
  const style = getComputedStyle(node), box = node.getBoundingClientRect();
  if (!box.width || style.display === 'inline' || node.closest('select, canvas, dialog')) return false;
  const scrolls = (axis) => ['auto', 'scroll'].includes(style[axis]);
  return (node.scrollWidth > node.clientWidth + 1 && !scrolls('overflowX'))
    || (node.scrollHeight > node.clientHeight + 1 && style.overflowY === 'hidden')
    || box.right > innerWidth + 0.5 || box.left < -0.5;
}).map((node) => [node.className, node.scrollWidth, node.clientWidth, node.scrollHeight, node.clientHeight])"""
SCROLLING = """[...document.querySelectorAll('.sl *')].filter((node) => {
  const style = getComputedStyle(node);
  return ['auto', 'scroll'].includes(style.overflowY) && node.scrollHeight > node.clientHeight + 1;
}).map((node) => node.className)"""
# Small maps with more than one colour.
PAINTED = """(() => { const { grid } = sightline, side = grid.step - grid.gap, copy = document.createElement('canvas');
  Object.assign(copy, { width: grid.canvas.width, height: grid.canvas.height });
  const context = copy.getContext('2d', { willReadFrequently: true });
  context.drawImage(grid.canvas, 0, 0);
  return grid.places.filter((p) => new Set(new Uint32Array(
    context.getImageData(p.x + grid.gap / 2, p.y + grid.gap / 2, side, side).data.buffer)).size > 1).length; })()"""
# The texts that the map draws beside and above its cells.
LABELS = """(() => { const { map } = sightline, found = [];
  const context = map.canvas.getContext('2d'), draw = context.fillText;
  context.fillText = function (text, ...place) { found.push([text, this.font, this.getTransform().b !== 0]);
    return draw.call(this, text, ...place); };
  map.draw(); delete context.fillText; return found; })()"""


@pytest.fixture
def tab(chromium):
    chromium.resize(*DESKTOP)
    chromium.media()
    return chromium


def weights_of(n, layers, heads):
    rng = np.random.default_rng(n)
    distance = abs(np.arange(n)[:, None] - np.arange(n))
    logits = 1.5 * rng.normal(size=(layers, heads, n, n)).astype(np.float32) - 6 * np.tanh(distance / 20)
    weights = np.exp(logits)
    return weights / weights.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of 15, 84 and 512 tokens. The last page has one of 12 layers, and a twelfth of the default limit."""
    words = load("minilm_moby").tokens[0]
    folder = tmp_path_factory.mktemp("pages")
    data = {
        15: explorer.from_weights(words[:15], list(weights_of(15, 6, 12)), title="A trained encoder"),
        84: explorer.from_weights(words[:84], list(weights_of(84, 12, 6)), title="A trained encoder"),
        512: explorer.from_weights((words * 4)[:512], list(weights_of(512, *FEW)), limit=10_000_000 // 12 + PROGRAM),
    }
    return {n: explorer.save_html(made, folder / f"{n}.html") for n, made in data.items()}


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("n", [15, 84, 512])
def test_the_page_fits(tab, pages, n, size, theme):
    tab.media(prefers_color_scheme=theme)
    tab.resize(*size)
    tab.open(pages[n])
    assert tab.js("sightline.root.dataset.theme") == theme
    assert tab.js("document.documentElement.scrollWidth") <= size[0]
    assert tab.js(CLIPPED) == []
    assert tab.js(PAINTED) == (6 if n == 512 else 72)
    whole = tab.js("[sightline.map.space, sightline.map.view, sightline.map.width, sightline.map.left]")
    cell = whole[1]["sx"]
    assert n * cell <= whole[0]["w"] + 1e-6
    scrolling = tab.js(SCROLLING)
    if size == DESKTOP:
        assert tab.js("document.documentElement.scrollHeight") <= size[1]
        assert scrolling == (["sl-strip-scroll"] if n == 512 else [])
        assert max(n * cell / whole[0]["w"], n * cell / whole[0]["h"]) > 0.85  # no dead space on both sides
        assert n < 512 or cell == 1
    else:
        boxes = tab.js(
            "['.sl-grid', '.sl-map', '.sl-text', '.sl-side'].map((name) => "
            "document.querySelector(name).getBoundingClientRect().top)"
        )
        assert boxes == sorted(boxes)
        assert boxes[1] < size[1] / 1.5  # the map begins on the first screen
        assert set(scrolling) <= {"sl-grid-scroll", "sl-strip-scroll"}
        assert tab.js("sightline.grid.step - sightline.grid.gap") >= FINGER
        small = tab.js(
            f"[...document.querySelectorAll('.sl-button, .sl-head select, .sl-search, .sl-entry')].filter((node) => "
            f"node.offsetParent && node.getBoundingClientRect().height < {FINGER}).length"
        )
        assert small == 0
    assert tab.complaints() == []


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_tap_on_a_small_map_selects_the_head(tab, pages, size):
    tab.resize(*size)
    tab.open(pages[15])
    tab.js("sightline.choose({ layer: 0 })")
    x, y = tab.js(
        "(() => { const { grid } = sightline, p = grid.places[8], b = grid.canvas.getBoundingClientRect();"
        "return [b.x + p.x + grid.step / 2, b.y + p.y + grid.step / 2]; })()"
    )
    tab.mouse(x, y, click=True)
    assert tab.js("[sightline.state.layer, sightline.state.head]") == [0, 8]
    tab.js("sightline.choose({ layer: 5, head: 11 })")
    inside = tab.js(
        "(() => { const { grid } = sightline, p = grid.places.at(-1), { scrollTop, clientHeight } = grid.scroller;"
        "return p.y >= scrollTop && p.y + grid.step <= scrollTop + clientHeight + 1; })()"
    )
    assert inside is True


def test_labels_of_the_axes(tab, pages):
    """Tokens where they fit, every second or third token where these fit, positions elsewhere; at least 10 pixels."""
    words = load("minilm_moby").tokens[0]
    for n, size, expected in (
        (15, DESKTOP, words[:15]),
        (15, PHONE, words[:15]),
        (84, DESKTOP, words[:84:3]),
        (84, PHONE, ["0", "20", "40", "60", "80"]),
        (512, DESKTOP, [str(k) for k in range(0, 512, 50)]),
    ):
        tab.resize(*size)
        tab.open(pages[n])
        tab.key("Escape")  # the token that the page opens on is labelled too
        labels = tab.js(LABELS)
        own = [text for text, font, _ in labels if text not in ("entropy", "received", "key →", "query ↓")]
        assert len(own) == 2 * len(expected)
        for text, token in zip(own, 2 * expected, strict=True):
            assert text == token or (text.endswith("…") and len(text) > 5 and token.startswith(text[:-1]))
        assert all(float(font.split("px")[0].split()[-1]) >= 10 for _, font, _ in labels)
        step = tab.js("labelling(sightline.map.view.sx).step * sightline.map.view.sx")
        assert step >= 11.5
    tab.open(pages[512])
    tab.js("sightline.pick({ side: 'query', at: 333 })")
    tab.frame()
    marked = [text for text, _, _ in tab.js(LABELS)]
    assert marked.count((words * 4)[333]) == 2  # the selected token is labelled on both axes


def test_rounded_weights_are_written_with_their_error(tab, pages):
    """Every written interval contains the weight, and the page says how it rounds."""
    weights = weights_of(512, *FEW)[0]
    assert pages[512].stat().st_size <= 10_000_000 // 12 + PROGRAM
    tab.open(pages[512])
    count = tab.js("sightline.layer.pairs.levels")
    assert count in page_parts.LEVELS[1:]
    assert f"a multiple of 1/{count};" in tab.js("document.querySelector('.sl-foot').textContent")
    assert f"roots rounded to 1/{count}" in tab.js("document.querySelector('.sl-scale').textContent")
    pairs = [(i, j) for i in (0, 100, 511) for j in (*range(max(i - 9, 0), min(i + 9, 512)), 0, 300, 511)]
    shown = tab.js(
        f"{json.dumps(pairs)}.map(([i, j]) => sightline.layer.formatWeight(4, sightline.layer.weight(4, i, j).value))"
    )
    kinds = set()
    for (i, j), (number, error) in zip(pairs, shown, strict=True):
        weight = float(weights[4, i, j])
        if number.startswith("≤"):
            assert 0 < weight <= float(number[1:].replace("e−", "e-"))
        else:
            assert abs(float(number) - weight) <= float(error or 0.006 * weight)
        kinds.add("bound" if number.startswith("≤") else "error" if error else "exact")
    assert {"bound", "error"} <= kinds
    entries = tab.js("[...document.querySelectorAll('.sl-entry')].map((node) => node.textContent)")
    assert entries
    assert all("±" in entry or "≤" in entry for entry in entries)


def test_the_page_decompresses_what_python_compresses(tab, pages, rng):
    """Noise is stored, short texts have fixed codes, others their own codes; damaged data raise an error."""
    tab.open(pages[15])
    for array in (
        rng.integers(0, 256, 5000).astype(np.uint8),
        np.zeros(70_000, np.uint8),
        np.array([7], np.uint8),
        (rng.random(50_000) ** 3 * 60).astype(np.uint8),
        rng.normal(size=(3, 999)).astype(np.float32),
        rng.integers(-5, 70_000, 3000).astype(np.int32),
        rng.integers(0, 70_000, 3000).astype(np.uint16),
    ):
        stored = {"at": 0, "type": f"{array.dtype.kind}{array.dtype.itemsize}", "shape": array.shape}
        read = tab.js(f"[...decode({json.dumps(stored)}, () => '{page_parts.encode_array(array)}')]")
        assert np.array_equal(np.array(read, array.dtype), array.ravel())
    packed = page_parts.encode_array((rng.random(50_000) ** 3 * 60).astype(np.uint8))
    stored = {"at": 0, "type": "u1", "shape": [50_000]}
    for damaged in (packed[: len(packed) // 8 * 4], packed[:400] + "AAAA" * 9 + packed[436:], ""):
        message = tab.js(
            f"(() => {{ try {{ decode({json.dumps(stored)}, () => '{damaged}'); return ''; }}"
            "catch (error) { return error.message; } })()"
        )
        assert "damaged" in message or damaged.startswith(packed[:400])


def test_small_maps_are_painted_without_waiting(tab, pages):
    """The maps are there when the page has loaded: without an event, a frame, a timer or an idle moment."""
    never = "window.requestAnimationFrame = window.setTimeout = window.requestIdleCallback = () => 0;"
    script = tab.call("Page.addScriptToEvaluateOnNewDocument", source=never)
    try:
        tab.events.clear()
        tab.call("Page.navigate", url=pages[512].as_uri())
        tab.until(lambda: tab.js("document.readyState === 'complete' && location.href.endsWith('512.html')"))
        assert tab.js(PAINTED) == 6
    finally:
        tab.call("Page.removeScriptToEvaluateOnNewDocument", **script)


def test_pairs_of_the_lists_are_marked(tab, pages):
    tab.open(pages[15])
    tab.mouse(*tab.middle("document.querySelectorAll('.sl-entry')[1]"))
    i, j = tab.js("['i', 'j'].map((side) => Number(document.querySelectorAll('.sl-entry')[1].dataset[side]))")
    assert tab.js("sightline.state.hover") == {"i": i, "j": j}
    assert tab.js("document.querySelector('[data-pair]').dataset.pair") == f"{i} {j}"
    assert tab.complaints() == []


@pytest.mark.soak
def test_512_tokens_of_72_heads(tab, tmp_path):
    """All weights of 12 layers of 6 heads take less than 10 MB, and every small map is painted when the page opens."""
    words = load("minilm_moby").tokens[0]
    data = explorer.from_weights((words * 4)[:512], list(weights_of(512, 12, 6)))
    assert data.texts[0].layers[0].how == "whole"
    path = explorer.save_html(data, tmp_path / "page.html")
    assert path.stat().st_size < 10_000_000
    tab.open(path)
    tab.until(lambda: tab.js(PAINTED) == 72)
    assert tab.js("sightline.map.view.sx") == 1


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_pages_of_one_head_and_of_two_sequences(tab, size, tmp_path):
    queries, keys = list("abcdef"), ["die", "Katze", "saß", "auf", "der", "Matte", "und", "schlief", "ein"]
    weights = weights_of(9, 2, 3)
    tab.resize(*size)
    for name, data in (
        ("one", explorer.from_weights(keys, weights[0, :1])),
        ("two", explorer.from_weights(queries, list(weights[:, :, :6]), keys=keys)),
    ):
        tab.open(explorer.save_html(data, tmp_path / f"{name}.html"))
        assert tab.js("document.documentElement.scrollWidth") <= size[0]
        assert tab.js(CLIPPED) == []
        assert tab.js(SCROLLING) == []
        assert tab.complaints() == []


def test_heads_are_numbered_by_their_numbers_in_the_model(tab, tmp_path):
    """One row of numbers serves layers of the same heads; other layers have a number above each map."""
    rng = np.random.default_rng(5)
    layers = [
        ShownLayer(f"Layer {k}", *(tuple("abcd"),) * 2, *given, heads=heads)
        for k, heads in enumerate([(2, 5), (2, 5), (0, 7)])
        for given in [(rng.random((2, 4, 4), np.float32), "whole", *rng.random((2, 2, 4), np.float32))]
    ]
    drawn = """(() => { const { grid } = sightline, found = [], context = grid.canvas.getContext('2d');
      context.fillText = (text, x, y) => found.push([String(text), x, y]); grid.draw(); delete context.fillText;
      return found.filter(([, x]) => x > grid.left).map(([text, x, y]) =>
        [text, grid.places.findIndex((p) => x > p.x && x < p.x + grid.step && y < p.y + 4 && y > p.y - 13)]); })()"""
    row = "[...document.querySelectorAll('.sl-grid-heads span')].map((node) => [node.textContent, node.className])"
    for shown, numbers, above in (
        (layers[:2] * 5, [["2", ""], ["5", "is-chosen"]], []),
        (layers[1:] * 5, [], [[name, place] for place, name in enumerate(["2", "5", "0", "7"] * 5)]),
    ):
        data = explorer.Exploration("Numbers", (explorer.Text("t", tuple(shown)),))
        tab.open(explorer.save_html(data, tmp_path / "page.html"))
        tab.js("sightline.choose({ layer: 0, head: 1 })")
        assert tab.js(row) == numbers
        assert tab.js(drawn) == above


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_bars_end_before_the_numbers(tab, pages, size):
    tab.resize(*size)
    tab.open(pages[512])
    for lists in ("sightline.panel.show(0)", "sightline.panel.show(100)"):
        tab.js(lists)
        gaps = tab.js(
            "[...document.querySelectorAll('.sl-entry')].map((node) => ['.sl-entry-value', '.sl-bar'].map((name) => "
            "node.querySelector(name).getBoundingClientRect())).map(([value, bar]) => value.left - bar.right)"
        )
        assert min(gaps) >= 4
        widths = "map((node) => node.scrollWidth - node.clientWidth)"
        assert max(tab.js(f"[...document.querySelectorAll('.sl-entry-value')].{widths}")) <= 1
