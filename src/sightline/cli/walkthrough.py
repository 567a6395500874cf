"""Every stage of attention on a short text, with numbers. `sightline explain` prints these stages.

Text → tokens → embeddings → query, key, value → rotation → scores → scaling → mask → softmax → weighted rows of V. The
definition, `reference.definition.forward`, computes the last five stages. Embeddings and projections are random, not
trained: the numbers show how attention works, not what a model knows.

The tokens come from byte-pair encoding; see `sightline.cli.byte_pair_encoding`. The merges are learned from the text.
The sentence "the cat ate the rat" is an exception: its tokens are published, with a vocabulary of the space, six
letters and three merges, a + t, t + h, and space + th + e. The third merge makes a whole word with the space before it,
which is published as "the". Thus the sentence becomes

    the ␣ c at ␣ at e the ␣ r at        [9, 0, 2, 7, 0, 7, 3, 9, 0, 6, 7]

These are eleven tokens, because the second "the" contains the space before it. If no merge included a space, the space
before the second "the" would be a token of its own, a 0 before the second 9, and there would be twelve tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..arrays.operations import Array
from ..errors import ParameterError, check_count
from ..formula.expression import Expression
from ..formula.library import causal, window
from ..positions import rotary
from ..reference.definition import Stages, forward
from .byte_pair_encoding import Tokenization, apply_merges, learn_merges

TEXT = "the cat ate the rat"
VOCABULARY = {" ": 0, "a": 1, "c": 2, "e": 3, "h": 4, "t": 5, "r": 6, "at": 7, "th": 8, " the": 9}  # of TEXT
MERGES = (("a", "t"), ("t", "h"), (" ", "th", "e"))  # of TEXT
WHOLE_WORD = {" the": "the"}  # published without the space that it contains
MAX_MERGES = 10  # default number of merges that are learned from a text
MAX_CHARACTERS = 2_000  # the stages keep several float64 matrices of tokens × tokens
MASKS = "none, causal or window:N"


def tokenize(text: str, max_merges: int | None = None) -> Tokenization:
    """Return the tokens of the text.

    Parameters
    ----------
    text : str
        Any text of 1 to `MAX_CHARACTERS` characters.
    max_merges : int, optional
        The largest number of merges that are learned from the text. Default: the published merges for the published
        sentence `TEXT`, else `MAX_MERGES`.

    Raises
    ------
    ParameterError
        The text is empty or too long, or `max_merges` is negative.

    Examples
    --------
    >>> from sightline.cli.walkthrough import tokenize
    >>> tokenize("the cat ate the rat").numbers
    (9, 0, 2, 7, 0, 7, 3, 9, 0, 6, 7)
    >>> tokenize("to be or not to be").pieces
    (' to', ' be', ' ', 'o', 'r', ' ', 'n', 'o', 't', ' to', ' be')
    """
    if not 1 <= len(text) <= MAX_CHARACTERS:
        allowed, cure = f"a text of 1 to {MAX_CHARACTERS:,} characters", "a part of the text" if text else repr(TEXT)
        raise ParameterError(f"a text of {len(text):,} characters" if text else "an empty text", allowed, cure)
    if max_merges is not None:
        check_count("{!r} merges", max_merges, 0, f"--merges {MAX_MERGES}")
    if text == TEXT and max_merges is None:
        return replace(apply_merges(TEXT, MERGES), vocabulary=VOCABULARY, published=WHOLE_WORD)
    return learn_merges(text, MAX_MERGES if max_merges is None else max_merges)


def named_mask(name: str) -> Expression | None:
    """Return the mask called `name`: "none", "causal" or "window:N". For "none" the result is None.

    "window:N" allows the key at the query's own position and the N − 1 keys before it.

    Raises
    ------
    ParameterError
        The name is none of these, or N is not a whole number of at least 1.
    """
    kind, _, length = name.partition(":")
    if name == "none":
        return None
    if name == "causal":
        return causal()
    if kind == "window" and length.isdecimal() and int(length) >= 1:
        return window(int(length))
    raise ParameterError(f"mask {name!r}", MASKS, "--mask causal")


@dataclass(frozen=True)
class Step:
    """The number that one stage of attention gives for one pair (query, key)."""

    name: str
    formula: str
    value: float


@dataclass(frozen=True)
class Walkthrough:
    """Every stage of attention on a text in float64: n tokens, embeddings of width d_model, one head with d_k = d_v."""

    tokens: Tokenization
    mask: Expression | None
    embedded: Array  # X (n, d_model)
    projections: tuple[Array, Array, Array]  # W_Q, W_K, W_V (d_model, d_k)
    query: Array  # Q = X W_Q (n, d_k)
    key: Array  # K = X W_K (n, d_k)
    value: Array  # V = X W_V (n, d_k)
    rotated_query: Array  # (n, d_k)
    rotated_key: Array  # (n, d_k)
    stages: Stages  # the stages of the definition: scores, scaled, masked, weights, output, lse
    pair: tuple[int, int]  # the query and the key that `follow` reports

    @property
    def d_k(self) -> int:
        return int(self.query.shape[-1])

    @property
    def allowed(self) -> bool:
        """True if the mask lets the query of `self.pair` see the key of `self.pair`."""
        return bool(self.stages.masked[self.pair] > -np.inf)

    def follow(self) -> list[Step]:
        """Return the number that each stage gives for `self.pair`, in the order of the stages."""
        query, key = self.pair
        stages = self.stages
        weight = float(stages.weights[query, key])
        return [
            Step("dot product before rotation", "q · k", float(self.query[query] @ self.key[key])),
            Step("score", "R q · R k", float(stages.scores[query, key])),
            Step("scaled", f"score / √{self.d_k}", float(stages.scaled[query, key])),
            Step("masked", "scaled where allowed, else −∞", float(stages.masked[query, key])),
            Step("lse", "ln Σ exp(masked) over the keys", float(stages.lse[query])),
            Step("weight", "exp(masked − lse)", weight),
            Step("share of the output", "‖weight · v‖", weight * float(np.linalg.norm(self.value[key]))),
        ]


def walk_through(
    text: str = TEXT,
    *,
    max_merges: int | None = None,
    d_model: int = 512,
    d_k: int = 64,
    seed: int = 0,
    mask: str = "none",
    pair: tuple[int, int] | None = None,
) -> Walkthrough:
    """Compute attention over a text, stage by stage, in float64.

    Parameters
    ----------
    text : str
        The text, at most `MAX_CHARACTERS` characters.
    max_merges : int, optional
        The largest number of byte-pair merges that are learned from the text; see `tokenize`.
    d_model, d_k : int
        The width of embeddings, and the width of query, key and value. d_k is even, because rotation needs pairs.
    seed : int
        The seed of the random embeddings (standard normal) and of W_Q, W_K and W_V, which are normal with variance
        2 / (d_model + d_k) (Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
        networks", 2010).
    mask : {"none", "causal", "window:N"}
        The pairs that are allowed; see `named_mask`.
    pair : (query, key), optional
        The pair that `Walkthrough.follow` reports, counted from 0. Default: the first c and the first r of the
        published tokens; the last token and the first token of any other text.

    Returns
    -------
    Walkthrough

    Raises
    ------
    ParameterError
        The text is empty or too long, there is no such mask, a number of merges, a width or the seed is out of range,
        or the pair lies outside the text.
    """
    tokenization = tokenize(text, max_merges)
    formula = named_mask(mask)
    check_count("d_model {!r}", d_model, 1, "--d-model 512")
    check_count("seed {!r}", seed, 0, "--seed 0")
    if check_count("d_k {!r}", d_k, 2, "--d-k 64") % 2:
        raise ParameterError(f"d_k {d_k}", "an even width of at least 2, because rotation needs pairs", "--d-k 64")
    n = len(tokenization.pieces)
    pair = _default_pair(tokenization) if pair is None else pair
    if not all(0 <= position < n for position in pair):
        raise ParameterError(f"pair {pair}", f"positions from 0 to {n - 1}", f"pair {_default_pair(tokenization)}")
    rng = np.random.default_rng(seed)
    embedded = rng.standard_normal((len(tokenization.vocabulary), d_model))[list(tokenization.numbers)]
    standard_deviation = math.sqrt(2 / (d_model + d_k))
    w_q, w_k, w_v = (standard_deviation * rng.standard_normal((d_model, d_k)) for _ in range(3))
    q, k, v = embedded @ w_q, embedded @ w_k, embedded @ w_v
    rotated_q, rotated_k = rotary(q), rotary(k)
    allowed = True if formula is None else formula.array(n)
    stages = forward(rotated_q, rotated_k, v, scale=1 / math.sqrt(d_k), allowed=allowed)
    return Walkthrough(tokenization, formula, embedded, (w_q, w_k, w_v), q, k, v, rotated_q, rotated_k, stages, pair)


def _default_pair(tokenization: Tokenization) -> tuple[int, int]:
    pieces = tokenization.pieces
    return (pieces.index("c"), pieces.index("r")) if tokenization.published else (len(pieces) - 1, 0)
