"""The benchmarks "overhead by kind" and "overhead training": calls of one query and one key.

The kernel computes almost nothing for one key of width 8, so the time of a call is the time around the kernel. A
training step is compared with an empty `torch.autograd.Function`, which no function with a backward pass of its own can
be faster than.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...api.functions import attention
from ...formula.library import bias, causal
from ...statistics import entropy
from .cases import Case, CaseContender, CaseGroup
from .implementations import PreparedCall
from .short_calls import POOL_SIZE, CallKind, Function, Pool, ShortCall, infer, share_of_pool, train

SHAPE = (1, 1, 1, 8)  # (B, H, n, d)
KINDS = (
    CallKind("plain", "plain"),
    CallKind("causal", "causal"),
    CallKind("padding mask", "padding mask", extra="mask"),
    CallKind("bias", "bias", extra="bias"),
    CallKind("see=[entropy()]", "entropy"),
)
TRAINING_KINDS = (
    CallKind("plain", "plain", training=True),
    CallKind("causal", "causal", training=True),
    CallKind("padding mask", "padding mask", extra="mask", training=True),
)


def numpy_functions() -> dict[str, Function]:
    """Return Sightline's function on NumPy arrays for each kind of call."""
    return {
        "plain": lambda query, key, value, _: attention(query, key, value),
        "causal": lambda query, key, value, _: attention(query, key, value, mask=causal()),
        "padding mask": lambda query, key, value, mask: attention(query, key, value, mask=mask),
        "bias": lambda query, key, value, added: attention(query, key, value, score=bias(added)),
        "entropy": lambda query, key, value, _: attention(query, key, value, see=[entropy()]),
    }


@dataclass(frozen=True)
class CallOverhead(Case):
    """One kind of call with one key, on tensors and on NumPy arrays, beside torch."""

    kind: CallKind

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.kind.name

    def small(self) -> CallOverhead:
        return self

    def contenders(self, threads: int) -> Iterator[CaseContender]:
        short_call = ShortCall(self.kind, SHAPE)
        ours, peer = short_call.contenders(threads)
        yield ours
        pool = Pool(short_call, POOL_SIZE, on_numpy=True)
        call = partial(infer, numpy_functions()[self.kind.function])
        prepared = PreparedCall(call, lambda result: result, pool.next, threads)
        yield CaseContender("numpy", "NumPy", prepared, partial(share_of_pool, call, pool, False))
        yield peer


@dataclass(frozen=True)
class TrainingOverhead(Case):
    """A forward and a backward pass with one key, beside torch's and beside those of an empty function."""

    kind: CallKind

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.kind.name

    def small(self) -> TrainingOverhead:
        return self

    def contenders(self, threads: int) -> Iterator[CaseContender]:
        short_call = ShortCall(self.kind, SHAPE)
        yield from short_call.contenders(threads)
        call = partial(train, _make_empty_function())
        prepared = PreparedCall(call, lambda result: result, Pool(short_call, POOL_SIZE).next, threads)
        yield CaseContender("empty", "empty pair", prepared, None, is_peer=True)


def _make_empty_function() -> Function:
    """Return a function whose output is not written, and whose gradients are d_output itself."""
    import torch

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            return torch.empty_like(query)

        @staticmethod
        def backward(ctx: Any, *d_output: Any) -> Any:
            return d_output * 3

    return lambda query, key, value, _: Empty.apply(query, key, value)  # type: ignore[no-untyped-call]


OVERHEADS = (
    CaseGroup(
        name="overhead by kind",
        group="overhead by kind",
        description="1 × 1 × 1 × 8, one key, float32",
        cases=tuple(map(CallOverhead, KINDS)),
        packages=("torch",),
        pip="torch",
        peer="torch",
    ),
    CaseGroup(
        name="overhead training",
        group="overhead training",
        description="1 × 1 × 1 × 8, one key, float32, forward and backward",
        cases=tuple(map(TrainingOverhead, TRAINING_KINDS)),
        packages=("torch",),
        pip="torch",
        peer="torch",
        subtracted="empty",
    ),
)
