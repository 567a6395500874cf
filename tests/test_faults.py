"""Broken on purpose: each fault, written into a kernel's source, must turn the check of conformance red."""

import importlib.util
import inspect

import numpy as np
import pytest

import sightline
from sightline import i, j
from sightline.cpu import Cpu, forward, run, tiles
from sightline.formula import bounds
from sightline.problem import pose
from sightline.streaming import Streaming
from sightline.testing import assert_conforms

FAULTS = {
    # kernel, module, the line as it stands, the line with the fault
    "cpu: off-by-one mask": ("cpu", forward, "j = (j0 + key).to(self.integer)", "j = (j0 + key + 1).to(self.integer)"),
    "cpu: dropped rescale": (
        "cpu",
        forward,
        "code.fma(old, self.alpha[v].get(), sums[r][v].get())",
        "old + sums[r][v].get()",
    ),
    "cpu: missed tail of keys": (
        "cpu",
        tiles,
        "with code.loop(whole, count) as k:",
        "with code.loop(count, count) as k:",
    ),
    "cpu: missed last rows": ("cpu", tiles, "with code.when(count > whole):", "with code.when(count > most):"),
    "cpu: wrong head of a group": (
        "cpu",
        forward,
        "g = self.h // given.group",
        "g = self.h % (given.H // given.group)",
    ),
    "cpu: stale maximum": ("cpu", forward, "self.largest[v].set(new)", "self.largest[v].set(self.largest[v].get())"),
    "streaming: off-by-one mask": (
        "streaming",
        None,
        "b, h, i, j = self.problem.positions(self.xp, rows, columns)",
        "b, h, i, j = self.problem.positions(self.xp, rows, columns); j = j + 1",
    ),
    "streaming: dropped rescale": (
        "streaming",
        None,
        "acc = acc * xp.astype(alpha, work.dtype)[..., None] + values",
        "acc = acc + values",
    ),
    "streaming: missed tail of keys": (
        "streaming",
        None,
        "stop = min(start + runs.key_block, self.problem.m)",
        "stop = min(start + runs.key_block, self.problem.m - self.problem.m % 8)",
    ),
    "streaming: wrong head of a group": (
        "streaming",
        None,
        "return self.xp.reshape(product, (*array.shape[:-1], other.shape[-2]))",
        "return self.xp.flip(self.xp.reshape(product, (*array.shape[:-1], other.shape[-2])), axis=-3)",
    ),
}


def broken(module, before, after):
    """The module again with one line changed."""
    source = inspect.getsource(module)
    assert source.count(before) == 1, f"the line of this fault is gone from {module.__name__}: {before}"
    spec = importlib.util.spec_from_loader(module.__name__, loader=None, origin=module.__file__)
    copy = importlib.util.module_from_spec(spec)
    copy.__package__ = module.__package__
    exec(compile(source.replace(before, after), module.__file__, "exec"), copy.__dict__)
    return copy


def planted(fault, monkeypatch):
    """The kernel's `run` with the fault in it."""
    import sightline.streaming as streaming

    kernel, module, before, after = FAULTS[fault]
    if kernel == "streaming":
        return broken(streaming, before, after).Streaming().run
    copy = broken(module, before, after)
    if module is tiles:
        monkeypatch.setattr(forward, "Tiles", copy.Tiles)
    else:
        monkeypatch.setattr(run, "Forward", copy.Forward)
    return Cpu().run


def check(run):
    """Conformance on problems with what a kernel may get wrong: masks, groups, tails, several tiles of keys."""
    rng = np.random.default_rng(3)
    q, k, v = (
        rng.normal(size=size).astype(np.float32) for size in ((2, 4, 131, 23), (2, 2, 1103, 23), (2, 2, 1103, 9))
    )
    k[..., 600:, :] *= 3  # later keys score higher, so the running maximum moves
    assert_conforms(run, pose(q, k, v))
    assert_conforms(run, pose(q, k, v, mask=(i * 8 >= j) & (j >= i), sinks=rng.normal(size=4).astype(np.float32)))


@pytest.mark.parametrize("kernel", [Cpu(), Streaming()], ids=lambda kernel: kernel.name)
def test_sound_kernels_pass(kernel):
    check(kernel.run)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_seen(fault, monkeypatch, fresh_kernels):
    run = planted(fault, monkeypatch)
    with pytest.raises(AssertionError, match=r"budget|shape"):
        check(run)


def test_a_wrong_interval_is_seen(monkeypatch):
    """Bounds that call too much "surely allowed" let a mask through."""
    rule = bounds.BOUND_RULES["greater_equal"]
    monkeypatch.setitem(bounds.BOUND_RULES, "greater_equal", lambda x, y: (rule(x, y)[1], rule(x, y)[1]))
    rng = np.random.default_rng(4)
    x = rng.normal(size=(1, 1, 100, 8)).astype(np.float32)
    with pytest.raises(AssertionError, match="budget"):
        assert_conforms(Streaming().run, pose(x, x, x, mask=i >= j))


def test_a_fault_in_the_gradient_is_seen(monkeypatch):
    """The derivative of a score formula, wrong by its sign, shows against finite differences of the definition."""
    from sightline.formula import derivative as room
    from sightline.reference import gradients_of, stages_of

    rng = np.random.default_rng(6)
    q, k, v, d_output = (rng.normal(size=(1, 1, 5, 3)) for _ in range(4))
    problem = pose(q, k, v, score=sightline.softcap(1.0))
    step = 1e-6
    moved = pose(q + step * d_output, k, v, score=sightline.softcap(1.0))
    slope = ((stages_of(moved).output - stages_of(problem).output) * d_output).sum() / step

    def disagreement():
        return abs((gradients_of(problem, d_output).query * d_output).sum() - slope) / abs(slope)

    sound = disagreement()
    monkeypatch.setitem(room.DERIVATIVE_RULES, "tanh", lambda node, dx: dx * (node * node - 1))
    assert disagreement() > 1000 * sound
