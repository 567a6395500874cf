"""The forward kernel with its warps specialised: one loads, two groups of four compute in turn.

    loads      Q, then K and V tile by tile into rings of shared memory, by the tensor memory accelerator
    group 0    S = Q Kᵀ | softmax    | S = Q Kᵀ | softmax             the first half of the block's queries
    group 1             | S = Q Kᵀ   | softmax  | S = Q Kᵀ ...        the other half

(Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2.) While one group has the tensor cores the other has the
units for exponentials, and within a group P V of a tile runs beside the softmax of the next. The sums are `forward`'s
in the same order, by the same formulas, over the same runs.
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

from .rings import (
    GROUPS,
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

# The first group is the four warps that a block begins with. A thread begins with 168 of 65536 registers; the warp that
# loads, and the three no work is found for, give most of theirs to the groups, 240 each.
WORKERS = gl.constexpr([4, 1])  # warps of the second group, and of what loads
REGISTERS = gl.constexpr([240, 24])
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
FLOAT32_MAX = gl.constexpr(3.4028234663852886e38)  # of float32


@gluon.jit
def load_worker(query, key, value, queries, k_ring, v_ring, block_info, meta: gl.constexpr, STAGES: gl.constexpr):
    """Both groups' queries, then keys and values in the order of the runs."""
    b, h, block = block_info[0], block_info[1], block_info[2]
    for warpgroup in gl.static_range(GROUPS):
        memory, ready = queries[0].index(warpgroup), queries[1].index(warpgroup)
        mbarrier.expect(ready, query.nbytes_per_cta)
        tma.async_load(
            query, tile_offset(query, b, h, block * meta.rows + warpgroup * (meta.rows // GROUPS)), ready, memory
        )
    group = h // block_info[7]
    step = 0
    for PARTIAL in gl.static_range(2):
        first_range, last_range = block_ranges(block_info, PARTIAL, meta)
        for range_index in range(first_range, last_range):
            first, last = range_tiles(block_info, range_index, PARTIAL, meta)
            for tile in range(first, last):
                load_tile(key, b, group, tile * meta.keys, k_ring, step, STAGES)
                load_tile(value, b, group, tile * meta.keys, v_ring, step, STAGES)
                step += 1


@gluon.jit
def compute_scores(
    products,
    tile,
    rows,
    block_info,
    formulas,
    mask_at: gl.constexpr,
    score_at: gl.constexpr,
    PARTIAL: gl.constexpr,
    meta: gl.constexpr,
):
    """Final scores of a tile: in nats with a score formula, else not yet scaled; −∞ where hidden or past the keys."""
    b, h, n, m = block_info[0], block_info[1], block_info[3], block_info[4]
    scale, _, tables = formulas
    j = (tile * meta.keys + gl.arange(0, meta.keys, gl.SliceLayout(0, products.type.layout)))[None, :]
    i = gl.minimum(rows, n - 1)[:, None]
    at = gl.minimum(j, m - 1) if PARTIAL and not meta.even else j
    s = products
    if score_at is not None:
        _, s = gl.broadcast(products, score_at(products * scale, b, h, i, at, n, m, tables))
    if PARTIAL:
        if mask_at is not None:
            s = gl.where(mask_at(b, h, i, at, n, m, tables), s, float("-inf"))
        if not meta.even:
            s = gl.where(j < m, s, float("-inf"))
    return s


@gluon.jit
def softmax(s, state, unit):
    """P = 2^((s − m) · unit), the factor on what was summed before, and the state after the tile.

    The state is (m, l, what rounding lost of l).
    """
    largest, total, compensation = state
    new = gl.maximum(largest, gl.max(s, 1))
    shift = gl.where(new == float("-inf"), 0.0, new)
    alpha = gl.exp2((largest - shift) * unit)
    p = gl.exp2((s - shift[:, None]) * unit)
    sums = gl.sum(p, 1)
    old = total * alpha  # Knuth's sum: later passes over the weights take on the error of lse
    total = old + sums
    share = total - old
    compensation = compensation * alpha + ((old - (total - share)) + (sums - share))
    return p, alpha, (new, total, compensation)


@gluon.jit
def to_dot_operand(p, q, output):
    """Weights as the left side of a product, in registers."""
    return gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, output.type.layout, 2))


@gluon.jit
def rescale(output, factor):
    """Every row of the output times its factor."""
    by_output: gl.constexpr = gl.SliceLayout(1, output.type.layout)
    return output * gl.convert_layout(factor, by_output, assert_trivial=True)[:, None]


@gluon.jit
def start_qk(q, k_ring, turn, step, WARPGROUP: gl.constexpr, meta: gl.constexpr, STAGES: gl.constexpr):
    """S = Q Kᵀ of this step on its way, once the keys are there and it is this group's turn."""
    k = wait_tile(k_ring, step, meta.padded_d_k, meta, STAGES)
    wait_turn(turn, step, WARPGROUP)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, meta.keys, 16])
    zeros = gl.zeros([meta.rows // GROUPS, meta.keys], gl.float32, mma)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def process_ranges(
    output,
    state,
    step,
    q,
    k_ring,
    v_ring,
    turn,
    rows,
    block_info,
    formulas,
    mask_at: gl.constexpr,
    score_at: gl.constexpr,
    PARTIAL: gl.constexpr,
    WARPGROUP: gl.constexpr,
    meta: gl.constexpr,
    STAGES: gl.constexpr,
):
    """O, the softmax's state and the step after the full tiles of a block, or after those to be masked."""
    unit = formulas[1]
    first_range, last_range = block_ranges(block_info, PARTIAL, meta)
    if last_range > first_range:
        tile, _ = range_tiles(block_info, first_range, PARTIAL, meta)
        products = start_qk(q, k_ring, turn, step, WARPGROUP, meta, STAGES)
        pass_turn(turn, WARPGROUP)
        products = warpgroup_mma_wait(0, deps=[products])
        release_tile(k_ring, step, STAGES)
        s = compute_scores(products, tile, rows, block_info, formulas, mask_at, score_at, PARTIAL, meta)
        weights, alpha, state = softmax(s, state, unit)
        output = rescale(output, alpha)
        p = to_dot_operand(weights, q, output)
        step += 1
        for range_index in range(first_range, last_range):
            first, last = range_tiles(block_info, range_index, PARTIAL, meta)
            for tile in range(first + gl.where(range_index == first_range, 1, 0), last):
                products = start_qk(q, k_ring, turn, step, WARPGROUP, meta, STAGES)
                v = wait_tile(v_ring, step - 1, meta.padded_d_v, meta, STAGES)
                output = warpgroup_mma(p, v, output, is_async=True)  # of the tile before, beside this one's softmax
                pass_turn(turn, WARPGROUP)
                products = warpgroup_mma_wait(1, deps=[products])
                release_tile(k_ring, step, STAGES)
                s = compute_scores(products, tile, rows, block_info, formulas, mask_at, score_at, PARTIAL, meta)
                weights, alpha, state = softmax(s, state, unit)
                output, p = warpgroup_mma_wait(0, deps=[output, p])  # the product reads p out of its registers
                release_tile(v_ring, step - 1, STAGES)
                output = rescale(output, alpha)
                p = to_dot_operand(weights, q, output)
                step += 1
        v = wait_tile(v_ring, step - 1, meta.padded_d_v, meta, STAGES)
        output = warpgroup_mma(p, v, output, is_async=True)
        output, p = warpgroup_mma_wait(0, deps=[output, p])
        release_tile(v_ring, step - 1, STAGES)
    return output, state, step


@gluon.jit
def compute_worker(
    results,
    queries,
    k_ring,
    v_ring,
    turn,
    block_info,
    formulas,
    mask_at: gl.constexpr,
    score_at: gl.constexpr,
    WARPGROUP: gl.constexpr,
    meta: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The rows of one group: O / l copied out of the memory its queries lay in, lse beside."""
    output, lse, nonfinite_flags, sinks, H, unit = results
    b, h, block, n = block_info[0], block_info[1], block_info[2], block_info[3]
    ROWS: gl.constexpr = meta.rows // GROUPS
    by_products: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, meta.keys, 16]))
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, meta.padded_d_v, 16])
    first = block * meta.rows + WARPGROUP * ROWS
    rows = first + gl.arange(0, ROWS, by_products)
    compensation = gl.zeros([ROWS], gl.float32, by_products)
    total, largest = compensation, gl.full([ROWS], float("-inf"), gl.float32, by_products)
    if sinks is not None:
        logit = gl.load(sinks + h) * LOG2_E / unit
        logit = gl.where(logit < float("inf"), gl.minimum(logit, FLOAT32_MAX), logit)
        total, largest = compensation + 1.0, compensation + logit.to(gl.float32)
    state = (largest, total, compensation)
    acc = gl.zeros([ROWS, meta.padded_d_v], gl.float32, mma)
    mbarrier.wait(queries[1].index(WARPGROUP), 0)
    q = queries[0].index(WARPGROUP).reshape([ROWS, meta.padded_d_k])
    step = 0
    for PARTIAL in gl.static_range(2):
        acc, state, step = process_ranges(
            acc,
            state,
            step,
            q,
            k_ring,
            v_ring,
            turn,
            rows,
            block_info,
            formulas,
            mask_at,
            score_at,
            PARTIAL,
            WARPGROUP,
            meta,
            STAGES,
        )
    largest, total, compensation = state
    nothing = total == 0
    safe = gl.where(nothing, 1.0, total)
    acc = rescale(acc, 1 / safe)
    stored = queries[0].index(WARPGROUP).reshape(output.block_shape)
    q.store(acc.to(q.dtype))
    fence_async_shared()
    tma.async_store(output, tile_offset(output, b, h, first), stored)
    base = gl.where(nothing, float("-inf"), largest).to(gl.float64) * unit
    at = (b * H + h).to(gl.int64) * n + rows
    normaliser = base * LN_2 + gl.log(safe.to(gl.float64) + compensation.to(gl.float64))
    if sinks is not None:  # one beyond the largest score was taken for the largest
        sink = gl.load(sinks + h)
        normaliser = gl.where(normaliser < sink, sink, normaliser)
    gl.store(lse + at, normaliser, mask=rows < n)
    has_nan = gl.max(gl.max(gl.where(acc == acc, 0, 1), 1), 0)
    gl.store(nonfinite_flags + gl.program_id(0), 1, mask=has_nan != 0)
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
    mask_at: gl.constexpr,
    score_at: gl.constexpr,
    meta: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One block of queries of a head.

    Parameters
    ----------
    query, key, value, output : descriptors of (B, heads, rows, width), in tiles of a group's queries and of the keys
    lse : float64 (B, H, n), contiguous
    tainted : int32 zeros, one for each program: 1 where its output has NaN
    blocks : of queries in a head; later ones first, since a causal mask makes those the longest
    scale, unit : s = Q Kᵀ · scale, and scores come to base 2 by · unit
    schedule, sinks : as `forward.forward` has them
    """
    item = gl.program_id(0)
    position, block = item // blocks, blocks - 1 - item % blocks
    b, h = position // H, position % H
    row = 0
    if schedule is not None:
        row = b * schedule[2] + h * schedule[3] + block
    q_memory = allocate_tiles(query, GROUPS)
    q_ready, turn = mbarrier.allocate_mbarrier(batch=GROUPS), mbarrier.allocate_mbarrier(batch=GROUPS)
    for warpgroup in gl.static_range(GROUPS):
        mbarrier.init(q_ready.index(warpgroup), count=1)
        mbarrier.init(turn.index(warpgroup), count=1)
    k_ring, v_ring = make_ring(key, STAGES), make_ring(value, STAGES)
    fence_async_shared()  # copies find the barriers made
    queries = (q_memory, q_ready)
    block_info = (b, h, block, n, m, row, schedule, group)
    formulas = (scale, unit.to(gl.float32), tables)
    results = (output, lse, nonfinite_flags, sinks, H, unit)
    gl.warp_specialize(
        [
            (
                compute_worker,
                (results, queries, k_ring, v_ring, turn, block_info, formulas, mask_at, score_at, 0, meta, STAGES),
            ),
            (
                compute_worker,
                (results, queries, k_ring, v_ring, turn, block_info, formulas, mask_at, score_at, 1, meta, STAGES),
            ),
            (load_worker, (query, key, value, queries, k_ring, v_ring, block_info, meta, STAGES)),
        ],
        WORKERS,
        REGISTERS,
    )
