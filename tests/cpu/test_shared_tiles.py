"""Blocks of queries that share tiles of K and V: layouts whose rows are far apart, and items of several blocks."""

from functools import partial

import numpy as np
import pytest

import sightline
from gradient_checks import by_cpu
from gradient_checks import check as check_gradients
from sightline import dense, i, j, s, table
from sightline.call import call_cache
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.cpu.kernels import shared_tiles
from sightline.cpu.launch import backward as launch_backward
from sightline.cpu.runtime.machine import CPU_VARIABLE, machine_names, missing_features, named_machine, native_machine
from sightline.reference.testing import assert_conforms
from statistic_definitions import check as check_statistics
from strategies import Case

RUNNABLE = [name for name in machine_names() if not missing_features(native_machine(), named_machine(name))]
B, G, GROUP, N, M, D = 1, 2, 2, 210, 150, 20


def _cut(x, at, parts):
    """Rows of x as one of several parts of wider rows, beside NaN."""
    wide = np.full((*x.shape[:-1], parts, x.shape[-1]), np.nan, x.dtype)
    wide[..., at, :] = x
    return wide[..., at, :]


LAYOUTS = {  # of (B, H, n, d): functions that return an equal array
    "contiguous": np.ascontiguousarray,
    "view": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "fused": lambda x: _cut(x.swapaxes(1, 2), 1, 3).swapaxes(1, 2),
    "padded rows": lambda x: _cut(x, 0, 2),
    "backwards": lambda x: np.ascontiguousarray(x[..., ::-1, :].swapaxes(1, 2)).swapaxes(1, 2)[..., ::-1, :],
    "one row": lambda x: np.broadcast_to(x[..., :1, :], x.shape),
    "columns first": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "gaps in rows": lambda x: _cut(x.reshape(*x.shape, 1), 0, 2)[..., 0],
}
FORMULAS = {
    "plain": {},
    "causal": {"mask": i >= j},
    "blocks apart": {"mask": ((i // 40) % 2 == 0) & (abs(i - j) < 30)},  # blocks of queries need different tiles
    "score": {"score": s * 0.5 + 0.01 * i, "mask": j < i + 20},
    "dropout": {"dropout": 0.3, "seed": 3},
}


def draw(layout, dtype=np.float32):
    rng = np.random.default_rng(5)
    shapes = (B, G * GROUP, N, D), (B, G, M, D), (B, G, M, D - 3)
    return [LAYOUTS[layout](rng.normal(size=shape).astype(dtype)) for shape in shapes]


@pytest.mark.sampled(one_in=29)
@pytest.mark.parametrize("machine", RUNNABLE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("formula", FORMULAS)
def test_outputs_and_gradients(formula, layout, machine, monkeypatch):
    monkeypatch.setenv(CPU_VARIABLE, machine)
    for dtype in (np.float32, np.float16):
        assert_conforms(Cpu().run, make_problem(*draw(layout, dtype), **FORMULAS[formula]))
    monkeypatch.setattr(launch_backward, "TARGET_ITEMS", 1)  # there is one split, and a block needs some of its tiles
    case = Case(*draw(layout), FORMULAS[formula])
    check_gradients(case, differentiate=partial(by_cpu, answer=Cpu().run(case.make_problem())))


@pytest.mark.parametrize("machine", RUNNABLE)
def test_statistics_beside_integers_of_64_bits(machine, monkeypatch):
    """The kernel keeps the key of the largest score for each block. A key of 64 bits is larger than a score."""
    monkeypatch.setenv(CPU_VARIABLE, machine)
    numbers = np.arange(M) % 5
    numbers[0] = 2**40
    see = [sightline.max_score(), sightline.entropy(), sightline.top_k(3), sightline.received()]
    problem = make_problem(*draw("contiguous"), mask=j > 0, score=s + table(numbers)[j], see=see)
    assert_conforms(Cpu().run, problem)
    check_statistics(Cpu().run, problem)


@pytest.mark.parametrize("layout", ["view", "fused"])
def test_hidden_rows_may_hold_anything(layout):
    """A copy of a tile holds hidden rows too, whose NaN and ∞ must not reach an output."""
    query, key, value = draw(layout)
    hidden = np.arange(M) % 7 == 3
    mask = dense(np.broadcast_to(~hidden, (N, M)))
    key[..., hidden, :], value[..., hidden, :] = np.nan, np.inf
    assert_conforms(Cpu().run, make_problem(query, key, value, mask=mask))


def test_far_rows_are_copied(monkeypatch, fresh_kernels):
    """The rows of a view are copied for so many queries, and no others: a wrong copy is seen in their outputs alone."""
    monkeypatch.setattr(shared_tiles.OperandTile, "copy_rows", lambda self, scratch: None)
    wrong = {layout: sightline.attention(*draw(layout)) for layout in ("contiguous", "view")}
    right = sightline.attention(*draw("contiguous"), kernel="reference")
    np.testing.assert_allclose(wrong["contiguous"], right, atol=1e-4)
    assert not np.allclose(wrong["view"], right, atol=1e-1)


@pytest.mark.parametrize("processors", [1, 2, 16, 1000])
def test_bits_do_not_depend_on_the_blocks_of_an_item(processors, monkeypatch):
    """NaN in one query, and in a hidden row of V, must not change the bits of other blocks either."""
    inputs = draw("view")
    inputs[0][..., 200, :], inputs[2][..., 100, :] = np.nan, np.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sightline.cpu.launch.forward.available_processors", lambda: 10**6)
        call_cache.clear()
        expected = sightline.attention(*inputs, mask=i >= j)
    monkeypatch.setattr("sightline.cpu.launch.forward.available_processors", lambda: processors)
    call_cache.clear()
    np.testing.assert_array_equal(sightline.attention(*inputs, mask=i >= j), expected)


def test_gradients_ignore_rows_of_queries_that_see_nothing():
    """NaN in the rows of a block without visible keys does not reach dK and dV of its neighbours."""
    inputs = draw("contiguous")
    clean, _, vjp = sightline.attention_vjp(*inputs, mask=(i < 64) & (i >= j))
    expected = vjp(np.ones_like(clean))
    inputs[0][..., 128:, :] = np.nan
    output, _, vjp = sightline.attention_vjp(*inputs, mask=(i < 64) & (i >= j))
    found = vjp(np.ones_like(output))
    for name in ("key", "value"):
        np.testing.assert_array_equal(found[name], expected[name])
