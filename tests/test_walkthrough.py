"""The walk-through of `sightline explain`: tokens, stages against plain NumPy, and the pair that it follows."""

import itertools
import math

import numpy as np
import pytest

from sightline.errors import ParameterError
from sightline.walkthrough import TEXT, VOCABULARY, detokenize, named_mask, tokenize, walk_through


def test_the_published_tokens():
    assert VOCABULARY == {" ": 0, "a": 1, "c": 2, "e": 3, "h": 4, "t": 5, "r": 6, "at": 7, "th": 8, "the": 9}
    assert tokenize("the cat ate the rat") == [9, 0, 2, 7, 0, 7, 3, 9, 0, 6, 7]


def test_tokens_give_the_text_back():
    """Every text of up to five characters of the vocabulary; all token lists differ."""
    found = {}
    for length in range(1, 6):
        for characters in itertools.product(" aceht", repeat=length):
            text = "".join(characters)
            tokens = tuple(tokenize(text))
            assert detokenize(list(tokens)) == text
            assert found.setdefault(tokens, text) == text
    assert detokenize(tokenize("the cat atethe rat")) == "the cat atethe rat"
    assert tokenize("ethe")[1:] == [3, 8, 3]  # inside a word


@pytest.mark.parametrize(("text", "named"), [("the dog", "'d', 'g', 'o'"), ("The cat", "'T'"), ("", "empty")])
def test_other_characters_are_named(text, named):
    with pytest.raises(ParameterError, match=named) as caught:
        tokenize(text)
    assert TEXT in caught.value.cure


def test_every_stage_equals_plain_numpy():
    walk = walk_through(seed=3, mask="causal")
    n, d_k = len(walk.tokens), 64
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
        assert [walk.labels[at] for at in walk.pair] == ["c", "r"]
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
    walk = walk_through("the tat", d_model=8, d_k=2, pair=(1, 0))
    assert walk.query.shape == (4, 2)
    assert walk.pair == (1, 0)
    assert walk_through("the tat").pair == (0, 3)
    assert walk_through("rat cat").pair == (0, 5)  # no r after the c


@pytest.mark.parametrize(
    "wrong", [{"d_k": 7}, {"d_k": 0}, {"d_model": 0}, {"seed": -1}, {"mask": "noncausal"}, {"pair": (0, 11)}]
)
def test_wrong_parameters(wrong):
    with pytest.raises(ParameterError):
        walk_through(**wrong)


def test_masks_by_name():
    assert named_mask("none") is None
    assert np.array_equal(named_mask("causal").array(4), np.tri(4, dtype=bool))
    assert np.array_equal(named_mask("window:2").array(4), np.tri(4, dtype=bool) & ~np.tri(4, k=-2, dtype=bool))
    for wrong in ("window", "window:0", "window:x", "causal:3"):
        with pytest.raises(ParameterError, match="none, causal or window:N"):
            named_mask(wrong)
