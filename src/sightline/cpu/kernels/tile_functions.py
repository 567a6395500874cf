"""The functions by which a kernel evaluates the formulas of a call over a tile, in a module that may be their own.

The rest of the kernel is compiled once for all formulas, and calls the functions. `OUTPUTS_FUNCTION` copies the
addresses of the outputs that have no field to its second argument, because the words before them in the argument block
are those of the formulas. In the other functions Sᵀ is Q · K without the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ...formula.derivative import derivative, vanishes_with
from ...formula.expression import SYMBOLS, Expression
from ..codegen.builder import Builder, Module, Variable
from ..codegen.values import BOOL, INT64, POINTER, Type, Value
from ..runtime.machine import Machine
from .block import OUTPUTS_FUNCTION, Block, ScoredPairs
from .kernel_spec import KEY_BLOCK, KernelSpec, ReductionRole
from .recomputed_weights import NormalizedWeights, RecomputedWeights
from .tables import TableGradientCode


class TileFunctions(Block):
    """Write two functions into a module: for tiles without hidden pairs, and for tiles that may have some.

    Attributes
    ----------
    fields : the fields of the kernel
    names : the names of the two functions
    arguments : the types of their arguments; the first one is the argument block of the kernel
    """

    names: ClassVar = ("sightline_apply_score", "sightline_apply_mask")
    arguments: ClassVar[tuple[Type, ...]] = (*[POINTER] * 4, *[INT64] * 5)

    def __init__(
        self,
        fields: Mapping[str, Any],
        spec: KernelSpec,
        formulas: Sequence[Expression | None],
        machine: Machine,
        module: Module | None = None,
    ) -> None:
        super().__init__(spec, formulas, machine)
        self.fields, self.module = fields, self.module if module is None else module

    def write(self, name: str = "") -> Any:
        """Return the module with the functions that the kernel calls."""
        self.begin(builder := Builder(self.module, OUTPUTS_FUNCTION, (POINTER, POINTER)))
        for index, output in enumerate(self.args.outputs):
            builder.arguments[1].at(index * 8).store(output.pointer)
        builder.finish()
        for masked, function in enumerate(self.names):
            builder = Builder(self.module, function, self.arguments)
            if not masked or self.spec.mask is not None:  # without a mask no pair is hidden
                self.begin(builder)
                self.write_function(bool(masked))
            builder.finish()
        return self.module

    def write_function(self, masked: bool) -> None:
        """Write the body of a function."""
        raise NotImplementedError(type(self).__name__)


class ScoreFunctions(TileFunctions):
    """Write the functions that the forward kernel calls.

        function(argument block, Sᵀ, max Sᵀ, f, b, h, i0, j0, number of keys)

    The function replaces Sᵀ by the results of the score formula, if there is one, and hidden entries by −∞. It writes
    each query's maximum in the tile, and the values of the formulas f of sums Σ P f, KEY_BLOCK rows for each.
    """

    def write_function(self, masked: bool) -> None:
        first, changes_scores = 0 if masked else 1, masked or self.spec.score is not None
        if not changes_scores and not self.spec.extra_formulas:
            return  # the kernel calls no such function
        builder, tiles, (_, self.s_t, maxima, values, *position) = self.builder, self.tiles, self.builder.arguments
        self.b, self.h, self.i0, j0, self.num_keys = position
        self.num_valid = builder.minimum(self.args.n - self.i0, tiles.block)
        self.evaluate_block()
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

    def evaluate_sums(self, values: Value, pairs: ScoredPairs) -> None:
        """Write the formulas' values at these pairs. A condition is 1 where it holds, else 0."""
        factor = self.factor if self.spec.score is None else 1.0
        symbols = pairs.symbols | {"s": pairs.score * factor * self.spec.nats_per_unit}
        one = self.builder.value(1.0, self.vector)
        for index in range(2, len(self.formulas)):
            value = self.evaluate_formula(index, symbols, pairs.key, pairs.v)
            value = self.builder.where(value, one, 0.0) if value.type.element is BOOL else value
            self.tiles.store(values, pairs.key + (index - 2) * KEY_BLOCK, pairs.v, value)


class GradientFunctions(TileFunctions, RecomputedWeights):
    """Write the functions that the backward kernel calls.

        function(argument block, Sᵀ, dPᵀ, lse and δ, P, dS, pairs of dS, bytes of a row of P, split, b, h, i0, j0, keys)

    The function computes P and dS, which includes the scale, and adds terms to the gradients of tables. P and dS are
    written by key, and dS also as pairs of keys if the processor multiplies pairs of bfloat16.

    `spec.roles` gives the role of each extra formula: statistics add the formula to dP ("weights") or to the gradient
    of the score after the score formula ("scores"). `spec.table_gradients` lists the lookups whose tables need
    gradients: (index of the lookup in `walk(score)`, slot of its table, True if only one split of the keys writes each
    entry). The sums of these gradients follow the tables among the arguments: address, and bytes from split to split.
    """

    names = "sightline_differentiate", "sightline_differentiate_masked"
    arguments = (*[POINTER] * 7, *[INT64] * 7)

    def write_function(self, masked: bool) -> None:
        builder, tiles, spec = self.builder, self.tiles, self.spec
        _, self.s_t, self.dp_t, per_query, *targets, self.split, self.b, self.h, self.i0, j0, num_keys = (
            builder.arguments
        )
        self.p_rows, self.ds_rows, self.ds_pairs, self.number_row_bytes = targets
        self.num_keys, self.num_valid = num_keys, builder.minimum(self.args.n - self.i0, tiles.block)
        self.lse, self.delta = (
            [Variable(builder, self.vector, tiles.load(per_query, row, v)) for v in self.vectors] for row in range(2)
        )
        self.prepare_derivatives()
        self.evaluate_block()
        step = 4 if spec.has_dropout else tiles.pair_size
        self.transpose_tables(j0, 0 if masked else 1)
        self.pad_keys(step, 0.0, self.s_t, self.dp_t)
        with builder.loop(0, self.num_keys, step) as key:
            keep_mask = self.dropout_keep_mask(j0 + key) if spec.has_dropout else []
            pairs_by_vector: list[list[tuple[Value, Value]]] = [[] for _ in self.vectors]
            for k, pairs, p, s in self.compute_weights(j0, key, step, masked):
                v, dropped, dp = pairs.v, p, tiles.load(self.dp_t, pairs.key, pairs.v)  # P after dropout
                if keep_mask:
                    factor = self.args.dropout_scale.to(self.float)
                    dropped, dp = (builder.where(keep_mask[k][v], x * factor, 0.0) for x in (p, dp))
                extra = self.evaluate_statistic_gradients(p, s, pairs)
                dp = dp + extra["weights"] if "weights" in extra else dp
                ds = self.compute_score_gradient(p, dp, extra.get("scores"), pairs)
                pairs_by_vector[v].append((dropped, ds))
            for v in self.vectors:
                self.store_weights_and_gradients(key, v, pairs_by_vector[v])
        for table_gradient in self.table_gradients:
            table_gradient.store(j0)

    def evaluate_statistic_gradients(self, p: Value, s: Value, pairs: ScoredPairs) -> dict[str, Value]:
        """Return by role what statistics add to dP ("weights") and to the gradient of S ("scores").

        P and S are those of `compute_weights`.
        """
        gradients: dict[str, Value] = {}
        for f, role in enumerate(self.spec.roles, start=2):
            gradient = self.evaluate_formula(f, pairs.symbols | {"s": s}, pairs.key, pairs.v)
            gradients[str(role)] = self.builder.where(p == 0.0, 0.0, gradient)
        return gradients

    def compute_score_gradient(self, p: Value, dp: Value, extra: Value | None, pairs: ScoredPairs) -> Value:
        """Return dS of the pairs, which includes the scale.

        `extra` is added to the gradient of the score after the score formula.
        """
        builder = self.builder
        scale, delta = self.args.scale.to(self.float), self.delta[pairs.v].get()
        if self.renderers[1] is None:
            ds = p * builder.fma(dp, scale, -(delta * scale))
            return ds if extra is None else builder.fma(extra, scale, ds)
        d_score = p * (dp - delta) if extra is None else p * (dp - delta) + extra
        d_score = builder.where(p == 0.0, 0.0, d_score)  # the derivative of a hidden score may be ∞
        for table_gradient in self.table_gradients:
            table_gradient.add(d_score, pairs)
        slope = self.score_derivative.evaluate_formula(pairs.symbols, pairs.nodes).to(self.float)
        slope = slope.broadcast(self.lanes)
        return builder.where(p == 0.0, 0.0, d_score * slope * scale)

    def store_weights_and_gradients(self, key: Value, v: int, pairs: list[tuple[Value, Value]]) -> None:
        """Store P and dS of a few keys where the products read them."""
        tiles = self.tiles
        for k, numbers in enumerate(pairs):
            for rows, x in zip((self.p_rows, self.ds_rows), numbers, strict=True):
                store_numbers(self, rows.at((key + k) * self.number_row_bytes), v, x)
        if self.paired:
            for k in range(0, len(pairs), 2):
                joined = self.pack_pairs(pairs[k][1], pairs[k + 1][1])
                tiles.at(self.ds_pairs, (key + k) // 2, v).store(joined, tiles.align)

    def prepare_derivatives(self) -> None:
        """Create the `Renderer` of d score / d s, and of d score / d entry for lookups whose tables need gradients.

        The derivatives read the same table entries as the score, so the kernel has loaded these entries already.
        """
        score = self.formulas[1]
        self.table_gradients: list[TableGradientCode] = []
        if score is None:
            return
        self.score_derivative = self.make_renderer(derivative(score), self.float, ())
        outputs = zip(self.args.outputs, self.spec.table_gradients, strict=True)
        self.table_gradients = [TableGradientCode(self, score, sums, *gradient) for sums, gradient in outputs]


def store_numbers(block: Block, row: Value, v: int, numbers: Value) -> None:
    """Store a row's numbers of a vector of queries, as bfloat16 if the processor multiplies pairs of these."""
    if block.paired:
        block.format.store(row.at(v * block.lanes * block.format.itemsize), numbers)
    else:
        block.tiles.store(row, 0, v, numbers)


class WeightFunctions(TileFunctions, NormalizedWeights):
    """Write the functions that a weights pass calls.

        function(argument block, Sᵀ, lse, entries, b, h, i0, j0, number of keys)

    The function replaces Sᵀ by the results of the score formula, if there is one, and hidden entries by −∞. For each
    role it writes KEY_BLOCK rows of entries: f, or P for top_k among others. lse has two rows, `lse_high` and
    `lse_low`.
    """

    @property
    def own_formulas(self) -> set[int]:  # type: ignore[override]
        """The indices of the mask, the score and the formulas that the reductions read, in `Block.formulas`."""
        return {0, 1} | {role.formula for role in self.spec.roles if isinstance(role, ReductionRole)}

    def write_function(self, masked: bool) -> None:
        builder, tiles, (_, self.s_t, lse, entries, *position) = self.builder, self.tiles, self.builder.arguments
        self.b, self.h, self.i0, j0, self.num_keys = position
        self.num_valid = builder.minimum(self.args.n - self.i0, tiles.block)
        self.lse_high, self.lse_low = (
            [Variable(builder, self.vector, tiles.load(lse, row, v)) for v in self.vectors] for row in range(2)
        )
        roles = list(enumerate(self.spec.roles)) if needs_entries(self.spec) else []
        self.evaluate_block()
        self.transpose_tables(j0, 0 if masked else 1)
        with builder.loop(0, self.num_keys) as key:
            for pairs in self.compute_scores(key, (j0 + key).to(self.integer)):
                s, v, allowed = pairs.score, pairs.v, self.compute_condition(pairs, masked)
                s = s if allowed is None else builder.where(allowed, s, builder.value(-math.inf, self.vector))
                for index, role in roles:
                    tiles.store(entries, key + index * KEY_BLOCK, v, self.compute_entry(role, pairs, s))
                if masked or self.spec.score is not None:
                    tiles.store(self.s_t, key, v, s)

    def compute_entry(self, role: ReductionRole | str, pairs: ScoredPairs, s: Value) -> Value:
        """Return f of these pairs, `role.hidden` for hidden pairs, whose score s is −∞; P if there is no formula."""
        exponent = self.compute_log_weight(s, pairs.v)
        p = self.exponentiate(exponent)
        if not isinstance(role, ReductionRole) or not role.formula:
            return p
        formula, nats = self.formulas[role.formula], self.spec.nats_per_unit
        assert formula is not None
        scale = 1.0 if self.spec.score is not None else self.factor * nats
        symbols = pairs.symbols | {"s": s * scale, "p": p, "ln p": exponent * nats}
        entry = self.evaluate_formula(role.formula, symbols, pairs.key, pairs.v)
        vanishes = vanishes_with(formula, SYMBOLS["p"])
        entry = self.builder.where(p == 0.0, 0.0, entry) if vanishes else entry
        is_visible = self.is_visible(s, pairs.v)
        return entry if vanishes and role.hidden == 0 else self.builder.where(is_visible, entry, role.hidden)


def needs_entries(spec: KernelSpec) -> bool:
    """True unless the pass is for top_k alone, which computes few weights itself."""
    return spec.roles != ("top_k",)


def without_formulas(spec: KernelSpec) -> KernelSpec:
    """Return the spec of the part that does not depend on the formulas.

    The mask is "", so that the kernel has code for tiles with hidden pairs. The score is "" if there is one.
    """
    score = None if spec.score is None else ""
    none: dict[str, Any] = {"tables": (), "extra_formulas": (), "clamped": ((), ()), "tile_lookups": ((), ())}
    roles = () if spec.kernel == "backward" else spec.roles
    return replace(spec, mask="", score=score, needs_int64=False, roles=roles, table_gradients=(), **none)
