"""Checks that ranks run by themselves: finite differences, training, counted bytes, and planted faults."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck

import sightline
import sightline.torch.distributed as distributed
from distributed_calls import short_blocks
from fault_planting import Fault, plant
from sightline import h, i, j, s, table
from sightline.partition import needed_keys, parts
from sightline.partition.parts import part_of
from sightline.torch.distributed import ring

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_distributed.py"


class _Replicated(torch.autograd.Function):
    """A tensor that every rank has whole; its gradient is the mean of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total / dist.get_world_size(ctx.group), None


def finite_differences(group: Any, layout: Any, method: Any) -> bool:
    """Check the gradients of shard → attention → unshard as a function of the whole tensors, tables and sinks.

    Each of the R ranks computes the loss of the whole output, so the total loss is R times the loss of one rank. The
    mean of the ranks' gradients is therefore the gradient of the function.
    """
    torch.manual_seed(0)

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> list[Tensor]:
        inputs: Any = [_Replicated.apply(x, group) for x in (query, key, value, bias, sinks)]  # type: ignore[no-untyped-call]
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


def penalise_gradients(group: Any, method: Any) -> list[bool]:
    """Return whether the gradients of the squared gradients are those of one process, of query, key and value."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 12, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    shards = [distributed.shard(x, group=group).requires_grad_() for x in whole]
    inputs = [x.requires_grad_() for x in whole]

    def differentiate(output: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(output.square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), given)  # type: ignore[arg-type]

    expected = differentiate(sightline.attention(*inputs, mask=i >= j), inputs)  # type: ignore[arg-type]
    output = distributed.attention(*shards, mask=i >= j, group=group, method=method)
    found = differentiate(output, shards)
    return [torch.allclose(x, distributed.shard(y, group=group)) for x, y in zip(found, expected, strict=True)]


def differentiate_some_results(group: Any, method: Any, read: list[str]) -> list[Tensor]:
    """Return this rank's gradients of a loss that reads one result, `read[rank]`: "output", "entropy" or "lse"."""
    whole = torch.randn(3, 1, 4, 16, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    shards = [distributed.shard(x, group=group).requires_grad_() for x in whole]
    see = {"entropy": sightline.entropy(), "lse": sightline.lse()}
    output, seen = distributed.attention(*shards, mask=i >= j, see=see, group=group, method=method)  # type: ignore[arg-type]
    loss = ({"output": output} | seen)[read[dist.get_rank(group)]].square().sum()
    return list(torch.autograd.grad(loss, shards))


def differentiate_largest_scores(group: Any) -> bool:
    """Check the gradient of the largest scores beside sinks so large that every weight underflows in float32.

    The gradient of the score q · k / √d_k by q is k / √d_k; it has no rounding for d_k = 4.
    """
    whole = torch.randn(3, 1, 1, 8, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    query, key, value = (distributed.shard(x, group=group).requires_grad_() for x in whole)
    options = {"sinks": torch.full((1,), 200.0), "see": sightline.max_score(), "group": group}
    _, (largest,) = distributed.attention(query, key, value, **options)
    (gradient,) = torch.autograd.grad(largest.score.sum(), query)
    return torch.equal(gradient[0, 0], whole[1][0, 0, largest.where[0, 0]] / 2)


def differentiate_twice(group: Any) -> Tensor:
    """Return the second derivative, for this rank's shard, of Σ x³ of the whole tensor, added over the ranks."""
    x = torch.full((4, 2), 1.0 + dist.get_rank(group), requires_grad=True)
    loss = distributed.unshard(x, group=group).pow(3).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def load_example() -> ModuleType:
    """Return examples/train_distributed.py as a module of its own."""
    spec = importlib.util.spec_from_file_location("train_distributed", EXAMPLE)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def train_wrapped(group: Any, steps: int, wrap: str) -> list[float]:
    """Return the losses of the example on all ranks: with `fully_shard`, or "compile" by torch before the ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    wraps = {
        "fully_shard": lambda model: fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu")),
        "compile": lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager")),
    }
    example: Any = load_example()
    example.DistributedDataParallel = wraps[wrap]
    return example.train(steps)  # type: ignore[no-any-return]


def solve_dtensors(group: Any, is_nested: bool) -> list[bool]:
    """Check that a call with DTensors, or with a mesh as the group, has the bits of the call with this rank's shards.

    is_nested : whether the positions are divided along the second axis of a mesh of 2 × 2 ranks
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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
    output, (entropy,) = distributed.attention(*shards, see=see, group=line, **options)  # type: ignore[arg-type]
    expected = torch.autograd.grad(output.square().sum(), shards)
    found, (found_entropy,) = distributed.attention(*given, see=see, **options)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(found.to_local().square().sum(), given)
    of_one = sightline.attention(*whole, mask=i >= j)
    return [
        isinstance(found, DTensor) and found.placements == tuple(placements),
        found.shape == of_one.shape and torch.equal(found.to_local(), output),
        torch.equal(found_entropy, entropy),
        all(torch.equal(one.to_local(), other) for one, other in zip(gradients, expected, strict=True)),
        torch.equal(found.full_tensor(), distributed.unshard(output, group=line)),
    ]


def count_bytes(group: Any, reach: int | None) -> int:
    """Return the bytes of keys and values that this rank sends in a forward pass; the window is `reach` keys long."""
    count = 0

    class Counting(ring.Transfers):
        def send(self, tensor: Tensor, rank: int) -> None:
            nonlocal count
            count += tensor.nbytes
            super().send(tensor, rank)

    query, key, value = torch.randn(3, 1, 2, 1024, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    shards = [distributed.shard(x, group=group) for x in (query, key, value)]
    mask = None if reach is None else (i >= j) & (i - j < reach)
    with mock.patch.object(ring, "Transfers", Counting), short_blocks(64):
        distributed.attention(*shards, mask=mask, group=group)
    return count


FAULTS = {
    "offset of keys": Fault(part_of, '("j", first_key)', '("j", first_key + (first_key > 0))'),
    "last shard dropped": Fault(needed_keys.Schedule.rounds, "range(1, self.size)", "range(1, self.size - 1)"),
    "tile skipped": Fault(needed_keys._find_schedule, "ranges.count_tiles()", "ranges.count_tiles(ranges.first != 1)"),
    "statistics without the factors of the parts": Fault(
        parts.combine,
        "KeyPart(part.seen[k], part.keys, factor)",
        "KeyPart(part.seen[k], part.keys, xp.ones_like(factor))",
    ),
    "entropy without the logarithms of the factors": Fault(
        parts.combine, "KeyPart(part.seen[k], part.keys, factor)", "KeyPart(part.seen[k], 0.0, factor)"
    ),
    "output not rescaled": Fault(
        parts.combine, "weigh(xp.astype(factor, dtype)[..., None], part.output)", "part.output"
    ),
    "keys of a block": Fault(parts.read_part, "key + first_key", "key"),
    "gradients returned to the wrong rows": Fault(
        ring.BlockExchange._finish,
        "self._add(sent, returned)",
        "self._add(sent, [x.flip(-2) for x in returned])",
    ),
}


def with_fault(group: Any, fault: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function on this rank with a fault planted, and without schedules that were found before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needed_keys, "_find_cached", needed_keys._find_schedule)
        plant(FAULTS[fault], patch)
        return function(group, *arguments)


def held_bytes(group: Any, length: int, heads: int, width: int) -> int:
    """Return the peak bytes of a forward and a backward pass beside this rank's shards, output and gradients."""
    from benchmarks.peak_memory import peak_memory

    def draw(positions: int = length // dist.get_world_size(group)) -> list[Tensor]:
        shape = (1, heads, positions, width)
        return [torch.randn(shape, requires_grad=True) for _ in range(3)] + [torch.randn(shape)]

    def call(arrays: list[Tensor]) -> Any:
        *shards, d_output = arrays
        output = distributed.attention(*shards, mask=i >= j, group=group, layout="zigzag")  # type: ignore[arg-type]
        return output, torch.autograd.grad(output, shards, d_output)

    ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD
    call(draw(512))  # libraries load, and kernels are compiled
    with mock.patch("benchmarks.peak_memory.MAX_TRIES", 1):  # every rank makes the same number of calls
        peak = peak_memory(call, draw)
    return int(peak or 0) - 4 * draw()[0].nbytes
