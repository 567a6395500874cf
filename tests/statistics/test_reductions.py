"""Sums, maxima and minima of drawn formulas, against a dense definition in torch and its gradients by autograd."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import sightline
from fault_planting import Fault, assert_found
from sightline import b, h, i, j, p, s, table, where
from sightline.arrays.operations import to_numpy
from sightline.reference import streaming
from sightline.statistics import arrays_of, reduction
from sightline.statistics.weight_formulas import split_logarithms

SYMBOLS = {"b": b, "h": h, "i": i, "j": j}
MASKS: list[Any] = [
    None,
    lambda i, j: i >= j,
    lambda i, j: i - j < 5,
    lambda i, j: (i + j) % 3 != 0,
    lambda i, j: j != 2,
]
NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}
TERMS: list[Any] = [  # a formula of sightline, and the same as a function of float64 tensors
    (p, lambda e: e["p"]),
    (p * p, lambda e: e["p"] ** 2),
    (-p * np.log(p), lambda e: -e["p"] * e["ln p"]),
    (2 * p * np.log(p), lambda e: 2 * e["p"] * e["ln p"]),
    (p * np.log2(p) * p, lambda e: e["p"] ** 2 * e["ln p"] / math.log(2)),
    (p * abs(i - j), lambda e: e["p"] * (e["i"] - e["j"]).abs()),
    (where(i - j > 3, p, 0), lambda e: torch.where(e["i"] - e["j"] > 3, e["p"], 0)),
    (s, lambda e: e["s"]),
    (p * s, lambda e: e["p"] * e["s"]),
    (np.tanh(s) + p * h, lambda e: torch.tanh(e["s"]) + e["p"] * e["h"]),
    (np.exp(-p) * (j + 1), lambda e: torch.exp(-e["p"]) * (e["j"] + 1)),
    (i * 0.5 + b - j, lambda e: e["i"] * 0.5 + e["b"] - e["j"]),
    (2.5, lambda e: torch.tensor(2.5)),
    (i >= j, lambda e: (e["i"] >= e["j"]).double()),
]


@dataclass
class Drawn:
    """A drawn problem, a statistic, and the dense definition of its result; `size` bounds the sum of |f|."""

    arrays: list[Any]
    options: dict[str, Any]
    statistic: Any
    entries: Any
    result: Any
    size: float
    axes: str


def draw(seed: int, dtype: str) -> Drawn:
    rng = np.random.default_rng(seed)
    B, H, (n, m), d = int(rng.integers(1, 3)), int(rng.choice([1, 2, 4])), rng.integers(1, [40, 140]), 8
    G = int(rng.choice([1, H]))
    shapes = (B, H, n, d), (B, G, m, d), (B, G, m, 3)
    query, key, value = (torch.tensor(rng.normal(size=x), dtype=getattr(torch, dtype)).requires_grad_() for x in shapes)
    sinks = torch.tensor(rng.normal(size=H), dtype=query.dtype) if rng.random() < 0.3 else None
    mask, scored = MASKS[rng.integers(len(MASKS))], rng.random() < 0.3
    at = dict(
        zip(
            "bhij",
            (torch.arange(x).double().reshape(-1, *[1] * k) for x, k in ((B, 3), (H, 2), (n, 1), (m, 0))),
            strict=True,
        )
    )
    scores = query.double() @ key.double().repeat_interleave(H // G, 1).mT / math.sqrt(d)
    scores = scores - 0.1 * (at["i"] - at["j"]).abs() if scored else scores
    visible = torch.ones(B, H, n, m, dtype=torch.bool) & (mask(at["i"], at["j"]) if mask else torch.tensor(True))
    final = scores.masked_fill(~visible, -math.inf)
    whole = final if sinks is None else torch.cat([final, sinks.double()[:, None, None].expand(B, H, n, 1)], -1)
    lse = torch.logsumexp(whole, -1, keepdim=True).nan_to_num(neginf=0.0)
    logarithm = torch.where(visible, scores - lse, 0)
    e = {**at, "s": torch.where(visible, scores, 0), "ln p": logarithm, "p": torch.where(visible, logarithm.exp(), 0)}
    (formula, function), how = TERMS[rng.integers(len(TERMS))], str(rng.choice(list(NEUTRAL)))
    values = function(e) + torch.zeros_like(scores)
    if rng.random() < 0.4:
        numbers = rng.normal(size=m)
        formula, values = formula * table(numbers)[j], values * torch.from_numpy(numbers)
    pairs = ["j", "i", "ij", ""]
    axes = str(rng.choice([*pairs, "hj", "hi", "h", "bj", "bhij", "bi"] if how == "sum" else pairs))
    cells = tuple(rng.integers(1, 8, 2).tolist()) if axes[-2:] == "ij" and rng.random() < 0.6 else None
    statistic = getattr(sightline, how)(formula, over=tuple([SYMBOLS[x] for x in axes]), cells=cells)
    entries = torch.where(visible, values, NEUTRAL[how])
    result = pool(entries, how, axes, cells)
    sizes = torch.where(visible, values.detach().abs(), 0)
    # ln p of a weight near 1 has the rounding error of the score, however small ln p is
    size = float(pool(sizes, "sum", axes, cells).max() if how == "sum" else sizes.max()) + 1e-2
    formula_mask = None if mask is None else mask(i, j)
    options = {"mask": formula_mask, "score": s - 0.1 * abs(i - j) if scored else None, "sinks": sinks}
    return Drawn([query, key, value], options, statistic, entries, result, size, axes)


def pool(entries: Any, how: str, axes: str, cells: Any) -> Any:
    """Return the sum, maximum or minimum over the axes, or over cells of queries and keys."""
    reduce = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[how]
    if cells is None:
        return reduce(entries, ["bhij".index(axis) for axis in axes]) if axes else entries
    (n, m), (rows, columns) = entries.shape[-2:], np.minimum(cells, entries.shape[-2:]).tolist()
    lines = [
        [
            reduce(
                entries[..., r * n // rows : (r + 1) * n // rows, c * m // columns : (c + 1) * m // columns], (-2, -1)
            )
            for c in range(columns)
        ]
        for r in range(rows)
    ]
    grid = torch.stack([torch.stack(line, -1) for line in lines], -2)
    outer = ["bh".index(axis) for axis in axes if axis in "bh"]
    return reduce(grid, outer) if outer else grid


def compare(drawn: Drawn, found: Any, tolerance: float) -> None:
    """Check a result, and the positions of maxima."""
    expected, (found, *places) = to_numpy(drawn.result.detach()), map(to_numpy, arrays_of(found))
    is_finite = np.isfinite(expected)
    assert found.shape == expected.shape
    assert np.array_equal(found[~is_finite], expected[~is_finite].astype(found.dtype)), "no pairs, another result"
    error = np.abs(found[is_finite] - expected[is_finite]).max(initial=0) / drawn.size
    assert error < tolerance, f"{drawn.statistic}: error {error} beyond the budget"
    for where_ in places:
        assert np.array_equal(where_ < 0, ~is_finite)
        axis = -2 if drawn.axes == "i" else -1
        entries = to_numpy(drawn.entries.detach())
        there = np.take_along_axis(entries, np.expand_dims(np.maximum(where_, 0), axis), axis).squeeze(axis)
        error = np.abs(there[is_finite] - expected[is_finite]).max(initial=0) / drawn.size
        assert error < tolerance, "another position"


def check_gradients(drawn: Drawn, gradients: Any, tolerance: float) -> None:
    """Check gradients of query and key. `gradients(seed)` returns them for this gradient of the result."""
    rng = np.random.default_rng(0)
    seed = np.where(np.isfinite(to_numpy(drawn.result.detach())), rng.normal(size=tuple(drawn.result.shape)), 0)
    total = (torch.where(torch.isfinite(drawn.result), drawn.result, 0) * torch.from_numpy(seed)).sum()
    expected = torch.autograd.grad(total + 0 * sum(x.double().sum() for x in drawn.arrays), drawn.arrays[:2])
    size = max(float(x.abs().max()) for x in expected) + drawn.size
    for one, other in zip(gradients(seed), expected, strict=True):
        error = np.abs(to_numpy(one) - to_numpy(other)).max() / size
        assert error < 10 * tolerance, f"gradient of {drawn.statistic}: error {error} beyond the budget"


def check_torch(seed: int, dtype: str = "float64", kernel: str | None = None) -> None:
    drawn, tolerance = draw(seed, dtype), {"float32": 5e-5, "float64": 1e-11}[dtype]
    _, (found,) = sightline.attention(*drawn.arrays, **drawn.options, see=[drawn.statistic], kernel=kernel)
    compare(drawn, found, tolerance)
    if not drawn.statistic.is_differentiable:
        return
    first = arrays_of(found)[0]

    def gradients(seed: Any) -> Any:
        shown = torch.where(torch.from_numpy(seed) == 0, 0, first) * torch.from_numpy(seed).to(first.dtype)
        return torch.autograd.grad(shown.sum() + 0 * sum(x.sum() for x in drawn.arrays[:2]), drawn.arrays[:2])

    check_gradients(drawn, gradients, tolerance)


@pytest.mark.sampled(one_in=47)
@pytest.mark.parametrize("kernel", [None, "streaming"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("first", range(0, 120, 10))
def test_drawn_reductions(first, dtype, kernel):
    for seed in range(first, first + 10):
        check_torch(seed, dtype, kernel)


@pytest.mark.wide
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_many_drawn_reductions(first):
    for seed in range(first, first + 100):
        check_torch(seed, "float32" if seed % 2 else "float64")


def test_drawn_reductions_of_numpy_in_repeated_calls():
    for seed in range(200, 220):
        drawn = draw(seed, "float32")
        arrays = [to_numpy(x.detach()) for x in drawn.arrays]
        sinks = drawn.options["sinks"]
        options = drawn.options | {"sinks": None if sinks is None else to_numpy(sinks)}
        results = [sightline.attention(*arrays, **options, see=[drawn.statistic])[1][0] for _ in range(3)]
        for found in results:
            compare(drawn, found, 5e-5)
            first, other = (x.value if isinstance(x, tuple) else x for x in (results[0], found))
            assert np.array_equal(first, other), "other bits in a repeated call"


@pytest.mark.parametrize("is_jitted", [False, True])
def test_drawn_reductions_of_jax(is_jitted):
    for seed in range(300, 305):
        drawn = draw(seed, "float32")
        arrays = [jnp.asarray(to_numpy(x.detach())) for x in drawn.arrays]
        sinks = drawn.options["sinks"]
        options = drawn.options | {"sinks": None if sinks is None else jnp.asarray(to_numpy(sinks))}

        def call(query, key, value=arrays[2], options=options, statistic=drawn.statistic):
            return sightline.attention(query, key, value, **options, see=[statistic])[1][0]

        found = (jax.jit(call) if is_jitted else call)(*arrays[:2])
        compare(drawn, found, 5e-5)
        if not drawn.statistic.is_differentiable:
            continue

        def gradients(seed, call=call, arrays=arrays):
            def loss(*operands):
                first = arrays_of(call(*operands))[0]
                return jnp.sum(jnp.where(seed == 0, 0, first) * seed)

            return jax.grad(loss, (0, 1))(*arrays[:2])

        check_gradients(drawn, gradients, 5e-5)


def test_hidden_pairs_take_no_part_whatever_the_formula_is_there():
    x = torch.tensor(np.random.default_rng(0).normal(size=(1, 2, 9, 4)), requires_grad=True)
    bad = table(np.where(np.arange(9)[:, None] >= np.arange(9), 1.0, [[np.nan, np.inf, -np.inf] * 3]))[i, j]
    formulas = p * bad, bad + p, np.sqrt(p) * bad
    for how, axes, formula in itertools.product(NEUTRAL, ((j,), (i,), (i, j)), formulas):
        sound = formula.rewrite(lookup=lambda *_: p * 0 + 1.0)
        see = [getattr(sightline, how)(one, over=axes) for one in (formula, sound)]
        _, results = sightline.attention(x, x, x, mask=i >= j, see=see)
        torch.testing.assert_close(*[arrays_of(found)[0] for found in results])


def test_named_statistics_and_formulas_are_one():
    x = np.random.default_rng(0).normal(size=(1, 2, 9, 4))
    pairs = [
        (sightline.received(), sightline.sum(p, over=i)),
        (sightline.received("mean"), sightline.sum(p / sightline.n, over=i)),
        (sightline.entropy(), sightline.sum(-p * np.log(p), over=j)),
        (sightline.entropy(), sightline.sum(np.log(p) * -p, over=j)),
        (sightline.max_score(), sightline.max(s, over=j)),
        (sightline.mass(i == j), sightline.sum(where(i == j, p, 0), over=j)),
        (sightline.weights(), sightline.sum(p, over=())),
        (sightline.weights().sum("heads"), sightline.sum(p, over=h)),
        (sightline.entropy().sum("heads").sum("batch"), sightline.sum(-p * np.log(p), over=(b, h, j))),
        (sightline.pooled(3, 3), sightline.sum(p / 9, over=(i, j), cells=(3, 3))),
    ]
    for named, formula in pairs:
        _, (one, other) = sightline.attention(x, x, x, mask=i >= j, see=[named, formula])
        for first, second in zip(np.atleast_2d(one), np.atleast_2d(other), strict=True):
            np.testing.assert_allclose(first, second, rtol=1e-13, err_msg=f"{named} and {formula}")
    assert [formula.fused_role for _, formula in pairs[2:5]] == ["entropy", "entropy", "max_score"]
    assert repr(sightline.sum(2 * p * np.log(p), over=j)) == "sum(2·p·ln(p), over=j)"
    assert repr(sightline.sum(p * table(np.arange(4.0))[h], over=(h, i))) == "sum(p·t[h], over=(h, i))"


def test_the_logarithm_of_an_underflowed_weight_is_exact():
    query = np.array([[[[1.0]]]])
    key = np.array([0.0, -2000.0, -1000.0]).reshape(1, 1, 3, 1)
    see = [sightline.min(np.log(p), over=j), sightline.sum(where(j > 0, np.log(p), 0), over=j)]
    _, (smallest, total) = sightline.attention(query, key, key, scale=1.0, see=see)
    assert (smallest.value.item(), smallest.where.item(), total.item()) == (-2000, 1, -3000)


@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor, jnp.asarray], ids=["numpy", "torch", "jax"])
@pytest.mark.parametrize("formula", [p / p, p * (1 / p), p * p**-1.0, p * (i % p)], ids=str)
def test_a_formula_that_divides_by_an_underflowed_weight_is_nan(library, formula):
    x = library(np.array([[0.0], [200.0]], np.float32))
    see = [sightline.sum(formula, over=j), sightline.min(formula, over=j), sightline.sum(p * p, over=j)]
    _, (total, least, purity) = sightline.attention(x[1:] / 200, x, x, scale=1.0, see=see)
    assert [bool(np.isnan(to_numpy(one)).all()) for one in (total, least.value, purity)] == [True, True, False]


LOGARITHMS = [
    (np.log(p), lambda e: e["ln p"]),
    (np.log(p) * (j < 3), lambda e: e["ln p"] * (e["j"] < 3)),
    (np.maximum(np.log(p), -1e5), lambda e: e["ln p"]),
    (np.log(p) - s, lambda e: e["ln p"] - e["s"]),
    (np.log(p) ** 2, lambda e: e["ln p"] ** 2),
    (p * np.log(p * 3), lambda e: e["p"] * (e["ln p"] + math.log(3))),
    (p * np.log(p / (j + 1)), lambda e: e["p"] * (e["ln p"] - (e["j"] + 1).log())),
    (p * np.log2(np.sqrt(p) / 2), lambda e: e["p"] * (e["ln p"] / 2 / math.log(2) - 1)),
    (np.log(p**3 / (j + 1)), lambda e: 3 * e["ln p"] - (e["j"] + 1).log()),
    (
        p * np.log(p / ((p + (j == 1) * 0.5) / 2)),
        lambda e: e["p"] * (e["ln p"] - (e["p"] / 2 + (e["j"] == 1) / 4).clamp_min(1e-300).log()),
    ),
    (p * np.log(1 / p), lambda e: -e["p"] * e["ln p"]),
]


def test_the_factors_of_a_logarithm_are_found_once_for_each_node():
    product = p
    for _ in range(60):
        product = product * product
    assert str(split_logarithms(np.log(product))) == f"ln p·{2.0**60:g}"


@pytest.mark.sampled(one_in=23)
@pytest.mark.parametrize("how", ["sum", "max"])
@pytest.mark.parametrize("distance", [1.0, 95.0, 103.0, 740.0, 5000.0])
@pytest.mark.parametrize(("formula", "function"), LOGARITHMS, ids=lambda value: "" if callable(value) else str(value))
def test_logarithms_of_underflowed_weights_have_exact_gradients(rng, formula, function, distance, how):
    """The logarithm of a weight is s − lse, however small the weight, and so are its derivatives."""
    query, key = (torch.tensor(rng.normal(size=(1, 1, 5, 4)), requires_grad=True) for _ in range(2))
    score = s + where(i >= j, 0.0, -distance)
    places = torch.arange(5.0, dtype=torch.float64)
    final = query @ key.mT / 2 - distance * (places[:, None] < places)
    logarithm = final - torch.logsumexp(final, -1, keepdim=True)
    entries = function({"ln p": logarithm, "p": logarithm.exp(), "s": final, "j": places}).nan_to_num(0.0)
    factor = torch.tensor(rng.normal(size=(1, 1, 5)))
    expected = entries.sum(-1) if how == "sum" else entries.amax(-1)
    gradients = torch.autograd.grad((expected * factor).sum(), (query, key))
    statistic = getattr(sightline, how)(formula, over=j)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        ours = [x.detach().to(dtype).requires_grad_() for x in (query, key)]
        _, (found,) = sightline.attention(*ours, ours[1], score=score, see=[statistic])
        found = found if how == "sum" else found.value
        size = float(final.detach().abs().max() + expected.detach().abs().max())
        np.testing.assert_allclose(found.detach(), expected.detach(), atol=tolerance * size)
        for one, other in zip(torch.autograd.grad((found * factor.to(dtype)).sum(), ours), gradients, strict=True):
            np.testing.assert_allclose(one, other, atol=20 * tolerance * float(1 + other.abs().max()))


@pytest.mark.parametrize("kernel", ["cpu", "streaming", "reference"])
def test_the_first_nan_and_the_first_visible_infinity_are_found(kernel):
    x, low = np.zeros((5, 2), np.float32), table(np.array([0.0, *[-np.inf] * 4]))
    f, g = (p + table(np.array([0, np.inf, np.nan, 1, np.nan]))[axis] for axis in (i, j))
    see = [sightline.max(f, over=i), sightline.max(g, over=j), sightline.min(-g, over=j), sightline.max(low[j], over=j)]
    _, found = sightline.attention(x, x, x, mask=j > 0, see=see, kernel=kernel)
    assert [one.where[-1] for one in found] == [2, 2, 2, 1]


FAULTS = {
    "a hidden pair counted": Fault(reduction.Reduction.hide, "self.hidden", "1.0"),
    "a weight of another query": Fault(streaming.row_tiles, "masked - high", "masked - high[..., :1, :]"),
    "an edge of a cell": Fault(reduction.cell_of, "(position + 1) * cells - 1", "position * cells"),
    "ln p without lse": Fault(reduction.Reduction.entries, "scores - tile.lse[..., None]", "scores"),
    "the position of the other extremum": Fault(reduction.find_extremum, "-values", "values"),
    "the derivative by p left out": Fault(reduction.Reduction.slopes.function, "(p, LOG_P, s)", "(s, LOG_P, s)"),
    "the derivative by ln p left out": Fault(reduction.Reduction.slopes.function, "(p, LOG_P, s)", "(p, s, s)"),
    "the derivative by s left out": Fault(reduction.Reduction.slopes.function, "(p, LOG_P, s)", "(p, LOG_P, i)"),
    "a gradient of another result": Fault(reduction.Reduction._gradient_of_pair, "context.gradient_at(*index)", "s"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(name, monkeypatch):
    def check() -> None:
        for seed in range(120):
            check_torch(seed, kernel="streaming")

    assert_found(FAULTS[name], monkeypatch, check, "budget|no pairs|position|shape")
