"""The call of the decoding kernel, on splits of the keys. Without formulas, a call serves any number of keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import layout
from ...problem import Problem
from ..codegen.abi import DECODE_FIELDS
from ..kernels.decode import MAX_ROWS_PER_ITEM, UNROLL, Decode
from ..kernels.kernel_spec import KEY_BLOCK, lanes_per_vector
from ..runtime.processor import Processor
from ..runtime.thread_count import thread_count
from .arguments import TARGET_ITEMS, KernelArguments, compile_kernel, has_unit_stride, make_spec
from .bound_call import BoundCall

__all__ = ["can_decode", "decode"]

MIN_KEYS_PER_SPLIT = 8 * KEY_BLOCK  # with fewer keys a split costs more than it saves
M_INDEX, ITEMS_INDEX, NUM_SPLITS_INDEX, SPLIT_SIZE_INDEX = map(
    list(DECODE_FIELDS).index, ("m", "items", "num_splits", "split_size")
)


def can_decode(problem: Problem, processor: Processor) -> bool:
    """True if the decoding kernel serves the problem.

    The kernel needs at most MAX_ROWS_PER_ITEM queries, at least MIN_KEYS_PER_SPLIT keys, d_k and d_v that fill whole
    vectors, adjacent columns of K and V, and a mask that does not depend on the head. The kernel has no dropout.
    """
    uses_bf16_pairs = problem.dtype == "bfloat16" and processor.machine.has_bf16_dot
    columns = lanes_per_vector(problem.dtype, processor.machine) * (1 + uses_bf16_pairs)
    return (
        problem.n <= MAX_ROWS_PER_ITEM
        and problem.m >= MIN_KEYS_PER_SPLIT
        and not problem.dropout
        and problem.d_k % columns == problem.d_v % columns == 0
        and has_unit_stride(problem.key)
        and has_unit_stride(problem.value)
        and (problem.mask is None or "h" not in problem.mask.free_symbols)
    )


def decode(
    problem: Problem, output: Any, lse: Any, threads: int | None, processor: Processor
) -> BoundDecodeCall | None:
    """Fill output and lse, and return the bound call. None if an output is NaN or ∞: the forward kernel must run."""
    arguments = KernelArguments(problem, MAX_ROWS_PER_ITEM)
    call = BoundDecodeCall(arguments, processor)
    arrays = (*arguments.arrays.values(), output)
    query, key, value, target = (layout(array)[0] for array in arrays)
    keep_alive = (*arrays, *arguments.keep_alive, lse)
    return call if call.run(threads, query, key, value, target, keep_alive, lse.ctypes.data) else None


class BoundDecodeCall(BoundCall):
    """A call of the decoding kernel for arrays of one layout, with any number of keys if there is no formula.

    A KV cache that grows by one key per token has one layout until its storage is full.
    """

    fields = DECODE_FIELDS

    def __init__(self, arguments: KernelArguments, processor: Processor) -> None:
        problem, self.processor = arguments.problem, processor
        self.has_dynamic_key_length = problem.mask is None and problem.score is None
        rows, output_rows = problem.group * problem.n, problem.B * problem.H * problem.n
        self.items_per_split = problem.B * problem.G * -(-rows // MAX_ROWS_PER_ITEM)
        self.target_splits = -(-TARGET_ITEMS // self.items_per_split)  # number of splits, if there are enough keys
        num_splits = self.target_splits if self.has_dynamic_key_length else self.split_keys(problem.m)[1]
        size = np.dtype(problem.accumulator).itemsize
        workspace = {
            "counter": 1,
            "nonfinite_flag": 1,
            "finished_splits": self.items_per_split,
            "split_lse": num_splits * output_rows,
            "lse": output_rows,
            "split_output": -(-num_splits * output_rows * problem.d_v * size // 8),
        }
        if self.has_dynamic_key_length:
            workspace["tile_range_last"] = 1  # without a mask there is one tile range, which contains all tiles
        spec = make_spec("decode", arguments, unroll=min(rows, UNROLL))
        fields = dict.fromkeys(DECODE_FIELDS, 0) | arguments.fields(spec)
        fields |= {"batches": problem.B, "sinks": arguments.retain_sinks()}
        kernel = compile_kernel(spec, arguments, Decode, processor)
        packed, max_threads = arguments.pack(DECODE_FIELDS, fields), self.items_per_split * num_splits
        super().__init__(kernel, packed, max_threads, workspace, arguments.constant_arrays())

    def split_keys(self, m: int) -> tuple[int, int]:
        """Return (tiles of keys in a split, number of splits) for m keys."""
        blocks = -(-m // KEY_BLOCK)
        split_size = -(-blocks // min(self.target_splits, -(-m // MIN_KEYS_PER_SPLIT)))
        return split_size, -(-blocks // split_size)

    def run(
        self, threads: int | None, q: int, k: int, v: int, output: int, arrays: tuple[Any, ...], lse: int | None = None
    ) -> bool:
        """Run the kernel as `BoundCall.run` does. Returns False if there are too few keys or an output is NaN or ∞."""
        m = arrays[1].shape[-2]
        if m < MIN_KEYS_PER_SPLIT:
            return False
        split_size, num_splits = self.split_keys(m)
        items = self.items_per_split * num_splits
        buffer = self.acquire_buffer(q, k, v, output, lse)
        array, view, _ = buffer
        view[M_INDEX], view[ITEMS_INDEX] = m, items
        view[NUM_SPLITS_INDEX], view[SPLIT_SIZE_INDEX] = num_splits, split_size
        array[self.counter_offset : self.offsets["split_lse"]] = 0  # counter, nonfinite_flag and finished_splits
        if self.has_dynamic_key_length:
            view[self.offsets["tile_range_last"]] = -(-m // KEY_BLOCK)
        packed, keep_alive = array[: self.template.size], (arrays, self.keep_alive, array)
        self.processor.call(self.kernel, packed, min(thread_count(threads), items), keep_alive)
        is_finite = not view[self.offsets["nonfinite_flag"]]
        self.release_buffer(buffer)
        return is_finite
