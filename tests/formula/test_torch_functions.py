"""Functions and methods of torch tensors on formulas: the same code runs on formulas and on tensors of their values."""

import functools
import math
import random

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, noop_mask, or_masks

import sightline
from flex_functions import MASKS, SHAPES, B, H, N
from sightline import i, j, s, table
from sightline.call.problem import make_problem
from sightline.call.validation import read_mask, read_score
from sightline.cpu import Cpu
from sightline.errors import FormulaError
from sightline.formula.derivative import derivative
from sightline.reference.definition import Reference
from sightline.reference.streaming import Streaming
from sightline.reference.testing import assert_conforms, assert_within_budget

ROWS, COLUMNS = 9, 11
X, Y = i * 0.5 - 2, j - 5  # a float and an integer, with positive and negative values
ROW, COLUMN = (torch.as_tensor(x) for x in np.indices((ROWS, COLUMNS)))
VALUES = ROW * 0.5 - 2, COLUMN - 5
VALUES = VALUES[0].double(), VALUES[1]
TORCH_TENSOR = torch.tensor(0.75, dtype=torch.float64)

SAME = {  # functions of a float x, an integer y and a condition c, by the name of what they test
    "abs": lambda x, y, c: x.abs() + y.abs() + torch.abs(y),
    "clamp": lambda x, y, c: x.clamp(-1, 1) + y.clamp(min=0) + y.clamp(max=2) + torch.clamp(x, min=-0.5, max=2),
    "clamp_min": lambda x, y, c: x.clamp_min(0) + y.clamp_max(1) + x.clip(0, 1),
    "comparisons": lambda x, y, c: x.lt(y) ^ x.le(0) ^ y.gt(0) ^ y.ge(x) ^ y.eq(1) ^ x.ne(0.5) ^ torch.eq(x, 0),
    "logical methods": lambda x, y, c: c.logical_and(x > 1) | c.logical_not().logical_xor(y > 1).logical_or(x < 0),
    "logical functions of numbers": lambda x, y, c: torch.logical_and(y, x) ^ torch.logical_or(y, c),
    "logical not of a number": lambda x, y, c: torch.logical_not(y) ^ torch.logical_xor(y, x),
    "where": lambda x, y, c: torch.where(c, x, 1.5) + torch.where(c, 0.0, TORCH_TENSOR) + x.where(c, y),
    "tensor.where": lambda x, y, c: TORCH_TENSOR.where(c, x),
    "where of integers": lambda x, y, c: torch.where(c, y, 7) + torch.where(y > 0, 1, 0),
    "masked_fill": lambda x, y, c: x.masked_fill(c, -math.inf) + torch.masked_fill(x, ~c, 0.0),
    "float": lambda x, y, c: y.float() / 2 + c.double() + x.to(torch.float64) + y.to(dtype=torch.float64),
    "int": lambda x, y, c: c.int() + y.long() + c.to(torch.int64) + y.to(torch.int32),
    "bool": lambda x, y, c: y.bool() ^ x.bool() ^ y.to(torch.bool) ^ c.to("cpu", torch.bool),
    "type": lambda x, y, c: y.type(torch.float64) * 0.5 + c.type(torch.int64),
    "type_as": lambda x, y, c: y.type_as(x) * y.to(x) + c.type_as(y),
    "int of a quotient": lambda x, y, c: (y / 3).int() + (y / 3).floor().long() + torch.ceil(y / -3).to(torch.int64),
    "div": lambda x, y, c: torch.div(y, 3, rounding_mode="floor") + torch.div(y, 3, rounding_mode="trunc"),
    "div of floats": lambda x, y, c: torch.div(x, 0.75, rounding_mode="trunc") + torch.div(x, 2) + x.div(0.5),
    "remainder": lambda x, y, c: torch.remainder(y, 4) + y.remainder(-3) + torch.fmod(y, 4) + y.fmod(-3),
    "remainder of floats": lambda x, y, c: x.remainder(0.75) + torch.fmod(x, 0.75) + x.frac(),
    "floor_divide": lambda x, y, c: torch.floor_divide(y, 4) + y.floor_divide(3) + torch.tensor(7) // (y + 9),
    "rounding": lambda x, y, c: x.round() + torch.round(x * 3) + x.trunc() + torch.fix(x) + x.floor() + x.ceil(),
    "rounding of integers": lambda x, y, c: y.round() + y.trunc() + y.floor(),
    "sign": lambda x, y, c: torch.sign(x) + y.sign() + x.sgn(),
    "extrema": lambda x, y, c: torch.maximum(x, y) + torch.min(x, TORCH_TENSOR) + x.maximum(y) + y.minimum(y * y),
    "new constants": lambda x, y, c: x.new_ones(()) + y.new_zeros(()) + x.new_full((), 2.5) + x.new_tensor(0.5),
    "new conditions": lambda x, y, c: y.new_ones(size=(), dtype=torch.bool, device="cpu") & c,
    "like": lambda x, y, c: torch.ones_like(x) + torch.zeros_like(y) + torch.full_like(x, 0.25),
    "like with a dtype": lambda x, y, c: (
        torch.full_like(x, 3, dtype=torch.int64) + torch.ones_like(c, dtype=torch.int64)
    ),
    "isin": lambda x, y, c: torch.isin(y, torch.tensor([2, -3, 2])) ^ torch.isin(y, torch.tensor([0]), invert=True),
    "isin of nothing": lambda x, y, c: torch.isin(y, torch.tensor([], dtype=torch.int64)),
    "bits": lambda x, y, c: (y & 5) + (y | 6) + (y ^ 3) + (y << 2) + (y >> 1) + torch.bitwise_and(y, y + 3),
    "bits of a negation": lambda x, y, c: torch.bitwise_not(y) + torch.where(torch.bitwise_not(c), 1, 0),
    "sums of conditions": lambda x, y, c: torch.where((c + (x > 0)) == 1, 1, 0) + (c + True + c),
    "products of conditions": lambda x, y, c: c * (x > 0) + c * c,
    "bits of a tensor": lambda x, y, c: torch.tensor(6) & y | torch.tensor(9) ^ y,
    "multiples": lambda x, y, c: torch.add(x, y, alpha=2) - torch.sub(x, y, alpha=0.5) + torch.rsub(x, 1),
    "other orders": lambda x, y, c: TORCH_TENSOR - x + TORCH_TENSOR * y + 2.0 ** (TORCH_TENSOR / (y * y + 1)),
    "remainders by infinity": lambda x, y, c: torch.fmod(x, 1 / (0 * x)) + torch.fmod(y, math.inf),
    "not finite": lambda x, y, c: torch.isfinite(1 / x) ^ torch.isinf(1 / x) ^ torch.isnan(x / x),
    "keywords": lambda x, y, c: torch.mul(input=x, other=y) + torch.where(c, input=x, other=y * 1.0),
}


U, V = (torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(2))
GRID = torch.arange(54).reshape(9, 2, 3) % 7
ROW_SCORES = {  # scores that read rows of tensors
    "squared distance": lambda s, b, h, q, k: s - ((U[q] - V[k]) ** 2).sum(),
    "distance": lambda s, b, h, q, k: s - torch.linalg.vector_norm(U[q] - U[k]) - torch.norm(U[q] - V[k]),
    "methods": lambda s, b, h, q, k: s - (U[q] - U[k]).pow(2).sum(-1) + U[q].abs().norm() + U[k].amax(),
    "products": lambda s, b, h, q, k: s + torch.dot(U[q], V[k]) + (U[q] * V[0]) @ V[k] + (V[0] * U[k]).sum(dim=-1),
    "conditions": lambda s, b, h, q, k: torch.where((U[q] > 1).any() | (U[q] < V[k]).all(), s, s - 1),
    "shapes": lambda s, b, h, q, k: s + (GRID[q].reshape(-1, 1) == GRID[k].reshape(6).unsqueeze(0)).any(-1).sum(),
    "flat": lambda s, b, h, q, k: s + (GRID[q].flatten() * torch.ravel(GRID[k])).sum() + GRID[q].view(3, 2)[2][0],
    "products of methods": lambda s, b, h, q, k: s + U[q].inner(V[k]) + U[q].matmul(V[k]) + torch.flatten(GRID[q])[4],
    "functions": lambda s, b, h, q, k: s + torch.tanh(U[q]).sum() + (2.0 - torch.maximum(U[q], U[k])).amin(-1),
    "entries": lambda s, b, h, q, k: s + (U[q] - V[k])[2] + GRID[q][1, 2] + (GRID[q, 0] != GRID[k, 1]).sum(),
}


@pytest.mark.parametrize("name", ROW_SCORES)
def test_rows_of_tensors_are_small_vectors(name):
    score = torch.tensor(0.75, dtype=torch.float64)
    exact = [[ROW_SCORES[name](score, 0, 0, torch.tensor(q), torch.tensor(k)) for k in range(9)] for q in range(9)]
    found = read_score(ROW_SCORES[name]).array(9, s=0.75)
    assert np.abs(found - np.array(exact, float)).max() <= 64 * np.finfo(float).eps


def test_distances_of_rows_have_gradients():
    """The derivative of a norm at 0 is 0, as in torch."""
    query, given = torch.ones(1, 1, 9, 4, dtype=torch.float64) * U, U.clone().requires_grad_()
    score = lambda s, b, h, q, k: s - torch.linalg.vector_norm(given[q] - given[k])  # noqa: E731
    ours = sightline.attention(query, query, query, score=score)
    distances = torch.linalg.vector_norm(given[:, None] - given[None], dim=-1)
    theirs = functional.scaled_dot_product_attention(query, query, query, attn_mask=-distances)
    (one,), (other,) = (torch.autograd.grad(output.square().sum(), given) for output in (ours, theirs))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["log1p", "expm1", "softplus", "logsigmoid"])
def test_small_values_keep_their_digits(name):
    function = getattr(torch, name, None) or getattr(functional, name)
    small, large = [1e-30, -1e-17, 1e-9], [-60.0, -30, -19]
    x = torch.tensor(small if name in ("log1p", "expm1") else large, dtype=torch.float64)
    x = -x if name == "logsigmoid" else x
    found = function(table(x)[i]).array(3, 1)[:, 0]
    assert np.abs(found / function(x).numpy() - 1).max() <= 8 * np.finfo(float).eps


SMOOTH = {  # by name: functions of floats with a derivative, also at 0
    "exponentials": lambda x: x.exp() + x.exp2() + torch.expm1(x),
    "logarithms": lambda x: torch.log1p(x * x) + torch.log10(x * x + 1) + (x * x + 2).log2() + (x * x + 1).log(),
    "roots": lambda x: torch.rsqrt(x * x + 1) + (x * x + 1).sqrt() + (x * x + 1).rsqrt() + (x + 9).reciprocal(),
    "sines": lambda x: x.sin() + torch.cos(x) + torch.tan(x * 0.5),
    "tanh": lambda x: x.tanh() * 2,
    "sigmoid": lambda x: x.sigmoid() + torch.sigmoid(3 * x),
    "sigmoid of large numbers": lambda x: torch.sigmoid(1000 * x),
    "logsigmoid": lambda x: functional.logsigmoid(x) + functional.logsigmoid(500 * x),
    "softplus": lambda x: functional.softplus(x) + functional.softplus(x, beta=2, threshold=5),
    "silu": lambda x: functional.silu(x),
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": lambda x: functional.relu(x) + torch.relu(x + 0.1),
    "leaky_relu": lambda x: functional.leaky_relu(x) + functional.leaky_relu(x, negative_slope=0.2),
    "powers": lambda x: x.pow(3) + torch.pow(x, 2) + x.square() + torch.pow(2, x),
    "products": lambda x: x.mul(x).add(1).sub(x).neg(),
}


def kind(values):
    return np.asarray(values).dtype.kind


@pytest.mark.parametrize("name", SAME)
def test_functions_of_formulas_equal_functions_of_tensors(name):
    found = np.asarray(SAME[name](X, Y, i >= j).array(ROWS, COLUMNS))
    expected = SAME[name](*VALUES, ROW >= COLUMN).broadcast_to(ROWS, COLUMNS).numpy()
    assert kind(found) == kind(expected)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.float32, "float32", float, np.dtype("float64"), torch.float16])
def test_names_of_float_dtypes(dtype):
    assert i.astype(dtype).kind == i.to("cuda", dtype).kind == "float"
    assert i.to("cuda:0").kind == "int"


def test_formulas_have_the_attributes_of_tensors_inside_functions():
    def hidden_by_the_smallest_number(score, b, h, q_idx, kv_idx):
        smallest = torch.full((), torch.finfo(score.dtype).min, dtype=score.dtype, device=score.device)
        return torch.where(q_idx >= kv_idx, score, smallest if q_idx.shape == () and b.ndim == 0 else 0.0)

    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    options = ({"score": hidden_by_the_smallest_number}, {"mask": i >= j})
    torch.testing.assert_close(*[sightline.attention(q, k, v, kernel="streaming", **one) for one in options])
    assert not hasattr(s, "dtype")


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_and_their_derivatives(name):
    at = torch.linspace(-2.0, 2.0, 9, dtype=torch.float64).requires_grad_()
    formula, values = SMOOTH[name](s), SMOOTH[name](at)
    (slopes,) = torch.autograd.grad(values.sum(), at)
    scores = at.detach().numpy().reshape(1, 1, 1, 9)
    for one, expected in ((formula, values.detach().numpy()), (derivative(formula), slopes.numpy())):
        found = one.array(1, 9, s=scores)[0]
        assert_within_budget(found.astype(np.float32), expected, expected.astype(np.float32), name)


def mask_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def score_mod(score, b, h, q_idx, kv_idx):
    return score * 2


REFUSED = {
    "int of a float": (lambda: (s * 2).int(), "s·2, a float", "i // 2"),
    "a narrow integer": (lambda: i.to(torch.int8), "torch.int8", "kinds"),
    "an axis": (lambda: i.new_ones((3,)), "shape (3,)", "new_ones(())"),
    "one axis": (lambda: i.new_zeros(3), "shape (3,)", "new_ones(())"),
    "ones of another shape": (lambda: np.ones_like(s, shape=(3,)), "shape=", "table"),
    "exact gelu": (lambda: functional.gelu(s), "erf", 'approximate="tanh"'),
    "item": (lambda: (i >= j).item(), ".item()", "torch.where"),
    "detach": (lambda: s.detach(), "detach", "t.detach()[h]"),
    "a long set": (lambda: torch.isin(j, torch.arange(1000)), "1000 numbers", "member[kv_idx]"),
    "max along an axis": (lambda: torch.max(s, 0), "axis", "torch.clamp(formula, min=0)"),
    "a shift by a formula": (lambda: i << j, "shift", "powers[h]"),
    "a shift of a float": (lambda: s >> 1, ">> of s", "x.int()"),
    "an unknown rounding mode": (lambda: torch.div(i, 2, rounding_mode="up"), "'up'", '"floor"'),
    "an unknown function": (lambda: torch.cumsum(s, 0), "torch.cumsum", "table"),
    "too many arguments": (lambda: s.clamp(0, 1, 2), "with 4 arguments", "table"),
    "max of Python": (lambda: max(i, j), "max, min", "torch.maximum(i, j)"),
    "in": (lambda: i in [1, 2], "`in`", "torch.isin"),
    "if": (lambda: i if i > j else j, "`if`", "sightline.where"),
    "a BlockMask as a score": (
        lambda: read_score(create_block_mask(noop_mask, 1, 1, 8, 8, device="cpu")),
        "score is a BlockMask",
        "mask=",
    ),
    "a slice": (lambda: read_mask(lambda b, h, q, kv: torch.ones(3, 3)[:, q] > 0), "slices", "before the call"),
    "a row as a number": (lambda: read_score(lambda s, b, h, q, kv: s + torch.ones(3, 3)[q]), "1 indices", "torch.dot"),
    "a long row": (lambda: read_score(lambda s, b, h, q, kv: s + torch.ones(3, 999)[q].sum()), "(999,)", "append"),
    "rows of two lengths": (
        lambda: read_score(lambda s, b, h, q, kv: torch.dot(torch.ones(3, 3)[q], torch.ones(3, 4)[kv])),
        "(3,) and (4,)",
        "entries",
    ),
    "a score_mod as a mask": (lambda: read_mask(score_mod), "takes 5 arguments", "score=score_mod"),
    "a mask_mod as a score": (lambda: read_score(mask_mod), "takes 4 arguments", "mask=mask_mod"),
    "two arguments": (lambda: read_mask(lambda q_idx, kv_idx: q_idx >= kv_idx), "(q_idx, kv_idx)", "lambda b, h"),
    "six arguments": (lambda: read_score(lambda bias, *rest, spare: bias), "(bias, rest, spare)", "lambda score, b"),
    "nothing returned": (lambda: read_mask(lambda b, h, q_idx, kv_idx: None), "returned None", "return"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_formulas_cannot_do_is_an_error_with_a_cure(name):
    call, given, cure = REFUSED[name]
    with pytest.raises(FormulaError) as caught:
        call()
    assert given in caught.value.given
    assert cure in caught.value.cure


def test_custom_operators_are_refused():
    library = torch.library.Library("sightline_test", "DEF")
    library.define("exp(Tensor x) -> Tensor")
    with pytest.raises(FormulaError, match="custom operator sightline_test::exp"):
        torch.ops.sightline_test.exp(s)


@pytest.mark.parametrize("kernel", [Cpu(), Streaming(), Reference()], ids=lambda kernel: kernel.name)
def test_kernels_compute_bits(kernel):
    options = {"mask": ((i - 9) & (j | 5)) != 1, "score": s + ((i ^ j) & (2**33 + 6)) / 8}
    query = np.random.default_rng(0).normal(size=(1, 1, 20, 16)).astype(np.float32)
    assert_conforms(kernel.run, make_problem(query, query, query, **options))


# -- the arguments of the functions ------------------------------------------------------------------------------------


def test_additional_arguments_may_have_defaults_or_be_fixed():
    def with_more(b, h, q_idx, kv_idx, size=3, *, offset=1):
        return q_idx + offset - kv_idx < size

    assert read_mask(with_more).text == (i + 1 - j < 3).text
    assert read_mask(functools.partial(with_more, size=5)).text == (i + 1 - j < 5).text


def test_numpy_arrays_are_found_in_containers_and_keep_their_attributes():
    tables = {"bias": [np.arange(4.0), np.ones((2, 4))]}

    class Holder:
        scale = 2.0

        def score(self, score, b, h, q_idx, kv_idx):
            first, second = tables["bias"]
            return score * self.scale + first[q_idx % first.size] + (2 * second)[0, kv_idx % second.shape[1]]

    found = read_score(Holder().score).array(3, 5, s=np.ones((1, 1, 3, 5)))
    np.testing.assert_array_equal(found, np.broadcast_to(4.0 + np.arange(3.0)[:, None], (3, 5)))


def test_captured_lists_without_arrays_stay_the_same_objects():
    calls = []

    def counted(b, h, q_idx, kv_idx):
        calls.append(q_idx)
        return q_idx >= kv_idx

    read_mask(counted)
    assert calls[0] is i


def test_draws_of_other_threads_are_no_error():
    draws, x = iter(range(2)), np.ones((1, 1, 4, 8))

    def mask(b, h, q_idx, kv_idx):
        if next(draws, None) is not None:
            random.random()
        return q_idx >= kv_idx

    sightline.attention(x, x, x, mask=mask)


def test_a_function_without_a_module_is_called():
    names = {}
    exec("def mask(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx", names)  # as code generators do
    assert names["mask"].__module__ is None
    assert read_mask(names["mask"]) is (i >= j)


def test_a_function_with_arrays_writes_to_its_nonlocal_variables():
    calls, slopes = 0, np.ones(2)

    def score_mod(score, b, h, q_idx, kv_idx):
        nonlocal calls
        calls += 1
        return score * slopes[h]

    read_score(score_mod)
    assert calls == 1


def test_a_negative_index_counts_from_the_end():
    lengths = torch.tensor([3, 5, 9])
    assert read_mask(lambda b, h, q, kv: kv < lengths[-1] + lengths[q - q - 1 + 1]).array(1, 14).sum() == 12
    assert sightline.table(lengths)[-1].array(1) == 9


def test_one_tensor_is_one_table():
    document = torch.tensor([0, 0, 1])
    assert len(read_mask(lambda b, h, q, kv: document[q] == document[kv]).tables) == 1


def test_an_error_names_the_line_of_the_user():
    def choose(q_idx):
        return 5 if q_idx > 3 else 6

    with pytest.raises(FormulaError, match=r"in line [0-9]+ of test_torch_functions.py: return 5 if q_idx > 3 else 6"):
        read_mask(lambda b, h, q_idx, kv_idx: kv_idx < choose(q_idx))
    with pytest.raises(FormulaError, match=r"no attribute 'lgamma'(?s:.)*in line [0-9]+ of .*: read_mask\(lambda"):
        read_mask(lambda b, h, q_idx, kv_idx: q_idx.lgamma() > 0)
    scope = {}
    exec("def written(b, h, q_idx, kv_idx):\n    return max(q_idx, kv_idx) > 3", scope)
    with pytest.raises(FormulaError, match=r"such as max.*, in line 2 of <string>\n"):
        read_mask(scope["written"])


# -- BlockMask ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "natten", "documents", "pages"])
def test_a_block_mask_is_its_mask_mod(name):
    n, m = SHAPES.get(name, (N, N))
    function = MASKS[name]
    block_mask = create_block_mask(lambda b, h, q, kv: function(b, h, q, kv), B, H, n, m, device="cpu", BLOCK_SIZE=8)
    arrays = [read_mask(mask).array(n, m, batch=B, heads=H) for mask in (block_mask, function)]
    np.testing.assert_array_equal(*arrays)


def test_a_block_mask_whose_function_allows_no_more_has_no_table():
    block_mask = create_block_mask(and_masks(mask_mod, or_masks(mask_mod, noop_mask)), 1, 1, 512, 512, device="cpu")
    assert not read_mask(block_mask).tables


def test_listed_blocks_are_part_of_the_mask():
    """Compiled flex_attention skips the blocks that are not listed; the function alone would allow them."""
    counts, listed = torch.tensor([[[1, 2, 1]]]), torch.tensor([[[[2, 0, 0], [0, 2, 0], [1, 0, 0]]]])
    full = torch.tensor([[[1, 0, 0]]]), torch.tensor([[[[1, 0, 0], [0, 0, 0], [0, 0, 0]]]])
    block_mask = BlockMask.from_kv_blocks(counts, listed, *full, BLOCK_SIZE=8, mask_mod=mask_mod)
    rows, columns = np.indices((24, 24))
    partial, whole = (
        np.kron(np.array(blocks), np.ones((8, 8), bool))
        for blocks in ([[0, 0, 1], [1, 0, 1], [0, 1, 0]], [[0, 1, 0], [0, 0, 0], [0, 0, 0]])
    )
    expected = (partial != 0) & (rows >= columns) | (whole != 0)
    np.testing.assert_array_equal(read_mask(block_mask).array(24), expected)
    query = torch.randn(1, 1, 24, 4)
    masks = block_mask, torch.tensor(expected)
    found, written = (sightline.attention(query, query, query, mask=mask, kernel="streaming") for mask in masks)
    torch.testing.assert_close(found, written)
