"""Data shipped with the library: activations of a trained encoder, described by README.md here, and tried versions."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import as_file, files

import numpy as np

from ..arrays.operations import Array
from ..errors import ParameterError

__all__ = ["NAMES", "Activations", "Layer", "load"]


NAMES = ("minilm_cat", "minilm_moby")


@dataclass(frozen=True)
class Layer:
    """The inputs and outputs of one attention layer, float32."""

    query: Array  # (B, H, n, d_k)
    key: Array  # (B, H, n, d_k)
    value: Array  # (B, H, n, d_v)
    output: Array  # (B, H, n, d_v), as the model computed it
    weights: Array | None  # (B, H, n, n), as the model computed them; None if the data file lacks the layer's weights


@dataclass(frozen=True)
class Activations:
    """Texts, and the activations of attention layers of all-MiniLM-L6-v2 on these texts.

    The scale is 1/√d_k, and keys at or beyond `lengths` are hidden.
    """

    texts: tuple[str, ...]
    tokens: tuple[tuple[str, ...], ...]  # for each of the B texts its n tokens, with padding
    lengths: Array  # (B,) int64: number of real tokens of each text; the tokens after these are padding
    layers: dict[int, Layer]  # by the number of the layer in the model


def load(name: str) -> Activations:
    """Return the shipped activations called `name`.

    Parameters
    ----------
    name : {"minilm_cat", "minilm_moby"}
        "minilm_cat": two sentences padded to 20 tokens, layers 0 and 3 with their weights. "minilm_moby": one paragraph
        of 135 tokens, layer 3 without weights.

    Returns
    -------
    Activations

    Raises
    ------
    ParameterError
        The name is not in `NAMES`.

    Examples
    --------
    >>> import sightline.data
    >>> cat = sightline.data.load("minilm_cat")
    >>> cat.texts[0], cat.layers[3].query.shape
    ('the cat ate the rat', (2, 12, 20, 32))
    """
    if name not in NAMES:
        raise ParameterError(f"activations {name!r}", " or ".join(map(repr, NAMES)), f"load({NAMES[0]!r})")
    with as_file(files(__package__) / f"{name}.npz") as path, np.load(path) as stored:
        arrays = dict(stored)
    numbers = sorted({int(key.removeprefix("layer").split("_")[0]) for key in arrays if key.startswith("layer")})
    parts = ("query", "key", "value", "output", "weights")
    return Activations(
        tuple(map(str, arrays["texts"])),
        tuple(tuple(map(str, row)) for row in arrays["tokens"]),
        arrays["lengths"],
        {number: Layer(*(arrays.get(f"layer{number}_{part}") for part in parts)) for number in numbers},  # type: ignore[arg-type]
    )


def tried_versions() -> dict[str, list[str]]:
    """Return the versions, oldest first, of each package with which the library was run.

    `make test-versions` writes them to tried_versions.toml.
    """
    return tomllib.loads((files(__package__) / "tried_versions.toml").read_text(encoding="utf-8"))
