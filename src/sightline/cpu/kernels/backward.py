"""The backward kernel: the weights again from the saved normaliser, tile by tile, and five products on register tiles.

For a tile of keys j and a block of queries i (Dao et al., "FlashAttention", 2022, algorithm 4), with c the scale and
δᵢ = Σ dO ∘ O − d_lse:

    Sᵀ[j][i] = Σ_d K[j][d] · Qᵀ[d][i]         P  = 2^(Sᵀ − lse), 0 where hidden
    dPᵀ[j][i] = Σ_d V[j][d] · dOᵀ[d][i]        dS = P ∘ (dP − δ) · d score / d s · c
    dQᵀ[d][i] += Σ_j K[j][d] · dSᵀ[j][i]
    dV[j][d] += Σ_i Pᵀ[j][i] · dO[i][d]        dK[j][d] += Σ_i dSᵀ[j][i] · Q[i][d]

The first three have their vectors along queries, as the forward kernel has; the last two along d, on rows of dO and Q
laid out beside their transposes, and are added to rows that only one thread ever writes: an item of work is a part of
the keys of one key head, which takes all its queries in turn. How many parts there are follows from the problem alone,
and the parts' shares of dQ are added in order, so that results are the same for any number of threads.

NaN and ∞ are not looked after here: a gradient that is not finite raises `taint`, and the caller takes another road.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from ...formula.derivative import derivative
from ...formula.expression import Lookup, walk
from ..codegen.abi import BACKWARD
from ..codegen.builder import DOUBLE, INT64, Value, Variable, vector
from ..codegen.operand_tiles import join_rows, widen_row
from .block import KEYS, Block
from .tables import Gain

__all__ = ["Backward"]


class Backward(Block):
    """Writes the kernel into a module.

    `structure.roles` says of each further formula whether statistics add it to dP ("weights") or to the gradient of the
    final score ("scores"). `structure.gaining` names the lookups of the score whose tables gain gradients: (place of
    the lookup in `walk`, slot of its table among those of the problem, whether one part of the keys alone writes each
    of its entries). The gains' own words follow the tables': address, and bytes from one part's sums to the next.
    """

    fields = BACKWARD

    def allocate(self) -> None:
        tiles, structure = self.tiles, self.structure
        self.q_t, self.s_t = tiles.matrix(tiles.pairs(structure.d_k)), tiles.matrix(KEYS)
        self.key, self.value = self.rows(1, along=True, down=True), self.rows(2, along=True, down=False)
        self.do_t = tiles.matrix(tiles.pairs(structure.d_v))
        self.dp_t, self.dq_t = tiles.matrix(KEYS), tiles.matrix(structure.d_k)
        self.q_rows, self.do_rows = self.block_rows(structure.d_k), self.block_rows(structure.d_v)
        if self.paired:  # dS once more with pairs along keys, and both with pairs along queries
            self.ds_pairs = tiles.matrix(tiles.pairs(KEYS))
            self.p_rows, self.ds_rows = (tiles.scratch(KEYS * tiles.block * 2) for _ in range(2))
        self.normaliser, self.delta = tiles.matrix(1), tiles.matrix(1)
        self.lse, self.shift = tiles.variables(), tiles.variables()
        self.prepare_slopes()

    # -- items ----------------------------------------------------------------------------------------------------
    def take(self, item: Value) -> None:
        """Item → (part of the keys, batches, key heads), and for each the queries of the group's heads in turn."""
        code, given = self.code, self.given
        apart = given.heads_apart * given.batches_apart
        self.part, place = item // apart, item % apart
        heads = given.H // given.group
        start = self.part * given.chunk
        last = (given.m + (KEYS - 1)) // KEYS
        self.first_tile, self.last_tile = start, code.minimum(start + given.chunk, last)

        def span(at: Value, apart: Value, whole: Value) -> tuple[Value, Value]:
            """One of them where they are taken apart, else all."""
            alone = apart == whole
            first = code.where(alone, at, 0)
            return first, code.where(alone, first + 1, whole)

        b0, b1 = span(place // given.heads_apart, given.batches_apart, given.batches)
        g0, g1 = span(place % given.heads_apart, given.heads_apart, heads)
        with code.loop(b0, b1) as b, code.loop(g0, g1) as g:
            self.place_keys(b, g, self.key, self.value)
            self.key_row = (b * heads + g) * given.m
            first = g * given.group
            with code.loop(first, first + given.group) as h, code.loop(0, given.query_blocks) as query_block:
                self.place(b, h, query_block)
                with code.when(self.sees(self.first_tile, self.last_tile)):
                    self.query_block_of_part()
            self.inspect_keys()

    def query_block_of_part(self) -> None:
        """One block of queries against the part's keys."""
        code, given, tiles = self.code, self.given, self.tiles
        self.o, self.do = given.operand("output", self.b, self.h), given.operand("d_output", self.b, self.h)
        self.turn_queries()
        self.turn_gradients()
        self.copy_rows(self.q, "query", self.structure.unit[0], self.structure.d_k, self.q_rows)
        self.copy_rows(self.do, "d_output", True, self.structure.d_v, self.do_rows)
        self.evaluate_block()
        with code.loop(0, self.structure.d_k) as d:
            for v in self.vectors:
                tiles.store(self.dq_t, d, v, code.value(0.0, self.vector))
        with self.each_tile(self.first_tile, self.last_tile) as (tile, partial):
            self.key_tile(tile * KEYS, partial)
        self.hand_over_queries()

    # -- the block's own rows -------------------------------------------------------------------------------------
    def padded(self, width: int) -> int:
        """The width rounded up to whole vectors."""
        return -(-width // self.lanes) * self.lanes

    def block_rows(self, width: int) -> Value:
        """Scratch for the block's rows; of pairs, two rows to one."""
        return self.tiles.scratch(self.tiles.pairs(self.tiles.block) * self.padded(width) * self.tiles.size)

    def turn_gradients(self) -> None:
        """dOᵀ[d][lane], and per lane δ and the normaliser in the scores' base; ∞ for lanes past the end, so P = 0."""
        code, given, tiles = self.code, self.given, self.tiles
        width, unit = self.structure.d_v, math.log2(math.e) if self.structure.base_2 else 1.0
        for v in self.vectors:
            tiles.store(self.delta, 0, v, code.value(0.0, self.vector))
            tiles.store(self.normaliser, 0, v, code.value(math.inf, self.vector))  # weights of 0
        self.turn(self.do, given.d_output_row, given.d_output_column, True, width, self.do_t)
        with code.loop(0, self.valid) as lane:
            source = self.do.at((self.i0 + lane) * given.d_output_row)
            answer = self.o.at((self.i0 + lane) * given.output_row)
            delta = Variable(code, DOUBLE, -given.d_lse.at((self.row + lane) * 8).load(DOUBLE))
            sums = Variable(code, vector(DOUBLE, self.lanes), 0.0)
            whole = width // self.lanes * self.lanes
            for total, first, last, lanes in ((sums, 0, whole, self.lanes), (delta, whole, width, 1)):
                with code.loop(first, last, lanes) as d:
                    x, y = (self.form.load(at.at(d * self.form.bytes), lanes).to(DOUBLE) for at in (source, answer))
                    total.set(code.fma(x, y, total.get()))
            delta.set(delta.get() + sums.get().sum())
            lse = given.lse.at((self.row + lane) * 8).load(DOUBLE)
            lse = code.where(lse == -math.inf, 0.0, lse) * unit
            self.lane_of(self.delta, 0, lane).store(delta.get().to(self.float))
            self.lane_of(self.normaliser, 0, lane).store(lse.to(self.float))
        for v in self.vectors:
            self.lse[v].set(tiles.load(self.normaliser, 0, v))
            self.shift[v].set(tiles.load(self.delta, 0, v))

    def copy_rows(self, source: Value, name: str, unit: bool, width: int, target: Value) -> None:
        """The block's rows as vectors along d, zeros past the ends; of pairs, two neighbouring rows joined."""
        code, given, tiles = self.code, self.given, self.tiles
        row_step, step = getattr(given, f"{name}_row"), getattr(given, f"{name}_column")
        long = self.padded(width) * tiles.size
        zero = code.value(0, tiles.numbers)
        with code.loop(0, tiles.pairs(tiles.block) * (long // tiles.align)) as at:
            target.at(at * tiles.align).store(zero, tiles.align)
        first = source.at(self.i0 * row_step)
        with code.loop(0, self.valid, tiles.pair) as lane:
            row, place = first.at(lane * row_step), target.at((lane // tiles.pair) * long)
            if self.paired:
                join_rows(tiles, row, place, width, row_step, step if not unit else None, lane + 1 < self.valid)
            else:
                widen_row(tiles, self.form, row, place, width, step if not unit else None)

    def hand_over_queries(self) -> None:
        """The part's share of dQ, row by row."""
        given, tiles = self.given, self.tiles
        width, size = self.structure.d_k, tiles.size
        self.look_for_taint(self.dq_t, width * len(self.vectors))
        rows = given.batches * given.H * given.n
        target = given.d_query.at((self.part * rows + self.row) * (width * size))
        self.turn_back(self.dq_t, width, target, self.form.widened)

    def look_for_taint(self, vectors: Value, count: Any) -> None:
        """Raise the flag where any of so many vectors holds NaN or ∞."""
        code = self.code
        mark = Variable(code, self.vector, 0.0)
        with code.loop(0, count) as at:
            entry = vectors.at(at * self.tiles.align).load(self.vector)
            mark.set(mark.get() + (entry - entry))  # 0 of what is finite
        with code.when((mark.get() != 0.0).any()):
            self.given.taint.store(code.value(1, INT64))

    def inspect_keys(self) -> None:
        """Look over the part's rows of dK and dV."""
        code, given = self.code, self.given
        first = self.first_tile * KEYS
        count = code.minimum(self.last_tile * KEYS, given.m) - first
        with code.when(count > 0):
            for target, width in ((given.d_key, self.structure.d_k), (given.d_value, self.structure.d_v)):
                vectors = self.padded(width) // self.lanes
                rows = target.at((self.key_row + first) * (vectors * self.tiles.align))
                self.look_for_taint(rows, count * vectors)

    # -- a tile ---------------------------------------------------------------------------------------------------
    def key_tile(self, j0: Value, partial: Value) -> None:
        """One tile: its weights and their gradients, and its share of dQ, dK and dV."""
        code, tiles, structure = self.code, self.tiles, self.structure
        self.keys = code.minimum(self.given.m - j0, KEYS)
        self.key.stage(j0, self.keys)
        self.value.stage(j0, self.keys)

        def keep_scores(key: Value, v: int, s: Value) -> None:
            tiles.store(self.s_t, key, v, s)

        self.product(self.keys, KEYS, self.key.row, self.q_t, tiles.pairs(structure.d_k), keep_scores)
        self.product(
            self.keys, KEYS, self.value.row, self.do_t, tiles.pairs(structure.d_v),
            lambda key, v, dp: tiles.store(self.dp_t, key, v, dp),
        )  # fmt: skip
        with code.either(partial) as (yes, no):
            with yes:
                if self.renderers[0] is not None:
                    self.differentiate(j0, masked=True)
            with no:
                self.differentiate(j0, masked=False)

        def add_queries(d: Value, v: int, dq: Value) -> None:
            tiles.store(self.dq_t, d, v, tiles.load(self.dq_t, d, v) + dq)

        width, length = structure.d_k, (self.keys + (tiles.pair - 1)) // tiles.pair
        matrix = self.ds_pairs if self.paired else self.dp_t
        self.product(width, width, self.key.column, matrix, length, add_queries)
        p, ds = (self.p_rows, self.ds_rows) if self.paired else (self.s_t, self.dp_t)
        self.add_to_rows(p, self.do_rows, structure.d_v, self.given.d_value, j0)
        self.add_to_rows(ds, self.q_rows, structure.d_k, self.given.d_key, j0)

    def differentiate(self, j0: Value, masked: bool) -> None:
        """P in place of Sᵀ and dS in place of dPᵀ, with the scale in it, and what tables gain."""
        code, tiles, structure = self.code, self.tiles, self.structure
        step = 4 if structure.dropout else tiles.pair
        self.turn_tables(j0, 0 if masked else 1)
        with code.loop(self.keys, (self.keys + (step - 1)) // step * step) as past:  # up to whole steps
            for v in self.vectors:
                tiles.store(self.s_t, past, v, code.value(0.0, self.vector))
                tiles.store(self.dp_t, past, v, code.value(0.0, self.vector))
        with code.loop(0, self.keys, step) as key:
            keep = self.kept(j0 + key) if structure.dropout else []
            found: list[list[tuple[Value, Value]]] = [[] for _ in self.vectors]
            for k in range(step):
                for tables in self.tile_tables[0 if masked else 1 :]:
                    tables.fetch(key + k, j0 + KEYS)
                j = code.minimum(j0 + key + k, self.given.m - 1).to(self.integer)
                rows, inside = self.by_row(j), (key + k < self.keys if step > 1 else None)
                for v in self.vectors:
                    s, dp = tiles.load(self.s_t, key + k, v), tiles.load(self.dp_t, key + k, v)
                    known = [self.known_of_pair(formula, rows, key + k, v) for formula in range(2)]
                    p = self.weight(s, v, j, known, masked, inside)
                    dropped = p
                    if keep:
                        factor = self.given.keep.to(self.float)
                        dropped, dp = (code.where(keep[k][v], x * factor, 0.0) for x in (p, dp))
                    more = self.slopes_of_statistics(p, key + k, v, rows)
                    dp = dp + more["weights"] if "weights" in more else dp
                    found[v].append((dropped, self.slope_of_scores(p, dp, more.get("scores"), key + k, v)))
            for v in self.vectors:
                self.keep_pairs(key, v, found[v])
        for gain in self.gaining:
            gain.hand_over(j0)

    def weight(
        self, s: Value, v: int, j: Value, known: list[dict[int, Value]], masked: bool, inside: Value | None
    ) -> Value:
        """P of one key and a vector of queries."""
        code = self.code
        mask, score = self.renderers[:2]
        symbols = self.symbols[v] | {"j": j, "s": s * self.factor}
        self.at = symbols
        if score is not None:
            self.parts = score.everything(symbols, known[1])
            self.final = self.parts[id(score.formula)].to(self.float).spread(self.lanes)
            logit = self.final - self.lse[v].get()
        else:
            self.final = symbols["s"] * (math.log(2) if self.structure.base_2 else 1.0)
            logit = code.fma(s, self.factor, -self.lse[v].get())
        p = self.power(logit)
        if masked and mask is not None:
            p = code.where(mask.pair(symbols, known[0]), p, code.value(0.0, self.vector))
        return p if inside is None else code.where(inside.spread(self.lanes), p, code.value(0.0, self.vector))

    def slopes_of_statistics(self, p: Value, key: Value, v: int, rows: list[dict[int, Value]]) -> dict[str, Value]:
        """What statistics add to dP ("weights") and to the gradient of the final score ("scores")."""
        found: dict[str, Value] = {}
        for f, role in enumerate(self.structure.roles, start=2):
            renderer = self.renderers[f]
            assert renderer is not None
            slope = renderer.pair(self.at | {"s": self.final}, self.known_of_pair(f, rows, key, v)).to(self.float)
            found[role] = self.code.where(p == 0.0, 0.0, slope.spread(self.lanes))
        return found

    def slope_of_scores(self, p: Value, dp: Value, more: Value | None, key: Value, v: int) -> Value:
        """dS with the scale in it, of the pair whose weight was just made; its final score's gradient has `more`."""
        code = self.code
        scale, delta = self.given.scale.to(self.float), self.shift[v].get()
        if self.renderers[1] is None:
            ds = p * code.fma(dp, scale, -(delta * scale))
            return ds if more is None else code.fma(more, scale, ds)
        d_score = p * (dp - delta) if more is None else p * (dp - delta) + more
        d_score = code.where(p == 0.0, 0.0, d_score)  # a slope may be ∞ where the mask hides
        for gain in self.gaining:
            gain.add(d_score, self.at, self.parts, key, v)
        slope = self.slope.pair(self.at, self.parts).to(self.float).spread(self.lanes)
        return code.where(p == 0.0, 0.0, d_score * slope * scale)

    def keep_pairs(self, key: Value, v: int, found: list[tuple[Value, Value]]) -> None:
        """P and dS to where the products read them."""
        tiles = self.tiles
        if not self.paired:
            for k, (p, ds) in enumerate(found):
                tiles.store(self.s_t, key + k, v, p)
                tiles.store(self.dp_t, key + k, v, ds)
            return
        half = tiles.block * 2
        for k in range(0, len(found), 2):
            joined = self.packed(found[k][1], found[k + 1][1])
            tiles.at(self.ds_pairs, (key + k) // 2, v).store(joined, tiles.align)
            for u in (k, k + 1):
                for target, value in zip((self.p_rows, self.ds_rows), found[u], strict=True):
                    self.form.store(target.at((key + u) * half + v * self.lanes * 2), value)

    def add_to_rows(self, numbers: Value, rows: Value, width: int, target: Value, j0: Value) -> None:
        """target[j][d] += Σ_i numbers[j][i] · rows[i][d], with vectors along d."""
        code, tiles = self.code, self.tiles
        vectors = self.padded(width) // self.lanes
        long = vectors * tiles.align
        line = tiles.row_bytes // tiles.pair  # bytes of one key's numbers
        groups = -(-vectors // tiles.vectors)
        edges = [vectors * k // groups for k in range(groups + 1)]
        for first, last in itertools.pairwise(edges):

            def write(key: Value, count: int, first: int = first, last: int = last) -> None:
                keys = [code.minimum(key + r, self.keys - 1) for r in range(count)]
                places = [target.at((self.key_row + j0 + k) * long + first * tiles.align) for k in keys]
                sums = [[Variable(code, self.vector, 0.0) for _ in range(first, last)] for _ in range(count)]
                bases = [numbers.at(k * line) for k in keys]
                for place in places:
                    for v in range(last - first):
                        code.prefetch(place.at(v * tiles.align))
                tiles.accumulate(sums, bases, tiles.size, rows.at(first * tiles.align), tiles.pairs(tiles.block), long)
                for r in range(count):
                    with code.when(key + r < self.keys):
                        for v, total in enumerate(sums[r]):
                            at = places[r].at(v * tiles.align)
                            at.store(at.load(self.vector) + total.get())

            tiles.in_groups(self.keys, KEYS, write)

    # -- tables ---------------------------------------------------------------------------------------------------
    def prepare_slopes(self) -> None:
        """d score / d s, and d score / d entry of the lookups whose tables gain gradients.

        A derivative reads the tables where the score does, so its lookups are known by the time it is evaluated.
        """
        score = self.formulas[1]
        self.gaining: list[Gain] = []
        if score is None:
            return
        nodes, tables = walk(score), self.given.tables
        self.slope = self.renderer(derivative(score), self.float, ())
        for sums, (place, slot, owned) in zip(
            tables[len(self.structure.tables) :], self.structure.gaining, strict=True
        ):
            node = nodes[place]
            assert isinstance(node, Lookup)
            slope = self.renderer(derivative(score, node), self.float, ())
            by_tile = owned and place in self.structure.by_tile[1]
            self.gaining.append(Gain(self, node, tables[slot].lengths, slope, sums, owned, by_tile))
