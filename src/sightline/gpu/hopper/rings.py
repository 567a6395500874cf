"""What the warps of a block share: the runs of its row, rings of tiles in shared memory, whose turn it is.

A ring is (memory, barriers ready, barriers free) of `STAGES` places; step t uses place t mod STAGES. `ready` says that
a copy is there, `free` that both groups have read it; each phase of theirs is one round of the ring. `block_info` is
(b, h, block, n, m, first row of the schedule, schedule, heads to a key head); the schedule is `forward.forward`'s.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

__all__ = [
    "GROUPS",
    "allocate_tiles",
    "block_ranges",
    "load_tile",
    "make_ring",
    "pass_turn",
    "range_tiles",
    "release_tile",
    "tile_offset",
    "wait_tile",
    "wait_turn",
]

GROUPS = gl.constexpr(2)  # that compute; four warps each


@gluon.jit
def block_ranges(block_info, PARTIAL: gl.constexpr, meta: gl.constexpr):
    """The first run of a block and the one past the last: of its full tiles, or of those to be masked."""
    m, row, schedule = block_info[4], block_info[5], block_info[6]
    if schedule is None:
        first = 0
        last = gl.where(m % meta.keys != 0, 1, 0) if PARTIAL else gl.where(m >= meta.keys, 1, 0)
    else:
        first = gl.load(schedule[0] + 3 * row + PARTIAL)
        last = gl.load(schedule[0] + 3 * row + PARTIAL + 1)
    return first, last


@gluon.jit
def range_tiles(block_info, range_index, PARTIAL: gl.constexpr, meta: gl.constexpr):
    """The first tile of a run and the one past the last."""
    m, schedule = block_info[4], block_info[6]
    if schedule is None:
        first = m // meta.keys if PARTIAL else 0
        last = m // meta.keys + PARTIAL
    else:
        first = gl.load(schedule[1] + 2 * range_index)
        last = gl.load(schedule[1] + 2 * range_index + 1)
    return first, last


@gluon.jit
def allocate_tiles(matrix, COUNT: gl.constexpr):
    """Memory for that many tiles."""
    tile: gl.constexpr = matrix.block_shape
    return gl.allocate_shared_memory(matrix.dtype, [COUNT, tile[0], tile[1], tile[2], tile[3]], matrix.layout)


@gluon.jit
def tile_offset(matrix, b, head, row):
    """Where a tile of a head's rows begins: an array has heads before rows, or rows before heads."""
    first, second = head, row
    if matrix.block_shape[1] != 1:
        first, second = row, head
    return b, first, second, 0


@gluon.jit
def make_ring(matrix, STAGES: gl.constexpr):
    """Room for `STAGES` tiles of keys or values."""
    memory = allocate_tiles(matrix, STAGES)
    ready, free = mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    return memory, ready, free


@gluon.jit
def load_tile(matrix, b, head, row, ring, step, STAGES: gl.constexpr):
    """Ask for the tile that begins at that row of a head, as soon as its place in the ring is free."""
    memory, ready, free = ring
    slot = step % STAGES
    mbarrier.wait(free.index(slot), (step // STAGES & 1) ^ 1)  # a fresh barrier lets the first round pass
    mbarrier.expect(ready.index(slot), matrix.nbytes_per_cta)
    tma.async_load(matrix, tile_offset(matrix, b, head, row), ready.index(slot), memory.index(slot))


@gluon.jit
def wait_tile(ring, step, PADDED_WIDTH: gl.constexpr, meta: gl.constexpr, STAGES: gl.constexpr):
    """The tile of this step, waited for."""
    memory, ready, _ = ring
    slot = step % STAGES
    mbarrier.wait(ready.index(slot), step // STAGES & 1)
    return memory.index(slot).reshape([meta.keys, PADDED_WIDTH])


@gluon.jit
def release_tile(ring, step, STAGES: gl.constexpr):
    """Say that this group has read the tile of this step."""
    mbarrier.arrive(ring[2].index(step % STAGES), count=1)


@gluon.jit
def wait_turn(turn, step, WARPGROUP: gl.constexpr):
    """Until it is this group's turn to multiply; group 0 begins."""
    mbarrier.wait(turn.index(WARPGROUP), (step & 1) ^ (1 - WARPGROUP))


@gluon.jit
def pass_turn(turn, WARPGROUP: gl.constexpr):
    """The other group may multiply."""
    mbarrier.arrive(turn.index(1 - WARPGROUP), count=1)
