"""Sequences that share a prefix, and trees of drafts; `test_keep.py` draws sequences of all operations."""

import copy
import gc
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch

import sightline
from fault_planting import Fault, make_fault_test
from filled_caches import PAIR, filled_cache
from sightline import KVCache, b, h, i, j, n, s
from sightline.api import functions, shared_prefix
from sightline.arrays.operations import to_numpy
from sightline.errors import ParameterError, ShapeError
from sightline.kv_cache import query_positions, row_positions, stored_rows

H, G, D = 4, 2, 32
TABLE = np.linspace(-2, 2, H * 400).reshape(H, 400).astype(np.float32)
CALLS = {
    "none": {},
    "causal": {"mask": sightline.causal()},
    "window": {"mask": sightline.causal() & sightline.window(50)},
    "first keys": {"mask": j < 80},
    "sequences and heads": {"mask": (i >= j) & ((j + h + b) % 3 != 0)},
    "length": {"mask": j < n - 3, "score": s + sightline.table(TABLE)[h, i - j]},
    "sinks": {"mask": i >= j, "sinks": np.linspace(-1, 3, H).astype(np.float32)},
    "a scale": {"scale": 0.3},
}
SEE = [sightline.lse(), sightline.entropy(), sightline.max_score(), sightline.mass(j < 90), sightline.top_k(3)]
SEE += [sightline.sum(sightline.p * (i - j) / 256, over=j)]


def drawn(rng, kind, batch, heads, count, dtype="float32"):
    array = rng.normal(size=(batch, heads, count, D)).astype(np.float32)
    return torch.from_numpy(array).to(getattr(torch, dtype)) if kind == "torch" else array


def forked(rng, kind="numpy", lengths=(150, 110), dtype=None, given="float32"):
    """Return a cache of five sequences in two prompts, the last two of which share a longer prefix."""
    new = drawn(rng, kind, 2, G, 150, given), drawn(rng, kind, 2, G, 150, given)
    cache = filled_cache(*new, dtype=dtype, lengths=list(lengths))
    cache.fork([2, 1])
    cache.append(drawn(rng, kind, 3, G, 70, given), drawn(rng, kind, 3, G, 70, given))
    cache.fork([1, 1, 3])
    cache.append(drawn(rng, kind, 5, G, 2, given), drawn(rng, kind, 5, G, 2, given))
    return cache


def flat(answer):
    output, seen = answer
    arrays = [output, *(array for one in seen for array in (one if isinstance(one, tuple) else (one,)))]
    return [to_numpy(array).astype(np.float64) for array in arrays]


def check_calls(cache, rng, kind="numpy", given="float32", *, calls, atol=3e-6):
    """Compare calls on a cache with calls on copies of its rows."""
    copied = cache.joined()
    assert copied.prefix is None
    assert cache.prefix is not None
    for count in (2, 1):
        query = drawn(rng, kind, 5, H, count, given)
        for name in calls:
            options = dict(CALLS[name])
            if "sinks" in options and kind == "torch":
                options["sinks"] = torch.from_numpy(options["sinks"])
            found, expected = (flat(sightline.attention(query, x, **options, see=SEE)) for x in (cache, copied))
            for one, other in zip(found, expected, strict=True):
                assert np.allclose(one, other, rtol=0, atol=atol), (name, count)


@pytest.mark.sampled(one_in=19)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("lengths", [(150, 150), (150, 110)], ids=["equal", "ragged"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_calls_on_shared_prefixes(rng, kind, lengths, name):
    check_calls(forked(rng, kind, lengths), rng, kind, calls=[name])


@pytest.mark.sampled(one_in=19)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", PAIR])
def test_quantized_prefixes(rng, dtype, name):
    check_calls(forked(rng, dtype=dtype), rng, calls=[name], atol=2e-5)


def test_bfloat16_prefixes(rng):
    check_calls(forked(rng, "torch", given="bfloat16"), rng, "torch", "bfloat16", calls=["none", "window"], atol=2e-2)


@pytest.mark.parametrize("kernel", ["streaming", "reference"])
def test_every_kernel_reads_a_prefix(rng, kernel):
    cache, query = forked(rng), drawn(rng, "numpy", 5, H, 1)
    found = sightline.attention(query, cache, mask=sightline.window(90), kernel=kernel)
    assert np.allclose(found, sightline.attention(query, cache, mask=sightline.window(90)), atol=3e-6)


def test_calls_that_need_the_rows_of_a_sequence_side_by_side(rng):
    cache, query = forked(rng, "torch"), drawn(rng, "torch", 5, H, 1)
    copied = cache.joined()
    hidden = torch.from_numpy(rng.random((5, H, 1, copied.key.shape[2])) < 0.5)
    for options in (
        {"see": [sightline.received()]},
        {"mask": hidden, "see": [sightline.lse()]},
        {"dropout": 0.3, "seed": 4, "see": [sightline.lse()]},
        {"mask": sightline.blocks(np.array([[[[0, 2]]]]), size=64), "see": [sightline.lse()]},
    ):
        found, expected = (flat(sightline.attention(query, x, **options)) for x in (cache, copied))
        assert all(map(np.array_equal, found, expected))
    assert torch.equal(cache.key, copied.key)
    assert np.array_equal(cache.key_positions, copied.key_positions)
    assert sightline.explain(query, cache).kernel == "cpu"
    assert cache.last(9).prefix is None


@pytest.mark.parametrize("shared", [False, True])
def test_steps_with_statistics_repeat_a_call(rng, shared, monkeypatch):
    cache, query = forked(rng), drawn(rng, "numpy", 5, H, 1)
    cache = cache if shared else cache.joined()
    options = {"mask": sightline.causal(), "see": [sightline.lse(), sightline.entropy()]}
    expected = [flat(sightline.attention(query, cache, **options)) for _ in range(3)][-1]
    monkeypatch.setattr(functions, "parse", None)  # only the full dispatch needs it
    assert all(map(np.array_equal, flat(sightline.attention(query, cache, **options)), expected))


def test_a_prefix_takes_its_memory_once(rng):
    cache = filled_cache(*(drawn(rng, "numpy", 1, G, 1000) for _ in "kv"))
    stored, one = cache.nbytes, cache.key
    cache.fork(32)
    cache.append(*(drawn(rng, "numpy", 32, G, 1) for _ in "kv"))
    assert cache.nbytes <= stored * 1.1
    assert len(cache.lengths) == 32
    assert cache.capacity >= 1001
    assert np.shares_memory(cache.prefix.cache.key, one)
    assert "1,000 are shared" in repr(cache)
    assert "shared        up to 1,000 keys" in str(sightline.explain(drawn(rng, "numpy", 32, H, 1), cache))


def test_copies_and_branches_are_independent(rng):
    cache = forked(rng)
    query, before = drawn(rng, "numpy", 5, H, 1), cache.joined().key.copy()
    other = copy.deepcopy(cache)
    other.append(*(drawn(rng, "numpy", 5, G, 1) for _ in "kv"))
    other.reorder([4, 4, 0])
    other.truncate(60)
    assert np.array_equal(cache.joined().key, before)
    same = copy.deepcopy(cache)
    assert np.array_equal(sightline.attention(query, same), sightline.attention(query, cache))


def test_sequences_without_owner_free_their_memory(rng):
    cache = filled_cache(*(drawn(rng, "numpy", 8, G, 200) for _ in "kv"))
    cache.fork(2)
    shared = cache.nbytes
    cache.reorder([0, 1, 2])
    assert cache.nbytes < shared / 3
    cache.truncate(0)
    assert cache.prefix is None


@pytest.mark.parametrize("capacity", [0, 300])
def test_unused_storage_is_freed(rng, capacity):
    new = drawn(rng, "numpy", 2, G, 2000)
    cache = filled_cache(new, new, capacity=capacity)
    view, full = cache.key, cache.nbytes
    cache.truncate([1900, 100])
    assert cache.nbytes == full
    cache.truncate([150, 90])
    assert cache.capacity == max(187, capacity)
    assert np.array_equal(cache.key[0], new[0, :, :150])
    assert np.array_equal(view, new)
    cache.reset()
    assert cache.capacity == (capacity or 187)


def test_the_query_has_its_gradient(rng):
    cache = forked(rng, "torch")
    query = drawn(rng, "torch", 5, H, 1)
    found = []
    for one in (cache, cache.joined()):
        leaf = query.clone().requires_grad_()
        output, (lse,) = sightline.attention(leaf, one, mask=sightline.causal(), see=[sightline.lse()])
        (output.square().sum() + lse.sum()).backward()
        found.append(leaf.grad)
    assert torch.allclose(*found, atol=1e-5)


@pytest.mark.wide
def test_ten_thousand_operations_leave_nothing_behind(rng):
    cache, random = KVCache(), np.random.default_rng(5)
    new = drawn(rng, "numpy", 1, G, 80)
    operations = 0

    def run(limit):
        nonlocal operations
        while operations < limit:
            cache.reset()
            cache.reorder([0]) if len(cache.lengths) > 1 else None
            cache.append(new, new)
            for _ in range(6):
                cache.fork(random.integers(1, 3, len(cache.lengths)))
                cache.reorder(np.arange(min(len(cache.lengths), 4)))
                step = np.broadcast_to(new[:, :, :70], (len(cache.lengths), G, 70, D))
                cache.append(step, step)
                cache.truncate(random.integers(1, 500, len(cache.lengths)))
                operations += 4
        cache.reset()
        gc.collect()

    run(1000)
    tracemalloc.start()
    first = tracemalloc.get_traced_memory()[0]
    run(10000)
    assert tracemalloc.get_traced_memory()[0] - first < 1 << 20
    tracemalloc.stop()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("change", ["keep", "fork", "append"])
def test_a_thread_attends_to_the_cache_before_a_change_or_after_it(rng, change):
    prompt = [drawn(rng, "numpy", 1, G, 400) for _ in "kv"]
    query, kept = drawn(rng, "numpy", 1, H, 1), np.arange(0, 400, 3)[None, None]
    score = s + sightline.table(rng.normal(size=500))[j]  # another result if rows are read as other positions

    def changed(cache):
        if change == "append":
            cache.append(*(x[:, :, :9] for x in prompt))
        else:
            cache.keep(kept) if change == "keep" else cache.fork([1])

    caches = [filled_cache(*prompt) for _ in range(150)]
    allowed = [sightline.attention(query, caches[0], score=score)]
    changed(caches[0])
    allowed.append(sightline.attention(query, caches[0], score=score))
    stop, found = threading.Event(), []

    def attend():
        while not stop.is_set():
            for cache in caches[-20:] + caches[1:]:
                found.append(sightline.attention(query, cache, score=score))

    thread = threading.Thread(target=attend)
    thread.start()
    for cache in caches[1:]:
        changed(cache)
        time.sleep(0.0003)
    stop.set()
    thread.join()
    assert all(min(np.abs(one - x).max() for x in allowed) < 3e-6 for one in found)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda cache: cache.fork([1, 2]), ShapeError, "one for each of 5"),
        (lambda cache: cache.fork(-1), ShapeError, "whole number"),
        (lambda cache: cache.fork(1.5), ShapeError, "whole number"),
        (lambda cache: KVCache().fork(2), ParameterError, "append"),
        (lambda cache: cache.accept([0]), ParameterError, "without drafts"),
    ],
)
def test_what_fork_refuses(rng, call, error, says):
    cache = forked(rng)
    before = cache.lengths
    with pytest.raises(error, match=says):
        call(cache)
    assert np.array_equal(cache.lengths, before)


@pytest.mark.parametrize(
    ("parents", "error"),
    [([0, -1, 1], ParameterError), ([-1, -2, 0], ParameterError), ([-1, 2, 0], ParameterError), ([-1, 0], ShapeError)],
)
def test_parents_that_are_no_tree(rng, parents, error):
    cache, new = forked(rng), drawn(rng, "numpy", 5, G, 3)
    before = cache.lengths
    with pytest.raises(error):
        cache.append(new, new, parents=parents)
    with pytest.raises(ParameterError, match="lengths and parents"):
        cache.append(new, new, [1] * 5, parents=[-1, 0, 1])
    assert np.array_equal(cache.lengths, before)
    cache.append(new, new)


def test_drafts_wait_for_accept(rng):
    cache, new = forked(rng), drawn(rng, "numpy", 5, G, 3)
    cache.append(new, new, parents=[-1, 0, 0])
    for path in ([1], [0, 0], [0, 3], [0, -1, 1], [[0]] * 4, [0.5]):
        with pytest.raises((ParameterError, ShapeError)):
            cache.accept(path)
    for change in (
        lambda: cache.append(new, new),
        lambda: cache.truncate(3),
        lambda: cache.fork(2),
        lambda: cache.last(1),
    ):
        with pytest.raises(ParameterError, match="accept"):
            change()
    with pytest.raises(ShapeError, match="one query for each draft"):
        sightline.attention(drawn(rng, "numpy", 5, H, 1), cache)
    before = cache.lengths
    cache.accept([0, 2])
    assert np.array_equal(cache.lengths, before)
    cache.append(new, new, parents=np.tile([-1, -1, 1], (5, 1)))
    cache.accept([])
    assert np.array_equal(cache.lengths, before)


FAULTS = {
    "a branch missed": Fault(
        row_positions.SharedPrefix.groups.function,
        'np.argsort(self.owners, kind="stable")',
        '0 * np.argsort(self.owners, kind="stable")',
    ),
    "the limit of a prefix ignored": Fault(
        query_positions.rewrite_for_prefix, "(limits < prefix.cache.lengths[:, None]).any()", "False"
    ),
    "b of the prefix for that of the call": Fault(query_positions.rewrite_for_prefix, '"b" in free', "False"),
    "the position of another branch": Fault(
        query_positions.rewrite_for_prefix, "indices, np.arange(indices.shape[1]) % count", "0 * indices, 0"
    ),
    "an ancestor missed": Fault(row_positions.DraftTree.ancestors.function, "is_ancestor[entries, parent]", "False"),
    "a sibling seen": Fault(
        row_positions.DraftTree.ancestors.function,
        "is_ancestor[:, draft, draft] = True",
        "is_ancestor[:, draft, : draft + 1] = True",
    ),
    "a path taken as it stands": Fault(KVCache.accept, "first + found", "first + steps"),
    "a sink counted twice": Fault(
        shared_prefix._merge,
        "xp.logaddexp(merged.shift, xp.astype(sinks, merged.shift.dtype)[:, None])",
        "2 * xp.logaddexp(merged.shift, xp.astype(sinks, merged.shift.dtype)[:, None])",
    ),
    "the first row of a part": Fault(shared_prefix._read, "key + rows", "key + 0 * rows"),
    "rows shared after a write": Fault(
        stored_rows.StoredRows.__deepcopy__, "self.storage and self.storage.copy()", "self.storage"
    ),
}


def check_branches():
    """Branches against the same appends on copies, then drafts against appends of their paths."""
    rng = np.random.default_rng(7)
    prompt, step = (drawn(rng, "numpy", 2, G, 150) for _ in "kv"), [drawn(rng, "numpy", 4, G, 3) for _ in "kv"]
    cache, plain = KVCache(), KVCache()
    for one, new in zip((cache, plain), [list(prompt)] * 2, strict=True):
        one.append(*new, lengths=[150, 120])
    cache.fork(2)
    plain.reorder([0, 0, 1, 1])
    other = copy.deepcopy(cache)
    other.append(*(x[:, :, ::-1] for x in step))
    before = other.joined().key
    for one in (cache, plain):
        one.append(*step)
        one.truncate([151, 100, 123, 90])
        one.append(*step)
    assert np.array_equal(other.joined().key, before)
    query = drawn(rng, "numpy", 4, H, 3)
    for name in CALLS:
        found, expected = (flat(sightline.attention(query, x, **CALLS[name], see=SEE)) for x in (cache, plain))
        for one, other in zip(found, expected, strict=True):
            assert np.allclose(one, other, rtol=0, atol=3e-6), name
    parents = [-1, 0, 0]
    cache.append(*step, parents=parents)
    drafts = sightline.attention(query, cache)
    for draft, path in enumerate(([0], [0, 1], [0, 2])):
        branch = copy.deepcopy(plain)
        branch.append(*(x[:, :, path] for x in step))
        expected = sightline.attention(query[:, :, draft : draft + 1], branch)
        assert np.allclose(drafts[:, :, draft : draft + 1], expected, atol=3e-6), draft
    cache.accept([0, 2])
    plain.append(*(x[:, :, [0, 2]] for x in step))
    assert np.array_equal(cache.joined().key[0], plain.key[0])


test_faults = pytest.mark.sampled(one_in=4)(make_fault_test(FAULTS, check_branches))
