"""The call of the kernel that appends rows to a quantised cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...arrays.operations import detach, dtype_name, layout
from ...arrays.row_formats import RowFormat
from ..kernels.quantize import Quantize, QuantizeSpec
from ..runtime.processor import HOST, Processor
from ..runtime.thread_team import KERNEL_FUNCTION

NAME = "sightline_quantize"


def quantize(
    array: Any, storage: Any, rows: Any, row_format: RowFormat, sums: Any, processor: Processor = HOST
) -> None:
    """Write array[b, :, r] to storage[b, :, rows[b, r]], quantised, for every b and r with rows[b, r] ≠ −1.

    Parameters
    ----------
    array : (B, G, t, width) floats
    storage : (B, G, capacity, row_format.row_bytes) uint8
    rows : (B, t) int64, contiguous
    sums : two float64, to which Σ (x − x̂)² and Σ x² are added
    """
    array, storage = detach(array), detach(storage)
    rows = np.ascontiguousarray(rows, np.int64)
    (source, strides), (target, target_strides) = layout(array), layout(storage)
    spec, key = _make_spec(row_format, dtype_name(array), strides[-1] == array.itemsize)
    kernel = processor.kernel(key, NAME, lambda: Quantize(spec, processor.machine).write(NAME))
    words = [source, *strides, target, *target_strides, layout(rows)[0], *array.shape[:3], layout(sums)[0]]
    packed = np.array(words, np.int64)  # in the order of FIELDS
    if isinstance(kernel, int):
        KERNEL_FUNCTION(kernel)(layout(packed)[0])
    else:  # an emulator
        processor.call(kernel, packed, 1, (array, storage, rows, sums))


@cache
def _make_spec(row_format: RowFormat, dtype: str, unit_stride: bool) -> tuple[QuantizeSpec, str]:
    spec = QuantizeSpec(row_format, dtype, unit_stride)
    return spec, repr(spec)
