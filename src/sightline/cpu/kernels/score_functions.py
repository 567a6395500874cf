"""The functions by which the forward kernel evaluates formulas over a tile. The rest of it does not depend on formulas.

    function(argument block, Sᵀ, max Sᵀ, f, b, h, i0, j0, number of keys)

Sᵀ is Q · K without the scale. The function replaces Sᵀ by the results of the score formula, if there is one, and hidden
entries by −∞. It writes each query's maximum in the tile, and the values of the formulas f of sums Σ P f, KEY_BLOCK
rows for each. `MASK_FUNCTION` applies score and mask, for tiles with hidden pairs; `SCORE_FUNCTION` applies the score
alone. `OUTPUTS_FUNCTION` copies the addresses of the statistics' arrays to its second argument, because the words
before them in the argument block are those of the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...formula.expression import Expression
from ..codegen.abi import FORWARD_FIELDS
from ..codegen.builder import Builder
from ..codegen.values import BOOL, INT64, POINTER, Value
from ..runtime.machine import Machine
from .block import Block, ScoredPairs
from .kernel_spec import KEY_BLOCK, KernelSpec

MASK_FUNCTION, SCORE_FUNCTION = "sightline_apply_mask", "sightline_apply_score"
OUTPUTS_FUNCTION = "sightline_find_outputs"
ARGUMENTS = (*[POINTER] * 4, *[INT64] * 5)


class ScoreFunctions(Block):
    """Write the functions into a module."""

    fields = FORWARD_FIELDS

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
        if self.spec.score is not None or self.spec.extra_formulas:
            self.write_function(SCORE_FUNCTION, masked=False)
        if self.spec.roles:
            self.begin(builder := Builder(self.module, OUTPUTS_FUNCTION, (POINTER, POINTER)))
            for index, output in enumerate(self.args.outputs):
                builder.arguments[1].at(index * 8).store(output.pointer)
            builder.finish()
        return self.module

    def write_function(self, name: str, masked: bool) -> None:
        """Write the function that applies the score, the mask too if `masked`, and evaluates the formulas of sums."""
        builder = Builder(self.module, name, ARGUMENTS)
        self.begin(builder)
        tiles, (_, self.s_t, maxima, values, *position) = self.tiles, builder.arguments
        self.b, self.h, self.i0, j0, self.num_keys = position
        self.num_valid = builder.minimum(self.args.n - self.i0, tiles.block)
        self.evaluate_block()
        first, changes_scores = 0 if masked else 1, masked or self.spec.score is not None
        self.transpose_tables(j0, first)
        tile_max = tiles.variables(-math.inf)
        with builder.loop(0, self.num_keys) as key:
            for tables in self.tile_tables[first:]:
                tables.prefetch(key, j0 + KEY_BLOCK)
            for pairs in self.compute_scores(key, (j0 + key).to(self.integer)):
                self.evaluate_sums(values, pairs)
                v, s, allowed = pairs.v, pairs.score, self.compute_condition(pairs, masked)
                if allowed is not None:
                    s = builder.where(allowed, s, builder.value(-math.inf, self.vector))
                if changes_scores:
                    tiles.store(self.s_t, key, v, s)
                    tile_max[v].set(builder.maximum(s, tile_max[v].get()))
        for v in self.vectors if changes_scores else ():
            tiles.store(maxima, 0, v, tile_max[v].get())
        builder.finish()

    def evaluate_sums(self, values: Value, pairs: ScoredPairs) -> None:
        """Write the formulas' values at these pairs. A condition is 1 where it holds, else 0."""
        factor = self.factor if self.spec.score is None else 1.0
        symbols = pairs.symbols | {"s": pairs.score * factor * self.spec.nats_per_unit}
        one = self.builder.value(1.0, self.vector)
        for index in range(2, len(self.formulas)):
            value = self.evaluate_formula(index, symbols, pairs.key, pairs.v)
            value = self.builder.where(value, one, 0.0) if value.type.element is BOOL else value
            self.tiles.store(values, pairs.key + (index - 2) * KEY_BLOCK, pairs.v, value)


def without_formulas(spec: KernelSpec) -> KernelSpec:
    """Return the spec of the part that does not depend on the formulas.

    The mask is "", so that the kernel calls `MASK_FUNCTION`. The score is "" if there is one.
    """
    score = None if spec.score is None else ""
    none: dict[str, Any] = {"tables": (), "extra_formulas": (), "clamped": ((), ()), "tile_lookups": ((), ())}
    return replace(spec, mask="", score=score, needs_int64=False, **none)
