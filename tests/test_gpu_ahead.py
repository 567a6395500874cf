"""Kernels compiled for GPUs that are not there: what they take of them, recorded and bounded."""

import pytest
import torch

from sightline import causal, softcap, window
from sightline.errors import ParameterError
from sightline.problem import pose

pytest.importorskip("triton")

from triton.runtime.driver import driver

from sightline.gpu.ahead import TARGETS, compiled
from sightline.gpu.run import forward_calls, run

FORMULAS = {
    "plain": {},
    "causal": {"mask": causal()},
    "window, capped": {"mask": window(256), "score": softcap(20.0)},
}


def kernels(target, dtype="bfloat16", width=64, formula="causal", n=1000):
    """The kernels a problem takes on that GPU."""
    query = torch.full((2, 8, n, width), torch.nan, dtype=getattr(torch, dtype))
    key = torch.full((2, 2, 1000, width), torch.nan, dtype=getattr(torch, dtype))
    problem = pose(query, key, key, **FORMULAS[formula])
    return compiled(lambda: run(problem, target), target)


# (bytes of a thread that found no register, bytes of shared memory) of each kernel, with triton 3.9. More of either is
# slower, or does not run at all; less of it belongs here.
RECORDED = {}
SHARED = {"sm_80": 163, "sm_90": 227, "gfx942": 64}  # KiB that a block can have


def check(found, recorded):
    """Kernels take no more than recorded, and nothing that their GPU has not."""
    assert [kernel.name for kernel in found] == list(recorded)
    for kernel in found:
        spilled, shared = recorded[kernel.name]
        assert kernel.spilled <= spilled, str(kernel)
        assert kernel.shared <= shared <= SHARED[kernel.target] << 10, str(kernel)


@pytest.mark.parametrize("target", TARGETS)
def test_what_kernels_take(target):
    for case in CHEAP:
        check(kernels(target, **case), RECORDED[target, *case.values()])


@pytest.mark.soak
@pytest.mark.parametrize("case", RECORDED)
def test_what_all_kernels_take(case):
    check(kernels(*case), RECORDED[case])


def test_nothing_runs_and_the_driver_is_put_back():
    problem = pose(*(torch.ones(1, 1, 20, 16, dtype=torch.float16) for _ in range(3)))
    output = torch.full((1, 1, 20, 16), 7.0, dtype=torch.float16)
    lse = torch.full((1, 1, 20), 7.0, dtype=torch.float64)

    def launch():
        for call in forward_calls(problem, output, lse, "sm_80"):
            call.launch()
        raise ZeroDivisionError

    before = active()
    with pytest.raises(ZeroDivisionError):
        compiled(launch, "sm_80")
    assert active() is before
    assert (output == 7).all()
    assert (lse == 7).all()


def active():
    """Triton's driver; None without a GPU."""
    try:
        return driver.active
    except RuntimeError:
        return None


def test_unknown_targets_are_named():
    with pytest.raises(ParameterError, match="one of 'sm_80'"):
        compiled(lambda: None, "sm_42")
