"""The groups "JAX" and "JAX short calls": calls on JAX arrays under `jax.jit`, beside `jax.nn.dot_product_attention`.

Sightline is timed on arrays with heads before positions, and on arrays in the layout of JAX's function. The short calls
are timed on NumPy arrays too, as they need no dispatch of JAX.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ...api.functions import attention
from ...formula.library import causal
from .cases import Case, CaseContender, CaseGroup
from .check import share_of_budget
from .implementations import PreparedCall
from .workloads import CAUSAL, Inputs, Workload

SMALL_LENGTH = 64  # number of queries in a small version


@dataclass(frozen=True)
class JaxCase(Case):
    """Attention of one batch entry, 8 heads of width 64 and n queries.

    Parameters
    ----------
    passes : with "forward and backward", "backward" in tables: a program of the output and of all gradients is timed
    is_short : True if NumPy arrays are timed too
    """

    n: int
    is_causal: bool = False
    passes: Literal["forward", "forward and backward"] = "forward"
    is_short: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        parts = [f"n {self.n}"] + ["causal"] * self.is_causal + ["backward"] * (self.passes != "forward")
        return " ".join(parts)

    def small(self) -> JaxCase:
        return replace(self, n=min(self.n, SMALL_LENGTH))

    def contenders(self, threads: int) -> Iterator[CaseContender]:
        os.environ.setdefault("NPROC", str(threads))  # XLA reads NPROC when a process first uses jax
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax

        from ...jax import dot_product_attention

        mask = causal() if self.is_causal else None
        yield self._contender("sightline", "Sightline", partial(attention, mask=mask), False, threads)
        for name, label, attend in (
            ("by position", "JAX's layout", dot_product_attention),
            ("jax", "JAX", jax.nn.dot_product_attention),
        ):
            yield self._contender(name, label, partial(attend, is_causal=self.is_causal), True, threads)
        if self.is_short:
            yield self._on_numpy(threads)

    def _workload(self) -> tuple[Workload, Inputs]:
        mask = CAUSAL if self.is_causal else None
        workload = Workload(name=self.name, passes=self.passes, n=self.n, mask=mask)
        return workload, Inputs.of(workload)

    def _contender(
        self, name: str, label: str, attend: Callable[..., Any], by_position: bool, threads: int
    ) -> CaseContender:
        """Return a contender on JAX arrays; `by_position` is true if positions are before heads in them."""
        import jax

        def swap(array: Any) -> Any:
            return array.swapaxes(1, 2) if by_position else array

        workload, inputs = self._workload()
        operands = [jax.numpy.asarray(swap(x).copy()) for x in (inputs.query, inputs.key, inputs.value)]
        call: Callable[[Any], Any]
        if inputs.d_output is None:
            run = jax.jit(attend)
            call = lambda _: (run(*operands).block_until_ready(),)  # noqa: E731
        else:
            both, d_output = jax.jit(partial(_differentiate, attend)), jax.numpy.asarray(swap(inputs.d_output).copy())
            call = lambda _: jax.block_until_ready(both(d_output, *operands))  # noqa: E731

        def results(arrays: Any) -> dict[str, Any]:
            return dict(zip(("output", "query", "key", "value"), (swap(np.asarray(x)) for x in arrays), strict=False))

        def check() -> float:
            return share_of_budget(workload, inputs, results(call(None)))

        return CaseContender(name, label, PreparedCall(call, results, threads=threads), check, is_peer=name == "jax")

    def _on_numpy(self, threads: int) -> CaseContender:
        _, inputs = self._workload()
        attend = partial(attention, mask=causal() if self.is_causal else None)
        prepared = PreparedCall(
            lambda _: attend(inputs.query, inputs.key, inputs.value), lambda x: {"output": x}, threads=threads
        )
        return CaseContender("numpy", "NumPy", prepared, None, is_peer=True)


def _differentiate(attend: Callable[..., Any], d_output: Any, *operands: Any) -> Any:
    import jax

    output, backward = jax.vjp(attend, *operands)
    return output, *backward(d_output)


def _group(name: str, description: str, cases: tuple[JaxCase, ...]) -> CaseGroup:
    return CaseGroup(
        name=name, group=name, description=description, cases=cases, packages=("jax",), pip="jax", peer="jax"
    )


_PASSES: tuple[Literal["forward", "forward and backward"], ...] = ("forward", "forward and backward")
JAX_CASES = (
    _group(
        "JAX",
        "1 × 8 heads, d 64, float32, under jit",
        tuple(JaxCase(n, is_causal, passes) for n in (1024, 4096) for is_causal in (False, True) for passes in _PASSES),
    ),
    _group(
        "JAX short calls",
        "1 × 8 heads, d 64, float32, under jit",
        tuple(JaxCase(n, is_causal, is_short=True) for n in (1, 16, 64) for is_causal in (False, True)),
    ),
)
