"""Tests that need a GPU: equal bits on every run, no host synchronisation, CUDA graphs, streams and compilation.

Only `pytest -m soak tests/gpu/test_cuda_device.py` runs the Hopper kernel, because that kernel could deadlock.
"""

import subprocess
import sys

import pytest
import torch

import sightline
from sightline import entropy, i, j, lse

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
CASES = {
    "plain": {},
    "causal": {"mask": i >= j},
    "window, capped": {"mask": (i >= j) & (i - j < 77), "score": sightline.softcap(20.0)},
    "dropped": {"mask": i >= j, "dropout": 0.2, "seed": 7},
}


def arrays(grad=False, n=1500):
    torch.manual_seed(3)
    shape = (2, 4, n, 64)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]


def output_and_gradients(options, n):
    """Return the output, lse, and the gradients of a fixed weighted sum of output and lse."""
    given = arrays(grad=True, n=n)
    output, (norm,) = sightline.attention(*given, see=[lse()], kernel="triton", **options)
    torch.manual_seed(4)
    loss = (output * torch.randn_like(output)).sum() + norm.sum()
    return [output, norm, *torch.autograd.grad(loss, given)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [300, 1500], ids=["small", "large"])
def test_every_run_gives_the_same_bits(name, n):
    first = output_and_gradients(CASES[name], n)
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(first, output_and_gradients(CASES[name], n), strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if name != "dropped"])
def test_a_cached_schedule_needs_no_host_synchronisation(name):
    given, options = arrays(), CASES[name]
    once = sightline.attention(*given, kernel="triton", **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = sightline.attention(*given, kernel="triton", **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(once, again)


def test_a_replayed_cuda_graph_reads_the_current_inputs():
    query, key, value = arrays()
    options = {"mask": i >= j, "kernel": "triton"}
    for _ in range(2):
        sightline.attention(query, key, value, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sightline.attention(query, key, value, **options)
    query.normal_()
    graph.replay()
    assert torch.equal(captured, sightline.attention(query, key, value, **options))


def test_the_mask_of_a_small_problem_is_not_read():
    given, visible = arrays(n=200), torch.rand(2, 1, 1, 200, device="cuda") < 0.7
    expected = sightline.attention(*given, mask=visible, kernel="triton")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [sightline.attention(*given, mask=visible.clone(), kernel="triton") for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, expected) for one in found)


def test_streams_and_devices_give_the_same_bits():
    given = arrays()
    first = sightline.attention(*given, mask=i >= j, kernel="triton")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = sightline.attention(*given, mask=i >= j, kernel="triton")
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(first, second)
    if torch.cuda.device_count() > 1:
        other = sightline.attention(*(x.to("cuda:1") for x in given), mask=i >= j, kernel="triton")
        assert torch.equal(first, other.to(first.device))


def test_compiled_and_under_autocast():
    def step(query, key, value):
        return sightline.attention(query, key, value, mask=lambda b, h, i, j: i >= j)

    given = arrays()
    once = step(*given)
    assert torch.equal(torch.compile(step, fullgraph=True)(*given), once)
    wide = [x.float() for x in given]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(step(*wide), once)


def test_the_chosen_kernels():
    given = arrays()
    assert sightline.explain(*given, mask=i >= j).kernel == "triton"
    assert sightline.explain(*given, see=[entropy()]).kernel == "triton"
    assert sightline.explain(*(x.detach().requires_grad_() for x in given)).kernel == "triton"
    assert sightline.explain(*given).kernel in ("fused", "triton")
    assert sightline.explain(*given).reasons["fused"]


HOPPER = """
import torch
import sightline.problem
from sightline import causal, softcap, window
from sightline.gpu import Triton
from sightline.gpu.tuning.selection import candidates, try_sizes
from sightline.problem import make_problem
from sightline.testing import assert_conforms

torch.manual_seed(5)
sightline.problem.MAX_SMALL_FLOPS = -1  # small problems have another kernel
for width in (64, 128):
    given = [torch.randn(1, 2, n, width, dtype=torch.bfloat16).to(DEVICE) for n in (300, 500, 500)]
    for options in ({}, {"mask": causal()}, {"mask": window(77), "score": softcap(20.0)}):
        problem = make_problem(*given, **options)
        tried = [each for each in candidates("forward", problem, "sm_90", True) if each.specialised]
        assert tried
        for sizes in tried:
            with try_sizes({"forward": sizes}) as trial:
                CHECK(Triton("sm_90").run, problem)
            assert trial.requested == {"forward": sizes}
"""
TIME_LIMIT = 600  # seconds, mostly for the compiler


@pytest.mark.soak
def test_the_hopper_kernel_conforms():
    """Run the kernel in a new process, which is stopped after `TIME_LIMIT` in case of a deadlock."""
    if torch.version.hip or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    program = HOPPER.replace("DEVICE", "'cuda'").replace("CHECK", "assert_conforms")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 0, done.stderr[-10_000:]
