"""Plant faults: change lines in a copy of a module, and put the copy where the kernels are looked up."""

import importlib.util
import inspect
from dataclasses import dataclass

import numpy as np

from sightline.cpu.codegen import operand_tiles, register_tile
from sightline.cpu.kernels import (
    backward,
    block,
    forward,
    fused_statistics,
    shared_tiles,
    tables,
    weights_by_key,
    weights_by_query,
    weights_pass,
    weights_statistics,
    weights_tiles,
)
from sightline.cpu.launch import backward as launch_backward
from sightline.cpu.launch import forward as launch_forward
from sightline.cpu.launch import table_gradients
from sightline.cpu.launch import weights_pass as launch_weights_pass
from sightline.problem import kernel as problem_kernel
from sightline.reference import streaming

PLACES = {  # for each module: the modules and the names through which its classes are looked up
    forward: [(launch_forward, "Forward")],
    backward: [(launch_backward, "Backward")],
    register_tile: [(block, "RegisterTiles")],
    operand_tiles: [(block, "OperandTile")],
    launch_backward: [(launch_backward, "backward")],
    table_gradients: [(launch_backward, "differentiate_sinks")],
    problem_kernel: [(table_gradients, "sum_sink_gradients")],
    tables: [(backward, "TableGradientCode")],
    fused_statistics: [(forward, "FusedStatisticsCode")],
    weights_by_key: [(weights_by_key, "ReceivedCode"), (weights_by_key, "PooledCode")],
    weights_by_query: [(weights_by_query, "TopKCode")],
    weights_statistics: [(launch_weights_pass, "WeightStatistics")],
    weights_tiles: [(launch_weights_pass, "WeightTiles"), (launch_weights_pass, "WeightSums")],
    streaming: [],
}


@dataclass(frozen=True)
class Fault:
    """Lines of a module before and after the fault. `more` are further faults if one alone has no effect."""

    module: object
    before: str
    after: str
    more: tuple["Fault", ...] = ()
    methods: tuple[str, ...] = ()  # the faulty methods of a base class of kernels, which replace the originals
    shows: str = "plain"  # for a fault of the backward pass: the problem of `DIFFERENTIATED` that reveals it


def broken(module, *changes):
    """Return a copy of the module with lines changed. `changes` alternates lines before and after the fault."""
    source = inspect.getsource(module)
    for before, after in zip(changes[::2], changes[1::2], strict=True):
        found = source.count(before)
        assert found == 1, f"the line of this fault occurs {found} times in {module.__name__}: {before}"
        source = source.replace(before, after)
    spec = importlib.util.spec_from_loader(module.__name__, loader=None, origin=module.__file__)
    copy = importlib.util.module_from_spec(spec)
    copy.__package__ = module.__package__
    exec(compile(source, module.__file__, "exec"), copy.__dict__)
    return copy


def filled(shape, dtype=float, **options):
    """Return an array of threes, in place of `np.empty`: what a faulty kernel leaves unwritten is not random."""
    return np.full(shape, 3, dtype, **options)


def plant(fault, monkeypatch):
    """Plant the fault where the kernels are looked up, and return the changed copy of its module."""
    monkeypatch.setattr(np, "empty", filled)
    together = [fault, *(other for other in fault.more if other.module is fault.module)]
    copy = broken(fault.module, *(line for part in together for line in (part.before, part.after)))
    for method in fault.methods:
        owner = {weights_pass: "WeightsPass", shared_tiles: "SharedTiles"}.get(fault.module, "Block")
        monkeypatch.setattr(getattr(fault.module, owner), method, getattr(getattr(copy, owner), method))
    for module, name in () if fault.methods else PLACES[fault.module]:
        monkeypatch.setattr(module, name, getattr(copy, name))
    for other in fault.more:
        if other.module is not fault.module:
            plant(other, monkeypatch)
    return copy
