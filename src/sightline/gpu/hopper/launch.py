"""The kernel's arguments, out of those of the Triton kernel for the same problem and sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..codegen.formula_functions import compile_function
from ..launch.arguments import to_operand
from ..launch.launcher import KernelLaunch
from . import TMA_ALIGNMENT
from .kernel import forward
from .rings import GROUPS

__all__ = ["specialise"]

SHARED_ARGUMENTS = ("lse", "n", "m", "H", "group", "blocks", "schedule", "sinks", "tables", "scale", "unit", "meta")


def specialise(call: KernelLaunch) -> KernelLaunch:
    """The call of this kernel for one of `forward.forward`, whose answer is the same."""
    original, meta = call.arguments, call.arguments["meta"]
    rows = meta.rows // GROUPS.value
    matrices = {
        "query": _make_descriptor(original["query"], rows, meta.padded_d_k),
        "key": _make_descriptor(original["key"], meta.keys, meta.padded_d_k),
        "value": _make_descriptor(original["value"], meta.keys, meta.padded_d_v),
        "output": _make_descriptor(to_operand(original["output"]), rows, meta.padded_d_v),
    }
    formula_functions = {
        name: compile_function(call.sources[name], name, "sightline.gpu.codegen.gluon_language")
        if name in call.sources
        else None
        for name in ("mask_at", "score_at")
    }
    more = {"nonfinite_flags": original["nonfinite_flags"].zero_(), "STAGES": call.configuration.stages}
    arguments = {name: original[name] for name in SHARED_ARGUMENTS} | matrices | formula_functions | more
    return replace(call, kernel=forward, arguments=arguments)


def _make_descriptor(array: tuple[Any, ...], rows: int, padded_width: int) -> TensorDescriptor:
    """An array (*lead, heads, rows, width) as one of four axes, copied in tiles of rows × lanes.

    Axes stand in the order of their steps, as the driver's manual has them: rows before heads where they lie so. Nobody
    takes the step of an axis of one; it is what it would be if the axis lay outside those after it.
    """
    tensor, lengths, strides, *inner = array
    heads, count, width = tensor.shape[-3:]
    aligned = TMA_ALIGNMENT // tensor.element_size()
    step = inner[1] if count > 1 else -(-width // aligned) * aligned
    across = inner[0] if heads > 1 else step * count
    middle, block = [(heads, across), (count, step)], [1, 1, rows, padded_width]
    if step > across:
        middle, block = middle[::-1], [1, rows, 1, padded_width]
    outer = (lengths[0], strides[0]) if lengths else (1, middle[0][0] * middle[0][1])
    shape, steps = zip(outer, *middle, (width, 1), strict=True)
    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, str(tensor.dtype).removeprefix("torch.")))
    return TensorDescriptor(tensor, list(shape), list(steps), block, layout)
