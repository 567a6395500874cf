"""Tests of ahead-of-time compilation, and of what the compiler makes of kernels with the tile sizes of the table.

`recorded_kernels.json` holds the resource use of each kernel with triton 3.9: registers per thread, spilled bytes per
thread, bytes of shared memory, and serialised products. A kernel that needs more is slower, or does not run at all.
`python tests/gpu/test_ahead_of_time.py` adds missing cases to the file.
"""

import json
import re
import subprocess
from dataclasses import dataclass
from operator import gt
from pathlib import Path
from unittest import mock

import pytest
import torch

from sightline import attention, causal, entropy, pooled, received, softcap, top_k, window
from sightline.call.problem import make_problem
from sightline.errors import ParameterError

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

from ahead_of_time import SHARED_MEMORY_BYTES, TARGETS, compile_kernels
from sightline.call.kernel import GivenGradients
from sightline.gpu import Triton
from sightline.gpu.configurations import Configuration
from sightline.gpu.launch.backward import backward
from sightline.gpu.launch.forward import forward_launches, run
from sightline.gpu.launch.launches import KernelLaunch

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
    key_heads: int = 2  # for 8 query heads
    length: int = 1000  # the number of queries and of keys, unless `work` says another

    def __str__(self):
        return f"{self.target} {self.work} {self.dtype} {self.width} {self.formula}"

    def problem(self):
        dtype = getattr(torch, self.dtype)
        length = 100 if "small" in self.work else self.length
        n, m = 1 if self.work == "decode" else length, length
        query = torch.zeros(2, 8, n, self.width, dtype=dtype)
        key = torch.zeros(2, self.key_heads, m, self.width, dtype=dtype)
        return make_problem(query, key, key, see=STATISTICS.get(self.work, []), **FORMULAS[self.formula])

    def launch(self):
        problem = self.problem()
        if "backward" in self.work:
            lse = torch.zeros(problem.query.shape[:-1], dtype=torch.float64)
            backward(problem, GivenGradients(problem.query, None, (problem.query, lse)), self.target)
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
QUICK = [Case(target, "forward", "bfloat16", 64, "causal") for target in TARGETS]


def measure(kernels):
    """Return the resource use of each kernel, and the number of its products that ptxas serialised."""
    return {one.name: [one.registers, one.spilled, one.shared, one.remarks.count("serialized")] for one in kernels}


def find_excess(case, kernels):
    """Return the kernels that need more of a resource than recorded."""
    found, recorded = measure(kernels), json.loads(FILE.read_text())[str(case)]
    assert list(found) == list(recorded)
    return [(name, found[name], most) for name, most in recorded.items() if any(map(gt, found[name], most))]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.soak) for case in CASES], ids=str
)
def test_no_kernel_needs_more_than_recorded(case):
    assert not find_excess(case, case.kernels())


def count_spills_in_loops(kernel, folder):
    """Return the number of accesses to spilled numbers in the innermost loops that multiply matrices, for NVIDIA."""
    file = folder / "kernel.cubin"
    file.write_bytes(kernel.binary)
    command = [knobs.nvidia.nvdisasm.path, "-c", file]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    labels = {line.strip(): place for place, line in enumerate(lines)}
    jumps = [(re.search(r"BRA.*`\((.*?)\)", line), place) for place, line in enumerate(lines)]
    loops = [(labels[f"{jump[1]}:"], place) for jump, place in jumps if jump and labels[f"{jump[1]}:"] < place]
    outer = {one for one in loops for other in loops if one[0] <= other[0] and other[1] <= one[1] and one != other}
    bodies = ["\n".join(lines[start:stop]) for start, stop in set(loops) - outer]
    products = [body for body in bodies if re.search(r"\bHG?MMA\b", body)]
    assert products, f"no loop of {kernel.name} multiplies matrices"
    return len(re.findall(r"\b(?:LDL|STL)\b", "\n".join(products)))


def find_slow_kernels(kernels, folder):
    """Return the kernels whose loops spill or serialise products. NaN-safe ones, which are rarely needed, may spill."""
    found = [one for one in kernels if one.name in ("forward", "backward_queries", "backward_keys")]
    assert found
    return [one.name for one in found if "serialized" in one.remarks or count_spills_in_loops(one, folder)]


@pytest.mark.wide
@pytest.mark.parametrize("work", ["forward", "backward"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("formula", ["plain", "causal"])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_loops_neither_spill_nor_serialise_products(work, width, formula, key_heads, tmp_path):
    case = Case("sm_90", work, "bfloat16", width, formula, key_heads, length=1024)
    assert not find_slow_kernels(case.kernels(), tmp_path)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case.target == "sm_90" else pytest.mark.wide) for case in QUICK], ids=str
)
def test_tiles_that_are_too_large_are_seen(case, tmp_path, monkeypatch):
    assert case.target != "sm_90" or not find_slow_kernels(case.kernels(), tmp_path)
    sizes = Configuration(128, 128, warps=4, stages=2)
    monkeypatch.setattr("sightline.gpu.configurations.find_configuration", lambda *_: sizes)
    kernels = case.kernels()
    assert find_excess(case, kernels)
    assert case.target != "sm_90" or find_slow_kernels(kernels, tmp_path)


def test_no_kernel_runs_and_the_driver_is_restored():
    problem = make_problem(*(torch.ones(1, 1, 20, 16, dtype=torch.float16) for _ in range(3)))
    output = torch.full((1, 1, 20, 16), 7.0, dtype=torch.float16)
    lse = torch.full((1, 1, 20), 7.0, dtype=torch.float64)

    def launch():
        for call in forward_launches(problem, output, lse, "sm_80"):
            call.launch()
        raise ZeroDivisionError

    before = driver._active
    with pytest.raises(ZeroDivisionError):
        compile_kernels(launch, "sm_80")
    assert driver._active is before
    assert (output == 7).all()
    assert (lse == 7).all()


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
    tried, options, launch = [], KernelLaunch.options, forward_launch(stages=4)
    monkeypatch.setattr(KernelLaunch, "options", lambda self, stages: tried.append(stages) or options(self, stages))
    (reduced,) = compile_kernels(lambda: [launch.launch() for _ in range(2)], "sm_80")
    assert tried == [4, 3, 2, 2]
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
    found = {str(case): recorded.get(str(case)) or measure(case.kernels()) for case in CASES}
    FILE.write_text(json.dumps(found).replace("}, ", "},\n ") + "\n")
