"""The kernel's arguments, out of those of the Triton kernel for the same problem and sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..call import Call
from ..operands import operand
from ..seams import function
from . import ALIGNED
from .kernel import forward
from .rings import GROUPS

__all__ = ["specialised"]

SAME = ("lse", "n", "m", "H", "group", "blocks", "schedule", "sinks", "tables", "scale", "unit", "form")


def specialised(call: Call) -> Call:
    """The call of this kernel for one of `forward.forward`, whose answer is the same."""
    given, form = call.arguments, call.arguments["form"]
    rows = form.rows // GROUPS.value
    tainted = given["tainted"]
    matrices = {
        "query": _tiles(given["query"], rows, form.lanes_k),
        "key": _tiles(given["key"], form.keys, form.lanes_k),
        "value": _tiles(given["value"], form.keys, form.lanes_v),
        "output": _tiles(operand(given["output"]), rows, form.lanes_v),
    }
    seams = {
        name: function(call.sources[name], name, "sightline.gpu.words") if name in call.sources else None
        for name in ("mask_at", "score_at")
    }
    more = {"tainted": None if tainted is None else tainted.zero_(), "STAGES": call.configuration.stages}
    arguments = {name: given[name] for name in SAME} | matrices | seams | more
    return replace(call, kernel=forward, arguments=arguments)


def _tiles(array: tuple[Any, ...], rows: int, lanes: int) -> TensorDescriptor:
    """An array (*lead, heads, rows, width) as one of four axes, copied in tiles of rows × lanes."""
    tensor, lengths, strides, *inner = array
    shape = [math.prod(lengths), *tensor.shape[-3:]]
    aligned = ALIGNED // tensor.element_size()
    steps = [
        step if length > 1 else aligned  # a step nobody takes
        for step, length in zip([*(strides or [0]), *inner[:-1]], shape[:-1], strict=True)
    ]
    block = [1, 1, rows, lanes]
    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, str(tensor.dtype).removeprefix("torch.")))
    return TensorDescriptor(tensor, shape, [*steps, 1], block, layout)
