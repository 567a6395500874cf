"""`sightline view`: the page that it writes for a model, and its error messages."""

import importlib.util
import re
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sightline
from sightline.cli import main
from sightline.cli.view_command import _statistics

TEXTS = ["the cat ate", "a rat"]


class Tokenizer:
    """One token per word; the part of a transformers tokenizer that the command uses."""

    padding_side, pad_token, eos_token = "left", None, "<end>"

    def __call__(self, texts, **options):
        assert self.padding_side == "right"
        words = [text.split() for text in texts]
        longest = max(map(len, words))
        mask = torch.tensor([[1] * len(line) + [0] * (longest - len(line)) for line in words])
        self.names = sorted({word for line in words for word in line})
        ids = [[self.names.index(word) for word in line] + [0] * (longest - len(line)) for line in words]
        return {"input_ids": torch.tensor(ids), "attention_mask": mask}

    def convert_ids_to_tokens(self, numbers):
        return [self.names[number] for number in numbers]


class Model(SimpleNamespace):
    def __call__(self, **inputs):
        self.given = inputs


@pytest.fixture
def fake(monkeypatch):
    """A stand-in for `watch` with two layers of three heads, and a loader; transformers is not needed."""
    rng, requested = np.random.default_rng(0), {}

    @contextmanager
    def watch(model, see, tokens):
        requested.update(see=see, tokens=tokens)
        given = {"statistics": tuple(see), "heads": (0, 1, 2), "key_start": 0, "query_start": 0, "kind": "self"}

        class Call(SimpleNamespace):
            def __getitem__(self, name):
                return self.results[0]

        longest = max(map(len, tokens))
        p = torch.from_numpy(rng.dirichlet(np.ones(longest), size=(len(tokens), 3, longest)).astype(np.float32))
        calls = [Call(name=f"layers.{k}", n=longest, m=longest, results=(p,), **given) for k in range(2)]

        def labels(call, entry):
            padded = tokens[entry] + [""] * (longest - len(tokens[entry]))
            return padded, padded

        yield SimpleNamespace(calls=calls, labels=labels)

    monkeypatch.setitem(sys.modules, "sightline.transformers", SimpleNamespace())
    monkeypatch.setattr(sightline, "watch", watch, raising=False)
    config = SimpleNamespace(is_encoder_decoder=False, num_hidden_layers=2, num_attention_heads=3)
    requested["model"] = Model(config=config)
    monkeypatch.setattr("sightline.cli.view_command.load_model", lambda path: (requested["model"], Tokenizer()))
    return requested


def test_two_texts_become_a_page(fake, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["view", "--model", str(tmp_path), *TEXTS, "--output", str(path)]) == 0
    assert fake["tokens"] == [["the", "cat", "ate"], ["a", "rat"]]
    assert [statistic.name for statistic in fake["see"]] == ["weights"]
    assert "attention_mask" in fake["model"].given
    page = path.read_text(encoding="utf-8")
    assert '[["the","cat","ate"],["a","rat"]]' in page
    out = " ".join(capsys.readouterr().out.split())
    assert f"Wrote {path}" in out
    assert "2 texts, 2 layers of up to 3 heads, 3 tokens" in out


def test_long_texts_request_statistics_of_linear_memory(monkeypatch):
    for name in ("pooled", "top_k", "entropy", "received"):
        monkeypatch.setattr(sightline, name, lambda *given, name=name: (name, *given), raising=False)
    config = SimpleNamespace(num_hidden_layers=12, num_attention_heads=12)
    assert [statistic.name for statistic in _statistics(config, 1, 200)] == ["weights"]
    expected = [("pooled", 256, 256), ("top_k", 8), ("entropy",), ("received",)]
    assert _statistics(config, 1, 100_000) == expected


def test_the_page_is_opened_in_the_browser(fake, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    path = tmp_path / "page.html"
    assert main(["view", "--model", str(tmp_path), TEXTS[0], "--output", str(path), "--open"]) == 0
    assert opened == [path.as_uri()]


def test_errors_name_a_cure(fake, tmp_path, capsys, monkeypatch):
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


@pytest.mark.skipif(
    not importlib.util.find_spec("transformers") or not importlib.util.find_spec("sightline.transformers"),
    reason="needs transformers",
)
def test_a_real_model(tmp_path, capsys, monkeypatch):
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "ate", "a", "rat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = transformers.BertTokenizer({word: number for number, word in enumerate(words)})
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).eval()
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "model")
    page = tmp_path / "page.html"
    assert main(["view", "--model", str(tmp_path / "model"), *TEXTS, "--output", str(page)]) == 0
    assert '[["[CLS]","the","cat","ate","[SEP]"],["[CLS]","a","rat","[SEP]"]]' in page.read_text(encoding="utf-8")
    assert "2 texts, 2 layers of up to 2 heads, 5 tokens" in " ".join(capsys.readouterr().out.split())
    assert main(["view", "--model", str(tmp_path), "x"]) == 2
    assert "a directory that save_pretrained wrote" in capsys.readouterr().err
    tokenizer.pad_token = None  # and there is no eos_token
    with monkeypatch.context() as change:
        change.setattr("sightline.cli.view_command.load_model", lambda path: (model, tokenizer))
        assert main(["view", "--model", str(tmp_path), *TEXTS, "--output", str(page)]) == 0
    assert '["[CLS]","a","rat","[SEP]"]' in page.read_text(encoding="utf-8")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:4])
    assert main(["view", "--model", str(tmp_path / "model"), "x"]) == 2
    assert "a directory that save_pretrained wrote" in capsys.readouterr().err
