"""The functions by which the forward kernel applies score and mask to a tile.

    function(argument block, Sᵀ, max Sᵀ, b, h, i0, j0, number of keys)

Sᵀ is Q · K without the scale. The function replaces Sᵀ by the results of the score formula, if there is one, and hidden
entries by −∞. It writes each query's maximum in the tile. `MASK_FUNCTION` applies score and mask, for tiles with hidden
pairs; `SCORE_FUNCTION` applies the score alone. The rest of the forward kernel does not depend on the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...formula.expression import Expression
from ..codegen.abi import FORWARD_FIELDS
from ..codegen.builder import Builder
from ..codegen.values import INT64, POINTER
from ..runtime.machine import Machine
from .block import Block
from .kernel_spec import KEY_BLOCK, KernelSpec

MASK_FUNCTION, SCORE_FUNCTION = "sightline_apply_mask", "sightline_apply_score"
ARGUMENTS = (POINTER, POINTER, POINTER, *[INT64] * 5)


class ScoreFunctions(Block):
    """Write the functions into a module."""

    fields = FORWARD_FIELDS
    own_formulas = range(2)

    def __init__(
        self, spec: KernelSpec, formulas: Sequence[Expression | None], machine: Machine, module: Any = None
    ) -> None:
        super().__init__(spec, formulas, machine)
        self.module = self.module if module is None else module

    def write(self, name: str = "") -> Any:
        """Return the module with the functions that the kernel calls."""
        if self.spec.mask is not None:
            self.write_function(MASK_FUNCTION, masked=True)
        else:
            Builder(self.module, MASK_FUNCTION, ARGUMENTS).finish()  # never called: without a mask no pair is hidden
        if self.spec.score is not None:
            self.write_function(SCORE_FUNCTION, masked=False)
        return self.module

    def write_function(self, name: str, masked: bool) -> None:
        """Write the function that applies the score, and the mask too if `masked`."""
        builder = Builder(self.module, name, ARGUMENTS)
        self.begin(builder)
        tiles, (_, self.s_t, maxima, self.b, self.h, self.i0, j0, self.num_keys) = self.tiles, builder.arguments
        self.num_valid = builder.minimum(self.args.n - self.i0, tiles.block)
        self.evaluate_block()
        self.transpose_tables(j0, 0 if masked else 1, 2)
        tile_max = tiles.variables(-math.inf)
        with builder.loop(0, self.num_keys) as key:
            for tables in self.tile_tables[0 if masked else 1 : 2]:
                tables.prefetch(key, j0 + KEY_BLOCK)
            for pairs in self.compute_scores(key, (j0 + key).to(self.integer)):
                v, s, allowed = pairs.v, pairs.score, self.compute_condition(pairs, masked)
                if allowed is not None:
                    s = builder.where(allowed, s, builder.value(-math.inf, self.vector))
                tiles.store(self.s_t, key, v, s)
                tile_max[v].set(builder.maximum(s, tile_max[v].get()))
        for v in self.vectors:
            tiles.store(maxima, 0, v, tile_max[v].get())
        builder.finish()


def without_formulas(spec: KernelSpec) -> KernelSpec:
    """Return the spec of the part that does not depend on the formulas.

    The mask is "", so that the kernel calls `MASK_FUNCTION`. The score is "" if there is one.
    """
    score = None if spec.score is None else ""
    return replace(spec, mask="", score=score, tables=(), needs_int64=False, clamped=((), ()), tile_lookups=((), ()))
