"""`python -m benchmarks --ranks`: attention over several processes of one thread each, measured and predicted times.

The cost model (`cost_model`) predicts the times from measured rates. One process alone measures the FLOP/s of
the forward and of the backward pass of each mask. An exchange of plain arrays between all processes measures the
bandwidth. Attention over a short sequence measures the time of a call that computes almost nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from sightline.cli.console import key_value_table, make_console, note, section, table
from sightline.cpu.runtime.thread_count import usable_processors
from sightline.errors import MissingExtraError
from sightline.formula.expression import Expression
from sightline.formula.library import causal, window
from sightline.partition.shards import ShardLayout
from sightline.problem.problem import Problem, make_problem

from .cost_model import Hardware, predict_problem
from .report import format_amount, format_duration, format_ratio

RANKS = (1, 2, 4)
SIZE, QUICK_SIZE = 16_384, 512  # positions of the sequence
HEADS, WIDTH, WINDOW = 4, 64, 512
EXCHANGED = 4 << 20  # bytes that each process sends to the next one, to measure the bandwidth
SHORT = 64  # positions of the sequence of a call that computes almost nothing


@dataclass(frozen=True)
class RankCase:
    """A mask, and how the sequence is divided among the processes."""

    name: str
    layout: ShardLayout
    width: int | None = None  # width of the causal window; None for the causal mask without a window

    def mask(self) -> Expression:
        return causal() if self.width is None else causal() & window(self.width)

    def problem(self, n: int) -> Problem:
        """Return the problem of the whole sequence, with broadcast arrays, which take no memory."""
        x = np.broadcast_to(np.float32(0), (1, HEADS, n, WIDTH))
        return make_problem(x, x, x, mask=self.mask())


CASES = (
    RankCase("causal, contiguous", "contiguous"),
    RankCase("causal, zigzag", "zigzag"),
    RankCase(f"window {WINDOW}, contiguous", "contiguous", WINDOW),
)


@dataclass(frozen=True)
class RankResult:
    """The seconds of one pass of a case: measured, and predicted by the cost model."""

    case: str
    ranks: int
    name: str  # "forward" or "backward"
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """The measured seconds divided by the predicted seconds."""
        return self.measured / self.predicted


class _Timing(NamedTuple):
    """What a group of processes measured; all numbers are seconds except the bandwidth, which is bytes per second."""

    passes: dict[str, tuple[float, float]]  # (forward, backward) of each case by name
    overhead: tuple[float, float]  # (forward, backward) of a call that computes almost nothing
    bandwidth: float
    latency: float  # the seconds of an exchange of one byte


def bench_ranks(quick: bool = False) -> None:
    """Print the measured and the predicted times of every case."""
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MissingExtraError("bench --ranks without torch", "torch 2.6 or later", "pip install torch") from error
    if not (dist.is_available() and dist.is_gloo_available()):
        raise MissingExtraError("bench --ranks with a torch without gloo", "a torch with gloo", "pip install torch")
    console = make_console()
    n = QUICK_SIZE if quick else SIZE
    console.print(Text("Attention over several processes of one thread each, by the ring", style="bold"))
    note(console, f"float32, {n:,} positions, on {usable_processors()} processors, which the processes share")
    results, hardware = measure_ranks(n, 1 if quick else 3)
    link = next(iter(hardware.values()))
    exchange = f"{format_amount(link.bandwidth, 'B/s')}, {format_duration(link.latency)} latency, in the largest group"
    console.print(key_value_table([("exchange", exchange)]))
    for name, rates in hardware.items():
        section(console, name)
        forward, backward = (format_amount(rates.rate(back), "FLOP/s") for back in (False, True))
        note(console, f"one process: {forward} forward, {backward} backward; the predictions begin with these rates")
        rows = [
            (
                one.ranks,
                one.name,
                format_duration(one.measured),
                format_duration(one.predicted),
                format_ratio(one.ratio),
            )
            for one in results
            if one.case == name
        ]
        console.print(table("processes", "pass", "measured", "predicted", "ratio", rows=rows, left=2))
    if quick:
        note(console, "\nA quick run: a short sequence and one round. Its times and ratios mean nothing.")


def measure_ranks(n: int, repeats: int, ranks: Sequence[int] = RANKS) -> tuple[list[RankResult], dict[str, Hardware]]:
    """Return the results of every case, number of ranks and pass, and the rates of each case in the largest group.

    Parameters
    ----------
    n : the length of the sequence
    repeats : the number of timed runs; the fastest counts, since a disturbance only makes a run slower
    ranks : the numbers of processes
    """
    alone = _run_group(1, n, repeats)
    results, hardware = list[RankResult](), dict[str, Hardware]()
    for size in ranks:
        timing = alone if size == 1 else _run_group(size, n, repeats)
        for case in CASES:
            problem = case.problem(n)
            whole, of_alone = predict_problem(problem, 1, case.layout), alone.passes[case.name]
            forward, backward = (
                float(whole.forward.flops.sum()) / of_alone[0],
                float(whole.backward.flops.sum()) / of_alone[1],
            )
            used = Hardware(forward, timing.bandwidth, timing.latency, min(size, usable_processors()), backward)
            prediction = predict_problem(problem, size, case.layout, hardware=used)
            for k, (name, predicted) in enumerate(
                {"forward": prediction.forward, "backward": prediction.backward}.items()
            ):
                overhead = timing.overhead[k] if size > 1 else 0.0
                measured = timing.passes[case.name][k]
                results.append(RankResult(case.name, size, name, measured, predicted.time + overhead))
            hardware[case.name] = used
    return results, hardware


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


def _time_case(case: RankCase, n: int, repeats: int) -> tuple[float, float]:
    """Return the seconds of the slowest process in the forward and in the backward pass, in the fastest run."""
    import torch
    import torch.distributed as dist

    from sightline.torch.distributed import attention, shard

    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, HEADS, n, WIDTH, generator=generator) for _ in range(3)]
    query, key, value = (shard(x, layout=case.layout).requires_grad_() for x in whole)
    found = []
    for _ in range(repeats + 1):  # the first run compiles the kernels
        forward, output = _time(attention, query, key, value, mask=case.mask(), layout=case.layout, threads=1)
        backward, _ = _time(output.backward, torch.ones_like(output))
        seconds = torch.tensor([forward, backward], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        found.append(seconds.tolist())
    forward, backward = np.min(found[1:], axis=0)
    return float(forward), float(backward)


def _time_exchange(rank: int, size: int, count: int, repeats: int) -> float:
    """Return the least seconds in which every process sends `count` bytes to the next one."""
    import torch
    import torch.distributed as dist

    sent, received = torch.zeros(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return float(min([_time(exchange)[0] for _ in range(4 * repeats + 1)]))


def _time(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[float, Any]:
    """Return the seconds and the result of a call, which all processes of the group begin together."""
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    result = function(*arguments, **options)
    return time.perf_counter() - started, result
