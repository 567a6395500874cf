"""`python -m benchmarks --device cuda` on the CPU: a stand-in for `torch.cuda` has the clock."""

import time
from dataclasses import replace

import pytest
import torch

from benchmarks import cuda
from benchmarks.__main__ import PROBLEMS, main
from benchmarks.contenders import SIGHTLINE
from benchmarks.core import Call
from benchmarks.cuda import Gpu
from benchmarks.cuda_problems import TOKENS, WITHOUT_STATISTICS
from benchmarks.measure import measure
from fake_cuda import Runtime

pytestmark = pytest.mark.sampled(one_in=4)

ON_CPU = {
    problem.name: replace(
        problem,
        device="cpu",
        d_k=32,
        d_v=32,
        contenders=tuple(
            replace(contender, prepare=SIGHTLINE.prepare) if contender.is_ours else contender
            for contender in problem.contenders
            if contender.name != "FlexAttention"  # it compiles for long
        ),
    )
    for problem in PROBLEMS["cuda"]
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Problem sizes, peaks and flushes that the CPU computes quickly."""
    monkeypatch.setattr("benchmarks.attention.SMALL_LENGTH", 40)
    for name, size in {"MATRIX_SIZE": 64, "COPY_BYTES": 1 << 16, "FLUSH_BYTES": 1 << 10}.items():
        monkeypatch.setattr(cuda, name, size)


def make_device():
    """A `Gpu` whose tensors are on the CPU."""
    device = Gpu(1, device="cpu", runtime=Runtime())
    device.pause = 0.0
    return device


def test_problems_have_the_same_number_of_tokens_and_our_own_kernel():
    for problem in PROBLEMS["cuda"]:
        assert problem.device == "cuda"
        assert problem.dtype == "bfloat16"
        assert problem.name == "decode" or problem.B * problem.n == TOKENS
        assert problem.contenders[0].prepare.keywords["kernel"] == "triton"
    assert WITHOUT_STATISTICS.prepare.keywords["kernel"] == "triton"


@pytest.mark.parametrize("name", ["forward causal n8192", "backward full n8192", "see received", "decode"])
def test_problems_run(name):
    """torch has its flash kernel for CPUs too, so this peer runs as on a GPU."""
    found = {each.contender: each for each in measure(ON_CPU[name].small(), make_device(), 0.01, is_quick=True)}
    assert found["Sightline"].seconds, found["Sightline"].reason
    assert found["Sightline"].error <= 1
    assert found["peak"].seconds
    assert found["Sightline"].memory is None
    if "n8192" in name:
        assert found["torch, flash"].error <= 1
        assert found["torch, cuDNN"].reason


def test_calls_are_timed_between_events():
    calls = []

    def run(_):
        calls.append(1)
        time.sleep(2e-3)

    assert make_device().time(Call(run), 3) >= 2e-3
    assert len(calls) == 1 + 3


def test_without_a_gpu_the_error_has_a_cure(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert "sees no CUDA device" in error
    assert "cure:" in error
