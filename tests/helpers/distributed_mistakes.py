"""Calls in which one rank makes a mistake, dies or stalls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import sightline
import sightline.torch.distributed as distributed
from sightline import h, i, j, s, table
from sightline.errors import SightlineError


def arguments() -> dict[str, Any]:
    """Return the arguments of a valid call on every rank."""
    query, key, value = torch.randn(3, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": i >= j,
        "score": s - table(torch.ones(4))[h] * abs(i - j),
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


def _as_dtensor(given: dict[str, Any], axis: int, *names: str) -> None:
    """Replace arrays of the call by DTensors that are sharded along an axis."""
    mesh = DeviceMesh.from_group(given["group"], "cpu")
    given.update({name: DTensor.from_local(given[name], mesh, [Shard(axis)], run_check=False) for name in names})


MISTAKES: dict[
    str, tuple[Callable[[dict[str, Any]], Any], str]
] = {  # what the last rank changes, and what the error says
    "mask": (lambda given: given.update(mask=i > j), "mask differs"),
    "score": (lambda given: given.update(score=s * 2), "score differs"),
    "contents of a table": (
        lambda given: given.update(score=s - table(torch.full((4,), 2.0))[h] * abs(i - j)),
        "score differs",
    ),
    "heads": (lambda given: given.update({k: given[k][:, :2] for k in ("query", "key", "value")}), "query differs"),
    "heads that do not fit": (lambda given: given.update(query=given["query"][:, :2]), "raised"),
    "batch": (lambda given: given.update(value=given["value"].expand(2, 4, 8, 8)), "value differs"),
    "dtypes": (lambda given: given.update({k: given[k].double() for k in ("query", "key", "value")}), "differs"),
    "statistics": (lambda given: given.update(see=[sightline.entropy()]), "see differs"),
    "formula of a statistic": (
        lambda given: given.update(see=[sightline.entropy(), sightline.mass(i - j < 6)]),
        "see differs",
    ),
    "requires_grad": (
        lambda given: given.update(query=given["query"].clone().requires_grad_()),
        "requires_grad of query differs",
    ),
    "sinks": (lambda given: given.update(sinks=torch.ones(4)), "sinks differs"),
    "no sinks": (lambda given: given.update(sinks=None), "sinks differs"),
    "scale": (lambda given: given.update(scale=0.5), "scale differs"),
    "method": (lambda given: given.update(method="heads"), "method differs"),
    "layout": (lambda given: given.update(layout="zigzag"), "layout differs"),
    "invalid dtype": (lambda given: given.update(value=given["value"].long()), "raised"),
    "invalid mask": (lambda given: given.update(mask="causal"), "raised"),
    "invalid method": (lambda given: given.update(method="tree"), "raised"),
    "requires_grad of sinks": (
        lambda given: given.update(sinks=torch.zeros(4, requires_grad=True)),
        "requires_grad of sinks differs",
    ),
    "requires_grad of a table": (
        lambda given: given.update(score=s - table(torch.ones(4, requires_grad=True))[h] * abs(i - j)),
        "requires_grad of tables differs",
    ),
    "unknown argument": (lambda given: given.update(is_causal=True), "raised"),
    "no statistic": (lambda given: given.update(see=5), "raised"),
    "a DTensor beside tensors": (lambda given: _as_dtensor(given, 2, "key"), "raised: DTensors and plain tensors"),
    "DTensors divided by heads": (
        lambda given: _as_dtensor(given, 1, "query", "key", "value"),
        "raised: DTensors with the placements",
    ),
    "an error without a text": (lambda given: given.update(mask=_raise_unreadable), "raised: _UnreadableError"),
    "seed out of range": (lambda given: given.update(dropout=0.1, seed=2**70), "raised"),
}


def make_mistake(group: Any, name: str) -> Any:
    """Make a call in which the last rank changes an argument; return the output."""
    given = arguments() | {"group": group}
    if torch.distributed.get_rank(group) == torch.distributed.get_world_size(group) - 1:
        MISTAKES[name][0](given)
    return distributed.attention(given.pop("query"), given.pop("key"), given.pop("value"), **given)


def make_valid_call(group: Any) -> None:
    """Make a valid call."""
    given = arguments()
    distributed.attention(given.pop("query"), given.pop("key"), given.pop("value"), group=group, **given)


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

                ring.dispatch = _Failing(fail)  # type: ignore[attr-defined]
            distributed.attention(query, key, value, group=group)


class _Failing:
    def __init__(self, fail: Callable[..., None]) -> None:
        self.solve = fail
