"""The benchmark "tangents": output and tangent in one call, beside the output alone and the dense formula.

The tangent is the derivative of the output in the direction of given tangents of query, key and value. The dense
formula is differentiated by `torch.func.jvp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...api.functions import attention
from ...reference.accuracy import budget_used
from .cases import Case, CaseContender, CaseGroup
from .implementations import PreparedCall
from .workloads import SEED

SMALL_LENGTH = 64  # number of queries in a small version


@dataclass(frozen=True)
class TangentCase(Case):
    """Attention of 2 heads of width 64 and n queries, without a mask.

    Parameters
    ----------
    wanted : the places of the operands that have tangents: 0 for query, 1 for key, 2 for value
    """

    n: int
    wanted: tuple[int, ...] = (0, 1, 2)

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"n {self.n} {', '.join(('query', 'key', 'value')[k] for k in self.wanted)}"

    def small(self) -> TangentCase:
        return replace(self, n=min(self.n, SMALL_LENGTH))

    def contenders(self, threads: int) -> Iterator[CaseContender]:
        import torch

        arrays = np.random.default_rng(SEED).standard_normal((6, 1, 2, self.n, 64), np.float32)
        operands, tangents = arrays[:3], arrays[3:]
        given = [torch.from_numpy(x) for x in operands]
        exact, rough = (
            self._differentiate(_attend_densely, [x.to(dtype) for x in given], torch.from_numpy(tangents).to(dtype))
            for dtype in (torch.float64, torch.float32)
        )

        def check(found: Any) -> float:
            return max(
                budget_used(x.numpy(), y.numpy(), z.numpy()) for x, y, z in zip(found, exact, rough, strict=True)
            )

        for name, label, function in (
            ("sightline", "Sightline", attention),
            ("dense", "dense formula", _attend_densely),
        ):

            def call(_: Any, function: Callable[..., Any] = function) -> Any:
                return self._differentiate(function, given, torch.from_numpy(tangents))

            prepared = PreparedCall(call, lambda _: {}, threads=threads)
            is_peer = name == "dense"
            yield CaseContender(name, label, prepared, lambda call=call: check(call(None)), is_peer)  # type: ignore[misc]
        output = PreparedCall(lambda _: attention(*given), lambda _: {}, threads=threads)
        yield CaseContender("output", "output alone", output, None, is_peer=True)

    def _differentiate(self, function: Callable[..., Any], operands: Sequence[Any], tangents: Any) -> Any:
        """Return (output, tangent) of a function of query, key and value."""
        from torch.func import jvp

        def of_wanted(*changed: Any) -> Any:
            every = list(operands)
            for place, operand in zip(self.wanted, changed, strict=True):
                every[place] = operand
            return function(*every)

        return jvp(of_wanted, tuple(operands[k] for k in self.wanted), tuple(tangents[k] for k in self.wanted))


def _attend_densely(query: Any, key: Any, value: Any) -> Any:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


TANGENTS = (
    CaseGroup(
        name="tangents",
        group="tangents",
        description="1 × 2 heads, d 64, float32, output and tangent by torch.func.jvp",
        cases=tuple(TangentCase(n, wanted) for n in (1024, 4096) for wanted in ((0, 1, 2), (0,), (2,))),
        packages=("torch",),
        pip="torch",
        peer="dense",
    ),
)
