"""What the warps of a block share: the runs of its row, rings of tiles in shared memory, whose turn it is.

A ring is (memory, barriers ready, barriers free) of `STAGES` places; step t uses place t mod STAGES. `ready` says that
a copy is there, `free` that both groups have read it; each phase of theirs is one round of the ring. `work` is
(b, h, block, n, m, first row of the schedule, schedule, heads to a key head); the schedule is `forward.forward`'s.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

__all__ = [
    "GROUPS",
    "corner",
    "give_back",
    "new_ring",
    "pass_turn",
    "put",
    "room",
    "runs_of",
    "take",
    "tiles_of",
    "wait_turn",
]

GROUPS = gl.constexpr(2)  # that compute; four warps each


@gluon.jit
def runs_of(work, PARTIAL: gl.constexpr, form: gl.constexpr):
    """The first run of a block and the one past the last: of its full tiles, or of those to be masked."""
    m, row, schedule = work[4], work[5], work[6]
    if schedule is None:
        first = 0
        last = gl.where(m % form.keys != 0, 1, 0) if PARTIAL else gl.where(m >= form.keys, 1, 0)
    else:
        first = gl.load(schedule[0] + 3 * row + PARTIAL)
        last = gl.load(schedule[0] + 3 * row + PARTIAL + 1)
    return first, last


@gluon.jit
def tiles_of(work, run, PARTIAL: gl.constexpr, form: gl.constexpr):
    """The first tile of a run and the one past the last."""
    m, schedule = work[4], work[6]
    if schedule is None:
        first = m // form.keys if PARTIAL else 0
        last = m // form.keys + PARTIAL
    else:
        first = gl.load(schedule[1] + 2 * run)
        last = gl.load(schedule[1] + 2 * run + 1)
    return first, last


@gluon.jit
def room(matrix, COUNT: gl.constexpr):
    """Memory for that many tiles."""
    tile: gl.constexpr = matrix.block_shape
    return gl.allocate_shared_memory(matrix.dtype, [COUNT, tile[0], tile[1], tile[2], tile[3]], matrix.layout)


@gluon.jit
def corner(matrix, b, head, row):
    """Where a tile of a head's rows begins: an array has heads before rows, or rows before heads."""
    first, second = head, row
    if matrix.block_shape[1] != 1:
        first, second = row, head
    return b, first, second, 0


@gluon.jit
def new_ring(matrix, STAGES: gl.constexpr):
    """Room for `STAGES` tiles of keys or values."""
    memory = room(matrix, STAGES)
    ready, free = mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    return memory, ready, free


@gluon.jit
def put(matrix, b, head, row, ring, step, STAGES: gl.constexpr):
    """Ask for the tile that begins at that row of a head, as soon as its place in the ring is free."""
    memory, ready, free = ring
    place = step % STAGES
    mbarrier.wait(free.index(place), (step // STAGES & 1) ^ 1)  # a fresh barrier lets the first round pass
    mbarrier.expect(ready.index(place), matrix.nbytes_per_cta)
    tma.async_load(matrix, corner(matrix, b, head, row), ready.index(place), memory.index(place))


@gluon.jit
def take(ring, step, LANES: gl.constexpr, form: gl.constexpr, STAGES: gl.constexpr):
    """The tile of this step, waited for."""
    memory, ready, _ = ring
    place = step % STAGES
    mbarrier.wait(ready.index(place), step // STAGES & 1)
    return memory.index(place).reshape([form.keys, LANES])


@gluon.jit
def give_back(ring, step, STAGES: gl.constexpr):
    """Say that this group has read the tile of this step."""
    mbarrier.arrive(ring[2].index(step % STAGES), count=1)


@gluon.jit
def wait_turn(turn, step, WHO: gl.constexpr):
    """Until it is this group's turn to multiply; group 0 begins."""
    mbarrier.wait(turn.index(WHO), (step & 1) ^ (1 - WHO))


@gluon.jit
def pass_turn(turn, WHO: gl.constexpr):
    """The other group may multiply."""
    mbarrier.arrive(turn.index(1 - WHO), count=1)
