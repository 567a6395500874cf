"""Byte-pair encoding: the learned merges against the algorithm written a second time, and texts of every kind."""

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.cli.byte_pair_encoding import apply_merges, learn_merges, printable

TEXTS = st.text(st.sampled_from("aabc \n"), max_size=60) | st.text(max_size=40)


def learned_by_search(text, max_merges):
    """The merges and tokens by Algorithm 1 of Sennrich et al. (2016), on lists."""
    words = [list(word) for word in re.findall(r"\s+(?!\S)|\s?\S+", " " + text)]
    merges = []
    for _ in range(max_merges):
        pairs = [pair for word in words for pair in itertools.pairwise(word)]
        counts = Counter(pairs)
        if not pairs or counts.most_common(1)[0][1] < 2:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pairs.index(pair)))
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = [word[at] + word[at + 1]]
                at += 1
        merges.append((best, counts[best], sum(map(len, words))))
    return merges, [piece for word in words for piece in word]


@settings(max_examples=25)
@given(TEXTS, st.integers(0, 12))
def test_merges_follow_the_algorithm(text, max_merges):
    found = learn_merges(text, max_merges)
    merges, pieces = learned_by_search(text, max_merges)
    assert [(merge.parts, merge.count, len(merge.pieces)) for merge in found.merges] == merges
    assert list(found.pieces) == pieces


@settings(max_examples=25)
@given(TEXTS, st.integers(0, 12))
def test_tokens_give_the_text_back(text, max_merges):
    found = learn_merges(text, max_merges)
    assert found.text == text
    assert sorted(found.vocabulary.values()) == list(range(len(found.vocabulary)))
    by_number = {number: piece for piece, number in found.vocabulary.items()}
    assert "".join(by_number[number] for number in found.numbers) == " " + text
    assert apply_merges(text, [merge.parts for merge in found.merges]) == found


def test_merges_stay_within_words():
    """The pair (b, space) occurs three times but joins two words."""
    found = learn_merges("ab ab ab ab", 9)
    assert set(found.pieces) == {" ab"}
    assert [merge.parts for merge in found.merges] == [(" ", "a"), (" a", "b")]


def test_learning_stops_if_no_pair_occurs_twice():
    assert learn_merges("abc", 9).merges == ()
    assert learn_merges("", 9).pieces == (" ",)


def test_two_merges_with_one_piece_have_one_number():
    found = apply_merges("abc abc", [("a", "b"), ("ab", "c"), ("b", "c"), ("a", "bc")])
    assert list(found.vocabulary) == [" ", "a", "b", "c", "ab", "abc", "bc"]


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (" cat", "␣cat"),
        ("\t\n", r"\t\n"),
        ("\u00a0", r"\xa0"),
        ("\u200d", r"\u200d"),
        ("\udcff", r"\udcff"),
        ("e\u0301", "e\u0301"),
        (" \u0301", "␣◌\u0301"),
        ("注意", "注意"),
    ],
)
def test_pieces_are_printed_visibly(piece, shown):
    assert printable(piece) == shown
