"""The matrix of weights or scores itself, second pass."""

from __future__ import annotations

import triton
import triton.language as tl

from . import tile_ops
from .tile_loop import Row, walk
from .weights_pass import block_of, scores

__all__ = ["written"]


@triton.jit
def put_over_run(_, first, last, block, seams, WHAT: tl.constexpr, form, PARTIAL: tl.constexpr):
    """The tiles `first` to before `last` to their places; sums added to what this program has written there."""
    corner, rows = block.own
    m = block.place.m
    down, across = tl.arange(0, form.rows)[:, None], tl.arange(0, form.keys)[None, :]
    for tile in range(first, last):
        j0 = tile * form.keys
        s = scores(block, j0, seams, PARTIAL, form)
        places = corner + j0 + (tl.cast(down, tl.int64) * m + across)
        inside = (down < rows) & (across < m - j0)
        if WHAT == "scores":
            if seams.score_at is None:
                s = s * block.scale
            tl.store(places, s, mask=inside)
        elif WHAT == "weights":
            tl.store(places, tile_ops.weight(s, block.unit, block.normaliser).to(corner.dtype.element_ty), mask=inside)
        else:
            held = tl.load(places, mask=inside, other=0.0)
            tl.store(places, held + tile_ops.weight(s, block.unit, block.normaliser), mask=inside)
    return ()


@triton.jit(do_not_specialize=["n", "m", "H", "group", "blocks", "batches", "heads"])
def written(
    query,
    key,
    lse,
    output,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    blocks: tl.int32,
    batches: tl.int32,
    heads: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    tables,
    seams,
    form: tl.constexpr,
    WHAT: tl.constexpr,
):
    """P or S of a block of queries put to (..., n, m), or P of so many batches and heads added up there.

    Parameters
    ----------
    output : (lines, n, m), holding what tiles that are not visited have; a line is a head, or what is added up
    batches, heads : of a line, one after another in one program
    WHAT : "weights", "scores" in nats, or "sums" of weights
    """
    item = tl.program_id(0)
    line, row = item // blocks, blocks - 1 - item % blocks
    across = H // heads  # lines of a batch
    first = row * form.rows
    corner = output + (tl.cast(line, tl.int64) * n + first) * m
    for turn in range(batches * heads):
        b, h = line // across * batches + turn // heads, line % across * heads + turn % heads
        own = (corner, n - first)
        block = block_of(query, key, lse, b, h, first, n, m, H, group, sign, scale, unit, tables, own, form)
        along = Row(schedule, b, h, row, m, None, False)
        walk((), put_over_run, along, form.keys, form.even, block, seams, WHAT, form)
        tl.debug_barrier()  # the next turn reads what other threads wrote in this one
