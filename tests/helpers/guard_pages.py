"""Problems whose every array ends or begins at a page nobody may touch: a program, which one access outside ends.

    python guard_pages.py SEED COUNT [PAST]

Query, key, value, tables, outputs and gradients lie between pages without rights, at the end of their own pages in one
call and at the start in the next, in every dtype, forward, backward and one statistic. With PAST, keys and values
claim to have so many rows more than they do, to see that the kernel's reads are noticed.
"""

import ctypes
import ctypes.util
import mmap
import sys

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

import sightline
from sightline import b, h, i, j, s, table
from sightline.cpu import Cpu
from sightline.cpu.launch import backward as launch_backward
from sightline.cpu.launch import weights_pass as launch_weights_pass
from sightline.problem import make_problem

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
NONE, BOTH, PRIVATE = 0, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
C = ctypes.CDLL(None, use_errno=True)
C.mmap.restype = ctypes.c_void_p
C.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
C.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
C.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Fences:
    """Arrays between forbidden pages; `clear` gives the memory of all back."""

    def __init__(self):
        self.at_end, self.held = True, []

    def room(self, shape, dtype):
        """An array of the shape, its bytes 0."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        pages = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = C.mmap(None, pages + 2 * mmap.PAGESIZE, BOTH, PRIVATE, -1, 0)
        assert whole != ctypes.c_void_p(-1).value
        first = whole + mmap.PAGESIZE
        for fence in (whole, first + pages):
            assert C.mprotect(fence, mmap.PAGESIZE, NONE) == 0
        self.held.append((whole, pages + 2 * mmap.PAGESIZE))
        start = first + pages - size if self.at_end else first
        return np.frombuffer((ctypes.c_char * size).from_address(start), np.uint8).view(dtype).reshape(shape)

    def around(self, array):
        """The array's numbers in fenced memory."""
        found = self.room(array.shape, array.dtype)
        found[...] = array
        return found

    def clear(self):
        for place in self.held:
            C.munmap(*place)
        self.held.clear()


def question(rng, fences, past):
    """A problem at random: odd sizes, groups, masks, a table that learns, dropout."""
    dtype = DTYPES[rng.integers(4)]
    n, m, d_k, d_v = (int(x) for x in rng.integers(1, [90, 140, 40, 40]))
    B, G, group = (int(x) for x in rng.integers(1, 3, 3))
    shapes = (B, G * group, n, d_k), (B, G, m, d_k), (B, G, m, d_v)
    q, k, v = (fences.around(rng.normal(size=shape).astype(dtype)) for shape in shapes)
    k, v = (as_strided(x, (B, G, m + past, x.shape[-1]), x.strides) for x in (k, v))
    shift = np.float32 if rng.integers(2) else np.float64
    bias = table(fences.around(rng.normal(size=(G * group, n + m - 1)).astype(shift)))[h, i - j + m - 1]
    number = table(fences.around(rng.integers(0, 3, (B, max(n, m)))))
    options = [
        {},
        {"mask": i + (m - n) >= j},
        {"mask": number[b, i] == number[b, j]},
        {"score": s + bias},
        {"score": s + table(fences.around(rng.normal(size=(n, m)).astype(shift)))[i, j]},
        {"mask": i * 2 >= j, "score": sightline.softcap(5.0)},
        {"dropout": 0.3, "seed": 7, "sinks": rng.normal(size=G * group)},
        {"scale": -0.5, "mask": table(fences.around(rng.random((n, m)) < 0.6))[i, j], "score": s * 2 + bias},
    ][rng.integers(8)]
    return make_problem(q, k, v, **options)


def statistic(rng, problem, lse):
    """One of the second pass's answers, with odd parameters."""
    n, m = problem.n, problem.m
    i0, j0 = rng.integers(0, n), rng.integers(0, m)
    rows, columns = rng.integers(1, n - i0 + 1), rng.integers(1, m - j0 + 1)
    how = ["mean", "max"][rng.integers(2)]
    return [
        lambda: launch_weights_pass.received(problem, lse, how, int(rng.integers(1, n + 1)), 2),
        lambda: launch_weights_pass.pooled(problem, lse, int(rows), int(columns), how, ((i0, n), (j0, m)), 2),
        lambda: launch_weights_pass.top_k(problem, lse, int(rng.integers(1, 12)), 2),
        lambda: launch_weights_pass.weights(problem, lse, slice(i0, n), slice(j0, m), 2),
    ][rng.integers(4)]()


def main(seed, count, past=0):
    rng, kernel, fences = np.random.default_rng(seed), Cpu(), Fences()
    plain_empty = np.empty

    def empty(shape, dtype=float, **_):
        return fences.room(shape, dtype) if np.dtype(dtype).kind in "fVi" else plain_empty(shape, dtype)

    table_sums = launch_backward._allocate_table_sums
    launch_backward._allocate_table_sums = lambda *given: fences.around(table_sums(*given))
    zeros = launch_weights_pass._zeros
    launch_weights_pass._zeros = lambda *given: fences.around(zeros(*given))
    for call in range(count):
        fences.at_end = call % 2 == 0
        problem = question(rng, fences, past)
        np.empty = empty
        try:
            answer = kernel.run(problem, 2)
            d_output, d_lse = (
                fences.around(rng.normal(size=x.shape).astype(x.dtype)) for x in (answer.output, answer.lse)
            )
            wanted_tables = [k for k, entry in enumerate(problem.tables) if entry.kind == "float"]
            found = kernel.backward(problem, d_output, d_lse, (answer.output, answer.lse), wanted_tables, 2)
            assert found is not None
            seen = statistic(rng, problem, fences.around(answer.lse))
            assert seen is not None
        finally:
            np.empty = plain_empty
        del answer, d_output, d_lse, found, seen, problem
        fences.clear()
    print("unharmed")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
