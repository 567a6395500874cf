"""The decoding kernel: it runs for few queries against many keys, and the merge of its splits is exact."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from cached_calls import cache_problem
from fault_planting import Fault, assert_found
from sightline import causal, entropy, h, i, j, lse, m, n, padding, s, softcap, table
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.cpu.kernels.decode import Decode
from sightline.cpu.kernels.decode_rows import VisibleKeys
from sightline.cpu.launch import decode as launch_decode
from sightline.cpu.launch import forward as launch_forward
from sightline.cpu.launch.decode import min_decode_keys
from sightline.cpu.runtime.processor import HOST
from sightline.reference.testing import assert_conforms, with_guards
from statistic_definitions import check as check_statistics
from strategies import DTYPES

MASKS = {
    "none": None,
    "causal": causal("lower right"),
    "holes": (j % 5 != 2) & (j + 3 * i >= 130),
    "far": j >= 900,
    "nothing": j < 0,
}


@pytest.fixture
def taken(monkeypatch):
    """A list with one entry per call of the decoding kernel: False if the forward kernel had to run instead."""
    found = []

    def spy(*arguments):
        answer = launch_decode.decode(*arguments)
        found.append(answer is not None)
        return answer

    monkeypatch.setattr(launch_forward, "decode", spy)
    return found


def arrays(dtype, lead=(2,), H=8, G=2, n=1, m=1100, d_k=64, d_v=64, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((*lead, H, n, d_k), (*lead, G, m, d_k), (*lead, G, m, d_v))
    return [rng.normal(size=shape).astype(DTYPES[dtype]) for shape in shapes]


EXAMPLES = 4  # per dtype


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_problems(dtype, taken):
    @settings(max_examples=EXAMPLES)
    @given(
        sizes=st.sampled_from([(1, 1), (2, 1), (8, 1), (3, 2), (1, 4), (8, 4), (1, 7), (2, 7), (1, 32), (2, 32)]),
        keys=st.integers(1, 1400),
        width=st.sampled_from([32, 64]),
        mask=st.sampled_from(sorted(MASKS)),
        extra=st.sampled_from([{}, {"scale": -0.4}, {"sinks": 1}, {"score": softcap(3.0)}]),
        see=st.sampled_from([[lse()], [lse(), entropy()]]),
        seed=st.integers(0, 99),
    )
    def conforms(sizes, keys, width, mask, extra, see, seed):
        group, queries = sizes
        keys = max(keys, min_decode_keys(queries))
        x = arrays(dtype, (), 2 * group, 2, queries, keys, width, 160 - 2 * width, seed)
        if "sinks" in extra:
            extra = {"sinks": np.linspace(-1, 1, 2 * group).astype(np.float32)}
        problem = make_problem(*(y[None] for y in x), mask=MASKS[mask], see=see, **extra)
        assert_conforms(Cpu().run, problem)
        check_statistics(Cpu().run, problem)

    conforms()
    assert all(taken)
    assert len(taken) >= EXAMPLES


def test_one_visible_key_has_no_entropy(taken):
    q, k, v = arrays("float32", n=1, m=700)
    result = Cpu().run(make_problem(q, k, v, mask=j == 300, see=[entropy()]))
    assert np.all(result.seen[0] == 0)
    assert taken == [True]


def test_tables_and_heads(taken):
    x = arrays("float32", n=3)
    score = s - table(np.linspace(0, 1, 8))[h] * (i + m - n - j) * 0.01
    assert_conforms(Cpu().run, make_problem(*x, score=score, mask=padding(np.array([1100, 700]))))
    assert taken == [True]


def check_masks_by_head(G=8):
    """Every head and batch hides other tiles and splits, by a mask and by biases of −∞."""
    x = arrays("float32", G=G, n=2, m=1300)
    limits = np.linspace(1, 1300, 16, dtype=np.int64).reshape(2, 8)
    hidden = np.arange(1300) < limits[::-1, :, None, None]
    for options in (
        {"mask": lambda b, h, i, j: j < table(limits)[b, h]},
        {"score": sightline.bias(np.where(hidden, -np.inf, hidden.cumsum(-1) / 1300))},
        {"mask": j > 200 * h - 300 * i},
    ):
        assert_conforms(Cpu().run, make_problem(*x, **options))


@pytest.mark.parametrize("G", [1, 2, 8])
def test_masks_by_head(G, taken):
    check_masks_by_head(G)
    assert taken == [True] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_for_any_number_of_threads(dtype, taken):
    problem = make_problem(*arrays(dtype, (1,), 4, 1, 5, 9000), mask=causal("lower right"))
    first = Cpu().run(replace(problem, threads=1))
    for threads in (2, 3, 7):
        again = Cpu().run(replace(problem, threads=threads))
        assert np.array_equal(again.output, first.output)
        assert np.array_equal(again.lse, first.lse)
    assert taken == [True] * 4


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("G", "group", "n"), [(5, 1, 1), (7, 3, 1), (13, 5, 1), (9, 1, 3), (3, 33, 1)])
def test_heads_that_are_neighbours_in_memory_share_an_item(dtype, G, group, n, taken):
    q, k, v = arrays(dtype, (2,), G * group, G, n, 1500, 32, 32)
    alone = Cpu().run(make_problem(q, k, v, see=[entropy()], threads=1))
    k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (k, v))
    problem = make_problem(q, k, v, see=[entropy()])
    assert_conforms(Cpu().run, problem)
    for threads in (1, 3):
        shared = Cpu().run(replace(problem, threads=threads))
        assert np.array_equal(shared.output, alone.output)
        assert np.array_equal(shared.lse, alone.lse)
        assert np.array_equal(shared.seen[0], alone.seen[0])
    assert taken == [True] * 4


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_no_row_sees_are_not_read(dtype, taken):
    q, k, v = arrays(dtype)
    k[..., 1000:, :], v[..., 1000:, :] = np.nan, np.inf
    assert_conforms(Cpu().run, make_problem(q, k, v, mask=j < 1000))
    assert taken == [True]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_that_one_row_sees_is_the_forward_kernels(dtype, taken):
    q, k, v = arrays(dtype)
    k[..., 1000:, :], v[..., 1000:, :] = np.nan, np.inf
    assert_conforms(Cpu().run, make_problem(q, k, v, mask=(j < 1000) | (h == 1)))
    assert taken == [False]


def test_no_byte_outside_is_read():
    q, k, v = arrays("float32", (1,), n=2, m=515)
    (k, k_unharmed), (v, v_unharmed) = with_guards(k), with_guards(v)
    assert_conforms(Cpu().run, make_problem(q, k, v))
    k_unharmed()
    v_unharmed()


REFUSED = {
    "many queries": (arrays("float32", (1,), 2, 1, n=33), {}),
    "few keys": (arrays("float32", n=4, m=31), {}),
    "many queries of many heads": (arrays("float32", n=5), {}),
    "odd width": (arrays("float32", d_k=63), {}),
    "dropout": (arrays("float32"), {"dropout": 0.5, "seed": 1}),
    "strided columns": ([x.swapaxes(-1, -2).copy().swapaxes(-1, -2) for x in arrays("float32")], {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_serve_goes_forward(name, taken):
    x, options = REFUSED[name]
    assert not launch_decode.can_decode(make_problem(*x, **options), HOST)
    assert_conforms(Cpu().run, make_problem(*x, **options))
    assert not taken


def test_a_cache_is_read_in_place(taken):
    """The kernel reads the keys from the cache's memory."""
    q, k, v = arrays("float32", H=2)
    cache = sightline.KVCache(dtype="float32")
    cache.append(k, v)
    output = sightline.attention(q, cache, mask=sightline.causal())
    assert taken == [True]
    assert np.array_equal(output, sightline.attention(q, k, v, mask=causal("lower right")))
    assert np.shares_memory(cache_problem(q, cache).key, cache.key)


# -- planted faults ----------------------------------------------------------------------------------------------------


def check_entropy():
    q, k, v = arrays("float32", (1,), n=2, m=2000)
    k[..., 1000:, :] *= 2
    for options in ({}, {"sinks": np.linspace(-1, 1, 8)}):
        check_statistics(Cpu().run, make_problem(q, k, v, see=[entropy()], **options))


def check_visible_keys():
    for queries, mask in ((1, MASKS["holes"]), (3, (i + j) % 3 == 0), (2, j < 700)):
        assert_conforms(Cpu().run, make_problem(*arrays("float32", n=queries), mask=mask))


def check_merge():
    q, k, v = arrays("float32", (1,), 4, 1, 2, 2000)
    k[..., 1500:, :] *= 3
    assert_conforms(Cpu().run, make_problem(q, k, v, sinks=np.full(4, 2.0, np.float32)))


FAULTS = {  # for each check: the faults that it finds
    check_entropy: {
        "exponents not rescaled": Fault(
            Decode.add_exponents,
            "builder.fma(difference, sums.load(self.vector), place.load(self.vector))",
            "place.load(self.vector)",
        ),
        "sums not rescaled": Fault(
            Decode.add_exponents,
            "builder.fma(difference, sums.load(self.vector), place.load(self.vector)) * alpha",
            "builder.fma(difference, sums.load(self.vector), place.load(self.vector))",
        ),
        "splits without their shares": Fault(Decode.merge_splits, "own - difference", "own"),
        "exponents in base 2": Fault(Decode.store, "exponents.to(DOUBLE) * unit", "exponents.to(DOUBLE)"),
        "weights of the splits not normalized": Fault(
            Decode.merge_splits,
            "(entropy.get() + log_total * (total.get() - sink_share)) / divisor",
            "entropy.get() + log_total * (total.get() - sink_share)",
        ),
    },
    check_visible_keys: {
        "the last row not read": Fault(
            VisibleKeys.select, "builder.loop(0, self.count)", "builder.loop(0, self.count - 1)"
        ),
        "rows that the last query row sees": Fault(
            VisibleKeys.mark_rows, "builder.where(allowed, 1, mark.get())", "builder.where(allowed, 1, 0 * mark.get())"
        ),
        "every second row left out": Fault(VisibleKeys.select, "key * ROW_BYTES", "key // 2 * 2 * ROW_BYTES"),
        "rows of a full tile": Fault(VisibleKeys.select, "builder.where(partial, self.seen, self.all)", "self.all"),
    },
    check_masks_by_head: {
        "the tile ranges of another head": Fault(
            Decode.locate_item,
            "self.b * args.tile_range_batch_stride + self.first_head * args.tile_range_head_stride",
            "self.b * args.tile_range_batch_stride",
        )
    },
    check_merge: {
        "splits not weighted": Fault(Decode.merge_splits, "exp(builder, difference)", "builder.value(1.0, DOUBLE)"),
        "a split dropped": Fault(
            Decode.merge_splits, "share.to(self.float)", "builder.where(split > 0, share.to(self.float), 0.0)"
        ),
        "sinks left out": Fault(
            Decode.merge_splits,
            "args.sinks.at(h * 8).load(DOUBLE) if self.spec.has_sinks else builder.value(-math.inf, DOUBLE)",
            "args.lse if False else builder.value(-math.inf, DOUBLE)",
        ),
    },
}


@pytest.mark.parametrize("check", FAULTS, ids=lambda check: check.__name__)
def test_sound_kernels_pass(check, taken):
    check()
    assert taken
    assert all(taken)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(("check", "fault"), [(check, fault) for check, faults in FAULTS.items() for fault in faults])
def test_every_fault_is_seen(check, fault, monkeypatch, fresh_kernels):
    assert_found(FAULTS[check][fault], monkeypatch, check, "budget")
