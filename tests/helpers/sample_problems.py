"""Random arrays of given shapes, and whether a kernel serves the smallest problem with some options."""

import numpy as np

from sightline.call.problem import make_problem
from strategies import DTYPES


def serves(kernel, dtype, **options):
    x = np.zeros((1, 1, 1, 1), DTYPES[dtype])
    return not list(kernel.refuses(make_problem(x, x, x, **options)))


def arrays(shape, dtype, d_v=None, groups=None, m=None, seed=0):
    """Return query (..., H, n, d), key (..., groups, m, d) and value (..., groups, m, d_v); defaults H, n and d."""
    rng = np.random.default_rng(seed)
    *lead, H, n, d = shape
    key = (*lead, groups or H, m or n, d)
    sizes = (shape, key, (*key[:-1], d_v or d))
    return [rng.normal(size=size).astype(DTYPES[dtype]) for size in sizes]
