"""The walk-through of `sightline explain`: tokens, stages against plain NumPy, and the pair that it follows."""

import math

import numpy as np
import pytest

from sightline.cli.walkthrough import MAX_CHARACTERS, MAX_MERGES, TEXT, VOCABULARY, named_mask, tokenize, walk_through
from sightline.errors import ParameterError


def test_the_published_tokens():
    labels = {walk_through().tokens.label(piece): number for piece, number in VOCABULARY.items()}
    assert labels == {"␣": 0, "a": 1, "c": 2, "e": 3, "h": 4, "t": 5, "r": 6, "at": 7, "th": 8, "the": 9}
    assert tokenize("the cat ate the rat").numbers == (9, 0, 2, 7, 0, 7, 3, 9, 0, 6, 7)
    assert tokenize(TEXT).text == TEXT
    assert walk_through().tokens.labels == ["the", "␣", "c", "at", "␣", "at", "e", "the", "␣", "r", "at"]


def test_merges_of_another_text_are_learned_from_it():
    found = tokenize("the cat ate the bat")
    assert found.merges[0].parts == ("a", "t")
    assert len(found.merges) <= MAX_MERGES
    assert walk_through("the cat ate the bat").tokens.labels[0] == "␣the"
    assert len(tokenize(TEXT, max_merges=2).merges) == 2  # learned, since the caller says how many


@pytest.mark.parametrize("text", ["注意力", "Zürich ❤️ 👩‍💻", "\udcff", " ", "x", "\n\t"])
def test_any_text_has_all_stages(text):
    walk = walk_through(text, d_model=8, d_k=4, mask="causal")
    n = len(walk.tokens.numbers)
    assert walk.tokens.text == text
    assert walk.embedded.shape == (n, 8)
    assert walk.stages.weights.shape == (n, n)
    assert len(walk.tokens.labels) == n
    assert walk.pair == (n - 1, 0)


def test_every_stage_equals_plain_numpy():
    walk = walk_through(seed=3, mask="causal")
    n, d_k = len(walk.tokens.numbers), 64
    assert walk.embedded.shape == (11, 512)
    assert np.array_equal(walk.embedded[0], walk.embedded[7])  # the same token
    for projection, made in zip(walk.projections, (walk.query, walk.key, walk.value), strict=True):
        assert projection.shape == (512, d_k)
        assert 0.98 < projection.std() / math.sqrt(2 / (512 + d_k)) < 1.02
        assert np.array_equal(made, walk.embedded @ projection)
    stages = walk.stages
    assert np.array_equal(stages.scores, walk.rotated_query @ walk.rotated_key.T)
    assert np.array_equal(stages.scaled, stages.scores * (1 / math.sqrt(d_k)))
    later = np.triu(np.ones((n, n), bool), 1)
    assert np.array_equal(stages.masked, np.where(later, -np.inf, stages.scaled))
    assert not stages.weights[later].any()
    np.testing.assert_array_max_ulp(stages.weights.sum(-1), np.ones(n), maxulp=8)
    assert np.array_equal(stages.output, stages.weights @ walk.value)


def test_the_followed_pair():
    """Query c and key r, at a distance of 7: allowed without a mask, exactly 0 with the causal mask."""
    free, causal = walk_through(), walk_through(mask="causal")
    for walk in (free, causal):
        assert walk.pair == (2, 9)
        assert [walk.tokens.labels[at] for at in walk.pair] == ["c", "r"]
        assert [step.name for step in walk.follow()][1:4] == ["score", "scaled", "masked"]
    values = {step.name: step.value for step in free.follow()}
    assert free.allowed
    assert values["weight"] == free.stages.weights[2, 9] > 0
    assert values["score"] != values["dot product before rotation"]
    values = {step.name: step.value for step in causal.follow()}
    assert not causal.allowed
    assert values["masked"] == -np.inf
    assert values["weight"] == values["share of the output"] == 0


def test_seeds_widths_and_pairs():
    assert np.array_equal(walk_through(seed=1).embedded, walk_through(seed=1).embedded)
    assert not np.array_equal(walk_through(seed=1).embedded, walk_through(seed=2).embedded)
    walk = walk_through("dog", d_model=8, d_k=2, pair=(1, 0))
    assert walk.query.shape == (4, 2)
    assert walk.pair == (1, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"text": ""}, "an empty text"),
        ({"text": "a" * (MAX_CHARACTERS + 1)}, "2,001 characters"),
        *(({name: number}, "cure") for name, number in (("d_k", 7), ("d_k", 0), ("d_model", 0), ("seed", -1))),
        *(({name: other}, "cure") for name, other in (("mask", "noncausal"), ("pair", (0, 11)), ("max_merges", -1))),
    ],
)
def test_wrong_parameters(wrong, message):
    with pytest.raises(ParameterError, match=message):
        walk_through(**wrong)


def test_masks_by_name():
    assert named_mask("none") is None
    assert np.array_equal(named_mask("causal").array(4), np.tri(4, dtype=bool))
    assert np.array_equal(named_mask("window:2").array(4), np.tri(4, dtype=bool) & ~np.tri(4, k=-2, dtype=bool))
    for wrong in ("window", "window:0", "window:x", "causal:3"):
        with pytest.raises(ParameterError, match="none, causal or window:N"):
            named_mask(wrong)
