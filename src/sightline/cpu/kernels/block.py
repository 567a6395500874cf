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
from ..codegen.abi import LoadedArguments
from ..codegen.builder import BFLOAT, BOOL, BYTE, DOUBLE, FLOAT, INT16, INT32, INT64, Builder, Value, Variable, vector
from ..codegen.formats import FloatFormat, format_of
from ..codegen.math import exp2_by_scaling, exp2_of_negative, exp_of_negative
from ..codegen.operand_tiles import OperandTile
from ..codegen.philox import random_words
from ..codegen.register_tile import RegisterTiles
from ..codegen.render import Renderer, TableSource
from ..runtime.machine import Machine
from .tables import TileTables

__all__ = ["CACHE_LINE_BYTES", "KEY_BLOCK", "TABLE_TYPES", "Block", "KernelSpec"]

CACHE_LINE_BYTES = 64  # bytes that memory gives at a time
KEY_BLOCK = 64  # keys at a time; their scores, K and V rows stay in the first two caches
TABLE_TYPES = {"bool": BYTE, "int32": INT32, "int64": INT64, "float32": FLOAT, "float64": DOUBLE}


@dataclass(frozen=True)
class KernelSpec:
    """All that is compiled into a kernel; everything else (lengths, strides, scale, tables' data) is an argument."""

    kernel: str
    dtype: str
    d_k: int
    d_v: int
    unit_stride: tuple[bool, ...]  # whether the columns of query, key and value lie next to each other
    mask: str | None
    score: str | None
    tables: tuple[tuple[str, int], ...]  # dtype and number of axes of each
    slots: tuple[int, ...]  # which of them each table of the mask, of the score, then of the others, is
    needs_int64: bool  # whether whole numbers need 64 bits
    clamped: tuple[tuple[tuple[int, int], ...], ...]  # of each formula; see Renderer
    has_sinks: bool
    has_dropout: bool
    unroll: int = 0  # query rows whose products are summed together; see Decode
    vectors: int | None = None  # of the register tile, where not the machine's own
    table_gradients: tuple[
        tuple[int, int, bool], ...
    ] = ()  # lookups of the score whose tables gain gradients; see Backward
    tile_lookups: tuple[tuple[int, ...], ...] = ((), ())  # lookups t[..., i, j] of each formula; see TileTables
    extra_formulas: tuple[str, ...] = ()  # further formulas of pairs and final scores
    k: int = 0  # keys kept for each query; see TopK
    roles: tuple[str, ...] = ()  # what statistics want, with the others in their order; see Riding and Backward

    @property
    def num_output_arrays(self) -> int:
        """How many arrays to write to follow the tables' words."""
        return len(self.table_gradients) + sum(
            {"largest": 2, "entropy": 1, "sum": 1}.get(role, 0) for role in self.roles
        )

    @property
    def is_base_2(self) -> bool:
        """Whether scores are in base 2 from the start; formulas and sinks are in natural logits, up to the largest."""
        return self.score is None and not self.has_sinks


class Block:
    """Writes what a block of queries needs into a module; a kernel is a subclass."""

    fields: Mapping[str, Any]
    q_t: Value  # Qᵀ[d][lane]
    s_t: Value  # Sᵀ[key][lane]
    num_keys: Value  # of the tile
    split: Value  # of the keys, where kernels cut them
    max_keys = KEY_BLOCK  # keys of a tile

    def __init__(self, spec: KernelSpec, formulas: Sequence[Expression | None], machine: Machine) -> None:
        self.spec = spec
        self.machine = machine = machine if spec.vectors is None else machine.narrow_tile(spec.vectors)
        self.format = format_of(spec.dtype, machine)
        self.float = self.format.accumulator_type
        self.paired = spec.dtype == "bfloat16" and machine.has_bf16_dot
        self.integer = INT64 if spec.needs_int64 else INT32
        self.formulas = tuple(formulas)  # mask, score, others
        self.module = ir.Module("sightline")

    def init(self, name: str) -> None:
        """The function's arguments and tiles."""
        self.builder = builder = Builder(self.module, name)
        axes = [axes for _, axes in self.spec.tables] + [1] * self.spec.num_output_arrays
        self.args = LoadedArguments(builder, builder.arguments[0], self.fields, axes)
        self.tiles = tiles = RegisterTiles(builder, self.float, self.machine, self.paired)
        self.vectors, self.lanes, self.vector = range(tiles.vectors), tiles.lanes, tiles.vector
        self.factor = self.args.factor.to(self.float)
        self.prepare_formulas()

    def write(self, name: str) -> Any:
        """The module with the kernel in it: scratch, and one item of work after another, as an atomic counter tells."""
        self.init(name)
        self.allocate()
        with self.builder.infinite_loop() as break_if:
            item = self.builder.atomic_increment(self.args.counter)
            break_if(item >= self.args.items)
            self.process_item(item)
        self.builder.finish()
        return self.module

    def allocate(self) -> None:
        """The kernel's own scratch."""
        raise NotImplementedError(type(self).__name__)

    def process_item(self, item: Value) -> None:
        """One item of work."""
        raise NotImplementedError(type(self).__name__)

    # -- where the block's data lie -------------------------------------------------------------------------------
    def locate(self, b: Value, h: Value, query_block: Value) -> None:
        """Query rows, runs and length of a block."""
        builder, args = self.builder, self.args
        self.b, self.h, self.query_block = b, h, query_block
        self.i0 = query_block * self.tiles.block
        self.num_valid = builder.minimum(args.n - self.i0, self.tiles.block)
        self.q = args.head_address("query", b, h)
        row = b * args.tile_range_batch_stride + h * args.tile_range_head_stride + query_block
        self.tile_range_start = args.tile_range_start.at(row * 8).load(INT64)
        self.tile_range_stop = args.tile_range_start.at(row * 8 + 8).load(INT64)
        self.row = (b * args.H + h) * args.n + self.i0

    @contextmanager
    def loop_tiles(self, first: Value | None = None, last: Value | None = None) -> Iterator[tuple[Value, Value]]:
        """Write a loop over the tiles of the block's runs, of those from `first` to before `last`.

        Yields the tile and whether its run is partial.
        """
        builder, args = self.builder, self.args
        with builder.loop(self.tile_range_start, self.tile_range_stop) as run:
            partial = args.tile_range_full.at(run).load(BYTE) == 0
            start, stop = (x.at(run * 8).load(INT64) for x in (args.tile_range_first, args.tile_range_last))
            start = start if first is None else builder.maximum(start, first)
            with builder.loop(start, stop if last is None else builder.minimum(stop, last)) as tile:
                yield tile, partial

    def overlaps_tiles(self, first: Value, last: Value) -> Value:
        """Whether the block's runs reach into the tiles from `first` to before `last`."""
        builder, args = self.builder, self.args
        overlap = Variable(builder, BOOL, False)
        with builder.loop(self.tile_range_start, self.tile_range_stop) as run:
            start, stop = (x.at(run * 8).load(INT64) for x in (args.tile_range_first, args.tile_range_last))
            overlap.set(overlap.get() | ((start < last) & (stop > first)))
        return overlap.get()

    def locate_keys(self, b: Value, g: Value, key: OperandTile, value: OperandTile) -> None:
        """The rows of a key head."""
        args = self.args
        key.locate(args.head_address("key", b, g), args.key_row_stride, args.key_column_stride)
        value.locate(args.head_address("value", b, g), args.value_row_stride, args.value_column_stride)

    def allocate_operand(self, operand_index: int, needs_rows: bool, needs_columns: bool) -> OperandTile:
        """Scratch and addresses of the keys' rows (1) or the values' (2)."""
        width = (self.spec.d_k, self.spec.d_k, self.spec.d_v)[operand_index]
        return OperandTile(
            self.tiles, self.format, width, self.spec.unit_stride[operand_index], KEY_BLOCK, needs_rows, needs_columns
        )

    def transpose_queries(self) -> None:
        """Qᵀ[d][lane] = Q[i0 + lane][d] · sign of the scale: nothing is rounded. Lanes past the end repeat the last."""
        builder, args = self.builder, self.args
        sign_flip = builder.where(args.scale_sign < 0.0, builder.value(0x80008000 - 2**32, INT32), 0)
        zero_mask = builder.where(args.scale_sign == 0.0, builder.value(0, INT32), -1)
        sign = args.scale_sign.to(self.float)

        def signed(numbers: Value) -> Value:
            return (numbers ^ sign_flip) & zero_mask if self.paired else numbers * sign

        self.transpose(
            self.q,
            args.query_row_stride,
            args.query_column_stride,
            self.spec.unit_stride[0],
            self.spec.d_k,
            self.q_t,
            signed,
        )

    def transpose(
        self,
        source: Value,
        row_stride: Value,
        step: Any,
        is_contiguous: bool,
        width: int,
        target: Value,
        transform: Callable[[Value], Value] = lambda numbers: numbers,
    ) -> None:
        """target[d][lane] = change(source[i0 + lane][d]), pairs of d together; lanes past the end repeat the last."""
        builder, tiles = self.builder, self.tiles
        size = tiles.pair_size * self.format.itemsize  # of a number in memory

        def row(lane: Value) -> Value:
            return source.at((self.i0 + builder.minimum(lane, self.num_valid - 1)) * row_stride)

        if is_contiguous:
            self.transpose_rows(
                row, lambda at, lanes: transform(self.load_numbers(at, lanes)), size, width // tiles.pair_size, target
            )
        else:
            with builder.loop(0, tiles.block) as lane, builder.loop(0, width // tiles.pair_size) as d:
                address = row(lane).at(d * tiles.pair_size * step)
                number = self.load_pair(address, step) if self.paired else self.load_numbers(address, 1)
                self.lane_address(target, d, lane).store(transform(number))
        if width % tiles.pair_size:
            with builder.loop(0, tiles.block) as lane:
                last = row(lane).at((width - 1) * (self.format.itemsize if is_contiguous else step))
                number = transform(last.load(INT16).zero_extend(INT32)) & 0xFFFF
                self.lane_address(target, width // tiles.pair_size, lane).store(number)

    def transpose_rows(
        self, row: Callable[[Value], Value], read: Callable[[Value, int], Value], size: int, count: Any, target: Value
    ) -> None:
        """target[c][lane] = read(row(lane) + c · size) for c < count; `read` takes an address and a number of lanes."""
        builder, tiles = self.builder, self.tiles
        whole = count // self.lanes * self.lanes
        with builder.loop(0, len(self.vectors)) as v:
            rows = [row(v * self.lanes + k) for k in range(self.lanes)]
            with builder.loop(0, whole, self.lanes) as c:
                for k, numbers in enumerate(tiles.transpose_lanes([read(at.at(c * size), self.lanes) for at in rows])):
                    tiles.at(target, c + k, v).store(numbers, tiles.align)
        with builder.loop(0, tiles.block) as lane, builder.loop(whole, count) as c:
            self.lane_address(target, c, lane).store(read(row(lane).at(c * size), 1))

    def store_transposed(self, source: Value, width: int, target: Value, format: FloatFormat) -> None:
        """target[lane][d] = source[d][lane] for the block's own lanes, in that format."""
        size = format.itemsize

        def write(lane: Value, d: Value, numbers: Value) -> None:
            format.store(target.at(lane * (width * size) + d * size), numbers)

        self.write_transposed_rows(source, width, write)

    def write_transposed_rows(self, source: Value, count: Any, write: Callable[[Value, Value, Value], None]) -> None:
        """write(lane, c, source[c ...][lane]) for c < count, neighbours in c together, for the block's own lanes."""
        builder, tiles = self.builder, self.tiles
        whole = count // self.lanes * self.lanes
        with builder.loop(0, len(self.vectors)) as v, builder.loop(0, whole, self.lanes) as c:
            rows = tiles.transpose_lanes([tiles.load(source, c + k, v) for k in range(self.lanes)])
            for k, row in enumerate(rows):
                lane = v * self.lanes + k
                with builder.if_then(lane < self.num_valid):
                    write(lane, c, row)
        with builder.loop(0, self.num_valid) as lane, builder.loop(whole, count) as c:
            write(lane, c, self.lane_address(source, c, lane).load(self.float))

    def load_numbers(self, pointer: Value, lanes: int) -> Value:
        """Neighbouring numbers as they are computed with: widened, or pairs as they lie."""
        return pointer.load(vector(INT32, lanes)) if self.paired else self.format.load(pointer, lanes)

    def load_pair(self, pointer: Value, step: Value) -> Value:
        """Two bfloat16 that lie apart, as a pair."""
        first, second = (at.load(INT16).zero_extend(INT32) for at in (pointer, pointer.at(step)))
        return first | (second << 16)

    def lane_address(self, matrix: Value, row: Any, lane: Value) -> Value:
        """Address of one number of a scratch matrix."""
        return self.tiles.at(matrix, row).at(lane * self.tiles.itemsize)

    # -- formulas -------------------------------------------------------------------------------------------------
    def prepare_formulas(self) -> None:
        sources = [
            TableSource(t.pointer, t.strides, t.lengths, TABLE_TYPES[dtype])
            for t, (dtype, _) in zip(self.args.tables, self.spec.tables, strict=False)
        ]
        tables = [table for f in self.formulas if f is not None for table in f.tables]
        self.sources = {id(t): sources[slot] for t, slot in zip(tables, self.spec.slots, strict=True)}
        self.renderers = [
            None if f is None else self.make_renderer(f, DOUBLE if f.kind == "bool" else self.float, clamped)
            for f, clamped in zip(self.formulas, self.spec.clamped, strict=True)
        ]
        self.tile_tables = [
            TileTables(self, which, renderer, places)
            for which, (renderer, places) in enumerate(zip(self.renderers, self.spec.tile_lookups, strict=True))
        ]

    def make_renderer(self, formula: Expression, floats: Any, clamped: tuple[tuple[int, int], ...]) -> Renderer:
        return Renderer(self.builder, formula, floats, self.integer, self.sources, clamped)

    def evaluate_block(self) -> None:
        """What mask and score say of the block's queries alone, for each vector of lanes."""
        builder, args = self.builder, self.args
        last = (args.n - 1).to(self.integer)
        self.symbols: list[dict[str, Value]] = []
        self.block_values: list[list[dict[int, Value]]] = []
        for v in self.vectors:
            i = builder.minimum(
                builder.arange(self.lanes, self.integer) + (self.i0 + v * self.lanes).to(self.integer), last
            )
            self.symbols.append({"b": self.b, "h": self.h, "i": i, "n": args.n, "m": args.m})
            self.block_values.append([{} if r is None else r.evaluate_block(self.symbols[v]) for r in self.renderers])

    def evaluate_key(self, j: Value) -> list[dict[int, Value]]:
        """What mask and score say of one key alone."""
        symbols = self.symbols[0] | {"j": j}
        return [{} if r is None else r.evaluate_row(symbols, self._values_shared_by_block(r)) for r in self.renderers]

    def transpose_tables(self, j0: Value, first: int, stop: int | None = None) -> None:
        """Read what the formulas from `first` to before `stop` look up for the tile of keys from j0 on."""
        for tables in self.tile_tables[first:stop]:
            tables.transpose(j0)

    def logits(self, key: Value, j0: Value, masked: bool) -> Iterator[tuple[int, Value, Value | None]]:
        """Of one key, by vector v: (v, S, or Q · K not yet scaled where no formula is, and what the mask allows)."""
        mask, score = self.renderers[:2]
        j = (j0 + key).to(self.integer)
        rows = self.evaluate_key(j)
        for v in self.vectors:
            s, allowed = self.tiles.load(self.s_t, key, v), None
            symbols = self.symbols[v] | {"j": j, "s": s * self.factor}
            if score is not None:
                s = (
                    score.evaluate_pair(symbols, self.values_before_pair(1, rows, key, v))
                    .to(self.float)
                    .broadcast(self.lanes)
                )
            if masked and mask is not None:
                allowed = mask.evaluate_pair(symbols, self.values_before_pair(0, rows, key, v))
            yield v, s, allowed

    def prefetch_row(self, first: Value, step: Value, lane: Value, j0: Value, size: int) -> None:
        """Ask for a tile's numbers, each `itemsize` bytes, in one query's row of a table whose rows lie `step` bytes apart.

        Rows of a table are far apart, so each tile waits for memory: asked for among other work, they are there.
        """
        row = first.at((self.i0 + self.builder.minimum(lane, self.num_valid - 1)) * step).at(j0 * size)
        for at in range(0, self.max_keys * size, CACHE_LINE_BYTES):
            self.builder.prefetch(row.at(at))

    def leading_offset(self, formula: int, node: Lookup, strides: Sequence[Any]) -> Value:
        """Bytes from a table's start to t[..., 0, 0], where the block's queries look up t[..., i, j]."""
        start = self.builder.value(0, INT64)
        for index, stride in zip(node.arguments[:-2], strides[:-2], strict=True):
            start = start + self.block_values[0][formula][id(index)].to(INT64) * stride
        return start

    def values_before_pair(
        self, formula: int, key_values: list[dict[int, Value]], key: Value, v: int
    ) -> dict[int, Value]:
        """What is known of mask (0), score (1) or another formula before a pair is looked at."""
        return self.block_values[v][formula] | key_values[formula] | self.tile_tables[formula].entries(key, v)

    def _values_shared_by_block(self, renderer: Renderer) -> dict[int, Value]:
        """What is known of the block and is the same for all its queries."""
        known = self.block_values[0][self.renderers.index(renderer)]
        return {id(n): known[id(n)] for n in renderer.nodes if id(n) in known and "i" not in n.free_symbols}

    def exponentiate(self, difference: Value) -> Value:
        """2^x or e^x, by the base of the scores; x ≤ 0."""
        if not self.spec.is_base_2:
            return exp_of_negative(self.builder, difference)
        whole = self.machine.has_scalef and difference.type == self.vector
        return (exp2_by_scaling if whole else exp2_of_negative)(self.builder, difference, 4 if self.paired else 5)

    def dropout_keep_mask(self, j: Value) -> list[list[Value]]:
        """Whether dropout keeps the weights of four keys from j on, a multiple of 4: by key, then by vector."""
        builder, args = self.builder, self.args
        keep_by_query = []
        for symbols in self.symbols:
            counter = (self.b, self.h, symbols["i"].to(INT64), j.to(INT64) >> 2)
            keep_by_query.append([word >= args.dropout_threshold for word in random_words(builder, args.seed, counter)])
        return [list(key_masks) for key_masks in zip(*keep_by_query, strict=True)]

    # -- products -------------------------------------------------------------------------------------------------
    def product(
        self,
        count: Any,
        max_count: int,
        number: Callable[[Value], tuple[Value, Any]],
        matrix: Value,
        length: Any,
        finish: Callable[[Value, int, Value], None],
    ) -> None:
        """finish(row, v, Σ_k number_row[k] · matrix[k][v]) for rows < count ≤ most, k < length."""
        builder, tiles = self.builder, self.tiles

        def rows(first: Value, count: int) -> None:
            operands = [number(first + r) for r in range(count)]
            sums = [[Variable(builder, self.vector, 0.0) for _ in self.vectors] for _ in range(count)]
            tiles.accumulate(sums, [base for base, _ in operands], operands[0][1], matrix, length)
            for r in range(count):
                for v in self.vectors:
                    finish(first + r, v, sums[r][v].get())

        tiles.for_each_row_group(count, max_count, rows)

    def pack_pairs(self, first: Value, second: Value) -> Value:
        """Two vectors as pairs of bfloat16: `first` in the low halves."""
        one, two = vector(self.float, self.lanes), vector(BFLOAT, 2 * self.lanes)
        name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{self.tiles.align * 8}"
        convert = self.builder.declare(name, ir.FunctionType(two, [one, one]))
        both = Value(
            self.builder, self.builder.irbuilder.call(convert, [second.raw, first.raw])
        )  # first's, then second's
        mixed = both.extract_lanes([k // 2 + k % 2 * self.lanes for k in range(2 * self.lanes)])
        return Value(self.builder, self.builder.irbuilder.bitcast(mixed.raw, vector(INT32, self.lanes)))
