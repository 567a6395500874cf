"""State that the warps of a program share: rings of tiles in shared memory, the turn of each warpgroup, tile ranges.

A ring has STAGES slots; step t uses slot t mod STAGES. Each slot has two barriers: `ready` signals that the copy of a
tile to the slot is complete, and `free` that both warpgroups have read the tile. One phase of a barrier is one round of
the ring.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

__all__ = [
    *("WARPGROUPS", "Block", "Ring", "allocate_tiles", "block_ranges", "load_tile", "make_ring", "pass_turn"),
    *("range_tiles", "release_tile", "tile_offset", "wait_tile", "wait_turn"),
]

WARPGROUPS = gl.constexpr(2)  # number of warpgroups that compute, of four warps each


class Block(namedtuple("Block", "b h block n m row schedule group")):
    """The block of queries that a program computes.

    `block` is the index of the block in its head, `row` the index of the block's row in the schedule, and `group` the
    number of query heads per key head. `schedule` is a `tile_loop.Schedule`, or None if the block visits all tiles.
    """


class Ring(namedtuple("Ring", "memory ready free")):
    """A ring of tiles of K or of V in shared memory, and the two barriers of each slot."""


@gluon.jit
def block_ranges(block, PARTIAL: gl.constexpr, meta: gl.constexpr):
    """Return (first range, last range + 1) of the full tiles of a block, or of its partial tiles if PARTIAL."""
    if block.schedule is None:
        first = 0
        last = gl.where(block.m % meta.keys != 0, 1, 0) if PARTIAL else gl.where(block.m >= meta.keys, 1, 0)
    else:
        first = gl.load(block.schedule.rows + 3 * block.row + PARTIAL)
        last = gl.load(block.schedule.rows + 3 * block.row + PARTIAL + 1)
    return first, last


@gluon.jit
def range_tiles(block, range_index, PARTIAL: gl.constexpr, meta: gl.constexpr):
    """Return (first tile, last tile + 1) of a tile range; without a schedule, of all full or all partial tiles."""
    if block.schedule is None:
        first = block.m // meta.keys if PARTIAL else 0
        last = block.m // meta.keys + PARTIAL
    else:
        first = gl.load(block.schedule.ranges + 2 * range_index)
        last = gl.load(block.schedule.ranges + 2 * range_index + 1)
    return first, last


@gluon.jit
def allocate_tiles(matrix, COUNT: gl.constexpr):
    """Return newly allocated shared memory for COUNT tiles of a matrix."""
    tile: gl.constexpr = matrix.block_shape
    return gl.allocate_shared_memory(matrix.dtype, [COUNT, tile[0], tile[1], tile[2], tile[3]], matrix.layout)


@gluon.jit
def tile_offset(matrix, b, head, row):
    """Return the offsets of the tile from `row` on, in the order of the descriptor's axes.

    The axes are (b, head, row, column) or (b, row, head, column).
    """
    first, second = head, row
    if matrix.block_shape[1] != 1:
        first, second = row, head
    return b, first, second, 0


@gluon.jit
def make_ring(matrix, STAGES: gl.constexpr):
    """Return a ring with STAGES slots for tiles of K or of V."""
    memory = allocate_tiles(matrix, STAGES)
    ready, free = mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=WARPGROUPS)
    return Ring(memory, ready, free)


@gluon.jit
def load_tile(matrix, b, head, row, ring, step):
    """Start the copy of the tile that begins at `row` of a head, once the ring's slot for this step is free."""
    STAGES: gl.constexpr = ring.memory.shape[0]
    slot = step % STAGES
    mbarrier.wait(ring.free.index(slot), (step // STAGES & 1) ^ 1)  # a new barrier does not block the first round
    mbarrier.expect(ring.ready.index(slot), matrix.nbytes_per_cta)
    tma.async_load(matrix, tile_offset(matrix, b, head, row), ring.ready.index(slot), ring.memory.index(slot))


@gluon.jit
def wait_tile(ring, step, PADDED_WIDTH: gl.constexpr, meta: gl.constexpr):
    """Wait until the copy of the tile of a step is complete, and return the tile."""
    STAGES: gl.constexpr = ring.memory.shape[0]
    slot = step % STAGES
    mbarrier.wait(ring.ready.index(slot), step // STAGES & 1)
    return ring.memory.index(slot).reshape([meta.keys, PADDED_WIDTH])


@gluon.jit
def release_tile(ring, step):
    """Signal that this warpgroup has read the tile of a step."""
    mbarrier.arrive(ring.free.index(step % ring.memory.shape[0]), count=1)


@gluon.jit
def wait_turn(turn, step, WARPGROUP: gl.constexpr):
    """Wait until this warpgroup may multiply Q Kᵀ; warpgroup 0 begins."""
    mbarrier.wait(turn.index(WARPGROUP), (step & 1) ^ (1 - WARPGROUP))


@gluon.jit
def pass_turn(turn, WARPGROUP: gl.constexpr):
    """Signal that the other warpgroup may multiply Q Kᵀ."""
    mbarrier.arrive(turn.index(1 - WARPGROUP), count=1)
