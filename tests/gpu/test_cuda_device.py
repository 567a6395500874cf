"""What only a GPU can show: the same bits on every run, no waiting for the host, CUDA graphs, streams, compilation.

Hopper's kernel runs only if asked, `pytest -m soak tests/gpu/test_cuda_device.py`: it may wait for ever.
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


def arrays(grad=False, n=700):
    torch.manual_seed(3)
    shape = (2, 4, n, 64)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]


def both(options):
    """Output, lse, and gradients of a fixed sum of both."""
    given = arrays(grad=True)
    output, (norm,) = sightline.attention(*given, see=[lse()], kernel="triton", **options)
    torch.manual_seed(4)
    loss = (output * torch.randn_like(output)).sum() + norm.sum()
    return [output, norm, *torch.autograd.grad(loss, given)]


@pytest.mark.parametrize("name", CASES)
def test_every_run_gives_the_same_bits(name):
    first = both(CASES[name])
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(first, both(CASES[name]), strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if name != "dropped"])
def test_nobody_waits_in_a_call_whose_mask_was_seen(name):
    given, options = arrays(), CASES[name]
    once = sightline.attention(*given, kernel="triton", **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = sightline.attention(*given, kernel="triton", **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(once, again)


def test_a_call_is_captured_in_a_graph_and_reads_what_is_there_when_replayed():
    query, key, value = arrays()
    options = {"mask": i >= j, "kernel": "triton"}
    for _ in range(2):
        sightline.attention(query, key, value, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = sightline.attention(query, key, value, **options)
    query.normal_()
    graph.replay()
    assert torch.equal(held, sightline.attention(query, key, value, **options))


def test_streams_and_devices():
    given = arrays()
    first = sightline.attention(*given, mask=i >= j, kernel="triton")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = sightline.attention(*given, mask=i >= j, kernel="triton")
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(first, second)
    if torch.cuda.device_count() > 1:
        there = sightline.attention(*(x.to("cuda:1") for x in given), mask=i >= j, kernel="triton")
        assert torch.equal(first, there.to(first.device))


def test_compiled_and_under_autocast():
    def step(query, key, value):
        return sightline.attention(query, key, value, mask=lambda b, h, i, j: i >= j)

    given = arrays()
    once = step(*given)
    assert torch.equal(torch.compile(step, fullgraph=True)(*given), once)
    wide = [x.float() for x in given]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(step(*wide), once)


def test_who_answers():
    given = arrays()
    assert sightline.explain(*given, mask=i >= j).kernel == "triton"
    assert sightline.explain(*given, see=[entropy()]).kernel == "triton"
    assert sightline.explain(*(x.detach().requires_grad_() for x in given)).kernel == "triton"
    assert sightline.explain(*given).kernel in ("fused", "triton")
    assert sightline.explain(*given).reasons["fused"]


HOPPER = """
import torch
from sightline import causal, softcap, window
from sightline.gpu import Triton
from sightline.gpu.tuning.selection import candidates, try_sizes
from sightline.problem import make_problem
from sightline.testing import assert_conforms

torch.manual_seed(5)
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
AT_MOST = 600  # seconds of it, most of them the compiler's


@pytest.mark.soak
def test_the_kernel_for_hopper_is_right():
    """In a process of its own, which is ended where a barrier is waited for in vain."""
    if torch.version.hip or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of that kind")
    program = HOPPER.replace("DEVICE", "'cuda'").replace("CHECK", "assert_conforms")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=AT_MOST)
    assert done.returncode == 0, done.stderr[-10_000:]
