"""The public function `attention_from_disk`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from ...arrays import operations as arrays
from ...dispatch.kernel_list import to_caller_layout
from ...errors import DtypeError, ParameterError
from ...problem.kernel import Result
from ...problem.problem import Problem, make_problem
from ...problem.validation import check_choice, split_names
from ...statistics import Lse, Statistic
from .block_plan import choose_sizes, find_work, parse_bytes
from .checkpoint import Checkpoint, State, hash_arguments
from .output import check_output, open_output
from .run import Run

Progress = bool | Callable[[int, int], Any] | None


def attention_from_disk(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    see: Statistic | Sequence[Statistic] | dict[str, Statistic] | None = None,
    output: Any = None,
    memory_limit: int | str = "2 GB",
    checkpoint: str | PathLike[str] | None = None,
    progress: Progress = None,
    threads: int | None = None,
) -> Any:
    """Compute `attention` for keys and values that are larger than memory.

    Keys and values are read once, in blocks that fit `memory_limit`. One thread reads the next block while the current
    block is computed. A block is computed only for the queries that can see one of its keys, and a block that no query
    sees is not read. The results of the blocks are merged exactly, by the formula of `merge`.

    Parameters
    ----------
    query : (..., H, n, d_k)
        numpy.memmap, a NumPy array, or any array whose slices numpy.asarray accepts, such as a dataset of h5py.
    key : (..., G, m, d_k), the same dtype
    value : (..., G, m, d_v), the same dtype
    mask, score, scale, sinks, dropout, seed, threads
        As in `attention`. Formulas count i and j from the start of the whole arrays.
    see : list of statistics, dict from names to statistics, or one statistic, optional
        `lse()`, `entropy()`, `max_score()`, `mass(condition)` and `top_k(k)`. Other statistics need all keys at once.
    output : path, or array (..., H, n, d_v) of the inputs' dtype, optional
        Where the output is written: the path of a file in NumPy's format .npy, or an array such as a numpy.memmap. The
        default is a new array in memory. Disk space for the file is reserved before the first block is computed. The
        file is written at the end, and a call that stops early leaves no new file.
    memory_limit : int or str, default "2 GB"
        The bytes that the call may use beside its arguments. The merged results of all queries are always in memory.
        They take n · H · (d_v + 2) · 4 bytes of the limit, or n · H · (d_v + 1) · 8 bytes for float64. Each number of a
        statistic other than lse takes up to 16 bytes more.
    checkpoint : path of a folder, optional
        The folder in which the state is saved every minute and when the call stops early, for example by Ctrl-C. A
        second call with the same arguments continues from there and gives the same bits as an uninterrupted call. When
        the call finishes, the state is removed. On the disk, the state takes twice the bytes of the merged results. To
        find changed entries, a second call hashes the query, and the keys and values that the first call has used.
    progress : bool or function (finished, total), optional
        True shows a progress bar on stderr. The default shows one if stderr is a terminal. A function is called with
        the number of finished work items and the number of all work items.

    Returns
    -------
    output : (..., H, n, d_v), the dtype of the inputs
        An array, `output` itself, or a numpy.memmap of the new file.
    seen : tuple, or dict if `see` is a dict; only if `see` is given

    Raises
    ------
    SightlineError
        Every error of `attention`.
    ParameterError
        The memory limit is too small, `see` has another statistic, the checkpoint is damaged, is not a folder or has
        other arguments, the output is read-only or is the file of an input, or another call uses the checkpoint or the
        output file.
    OSError
        A disk has no space for the output or the state. The error is raised before the first block is computed.

    References
    ----------
    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> from sightline import i, j
    >>> x = np.random.default_rng(0).normal(size=(1000, 16))
    >>> output = sightline.attention_from_disk(x, x, x, mask=(i >= j) & (i - j < 256), memory_limit="600 kB")
    >>> bool(np.allclose(output, sightline.attention(x, x, x, mask=(i >= j) & (i - j < 256))))
    True
    """
    check_choice(None, threads)
    names, statistics = split_names(() if see is None else see)
    sources = {"query": query, "key": key, "value": value}
    options = {"mask": mask, "score": score, "scale": scale, "sinks": sinks, "dropout": dropout, "seed": seed}
    asked = make_problem(*_stand_ins(sources), **options, see=statistics)
    _check_statistics(asked)
    problem = replace(asked, see=tuple([statistic for statistic in asked.see if not isinstance(statistic, Lse)]))
    sizes = choose_sizes(problem, _key_bytes(key, value), parse_bytes(memory_limit), output is None)
    check_output(output, problem, sources)
    run = Run(problem, sources, find_work(problem.mask, problem.extent, sizes), threads)
    with ExitStack() as stack:
        if checkpoint is not None:
            arguments = hash_arguments(problem, sources, run.items)
            run.resume(stack.enter_context(Checkpoint(checkpoint, arguments, len(run.items))))
        with open_output(output, problem) as write, _report_progress(progress) as report:
            try:
                for finished, total in run.steps():
                    report(finished, total)
                result = write(run.state.output)
            except BaseException:
                run.save()
                raise
        if run.checkpoint is not None:
            run.checkpoint.remove()
    if see is None:
        return result
    _, seen = to_caller_layout(asked, Result(run.state.output, run.state.lse, tuple(_build_results(asked, run.state))))
    return result, seen if names is None else dict(zip(names, seen, strict=True))


def _build_results(problem: Problem, state: State) -> Iterator[Any]:
    """Yield the result of each statistic. `state.seen` has the arrays of the statistics other than lse."""
    others = iter(state.seen)
    for statistic in problem.see:
        own = zip([state.lse] if isinstance(statistic, Lse) else next(others), statistic.dtypes(problem), strict=True)
        yield statistic.build_result([array.astype(dtype, copy=False) for array, dtype in own])


def _stand_ins(sources: dict[str, Any]) -> list[Any]:
    """Return arrays that have the shapes and dtypes of the sources, and that take no memory."""
    found = []
    for name, array in sources.items():
        if not (hasattr(array, "shape") and hasattr(array, "dtype")) or arrays.framework(array) in ("torch", "jax"):
            raise DtypeError(
                f"{name} is a {type(array).__module__}.{type(array).__name__}",
                "numpy.memmap, or an array whose slices numpy.asarray accepts",
                f"numpy.memmap of a file, or sightline.attention for {name} in memory",
            )
        found.append(np.broadcast_to(np.zeros((), array.dtype), tuple(array.shape)))
    return found


def _key_bytes(key: Any, value: Any) -> int:
    """Return the bytes of one position of key and value, over all batches and heads."""
    positions = max(key.shape[-2], 1)
    return sum(math.prod(x.shape) // positions * np.dtype(x.dtype).itemsize for x in (key, value))


def _check_statistics(problem: Problem) -> None:
    if not all(statistic.is_mergeable for statistic in problem.see):
        raise ParameterError(
            f"see={list(problem.see)!r}, for keys on disk",
            "lse(), entropy(), max_score(), mass(condition) and top_k(k), without selections and means",
            "select or average the result, or call sightline.attention if the keys fit in memory",
        )


@contextmanager
def _report_progress(progress: Progress) -> Iterator[Callable[[int, int], Any]]:
    """Yield the function that is called with (finished work items, all work items) after each item.

    Parameters
    ----------
    progress : the function itself; True for a progress bar on stderr; None for a bar if stderr is a terminal
    """
    if callable(progress):
        yield progress
        return
    if not (progress is None or isinstance(progress, bool)):
        raise ParameterError(
            f"progress={progress!r}", "True, False, None or a function (finished, total)", "progress=True"
        )
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda finished, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("attention"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda finished, total: bar.update(task, completed=finished, total=total)
