"""The call of the decoding kernel, which computes few queries on splits of the keys.

Without formulas, a call can be repeated for any number of keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.operations import strides_of
from ...call.problem import Problem
from ..codegen.abi import DECODE_CALL_FIELDS, FORWARD_CALL_FIELDS
from ..kernels.decode import MAX_ROWS_PER_ITEM, Decode
from ..kernels.decode_rows import UNROLL
from ..kernels.kernel_spec import KEY_BLOCK, lanes_per_vector, round_up
from ..runtime.processor import Processor
from .arguments import CpuFusedStatistics, KernelArguments, has_unit_stride, output_strides
from .bound_call import BoundCall, CallFamily
from .product_rates import machine_for

TARGET_PARTS = 32  # about how many blocks of rows and splits of keys a call is divided into
MIN_ITEMS = 8  # fewer items, each of more heads, would leave threads without work
MAX_HEADS_PER_ITEM = 8  # of heads whose rows are neighbours in memory
MAX_FEW_QUERIES = 4  # up to this number of queries, this kernel is faster than the forward kernel for enough keys
MIN_DECODE_KEYS = (1, 8, 16, 32)  # for 1, 2, 3 and 4 queries: from this number of keys on, this kernel is faster
MIN_DECODE_SPLIT_KEYS = 512  # with fewer keys a split costs more than it saves
MAX_FEW_HEADS = 4  # up to this number of heads of all batches, splits of the keys keep more threads busy


def min_decode_keys(n: int) -> int:
    """Return the smallest number of keys for which the decoding kernel may serve n queries."""
    return MIN_DECODE_KEYS[n - 1] if 0 < n <= MAX_FEW_QUERIES else MIN_DECODE_SPLIT_KEYS


def can_decode(problem: Problem, processor: Processor, roles: tuple[str, ...] = ()) -> bool:
    """True if the decoding kernel can compute the problem and its statistics `roles`, and is likely the fastest kernel.

    The kernel needs d_k and d_v that fill whole vectors, and adjacent columns of K and V. It has no dropout, and its
    only statistic is the entropy. It is faster than the forward kernel for few queries and many keys. With few heads,
    the forward kernel leaves threads without work; up to MAX_ROWS_PER_ITEM queries are then decoded.
    """
    machine = machine_for(processor, problem.dtype)
    uses_bf16_pairs = problem.dtype == "bfloat16" and machine.has_bf16_dot and problem.row_formats is None
    columns = lanes_per_vector(problem.dtype, machine) * (1 + uses_bf16_pairs)
    return (
        problem.n <= (MAX_ROWS_PER_ITEM if problem.B * problem.H <= MAX_FEW_HEADS else MAX_FEW_QUERIES)
        and problem.m >= min_decode_keys(problem.n)
        and not problem.dropout
        and roles in ((), ("entropy",))
        and problem.d_k % columns == problem.d_v % columns == 0
        and has_unit_stride(problem.key)
        and has_unit_stride(problem.value)
    )


def decode(
    problem: Problem, output: Any, lse: Any, processor: Processor, fused: CpuFusedStatistics
) -> BoundDecode | None:
    """Fill output, lse and the arrays of the statistics `fused`, and return the call for repetition.

    The result is None if an output is NaN or ∞. The forward kernel must then compute the problem.
    """
    arguments = KernelArguments(problem, processor, MAX_ROWS_PER_ITEM, group=problem.group, unread=fused.unread)
    arguments.specify("decode", unroll=min(problem.group * problem.n, UNROLL), roles=fused.roles)
    call = BoundDecode(arguments)
    if call.run_first(arguments, {"output": output, "lse": lse}, fused.arrays) is None:
        return None
    call.family = CallFamily.of(arguments, BoundDecode)
    return call


class BoundDecode(BoundCall):
    """A call of the decoding kernel for arrays of one layout, with any number of keys if there is no formula.

    A KV cache that grows by one key per token has one layout until its storage is full.
    """

    call_fields = DECODE_CALL_FIELDS
    length_fields = DECODE_CALL_FIELDS[len(FORWARD_CALL_FIELDS) :]
    min_parallel_multiplications = 1 << 19

    def __init__(self, arguments: KernelArguments) -> None:
        problem, spec = arguments.problem, arguments.spec
        self.min_keys = min_decode_keys(problem.n)
        self.has_dynamic_key_length = spec.mask is None and spec.score is None
        rows, output_rows = problem.group * problem.n, problem.B * problem.H * problem.n
        self.batches, self.key_heads, self.row_blocks = problem.B, problem.G, -(-rows // MAX_ROWS_PER_ITEM)
        self.blocks = problem.B * problem.G * self.row_blocks  # of query rows, each of one key head
        self.target_splits = -(-TARGET_PARTS // self.blocks)  # number of splits, if there are enough keys
        head_stride, row_stride, _ = strides_of(problem.key)[-3:]
        max_heads = min(MAX_ROWS_PER_ITEM // round_up(rows, spec.unroll), MAX_HEADS_PER_ITEM)
        can_share = abs(head_stride) < abs(row_stride) and arguments.tile_ranges.heads == 1
        self.max_heads_per_item = max_heads if can_share else 1
        num_splits = self.target_splits if self.has_dynamic_key_length else self.split_keys(problem.m)[1]
        size = np.dtype(problem.accumulator).itemsize
        scratch = {
            "split_lse": num_splits * output_rows,
            "split_output": -(-num_splits * output_rows * problem.d_v * size // 8),
        }
        if spec.roles:
            scratch["split_entropy"] = num_splits * output_rows
        values = {"items": self.blocks * num_splits, "batches": problem.B, **output_strides(problem)}
        if self.has_dynamic_key_length:  # without a mask there is one tile range, which contains the tiles of every m
            values["tile_range_last"] = arguments.retain(np.full(1, 2**62))
        zeroed = {"finished_splits": self.blocks}
        super().__init__(arguments, Decode, values, scratch=scratch, zeroed=zeroed)

    def split_keys(self, m: int) -> tuple[int, int]:
        """Return (tiles of keys in a split, number of splits) for m keys."""
        blocks = -(-m // KEY_BLOCK)
        split_size = -(-blocks // min(self.target_splits, -(-m // MIN_DECODE_SPLIT_KEYS)))
        return split_size, -(-blocks // split_size)

    def find_length_words(self, num_keys: int) -> tuple[int, ...] | None:
        if num_keys < self.min_keys:
            return None
        split_size, num_splits = self.split_keys(num_keys)
        heads = max(min(self.blocks * num_splits // MIN_ITEMS, self.max_heads_per_item), 1)
        items = self.batches * -(-self.key_heads // heads) * self.row_blocks * num_splits
        return num_keys, items, num_splits, split_size, heads
