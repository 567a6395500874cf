"""The decoding kernel's call: the keys cut into parts, and the same call for other keys, of which there may be more."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import layout, to_numpy
from ...problem import Problem
from ..codegen.abi import DECODE_FIELDS, pack
from ..kernels.block import KEY_BLOCK
from ..kernels.decode import MAX_ROWS_PER_ITEM, UNROLL, Decode
from ..runtime.processor import Processor
from ..runtime.thread_team import thread_count
from .arguments import KernelArguments, compile_kernel, make_spec
from .bound_call import KEY_INDEX, LSE_INDEX, OUTPUT_INDEX, QUERY_INDEX, VALUE_INDEX, BoundCall

__all__ = ["can_decode", "decode"]

TARGET_ITEMS = 16  # pieces of work wanted, whatever the number of threads
MIN_KEYS_PER_SPLIT = 8 * KEY_BLOCK  # keys worth a part of their own
M_INDEX, ITEMS_INDEX, NUM_SPLITS_INDEX, SPLIT_SIZE_INDEX = map(
    list(DECODE_FIELDS).index, ("m", "items", "num_splits", "split_size")
)


def can_decode(problem: Problem, processor: Processor) -> bool:
    """Whether few queries look at many keys, in rows of whole vectors and the same ones for all heads."""
    lanes = processor.machine.vector_bytes // (8 if problem.dtype == "float64" else 4)
    uses_bf16_pairs = problem.dtype == "bfloat16" and processor.machine.has_bf16_dot
    has_unit_strides = all(layout(x)[1][-1] == x.itemsize for x in (problem.key, problem.value))
    has_whole_vectors = (
        problem.d_k % (lanes * (1 + uses_bf16_pairs)) == 0 and problem.d_v % (lanes * (1 + uses_bf16_pairs)) == 0
    )
    is_shared_by_heads = problem.mask is None or "h" not in problem.mask.free_symbols
    return (
        problem.n <= MAX_ROWS_PER_ITEM
        and problem.m >= MIN_KEYS_PER_SPLIT
        and not problem.dropout
        and has_whole_vectors
        and has_unit_strides
        and is_shared_by_heads
    )


def decode(
    problem: Problem, output: Any, lse: Any, threads: int | None, processor: Processor
) -> BoundDecodeCall | None:
    """Fill output and lse, and give the call; None where an output is NaN or ∞, which the forward kernel sorts out."""
    kernel_arguments = KernelArguments(problem, MAX_ROWS_PER_ITEM)
    call = BoundDecodeCall(problem, kernel_arguments, processor)
    arrays = (*kernel_arguments.arrays.values(), output)
    query, key, value, output_address = (layout(array)[0] for array in arrays)
    return (
        call
        if call.run(
            threads, query, key, value, output_address, (*arrays, *kernel_arguments.keep_alive, lse), lse.ctypes.data
        )
        else None
    )


class BoundDecodeCall(BoundCall):
    """The decoding kernel's call for arrays of one layout; of any number of keys where no formula asks for it.

    A cache that grows by a key at every token has one layout until its storage is full.
    """

    fields = DECODE_FIELDS

    def __init__(self, problem: Problem, kernel_arguments: KernelArguments, processor: Processor) -> None:
        self.processor = processor
        self.has_dynamic_key_length = problem.mask is None and problem.score is None
        rows, output_rows = problem.group * problem.n, problem.B * problem.H * problem.n
        self.items_per_split = problem.B * problem.G * -(-rows // MAX_ROWS_PER_ITEM)
        num_splits = self.target_splits if self.has_dynamic_key_length else self.split_keys(problem.m)[1]
        size = np.dtype(problem.accumulator).itemsize
        workspace = {
            "counter": 1,
            "nonfinite_flag": 1,
            "finished_splits": self.items_per_split,
            "split_lse": num_splits * output_rows,
            "lse": output_rows,
        }
        workspace |= {"split_output": -(-num_splits * output_rows * problem.d_v * size // 8)}
        if self.has_dynamic_key_length:
            workspace["tile_range_last"] = 1  # without a mask there is one run, of all blocks
        sinks = np.zeros(1) if problem.sinks is None else to_numpy(problem.sinks).astype(np.float64)
        spec = make_spec("decode", problem, kernel_arguments, unroll=min(rows, UNROLL))
        fixed = {"query_blocks": 1, "batches": problem.B, "sinks": kernel_arguments.address(sinks)}
        fields = dict.fromkeys(DECODE_FIELDS, 0) | kernel_arguments.fields(spec) | fixed
        kernel = compile_kernel(spec, kernel_arguments, Decode, processor)
        argument_words = pack(DECODE_FIELDS, fields, kernel_arguments.table_fields())
        super().__init__(
            kernel, argument_words, self.items_per_split * num_splits, workspace, kernel_arguments.constant_arrays()
        )

    @property
    def target_splits(self) -> int:
        """Parts of the keys wanted, where there are enough keys."""
        return -(-TARGET_ITEMS // self.items_per_split)

    def split_keys(self, m: int) -> tuple[int, int]:
        """(blocks of keys in a part, parts) of that many keys."""
        blocks = -(-m // KEY_BLOCK)
        split_size = -(-blocks // min(self.target_splits, -(-m // MIN_KEYS_PER_SPLIT)))
        return split_size, -(-blocks // split_size)

    def run(
        self,
        threads: int | None,
        query: int,
        key: int,
        value: int,
        output: int,
        arrays: tuple[Any, ...],
        lse: int | None = None,
    ) -> bool:
        """As `BoundCall.run`, for keys of any number: it answers where they are many and no output is NaN or ∞."""
        m = arrays[1].shape[-2]
        if m < MIN_KEYS_PER_SPLIT:
            return False
        split_size, num_splits = self.split_keys(m)
        buffer = self.acquire_buffer()
        buffer_array, buffer_view, address = buffer
        buffer_view[QUERY_INDEX], buffer_view[KEY_INDEX], buffer_view[VALUE_INDEX], buffer_view[OUTPUT_INDEX] = (
            query,
            key,
            value,
            output,
        )
        buffer_view[M_INDEX], buffer_view[ITEMS_INDEX], buffer_view[NUM_SPLITS_INDEX], buffer_view[SPLIT_SIZE_INDEX] = (
            m,
            self.items_per_split * num_splits,
            num_splits,
            split_size,
        )
        buffer_view[LSE_INDEX] = address + self.lse_offset if lse is None else lse
        buffer_array[self.counter_offset : self.offsets["split_lse"]] = 0  # counter, taint and done
        if self.has_dynamic_key_length:
            buffer_view[self.offsets["tile_range_last"]] = -(-m // KEY_BLOCK)
        launch_arguments = (
            buffer_array[: self.template.size],
            min(thread_count(threads), self.items_per_split * num_splits),
        )
        self.processor.call(self.kernel, *launch_arguments, (arrays, self.keep_alive, buffer_array))
        is_finite = not buffer_view[self.offsets["nonfinite_flag"]]
        self.release_buffer(buffer)
        return is_finite
