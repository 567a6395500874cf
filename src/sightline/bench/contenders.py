"""What takes part in a race: the protocol, and our own entries. Peers are in `peers`."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..api import attention
from ..arrays import resolve, to_numpy
from ..formula.library import bias
from ..formula.tables import Table
from ..statistics import arrays_of
from .races import SEED, Inputs, Race, Read

__all__ = [
    "OWN",
    "Contender",
    "Numpy",
    "OneThread",
    "Ready",
    "Sightline",
    "WithoutDropout",
    "WithoutStatistics",
    "named",
    "reading",
    "tensor",
    "through_autograd",
]

# by name: output, query, key, value, bias; float32 NumPy, heads before positions; a tuple of such for each statistic
Answers = dict[str, Any]


@dataclass
class Ready:
    """A contender with its arrays in hand.

    Parameters
    ----------
    call : what is timed, of what `start` gave
    answers : from what `call` gave to arrays by name, not timed: "output", and "query", "key", "value", "bias" for
        their gradients
    start : run before every call, not timed: the forward pass where the backward pass is timed
    threads : torch's setting while it runs
    close : gives back what it holds
    reseed : puts another array in d_output's place, where a backward pass is timed and it can
    """

    call: Callable[[Any], Any]
    answers: Callable[[Any], Answers]
    start: Callable[[], Any] = lambda: None
    threads: int = 1
    close: Callable[[], None] = lambda: None
    reseed: Callable[[Any], Any] | None = None


class Contender(ABC):
    """One way to compute a race: a small class and a line in `peers.PEERS` or `OWN`."""

    name: str
    label: str
    packages: tuple[str, ...] = ()  # that must be there to import
    pip: str = ""  # what brings them
    note: str = ""  # what else is worth knowing of what is timed
    arena: bool = False  # keeps memory of its own between calls, so that a call's peak cannot be seen from outside
    device: str = "cpu"  # torch's name of where its tensors are

    def absent(self) -> str | None:
        """Why it cannot take part here, whatever the race."""
        missing = [package for package in self.packages if find_spec(package) is None]
        return f"not installed: pip install {self.pip}" if missing else None

    @abstractmethod
    def refuses(self, race: Race) -> str | None:
        """Why it cannot take part in this race."""

    def judged_as(self, race: Race) -> Race | None:
        """The race whose definition its answer must agree with; None where it draws what no one else can know."""
        return race

    @abstractmethod
    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        """Everything that is done once: conversion, compilation, layout."""


# -- torch's ways, which ours share ---------------------------------------------------------------------------------


def tensor(array: Any, dtype: str, device: str = "cpu") -> Any:
    """A NumPy array as a tensor of that dtype."""
    import torch

    return torch.from_numpy(array).to(device, getattr(torch, dtype))


def reading(device: str) -> Read:
    """Makes an array a tensor there, which formulas of torch's own language index."""
    import torch

    return lambda array: torch.as_tensor(array, device=device)


def plain(result: Any) -> Any:
    """A tensor or array as float32 NumPy."""
    return np.asarray(to_numpy(result), np.float32)


def named(race: Race, found: Any) -> Answers:
    """The answers of a forward pass: of its output, or (output, seen) where statistics are asked for."""
    output, seen = found if race.see else (found, ())
    arrays = zip(race.see, seen, strict=True)
    return {"output": plain(output)} | {
        repr(statistic): tuple(plain(array) for array in arrays_of(answer)) for statistic, answer in arrays
    }


def through_autograd(
    race: Race, inputs: Inputs, forward: Callable[..., Any], threads: int, device: str = "cpu"
) -> Ready:
    """A function of tensors (query, key, value, bias or None), timed the way the race says.

    "backward" is torch.autograd.grad of the output alone: the forward pass before it is not timed.
    """
    import torch

    given = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    if inputs.bias is not None:
        given["bias"] = inputs.bias
    leaves = {name: tensor(array, race.dtype, device) for name, array in given.items()}
    arguments = [leaves["query"], leaves["key"], leaves["value"], leaves.get("bias")]
    if race.passes == "forward":
        return Ready(lambda _: forward(*arguments), lambda found: named(race, found), threads=threads)
    for leaf in leaves.values():
        leaf.requires_grad_()
    seed = tensor(inputs.d_output, race.dtype, device).clone()  # of its own: `reseed` writes there

    def gradients(output: Any) -> Any:
        return output.detach(), torch.autograd.grad(output, list(leaves.values()), seed)

    def answers(found: Any) -> Answers:
        return {"output": plain(found[0])} | {
            name: plain(gradient) for name, gradient in zip(leaves, found[1], strict=True)
        }

    def reseed(array: Any) -> None:
        seed.copy_(tensor(array, race.dtype))

    if race.passes == "backward":
        return Ready(gradients, answers, lambda: forward(*arguments), threads, reseed=reseed)
    return Ready(lambda _: gradients(forward(*arguments)), answers, threads=threads, reseed=reseed)


# -- ours -----------------------------------------------------------------------------------------------------------


@dataclass
class Sightline(Contender):
    """`sightline.attention`, as a user calls it: on tensors where torch is installed, on NumPy arrays elsewhere."""

    name: str = "sightline"
    label: str = "Sightline"
    options: dict[str, Any] = field(default_factory=dict)  # to `attention`
    device: str = "cpu"

    def refuses(self, race: Race) -> str | None:
        """Backward passes without torch: NumPy has no gradients."""
        if race.passes != "forward" and find_spec("torch") is None:
            return "gradients need torch: pip install torch"
        return None

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        if find_spec("torch") is None:
            return self.on_numpy(race, inputs, threads)
        read = Table if self.device == "cpu" else self._on_device
        mask = None if race.mask is None else race.mask.formula(race.n, read)
        scores = {} if race.score is None else {0: race.score.formula(race.H, read)}
        seed = SEED if race.dropout else None

        def forward(query: Any, key: Any, value: Any, added: Any) -> Any:
            if added is not None and not scores:
                scores[0] = bias(added)
            options: dict[str, Any] = {"mask": mask, "score": scores.get(0), "dropout": race.dropout, "seed": seed}
            options |= {"see": list(race.see) or None} | self.options
            return attention(query, key, value, threads=threads, **options)

        return through_autograd(race, inputs, forward, threads, self.device)

    def _on_device(self, array: Any) -> Table:
        return Table(reading(self.device)(array))

    def on_numpy(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        """The forward pass on NumPy arrays."""
        kind = resolve(np, race.dtype)
        query, key, value = (x.astype(kind) for x in (inputs.query, inputs.key, inputs.value))
        score = inputs.score if race.score is None else race.formula_of_score
        options: dict[str, Any] = {
            "mask": race.formula,
            "score": score,
            "dropout": race.dropout,
            "seed": SEED,
            "see": list(race.see) or None,
        } | self.options
        if race.formula is None and score is None and not (race.dropout or race.see):
            options = {}  # as short as a user would write it, where a call is all overhead
        return Ready(
            lambda _: attention(query, key, value, threads=threads, **options),
            lambda found: named(race, found),
            threads=threads,
        )


class Numpy(Sightline):
    """The same on NumPy arrays."""

    def __init__(self) -> None:
        super().__init__("numpy", "Sightline on NumPy")

    def refuses(self, race: Race) -> str | None:
        """Gradients."""
        return None if race.passes == "forward" else "NumPy has no gradients"

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        return self.on_numpy(race, inputs, threads)


class OneThread(Sightline):
    """The same on one thread."""

    def __init__(self) -> None:
        super().__init__("one thread", "one thread")

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        return super().prepare(race, inputs, 1)


class WithoutDropout(Sightline):
    """The same with every weight kept."""

    def __init__(self) -> None:
        super().__init__("without dropout", "without dropout", {"dropout": 0.0, "seed": None})

    def judged_as(self, race: Race) -> Race:
        """The same without dropout."""
        return replace(race, dropout=0.0)


class WithoutStatistics(Sightline):
    """The same with nothing seen."""

    def __init__(self, options: dict[str, Any] | None = None, device: str = "cpu") -> None:
        super().__init__("without statistics", "without statistics", options or {}, device)

    def judged_as(self, race: Race) -> Race:
        """The same without statistics."""
        return replace(race, see=())

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        return super().prepare(self.judged_as(race), inputs, threads)


OWN: dict[str, Sightline] = {
    own.name: own for own in (Sightline(), Numpy(), OneThread(), WithoutDropout(), WithoutStatistics())
}


def set_threads(threads: int) -> None:
    """torch's setting, where torch is loaded; every other library was told when its contender was prepared."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def usable() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
