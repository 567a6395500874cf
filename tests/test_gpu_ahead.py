"""Kernels compiled for GPUs that are not there: what they take of them, recorded and bounded.

`recorded_kernels.json` holds what each kernel took with triton 3.9: registers of a thread, bytes of a thread that found
none, and bytes of shared memory. More of any is slower, or does not run at all. `python tests/test_gpu_ahead.py`
records anew.
"""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch

from sightline import causal, softcap, window
from sightline.errors import ParameterError
from sightline.problem import pose

pytest.importorskip("triton")

from triton.runtime.driver import driver

from sightline.gpu.ahead import TARGETS, compiled
from sightline.gpu.run import calls_of, forward_calls

FILE = Path(__file__).with_name("recorded_kernels.json")
SHARED = {"sm_80": 163, "sm_90": 227, "gfx942": 64}  # KiB that a block can have
FORMULAS = {"causal": {"mask": causal()}, "capped window": {"mask": window(256), "score": softcap(20.0)}}


@dataclass(frozen=True)
class Case:
    """Kernels of one kind of problem for one GPU."""

    target: str
    work: str  # "forward", "decode"
    dtype: str
    width: int
    formula: str

    def __str__(self):
        return f"{self.target} {self.work} {self.dtype} {self.width} {self.formula}"

    def calls(self):
        """The calls the problem takes, on arrays of the CPU."""
        dtype = getattr(torch, self.dtype)
        query = torch.zeros(2, 8, 1 if self.work == "decode" else 1000, self.width, dtype=dtype)
        key = torch.zeros(2, 2, 1000, self.width, dtype=dtype)
        problem = pose(query, key, key, **FORMULAS[self.formula])
        lse = torch.zeros(query.shape[:-1], dtype=torch.float64)
        return calls_of(problem, torch.zeros_like(query), lse, self.target)

    def kernels(self, most=None):
        """Its first kernels, compiled."""
        for call in islice(self.calls(), most):
            yield from compiled(call.launch, self.target)


CASES = [
    Case(target, work, dtype, width, formula)
    for target in TARGETS
    for work, dtype, width in [
        *(("forward", "bfloat16", width) for width in (64, 128, 256)),
        *(("forward", dtype, width) for dtype in ("float32", "float64") for width in (64, 128)),
        ("decode", "bfloat16", 128),
    ]
    for formula in (FORMULAS if dtype == "bfloat16" else ["causal"])
]


def check(case, most=None):
    """Kernels take no more than recorded, and nothing that their GPU has not."""
    recorded = json.loads(FILE.read_text())[str(case)]
    found = list(case.kernels(most))
    assert [kernel.name for kernel in found] == list(recorded)[:most]
    for kernel in found:
        registers, spilled, shared = recorded[kernel.name]
        assert kernel.registers <= registers, str(kernel)
        assert kernel.spilled <= spilled, str(kernel)
        assert kernel.shared <= shared <= SHARED[case.target] << 10, str(kernel)


@pytest.mark.parametrize("target", TARGETS)
def test_what_the_forward_kernel_takes(target):
    check(Case(target, "forward", "bfloat16", 64, "causal"), most=1)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_all_kernels_take(case):
    check(case)


def test_all_that_is_recorded_is_checked():
    assert list(json.loads(FILE.read_text())) == [str(case) for case in CASES]


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


if __name__ == "__main__":
    found = {}
    for case in CASES:
        found[str(case)] = {one.name: [one.registers, one.spilled, one.shared] for one in case.kernels()}
        print(case, found[str(case)], flush=True)
    FILE.write_text(json.dumps(found).replace("}, ", "},\n ") + "\n")
