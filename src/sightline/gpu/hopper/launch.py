"""Convert a launch of the Triton forward kernel to a launch of the Hopper kernel, with the same problem and tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..codegen.jit_functions import FormulaFunctions, compile_function
from ..launch.arguments import to_operand
from ..launch.launcher import KernelLaunch
from . import TMA_ALIGNMENT
from .kernel import forward
from .shared_memory_rings import WARPGROUPS

__all__ = ["specialise"]

SHARED_ARGUMENTS = ("lse", "n", "m", "H", "group", "blocks", "schedule", "sinks", "tables", "scale", "unit", "meta")
GLUON_LANGUAGE = "sightline.gpu.codegen.gluon_language"


def specialise(call: KernelLaunch) -> KernelLaunch:
    """Return the launch of the Hopper kernel that replaces `call`, a launch of `kernels.forward.forward`."""
    original, meta = call.arguments, call.arguments["meta"]
    rows = meta.rows // WARPGROUPS.value
    formulas = {name: compile_function(source, name, GLUON_LANGUAGE) for name, source in call.sources.items()}
    arguments = {name: original[name] for name in SHARED_ARGUMENTS} | {
        "query": _make_descriptor(original["query"], rows, meta.padded_d_k),
        "key": _make_descriptor(original["key"], meta.keys, meta.padded_d_k),
        "value": _make_descriptor(original["value"], meta.keys, meta.padded_d_v),
        "output": _make_descriptor(to_operand(original["output"]), rows, meta.padded_d_v),
        "formulas": FormulaFunctions(**formulas),
        "nonfinite_flags": original["nonfinite_flags"].zero_(),
        "STAGES": call.configuration.stages,
    }
    return replace(call, kernel=forward, arguments=arguments)


def _make_descriptor(array: tuple[Any, ...], rows: int, padded_width: int) -> TensorDescriptor:
    """Return the descriptor by which TMA copies an array (*batch, heads, rows, width) in tiles of rows × padded_width.

    The descriptor has four axes in the order of their strides, as the CUDA driver's manual requires: rows before heads
    if the stride of rows is larger. The stride of an axis of length 1 is not used, and is set to that of a contiguous
    axis.
    """
    tensor, lengths, strides, *inner = array
    heads, count, width = tensor.shape[-3:]
    aligned = TMA_ALIGNMENT // tensor.element_size()
    row_stride = inner[1] if count > 1 else -(-width // aligned) * aligned
    head_stride = inner[0] if heads > 1 else row_stride * count
    middle, block = [(heads, head_stride), (count, row_stride)], [1, 1, rows, padded_width]
    if row_stride > head_stride:
        middle, block = middle[::-1], [1, rows, 1, padded_width]
    outer = (lengths[0], strides[0]) if lengths else (1, middle[0][0] * middle[0][1])
    shape, steps = zip(outer, *middle, (width, 1), strict=True)
    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, str(tensor.dtype).removeprefix("torch.")))
    return TensorDescriptor(tensor, list(shape), list(steps), block, layout)
