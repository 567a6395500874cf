"""Evicted keys: attention on a cache after `keep` is attention on all keys with the evicted ones hidden."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import sightline
from fault_planting import Fault, make_fault_test
from filled_caches import assert_solves, filled_cache
from sightline import KVCache, i, j, s
from sightline.call.problem import make_problem
from sightline.errors import ParameterError, ShapeError
from sightline.formula.expression import as_expression
from sightline.kv_cache import cache as cache_module
from sightline.kv_cache import row_positions

H, G, D = 4, 2, 8
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])
CALLS = [
    {},
    {"mask": sightline.causal()},
    {"mask": sightline.window(4)},
    {"mask": sightline.causal(), "score": sightline.alibi(SLOPES)},
    {"mask": (i >= j) & (2 * j >= sightline.n - 9)},
    {"mask": i >= j, "score": s + sightline.table(np.linspace(-2, 2, 200))[i - j + 99]},
]


def draw_calls(rng):
    """Return calls in which each of three drawn conditions is a mask, a part of a score, and that of a mass."""
    shown, words, reach = rng.random(99) < 0.6, rng.integers(0, 3, 99), rng.integers(1, 9, 99)
    shown, words, reach = map(sightline.table, (shown, words, reach))
    conditions = [call["mask"] for call in CALLS[1:5]]
    conditions += [j < 5, i - j < 4, shown[j], shown[i] | (i == j), words[i] == words[j], i - j < reach[sightline.b]]
    chosen = [conditions[k] for k in rng.choice(len(conditions), 3)]
    scores = [None, CALLS[3]["score"], CALLS[5]["score"], *[sightline.where(one, s, s - 1) for one in chosen]]
    masks = [None, *chosen, chosen[0] & chosen[1]]
    return [
        {"mask": mask, "score": score, "see": [sightline.entropy(), sightline.mass(condition)]}
        for mask in masks
        for score in scores
        for condition in chosen
    ]


class Oracle:
    """Lists of the keys and values of each sequence, and which positions each key head still has."""

    def __init__(self, batch, dtype=None):
        self.dtype = dtype  # of a quantised cache
        self.rows = [np.zeros((2, G, 0, D), np.float32) for _ in range(batch)]  # keys and values
        self.held = [np.ones((G, 0), bool) for _ in range(batch)]

    def append(self, key, value, counts):
        if self.dtype is not None and key.size:
            stored = filled_cache(key, value, dtype=self.dtype)
            key, value = stored.dequantized()
        for b, count in enumerate(counts):
            new = np.stack([key[b, :, :count], value[b, :, :count]])
            self.rows[b] = np.concatenate([self.rows[b], new], 2)
            self.held[b] = np.concatenate([self.held[b], np.ones((G, count), bool)], 1)

    def fork(self, owners):
        self.rows, self.held = [self.rows[b] for b in owners], [self.held[b] for b in owners]

    def check(self, cache, rng, call, count, kind="numpy"):
        """Compare attention of `count` queries at the last positions with attention that hides evicted keys."""
        query = rng.normal(size=(len(self.rows), H, count, D)).astype(np.float32)
        given = torch.from_numpy(query) if kind == "torch" else query
        call = {"see": [sightline.entropy()], **call}
        output, seen = sightline.attention(given, cache, **call)
        received = sightline.attention(given, cache, **{**call, "see": [sightline.received()]})[1][0]
        again = sightline.attention(given, cache, **call, threads=2)
        assert all(np.array_equal(*pair) for pair in zip((again[0], *again[1]), (output, *seen), strict=True))
        for b in range(len(self.rows)):
            of_one = query[b], output[b], [one[b] for one in seen]
            self.check_sequence(b, *of_one, call, received[b], cache.key_positions[b])

    def check_sequence(self, b, query, output, seen, call, received=None, positions=None, branch=None, n=None):
        rows, held = (self.rows[b], self.held[b]) if branch is None else (branch.rows[0], branch.held[0])
        count, length = query.shape[1], held.shape[1]
        first = max(count - length, 0)  # queries before the first position of a short sequence
        whole = np.zeros((1, H, length, D), np.float32)
        whole[:, :, length - count + first :] = query[None, :, first:]
        of_sequence = {"b": as_expression(b), "n": as_expression(length if n is None else n)}
        given = call.get("mask"), call.get("score")
        mask, score = (None if one is None else one.rewrite(of_sequence) for one in given)
        see = [one.map_formulas(lambda formula: formula.rewrite(of_sequence)) for one in call["see"]]
        hidden = sightline.table(held.repeat(H // G, 0))[sightline.h, j]
        problem = make_problem(whole, rows[:1], rows[1:], mask=hidden if mask is None else mask & hidden, score=score)
        part = slice(length - count + first, length)
        truth = assert_solves(np.asarray(output)[None, :, first:], problem, part)
        exact = [x.astype(np.float64) for x in (whole, rows[:1], rows[1:])]
        _, expected = sightline.attention(*exact, mask=problem.mask, score=score, see=see, kernel="reference")
        for found, one in zip(seen, expected, strict=True):
            assert np.abs(np.asarray(found)[:, first:] - one[0, :, part]).max(initial=0) <= 2e-5
        if first == 0 and received is not None:
            expected = np.zeros((H, length))
            for h in range(H):
                real = positions[h // (H // G)] >= 0
                expected[h, positions[h // (H // G)][real]] = np.asarray(received)[h][real]
            assert np.abs(expected - truth.weights[0, :, part].sum(1)).max() <= 1e-6 * count

    def check_drafts(self, cache, key, value, parents, rng, call, kind="numpy"):
        """Compare attention of the drafts with attention of each at the end of its own path."""
        query = rng.normal(size=(len(self.rows), H, len(parents), D)).astype(np.float32)
        given = torch.from_numpy(query) if kind == "torch" else query
        output, seen = sightline.attention(given, cache, **call)
        for b in range(len(self.rows)):
            for draft in range(len(parents)):
                path = path_to(draft, parents)
                branch = Oracle(1, self.dtype)
                branch.rows, branch.held = [self.rows[b]], [self.held[b]]
                branch.append(key[b : b + 1][:, :, path], value[b : b + 1][:, :, path], [len(path)])
                one = slice(draft, draft + 1)
                of_draft = query[b][:, one], output[b][:, one], [x[b][:, one] for x in seen]
                self.check_sequence(b, *of_draft, call, branch=branch, n=int(cache.lengths[b]))


def path_to(draft, parents):
    """Return the drafts from a root to this one."""
    path = [draft]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def draw_rows(rng, batch, count, kind):
    """Return drawn keys and values of NumPy, and the same of the library `kind`."""
    rows = [rng.normal(size=(batch, G, count, D)).astype(np.float32) for _ in range(2)]
    return rows, list(map(torch.from_numpy, rows)) if kind == "torch" else rows


def filled(kind, lengths, rng, dtype=None):
    """Return a cache of ragged sequences, and the oracle."""
    cache, oracle = KVCache(dtype=dtype), Oracle(len(lengths), dtype)
    rows, given = draw_rows(rng, len(lengths), max(lengths), kind)
    cache.append(*given, lengths=lengths)
    oracle.append(*rows, lengths)
    return cache, oracle


def draw_kept(rng, held, uniform):
    """Return positions to keep for each sequence and head, (B, G, c), with −1 at the end, and the new `held`."""
    least = min(int(one.sum(1).min()) for one in held)
    count = int(rng.integers(0, least + 1))
    chosen, left = [], []
    for one in held:
        heads = []
        for head in one:
            have = np.flatnonzero(head)
            size = count if uniform else int(rng.integers(0, len(have) + 1))
            heads.append(np.sort(rng.choice(have, size, replace=False)))
        chosen.append(heads)
        new = np.zeros_like(one)
        for g, kept in enumerate(heads):
            new[g, kept] = True
        left.append(new)
    width = max(len(head) for heads in chosen for head in heads)
    indices = np.full((len(held), G, width), -1)
    for b, heads in enumerate(chosen):
        for g, kept in enumerate(heads):
            indices[b, g, : len(kept)] = kept
    return indices, left


class AgainstLists(RuleBasedStateMachine):
    """Drawn changes of a cache, and the same changes of lists."""

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        kind=st.sampled_from(["numpy", "torch"]),
        batch=st.integers(1, 3),
        dtype=st.sampled_from([None, None, "int8"]),
    )
    def start(self, seed, kind, batch, dtype):
        self.rng, self.kind = np.random.default_rng(seed), kind
        lengths = [int(one) for one in self.rng.integers(1, 9, batch)]
        self.calls = draw_calls(self.rng)
        self.cache, self.oracle = filled(kind, lengths, self.rng, dtype)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(cache_module, "MIN_SHARED_ROWS", 1)

    def teardown(self):
        self.patch.undo()

    @rule(data=st.data())
    def fork(self, data):
        batch = len(self.oracle.rows)
        counts = data.draw(st.lists(st.integers(0, 2), min_size=batch, max_size=batch))
        if 0 < sum(counts) < 5:
            self.cache.fork(counts)
            self.oracle.fork(np.repeat(np.arange(batch), counts))

    @rule(count=st.integers(1, 5), data=st.data())
    def drafts(self, count, data):
        batch = len(self.oracle.rows)
        parents = [data.draw(st.integers(-1, draft - 1)) for draft in range(count)]
        (key, value), given = draw_rows(self.rng, batch, count, self.kind)
        self.cache.append(*given, parents=parents)
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(batch)))
            self.cache.reorder(order)
            self.oracle.fork(order)
            key, value = key[order], value[order]
        for call in self.rng.choice(self.calls, 3):
            self.oracle.check_drafts(self.cache, key, value, parents, self.rng, call, self.kind)
        paths = [path_to(self.rng.integers(count), parents)[: self.rng.integers(0, 4)] for _ in range(batch)]
        padded = np.full((batch, 5), -1)
        for b, path in enumerate(paths):
            padded[b, : len(path)] = path
        self.cache.accept(padded)
        accepted = np.maximum(padded, 0)[:, None, :, None]
        self.oracle.append(*(np.take_along_axis(x, accepted, 2) for x in (key, value)), map(len, paths))

    @rule(count=st.integers(1, 3), ragged=st.booleans())
    def append(self, count, ragged):
        batch = len(self.oracle.rows)
        counts = self.rng.integers(0, count + 1, batch) if ragged else np.full(batch, count)
        rows, given = draw_rows(self.rng, batch, count, self.kind)
        self.cache.append(*given, lengths=counts)
        self.oracle.append(*rows, counts)

    @rule(uniform=st.booleans())
    def keep(self, uniform):
        indices, self.oracle.held = draw_kept(self.rng, self.oracle.held, uniform)
        self.cache.keep(indices)
        assert self.cache.nbytes <= 2 * len(indices) * G * D * 4 * (indices.shape[2] * 5 // 4 + 1)

    @rule(share=st.floats(0, 1))
    def truncate(self, share):
        lengths = [max(int(share * one.shape[1]), 1) for one in self.oracle.held]
        self.cache.truncate(lengths)
        self.oracle.held = [one[:, :length] for one, length in zip(self.oracle.held, lengths, strict=True)]
        self.oracle.rows = [one[:, :, :length] for one, length in zip(self.oracle.rows, lengths, strict=True)]

    @rule(data=st.data())
    def reorder(self, data):
        order = data.draw(st.lists(st.integers(0, len(self.oracle.rows) - 1), min_size=1, max_size=3))
        self.cache.reorder(order)
        self.oracle.fork(order)

    @rule()
    def branch(self):
        other, self.cache = self.cache, copy.deepcopy(self.cache)
        other.keep(np.full((1, 1, 0), -1))
        assert other.row_counts.max() == 0

    @invariant()
    def positions_are_those_of_the_lists(self):
        assert self.cache.lengths.tolist() == [one.shape[1] for one in self.oracle.held]
        for found, held in zip(self.cache.key_positions, self.oracle.held, strict=True):
            for one, head in zip(found, held, strict=True):
                assert one[one >= 0].tolist() == np.flatnonzero(head).tolist()

    @rule(count=st.integers(1, 2))
    def attend(self, count):
        if min(one.shape[1] for one in self.oracle.held) >= count and not self.cache.are_newest(count):
            for call in self.rng.choice(self.calls, 3):
                self.oracle.check(self.cache, self.rng, call, count, self.kind)


TestAgainstLists = AgainstLists.TestCase
TestAgainstLists.settings = settings(max_examples=1, stateful_step_count=14, deadline=None)


@pytest.mark.wide
class TestMoreAgainstLists(AgainstLists.TestCase):
    settings = settings(max_examples=20, stateful_step_count=14, deadline=None)


def kept_cache(rng, kept, kind="numpy"):
    """Return a cache of sequences of 12 positions after an eviction, and its oracle."""
    cache, oracle = filled(kind, [12] * len(kept), rng)
    cache.keep(kept)
    for b, heads in enumerate(kept):
        oracle.held[b][:] = False
        for g in range(G):
            oracle.held[b][g, heads[g][heads[g] >= 0]] = True
    return cache, oracle


def check_steps(kind="numpy"):
    """A prompt, an eviction that differs by head, and some steps under every formula."""
    rng = np.random.default_rng(3)
    kept = np.array([[[0, 1, 5, 9], [0, 2, 3, 11]], [[2, 4, 6, 8], [0, 1, 2, 3]]])
    cache, oracle = kept_cache(rng, kept, kind)
    for _ in range(3):
        rows, given = draw_rows(rng, 2, 1, kind)
        cache.append(*given)
        oracle.append(*rows, [1, 1])
        for call in CALLS:
            oracle.check(cache, rng, call, 1, kind)
    assert cache.key.shape == (2, G, 7, D)
    assert repr(cache).startswith("KVCache: 2 sequences of 15 positions each, of which up to 7 are kept")
    assert cache.rewriting(1, reads_rows=True, heads=H).mask(sightline.causal()) is None  # a step searches no tiles


@pytest.mark.wide
def test_steps_after_an_eviction_in_torch():
    check_steps("torch")


UNEVEN = np.array([[[0, 3, 5, 11], [2, 10, 11, -1]], [[1, 2, 3, 4], [0, 8, -1, -1]]])
EVEN = np.array([[[0, 3, 5, 11], [2, 6, 10, 11]], [[1, 2, 3, 4], [0, 4, 8, 9]]])
LISTS = np.array([[[[0, 2]], [[1, 2]], [[2, -1]], [[0, 1]]]])


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("kept", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", ["documents", "padding", "dense", "bias", "blocks", "function"])
def test_tables_by_position_after_an_eviction(name, kept, rng):
    dense = rng.random((2, H, 1, 12)) < 0.7
    dense[..., 11] = True
    biases = rng.normal(size=(1, H, 12))
    masks = {
        "documents": sightline.documents(np.repeat([0, 1, 2], [3, 4, 5])),
        "padding": sightline.padding([12, 9]),
        "dense": sightline.table(dense[:, :, 0])[sightline.b, sightline.h, j],
        "blocks": sightline.blocks(LISTS, size=(1, 4)),
        "function": lambda b, h, i, j: j % 3 != 1,
    }
    options = {"mask": masks[name]} if name in masks else {"score": s + sightline.table(biases)[0, sightline.h, j]}
    cache, oracle = kept_cache(rng, kept)
    query = rng.normal(size=(2, H, 1, D)).astype(np.float32)
    output = sightline.attention(query, cache, **options)
    held = np.stack([one.repeat(H // G, 0) for one in oracle.held])
    hidden = sightline.table(held)[sightline.b, sightline.h, j]
    mask = options.get("mask")
    if name == "blocks":
        mask = sightline.table(np.array([[k // 4 in one[0] for k in range(12)] for one in LISTS[0]]))[sightline.h, j]
    elif name == "function":
        mask = j % 3 != 1
    elif name == "documents":
        mask = sightline.table(np.repeat([False, True], [7, 5]))[j]
    key, value = np.stack([one[0] for one in oracle.rows]), np.stack([one[1] for one in oracle.rows])
    whole = {**options, "mask": hidden if mask is None else mask & hidden}
    assert_solves(output, make_problem(query, key, value, **whole))


def test_an_array_has_a_column_for_each_row(rng):
    cache, oracle = kept_cache(rng, UNEVEN)
    query = rng.normal(size=(2, H, 1, D)).astype(np.float32)
    everything = sightline.attention(query, cache, mask=np.ones((1, 1, 1, 4), bool))
    assert np.array_equal(everything, sightline.attention(query, cache))
    few = sightline.attention(query, cache, mask=np.array([[[[True, False, True, True]]]]))
    positions = cache.key_positions.repeat(H // G, 1)
    for b, h in np.ndindex(2, H):
        rows = [row for row in (0, 2, 3) if positions[b, h, row] >= 0]
        key, value = (oracle.rows[b][part][h // 2][positions[b, h, rows]][None, None] for part in (0, 1))
        expected = sightline.attention(query[b : b + 1, h : h + 1], key, value, kernel="reference")
        assert np.abs(few[b, h] - expected[0, 0]).max() < 1e-5


def test_quantized_and_latent_caches(rng):
    for dtype in ("int8", "int4"):
        cache, _ = filled("numpy", [6, 6], rng, dtype)
        before = cache.dequantized()
        cache.keep([[[1, 3, 5]]])
        assert all(
            np.array_equal(new, old[:, :, [1, 3, 5]]) for new, old in zip(cache.dequantized(), before, strict=True)
        )
    key = rng.normal(size=(1, 1, 9, D)).astype(np.float32)
    cache = filled_cache(key, key[..., :5])
    cache.keep([[[0, 8]]])
    assert np.array_equal(cache.value, key[:, :, [0, 8], :5])
    assert cache.nbytes == cache.capacity * D * 4


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([[[0.5]]], ShapeError, "whole numbers"),
        ([[0]], ShapeError, r"\(2 or 1, 2 or 1, count\)"),
        (np.zeros((3, 1, 1), int), ShapeError, r"\(2 or 1"),
        ([[[2, 1]]], ParameterError, "do not ascend"),
        ([[[1, 1]]], ParameterError, "do not ascend"),
        ([[[-1, 1]]], ParameterError, "do not ascend"),
        ([[[-2]]], ParameterError, "do not ascend"),
        ([[[9]]], ParameterError, "position 9, which the cache does not hold"),
        ([[[3]]], ParameterError, "position 3, which the cache does not hold"),
    ],
)
def test_what_keep_refuses(rng, indices, error, message):
    cache, _ = filled("numpy", [9, 9], rng)
    cache.keep([[[0, 4, 8]]])
    before = cache.key.copy(), cache.key_positions
    with pytest.raises(error, match=message):
        cache.keep(indices)
    assert np.array_equal(cache.key, before[0])
    assert np.array_equal(cache.key_positions, before[1])


def test_reset_forgets_what_was_evicted(rng):
    cache, _ = filled("numpy", [9, 9], rng)
    cache.keep([[[0, 4, 8]]])
    cache.reset()
    key = rng.normal(size=(2, G, 3, D)).astype(np.float32)
    cache.append(key, key)
    assert cache.key_positions.tolist() == np.tile(np.arange(3), (2, G, 1)).tolist()
    assert np.array_equal(cache.last(2).key, key[:, :, 1:])


def test_keep_of_an_empty_cache():
    with pytest.raises(ParameterError, match="append"):
        KVCache().keep([[[0]]])


FAULTS = {
    "a row for a position": Fault(row_positions.KeptRows._make_formulas, "j < rows", "j < 0"),
    "the wrong head": Fault(row_positions.KeptRows._make_formulas, "h // group", "h % group"),
    "later rows as before": Fault(row_positions.keep_rows, "lengths - rows", "0 * rows"),
    "a head's rows for another's": Fault(
        row_positions.find_rows, "np.where(is_real, rows, 0)", "np.where(is_real, rows[:, ::-1], 0)"
    ),
}


test_faults = make_fault_test(FAULTS, check_steps, kinds=(AssertionError, ValueError))
