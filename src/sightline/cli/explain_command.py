"""`sightline explain`: print every stage of attention on a short text, and draw the weights."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..arrays.operations import Array
from ..formula.expression import Expression
from ..view.formula_pictures import formula_picture
from .byte_pair_encoding import Tokenization, learn_merges
from .console import (
    ELLIPSIS,
    make_console,
    make_table,
    matrix,
    note,
    number,
    render_picture,
    section,
    shorten,
    visible_indices,
)
from .walkthrough import MASKS, MAX_MERGES, TEXT, Walkthrough, walk_through

MAX_COMPONENTS = 7  # largest number of columns for a vector; a longer vector has the first five, an ellipsis, the last
COMPONENT_WIDTH = 9  # characters of a column, with the gap after the column
LABEL_WIDTH = 14  # characters of the labels of rows, with the gap after them
MAX_PRINTED_MERGES = 20  # largest number of printed merges of the tokenizer
MAX_TOKEN_BLOCKS = 4  # largest number of printed blocks of the table of tokens
MAX_VOCABULARY_ENTRIES = 40  # largest number of printed entries of the vocabulary
MAX_TOKEN = 16  # largest number of printed characters of a token


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `explain` and its options to the command line."""
    command = commands.add_parser(
        "explain",
        help="show every stage of attention on a text, with shapes and numbers",
        description="Shows every stage of attention on a text: tokens, embeddings, query, key and value, rotation, "
        "scores, scaling, mask, softmax, weighted values. Then follows one pair of tokens through all stages. The "
        "tokens come from byte-pair merges that are learned from the text, step by step. Embeddings and projections "
        "are random, not trained.",
    )
    add = command.add_argument
    add("text", nargs="*", help=f"any text (default: {TEXT!r}, whose tokens are published)")
    merges = f"largest number of merges that are learned from the text (default: {MAX_MERGES})"
    add("--merges", type=int, metavar="N", help=merges)
    add("--d-model", type=int, default=512, help="width of the embeddings (default: 512)")
    add("--d-k", type=int, default=64, help="width of query, key and value; even (default: 64)")
    add("--seed", type=int, default=0, help="seed of the embeddings and projections (default: 0)")
    add("--mask", default="none", help=f"{MASKS} (default: none)")
    positions = "positions to follow (default: c and r of the published text, else the last and the first)"
    add("--pair", type=int, nargs=2, metavar=("QUERY", "KEY"), help=positions)
    add("--figure", metavar="PATH", help="draw the weights to PATH")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    text = " ".join(options.text) if options.text else TEXT  # words without quotes are one text
    pair = None if options.pair is None else (options.pair[0], options.pair[1])
    sizes = {"d_model": options.d_model, "d_k": options.d_k, "seed": options.seed}
    walk = walk_through(text, max_merges=options.merges, mask=options.mask, pair=pair, **sizes)
    print_walkthrough(walk, options.seed)
    if options.figure is not None:
        from ..view import heatmap, save

        title = f"weights of “{walk.tokens.text}”, mask {_mask_name(walk.mask)}"
        axis = heatmap(walk.stages.weights, walk.tokens.labels, title=title)
        make_console().print(f"\nWrote {save(axis, Path(options.figure))}")


def print_walkthrough(walk: Walkthrough, seed: int, console: Console | None = None) -> None:
    """Print every stage of the walkthrough."""
    console = console or make_console()
    n, d_model, d_k = len(walk.tokens.numbers), walk.embedded.shape[1], walk.d_k
    formula = "softmax(Q Kᵀ / √d_k + M) V   over   "
    text = shorten(repr(walk.tokens.text), max(console.width - len(formula), 20))
    console.print(Text(formula + text, style="bold"))
    note(console, f"d_model {d_model}, d_k = d_v = {d_k}, seed {seed}, mask {_mask_name(walk.mask)}")
    _print_tokens(console, walk.tokens)
    _print_vectors(console, walk)
    _print_scores(console, walk)
    section(console, "10  Output: O = P V", f"({n}, {d_k})")
    _print_rows(console, walk, {"": walk.stages.output}, range(n))
    _print_pair(console, walk)


def _mask_name(mask: Expression | None) -> str:
    return "none" if mask is None else str(mask)


def _print_tokens(console: Console, tokens: Tokenization) -> None:
    """Print the merges, the tokens with their numbers, and the vocabulary."""
    section(console, "1  Tokens", f"({len(tokens.numbers)},)")
    _print_merges(console, tokens)
    console.print()
    _print_blocks(console, tokens)
    note(console, _vocabulary_text(console.width, tokens))
    if tokens.published:
        note(console, "These tokens are published: 'the' includes the space before it.")
    note(console, "One space is added before the text. ␣ is a space.")


def _vocabulary_text(width: int, tokens: Tokenization) -> str:
    """Return a text in lines of at most `width` characters that lists the first entries of the vocabulary."""
    vocabulary = tokens.vocabulary.items()
    entries = [f"{shorten(tokens.label(piece), MAX_TOKEN)} {number}" for piece, number in vocabulary]
    if len(entries) > MAX_VOCABULARY_ENTRIES:
        entries[MAX_VOCABULARY_ENTRIES:] = [f"and {len(entries) - MAX_VOCABULARY_ENTRIES} more"]
    lines = _split_lines(width + 1, [cell_len(entry) + 2 for entry in entries])  # a line ends with "," but no space
    return ",\n".join(", ".join(entries[place] for place in line) for line in lines)


def _split_lines(width: int, widths: Sequence[int]) -> list[range]:
    """Return ranges of the entries of these widths, each as long as fits into a line of `width` characters."""
    lines, start, used = list[range](), 0, 0
    for place, needed in enumerate(widths):
        if used + needed > width and place > start:
            lines.append(range(start, place))
            start, used = place, 0
        used += needed
    return [*lines, range(start, len(widths))]


def _print_merges(console: Console, tokens: Tokenization) -> None:
    """Print a row for each merge. If there are more than `MAX_PRINTED_MERGES`, rows in the middle are left out.

    The rows have the text after each merge if every merge has a row and the rows then fit into the console. For merges
    that were learned, a note below says whether more could be learned.
    """
    merges = tokens.merges
    found = _merge_table(tokens, with_texts=len(merges) <= MAX_PRINTED_MERGES)
    if console.measure(found, options=console.options.update(max_width=10_000)).maximum > console.width:
        found = _merge_table(tokens, with_texts=False)
    console.print(found)
    if tokens.published:
        return
    if len(learn_merges(tokens.text, len(merges) + 1).merges) > len(merges):
        note(console, "More pairs occur twice; --merges sets how many merges are learned.")
    else:
        note(console, f"No {'further ' if merges else ''}pair of tokens occurs twice within the words of the text.")


def _merge_table(tokens: Tokenization, with_texts: bool) -> Table:
    """Return the table of the merges. The last column has the text after each merge, or else the new token."""
    characters = " " + tokens.text
    first = " ".join(map(tokens.label, characters)) if with_texts else ""
    rows: list[tuple[str, ...]] = [("characters", "", "", str(len(characters)), first)]
    for index in visible_indices(len(tokens.merges), MAX_PRINTED_MERGES):
        if index is None:
            rows.append((ELLIPSIS,) * 5)
            continue
        merge = tokens.merges[index]
        joined = " + ".join(shorten(tokens.label(part), MAX_TOKEN) for part in merge.parts)
        new = shorten(tokens.label(merge.piece), MAX_TOKEN)
        last = " ".join(map(tokens.label, merge.pieces)) if with_texts else new
        rows.append((joined, f"{merge.count:,}", str(tokens.vocabulary[merge.piece]), f"{len(merge.pieces):,}", last))
    result = make_table("joined", "places", "number", "tokens", "text" if with_texts else "new token", rows=rows)
    result.columns[-1].justify = "left"
    for column in result.columns:
        column.no_wrap = True
    return result


def _print_blocks(console: Console, tokens: Tokenization) -> None:
    """Print positions, tokens and numbers in at most `MAX_TOKEN_BLOCKS` blocks of the console, without the middle."""
    labels = [shorten(label, MAX_TOKEN) for label in tokens.labels]
    columns = enumerate(zip(labels, tokens.numbers, strict=True))
    widths = [2 + max(cell_len(label), len(str(token)), len(str(i))) for i, (label, token) in columns]
    blocks = _split_lines(console.width - len("position") - 2, widths)
    shown = visible_indices(len(blocks), MAX_TOKEN_BLOCKS)
    for index in shown:
        if index is None:
            hidden = sum(len(block) for number, block in enumerate(blocks) if number not in shown)
            note(console, f"{ELLIPSIS} {hidden:,} tokens")
            continue
        part = blocks[index]
        rows = [("token", *(labels[i] for i in part)), ("number", *(tokens.numbers[i] for i in part))]
        console.print(make_table("position", *map(str, part), rows=rows))


def _print_vectors(console: Console, walk: Walkthrough) -> None:
    n, d_model, d_k = len(walk.tokens.numbers), walk.embedded.shape[1], walk.d_k
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
    note(console, f"{angles}, {10000 ** (2 / d_k - 1):.2g} for the last.")
    note(console, f"A rotation keeps the length: ‖q‖ = {lengths[0]:.4f}, ‖R q‖ = {lengths[1]:.4f}.")


def _print_scores(console: Console, walk: Walkthrough) -> None:
    n, stages, labels, width = len(walk.tokens.numbers), walk.stages, walk.tokens.labels, console.width
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
    lines, labels = list[tuple[Text | str, ...]](), walk.tokens.labels
    for name, array in arrays.items():
        columns = visible_indices(array.shape[1], max_components, last=1)
        for before, i in zip([rows[0], *rows], rows, strict=False):
            if i - before > 1:
                lines.append((ELLIPSIS, *[ELLIPSIS] * len(columns)))
            token = shorten(labels[i], 8 if console.width >= 80 else 5)
            label = f"{name} of {token}, {i}" if name else f"{i:>2} {token}"
            numbers = (ELLIPSIS if c is None else number(array[i, c]) for c in columns)
            lines.append((Text(label, style="cyan"), *numbers))
    result = make_table(*[""] * len(lines[0]), rows=lines)
    result.show_header = False
    result.columns[0].min_width = 12
    for column in result.columns[1:]:
        column.min_width = 1 if column.header == ELLIPSIS else COMPONENT_WIDTH - 2
    console.print(result)


def _print_pair(console: Console, walk: Walkthrough) -> None:
    query, key = walk.pair
    names = f"query {query} ({walk.tokens.labels[query]}) and key {key} ({walk.tokens.labels[key]})"
    section(console, f"One pair in every stage: {names}, distance {abs(key - query)}")
    rows = [(step.name, step.formula, number(step.value) if step.value else "0") for step in walk.follow()]
    console.print(make_table("stage", "formula", "value", rows=rows, left=2))
    if walk.allowed:
        weight = walk.stages.weights[walk.pair]
        console.print(f"The mask allows the pair: the query gives {weight:.2%} of its weight to this key.")
    else:
        console.print("The mask hides the pair: its weight is exactly 0, so the key has no effect.")
