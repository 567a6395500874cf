"""Tests that need a GPU: equal bits on every run, no host synchronisation, CUDA graphs, streams and compilation."""

import warnings
from contextlib import contextmanager

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


@contextmanager
def without_synchronisation():
    """Make it an error to wait for the GPU in the block."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that this mode does not find every wait
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
    with without_synchronisation():
        again = sightline.attention(*given, kernel="triton", **options)
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
    with without_synchronisation():
        found = [sightline.attention(*given, mask=visible.clone(), kernel="triton") for _ in range(2)]
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler loads
def test_compiled_and_under_autocast():
    def step(query, key, value):
        return sightline.attention(query, key, value, mask=lambda b, h, i, j: i >= j)

    given = arrays()
    once = step(*given)
    assert torch.equal(torch.compile(step, fullgraph=True)(*given), once)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(step(*(x.float() for x in given)), once)


def test_the_chosen_kernels():
    given = arrays()
    assert sightline.explain(*given, mask=i >= j).kernel == "triton"
    assert sightline.explain(*given, see=[entropy()]).kernel == "triton"
    assert sightline.explain(*(x.detach().requires_grad_() for x in given)).kernel == "triton"
    assert sightline.explain(*given).kernel in ("fused", "triton")
    assert sightline.explain(*given).reasons["fused"]
