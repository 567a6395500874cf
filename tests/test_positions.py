"""Rotary and sinusoidal positions against their formulas, and that scores depend only on j − i."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from sightline.arrays.operations import dtype_name, to_numpy
from sightline.errors import DtypeError, ParameterError, ShapeError
from sightline.positions import rotary, sinusoidal
from sightline.reference.testing import assert_within_budget

PAIRINGS = ("half", "interleaved")
DTYPES = ("float64", "float32", "bfloat16", "float16")


def rotary_definition(x, base=10000.0, pairing="half", dimensions=None, positions=None):
    """Equation 34, one pair of components at a time, in float64."""
    x = np.array(x, np.float64)
    result, width = x.copy(), dimensions or x.shape[-1]
    positions = np.broadcast_to(np.arange(x.shape[-2]) if positions is None else positions, x.shape[:-1])
    for t in range(width // 2):
        a, b = (t, t + width // 2) if pairing == "half" else (2 * t, 2 * t + 1)
        angle = positions * base ** (-2 * t / width)
        result[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
        result[..., b] = x[..., b] * np.cos(angle) + x[..., a] * np.sin(angle)
    return result


def plain(x, **options):
    """Rotary positions in the dtype of x: cosines, products and sums are rounded."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    turn = rotary_definition(
        np.eye(x.shape[-1])[:, None, :].repeat(x.shape[-2], 1), **options
    )  # (d, n, d): rotated unit vectors
    terms = np.stack([x[..., k, None].astype(wide) * turn[k].astype(wide) for k in range(x.shape[-1])])
    return np.stack([terms.sum(0, dtype=wide).astype(x.dtype), terms[::-1].sum(0, dtype=wide).astype(x.dtype)])


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_against_the_formula(rng, dtype, pairing, library):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    x = rng.normal(size=(2, 3, 37, 16)).astype(kind)
    for options in ({}, {"base": 500.0}, {"dimensions": 6}):
        given = x if library == "numpy" else torch.from_numpy(x.astype(np.float64)).to(getattr(torch, dtype))
        turned = rotary(given, pairing=pairing, **options)
        assert dtype_name(turned) == dtype
        assert_within_budget(
            turned, rotary_definition(x, pairing=pairing, **options), plain(x, pairing=pairing, **options)
        )
        rest = options.get("dimensions", 16)
        assert np.array_equal(to_numpy(turned[..., rest:]), to_numpy(given[..., rest:]))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_scores_depend_on_the_distance_alone(rng, pairing):
    """Both positions shifted by any offset: equal scores, within the rounding of angles and sums."""
    q, k = rng.normal(size=(2, 1, 24, 32))
    counted = np.arange(24)

    def scores(offset):
        turned = [rotary(x, pairing=pairing, positions=counted + offset) for x in (q[0], k[0])]
        return turned[0] @ turned[1].T

    lengths = np.linalg.norm(q[0], axis=-1)[:, None] * np.linalg.norm(k[0], axis=-1)
    epsilon = np.finfo(np.float64).eps
    for offset in (1, 7, 1000, -12, 0.5):
        angles = 4 * (abs(offset) + 24) * epsilon  # rounding of pθ, in radians, for two vectors and two shifts
        assert (np.abs(scores(offset) - scores(0)) <= lengths * (angles + 2 * 32 * epsilon)).all()
    assert np.abs(scores(0) - q[0] @ k[0].T).max() > 1  # the scores do depend on the positions


def test_given_positions_equal_counted_positions(rng):
    x = rng.normal(size=(2, 3, 5, 8))
    assert np.array_equal(rotary(x), rotary(x, positions=np.arange(5)))
    assert np.array_equal(rotary(x)[..., 3:, :], rotary(x[..., 3:, :], positions=[3, 4]))
    rows = np.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
    by_row = rotary(x, positions=rows[:, None, :])
    assert np.array_equal(by_row[0], rotary(x[0]))
    assert np.array_equal(by_row[1, :, ::-1], rotary(x[1, :, ::-1]))
    assert np.array_equal(rotary(x, positions=np.zeros(5)), x)
    assert np.array_equal(to_numpy(rotary(torch.from_numpy(x), positions=torch.arange(5))), rotary(x))
    assert rotary(x[:, :, :0]).shape == (2, 3, 0, 8)


def test_interleaved_pairing_is_half_pairing_reordered(rng):
    x = rng.normal(size=(5, 8))
    order = np.arange(8).reshape(4, 2).T.ravel()  # 0, 2, 4, 6, 1, 3, 5, 7
    assert np.array_equal(rotary(x, pairing="interleaved")[..., order], rotary(x[..., order]))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradients(pairing):
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary(x, pairing=pairing, dimensions=6), x)


def test_compiles_without_graph_breaks():
    x = torch.randn(2, 5, 8)
    assert torch.equal(torch.compile(rotary, fullgraph=True, backend="eager")(x), rotary(x))


def test_sinusoidal_is_that_of_the_paper():
    pe = sinusoidal(50, 12)
    for p, t in ((0, 0), (7, 3), (49, 5)):
        angle = p / 10000 ** (2 * t / 12)
        np.testing.assert_array_max_ulp(pe[p, [2 * t, 2 * t + 1]], np.array([math.sin(angle), math.cos(angle)]), 64)
    assert pe.shape == (50, 12)
    assert sinusoidal(0, 4).shape == (0, 4)
    assert sinusoidal(3, 0).shape == (3, 0)


@pytest.mark.parametrize(
    ("error", "options", "cure"),
    [
        (ShapeError, {"x": np.zeros((5, 7))}, "an even number"),
        (ShapeError, {"x": np.zeros(8)}, r"\(\.\.\., n, d\)"),
        (DtypeError, {"x": np.zeros((5, 8), int)}, "float32"),
        (DtypeError, {"x": [[1.0, 2.0]]}, "asarray"),
        (ShapeError, {"dimensions": 5}, "dimensions=4"),
        (ParameterError, {"dimensions": 10}, "dimensions=None"),
        (ParameterError, {"dimensions": 0}, "dimensions=None"),
        (ParameterError, {"pairing": "both"}, "half"),
        (ParameterError, {"base": 0.0}, "10000"),
        (ParameterError, {"base": math.inf}, "10000"),
        (ParameterError, {"base": "10000"}, "base='10000'"),
        (ParameterError, {"base": True}, "base=True"),
        (ShapeError, {"positions": np.arange(4)}, r"positions\[:, None, :\]"),
        (ShapeError, {"positions": np.zeros((1, 2, 3, 5))}, r"\(n,\)"),
        (DtypeError, {"positions": np.zeros(5, bool)}, "cast"),
    ],
)
def test_errors_name_the_cure(error, options, cure):
    with pytest.raises(error, match=cure):
        rotary(**({"x": np.zeros((2, 5, 8))} | options))


def test_errors_of_sinusoidal():
    with pytest.raises(ShapeError, match=r"sinusoidal\(5, 4\)"):
        sinusoidal(5, 3)
    with pytest.raises(ParameterError):
        sinusoidal(5, 4, base=-1.0)
