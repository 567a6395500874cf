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

from .rings import GROUPS, corner, give_back, new_ring, pass_turn, put, room, runs_of, take, tiles_of, wait_turn

__all__ = ["forward"]

# The first group is the four warps that a block begins with. A thread begins with 168 of 65536 registers; the warp that
# loads, and the three no work is found for, give most of theirs to the groups, 240 each.
WORKERS = gl.constexpr([4, 1])  # warps of the second group, and of what loads
REGISTERS = gl.constexpr([240, 24])
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
LARGEST = gl.constexpr(3.4028234663852886e38)  # of float32


@gluon.jit
def load(query, key, value, queries, k_ring, v_ring, work, form: gl.constexpr, STAGES: gl.constexpr):
    """Both groups' queries, then keys and values in the order of the runs."""
    b, h, block = work[0], work[1], work[2]
    for who in gl.static_range(GROUPS):
        memory, ready = queries[0].index(who), queries[1].index(who)
        mbarrier.expect(ready, query.nbytes_per_cta)
        tma.async_load(query, corner(query, b, h, block * form.rows + who * (form.rows // GROUPS)), ready, memory)
    group = h // work[7]
    step = 0
    for PARTIAL in gl.static_range(2):
        first_run, last_run = runs_of(work, PARTIAL, form)
        for run in range(first_run, last_run):
            first, last = tiles_of(work, run, PARTIAL, form)
            for tile in range(first, last):
                put(key, b, group, tile * form.keys, k_ring, step, STAGES)
                put(value, b, group, tile * form.keys, v_ring, step, STAGES)
                step += 1


@gluon.jit
def scores(
    products,
    tile,
    rows,
    work,
    formulas,
    mask_at: gl.constexpr,
    score_at: gl.constexpr,
    PARTIAL: gl.constexpr,
    form: gl.constexpr,
):
    """Final scores of a tile: in nats with a score formula, else not yet scaled; −∞ where hidden or past the keys."""
    b, h, n, m = work[0], work[1], work[3], work[4]
    scale, _, tables = formulas
    j = (tile * form.keys + gl.arange(0, form.keys, gl.SliceLayout(0, products.type.layout)))[None, :]
    i = gl.minimum(rows, n - 1)[:, None]
    at = gl.minimum(j, m - 1) if PARTIAL and not form.even else j
    s = products
    if score_at is not None:
        _, s = gl.broadcast(products, score_at(products * scale, b, h, i, at, n, m, tables))
    if PARTIAL:
        if mask_at is not None:
            s = gl.where(mask_at(b, h, i, at, n, m, tables), s, float("-inf"))
        if not form.even:
            s = gl.where(j < m, s, float("-inf"))
    return s


@gluon.jit
def softmax(s, state, unit):
    """P = 2^((s − m) · unit), the factor on what was summed before, and the state after the tile.

    The state is (m, l, what rounding lost of l).
    """
    largest, total, lost = state
    new = gl.maximum(largest, gl.max(s, 1))
    shift = gl.where(new == float("-inf"), 0.0, new)
    alpha = gl.exp2((largest - shift) * unit)
    p = gl.exp2((s - shift[:, None]) * unit)
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
def begin_products(q, k_ring, turn, step, WHO: gl.constexpr, form: gl.constexpr, STAGES: gl.constexpr):
    """S = Q Kᵀ of this step on its way, once the keys are there and it is this group's turn."""
    k = take(k_ring, step, form.lanes_k, form, STAGES)
    wait_turn(turn, step, WHO)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.keys, 16])
    zeros = gl.zeros([form.rows // GROUPS, form.keys], gl.float32, mma)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def over_runs(
    output,
    state,
    step,
    q,
    k_ring,
    v_ring,
    turn,
    rows,
    work,
    formulas,
    mask_at: gl.constexpr,
    score_at: gl.constexpr,
    PARTIAL: gl.constexpr,
    WHO: gl.constexpr,
    form: gl.constexpr,
    STAGES: gl.constexpr,
):
    """O, the softmax's state and the step after the full tiles of a block, or after those to be masked."""
    unit = formulas[1]
    first_run, last_run = runs_of(work, PARTIAL, form)
    if last_run > first_run:
        tile, _ = tiles_of(work, first_run, PARTIAL, form)
        products = begin_products(q, k_ring, turn, step, WHO, form, STAGES)
        pass_turn(turn, WHO)
        products = warpgroup_mma_wait(0, deps=[products])
        give_back(k_ring, step, STAGES)
        s = scores(products, tile, rows, work, formulas, mask_at, score_at, PARTIAL, form)
        weights, alpha, state = softmax(s, state, unit)
        output = scaled(output, alpha)
        p = operand(weights, q, output)
        step += 1
        for run in range(first_run, last_run):
            first, last = tiles_of(work, run, PARTIAL, form)
            for tile in range(first + gl.where(run == first_run, 1, 0), last):
                products = begin_products(q, k_ring, turn, step, WHO, form, STAGES)
                v = take(v_ring, step - 1, form.lanes_v, form, STAGES)
                output = warpgroup_mma(p, v, output, is_async=True)  # of the tile before, beside this one's softmax
                pass_turn(turn, WHO)
                products = warpgroup_mma_wait(1, deps=[products])
                give_back(k_ring, step, STAGES)
                s = scores(products, tile, rows, work, formulas, mask_at, score_at, PARTIAL, form)
                weights, alpha, state = softmax(s, state, unit)
                output, p = warpgroup_mma_wait(0, deps=[output, p])  # the product reads p out of its registers
                give_back(v_ring, step - 1, STAGES)
                output = scaled(output, alpha)
                p = operand(weights, q, output)
                step += 1
        v = take(v_ring, step - 1, form.lanes_v, form, STAGES)
        output = warpgroup_mma(p, v, output, is_async=True)
        output, p = warpgroup_mma_wait(0, deps=[output, p])
        give_back(v_ring, step - 1, STAGES)
    return output, state, step


@gluon.jit
def compute(
    answer,
    queries,
    k_ring,
    v_ring,
    turn,
    work,
    formulas,
    mask_at: gl.constexpr,
    score_at: gl.constexpr,
    WHO: gl.constexpr,
    form: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The rows of one group: O / l copied out of the memory its queries lay in, lse beside."""
    output, lse, tainted, sinks, H, unit = answer
    b, h, block, n = work[0], work[1], work[2], work[3]
    ROWS: gl.constexpr = form.rows // GROUPS
    by_products: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.keys, 16]))
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.lanes_v, 16])
    first = block * form.rows + WHO * ROWS
    rows = first + gl.arange(0, ROWS, by_products)
    lost = gl.zeros([ROWS], gl.float32, by_products)
    total, largest = lost, gl.full([ROWS], float("-inf"), gl.float32, by_products)
    if sinks is not None:
        logit = gl.load(sinks + h) * LOG2_E / unit
        logit = gl.where(logit < float("inf"), gl.minimum(logit, LARGEST), logit)
        total, largest = lost + 1.0, lost + logit.to(gl.float32)
    state = (largest, total, lost)
    found = gl.zeros([ROWS, form.lanes_v], gl.float32, mma)
    mbarrier.wait(queries[1].index(WHO), 0)
    q = queries[0].index(WHO).reshape([ROWS, form.lanes_k])
    step = 0
    for PARTIAL in gl.static_range(2):
        found, state, step = over_runs(
            found,
            state,
            step,
            q,
            k_ring,
            v_ring,
            turn,
            rows,
            work,
            formulas,
            mask_at,
            score_at,
            PARTIAL,
            WHO,
            form,
            STAGES,
        )
    largest, total, lost = state
    nothing = total == 0
    safe = gl.where(nothing, 1.0, total)
    found = scaled(found, 1 / safe)
    stored = queries[0].index(WHO).reshape(output.block_shape)
    q.store(found.to(q.dtype))
    fence_async_shared()
    tma.async_store(output, corner(output, b, h, first), stored)
    base = gl.where(nothing, float("-inf"), largest).to(gl.float64) * unit
    at = (b * H + h).to(gl.int64) * n + rows
    normaliser = base * LN_2 + gl.log(safe.to(gl.float64) + lost.to(gl.float64))
    if sinks is not None:  # one beyond the largest score was taken for the largest
        sink = gl.load(sinks + h)
        normaliser = gl.where(normaliser < sink, sink, normaliser)
    gl.store(lse + at, normaliser, mask=rows < n)
    odd = gl.max(gl.max(gl.where(found == found, 0, 1), 1), 0)
    gl.store(tainted + gl.program_id(0), 1, mask=odd != 0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n", "m", "H", "group", "blocks"])
def forward(
    query,
    key,
    value,
    output,
    lse,
    tainted,
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
    form: gl.constexpr,
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
    q_memory = room(query, GROUPS)
    q_ready, turn = mbarrier.allocate_mbarrier(batch=GROUPS), mbarrier.allocate_mbarrier(batch=GROUPS)
    for who in gl.static_range(GROUPS):
        mbarrier.init(q_ready.index(who), count=1)
        mbarrier.init(turn.index(who), count=1)
    k_ring, v_ring = new_ring(key, STAGES), new_ring(value, STAGES)
    fence_async_shared()  # copies find the barriers made
    queries = (q_memory, q_ready)
    work = (b, h, block, n, m, row, schedule, group)
    formulas = (scale, unit.to(gl.float32), tables)
    answer = (output, lse, tainted, sinks, H, unit)
    gl.warp_specialize(
        [
            (compute, (answer, queries, k_ring, v_ring, turn, work, formulas, mask_at, score_at, 0, form, STAGES)),
            (compute, (answer, queries, k_ring, v_ring, turn, work, formulas, mask_at, score_at, 1, form, STAGES)),
            (load, (query, key, value, queries, k_ring, v_ring, work, form, STAGES)),
        ],
        WORKERS,
        REGISTERS,
    )
