"""Attention to lists of single keys by copies of these keys: results, gradients, the choice of the kernel, faults."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import sightline
from fault_planting import Fault, assert_found
from gradient_checks import check as check_gradients
from sightline import b, causal, h, i, j, s, table
from sightline.api.kernels import KERNELS
from sightline.call.kernel import GivenGradients, Result
from sightline.call.problem import make_problem
from sightline.formula import block_lists
from sightline.reference import gathered_keys
from sightline.reference.gathered_keys import Gathering
from sightline.reference.testing import assert_conforms
from statistic_definitions import check as check_statistics
from strategies import DTYPES, Case

B, H, G, N, M = 2, 4, 2, 23, 40
GATHER = next(kernel for kernel in KERNELS if kernel.name == "gather")
LISTS = np.random.default_rng(1).integers(-2, M + 2, (B, H, N, 3))  # with numbers that are no keys
LISTS[0, :, 3:9, 1:] = LISTS[0, :, 3:9, :1]
LISTS[:, :, 4] = -1  # a query without keys
T, BIAS = table(LISTS), table(np.linspace(-1, 1, H * 90).reshape(H, 90).astype(np.float32))
SEE = [
    *[sightline.received(how) for how in ("sum", "mean", "max")],
    *[sightline.lse(), sightline.max_score(), sightline.entropy(), sightline.top_k(2), sightline.mass(i >= j + b)],
    sightline.sum(sightline.p * (i - j), over=j),
    sightline.sum(sightline.p**2 * j, over=j),
    sightline.max(sightline.p * j, over=j),
    sightline.sum(sightline.p**2 + i, over=i),
    sightline.min(s - j, over=(i, j), cells=(5, 3)),
    sightline.sum(sightline.p * i, over=(i, j)),
    *[sightline.pooled(5, 7), sightline.pooled(3, 4, "max", ((2, 20), (5, 37))), sightline.pooled(4, 4).mean("heads")],
    *[sightline.received().mean("heads"), sightline.received("max").mean("batch"), sightline.entropy().mean("batch")],
]


def searched(indices, size=1):
    """Return the mask `blocks` that searches the lists, also if they are not short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_lists, "PAIRS_PER_KEY", 0)
        patch.setattr(block_lists, "PAIRS_PER_CALL", 0)
        return sightline.blocks(indices, size)


CALLS = {
    "equalities": {"mask": (j == T[b, h, i, 0]) | (T[b, h, i, 1] == j) | (j == T[b, h, i, 2])},
    "other conditions": {
        "mask": ((j == T[0, 1, i, 0]) | (j == i // 2) | (j == T[0, 0, i, 1])) & causal() & (j < table([30, 25])[b])
    },
    "a condition by head": {"mask": ((j == T[b, 0, i, 0]) | (j == T[0, 0, 0, 1])) & (table([1, 0, 1, 1])[h] > 0)},
    "searched": {"mask": searched(np.clip(LISTS, -1, M - 1))},
    "searched for two queries": {"mask": searched(np.clip(LISTS[:1, :1, :12], -1, M - 1), (2, 1)) & causal()},
    "score and sinks": {
        "mask": (j == T[b, h, i, 0]) | (j == T[b, 0, i, 1]),
        "score": 5 * np.tanh(s / 5) + BIAS[h, abs(i - j)] + b,
        "sinks": np.linspace(-1, 1, H).astype(np.float32),
    },
    "no key": {"mask": j == T[0, 0, 4, i % 2]},
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(gathered_keys, "PART_BYTES", 1 << 13)


def case(name, dtype="float32"):
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(B, heads, length, 8)).astype(DTYPES[dtype]) for heads, length in ((H, N), (G, M), (G, M))
    ]
    arrays[1][..., 7, :] = np.nan  # most queries do not see this key
    options = CALLS[name]
    sinks = options.get("sinks")
    return Case(*arrays, options if sinks is None else options | {"sinks": sinks.astype(DTYPES[dtype])})


def by(kernel):
    def differentiate(problem, d_output, d_lse, _):
        answer = kernel.run(problem)
        saved = answer.output, answer.lse
        return kernel.backward(problem, GivenGradients(d_output, d_lse, saved, range(len(problem.tables))))

    return differentiate


def check(kernel, name, dtype="float32", framework="numpy"):
    own = case(name, dtype)
    given = own.as_torch() if framework == "torch" else own
    assert not list(kernel.refuses(given.make_problem(see=SEE)))
    assert_conforms(kernel.run, given.make_problem(see=[sightline.lse()]))
    own.key[..., 7, :] = 0
    if framework == "numpy":
        check_statistics(kernel.run, own.make_problem(see=SEE))
    check_gradients(own, framework, by(kernel))


@pytest.mark.sampled(one_in=17)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("dtype", "framework"), [("float32", "numpy"), ("float64", "numpy"), ("float32", "torch"), ("bfloat16", "torch")]
)
def test_conforms(name, dtype, framework):
    check(GATHER, name, dtype, framework)


def test_strides_and_a_query_without_heads(rng):
    query, key, value = (rng.normal(size=(N, 2, 3, 8)).astype(np.float32).transpose(2, 1, 0, 3) for _ in range(3))
    mask = (j == T[0, 0, i, 0] % N) | (j == T[0, h, i, 1])
    assert_conforms(GATHER.run, make_problem(query, key, value, mask=mask, see=[sightline.lse()]))
    assert_conforms(GATHER.run, make_problem(query[0, 0], key[0, 0], value[0, 0], mask=j == T[0, 0, i, 0]))


def test_a_quantised_cache(rng):
    cache = sightline.KVCache(dtype="int8")
    cache.append(*rng.normal(size=(2, 1, G, M, 64)).astype(np.float32))
    query, mask = rng.normal(size=(1, H, N, 64)).astype(np.float32), (j == T[0, h, i - M + N, 0]) | (j == i)
    output, (lse,) = sightline.attention(query, cache, mask=mask, see=[sightline.lse()], kernel="gather")
    problem = make_problem(query, *cache.dequantized(), mask=(j == T[0, h, i, 0]) | (j == i + M - N))
    assert_conforms(lambda _: Result(output, lse), problem)


FAULTS = {  # for each call: the faults that it shows
    "equalities": {
        "a repeated key counts twice": Fault(
            Gathering._find_keys, "is_visible[..., 1:] &= keys[..., 1:] != keys[..., :-1]", "pass"
        ),
        "numbers that are no keys": Fault(Gathering._find_keys, "(keys >= 0) & (keys < m)", "keys < m"),
        "the first key head": Fault(Gathering._part, "self.key_heads // problem.G", "self.key_heads"),
        "half of the sums of keys": Fault(
            gathered_keys.add_rows, "values[place[odd - 1]] += values[place[odd]]", "pass"
        ),
    },
    "other conditions": {
        "rows of the first sequence": Fault(
            Gathering._part, "self.arange(problem.B)[:, None, None, None] * problem.G", "0"
        )
    },
    "searched": {
        "positions of copies": Fault(
            Gathering.add_statistic, "Extremum(None, where).at_positions(part.keys).where", "where"
        ),
        "the first pooled query": Fault(Gathering._add_to_cells, "i >= i0", "i > i0"),
    },
    "score and sinks": {"queries from the first": Fault(Gathering._part, "query + first", "query + 0 * first")},
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("call", "fault"), [(call, fault) for call, faults in FAULTS.items() for fault in faults])
def test_every_fault_is_seen(call, fault, monkeypatch):
    assert_found(FAULTS[call][fault], monkeypatch, lambda: check(gathered_keys.Gather(GATHER.by_tiles), call), "budget")


LONG = 1700


def long_call(rng):
    """Return query, key, value and lists of two keys for each query, for which the copies cost less than tiles."""
    return [*rng.normal(size=(3, 1, 2, LONG, 8)).astype(np.float32), rng.integers(0, LONG, (1, 1, LONG, 2))]


def test_calls_choose_copies_where_these_cost_less(rng):
    query, key, value, lists = long_call(rng)
    for mask in (sightline.blocks(lists, size=1), (j == table(lists)[0, 0, i, 0]) | (j == table(lists)[0, 0, i, 1])):
        told = sightline.explain(query, key, value, mask=mask)
        assert (told.kernel, told.tiles, told.flops) == ("gather", {}, 2 * 2 * LONG * 2 * 16)
        assert "gather: copies at most 2 of 1,700 keys for each query" in str(told)
        assert sum(t.array.nbytes for t in mask.tables) <= lists.nbytes * len(mask.tables)
    for options in ({"dropout": 0.5, "seed": 1}, {"see": [sightline.weights()]}):
        told = sightline.explain(query, key, value, mask=mask, **options)
        assert told.kernel == "cpu"
        assert told.refusals["gather"]
    near = sightline.explain(query, key, value, mask=mask & (abs(i - j) < 9))
    few = sightline.explain(query[..., :400, :], key, value, mask=mask)
    assert near.kernel == few.kernel == "cpu"
    assert sightline.blocks(np.arange(800)[None, None, :, None], size=1).tables[0].kind == "bool"


def test_numpy_torch_and_jax_give_the_bits_of_the_kernel(rng):
    *arrays, lists = long_call(rng)
    d_output = rng.normal(size=arrays[0].shape).astype(np.float32)
    problem = make_problem(*arrays, mask=sightline.blocks(lists, size=1), see=[sightline.received()])
    expected = GATHER.run(problem)
    saved = expected.output, expected.lse
    gradients = GATHER.backward(replace(problem, see=()), GivenGradients(d_output, None, saved, ()))
    expected = [expected.output, expected.seen[0], gradients.query, gradients.key, gradients.value]

    def call(query, key, value, lists):
        mask = sightline.blocks(lists, size=1, keys=LONG)
        return sightline.attention(query, key, value, mask=mask, see=[sightline.received()])

    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays]
    output, (received,) = call(*tensors, torch.from_numpy(lists))
    output.backward(torch.from_numpy(d_output))
    by_torch = [x.detach().numpy() for x in (output, received, *[x.grad for x in tensors])]
    output, vjp, received = jax.vjp(
        jax.jit(lambda *x: (lambda output, seen: (output, seen[0]))(*call(*x, jnp.asarray(lists)))),
        *arrays,
        has_aux=True,
    )
    by_jax = [output, received, *vjp(jnp.asarray(d_output))]
    for found in (by_torch, by_jax):
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one, other)


def test_an_index_past_the_keys_is_refused(rng):
    *arrays, lists = long_call(rng)
    lists[0, 0, 5] = LONG
    with pytest.raises(sightline.errors.ShapeError, match=rf"the block index {LONG}"):
        sightline.attention(*arrays, mask=sightline.blocks(lists, size=1))
