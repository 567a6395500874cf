"""Every statistic of every kernel, and its gradients, are within the rounding-error budget of the definition."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.autograd import gradcheck, gradgradcheck

import sightline
from fault_planting import Fault, assert_found, plant
from sightline import h, i, j, p, s, table, where
from sightline.api import functions
from sightline.arrays.operations import to_numpy
from sightline.call.problem import make_problem
from sightline.errors import DtypeError, FormulaError, MaskError, ParameterError, ShapeError, TableError
from sightline.reference.accuracy import dense_attention, gradient_term_sizes, summation_orders
from sightline.reference.testing import assert_within_budget
from sightline.statistics import arrays_of, head_factors, per_query, reduction, restriction
from sightline.statistics import statistic as statistic_module
from statistic_definitions import (
    EQUAL_WEIGHTS,
    Dense,
    check,
    check_equal_weights,
    check_results,
    defined,
    parts,
    statistics,
    usable,
)
from strategies import DTYPES, ON_HOST, cases

streaming = sys.modules["sightline.reference.streaming"]
EXAMPLES = {"reference": 2, "streaming": 6, "cpu": 2}  # examples per dtype; most examples of "cpu" compile a kernel


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ON_HOST, ids=lambda kernel: kernel.name)
def test_drawn_problems(kernel, dtype):
    @settings(max_examples=EXAMPLES[kernel.name])
    @given(st.data(), cases(dtypes=(dtype,), largest=8000))
    def conforms(data, case):
        problem = case.make_problem()
        if not usable(problem):
            return
        see = data.draw(statistics(problem))
        framework = data.draw(st.sampled_from(["numpy", "torch"]))
        check(kernel.run, (case.as_torch() if framework == "torch" else case).make_problem(see=see))

    conforms()


@pytest.mark.parametrize("kernel", ON_HOST, ids=lambda kernel: kernel.name)
def test_drawn_parts(kernel):
    @settings(max_examples=2 * EXAMPLES[kernel.name])
    @given(st.data(), cases(largest=4000))
    def conforms(data, case):
        problem = case.make_problem()
        if usable(problem):
            check(kernel.run, case.make_problem(see=data.draw(parts(problem))))

    conforms()


# -- gradients ---------------------------------------------------------------------------------------------------------


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.tensor(np.random.default_rng(seed).normal(size=shape), dtype=dtype, requires_grad=True)


DIFFERENTIABLE = {
    "lse": lambda x: sightline.lse().mean("heads"),
    "max_score": lambda x: sightline.max_score(),
    "entropy": lambda x: sightline.entropy(),
    "mass": lambda x: sightline.mass((i + j) % 2 == h),
    "sum": lambda x: sightline.sum(p * abs(i - j) / 2, over=j),
    "sum of scores": lambda x: sightline.sum(p * s * (s - j), over=j).mean("heads"),
    "received": lambda x: sightline.received(),
    "received, mean of the last": lambda x: sightline.received("mean", last=2).mean("batch"),
    "received, max": lambda x: sightline.received("max"),
    "pooled": lambda x: sightline.pooled(2, 2, within=((0, 3), (1, 4))),
    "weights": lambda x: sightline.weights().mean("heads"),
    "weights, weighted heads": lambda x: sightline.weights().sum("heads", weights=[0.5, -2.0]),
    "lse, weighted heads": lambda x: (
        sightline.lse().mean("batch").mean("heads", weights=[np.float32(0.5), np.int64(-2)])
    ),
    "entropy, the sum of heads": lambda x: sightline.entropy().sum("heads"),
    "scores": lambda x: sightline.scores(),
    "rows and heads": lambda x: sightline.weights().rows([np.int64(-1), 0]).heads([np.int64(1), 0]),
    "one head of a group": lambda x: sightline.entropy().heads([1]).mean("heads"),
    "weighted_sum": lambda x: sightline.weighted_sum(x),
    "weighted_sum, a part": lambda x: sightline.weighted_sum(x).rows(slice(1, None)).mean("heads"),
}


def gradient_inputs():
    """Query, key, value, biases, sinks, a scale and x, all with gradients; two query heads and one key head."""
    return [
        drawn(1, 2, 3, 2, seed=1),
        drawn(1, 1, 4, 2, seed=2),
        drawn(1, 1, 4, 2, seed=3),
        drawn(2, 4, seed=4),
        drawn(2, seed=5),
        torch.tensor(0.7, dtype=torch.float64, requires_grad=True),
        drawn(1, 4, 2, seed=6),
    ]


def statistic_function(name, kernel=None):
    """The statistic as a function of `gradient_inputs()`, with a query that attends to no key and a dropped weight."""

    def call(query, key, value, bias, sinks, scale, x):
        options = {"mask": (i >= j - 1) & (i != 1), "score": torch.tanh(s) + table(bias)[h, j], "sinks": sinks}
        options |= {"scale": scale, "dropout": 0.3, "seed": 1, "kernel": kernel}
        output, (found,) = sightline.attention(query, key, value, see=[DIFFERENTIABLE[name](x)], **options)
        first = found[0] if isinstance(found, tuple) else found
        return output, torch.where(torch.isinf(first), 0.0, first)

    return call


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_equal_finite_differences(name):
    assert gradcheck(statistic_function(name, "streaming"), gradient_inputs(), fast_mode=True)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", ["entropy", "sum of scores", "max_score", "weighted_sum, a part"])
def test_second_gradients_equal_finite_differences(name):
    assert gradgradcheck(statistic_function(name, "streaming"), gradient_inputs(), fast_mode=True)


UNDERFLOWED = {  # statistics of scores, options of a call, and which weights of query 1 are 0
    "a large scale": (sightline.scores(), {"mask": i >= j - 1, "scale": 2000.0}, torch.any),
    "a large sink": (sightline.max_score(), {"mask": i >= j, "sinks": torch.full((2,), 1000.0)}, torch.all),
}


@pytest.mark.parametrize("kernel", ["streaming", "cpu"])
@pytest.mark.parametrize("name", UNDERFLOWED)
def test_scores_have_gradients_where_weights_are_0(name, kernel):
    statistic, options, which = UNDERFLOWED[name]

    def call(query, key):
        _, (found,) = sightline.attention(query, key, key, see=[statistic], **options, kernel=kernel)
        first = arrays_of(found)[0]
        return torch.where(torch.isinf(first), 0.0, first)

    query, key, *_ = gradient_inputs()
    _, (weights,) = sightline.attention(query, key, key, see=[sightline.weights()], **options)
    assert which(weights[..., 1, :3] == 0)
    assert gradcheck(call, [query, key], fast_mode=True)


@pytest.mark.parametrize("statistic", [sightline.top_k(2), sightline.pooled(2, 2, "max")], ids=str)
def test_statistics_without_gradients_are_outside_the_graph(statistic):
    query, key, value, *_ = gradient_inputs()
    output, (found,) = sightline.attention(query, key, value, see=[statistic])
    assert output.requires_grad
    assert [array.requires_grad for array in arrays_of(found)] == [False] * statistic.num_arrays


# -- compilation -------------------------------------------------------------------------------------------------------

COMPILED = {
    "several": lambda x: [sightline.max_score(), sightline.top_k(2), sightline.received("max"), sightline.lse()],
    "conditions": lambda x: [
        sightline.mass(lambda b, h, i, j: i >= j),
        sightline.mass(j < table(torch.tensor([2, 4]))[h]),
        sightline.mass(torch.ones(3, 4, dtype=torch.bool).tril()),
    ],
    "parts and means": lambda x: [
        sightline.pooled(2, 2).mean("heads"),
        sightline.weights().sum("heads", weights=[0.5, 2.0]),
        sightline.received(last=2),
        sightline.weights().heads([-1]).rows([0, -1]),
        sightline.weighted_sum(x).mean("batch"),
    ],
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_without_graph_breaks(name):
    torch.compiler.reset()

    def call(query, key, value, x):
        options = {"see": COMPILED[name](x), "kernel": "streaming"}
        _, found = sightline.attention(query, key, value, mask=i >= j - 1, **options)
        return [array for entry in found for array in arrays_of(entry)]

    query, key, value, *_, x = gradient_inputs()
    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        arrays = function(query, key, value, x)
        total = sum(array.square().sum() for array in arrays if array.requires_grad)
        results.append([*arrays, *torch.autograd.grad(total, [query, key, x], allow_unused=True)])
    torch.testing.assert_close(*results, rtol=0, atol=1e-13, equal_nan=True)


def test_compiled_once_for_all_lengths():
    torch.compiler.reset()
    counter = CompileCounter()

    def call(x):
        see = [
            sightline.weights().rows([0, -1]),
            sightline.received(last=3),
            sightline.weighted_sum(x[..., :2]),
            sightline.top_k(2),
            sightline.sum(p * p, over=j),
            sightline.max(p * j, over=i),
        ]
        _, found = sightline.attention(x, x, x, mask=i >= j, see=see, kernel="streaming")
        return [array for entry in found for array in arrays_of(entry)]

    call(drawn(2, 4, 5, 8, dtype=torch.float32))  # imports and global dicts are ready before the trace
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 6, 9, 70):
        x = drawn(2, 4, length, 8, dtype=torch.float32)
        for one, other in zip(compiled(x), call(x), strict=True):
            assert torch.equal(one, other)
    assert counter.frame_count == 1


# -- gradients within the budget ---------------------------------------------------------------------------------------

OF_WEIGHTS = {
    "entropy": sightline.entropy(),
    "mass": sightline.mass(i % 3 == j % 3),
    "received": sightline.received("mean", last=9),
    "pooled": sightline.pooled(4, 3).mean("batch"),
    "weights": sightline.weights().mean("heads"),
    "weighted heads": sightline.weights().sum("heads", weights=[1.0, -0.5, 0.0, 2.0]),
    "heads": sightline.weights().heads([2, 1]),
}


def check_gradients(statistic, kernel="streaming"):
    """Check gradients of Σ seed ∘ statistic in float32 against torch's float64 gradients of the dense definition."""
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=size).astype(np.float32) for size in ((2, 4, 31, 8), (2, 2, 600, 8), (2, 2, 600, 1))]
    options = {"mask": i * 30 >= j, "score": 4 * np.tanh(s / 4), "sinks": np.linspace(-1, 1, 4, dtype=np.float32)}
    problem = sightline.call.problem.make_problem(*arrays, **options, see=[statistic])
    seed = torch.tensor(rng.normal(size=statistic.outputs(problem)[0][0]))

    def leaves(dtype):
        return [torch.tensor(array, dtype=dtype, requires_grad=True) for array in arrays]

    def plain_gradients(dtype, order):
        tensors = leaves(dtype)
        posed = sightline.call.problem.make_problem(*tensors, **options)
        _, lse, weights = dense_attention(posed, str(dtype).removeprefix("torch."), order)
        found = defined(statistic, Dense(weights, weights, lse, posed))[0]
        gradients = torch.autograd.grad((found * seed.to(dtype)).sum(), [*tensors[:2], weights])
        return [to_numpy(gradient).astype(np.float64) for gradient in gradients]

    tensors = leaves(torch.float32)
    _, (found,) = sightline.attention(*tensors, **options, see=[statistic], kernel=kernel)
    answers = torch.autograd.grad((found * seed.float()).sum(), tensors[:2])
    *truth, d_weights = plain_gradients(torch.float64, 0)
    rough = [plain_gradients(torch.float32, order) for order in summation_orders(problem)]
    sizes = gradient_term_sizes(problem, np.zeros((*problem.query.shape[:-1], 1)), 0.0, abs(d_weights))
    for k, name in enumerate(("query", "key")):
        worst = np.stack([one[k] for one in rough])
        assert_within_budget(answers[k], truth[k], worst, f"gradient of {name} through {statistic}", sizes[name])


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kernel", ["streaming", "cpu"])
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_gradients_within_budget(name, kernel):
    check_gradients(OF_WEIGHTS[name], kernel)


@pytest.mark.parametrize("kernel", ON_HOST, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("how", ["mean", "max"])
def test_pooled_has_at_most_a_cell_for_each_pair(kernel, how):
    x = np.random.default_rng(0).normal(size=(1, 2, 7, 4)).astype(np.float32)
    own = make_problem(x[..., :3, :], x, x, see=[sightline.weights(), sightline.pooled(64, 64, how)])
    weights, cells = kernel.run(own).seen
    np.testing.assert_array_max_ulp(cells, weights)
    empty = sightline.pooled(64, 64, how, within=((2, 2), (0, 7)))
    assert kernel.run(own.with_statistics(empty)).seen[0].shape == (1, 2, 0, 7)
    query, key = (torch.tensor(part, requires_grad=True) for part in (x[..., :3, :], x))
    both = [sightline.weights(), sightline.pooled(64, 64), sightline.pooled(64, 64, within=((2, 2), (0, 7)))]
    _, (dense, pooled, nothing) = sightline.attention(query, key, key, see=both)
    expected, found = (torch.autograd.grad(p.square().sum(), query, retain_graph=True)[0] for p in (dense, pooled))
    torch.testing.assert_close(found, expected)
    assert not torch.autograd.grad(nothing.sum(), query)[0].any()


# -- the same bits -----------------------------------------------------------------------------------------------------


def every_statistic(m):
    """Every statistic, for a problem of m keys and at least four heads."""
    x = np.random.default_rng(2).normal(size=(m, 3)).astype(np.float32)
    return [
        sightline.lse(),
        sightline.max_score(),
        sightline.entropy(),
        sightline.top_k(5),
        sightline.mass(i >= j),
        *(sightline.received(how) for how in ("sum", "mean", "max")),
        sightline.received(last=7),
        *(sightline.pooled(6, 11, how) for how in ("mean", "max")),
        sightline.pooled(3, 4, within=((9, 24), np.array([505, 523]))),
        sightline.weights(),
        sightline.scores(),
        sightline.weights().rows([0, -1]),
        sightline.weights().heads([3, 2]),
        sightline.weights().mean("heads").mean("batch"),
        sightline.weights().sum("heads", weights=[1.0, -0.5, 0.0, 2.0]),
        sightline.weighted_sum(x),
    ]


@pytest.fixture(scope="module")
def long_problem():
    """A problem with several key tiles, two query heads per key head, hidden pairs and sinks."""
    rng = np.random.default_rng(7)
    arrays = [rng.normal(size=size).astype(np.float32) for size in ((2, 4, 40, 8), (2, 2, 700, 8), (2, 2, 700, 5))]
    return (*arrays, {"mask": (i * 20 >= j) & (i != 3), "sinks": np.linspace(-1, 1, 4, dtype=np.float32)})


@pytest.mark.parametrize("kernel", ON_HOST, ids=lambda kernel: kernel.name)
def test_equal_bits_in_every_call_and_for_any_number_of_threads(kernel, long_problem):
    *arrays, options = long_problem
    answers = [
        sightline.attention(*arrays, **options, see=every_statistic(700), kernel=kernel.name, threads=threads)[1]
        for threads in (1, 1, 2, 3)
    ]
    for statistic, first, *others in zip(every_statistic(700), *answers, strict=True):
        for other in others:
            for one, again in zip(arrays_of(first), arrays_of(other), strict=True):
                assert np.array_equal(one, again), statistic


@pytest.mark.parametrize("kernel", ON_HOST, ids=lambda kernel: kernel.name)
def test_several_tiles(kernel, long_problem):
    *arrays, options = long_problem
    check(kernel.run, sightline.call.problem.make_problem(*arrays, **options, see=every_statistic(700)))


@pytest.mark.parametrize("kernel", ON_HOST, ids=lambda kernel: kernel.name)
def test_the_first_of_equal_keys_is_found(kernel):
    query, key = np.ones((1, 1, 3, 2), np.float32), np.ones((1, 1, 1030, 2), np.float32)
    options = {"mask": (j > i) & (i < 2), "see": [sightline.max_score(), sightline.top_k(3)], "kernel": kernel.name}
    _, (largest, top) = sightline.attention(query, key, key, **options)
    assert largest.where.tolist() == [[[1, 2, -1]]]
    assert top.where.tolist() == [[[[1, 2, 3], [2, 3, 4], [-1, -1, -1]]]]
    assert np.isneginf(largest.score[0, 0, 2])
    assert not top.weights[0, 0, 2].any()


@pytest.mark.parametrize("by_formula", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", EQUAL_WEIGHTS)
@pytest.mark.parametrize("kernel", ON_HOST, ids=lambda kernel: kernel.name)
def test_of_equal_weights_the_smaller_key_comes_first(kernel, name, dtype, by_formula):
    check_equal_weights(kernel.run, name, dtype, by_formula)


# -- shapes of results -------------------------------------------------------------------------------------------------


def test_arrays_without_heads_give_results_without_heads(long_problem):
    query, key, value, _ = long_problem
    see = [
        *(one for one in every_statistic(700) if one.name != "selection" and "weights=" not in repr(one)),
        sightline.weights().rows([1]),
        sightline.weights().rows([1, 2]).mean("batch"),
        sightline.weights().rows([1]).mean("heads"),
        sightline.entropy().mean("batch"),
    ]
    with_heads = [x[:, :1] for x in (query, key, value)]
    _, whole = sightline.attention(*with_heads, see=see, kernel="streaming")
    _, flat = sightline.attention(*(x[:, 0] for x in with_heads), see=see, kernel="streaming")
    for statistic, one, other in zip(see, whole, flat, strict=True):
        axis = statistic.head_axis(1)
        for x, y in zip(arrays_of(one), arrays_of(other), strict=True):
            assert np.array_equal(x if axis is None else np.squeeze(x, axis), y), statistic
    for kernel in ("streaming", "cpu"):
        _, first = sightline.attention(*(x[:1, 0] for x in with_heads), see=see, kernel=kernel)
        _, alone = sightline.attention(*(x[0, 0] for x in with_heads), see=see, kernel=kernel)
        for statistic, one, other in zip(see, first, alone, strict=True):
            for x, y in zip(arrays_of(one), arrays_of(other), strict=True):
                assert np.array_equal(x if "batch" in repr(statistic) else x[0], y), statistic


def test_a_cache_replaces_key_and_value(long_problem):
    query, key, value, options = long_problem
    cache = sightline.KVCache()
    cache.append(key, value)
    statistics = [sightline.mass(j < 9), *every_statistic(700)]
    before = key.shape[-2] - query.shape[-2]
    mask = (j % 7 != 2) & (i != before + 3)
    options = options | {"kernel": "streaming"}
    _, cached = sightline.attention(query, cache, **options | {"mask": mask, "see": statistics})

    def of_rows(formula):
        return formula.rewrite({"i": i + before})

    options |= {"mask": of_rows(mask), "see": [statistic.map_formulas(of_rows) for statistic in statistics]}
    _, plain = sightline.attention(query, key, value, **options)
    for statistic, one, other in zip(statistics, cached, plain, strict=True):
        for x, y in zip(arrays_of(one), arrays_of(other), strict=True):
            assert np.array_equal(x, y), statistic


@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor, jnp.asarray], ids=["numpy", "torch", "jax"])
def test_maxima_over_queries_name_positions_in_the_sequence(library, rng):
    x, largest = rng.normal(size=(2, 3, 6, 4)).astype(np.float32), sightline.max(p, over=i)
    chosen = {(0, 1, 2, 3, 4, 5): largest, (5, 1, 4): largest.rows([5, 1, -2]), (3, 4, 5): largest.rows(slice(3, None))}
    see = [sightline.weights(), largest.rows([]).heads([2]), *chosen.values()]
    _, (weights, none, *found) = sightline.attention(*[library(x)] * 3, mask=i >= j, see=see)
    assert (none.where == -np.ones((2, 1, 6))).all()
    for rows, one in zip(chosen, found, strict=True):
        own = to_numpy(weights)[:, :, list(rows)]
        assert np.array_equal(one.where, np.where(own.any(-2), np.array(rows)[own.argmax(-2)], -1))


@pytest.mark.parametrize("counts", [None, [2, 1]], ids=["equal lengths", "ragged"])
@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_maxima_over_queries_of_a_cache_name_positions_in_the_sequence(library, counts, rng):
    x, largest, cache = library(rng.normal(size=(2, 3, 6, 4))), sightline.max(p, over=i), sightline.KVCache()
    cache.append(x[:, :, :4], x[:, :, :4], lengths=counts and [4, 3])
    cache.append(x[:, :, 4:], x[:, :, 4:], lengths=counts)
    see = [sightline.weights(), largest, largest.rows([1])]
    _, (weights, of_both, of_last) = sightline.attention(x[:, :, 4:], cache, mask=i >= j, see=see)
    weights, places = to_numpy(weights), cache.positions()
    expected = [np.where(row.any(-2), place[row.argmax(-2)], -1) for row, place in zip(weights, places, strict=True)]
    assert np.array_equal(of_both.where, expected)
    assert np.array_equal(of_last.where, np.where(weights[:, :, 1] > 0, places[:, 1:, None], -1))


@pytest.mark.parametrize("scale", [1.0, 1e9])
def test_tiles_have_the_values_of_the_weights(long_problem, scale, monkeypatch):
    """Tiles of 16 queries, also where an lse in float32 would be too coarse."""
    *arrays, options = long_problem
    see = [sightline.weights(), sightline.scores(), sightline.lse()]
    problem = make_problem(*arrays, **options, scale=scale, see=see)
    monkeypatch.setattr(functions, "MAX_TILE_SCORES", 16 * 2 * 4 * 700)
    weights = np.zeros((2, 4, 40, 700), np.float32)
    scores, lse = np.full_like(weights, -np.inf), np.full(weights.shape[:-1], np.nan)
    tiles = list(sightline.tiles(*arrays, **options, scale=scale))
    for tile in tiles:
        weights[..., tile.rows, tile.columns] += tile.weights
        scores[..., tile.rows, tile.columns] = tile.scores
        lse[..., tile.rows] = tile.lse
    assert [tile.rows.start for tile in tiles] == sorted([tile.rows.start for tile in tiles])
    assert len(tiles) > 2
    check_results(problem, problem.see, (weights, scores, lse.astype(np.float32)))


# -- errors ------------------------------------------------------------------------------------------------------------

X = np.ones((1, 2, 4, 3), np.float32)
LEARNED = table(torch.ones(4, requires_grad=True))


def wanted(t):
    return sightline.attention_vjp(X, X, X, wrt=[t], score=s + t[j], see=sightline.sum(p * t[j], over=j))


def attend(*see, arrays=(X, X, X)):
    return sightline.attention(*arrays, see=list(see))


LARGE = np.zeros((1, 1, 1 << 15, 1), np.float32)  # its weights take 4 GiB


ERRORS = {
    "no key to find": (lambda: sightline.top_k(0), ParameterError, "top_k(k=0)", "at least 1"),
    "half a key": (lambda: sightline.top_k(1.5), ParameterError, "top_k(k=1.5)", "whole number"),
    "keys beyond memory": (lambda: attend(sightline.top_k(10**12)), ParameterError, "of 4 keys, 96,000,", "top_k(4)"),
    "no condition": (lambda: sightline.mass(None), MaskError, "mass(None)", "True pairs are summed"),
    "a slice of words": (
        lambda: sightline.weights().rows(slice("a", None)),
        ParameterError,
        "rows(slice('a', None, None))",
    ),
    "a slice without steps": (
        lambda: sightline.weights().heads(slice(None, None, 0)),
        ParameterError,
        "step other than 0",
    ),
    "masked rows": (lambda: sightline.weighted_sum(np.ma.ones((4, 1))), DtypeError, "a masked array", "filled(0)"),
    "another way": (lambda: sightline.received("median"), ParameterError, "'median'", '"sum"'),
    "the last 0": (lambda: sightline.received(last=0), ParameterError, "last=0", "None for all"),
    "a mask of numbers": (lambda: attend(sightline.mass(i - j)), MaskError, "mass(i − j)", "sum(p * formula, over=j)"),
    "a mask that reads p": (lambda: sightline.mass(p > 1), MaskError, "mass(p > 1)", "where(formula, p, 0), over=j)"),
    "p in a mask": (lambda: sightline.attention(X, X, X, mask=p > 0), MaskError, "reads the weight p"),
    "p in a score": (lambda: sightline.attention(X, X, X, score=s + p), MaskError, "reads the weight p"),
    "a sum over a length": (lambda: sightline.sum(p, over=sightline.n), ParameterError, "over=n", "over=j"),
    "a sum over text": (lambda: sightline.sum(p, over="j"), ParameterError, "over='j'", "from sightline import j"),
    "a sum by groups": (
        lambda: sightline.sum(p, over=sightline.table(X[0, 0])[j, 0]),
        ParameterError,
        "weighted_sum(x)",
    ),
    "sorted weights": (lambda: np.sort(p), FormulaError, "top_k(k) or sightline.tiles"),
    "where of two arguments": (lambda: np.where(p > 0.1, p), FormulaError, "such as 0"),
    "a comparison of a maximum": (lambda: sightline.max(p, over=j) > 0.3, ParameterError, "compute with its results"),
    "a statistic in a formula": (lambda: p + sightline.sum(p * i, over=j), FormulaError, "table(result)[b, h, i]"),
    "a statistic of a statistic": (lambda: sightline.sum(sightline.max(p, over=j), over=j), FormulaError, "see=[max(p"),
    "the weight of another pair": (lambda: sightline.sum(p[j, sightline.i], over=j), FormulaError, "[b, h, j, i]"),
    "a sum of a sum": (lambda: sightline.sum(p, over=j) ** 2, ParameterError, "arithmetic with sum(p, over=j)"),
    "a formula in see": (lambda: attend(p * p), ParameterError, "p·p in see=", "sightline.sum(formula, over=j)"),
    "a mean of a statistic by NumPy": (lambda: np.mean(sightline.lse()), ParameterError, "arithmetic with lse()"),
    "an exponential of a statistic": (lambda: np.exp(sightline.lse()), ParameterError, "arithmetic with lse()"),
    "a sum over one axis twice": (lambda: sightline.sum(p, over=(j, j)), ParameterError, "over=(j, j)"),
    "a maximum over heads": (lambda: sightline.max(p, over=(sightline.h, j)), ParameterError, "i, j or both"),
    "cells of queries": (lambda: sightline.sum(p, over=j, cells=(2, 2)), ParameterError, "over=(i, j)"),
    "one number of cells": (lambda: sightline.sum(p, over=(i, j), cells=4), ParameterError, "(rows, columns)"),
    "no rows of cells": (lambda: sightline.max(p, over=(i, j), cells=(0, 4)), ParameterError, "at least 1"),
    "a sum of words": (lambda: sightline.sum("p", over=j), FormulaError, "a str inside a formula"),
    "a learned table in a maximum": (lambda: attend(sightline.max(p + LEARNED[j], over=j)), ParameterError, "detach"),
    "every pair of a long text": (
        lambda: attend(sightline.sum(p * p, over=()), arrays=(LARGE,) * 3),
        ParameterError,
        "sum(p·p, over=()) of 1 × 1 × 32768 × 32768, 4,294,967,296 bytes",
        "a sum over i or j",
    ),
    "a wanted table in a sum": (lambda: wanted(table(np.ones(4))), ParameterError, "requires a gradient"),
    "a learned table in a sum": (lambda: attend(sightline.sum(p * LEARNED[j], over=j)), ParameterError, "detach"),
    "a mask outside its table": (lambda: attend(sightline.mass(table([True])[i])), TableError, "reads outside", "i=1"),
    "no cells": (lambda: sightline.pooled(0, 3), ParameterError, "rows=0", "pooled(64, 64)"),
    "a line": (lambda: sightline.pooled(1, 1, within=(0, 4)), ParameterError, "within=(0, 4)", "first query"),
    "a rectangle outside": (lambda: attend(sightline.pooled(1, 1, within=((0, 4), (0, 5)))), ShapeError, "keys 0 to 5"),
    "pooled by another way": (lambda: sightline.pooled(1, 1, "sum"), ParameterError, "how='sum'", '"max"'),
    "a matrix too large": (
        lambda: attend(sightline.weights(), arrays=(LARGE,) * 3),
        ParameterError,
        "weights() of 1 × 1 × 32768 × 32768, 4,294,967,296 bytes",
        "2,147,483,648",
        "insist=True",
    ),
    "a limit that is none": (lambda: sightline.scores(limit=-1), ParameterError, "scores(limit=-1)", "bytes"),
    "row beyond": (lambda: attend(sightline.weights().rows([4])), ParameterError, "rows([4]) of 4", "indices -4 to 3"),
    "a head beyond": (lambda: attend(sightline.weights().heads([-3])), ParameterError, "heads([-3]) of 2", "omit -3"),
    "one number for rows": (lambda: sightline.weights().rows(3), ParameterError, "rows(3)", "rows([0, -1])"),
    "rows twice": (lambda: sightline.weights().rows([0]).rows([0]), ParameterError, "rows selected once"),
    "heads where there are none": (
        lambda: attend(sightline.weights().heads([0]), arrays=(X[0, 0],) * 3),
        ParameterError,
        "without heads",
    ),
    "a mean over keys": (lambda: sightline.weights().mean("keys"), ParameterError, "mean('keys')", '"heads"'),
    "weights of other heads": (
        lambda: attend(sightline.entropy().mean("heads", weights=[1, 2, 3])),
        ParameterError,
        "3 weights for 2 heads",
        "one number for each head",
    ),
    "weights of layers": (
        lambda: attend(sightline.entropy().sum("heads", weights=np.ones((5, 2)))),
        ParameterError,
        "5×2 weights for 2 heads",
        "of a watch",
    ),
    "weights without a mean": (
        lambda: sightline.weights().mean("heads", weights=[1, -1]),
        ParameterError,
        "whose sum is 0",
        ".sum(",
    ),
    "weights that are learned": (
        lambda: sightline.weights().mean("heads", weights=torch.ones(2, requires_grad=True)),
        ParameterError,
        "require gradients",
        "detach()",
    ),
    "word weights": (lambda: sightline.lse().mean("heads", "ab"), ParameterError, "weights='ab'", "H finite numbers"),
    "weights of the batch": (
        lambda: sightline.weights().mean("batch", weights=[1.0]),
        ParameterError,
        "mean('batch', weights=...)",
        'weights for "heads"',
    ),
    "heads twice": (lambda: sightline.lse().mean("heads").sum("heads"), ParameterError, "one sum or mean over heads"),
    "a sum over keys": (lambda: sightline.weights().sum("keys"), ParameterError, "sum('keys')", '"layers"'),
    "the batch twice": (lambda: sightline.lse().mean("batch").sum("batch"), ParameterError, "mean over the batch"),
    "layers of one call": (
        lambda: attend(sightline.received().mean("layers")),
        ParameterError,
        'received().mean("layers") of one call',
        "watch(model",
    ),
    "a mean of places": (lambda: sightline.top_k(2).mean("heads"), ParameterError, "which finds positions"),
    "a list of rows": (lambda: sightline.weighted_sum([1.0]), DtypeError, "weighted_sum(x) is a list", "numpy.asarray"),
    "rows of integers": (lambda: sightline.weighted_sum(np.ones((4, 1), int)), DtypeError, "dtype int64", "cast"),
    "rows": (lambda: attend(sightline.weighted_sum(X[0, 0, :3])), ShapeError, "(3, 3)", "m = 4 keys, G = 2 key heads"),
    "a small table": (lambda: attend(sightline.sum(p * table([1.0])[i], over=j).rows([0])), TableError, "from 0 to 3"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_three_parts(name):
    call, error, *fragments = ERRORS[name]
    with pytest.raises(error) as raised:
        call()
    for fragment in (*fragments, "allowed:", "cure:"):
        assert fragment in str(raised.value)
    assert "·" not in raised.value.cure  # a cure can be pasted


@pytest.mark.parametrize("kernel", ["cpu", "streaming", "reference"])
def test_a_weight_of_0_has_no_gradient_where_the_formula_overflows(kernel):
    x = drawn(1, 1, 5, 3, dtype=torch.float32)
    options = {"score": where(j <= i, s, -1e30), "kernel": kernel}
    _, (found,) = sightline.attention(x, x, x, see=sightline.sum(p * s * s + 0.0 * p * j, over=j), **options)
    assert torch.isfinite(torch.autograd.grad(found.sum(), x)[0]).all()


def test_explain_shows_the_memory_of_statistics(long_problem):
    *arrays, options = long_problem
    totals = [sightline.explain(*arrays, **options, see=see).memory for see in (every_statistic(700), None)]
    answers = sightline.attention(*arrays, **options, see=every_statistic(700))[1]
    assert totals[0] - totals[1] == sum(array.nbytes for answer in answers for array in arrays_of(answer))
    assert sightline.explain(LARGE, LARGE, LARGE, see=sightline.weights(insist=True)).memory > 4 << 30


# -- planted faults ----------------------------------------------------------------------------------------------------


STATISTICS = {
    "a missed tile": (
        Fault(
            streaming.visible_tiles,
            "yield Tile(rows, columns, weights, masked, lse[..., rows])",
            "if columns.start == 0: yield Tile(rows, columns, weights, masked, lse[..., rows])",
        ),
        None,
    ),
    "scores before the mask": (Fault(streaming.visible_tiles, "masked", "_"), None),
    "a maximum of the last tile": (
        Fault(reduction.join_extrema, "(where < 0) | is_beyond | (is_equal & (other_where < where))", "value == value"),
        sightline.max_score(),
    ),
    "keys counted from the tile": (
        Fault(
            reduction.Reduction._find,
            "context.problem.positions(context.xp, tile.rows, tile.columns)",
            "context.problem.positions(context.xp, tile.rows, slice(0, tile.columns.stop - tile.columns.start))",
        ),
        sightline.max_score(),
    ),
    "the smallest weights": (
        Fault(per_query.TopK._largest, "xp.where(marked != marked, xp.inf, marked)", "-marked"),
        sightline.top_k(3),
    ),
    "hidden keys found": (Fault(per_query.TopK.add, "-math.inf", "0"), sightline.top_k(20)),
    "a mask one key on": (
        Fault(
            reduction.Reduction.entries,
            "problem.positions(xp, tile.rows, tile.columns)",
            "problem.positions(xp, tile.rows, slice(tile.columns.start + 1, tile.columns.stop + 1))",
        ),
        sightline.mass(i * 20 == j),
    ),
    "a mean over the keys": (
        Fault(reduction.Reduction.divide, "max(n, 1)", "array.shape[-1]"),
        sightline.received("mean"),
    ),
    "a row left out": (
        Fault(reduction.Reduction.add, "self.reduce(entries, axis)", "self.reduce(entries[..., 1:, :], axis)"),
        sightline.received(),
    ),
    "cells of equal size": (
        Fault(
            reduction.Reduction.cell_sizes,
            "np.outer(np.diff(cell_edges(*down, rows)), np.diff(cell_edges(*across, columns))).astype(np.float64)",
            "np.full((rows, columns), (down[1] - down[0]) / rows * (across[1] - across[0]) / columns)",
        ),
        sightline.pooled(6, 11),
    ),
    "the wrong key head": (
        Fault(restriction.resolve_heads, "head // problem.group", "head % problem.G"),
        sightline.weights().heads([2, 1]),
    ),
    "positions of the part": (
        Fault(
            restriction.restrict,
            'symbols["i"] = Table(positions)[SYMBOLS["i"]]',
            'symbols["b"] = Table(positions)[SYMBOLS["i"]]',
        ),
        sightline.weights().rows([-1]),
    ),
    "a mean of the wrong count": (
        Fault(statistic_module.Mean._reduced_axes, "math.prod([shape[axis] for axis in averaged])", "shape[-1]"),
        sightline.weights().mean("heads"),
    ),
    "a factor of another head": (
        Fault(head_factors.multiply_heads, "np.asarray(factors)", "np.asarray(factors[::-1])"),
        sightline.weights().sum("heads", weights=[1.0, 0.5, 2.0, 3.0]),
    ),
}
GRADIENTS = {
    "entropy the wrong way": (
        Fault(reduction.Reduction.slopes.function, "by_weight + quotient", "by_weight - quotient"),
        "entropy",
    ),
    "mass of every key": (
        Fault(reduction.Reduction.backward, "times_factor(gradient, term.rewrite(values))", "gradient"),
        "mass",
    ),
    "a mean that is a sum": (Fault(reduction.Reduction._gradient_of_pair, "1 / max(n, 1)", "1.0"), "received"),
    "cells from the other end": (Fault(reduction.Reduction._gradient_of_pair, "j - j0", "j1 - 1 - j"), "pooled"),
    "a gradient of another head": (
        Fault(statistic_module.Mean.backward, "np.asarray(self.factors)", "np.asarray(self.factors[::-1])"),
        "weighted heads",
    ),
    "the mean's share": (
        Fault(statistic_module.Mean.backward, "context.gradient / self.divisor(context.problem)", "context.gradient"),
        "weights",
    ),
}
RED = "budget|shape"


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("fault", STATISTICS)
def test_every_fault_in_a_statistic_is_found(fault, long_problem, monkeypatch):
    *arrays, options = long_problem
    planted, statistic = STATISTICS[fault]
    problem = make_problem(*arrays, **options, see=[statistic] if statistic else every_statistic(700))
    check(ON_HOST[1].run, problem)
    assert_found(planted, monkeypatch, lambda: check(ON_HOST[1].run, problem), RED)


@pytest.mark.parametrize("fault", GRADIENTS)
def test_every_fault_in_a_gradient_is_found(fault, monkeypatch):
    planted, statistic = GRADIENTS[fault]
    assert_found(planted, monkeypatch, lambda: check_gradients(OF_WEIGHTS[statistic]), RED)


def test_a_row_sum_without_the_statistics_share_is_found(monkeypatch):
    share = "xp.sum(p * xp.where(p == 0, ops.full(0.0), added_weights), axis=-1)"
    plant(Fault(streaming.backward, share, f"0 * {share}"), monkeypatch)
    with pytest.raises(AssertionError, match=RED):
        check_gradients(OF_WEIGHTS["received"])
    plant(Fault(streaming.backward, "xp.astype(known, ops.dtype)", "0"), monkeypatch)  # a sum that the result gives
    with pytest.raises(AssertionError, match=RED):
        check_gradients(OF_WEIGHTS["mass"])


@pytest.mark.parametrize("n", [1, 130], ids=["hidden pairs alone", "hidden tiles"])
@pytest.mark.parametrize("factors", [(-1.0, -2.0), (-1.0, 2.0), (0.0, 1.0)])
@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor, jnp.asarray], ids=["numpy", "torch", "jax"])
def test_a_weighted_sum_of_hidden_scores(library, factors, n):
    x, scores = library(np.ones((1, 2, n, 4), np.float32)), sightline.scores()
    _, (each, total) = sightline.attention(x, x, x, mask=i > j, see=[scores, scores.sum("heads", weights=factors)])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(sum(f * to_numpy(each)[:, k] for k, f in enumerate(factors) if f), total)


@pytest.mark.parametrize("statistic", [sightline.scores(), sightline.weights(), sightline.entropy()], ids=str)
@pytest.mark.parametrize("kernel", ["cpu", "streaming", "reference"])
def test_the_mean_of_no_batch_is_0(kernel, statistic):
    x = np.zeros((0, 2, 3, 4), np.float32)
    _, (mean,) = sightline.attention(x, x, x, see=[statistic.mean("batch")], kernel=kernel)
    assert mean.shape[0] == 2
    assert not np.asarray(mean).any()
