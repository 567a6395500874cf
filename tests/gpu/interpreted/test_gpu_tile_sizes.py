"""Other tile sizes than the default ones, and the bench's GPU workloads computed by them."""

import dataclasses
from importlib import import_module

import pytest
import torch

import sightline.call.problem
from on_device import DEVICE, OnDevice
from sightline import i, j
from sightline.call.kernel import GivenGradients
from sightline.call.problem import make_problem
from sightline.gpu import Triton, configurations
from sightline.gpu.configurations import Configuration
from sightline.reference.testing import assert_conforms
from triton_interpreter import INTERPRETED

KERNEL = Triton("interpreter") if INTERPRETED else Triton()


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Let no problem count as small, so that the plan reads the mask."""
    monkeypatch.setattr(sightline.call.problem, "MAX_SMALL_FLOPS", -1)


def arrays(n=40, m=40):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1, 1, length, 16, generator=generator).to(DEVICE) for length in (n, m, m)]


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("keys", [16, 32])
def test_every_size_is_right(rows, keys, monkeypatch):
    monkeypatch.setattr(configurations, "find_configuration", lambda *_: Configuration(rows, keys, 1, 1))
    assert_conforms(KERNEL.run, make_problem(*arrays(), mask=(i >= j) & (i - j < 23)))


def test_results_through_on_device_are_the_same():
    """Tables, statistics and gradients through `OnDevice`, which tests on a GPU use."""
    if not INTERPRETED:
        pytest.skip("on a GPU every other test uses OnDevice")
    query, key, value = arrays()
    order = sightline.table(torch.arange(40))
    options = {"mask": order[i] >= j, "score": sightline.s * sightline.table(torch.ones(1))[sightline.h]}
    problem = make_problem(query, key, value, see=[sightline.lse(), sightline.mass(order[j] < 9)], **options)
    answers = [kernel.run(problem) for kernel in (KERNEL, OnDevice(KERNEL, "cpu"))]
    assert all(torch.equal(x.cpu(), y) for x, y in zip(*(answer.seen for answer in answers), strict=True))
    given = GivenGradients(torch.ones_like(query), None, (answers[1].output, answers[1].lse), range(2))
    found = [kernel.backward(problem, given) for kernel in (KERNEL, OnDevice(KERNEL, "cpu"))]
    assert torch.equal(found[0].key, found[1].key)
    assert torch.equal(found[0].tables[1], found[1].tables[1])


def test_the_bench_times_the_kernel_itself(monkeypatch):
    """`python -m benchmarks --device cuda` as on a GPU, except for the clock, the sizes and the kernels."""
    if not INTERPRETED:
        pytest.skip("on a GPU the bench itself runs")
    from benchmarks import cuda, cuda_problems
    from benchmarks.measure import measure
    from fake_cuda import Runtime

    dispatch = import_module("sightline.api.kernels")
    ours = [KERNEL if isinstance(kernel, Triton) else kernel for kernel in dispatch.KERNELS]
    monkeypatch.setattr(dispatch, "KERNELS", tuple(ours))
    for name, size in {"MATRIX_SIZE": 64, "COPY_BYTES": 1 << 16, "FLUSH_BYTES": 1 << 10}.items():
        monkeypatch.setattr(cuda, name, size)
    device = cuda.Gpu(1, device="cpu", runtime=Runtime())
    device.pause = 0.0
    (problem,) = (each for each in cuda_problems.PROBLEMS if each.name == "forward window")
    sizes = {"n": 33, "m": 33, "H": 1, "G": 1, "B": 1, "d_k": 16, "d_v": 16}
    problem = dataclasses.replace(problem, device="cpu", contenders=problem.contenders[:1], **sizes)
    (found,) = measure(problem, device, 0.01, is_quick=True)
    assert found.seconds, found.reason
    assert found.error <= 1
