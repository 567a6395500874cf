"""The search in generated code finds the tile ranges of `formula.tile_ranges`, and refuses contents that are wrong."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from sightline import b, h, i, j, table, where
from sightline.call.problem import make_problem
from sightline.cpu.codegen.render_bounds import TableExtremes
from sightline.cpu.kernels import tile_search
from sightline.cpu.kernels.kernel_spec import KEY_BLOCK
from sightline.cpu.kernels.tile_search import SEARCH_FIELDS
from sightline.cpu.launch.arguments import prepare
from sightline.cpu.launch.tile_search import BoundSearch
from sightline.cpu.runtime.processor import HOST

RNG = np.random.default_rng(3)
IDS = np.sort(RNG.integers(0, 5, (2, 1000)), axis=1)
PADDING = np.arange(300) < np.array([100, 257])[:, None]
MASKS = {  # (mask, number of queries and keys)
    "causal": (i >= j, 700),
    "window": (sightline.window(100, 30), 700),
    "two windows of heads": (i - j < table(np.array([5, 70, 400]))[h], 500),
    "padding": (sightline.padding(np.array([100, 257])), 300),
    "documents": (sightline.documents(IDS), 1000),
    "documents of 32 bits": (sightline.documents(IDS.astype(np.int32)), 1000),
    "dense": (RNG.random((2, 3, 300, 300)) < 0.5, 300),
    "dense, all visible": (np.ones((300, 300), bool), 300),
    "dense, nothing visible": (np.zeros((300, 300), bool), 300),
    "dense causal": (np.tri(700, dtype=bool), 700),
    "dense padding": (np.broadcast_to(PADDING[:, None, None], (2, 1, 300, 300)), 300),
    "dense, columns apart": (np.tri(640, dtype=bool)[:, ::-1], 640),
    "blocks": (table(RNG.random((9, 9)) < 0.4)[i // 64, j // 64], 512),
    "whole numbers": ((table(RNG.integers(0, 9, 7))[i % 7] > (j // 3) % 5) & (i - j < 77), 500),
    "a table of indices": (table(np.arange(9) < 6)[table(RNG.integers(0, 9, 300))[j]], 300),
    "floats": (where(i > j, 1.5, 0.5) * table(RNG.random(300))[j] > 0.7, 300),
    "exponentials": (np.exp(-abs(i - j) / 50.0) > 0.3, 600),
    "batches": ((i >= j) | (b == 1), 200),
    "remainders": ((i - j) % 64 < 3, 400),
    "square roots": (np.sqrt(1.0 * i) > np.tanh(j / 9.0) * 7, 400),
}


def search_of(mask, n, score=None, B=2, H=3):
    """The search of a call with this mask, and the arguments of the call."""
    x = np.zeros((B, H, n, 8), np.float32)
    problem = make_problem(x, x, x, mask=mask, score=score)
    arguments = prepare("forward", problem, HOST)
    return BoundSearch(arguments), arguments


def run(search, tables=()):
    """(number of ranges, {field: array}) of a search; `tables` replace the tables of the call."""
    arrays = {name: np.zeros(max(length, 1), np.int64) for name, length in search.workspace(search.capacity).items()}
    packed, names = search.packed.copy(), list(SEARCH_FIELDS)
    for name, array in arrays.items():
        packed[names.index(name)] = array.ctypes.data
    packed[names.index("capacity")] = search.capacity
    for slot, array in enumerate(tables):
        packed[len(names) + slot] = array.ctypes.data
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(search.address)(packed.ctypes.data)
    return int(arrays["count"][0]), arrays


def ranges_of(count, arrays):
    full = arrays["full"].view(np.uint8)[:count].astype(bool)
    return [arrays["start"].tolist(), arrays["first"][:count].tolist(), arrays["last"][:count].tolist(), full.tolist()]


def expected_ranges(arguments):
    ranges = arguments.tile_ranges
    return [x.tolist() for x in (ranges.start, ranges.first, ranges.last, ranges.full)]


@pytest.mark.parametrize("name", MASKS)
def test_equal_tile_ranges(name):
    search, arguments = search_of(*MASKS[name])
    assert ranges_of(*run(search)) == expected_ranges(arguments)


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["documents", "padding", "dense"]))
def test_other_contents(seed, kind):
    """A search that was bound with other contents of its tables."""
    rng, n = np.random.default_rng(seed), 300

    def draw():
        if kind == "dense":
            return rng.random((2, 1, n, n)) < rng.choice([0.001, 0.5, 0.999])
        if kind == "padding":
            return rng.integers(0, n + 1, 2)
        return np.sort(rng.integers(0, rng.integers(1, 9), (2, n)), axis=1)

    formula = {"documents": sightline.documents, "padding": sightline.padding, "dense": sightline.dense}[kind]
    other, array = draw(), draw()
    search, _ = search_of(formula(other), n)
    _, arguments = search_of(formula(array), n)
    search.capacity = 4096
    assert ranges_of(*run(search, [array])) == expected_ranges(arguments)


def test_a_bias_of_minus_infinity_hides_tiles():
    """Tiles whose entries are all −∞ are empty. All others are partial: the search does not read all their entries."""
    bias = np.where(np.tri(300, dtype=bool), 0.0, -np.inf)
    search, arguments = search_of(None, 300, sightline.bias(bias), 1, 1)
    count, arrays = run(search)
    start, first, last, full = ranges_of(count, arrays)
    expected = arguments.tile_ranges
    assert not any(full)
    for block in range(expected.query_blocks):
        found = {tile for k in range(start[block], start[block + 1]) for tile in range(first[k], last[k])}
        needed = {tile for k in expected.row(0, 0, block) for tile in range(expected.first[k], expected.last[k])}
        assert found == needed


def test_too_little_memory_is_reported():
    search, arguments = search_of(MASKS["dense"][0], 300)
    search.capacity = 1
    count, arrays = run(search)
    assert count == arguments.tile_ranges.first.size > 1
    assert arrays["first"].size == 1


@pytest.mark.parametrize("bad", [np.array([0, 9]), np.array([-1, 0]), np.array([2**31, 0]), np.array([2**60, 0])])
def test_bad_contents_are_refused(bad):
    """An index outside of its table, and a whole number that is too large for the kernel."""
    search, _ = search_of(table(np.ones(9, bool))[table(np.array([0, 8]))[b]], 100)
    count, _ = run(search, [np.array([0, 8]), np.ones(9, bool)])
    assert count > 0
    count, _ = run(search, [bad, np.ones(9, bool)])
    assert count == -1


@pytest.mark.parametrize(
    ("owner", "name", "value", "mask"),
    [(tile_search, "KEY_BLOCK", KEY_BLOCK - 1, "causal"), (TableExtremes, "compute", lambda self: None, "documents")],
    ids=["bounds without the last key of a tile", "extremes of the tables of the call before"],
)
def test_planted_faults_are_found(owner, name, value, mask, monkeypatch, fresh_kernels):
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(AssertionError):
        test_equal_tile_ranges(mask)
