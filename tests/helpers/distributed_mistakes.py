"""Calls in which one rank makes a mistake, dies or stalls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import sightline
import sightline.torch.distributed as distributed
from sightline import h, i, j, s, table
from sightline.errors import SightlineError

NAMES = ("query", "key", "value")


def linear_bias(slope: float = 1.0, **options: Any) -> Any:
    """Return a score whose table has four equal slopes."""
    return s - table(torch.full((4,), slope, **options))[h] * abs(i - j)


def arguments() -> dict[str, Any]:
    """Return the arguments of a valid call on every rank."""
    query, key, value = torch.randn(3, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": i >= j,
        "score": linear_bias(),
        "see": [sightline.entropy(), sightline.mass(i - j < 5)],
        "sinks": torch.zeros(4),
    }


class _UnreadableError(SightlineError):
    """An error that cannot be written as text."""

    def __init__(self) -> None:
        super().__init__("no text", "text", "write one")

    def __str__(self) -> str:
        raise ValueError("no text")

    def __reduce__(self) -> Any:
        return _UnreadableError, ()


def _raise_unreadable(*_: Any) -> None:
    raise _UnreadableError()


def _as_dtensor(given: dict[str, Any], axis: int, *names: str) -> dict[str, Any]:
    """Return arrays of the call as DTensors that are sharded along an axis."""
    mesh = DeviceMesh.from_group(given["group"], "cpu")
    return {name: DTensor.from_local(given[name], mesh, [Shard(axis)], run_check=False) for name in names}


# What the last rank passes in place of its arguments, or a function of these that returns it; and what the error says
MISTAKES: dict[str, tuple[dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "mask": ({"mask": i > j}, "mask differs"),
    "score": ({"score": s * 2}, "score differs"),
    "contents of a table": ({"score": linear_bias(2.0)}, "score differs"),
    "heads": (lambda given: {name: given[name][:, :2] for name in NAMES}, "query differs"),
    "heads that do not fit": (lambda given: {"query": given["query"][:, :2]}, "raised"),
    "batch": (lambda given: {"value": given["value"].expand(2, 4, 8, 8)}, "value differs"),
    "dtypes": (lambda given: {name: given[name].double() for name in NAMES}, "differs"),
    "statistics": ({"see": [sightline.entropy()]}, "see differs"),
    "formula of a statistic": ({"see": [sightline.entropy(), sightline.mass(i - j < 6)]}, "see differs"),
    "requires_grad": (
        lambda given: {"query": given["query"].clone().requires_grad_()},
        "requires_grad of query differs",
    ),
    "sinks": ({"sinks": torch.ones(4)}, "sinks differs"),
    "no sinks": ({"sinks": None}, "sinks differs"),
    "scale": ({"scale": 0.5}, "scale differs"),
    "method": ({"method": "heads"}, "method differs"),
    "layout": ({"layout": "zigzag"}, "layout differs"),
    "invalid dtype": (lambda given: {"value": given["value"].long()}, "raised"),
    "invalid mask": ({"mask": "causal"}, "raised"),
    "invalid method": ({"method": "tree"}, "raised"),
    "requires_grad of sinks": ({"sinks": torch.zeros(4, requires_grad=True)}, "requires_grad of sinks differs"),
    "requires_grad of a table": ({"score": linear_bias(requires_grad=True)}, "requires_grad of tables differs"),
    "unknown argument": ({"is_causal": True}, "raised"),
    "no statistic": ({"see": 5}, "raised"),
    "a DTensor beside tensors": (lambda given: _as_dtensor(given, 2, "key"), "raised: DTensors and plain tensors"),
    "DTensors divided by heads": (lambda given: _as_dtensor(given, 1, *NAMES), "raised: DTensors with the placements"),
    "an error without a text": ({"mask": _raise_unreadable}, "raised: _UnreadableError"),
    "seed out of range": ({"dropout": 0.1, "seed": 2**70}, "raised"),
}


def make_mistake(group: Any, name: str) -> Any:
    """Make a call in which the last rank changes an argument; return the output."""
    given = arguments() | {"group": group}
    if torch.distributed.get_rank(group) == torch.distributed.get_world_size(group) - 1:
        mistake, _ = MISTAKES[name]
        given |= mistake(given) if callable(mistake) else mistake
    return distributed.attention(**given)


def make_valid_call(group: Any) -> None:
    """Make a valid call."""
    distributed.attention(**arguments(), group=group)


def call_in_first_rank(_: Any) -> None:
    """Make a valid call in a group that has rank 0 alone. All ranks form the group."""
    make_valid_call(torch.distributed.new_group([0]))


def fail_in_call(group: Any, how: str, backward: bool, seconds: float) -> None:
    """Make a call in which the last rank dies or stalls during the forward or the backward pass."""
    from distributed_calls import short_blocks

    shape = (1, 4, 512, 16)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    is_last = torch.distributed.get_rank(group) == torch.distributed.get_world_size(group) - 1

    def fail(*_: Any) -> None:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)

    with short_blocks(64):
        if backward:
            output = distributed.attention(query, key, value, group=group)
            if is_last:
                fail()
            output.sum().backward()
        else:
            if is_last:
                from sightline.torch.distributed import ring

                ring.kernels = SimpleNamespace(solve=fail)  # type: ignore[attr-defined]
            distributed.attention(query, key, value, group=group)
