"""Read the word alignment of a small translator from its cross-attention.

    python examples/translate_align.py [--steps 150] [--output sightline-align.png]

One language has the adjective before its noun, the other after it; every word has one translation. An encoder-decoder
model (`torch.nn.Transformer`) learns the translation from pairs of sentences without any alignment. Still, the key with
the largest weight in the cross-attention is the word that the decoder translates.

Source: Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate", 2015, section 5.2.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import sightline
import sightline.torch

ADJECTIVES = {"red": "rouge", "green": "vert", "blue": "bleu", "white": "blanc", "black": "noir", "round": "rond"}
NOUNS = {"house": "maison", "cat": "chat", "tree": "arbre", "boat": "bateau", "bird": "oiseau", "stone": "pierre"}
ENGLISH, FRENCH = [*ADJECTIVES, *NOUNS], [*ADJECTIVES.values(), *NOUNS.values()]
START = len(FRENCH)
LENGTH, WIDTH, HEADS, BATCH = 8, 32, 2, 64
OUTPUT = Path("sightline-align.png")


class Pairs(NamedTuple):
    """Sentences of both languages, (count, LENGTH) int64, and the source position of each target word."""

    source: Any
    target: Any
    origin: Any


def order(sentence: list[int]) -> list[int]:
    """Return the source positions in the order of the second language, where a noun precedes its adjective."""
    positions = list(range(len(sentence)))
    for k in range(1, len(sentence)):
        if sentence[k - 1] < len(ADJECTIVES) <= sentence[k]:
            positions[k - 1 : k + 1] = [k, k - 1]
    return positions


def pairs(count: int) -> Pairs:
    """Return pairs of random sentences."""
    source = torch.randint(len(ENGLISH), (count, LENGTH))
    origin = torch.tensor([order(sentence) for sentence in source.tolist()])
    return Pairs(source, source.gather(1, origin), origin)  # a word and its translation have the same number


class Translator(nn.Module):
    """torch's transformer with one encoder layer and one decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(START + 1, WIDTH) for _ in range(2))
        self.positions = nn.ModuleList(nn.Embedding(LENGTH, WIDTH) for _ in range(2))
        self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, len(FRENCH))

    def forward(self, source: Any, target: Any) -> Any:
        """Return logits of every target word, given the source and the target words before it."""
        decoder_input = functional.pad(target[:, :-1], (1, 0), value=START)
        x, y = (
            word(text) + position.weight
            for word, position, text in zip(self.words, self.positions, (source, decoder_input), strict=True)
        )
        hidden = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.body(x, y, tgt_mask=hidden, tgt_is_causal=True))


def train(steps: int) -> Translator:
    """Return a translator trained on steps × BATCH pairs."""
    torch.manual_seed(0)
    model = Translator()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        source, target, _ = pairs(BATCH)
        loss = functional.cross_entropy(model(source, target).flatten(0, 1), target.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


class Aligned(NamedTuple):
    """Results on new sentences."""

    translated: float  # share of words translated right
    aligned: list[float]  # per head: share of words whose key of largest weight is the source word
    moved: list[float]  # per head: the same share of the words at another position than their source word
    sentence: Pairs  # one of the sentences
    weights: Any  # (HEADS, LENGTH, LENGTH): the cross-attention on this sentence


def align(model: Translator, count: int = 200) -> Aligned:
    """Record the cross-attention on new sentences and compare it with the true alignment."""
    new = pairs(count)
    with torch.no_grad(), sightline.watch(model, see=[sightline.top_k(1), sightline.weights()]) as seen:
        logits = model(new.source, new.target)
    (call,) = seen.of(kind="cross")
    found = call["top_k"].where[..., 0]  # (count, HEADS, LENGTH)
    right, moved = found == new.origin[:, None], (new.origin != torch.arange(LENGTH))[:, None]
    aligned, of_moved = right.float().mean((0, 2)), (right & moved).sum((0, 2)) / moved.sum()
    first = Pairs(*[part[0] for part in new])
    translated = (logits.argmax(-1) == new.target).float().mean().item()
    return Aligned(translated, aligned.tolist(), of_moved.tolist(), first, call["weights"][0])


def main(steps: int = 150, output: Path | None = OUTPUT) -> Aligned:
    """Train a translator, print its alignment of a sentence and draw the weights."""
    console = Console(highlight=False)
    found = align(train(steps))
    best = max(range(HEADS), key=found.aligned.__getitem__)
    console.print("[bold]Word alignment[/]   by the key of largest weight in the cross-attention")
    source, target, origin = (part.tolist() for part in found.sentence)
    chosen = found.weights[best].argmax(-1).tolist()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("target word", "source word", "weight"):
        table.add_column(title, justify="right" if title == "weight" else "left")
    for query, key in enumerate(chosen):
        mark = "" if key == origin[query] else " (wrong)"
        table.add_row(FRENCH[target[query]], f"{ENGLISH[source[key]]}{mark}", f"{found.weights[best, query, key]:.2f}")
    console.print(f"“{' '.join(ENGLISH[word] for word in source)}”", style="dim")
    console.print(table)
    console.print(
        f"{found.translated:.1%} of the words are translated right. Head {best} aligns {found.aligned[best]:.1%} of "
        f"the words, and {found.moved[best]:.1%} of the words at another position than their source word.",
        style="dim",
    )
    if output is not None:
        from sightline.view import heatmap, save

        labels = ([FRENCH[word] for word in target], [ENGLISH[word] for word in source])
        save(heatmap(found.weights[best], labels, title=f"cross-attention, head {best}").figure, output)
        console.print(f"Wrote {output}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    main(**vars(parser.parse_args()))
