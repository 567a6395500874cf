"""Position encodings: rotary embeddings (RoPE) for queries and keys, and sinusoidal encodings for embeddings."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from .arrays.operations import accumulator, check_float_dtype, convert, dtype_name, namespace, resolve_dtype
from .call.validation import to_float
from .errors import DtypeError, ParameterError, ShapeError

__all__ = ["rotary", "sinusoidal"]

Pairing = Literal["half", "interleaved"]


def rotary(
    x: Any, *, base: float = 10000.0, pairing: Pairing = "half", dimensions: int | None = None, positions: Any = None
) -> Any:
    """Rotate pairs of components by angles that grow with the position. Scores then depend on positions by j − i only.

        (x_a, x_b) → (x_a cos pθ_t − x_b sin pθ_t, x_b cos pθ_t + x_a sin pθ_t),   θ_t = base^(−2t / dimensions)

    Here p is the position, t = 0, 1, ... counts the pairs, and a and b are the two components of pair t. Angles are in
    radians. Apply `rotary` to query and key, not to value.

    Parameters
    ----------
    x : (..., n, d) float16, bfloat16, float32 or float64, NumPy or torch
        Angles are computed in float64, and the rotation in the accumulator's dtype (float64 for float64, else float32).
    base : float, default 10000
        Above 0. The slowest pair turns once in about 2π · base positions.
    pairing : {"half", "interleaved"}
        The components of pair t: "half" pairs t and t + dimensions/2 (GPT-NeoX, Llama in Hugging Face's transformers),
        "interleaved" pairs 2t and 2t + 1 (RoFormer, GPT-J, Meta's Llama). The two pairings differ only in the order of
        components, but trained weights fit only one of the pairings.
    dimensions : int, default d
        The number of leading components that rotate; an even number. The other components stay as they are.
    positions : (n,) or (..., n) ints or floats, optional
        The position of each row of x, broadcastable to x.shape[:-1]. Default: 0, 1, ..., n − 1.

    Returns
    -------
    (..., n, d) array of x's library and dtype. In torch, gradients flow to x.

    Raises
    ------
    ShapeError
        x has fewer than two axes, the number of rotating components is odd, or positions do not broadcast.
    DtypeError
        x is not an array of floats, or positions are not real numbers.
    ParameterError
        base is not positive and finite, pairing is no allowed word, or dimensions is outside 2 ... d.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34.

    Examples
    --------
    >>> import numpy as np
    >>> from sightline.positions import rotary
    >>> rotary(np.array([[1.0, 0.0], [1.0, 0.0]])).round(2)  # position 0 stays, position 1 turns by 1 radian
    array([[1.  , 0.  ],
           [0.54, 0.84]])
    """
    width = _validate(x, base, pairing, dimensions)
    xp, half = namespace(x), width // 2
    angles = _angles(xp, x, base, width, positions)
    wide = resolve_dtype(xp, accumulator(dtype_name(x)))
    cos, sin = xp.astype(xp.cos(angles), wide), xp.astype(xp.sin(angles), wide)
    rotary_part = xp.astype(x[..., :width], wide)
    if pairing == "half":
        first, second = rotary_part[..., :half], rotary_part[..., half:]
    else:
        first, second = rotary_part[..., 0::2], rotary_part[..., 1::2]
    pair = [first * cos - second * sin, second * cos + first * sin]
    rotated = xp.concat(pair, axis=-1) if pairing == "half" else xp.reshape(xp.stack(pair, axis=-1), rotary_part.shape)
    rotated = xp.astype(rotated, x.dtype)
    return rotated if width == x.shape[-1] else xp.concat([rotated, x[..., width:]], axis=-1)


def sinusoidal(n: int, d: int, base: float = 10000.0) -> Any:
    """Return the sinusoidal position encoding: PE[p, 2t] = sin(p / base^(2t/d)), PE[p, 2t + 1] = cos(p / base^(2t/d)).

    Parameters
    ----------
    n, d : int
        The number of positions, and the width of an embedding. d is even.
    base : float, default 10000
        Above 0.

    Returns
    -------
    (n, d) numpy.ndarray of float64
        Add it to embeddings.

    Raises
    ------
    ShapeError
        d is odd, or n or d is negative.
    ParameterError
        base is not positive and finite.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.5.

    Examples
    --------
    >>> from sightline.positions import sinusoidal
    >>> sinusoidal(2, 2).round(2)
    array([[0.  , 1.  ],
           [0.84, 0.54]])
    """
    _check_base(base)
    if n < 0 or d < 0 or d % 2:
        raise ShapeError(
            f"sinusoidal({n}, {d})", "n ≥ 0 and an even d ≥ 0", f"sinusoidal({max(n, 0)}, {max(d + d % 2, 0)})"
        )
    angles = np.arange(n, dtype=np.float64)[:, None] * float(base) ** (-np.arange(0, d, 2) / max(d, 1))
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(n, d)


def _angles(xp: Any, x: Any, base: float, width: int, positions: Any) -> Any:
    """Return the angles p · base^(−2t/width) as a float64 array (..., n, width/2)."""
    options = {"device": x.device, "dtype": xp.float64}
    if positions is None:
        positions = xp.arange(x.shape[-2], **options)
    else:
        positions = xp.astype(_read_positions(x, positions), xp.float64)
    exponents = xp.arange(0, width, 2, **options) / -width
    return positions[..., None] * xp.pow(xp.asarray(float(base), **options), exponents)


def _read_positions(x: Any, positions: Any) -> Any:
    """Return the positions as an array in the library and on the device of x, after checking shape and dtype."""
    if not hasattr(positions, "dtype"):
        positions = np.asarray(positions)
    if not dtype_name(positions).startswith(("int", "uint", "float", "bfloat")):
        raise DtypeError(
            f"positions of dtype {dtype_name(positions)}", "ints or floats", "cast: positions.astype(float)"
        )
    given, rows = tuple(positions.shape), tuple(x.shape[:-1])
    if len(given) > len(rows) or any(p not in (1, r) for p, r in zip(given[::-1], rows[::-1], strict=False)):
        raise ShapeError(
            f"positions of shape {given} for x of shape {tuple(x.shape)}",
            f"a shape that broadcasts to x.shape[:-1] = {rows}",
            "positions of shape (n,), or positions[:, None, :] for positions (B, n) and x (B, H, n, d)",
        )
    return convert(positions, x)


def _validate(x: Any, base: float, pairing: str, dimensions: int | None) -> int:
    """Check the arguments of `rotary`. Return the number of components that rotate."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise DtypeError(f"x is a {type(x).__name__}", "an array of floats", "x=numpy.asarray(x)")
    check_float_dtype("x", x)
    if x.ndim < 2:
        raise ShapeError(f"x of shape {tuple(x.shape)}", "(..., n, d)", "x[None, :] for a single position")
    _check_base(base)
    if pairing not in ("half", "interleaved"):
        raise ParameterError(f"pairing={pairing!r}", '"half" or "interleaved"', 'pairing="half" for Llama weights')
    d = x.shape[-1]
    width = d if dimensions is None else dimensions
    if not hasattr(width, "__index__") or isinstance(width, bool) or not 0 < width <= d:
        given = f"dimensions={dimensions!r} for x with {d} components"
        raise ParameterError(given, f"an even number from 2 to {d}", "dimensions=None")
    if width % 2:
        raise ShapeError(
            f"{width} components to rotate in pairs (x is {d} wide)",
            "an even number",
            f"dimensions={width - 1} leaves the last component as it is" if width > 1 else "x of an even width",
        )
    return width


def _check_base(base: float) -> None:
    if not 0 < to_float(base) < math.inf:
        raise ParameterError(f"base={base!r}", "a finite number above 0", "base=10000.0")
