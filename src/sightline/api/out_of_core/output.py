"""Where the output of a call is written: a new array, an array of the caller or a new file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any

import numpy as np

from ...arrays import operations as arrays
from ...errors import DtypeError, ParameterError, ShapeError
from ...problem.problem import Problem
from .locked_file import LockedFile, reserve

COPY_ELEMENTS = 1 << 20  # the elements of the output that are converted at once

Write = Callable[[Any], Any]  # writes the output, given in the accumulator's dtype, and returns the caller's result


def check_output(output: Any, problem: Problem, sources: dict[str, Any]) -> None:
    """Raise an error if the output is an array that does not fit, or the path of a file that an input reads."""
    if isinstance(output, str | PathLike):
        tables = [*problem.tables]
        for statistic in problem.see:
            statistic.map_formulas(lambda formula: tables.extend(formula.tables))
        _check_file(output, sources | {"a table": [table.array for table in tables]})
        return
    if output is None:
        return
    shape, dtype = _form(problem)
    if isinstance(output, np.ndarray) and not output.flags.writeable:
        raise ParameterError("output is a read-only array", "an array to write to", 'numpy.load(path, mmap_mode="r+")')
    if not hasattr(output, "dtype") or output.dtype != dtype:
        given = getattr(output, "dtype", type(output).__name__)
        raise DtypeError(f"output of {given}", f"a path, or an array of {dtype}", 'output="output.npy"')
    if tuple(output.shape) != shape:
        raise ShapeError(f"output of shape {tuple(output.shape)}", f"the shape {shape}", 'output="output.npy"')


@contextmanager
def open_output(output: Any, problem: Problem) -> Iterator[Write]:
    """Reserve disk space for the output, and yield the function that writes it.

    A new file is removed if the `with` block fails, so a file of the output is always complete. A file that existed
    keeps its bytes until the output is written.

    Raises
    ------
    ParameterError
        Another call writes to the file.
    OSError
        The disk has no space for the output.
    """
    if not isinstance(output, str | PathLike):
        _reserve_mapped(output)
        yield partial(_write_array, output, problem)
        return
    file = LockedFile(output, "output")
    try:
        header = _file_header(*_form(problem))
        size = len(header) + problem.B * problem.H * problem.n * problem.d_v * _form(problem)[1].itemsize
        file.allocate(size)
        yield partial(_write_file, file, header, size, problem)
    except BaseException:
        file.restore_size()
        raise
    finally:
        file.close()


def _write_array(target: Any, problem: Problem, output: Any) -> Any:
    """Write to the array of the caller, or return a new array if the caller gave none."""
    output, dtype = problem.squeeze_heads(output, 2), _form(problem)[1]
    if target is None:
        return output.astype(dtype, copy=False)
    step = max(COPY_ELEMENTS // max(problem.B * problem.H * problem.d_v, 1), 1)
    for start in range(0, problem.n, step):
        target[..., start : start + step, :] = output[..., start : start + step, :].astype(dtype)
    mapped = _find_map(target)
    if mapped is not None:
        mapped.flush()
    return target


def _write_file(file: LockedFile, header: bytes, size: int, problem: Problem, output: Any) -> Any:
    """Write a file of `size` bytes in the format .npy, and return a numpy.memmap of it.

    `LockedFile.write` raises an error if the disk is full; an assignment to a memory map would end the process. The
    header is written last, so NumPy does not load an incomplete file.
    """
    shape, dtype = _form(problem)
    entries = output.reshape(-1)
    file.return_to_place(size)  # the file may have been removed since it was opened
    file.write(0, bytes(len(header)))
    for start in range(0, entries.size, COPY_ELEMENTS):
        part = entries[start : start + COPY_ELEMENTS].astype(dtype)
        file.write(len(header) + start * dtype.itemsize, part)
    file.truncate(size)
    file.sync()
    file.write(0, header)
    file.sync()
    return np.memmap(file.file, dtype, "r+", len(header), shape)


def _form(problem: Problem) -> tuple[tuple[int, ...], Any]:
    """Return the shape and the dtype of the output."""
    heads = () if problem.heads_squeezed else (problem.H,)
    shape = (*problem.batch_shape, *heads, problem.n, problem.d_v)
    return shape, np.dtype(arrays.resolve_dtype(np, problem.dtype))


def _file_header(shape: tuple[int, ...], dtype: Any) -> bytes:
    """Return the bytes before the entries of an array in a file of the format .npy."""
    file = io.BytesIO()
    form = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, form)
    return file.getvalue()


def _reserve_mapped(output: Any) -> None:
    """Reserve disk space for the part of a file that an array maps. A file may have holes, which take no space yet."""
    mapped = _find_map(output)
    if mapped is None or mapped.filename is None or mapped.mode == "c" or not os.path.isfile(mapped.filename):
        return
    first, last = np.lib.array_utils.byte_bounds(output)
    start = mapped.offset + first - np.lib.array_utils.byte_bounds(mapped)[0]
    with open(mapped.filename, "r+b") as file:
        if start + last - first <= os.fstat(file.fileno()).st_size:  # the file of the array still has this name
            reserve(file, start, last - first, os.path.realpath(mapped.filename), "output")


def _find_map(array: Any) -> Any:
    """Return the numpy.memmap of the whole mapping of which the array is a view; None if the array maps no file."""
    found = None
    while isinstance(array, np.ndarray):
        found = array if isinstance(array, np.memmap) else found
        array = array.base
    return found


def _check_file(output: Any, sources: dict[str, Any]) -> None:
    """Raise ParameterError if the output is the path of a file that an input reads."""
    if not os.path.exists(output):
        return
    for name, source in sources.items():
        for array in source if isinstance(source, list) else [source]:
            mapped = _find_map(array)
            file = getattr(getattr(array, "file", None) if mapped is None else mapped, "filename", None)  # h5py: `file`
            if file is not None and os.path.exists(file) and os.path.samefile(file, output):
                raise ParameterError(
                    f"output={str(output)!r}, the file of {name}", "another file", 'output="output.npy"'
                )
