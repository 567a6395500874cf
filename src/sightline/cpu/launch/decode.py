"""The call of the decoding kernel, on splits of the keys. Without formulas, a call serves any number of keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...problem import Problem
from ..kernels.decode import MAX_ROWS_PER_ITEM, UNROLL, Decode
from ..kernels.kernel_spec import KEY_BLOCK, lanes_per_vector
from ..runtime.processor import Processor
from .arguments import TARGET_ITEMS, KernelArguments, has_unit_stride, make_spec
from .bound_call import CALL_FIELDS, BoundCall, CallInputs, first_inputs

__all__ = ["can_decode", "decode"]

MIN_KEYS_PER_SPLIT = 8 * KEY_BLOCK  # with fewer keys a split costs more than it saves
SPLIT_FIELDS = ("m", "items", "num_splits", "split_size")  # the fields that follow from the number of keys


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
    inputs = first_inputs(call, arguments, output, lse)
    return None if call.run(threads, inputs, is_first=True) is None else call


class BoundDecodeCall(BoundCall):
    """A call of the decoding kernel for arrays of one layout, with any number of keys if there is no formula.

    A KV cache that grows by one key per token has one layout until its storage is full.
    """

    def __init__(self, arguments: KernelArguments, processor: Processor) -> None:
        problem = arguments.problem
        self.has_dynamic_key_length = problem.mask is None and problem.score is None
        rows, output_rows = problem.group * problem.n, problem.B * problem.H * problem.n
        self.items_per_split = problem.B * problem.G * -(-rows // MAX_ROWS_PER_ITEM)
        self.target_splits = -(-TARGET_ITEMS // self.items_per_split)  # number of splits, if there are enough keys
        num_splits = self.target_splits if self.has_dynamic_key_length else self.split_keys(problem.m)[1]
        size = np.dtype(problem.accumulator).itemsize
        zeroed = {"counter": 1, "imprecise_lse_flag": 1, "nonfinite_flag": 1, "finished_splits": self.items_per_split}
        workspace = zeroed | {
            "split_lse": num_splits * output_rows,
            "split_output": -(-num_splits * output_rows * problem.d_v * size // 8),
        }
        if self.has_dynamic_key_length:
            workspace["tile_range_last"] = 1  # without a mask there is one tile range, which contains all tiles
        super().__init__(
            arguments,
            make_spec("decode", arguments, unroll=min(rows, UNROLL)),
            Decode,
            {"batches": problem.B},
            processor,
            fields=(*CALL_FIELDS, *SPLIT_FIELDS),
            max_threads=self.items_per_split * num_splits,
            workspace=workspace,
            zeroed=tuple(zeroed),
        )

    def split_keys(self, m: int) -> tuple[int, int]:
        """Return (tiles of keys in a split, number of splits) for m keys."""
        blocks = -(-m // KEY_BLOCK)
        split_size = -(-blocks // min(self.target_splits, -(-m // MIN_KEYS_PER_SPLIT)))
        return split_size, -(-blocks // split_size)

    def run(self, threads: int | None, inputs: CallInputs, is_first: bool = False) -> int | None:
        """Run the kernel as `BoundCall.run` does. The result is None too if there are too few keys."""
        m = inputs.num_keys
        if m < MIN_KEYS_PER_SPLIT:
            return None
        split_size, num_splits = self.split_keys(m)
        splits = m, self.items_per_split * num_splits, num_splits, split_size
        return super().run(threads, inputs._replace(fields=(*inputs.fields, *splits)), is_first)

    def set_fields(self, buffer: tuple[Any, Any, int], inputs: CallInputs) -> int:
        _, view, _ = buffer
        m, items, *_ = inputs.fields[-len(SPLIT_FIELDS) :]
        if self.has_dynamic_key_length:
            view[self.buffers.offsets["tile_range_last"]] = -(-m // KEY_BLOCK)
        return items

    def read_status(self, view: Any) -> int | None:
        return None if view[self.buffers.offsets["nonfinite_flag"]] else super().read_status(view)
