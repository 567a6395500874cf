"""A program of a user: `mypy --strict` checks it against the installed wheel, and it runs without optional packages.

The line with `type: ignore` is wrong on purpose. If the wheel had no types, mypy would report that comment as unused.
"""

import numpy as np

import sightline
from sightline import Expression, KVCache, i, j, s, table


def attend(length: int) -> float:
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, length, 16)).astype(np.float32) for _ in range(3))
    mask: Expression = (i >= j) & sightline.window(8)
    score: Expression = s - table(np.array([0.5, 0.25]))[sightline.h] * (i - j)
    output, (entropy, top) = sightline.attention(
        query, key, value, mask=mask, score=score, see=[sightline.entropy(), sightline.top_k(2)]
    )
    assert output.shape == (2, length, 16)
    assert entropy.shape == (2, length)
    assert top.where.shape == (2, length, 2)
    exact = sightline.attention(
        query.astype(float), key.astype(float), value.astype(float), mask=mask, score=score, kernel="reference"
    )
    return float(np.abs(output - exact).max())


def decode() -> KVCache:
    cache = KVCache(dtype="float32")
    row = np.ones((1, 2, 1, 16), np.float32)
    cache.append(row, row)
    assert sightline.attention(row, cache, mask=sightline.causal()).shape == (1, 2, 1, 16)
    return cache


if __name__ == "__main__":
    assert attend(40) < 1e-5, "the error of float32 is larger than 1e-5"
    print(decode())
    try:
        sightline.window("wide")  # type: ignore[arg-type]
    except sightline.errors.SightlineError as error:
        print(f"a wrong argument raises {type(error).__name__}")
