"""The formula language: printing, values, NumPy's and torch's functions, derivatives, and formulas as text."""

import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from sightline import Table, b, causal, documents, h, i, j, m, n, padding, prefix, s, softcap, table, where, window
from sightline.arrays.operations import namespace
from sightline.call.validation import read_mask, read_score
from sightline.errors import FormulaError
from sightline.formula.derivative import DERIVATIVE_RULES, derivative
from sightline.formula.evaluate_array import ARRAY_RULES, evaluate, evaluate_dense
from sightline.formula.expression import apply, conjuncts, parse_text, table_lookup
from sightline.formula.interval_arithmetic import BOUND_RULES
from sightline.formula.operators import OPERATORS
from sightline.formula.parameters import structure_of
from sightline.statistics.weight_formulas import degree_in
from strategies import conditions, lookups, masks, reals, scores, wholes

EXTENT = (2, 3, 9, 11)


def values(formula, extent=EXTENT, s=0.75):
    B, H, rows, columns = extent
    return formula.array(rows, columns, batch=B, heads=H, s=np.full(extent, s))


def same(x, y):
    assert x.dtype == y.dtype
    assert np.array_equal(x, y, equal_nan=x.dtype.kind == "f")


# -- every renderer knows every operator -----------------------------------------------------------------------------


def test_bounds_and_arrays_cover_every_operator():
    assert set(BOUND_RULES) == set(OPERATORS)
    assert set(ARRAY_RULES) == set(OPERATORS)


def test_derivatives_cover_every_operator_that_gives_floats():
    kinds = {name: rule.kind(("float",) * rule.arity) for name, rule in OPERATORS.items()}
    assert set(DERIVATIVE_RULES) == {name for name, kind in kinds.items() if kind == "float"}


# -- printing --------------------------------------------------------------------------------------------------------

t, u = table(np.arange(4.0)), table(np.arange(6).reshape(2, 3))

PRINTED = [
    (i >= j, "i ≥ j"),
    (causal("lower right"), "i + m − n ≥ j"),
    (window(256), "i − j < 256 ∧ j − i ≤ 0"),
    (causal() | prefix(4), "i ≥ j ∨ j < 4"),
    ((i >= j) & ((i < 3) | (j < 3)), "i ≥ j ∧ (i < 3 ∨ j < 3)"),
    (~(i >= j), "¬(i ≥ j)"),
    (~((i >= j) & (i < 3)), "¬(i ≥ j ∧ i < 3)"),
    (i - (j - 1), "i − (j − 1)"),
    (i - j - 1, "i − j − 1"),
    ((i + 1) * (j + 2), "(i + 1)·(j + 2)"),
    (i // 4 == j // 4, "i // 4 = j // 4"),
    ((i % 3) * 2, "(i mod 3)·2"),
    (i % 3 != 0, "i mod 3 ≠ 0"),
    (-(i + 1), "−(i + 1)"),
    (i - -3, "i − −3"),
    (abs(i - j), "|i − j|"),
    (s**2.5, "s^2.5"),
    ((s + 1) ** 0.5, "(s + 1)^0.5"),
    (s / (2 * n), "s / (2·n)"),
    (softcap(30.0), "tanh(s / 30)·30"),
    (where(i >= j, s, -np.inf), "where(i ≥ j, s, −∞)"),
    (np.sqrt(np.exp(s)) + np.log(m), "√(exp(s)) + ln(m)"),
    (np.minimum(s, 1e-6), "min(s, 1e−06)"),
    (s - t[h] * (i - j), "s − t[h]·(i − j)"),
    (t[b] + u[h, 0], "t₁[b] + t₂[h, 0]"),
    ((i < j) ^ (i == 0), "i < j ⊻ i = 0"),
]


@pytest.mark.parametrize(("formula", "text"), PRINTED, ids=[text for _, text in PRINTED])
def test_formulas_print_as_mathematics(formula, text):
    assert str(formula) == text


# -- values ----------------------------------------------------------------------------------------------------------


def test_array_gives_the_values_at_every_position():
    same((i * 10 + j).array(2, 3), np.array([[0, 1, 2], [10, 11, 12]]))
    same((i >= j).array(2), np.array([[True, False], [True, True]]))
    same(((b + h) / 2).array(1, 1, batch=2, heads=2)[..., 0, 0], np.array([[0, 0.5], [0.5, 1]]))
    same((s + n + m).array(1, 2, s=np.array([[0.5, 1.5]])), np.array([[3.5, 4.5]]))


def test_array_of_a_score_requires_scores():
    with pytest.raises(FormulaError, match="s=scores"):
        (s + 1).array(3)


WHOLE = np.arange(-6, 7)
ARITHMETIC = {
    "//": (lambda x, y: x // y, np.floor_divide),
    "%": (lambda x, y: x % y, np.remainder),
    "+": (lambda x, y: x + y, np.add),
    "-": (lambda x, y: x - y, np.subtract),
    "*": (lambda x, y: x * y, np.multiply),
}


@pytest.mark.parametrize("sign", ARITHMETIC)
def test_integer_arithmetic_is_numpys(sign):
    """Includes division by 0, for which NumPy gives 0."""
    written, numpys = ARITHMETIC[sign]
    x, y = np.meshgrid(WHOLE, WHOLE, indexing="ij")
    with np.errstate(all="ignore"):
        same(written(i - 6, j - 6).array(13), numpys(x, y))


def test_integer_powers_are_integers():
    same((i**3).array(4, 1), np.arange(4)[:, None] ** 3)
    assert (i**3).kind == "int"
    assert (i**0.5).kind == (2.0**i).kind == "float"


READY = {
    "window": (window(3, 1), lambda i, j: (i - j < 3) & (j - i <= 1)),
    "prefix": (prefix(2), lambda i, j: j < 2 + 0 * i),
    "documents": (documents([0, 0, 1, 1, 0]), lambda i, j: i // 2 % 2 == j // 2 % 2),
    "lengths": (documents(lengths=[2, 0, 3]), lambda i, j: (i < 2) == (j < 2)),
    "lower right": (causal("lower right"), lambda i, j: i >= j),
    "padding": (padding(np.array([3])), lambda i, j: j < 3 + 0 * i),
}


@pytest.mark.parametrize("name", READY)
def test_ready_masks(name):
    formula, expected = READY[name]
    same(formula.array(5), expected(*np.indices((5, 5))))


# -- functions of NumPy and torch ------------------------------------------------------------------------------------

X, Y = i * 0.5 - 2, j - 3  # a float and an integer, both with positive and negative values
BOTH = {
    "tanh": lambda lib: lib.tanh(X),
    "exp": lambda lib: lib.exp(X),
    "exp2": lambda lib: lib.exp2(X),
    "log": lambda lib: lib.log(lib.abs(X) + 1),
    "log2": lambda lib: lib.log2(X * X + 1),
    "log1p": lambda lib: lib.log1p(X * X * 1e-9),
    "sqrt": lambda lib: lib.sqrt(X * X),
    "sin": lambda lib: lib.sin(X) + lib.cos(X),
    "floor": lambda lib: lib.floor(X) + lib.ceil(X),
    "square": lambda lib: lib.square(X) - lib.negative(X),
    "where": lambda lib: lib.where(X > Y, X, Y * 1.0),
    "minimum": lambda lib: lib.minimum(X, Y * 1.0) - lib.maximum(X, Y * 1.0),
    "logical": lambda lib: lib.logical_or(
        lib.logical_and(X < 1, Y > 0), lib.logical_not(lib.logical_xor(X < 0, Y < 0))
    ),
    "bitwise": lambda lib: lib.bitwise_or(lib.bitwise_and(X < 1, Y > 0), lib.bitwise_not(Y < 0)),
    "clip": lambda lib: lib.clip(X, -1, 1),
    "remainder": lambda lib: lib.remainder(X, 0.75) + lib.floor_divide(X, 0.75),
    "arithmetic": lambda lib: lib.add(X, Y) * lib.subtract(X, Y) / lib.multiply(Y * Y + 1.0, 2.0),
    "true_divide": lambda lib: lib.true_divide(X, Y * Y + 1.0),
    "comparisons": lambda lib: lib.less_equal(X, Y) ^ lib.not_equal(X, Y) ^ lib.greater(X, 0),
}


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", BOTH)
def test_functions_of_formulas_equal_functions_of_arrays(name, library, monkeypatch):
    found = BOTH[name](library).array(9, 11)
    rows, columns = np.indices((9, 11))
    monkeypatch.setitem(globals(), "X", rows * 0.5 - 2)
    monkeypatch.setitem(globals(), "Y", columns - 3)
    expected = BOTH[name](np)
    same(found, expected)


ONLY = {
    "torch.clamp": (lambda: torch.clamp(X, min=-1), lambda x, y: np.maximum(x, -1)),
    "torch.pow": (lambda: torch.pow(X, 2), lambda x, y: x**2),
    "torch.sub": (lambda: torch.sub(X, Y), lambda x, y: x - y),
    "torch.mul": (lambda: torch.mul(X, 2.0), lambda x, y: x * 2),
    "torch.eq": (lambda: torch.eq(Y, 0), lambda x, y: y == 0),
    "np.clip by name": (lambda: np.clip(X, a_min=None, a_max=1), lambda x, y: np.minimum(x, 1)),
    "np.fabs": (lambda: np.fabs(X), lambda x, y: abs(x)),
    "np.power": (lambda: np.power(X * X, 1.5), lambda x, y: (x * x) ** 1.5),
    "a NumPy number": (lambda: np.float32(0.5) * X + np.int64(2), lambda x, y: x / 2 + 2),
    "an array of one number": (lambda: X + np.array(1.5), lambda x, y: x + 1.5),
    "a tensor of one number": (lambda: X + torch.tensor(1.5), lambda x, y: x + 1.5),
}


@pytest.mark.parametrize("name", ONLY)
def test_names_of_numpy_and_torch_functions(name):
    written, expected = ONLY[name]
    x, y = np.indices((9, 11))
    found = written().array(9, 11)
    assert np.array_equal(found, expected(x * 0.5 - 2, y - 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda: np.cumsum(i),
        lambda: np.add.reduce(i),
        lambda: np.arctan2(i, j),
        lambda: np.exp(s, out=np.zeros(1)),
        lambda: torch.softmax(s, 0),
        lambda: torch.clamp(s, 0, 1, out=None) + torch.sum(s),
        lambda: np.clip(s, 0, 1, dtype=float),
    ],
)
def test_unknown_functions_raise_an_error_that_lists_the_known(call):
    with pytest.raises(FormulaError, match=r"tanh|np\.clip"):
        call()


@pytest.mark.parametrize("indices", ["j", "i, j", "h, i, j", "b, h, i, j", "0, b, h, i, j"])
def test_an_array_in_a_formula_is_read_at_its_own_axes(indices):
    array = np.ones((4,) * len(indices.split()))
    for operand in (array, table(array)):
        with pytest.raises(FormulaError, match=rf"\(array\)\[{indices}\]"):
            s + operand


def test_a_method_for_a_sum_names_the_statistic():
    with pytest.raises(AttributeError, match=r"sightline\.sum\(p, over=j\)"):
        sightline.p.sum()


# -- functions as formulas -------------------------------------------------------------------------------------------

DOCUMENT = torch.tensor([0, 0, 1, 1, 1])
SLOPES, SPARE = np.array([0.5, 0.25, 0.125]), np.array([1, 2])


def sliding(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= 2


def same_document(b, h, q_idx, kv_idx):
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


def biased(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx - kv_idx)


def both(*mods):
    """Like FlexAttention's and_masks: the functions to combine are in a closure."""

    def joined(b, h, q_idx, kv_idx):
        result = None
        for mod in mods:
            one = mod(b, h, q_idx, kv_idx)
            result = one if result is None else result & one
        return result

    return joined


def offset(by):
    lengths = np.array([3, 5])

    def mod(b, h, q_idx, kv_idx, *, spare=SPARE):
        return (q_idx + by >= kv_idx) & (kv_idx < lengths[b]) & (spare[b] > 0)

    return mod


def test_mask_mods_are_accepted_unchanged():
    rows, columns = np.indices((5, 5))
    ids = DOCUMENT.numpy()
    same(read_mask(sliding).array(5), rows - columns <= 2)
    same(read_mask(same_document).array(5), ids[rows] == ids[columns])
    joined = both(sliding, same_document, lambda b, h, q, k: q >= k)
    same(read_mask(joined).array(5), (rows - columns <= 2) & (ids[rows] == ids[columns]) & (rows >= columns))


def test_captured_arrays_become_tables():
    found = read_mask(offset(1)).array(5, batch=2)[:, 0]
    rows, columns = np.indices((5, 5))
    same(found, np.stack([(rows + 1 >= columns) & (columns < length) for length in (3, 5)]))
    assert len(read_score(biased).tables) == 1
    scores_ = np.ones((1, 3, 4, 4))
    rows, columns = np.indices((4, 4))
    same(read_score(biased).array(4, heads=3, s=scores_)[0], 1 - SLOPES[:, None, None] * (rows - columns))


def test_the_given_function_is_not_changed():
    read_mask(same_document)
    assert DOCUMENT[3] == same_document.__globals__["DOCUMENT"][3]
    assert isinstance(same_document.__globals__["DOCUMENT"], torch.Tensor)


# -- formulas as text ------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.one_of(masks(EXTENT), scores(EXTENT), wholes(EXTENT), reals(EXTENT)))
def test_text_gives_the_formula_back(formula):
    again = parse_text(formula.text, formula.tables)
    assert again.text == formula.text
    same(values(again), values(formula))
    json.loads(formula.text)


@settings(max_examples=100)
@given(st.one_of(conditions(EXTENT), scores(EXTENT)))
def test_other_tables_with_the_same_values_change_nothing(formula):
    copied = formula.rewrite(lookup=table_lookup(lambda entry: Table(np.array(entry.array), entry.axes)))
    same(values(copied), values(formula))


# -- derivatives -----------------------------------------------------------------------------------------------------

POINT = table(np.array([0.7]))[0]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (name, k)
        for name in DERIVATIVE_RULES
        for k in range(OPERATORS[name].arity)
        if k not in OPERATORS[name].conditions
    ],
)
def test_derivatives_are_slopes(name, place):
    """The derivative of each operator by each argument that may depend on s, against central differences."""
    rule = OPERATORS[name]
    inner = s * 0.9 + 0.4
    inputs = [inner if k == place else (i < 3) if k in rule.conditions else POINT + 1.6 for k in range(rule.arity)]
    formula = apply(name, *inputs)
    at = np.linspace(0.11, 1.77, 8).reshape(1, 1, 8, 1)
    found = values_at(derivative(formula), at)
    assert_slope(lambda x: values_at(formula, x), at, found)


def values_at(formula, at):
    return formula.array(at.shape[2], 1, s=at)


def assert_slope(function, at, slope):
    """Compare with central differences at two steps: their Richardson extrapolation bounds the error."""
    step = np.finfo(float).eps ** (1 / 5)
    wide, narrow = ((function(at + d) - function(at - d))[:, 0] / (2 * d) for d in (step, step / 2))
    best = (4 * narrow - wide) / 3
    noise = np.finfo(float).eps / step * (1 + np.abs(function(at)[:, 0]))
    assert (np.abs(best - slope[:, 0]) <= np.abs(narrow - wide) + 8 * noise).all()


@settings(max_examples=200)
@given(scores(EXTENT, hides=False))
def test_derivatives_of_drawn_scores_equal_torchs(formula):
    at = torch.linspace(-2.0, 2.0, 9 * 11, dtype=torch.float64).reshape(9, 11).requires_grad_()
    symbols = {"b": 0, "h": 0, "i": torch.arange(9)[:, None], "j": torch.arange(11), "n": 9, "m": 11, "s": at}
    value = evaluate(formula, symbols, xp=namespace(at), float_dtype=torch.float64, like=at)
    (expected,) = torch.autograd.grad(value.sum() + 0 * at.sum(), at)
    found = evaluate_dense(derivative(formula), (1, 1, 9, 11), at)[0, 0]
    finite = np.isfinite(value.detach().numpy())
    spread = np.abs(expected.numpy())[finite].max(initial=1.0)
    worst = np.abs(np.broadcast_to(found, finite.shape)[finite] - expected.numpy()[finite]).max(initial=0.0)
    assert worst <= 64 * np.finfo(float).eps * spread


SCALED = where(i > j, s * s, 0) * (i + 1) - abs(s) * s * 3
DEGREES = [
    (s * s * abs(i - j), 2),
    (-s * np.sqrt(s), 1.5),
    (s**3 / (i + 2), 3),
    (2 / s, -1),
    (SCALED, 2),
    (np.maximum(SCALED, s * s), 2),
    (np.exp(i) * 2, 0),
    (s * s + s, None),
    (s + 1, None),
    (np.tanh(s), None),
    (s * np.log(s), None),
    (2**s, None),
    (np.floor(s), None),
]


@pytest.mark.parametrize(("formula", "degree"), DEGREES, ids=lambda value: str(value))
def test_the_degree_of_a_formula_follows_from_its_form(formula, degree):
    assert degree_in(formula, s) == degree
    if degree is not None:  # Euler's theorem
        at = np.linspace(0.2, 3.1, 8).reshape(1, 1, 8, 1)
        product = at[0, 0] * values_at(derivative(formula), at)
        np.testing.assert_allclose(product, degree * values_at(formula, at), rtol=1e-12)


@settings(max_examples=50)
@given(lookups(EXTENT, "float"))
def test_the_derivative_by_a_lookup_is_1_where_it_is_read(node):
    same(values(derivative(s + 2.0 * node, node) + 0 * node), values(2.0 + 0 * node))


# -- extreme graphs --------------------------------------------------------------------------------------------------


def doubled(x, times):
    for _ in range(times):
        x = x + x
    return x


def every_pass(formula):
    str(formula)
    parse_text(formula.text, formula.tables)
    formula.rewrite()
    derivative(formula)
    values(formula)
    return formula.free_symbols, formula.tables


def test_shared_subexpressions_are_computed_once():
    started = time.perf_counter()
    every_pass(doubled(s, 60))
    every_pass(doubled(i * 1.0 + POINT, 60))
    assert time.perf_counter() - started < 5


def test_deep_formulas_do_not_hit_the_recursion_limit():
    deep = s
    for k in range(5000):
        deep = deep + k
    every_pass(deep)
    assert values(deep).max() == 0.75 + 5000 * 4999 / 2
    mask = causal()
    for k in range(2000):
        mask &= i - j != k
    assert [str(condition) for condition in conjuncts(mask)] == ["i ≥ j", *(f"i − j ≠ {k}" for k in range(2000))]


# -- formulas from templates -------------------------------------------------------------------------------------------

FILLED = {  # by name: shape and dtype of an array, a function of the library, the axes of its table, and its formula
    "padding": ((3,), int, sightline.padding, ("b",), lambda t: j < t[b]),
    "alibi": ((2,), float, sightline.alibi, ("h",), lambda t: s - t[h] * (i - j)),
    "one length": ((1,), int, sightline.padding, ("b",), lambda t: j < t[0]),
    "one slope": ((1,), float, sightline.alibi, ("h",), lambda t: s - t[0] * (i - j)),
    "bias": ((2, 4, 5), float, sightline.bias, ("h", "i", "j"), lambda t: s + t[h, i, j]),
    "bias of one row": ((1, 5), float, sightline.bias, ("i", "j"), lambda t: s + t[0, j]),
    "bias of integers": ((4, 5), np.int32, sightline.bias, ("i", "j"), lambda t: s + t[i, j]),
    "dense": ((1, 4, 5), bool, sightline.dense, ("h", "i", "j"), lambda t: t[0, i, j]),
    "documents": ((2, 9), int, sightline.documents, ("b", None), lambda t: t[b, i] == t[b, j]),
}


def same_structure(found, expected):
    """True if both calls have one kernel and one cached call, with the same tables and numbers."""
    axes = [[table.axes for table in structure.tables] for structure in (found, expected)]
    arrays = zip(found.tables, expected.tables, strict=True)
    return (
        all(x is y for x, y in zip(found.formulas, expected.formulas, strict=True))
        and len(found.key) == len(expected.key)
        and axes[0] == axes[1]
        and all(np.array_equal(x.array, y.array) for x, y in arrays)
        and found.numbers == expected.numbers
    )


PLACES = (  # the formulas of a call, one of which is x
    lambda x: (x,),
    lambda x: (x, None),
    lambda x: (i >= j, x),
    lambda x: (table(np.arange(5))[j] < 3, x),
    lambda x: (None, where(x > 1, x, 0)),
)


@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_filled_template_is_the_formula_written_out(name, seed):
    shape, dtype, function, axes, write = FILLED[name]
    array = np.abs(np.random.default_rng(seed).normal(size=shape) * 4).astype(dtype)
    filled, written = function(array), write(Table(array, axes))
    assert (filled.text, filled.free_symbols) == (written.text, written.free_symbols)
    for place in PLACES:
        assert same_structure(structure_of(*place(filled)), structure_of(*place(written)))


def test_two_formulas_of_one_template_keep_their_own_tables(rng):
    x = rng.normal(size=(2, 1, 6, 8)).astype(np.float32)
    for first, second in (([3, 5], [1, 2]), ([6, 4], [2, 3])):
        see = [sightline.mass(sightline.padding(second)), sightline.weights()]
        _, (mass, weights) = sightline.attention(x, x, x, mask=sightline.padding(first), see=see)
        for batch in range(2):
            np.testing.assert_allclose(weights[batch, :, :, first[batch] :], 0)
            np.testing.assert_allclose(mass[batch], weights[batch, ..., : second[batch]].sum(-1), rtol=1e-5)


SHARED = {  # formulas of arrays whose first axis stands for b or h, one entry of which serves all
    "padding": lambda x, count: {"mask": sightline.padding(np.repeat(np.array([4]), count))},
    "documents": lambda x, count: {"mask": sightline.documents(np.repeat(x[:1, :6] > 0, count, 0).astype(int))},
    "alibi": lambda x, count: {"score": sightline.alibi(np.repeat(x[0, :1], count))},
    "relative bias": lambda x, count: {"score": sightline.relative_bias(np.repeat(x[:1, :5], count, 0))},
}


@pytest.mark.parametrize("name", SHARED)
def test_one_entry_serves_every_batch_or_head(rng, name):
    x, contents = rng.normal(size=(3, 3, 6, 8)).astype(np.float32), rng.normal(size=(2, 8))
    found, expected = (sightline.attention(x, x, x, **SHARED[name](contents, count)) for count in (1, 3))
    np.testing.assert_array_equal(found, expected)
