"""Which word became which: the alignment of a small translator, read from its cross-attention.

    python examples/translate_align.py [--steps 150] [--output sightline-align.png]

One language puts an adjective before its noun, the other after it; every word has one translation. A model of encoder
and decoder (`torch.nn.Transformer`) learns it from pairs of sentences. No alignment is shown to it, yet the key that
the cross-attention weighs most is the word that was translated.

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
    """Sentences of both languages, (count, LENGTH) int64, and for each word of the second the place it came from."""

    source: Any
    target: Any
    origin: Any


def order(sentence: list[int]) -> list[int]:
    """Places of the words as the second language puts them: an adjective and its noun change places."""
    places = list(range(len(sentence)))
    for k in range(1, len(sentence)):
        if sentence[k - 1] < len(ADJECTIVES) <= sentence[k]:
            places[k - 1 : k + 1] = [k, k - 1]
    return places


def pairs(count: int) -> Pairs:
    """Sentences of random words."""
    source = torch.randint(len(ENGLISH), (count, LENGTH))
    origin = torch.tensor([order(sentence) for sentence in source.tolist()])
    return Pairs(source, source.gather(1, origin), origin)  # a word and its translation have the same number


class Translator(nn.Module):
    """torch's transformer, a layer of encoder and one of decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(START + 1, WIDTH) for _ in range(2))
        self.places = nn.ModuleList(nn.Embedding(LENGTH, WIDTH) for _ in range(2))
        self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, len(FRENCH))

    def forward(self, source: Any, target: Any) -> Any:
        """Logits of every word of the target, given the source and the words before it."""
        decoder_input = functional.pad(target[:, :-1], (1, 0), value=START)
        x, y = (
            word(text) + place.weight
            for word, place, text in zip(self.words, self.places, (source, decoder_input), strict=True)
        )
        hidden = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.body(x, y, tgt_mask=hidden, tgt_is_causal=True))


def train(steps: int) -> Translator:
    """A translator that has seen steps × BATCH pairs."""
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
    """What was found on new sentences."""

    translated: float  # share of words translated right
    aligned: list[float]  # of each head: share of words whose heaviest key is the word they came from
    moved: list[float]  # the same, of words that stand elsewhere than the word they came from
    sentence: Pairs  # one of them
    weights: Any  # (HEADS, LENGTH, LENGTH): its cross-attention


def align(model: Translator, count: int = 200) -> Aligned:
    """Watch the model translate new sentences."""
    new = pairs(count)
    with torch.no_grad(), sightline.torch.watch(model, see=[sightline.top_k(1), sightline.weights()]) as seen:
        logits = model(new.source, new.target)
    (call,) = seen.of(kind="cross")
    found = call["top_k"].where[..., 0]  # (count, HEADS, LENGTH)
    right, moved = found == new.origin[:, None], (new.origin != torch.arange(LENGTH))[:, None]
    aligned, of_moved = right.float().mean((0, 2)), (right & moved).sum((0, 2)) / moved.sum()
    first = Pairs(*[part[0] for part in new])
    translated = (logits.argmax(-1) == new.target).float().mean().item()
    return Aligned(translated, aligned.tolist(), of_moved.tolist(), first, call["weights"][0])


def main(steps: int = 150, output: Path | None = OUTPUT) -> Aligned:
    """Train, watch, tell."""
    console = Console(highlight=False)
    found = align(train(steps))
    best = max(range(HEADS), key=found.aligned.__getitem__)
    console.print("[bold]Which word became which[/]   by the heaviest key of the cross-attention")
    source, target, origin = (part.tolist() for part in found.sentence)
    chosen = found.weights[best].argmax(-1).tolist()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("written", "looks at", "weight"):
        table.add_column(head, justify="right" if head == "weight" else "left")
    for place, key in enumerate(chosen):
        mark = "" if key == origin[place] else " (no)"
        table.add_row(FRENCH[target[place]], f"{ENGLISH[source[key]]}{mark}", f"{found.weights[best, place, key]:.2f}")
    console.print(f"“{' '.join(ENGLISH[word] for word in source)}”", style="dim")
    console.print(table)
    console.print(
        f"Of all words {found.translated:.1%} are translated right. Head {best} aligns {found.aligned[best]:.1%} "
        f"of them, and {found.moved[best]:.1%} of those that changed places.",
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
