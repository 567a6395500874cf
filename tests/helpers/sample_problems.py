"""Random arrays of given shapes, named problems, and whether a kernel serves the smallest problem with some options."""

import numpy as np

from sightline import alibi, causal, documents, h, i, j, padding, s, softcap, table, window
from sightline.call.problem import make_problem
from strategies import DTYPES

PROBLEMS = {  # by name: the arguments of `arrays`, and the options of the problem
    "odd sizes": ({"shape": (1, 2, 131, 23), "d_v": 17, "m": 67}, {}),
    "shared heads, causal": ({"shape": (2, 4, 70, 64), "groups": 2, "m": 75}, {"mask": causal("lower right")}),
    "decoding": ({"shape": (2, 4, 1, 64), "groups": 1, "m": 513}, {"mask": padding([513, 130])}),
    "window, soft cap, sinks": (
        {"shape": (1, 2, 150, 16)},
        {"mask": window(40, 3), "score": softcap(5.0), "sinks": np.array([0.5, -2.0])},
    ),
    "packed, slopes": ({"shape": (1, 3, 90, 8)}, {"mask": documents(lengths=[1, 40, 0, 49]), "score": alibi(3)}),
    "tables, library functions": (
        {"shape": (1, 2, 60, 32), "m": 81},
        {
            "mask": table(np.arange(7) % 3 > 0)[(i * j) % 7],
            "score": s + table(np.linspace(-1, 1, 10).reshape(2, 5))[h, (i - j) % 5] + np.sin(i - j) - abs(s) ** 1.5,
        },
    ),
}


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
