"""Invalid arguments raise errors with given, allowed and cure; empty and unusual shapes are valid."""

import copy
import functools
import pickle
import random

import numpy as np
import pytest
import torch

import sightline
from sightline import (
    alibi,
    bias,
    causal,
    dense,
    documents,
    errors,
    h,
    i,
    j,
    lse,
    p,
    padding,
    prefix,
    relative_bias,
    s,
    softcap,
    table,
    weights,
    where,
    window,
)
from sightline.call.problem import make_problem
from sightline.errors import (
    DeviceError,
    DtypeError,
    FormulaError,
    KernelRefusedError,
    MaskError,
    ParameterError,
    ShapeError,
    SightlineError,
    TableError,
)
from sightline.formula.derivative import derivative
from sightline.reference.accuracy import compute_baseline
from sightline.reference.testing import assert_within_budget

X = np.ones((1, 2, 4, 3), np.float32)
T = torch.ones(1, 2, 4, 3)
META = T.to("meta")
FEW = table(np.ones(2))


def make(query=X, key=X, value=X, **options):
    return make_problem(query, key, value, **options)


def tensors(**options):
    return make(T, T, T, **options)


masked_call, masked_vjp = (functools.partial(run, X, X, X) for run in (sightline.attention, sightline.attention_vjp))


def masked(function):
    return lambda: make(mask=function)


REFUSED = {
    # name: the call, its error, and texts that the message must contain
    "a list": (lambda: make([[1.0]]), DtypeError, "query is a list", "numpy.asarray"),
    "integers": (lambda: make(X.astype(int)), DtypeError, "query has dtype int64", "float32", "cast"),
    "complex numbers": (lambda: make(key=X.astype(complex)), DtypeError, "key has dtype complex128", "cast"),
    "objects": (lambda: make(value=X.astype(object)), DtypeError, "value has dtype object"),
    "strings": (lambda: make(X.astype(str)), DtypeError, "query has dtype <U"),
    "extended precision": (lambda: make(X.astype(np.longdouble)), DtypeError, "query has dtype", "float64"),
    "byte order": (lambda: make(*[X.astype(X.dtype.newbyteorder())] * 3), DtypeError, "query has dtype", "cast"),
    "a masked array": (lambda: make(np.ma.masked_array(X, X > 0)), DtypeError, "masked", "mask="),
    "a sparse tensor": (lambda: make(T.to_sparse(), T, T), DtypeError, "sparse", "to_dense"),
    "dtypes": (lambda: make(key=X.astype(float)), DtypeError, "query: float32, key: float64", "cast key and value"),
    "two frameworks": (lambda: make(key=T), DeviceError, "query: numpy, key: torch", "convert"),
    "two devices": (lambda: make(T, META, T), DeviceError, "query: cpu, key: meta", "one device"),
    "one axis": (lambda: make(X[0, 0, 0]), ShapeError, "fewer than two axes", "query (3,)"),
    "some without heads": (lambda: make(X[0]), ShapeError, "different numbers of axes", "query (2, 4, 3)"),
    "two widths": (lambda: make(key=X[..., :2]), ShapeError, "query is 3 wide and key 2", "same d_k"),
    "no width": (lambda: make(X[..., :0], X[..., :0]), ShapeError, "d_k is 0", "component"),
    "fewer values": (lambda: make(value=X[..., :3, :]), ShapeError, "4 keys and 3 values", "one value for every key"),
    "fewer value heads": (lambda: make(value=X[:, :1]), ShapeError, "2 key heads and 1 value heads"),
    "uneven groups": (lambda: make(np.ones((1, 3, 4, 3), np.float32)), ShapeError, "3 query heads", "multiple of G"),
    "batches of 2 and 3": (lambda: make(*(X.repeat(k, 0) for k in (2, 3, 3))), ShapeError, "do not broadcast", "or 1"),
    # masks
    "a mask of floats": (lambda: make(mask=np.zeros((4, 4))), MaskError, "array of float64", "!= 0", "bias"),
    "a mask of integers": (lambda: make(mask=np.zeros((4, 4), int)), MaskError, "array of int64", "!= 0", "bias"),
    "a tensor of floats": (lambda: tensors(mask=torch.zeros(4, 4)), MaskError, "array of float32", "bias"),
    "a list as mask": (lambda: make(mask=[[True]]), MaskError, "mask is a list", "numpy.asarray"),
    "a word as mask": (lambda: make(mask="causal"), MaskError, "mask is a str", "causal()"),
    "a number as mask": (lambda: make(mask=i - j), MaskError, "i − j, which is a number", "(i − j) != 0"),
    "a bias as mask": (lambda: make(mask=bias(np.ones((4, 4)))), MaskError, "which is a number", "score="),
    "a mask of scores": (lambda: make(mask=s > 0), MaskError, "reads the score", "where(condition, s, -inf)"),
    "a short mask": (lambda: make(mask=np.ones((3, 4), bool)), ShapeError, "axis 0 of length 3 stands for i", "4 or 1"),
    "a mask of nothing": (lambda: make(mask=np.ones((0, 4), bool)), ShapeError, "(0, 4)", "length 4 or 1"),
    "a mask for 4 batches": (
        lambda: make(mask=np.ones((2, 2, 2, 4, 4), bool)),
        ShapeError,
        "whose leading axes (2, 2) stand for the batch axes (1,)",
        "broadcast to (1,)",
    ),
    "dense numbers": (lambda: dense(np.ones((4, 4))), MaskError, "True where the query attends", "bias"),
    "lengths of 2 batches": (lambda: make(mask=padding([3, 4])), ShapeError, "axis 0 of length 2 stands for b"),
    "fractional lengths": (lambda: padding(np.ones(2)), ShapeError, "float64", "cast the lengths to integers"),
    "a mask as lengths": (lambda: padding(np.ones((2, 4), bool)), ShapeError, "2×4 bool", "padding(array.sum(-1))"),
    "a mask of keys": (
        lambda: make(*[X.repeat(3, 0)] * 3, mask=np.ones((3, 4), bool)),
        ShapeError,
        "axis 0 of length 3 stands for i",
        "array[:, None, None] if its axes are (B, m)",
    ),
    "a mask without heads": (
        lambda: make(*[X.repeat(3, 0)] * 3, mask=np.ones((3, 4, 4), bool)),
        ShapeError,
        "axis 0 of length 3 stands for h",
        "array[:, None] if its axes are (B, n, m)",
    ),
    "positions before heads": (
        lambda: make(X.swapaxes(1, 2), X[..., :3, :].swapaxes(1, 2), X[..., :3, :].swapaxes(1, 2)),
        ShapeError,
        "4 query heads cannot share 3 key heads",
        "query.swapaxes(-3, -2)",
    ),
    "a single length": (lambda: padding(3), ShapeError, "lengths 3", "padding([7, 20])"),
    "a picture of −1 rows": (lambda: (i >= j).array(-1), ParameterError, "(1, 1, -1, -1)", "at least 0"),
    "a picture of 2.5 rows": (lambda: (i >= j).show(2.5), ParameterError, "1, 1, 2.5, 2.5", "whole numbers"),
    "documents too short": (lambda: make(mask=documents([0, 1, 1])), TableError, "(3,)", "j=3"),
    "documents twice": (lambda: documents([1], lengths=[1]), ParameterError, "either ids or lengths"),
    "negative lengths": (lambda: documents(lengths=[2, -1]), ShapeError, "≥ 0"),
    "a window of nothing": (lambda: window(0), ParameterError, "window(0, 0)", "left ≥ 1"),
    "a window of half a key": (lambda: window(2.5), ParameterError, "window(2.5, 0)", "whole numbers"),
    "a window of words": (lambda: window("4"), ParameterError, "window('4', 0)"),
    "a negative prefix": (lambda: prefix(-1), ParameterError, "prefix(-1)", "≥ 0"),
    "some other corner": (lambda: causal("bottom"), ParameterError, "'bottom'", "lower right"),
    # uses of formulas in Python expressions
    "and": (masked(lambda b, h, i, j: i >= j and j > 2), FormulaError, "i ≥ j", "& for and"),
    "or": (masked(lambda b, h, i, j: i >= j or j > 2), FormulaError, "i ≥ j", "| for or"),
    "not": (masked(lambda b, h, i, j: not i >= j), FormulaError, "~ for not"),
    "a chain": (masked(lambda b, h, i, j: 0 <= i - j < 4), FormulaError, "(a < i) & (i < b)"),
    "if": (masked(lambda b, h, i, j: j if i > j else i), FormulaError, "where(...) for if"),
    "in": (masked(lambda b, h, i, j: i in (1, 2)), FormulaError, "i = 1", "True or False"),
    "max": (lambda: make(score=lambda s, b, h, i, j: max(s, 0)), FormulaError, "s < 0"),
    "int": (lambda: make(score=lambda s, b, h, i, j: int(s)), FormulaError, "whole number", "table"),
    "an index": (masked(lambda b, h, i, j: [True, False][i]), FormulaError, "array[i]", "table(array)[...]"),
    "round": (
        lambda: make(score=lambda s, b, h, i, j: round(s)),
        FormulaError,
        "failed when called with (s, b, h, i, j)",
    ),
    "too few arguments": (masked(lambda i, j: i >= j), FormulaError, "(i, j)", "(b, h, q_idx, kv_idx)"),
    "no result": (masked(lambda b, h, i, j: None), FormulaError, "returned None", "return ..."),
    "an attribute": (masked(lambda b, h, i, j: i.length > 2), FormulaError, "length"),
    "an array in a formula": (lambda: s + np.ones(3), FormulaError, "ndarray of shape (3,)", "table(array)"),
    "a tensor in a formula": (lambda: s + torch.ones(3), FormulaError, "Tensor of shape (3,)", "table(array)"),
    "an array of a formula": (lambda: np.asarray(i), FormulaError, "turned into an array", ".array(n, m)"),
    "a complex number": (lambda: s * 1j, FormulaError, "complex"),
    "a comparison with None": (lambda: i == None, FormulaError, "NoneType"),  # noqa: E711
    "not of a number": (lambda: ~i, FormulaError, "¬ on i", "i != 0"),
    "and of numbers": (lambda: s & 1, FormulaError, "∧ on s", "(i >= j) & (i - j < 256)"),
    "and of a condition and a number": (lambda: (i >= j) & i, FormulaError, "∧ on i", "(i != 0)"),
    "a huge number": (lambda: i + 2**60, FormulaError, "2⁵³", "float"),
    "a number that grows": (lambda: make(mask=(i + 1) * 2**50 * (j + 1) > 0), FormulaError, "may reach", "1.0 * i"),
    "a table of huge numbers": (lambda: make(mask=table([2**53 + 1])[0] == i), FormulaError, "t[0] may reach", "2⁵³"),
    "a picture without lengths": (lambda: causal().show(), ParameterError, "show of", "None", "show(4, 6)"),
    "an array without lengths": (lambda: causal().array(), ParameterError, "array of", "None", "array(4, 6)"),
    "False as mask": (lambda: make(mask=False), MaskError, "hides every pair", "mask=None"),
    "a negative length": (lambda: padding([-1, 2]), ParameterError, "padding([-1, 2])", "at least 0"),
    "a block far away": (lambda: sightline.blocks([[[[2**40]]]]), ShapeError, "1099511627776", "2,147,483,648"),
    "draws of torch": (masked(lambda *x: x[2] > torch.randint(0, 9, ())), FormulaError, "torch.randint in a", "before"),
    "draws of Python": (lambda: masked_call(mask=lambda *x: x[2] > random.random()), FormulaError, "numbers of Python"),
    "draws of NumPy": (lambda: masked_vjp(mask=lambda *x: x[2] > np.random.rand()), FormulaError, "or NumPy in a mask"),
    # tables
    "a tensor at a symbol": (lambda: torch.arange(9)[i], FormulaError, "indexed by i", "sightline.table(tensor)[i]"),
    "a read outside": (lambda: make(mask=table(np.ones(3, bool))[i]), TableError, "t[i]", "(3,)", "i=3", "np.clip"),
    "a read before 0": (lambda: make(score=s + table(np.ones(9))[i - j]), TableError, "from -3 to 3", "i=0, j=1"),
    "two reads that hide each other": (lambda: make(mask=(FEW[i] < 0) & (FEW[j] < 0)), TableError, "t[i]", "i=2, j=2"),
    "a read guarded by s": (lambda: make(score=where(s > 0, s + FEW[j], s)), TableError, "t[j]", "j=2"),
    "an index that reads s": (lambda: make(score=s + FEW[where(s > 0, i, j)]), TableError, "from 0 to 3"),
    "a read in a later branch": (lambda: make(score=where(j < 2, FEW[j], FEW[i] + s)), TableError, "t[i]", "i=2, j=2"),
    "a read of nothing": (lambda: make(score=s + table(np.ones(0))[i]), TableError, "(0,)"),
    "another byte order": (lambda: table(np.ones(3, ">i2")), DtypeError, ">i2", "of this machine", "newbyteorder('=')"),
    "a fractional index": (lambda: table(np.ones(3))[i * 0.5], FormulaError, "i·0.5", "//"),
    "a condition as index": (lambda: table(np.ones(3))[i > j], FormulaError, "is a bool", "where(condition, 1, 0)"),
    "a slice": (lambda: table(np.ones(3))[0:2], FormulaError, "slice"),
    "too few indices": (lambda: s + table(np.ones((3, 3)))[i], FormulaError, "read with 1 indices", "table[i, j]"),
    "a table of one number": (lambda: table(np.float64(3)), ShapeError, "one number", "table(array[None])[0]"),
    "a ragged table": (lambda: table([[1, 2], [3]]), ShapeError, "unequal lengths"),
    "a function in a formula": (
        lambda: causal() & (lambda *x: x[2] > x[3]),
        FormulaError,
        "a function",
        "mask=lambda b",
    ),
    "a mask in a formula": (lambda: causal() & np.ones((4, 4), bool), FormulaError, "(4, 4)", "sightline.dense(array)"),
    "a sum of weights": (lambda: np.sum(p), FormulaError, "numpy.sum", "see=sightline.sum(p, over=j)"),
    "a sum of weights by axis": (lambda: torch.sum(p, -1), FormulaError, "torch.sum", "see=sightline.sum(p, over=j)"),
    "a sum of weights by Python": (lambda: sum(p), FormulaError, "Python's sum", "see=sightline.sum(p, over=j)"),
    "a mean of weights": (lambda: np.mean(p), FormulaError, "numpy.mean", "see=sightline.sum(p / m, over=j)"),
    "a greatest weight": (lambda: np.max(p * i), FormulaError, "numpy.max", "see=sightline.max(formula, over=j)"),
    "a greatest weight by axis": (lambda: np.max(p, 0), FormulaError, "numpy.max", "see=sightline.max(p, over=j)"),
    "weights times an array": (lambda: p * np.ones((4, 4)), FormulaError, "(4, 4)", "sightline.table(array)[i, j]"),
    "a list in a formula": (lambda: j == [0, 2], FormulaError, "a list inside", "np.isin(j, [0, 4])"),
    "a table of words": (lambda: table(["a"]), DtypeError, "<U1", "np.unique"),
    "a table of huge unsigned": (lambda: table(np.ones(3, np.uint64)), DtypeError, "uint64", "signed"),
    "a table unread": (lambda: s + table(np.ones(3)), FormulaError, "without indices", "table(array)[j]"),
    "a loop over a table": (lambda: list(table(np.ones(3))), FormulaError, "a loop over table(3 float64)"),
    "a table elsewhere": (lambda: tensors(score=s + table(META[0, 0, 0])[h]), DeviceError, "on meta", "query on cpu"),
    "a table for meta": (lambda: make(META, META, META, mask=np.ones((4, 4), bool)), DeviceError, "meta", "numbers"),
    # scores
    "a condition as score": (lambda: make(score=i >= j), MaskError, "a condition", "mask="),
    "an array as score": (
        lambda: make(score=np.zeros((4, 4))),
        FormulaError,
        "ndarray of shape (4, 4)",
        "sightline.bias(array)",
    ),
    "conditions as bias": (lambda: bias(np.ones((4, 4), bool)), ParameterError, "bool", "mask="),
    "a bias too short": (lambda: make(score=bias(np.ones((4, 3)))), ShapeError, "axis 1 of length 3 stands for j"),
    "slopes for 3 heads": (lambda: make(score=alibi(3)), ShapeError, "length 3 stands for h", "length 2 or 1"),
    "no heads": (lambda: alibi(0), ParameterError, "at least 1"),
    "an even relative bias": (lambda: relative_bias(np.ones((2, 4))), ShapeError, "2×4", "odd"),
    "a relative bias for 3": (lambda: make(score=relative_bias(np.ones((3, 5)))), ShapeError, "length 3 stands for h"),
    "a cap of 0": (lambda: softcap(0), ParameterError, "softcap(0)", "above 0"),
    "a bias expanded to a huge gradient": (
        lambda: sightline.bias(torch.zeros(1, requires_grad=True).expand(10**6, 10**6)),
        ShapeError,
        "gradient takes 4,000,000,000,000 bytes",
        "without expand",
    ),
    "a cap of True": (lambda: softcap(True), ParameterError, "softcap(True)", "above 0"),
    "a cap as text": (lambda: softcap("30"), ParameterError, "softcap('30')", "above 0"),
    "a cap that is NaN": (lambda: softcap(float("nan")), ParameterError, "finite"),
    # numbers and words
    "a scale of NaN": (lambda: make(scale=float("nan")), ParameterError, "scale=nan", "1/√d_k"),
    "a scale of ∞": (lambda: make(scale=np.inf), ParameterError, "scale=inf", "finite"),
    "a scale beyond floats": (lambda: make(scale=10**400), ParameterError, "scale=1000", "finite"),
    "a scale beyond float32": (lambda: make(scale=-1e39), ParameterError, "scale=-1e+39", "at most ±3.4e+38"),
    "scales": (lambda: make(scale=np.ones(2)), ParameterError, "scale=array", "a finite number"),
    "a scale as text": (lambda: make(scale="1"), ParameterError, "scale='1'", "a finite number"),
    "a scale as bytes": (lambda: make(scale=b"1"), ParameterError, "scale=b'1'", "a finite number"),
    "a scale of True": (lambda: make(scale=True), ParameterError, "scale=True", "a finite number"),
    "NumPy's True as a scale": (lambda: make(scale=np.True_), ParameterError, "scale=np.True_", "a finite number"),
    "a tensor's True as a scale": (lambda: make(scale=torch.tensor(True)), ParameterError, "scale=tensor(True)"),
    "a scale as an array of text": (lambda: make(scale=np.array("1")), ParameterError, "scale=array('1'"),
    "a complex scale": (lambda: make(scale=np.complex128(1)), ParameterError, "scale=np.complex128(1+0j)"),
    "dropout as text": (lambda: make(dropout="0.1", seed=0), ParameterError, "dropout='0.1'", "from 0 to 1"),
    "a dropout of True": (lambda: make(dropout=True, seed=0), ParameterError, "dropout=True", "from 0 to 1"),
    "a dropout of False": (lambda: make(dropout=False), ParameterError, "dropout=False", "from 0 to 1"),
    "no dropout as text": (lambda: make(dropout="0"), ParameterError, "dropout='0'", "from 0 to 1"),
    "negative dropout": (lambda: make(dropout=-0.1, seed=0), ParameterError, "dropout=-0.1", "from 0 to 1"),
    "dropout of NaN": (lambda: make(dropout=np.nan, seed=0), ParameterError, "dropout=nan"),
    "a dropout beyond floats": (lambda: make(dropout=10**400, seed=0), ParameterError, "from 0 to 1"),
    "dropout without a seed": (lambda: make(dropout=0.1), ParameterError, "seed=None with dropout=0.1", "seed=0"),
    "a negative seed": (lambda: make(dropout=0.1, seed=-1), ParameterError, "seed=-1", "2⁶⁴"),
    "seeds": (lambda: make(dropout=0.1, seed=np.array([7, 8])), ParameterError, "seed=array([7, 8])", "whole number"),
    "half a seed in a tensor": (
        lambda: make(dropout=0.1, seed=torch.tensor(0.5)),
        ParameterError,
        "seed=tensor(0.5000)",
        "whole number",
    ),
    "half a seed": (lambda: make(dropout=0.1, seed=0.5), ParameterError, "seed=0.5", "whole number"),
    "a seed as an array of floats": (lambda: make(dropout=0.1, seed=np.array(5.0)), ParameterError, "seed=array(5.)"),
    "a seed as a tensor of floats": (lambda: make(dropout=0.1, seed=torch.tensor(5.0)), ParameterError, "tensor(5.)"),
    "two seeds": (lambda: make(dropout=0.1, seed=torch.arange(2)), ParameterError, "seed=tensor([0, 1])"),
    "a seed of a tensor's True": (lambda: make(dropout=0.1, seed=torch.tensor(True)), ParameterError, "=tensor(True)"),
    "a seed on meta": (lambda: make(dropout=0.1, seed=META[0, 0, 0, 0].long()), ParameterError, "device='meta'"),
    "sinks for 3 heads": (lambda: make(sinks=np.ones(3)), ShapeError, "(3,)", "(H,) = (2,)"),
    "one sink": (lambda: make(sinks=1.0), ShapeError, "shape ()", "one logit per query head"),
    "sinks of integers": (lambda: make(sinks=np.ones(2, int)), DtypeError, "sinks has dtype int64", "cast"),
    "sinks elsewhere": (lambda: tensors(sinks=META[0, :, 0, 0]), DeviceError, "sinks on meta, query on cpu"),
    "a word to see": (lambda: make(see="top_k"), ParameterError, "see='top_k'", "sightline.top_k(...)"),
    "another word to see": (lambda: make(see=["all"]), ParameterError, "all", "sightline.lse()"),
    "a function to see": (lambda: make(see=[lse]), ParameterError, "see=[<function", "see=[sightline.lse(...)]"),
    "an unknown kernel": (lambda: sightline.attention(X, X, X, kernel="gpu"), ParameterError, "'gpu'", "'streaming'"),
    "a kernel that refuses": (
        lambda: sightline.attention(*[np.zeros((2, 4096), np.float16)] * 3, kernel="cpu"),
        KernelRefusedError,
        "d_k 4096",
        "use widths up to 1024; the streaming kernel serves larger",
        "kernel=None",
    ),
}


@pytest.mark.parametrize("given", REFUSED)
def test_errors_have_three_parts(given):
    call, kind, *words = REFUSED[given]
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind
    for word in (*words, "\n  allowed: ", "\n  cure:    "):
        assert word in message


def test_an_error_made_anew_from_its_message_has_it():
    """As Keras does with errors inside of a layer."""
    error = errors.ShapeError("(3,)", "(B, H, n, d)", "query[None]")
    again = type(error)(str(error))
    assert (str(again), again.args, pickle.loads(pickle.dumps(again)).given) == (str(error), error.args, str(error))


@pytest.mark.parametrize("name", sorted({*errors.__all__} - {"SightlineError", "name_file"}))
def test_errors_are_subclasses_of_builtin_errors(name):
    kind = getattr(errors, name)
    assert issubclass(kind, SightlineError)
    assert any(base.__module__ == "builtins" and base is not Exception for base in kind.__mro__[:-3])
    error = kind("a", "b", "c")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.cure) == (kind, str(error), "c")


ACCEPTED = {
    "a read outside where the mask hides it": {"mask": (i < 3) & (j < 2), "score": s + table(np.ones(3))[i]},
    "a read outside in a branch not taken": {"score": where(i < 3, s + table(np.ones(3))[i], s)},
    "two branches, two tables": {"score": where(i < 3, table(np.ones(3))[i], table(np.ones(1))[i - 3]) + s},
    "an index clipped": {"score": s + table(np.ones(2))[np.clip(i - j, 0, 1)]},
    "division by zero": {"mask": (i // 0 == 0) & (j % 0 == 0), "score": s + np.minimum(1 / (i - j), 1.0)},
    "True": {"mask": True},
    "NumPy's True": {"mask": np.True_},
    "a constant score": {"score": 0 * s + 3},
    "a mask over keys": {"mask": np.array([True, False, True, True])},
    "a mask of lists": {"mask": dense([[True] * 4] * 4)},
    "a table of a table": {"score": s + table(table(np.ones(4)))[i]},
    "a tensor as table": {"score": s + table(torch.ones(4))[i]},
    "a partial function": {"mask": functools.partial(lambda by, b, h, i, j: i + by >= j, 1)},
    "a seed of NumPy's": {"dropout": 0.5, "seed": np.uint64(2**64 - 1)},
    "one statistic": {"see": lse()},
    "sinks as a list": {"sinks": [0.5, -np.inf]},
    "a scale in a tensor": {"scale": torch.tensor(0.5)},
    "a whole number as scale": {"scale": np.int32(2), "dropout": np.float32(0.0)},
    "a mask of the rest": {"mask": ~causal() & ~window(2, 1)},
}


@pytest.mark.parametrize("given", ACCEPTED)
def test_valid_arguments(given):
    output = sightline.attention(X, X, X, **ACCEPTED[given])
    output = output[0] if "see" in ACCEPTED[given] else output
    assert output.shape == X.shape
    assert np.isfinite(output).all()


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (-abs(i - j), r"does not read s.*\n  cure: score=s \+ \(−\|i − j\|\)"),
        (3, "does not read s"),
        (s + s, "adds s twice"),
        (sightline.alibi(2) + sightline.softcap(30), "adds s twice.*\n  cure: one.with_scores"),
    ],
)
def test_a_score_that_loses_or_doubles_the_products_is_noticed(score, message):
    with pytest.warns(UserWarning, match=message):
        sightline.attention(X, X, X, score=score)
    plain = s * table(np.ones(2))[h] + s * i, sightline.alibi(2).with_scores(sightline.softcap(30)), s + abs(i - j)
    for score in plain:
        sightline.attention(X, X, X, score=score)


EMPTY = {
    "no queries": ((2, 3, 0, 4), (2, 3, 5, 4), (2, 3, 5, 6)),
    "no keys": ((2, 3, 5, 4), (2, 3, 0, 4), (2, 3, 0, 6)),
    "no batch": ((0, 3, 5, 4), (0, 3, 5, 4), (0, 3, 5, 6)),
    "no batch on one side": ((0, 3, 5, 4), (1, 3, 5, 4), (1, 3, 5, 6)),
    "no heads": ((2, 0, 5, 4), (2, 0, 5, 4), (2, 0, 5, 6)),
    "no heads on keys": ((2, 0, 5, 4), (2, 2, 5, 4), (2, 2, 5, 6)),
    "no value width": ((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 0)),
    "nothing, headless": ((0, 4), (0, 4), (0, 6)),
}


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("kernel", [None, "streaming", "reference"])
@pytest.mark.parametrize("given", EMPTY)
def test_empty_axes_give_empty_or_zero_outputs(given, kernel, library):
    q, k, v = (library.ones(shape, dtype=library.float32) for shape in EMPTY[given])
    output, (normaliser, matrix) = sightline.attention(
        q, k, v, mask=causal(), score=softcap(5.0), see=[lse(), weights()], kernel=kernel
    )
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    rows = (*lead, *q.shape[-3:-1])
    assert tuple(output.shape) == (*rows, v.shape[-1])
    assert tuple(normaliser.shape) == rows
    assert tuple(matrix.shape) == (*rows, k.shape[-2])
    if k.shape[-2] == 0:
        assert not np.asarray(output).any()
        assert (np.asarray(normaliser) == -np.inf).all()


LAYOUTS = {
    "one sequence": ((5, 4), (7, 4), (7, 6), (5, 6)),
    "a batch": ((2, 5, 4), (2, 7, 4), (2, 7, 6), (2, 5, 6)),
    "a batch against one": ((2, 5, 4), (1, 7, 4), (1, 7, 6), (2, 5, 6)),
    "heads in groups": ((2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 6), (2, 6, 5, 6)),
    "two leading axes": ((3, 1, 2, 5, 4), (1, 2, 2, 7, 4), (2, 2, 7, 6), (3, 2, 2, 5, 6)),
}


@pytest.mark.parametrize("given", LAYOUTS)
def test_shapes_of_results(given, rng):
    *shapes, expected = LAYOUTS[given]
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    output, (normaliser, matrix) = sightline.attention(q, k, v, see=[lse(), weights()])
    assert output.shape == expected
    assert normaliser.shape == expected[:-1]
    assert matrix.shape == (*expected[:-1], k.shape[-2])


def test_batches_are_counted_over_all_leading_axes(rng):
    """b counts the leading axes in C order, so a table indexed by b has one entry for each."""
    x = rng.normal(size=(2, 3, 1, 4, 5)).astype(np.float64)
    lengths = np.array([4, 3, 2, 1, 4, 0])
    whole = sightline.attention(x, x, x, mask=padding(lengths))
    for place, length in zip(np.ndindex(2, 3), lengths, strict=True):
        one = x[place][None]
        alone = sightline.attention(one, one[..., :length, :], one[..., :length, :])[0]
        rough = compute_baseline(make_problem(one, one, one, mask=padding([length]))).output[:, 0]
        assert_within_budget(whole[place], alone, rough)


def test_copied_formulas_are_equal():
    """Pickled and deep-copied formulas have the same symbols, so the derivative with respect to s is unchanged."""
    formula = softcap(2.0)
    for again in (copy.deepcopy(formula), pickle.loads(pickle.dumps(formula))):
        assert str(again) == str(formula)
        assert again.text == formula.text
        assert str(derivative(again)) == str(derivative(formula)) != "0"
