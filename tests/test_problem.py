"""At the door: bad input gets one clear error that says what was given, what is allowed and the cure."""

import numpy as np
import pytest
import torch

import sightline
from sightline import b, errors, h, i, j, lse, s, table, weights, where
from sightline.problem import pose

Q, K, V = np.zeros((2, 4, 6, 8), np.float32), np.zeros((2, 2, 7, 8), np.float32), np.zeros((2, 2, 7, 3), np.float32)


def z(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def chained(b, h, q, k):
    return q >= k > 2


def truthy(b, h, q, k):
    return k if q > k else q


# what is asked: arguments, the class of error, words its message holds
BAD = {
    "widths differ": (dict(query=z(2, 4, 6, 9)), errors.ShapeError, ["9 wide", "d_k"]),
    "keys and values differ": (dict(value=z(2, 2, 8, 3)), errors.ShapeError, ["7 keys and 8 values"]),
    "key and value heads differ": (dict(value=z(2, 1, 7, 3)), errors.ShapeError, ["2 key heads and 1 value heads"]),
    "heads do not divide": (dict(query=z(2, 3, 6, 8)), errors.ShapeError, ["3 query heads", "multiple of G"]),
    "batches differ": (dict(query=z(3, 4, 6, 8)), errors.ShapeError, ["broadcast", "(3, 4, 6, 8)"]),
    "one axis": (dict(query=z(8)), errors.ShapeError, ["two axes"]),
    "axes differ": (dict(query=z(4, 6, 8)), errors.ShapeError, ["different numbers of axes"]),
    "no width": (dict(query=z(1, 1, 6, 0), key=z(1, 1, 7, 0)), errors.ShapeError, ["d_k is 0"]),
    "a list": (dict(query=[[1.0]]), errors.DtypeError, ["query is a list", "asarray"]),
    "integers": (dict(query=z(2, 4, 6, 8, dtype=np.int64)), errors.DtypeError, ["int64", "float32"]),
    "complex": (dict(key=z(2, 2, 7, 8, dtype=np.complex64)), errors.DtypeError, ["key has dtype complex64"]),
    "objects": (dict(value=z(2, 2, 7, 3, dtype=object)), errors.DtypeError, ["object"]),
    "strings": (dict(query=np.full((2, 4, 6, 8), "x")), errors.DtypeError, ["query"]),
    "mixed dtypes": (dict(key=z(2, 2, 7, 8, dtype=np.float64)), errors.DtypeError, ["float64", "one dtype"]),
    "mixed frameworks": (dict(key=torch.zeros(2, 2, 7, 8)), errors.DeviceError, ["torch", "numpy"]),
    "a float mask": (dict(mask=z(6, 7)), errors.MaskError, ["float32", "bias", "!= 0"]),
    "an integer mask": (dict(mask=z(6, 7, dtype=np.int64)), errors.MaskError, ["int64", "bias", "!= 0"]),
    "a number as mask": (dict(mask=i - j), errors.MaskError, ["i − j", "!= 0"]),
    "a mask that reads s": (dict(mask=s > 0), errors.MaskError, ["reads the score", "where(condition, s, -inf)"]),
    "a condition as score": (dict(score=i >= j), errors.MaskError, ["condition", "mask="]),
    "a mask of other lengths": (dict(mask=z(6, 8, dtype=bool)), errors.ShapeError, ["length 8 stands for j", "7 or 1"]),
    "a bias of other heads": (dict(score=sightline.bias(z(3, 6, 7))), errors.ShapeError, ["stands for h", "4 or 1"]),
    "a string as mask": (dict(mask="causal"), errors.MaskError, ["str", "causal()"]),
    "a list as mask": (dict(mask=[[True] * 7] * 6), errors.MaskError, ["list", "asarray"]),
    "chained comparison": (dict(mask=chained), errors.FormulaError, ["(a < i) & (i < b)"]),
    "an if": (dict(mask=truthy), errors.FormulaError, ["sightline.where"]),
    "a function of other arguments": (dict(mask=lambda i, j: i >= j), errors.FormulaError, ["(b, h, i, j)"]),
    "reads outside": (dict(score=s + table(z(9))[i - j]), errors.TableError, ["(9,)", "b=0, h=0, i=0, j=1", "clip"]),
    "reads outside by b": (dict(mask=j < table(z(1, dtype=int))[b]), errors.TableError, ["b=1"]),
    "sinks of other heads": (dict(sinks=z(2)), errors.ShapeError, ["(H,) = (4,)"]),
    "whole sinks": (dict(sinks=z(4, dtype=int)), errors.DtypeError, ["sinks"]),
    "scale NaN": (dict(scale=float("nan")), errors.ParameterError, ["scale=nan", "finite"]),
    "scale infinite": (dict(scale=float("inf")), errors.ParameterError, ["scale=inf"]),
    "scale a word": (dict(scale="small"), errors.ParameterError, ["scale='small'"]),
    "dropout negative": (dict(dropout=-0.1), errors.ParameterError, ["dropout=-0.1", "0 to 1"]),
    "dropout over one": (dict(dropout=1.5), errors.ParameterError, ["dropout=1.5"]),
    "dropout without a seed": (dict(dropout=0.1), errors.ParameterError, ["seed"]),
    "seed negative": (dict(dropout=0.1, seed=-1), errors.ParameterError, ["seed=-1"]),
    "see a word": (dict(see="lse"), errors.ParameterError, ["sightline.lse()"]),
    "see a function": (dict(see=[lse]), errors.ParameterError, ["sightline.lse()"]),
    "huge whole numbers": (dict(mask=i * 2**52 * 4 >= j), errors.FormulaError, ["2⁵³"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    given, kind, words = BAD[name]
    arguments = {"query": Q, "key": K, "value": V} | given
    with pytest.raises(kind) as caught:
        sightline.attention(**arguments)
    error = caught.value
    assert isinstance(error, errors.SightlineError)
    assert all(word in str(error) for word in words), str(error)
    assert all((error.given, error.allowed, error.cure))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: (i >= j) and (j > 2),
        lambda: (i >= j) or (j > 2),
        lambda: not (i >= j),
        lambda: 1 < i < 5,
        lambda: (i >= j) & (i - j),
        lambda: ~i,
        lambda: np.zeros(5)[i],
        lambda: int(i),
        lambda: np.asarray(i),
        lambda: np.sum(i),
        lambda: np.zeros(3) * s,
        lambda: table(np.zeros(3)) + s,
        lambda: table(np.zeros(3))[i, j],
        lambda: table(np.zeros(3))[s],
        lambda: table(np.zeros(3))[i >= j],
        lambda: i + "1",
        lambda: i + 2**60,
    ],
)
def test_what_formulas_cannot_mean(wrong):
    with pytest.raises(errors.FormulaError) as caught:
        wrong()
    assert caught.value.cure


def test_reads_are_allowed_where_nobody_looks():
    bias = np.arange(1.0, 7.0)
    hidden = pose(Q, K, V, mask=(i >= j) & (j < 6), score=s + table(bias)[i - j])
    branch = pose(Q, K, V, score=where((i >= j) & (j < 6), s + table(bias)[i - j], s))
    for problem in (hidden, branch):
        assert problem.score is not None
    with pytest.raises(errors.TableError):
        pose(Q, K, V, score=where(i > j, s, s + table(bias)[i - j]))


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("m", [0, 1])
@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("kernel", [None, "cpu", "streaming", "reference"])
def test_nothing_is_not_an_error(n, m, batch, kernel):
    q, k, v = z(batch, 2, n, 4), z(batch, 1, m, 4), np.ones((batch, 1, m, 3), np.float32)
    see = [lse(), weights()]
    out, (normaliser, seen) = sightline.attention(q, k, v, mask=i >= j, see=see, kernel=kernel)
    assert out.shape == (batch, 2, n, 3)
    assert normaliser.shape == (batch, 2, n)
    assert seen.shape == (batch, 2, n, m)
    np.testing.assert_array_equal(out, np.full_like(out, 1.0 if m else 0.0))
    np.testing.assert_array_equal(normaliser, np.full_like(normaliser, 0.0 if m else -np.inf))


def test_layouts_without_heads():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 5, 4)), rng.normal(size=(3, 6, 4)), rng.normal(size=(3, 6, 2))
    whole = sightline.attention(q[:, None], k[:, None], v[:, None], mask=j < 2 + b + h)
    np.testing.assert_array_equal(sightline.attention(q, k, v, mask=j < 2 + b + h), whole[:, 0])
    np.testing.assert_array_equal(sightline.attention(q[1], k[1], v[1], mask=j < 3), whole[1, 0])
    _, (normaliser, seen) = sightline.attention(q, k, v, see=[lse(), weights()])
    assert (normaliser.shape, seen.shape) == ((3, 5), (3, 5, 6))


def test_leading_axes_broadcast_and_b_counts_them_in_c_order():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 3, 4, 5, 6)), rng.normal(size=(3, 2, 7, 6)), rng.normal(size=(1, 1, 2, 7, 6))
    lengths = np.array([1, 2, 3, 4, 5, 6])
    out = sightline.attention(q, k, v, mask=sightline.padding(lengths))
    assert out.shape == (2, 3, 4, 5, 6)
    one = sightline.attention(q[1, :1], k[:1], v[0], mask=j < 4)
    np.testing.assert_array_equal(out[1, :1], one)
