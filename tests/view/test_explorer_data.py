"""The data of the explorer page: from dense weights and from recordings of models; and files that load nothing."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from sightline.errors import DtypeError, MissingExtraError, ParameterError, ShapeError
from sightline.view import explorer
from sightline.view.explorer import html_page
from sightline.view.explorer.data import top_links

HOSTILE = "</script><script>window.hacked=1</script>"


def test_one_file_that_loads_nothing():
    text = explorer.html(explorer.from_weights([HOSTILE, "b"], np.full((1, 2, 2), 0.5), title=HOSTILE))
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text))
    assert addresses == {"http://www.w3.org"}  # the SVG namespace, which is not loaded
    assert "default-src 'none'" in text
    assert text.count("<script") == text.count("</script>")
    assert HOSTILE not in text


def test_weights_too_large_for_the_limit_are_pooled(rng):
    n, limit = 300, 60_000 + len(html_page.program()) + len(html_page.style())
    weights = rng.dirichlet(np.ones(n), size=(2, n)).astype(np.float32)
    tokens = [str(i) for i in range(n)]
    data = explorer.from_weights(tokens, weights, limit=limit)
    layer = data.texts[0].layers[0]
    assert "shows means" in data.notes[0]
    assert len(explorer.html(data)) <= limit
    order = np.argsort(-weights, axis=-1, kind="stable")[..., : layer.looks.where.shape[-1]]
    assert np.array_equal(layer.looks.where, order)
    assert np.array_equal(layer.looks.weights, np.take_along_axis(weights, order, -1))
    turned = np.argsort(-weights.swapaxes(1, 2), axis=-1, kind="stable")[..., : layer.seen_by.where.shape[-1]]
    assert np.array_equal(layer.seen_by.where, turned)
    rows = layer.cells.shape[1]
    edges = np.arange(rows + 1) * n // rows
    first = weights[0, edges[1] : edges[2], edges[3] : edges[4]].mean()
    assert layer.cells[0, 1, 3] == pytest.approx(first, rel=float(np.finfo(np.float16).eps))
    assert layer.levels == 255
    whole = explorer.from_weights(tokens, weights.astype(np.float16))
    assert whole.texts[0].layers[0].levels is None
    assert whole.texts[0].layers[0].cells.dtype == np.float16
    assert np.array_equal(whole.texts[0].layers[0].cells, weights.astype(np.float16))


def test_ties_and_zeros_of_links():
    weights, where = top_links(np.array([[0.25, 0.5, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]]), 3)
    assert where.tolist() == [[1, 0, 2], [-1, -1, -1]]
    assert weights.tolist() == [[0.5, 0.25, 0.25], [0, 0, 0]]


ONE = np.ones((1, 1, 1))


@pytest.mark.parametrize(
    ("tokens", "weights", "options", "error", "message"),
    [
        (list("abc"), np.ones((3, 3)), {}, ShapeError, "allowed"),
        (list("abcd"), np.ones((1, 3, 3)), {}, ShapeError, "allowed"),
        ([["a"], ["b"]], ONE, {}, ShapeError, "allowed"),
        ([["a"], []], np.ones((2, 1, 1, 1)), {}, ShapeError, "cure"),
        (["a"], None, {}, ShapeError, "cure"),
        (["a"], np.full((1, 1, 1), "x"), {}, DtypeError, "cure"),
        (["a"], ONE * 1j, {}, DtypeError, "cure"),
        (["a"], -ONE, {}, ParameterError, "cure"),
        (None, ONE, {}, ParameterError, "cure"),
        ([7], ONE, {}, ParameterError, "cure"),
        (["a"], ONE, {"names": ["x", "y"]}, ParameterError, "2 names for 1"),
        (["a"], ONE, {"limit": 0}, ParameterError, "limit=0"),
        *((["a"], ONE, {"limit": limit}, ParameterError, "numbers ≥ 1") for limit in (None, "1", float("nan"))),
    ],
)
def test_invalid_texts_weights_and_options(tokens, weights, options, error, message):
    with pytest.raises(error, match=message):
        explorer.from_weights(tokens, weights, **options)


def test_the_cure_for_one_head_makes_a_page():
    weights = np.full((3, 3), 1 / 3)
    with pytest.raises(ShapeError, match=r"\[array\[None\]\] for one head"):
        explorer.from_weights([list("abc")], weights)
    assert explorer.from_weights([list("abc")], [weights[None]]).texts[0].layers[0].queries == ("a", "b", "c")


@pytest.mark.parametrize("given", [None, np.ones((1, 1, 1))])
def test_invalid_explorations(given):
    with pytest.raises(ParameterError, match="from_weights"):
        explorer.html(given)


@pytest.mark.parametrize("place", ["missing/page.html", "", "a\0b", "x" * 300, None, "full.html"])
def test_a_path_that_cannot_be_written(place, tmp_path):
    (tmp_path / "full.html").symlink_to("/dev/full")
    message = r"full\.html': .*No space left on device" if place == "full.html" else "a folder that exists"
    with pytest.raises(ParameterError, match=message):
        explorer.save_html(explorer.from_weights(["a"], ONE), None if place is None else tmp_path / place)


def test_titles_name_the_model_and_a_text_of_words():
    for tokens, title in ((["[CLS]", "the"], "Attention: “the”"), (["class", "0,0"], "Attention")):
        assert explorer.from_weights(tokens, np.ones((1, 2, 2))).title == title


def test_lone_surrogates_are_written(tmp_path):
    """Names of folders that are not valid text contain lone surrogates."""
    data = explorer.from_weights(["\ud800"], np.ones((1, 1, 1)), title="\udc80")
    assert "<title>?</title>" in explorer.save_html(data, tmp_path / "page.html").read_text(encoding="utf-8")


def call(layer, results, n, m, start=0, key_start=0, kind="self", **statistics):
    """A call as `watch` records it."""
    named = tuple(SimpleNamespace(name=name, how=statistics.get(name, "sum")) for name in results)

    class Call(SimpleNamespace):
        def __getitem__(self, name):
            return results[name]

    given = {"statistics": named, "results": tuple(results.values()), "heads": (2, 5), "key_start": key_start}
    return Call(layer=layer, name=layer, n=n, m=m, query_start=start, kind=kind, **given)


def recording_of(calls, tokens):
    def labels(one, entry):
        listed = tokens[entry] + [""] * one.m
        first = one.key_start + one.query_start
        return listed[first : first + one.n], listed[one.key_start : one.key_start + one.m]

    layers = tuple(dict.fromkeys(one.layer for one in calls))
    return SimpleNamespace(calls=calls, layers=layers, labels=labels, model="M")


def test_seen_weights_with_padding_and_steps_of_generation(rng):
    prompt, step = rng.random((2, 2, 3, 3)).astype(np.float32), rng.random((2, 2, 1, 4)).astype(np.float32)
    calls = [
        call("model.layers.7.self_attn", {"weights": prompt * 0}, 3, 3),
        call("model.layers.7.self_attn", {"weights": prompt}, 3, 3),
        call("model.layers.7.self_attn", {"weights": step}, 1, 4, start=3),
    ]
    data = explorer.from_seen(recording_of(calls, [["a", "b", "c", "d"], ["e", "f"]]))
    first, second = (text.layers[0] for text in data.texts)
    assert first.queries == first.keys == ("a", "b", "c", "d")
    assert second.queries == second.keys == ("e", "f")
    assert np.array_equal(first.cells[:, :3, :3], prompt[0])
    assert np.array_equal(first.cells[:, 3:], step[0])
    assert not first.cells[:, :3, 3].any()
    assert np.array_equal(second.cells, prompt[1, :, :2, :2])
    manifest, _ = html_page.serialise(data)
    assert manifest["texts"][0]["layers"][0]["short"] == "7"
    assert manifest["texts"][0]["layers"][0]["heads"] == (2, 5)


def test_recordings_without_weights(rng):
    p = rng.dirichlet(np.ones(6), size=(1, 2, 6)).astype(np.float32)
    order = np.argsort(-p, axis=-1)[..., :2]
    results = {
        "pooled": p.reshape(1, 2, 3, 2, 3, 2).max((3, 5)),
        "top_k": (np.take_along_axis(p, order, -1), order),
        "entropy": -(p * np.log(p)).sum(-1),
        "received": p.sum(-2),
    }
    seen = recording_of([call("layer.0", results, 6, 6, pooled="max", received="sum")], [["ab", "cd", *"efgh"]])
    data = explorer.from_seen(seen)
    layer = data.texts[0].layers[0]
    assert (layer.how, data.title) == ("max", "M: “ab cd e f g h”")
    assert np.array_equal(layer.looks.where, order[0])
    assert layer.seen_by is layer.levels is layer.sum_levels is layer.looks.levels is None
    del results["entropy"]
    with pytest.raises(ParameterError, match="missing entropy"):
        explorer.from_seen(recording_of([call("layer.0", results, 6, 6)], [list("abcdef")]))
    with pytest.raises(ParameterError, match="nothing was recorded"):
        explorer.from_seen(recording_of([], []))


def overview(p, side, k=2):
    """The results of `sightline.OVERVIEW` for weights (B, H, n, m), in cells of equal size."""
    rows, columns = (min(side, length) for length in p.shape[-2:])
    order = np.argsort(-p, axis=-1)[..., :k]
    cells = p.reshape(*p.shape[:2], rows, p.shape[2] // rows, columns, p.shape[3] // columns).mean((3, 5))
    links = np.take_along_axis(p, order, -1), order
    return {"pooled": cells, "top_k": links, "entropy": -(p * np.log(p)).sum(-1), "received": p.sum(-2)}


def test_cells_of_single_pairs_are_all_weights(rng):
    """A prompt with one cell per pair, and a step of one query with fewer cells: its keys receive its weights."""
    prompt, step = (rng.dirichlet(np.ones(m), size=(1, 2, n)).astype(np.float32) for n, m in ((4, 4), (1, 6)))
    parts = [(prompt, 4, 4, 0), (step, 1, 6, 4)]
    kinds = {"pooled": "mean", "received": "sum"}
    pages = [
        explorer.from_seen(
            recording_of([call("a.0", make(p), n, m, start, **kinds) for p, n, m, start in parts], [list("abcdef")])
        )
        for make in (lambda p: overview(p, 4 if p.shape[-2] == 4 else 3), lambda p: {"weights": p})
    ]
    found, expected = (page.texts[0].layers[0] for page in pages)
    assert (found.how, found.looks, pages[0].notes) == ("whole", None, ())
    assert np.array_equal(found.cells, expected.cells)
    assert (found.queries, found.keys) == (expected.queries, expected.keys)


def test_pooled_steps_of_a_generation_are_joined(rng):
    """A prompt of pooled cells, a step of one query, and three queries on a cache without the first four keys."""
    p = np.tril(rng.random((1, 2, 12, 12))) + 1e-9
    p[..., 9:, :4] = 0
    p /= p.sum(-1, keepdims=True)
    parts = [(p[..., :8, :8], 8, 8, 0), (p[..., 8:9, :9], 1, 9, 8), (p[..., 9:, 4:], 3, 8, 5, 4)]
    kinds = {"pooled": "mean", "received": "sum"}
    results = [overview(part, side) for (part, *_), side in zip(parts, (4, 3, 4), strict=True)]
    calls = [call("a.0", of, *sizes, **kinds) for of, (_, *sizes) in zip(results, parts, strict=True)]
    earlier = call("a.0", overview(p[..., :8, :8] * 0 + 1, 4), 8, 8, **kinds)
    layer = explorer.from_seen(recording_of([earlier, *calls], [list("abcdefghijkl")])).texts[0].layers[0]
    whole = np.zeros((2, 12, 12))  # the weights, as far as cells tell them apart
    whole[:, :8, :8] = results[0]["pooled"][0].repeat(2, 1).repeat(2, 2)
    whole[:, 8, :9] = p[0, :, 8, :9]
    whole[:, 9:, 4:] = results[2]["pooled"][0].repeat(2, 2)
    assert layer.how == "mean"
    np.testing.assert_allclose(layer.cells, whole.reshape(2, 4, 3, 4, 3).mean((2, 4)), rtol=1e-6)
    summed = p[0, :, 9:].sum(1) + sum(np.pad(q[0].sum(1), ((0, 0), (0, 12 - m))) for q, _, m, _ in parts[:2])
    np.testing.assert_allclose(layer.received, summed, rtol=1e-6)
    assert (layer.entropy.shape, layer.looks.weights.shape) == ((2, 12), (2, 12, 2))
    assert np.array_equal(layer.looks.where[:, 8:9], results[1]["top_k"][1][0])
    assert np.array_equal(layer.looks.where[:, 9:], 4 + results[2]["top_k"][1][0])
    assert (layer.queries, layer.keys) == (tuple("abcdefghijkl"),) * 2


def test_short_sequences_beside_long_ones_have_every_weight(rng):
    """A decoder of few tokens and an encoder of many frames; a limit rounds both."""
    short, long = (rng.dirichlet(np.ones(n), size=(1, 2, n)).astype(np.float32) for n in (4, 12))
    kinds = {"pooled": "mean", "received": "sum"}
    calls = [call(name, overview(p, 4), p.shape[-1], p.shape[-1], **kinds) for name, p in (("a", short), ("b", long))]
    seen = recording_of(calls, [list("abcdefghijkl")])
    first, second = explorer.from_seen(seen).texts[0].layers
    assert (first.how, second.how) == ("whole", "mean")
    assert np.array_equal(first.cells, short[0])
    page = explorer.from_seen(seen, limit=1)
    first, second = page.texts[0].layers
    assert (first.cells.shape, first.levels, second.cells.shape) == ((2, 4, 4), 63, (2, 1, 1))
    assert "maps of at most 1 × 1 cells" in page.notes[1]


def test_a_notebook_gets_the_same_page(monkeypatch):
    data = explorer.from_weights(["a", "b"], np.full((1, 2, 2), 0.5))
    shown = html_page.widget(data)
    assert json.loads(shown.manifest)["tokens"] == [["a", "b"]]
    assert html_page.program() in shown._esm
    opened = []
    monkeypatch.setattr(html_page.webbrowser, "open", opened.append)
    path = explorer.explore(data)
    assert opened == [path.as_uri()]
    assert path.read_text(encoding="utf-8") == explorer.html(data)
    monkeypatch.setitem(__import__("sys").modules, "anywidget", None)
    with pytest.raises(MissingExtraError, match=r"sightline-attention\[notebook\]"):
        html_page.widget(data)
