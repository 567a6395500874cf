"""`sightline bench --ranks`: time attention over several processes, beside the times that the cost model predicts."""

from __future__ import annotations

from rich.text import Text

from ..cpu.runtime.thread_count import usable_processors
from ..errors import MissingExtraError
from .bench.rank_scaling import RankResult, measure_ranks
from .bench.report import format_amount, format_duration, format_ratio
from .console import key_value_table, make_console, note, section, table

SIZE, QUICK_SIZE = 16_384, 512  # positions of the sequence


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
        rows = [_row(result) for result in results if result.case == name]
        console.print(table("processes", "pass", "measured", "predicted", "ratio", rows=rows, left=2))
    if quick:
        note(console, "\nA quick run: a short sequence and one round. Its times and ratios mean nothing.")


def _row(result: RankResult) -> list[str]:
    times = format_duration(result.measured), format_duration(result.predicted)
    return [str(result.ranks), result.name, *times, format_ratio(result.ratio)]
