"""Packed and padded batches: every document gets the results, and costs the tiles, of the document alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from fault_planting import Fault, plant
from sightline import attention, causal, documents, explain, i, j, padding, table
from sightline.arrays.operations import to_numpy
from sightline.call.problem import make_problem
from sightline.errors import ParameterError, ShapeError, TableError
from sightline.formula import interval_arithmetic as bounds
from sightline.formula import library, tile_ranges
from sightline.formula.tile_ranges import find_tile_ranges
from sightline.reference.accuracy import compute_baseline, term_sizes
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from strategies import to_torch

TILE = 64
LENGTHS = np.array([70, 1, 0, 129, 64, 3, 200, 45])  # with an empty document, and a document that fills its tile
N = int(LENGTHS.sum())
MANY = np.random.default_rng(1).multinomial(131_072, np.full(1000, 1e-3))  # 1,000 documents


def spans(lengths):
    """The positions of each document."""
    ends = np.cumsum(lengths)
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def tiles_of(rows, columns):
    """The set of tiles that contain a pair of these positions."""
    if rows.start == rows.stop or columns.start == columns.stop:
        return set()
    return {
        (x, y)
        for x in range(rows.start // TILE, (rows.stop - 1) // TILE + 1)
        for y in range(columns.start // TILE, (columns.stop - 1) // TILE + 1)
    }


def visited(mask, n, m=None, batch=1, heads=1):
    """The numbers of the tiles that are computed, full or partial."""
    tiles = find_tile_ranges(mask, (batch, heads, n, n if m is None else m), TILE, TILE).tiles
    return tiles["full"] + tiles["partial"]


def drawn(rng, *shapes):
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def assert_separate(output, query, key, value, rows, columns, **options):
    """Raise AssertionError unless the packed output of each document is attention on that document alone."""
    for own, others in zip(rows, columns, strict=True):
        alone = make_problem(query[..., own, :], key[..., others, :], value[..., others, :], **options)
        truth, rough = compute_stages(alone), compute_baseline(alone)
        terms = term_sizes(alone, truth.weights)
        assert_within_budget(output[..., own, :], truth.output, rough.output, terms=terms)


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [LENGTHS, MANY, np.ones(500, int), np.array([4096])], ids=lambda x: f"{len(x)}")
def test_a_packed_axis_costs_its_documents(lengths):
    """Exactly the tiles of n² that contain a pair of a document: at most Σ (⌈length / 64⌉ + 1)²."""
    n = int(lengths.sum())
    count = visited(documents(lengths=lengths), n)
    assert count == len(set().union(*(tiles_of(own, own) for own in spans(lengths))))
    assert count <= ((-(-lengths // TILE) + 1) ** 2).sum()


@pytest.mark.parametrize("lengths", [LENGTHS, MANY], ids=lambda x: f"{len(x)}")
def test_causal_skips_the_upper_half(lengths):
    n = int(lengths.sum())
    reached = set().union(*(tiles_of(own, own) for own in spans(lengths)))
    assert visited(documents(lengths=lengths) & causal(), n) == sum(y <= x for x, y in reached)


def test_documents_of_each_sequence_of_a_batch():
    """(B, n) document numbers: every sequence has its own documents, and all heads share the tile ranges."""
    rng = np.random.default_rng(2)
    each = [rng.permutation(LENGTHS) for _ in range(3)]
    ids = np.stack([np.repeat(np.arange(len(LENGTHS)), lengths) for lengths in each])
    reached = sum(len(set().union(*(tiles_of(own, own) for own in spans(lengths)))) for lengths in each)
    assert visited(documents(ids), N, batch=3, heads=8) == 8 * reached
    assert find_tile_ranges(documents(ids), (3, 8, N, N), TILE, TILE).heads == 1


def test_documents_of_other_lengths_among_the_keys():
    lengths, keys = LENGTHS[LENGTHS > 0], np.array([5, 64, 100, 300, 1, 2, 190])
    reached = set().union(*map(tiles_of, spans(lengths), spans(keys)))
    assert visited(documents(lengths=lengths, key_lengths=keys), N, int(keys.sum())) == len(reached)
    keys[3] = 0  # a tile may now be computed for a document without keys; the bound still holds
    most = ((-(-lengths // TILE) + 1) * (-(-keys // TILE) + 1)).sum()
    assert visited(documents(lengths=lengths, key_lengths=keys), N, int(keys.sum())) <= most


def test_padding_costs_the_real_keys():
    """Σ n · length: tiles beyond a sequence's end are not computed, and tiles before it need no mask."""
    lengths, n = np.array([1000, 64, 0, 65, 512]), 256
    told = find_tile_ranges(padding(lengths), (5, 4, n, 1000), TILE, TILE).tiles
    assert told["full"] + told["partial"] == 4 * n // TILE * (-(-lengths // TILE)).sum()
    assert told["partial"] == 4 * n // TILE * (lengths % TILE != 0)[1:].sum()


def test_explain_prints_the_cost():
    query, key = np.zeros((1, 8, N, 16), np.float32), np.zeros((1, 2, N, 16), np.float32)
    told = explain(query, key, key, mask=documents(lengths=LENGTHS))
    reached = len(set().union(*(tiles_of(own, own) for own in spans(LENGTHS))))
    assert told.tiles["full"] + told.tiles["partial"] == 8 * reached
    assert told.flops == round(told.dense_flops * reached / (-(-N // TILE)) ** 2)


@pytest.mark.parametrize("mask", [documents(lengths=MANY), documents(lengths=MANY) & causal()], ids=repr)
def test_planning_cost_follows_the_allowed_tiles(mask, monkeypatch):
    """1,000 documents in 131,072 positions: bisection computes bounds of a few rectangles per tile, not of n²."""
    n, looked, answer = int(MANY.sum()), [], tile_ranges.compute_intervals

    def counted(formula, box):
        looked.append(box["i"][0].size)
        return answer(formula, box)

    monkeypatch.setattr(tile_ranges, "compute_intervals", counted)
    count, depth = visited(mask, n), int(np.ceil(np.log2(n / TILE))) + 1
    assert sum(looked) <= 2 * (depth * n // TILE + count)


# -- results -----------------------------------------------------------------------------------------------------------

OPTIONS = {"plain": {}, "soft cap": {"score": sightline.softcap(3.0)}, "sinks": {"sinks": np.linspace(-1, 1, 4)}}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("kernel", "kind"), [("cpu", "numpy"), ("streaming", "torch")])
def test_each_document_equals_the_document_alone(rng, options, kernel, kind):
    """With grouped heads, for all pairs and for causal masks."""
    q, k, v = drawn(rng, (1, 4, N, 16), (1, 2, N, 16), (1, 2, N, 9))
    own = spans(LENGTHS)
    for inside in (None, causal()):
        mask = documents(lengths=LENGTHS) if inside is None else documents(lengths=LENGTHS) & inside
        given_ = [to_torch(x) for x in (q, k, v)] if kind == "torch" else (q, k, v)
        output = to_numpy(attention(*given_, mask=mask, kernel=kernel, **OPTIONS[options]))
        assert_separate(output, q, k, v, own, own, mask=inside, **OPTIONS[options])


def test_sequences_with_different_documents(rng):
    q, k, v = drawn(rng, (3, 4, N, 16), (3, 2, N, 16), (3, 2, N, 9))
    each = [rng.permutation(LENGTHS) for _ in range(3)]
    ids = np.stack([np.repeat(np.arange(len(LENGTHS)), lengths) for lengths in each])
    output = attention(q, k, v, mask=documents(ids) & causal())
    for b, lengths in enumerate(each):
        one = [x[b : b + 1] for x in (output, q, k, v)]
        assert_separate(*one, spans(lengths), spans(lengths), mask=causal())


def test_nonfinite_documents_do_not_affect_others(rng):
    """NaN and ∞ in one document do not change the results of the others."""
    q, k, v = drawn(rng, (1, 2, N, 16), (1, 2, N, 16), (1, 2, N, 16))
    own = spans(LENGTHS)
    bad = own.pop(3)
    k[..., bad, :], v[..., bad, :] = np.nan, np.inf
    output = attention(q, k, v, mask=documents(lengths=LENGTHS))
    assert_separate(output, q, k, v, own, own)
    assert np.isnan(output[..., bad, :]).all()


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=30)
def test_packed_cross_attention(pairs, seed):
    """Documents of any lengths among queries and keys; a document without keys has the output 0."""
    lengths, keys = np.array(pairs).T
    q, k, v = drawn(np.random.default_rng(seed), (1, 4, lengths.sum(), 8), (1, 2, keys.sum(), 8), (1, 2, keys.sum(), 5))
    mask = documents(lengths=lengths, key_lengths=keys)
    assert_separate(attention(q, k, v, mask=mask), q, k, v, spans(lengths), spans(keys))
    ends = np.repeat(np.cumsum(keys) - np.cumsum(lengths), lengths)
    if lengths.sum():
        lower = mask & (i + table(ends)[i] >= j)  # as in docs/recipes/masks.md
        own = attention(q, k, v, mask=lower)
        assert_separate(own, q, k, v, spans(lengths), spans(keys), mask=causal("lower right"))


def test_padded_sequences_equal_the_sequences_alone(rng):
    lengths = [0, 33, 64, 100, 7]
    q, k, v = drawn(rng, (5, 4, 50, 16), (5, 2, 100, 16), (5, 2, 100, 9))
    output = attention(q, k, v, mask=padding(lengths))
    for b, length in enumerate(lengths):
        one = [x[b : b + 1] for x in (output, q, k, v)]
        assert_separate(*one, [slice(0, 50)], [slice(0, length)])


def test_gradients_of_a_document_equal_those_of_the_document_alone(rng):
    """The gradients of every document are those that it has alone."""
    whole = [torch.from_numpy(x.astype(np.float64)).requires_grad_() for x in drawn(rng, *[(1, 2, N, 8)] * 3)]
    seed = torch.from_numpy(rng.normal(size=(1, 2, N, 8)))
    packed = torch.autograd.grad(attention(*whole, mask=documents(lengths=LENGTHS) & causal()), whole, seed)
    for own in spans(LENGTHS):
        parts = [x[:, :, own].detach().requires_grad_() for x in whole]
        alone = torch.autograd.grad(attention(*parts, mask=causal()), parts, seed[:, :, own])
        for found, expected in zip(packed, alone, strict=True):
            truth = to_numpy(expected)
            assert_within_budget(found[:, :, own], truth, truth.astype(np.float32).astype(np.float64))


# -- errors ------------------------------------------------------------------------------------------------------------

X = np.zeros((1, 1, 6, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: documents([0, 1], key_lengths=[1, 1]), ParameterError, "ids and key_lengths"),
        (lambda: attention(X, X, X, mask=documents([4, 2])), TableError, r"documents\(lengths=\.\.\.\) if .* sum to 6"),
        (lambda: attention(X, X, X, mask=documents(lengths=[4, 3])), ShapeError, "lengths must sum to 6"),
        (lambda: attention(X, X, X, mask=documents(lengths=[4, 1])), ShapeError, "lengths must sum to 6"),
        (lambda: attention(X[..., :2, :], X, X, mask=documents(lengths=[2])), TableError, "key lengths sum to 6"),
        (lambda: documents(lengths=[1], key_lengths=[1, 2]), ShapeError, "1 lengths and 2 key_lengths"),
        (lambda: documents(lengths=[1], key_lengths=[-1]), ShapeError, r"key_lengths \[-1\]"),
        (lambda: documents(lengths=[[1]], key_lengths=[1]), ShapeError, "lengths"),
        (lambda: attention(X, X, X, mask=documents(lengths=[2, 5], key_lengths=[3, 3])), ShapeError, "stands for i"),
        (lambda: attention(X, X, X, mask=documents(lengths=[2, 4], key_lengths=[3, 2])), ShapeError, "stands for j"),
    ],
)
def test_errors_name_what_does_not_fit(call, error, says):
    with pytest.raises(error, match=says):
        call()


# -- planted faults ----------------------------------------------------------------------------------------------------


def test_a_shifted_document_boundary_is_found(rng, monkeypatch):
    """A document number that starts one position late."""
    numbers = "np.repeat(np.arange(array.size), array)"
    q, k, v = drawn(rng, (1, 2, N, 8), (1, 2, N, 8), (1, 2, N, 8))
    own = spans(LENGTHS)
    assert_separate(attention(q, k, v, mask=documents(lengths=LENGTHS)), q, k, v, own, own)
    plant(Fault(library._document_ids, numbers, f"np.roll({numbers}, 1)"), monkeypatch)
    with pytest.raises(AssertionError, match="budget"):
        assert_separate(attention(q, k, v, mask=documents(lengths=LENGTHS)), q, k, v, own, own)


def test_loose_bounds_are_found(monkeypatch):
    """With bounds that cannot separate documents the results are right, but every tile is computed."""
    monkeypatch.setitem(
        bounds.BOUND_RULES, "equal", lambda xp, x, y: (0 * bounds._equal(xp, x, y)[0], 1 + 0 * x[0] + 0 * y[0])
    )
    with pytest.raises(AssertionError):
        test_a_packed_axis_costs_its_documents(LENGTHS)
