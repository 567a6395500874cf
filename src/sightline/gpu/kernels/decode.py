"""The decoding kernel: few queries against many keys, bound by reading K and V once.

The query heads that share a key head are rows of one block, so that one read of K and V serves them all. Keys are cut
into parts, a program each; `merge` joins the parts of a query in their own order (Dao et al., "Flash-Decoding", 2023):

    lse = ln Σ_p e^lse_p        O = Σ_p e^(lse_p − lse) O_p
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import tile_ops
from .forward import Block, Given, State, begin, block_of_head, hand_over, has_nan, over_run
from .tile_loop import Row, walk

__all__ = ["decode", "merge"]

UNROLLED = tl.constexpr(8)  # parts that `merge` has on their way at once: one by one it would wait for memory each time


@triton.jit(do_not_specialize=["n", "m", "H", "group", "parts", "chunk"])
def decode(
    query,
    key,
    value,
    part_output,
    part_lse,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    parts: tl.int32,
    chunk: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    random,
    tables,
    seams,
    form: tl.constexpr,
):
    """A part of the keys for the queries of a group of heads.

    Parameters
    ----------
    part_output : (parts, B, H, n, d_v) in the accumulator's type: each part's own softmax times V
    part_lse : (parts, B, H, n) float64: the log of each part's sum of 2^S, base 2; −∞ where it sees nothing
    parts, chunk : of the keys, and tiles in a part
    """
    item = tl.program_id(0)
    part, position = item % parts, item // parts
    G = H // group
    blocks = tl.cdiv(group * n, form.rows)
    block, b, g = position % blocks, position // blocks // G, position // blocks % G
    rows = (block * form.rows + tl.arange(0, form.rows))[:, None]
    inside = rows < group * n
    rows = tl.minimum(rows, group * n - 1)
    h, i = g * group + rows // n, rows % n
    q = tile_ops.gathered(tile_ops.head_of(query, b, h), i, inside, form.d_k, form.lanes_k, form)
    given = Block(
        tile_ops.signed(q, sign, form),
        tile_ops.head_of(key, b, g),
        tile_ops.head_of(value, b, g),
        tile_ops.Place(b, h, i, n, m),
        tile_ops.number(scale, form.total),
        tile_ops.number(unit, form.total),
        random,
        tables,
    )
    row = Row(schedule, b, 0, 0, m, (part * chunk, (part + 1) * chunk), False)
    state = walk(begin(None, 0, False, form), over_run, row, form.keys, form.even, given, seams, False, form)
    nothing = state.total == 0
    safe = tl.where(nothing, 1.0, state.total)
    at = ((tl.cast(part, tl.int64) * tl.num_programs(0) // (parts * blocks * G) + b) * H + h) * n + i
    column = tl.arange(0, form.lanes_v)[None, :]
    tl.store(part_output + at * form.d_v + column, state.output / safe[:, None], mask=inside & (column < form.d_v))
    base = state.largest.to(tl.float64) * tile_ops.number(unit, tl.float64)
    sums = base + tl.log2(safe.to(tl.float64) + state.lost.to(tl.float64))
    tl.store(part_lse + at, tl.where(nothing, float("-inf"), sums)[:, None], mask=inside)


@triton.jit(do_not_specialize=["n", "m", "H", "group", "parts"])
def merge(
    query,
    key,
    value,
    output,
    lse,
    part_output,
    part_lse,
    n: tl.int32,
    m: tl.int32,
    H: tl.int32,
    group: tl.int32,
    parts: tl.int32,
    sign: tl.float64,
    scale: tl.float64,
    unit: tl.float64,
    schedule,
    sinks,
    random,
    kept: tl.float64,
    tables,
    seams,
    form: tl.constexpr,
    careful: tl.constexpr,
):
    """A head's queries joined from their parts; where the output has NaN, attended to carefully.

    `form` has as many rows as there are queries, so that much is on its way at once; `careful` those of a product.
    """
    position = tl.program_id(0)
    rows, column = tl.arange(0, form.rows), tl.arange(0, form.lanes_v)[None, :]
    at, inside = tl.cast(position, tl.int64) * n + rows, rows < n
    step = tl.cast(tl.num_programs(0), tl.int64) * n  # rows of a part
    largest = tl.full((form.rows,), float("-inf"), tl.float64)
    if sinks is not None:
        largest = tl.zeros((form.rows,), tl.float64) + tl.load(sinks + position % H) * tile_ops.LOG2_E
    sink = largest
    for part in tl.range(parts, loop_unroll_factor=UNROLLED):
        largest = tl.maximum(largest, tl.load(part_lse + part * step + at, mask=inside, other=float("-inf")))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.exp2(sink - shift)
    found = tl.zeros((form.rows, form.lanes_v), form.total)
    for part in tl.range(parts, loop_unroll_factor=UNROLLED):
        power = tl.load(part_lse + part * step + at, mask=inside, other=float("-inf"))
        weight = tl.exp2((power - shift).to(form.total))  # the difference is exact enough; float64's power branches
        total += weight.to(tl.float64)
        place = part_output + (part * step + at)[:, None] * form.d_v + column
        share = tl.load(place, mask=inside[:, None] & (column < form.d_v), other=0.0)
        found += weight[:, None] * share
    factor = tile_ops.number(kept, form.total)
    if has_nan(found) != 0:
        given = Given(query, key, value, n, m, H, group, sign, scale, unit, schedule, sinks, random, tables)
        state = block_of_head(given, position, 0, 0, seams, 0, True, careful)
        hand_over(state, output, lse, sinks, position, 0, n, H, unit, factor, careful)
    else:
        high = total.to(form.total)
        joined = State(found, high, (total - high.to(tl.float64)).to(form.total), largest, (), ())
        hand_over(joined, output, lse, sinks, position, 0, n, H, 1.0, factor, form)
