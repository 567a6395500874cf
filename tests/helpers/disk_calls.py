"""Calls of `attention_from_disk` that the tests share: their arrays and formulas, and calls that stop early."""

import numpy as np
import pytest

import sightline
from sightline import i, j, table
from sightline.api.out_of_core import block_plan

N = 330
SIZES = block_plan.BlockSizes(keys=64, queries=100)


def drawn(seed=0, dtype=np.float32, n=N, heads=(4, 2)):
    """Return query, key and value with shared key heads."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(2, number, n, 16)).astype(dtype) for number in (heads[0], heads[1], heads[1])]


def options():
    """Return a mask of a window, two sinks and documents, a score with a table, and sinks."""
    start = sightline.documents(lengths=[150, N - 150])
    rng = np.random.default_rng(1)
    mask = ((i >= j) & (i - j < 90) | (j < 2)) & start
    return {"mask": mask, "score": sightline.s + table(rng.normal(size=N))[j], "sinks": rng.normal(size=4)}


def stop_after(count):
    """Return a function for `progress` that interrupts the call when `count` work items have finished."""

    def report(finished, total):
        if finished == count:
            raise KeyboardInterrupt

    return report


def stopped(folder, arrays=None, count=2, **more):
    """Make a call whose state is saved in the folder when `count` work items have finished."""
    with pytest.raises(KeyboardInterrupt):
        sightline.attention_from_disk(
            *(arrays or drawn()), **(options() | more), checkpoint=folder, progress=stop_after(count)
        )


def continued(folder, arrays=None, **more):
    """Return the output of a call with this checkpoint, and the number of work items that it found finished."""
    finished = []
    output = sightline.attention_from_disk(
        *(arrays or drawn()),
        **(options() | more),
        checkpoint=folder,
        progress=lambda done, total: finished.append(done),
    )
    return output, finished[0]
