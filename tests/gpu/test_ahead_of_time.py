"""Tests of ahead-of-time compilation, and upper bounds on the resource use of compiled kernels.

`recorded_kernels.json` holds the resource use of each kernel with triton 3.9: registers per thread, spilled bytes per
thread, and bytes of shared memory. A kernel that needs more of a resource is slower, or does not run at all.
`python tests/gpu/test_ahead_of_time.py` adds missing cases to the file.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

from sightline import attention, causal, entropy, pooled, received, softcap, top_k, window
from sightline.call.problem import make_problem
from sightline.errors import ParameterError
from sightline.statistics import StatisticGradients

pytest.importorskip("triton")

from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

from ahead_of_time import SHARED_MEMORY_BYTES, TARGETS, compile_kernels
from sightline.call.kernel import GivenGradients
from sightline.gpu import Triton
from sightline.gpu.configurations import Configuration
from sightline.gpu.launch.backward import backward
from sightline.gpu.launch.forward import forward_launches, run

FILE = Path(__file__).with_name("recorded_kernels.json")
FORMULAS = {"plain": {}, "causal": {"mask": causal()}, "capped window": {"mask": window(256), "score": softcap(20.0)}}
STATISTICS = {"entropy": [entropy()], "top_k": [top_k(8)], "received": [received()], "pooled": [pooled(16, 16)]}


@dataclass(frozen=True)
class Case:
    """The kernels of one kind of problem for one GPU."""

    target: str
    work: str
    dtype: str
    width: int
    formula: str

    def __str__(self):
        return f"{self.target} {self.work} {self.dtype} {self.width} {self.formula}"

    def problem(self):
        dtype = getattr(torch, self.dtype)
        n, m = {"decode": (1, 1000)}.get(self.work, (100, 100) if "small" in self.work else (1000, 1000))
        query = torch.zeros(2, 8, n, self.width, dtype=dtype)
        key = torch.zeros(2, 2, m, self.width, dtype=dtype)
        return make_problem(query, key, key, see=STATISTICS.get(self.work, []), **FORMULAS[self.formula])

    def launch(self):
        problem = self.problem()
        if "backward" in self.work:
            lse = torch.zeros(problem.query.shape[:-1], dtype=torch.float64)
            backward(problem, problem.query, None, (problem.query, lse), (), StatisticGradients(), self.target)
        else:
            run(problem, self.target)

    def kernels(self):
        return compile_kernels(self.launch, self.target)


CASES = [
    Case(target, *work)
    for target in TARGETS
    for work in [
        *(("forward", "bfloat16", width, "causal") for width in (64, 128, 256)),
        *(("forward", "bfloat16", 128, formula) for formula in ("plain", "capped window")),
        ("forward", "float32", 128, "causal"),
        ("forward", "float64", 64, "causal"),
        *(("decode", "bfloat16", 128, formula) for formula in ("plain", "causal")),
        *(("backward", "bfloat16", width, "causal") for width in (64, 128)),
        ("backward", "float32", 64, "causal"),
        *((work, "bfloat16", 64, "causal") for work in STATISTICS),
        *(("small forward", "bfloat16", width, "causal") for width in (64, 256)),
        *(("small backward", "bfloat16", width, "causal") for width in (64, 128)),
    ]
]


def is_quick(case):
    return (case.work, case.dtype, case.width) == ("forward", "bfloat16", 64)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if is_quick(case) else pytest.mark.soak) for case in CASES], ids=str
)
def test_resources_of_kernels(case):
    """No kernel needs more resources than recorded, or more shared memory than the GPU has."""
    found = case.kernels()
    recorded = json.loads(FILE.read_text())[str(case)]
    assert [kernel.name for kernel in found] == list(recorded)
    for kernel in found:
        registers, spilled, shared = recorded[kernel.name]
        assert kernel.registers <= registers, str(kernel)
        assert kernel.spilled <= spilled, str(kernel)
        assert kernel.shared <= shared <= SHARED_MEMORY_BYTES[case.target], str(kernel)


def test_every_recorded_case_is_tested():
    assert list(json.loads(FILE.read_text())) == [str(case) for case in CASES]


def test_no_kernel_runs_and_the_driver_is_restored():
    problem = make_problem(*(torch.ones(1, 1, 20, 16, dtype=torch.float16) for _ in range(3)))
    output = torch.full((1, 1, 20, 16), 7.0, dtype=torch.float16)
    lse = torch.full((1, 1, 20), 7.0, dtype=torch.float64)

    def launch():
        for call in forward_launches(problem, output, lse, "sm_80"):
            call.launch()
        raise ZeroDivisionError

    before = active_driver()
    with pytest.raises(ZeroDivisionError):
        compile_kernels(launch, "sm_80")
    assert active_driver() is before
    assert (output == 7).all()
    assert (lse == 7).all()


def active_driver():
    """Return Triton's driver; None without a GPU."""
    try:
        return driver.active
    except RuntimeError:
        return None


def forward_launch(stages):
    """Return a forward launch of small tiles for sm_80."""
    x = torch.ones(1, 1, 20, 128, dtype=torch.float16).expand(64, 64, 20, 128)
    lse, sizes = torch.zeros(x.shape[:-1], dtype=torch.float64), Configuration(16, 16, warps=1, stages=stages)
    with mock.patch("sightline.gpu.configurations.find_configuration", return_value=sizes):
        return next(forward_launches(make_problem(x, x, x), x, lse, "sm_80"))


def test_a_kernel_that_exceeds_shared_memory_raises(monkeypatch):
    monkeypatch.setitem(SHARED_MEMORY_BYTES, "sm_80", 1000)
    with pytest.raises(OutOfResources, match=r"shared memory, Required: \d+, Hardware limit: 1000"):
        compile_kernels(forward_launch(stages=1).launch, "sm_80")


@pytest.mark.wide
def test_stages_are_reduced_to_fit_shared_memory_and_only_the_last_kernel_is_returned(monkeypatch):
    (large,), (small,) = (compile_kernels(forward_launch(stages).launch, "sm_80") for stages in (4, 2))
    assert large.shared > small.shared
    monkeypatch.setitem(SHARED_MEMORY_BYTES, "sm_80", small.shared)
    (reduced,) = compile_kernels(forward_launch(stages=4).launch, "sm_80")
    assert (reduced.text, reduced.shared) == (small.text, small.shared)


def test_the_backward_kernels_are_compiled_for_tensors_in_host_memory():
    x = torch.ones(1, 1, 20, 16, dtype=torch.float16)
    saved = x, torch.zeros(1, 1, 20, dtype=torch.float64)
    found = compile_kernels(
        lambda: Triton("sm_90").backward(make_problem(x, x, x), GivenGradients(x, None, saved, ())), "sm_90"
    )
    assert {"backward_queries", "backward_keys"} <= {kernel.name for kernel in found}


def test_a_call_without_launches_or_for_another_or_an_unknown_gpu_is_an_error():
    x = torch.ones(1, 1, 20, 16, dtype=torch.float16)
    with pytest.raises(ParameterError, match="launched no kernel") as caught:
        compile_kernels(lambda: attention(x, x, x), "sm_90")
    assert "Triton('sm_90').run(problem)" in caught.value.cure
    with pytest.raises(ParameterError, match="sizes of sm_80, compiled for sm_90"):
        compile_kernels(lambda: Triton("sm_80").run(make_problem(x, x, x)), "sm_90")
    with pytest.raises(ParameterError, match="one of 'sm_80'"):
        compile_kernels(lambda: None, "sm_42")


if __name__ == "__main__":
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {}
    for case in CASES:
        if str(case) not in recorded:
            recorded[str(case)] = {one.name: [one.registers, one.spilled, one.shared] for one in case.kernels()}
            print(case, recorded[str(case)], flush=True)
            text = json.dumps({str(case): recorded[str(case)] for case in CASES if str(case) in recorded})
            FILE.write_text(text.replace("}, ", "},\n ") + "\n")
