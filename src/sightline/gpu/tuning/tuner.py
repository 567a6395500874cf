"""`tune` measures tile sizes, warps and stages for a problem on this GPU, and saves the fastest configuration.

The default table (`tuning.configurations`) depends on architecture, kernel, dtype and width only. The fastest
configuration also depends on the formula, the GPU and the compiler's version. A configuration is valid if the kernel
compiles, fits the GPU, and has an error against float64 within the budget of `reference.accuracy`: twice the error of
the default configuration, plus 2 units in the last place. So a wrong default passes, with configurations that are as
wrong; the tests detect a wrong default. The fastest few valid configurations are then timed again in turns. If one of
them is faster than the default by a factor of at least `MIN_SPEEDUP`, it is saved (`tuning.cache`), and every later
call of a problem of the same structure on the same device uses it.
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

from ...arrays.operations import to_numpy
from ...cache_folder import CACHE_VARIABLE
from ...errors import KernelRefusedError, ParameterError
from ...problem.kernel import Gradients, Result
from ...problem.problem import MAX_SMALL_FLOPS, MIN_COUNTED_QUERIES, Problem, make_problem
from ...reference.accuracy import budget_used
from ...reference.streaming import Streaming, backward
from ...statistics import Statistic, arrays_of, solve_selections_separately
from .. import Triton
from . import cache
from .configurations import Configuration, architecture_of, candidates, device_of, try_sizes

MAX_COMPARED_ROWS = 256  # most rows of a head of a result that are compared with the expected result
FINALISTS, ROUNDS = 3, 5  # configurations that are timed again at the end, and how often each of them is timed
MIN_SPEEDUP = 1.02  # least speedup over the default for which a configuration is saved; a smaller speedup may be noise

Timer = Callable[[Callable[[], Any]], float]  # calls its argument, and returns the seconds that one call takes
ProgressCallback = Callable[[str, int, int], None]  # takes (description, number of completed steps, number of steps)


@dataclass(frozen=True)
class TunedKernel:
    """The result of tuning one kernel."""

    kernel: str  # "forward", "decode", "weights_pass", "backward_queries" or "backward_keys"
    default: Configuration  # the configuration of the default table
    best: Configuration  # the fastest configuration; the default if no other is faster by `MIN_SPEEDUP`
    before: float  # seconds of a call with the default configuration
    after: float  # seconds of a call with the best configuration
    tried: int  # number of configurations tried
    wrong: int  # number of configurations whose error exceeded the budget
    failed: int  # number of configurations that raised an error
    reason: str = ""  # the first error raised, "" if none was; most errors say that the tiles do not fit
    path: Path | None = None  # the file that holds the best configuration; None if nothing was saved


@dataclass(frozen=True, repr=False)
class Tuning:
    """The result of `tune` for every kernel of a problem; `print` shows a small table."""

    device: str
    found: tuple[TunedKernel, ...]

    def __repr__(self) -> str:
        return f"Tuning({self.device}: {', '.join(tuned.kernel for tuned in self.found)})"

    def __str__(self) -> str:
        header = ("kernel", "rows × keys", "warps", "stages", "time", "default time", "speedup", "tried")
        rows = [header, *map(_format_row, self.found)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        errors = [f"{each.kernel}: first error: {each.reason.splitlines()[0]}" for each in self.found if each.reason]
        saved = sorted({f"saved in {tuned.path.parent}" for tuned in self.found if tuned.path})
        return "\n".join([self.device, *lines, *errors, *(saved or [self._explain_nothing_saved()])])

    def _explain_nothing_saved(self) -> str:
        if not self.found:
            return "nothing saved: no kernel runs for this problem, which has no products"
        if any(tuned.best != tuned.default for tuned in self.found):
            return f"nothing saved: {CACHE_VARIABLE}=off"
        return f"nothing saved: no configuration was {MIN_SPEEDUP:g} times as fast as the default"


def tune(
    query: Any,
    key: Any,
    value: Any = None,
    *,
    gradients: bool = True,
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
    """Measure tile sizes, warps and stages of the GPU kernels for a problem, and save the fastest for this GPU.

    Tuning takes some minutes, mostly for the compiler. Later calls on this GPU use the saved configurations for every
    problem of the same dtype, widths, formulas and statistics, whatever its numbers of queries and keys. So tune with
    the numbers of queries and keys that you use.

    Parameters
    ----------
    query : (..., H, n, d_k) float16, bfloat16, float32 or float64, a torch tensor on the GPU
    key : (..., G, m, d_k), the dtype and device of query
    value : (..., G, m, d_v), the dtype and device of query
        None if `key` is a `KVCache`.
    mask, score, scale, sinks, dropout, seed, see
        The options of `attention`, with the same meaning.
    gradients : bool, default True
        Tune the backward kernels too.
    show : bool, default True
        Show a progress bar while tuning, and print the table of results.
    timer : callable, optional
        It takes a function without arguments, and returns the seconds of one call of that function. The default is
        `triton.testing.do_bench`, the median of many calls.
    kernel : sightline.gpu.Triton, optional
        The kernel to tune, by default `gpu.Triton()`.

    Returns
    -------
    Tuning
        For every kernel the default and the fastest configuration, and the times of both in seconds; `print` shows a
        table.

    Raises
    ------
    KernelRefusedError
        The arrays are not on a GPU, Triton is not installed, or the kernels cannot serve the problem. The message has
        every reason with its cure.
    ParameterError
        The problem is small (`Problem.is_small_on_gpu`) and no decoding, so that its launches are not tuned; the
        folder of the cache is not writable; `kernel` is not a `Triton`; `timer` is not callable or returns no number
        of seconds; `gradients` or `show` is not a bool.
    SightlineError
        The errors of `attention`.

    See Also
    --------
    sightline.gpu.tuning.cache : the saved files, and the problems and machines that use them.

    Examples
    --------
    On a machine with a GPU, for a causal mask:

        query, key, value = (torch.randn(2, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        sightline.tune(query, key, value, mask=sightline.causal())
    """
    for name, choice in (("gradients", gradients), ("show", show)):
        if not isinstance(choice, bool):
            raise ParameterError(f"{name}={choice!r}", "True or False", f"{name}=True")
    if timer is not None and not callable(timer):
        raise ParameterError(f"timer={timer!r}", "a callable that returns seconds, or None", "leave timer=None")
    options = {"mask": mask, "score": score, "scale": scale, "sinks": sinks}
    problem = make_problem(query, key, value, dropout=dropout, seed=seed, see=see, **options)
    kernel = Triton() if kernel is None else kernel
    _check_tunable(kernel, problem)
    run = TuningRun(problem, kernel, _time_with_events if timer is None else timer)
    cache.prepare_folder()  # raises an error now, and not after minutes of measurements
    import torch

    passes = [run.forward, *([run.backward] if gradients else [])]
    # CUDA events belong to the current device.
    with _progress_bar(show) as step, torch.cuda.device_of(problem.query):  # type: ignore[no-untyped-call]
        tuning = Tuning(run.device, tuple(tuned for each in passes for tuned in run.tune_pass(each, step)))
    if show:
        print(tuning)
    return tuning


def _check_tunable(kernel: Any, problem: Problem) -> None:
    """Raise the errors of `tune` for a `kernel` that is no `Triton`, and for a problem that cannot be tuned."""
    if not isinstance(kernel, Triton):
        raise ParameterError(f"kernel={kernel!r}", "sightline.gpu.Triton(), or None", "leave kernel=None")
    reasons = list(kernel.refuses(problem))
    if reasons:
        raise KernelRefusedError(
            "the GPU kernels cannot be tuned for this problem: " + "; ".join(each.reason for each in reasons),
            "problems that the GPU kernels serve, with tensors on the GPU",
            "; ".join(each.cure for each in reasons),
        )
    from ..launch.forward import uses_decode  # loads triton, which `refuses` has found

    if problem.is_small_on_gpu and not uses_decode(problem):
        raise ParameterError(
            f"a small problem, (B, H, n, m) = {problem.extent}, whose launches are not tuned",
            "decoding (few queries, many keys), or "
            f"2 · B · H · max(n, {MIN_COUNTED_QUERIES}) · m · (d_k + d_v) above {MAX_SMALL_FLOPS:,}",
            "tune with the lengths of your long calls",
        )


class TuningRun:
    """The problem, the kernel and the arrays that all trials of one call of `tune` share."""

    def __init__(self, problem: Problem, kernel: Triton, timer: Timer) -> None:
        import torch

        detached = {name: getattr(problem, name).detach() for name in ("query", "key", "value")}
        self.problem, self.kernel, self.timer = replace(problem, **detached), kernel, timer
        self.architecture = kernel.architecture or architecture_of(problem.query.device)
        self.device = device_of(problem, self.architecture)
        generator = torch.Generator(device="cpu").manual_seed(0)
        shape = (*problem.batch_shape, problem.H, problem.n, problem.d_v)
        self.d_output = torch.randn(shape, generator=generator).to(problem.query)
        self.saved: Any = None

    def forward(self) -> tuple[Any, ...]:
        """Run the forward pass; return output, lse and the float arrays of the statistics.

        Arrays of key indices are left out, since ties between scores leave them ambiguous.
        """
        result = solve_selections_separately(self.problem, self.kernel.run)
        self.saved = result.output, result.lse
        return result.output, *self._row_arrays(result)

    def backward(self) -> tuple[Any, ...]:
        """Run the backward pass; return the gradients of query, key and value, or () if the kernel has no gradients."""
        found = self.kernel.backward(self.problem, self.d_output, None, self.saved, ())
        return () if found is None else (found.query, found.key, found.value)

    def expected(self, call: Callable[[], Any]) -> list[Any]:
        """Return some rows of the expected result of `call`, computed in float64 by `Streaming` on the same device."""
        wide = {name: getattr(self.problem, name).double() for name in ("query", "key", "value")}
        problem = replace(self.problem, **wide)
        if call == self.forward:
            result = solve_selections_separately(problem, Streaming().run)
            return [_sample_rows(array) for array in (result.output, *self._row_arrays(result))]
        found: Gradients = backward(problem, self.d_output.double())
        return [_sample_rows(array) for array in (found.query, found.key, found.value)]

    def tune_pass(self, call: Callable[[], Any], step: ProgressCallback) -> Iterator[TunedKernel]:
        """Tune every kernel that the forward or backward pass `call` launches; save and yield the result of each."""
        with try_sizes({}) as trial:
            default = [_sample_rows(array) for array in call()]
        if not default:
            return
        expected = self.expected(call)
        best: dict[str, Configuration] = {}
        for name, configuration in trial.requested.items():
            tuned = self._tune_kernel(name, configuration, best, call, (expected, default), step)
            best[name] = tuned.best
            if tuned.best != tuned.default:
                entry = {"configuration": asdict(tuned.best), "seconds": tuned.after, "default_seconds": tuned.before}
                entry |= {"extent": self.problem.extent}
                tuned = replace(tuned, path=cache.store(name, self.problem, self.device, entry))
            yield tuned

    def _tune_kernel(
        self,
        name: str,
        default: Configuration,
        others: dict[str, Configuration],
        call: Callable[[], Any],
        references: tuple[list[Any], list[Any]],
        step: ProgressCallback,
    ) -> TunedKernel:
        """Tune the kernel `name`, while other kernels use the configurations `others`.

        `references` is (the expected result of `call`, the result of `call` with the default configurations).
        """
        able = candidates(name, self.problem, self.architecture)
        sizes = [default, *(each for each in able if each != default)]
        times: dict[Configuration, float] = {}
        wrong = failed = 0
        reason = ""
        for done, each in enumerate(sizes):
            step(f"{name}: {each.rows} × {each.keys}, {each.warps} warps, {each.stages} stages", done, len(sizes))
            with try_sizes({**others, name: each}):
                try:
                    found = call()
                    right = _budget_share(found, *references) <= 1
                    if right:
                        times[each] = self._measure(call)
                except Exception as error:  # by the compiler or the driver: too much shared memory, too many registers
                    if each == default:
                        raise
                    failed += 1
                    reason = reason or f"{type(error).__name__}: {error}"
                else:
                    wrong += not right
        finalists = sorted(times, key=lambda each: times[each])[:FINALISTS]
        finalists = [default, *(each for each in finalists if each != default)]
        medians = self._time_interleaved(name, finalists, others, call)
        best = min(medians, key=lambda each: medians[each])
        best = best if medians[best] * MIN_SPEEDUP <= medians[default] else default
        return TunedKernel(name, default, best, medians[default], medians[best], len(sizes), wrong, failed, reason)

    def _time_interleaved(
        self, name: str, sizes: Sequence[Configuration], others: dict[str, Configuration], call: Callable[[], Any]
    ) -> dict[Configuration, float]:
        """Return the median time in seconds of each configuration; the measurements of the configurations alternate."""
        times: dict[Configuration, list[float]] = {each: [] for each in sizes}
        for _ in range(ROUNDS):
            for each in sizes:
                with try_sizes({**others, name: each}):
                    times[each].append(self._measure(call))
        return {each: statistics.median(seconds) for each, seconds in times.items()}

    def _measure(self, call: Callable[[], Any]) -> float:
        """Return the timer's seconds for `call`; raise ParameterError if the timer does not return finite seconds."""
        seconds = self.timer(call)
        if not isinstance(seconds, float | int) or not 0 <= seconds < math.inf:
            raise ParameterError(f"a timer that returns {seconds!r}", "finite seconds, at least 0", "leave timer=None")
        return float(seconds)

    def _row_arrays(self, result: Result) -> list[Any]:
        """Return lse and the float arrays of the statistics, each with a last axis of length 1 appended.

        The arrays have the accumulator's dtype.
        """
        import torch

        seen = [array for answer in result.seen for array in arrays_of(answer) if array.is_floating_point()]
        return [array.to(getattr(torch, self.problem.accumulator))[..., None] for array in (result.lse, *seen)]


def _sample_rows(array: Any) -> Any:
    """Return at most `MAX_COMPARED_ROWS` rows of an array (..., rows, width), with its first and last, on the CPU."""
    import torch

    count = array.shape[-2]
    rows = np.unique(np.linspace(0, count - 1, min(count, MAX_COMPARED_ROWS)).astype(np.int64))
    return array.index_select(-2, torch.from_numpy(rows).to(array.device)).cpu()


def _budget_share(found: Sequence[Any], expected: Sequence[Any], default: Sequence[Any]) -> float:
    """Return the largest share of its error budget that an array of `found` uses; more than 1 exceeds the budget."""
    return max(
        budget_used(_sample_rows(array), to_numpy(right), to_numpy(baseline).astype(np.float64))
        for array, right, baseline in zip(found, expected, default, strict=True)
    )


def _time_with_events(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, the median of many calls timed by CUDA events."""
    from triton.testing import do_bench

    return float(do_bench(call, return_mode="median")) / 1e3


@contextmanager
def _progress_bar(show: bool) -> Iterator[ProgressCallback]:
    """Yield the callback of a progress bar, which is visible only with `show` in a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, transient=True)
    bar.disable = not (show and bar.console.is_terminal)
    with bar:
        task = bar.add_task("", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


def _format_row(tuned: TunedKernel) -> tuple[str, ...]:
    """Return the texts in the row of a kernel in the table that `Tuning` prints."""
    sizes = tuned.best
    speedup = "none" if sizes == tuned.default else f"{tuned.before / tuned.after:.2f}×"
    tried = f"{tuned.tried}, {tuned.wrong} wrong, {tuned.failed} failed"
    times = (_format_time(tuned.after), _format_time(tuned.before))
    return tuned.kernel, f"{sizes.rows} × {sizes.keys}", str(sizes.warps), str(sizes.stages), *times, speedup, tried


def _format_time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
