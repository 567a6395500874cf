"""`blocks` allows exactly the pairs that the lists name, in kernels and frameworks, and its errors name the cure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from gradient_checks import by_cpu, by_definition
from jax_kernel import enable_x64
from sightline import blocks, causal, h, i, j, s
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.errors import DtypeError, ParameterError, ShapeError
from sightline.formula import block_lists
from sightline.reference.definition import compute_stages
from sightline.reference.testing import LAYOUTS, assert_conforms
from statistic_definitions import check as check_statistics
from strategies import DTYPES


def pairs(lists, size, extent):
    """Return (B, H, n, m) booleans: the pairs that the lists allow, one after another."""
    B, H, n, _m = extent
    rows, size = size if isinstance(size, tuple) else (size, size)
    lists = np.broadcast_to(lists, (B, H, *np.shape(lists)[2:]))
    allowed = np.zeros(extent, bool)
    for entry, head, row in np.ndindex(B, H, n):
        for block in lists[entry, head, row // rows]:
            if block >= 0:
                allowed[entry, head, row, block * size : (block + 1) * size] = True
    return allowed


def draw_lists(rng, size, extent, count=3, shared=(False, False)):
    """Return lists with −1, repeated numbers and no order; `shared` makes one list for all batch entries, or heads."""
    lead = [1 if one else length for one, length in zip(shared, extent, strict=False)]
    rows, size = size if isinstance(size, tuple) else (size, size)
    return rng.integers(-1, -(-extent[3] // size), size=(*lead, -(-extent[2] // rows), count))


def arrays(rng, extent, G=None, width=16, dtype="float64"):
    B, H, n, m = extent
    shapes = (B, H, n, width), (B, G or H, m, width), (B, G or H, m, width)
    return [rng.normal(size=shape).astype(DTYPES[dtype]) for shape in shapes]


EXTENTS = st.tuples(st.integers(1, 2), st.sampled_from([1, 2, 4]), st.integers(1, 150), st.integers(1, 150))
SIZES = st.one_of(st.integers(1, 256), st.sampled_from([1, 16, 64, (1, 16), (64, 1), (1, 64)]))


@given(EXTENTS, SIZES, st.integers(0, 4), st.booleans(), st.booleans(), st.integers(0, 99))
@settings(max_examples=40)
def test_the_mask_is_the_pairs_of_the_lists(extent, size, count, one_batch, one_head, seed):
    rng = np.random.default_rng(seed)
    lists = draw_lists(rng, size, extent, count, (one_batch, one_head))
    B, H, n, m = extent
    expected = pairs(lists, size, extent)
    for keys in (None, m):
        found = blocks(lists, size, keys).array(n, m, batch=B, heads=H)
        assert np.array_equal(np.broadcast_to(found, extent), expected)


@given(
    EXTENTS,
    SIZES,
    st.sampled_from(list(DTYPES)),
    st.sampled_from([None, causal(), abs(i - j) < 40]),
    st.integers(0, 99),
)
@settings(max_examples=5)
def test_kernels_and_statistics(extent, size, dtype, other, seed):
    rng = np.random.default_rng(seed)
    mask = blocks(draw_lists(rng, size, extent), size)
    mask = mask if other is None else mask & other
    see = [sightline.entropy(), sightline.received(), sightline.top_k(2), sightline.mass(causal()), sightline.weights()]
    problem = make_problem(*arrays(rng, extent, G=1, dtype=dtype), mask=mask, score=s * 0.5, see=see)
    assert_conforms(Cpu().run, problem)
    check_statistics(Cpu().run, problem)


def check_repeated_calls(kind="numpy", G=2):
    """Compare calls with other lists each time, whose tile ranges the generated search finds."""
    rng = np.random.default_rng(1)
    for size, n, m in ((64, 200, 300), ((1, 64), 70, 300), (5, 3, 90), (64, 1, 2000), (1, 1, 600)):
        extent = 2, 4, n, m
        query, key, value = arrays(rng, extent, G)
        for _ in range(4):
            lists = draw_lists(rng, size, extent)
            mask = pairs(lists, size, extent)
            expected = compute_stages(make_problem(query, key, value, mask=mask)).output
            convert = torch.from_numpy if kind == "torch" else np.asarray
            found = sightline.attention(*map(convert, (query, key, value)), mask=blocks(convert(lists), size))
            np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "G"), [("numpy", 4), ("numpy", 2), ("torch", 1)])
def test_repeated_calls_read_the_new_lists(kind, G):
    check_repeated_calls(kind, G)


def test_a_list_of_another_head_is_seen(monkeypatch):
    """A fault on purpose: each head reads the list of the next head."""
    sound = block_lists._mark
    monkeypatch.setattr(block_lists, "_mark", lambda lists, count: np.roll(sound(lists, count), 1, axis=1))
    with pytest.raises(AssertionError):
        check_repeated_calls()


def test_gradients(rng):
    size, extent = 16, (2, 4, 70, 100)
    lists = draw_lists(rng, size, extent)
    lists[1, 2, 3] = -1
    query, key, value = arrays(rng, extent, G=2)
    d_output = rng.normal(size=query.shape)
    problem = make_problem(query, key, value, mask=blocks(lists, size) & (i + 40 >= j))
    found = by_cpu(problem, d_output, None, None)
    expected = by_definition(problem, d_output, 0.0, 0.0)
    for one, other in zip((found.query, found.key, found.value), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    dense = torch.from_numpy(pairs(lists, size, extent)) & (torch.arange(70)[:, None] + 40 >= torch.arange(100))
    results = []
    for mask in (blocks(torch.from_numpy(lists), size) & (i + 40 >= j), dense):
        x = [torch.from_numpy(each).requires_grad_() for each in (query, key, value)]
        for _ in range(3):  # the second backward pass is bound
            for each in x:
                each.grad = None
            sightline.attention(*x, mask=mask).backward(torch.from_numpy(d_output))
        results.append([each.grad.numpy() for each in x])
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert not results[0][0][1, 2, 48:64].any()


def test_an_empty_list_shows_nothing(rng):
    lists = np.array([[[[0, 1], [-1, -1]]]])
    query, key, value = arrays(rng, (1, 2, 20, 30))
    for indices in (lists, lists[..., :0]):
        output, (lse,) = sightline.attention(query, key, value, mask=blocks(indices, 10), see=[sightline.lse()])
        assert not output[:, :, 10:].any()
        assert np.all(lse[:, :, 10:] == -np.inf)
    assert not output.any()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint32, np.int64])
def test_integers_of_any_dtype(rng, dtype):
    lists = draw_lists(rng, 8, (1, 2, 20, 30)) + (1 if np.dtype(dtype).kind == "u" else 0)
    lists = np.minimum(lists, 3)
    expected = pairs(lists, 8, (1, 2, 20, 30))
    assert np.array_equal(blocks(lists.astype(dtype), 8).array(20, 30, heads=2).reshape(expected.shape), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_lists(rng, layout):
    lists = LAYOUTS[layout](draw_lists(rng, 8, (2, 2, 20, 30), 6))
    expected = pairs(lists, 8, (2, 2, 20, 30))
    assert np.array_equal(blocks(lists, 8).array(20, 30, batch=2, heads=2), expected)


STEPS = [[5], [70, 1, 1], [40, 3, 1], [[50, 30], 1], [[50, 3], [2, 1], [1, 0], 1]]


@pytest.mark.sampled(one_in=13)
@pytest.mark.parametrize(("kind", "G"), [("numpy", 1), ("numpy", 2), ("torch", 4)])
@pytest.mark.parametrize("size", [1, (1, 16), 4, 64])
@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_on_a_cache_rows_choose_the_lists(rng, steps, size, G, kind):
    convert = torch.from_numpy if kind == "torch" else np.asarray
    cache = sightline.KVCache()
    for step in steps:
        counts = np.broadcast_to(step, 2)
        n = counts.max()
        query, key, value = (rng.normal(size=(2, heads, n, 16)) for heads in (4, G, G))
        cache.append(convert(key), convert(value), lengths=None if np.ndim(step) == 0 else counts)
        lengths, m = cache.lengths, int(cache.lengths.max())
        lists = draw_lists(rng, size, (2, 4, n, m), 5)
        found = sightline.attention(convert(query), cache, mask=blocks(convert(lists), size) & causal())
        positions = (lengths - counts)[:, None] + np.arange(n)
        positions = np.where(np.arange(n) < counts[:, None], positions, -1)[:, None, :, None]
        allowed = pairs(lists, size, (2, 4, n, m)) & (np.arange(m) <= positions)
        keys, values = (np.nan_to_num(np.asarray(each)) for each in (cache.key, cache.value))
        expected = compute_stages(make_problem(query, keys, values, mask=allowed)).output
        np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-12)


def test_a_decoding_loop_with_other_lists_at_each_step(rng):
    """The number of keys and the largest index change, so that the call is bound again; see `CallFamily`."""
    cache = sightline.KVCache()
    cache.append(*rng.normal(size=(2, 1, 2, 120, 16)))
    for _ in range(20):
        cache.append(*rng.normal(size=(2, 1, 2, 1, 16)))
        m, query = int(cache.lengths[0]), rng.normal(size=(1, 4, 1, 16))
        lists = draw_lists(rng, 8, (1, 4, 1, m), 2)
        expected = compute_stages(make_problem(query, cache.key, cache.value, mask=pairs(lists, 8, (1, 4, 1, m))))
        np.testing.assert_allclose(
            sightline.attention(query, cache, mask=blocks(lists, 8)), expected.output, atol=1e-12
        )


def test_compilers_trace_a_call(rng):
    size, extent = 16, (2, 4, 70, 100)
    lists, x = draw_lists(rng, size, extent), arrays(rng, extent)
    expected = compute_stages(make_problem(*x, mask=pairs(lists, size, extent))).output

    def call(query, key, value, indices):
        return sightline.attention(query, key, value, mask=blocks(indices, size, keys=key.shape[-2]))

    tensors = [torch.from_numpy(each) for each in (*x, lists)]
    np.testing.assert_allclose(torch.compile(call, fullgraph=True, backend="eager")(*tensors), expected, atol=1e-12)
    with enable_x64(True):
        traced = list(map(jnp.asarray, (*x, lists)))
        np.testing.assert_allclose(jax.jit(call)(*traced), expected, atol=1e-12)
        np.testing.assert_allclose(call(*traced), expected, atol=1e-12)
        with pytest.raises(ParameterError, match=r"keys=key.shape\[-2\]"):
            jax.jit(lambda indices: sightline.attention(*traced[:3], mask=blocks(indices, size)))(traced[3])


ROWS = np.zeros((1, 1, 3, 2), int)
REFUSED = {
    "floats": (lambda x: blocks(ROWS * 0.5), DtypeError, "cast them to int64"),
    "booleans": (lambda x: blocks(ROWS > 0), DtypeError, "sightline.dense"),
    "two axes": (lambda x: blocks(ROWS[0, 0]), ShapeError, r"indices\[None, None\]"),
    "unequal lists": (lambda x: blocks([[[[0], [1, 2]]]]), ShapeError, "fill shorter lists with -1"),
    "a size of 0": (lambda x: blocks(ROWS, 0), ParameterError, "a whole number of at least 1"),
    "half a size": (lambda x: blocks(ROWS, 0.5), ParameterError, "a whole number of at least 1"),
    "a size of three": (lambda x: blocks(ROWS, (1, 2, 3)), ParameterError, r"size=\(1, 64\)"),
    "no keys": (lambda x: blocks(ROWS, keys=0), ParameterError, "a whole number of at least 1"),
    "-2": (lambda x: blocks(ROWS - 2), ShapeError, "the block index -2"),
    "an index past the keys": (lambda x: blocks(ROWS + 2, 64, keys=128), ShapeError, "0 to 1"),
    "an index past m": (lambda x: sightline.attention(*x, mask=blocks(ROWS + 3)), ShapeError, "⌈m / size⌉ − 1 = 2"),
    "other keys": (lambda x: sightline.attention(*x, mask=blocks(ROWS, keys=193)), ShapeError, "⌈m / size⌉ − 1 = 2"),
    "too few lists": (
        lambda x: sightline.attention(*x, mask=blocks(ROWS[:, :, :2])),
        ShapeError,
        "2 lists of blocks for 150",
    ),
    "too many lists": (lambda x: sightline.attention(*x, mask=blocks(ROWS, 75)), ShapeError, "⌈n / size⌉ = 2 lists"),
    "key heads": (
        lambda x: sightline.attention(*x, mask=blocks(ROWS.repeat(2, 1))),
        ShapeError,
        r"np.repeat\(indices, 4 // G",
    ),
    "batch": (lambda x: sightline.attention(*x, mask=blocks(ROWS.repeat(3, 0))), ShapeError, "length 2 or 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_cure(rng, name):
    call, error, message = REFUSED[name]
    x = arrays(rng, (2, 4, 150, 190), G=2)
    for _ in range(2):
        with pytest.raises(error, match=message):
            call(x)
        sightline.attention(*x, mask=blocks(ROWS))  # a sound call between, which the cache keeps
    if name == "an index past m":
        for _ in range(4):
            sightline.attention(*x, mask=blocks(ROWS + 2))
        with pytest.raises(error, match=message):
            call(x)


def test_lists_in_an_explanation_and_a_picture():
    lists = np.array([[[[0], [0], [2]]]])
    mask = blocks(lists, 64) & causal()
    x = np.zeros((1, 2, 192, 16), np.float32)
    assert "t[0, 0, i // 64, min(j // 64, 3)] ∧ i ≥ j" in repr(mask)
    assert mask.sparsity(192) == pytest.approx(1 - (64 * 65 / 2 * 2 + 64 * 64) / 192**2)
    assert sightline.explain(x, x, x, mask=mask)
    assert h.free_symbols.isdisjoint(mask.free_symbols)
