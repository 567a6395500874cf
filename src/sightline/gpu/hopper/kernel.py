"""The forward kernel with specialised warps: one warp loads tiles; two warpgroups of four warps compute in turn.

    loads          Q, then K and V tile by tile into rings in shared memory, by the tensor memory accelerator (TMA)
    warpgroup 0    S = Q Kᵀ | softmax    | S = Q Kᵀ | softmax             the first half of the block's queries
    warpgroup 1             | S = Q Kᵀ   | softmax  | S = Q Kᵀ ...        the second half

(Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2.) While one warpgroup uses the tensor cores, the other uses
the exponential units. Within a warpgroup, P V of a tile overlaps the softmax of the next tile. The kernel computes the
sums of `kernels.forward`, by the same formulas, over the same tiles, in the same order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kernels.tile_ops import FLOAT32_MAX, LOG2_E, BlockLocation, compute_lse, compute_scores, has_nan, update_softmax
from .shared_memory_rings import (
    WARPGROUPS,
    Block,
    allocate_tiles,
    block_ranges,
    load_tile,
    make_ring,
    pass_turn,
    range_tiles,
    release_tile,
    tile_offset,
    wait_tile,
    wait_turn,
)

__all__ = ["forward"]

# A program begins with four warps, which are warpgroup 0. Every thread begins with 168 of the 65536 registers. The load
# warp and three idle warps release most of their registers to the two warpgroups, whose threads then have 240 each.
WORKERS = gl.constexpr([4, 1])  # number of warps of warpgroup 1, and of the load worker
REGISTERS = gl.constexpr([240, 24])  # registers per thread of warpgroup 1, and of the load worker


@gluon.jit
def load_worker(query, key, value, queries, k_ring, v_ring, block, meta: gl.constexpr):
    """Load the queries of both warpgroups, then the tiles of K and V: full tiles first, by the ranges of the block."""
    for warpgroup in gl.static_range(WARPGROUPS):
        memory, ready = queries[0].index(warpgroup), queries[1].index(warpgroup)
        mbarrier.expect(ready, query.nbytes_per_cta)
        first = block.block * meta.rows + warpgroup * (meta.rows // WARPGROUPS)
        tma.async_load(query, tile_offset(query, block.b, block.h, first), ready, memory)
    head = block.h // block.group
    step = 0
    for PARTIAL in gl.static_range(2):
        first_range, last_range = block_ranges(block, PARTIAL, meta)
        for range_index in range(first_range, last_range):
            first, last = range_tiles(block, range_index, PARTIAL, meta)
            for tile in range(first, last):
                load_tile(key, block.b, head, tile * meta.keys, k_ring, step)
                load_tile(value, block.b, head, tile * meta.keys, v_ring, step)
                step += 1


@gluon.jit
def process_scores(products, tile, rows, state, block, params, formulas, PARTIAL: gl.constexpr, meta: gl.constexpr):
    """Return (P, α, state) of the running softmax after a tile; the state is (maximum, total, compensation)."""
    scale, unit, tables = params
    j = (tile * meta.keys + gl.arange(0, meta.keys, gl.SliceLayout(0, products.type.layout)))[None, :]
    i = gl.minimum(rows, block.n - 1)[:, None]
    location = BlockLocation(block.b, block.h, i, block.n, block.m)
    s = compute_scores(products, location, j, scale, tables, formulas, PARTIAL, meta)
    maximum, total, compensation = state
    _, p, _, _, alpha, maximum, total, compensation = update_softmax(
        s, gl.max(s, 1), maximum, total, compensation, unit
    )
    return p, alpha, (maximum, total, compensation)


@gluon.jit
def to_dot_operand(p, q, output):
    """Return the weights P converted to the left operand of a product, in registers."""
    return gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, output.type.layout, 2))


@gluon.jit
def rescale(output, factor):
    """Return the output with each row multiplied by the row's factor."""
    by_output: gl.constexpr = gl.SliceLayout(1, output.type.layout)
    return output * gl.convert_layout(factor, by_output, assert_trivial=True)[:, None]


@gluon.jit
def start_qk(q, k_ring, turn, step, WARPGROUP: gl.constexpr, meta: gl.constexpr):
    """Start S = Q Kᵀ of a step, once the step's tile of K is loaded and it is the turn of this warpgroup."""
    k = wait_tile(k_ring, step, meta.padded_d_k, meta)
    wait_turn(turn, step, WARPGROUP)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, meta.keys, 16])
    zeros = gl.zeros([meta.rows // WARPGROUPS, meta.keys], gl.float32, mma)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def process_ranges(
    output, state, step, q, k_ring, v_ring, turn, rows, block, params, formulas, PARTIAL, WARPGROUP, meta
):
    """Return (O, the softmax's state, the next step) after a block's full tiles, or its partial tiles if PARTIAL."""
    first_range, last_range = block_ranges(block, PARTIAL, meta)
    if last_range > first_range:
        tile, _ = range_tiles(block, first_range, PARTIAL, meta)
        products = start_qk(q, k_ring, turn, step, WARPGROUP, meta)
        pass_turn(turn, WARPGROUP)
        products = warpgroup_mma_wait(0, deps=[products])
        release_tile(k_ring, step)
        weights, alpha, state = process_scores(products, tile, rows, state, block, params, formulas, PARTIAL, meta)
        output = rescale(output, alpha)
        p = to_dot_operand(weights, q, output)
        step += 1
        for range_index in range(first_range, last_range):
            first, last = range_tiles(block, range_index, PARTIAL, meta)
            for tile in range(first + gl.where(range_index == first_range, 1, 0), last):
                products = start_qk(q, k_ring, turn, step, WARPGROUP, meta)
                v = wait_tile(v_ring, step - 1, meta.padded_d_v, meta)
                output = warpgroup_mma(p, v, output, is_async=True)  # P V of the previous tile overlaps this softmax
                pass_turn(turn, WARPGROUP)
                products = warpgroup_mma_wait(1, deps=[products])
                release_tile(k_ring, step)
                weights, alpha, state = process_scores(
                    products, tile, rows, state, block, params, formulas, PARTIAL, meta
                )
                output, p = warpgroup_mma_wait(0, deps=[output, p])  # the product reads p from its registers
                release_tile(v_ring, step - 1)
                output = rescale(output, alpha)
                p = to_dot_operand(weights, q, output)
                step += 1
        v = wait_tile(v_ring, step - 1, meta.padded_d_v, meta)
        output = warpgroup_mma(p, v, output, is_async=True)
        output, p = warpgroup_mma_wait(0, deps=[output, p])
        release_tile(v_ring, step - 1)
    return output, state, step


@gluon.jit
def compute_worker(results, queries, k_ring, v_ring, turn, block, params, formulas, WARPGROUP: gl.constexpr, meta):
    """Compute O / l and lse for the queries of one warpgroup, and store both.

    O / l is written to the shared memory that held the queries, and copied from there.
    """
    output, lse, nonfinite_flags, sinks, H, unit = results
    ROWS: gl.constexpr = meta.rows // WARPGROUPS
    by_products: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, meta.keys, 16]))
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, meta.padded_d_v, 16])
    first = block.block * meta.rows + WARPGROUP * ROWS
    rows = first + gl.arange(0, ROWS, by_products)
    compensation = gl.zeros([ROWS], gl.float32, by_products)
    total, maximum = compensation, gl.full([ROWS], float("-inf"), gl.float32, by_products)
    if sinks is not None:
        logit = gl.load(sinks + block.h) * LOG2_E / unit
        logit = gl.where(logit < float("inf"), gl.minimum(logit, FLOAT32_MAX), logit)
        total, maximum = compensation + 1.0, compensation + logit.to(gl.float32)
    state = (maximum, total, compensation)
    acc = gl.zeros([ROWS, meta.padded_d_v], gl.float32, mma)
    mbarrier.wait(queries[1].index(WARPGROUP), 0)
    q = queries[0].index(WARPGROUP).reshape([ROWS, meta.padded_d_k])
    step = 0
    for PARTIAL in gl.static_range(2):
        acc, state, step = process_ranges(
            *(acc, state, step, q, k_ring, v_ring, turn, rows, block, params, formulas, PARTIAL, WARPGROUP, meta)
        )
    maximum, total, compensation = state
    acc = rescale(acc, 1 / gl.where(total == 0, 1.0, total))
    stored = queries[0].index(WARPGROUP).reshape(output.block_shape)
    q.store(acc.to(q.dtype))
    fence_async_shared()
    tma.async_store(output, tile_offset(output, block.b, block.h, first), stored)
    at = (block.b * H + block.h).to(gl.int64) * block.n + rows
    found = compute_lse(maximum, total, compensation, sinks, block.h, unit)
    gl.store(lse + at, found, mask=rows < block.n)
    gl.store(nonfinite_flags + gl.program_id(0), 1, mask=has_nan(acc) != 0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "m", "H", "group", "blocks"])
def forward(
    query,
    key,
    value,
    output,
    lse,
    nonfinite_flags,
    n: gl.int32,
    m: gl.int32,
    H: gl.int32,
    group: gl.int32,
    blocks: gl.int32,
    scale: gl.float32,
    unit: gl.float64,
    schedule,
    sinks,
    tables,
    formulas,
    meta: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute attention for one block of queries of a head.

    Parameters
    ----------
    query, key, value, output : descriptors of arrays with four axes
        A tile has the queries of one warpgroup, or `meta.keys` keys.
    lse : float64 (B, H, n), contiguous
    nonfinite_flags : int32 zeros, one for each program, which is set to 1 if the output of the program has NaN
    blocks : number of blocks of queries in a head
        The last blocks of a head run first, since a causal mask gives them the most tiles.
    scale, unit : as in `kernels.forward.forward`, with sign 1
    schedule, sinks : as in `kernels.forward.forward`
    STAGES : number of tiles in each ring
    """
    item = gl.program_id(0)
    position, block = item // blocks, blocks - 1 - item % blocks
    b, h = position // H, position % H
    row = 0
    if schedule is not None:
        row = b * schedule.batch_stride + h * schedule.head_stride + block
    q_memory = allocate_tiles(query, WARPGROUPS)
    q_ready, turn = mbarrier.allocate_mbarrier(batch=WARPGROUPS), mbarrier.allocate_mbarrier(batch=WARPGROUPS)
    for warpgroup in gl.static_range(WARPGROUPS):
        mbarrier.init(q_ready.index(warpgroup), count=1)
        mbarrier.init(turn.index(warpgroup), count=1)
    k_ring, v_ring = make_ring(key, STAGES), make_ring(value, STAGES)
    fence_async_shared()  # so that the asynchronous copies see the initialised barriers
    queries = (q_memory, q_ready)
    block_info = Block(b, h, block, n, m, row, schedule, group)
    params = (scale, unit.to(gl.float32), tables)
    results = (output, lse, nonfinite_flags, sinks, H, unit)
    gl.warp_specialize(
        [
            (compute_worker, (results, queries, k_ring, v_ring, turn, block_info, params, formulas, 0, meta)),
            (compute_worker, (results, queries, k_ring, v_ring, turn, block_info, params, formulas, 1, meta)),
            (load_worker, (query, key, value, queries, k_ring, v_ring, block_info, meta)),
        ],
        WORKERS,
        REGISTERS,
    )
