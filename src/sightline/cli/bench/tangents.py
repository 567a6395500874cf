"""The benchmark "tangents": output and tangent in one call, beside the output alone and the dense formula.

The tangent is the derivative of the output in the direction of given tangents of query, key and value. The dense
formula is differentiated by `torch.func.jvp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...api.functions import attention
from ...reference.accuracy import budget_used
from .cases import SEED, Case, Contender, Group, PreparedCall

SMALL_LENGTH = 64  # number of queries in a small version


def attend_densely(query: Any, key: Any, value: Any) -> Any:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


@dataclass(frozen=True, eq=False)
class Differentiator(Contender):
    """A contender that computes output and tangent of a function, or its output alone."""

    name: str
    label: str
    function: Callable[..., Any]
    is_peer: bool = False
    has_tangent: bool = True

    def reference(self, case: TangentCase) -> TangentCase | None:
        return case if self.has_tangent else None

    def prepare(self, case: TangentCase, inputs: Any, threads: int) -> PreparedCall:
        if self.has_tangent:
            return PreparedCall(lambda _: case.differentiate(self.function, *inputs), threads=threads)
        return PreparedCall(lambda _: self.function(*inputs[0]), threads=threads)


@dataclass(frozen=True)
class TangentCase(Case):
    """Attention of 2 heads of width 64 and n queries, without a mask.

    Parameters
    ----------
    wanted : the places of the operands that have tangents: 0 for query, 1 for key, 2 for value
    """

    n: int
    wanted: tuple[int, ...] = (0, 1, 2)
    contenders: tuple[Contender | str, ...] = (
        Differentiator("sightline", "Sightline", attention),
        Differentiator("dense", "dense formula", attend_densely, is_peer=True),
        Differentiator("output", "output alone", attention, is_peer=True, has_tangent=False),
    )

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"n {self.n} {', '.join(('query', 'key', 'value')[k] for k in self.wanted)}"

    def small(self) -> TangentCase:
        return replace(self, n=min(self.n, SMALL_LENGTH))

    def make_inputs(self) -> Any:
        """Return (query, key, value) and their tangents."""
        import torch

        arrays = torch.from_numpy(np.random.default_rng(SEED).standard_normal((6, 1, 2, self.n, 64), np.float32))
        return arrays[:3], arrays[3:]

    def share_of_budget(self, prepared: PreparedCall, inputs: Any) -> float:
        found, wide = prepared.call(None), [x.double() for x in inputs]
        exact, rough = (self.differentiate(attend_densely, *given) for given in (wide, inputs))
        return max(budget_used(x.numpy(), y.numpy(), z.numpy()) for x, y, z in zip(found, exact, rough, strict=True))

    def differentiate(self, function: Callable[..., Any], operands: Any, tangents: Any) -> Any:
        """Return (output, tangent) of a function of query, key and value."""
        from torch.func import jvp

        def of_wanted(*changed: Any) -> Any:
            every = list(operands)
            for place, operand in zip(self.wanted, changed, strict=True):
                every[place] = operand
            return function(*every)

        return jvp(of_wanted, tuple(operands[k] for k in self.wanted), tuple(tangents[k] for k in self.wanted))


TANGENTS = Group(
    name="tangents",
    group="tangents",
    description="1 × 2 heads, d 64, float32, output and tangent by torch.func.jvp",
    cases=tuple(TangentCase(n, wanted) for n in (1024, 4096) for wanted in ((0, 1, 2), (0,), (2,))),
    peer="dense",
)
