"""The call of the kernel that appends rows to a quantised cache."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ...arrays.operations import detach, dtype_name, layout
from ...arrays.row_formats import RowFormat
from ..codegen.abi import pack
from ..kernels.quantize import FIELDS, STRIDES, Quantize, QuantizeSpec
from ..runtime.processor import HOST, Processor

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
NAME = "sightline_quantize"


def quantize(
    array: Any, storage: Any, positions: Any, format: RowFormat, sums: Any, processor: Processor = HOST
) -> None:
    """Write array[b, :, r] to storage[b, :, positions[b, r]], quantised, for every position that is not −1.

    Parameters
    ----------
    array : (B, G, t, width) floats
    storage : (B, G, capacity, format.row_bytes) uint8
    positions : (B, t) int64, contiguous
    sums : two float64, to which Σ (x − x̂)² and Σ x² are added
    """
    array, storage = detach(array), detach(storage)
    spec = QuantizeSpec(format, dtype_name(array), layout(array)[1][-1] == array.itemsize)
    kernel = processor.kernel(repr(spec), NAME, lambda: Quantize(spec, processor.machine).write(NAME))
    B, G, t, _ = array.shape
    positions = np.ascontiguousarray(positions, np.int64)
    values = {"positions": positions.ctypes.data, "B": B, "G": G, "t": t, "sums": sums.ctypes.data}
    for name, one in (("source", array), ("target", storage)):
        values[name], strides = layout(one)
        values |= {f"{name}_{axis}": stride for axis, stride in zip(STRIDES, strides, strict=True)}
    packed = pack(FIELDS, values, ())
    if isinstance(kernel, int):
        _FUNCTION(kernel)(packed.ctypes.data)
    else:  # an emulator
        processor.call(kernel, packed, 1, (array, storage, positions, sums))
