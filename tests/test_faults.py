"""Planted faults: each fault, put into a kernel's function, must make the check of that kernel fail."""

from functools import cache, partial

import ml_dtypes
import numpy as np
import pytest

import sightline
from fault_planting import KNOWN, Fault, assert_found, change_code, make_fault_test, plant
from gradient_checks import by_cpu, reference_gradients
from gradient_checks import check as check_gradients
from sharded_problems import assert_covers, needed_pairs, run_parts
from sightline import h, i, j, s, table
from sightline.call.gradient_parts import differentiate_sinks, sum_sink_gradients
from sightline.call.partition import needed_keys
from sightline.call.partition.parts import part_of
from sightline.call.partition.shards import divide
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.cpu.codegen.operand_tiles import OperandTile, pair_row
from sightline.cpu.codegen.register_tile import RegisterTiles
from sightline.cpu.kernels.backward import Backward
from sightline.cpu.kernels.block import Block
from sightline.cpu.kernels.forward import Forward
from sightline.cpu.kernels.fused_statistics import FusedStatisticsCode
from sightline.cpu.kernels.recomputed_weights import RecomputedWeights
from sightline.cpu.kernels.shared_tiles import SharedTiles
from sightline.cpu.kernels.tables import TableGradientCode
from sightline.cpu.kernels.tile_functions import GradientFunctions, ScoreFunctions, WeightFunctions
from sightline.cpu.kernels.weights_by_key import CellSums, KeyExtrema, KeySums
from sightline.cpu.kernels.weights_by_query import RowExtrema, RowSums, TopKCode
from sightline.cpu.kernels.weights_pass import WeightsPass, WeightSums, WeightTiles
from sightline.cpu.kernels.weights_statistics import WeightStatistics
from sightline.cpu.launch import backward as launch_backward
from sightline.cpu.launch.product_rates import machine_for
from sightline.cpu.runtime.processor import HOST
from sightline.formula import interval_arithmetic as bounds
from sightline.reference import streaming, testing
from sightline.reference.streaming import Streaming, TileOps
from sightline.reference.testing import assert_conforms
from statistic_definitions import check as check_statistics
from strategies import Case
from weights_pass_checks import check_everything

FORWARD = {
    "off-by-one mask": Fault(ScoreFunctions.write_function, "j0 + key", "j0 + key + 1"),
    "dropped rescale": Fault(Forward.accumulate_values, "builder.fma(old, self.alpha[v].get(), total)", "old + total"),
    "missed tail of keys": Fault(RegisterTiles.accumulate, "builder.loop(whole, count)", "builder.loop(count, count)"),
    "missed last rows": Fault(RegisterTiles.for_each_row_group, "count > whole", "count > max_rows"),
    "rows of the output one head after another": Fault(
        Forward.store,
        "self.store_transposed(self.o_t, self.spec.d_v, output, self.format, args.output_row_stride)",
        "self.store_transposed(self.o_t, self.spec.d_v, output, self.format)",
    ),
    "wrong key head": Fault(Forward.locate_item, "self.g", "self.g * 0"),
    "a tile range left too late": Fault(
        SharedTiles.find_tile,
        "self.args.tile_range_last.at(self.range_index.get() * 8).load(INT64) > first",
        "self.args.tile_range_last.at(self.range_index.get() * 8).load(INT64) >= first",
    ),
    "variables of another block": Fault(SharedTiles.loop_blocks, "variables[3:]", "variables[4:]"),
    "stride of rows that were copied": Fault(
        OperandTile.stage,
        "where(copies, self.row_bytes, self.row_stride)",
        "where(copies, self.row_stride, self.row_stride)",
    ),
    "last row not copied": Fault(OperandTile.copy_rows, "self.count", "self.count - 1"),
    "stale maximum": Fault(
        Forward.softmax, "self.running_max[v].set(new)", "self.running_max[v].set(self.running_max[v].get())"
    ),
}

DROPOUT = {
    "wrong word of four": Fault(
        Block.dropout_keep_mask,
        "[(word & LOW_32_BITS) >= args.dropout_threshold for word in words]",
        "[(word & LOW_32_BITS) >= args.dropout_threshold for word in reversed(words)]",
    ),
    "counter of the next four keys": Fault(Block.dropout_keep_mask, "first_key >> 2", "(first_key >> 2) + 1"),
    "seed cut short": Fault(Block.dropout_keep_mask, "args.seed >> 32", "args.seed & 0"),
    "weights not made larger": Fault(
        Forward.store, "args.dropout_scale.to(self.float)", "builder.value(1.0, self.float)"
    ),
    "sum of the weights after dropout": Fault(
        Forward.softmax, "sums[v].get() + p", "sums[v].get() + builder.where(keep_mask[k][v], p, 0.0)"
    ),
}

PAIRS = {  # the first needs two changes: with one, the other factor of the product is 0 and hides it
    "numbers after an odd width": (
        Fault(
            pair_row,
            "target.at(last // 2 * 4).store(_load_bits(source.at(last * stride)))",
            "bits = _load_bits(source.at(last * stride)); target.at(last // 2 * 4).store(bits | bits << 16)",
        ),
        Fault(
            Block.transpose,
            "number = transform(last.load(INT16).zero_extend(INT32)) & 65535",
            "bits = last.load(INT16).zero_extend(INT32); number = transform(bits | bits << 16)",
        ),
    ),
    "weights past an odd number of keys": Fault(
        Forward.softmax, "self.pad_keys(step, -math.inf, self.s_t)", "self.pad_keys(step, 0.0, self.s_t)"
    ),
    "halves swapped": Fault(
        Block.pack_pairs, "builder.call(name, two, second, first)", "builder.call(name, two, first, second)"
    ),
}

BACKWARD = {  # for each problem of `DIFFERENTIATED`: the faults that it reveals
    "plain": {
        "dropped delta": Fault(
            GradientFunctions.compute_score_gradient, "builder.fma(dp, scale, -(delta * scale))", "dp * scale"
        ),
        "gradient of lse left out": Fault(
            Backward.transpose_output_gradients,
            "-args.d_lse.at((self.row + lane) * 8).load(DOUBLE)",
            "0.0 * args.d_lse.at((self.row + lane) * 8).load(DOUBLE)",
        ),
        "dK scaled twice": Fault(
            launch_backward.backward, "call.combine(sums)", "call.combine([sums[0], problem.scale * sums[1], sums[2]])"
        ),
        "missed tail of queries": Fault(Backward.process_item, "args.query_blocks", "args.n // self.tiles.block"),
        "one split's dQ dropped": Fault(launch_backward._sum_in_order, "terms[2:]", "terms[3:]"),
        "one head of a group for all": Fault(
            SharedTiles.loop_blocks, "self.g * args.group + index // args.query_blocks", "self.g * args.group"
        ),
        "dK of the first block alone": Fault(
            Backward.add_to_rows,
            "self.num_blocks * tiles.packed_length(tiles.block)",
            "tiles.packed_length(tiles.block)",
        ),
        "missed last key": Fault(Backward.add_to_rows, "key + r < self.num_keys", "key + r < self.num_keys - 1"),
    },
    "sinks": {
        "off-by-one mask": Fault(RecomputedWeights.compute_weights, "j0 + key + k", "j0 + key + k + 1"),
        "sinks blind to lse": Fault(differentiate_sinks, "delta = delta - xp.astype(d_lse, wide)", "pass"),
        "sinks the wrong way": Fault(
            sum_sink_gradients,
            "-xp.astype(sink_weights(sinks, lse), delta.dtype)",
            "xp.astype(sink_weights(sinks, lse), delta.dtype)",
        ),
    },
    "tables": {
        "dropped delta under a score": Fault(
            GradientFunctions.compute_score_gradient,
            "p * (dp - delta) if extra is None else p * (dp - delta) + extra",
            "p * dp if extra is None else p * (dp - delta) + extra",
        ),
        "wrong stride of a table": Fault(TableGradientCode.__init__, "length", "length - 1"),
        "score's slope left out": Fault(GradientFunctions.compute_score_gradient, "d_score * slope", "d_score"),
        "lanes with one entry added once": Fault(TableGradientCode.scatter, "terms.sum()", "terms.sum() / 2"),
    },
    "dropout": {
        "dropout forgotten in dP": Fault(
            GradientFunctions.write_function,
            "dropped, dp = (builder.where(keep_mask[k][v], x * factor, 0.0) for x in (p, dp))",
            "dropped = builder.where(keep_mask[k][v], p * factor, 0.0)",
        )
    },
}

WEIGHTS_PASS = {
    "off-by-one mask": Fault(WeightFunctions.write_function, "j0 + key", "j0 + key + 1"),
    "wrong head of a group": Fault(WeightsPass.attend, "self.h // args.group", "self.h % args.group"),
    "missed first query": Fault(WeightsPass.clip_lanes, "args.first_query - self.i0", "args.first_query - self.i0 + 1"),
    "missed last block of queries": Fault(WeightStatistics.process_item, "args.query_blocks", "args.query_blocks - 1"),
    "missed last tile of a split": Fault(
        WeightStatistics.locate_span, "(split + 1) * args.split_size", "(split + 1) * args.split_size - 1"
    ),
    "sums of all ranges together": Fault(
        KeySums.init_item, "kernel.range_index * heads + kernel.head_index", "kernel.head_index"
    ),
    "sums of the first keys of a tile": Fault(KeySums.finish_tile, "j0 + first", "j0"),
    "sums of hidden pairs": Fault(WeightFunctions.write_function, "allowed is None", "True"),
    "a hidden pair in a maximum": Fault(WeightFunctions.is_visible, "s != -math.inf", "s == s"),
    "scores in base 2": Fault(WeightFunctions.compute_entry, "self.factor * nats", "self.factor"),
    "logarithms in base 2": Fault(WeightFunctions.compute_entry, "exponent * nats", "exponent"),
    "the last tile alone": Fault(RowSums.finish_tile, "total.get() + part.get()", "part.get()"),
    "a maximum that is a minimum": Fault(RowExtrema.add_key, "self.exceeds(entry, best.get())", "(entry < best.get())"),
    "the first maximum of many": Fault(KeyExtrema.add_key, "best == largest.broadcast(kernel.lanes)", "best == best"),
    "another query of the block": Fault(KeyExtrema.add_key, "builder.where(is_new, i, query)", "query"),
    "cells that begin at 0": Fault(CellSums.clear_from, "self.role.hidden", "0.0"),
    "cells of all ranges together": Fault(
        CellSums.reduce_lanes,
        "kernel.head_index * head_rows + row.get() + kernel.range_index",
        "kernel.head_index * head_rows + row.get()",
    ),
    "columns cleared before they are stored": Fault(CellSums.init_tile, "self.reduce_lanes()", "pass"),
    "a hidden key in a list": Fault(TopKCode.add_key, "s > -math.inf", "s == s"),
    "hidden scores kept": Fault(WeightFunctions.write_function, "masked or self.spec.score is not None", "False"),
    "missed last key of a cell": Fault(CellSums.loop_keys, "end - j0", "end - j0 - 1"),
    "cells of the first column": Fault(
        CellSums.loop_keys, "self.cell_address(column.get(), v)", "self.cell_address(self.first_column.get(), v)"
    ),
    "lanes of all cells": Fault(CellSums.reduce_lanes, "lanes < end.to(integer)", "lanes >= 0"),
    "a list moved down by the wrong weight": Fault(TopKCode.insert, "old.set(above)", "old.set(p)"),
    "keys left where they were": Fault(
        TopKCode.insert,
        "builder.where(passes, key_above, builder.where(enters, j, key.get()))",
        "builder.where(passes, j, builder.where(enters, j, key.get()))",
    ),
    "missed tail of keys": Fault(
        WeightTiles.process_tile, "builder.loop(vector_stop, self.num_keys)", "builder.loop(vector_stop, vector_stop)"
    ),
    "the factor of the first head": Fault(WeightSums.process_item, "head_index * 8", "head_index * 0"),
    "the last head alone": Fault(
        WeightSums.store_weights, "self.builder.fma(p, factor, self.output_format.load(address, lanes))", "p * factor"
    ),
}

FUSED_STATISTICS = {
    "keys counted from the tile": Fault(FusedStatisticsCode.update_max_score, "j0 + key", "key * 1"),
    "the key of a smaller score": Fault(
        FusedStatisticsCode.update_max_score,
        "builder.where(is_larger, tile_key.get(), self.max_score_key[v].get())",
        "tile_key.get()",
    ),
    "exponents not rescaled": Fault(
        FusedStatisticsCode.rescale, "self.weighted_exponents[v].get() + shifted", "self.weighted_exponents[v].get()"
    ),
    "entropy's weights not rescaled": Fault(
        FusedStatisticsCode.rescale, "self.weight_sum[v].get() * alpha", "self.weight_sum[v].get()"
    ),
    "sums not rescaled": Fault(FusedStatisticsCode.rescale, "whole[v].get() * alpha", "whole[v].get()"),
    "every key counted": Fault(ScoreFunctions.evaluate_sums, "self.builder.where(value, one, 0.0)", "one"),
}

STREAMING = {
    "off-by-one mask": Fault(
        TileOps.symbols,
        "b, h, i, j = self.problem.positions(self.xp, rows, columns)",
        "b, h, i, j = self.problem.positions(self.xp, rows, columns); j = j + 1",
    ),
    "dropped rescale": Fault(streaming.forward, "acc * xp.astype(alpha, ops.dtype)[..., None]", "acc"),
    "missed tail of keys": Fault(TileOps.key_blocks, "self.problem.m", "self.problem.m - self.problem.m % 8"),
    "wrong head of a group": Fault(
        TileOps.dot_products,
        "self.xp.reshape(product, (*array.shape[:-1], other.shape[-2]))",
        "self.xp.flip(self.xp.reshape(product, (*array.shape[:-1], other.shape[-2])), axis=-3)",
    ),
}


ONCE = {name: cache(getattr(testing, name)) for name in ("compute_stages", "compute_baseline")}


@pytest.fixture(autouse=True)
def truth_once(monkeypatch):
    """Compute the reference results of each problem once. What a faulty kernel leaves unwritten is 3, not random."""
    for name, function in ONCE.items():
        monkeypatch.setattr(testing, name, function)
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float, **options: np.full(shape, 3, dtype, **options))


def check(run):
    """Check conformance on problems with a mask, groups of heads, tails of tiles, and several tiles of keys."""
    for problem in problems():
        assert_conforms(run, problem)


@cache
def problems():
    rng = np.random.default_rng(3)
    q, k, v = (
        rng.normal(size=size).astype(np.float32) for size in ((2, 4, 131, 23), (2, 2, 1103, 23), (2, 2, 1103, 9))
    )
    k[..., 600:, :] *= 3  # later keys have larger scores, so that the running maximum changes
    sinks = rng.normal(size=4).astype(np.float32)
    far = [np.swapaxes(np.ascontiguousarray(np.swapaxes(x, 1, 2)), 1, 2) for x in (q, k, v)]  # rows of (B, n, H, d)
    return make_problem(q, k, v), make_problem(*far, mask=(i * 8 >= j) & (j >= i), sinks=sinks)


def small(dtype=np.float32):
    """Return query, key and value: 2 heads, 1 key head, 3 blocks of queries, 4 tiles of keys, odd widths, lengths.

    Rows of key and value are far apart, so that tiles are copied.
    """
    rng = np.random.default_rng(8)
    q, k, v = (rng.normal(size=size).astype(dtype) for size in ((1, 2, 131, 7), (1, 1, 201, 30), (1, 1, 201, 20)))
    return [q, k[..., 8:15], v[..., :5]]


def check_dropout(run):
    assert_conforms(run, make_problem(*small(), dropout=0.4, seed=2**63 + 12345, mask=i * 2 >= j))


def check_pairs(run):
    assert_conforms(run, make_problem(*small(ml_dtypes.bfloat16), scale=-0.4))


SINKS = np.array([1.5, -0.5], np.float32)
LEARNED = table(np.linspace(-1, 1, 2 * 401, dtype=np.float32).reshape(2, 401))
SLOPES = table(np.array([0.3, -0.2], np.float32))
DIFFERENTIATED = {
    "plain": {"scale": -0.7},
    "sinks": {"mask": (i * 2 >= j) & (j >= i // 2), "sinks": SINKS},
    "tables": {"mask": i * 2 >= j, "score": 5 * np.tanh(s / 5) + LEARNED[h, i - j + 200] + SLOPES[h] * j / 50},
    "dropout": {"dropout": 0.4, "seed": 5},
}


def check_backward(name):
    """Check the gradients of one problem of `DIFFERENTIATED`. `forward_without_faults` has run its forward pass."""
    check_gradients(Case(*small(), DIFFERENTIATED[name]), differentiate=partial(by_cpu, answer=answered(name)))


@pytest.fixture
def forward_without_faults():
    """Run the forward passes before a fault is planted: a fault in code of both passes would change their results."""
    for name in DIFFERENTIATED:
        answered(name)


@cache
def answered(name):
    return Cpu().run(Case(*small(), DIFFERENTIATED[name]).make_problem())


def check_weights_pass():
    """Check the statistics of a problem with groups of heads, a mask, and tails of queries and keys."""
    q, k, v = (np.ascontiguousarray(x[:, :, :150]) for x in small())
    x = np.concatenate([q, q[:, ::-1]], axis=1), np.concatenate([k, -k], axis=1), np.concatenate([v, v], axis=1)
    check_everything(make_problem(*x, mask=i * 2 >= j))


def check_fused_statistics():
    """Check the fused statistics of a problem whose later keys have larger scores, with sinks."""
    q, k, v = small()
    k[..., 100:, :] *= 3
    see = [sightline.max_score(), sightline.entropy(), sightline.mass((i + j) % 3 == 0)]
    options = {"mask": i * 2 >= j, "sinks": np.array([1.5, -0.5], np.float32)}
    check_statistics(Cpu().run, make_problem(q, k, v, **options, see=see))


@pytest.mark.parametrize("kernel", [Cpu(), Streaming()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("check", [check, check_dropout, check_pairs])
def test_sound_kernels_pass(kernel, check):
    check(kernel.run)


RED = r"budget|shape"


CHECKS = {  # planted faults, and a check that finds them
    "forward": (FORWARD, lambda: check(Cpu().run)),
    "streaming": (STREAMING, lambda: check(Streaming().run)),
    "dropout": (DROPOUT, lambda: check_dropout(Cpu().run)),
    "pairs": (PAIRS, lambda: check_pairs(Cpu().run)),
    **{f"backward, {name}": (faults, partial(check_backward, name)) for name, faults in BACKWARD.items()},
    "fused statistics": (FUSED_STATISTICS, check_fused_statistics),
    "weights pass": (WEIGHTS_PASS, check_weights_pass),
}


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, (faults, _) in CHECKS.items() for fault in faults])
@pytest.mark.usefixtures("forward_without_faults", "fresh_kernels")
def test_every_fault_is_seen(name, fault, monkeypatch):
    if name == "pairs" and not machine_for(HOST, "bfloat16").has_bf16_dot:
        pytest.skip("kernels multiply no pairs of bfloat16 in this process")
    faults, run = CHECKS[name]
    with np.errstate(all="ignore"):  # what a faulty kernel leaves unwritten in its scratch is any number
        assert_found(faults[fault], monkeypatch, run, f"{RED}|a key|not equal" if name == "weights pass" else RED)


SOUND = [check_fused_statistics, check_weights_pass, *(partial(check_backward, name) for name in DIFFERENTIATED)]


@pytest.mark.parametrize("run", SOUND)
def test_sound_gradients_and_statistics_pass(run):
    run()


def test_a_wrong_interval_is_seen(monkeypatch):
    """Wrong bounds report partial tiles as full, so that hidden pairs get weight."""
    rule = bounds.BOUND_RULES["greater_equal"]
    monkeypatch.setitem(bounds.BOUND_RULES, "greater_equal", lambda xp, x, y: (rule(xp, x, y)[1], rule(xp, x, y)[1]))
    rng = np.random.default_rng(4)
    x = rng.normal(size=(1, 1, 100, 8)).astype(np.float32)
    with pytest.raises(AssertionError, match="budget"):
        assert_conforms(Streaming().run, make_problem(x, x, x, mask=i >= j))


def test_a_fault_in_the_gradient_is_seen(monkeypatch):
    """A derivative rule with the wrong sign disagrees with finite differences of the reference."""
    from sightline.formula import derivative
    from sightline.reference.definition import compute_stages

    rng = np.random.default_rng(6)
    q, k, v, d_output = (rng.normal(size=(1, 1, 5, 3)) for _ in range(4))
    problem = make_problem(q, k, v, score=sightline.softcap(1.0))
    step = 1e-6
    moved = make_problem(q + step * d_output, k, v, score=sightline.softcap(1.0))
    slope = ((compute_stages(moved).output - compute_stages(problem).output) * d_output).sum() / step

    def disagreement():
        return abs((reference_gradients(problem, d_output).query * d_output).sum() - slope) / abs(slope)

    sound = disagreement()
    monkeypatch.setitem(derivative.DERIVATIVE_RULES, "tanh", lambda node, dx: dx * (node * node - 1))
    assert disagreement() > 1000 * sound


PARTS = {
    "an offset of one key too many": Fault(
        part_of, 'Offset(first, "int", name=name)', "Offset(first + (name == 'j'), \"int\", name=name)"
    ),
    "an offset of one query too few": Fault(
        part_of, 'Offset(first, "int", name=name)', "Offset(first - (name == 'i'), \"int\", name=name)"
    ),
    "heads that count from 0": Fault(part_of, 'symbols["h"] = SYMBOLS["h"] + first_head', "pass"),
    "the part's own lengths": Fault(part_of, '{"n": as_expression(problem.n), "m": as_expression(problem.m)}', "{}"),
    "dropout of other keys": Fault(part_of, "j + (first_key or 0)", "j"),
}


def check_parts():
    rng = np.random.default_rng(9)
    query, key, value = (
        rng.normal(size=(1, *shape)).astype(np.float32) for shape in ((4, 20, 8), (2, 40, 8), (2, 40, 8))
    )
    for options in ({"mask": (i * 2 >= j - h) | (j > sightline.m - 3)}, {"dropout": 0.5, "seed": 3}):
        problem = make_problem(query, key, value, **options)
        assert_conforms(lambda whole: run_parts(Streaming().run, whole, head_parts=2), problem)


test_parts = make_fault_test(PARTS, check_parts, RED)


SCHEDULE = {
    "a tile skipped that is not empty": Fault(
        needed_keys._find_schedule, "ranges.find_covered()", "np.tril(ranges.find_covered(), -1)"
    ),
    "a piece skipped that is partial": Fault(
        needed_keys._clear_hidden, "np.broadcast_to(high, row.shape) != 0", "np.broadcast_to(_, row.shape) == 1"
    ),
    "the last piece of a span": Fault(needed_keys._Pieces.find_ends, "self.end", "self.end - 1"),
}


def check_schedule():
    for n in (320, 301):
        x = np.zeros((1, 3, n, 1), np.float32)
        problem = make_problem(x, x, x, mask=(i - j < 40 * h + 20) & (i >= j))
        shards = divide(n, 4, "zigzag")
        assert_covers(
            needed_keys.find_schedule(problem.mask, problem.extent, shards, shards, 50), needed_pairs(problem)
        )


def test_a_sound_schedule_passes():
    check_schedule()


@pytest.mark.parametrize("fault", SCHEDULE)
def test_every_fault_in_the_schedule_is_seen(fault, monkeypatch):
    plant(SCHEDULE[fault], monkeypatch)
    monkeypatch.setattr(needed_keys, "_find_cached", needed_keys._find_schedule)
    with pytest.raises(AssertionError, match="needless"):
        check_schedule()


@pytest.mark.parametrize(("before", "count"), [("needed(problem)", 0), ("np.stack(found)", 2)])
def test_a_fault_of_no_single_place_is_an_error(before, count):
    def differentiate(problem, found):
        return np.stack(found) if problem else -np.stack( found )  # fmt: skip

    with pytest.raises(ValueError, match=rf"{count} times in .*differentiate, not once: {before[:6]}"):
        change_code(differentiate, before, "problem")


def test_every_fault_has_its_place():
    """The code that a fault changes still has it, also for faults that only `make test-wide` plants."""
    for fault in KNOWN:
        change_code(fault.function, fault.before, fault.after)
