"""`sightline bench`: the times of common problems on this machine, beside torch's attention."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from rich.text import Text

from ..api.functions import attention
from ..cpu.runtime.thread_count import usable_processors
from ..errors import MissingExtraError, ParameterError
from ..formula.expression import SYMBOLS, Expression
from ..formula.library import causal, documents, window
from .console import make_console, make_table, note, progress, section
from .info_command import processor_name
from .timing import format_speedups, interleave, speedups, time_calls

i, j = SYMBOLS["i"], SYMBOLS["j"]
ROUNDS, SECONDS = 5, 3.0  # the fewest rounds, and the seconds of all rounds of a problem
QUICK = 32  # a quick run divides the lengths by this number


@dataclass(frozen=True)
class TimedProblem:
    """A problem that is timed: 8 heads, 4,096 positions, width 64 and float32 unless it says otherwise."""

    name: str
    n: int = 4096
    m: int | None = None  # None for n keys
    d: int = 64
    heads: tuple[int, int] = (8, 8)  # query heads, key heads
    dtype: str = "float32"
    mask: Callable[[int], Expression | None] = field(default=lambda n: None)  # from the number of queries
    dropout: float = 0.0
    trains: bool = False  # True for a forward and a backward pass

    def calls(self, divisor: int) -> dict[str, Callable[[Any], Any]]:
        """Return what is timed, with arrays of lengths that are divided by `divisor`: Sightline and torch."""
        import torch

        n, m = (max(length // divisor, 1) for length in (self.n, self.m or self.n))
        dtype, (H, G) = getattr(torch, self.dtype), self.heads
        generator = torch.Generator().manual_seed(1)
        query, key, value = (
            torch.randn(1, length, heads, self.d, generator=generator).to(dtype).transpose(1, 2)
            for length, heads in ((n, H), (m, G), (m, G))
        )
        mask, options = self.mask(n), dict[str, Any]()
        if mask is causal():  # equal formulas are one object
            options["is_causal"] = True
        elif mask is not None:
            options["attn_mask"] = torch.tensor(mask.array(n, m))
        if H != G:
            options["enable_gqa"] = True
        sdpa = torch.nn.functional.scaled_dot_product_attention
        functions: dict[str, Callable[..., Any]] = {
            "Sightline": partial(attention, mask=mask, dropout=self.dropout),
            "torch": partial(sdpa, dropout_p=self.dropout, **options),
        }
        operands = [x.detach().requires_grad_(self.trains) for x in (query, key, value)]

        def call(function: Callable[..., Any], _: Any) -> Any:
            output = function(*operands)
            if not self.trains:
                return (output,)
            return output.detach(), *torch.autograd.grad(output.sum(), operands)

        return {name: partial(call, function) for name, function in functions.items()}


PROBLEMS = (
    TimedProblem("forward"),
    TimedProblem("forward, width 128", d=128),
    TimedProblem("forward, bfloat16", dtype="bfloat16"),
    TimedProblem("forward, causal", mask=lambda n: causal()),
    TimedProblem("forward, window of 256 keys", mask=lambda n: causal() & window(min(256, n // 2))),
    TimedProblem("forward, 16 documents", n=8192, mask=lambda n: documents(lengths=[n // 16] * 16)),
    TimedProblem("forward, dropout 0.1", dropout=0.1),
    TimedProblem("training", trains=True),
    TimedProblem("training, causal", mask=lambda n: causal(), trains=True),
    TimedProblem("one new token, 32 heads on 8", n=1, m=8192, d=128, heads=(32, 8)),
    TimedProblem("a sentence of 16 tokens", n=16),
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `bench` and its options to the command line."""
    command = commands.add_parser(
        "bench",
        help="time common problems on this machine, beside torch",
        description="Times Sightline and torch's scaled_dot_product_attention in turn, on views of (B, n, H d). "
        "More problems and libraries are in a checkout: python -m benchmarks --list.",
    )
    command.add_argument("--only", action="append", metavar="WORD", help="run problems whose name contains WORD")
    command.add_argument("--threads", type=int, help="threads of both (default: all usable processors)")
    command.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; the times mean nothing")
    command.set_defaults(run=lambda options: bench(options.only or (), options.threads, options.quick))


def bench(only: Any = (), threads: int | None = None, quick: bool = False) -> None:
    """Print a table of the times of the selected problems. `only` has parts of their names; () selects all."""
    selected = [problem for problem in PROBLEMS if not only or any(word in problem.name for word in only)]
    threads = usable_processors() if threads is None else threads
    if not selected or threads < 1:
        names = ", ".join(problem.name for problem in PROBLEMS)
        given = f"--only {' '.join(only)}, {threads} threads"
        raise ParameterError(given, f"parts of: {names}; at least 1 thread", "sightline bench")
    if find_spec("torch") is None:
        raise MissingExtraError("bench without torch", "torch 2.6 or later", "pip install torch")
    import torch

    torch.set_num_threads(threads)
    console = make_console()
    console.print(Text("softmax(Q Kᵀ / √d_k + M) V   beside torch's scaled_dot_product_attention", style="bold"))
    note(console, f"{processor_name()}, {threads} threads, torch {torch.__version__}; medians of alternating turns")
    with progress(console) as bar:
        rows = [_measure(problem, quick) for problem in bar.track(selected, description="timing")]
    section(console, "Times", "8 heads, 4,096 positions, width 64, float32 unless stated")
    console.print(make_table("problem", "Sightline", "torch", "torch / Sightline", "difference", rows=rows))
    note(console, "difference: the largest one of all outputs and gradients; both round, and neither is exact")
    if quick:
        note(console, "A quick run: tiny sizes. Its times and ratios mean nothing.")


def _measure(problem: TimedProblem, quick: bool) -> tuple[str, ...]:
    """Return the row of a problem: its name, both times, their ratio, and how far the results differ."""
    calls = problem.calls(QUICK if quick else 1)
    ours, others = (call(None) for call in calls.values())  # the first calls compile
    difference = max(float((x - y).abs().max()) for x, y in zip(ours, others, strict=True))
    turns = {name: partial(time_calls, call) for name, call in calls.items()}
    times = interleave(turns, 2 if quick else ROUNDS, 0.0 if quick else SECONDS)
    found = speedups(*times.values())
    ratio = "this machine is busy" if found is None else format_speedups(*found)
    medians = [f"{1e3 * statistics.median(seconds):.3g} ms" for seconds in times.values()]
    shown = "not comparable" if problem.dropout else f"{difference:.1e}"  # each draws its own weights to drop
    return problem.name, *medians, ratio, shown
