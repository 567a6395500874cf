"""`tune`: sizes of tiles, warps and stages measured on this machine for a problem, and the best of them kept.

The table of `gpu.configurations` holds sizes for architectures; which are best depends on the formula, the widths, the
card and the compiler's version too. A trial counts where it compiles, fits, and errs against float64 no more than the
budget of `testing` allows, with the default's own answer as the plain computation: twice its error, plus 2 units in the
last place. So a default that is wrong passes, and sizes as wrong as it: the tests are what tells. The fastest few then
run in turn once more, and where one of them is faster than the default it is kept (`gpu.kept`), and taken by every
later call of a problem of the same structure on the same device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...accuracy import budget_used
from ...arrays import to_numpy
from ...errors import KernelRefusedError, ParameterError
from ...kernel import Gradients, Result
from ...problem import Problem, make_problem
from ...statistics import Statistic, arrays_of, solve_selections_separately
from ...streaming import Streaming, backward
from .. import Triton
from . import cache
from .configurations import Configuration
from .selection import architecture_of, candidates, device_of, try_sizes

__all__ = ["TunedKernel", "Tuning", "tune"]

MAX_COMPARED_ROWS = 256  # rows of an array that are compared
FINALISTS, ROUNDS = 3, 5  # run in turn at the end, so many times
MIN_SPEEDUP = 1.02  # times as fast as the default, at least: less than that is noise between two runs

Timer = Callable[[Callable[[], Any]], float]  # seconds of a call
ProgressCallback = Callable[[str, int, int], None]  # told what is being done, how much is done, and of how much


@dataclass(frozen=True)
class TunedKernel:
    """What was found for one kernel. Times in seconds.

    Parameters
    ----------
    kernel : "forward", "backward", ...
    default, best : the sizes the table has, and the fastest found; the same where none is faster
    before, after : how long calls with them took
    tried, wrong, failed : how many sizes were tried, answered beyond the budget of errors, ended in an error
    reason : the first such error; most say that the sizes do not fit
    path : the file it is kept in, if any
    """

    kernel: str
    default: Configuration
    best: Configuration
    before: float
    after: float
    tried: int
    wrong: int
    failed: int
    reason: str = ""
    path: Path | None = None


@dataclass(frozen=True, repr=False)
class Tuning:
    """What `tune` found, kernel by kernel; `print` shows it as a small table."""

    device: str
    found: tuple[TunedKernel, ...]

    def __repr__(self) -> str:
        return f"Tuning({self.device}: {', '.join(one.kernel for one in self.found)})"

    def __str__(self) -> str:
        rows = [("kernel", "rows × keys", "warps", "stages", "time", "default's", "gain", "tried")]
        for one in self.found:
            sizes = one.best
            rows.append(
                (
                    one.kernel + (", specialised" if sizes.specialised else ""),
                    f"{sizes.rows} × {sizes.keys}",
                    str(sizes.warps),
                    str(sizes.stages),
                    _format_time(one.after),
                    _format_time(one.before),
                    "none" if one.best == one.default else f"{one.before / one.after:.2f}×",
                    f"{one.tried}, {one.wrong} wrong, {one.failed} failed",
                )
            )
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        failed = [
            f"{one.kernel}: the first that failed: {one.reason.splitlines()[0]}" for one in self.found if one.reason
        ]
        places = sorted({f"kept in {one.path.parent}" for one in self.found if one.path})
        return "\n".join([self.device, *lines, *failed, *(places or [self._explain_nothing_kept()])])

    def _explain_nothing_kept(self) -> str:
        """Why nothing was kept."""
        if not self.found:
            return "nothing kept: such a problem has nothing to multiply, so no kernel runs"
        if any(one.best != one.default for one in self.found):
            return f"nothing kept: {cache.CACHE_VARIABLE}=off"
        return f"nothing kept: no sizes were {MIN_SPEEDUP:g} times as fast as the default's"


def tune(
    query: Any,
    key: Any,
    value: Any = None,
    *,
    gradients: bool = True,
    specialised: bool = False,
    show: bool = True,
    timer: Timer | None = None,
    kernel: Triton | None = None,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    see: Sequence[Statistic] = (),
) -> Tuning:
    """Measure the sizes our GPU kernels may run such a problem with, and keep the fastest for this machine.

    It takes some minutes, most of them the compiler's. Problems of the same dtype, widths, formulas and statistics take
    what was found, whatever their lengths, so measure at those you use.

    Parameters
    ----------
    query : (..., H, n, d_k) float16, bfloat16, float32 or float64, torch tensors on the GPU
    key : (..., G, m, d_k), same dtype
    value : (..., G, m, d_v)
    mask, score, scale, sinks, dropout, seed, see
        As in `attention`.
    gradients : bool, default True
        Tune the backward kernels too.
    specialised : bool, default False
        On Hopper, try the forward kernel whose warps are specialised too. It has never run on a GPU: a barrier mistaken
        there would wait for ever, and the process would have to be killed.
    show : bool, default True
        A progress bar meanwhile, and the table in the end, printed.
    timer : function, optional
        Seconds of a call, the median of many by default (`triton.testing.do_bench`).
    kernel : optional
        The kernel tuned, `gpu.Triton()` by default.

    Returns
    -------
    Tuning
        For every kernel the sizes found, their time and that of the default, in seconds; `print` shows a table.

    Raises
    ------
    KernelRefusedError
        The arrays are not on a GPU, Triton is not installed, or the kernels cannot serve the problem; the message holds
        every reason with its cure.
    ParameterError
        What is found could not be kept, `kernel` or `timer` is none, or a choice is neither True nor False.
    SightlineError
        As `sightline.problem.make_problem` says.

    See Also
    --------
    sightline.gpu.tuning.cache : what is kept where, and for whom it holds.

    Examples
    --------
    On a machine with a GPU, for a causal mask:

        query, key, value = (torch.randn(2, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        sightline.tune(query, key, value, mask=sightline.causal())
    """
    for name, choice in (("gradients", gradients), ("specialised", specialised), ("show", show)):
        if not isinstance(choice, bool):
            raise ParameterError(f"{name}={choice!r}", "True or False", f"{name}=True")
    if timer is not None and not callable(timer):
        raise ParameterError(f"timer={timer!r}", "a function of a call, or None", "leave timer=None")
    options = {"mask": mask, "score": score, "scale": scale, "sinks": sinks}
    problem = make_problem(query, key, value, dropout=dropout, seed=seed, see=see, **options)
    kernel = Triton() if kernel is None else kernel
    if not isinstance(kernel, Triton):
        raise ParameterError(f"kernel={kernel!r}", "sightline.gpu.Triton(), or None", "leave kernel=None")
    reasons = list(kernel.refuses(problem))
    if reasons:
        raise KernelRefusedError(
            "tune of " + "; ".join(each.reason for each in reasons),
            "problems that the GPU kernels serve, on the device they are to be tuned for",
            "; ".join(each.cure for each in reasons),
        )
    tuning_run = TuningRun(problem, kernel, _time_with_events if timer is None else timer, specialised)
    cache.prepare_folder()  # before minutes are spent
    passes = [tuning_run.forward, *([tuning_run.backward] if gradients else [])]
    with _progress_bar(show) as step, _device_scope(problem):
        found = [one for each in passes for one in tuning_run.tune_pass(each, step)]
    tuning = Tuning(tuning_run.device, tuple(found))
    if show:
        print(tuning)
    return tuning


class TuningRun:
    """A problem with what every trial of it needs."""

    def __init__(self, problem: Problem, kernel: Triton, timer: Timer, specialised: bool = False) -> None:
        import torch

        plain = {name: getattr(problem, name).detach() for name in ("query", "key", "value")}
        self.problem, self.kernel, self.timer = replace(problem, **plain), kernel, timer
        self.specialised = specialised
        self.architecture = kernel.architecture or architecture_of(problem.query.device)
        self.device = device_of(problem, self.architecture)
        drawn = torch.Generator(device="cpu").manual_seed(0)
        shape = (*problem.batch_shape, problem.H, problem.n, problem.d_v)
        self.d_output = torch.randn(shape, generator=drawn).to(problem.query)
        self.saved: Any = None

    def forward(self) -> tuple[Any, ...]:
        """Output, lse and what is seen, but for places of keys, which equal weights leave open."""
        result = solve_selections_separately(self.problem, self.kernel.run)
        self.saved = result.output, result.lse
        return result.output, *self._row_arrays(result)

    def backward(self) -> tuple[Any, ...]:
        """Gradients of query, key and value; none where the kernel has none."""
        found = self.kernel.backward(self.problem, self.d_output, None, self.saved, ())
        return () if found is None else (found.query, found.key, found.value)

    def expected(self, call: Callable[[], Any]) -> list[Any]:
        """What the call should answer, in float64, by plain array operations on the same device."""
        wide = {name: getattr(self.problem, name).double() for name in ("query", "key", "value")}
        problem = replace(self.problem, **wide)
        if call == self.forward:
            result = solve_selections_separately(problem, Streaming().run)
            return [_sample_rows(array) for array in (result.output, *self._row_arrays(result))]
        found: Gradients = backward(problem, self.d_output.double())
        return [_sample_rows(array) for array in (found.query, found.key, found.value)]

    def tune_pass(self, call: Callable[[], Any], step: ProgressCallback) -> Iterator[TunedKernel]:
        """What is found for each kernel that a pass runs."""
        with try_sizes({}) as trial:
            default = [_sample_rows(array) for array in call()]
        if not default:
            return
        expected = self.expected(call)
        best: dict[str, Configuration] = {}
        for name, table in trial.requested.items():
            one = self._tune_kernel(name, table, best, call, (expected, default), step)
            best[name] = one.best
            if one.best != one.default:
                finding = {"configuration": asdict(one.best), "seconds": one.after, "default's": one.before}
                finding |= {"extent": self.problem.extent}
                path = cache.store(name, self.problem, self.device, finding)
                one = replace(one, path=path)
            yield one

    def _tune_kernel(
        self,
        name: str,
        table: Configuration,
        others: dict[str, Configuration],
        call: Callable[[], Any],
        answers: tuple[list[Any], list[Any]],
        step: ProgressCallback,
    ) -> TunedKernel:
        """One kernel's sizes, those of the others as they are."""
        able = candidates(name, self.problem, self.architecture, self.specialised)
        sizes = [table, *(each for each in able if each != table)]
        times: dict[Configuration, float] = {}
        wrong = failed = 0
        reason = ""
        for done, each in enumerate(sizes):
            step(f"{name}: {each.rows} × {each.keys}, {each.warps} warps, {each.stages} stages", done, len(sizes))
            with try_sizes({**others, name: each}):
                try:
                    found = call()
                    right = _budget_share(found, *answers) <= 1
                    if right:
                        times[each] = self._measure(call)
                except Exception as error:  # the compiler's or the driver's: too much shared memory, registers, ...
                    if each == table:
                        raise
                    failed += 1
                    reason = reason or f"{type(error).__name__}: {error}"
                else:
                    wrong += not right
        finalists = sorted(times, key=lambda each: times[each])[:FINALISTS]
        medians = self._time_interleaved(name, [table, *(each for each in finalists if each != table)], others, call)
        best = min(medians, key=lambda each: medians[each])
        best = best if medians[best] * MIN_SPEEDUP <= medians[table] else table
        return TunedKernel(name, table, best, medians[table], medians[best], len(sizes), wrong, failed, reason)

    def _time_interleaved(
        self, name: str, sizes: Sequence[Configuration], others: dict[str, Configuration], call: Callable[[], Any]
    ) -> dict[Configuration, float]:
        times: dict[Configuration, list[float]] = {each: [] for each in sizes}
        for _ in range(ROUNDS):
            for each in sizes:
                with try_sizes({**others, name: each}):
                    times[each].append(self._measure(call))
        return {each: statistics.median(taken) for each, taken in times.items()}

    def _measure(self, call: Callable[[], Any]) -> float:
        """What the timer says, which may be the caller's."""
        taken = self.timer(call)
        if not isinstance(taken, float | int) or not 0 <= taken < math.inf:
            raise ParameterError(
                f"a timer that answers {taken!r}", "seconds, a number of at least 0", "leave timer=None"
            )
        return float(taken)

    def _row_arrays(self, result: Result) -> list[Any]:
        """lse and the statistics, a number a row, in the dtype they are judged by."""
        import torch

        seen = [array for answer in result.seen for array in arrays_of(answer) if array.is_floating_point()]
        return [array.to(getattr(torch, self.problem.accumulator))[..., None] for array in (result.lse, *seen)]


def _sample_rows(array: Any) -> Any:
    """Some rows of (..., rows, width), those at the ends among them."""
    import torch

    count = array.shape[-2]
    rows = np.unique(np.linspace(0, count - 1, min(count, MAX_COMPARED_ROWS)).astype(np.int64))
    return array.index_select(-2, torch.from_numpy(rows).to(array.device)).cpu()


def _budget_share(found: Sequence[Any], expected: Sequence[Any], default: Sequence[Any]) -> float:
    """The largest share of its budget that any of the arrays uses."""
    used = [
        budget_used(_sample_rows(one), to_numpy(right), to_numpy(plain).astype(np.float64))
        for one, right, plain in zip(found, expected, default, strict=True)
    ]
    return max(used)


def _time_with_events(call: Callable[[], Any]) -> float:
    """The median of many calls between the device's events."""
    from triton.testing import do_bench

    return float(do_bench(call, return_mode="median")) / 1e3


def _device_scope(problem: Problem) -> Any:
    """Events are those of the device that is current."""
    import torch

    return torch.cuda.device_of(problem.query)  # type: ignore[no-untyped-call]


@contextmanager
def _progress_bar(show: bool) -> Iterator[ProgressCallback]:
    """Tells what is being done: by a bar of rich's, where one is wanted and somebody is there to see it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, transient=True)
    bar.disable = not (show and bar.console.is_terminal)
    with bar:
        task = bar.add_task("", total=None)
        yield lambda words, done, total: bar.update(task, description=words, completed=done, total=total)


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
