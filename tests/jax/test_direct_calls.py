"""Repeated forward passes of compiled programs, which generated code runs without Python."""

import gc
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sightline
from fault_planting import Fault, plant
from jax_kernel import enable_x64
from sample_calls import bits
from sightline import b, h, i, j, s, table
from sightline.call import call_cache
from sightline.cpu.calls import xla_handler
from sightline.cpu.calls.xla_handler import XlaHandler
from sightline.jax import custom_call, dot_product_attention, primitives
from sightline.jax.xla_calls import parse_call

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the code reads the environment of POSIX")
B, H, N, M, D = 2, 3, 9, 14, 16
RUNS = 2  # the first goes through the full dispatch, and Python runs the second

CALLS = {  # functions of query, key, value, lengths (B,) and a bias (H, N, M)
    "plain": lambda q, k, v, lengths, bias: sightline.attention(q, k, v),
    "lse": lambda q, k, v, lengths, bias: sightline.attention(q, k, v, mask=i >= j, see=[sightline.lse()]),
    "numbers": lambda q, k, v, lengths, bias: sightline.attention(q, k, v, mask=sightline.window(5), scale=0.3),
    "tables": lambda q, k, v, lengths, bias: sightline.attention(
        q, k, v, mask=j < table(lengths)[b], score=s + table(bias)[h, i, j], see=[sightline.lse()]
    ),
    "decoding": lambda q, k, v, lengths, bias: sightline.attention(q[:, :, :1], k, v, mask=j < table(lengths)[b]),
    "heads after positions": lambda q, k, v, lengths, bias: attend_by_position(q, k, v),
}


def attend_by_position(query, key, value):
    if isinstance(query, np.ndarray):
        return sightline.attention(query, key, value, mask=i >= j).swapaxes(1, 2)
    return dot_product_attention(*(x.swapaxes(1, 2) for x in (query, key, value)), is_causal=True)


@pytest.fixture
def draw(rng):
    def inputs():
        arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((B, H, N, D), (B, H, M, D), (B, H, M, D))]
        return *map(jnp.asarray, arrays), jnp.asarray(rng.integers(1, M, B)), jnp.asarray(rng.normal(size=(H, N, M)))

    return inputs


@pytest.fixture(name="python_calls")
def count_python_calls(monkeypatch):
    """Return a list that grows with each call that runs in Python."""
    calls, parse = [], custom_call.parse_call
    monkeypatch.setattr(custom_call, "parse_call", lambda text: calls.append(text) or parse(text))
    return calls


def same(found, expected):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True))


def compiled(name):
    """Return the call as a program of its own: JAX keeps the programs of a function."""
    return jax.jit(lambda *given: CALLS[name](*given))


def on_numpy(name, given):
    return CALLS[name](*map(np.asarray, given))


def check(name, draw):
    """Compare calls with other contents, the last of them without Python, with calls on arrays of NumPy."""
    attend = compiled(name)
    for _ in range(RUNS + 3):
        given = draw()
        assert same(attend(*given), on_numpy(name, given)), "other bits"


@pytest.mark.parametrize("name", CALLS)
def test_the_bits_are_those_of_python(draw, name, python_calls):
    attend = compiled(name)
    for _ in range(RUNS):
        attend(*draw())
    given = draw()
    python_calls.clear()
    assert same(attend(*given), on_numpy(name, given))
    assert not python_calls


def test_float64(draw):
    with enable_x64(True):
        check("lse", lambda: [x.astype(jnp.float64) for x in draw()])


def test_many_threads(draw):
    """Threads that find the record in use run the call in Python."""
    attend, inputs = compiled("tables"), [draw() for _ in range(8)]
    expected = [on_numpy("tables", given) for given in inputs]
    for _ in range(RUNS):
        attend(*inputs[0])
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            for found, own in zip(pool.map(lambda given: attend(*given), inputs), expected, strict=True):
                assert same(found, own)


def test_entries_own_what_they_read(draw, python_calls):
    """The cache of parsed calls drops calls that were not used recently, and direct calls do not count as uses."""
    attend, (q, k, v, *_) = jax.jit(lambda q, k, v: sightline.attention(q, k, v, mask=sightline.window(4, 3))), draw()
    for _ in range(RUNS):
        attend(q, k, v)
    call = weakref.ref(parse_call(python_calls[-1]).find_prepared().call)
    parse_call.cache_clear()
    call_cache.clear()
    gc.collect()
    assert call() is not None, "the entry reads the memory of a call that is gone"
    python_calls.clear()
    attend(q, k, v)
    assert not python_calls


def test_a_call_with_more_tile_ranges_than_before(rng, python_calls):
    """Every second block of keys is hidden in the later calls, so that the tiles form more ranges."""
    q, k, v = (jnp.asarray(rng.normal(size=(1, 1, length, 8)), jnp.float32) for length in (64, 1900, 1900))
    blocks = np.arange(1900) // 200 % 2 == 0

    def attend(q, k, v, visible):
        return sightline.attention(q, k, v, mask=table(visible)[j])

    program = jax.jit(lambda *given: attend(*given))
    for contents, runs in ((np.ones(1900, bool), RUNS), (blocks, RUNS)):
        for _ in range(runs):
            assert same(program(q, k, v, jnp.asarray(contents)), attend(*map(np.asarray, (q, k, v)), contents))
    python_calls.clear()
    program(q, k, v, jnp.asarray(blocks))
    assert not python_calls


def test_another_setting_of_the_processor(draw, monkeypatch, python_calls):
    """SIGHTLINE_CPU is read at each call: a setting that no processor has is an error, also after direct calls."""
    attend, given = compiled("plain"), draw()
    for _ in range(RUNS):
        attend(*given)
    monkeypatch.setenv("SIGHTLINE_CPU", "no such processor")
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="no such processor"):
        jax.block_until_ready(attend(*given))
    monkeypatch.delenv("SIGHTLINE_CPU")
    python_calls.clear()
    attend(*given)
    assert not python_calls


@pytest.mark.usefixtures("without_checks")
def test_a_result_that_is_not_finite_is_computed_in_python(draw):
    attend = compiled("tables")
    for _ in range(RUNS):
        attend(*draw())
    q, k, v, lengths, bias = draw()
    lengths = jnp.full_like(lengths, M - 1)
    given = q, k.at[:, :, -1].set(jnp.nan), v.at[:, :, -1].set(jnp.inf), lengths, bias
    assert same(attend(*given), on_numpy("tables", given))


def check_all(draw):
    for name in ("lse", "tables", "heads after positions"):
        check(name, draw)
    for scale in (0.25, 0.75):  # the texts of both calls have the same length
        attend, given = jax.jit(lambda q, k, v, scale=scale: sightline.attention(q, k, v, scale=scale)), draw()[:3]
        for _ in range(RUNS):
            assert same(attend(*given), sightline.attention(*map(np.asarray, given), scale=scale)), "other bits"


COPY = "self.copy_addresses(ARGUMENTS, num_arguments, buffers)"
FAULTS = {
    "key in place of query": Fault(XlaHandler.build, COPY, f"{COPY}; buffers.store(buffers.at(8).load(INT64))"),
    "key in place of value": Fault(XlaHandler.build, COPY, f"{COPY}; buffers.at(16).store(buffers.at(8).load(INT64))"),
    "the keys as values": Fault(
        XlaHandler.write_words, "self.buffers.at(index * 8)", "self.buffers.at((index - (index == 2).to(INT64)) * 8)"
    ),
    "lse as it was": Fault(XlaHandler.write_lse, "lse.at(row * 4).store(number.to(FLOAT))", "pass"),
    "an entry of another text": Fault(XlaHandler.is_entry_of, "(difference == 0) & (own == current)", "own == current"),
}


def register_alone(monkeypatch, target):
    """Build the handler again during a test, under a name of its own: XLA registers a name once for a process.

    The handler has direct entries of its own too. The first handler would find no entry that this one installs.
    """
    monkeypatch.setattr(custom_call, "TARGET", target)
    monkeypatch.setattr(custom_call, "_entries", custom_call.DirectEntries())
    monkeypatch.setattr(primitives, "register_custom_call", custom_call.register_custom_call.__wrapped__)


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_every_fault_is_seen(fault, draw, monkeypatch, fresh_kernels):
    """All texts of one length have the same hash."""
    if fault is not None:
        plant(FAULTS[fault], monkeypatch)
    monkeypatch.setattr(xla_handler, "PRIME", 0)
    register_alone(monkeypatch, f"sightline direct: {fault}")
    if fault is None:
        check_all(draw)
        return
    with pytest.raises(AssertionError, match="bits"):
        check_all(draw)


def test_gradients_beside_a_condition(draw):
    """The condition has a number of the mask as a divisor, and the backward pass of the output reads no condition."""
    given, see = draw()[:3], [sightline.mass((i // 3 == j // 3) & (j < 8))]
    gradients = jax.grad(lambda *x: sightline.attention(*x, mask=(j - i < 3) | (j < 2), see=see)[0].sum(), (0, 1, 2))
    first, *others = [[bits(x) for x in gradients(*given)] for _ in range(3)]
    assert others == [first] * 2
