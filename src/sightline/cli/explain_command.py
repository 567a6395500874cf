"""`sightline explain`: print every stage of attention on a short text, and draw two figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from ..formula.expression import Expression
from ..view.picture import formula_picture
from .console import (
    ELLIPSIS,
    make_console,
    matrix,
    note,
    number,
    render_picture,
    section,
    shorten,
    table,
    visible_indices,
)
from .token_tables import print_tokens
from .walkthrough import Walkthrough

Array = np.ndarray[Any, np.dtype[Any]]

MAX_COMPONENTS = 7  # largest number of columns for a vector; a longer one has five components, an ellipsis, the last
COMPONENT_WIDTH = 9  # characters of a column, with the gap after the column
LABEL_WIDTH = 14  # characters of the labels of rows, with the gap after them


def explain(walk: Walkthrough, seed: int, console: Console | None = None) -> None:
    """Print every stage of the walkthrough."""
    console = console or make_console()
    n, d_model, d_k = len(walk.tokens), walk.embedded.shape[1], walk.d_k
    formula = "softmax(Q Kᵀ / √d_k + M) V   over   "
    text = shorten(repr(walk.text), max(console.width - len(formula), 20))
    console.print(Text(formula + text, style="bold"))
    note(console, f"d_model {d_model}, d_k = d_v = {d_k}, seed {seed}, mask {_mask_name(walk.mask)}")
    print_tokens(console, walk)
    _print_vectors(console, walk)
    _print_scores(console, walk)
    section(console, "10  Output: O = P V", f"({n}, {d_k})")
    _print_rows(console, walk, {"": walk.stages.output}, range(n))
    _print_pair(console, walk)


def _mask_name(mask: Expression | None) -> str:
    return "none" if mask is None else str(mask)


def _print_vectors(console: Console, walk: Walkthrough) -> None:
    n, d_model, d_k = len(walk.tokens), walk.embedded.shape[1], walk.d_k
    query, key = walk.pair
    section(console, "2  Embeddings: X, one row of a random table per token", f"({n}, {d_model})")
    _print_rows(console, walk, {"": walk.embedded}, range(n))
    section(console, "3  Projections: W_Q, W_K, W_V, Glorot normal", f"3 × ({d_model}, {d_k})")
    drawn = ", ".join(f"{w.std():.4f}" for w in walk.projections)
    console.print(f"σ = √(2 / (d_model + d_k)) = {math.sqrt(2 / (d_model + d_k)):.4f}; measured {drawn}")
    section(console, "4  Query, key and value: Q = X W_Q, K = X W_K, V = X W_V", f"3 × ({n}, {d_k})")
    _print_rows(console, walk, {"q": walk.query}, [query])
    _print_rows(console, walk, {"k": walk.key, "v": walk.value}, [key])
    section(console, "5  Rotation: R_p q and R_p k, pairs rotated by the angle p θ_t", f"2 × ({n}, {d_k})")
    _print_rows(console, walk, {"R q": walk.rotated_query}, [query])
    _print_rows(console, walk, {"R k": walk.rotated_key}, [key])
    lengths = [float(np.linalg.norm(x)) for x in (walk.query[query], walk.rotated_query[query])]
    angles = f"θ_t = 10000^(−2t / {d_k}) radians per position: 1 for the first pair of components"
    note(console, f"{angles}, {10000 ** (2 / d_k - 1):.1e} for the last.")
    note(console, f"A rotation keeps the length: ‖q‖ = {lengths[0]:.4f}, ‖R q‖ = {lengths[1]:.4f}.")


def _print_scores(console: Console, walk: Walkthrough) -> None:
    n, stages, labels, width = len(walk.tokens), walk.stages, walk.labels, console.width
    shape = f"({n}, {n})"
    section(console, "6  Scores: S = (R Q)(R K)ᵀ", shape)
    console.print(matrix(stages.scores, labels, labels, mark=walk.pair, width=width))
    section(console, f"7  Scaled: S / √{walk.d_k}", shape)
    console.print(matrix(stages.scaled, labels, labels, mark=walk.pair, width=width))
    note(console, f"standard deviation: {stages.scores.std():.2f} before scaling, {stages.scaled.std():.2f} after")
    section(console, "8  Mask: −∞ where a query may not attend to a key", shape)
    if walk.mask is None:
        console.print("none: every query attends to every key")
    else:
        console.print(render_picture(console, formula_picture(walk.mask, n, n)))
    section(console, "9  Weights: P = softmax(S / √d_k + M), each row sums to 1", shape)
    console.print(matrix(stages.weights, labels, labels, weights=True, mark=walk.pair, width=width))


def _print_rows(console: Console, walk: Walkthrough, arrays: dict[str, Array], rows: Sequence[int]) -> None:
    """Print the given rows of each array; of more than four rows, the first three and the last.

    Of each row the first components and the last component are printed, as many as fit into the console.
    """
    if len(rows) > 4:
        rows = [*rows[:3], rows[-1]]
    max_components = min(MAX_COMPONENTS, (console.width - LABEL_WIDTH) // COMPONENT_WIDTH)
    lines, labels = list[tuple[Text | str, ...]](), walk.labels
    for name, array in arrays.items():
        columns = visible_indices(array.shape[1], max_components, last=1)
        for before, i in zip([rows[0], *rows], rows, strict=False):
            if i - before > 1:
                lines.append((ELLIPSIS, *[ELLIPSIS] * len(columns)))
            token = shorten(labels[i], 8 if console.width >= 80 else 5)
            label = f"{name} of {token}, {i}" if name else f"{i:>2} {token}"
            numbers = (ELLIPSIS if c is None else number(array[i, c]) for c in columns)
            lines.append((Text(label, style="cyan"), *numbers))
    result = table(*[""] * len(lines[0]), rows=lines)
    result.show_header = False
    result.columns[0].min_width = 12
    for column in result.columns[1:]:
        column.min_width = 1 if column.header == ELLIPSIS else COMPONENT_WIDTH - 2
    console.print(result)


def _print_pair(console: Console, walk: Walkthrough) -> None:
    query, key = walk.pair
    names = f"query {query} ({walk.labels[query]}) and key {key} ({walk.labels[key]})"
    section(console, f"One pair in every stage: {names}, distance {abs(key - query)}")
    rows = [(step.name, step.formula, number(step.value) if step.value else "0") for step in walk.follow()]
    console.print(table("stage", "formula", "value", rows=rows, left=2))
    if walk.allowed:
        weight = walk.stages.weights[walk.pair]
        console.print(f"The mask allows the pair: the query gives {weight:.2%} of its weight to this key.")
    else:
        console.print("The mask hides the pair: its weight is exactly 0, so the key has no effect.")


def write_figures(walk: Walkthrough, path: str | Path, console: Console | None = None) -> None:
    """Draw the weights to the file `path`, and the effect of scaling to a second file, whose name adds "-scaling"."""
    from ..view import heatmap, save, scaling_figure

    console, path = console or make_console(), Path(path)
    title = f"weights of “{walk.text}”, mask {_mask_name(walk.mask)}"
    written = [save(heatmap(walk.stages.weights, walk.labels, title=title).figure, path)]
    written.append(save(scaling_figure(), path.with_name(f"{path.stem}-scaling{path.suffix}")))
    console.print()
    console.print("Wrote " + " and ".join(map(str, written)))
