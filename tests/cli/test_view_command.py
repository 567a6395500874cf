"""`sightline view`: the page that it writes for a model, and its error messages."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

import sightline
from sightline.cli import main
from sightline.cli.view_command import _statistics

TEXTS = ["the cat ate", "a rat"]


@pytest.fixture
def bert():
    """A model of two layers of two heads, and its tokenizer, which pads on the left unless it is told otherwise."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "ate", "a", "rat"]
    tokenizer = transformers.BertTokenizer({word: k for k, word in enumerate(words)}, padding_side="left")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).eval(), tokenizer


@pytest.fixture
def folder(bert, tmp_path):
    """The folder of the saved model and tokenizer."""
    for part in bert:
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_two_texts_become_a_page_which_is_opened(folder, tmp_path, capsys, monkeypatch):
    opened, path = [], tmp_path / "page.html"
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert main(["view", "--model", str(folder), *TEXTS, "--output", str(path), "--open"]) == 0
    assert '[["[CLS]","the","cat","ate","[SEP]"],["[CLS]","a","rat","[SEP]"]]' in path.read_text(encoding="utf-8")
    out = " ".join(capsys.readouterr().out.split())
    assert f"Wrote{path}" in out.replace(" ", "")  # a long path is wrapped
    assert "2 texts, 2 layers of up to 2 heads, 5 tokens" in out
    assert opened == [path.as_uri()]


def test_padding_is_masked_without_a_token_for_it(bert, tmp_path, monkeypatch):
    (model, tokenizer), given = bert, []
    tokenizer.pad_token = None  # and there is no eos_token
    hook = model.register_forward_pre_hook(lambda _, inputs, options: given.append(options), with_kwargs=True)
    monkeypatch.setattr("sightline.cli.view_command.load_model", lambda path: (model, tokenizer))
    page = tmp_path / "page.html"
    assert main(["view", "--model", str(tmp_path), *TEXTS, "--output", str(page)]) == 0
    hook.remove()
    assert '["[CLS]","a","rat","[SEP]"]' in page.read_text(encoding="utf-8")
    assert [options["attention_mask"].tolist() for options in given] == [[[1] * 5, [1] * 4 + [0]]]


def test_long_texts_request_statistics_of_linear_memory(monkeypatch):
    for name in ("pooled", "top_k", "entropy", "received"):
        monkeypatch.setattr(sightline, name, lambda *given, name=name: (name, *given), raising=False)
    config = SimpleNamespace(num_hidden_layers=12, num_attention_heads=12)
    assert [statistic.name for statistic in _statistics(config, 1, 200)] == ["weights"]
    expected = [("pooled", 256, 256), ("top_k", 8), ("entropy",), ("received",)]
    assert _statistics(config, 1, 100_000) == expected


def test_errors_name_a_cure(folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    for arguments, message in (
        (["--model", str(tmp_path / "nowhere"), "x"], "which is no directory"),
        (["--model", str(tmp_path)], "no text"),
        (["--model", str(tmp_path), "--text-file", str(tmp_path / "bytes.txt")], "a file of UTF-8 text"),
        (["--model", str(tmp_path), "--text-file", str(tmp_path / "none.txt")], "No such file"),
    ):
        assert main(["view", *arguments]) == 2
        assert re.search(f"(?s){message}.*cure:    sightline view --model", capsys.readouterr().err)
    monkeypatch.delitem(sys.modules, "sightline.transformers", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["view", "--model", str(tmp_path), "x"]) == 2
    assert "pip install -U" in capsys.readouterr().err


def test_a_folder_without_a_model_or_with_damaged_weights(folder, tmp_path, capsys):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:4])
    for path in (tmp_path, folder):
        assert main(["view", "--model", str(path), "x"]) == 2
        assert "a directory that save_pretrained wrote" in capsys.readouterr().err
