"""Planted faults: each fault, written into a kernel's source, must make the check of that kernel fail."""

from functools import cache, partial

import ml_dtypes
import numpy as np
import pytest

import sightline
from fault_planting import Fault, broken, plant
from gradient_checks import by_cpu, reference_gradients
from gradient_checks import check as check_gradients
from sharded_problems import assert_covers, needed_pairs, run_parts
from sightline import h, i, j, s, table, testing
from sightline.cpu import Cpu
from sightline.cpu.codegen import operand_tiles, register_tile
from sightline.cpu.kernels import (
    backward,
    block,
    forward,
    fused_statistics,
    shared_tiles,
    tables,
    weights_by_key,
    weights_by_query,
    weights_pass,
    weights_statistics,
    weights_tiles,
)
from sightline.cpu.launch import backward as launch_backward
from sightline.cpu.launch import table_gradients
from sightline.cpu.launch.product_rates import machine_for
from sightline.cpu.runtime.processor import HOST
from sightline.formula import interval_arithmetic as bounds
from sightline.partition import part, schedule
from sightline.partition.shards import divide
from sightline.problem import kernel as problem_kernel
from sightline.problem.problem import make_problem
from sightline.reference import streaming
from sightline.reference.streaming import Streaming
from sightline.testing import assert_conforms
from statistic_definitions import check as check_statistics
from strategies import Case
from weights_pass_checks import check_everything

FORWARD = {
    "off-by-one mask": Fault(
        block, "j = (j0 + key).to(self.integer)", "j = (j0 + key + 1).to(self.integer)", methods=("logits",)
    ),
    "dropped rescale": Fault(forward, "builder.fma(old, self.alpha[v].get(), total)", "old + total"),
    "missed tail of keys": Fault(
        register_tile, "with builder.loop(whole, count) as k:", "with builder.loop(count, count) as k:"
    ),
    "missed last rows": Fault(
        register_tile, "with builder.if_then(count > whole):", "with builder.if_then(count > max_rows):"
    ),
    "rows of the output one head after another": Fault(forward, "self.format, args.output_row_stride)", "self.format)"),
    "wrong key head": Fault(forward, "self.locate_keys(self.b, self.g,", "self.locate_keys(self.b, self.g * 0,"),
    "a tile range left too late": Fault(
        shared_tiles, ".load(INT64) > first)", ".load(INT64) >= first)", methods=("find_tile",)
    ),
    "variables of another block": Fault(
        shared_tiles, "(variables[3:] if stores else [])", "(variables[4:] if stores else [])", methods=("loop_blocks",)
    ),
    "stride of rows that were copied": Fault(
        operand_tiles,
        "where(copies, self.row_bytes, self.row_stride)",
        "where(copies, self.row_stride, self.row_stride)",
    ),
    "last row not copied": Fault(
        operand_tiles, "with self.builder.loop(0, self.count) as r:", "with self.builder.loop(0, self.count - 1) as r:"
    ),
    "stale maximum": Fault(
        forward, "self.running_max[v].set(new)", "self.running_max[v].set(self.running_max[v].get())"
    ),
}

DROPOUT = {
    "wrong word of four": Fault(
        block,
        "for word in words])",
        "for word in reversed(words)])",
        methods=("dropout_keep_mask",),
    ),
    "counter of the next four keys": Fault(
        block, "first_key >> 2)", "(first_key >> 2) + 1)", methods=("dropout_keep_mask",)
    ),
    "seed cut short": Fault(
        block,
        "args.seed >> 32)",
        "args.seed & 0)",
        methods=("dropout_keep_mask",),
    ),
    "weights not made larger": Fault(
        forward, "args.dropout_scale.to(self.float) / sums", "builder.value(1.0, self.float) / sums"
    ),
    "sum of the weights after dropout": Fault(
        forward,
        "                for k, p in enumerate(weights):\n                    sums[v].set(sums[v].get() + p)\n",
        "                for k, p in enumerate(weights):\n",
        (
            Fault(
                forward,
                "                for k in range(0, step, tiles.pair_size):\n",
                "                for p in weights:\n                    sums[v].set(sums[v].get() + p)\n"
                "                for k in range(0, step, tiles.pair_size):\n",
            ),
        ),
    ),
}

PAIRS = {  # the first needs two changes: with one, the other factor of the product is 0 and hides it
    "numbers after an odd width": Fault(
        operand_tiles,
        "target.at(last // 2 * 4).store(_load_bits(source.at(last * stride)))",
        "bits = _load_bits(source.at(last * stride)); target.at(last // 2 * 4).store(bits | (bits << 16))",
        (
            Fault(
                block,
                "number = transform(last.load(INT16).zero_extend(INT32)) & 0xFFFF",
                "bits = last.load(INT16).zero_extend(INT32); number = transform(bits | (bits << 16))",
                methods=("transpose",),
            ),
        ),
    ),
    "weights past an odd number of keys": Fault(
        forward,
        "tiles.store(self.s_t, past, v, builder.value(-math.inf, self.vector))",
        "tiles.store(self.s_t, past, v, builder.value(0.0, self.vector))",
    ),
    "halves swapped": Fault(block, "two, second, first", "two, first, second", methods=("pack_pairs",)),
}

BACKWARD = {
    "dropped delta": Fault(backward, "p * builder.fma(dp, scale, -(delta * scale))", "p * (dp * scale)"),
    "dropped delta under a score": Fault(backward, "p * (dp - delta) if extra", "p * dp if extra", shows="tables"),
    "gradient of lse left out": Fault(backward, "delta.set(-args.d_lse", "delta.set(0.0 * args.d_lse"),
    "dK scaled twice": Fault(
        launch_backward,
        "for x in call.combine(sums))",
        "for x in call.combine([sums[0], problem.scale * sums[1], sums[2]]))",
    ),
    "missed tail of queries": Fault(
        backward, "blocks = args.group * args.query_blocks", "blocks = args.group * (args.n // self.tiles.block)"
    ),
    "off-by-one mask": Fault(
        backward,
        "j = builder.minimum(j0 + key + k, self.args.m - 1)",
        "j = builder.minimum(j0 + key + k + 1, self.args.m - 1)",
        shows="sinks",
    ),
    "one split's dQ dropped": Fault(launch_backward, "for term in terms[2:]:", "for term in terms[3:]:"),
    "one head of a group for all": Fault(
        shared_tiles,
        "self.g * args.group + index // args.query_blocks",
        "self.g * args.group",
        methods=("loop_blocks",),
    ),
    "dK of the first block alone": Fault(
        backward, "self.num_blocks * tiles.packed_length(tiles.block)", "tiles.packed_length(tiles.block)"
    ),
    "missed last key": Fault(
        backward, "with builder.if_then(key + r < self.num_keys):", "with builder.if_then(key + r < self.num_keys - 1):"
    ),
    "wrong stride of a table": Fault(
        tables,
        "strides.insert(0, self.strides[0] * length)",
        "strides.insert(0, self.strides[0] * (length - 1))",
        shows="tables",
    ),
    "score's slope left out": Fault(backward, "d_score * slope * scale)", "d_score * scale)", shows="tables"),
    "lanes with one entry added once": Fault(
        tables, "target.load(kind) + terms.sum()", "target.load(kind) + terms.sum() / 2", shows="tables"
    ),
    "sinks blind to lse": Fault(table_gradients, "delta = delta - xp.astype(d_lse, wide)", "pass", shows="sinks"),
    "sinks the wrong way": Fault(
        problem_kernel,
        "xp.sum(-xp.astype(sink_weights",
        "xp.sum(xp.astype(sink_weights",
        shows="sinks",
    ),
    "dropout forgotten in dP": Fault(
        backward,
        "dropped, dp = (builder.where(keep_mask[k][v], x * factor, 0.0) for x in (p, dp))",
        "dropped = builder.where(keep_mask[k][v], p * factor, 0.0)",
        shows="dropout",
    ),
}

WEIGHTS_PASS = {
    "off-by-one mask": Fault(
        block, "j = (j0 + key).to(self.integer)", "j = (j0 + key + 1).to(self.integer)", methods=("logits",)
    ),
    "wrong head of a group": Fault(weights_pass, "self.h // args.group", "self.h % args.group", methods=("attend",)),
    "missed first query": Fault(  # queries before the first would be written outside the output
        weights_pass,
        "builder.maximum(first - self.i0, 0)",
        "builder.maximum(first - self.i0 + 1, 0)",
        methods=("clip_lanes",),
    ),
    "missed last block of queries": Fault(
        weights_statistics,
        "builder.minimum(first + args.range_size, args.query_blocks)",
        "builder.minimum(first + args.range_size, args.query_blocks - 1)",
    ),
    "missed last tile of a split": Fault(
        weights_statistics, "(split + 1) * args.split_size", "(split + 1) * args.split_size - 1"
    ),
    "sums of all ranges together": Fault(
        weights_by_key, "(kernel.range_index * heads + kernel.head_index) * row_bytes", "kernel.head_index * row_bytes"
    ),
    "sums of the first keys of a tile": Fault(weights_by_key, "(j0 + first) * tiles", "j0 * tiles"),
    "sums of hidden pairs": Fault(
        weights_by_key, "totals = self.kernel.hide(pairs.weights, pairs.conditions, 0.0)", "totals = pairs.weights"
    ),
    "cells of all ranges together": Fault(weights_by_key, "row.get() + kernel.range_index", "row.get()"),
    "columns cleared before they are stored": Fault(
        weights_by_key,
        "self.reduce_lanes()\n            self.clear_from",
        "self.clear_from",
    ),
    "a hidden key in a list": Fault(
        weights_by_query,
        "weights = self.kernel.hide(pairs.weights, pairs.conditions, -math.inf)",
        "weights = self.kernel.hide(pairs.weights, pairs.conditions, 0.0)",
    ),
    "missed last key of a cell": Fault(weights_by_key, "end - j0) as key:", "end - j0 - 1) as key:"),
    "cells of the first column": Fault(weights_by_key, "(column.get(), v)", "(self.first_column.get(), v)"),
    "lanes of all cells": Fault(weights_by_key, "(lanes < end.to(integer))", "(lanes >= 0)"),
    "a list moved down by the wrong weight": Fault(weights_by_query, "old.set(above)", "old.set(p)"),
    "keys left where they were": Fault(
        weights_by_query, "builder.where(passes, key_above, ", "builder.where(passes, j, "
    ),
    "missed tail of keys": Fault(
        weights_tiles,
        "builder.loop(vector_stop, self.num_keys) as key:",
        "builder.loop(vector_stop, vector_stop) as key:",
    ),
    "the factor of the first head": Fault(weights_tiles, "factors.at(head_index * 8)", "factors.at(head_index * 0)"),
    "the last head alone": Fault(
        weights_tiles, "self.builder.fma(p, factor, self.output_format.load(address, lanes))", "p * factor"
    ),
}

FUSED_STATISTICS = {
    "keys counted from the tile": Fault(
        fused_statistics, "j = (j0 + key).to(block.integer).broadcast", "j = (key * 1).to(block.integer).broadcast"
    ),
    "the key of a smaller score": Fault(
        fused_statistics, "builder.where(is_larger, tile_key.get(), self.max_score_key[v].get())", "tile_key.get()"
    ),
    "exponents not rescaled": Fault(
        fused_statistics,
        "(self.weighted_exponents[v].get() + shifted) * alpha",
        "self.weighted_exponents[v].get() * alpha",
    ),
    "entropy's weights not rescaled": Fault(
        fused_statistics, "self.weight_sum[v].get() * alpha", "self.weight_sum[v].get()"
    ),
    "sums not rescaled": Fault(fused_statistics, "whole[v].get() * alpha", "whole[v].get()"),
    "every key counted": Fault(fused_statistics, "builder.where(entry, old + p, old)", "old + p"),
}

STREAMING = {
    "off-by-one mask": Fault(
        streaming,
        "b, h, i, j = self.problem.positions(self.xp, rows, columns)",
        "b, h, i, j = self.problem.positions(self.xp, rows, columns); j = j + 1",
    ),
    "dropped rescale": Fault(
        streaming, "acc = acc * xp.astype(alpha, ops.dtype)[..., None] + values", "acc = acc + values"
    ),
    "missed tail of keys": Fault(
        streaming,
        "stop = min(start + runs.key_block, self.problem.m)",
        "stop = min(start + runs.key_block, self.problem.m - self.problem.m % 8)",
    ),
    "wrong head of a group": Fault(
        streaming,
        "return self.xp.reshape(product, (*array.shape[:-1], other.shape[-2]))",
        "return self.xp.flip(self.xp.reshape(product, (*array.shape[:-1], other.shape[-2])), axis=-3)",
    ),
}


ONCE = {name: cache(getattr(testing, name)) for name in ("compute_stages", "compute_baseline")}


@pytest.fixture(autouse=True)
def truth_once(monkeypatch):
    """Compute the reference results of each problem once."""
    for name, function in ONCE.items():
        monkeypatch.setattr(testing, name, function)


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
    """Check the gradients of one problem of `DIFFERENTIATED`; the forward pass runs without the fault."""
    check_gradients(Case(*small(), DIFFERENTIATED[name]), differentiate=partial(by_cpu, answer=answered(name)))


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


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_sound_gradients_pass(name):
    check_backward(name)


RED = r"budget|shape"


@pytest.mark.parametrize("fault", FORWARD)
def test_every_fault_is_seen(fault, monkeypatch, fresh_kernels):
    plant(FORWARD[fault], monkeypatch)
    with pytest.raises(AssertionError, match=RED):
        check(Cpu().run)


@pytest.mark.parametrize("fault", STREAMING)
def test_every_fault_in_streaming_is_seen(fault, monkeypatch):
    with pytest.raises(AssertionError, match=RED):
        check(plant(STREAMING[fault], monkeypatch).Streaming().run)


@pytest.mark.parametrize("fault", DROPOUT)
def test_every_fault_in_dropout_is_seen(fault, monkeypatch, fresh_kernels):
    plant(DROPOUT[fault], monkeypatch)
    with pytest.raises(AssertionError, match=RED):
        check_dropout(Cpu().run)


@pytest.mark.parametrize("fault", PAIRS)
def test_every_fault_in_pairs_is_seen(fault, monkeypatch, fresh_kernels):
    if not machine_for(HOST, "bfloat16").has_bf16_dot:
        pytest.skip("kernels multiply no pairs of bfloat16 in this process")
    plant(PAIRS[fault], monkeypatch)
    with pytest.raises(AssertionError, match=RED):
        check_pairs(Cpu().run)


@pytest.mark.parametrize("fault", BACKWARD)
def test_every_fault_in_the_backward_kernel_is_seen(fault, monkeypatch, fresh_kernels):
    plant(BACKWARD[fault], monkeypatch)
    with pytest.raises(AssertionError, match=RED):
        check_backward(BACKWARD[fault].shows)


def test_sound_fused_statistics_pass():
    check_fused_statistics()


@pytest.mark.parametrize("fault", FUSED_STATISTICS)
def test_every_fault_in_the_fused_statistics_is_seen(fault, monkeypatch, fresh_kernels):
    plant(FUSED_STATISTICS[fault], monkeypatch)
    with pytest.raises(AssertionError, match=RED):
        check_fused_statistics()


def test_a_sound_weights_pass_passes():
    check_weights_pass()


@pytest.mark.parametrize("fault", WEIGHTS_PASS)
def test_every_fault_in_the_weights_pass_is_seen(fault, monkeypatch, fresh_kernels):
    plant(WEIGHTS_PASS[fault], monkeypatch)
    with pytest.raises(AssertionError, match=f"{RED}|a key|not equal"):
        check_weights_pass()


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
    "an offset of one key too many": ("Offset(first,", "Offset(first + (name == 'j'),"),
    "an offset of one query too few": ("Offset(first,", "Offset(first - (name == 'i'),"),
    "heads that count from 0": ("if first_head:", "if False:"),
    "the part's own lengths": ('{"n": as_expression(problem.n), "m": as_expression(problem.m)}', "{}"),
    "dropout of other keys": ("j + (first_key or 0))", "j)"),
}


def check_parts(part_of):
    rng = np.random.default_rng(9)
    query, key, value = (
        rng.normal(size=(1, *shape)).astype(np.float32) for shape in ((4, 20, 8), (2, 40, 8), (2, 40, 8))
    )
    for options in ({"mask": (i * 2 >= j - h) | (j > sightline.m - 3)}, {"dropout": 0.5, "seed": 3}):
        problem = make_problem(query, key, value, **options)
        assert_conforms(lambda whole: run_parts(Streaming().run, whole, head_parts=2, part=part_of), problem)


def test_sound_parts_pass():
    check_parts(part.part_of)


@pytest.mark.parametrize("fault", PARTS)
def test_every_fault_in_parts_is_seen(fault):
    with pytest.raises(AssertionError, match=RED):
        check_parts(broken(part, *PARTS[fault]).part_of)


SCHEDULE = {
    "a tile skipped that is not empty": (
        "count_tiles(~ranges.full)",
        "count_tiles(~ranges.full & (ranges.first != 1))",
    ),
    "a piece skipped that is partial": ("np.broadcast_to(high, row.shape) != 0", "np.broadcast_to(_, row.shape) == 1"),
    "the last piece of a span": ("[self.begin[order], self.end[order]]", "[self.begin[order], self.end[order] - 1]"),
}


def check_schedule(find_schedule):
    for n in (320, 301):
        x = np.zeros((1, 3, n, 1), np.float32)
        problem = make_problem(x, x, x, mask=(i - j < 40 * h + 20) & (i >= j))
        shards = divide(n, 4, "zigzag")
        assert_covers(find_schedule(problem.mask, problem.extent, shards, shards, 50), needed_pairs(problem))


def test_a_sound_schedule_passes():
    check_schedule(schedule.find_schedule)


@pytest.mark.parametrize("fault", SCHEDULE)
def test_every_fault_in_the_schedule_is_seen(fault):
    with pytest.raises(AssertionError, match=r"needless|too few"):
        check_schedule(broken(schedule, *SCHEDULE[fault]).find_schedule)
