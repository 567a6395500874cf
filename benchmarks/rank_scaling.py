"""`python -m benchmarks --ranks`: attention over several processes of one thread each, measured and predicted times.

`cost_model` predicts the times from measured rates. One process alone measures the FLOP/s of the forward and of the
backward pass of each mask. An exchange of plain arrays between all processes measures the bandwidth. Attention over a
short sequence measures the time of a call that computes almost nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from sightline.call.problem import make_problem
from sightline.cli.console import make_console, note, table
from sightline.cpu.runtime.thread_count import usable_processors
from sightline.formula.expression import Expression
from sightline.formula.library import causal, window
from sightline.partition.shards import ShardLayout

from .cost_model import Hardware, predict_problem
from .report import format_amount, format_duration

RANKS = (1, 2, 4)
SIZE, QUICK_SIZE = 16_384, 512  # positions of the sequence
HEADS, WIDTH, WINDOW = 4, 64, 512
EXCHANGED = 4 << 20  # bytes that each process sends to the next one, to measure the bandwidth
SHORT = 64  # positions of a rank, in a call that computes almost nothing
PASSES = "forward", "backward"


class RankCase(NamedTuple):
    """A mask, and how the sequence is divided among the processes."""

    name: str
    layout: ShardLayout
    mask: Expression


CASES = (
    RankCase("causal, contiguous", "contiguous", causal()),
    RankCase("causal, zigzag", "zigzag", causal()),
    RankCase(f"window {WINDOW}, contiguous", "contiguous", causal() & window(WINDOW)),
)


class RankResult(NamedTuple):
    """The seconds of one pass of a case: measured, and predicted by the cost model."""

    case: str
    ranks: int
    name: str  # "forward" or "backward"
    measured: float
    predicted: float


class _Timing(NamedTuple):
    """What a group of processes measured; all numbers are seconds except the bandwidth, which is bytes per second."""

    passes: dict[str, list[float]]  # [forward, backward] of each case by name
    overhead: list[float]  # [forward, backward] of a call that computes almost nothing
    bandwidth: float
    latency: float  # the seconds of an exchange of one byte


def bench_ranks(quick: bool = False) -> None:
    """Print the measured and the predicted times of every case."""
    console = make_console()
    n = QUICK_SIZE if quick else SIZE
    console.print(Text("Attention over several processes of one thread each, by the ring", style="bold"))
    note(console, f"float32, {n:,} positions, on {usable_processors()} processors, which the processes share")
    results, links = measure_ranks(n, 1 if quick else 3)
    rows = [(*one[:3], *map(format_duration, one[3:]), f"{one.measured / one.predicted:.2f}×") for one in results]
    console.print(table("mask", "processes", "pass", "measured", "predicted", "ratio", rows=rows, left=3))
    for size, (bandwidth, latency) in links.items():
        note(console, f"exchange among {size}: {format_amount(bandwidth, 'B/s')}, {format_duration(latency)} latency")
    if quick:
        note(console, "\nA quick run: a short sequence and one round. Its times and ratios mean nothing.")


def measure_ranks(
    n: int, repeats: int, ranks: Sequence[int] = RANKS
) -> tuple[list[RankResult], dict[int, tuple[float, float]]]:
    """Return the results of every case, number of ranks and pass, and (bandwidth, latency) by number of ranks.

    n : the length of the sequence
    repeats : the number of timed runs; the fastest counts, since a disturbance only makes a run slower
    """
    timings = {size: _run_group(size, n, repeats) for size in dict.fromkeys((1, *ranks))}
    array = np.broadcast_to(np.float32(0), (1, HEADS, n, WIDTH))  # takes no memory
    results = list[RankResult]()
    for case in CASES:
        problem = make_problem(array, array, array, mask=case.mask)
        whole = predict_problem(problem, 1, case.layout)
        flops = [float(cost.flops.sum()) for cost in (whole.forward, whole.backward)]
        rates = [work / seconds for work, seconds in zip(flops, timings[1].passes[case.name], strict=True)]
        for size in ranks:
            timing, shared = timings[size], min(size, usable_processors())
            hardware = Hardware(rates[0], timing.bandwidth, timing.latency, shared, rates[1])
            prediction = predict_problem(problem, size, case.layout, hardware)
            for place, cost in enumerate((prediction.forward, prediction.backward)):
                predicted = cost.time + (timing.overhead[place] if size > 1 else 0.0)
                measured = timing.passes[case.name][place]
                results.append(RankResult(case.name, size, PASSES[place], measured, predicted))
    return results, {size: (timings[size].bandwidth, timings[size].latency) for size in ranks if size > 1}


def _run_group(size: int, n: int, repeats: int) -> _Timing:
    """Start the processes of a group, and return the timing that the process of rank 0 measures."""
    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        store = (Path(folder) / "store").as_uri()
        multiprocessing.spawn(_work, (size, store, n, repeats, answers), nprocs=size)  # type: ignore[attr-defined, no-untyped-call]
        timing: _Timing = answers.get()
        return timing


def _work(rank: int, size: int, store: str, n: int, repeats: int, answers: Any) -> None:
    """Do the work of one process of a group. The process of rank 0 puts the timing of the group into `answers`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    try:
        passes = {case.name: _time_case(case, n, repeats) for case in CASES}
        overhead = _time_case(CASES[0], SHORT * size, repeats)
        seconds = [_time_exchange(rank, size, count, repeats) for count in (1, EXCHANGED)] if size > 1 else [0.0, 1.0]
        bandwidth = EXCHANGED / max(seconds[1] - seconds[0], 1e-9)
        if rank == 0:
            answers.put(_Timing(passes, overhead, bandwidth, seconds[0]))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _time_case(case: RankCase, n: int, repeats: int) -> list[float]:
    """Return the seconds of the slowest process in the forward and in the backward pass, in the fastest run."""
    import torch
    import torch.distributed as dist

    from sightline.torch.distributed import attention, shard

    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, HEADS, n, WIDTH, generator=generator) for _ in range(3)]
    query, key, value = (shard(x, layout=case.layout).requires_grad_() for x in whole)
    found = []
    for _ in range(repeats + 1):  # the first run compiles the kernels
        forward, output = _time(attention, query, key, value, mask=case.mask, layout=case.layout, threads=1)
        backward, _ = _time(output.backward, torch.ones_like(output))
        seconds = torch.tensor([forward, backward], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        found.append(seconds.tolist())
    return [min(of_pass) for of_pass in zip(*found[1:], strict=True)]


def _time_exchange(rank: int, size: int, count: int, repeats: int) -> float:
    """Return the least seconds in which every process sends `count` bytes to the next one."""
    import torch
    import torch.distributed as dist

    sent, received = torch.zeros(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)

    def exchange() -> None:
        pairs = ((dist.isend, sent, (rank + 1) % size), (dist.irecv, received, (rank - 1) % size))
        for work in dist.batch_isend_irecv([dist.P2POp(*pair) for pair in pairs]):
            work.wait()

    return float(min([_time(exchange)[0] for _ in range(4 * repeats + 1)]))


def _time(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[float, Any]:
    """Return the seconds and the result of a call, which all processes of the group begin together."""
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    result = function(*arguments, **options)
    return time.perf_counter() - started, result
