"""The kernel's arguments, out of those of the Triton kernel for the same problem and sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..codegen.formula_functions import function
from ..launch.arguments import operand
from ..launch.launcher import Call
from . import ALIGNED
from .kernel import forward
from .rings import GROUPS

__all__ = ["specialised"]

SAME = ("lse", "n", "m", "H", "group", "blocks", "schedule", "sinks", "tables", "scale", "unit", "form")


def specialised(call: Call) -> Call:
    """The call of this kernel for one of `forward.forward`, whose answer is the same."""
    given, form = call.arguments, call.arguments["form"]
    rows = form.rows // GROUPS.value
    matrices = {
        "query": _tiles(given["query"], rows, form.lanes_k),
        "key": _tiles(given["key"], form.keys, form.lanes_k),
        "value": _tiles(given["value"], form.keys, form.lanes_v),
        "output": _tiles(operand(given["output"]), rows, form.lanes_v),
    }
    seams = {
        name: function(call.sources[name], name, "sightline.gpu.codegen.gluon_language")
        if name in call.sources
        else None
        for name in ("mask_at", "score_at")
    }
    more = {"tainted": given["tainted"].zero_(), "STAGES": call.configuration.stages}
    arguments = {name: given[name] for name in SAME} | matrices | seams | more
    return replace(call, kernel=forward, arguments=arguments)


def _tiles(array: tuple[Any, ...], rows: int, lanes: int) -> TensorDescriptor:
    """An array (*lead, heads, rows, width) as one of four axes, copied in tiles of rows × lanes.

    Axes stand in the order of their steps, as the driver's manual has them: rows before heads where they lie so. Nobody
    takes the step of an axis of one; it is what it would be if the axis lay outside those after it.
    """
    tensor, lengths, strides, *inner = array
    heads, count, width = tensor.shape[-3:]
    aligned = ALIGNED // tensor.element_size()
    step = inner[1] if count > 1 else -(-width // aligned) * aligned
    across = inner[0] if heads > 1 else step * count
    middle, block = [(heads, across), (count, step)], [1, 1, rows, lanes]
    if step > across:
        middle, block = middle[::-1], [1, rows, 1, lanes]
    outer = (lengths[0], strides[0]) if lengths else (1, middle[0][0] * middle[0][1])
    shape, steps = zip(outer, *middle, (width, 1), strict=True)
    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, str(tensor.dtype).removeprefix("torch.")))
    return TensorDescriptor(tensor, list(shape), list(steps), block, layout)
