"""The forward kernel for Hopper's GPUs (sm_90), its warps specialised: one loads, two groups compute in turn.

    loads      Q, and K and V tile by tile into rings of shared memory, by the tensor memory accelerator
    group 0    S = Q Kᵀ | softmax    | S = Q Kᵀ | softmax            rows 0 ... ROWS − 1 of the block of queries
    group 1             | S = Q Kᵀ   | softmax  | S = Q Kᵀ ...       the other ROWS

(Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2.) While one group has the tensor cores the other has the
units for exponentials; and within a group the product P V of a tile runs beside the softmax of the next. A ring holds
`STAGES` tiles. Step t of a group uses place t mod STAGES; a barrier `ready` says that a copy is there, and `free` that
both groups have read it, each phase one round of the ring.

What the formulas are to `forward` they are here, the same functions; so are the runs.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["forward"]

GROUPS = gl.constexpr(2)  # of four warps each; the first is the block's own
WORKERS = gl.constexpr([4, 1])  # warps of the other group and of the one that loads
REGISTERS = gl.constexpr([240, 24])  # of their threads; the first group has 240 too
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)


# Runs


@gluon.jit
def runs_of(schedule, row, m, PARTIAL: gl.constexpr, form: gl.constexpr):
    """The first run of a block and the one past the last: of its full tiles, or of those to be masked."""
    if schedule is None:
        first = 0
        last = gl.where(m % form.keys != 0, 1, 0) if PARTIAL else gl.where(m >= form.keys, 1, 0)
    else:
        first = gl.load(schedule[0] + 3 * row + PARTIAL)
        last = gl.load(schedule[0] + 3 * row + PARTIAL + 1)
    return first, last


@gluon.jit
def tiles_of(schedule, run, m, PARTIAL: gl.constexpr, form: gl.constexpr):
    """The first tile of a run and the one past the last."""
    if schedule is None:
        first = m // form.keys if PARTIAL else 0
        last = m // form.keys + PARTIAL
    else:
        first = gl.load(schedule[1] + 2 * run)
        last = gl.load(schedule[1] + 2 * run + 1)
    return first, last


# Rings: (memory, barriers ready, barriers free)


@gluon.jit
def put(matrix, corner, ring, step, STAGES: gl.constexpr):
    """Ask for the tile at `corner` as soon as its place in the ring is free."""
    memory, ready, free = ring
    place = step % STAGES
    mbarrier.wait(free.index(place), (step // STAGES & 1) ^ 1)  # a fresh barrier lets the first round pass
    mbarrier.expect(ready.index(place), matrix.nbytes_per_cta)
    tma.async_load(matrix, corner, ready.index(place), memory.index(place))


@gluon.jit
def take(ring, step, form: gl.constexpr, STAGES: gl.constexpr):
    """The tile of this step, waited for."""
    memory, ready, _ = ring
    place = step % STAGES
    mbarrier.wait(ready.index(place), step // STAGES & 1)
    return memory.index(place).reshape([form.keys, form.lanes_k])


@gluon.jit
def give_back(ring, step, STAGES: gl.constexpr):
    """This group has read the tile of this step."""
    mbarrier.arrive(ring[2].index(step % STAGES), count=1)


# The warp that loads


@gluon.jit
def load(
    query, key, value, queries, k_ring, v_ring, place, group, block, row, schedule,
    form: gl.constexpr, STAGES: gl.constexpr,
):
    """Both groups' queries, then keys and values in the order of the runs."""
    b, h, _, m = place
    for who in gl.static_range(GROUPS):
        memory, ready = queries[0].index(who), queries[1].index(who)
        mbarrier.expect(ready, query.nbytes_per_cta)
        tma.async_load(query, [b, h, block * form.rows + who * (form.rows // GROUPS), 0], ready, memory)
    step = 0
    for PARTIAL in gl.static_range(2):
        first_run, last_run = runs_of(schedule, row, m, PARTIAL, form)
        for run in range(first_run, last_run):
            first, last = tiles_of(schedule, run, m, PARTIAL, form)
            for tile in range(first, last):
                put(key, [b, h // group, tile * form.keys, 0], k_ring, step, STAGES)
                put(value, [b, h // group, tile * form.keys, 0], v_ring, step, STAGES)
                step += 1


# The groups that compute


@gluon.jit
def begin_products(q, k_ring, turn, step, WHO: gl.constexpr, form: gl.constexpr, STAGES: gl.constexpr):
    """S = Q Kᵀ of this step on its way, once the keys are there and it is this group's turn."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.keys, 16])
    k = take(k_ring, step, form, STAGES)
    mbarrier.wait(turn.index(WHO), step & 1 ^ (1 - WHO))  # group 0 begins
    zeros = gl.zeros([form.rows // GROUPS, form.keys], gl.float32, mma)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def scores(
    products, tile, rows, place, numbers, tables,
    mask_at: gl.constexpr, score_at: gl.constexpr, PARTIAL: gl.constexpr, form: gl.constexpr,
):
    """Final scores of a tile: in nats with a score formula, not yet scaled without; −∞ where hidden or past the keys."""
    b, h, n, m = place
    j = (tile * form.keys + gl.arange(0, form.keys, gl.SliceLayout(0, products.type.layout)))[None, :]
    i = gl.minimum(rows, n - 1)[:, None]
    at = gl.minimum(j, m - 1) if PARTIAL and not form.even else j
    s = products
    if score_at is not None:
        _, s = gl.broadcast(products, score_at(products * numbers[0], b, h, i, at, n, m, tables))
    if PARTIAL:
        if mask_at is not None:
            s = gl.where(mask_at(b, h, i, at, n, m, tables), s, float("-inf"))
        if not form.even:
            s = gl.where(j < m, s, float("-inf"))
    return s


@gluon.jit
def softmax(s, state, unit):
    """P = 2^(s · unit − m), the factor on what was summed before, and the state after the tile.

    The state is (m, l, what rounding lost of l).
    """
    largest, total, lost = state
    new = gl.maximum(largest, gl.max(s, 1) * unit)
    shift = gl.where(new == float("-inf"), 0.0, new)
    alpha = gl.exp2(largest - shift)
    # at most 1: a rounded maximum as shift is off by more than 1 where scores are huge
    p = gl.exp2(gl.minimum(gl.fma(s, unit, -shift[:, None]), 0.0, propagate_nan=tl.PropagateNan.ALL))
    sums = gl.sum(p, 1)
    old = total * alpha  # Knuth's sum: later passes over the weights take on the error of lse
    total = old + sums
    share = total - old
    lost = lost * alpha + ((old - (total - share)) + (sums - share))
    return p, alpha, (new, total, lost)


@gluon.jit
def operand(p, q, output):
    """Weights as the left side of a product, in registers."""
    return gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, output.type.layout, 2))


@gluon.jit
def scaled(output, factor):
    """Every row of the output times its factor."""
    by_output: gl.constexpr = gl.SliceLayout(1, output.type.layout)
    return output * gl.convert_layout(factor, by_output, assert_trivial=True)[:, None]


@gluon.jit
def over_runs(
    output, state, step, q, k_ring, v_ring, turn, rows, place, row, schedule, numbers, tables,
    mask_at: gl.constexpr, score_at: gl.constexpr, PARTIAL: gl.constexpr, WHO: gl.constexpr,
    form: gl.constexpr, STAGES: gl.constexpr,
):
    """O, the softmax's state and the step after the full tiles of a block, or after those to be masked."""
    m = place[3]
    first_run, last_run = runs_of(schedule, row, m, PARTIAL, form)
    if last_run > first_run:
        tile, _ = tiles_of(schedule, first_run, m, PARTIAL, form)
        products = begin_products(q, k_ring, turn, step, WHO, form, STAGES)
        mbarrier.arrive(turn.index(1 - WHO), count=1)
        products = warpgroup_mma_wait(0, deps=[products])
        give_back(k_ring, step, STAGES)
        s = scores(products, tile, rows, place, numbers, tables, mask_at, score_at, PARTIAL, form)
        weights, alpha, state = softmax(s, state, numbers[1])
        output = scaled(output, alpha)
        p = operand(weights, q, output)
        step += 1
        for run in range(first_run, last_run):
            first, last = tiles_of(schedule, run, m, PARTIAL, form)
            for tile in range(first + gl.where(run == first_run, 1, 0), last):
                products = begin_products(q, k_ring, turn, step, WHO, form, STAGES)
                v = take(v_ring, step - 1, form, STAGES)
                output = warpgroup_mma(p, v, output, is_async=True)  # of the tile before, beside this one's softmax
                mbarrier.arrive(turn.index(1 - WHO), count=1)
                products = warpgroup_mma_wait(1, deps=[products])
                give_back(k_ring, step, STAGES)
                s = scores(products, tile, rows, place, numbers, tables, mask_at, score_at, PARTIAL, form)
                weights, alpha, state = softmax(s, state, numbers[1])
                output, p = warpgroup_mma_wait(0, deps=[output, p])  # the product reads p out of its registers
                give_back(v_ring, step - 1, STAGES)
                output = scaled(output, alpha)
                p = operand(weights, q, output)
                step += 1
        v = take(v_ring, step - 1, form, STAGES)
        output = warpgroup_mma(p, v, output, is_async=True)
        output, p = warpgroup_mma_wait(0, deps=[output, p])
        give_back(v_ring, step - 1, STAGES)
    return output, state, step


@gluon.jit
def compute(
    given, queries, k_ring, v_ring, turn, place, block, row, schedule, numbers, tables,
    mask_at: gl.constexpr, score_at: gl.constexpr, WHO: gl.constexpr, form: gl.constexpr, STAGES: gl.constexpr,
):
    """The rows of one group: O / l copied out of the memory its queries lay in, lse beside."""
    ROWS: gl.constexpr = form.rows // GROUPS
    by_products: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.keys, 16]))
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.lanes_v, 16])
    output, lse, suspects, sinks, H = given
    b, h, n, m = place
    first = block * form.rows + WHO * ROWS
    rows = first + gl.arange(0, ROWS, by_products)
    largest = gl.full([ROWS], float("-inf"), gl.float32, by_products)
    lost = gl.zeros([ROWS], gl.float32, by_products)
    total = lost
    if sinks is not None:
        largest = lost + (gl.load(sinks + h) * LOG2_E).to(gl.float32)
        total = lost + 1.0
    state = (largest, total, lost)
    found = gl.zeros([ROWS, form.lanes_v], gl.float32, mma)
    mbarrier.wait(queries[1].index(WHO), 0)
    q = queries[0].index(WHO).reshape([ROWS, form.lanes_k])
    step = 0
    for PARTIAL in gl.static_range(2):
        found, state, step = over_runs(
            found, state, step, q, k_ring, v_ring, turn, rows, place, row, schedule, numbers, tables,
            mask_at, score_at, PARTIAL, WHO, form, STAGES,
        )
    largest, total, lost = state
    nothing = total == 0
    safe = gl.where(nothing, 1.0, total)
    found = scaled(found, 1 / safe)
    q.store(found.to(q.dtype))
    fence_async_shared()
    tma.async_store(output, [b, h, first, 0], queries[0].index(WHO))
    base = gl.where(nothing, float("-inf"), largest).to(gl.float64)
    at = (b * H + h).to(gl.int64) * n + rows
    gl.store(lse + at, base * LN_2 + gl.log(safe.to(gl.float64) + lost.to(gl.float64)), mask=rows < n)
    odd = gl.max(gl.max(gl.where(found == found, 0, 1), 1), 0)
    gl.store(suspects + gl.program_id(0) * GROUPS + WHO, odd)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "m", "H", "group", "blocks"])
def forward(
    query, key, value, output, lse, suspects,
    n: gl.int32, m: gl.int32, H: gl.int32, group: gl.int32, blocks: gl.int32, scale: gl.float32, unit: gl.float32,
    schedule, sinks, tables,
    mask_at: gl.constexpr, score_at: gl.constexpr, form: gl.constexpr, STAGES: gl.constexpr,
):
    """One block of queries of a head.

    Parameters
    ----------
    query, key, value, output : descriptors of (B, heads, rows, width), in tiles of a group's queries and of the keys
    lse : float64 (B, H, n), contiguous
    suspects : int32 (programs, groups): whether there is a NaN in what a group found
    blocks, schedule, sinks : as `forward.forward` has them
    scale, unit : s = Q Kᵀ · scale, and scores come to base 2 by · unit
    """
    item = gl.program_id(0)
    position, block = item // blocks, blocks - 1 - item % blocks
    b, h = position // H, position % H
    row = 0
    if schedule is not None:
        row = b * schedule[2] + h * schedule[3] + block
    q_memory = gl.allocate_shared_memory(query.dtype, [GROUPS] + query.block_shape, query.layout)
    k_memory = gl.allocate_shared_memory(key.dtype, [STAGES] + key.block_shape, key.layout)
    v_memory = gl.allocate_shared_memory(value.dtype, [STAGES] + value.block_shape, value.layout)
    q_ready, turn = mbarrier.allocate_mbarrier(batch=GROUPS), mbarrier.allocate_mbarrier(batch=GROUPS)
    k_ready, k_free = mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)
    v_ready, v_free = mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)
    for who in gl.static_range(GROUPS):
        mbarrier.init(q_ready.index(who), count=1)
        mbarrier.init(turn.index(who), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=GROUPS)
        mbarrier.init(v_free.index(stage), count=GROUPS)
    fence_async_shared()  # copies find the barriers made
    queries, k_ring, v_ring = (q_memory, q_ready), (k_memory, k_ready, k_free), (v_memory, v_ready, v_free)
    place, numbers = (b, h, n, m), (scale, unit)
    given = (output, lse, suspects, sinks, H)
    gl.warp_specialize(
        [
            (compute, (given, queries, k_ring, v_ring, turn, place, block, row, schedule, numbers, tables, mask_at, score_at, 0, form, STAGES)),
            (compute, (given, queries, k_ring, v_ring, turn, place, block, row, schedule, numbers, tables, mask_at, score_at, 1, form, STAGES)),
            (load, (query, key, value, queries, k_ring, v_ring, place, group, block, row, schedule, form, STAGES)),
        ],
        WORKERS,
        REGISTERS,
    )
