"""The tokens of `sightline explain`: the byte-pair merges step by step, the tokens and their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from .byte_pair_encoding import apply_merges, learn_merges
from .console import ELLIPSIS, note, section, shorten, table, visible_indices
from .walkthrough import Walkthrough

MAX_STEPS = 20  # largest number of printed merges
MAX_BLOCKS = 4  # largest number of printed blocks of the table of tokens
MAX_ENTRIES = 40  # largest number of printed entries of the vocabulary
MAX_TOKEN = 16  # largest number of printed characters of a token


def print_tokens(console: Console, walk: Walkthrough) -> None:
    """Print the merges, the tokens with their numbers, and the vocabulary."""
    section(console, "1  Tokens", f"({len(walk.tokens)},)")
    _print_merges(console, walk)
    console.print()
    _print_blocks(console, walk)
    for line in _vocabulary_lines(console.width, walk):
        note(console, line)
    if walk.is_published:
        note(console, "These tokens are published: 'the' includes the space before it.")
    note(console, "One space is added before the text. ␣ is a space.")


def _vocabulary_lines(width: int, walk: Walkthrough) -> list[str]:
    """Return lines of at most `width` characters that list the first entries of the vocabulary."""
    vocabulary = walk.tokenization.vocabulary.items()
    entries = [f"{shorten(walk.label(piece), MAX_TOKEN)} {number}" for piece, number in vocabulary]
    if len(entries) > MAX_ENTRIES:
        entries[MAX_ENTRIES:] = [f"and {len(entries) - MAX_ENTRIES} more"]
    lines = [""]
    for entry in entries:
        if lines[-1] and cell_len(lines[-1]) + cell_len(entry) + 3 > width:  # ", " before and "," after the entry
            lines[-1] += ","
            lines.append("")
        lines[-1] += f", {entry}" if lines[-1] else entry
    return lines


def _print_merges(console: Console, walk: Walkthrough) -> None:
    """Print one row for each merge, with the text after the merge if the rows then fit into the console."""
    merges = walk.tokenization.merges
    found = _merge_table(walk, [])
    if len(merges) <= MAX_STEPS:
        with_texts = _merge_table(walk, _texts_after_merges(walk))
        needed = console.measure(with_texts, options=console.options.update(max_width=10_000)).maximum
        found = with_texts if needed <= console.width else found
    console.print(found)
    if walk.is_published:
        return
    if len(learn_merges(walk.text, len(merges) + 1).merges) > len(merges):
        note(console, "More pairs occur twice; --merges sets how many merges are learned.")
    else:
        note(console, f"No {'further ' if merges else ''}pair of tokens occurs twice within the words of the text.")


def _merge_table(walk: Walkthrough, texts: Sequence[str]) -> Table:
    """Return the table of the merges, with the text after each merge. Without `texts` it names the pieces made."""
    tokens = walk.tokenization
    rows: list[tuple[str, ...]] = [("characters", "", "", str(len(walk.text) + 1), texts[0] if texts else "")]
    for index in visible_indices(len(tokens.merges), MAX_STEPS):
        if index is None:
            rows.append((ELLIPSIS,) * 5)
            continue
        merge = tokens.merges[index]
        joined = " + ".join(shorten(walk.label(part), MAX_TOKEN) for part in merge.parts)
        last = texts[index + 1] if texts else shorten(walk.label(merge.piece), MAX_TOKEN)
        rows.append((joined, f"{merge.count:,}", str(tokens.vocabulary[merge.piece]), f"{merge.length:,}", last))
    result = table("joined", "places", "number", "tokens", "text" if texts else "new token", rows=rows)
    result.columns[-1].justify = "left"
    for column in result.columns:
        column.no_wrap = True
    return result


def _texts_after_merges(walk: Walkthrough) -> list[str]:
    """Return the text in characters, and the text after each merge, with a blank between the tokens."""
    parts = [merge.parts for merge in walk.tokenization.merges]
    splits = (apply_merges(walk.text, parts[:steps]).pieces for steps in range(len(parts) + 1))
    return [" ".join(map(walk.label, pieces)) for pieces in splits]


def _print_blocks(console: Console, walk: Walkthrough) -> None:
    """Print positions, tokens and numbers in blocks as wide as the console. Middle blocks may be left out."""
    labels = [shorten(label, MAX_TOKEN) for label in walk.labels]
    blocks = _split_blocks(console.width, labels, walk.tokens)
    shown = visible_indices(len(blocks), MAX_BLOCKS)
    for index in shown:
        if index is None:
            hidden = sum(len(block) for number, block in enumerate(blocks) if number not in shown)
            note(console, f"{ELLIPSIS} {hidden:,} tokens")
            continue
        part = blocks[index]
        rows = [("token", *(labels[i] for i in part)), ("number", *(walk.tokens[i] for i in part))]
        console.print(table("position", *map(str, part), rows=rows))


def _split_blocks(width: int, labels: Sequence[str], numbers: Sequence[int]) -> list[range]:
    """Return ranges of the positions, each as long as fits into a line of `width` characters."""
    margin = len("position") + 2
    blocks, start, used = list[range](), 0, margin
    for position, (label, number) in enumerate(zip(labels, numbers, strict=True)):
        needed = 2 + max(cell_len(label), len(str(number)), len(str(position)))
        if used + needed > width and position > start:
            blocks.append(range(start, position))
            start, used = position, margin
        used += needed
    return [*blocks, range(start, len(labels))]
