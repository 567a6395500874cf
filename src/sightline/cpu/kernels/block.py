"""A block of queries against tiles of keys, on register tiles: the base class of all kernels.

Vectors run along queries. The queries of a block are transposed once, to Qᵀ[d][lane], and scores are computed as
Sᵀ[key][lane]. K and V are therefore read in their own row order, one number at a time, and each number is broadcast to
all lanes. Every number per query (maximum, sum, lse) is computed with plain operations on vectors.

The product of query and key is scaled in the softmax: one fused operation multiplies by the factor and subtracts the
maximum. If there is no score formula and no sink, the factor contains log₂ e, and scores are in base 2 from there on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ...arrays.row_formats import RowFormat
from ...call.gradient_parts import MAX_LSE
from ...formula.expression import Expression
from ...reference.dropout import LOW_32_BITS, philox_rounds
from ..codegen.abi import LoadedArguments
from ..codegen.builder import Builder, Module, Variable
from ..codegen.formats import FloatFormat, PackedFormat, format_of
from ..codegen.math import exp2_by_scaling, exp2_of_negative, exp_of_negative
from ..codegen.operand_tiles import OperandTile
from ..codegen.register_tile import RegisterTiles
from ..codegen.render_llvm import NodeValues, Renderer
from ..codegen.values import BFLOAT, BOOL, BYTE, DOUBLE, INT16, INT32, INT64, POINTER, VOID, Value, vector
from ..runtime.machine import Machine
from .kernel_spec import KEY_BLOCK, KernelSpec
from .tables import TileTables

if TYPE_CHECKING:
    from .tile_functions import TileFunctions

OUTPUTS_FUNCTION = "sightline_find_outputs"  # see `tile_functions`


class ScoredPairs(NamedTuple):
    """The pairs of one key with one vector of queries.

    key : index of the key in its tile
    v : index of the vector
    score : S, the result of the score formula; Q · K without the scale if there is no formula
    symbols : the values of the symbols; s, the scaled Q · K, is in the base of the scores
    nodes : the values of the score formula's nodes, by id; {} if there is no formula
    """

    key: Value
    v: int
    score: Value
    symbols: dict[str, Value]
    nodes: NodeValues


class Block:
    """Write the code for a block of queries into a module. Each kernel is a subclass."""

    fields: Mapping[str, Any]
    q_t: Value  # Qᵀ[d][lane]
    s_t: Value  # Sᵀ[key][lane]
    num_keys: Value  # number of keys in the current tile
    own_formulas: Container[int] = range(1 << 30)  # which formulas (mask, score, extra formulas) this code evaluates
    functions: type[TileFunctions] | None = None  # the code that evaluates formulas, if they are functions
    split: Value  # index of the split of the keys, in kernels that split the keys
    tile_range: Value  # index of the tile range in `loop_tiles`

    def __init__(self, spec: KernelSpec, formulas: Sequence[Expression | None], machine: Machine) -> None:
        self.spec = spec
        self.machine = machine = machine if spec.vectors is None else machine.narrow_tile(spec.vectors)
        self.format = format_of(spec.dtype, machine)
        self.float = self.format.accumulator_type
        self.key_format, self.value_format = (self.make_operand_format(k) for k in range(2))
        self.paired = spec.dtype == "bfloat16" and machine.has_bf16_dot and not spec.stored
        self.integer = INT64 if spec.needs_int64 else INT32
        self.formulas = tuple(formulas)  # the structures of mask, score and the extra formulas
        self.module = Module()

    def make_operand_format(self, index: int) -> FloatFormat | PackedFormat:
        """Return the format of the rows of K (index 0) or V (index 1)."""
        if not self.spec.stored:
            return self.format
        width = (self.spec.d_k, self.spec.d_v)[index]
        return PackedFormat(RowFormat(self.spec.stored[index], width), self.machine)

    def write(self, name: str) -> Any:
        """Return the module with the kernel. An atomic counter gives each thread its next work item."""
        self.begin(Builder(self.module, name))
        builder = self.builder
        self.allocate()
        with builder.infinite_loop() as break_if:
            item = builder.atomic_add(self.args.counter, 1, "monotonic")
            break_if(item >= self.args.items)
            self.process_item(item)
        builder.finish()
        return self.module

    def begin(self, builder: Builder) -> None:
        """Begin a function whose first argument is the argument block."""
        self.builder = builder
        spec = self.spec
        self.args = LoadedArguments(builder, self.fields, spec.tables, self.formulas, spec.num_output_arrays)
        self.tiles = tiles = RegisterTiles(builder, self.float, self.machine, BFLOAT if self.paired else None)
        self.vectors, self.lanes, self.vector = range(tiles.vectors), tiles.lanes, tiles.vector
        self.factor = self.args.factor.to(self.float)
        self.prepare_formulas()

    def allocate(self) -> None:
        raise NotImplementedError(type(self).__name__)

    def process_item(self, item: Value) -> None:
        raise NotImplementedError(type(self).__name__)

    # -- addresses ------------------------------------------------------------------------------------------------
    def locate(self, b: Value, h: Value, query_block: Value) -> None:
        """Compute the addresses, the tile ranges and the number of queries of a block of queries."""
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
        """Write a loop over the tiles in the block's tile ranges; if limits are given, only `first` <= tile < `last`.

        Yields the tile's index, and whether the tile range is partial: some of its pairs may be hidden.
        """
        builder, args = self.builder, self.args
        with builder.loop(self.tile_range_start, self.tile_range_stop) as index:
            self.tile_range, partial = index, args.tile_range_full.at(index).load(BYTE) == 0
            start, stop = (x.at(index * 8).load(INT64) for x in (args.tile_range_first, args.tile_range_last))
            start = start if first is None else builder.maximum(start, first)
            with builder.loop(start, stop if last is None else builder.minimum(stop, last)) as tile:
                yield tile, partial

    def overlaps_tiles(self, first: Value, last: Value) -> Value:
        """True if the block's tile ranges contain a tile with `first` <= tile < `last`."""
        builder, args = self.builder, self.args
        overlap = Variable(builder, BOOL, False)
        with builder.loop(self.tile_range_start, self.tile_range_stop) as index:
            start, stop = (x.at(index * 8).load(INT64) for x in (args.tile_range_first, args.tile_range_last))
            overlap.set(overlap.get() | ((start < last) & (stop > first)))
        return overlap.get()

    def locate_keys(self, b: Value, g: Value, key: OperandTile, value: OperandTile) -> None:
        """Set the addresses and strides of a key head's rows of K and V."""
        args = self.args
        key.locate(args.head_address("key", b, g), args.key_row_stride, args.key_column_stride)
        value.locate(args.head_address("value", b, g), args.value_row_stride, args.value_column_stride)

    def allocate_operand(
        self, operand_index: int, needs_rows: bool, needs_columns: bool, copies_far_rows: bool = False
    ) -> OperandTile:
        """Return the tile of rows of K (index 1) or V (index 2)."""
        width = (self.spec.d_k, self.spec.d_k, self.spec.d_v)[operand_index]
        unit_stride = self.spec.unit_stride[operand_index]
        format = self.value_format if operand_index == 2 else self.key_format
        needs = needs_rows, needs_columns, copies_far_rows
        return OperandTile(self.tiles, format, width, unit_stride, KEY_BLOCK, *needs)

    def find_outputs(self) -> list[Value]:
        """Return the addresses of the outputs that have no field."""
        addresses = self.tiles.scratch(self.spec.num_output_arrays * 8)
        self.builder.call(OUTPUTS_FUNCTION, VOID, self.builder.arguments[0], addresses)
        return [addresses.at(index * 8).load(POINTER) for index in range(self.spec.num_output_arrays)]

    def needs_lse(self) -> Value:
        """True if the call stores lse, or has statistics, which are not valid if an lse is imprecise."""
        return self.builder.value(True, BOOL) if self.spec.roles else self.args.lse != self.builder.null()

    def store_lse(self, row: Value, lse: Value) -> None:
        """Store an lse, a float64. Set `imprecise_lse_flag` if weights that are computed from it would not sum to 1."""
        builder, args = self.builder, self.args
        with builder.if_then(args.lse != builder.null()):
            args.lse.at(row * 8).store(lse)
        limit = MAX_LSE["float64" if self.float is DOUBLE else "float32"]
        is_precise = (builder.call_intrinsic("fabs", lse) <= limit) | (lse == -math.inf)
        with builder.if_then(~is_precise):
            args.imprecise_lse_flag.store(builder.value(1, INT64), 8)

    # -- transposes -----------------------------------------------------------------------------------------------
    def transpose_queries(self) -> None:
        """Compute Qᵀ[d][lane] = Q[i0 + lane][d] · sign of the scale, without rounding; see `transpose`."""
        strides = self.args.query_row_stride, self.args.query_column_stride
        self.transpose(self.q, *strides, self.spec.unit_stride[0], self.spec.d_k, self.q_t, self.multiply_by_sign())

    def multiply_by_sign(self) -> Callable[[Value], Value]:
        """Return a function that multiplies numbers, or pairs of bfloat16, by the sign of the scale."""
        builder, sign, sign_bits = self.builder, self.args.scale_sign, 0x80008000 - 2**32

        def multiply_pairs(numbers: Value) -> Value:
            flipped = numbers ^ builder.where(sign < 0.0, builder.value(sign_bits, INT32), 0)
            is_nonfinite = ((numbers & 0x7F807F80) + 0x00800080) & sign_bits  # 0x8000 if the exponent is all ones
            return builder.where(sign == 0.0, is_nonfinite - (is_nonfinite >> 9), flipped)  # 0x7FC0 is NaN

        return multiply_pairs if self.paired else lambda numbers: numbers * sign.to(self.float)

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
        """Compute target[d][lane] = transform(source[i0 + lane][d]).

        Lanes past the last query repeat the last query. If operands are pairs of bfloat16, each number of the target
        is the pair of source numbers at two neighbouring d.
        """
        builder, tiles = self.builder, self.tiles
        size = tiles.pair_size * self.format.itemsize  # bytes in the source for one number of the target

        def row(lane: Value) -> Value:
            return source.at((self.i0 + builder.minimum(lane, self.num_valid - 1)) * row_stride)

        def read(address: Value, lanes: int) -> Value:
            load = address.load(vector(INT32, lanes)) if self.paired else self.format.load(address, lanes)
            return transform(load)

        if is_contiguous:
            self.transpose_rows(row, read, size, width // tiles.pair_size, target)
        else:
            with builder.loop(0, tiles.block) as lane, builder.loop(0, width // tiles.pair_size) as d:
                address = row(lane).at(d * tiles.pair_size * step)
                if self.paired:
                    low, high = (at.load(INT16).zero_extend(INT32) for at in (address, address.at(step)))
                    number = low | (high << 16)
                else:
                    number = self.format.load(address)
                self.lane_address(target, d, lane).store(transform(number))
        if width % tiles.pair_size:
            with builder.loop(0, tiles.block) as lane:
                last = row(lane).at((width - 1) * (self.format.itemsize if is_contiguous else step))
                number = transform(last.load(INT16).zero_extend(INT32)) & 0xFFFF
                self.lane_address(target, width // tiles.pair_size, lane).store(number)

    def transpose_rows(
        self, row: Callable[[Value], Value], read: Callable[[Value, int], Value], size: int, count: Any, target: Value
    ) -> None:
        """Compute target[c][lane] = read(row(lane) + c · size, 1) for c < count.

        `read` takes an address and how many neighbouring numbers to read; `size` is the bytes of one number.
        """
        builder, tiles = self.builder, self.tiles
        whole = count // self.lanes * self.lanes
        with builder.loop(0, len(self.vectors)) as v:
            rows = [row(v * self.lanes + k).freeze() for k in range(self.lanes)]
            with builder.loop(0, whole, self.lanes) as c:
                for k, numbers in enumerate(tiles.transpose_lanes([read(at.at(c * size), self.lanes) for at in rows])):
                    tiles.at(target, c + k, v).store(numbers, tiles.align)
        with builder.loop(0, tiles.block) as lane, builder.loop(whole, count) as c:
            self.lane_address(target, c, lane).store(read(row(lane).at(c * size), 1))

    def store_transposed(
        self, source: Value, width: int, target: Value, format: FloatFormat, row_stride: Any = None
    ) -> None:
        """Store target[lane][d] = source[d][lane] in the given format, for every lane with a query.

        `row_stride` is in bytes; without it the rows of the target are contiguous.
        """
        size = format.itemsize
        stride = width * size if row_stride is None else row_stride

        def write(lane: Value, d: Value, numbers: Value) -> None:
            format.store(target.at(lane * stride + d * size), numbers)

        self.write_transposed_rows(source, width, write)

    def write_transposed_rows(self, source: Value, count: Any, write: Callable[[Value, Value, Value], None]) -> None:
        """Call write(lane, c, numbers) for every lane with a query and every c < count.

        `numbers` is source[c][lane], or a vector of source[c ...][lane] for as many c as a vector has lanes.
        """
        builder, tiles = self.builder, self.tiles
        whole, scratch = count // self.lanes * self.lanes, tiles.scratch(self.lanes * tiles.align)
        with builder.loop(0, len(self.vectors)) as v, builder.loop(0, whole, self.lanes) as c:
            rows = tiles.transpose_lanes([tiles.load(source, c + k, v) for k in range(self.lanes)])
            for k, row in enumerate(rows):
                scratch.at(k * tiles.align).store(row, tiles.align)
            first = v * self.lanes
            with builder.loop(0, builder.minimum(self.num_valid - first, self.lanes)) as row_index:
                numbers = scratch.at(row_index * tiles.align).load(tiles.vector, tiles.align)
                write(first + row_index, c, numbers)
        with builder.loop(0, self.num_valid) as lane, builder.loop(whole, count) as c:
            write(lane, c, self.lane_address(source, c, lane).load(self.float))

    def store_per_query(self, target: Value, values: list[Value]) -> None:
        """Store one number for each query of the block, from a vector of numbers for each vector of queries."""
        size = values[0].type.element.itemsize
        scratch = self.tiles.scratch(self.tiles.block * size)
        for v, value in enumerate(values):
            scratch.at(v * self.lanes * size).store(value)
        with self.builder.loop(0, self.num_valid) as lane:
            target.at((self.row + lane) * size).store(scratch.at(lane * size).load(values[0].type.element))

    def lane_address(self, matrix: Value, row: Any, lane: Value) -> Value:
        """Return the address of one number of a scratch matrix."""
        return self.tiles.at(matrix, row).at(lane * self.tiles.itemsize)

    # -- formulas -------------------------------------------------------------------------------------------------
    def prepare_formulas(self) -> None:
        """Create the `Renderer` of every formula, and the code of its lookups t[..., i, j] (`TileTables`)."""
        formulas = [formula if index in self.own_formulas else None for index, formula in enumerate(self.formulas)]
        self.renderers = [
            None if f is None else self.make_renderer(f, DOUBLE if f.kind == "bool" else self.float, clamped)
            for f, clamped in zip(formulas, self.spec.clamped, strict=True)
        ]
        parts = enumerate(zip(self.renderers, self.spec.tile_lookups, strict=True))
        self.tile_tables = [TileTables(self, index, renderer, lookups) for index, (renderer, lookups) in parts]

    def make_renderer(self, formula: Expression, floats: Any, clamped: tuple[tuple[int, int], ...]) -> Renderer:
        """Return the object that writes the code of a formula. Its floats have the type `floats`."""
        return Renderer(self.builder, formula, floats, self.integer, self.args, clamped)

    def evaluate_block(self) -> None:
        """Evaluate the formulas' nodes that depend on neither j nor s, for each vector of queries."""
        builder, args = self.builder, self.args
        last = (args.n - 1).to(self.integer)
        self.symbols: list[dict[str, Value]] = []
        self.block_values: list[list[NodeValues]] = []
        for v in self.vectors:
            start = (self.i0 + v * self.lanes).to(self.integer)
            i = builder.minimum(builder.arange(self.lanes, self.integer) + start, last)
            self.symbols.append({"b": self.b, "h": self.h, "i": i, "n": args.n, "m": args.m})
            self.block_values.append([{} if r is None else r.evaluate(self.symbols[v], {}) for r in self.renderers])
        self.shared_values = [  # for each formula, the node values that all queries of the block share
            {} if r is None else {id(x): known[id(x)] for x in r.nodes if id(x) in known and "i" not in x.free_symbols}
            for r, known in zip(self.renderers, self.block_values[0], strict=True)
        ]

    def evaluate_key(self, j: Value) -> None:
        """Evaluate the formulas' nodes that depend on neither i nor s, at key j."""
        symbols = {name: x for name, x in self.symbols[0].items() if name != "i"} | {"j": j}
        formulas = zip(self.renderers, self.shared_values, strict=True)
        self.key_values = [{} if r is None else r.evaluate(symbols, shared) for r, shared in formulas]

    def evaluate_nodes(self, formula: int, symbols: Mapping[str, Value], key: Value, v: int) -> NodeValues:
        """Return the values of a formula's nodes, by id, for the pairs of one key with vector v of the queries.

        `evaluate_key` must have evaluated the key.
        """
        renderer, entries = self.renderers[formula], self.tile_tables[formula].entries(key, v)
        assert renderer is not None
        return renderer.evaluate(symbols, self.block_values[v][formula] | self.key_values[formula] | entries)

    def evaluate_formula(self, formula: int, symbols: Mapping[str, Value], key: Value, v: int) -> Value:
        """Return the formula's value in `evaluate_nodes`: a condition, or a vector of the accumulator's type."""
        found = self.evaluate_nodes(formula, symbols, key, v)[id(self.formulas[formula])]
        return found if found.type.element is BOOL else found.to(self.float).broadcast(self.lanes)

    def transpose_tables(self, j0: Value, first: int) -> None:
        """Read the entries of lookups t[..., i, j] in the formulas from `first` on, for the tile of keys at j0."""
        for tables in self.tile_tables[first:]:
            tables.transpose(j0)

    def compute_scores(self, key: Value, j: Value) -> Iterator[ScoredPairs]:
        """Yield the pairs of a row of the tile, key j, with every vector of queries."""
        score = self.renderers[1]
        self.evaluate_key(j)
        for v in self.vectors:
            s = self.tiles.load(self.s_t, key, v)
            symbols, nodes = self.symbols[v] | {"j": j, "s": s * self.factor}, NodeValues()
            if score is not None:
                nodes = self.evaluate_nodes(1, symbols, key, v)
                s = nodes[id(score.formula)].to(self.float).broadcast(self.lanes)
            yield ScoredPairs(key, v, s, symbols, nodes)

    def compute_condition(self, pairs: ScoredPairs, masked: bool) -> Value | None:
        """Return the condition of the mask for these pairs; None if there is no mask or `masked` is False."""
        if not masked or self.renderers[0] is None:
            return None
        return self.evaluate_formula(0, pairs.symbols, pairs.key, pairs.v)

    def compute_exponent(self, s: Value, shift: Value) -> Value:
        """Return S − shift in the base of the scores, for a vector of scores that `compute_scores` yields."""
        return s - shift if self.spec.score is not None else self.builder.fma(s, self.factor, -shift)

    def exponentiate(self, difference: Value) -> Value:
        """Return 2^x or e^x, by the base of the scores, for x ≤ 0."""
        if not self.spec.is_base_2:
            return exp_of_negative(self.builder, difference)
        use_scalef = self.machine.has_scalef and difference.type == self.vector
        return (exp2_by_scaling if use_scalef else exp2_of_negative)(self.builder, difference, 4 if self.paired else 5)

    def dropout_keep_mask(self, j: Value) -> list[list[Value]]:
        """Return, for each key from j to j + 3 and each vector, whether dropout keeps the weights; 4 divides j."""
        args = self.args
        origin = (args.dropout_b, args.dropout_h, args.dropout_i, args.dropout_j)
        key, keep_by_query = (args.seed & LOW_32_BITS, args.seed >> 32), []

        def multiply_wide(constant: int, word: Value) -> tuple[Value, Value]:
            """Return the high and the low word of a product. The upper half of the low word's lane is not cleared."""
            product = (word & LOW_32_BITS) * constant
            return product >> 32, product

        for symbols in self.symbols:
            position = (self.b, self.h, symbols["i"].to(INT64), j.to(INT64))
            b, h, i, first_key = (x + first for x, first in zip(position, origin, strict=True))
            words = philox_rounds(
                key, (b, h, i, first_key >> 2), multiply_wide, lambda word, weyl: (word + weyl) & LOW_32_BITS
            )
            keep_by_query.append([(word & LOW_32_BITS) >= args.dropout_threshold for word in words])
        return [list(key_masks) for key_masks in zip(*keep_by_query, strict=True)]

    def write_by_mask(self, partial: Value, write: Callable[[bool], None]) -> None:
        """Write the code of a tile twice: `write(True)` for a partial tile, and `write(False)` for a full tile.

        Without a mask every tile is full.
        """
        with self.builder.if_else(partial) as (yes, no):
            with yes:
                if self.spec.mask is not None:
                    write(True)
            with no:
                write(False)

    def pad_keys(self, step: int, filler: float, *matrices: Value) -> None:
        """Set the rows of keys past the last key, up to a multiple of `step`, to `filler`."""
        with self.builder.loop(self.num_keys, (self.num_keys + (step - 1)) // step * step) as past:
            for v in self.vectors:
                for matrix in matrices:
                    self.tiles.store(matrix, past, v, self.builder.value(filler, self.vector))

    def set_per_query(
        self,
        targets: Sequence[tuple[Sequence[Variable], float]],
        compute: Callable[[Value], Sequence[Value]],
        first: Any,
        last: Value,
    ) -> None:
        """Set variables, one for each vector of queries, to numbers that are computed for one query at a time.

        Parameters
        ----------
        targets : the variables of each number, and the number in lanes outside of `first` <= lane < `last`
        compute : function (lane) that returns the numbers of a query
        """
        tiles, matrices = self.tiles, [self.tiles.matrix(1) for _ in targets]
        for v in self.vectors:
            for matrix, (_, filler) in zip(matrices, targets, strict=True):
                tiles.store(matrix, 0, v, self.builder.value(filler, self.vector))
        with self.builder.loop(first, last) as lane:
            for matrix, number in zip(matrices, compute(lane), strict=True):
                self.lane_address(matrix, 0, lane).store(number.to(self.float))
        for matrix, (variables, _) in zip(matrices, targets, strict=True):
            for v in self.vectors:
                variables[v].set(tiles.load(matrix, 0, v))

    def pack_pairs(self, first: Value, second: Value) -> Value:
        """Return two vectors as one vector of bfloat16 pairs, with `first` in the low halves."""
        builder = self.builder
        two = vector(BFLOAT, 2 * self.lanes)
        name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{self.tiles.align * 8}"
        both = builder.call(name, two, second, first)  # the lanes of `first`, then the lanes of `second`
        mixed = both.extract_lanes([k // 2 + k % 2 * self.lanes for k in range(2 * self.lanes)])
        return mixed.bitcast(vector(INT32, self.lanes))
