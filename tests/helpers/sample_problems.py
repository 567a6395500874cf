"""Random arrays of a given shape, and the smallest problem that asks whether a kernel serves it."""

import numpy as np

from sightline.problem import make_problem
from strategies import DTYPES


def probe(dtype, **options):
    x = np.zeros((1, 1, 1, 1), DTYPES[dtype])
    return make_problem(x, x, x, **options)


def serves(kernel, dtype, **options):
    return not list(kernel.refuses(probe(dtype, **options)))


def arrays(shape, dtype, d_v=None, groups=None, m=None, seed=0):
    """Query (..., H, n, d), key and value with their own heads, keys and width."""
    rng = np.random.default_rng(seed)
    *lead, H, n, d = shape
    key = (*lead, groups or H, m or n, d)
    sizes = (shape, key, (*key[:-1], d_v or d))
    return [rng.normal(size=size).astype(DTYPES[dtype]) for size in sizes]
