"""What forward and backward share: a block of queries against tiles of keys, on register tiles.

Vectors run along queries. A block of queries is turned once into Qᵀ[d][lane], and scores are made as Sᵀ[key][lane]. So
K and V are read in their own row order, one number spread over the lanes at a time, and everything per query (maximum,
sum, normaliser) is plain operations on vectors.

Products of query and key are scaled where they meet the softmax, in one rounding with the shift. Scores are in base 2
from there, log₂ e in the factor, where no score formula or sink wants natural logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ...formula.expression import Expression, Lookup
from ..codegen.abi import Arguments
from ..codegen.builder import BFLOAT, BOOL, BYTE, DOUBLE, FLOAT, INT16, INT32, INT64, Code, Value, Variable, vector
from ..codegen.formats import Format, format_of
from ..codegen.math import exp2_by_scaling, exp2_of_negative, exp_of_negative
from ..codegen.operand_tiles import Rows
from ..codegen.philox import words
from ..codegen.register_tile import Tiles
from ..codegen.render import Renderer, Source
from ..runtime.machine import Machine
from .tables import TileTables

__all__ = ["KEYS", "LINE", "TABLE_TYPES", "Block", "Structure"]

LINE = 64  # bytes that memory gives at a time
KEYS = 64  # keys at a time; their scores, K and V rows stay in the first two caches
TABLE_TYPES = {"bool": BYTE, "int32": INT32, "int64": INT64, "float32": FLOAT, "float64": DOUBLE}


@dataclass(frozen=True)
class Structure:
    """All that is compiled into a kernel; everything else (lengths, strides, scale, tables' data) is an argument."""

    kernel: str
    dtype: str
    d_k: int
    d_v: int
    unit: tuple[bool, ...]  # whether the columns of query, key and value lie next to each other
    mask: str | None
    score: str | None
    tables: tuple[tuple[str, int], ...]  # dtype and number of axes of each
    slots: tuple[int, ...]  # which of them each table of the mask, of the score, then of the others, is
    wide: bool  # whether whole numbers need 64 bits
    clamped: tuple[tuple[tuple[int, int], ...], ...]  # of each formula; see Renderer
    sinks: bool
    dropout: bool
    together: int = 0  # query rows whose products are summed together; see Decode
    vectors: int | None = None  # of the register tile, where not the machine's own
    gaining: tuple[tuple[int, int, bool], ...] = ()  # lookups of the score whose tables gain gradients; see Backward
    by_tile: tuple[tuple[int, ...], ...] = ((), ())  # lookups t[..., i, j] of each formula; see TileTables
    others: tuple[str, ...] = ()  # further formulas of pairs and final scores
    k: int = 0  # keys kept for each query; see TopK
    roles: tuple[str, ...] = ()  # what statistics want, with the others in their order; see Riding and Backward

    @property
    def arrays(self) -> int:
        """How many arrays to write to follow the tables' words."""
        return len(self.gaining) + sum({"largest": 2, "entropy": 1, "sum": 1}.get(role, 0) for role in self.roles)

    @property
    def base_2(self) -> bool:
        """Whether scores are in base 2 from the start; formulas and sinks are in natural logits, up to the largest."""
        return self.score is None and not self.sinks


class Block:
    """Writes what a block of queries needs into a module; a kernel is a subclass."""

    fields: Mapping[str, Any]
    q_t: Value  # Qᵀ[d][lane]
    s_t: Value  # Sᵀ[key][lane]
    keys: Value  # of the tile
    part: Value  # of the keys, where kernels cut them
    most = KEYS  # keys of a tile

    def __init__(self, structure: Structure, formulas: Sequence[Expression | None], machine: Machine) -> None:
        self.structure = structure
        self.machine = machine = machine if structure.vectors is None else machine.fitted(structure.vectors)
        self.form = format_of(structure.dtype, machine)
        self.float = self.form.wide
        self.paired = structure.dtype == "bfloat16" and machine.bf16_dot
        self.integer = INT64 if structure.wide else INT32
        self.formulas = tuple(formulas)  # mask, score, others
        self.module = ir.Module("sightline")

    def begin(self, name: str) -> None:
        """The function's arguments and tiles."""
        self.code = code = Code(self.module, name)
        axes = [axes for _, axes in self.structure.tables] + [1] * self.structure.arrays
        self.given = Arguments(code, code.arguments[0], self.fields, axes)
        self.tiles = tiles = Tiles(code, self.float, self.machine, self.paired)
        self.vectors, self.lanes, self.vector = range(tiles.vectors), tiles.lanes, tiles.vector
        self.factor = self.given.factor.to(self.float)
        self.prepare_formulas()

    def write(self, name: str) -> Any:
        """The module with the kernel in it: scratch, and one item of work after another, as an atomic counter tells."""
        self.begin(name)
        self.allocate()
        with self.code.forever() as leave:
            item = self.code.increment(self.given.counter)
            leave(item >= self.given.items)
            self.take(item)
        self.code.finish()
        return self.module

    def allocate(self) -> None:
        """The kernel's own scratch."""
        raise NotImplementedError(type(self).__name__)

    def take(self, item: Value) -> None:
        """One item of work."""
        raise NotImplementedError(type(self).__name__)

    # -- where the block's data lie -------------------------------------------------------------------------------
    def place(self, b: Value, h: Value, query_block: Value) -> None:
        """Query rows, runs and length of a block."""
        code, given = self.code, self.given
        self.b, self.h, self.query_block = b, h, query_block
        self.i0 = query_block * self.tiles.block
        self.valid = code.minimum(given.n - self.i0, self.tiles.block)
        self.q = given.operand("query", b, h)
        row = b * given.run_batch + h * given.run_head + query_block
        self.run_start = given.run_start.at(row * 8).load(INT64)
        self.run_stop = given.run_start.at(row * 8 + 8).load(INT64)
        self.row = (b * given.H + h) * given.n + self.i0

    @contextmanager
    def each_tile(self, first: Value | None = None, last: Value | None = None) -> Iterator[tuple[Value, Value]]:
        """Write a loop over the tiles of the block's runs, of those from `first` to before `last`.

        Yields the tile and whether its run is partial.
        """
        code, given = self.code, self.given
        with code.loop(self.run_start, self.run_stop) as run:
            partial = given.run_full.at(run).load(BYTE) == 0
            start, stop = (x.at(run * 8).load(INT64) for x in (given.run_first, given.run_last))
            start = start if first is None else code.maximum(start, first)
            with code.loop(start, stop if last is None else code.minimum(stop, last)) as tile:
                yield tile, partial

    def sees(self, first: Value, last: Value) -> Value:
        """Whether the block's runs reach into the tiles from `first` to before `last`."""
        code, given = self.code, self.given
        found = Variable(code, BOOL, False)
        with code.loop(self.run_start, self.run_stop) as run:
            start, stop = (x.at(run * 8).load(INT64) for x in (given.run_first, given.run_last))
            found.set(found.get() | ((start < last) & (stop > first)))
        return found.get()

    def place_keys(self, b: Value, g: Value, key: Rows, value: Rows) -> None:
        """The rows of a key head."""
        given = self.given
        key.place(given.operand("key", b, g), given.key_row, given.key_column)
        value.place(given.operand("value", b, g), given.value_row, given.value_column)

    def rows(self, which: int, along: bool, down: bool) -> Rows:
        """Scratch and addresses of the keys' rows (1) or the values' (2)."""
        width = (self.structure.d_k, self.structure.d_k, self.structure.d_v)[which]
        return Rows(self.tiles, self.form, width, self.structure.unit[which], KEYS, along, down)

    def turn_queries(self) -> None:
        """Qᵀ[d][lane] = Q[i0 + lane][d] · sign of the scale: nothing is rounded. Lanes past the end repeat the last."""
        code, given = self.code, self.given
        flip = code.where(given.sign < 0.0, code.value(0x80008000 - 2**32, INT32), 0)
        hold = code.where(given.sign == 0.0, code.value(0, INT32), -1)
        sign = given.sign.to(self.float)

        def signed(numbers: Value) -> Value:
            return (numbers ^ flip) & hold if self.paired else numbers * sign

        self.turn(
            self.q, given.query_row, given.query_column, self.structure.unit[0], self.structure.d_k, self.q_t, signed
        )

    def turn(
        self,
        source: Value,
        row_step: Value,
        step: Any,
        unit: bool,
        width: int,
        target: Value,
        change: Callable[[Value], Value] = lambda numbers: numbers,
    ) -> None:
        """target[d][lane] = change(source[i0 + lane][d]), pairs of d together; lanes past the end repeat the last."""
        code, tiles = self.code, self.tiles
        size = tiles.pair * self.form.bytes  # of a number in memory

        def row(lane: Value) -> Value:
            return source.at((self.i0 + code.minimum(lane, self.valid - 1)) * row_step)

        if unit:
            self.turn_rows(row, lambda at, lanes: change(self.numbers(at, lanes)), size, width // tiles.pair, target)
        else:
            with code.loop(0, tiles.block) as lane, code.loop(0, width // tiles.pair) as d:
                place = row(lane).at(d * tiles.pair * step)
                number = self.pair_of(place, step) if self.paired else self.numbers(place, 1)
                self.lane_of(target, d, lane).store(change(number))
        if width % tiles.pair:
            with code.loop(0, tiles.block) as lane:
                last = row(lane).at((width - 1) * (self.form.bytes if unit else step))
                number = change(last.load(INT16).widened(INT32)) & 0xFFFF
                self.lane_of(target, width // tiles.pair, lane).store(number)

    def turn_rows(
        self,
        row: Callable[[Value], Value],
        read: Callable[[Value, int], Value],
        size: int,
        count: Any,
        target: Value,
    ) -> None:
        """target[c][lane] = read(row(lane) + c · size) for c < count; `read` takes an address and a number of lanes."""
        code, tiles = self.code, self.tiles
        whole = count // self.lanes * self.lanes
        with code.loop(0, len(self.vectors)) as v:
            rows = [row(v * self.lanes + k) for k in range(self.lanes)]
            with code.loop(0, whole, self.lanes) as c:
                for k, numbers in enumerate(tiles.turned([read(at.at(c * size), self.lanes) for at in rows])):
                    tiles.at(target, c + k, v).store(numbers, tiles.align)
        with code.loop(0, tiles.block) as lane, code.loop(whole, count) as c:
            self.lane_of(target, c, lane).store(read(row(lane).at(c * size), 1))

    def turn_back(self, source: Value, width: int, target: Value, form: Format) -> None:
        """target[lane][d] = source[d][lane] for the block's own lanes, in that format."""
        size = form.bytes

        def write(lane: Value, d: Value, numbers: Value) -> None:
            form.store(target.at(lane * (width * size) + d * size), numbers)

        self.turn_rows_back(source, width, write)

    def turn_rows_back(self, source: Value, count: Any, write: Callable[[Value, Value, Value], None]) -> None:
        """write(lane, c, source[c ...][lane]) for c < count, neighbours in c together, for the block's own lanes."""
        code, tiles = self.code, self.tiles
        whole = count // self.lanes * self.lanes
        with code.loop(0, len(self.vectors)) as v, code.loop(0, whole, self.lanes) as c:
            rows = tiles.turned([tiles.load(source, c + k, v) for k in range(self.lanes)])
            for k, row in enumerate(rows):
                lane = v * self.lanes + k
                with code.when(lane < self.valid):
                    write(lane, c, row)
        with code.loop(0, self.valid) as lane, code.loop(whole, count) as c:
            write(lane, c, self.lane_of(source, c, lane).load(self.float))

    def numbers(self, pointer: Value, lanes: int) -> Value:
        """Neighbouring numbers as they are computed with: widened, or pairs as they lie."""
        return pointer.load(vector(INT32, lanes)) if self.paired else self.form.load(pointer, lanes)

    def pair_of(self, pointer: Value, step: Value) -> Value:
        """Two bfloat16 that lie apart, as a pair."""
        first, second = (at.load(INT16).widened(INT32) for at in (pointer, pointer.at(step)))
        return first | (second << 16)

    def lane_of(self, matrix: Value, row: Any, lane: Value) -> Value:
        """Address of one number of a scratch matrix."""
        return self.tiles.at(matrix, row).at(lane * self.tiles.size)

    # -- formulas -------------------------------------------------------------------------------------------------
    def prepare_formulas(self) -> None:
        sources = [
            Source(t.pointer, t.strides, t.lengths, TABLE_TYPES[dtype])
            for t, (dtype, _) in zip(self.given.tables, self.structure.tables, strict=False)
        ]
        tables = [table for f in self.formulas if f is not None for table in f.tables]
        self.sources = {id(t): sources[slot] for t, slot in zip(tables, self.structure.slots, strict=True)}
        self.renderers = [
            None if f is None else self.renderer(f, DOUBLE if f.kind == "bool" else self.float, clamped)
            for f, clamped in zip(self.formulas, self.structure.clamped, strict=True)
        ]
        self.tile_tables = [
            TileTables(self, which, renderer, places)
            for which, (renderer, places) in enumerate(zip(self.renderers, self.structure.by_tile, strict=True))
        ]

    def renderer(self, formula: Expression, floats: Any, clamped: tuple[tuple[int, int], ...]) -> Renderer:
        return Renderer(self.code, formula, floats, self.integer, self.sources, clamped)

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

    def by_row(self, j: Value) -> list[dict[int, Value]]:
        """What mask and score say of one key alone."""
        symbols = self.symbols[0] | {"j": j}
        return [{} if r is None else r.row(symbols, self._shared(r)) for r in self.renderers]

    def turn_tables(self, j0: Value, first: int, stop: int | None = None) -> None:
        """Read what the formulas from `first` to before `stop` look up for the tile of keys from j0 on."""
        for tables in self.tile_tables[first:stop]:
            tables.turn(j0)

    def logits(self, key: Value, j0: Value, masked: bool) -> Iterator[tuple[int, Value, Value | None]]:
        """Of one key, by vector v: (v, S, or Q · K not yet scaled where no formula is, and what the mask allows)."""
        mask, score = self.renderers[:2]
        j = (j0 + key).to(self.integer)
        rows = self.by_row(j)
        for v in self.vectors:
            s, allowed = self.tiles.load(self.s_t, key, v), None
            symbols = self.symbols[v] | {"j": j, "s": s * self.factor}
            if score is not None:
                s = score.pair(symbols, self.known_of_pair(1, rows, key, v)).to(self.float).spread(self.lanes)
            if masked and mask is not None:
                allowed = mask.pair(symbols, self.known_of_pair(0, rows, key, v))
            yield v, s, allowed

    def fetch(self, first: Value, step: Value, lane: Value, j0: Value, size: int) -> None:
        """Ask for a tile's numbers, each `size` bytes, in one query's row of a table whose rows lie `step` bytes apart.

        Rows of a table are far apart, so each tile waits for memory: asked for among other work, they are there.
        """
        row = first.at((self.i0 + self.code.minimum(lane, self.valid - 1)) * step).at(j0 * size)
        for at in range(0, self.most * size, LINE):
            self.code.prefetch(row.at(at))

    def start_of(self, formula: int, node: Lookup, strides: Sequence[Any]) -> Value:
        """Bytes from a table's start to t[..., 0, 0], where the block's queries look up t[..., i, j]."""
        start = self.code.value(0, INT64)
        for index, stride in zip(node.arguments[:-2], strides[:-2], strict=True):
            start = start + self.known[0][formula][id(index)].to(INT64) * stride
        return start

    def known_of_pair(self, formula: int, by_row: list[dict[int, Value]], key: Value, v: int) -> dict[int, Value]:
        """What is known of mask (0), score (1) or another formula before a pair is looked at."""
        return self.known[v][formula] | by_row[formula] | self.tile_tables[formula].entries(key, v)

    def _shared(self, renderer: Renderer) -> dict[int, Value]:
        """What is known of the block and is the same for all its queries."""
        known = self.known[0][self.renderers.index(renderer)]
        return {id(n): known[id(n)] for n in renderer.nodes if id(n) in known and "i" not in n.reads}

    def power(self, difference: Value) -> Value:
        """2^x or e^x, by the base of the scores; x ≤ 0."""
        if not self.structure.base_2:
            return exp_of_negative(self.code, difference)
        whole = self.machine.scalef and difference.type == self.vector
        return (exp2_by_scaling if whole else exp2_of_negative)(self.code, difference, 4 if self.paired else 5)

    def kept(self, j: Value) -> list[list[Value]]:
        """Whether dropout keeps the weights of four keys from j on, a multiple of 4: by key, then by vector."""
        code, given = self.code, self.given
        found = []
        for symbols in self.symbols:
            counter = (self.b, self.h, symbols["i"].to(INT64), j.to(INT64) >> 2)
            found.append([word >= given.threshold for word in words(code, given.seed, counter)])
        return [list(by_key) for by_key in zip(*found, strict=True)]

    # -- products -------------------------------------------------------------------------------------------------
    def product(
        self,
        count: Any,
        most: int,
        number: Callable[[Value], tuple[Value, Any]],
        matrix: Value,
        length: Any,
        finish: Callable[[Value, int, Value], None],
    ) -> None:
        """finish(row, v, Σ_k number_row[k] · matrix[k][v]) for rows < count ≤ most, k < length."""
        code, tiles = self.code, self.tiles

        def rows(first: Value, count: int) -> None:
            found = [number(first + r) for r in range(count)]
            sums = [[Variable(code, self.vector, 0.0) for _ in self.vectors] for _ in range(count)]
            tiles.accumulate(sums, [base for base, _ in found], found[0][1], matrix, length)
            for r in range(count):
                for v in self.vectors:
                    finish(first + r, v, sums[r][v].get())

        tiles.in_groups(count, most, rows)

    def packed(self, first: Value, second: Value) -> Value:
        """Two vectors as pairs of bfloat16: `first` in the low halves."""
        one, two = vector(self.float, self.lanes), vector(BFLOAT, 2 * self.lanes)
        name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{self.tiles.align * 8}"
        convert = self.code.declare(name, ir.FunctionType(two, [one, one]))
        both = Value(self.code, self.code.builder.call(convert, [second.raw, first.raw]))  # first's, then second's
        mixed = both.pick([k // 2 + k % 2 * self.lanes for k in range(2 * self.lanes)])
        return Value(self.code, self.code.builder.bitcast(mixed.raw, vector(INT32, self.lanes)))
