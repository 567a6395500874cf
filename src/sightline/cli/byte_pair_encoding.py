"""Byte-pair encoding: merges that are learned from one text, and the tokens that the merges give.

The algorithm (Gage, 1994; Sennrich et al., "Neural machine translation of rare words with subword units", 2016,
Algorithm 1) starts with one token for each character. A step counts all pairs of adjacent tokens within a word, and
joins every occurrence of the most frequent pair to one token. Among equally frequent pairs, the pair that occurs first
in the text is joined. The steps end if no pair occurs twice, or after a given number of merges.

As in SentencePiece (Kudo and Richardson, 2018), a word contains the space before it, and a space is put before the
text. The pieces of all tokens in a row are therefore that space, followed by the text. Characters are Unicode code
points. They are neither normalised nor changed.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

# A word may begin with one white-space character and has no other. All other white space forms words of its own.
WORD = re.compile(r"\s+(?!\S)|\s?\S+")

Pieces = tuple[str, ...]  # the pieces of one word


@dataclass(frozen=True)
class Merge:
    """One step: every occurrence of adjacent tokens with the pieces `parts` becomes one token."""

    parts: tuple[str, ...]
    count: int  # number of places of the text at which the parts are adjacent, before the step
    pieces: tuple[str, ...]  # the tokens of the text after the step

    @property
    def piece(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True)
class Tokenization:
    """The tokens of a text: their pieces of text, the merges that gave the tokens, and the number of every piece.

    `published` has the pieces that were published under another label, with this label.
    """

    pieces: tuple[str, ...]
    merges: tuple[Merge, ...]
    vocabulary: dict[str, int]
    published: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text that was tokenized: the pieces in a row, without the space that was put before the text."""
        return "".join(self.pieces)[1:]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The tokens as numbers."""
        return tuple(self.vocabulary[piece] for piece in self.pieces)

    @property
    def labels(self) -> list[str]:
        """The tokens as text, with ␣ for a space."""
        return list(map(self.label, self.pieces))

    def label(self, piece: str) -> str:
        """Return the piece of a token as text, with ␣ for a space."""
        return self.published.get(piece) or printable(piece)


def learn_merges(text: str, max_merges: int) -> Tokenization:
    """Return the tokens of the text after at most `max_merges` merges, each of the most frequent pair.

    Examples
    --------
    >>> from sightline.cli.byte_pair_encoding import learn_merges
    >>> found = learn_merges("low lower lowest", max_merges=4)
    >>> [(merge.parts, merge.count) for merge in found.merges]
    [((' ', 'l'), 3), ((' l', 'o'), 3), ((' lo', 'w'), 3), ((' low', 'e'), 2)]
    >>> found.pieces
    (' low', ' lowe', 'r', ' lowe', 's', 't')
    """

    def most_frequent(words: list[Pieces], step: int) -> tuple[str, ...] | None:
        pairs = Counter(chain.from_iterable(map(pairwise, words)))
        parts, count = max(pairs.items(), key=lambda item: item[1], default=((), 0))  # of the largest, the first
        return parts if count >= 2 and step < max_merges else None

    return _merge(text, most_frequent)


def apply_merges(text: str, merges: Sequence[tuple[str, ...]]) -> Tokenization:
    """Return the tokens of the text after the given merges, in their order. A merge may join more than two tokens."""
    return _merge(text, lambda _, step: merges[step] if step < len(merges) else None)


def _merge(text: str, choose: Callable[[list[Pieces], int], tuple[str, ...] | None]) -> Tokenization:
    """Return the tokens of the text after the steps. `choose` returns the parts that a step joins, None after the last.

    Characters get the first numbers, in the order of Unicode, then every merge gets one.
    """
    words, merges = [tuple(word) for word in WORD.findall(" " + text)], list[Merge]()
    while (parts := choose(words, len(merges))) is not None:
        count = sum(word[start : start + len(parts)] == parts for word in words for start in range(len(word)))
        words = [_merge_word(word, parts) for word in words]
        merges.append(Merge(parts, count, tuple(chain.from_iterable(words))))
    pieces = tuple(chain.from_iterable(words))
    entries = dict.fromkeys([*sorted(set("".join(pieces))), *(merge.piece for merge in merges)])
    return Tokenization(pieces, tuple(merges), {piece: number for number, piece in enumerate(entries)})


def _merge_word(word: Pieces, parts: tuple[str, ...]) -> Pieces:
    """Return the word, with every occurrence of the parts joined to one piece, from the left."""
    result: list[str] = []
    start = 0
    while start < len(word):
        length = len(parts) if word[start : start + len(parts)] == parts else 1
        result.append("".join(word[start : start + length]))
        start += length
    return tuple(result)


def printable(piece: str) -> str:
    r"""Return the piece with ␣ for a space, ◌ under a lone combining mark, and escapes for invisible characters.

    Examples
    --------
    >>> from sightline.cli.byte_pair_encoding import printable
    >>> printable(" the"), printable("\n"), printable("\u0301")
    ('␣the', '\\n', '◌́')
    """
    shown = []
    for index, character in enumerate(piece):
        kind = unicodedata.category(character)
        if character == " ":
            shown.append("␣")
        elif kind[0] in "CZ":  # control, format, surrogate, unassigned; separators
            shown.append(character.encode("unicode_escape").decode("ascii"))
        elif kind[0] == "M" and (index == 0 or unicodedata.category(piece[index - 1])[0] in "CZ"):
            shown.append("◌" + character)
        else:
            shown.append(character)
    return "".join(shown)
