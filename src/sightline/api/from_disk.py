"""The public function `attention_from_disk`: attention over keys and values in blocks that fit a limit of memory."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import operations as arrays
from ..arrays.unreadable import is_array
from ..call.kernel import Result
from ..call.partition.parts import Sums, add_parts, part_of, read_part, start
from ..call.problem import Options, Problem, parse, validate
from ..call.validation import broadcast_inputs, split_names
from ..errors import DtypeError, ParameterError
from ..formula.expression import Expression
from ..formula.tile_ranges import find_runs, find_tile_ranges
from ..statistics import Statistic
from .kernels import solve, to_caller

Progress = bool | Callable[[int, int], Any] | None
UNITS = ("", "k", "M", "G", "T")
MIN_POSITIONS = 64  # the fewest keys of a block, and the fewest queries of a part
SEARCH_ROWS = 256  # the queries of a tile in the search for the queries that see a block
MAX_PAIRS = 1 << 30  # the most pairs of one part, so that an interrupt takes effect within seconds
MERGE_COPIES = 6  # the merge of a part's results needs memory for so many copies of its output and statistics
KEY_MULTIPLE = 4  # dropout counts keys in groups of 4


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
        `lse()`, `entropy()`, `max_score()`, `mass(condition)`, `sum(p * f, over=j)` and `top_k(k)`, and means over
        heads or batch of those that return no positions. Other statistics need all keys at once.
    output : path, or array (..., H, n, d_v) of the inputs' dtype, optional
        Where the output is written: the path of a file in NumPy's format .npy, or an array such as a numpy.memmap. The
        default is a new array in memory. A call that stops early leaves no new file, and keeps an older one.
    memory_limit : int or str, default "2 GB"
        The bytes that the call may use beside its arguments. The merged results of all queries are always in memory.
        For each query and head they take 4 · d_v + 24 bytes of the limit, 6 · d_v + 24 for 16-bit inputs, 8 · d_v + 24
        for float64. Each number of a statistic other than lse takes up to 16 bytes more.
    progress : bool or function (finished, total), optional
        True shows a progress bar on stderr. The default shows one if stderr is a terminal. A function is called with
        the number of finished steps and the number of all steps.

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
        The memory limit is too small, `see` has another statistic, or `output` does not fit or is read-only.
    OSError
        The file of the output cannot be written.

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
    names, statistics = split_names(see)
    sources = {"query": query, "key": key, "value": value}
    options = Options(mask, score, statistics, scale, sinks, dropout, seed, None, threads)
    stand_ins = {name: _stand_in(name, source) for name, source in sources.items()}
    problem = validate(parse(**stand_ins, options=options))
    if not all(statistic.is_mergeable for statistic in problem.see):
        allowed = "lse(), entropy(), max_score(), mass(condition), sum(p * f, over=j), top_k(k); no selections"
        cure = "select from the result, or call sightline.attention if the keys fit in memory"
        raise ParameterError(f"see={list(problem.see)!r}, for keys on disk", allowed, cure)
    sizes = _choose_sizes(problem, sources, _parse_bytes(memory_limit))
    with _open_output(output, problem) as write, _report_progress(progress) as report:
        sums = _sum_blocks(problem, sources, sizes, report)
        result = write(problem.squeeze_heads(sums.output, 2))
    if see is None:
        return result
    results = []
    for statistic, totals in zip(problem.see, sums.seen, strict=True):
        dtypes = statistic.dtypes(problem)
        results.append(statistic.build_result([x.astype(dtype) for x, dtype in zip(totals, dtypes, strict=True)]))
    _, seen = to_caller(problem, Result(sums.output, sums.shift, tuple(results)), statistics)
    return result, seen if names is None else dict(zip(names, seen, strict=True))


def _sum_blocks(
    problem: Problem, sources: dict[str, Any], sizes: tuple[int, int], report: Callable[[int, int], Any]
) -> Sums:
    """Return the normalised sums over all blocks of keys. `sizes`: the keys of a block, and the queries of a part."""
    sinks = None if problem.sinks is None else np.asarray(arrays.to_numpy(problem.sinks), np.float64)[:, None]
    output = np.zeros((*problem.batch_shape, problem.H, problem.n, problem.d_v), problem.accumulator)
    sums = start(problem, output, sinks, np.float64)
    blocks = _find_blocks(problem.mask, problem.extent, *sizes)
    finished, total = 0, sum([len(parts) for _, parts in blocks])
    report(finished, total)
    with ThreadPoolExecutor(1, thread_name_prefix="sightline-read") as reader, np.errstate(all="ignore"):

        def read(block: tuple[slice, list[slice]]) -> list[Any]:
            return [np.array(sources[name][..., block[0], :]) for name in ("key", "value")]

        reads = (reader.submit(read, block) for block in blocks)
        following = next(reads, None)  # starts to read
        for keys, parts in blocks:
            assert following is not None
            key, value = following.result()
            following = next(reads, None)
            for rows in parts:
                query = np.asarray(sources["query"][..., rows, :])
                inputs = broadcast_inputs({"query": query, "key": key, "value": value})
                inputs = [arrays.broadcast_to(x, (*problem.batch_shape, *x.shape[-3:])) for x in inputs]
                part = part_of(problem, *inputs, first_row=rows.start, first_key=keys.start, see=problem.see)
                result = solve(part)
                added = read_part(result.output.astype(output.dtype), result.lse, result.seen, keys.start)
                sums.store(rows, add_parts([sums.rows(rows), added], problem.see))
                finished += 1
                report(finished, total)
        for first in range(0, problem.n, sizes[1]):
            rows = slice(first, first + sizes[1])
            sums.store(rows, add_parts([sums.rows(rows)], problem.see, normalize=True))
    return sums


def _find_blocks(
    mask: Expression | None, extent: tuple[int, int, int, int], key_count: int, row_count: int
) -> list[tuple[slice, list[slice]]]:
    """Return (keys, parts of the queries that may see one of them) of each block of keys that is seen."""
    _, _, n, m = extent
    blocks = []
    for block, is_seen in enumerate(find_tile_ranges(mask, extent, SEARCH_ROWS, key_count).find_covered().T):
        parts = []
        for first, last in find_runs(is_seen):
            begin, end = first * SEARCH_ROWS, min(last * SEARCH_ROWS, n)
            parts += [slice(row, min(row + row_count, end)) for row in range(begin, end, row_count)]
        if parts:
            blocks.append((slice(block * key_count, min((block + 1) * key_count, m)), parts))
    return blocks


def _parse_bytes(limit: Any) -> int:
    """Return a number of bytes from a whole number or text such as "2 GB" or "512 MiB"; else raise ParameterError."""
    if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
        return limit
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B\s*", limit) if isinstance(limit, str) else None
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** UNITS.index(match[2])) if match else 0
    if size < 1:
        raise ParameterError(f"memory_limit={limit!r}", "a number of bytes, or text with a unit", 'memory_limit="2 GB"')
    return size


def _choose_sizes(problem: Problem, sources: dict[str, Any], limit: int) -> tuple[int, int]:
    """Return the largest numbers of keys of a block and queries of a part with which a call stays within the limit."""
    heads, wide, narrow = problem.B * problem.H, *map(arrays.itemsize, (problem.accumulator, problem.dtype))
    per_key = sum([math.prod(sources[name].shape) // max(problem.m, 1) for name in ("key", "value")])
    key_bytes = 2 * narrow * per_key  # one block is read ahead
    numbers = sum([math.prod(shape) for statistic in problem.see for shape, _ in statistic.outputs(problem)])
    sums = heads * problem.n * (problem.d_v * (wide + narrow % wide) + 24)  # `Sums` has 3 numbers of 8 bytes a query
    sums += numbers * (8 + wide)  # summed in 8 bytes, and returned in the accumulator's dtype
    row_bytes = heads * (problem.d_k * narrow + MERGE_COPIES * problem.d_v * wide + 16 * 8)
    row_bytes += MERGE_COPIES * 8 * numbers // max(problem.n, 1)
    least = sums + 2 * MIN_POSITIONS * max(key_bytes, row_bytes)
    if limit < least:
        given = f"memory_limit of {limit:,} bytes"
        allowed = f"at least {least:,} bytes for {problem.n:,} queries, {heads} heads and d_v = {problem.d_v}"
        raise ParameterError(given, allowed, f"memory_limit={least}, or fewer queries in one call")
    half = (limit - sums) // 2
    keys = half // max(key_bytes, 1) // KEY_MULTIPLE * KEY_MULTIPLE
    keys = min(keys, max(-(-problem.m // KEY_MULTIPLE), 1) * KEY_MULTIPLE)
    rows = min(half // max(row_bytes, 1), max(MAX_PAIRS // (max(heads, 1) * keys), MIN_POSITIONS), problem.n)
    return keys, max(rows, 1)


def _stand_in(name: str, array: Any) -> Any:
    """Return an array that has the shape and dtype of the given array, and that takes no memory."""
    if not is_array(array) or (arrays.framework(array).is_native and not isinstance(array, np.ndarray)):
        given = f"{name} is a {type(array).__module__}.{type(array).__name__}"
        allowed = "numpy.memmap, or an array whose slices numpy.asarray accepts"
        raise DtypeError(given, allowed, f"numpy.memmap of a file, or sightline.attention for {name} in memory")
    return np.broadcast_to(np.zeros((), array.dtype), tuple(array.shape))


@contextmanager
def _open_output(output: Any, problem: Problem) -> Iterator[Callable[[Any], Any]]:
    """Check where the output goes, and yield the function that writes it and returns what the caller gets.

    A path gets a complete file or none: the entries go to a file beside it, which then takes its name.
    """
    dtype = np.dtype(arrays.resolve_dtype(np, problem.dtype))
    if isinstance(output, str | PathLike):
        path = os.path.realpath(output)
        unfinished = f"{path}.{os.getpid()}.unfinished"
        try:
            with open(unfinished, "wb") as file:  # a folder that does not exist is an error before the work

                def save(result: Any) -> Any:
                    np.save(file, result.astype(dtype, copy=False))
                    file.close()
                    os.replace(unfinished, path)
                    return np.load(path, mmap_mode="r+").view(dtype)  # NumPy's format has no name for bfloat16

                yield save
        finally:
            Path(unfinished).unlink(missing_ok=True)
        return
    if output is None:
        yield lambda result: result.astype(dtype, copy=False)
        return
    heads = () if problem.heads_squeezed else (problem.H,)
    shape = (*problem.batch_shape, *heads, problem.n, problem.d_v)
    given = f"{getattr(output, 'dtype', type(output).__name__)} {getattr(output, 'shape', '')}"
    is_read_only = isinstance(output, np.ndarray) and not output.flags.writeable
    if is_read_only or given != f"{dtype} {shape}":
        allowed = f"a path, or an array {dtype} {shape} to write to"
        raise ParameterError(f"output={given}{', read-only' * is_read_only}", allowed, 'output="output.npy"')

    def fill(result: Any) -> Any:
        output[...] = result
        return output

    yield fill


@contextmanager
def _report_progress(progress: Progress) -> Iterator[Callable[[int, int], Any]]:
    """Yield the function that is called with (finished steps, all steps); it draws a bar on stderr if one is wanted."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        given = f"progress={progress!r}"
        raise ParameterError(given, "True, False, None or a function (finished, total)", "progress=True")
    if callable(progress) or progress is False or (progress is None and not sys.stderr.isatty()):
        yield progress if callable(progress) else lambda finished, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("attention", total=None)
        yield lambda finished, total: bar.update(task, completed=finished, total=total)
