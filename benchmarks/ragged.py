"""The group "ragged": sentences of several lengths, packed on one axis as documents, or as a padded batch.

The inputs are the packed tokens. A contender that computes a padded batch gets the tokens in the padded shape. The
padding is not timed. The results of such a contender are checked at the tokens, without the padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .cases import CaseGroup, Contender, TimedCall
from .contenders import Sightline
from .peers import Torch
from .workloads import Array, Documents, Inputs, Passes, Workload, padding_mask


class Padded(Contender):
    """A contender that computes packed documents as a padded batch with a mask that hides padding keys."""

    packages, pip = ("torch",), "torch"

    def __init__(self, contender: Contender, name: str) -> None:
        self.contender, self.name, self.label, self.is_peer = contender, name, name, contender.is_peer

    def prepare(self, case: Workload, inputs: Inputs, threads: int) -> TimedCall:
        assert isinstance(case.mask, Documents)
        lengths = case.mask.lengths(case.n)
        batch = replace(case, B=len(lengths), n=max(lengths), m=max(lengths), mask=padding_mask(lengths))
        is_token = np.arange(batch.n) < lengths[:, None]  # (B, n)

        def pad(array: Array | None) -> Any:
            """Return an array (1, H, tokens, d) as a view (B, H, n, d) of (B, n, H d), with zeros in padding."""
            if array is None:
                return None
            padded = np.zeros((*is_token.shape, *array.shape[1::2]), np.float32)
            padded[is_token] = array[0].swapaxes(0, 1)
            return padded.swapaxes(1, 2)

        def results(result: Any) -> dict[str, Array]:
            named = prepared.results(result).items()
            return {name: array.swapaxes(1, 2)[is_token].swapaxes(0, 1)[None] for name, array in named}

        given = map(pad, (inputs.query, inputs.key, inputs.value, inputs.d_output))
        prepared = self.contender.prepare(batch, Inputs(*given), threads)
        return replace(prepared, results=results, set_d_output=None)


def _case(count: int, mean: int, d: int, passes: Passes) -> Workload:
    name = f"{count} of about {mean}, d {d}" + " training" * (passes != "forward")
    packed, padded = Sightline(label="packed"), (Padded(Sightline(), "padded"), Padded(Torch(), "torch"))
    more: dict[str, Any] = {"mask": Documents(count, 0.9), "ours": packed, "baselines": padded, "peak": ""}
    return Workload(name=name, H=12, n=count * mean, d_k=d, passes=passes, **more)


BOTH: Passes = "forward and backward"
RAGGED = CaseGroup(
    name="ragged",
    group="ragged",
    description="12 heads, 0.1 to 1.9 times so many tokens; torch padded too",
    cases=tuple(
        _case(*size, each) for size in ((32, 64, 32), (32, 64, 64), (8, 256, 64)) for each in ("forward", BOTH)
    ),
)
