"""The forward kernel: FlashAttention's running softmax on register tiles, written for one formula and one machine.

Vectors run along queries. A block of queries is turned once into Qᵀ[d][lane]; scores are made as Sᵀ[key][lane], the
output is kept as Oᵀ[d_v][lane]. So K and V are read in their own row order, one number spread over the lanes at a time,
whatever their strides; row maximum and sum are plain operations on vectors; and both products are one register tile:

    Sᵀ[key][lane]  = Σ_d  K[key][d] · Qᵀ[d][lane]          for each block of keys a run names:
    Sᵀ             = score, mask                               m' = max(m, max Sᵀ),  α = 2^(m − m')
    P              = 2^(Sᵀ − m')                               l  = α l + Σ P
    Oᵀ[d_v][lane]  = α Oᵀ + Σ_key V[key][d_v] · P[key][lane]   at the end O = Oᵀ / l

Scores are in base 2 from the start, log₂ e folded into Q, where no score formula or sink wants natural logits. Work is
blocks of queries × heads, handed out by an atomic counter.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..formula.expression import Expression
from .arguments import Arguments
from .functions import exp2_of_negative, exp_of_negative
from .lanes import BOOL, BYTE, DOUBLE, FLOAT, INT32, INT64, Code, Value, Variable
from .machine import Machine
from .render import Renderer, Source
from .tiles import Tiles

__all__ = ["KEYS", "Forward", "Structure"]

KEYS = 64  # keys at a time; their scores, K and V rows stay in the first two caches


@dataclass(frozen=True)
class Structure:
    """All that is compiled into a kernel; everything else (lengths, strides, scale, tables' data) is an argument."""

    dtype: str
    d_k: int
    d_v: int
    unit: tuple[bool, ...]  # whether the columns of query, key and value lie next to each other
    mask: str | None
    score: str | None
    tables: tuple[tuple[str, int], ...]  # dtype and number of axes of each
    slots: tuple[int, ...]  # which of them each table of the mask, then of the score, is
    wide: bool  # whether whole numbers need 64 bits
    clamped: tuple[tuple[tuple[int, int], ...], ...]  # of mask and score; see Renderer
    sinks: bool

    @property
    def base_2(self) -> bool:
        """Whether scores are in base 2 from the start; formulas and sinks are in natural logits, up to the largest."""
        return self.score is None and not self.sinks


class Forward:
    """Writes the kernel into a module."""

    def __init__(
        self, structure: Structure, mask: Expression | None, score: Expression | None, machine: Machine
    ) -> None:
        self.structure, self.machine = structure, machine
        self.float = FLOAT if structure.dtype == "float32" else DOUBLE
        self.integer = INT64 if structure.wide else INT32
        self.formulas = (mask, score)
        self.module = ir.Module("sightline")

    def write(self, name: str) -> Any:
        """The module with the kernel in it."""
        self.code = code = Code(self.module, name)
        self.given = given = Arguments(code, code.arguments[0], tuple(axes for _, axes in self.structure.tables))
        self.tiles = tiles = Tiles(code, self.float, self.machine)
        self.vectors, self.lanes, self.vector = range(tiles.vectors), tiles.lanes, tiles.vector
        self.q_t, self.s_t, self.o_t = (tiles.matrix(rows) for rows in (self.structure.d_k, KEYS, self.structure.d_v))
        self.largest, self.total, self.tile_max, self.shift, self.alpha = (tiles.variables() for _ in range(5))
        self.prepare_formulas()
        with code.forever() as leave:
            item = code.increment(given.counter)
            leave(item >= given.items)
            self.place(item)
            self.turn_queries()
            self.evaluate_block()
            again = Variable(code, BOOL, True)
            with code.loop(0, 2) as attempt, code.when(again.get()):
                self.attend(careful=attempt == 1)
                again.set(self.tainted())
            self.hand_over()
        code.finish()
        return self.module

    # -- where the item's data lie --------------------------------------------------------------------------------
    def place(self, item: Value) -> None:
        """Item → (b, h, block of queries); later blocks first, since a causal mask makes those the longest."""
        code, given = self.code, self.given
        blocks = given.query_blocks
        position = item // blocks
        self.query_block = blocks - 1 - item % blocks
        self.b, self.h = position // given.H, position % given.H
        self.i0 = self.query_block * self.tiles.block
        g = self.h // given.group
        offset = self.b * 8
        self.q = given.query.at(given.query_batch.at(offset).load(INT64)).at(self.h * given.query_head)
        self.k = given.key.at(given.key_batch.at(offset).load(INT64)).at(g * given.key_head)
        self.v = given.value.at(given.value_batch.at(offset).load(INT64)).at(g * given.value_head)
        row = self.b * given.run_batch + self.h * given.run_head + self.query_block
        self.run_start = given.run_start.at(row * 8).load(INT64)
        self.run_stop = given.run_start.at(row * 8 + 8).load(INT64)
        self.valid = code.minimum(given.n - self.i0, self.tiles.block)

    def column(self, stride: Value, which: int) -> Any:
        """Bytes from one column to the next: a constant where they lie together."""
        return self.tiles.size if self.structure.unit[which] else stride

    def turn_queries(self) -> None:
        """Qᵀ[d][lane] = Q[i0 + lane][d] · factor; lanes past the end repeat the last query."""
        code, given = self.code, self.given
        step = self.column(given.query_column, 0)
        with code.loop(0, self.tiles.block) as lane:
            source = self.q.at((self.i0 + code.minimum(lane, self.valid - 1)) * given.query_row)
            with code.loop(0, self.structure.d_k) as d:
                entry = source.at(d * step).load(self.float).to(DOUBLE) * given.factor
                self.lane_of(self.q_t, d, lane).store(entry.to(self.float))

    def lane_of(self, matrix: Value, row: Any, lane: Value) -> Value:
        """Address of one number of a scratch matrix."""
        return self.tiles.at(matrix, row, 0).at(lane * self.tiles.size)

    # -- formulas -------------------------------------------------------------------------------------------------
    def prepare_formulas(self) -> None:
        sources = [
            Source(t.pointer, t.strides, t.lengths, TABLE_TYPES[dtype])
            for t, (dtype, _) in zip(self.given.tables, self.structure.tables, strict=True)
        ]
        found = {id(t): t for f in self.formulas if f is not None for t in f.tables}
        by_id = dict(zip(found, sources, strict=True))
        self.renderers = [
            None if formula is None else Renderer(self.code, formula, floats, self.integer, by_id, clamped)
            for formula, floats, clamped in zip(
                self.formulas, (DOUBLE, self.float), self.structure.clamped, strict=True
            )
        ]

    def evaluate_block(self) -> None:
        """What mask and score say of the block's queries alone, for each vector of lanes."""
        code, given = self.code, self.given
        last = (given.n - 1).to(self.integer)
        self.symbols: list[dict[str, Value]] = []
        self.known: list[list[dict[int, Value]]] = []
        for v in self.vectors:
            i = code.minimum(code.count(self.lanes, self.integer) + (self.i0 + v * self.lanes).to(self.integer), last)
            self.symbols.append({"b": self.b, "h": self.h, "i": i, "n": given.n, "m": given.m})
            self.known.append([{} if r is None else r.block(self.symbols[v]) for r in self.renderers])

    # -- attention of the block -----------------------------------------------------------------------------------
    def attend(self, careful: Value) -> None:
        """The running softmax over the block's runs. `careful`: weights of 0 take nothing, even of NaN and ∞ in V.

        A NaN in the output of the first attempt is the sign that care is needed, which costs whole inputs nothing.
        """
        code, given = self.code, self.given
        with code.loop(0, self.structure.d_v) as d:
            for v in self.vectors:
                self.tiles.store(self.o_t, d, v, code.value(0.0, self.vector))
        for v in self.vectors:
            self.largest[v].set(self.sink() if self.structure.sinks else -math.inf)
            self.total[v].set(1.0 if self.structure.sinks else 0.0)
        with code.loop(self.run_start, self.run_stop) as run:
            partial = given.run_full.at(run).load(BYTE) == 0
            stop = given.run_last.at(run * 8).load(INT64)
            with code.loop(given.run_first.at(run * 8).load(INT64), stop) as tile:
                self.key_tile(tile * KEYS, partial, careful)

    def sink(self) -> Value:
        return self.given.sinks.at(self.h * 8).load(DOUBLE).to(self.float)

    def key_tile(self, j0: Value, partial: Value, careful: Value) -> None:
        """One tile: scores, score formula and mask, softmax, weighted values."""
        code = self.code
        self.keys = code.minimum(self.given.m - j0, KEYS)
        for v in self.vectors:
            self.tile_max[v].set(-math.inf)
        self.score_tile(j0)
        mask, score = self.renderers
        with code.either(partial) as (yes, no):  # without a mask every run is full
            with yes:
                if mask is not None:
                    self.reshape_scores(j0, masked=True)
            with no:
                if score is not None:
                    self.reshape_scores(j0, masked=False)
        self.softmax()
        with code.either(careful) as (yes, no):
            with yes:
                self.weigh_values_carefully(j0)
            with no:
                self.weigh_values(j0)

    def score_tile(self, j0: Value) -> None:
        """Sᵀ[key][lane] and, from the registers, its maximum. Keys past the end repeat the last."""
        code, given, tiles = self.code, self.given, self.tiles
        step = self.column(given.key_column, 1)

        def rows(first: Value, count: int) -> None:
            bases = [self.k.at((j0 + code.minimum(first + r, self.keys - 1)) * given.key_row) for r in range(count)]
            sums = [[Variable(code, self.vector, 0.0) for _ in self.vectors] for _ in range(count)]
            tiles.accumulate(sums, bases, step, self.q_t, self.structure.d_k)
            for r in range(count):
                for v in self.vectors:
                    s = sums[r][v].get()
                    tiles.store(self.s_t, first + r, v, s)
                    self.tile_max[v].set(code.maximum(s, self.tile_max[v].get()))

        tiles.in_groups(self.keys, KEYS, rows)

    def reshape_scores(self, j0: Value, masked: bool) -> None:
        """Sᵀ through the score formula, −∞ where hidden; and its maximum anew."""
        code, tiles = self.code, self.tiles
        mask, score = self.renderers
        for v in self.vectors:
            self.tile_max[v].set(-math.inf)
        with code.loop(0, self.keys) as key:
            j = (j0 + key).to(self.integer)
            by_row = [{} if r is None else r.row(self.symbols[0] | {"j": j}, self._shared(r)) for r in self.renderers]
            for v in self.vectors:
                s = tiles.load(self.s_t, key, v)
                symbols = self.symbols[v] | {"j": j, "s": s}
                if score is not None:
                    s = score.pair(symbols, self.known[v][1] | by_row[1]).to(self.float).spread(self.lanes)
                if masked and mask is not None:
                    allowed = mask.pair(symbols, self.known[v][0] | by_row[0])
                    s = code.where(allowed, s, code.value(-math.inf, self.vector))
                tiles.store(self.s_t, key, v, s)
                self.tile_max[v].set(code.maximum(s, self.tile_max[v].get()))

    def _shared(self, renderer: Renderer) -> dict[int, Value]:
        """What is known of the block and is the same for all its queries."""
        known = self.known[0][self.renderers.index(renderer)]
        return {id(n): known[id(n)] for n in renderer.nodes if id(n) in known and "i" not in n.reads}

    def power(self, difference: Value) -> Value:
        """2^x or e^x, by the base of the scores; x ≤ 0."""
        return (exp2_of_negative if self.structure.base_2 else exp_of_negative)(self.code, difference)

    def softmax(self) -> None:
        """P = 2^(Sᵀ − m') in place of Sᵀ, and the running maximum m and sum l."""
        code, tiles = self.code, self.tiles
        for v in self.vectors:
            new = code.maximum(self.tile_max[v].get(), self.largest[v].get())
            shift = code.where(new == -math.inf, 0.0, new)
            alpha = self.power(self.largest[v].get() - shift)
            self.largest[v].set(new)
            self.shift[v].set(shift)
            self.alpha[v].set(alpha)
        sums = [Variable(code, self.vector, 0.0) for _ in self.vectors]
        with code.loop(0, self.keys) as key:
            for v in self.vectors:
                p = self.power(tiles.load(self.s_t, key, v) - self.shift[v].get())
                tiles.store(self.s_t, key, v, p)
                sums[v].set(sums[v].get() + p)
        for v in self.vectors:
            self.total[v].set(code.fma(self.total[v].get(), self.alpha[v].get(), sums[v].get()))

    def weigh_values(self, j0: Value) -> None:
        """Oᵀ = α Oᵀ + Σ V[key][d_v] · P[key][lane]."""
        code, given, tiles = self.code, self.given, self.tiles
        step = self.column(given.value_column, 2)
        values = self.v.at(j0 * given.value_row)

        def rows(first: Value, count: int) -> None:
            bases = [values.at((first + r) * step) for r in range(count)]
            sums = [[Variable(code, self.vector, 0.0) for _ in self.vectors] for _ in range(count)]
            tiles.accumulate(sums, bases, given.value_row, self.s_t, self.keys)
            for r in range(count):
                for v in self.vectors:  # added at the end: a tile's sum is rounded at its own size
                    old = tiles.load(self.o_t, first + r, v)
                    tiles.store(self.o_t, first + r, v, code.fma(old, self.alpha[v].get(), sums[r][v].get()))

        tiles.in_groups(self.structure.d_v, self.structure.d_v, rows)

    def weigh_values_carefully(self, j0: Value) -> None:
        """The same, one number of V at a time, where a weight of 0 takes nothing."""
        code, given, tiles = self.code, self.given, self.tiles
        step = self.column(given.value_column, 2)
        with code.loop(0, self.structure.d_v) as d:
            sums = [Variable(code, self.vector, tiles.load(self.o_t, d, v) * self.alpha[v].get()) for v in self.vectors]
            with code.loop(0, self.keys) as key:
                number = self.v.at((j0 + key) * given.value_row).at(d * step).load(self.float).spread(self.lanes)
                for v in self.vectors:
                    p, old = tiles.load(self.s_t, key, v), sums[v].get()
                    sums[v].set(code.where(p == 0.0, old, code.fma(number, p, old)))
            for v in self.vectors:
                tiles.store(self.o_t, d, v, sums[v].get())

    # -- the end of the block -------------------------------------------------------------------------------------
    def tainted(self) -> Value:
        """Whether any output is NaN: then V held NaN or ∞, hidden or not, or a score was NaN."""
        code = self.code
        marks = [Variable(code, self.vector, 0.0) for _ in self.vectors]
        with code.loop(0, self.structure.d_v) as d:
            for v in self.vectors:
                entry = self.tiles.load(self.o_t, d, v)
                marks[v].set(code.where(entry != entry, 1.0, marks[v].get()))
        found = [(mark.get() != 0.0).any() for mark in marks]
        return functools.reduce(operator.or_, found)

    def hand_over(self) -> None:
        """O = Oᵀ / l and lse = m ln 2 + ln l, row by row; 0 and −∞ for queries that saw nothing."""
        code, given, tiles = self.code, self.given, self.tiles
        size = tiles.size
        total, base = tiles.matrix(1), tiles.matrix(1)
        for v in self.vectors:
            nothing = self.total[v].get() == 0.0
            tiles.store(total, 0, v, code.where(nothing, 1.0, self.total[v].get()))
            tiles.store(base, 0, v, code.where(nothing, -math.inf, self.largest[v].get()))
        row = (self.b * given.H + self.h) * given.n + self.i0
        with code.loop(0, self.valid) as lane:
            sum_of_row = self.lane_of(total, 0, lane).load(self.float)
            factor = 1.0 / sum_of_row.to(DOUBLE)
            target = given.output.at((row + lane) * (self.structure.d_v * size))
            with code.loop(0, self.structure.d_v) as d:
                entry = self.lane_of(self.o_t, d, lane).load(self.float).to(DOUBLE) * factor
                target.at(d * size).store(entry.to(self.float))
            largest = self.lane_of(base, 0, lane).load(self.float).to(DOUBLE)
            unit = math.log(2) if self.structure.base_2 else 1.0
            lse = code.fma(largest, unit, code.intrinsic("log", sum_of_row.to(DOUBLE)))
            given.lse.at((row + lane) * 8).store(lse)


TABLE_TYPES = {"bool": BYTE, "int32": INT32, "int64": INT64, "float32": FLOAT, "float64": DOUBLE}
