"""Faults written into the source of a module, and where they are put so that kernels find them."""

import importlib.util
import inspect
from dataclasses import dataclass

from sightline import streaming
from sightline.cpu.codegen import operand_tiles as operands
from sightline.cpu.codegen import register_tile as tiles
from sightline.cpu.kernels import backward, block, forward, tables
from sightline.cpu.kernels import fused_statistics as riding
from sightline.cpu.kernels import weights_by_key as keywise
from sightline.cpu.kernels import weights_by_query as rowwise
from sightline.cpu.kernels import weights_pass as observe
from sightline.cpu.launch import backward as gradients
from sightline.cpu.launch import forward as run
from sightline.cpu.launch import weights_pass as observing

PLACES = {  # what of a module the rest looks up, and where
    forward: [(run, "Forward")],
    backward: [(gradients, "Backward")],
    tiles: [(block, "Tiles")],
    operands: [(block, "Rows")],
    gradients: [(gradients, "gradients")],
    tables: [(backward, "Gain")],
    riding: [(forward, "Riding")],
    keywise: [(observing, "Received"), (observing, "Pooled")],
    rowwise: [(observing, "TopK"), (observing, "WeightTiles")],
    streaming: [],
}


@dataclass(frozen=True)
class Fault:
    """Lines as they stand and with the fault in them; several where one alone does no harm."""

    module: object
    before: str
    after: str
    more: tuple["Fault", ...] = ()
    methods: tuple[str, ...] = ()  # of Block or Observe, where the fault is in theirs: subclasses stay as they are
    shows: str = "plain"  # the problem of `DIFFERENTIATED` it shows in, where it is one of the backward pass


def broken(module, *changes):
    """The module again with lines changed: as they stand, and with the fault in them."""
    source = inspect.getsource(module)
    for before, after in zip(changes[::2], changes[1::2], strict=True):
        found = source.count(before)
        assert found == 1, f"the line of this fault is {found} times in {module.__name__}: {before}"
        source = source.replace(before, after)
    spec = importlib.util.spec_from_loader(module.__name__, loader=None, origin=module.__file__)
    copy = importlib.util.module_from_spec(spec)
    copy.__package__ = module.__package__
    exec(compile(source, module.__file__, "exec"), copy.__dict__)
    return copy


def plant(fault, monkeypatch):
    """Put the fault where the kernels find it; the copy of its module."""
    together = [fault, *(other for other in fault.more if other.module is fault.module)]
    copy = broken(fault.module, *(line for part in together for line in (part.before, part.after)))
    for method in fault.methods:
        owner = "Observe" if fault.module is observe else "Block"
        monkeypatch.setattr(getattr(fault.module, owner), method, getattr(getattr(copy, owner), method))
    for module, name in () if fault.methods else PLACES[fault.module]:
        monkeypatch.setattr(module, name, getattr(copy, name))
    for other in fault.more:
        if other.module is not fault.module:
            plant(other, monkeypatch)
    return copy
