"""Gradients are finite differences, training equals that on one process; transfers and memory are measured."""

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.autograd import gradcheck
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import sightline
import sightline.torch.distributed as distributed
from benchmarks.peak_memory import peak_memory
from distributed_calls import short_blocks
from distributed_ranks import Ranks
from sightline import h, i, j, p, s, table
from sightline.errors import ParameterError
from sightline.torch.distributed import ring

pytestmark = pytest.mark.wide
EXAMPLE = Path(__file__).parents[3] / "examples" / "train_distributed.py"


class _Replicated(torch.autograd.Function):
    """A tensor that every rank has whole; its gradient is the mean of the gradients of all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total / dist.get_world_size(ctx.group), None


def finite_differences(group, layout, method):
    """Check the gradients of shard → attention → unshard as a function of the whole tensors, tables and sinks.

    Each of the R ranks computes the loss of the whole output, so the total loss is R times the loss of one rank. The
    mean of the ranks' gradients is therefore the gradient of the function.
    """
    torch.manual_seed(0)

    def call(query, key, value, bias, sinks):
        inputs = [_Replicated.apply(x, group) for x in (query, key, value, bias, sinks)]
        options = {
            "mask": (i >= j - 1) & (i != 1),
            "score": sightline.softcap(2.0).with_scores(s) + table(inputs[3])[h, j],
        }
        options |= {"dropout": 0.3, "seed": 1, "sinks": inputs[4], "group": group, "layout": layout, "method": method}
        see = [
            sightline.lse().mean("heads"),
            sightline.entropy(),
            sightline.mass((i + j) % 2 == h),
            sightline.max_score(),
        ]
        if method == "heads":
            see += [sightline.received(), sightline.pooled(2, 2)]
        shards = [distributed.shard(x, group=group, layout=layout) for x in inputs[:3]]
        output, seen = distributed.attention(*shards, see=see, **options)
        found = [distributed.unshard(output, group=group, layout=layout)]
        for statistic, one in zip(see, seen, strict=True):
            array = one[0] if isinstance(one, tuple) else one
            array = torch.where(torch.isinf(array), 0.0, array)
            if statistic.name == "pooled":
                found.append(array / dist.get_world_size(group))
            else:
                found.append(distributed.unshard(array, group=group, layout=layout, axis=-1))
        return found

    shapes = [(1, 4, 10, 2), (1, 2, 9, 2), (1, 2, 9, 2), (4, 9), (4,)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    with short_blocks(4):
        return bool(gradcheck(call, inputs, fast_mode=True))


@pytest.mark.parametrize(
    ("layout", "method"),
    [("contiguous", "ring"), ("zigzag", "ring"), pytest.param("zigzag", "heads", marks=pytest.mark.soak)],
)
def test_gradients_equal_finite_differences(ranks, layout, method):
    assert ranks.run(finite_differences, layout, method, size=2) == [True, True]


def penalise_gradients(group, method):
    """Return whether the gradients of the squared gradients are those of one process, of query, key and value."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 12, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    shards = [distributed.shard(x, group=group).requires_grad_() for x in whole]
    inputs = [x.requires_grad_() for x in whole]

    def differentiate(output, given):
        first = torch.autograd.grad(output.square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), given)

    expected = differentiate(sightline.attention(*inputs, mask=i >= j), inputs)
    output = distributed.attention(*shards, mask=i >= j, group=group, method=method)
    found = differentiate(output, shards)
    return [torch.allclose(x, distributed.shard(y, group=group)) for x, y in zip(found, expected, strict=True)]


def test_second_derivatives_by_heads(ranks):
    assert ranks.run(penalise_gradients, "heads", size=2) == [[True] * 3] * 2


def test_second_derivatives_by_the_ring_raise_an_error(ranks):
    with pytest.raises(ParameterError, match='method="heads"'):
        ranks.run(penalise_gradients, "ring", size=2)


def differentiate_some_results(group, method, read):
    """Return this rank's gradients of a loss that reads one result, `read[rank]`: "output", "entropy" or "lse"."""
    whole = torch.randn(3, 1, 4, 16, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    shards = [distributed.shard(x, group=group).requires_grad_() for x in whole]
    see = {"entropy": sightline.entropy(), "lse": sightline.lse()}
    output, seen = distributed.attention(*shards, mask=i >= j, see=see, group=group, method=method)
    loss = ({"output": output} | seen)[read[dist.get_rank(group)]].square().sum()
    return list(torch.autograd.grad(loss, shards))


@pytest.mark.parametrize("read", [("output", "entropy"), ("lse", "output")], ids="-".join)
@pytest.mark.parametrize("method", ["ring", "heads"])
def test_losses_of_ranks_may_read_different_results(ranks, method, read):
    found = ranks.run(differentiate_some_results, method, list(read), size=2)
    whole = torch.randn(3, 1, 4, 16, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    given = [x.requires_grad_() for x in whole]
    see = {"entropy": sightline.entropy(), "lse": sightline.lse()}
    output, seen = sightline.attention(*given, mask=i >= j, see=see)
    results = {"output": output, "entropy": seen["entropy"][..., None], "lse": seen["lse"][..., None]}
    loss = sum(results[name].chunk(2, dim=-2)[rank].square().sum() for rank, name in enumerate(read))
    for shards, expected in zip(zip(*found, strict=True), torch.autograd.grad(loss, given), strict=True):
        torch.testing.assert_close(torch.cat(shards, dim=-2), expected, rtol=1e-4, atol=1e-5)


def differentiate_largest_scores(group):
    """Check the gradient of the largest scores beside sinks so large that every weight underflows in float32.

    The gradient of the score q · k / √d_k by q is k / √d_k; it has no rounding for d_k = 4.
    """
    whole = torch.randn(3, 1, 1, 8, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    query, key, value = (distributed.shard(x, group=group).requires_grad_() for x in whole)
    options = {"sinks": torch.full((1,), 200.0), "see": sightline.max_score(), "group": group}
    _, (largest,) = distributed.attention(query, key, value, **options)
    (gradient,) = torch.autograd.grad(largest.score.sum(), query)
    return torch.equal(gradient[0, 0], whole[1][0, 0, largest.where[0, 0]] / 2)


def test_largest_scores_beside_large_sinks_have_a_gradient(ranks):
    assert ranks.run(differentiate_largest_scores, size=2) == [True, True]


def differentiate_distances(group, n, m, visible):
    """Return whether the gradients of mean distances are those of one process. Keys from `visible` on are NaN."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, length, 4, generator=generator, dtype=torch.float64) for length in (n, m, m)]
    whole[1][:, :, visible:] = whole[2][:, :, visible:] = float("nan")
    options = {"mask": (i >= j) & (i < visible) & (j < visible), "see": [sightline.sum(p * abs(i - j), over=j)]}

    def gradients(attend, arrays, **others):
        sinks = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
        given = [*[x.clone().requires_grad_() for x in arrays], sinks]
        output, (distances,) = attend(*given[:3], sinks=sinks, **options, **others)
        return torch.autograd.grad(distances.sum() + 0 * output.sum(), given)

    *expected, of_sinks = gradients(sightline.attention, whole)
    *found, part = gradients(distributed.attention, [distributed.shard(x, group=group) for x in whole], group=group)
    dist.all_reduce(part, group=group)
    shards = [*[distributed.shard(x, group=group) for x in expected], of_sinks]
    return [torch.allclose(x, y) for x, y in zip([*found, part], shards, strict=True)]


@pytest.mark.parametrize(("n", "m", "visible"), [(12, 2, 12), (127, 129, 70)], ids=["a rank without keys", "NaN"])
def test_statistics_of_a_ring_have_the_gradients_of_one_process(ranks, n, m, visible):
    assert ranks.run(differentiate_distances, n, m, visible, size=2) == [[True] * 4] * 2


def differentiate_twice(group):
    """Return the second derivative, for this rank's shard, of Σ x³ of the whole tensor, added over the ranks."""
    x = torch.full((4, 2), 1.0 + dist.get_rank(group), requires_grad=True)
    loss = distributed.unshard(x, group=group).pow(3).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def test_unshard_has_a_second_derivative(ranks):
    """Each of the two ranks has the whole loss, so both derivatives are sums of two: 2 · 6 x."""
    for rank, found in enumerate(ranks.run(differentiate_twice, size=2)):
        torch.testing.assert_close(found, torch.full((4, 2), 12.0 * (1 + rank)))


def load_example():
    """Return examples/train_distributed.py as a module of its own."""
    spec = importlib.util.spec_from_file_location("train_distributed", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differ_by_rounding(losses, others, depth):
    """True if losses differ by `depth` roundings in a step at most: consecutive ones, each of half a unit."""
    return (abs(losses - others) <= depth * np.spacing(others.astype(np.float32))).all()


@pytest.fixture
def alone(monkeypatch):
    """The training function of examples/train_distributed.py with the attention of one process, without a group."""
    module = load_example()
    monkeypatch.setattr(module, "attention", lambda *heads, mask, layout: sightline.attention(*heads, mask=mask))
    monkeypatch.setattr(module, "shard", lambda x, **_: x)
    monkeypatch.setattr(module, "DistributedDataParallel", lambda model: model)
    monkeypatch.setattr(module, "dist", SimpleNamespace(all_reduce=lambda x: x, get_world_size=lambda: 1))
    return module


def run_example(steps):
    """Return the steps and losses that two ranks print, on the loopback interface."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [*launch, EXAMPLE, "--steps", str(steps)], env=environment, capture_output=True, text=True, timeout=560
    )
    assert ran.returncode == 0, ran.stderr
    assert "2 ranks, 256 of 512 positions on each" in ran.stdout
    found = re.findall(r"step +(\d+)  loss (\d+\.\d+)", ran.stdout)
    return np.array([int(step) for step, _ in found]), np.array([float(loss) for _, loss in found])


def test_the_example_trains_on_two_ranks(alone):
    steps, losses = run_example(4)
    assert steps.tolist() == [0, 1, 2, 3]
    assert differ_by_rounding(losses, np.array(alone.train(4)), alone.LAYERS * alone.CONTEXT)


@pytest.mark.soak
def test_two_ranks_reach_the_loss_of_one_process(alone):
    """After many steps the losses differ by less than those of two seeds."""
    steps, losses = run_example(200)
    own, other = (np.array(alone.train(200, seed))[steps] for seed in (0, 1))
    assert losses[-1] < losses[0]
    assert abs(losses[-4:].mean() - own[-4:].mean()) <= abs(own[-4:].mean() - other[-4:].mean())


def train_wrapped(group, steps, wrap):
    """Return the losses of the example on all ranks: with `fully_shard`, or "compile" by torch before the ranks."""
    wraps = {
        "fully_shard": lambda model: fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu")),
        "compile": lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager")),
    }
    example = load_example()
    example.DistributedDataParallel = wraps[wrap]
    return example.train(steps)


@pytest.mark.soak
@pytest.mark.parametrize(("wrap", "steps"), [("fully_shard", 5), ("compile", 3)])
def test_training_of_wrapped_models(ranks, alone, wrap, steps):
    expected = np.array(alone.train(steps))
    for losses in ranks.run(train_wrapped, steps, wrap):
        assert differ_by_rounding(np.array(losses), expected, alone.LAYERS * alone.CONTEXT)


def solve_dtensors(group, is_nested):
    """Check that a call with DTensors, or with a mesh as the group, has the bits of the call with this rank's shards.

    is_nested : whether the positions are divided along the second axis of a mesh of 2 × 2 ranks
    """
    if is_nested:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("data", "positions"))
        line, placements = mesh["positions"], [Replicate(), Shard(2)]
    else:
        mesh = line = DeviceMesh.from_group(group, "cpu")
        placements = [Shard(2)]
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, 40, 8, generator=generator) for heads in (4, 2, 2)]
    given = [distribute_tensor(x, mesh, placements).requires_grad_() for x in whole]
    shards = [x.to_local().detach().clone().requires_grad_() for x in given]
    see, options = [sightline.entropy()], {"mask": i >= j}
    output, (entropy,) = distributed.attention(*shards, see=see, group=line, **options)
    expected = torch.autograd.grad(output.square().sum(), shards)
    found, (found_entropy,) = distributed.attention(*given, see=see, **options)
    gradients = torch.autograd.grad(found.to_local().square().sum(), given)
    of_one = sightline.attention(*whole, mask=i >= j)
    return [
        isinstance(found, DTensor) and found.placements == tuple(placements),
        found.shape == of_one.shape and torch.equal(found.to_local(), output),
        torch.equal(found_entropy, entropy),
        all(torch.equal(one.to_local(), other) for one, other in zip(gradients, expected, strict=True)),
        torch.equal(found.full_tensor(), distributed.unshard(output, group=line)),
    ]


@pytest.mark.parametrize("is_nested", [False, True], ids=["one axis", "two axes"])
def test_dtensors_have_the_results_of_their_shards(ranks, is_nested):
    assert ranks.run(solve_dtensors, is_nested, size=4 if is_nested else 3) == [[True] * 5] * (4 if is_nested else 3)


def count_bytes(group, reach):
    """Return the bytes of keys and values that this rank sends in a forward pass; the window is `reach` keys long."""
    count = 0

    class Counting(ring.Transfers):
        def send(self, tensor, rank):
            nonlocal count
            count += tensor.nbytes
            super().send(tensor, rank)

    query, key, value = torch.randn(3, 1, 2, 1024, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    shards = [distributed.shard(x, group=group) for x in (query, key, value)]
    mask = None if reach is None else (i >= j) & (i - j < reach)
    with mock.patch.object(ring, "Transfers", Counting), short_blocks(64):
        distributed.attention(*shards, mask=mask, group=group)
    return count


def test_a_window_sends_fewer_bytes(ranks):
    every = ranks.run(count_bytes, None, size=4)
    window = ranks.run(count_bytes, 64, size=4)
    row_bytes = 2 * 2 * 8 * 4  # keys and values of 2 heads with 8 numbers of 4 bytes
    assert every == [3 * 256 * row_bytes] * 4
    assert window == [64 * row_bytes] * 3 + [0]


def held_bytes(group, length, heads, width):
    """Return the peak bytes of a forward and a backward pass beside this rank's shards, output and gradients."""
    own = length // dist.get_world_size(group)

    def draw(positions=own):
        shape = (1, heads, positions, width)
        return [torch.randn(shape, requires_grad=True) for _ in range(3)] + [torch.randn(shape)]

    def call(arrays):
        *shards, d_output = arrays
        output = distributed.attention(*shards, mask=i >= j, group=group, layout="zigzag")
        return output, torch.autograd.grad(output, shards, d_output)

    ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD
    call(draw(512))  # libraries load, and kernels are compiled
    with mock.patch("benchmarks.peak_memory.MAX_TRIES", 1):  # every rank makes the same number of calls
        peak = peak_memory(call, draw)
    return int(peak or 0) - 4 * draw()[0].nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
def test_memory_beside_the_shards():
    """A rank needs its shards and results, one shard of keys and values, and 64 MB.

    glibc keeps freed memory of some megabytes for later calls, unless a fixed threshold forbids it.
    """
    length, heads, width = 8192, 8, 64
    ranks = Ranks(2)
    try:
        shard = 2 * length // 2 * heads * width * 4  # keys and values
        for held in ranks.run(held_bytes, length, heads, width):
            assert held < shard + 64e6
    finally:
        ranks.close()
