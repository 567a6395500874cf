"""Every stage of attention on a short text, with numbers to look at: the source of `sightline explain`.

Text → tokens → embeddings → query, key, value → rotation → scores → scaling → mask → softmax → weighted values. The
last five are the stages of the definition itself, `sightline.reference.forward`. Embeddings and projections are drawn,
not trained: the numbers show how attention works, not what a model knows.

How the text becomes tokens. Byte-pair encoding (Gage, 1994; Sennrich et al., 2016) over spaces, six letters and three
merges: a + t, t + h, th + e. The last makes a whole word, and as in SentencePiece (Kudo and Richardson, 2018) a word
carries the space before it, and one space is put before the text. So "the cat ate the rat" is

    the ␣ c at ␣ at e the ␣ r at        [9, 0, 2, 7, 0, 7, 3, 9, 0, 6, 7]

eleven tokens; the space before the second "the" lies within it. Were spaces never joined to words, it would be a token
of its own, a 0 before the second 9, and there would be twelve. "the" inside a word stays th, e, so that `detokenize`
gives back every text exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ParameterError
from .formula.expression import Expression
from .formula.library import causal, window
from .positions import rotary
from .reference import Stages, forward

__all__ = ["MASKS", "TEXT", "VOCABULARY", "Step", "Walkthrough", "detokenize", "named_mask", "tokenize", "walk_through"]

Array = np.ndarray[Any, np.dtype[Any]]

TEXT = "the cat ate the rat"
VOCABULARY = {" ": 0, "a": 1, "c": 2, "e": 3, "h": 4, "t": 5, "r": 6, "at": 7, "th": 8, "the": 9}
WHOLE_WORDS = ("the",)  # written without the space they carry
MERGES = (("a", "t"), ("t", "h"), (" ", "th", "e"))
MASKS = "none, causal or window:N"


def tokenize(text: str) -> list[int]:
    """The text as token numbers of `VOCABULARY`.

    Raises
    ------
    ParameterError
        The text is empty, or holds characters outside the vocabulary.

    Examples
    --------
    >>> from sightline.walkthrough import tokenize
    >>> tokenize("the cat ate the rat")
    [9, 0, 2, 7, 0, 7, 3, 9, 0, 6, 7]
    """
    characters = sorted(piece for piece in VOCABULARY if len(piece) == 1)
    unknown_characters = sorted(set(text) - set(characters))
    if unknown_characters or not text:
        raise ParameterError(
            f"a text with {', '.join(map(repr, unknown_characters))}, outside the vocabulary"
            if unknown_characters
            else "an empty text",
            "the characters " + " ".join(map(repr, characters)),
            f"write it with these, as in {TEXT!r}",
        )
    pieces = [" ", *text]
    for merge in MERGES:
        pieces = _merge_pieces(pieces, merge)
    return [VOCABULARY[piece.strip() or " "] for piece in pieces]


def detokenize(tokens: list[int]) -> str:
    """The text that `tokenize` turned into these tokens."""
    pieces = {number: piece for piece, number in VOCABULARY.items()}
    return "".join(" " + pieces[t] if pieces[t] in WHOLE_WORDS else pieces[t] for t in tokens)[1:]


def _merge_pieces(pieces: list[str], merge: tuple[str, ...]) -> list[str]:
    """The pieces with every run of `merge`, left to right, joined."""
    result: list[str] = []
    at = 0
    while at < len(pieces):
        length = len(merge) if tuple(pieces[at : at + len(merge)]) == merge else 1
        result.append("".join(pieces[at : at + length]))
        at += length
    return result


def named_mask(name: str) -> Expression | None:
    """The mask of a name: "none", "causal", or "window:N" for the own key and the N − 1 before it.

    Raises
    ------
    ParameterError
        Any other name.
    """
    kind, _, length = name.partition(":")
    if name == "none":
        return None
    if name == "causal":
        return causal()
    if kind == "window" and length.isdecimal() and int(length) >= 1:
        return window(int(length))
    raise ParameterError(f"mask {name!r}", MASKS, "causal")


@dataclass(frozen=True)
class Step:
    """What one stage says of one pair (query, key)."""

    name: str
    formula: str
    value: float


@dataclass(frozen=True)
class Walkthrough:
    """Every stage, float64. n tokens, d_model wide; one head of width d_k = d_v."""

    text: str
    tokens: tuple[int, ...]
    mask: Expression | None
    embedded: Array  # X (n, d_model)
    projections: tuple[Array, Array, Array]  # W_Q, W_K, W_V (d_model, d_k)
    query: Array  # Q = X W_Q (n, d_k)
    key: Array  # K = X W_K (n, d_k)
    value: Array  # V = X W_V (n, d_k)
    rotated_query: Array  # (n, d_k)
    rotated_key: Array  # (n, d_k)
    stages: Stages  # scores, scaled, masked, weights, output, lse
    pair: tuple[int, int]  # the query and key followed

    @property
    def labels(self) -> list[str]:
        """The tokens as text, ␣ for a space."""
        pieces = {number: piece for piece, number in VOCABULARY.items()}
        return [pieces[token].replace(" ", "␣") for token in self.tokens]

    @property
    def d_k(self) -> int:
        return int(self.query.shape[-1])

    @property
    def allowed(self) -> bool:
        """Whether the followed query may see the followed key."""
        return bool(self.stages.masked[self.pair] > -np.inf)

    def follow(self) -> list[Step]:
        """The followed pair, stage by stage."""
        query, key = self.pair
        stages = self.stages
        weight = float(stages.weights[query, key])
        return [
            Step("dot product before rotation", "q · k", float(self.query[query] @ self.key[key])),
            Step("score", "R q · R k", float(stages.scores[query, key])),
            Step("scaled", f"score / √{self.d_k}", float(stages.scaled[query, key])),
            Step("masked", "scaled where allowed, else −∞", float(stages.masked[query, key])),
            Step("normaliser", "lse = ln Σ exp(masked) over the keys", float(stages.lse[query])),
            Step("weight", "exp(masked − lse)", weight),
            Step("share of the output", "‖weight · v‖", weight * float(np.linalg.norm(self.value[key]))),
        ]


def walk_through(
    text: str = TEXT,
    *,
    d_model: int = 512,
    d_k: int = 64,
    seed: int = 0,
    mask: str = "none",
    pair: tuple[int, int] | None = None,
) -> Walkthrough:
    """Attention over a text, stage by stage, in float64.

    Parameters
    ----------
    text : str
        Written with the characters of `VOCABULARY`.
    d_model, d_k : int
        Widths of embeddings and of query, key and value. d_k is even, for the rotation.
    seed : int
        Draws the embeddings, standard normal, and W_Q, W_K, W_V, normal with variance 2 / (d_model + d_k) (Glorot and
        Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010).
    mask : {"none", "causal", "window:N"}
        Which pairs are allowed; see `named_mask`.
    pair : (query, key), optional
        The pair to follow, counted from 0; by default the first c and the first r after it where the text has both,
        else the first and the last token.

    Returns
    -------
    Walkthrough

    Raises
    ------
    ParameterError
        A text outside the vocabulary, a width, seed or mask out of range, a pair outside the text.
    """
    tokens = tokenize(text)
    formula = named_mask(mask)
    _validate(d_model, d_k, seed)
    n = len(tokens)
    pair = _default_pair(tokens) if pair is None else pair
    if not all(0 <= at < n for at in pair):
        raise ParameterError(f"pair {pair}", f"positions from 0 to {n - 1}", f"pair {_default_pair(tokens)}")
    rng = np.random.default_rng(seed)
    embedded = rng.standard_normal((len(VOCABULARY), d_model))[tokens]
    standard_deviation = math.sqrt(2 / (d_model + d_k))
    w_q, w_k, w_v = (standard_deviation * rng.standard_normal((d_model, d_k)) for _ in range(3))
    query, key, value = embedded @ w_q, embedded @ w_k, embedded @ w_v
    rotated_query, rotated_key = rotary(query), rotary(key)
    allowed = True if formula is None else formula.array(n)
    stages = forward(rotated_query, rotated_key, value, scale=1 / math.sqrt(d_k), allowed=allowed)
    return Walkthrough(
        text,
        tuple(tokens),
        formula,
        embedded,
        (w_q, w_k, w_v),
        query,
        key,
        value,
        rotated_query,
        rotated_key,
        stages,
        pair,
    )


def _default_pair(tokens: list[int]) -> tuple[int, int]:
    c, r = VOCABULARY["c"], VOCABULARY["r"]
    if c in tokens and r in tokens[tokens.index(c) :]:
        return tokens.index(c), tokens.index(r, tokens.index(c))
    return 0, len(tokens) - 1


def _validate(d_model: int, d_k: int, seed: int) -> None:
    if d_model < 1:
        raise ParameterError(f"d_model {d_model}", "a width of at least 1", "512")
    if d_k < 2 or d_k % 2:
        raise ParameterError(f"d_k {d_k}", "an even width of at least 2: rotation turns pairs", "64")
    if seed < 0:
        raise ParameterError(f"seed {seed}", "a whole number ≥ 0", "0")
