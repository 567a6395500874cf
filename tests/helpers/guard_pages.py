"""A program that runs problems with every array next to guard pages. One access outside an array ends the program.

    python guard_pages.py SEED COUNT [PAST]

A guard page cannot be read or written. Query, key, value, tables, outputs and gradients are between two guard pages. In
every second call an array ends at a guard page, and in the others it begins at one. Each problem runs the forward pass,
the backward pass and a weights pass, and the problems have every dtype. COUNT calls of `repeated_calls` follow, each
repeated until it is direct and then with other lengths; their tables, masks and sinks are between guard pages too. With
PAST, keys and values of the problems claim PAST more rows than they have, to test that guard pages detect such reads.
"""

import ctypes
import ctypes.util
import mmap
import sys

import ml_dtypes
import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

import sightline
from repeated_calls import MEMORY, Repetition
from sightline import b, h, i, j, s, table
from sightline.call import call_cache
from sightline.call.kernel import GivenGradients
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.cpu.launch import backward as launch_backward
from sightline.statistics import TopK, pooled, received, weights
from weights_pass_checks import compute

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
NONE, BOTH, PRIVATE = 0, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
C = ctypes.CDLL(None, use_errno=True)
C.mmap.restype = ctypes.c_void_p
C.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
C.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
C.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class GuardedMemory:
    """Allocates arrays between guard pages. `clear` frees all of them."""

    def __init__(self):
        self.at_end, self.mappings = True, []

    def zeros(self, shape, dtype):
        """Return an array of zeros, which ends (`at_end`) or begins at a guard page."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        pages = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = C.mmap(None, pages + 2 * mmap.PAGESIZE, BOTH, PRIVATE, -1, 0)
        assert whole != ctypes.c_void_p(-1).value
        first = whole + mmap.PAGESIZE
        for guard in (whole, first + pages):
            assert C.mprotect(guard, mmap.PAGESIZE, NONE) == 0
        self.mappings.append((whole, pages + 2 * mmap.PAGESIZE))
        start = first + pages - size if self.at_end else first
        return np.frombuffer((ctypes.c_char * size).from_address(start), np.uint8).view(dtype).reshape(shape)

    def copy(self, array):
        """Return a copy of the array between guard pages."""
        found = self.zeros(array.shape, array.dtype)
        found[...] = array
        return found

    def clear(self):
        for mapping in self.mappings:
            C.munmap(*mapping)
        self.mappings.clear()


def random_problem(rng, memory, past):
    """Return a random problem: odd sizes, groups, masks, tables with gradients, dropout."""
    dtype = DTYPES[rng.integers(4)]
    n, m, d_k, d_v = (int(x) for x in rng.integers(1, [90, 140, 40, 40]))
    B, G, group = (int(x) for x in rng.integers(1, 3, 3))
    shapes = (B, G * group, n, d_k), (B, G, m, d_k), (B, G, m, d_v)
    q, k, v = (memory.copy(rng.normal(size=shape).astype(dtype)) for shape in shapes)
    k, v = (as_strided(x, (B, G, m + past, x.shape[-1]), x.strides) for x in (k, v))
    shift = np.float32 if rng.integers(2) else np.float64
    bias = table(memory.copy(rng.normal(size=(G * group, n + m - 1)).astype(shift)))[h, i - j + m - 1]
    number = table(memory.copy(rng.integers(0, 3, (B, max(n, m)))))
    options = [
        {},
        {"mask": i + (m - n) >= j},
        {"mask": number[b, i] == number[b, j]},
        {"score": s + bias},
        {"score": s + table(memory.copy(rng.normal(size=(n, m)).astype(shift)))[i, j]},
        {"mask": i * 2 >= j, "score": sightline.softcap(5.0)},
        {"dropout": 0.3, "seed": 7, "sinks": rng.normal(size=G * group)},
        {"scale": -0.5, "mask": table(memory.copy(rng.random((n, m)) < 0.6))[i, j], "score": s * 2 + bias},
    ][rng.integers(8)]
    return make_problem(q, k, v, threads=2, **options)


def statistic(rng, problem, lse):
    """Compute statistics of the weights pass, with random parameters: one alone, or several in one pass."""
    n, m = problem.n, problem.m
    i0, j0 = rng.integers(0, n), rng.integers(0, m)
    rows, columns = rng.integers(1, n - i0 + 1), rng.integers(1, m - j0 + 1)
    how = ["mean", "max"][rng.integers(2)]
    together = received(how), pooled(int(rng.integers(1, n + 1)), int(rng.integers(1, m + 1)), how), TopK(5)
    group = [
        lambda: [received(how)],
        lambda: [pooled(int(rows), int(columns), how, ((int(i0), n), (int(j0), m)))],
        lambda: [TopK(int(rng.integers(1, 12)))],
        lambda: [weights()],
        lambda: [together[k] for k in rng.permutation(3)[: rng.integers(2, 4)]],
    ][rng.integers(5)]()
    return compute(problem, lse, *group)


def main(seed, count, past=0):
    rng, kernel, memory = np.random.default_rng(seed), Cpu(), GuardedMemory()
    original_empty = np.empty

    def empty(shape, dtype=float, **_):
        return memory.zeros(shape, dtype) if np.dtype(dtype).kind in "fVi" else original_empty(shape, dtype)

    make_sums = launch_backward.BoundBackward.make_table_sums
    launch_backward.BoundBackward.make_table_sums = lambda call: [memory.copy(sums) for sums in make_sums(call)]
    for call in range(count):
        memory.at_end = call % 2 == 0
        problem = random_problem(rng, memory, past)
        np.empty = empty
        try:
            answer = kernel.run(problem)
            d_output, d_lse = (
                memory.copy(rng.normal(size=x.shape).astype(x.dtype)) for x in (answer.output, answer.lse)
            )
            wanted_tables = [k for k, entry in enumerate(problem.tables) if entry.kind == "float"]
            given = GivenGradients(d_output, d_lse, (answer.output, answer.lse), wanted_tables)
            found = kernel.backward(problem, given)
            assert found is not None
            seen = statistic(rng, problem, memory.copy(answer.lse))
            assert seen is not None
        finally:
            np.empty = original_empty
        del answer, d_output, d_lse, found, seen, problem
        memory.clear()
    torch.set_num_threads(1)
    for call in range(count):
        for memory.at_end in (True, False):
            Repetition(seed + call, dict.fromkeys(MEMORY, memory.copy)).check()
            call_cache.clear()
            memory.clear()
    print("unharmed")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
