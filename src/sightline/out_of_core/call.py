"""The public function `attention_from_disk`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from os import PathLike
from typing import Any

import numpy as np

from .. import arrays
from ..dispatch import solve
from ..errors import DtypeError, ParameterError, ShapeError
from ..lse_merge import merge
from ..problem import Problem, make_problem
from ..sharding import part_of
from ..statistics import Lse, Statistic
from ..validation import broadcast_inputs, check_choice, split_names
from .block_plan import BlockSizes, WorkItem, choose_sizes, find_work, parse_bytes
from .checkpoint import Checkpoint, State, digest
from .progress_bar import Progress, report_progress

__all__ = ["attention_from_disk"]

SECONDS_BETWEEN_SAVES = 60.0
COPY_ELEMENTS = 1 << 20  # of the output that are converted at once


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

    Keys and values are read once, in blocks that fit `memory_limit`; one thread reads the next block while the current
    one is computed. A block is computed only for the queries that can see one of its keys, and a block that no query
    sees is not read. The results of the blocks are merged exactly, by the formula of `merge`.

    Parameters
    ----------
    query : (..., H, n, d_k)
        numpy.memmap, a NumPy array, or any array whose slices numpy.asarray accepts, such as a dataset of h5py.
    key : (..., G, m, d_k), the same dtype
    value : (..., G, m, d_v), the same dtype
    mask, score, scale, sinks, dropout, seed, threads
        As in `attention`. Formulas count i and j from the start of the whole arrays.
    see : lse(), or a list or dict of it, optional
        Other statistics are refused.
    output : path, or array (..., H, n, d_v) of the inputs' dtype, optional
        Where the output is written: the path of a new file in NumPy's format .npy, or an array such as a numpy.memmap.
        The default is a new array in memory.
    memory_limit : int or str, default "2 GB"
        The bytes that the call may use beside its arguments. The limit contains the sums of all queries, which are
        always in memory: n · H · (d_v + 2) · 4 bytes, or n · H · (d_v + 1) · 8 bytes for float64.
    checkpoint : path of a folder, optional
        The folder in which the state is saved every minute and when the call stops early, for example by Ctrl-C. A
        second call with the same arguments continues from there and gives the same bits as an uninterrupted call. When
        the call finishes, the state is removed.
    progress : bool or function (finished, total), optional
        True shows a progress bar on stderr; the default shows one if stderr is a terminal.

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
        The memory limit is too small, `see` has another statistic than lse, the checkpoint is one of other arguments or
        no folder, or the output is read-only or the file of an input.

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
    problem = make_problem(*_stand_ins(sources), **options, see=statistics)
    _check_statistics(problem)
    sizes = choose_sizes(problem, _key_bytes(key, value), parse_bytes(memory_limit), output is None)
    _check_output(output, sources)
    saved = None if checkpoint is None else Checkpoint(checkpoint, digest(problem, sources, sizes))
    run = _Run(problem, sources, sizes, saved, threads)
    target = _open_output(problem, output)
    with report_progress(progress) as report:
        try:
            for finished, total in run.steps():
                report(finished, total)
            result = run.write(target)
        except BaseException:
            run.save()
            raise
    if saved is not None:
        saved.remove()
    if see is None:
        return result
    lse = problem.squeeze_heads(run.state.lse, 1).astype(problem.accumulator)
    seen = tuple([lse for _ in problem.see])
    return result, seen if names is None else dict(zip(names, seen, strict=True))


class _Run:
    """The work items of one call, and its state."""

    def __init__(
        self,
        problem: Problem,
        sources: dict[str, Any],
        sizes: BlockSizes,
        checkpoint: Checkpoint | None,
        threads: int | None,
    ) -> None:
        self.problem, self.sources, self.checkpoint, self.threads = problem, sources, checkpoint, threads
        self.items = find_work(problem.mask, problem.extent, sizes)
        loaded = None if checkpoint is None else checkpoint.load()
        self.state = _initial_state(problem) if loaded is None else loaded
        self.merged: tuple[int, Any, Any] | None = None  # the item that is being stored, its output and its lse

    def steps(self) -> Iterator[tuple[int, int]]:
        """Compute the work items that remain. Yield (finished, total) at the start and after each item."""
        yield self.state.finished, len(self.items)
        saved_at = time.monotonic()
        for item, key, value in self._blocks():
            self._compute(item, key, value)
            yield self.state.finished, len(self.items)
            if time.monotonic() - saved_at > SECONDS_BETWEEN_SAVES:
                self.save()
                saved_at = time.monotonic()

    def save(self) -> None:
        """Save the state if the call has a checkpoint."""
        self._store()
        if self.checkpoint is not None:
            self.checkpoint.save(self.state)

    def write(self, target: Any) -> Any:
        """Write the output to `target`, or return it as a new array if `target` is None."""
        problem, output = self.problem, self.problem.squeeze_heads(self.state.output, 2)
        dtype = np.dtype(arrays.resolve_dtype(np, problem.dtype))
        if target is None:
            return output.astype(dtype, copy=False)
        step = max(COPY_ELEMENTS // max(problem.B * problem.H * problem.d_v, 1), 1)
        for start in range(0, problem.n, step):
            target[..., start : start + step, :] = output[..., start : start + step, :].astype(dtype)
        if isinstance(target, np.memmap):
            target.flush()
        return target

    def _blocks(self) -> Iterator[tuple[WorkItem, Any, Any]]:
        """Yield the remaining items with their keys and values. A thread reads the next block meanwhile."""
        blocks = [list(items) for _, items in groupby(self.items[self.state.finished :], lambda item: item.keys.start)]
        with ThreadPoolExecutor(1, thread_name_prefix="sightline-read") as reader:
            reads = (reader.submit(self._read, items[0].keys) for items in blocks)
            following = next(reads, None)  # starts to read
            for items in blocks:
                assert following is not None
                key, value = following.result()
                following = next(reads, None)
                for item in items:
                    yield item, key, value

    def _read(self, keys: slice) -> tuple[Any, Any]:
        """Return a block of keys and values."""
        key, value = (np.array(self.sources[name][..., keys, :]) for name in ("key", "value"))
        return key, value

    def _compute(self, item: WorkItem, key: Any, value: Any) -> None:
        """Compute one work item and merge it into the state."""
        state, rows = self.state, item.queries
        query = np.asarray(self.sources["query"][..., rows, :])
        operands = _broadcast({"query": query, "key": key, "value": value}, self.problem)
        part = part_of(self.problem, *operands, first_row=rows.start, first_key=item.keys.start)
        result = solve(part, None, self.threads)
        output = result.output.astype(state.output.dtype, copy=False)
        self.merged = state.finished, *merge([(state.output[..., rows, :], state.lse[..., rows]), (output, result.lse)])
        self._store()

    def _store(self) -> None:
        """Store the merged rows. An interrupt may stop this at any point, and `save` then repeats it."""
        if self.merged is None:
            return
        number, output, lse = self.merged
        rows = self.items[number].queries
        self.state.output[..., rows, :], self.state.lse[..., rows] = output, lse
        self.state.finished = number + 1
        self.merged = None


def _stand_ins(sources: dict[str, Any]) -> list[Any]:
    """Return arrays with the shapes and dtypes of the sources that take no memory."""
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


def _broadcast(parts: dict[str, Any], problem: Problem) -> list[Any]:
    """Return parts of query, key and value with a head axis and the batch axes of the problem."""
    return [arrays.broadcast_to(x, (*problem.batch_shape, *x.shape[-3:])) for x in broadcast_inputs(parts)]


def _key_bytes(key: Any, value: Any) -> int:
    """Return the bytes of one position of key and value."""
    positions = max(key.shape[-2], 1)
    return sum(math.prod(x.shape) // positions * np.dtype(x.dtype).itemsize for x in (key, value))


def _check_statistics(problem: Problem) -> None:
    if any(type(statistic) is not Lse for statistic in problem.see):
        raise ParameterError(
            f"see={list(problem.see)!r}", "lse() alone, for keys on disk", "see=[sightline.lse()], or attention"
        )


def _initial_state(problem: Problem) -> State:
    """Return the state before the first key: sinks take part in the softmax, but have no row of V."""
    shape = (*problem.batch_shape, problem.H, problem.n)
    lse = np.full(shape, -np.inf)
    if problem.sinks is not None:
        lse[...] = np.asarray(arrays.to_numpy(problem.sinks), np.float64)[:, None]
    return State(np.zeros((*shape, problem.d_v), problem.accumulator), lse)


def _check_output(output: Any, sources: dict[str, Any]) -> None:
    """Raise ParameterError if the output is a read-only array, or the path of a file that an input reads."""
    if isinstance(output, np.ndarray) and not output.flags.writeable:
        raise ParameterError("output is a read-only array", "an array to write to", 'numpy.load(path, mmap_mode="r+")')
    if not isinstance(output, str | PathLike) or not os.path.exists(output):
        return
    for name, array in sources.items():
        file = _find_file(array)
        if file is not None and os.path.exists(file) and os.path.samefile(file, output):
            raise ParameterError(f"output={str(output)!r}, the file of {name}", "another file", 'output="output.npy"')


def _find_file(array: Any) -> Any:
    """Return the path of the file that an array or the base of a view maps; None if there is none."""
    while array is not None and getattr(array, "filename", None) is None:
        array = getattr(array, "base", None)
    return None if array is None else array.filename


def _open_output(problem: Problem, output: Any) -> Any:
    """Return the array that receives the output; None for a new array in memory."""
    if output is None:
        return None
    whole = (*problem.batch_shape, problem.H, problem.n, problem.d_v)
    shape = problem.squeeze_heads(np.broadcast_to(np.zeros(()), whole), 2).shape
    dtype = np.dtype(arrays.resolve_dtype(np, problem.dtype))
    if isinstance(output, str | PathLike):
        return np.lib.format.open_memmap(output, mode="w+", dtype=dtype, shape=shape)
    if not hasattr(output, "dtype") or output.dtype != dtype:
        given = getattr(output, "dtype", type(output).__name__)
        raise DtypeError(f"output of {given}", f"a path, or an array of {dtype}", 'output="output.npy"')
    if tuple(output.shape) != tuple(shape):
        raise ShapeError(f"output of shape {tuple(output.shape)}", f"{tuple(shape)}", 'output="output.npy"')
    return output
