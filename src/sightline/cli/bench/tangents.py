"""The group "tangents": output and tangent in one call, beside the output alone and the dense formula.

The tangent is the derivative of the output in the direction of given tangents of query, key and value. Each contender
is a function of query, key and value that `torch.func.jvp` differentiates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...api.functions import attention
from ...reference.accuracy import budget_used
from .cases import SEED, CaseGroup, Contender, TimedCall
from .workloads import Workload


def attend_densely(query: Any, key: Any, value: Any) -> Any:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


@dataclass(frozen=True, eq=False)
class Differentiator(Contender):
    """A contender that computes output and tangent of a function; only the output if `has_tangent` is False."""

    name: str
    label: str
    function: Callable[..., Any]
    is_peer: bool = False
    has_tangent: bool = True

    def reference(self, case: TangentCase) -> TangentCase | None:
        return case if self.has_tangent else None

    def prepare(self, case: TangentCase, inputs: Any, threads: int) -> TimedCall:
        if self.has_tangent:
            return TimedCall(lambda _: case.differentiate(self.function, *inputs), threads=threads)
        return TimedCall(lambda _: self.function(*inputs[0]), threads=threads)


@dataclass(frozen=True, kw_only=True)
class TangentCase(Workload):
    """Attention without a mask.

    `wanted` has the places of the operands that have tangents: 0 for query, 1 for key, 2 for value.
    """

    H: int = 2
    wanted: tuple[int, ...] = (0, 1, 2)
    peak: str = ""
    ours: Contender | str = Differentiator("sightline", "Sightline", attention)
    baselines: tuple[Contender | str, ...] = (
        Differentiator("dense", "dense formula", attend_densely, is_peer=True),
        Differentiator("output", "output alone", attention, is_peer=True, has_tangent=False),
    )

    def make_inputs(self) -> Any:
        """Return the tensors (query, key, value), and their tangents."""
        import torch

        shape = 6, self.B, self.H, self.n, self.d_k
        arrays = torch.from_numpy(np.random.default_rng(SEED).standard_normal(shape, np.float32))
        return arrays[:3], arrays[3:]

    def share_of_budget(self, prepared: TimedCall, inputs: Any) -> float:
        found, wide = prepared.call(None), [x.double() for x in inputs]
        exact, rough = (self.differentiate(attend_densely, *given) for given in (wide, inputs))
        return max(budget_used(x.numpy(), y.numpy(), z.numpy()) for x, y, z in zip(found, exact, rough, strict=True))

    def differentiate(self, function: Callable[..., Any], operands: Any, tangents: Any) -> Any:
        """Return (output, tangent) of a function of query, key and value."""
        from torch.func import jvp

        def of_wanted(*changed: Any) -> Any:
            every = dict(enumerate(operands)) | dict(zip(self.wanted, changed, strict=True))
            return function(*every.values())

        return jvp(of_wanted, tuple(operands[k] for k in self.wanted), tuple(tangents[k] for k in self.wanted))


TANGENTS = CaseGroup(
    name="tangents",
    group="tangents",
    description="1 × 2 heads, d 64, float32, output and tangent by torch.func.jvp",
    cases=tuple(
        TangentCase(name=f"n {n} {operands}", n=n, wanted=wanted)
        for n in (1024, 4096)
        for operands, wanted in {"query, key, value": (0, 1, 2), "query": (0,), "value": (2,)}.items()
    ),
    peer="dense",
)
