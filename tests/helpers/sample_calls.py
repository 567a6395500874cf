"""Calls of many kinds whose contents are drawn anew at each call, and the bytes of their results."""

import numpy as np
import torch

import sightline
from sightline import b, h, i, j, s, table


def arrays(rng, shapes=((1, 2, 9, 8),) * 3, dtype=np.float32):
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def tensors(rng, **options):
    return [torch.from_numpy(x).requires_grad_(**options) if options else torch.from_numpy(x) for x in arrays(rng)]


def decoding_arrays(rng, m=700, dtype=np.float32, H=4, G=2):
    """A query of one token, and m keys and values."""
    return arrays(rng, ((1, H, 1, 64), (1, G, m, 64), (1, G, m, 64)), dtype)


def bits(array):
    """The array's bytes in C order, for arrays of NumPy and torch."""
    if isinstance(array, torch.Tensor):
        array = array.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(array).tobytes()


def all_bits(answer):
    """The shape and the bytes of each array of an answer."""
    output, seen = answer if isinstance(answer, tuple) else (answer, ())
    found = [output, *[x for entry in seen for x in (entry if isinstance(entry, tuple) else (entry,))]]
    return [(tuple(x.shape), bits(x)) for x in found]


def draw_inputs(rng, kind, B, H, n, m, to_table=np.asarray):
    """Options of a call whose contents are drawn anew at each call, with one structure for each kind.

    The numbers of one call differ: two equal numbers would be one number of the structure.
    """

    def read(array):
        return table(to_table(array))

    ids = np.sort(rng.integers(0, 4, (B, max(n, m))), axis=1)
    bias = rng.normal(size=(1, H, n, m)).astype(np.float32)
    return {
        "padding": lambda: {"mask": sightline.padding(to_table(rng.integers(0, m + 1, B)))},
        "padding of another dtype": lambda: {
            "mask": sightline.padding(to_table(rng.integers(0, m + 1, B).astype(np.uint8)))
        },
        "documents": lambda: {"mask": (i >= j) & (read(ids)[b, i] == read(ids)[b, j])},
        "boolean array": lambda: {"mask": to_table(rng.random((B, 1, n, m)) < 0.7)},
        "a row of booleans": lambda: {"mask": to_table(rng.random((B, 1, 1, m)) < 0.7)},
        "function": lambda: {"mask": lambda b, h, i, j: (i >= j) | (j < 3)},
        "bias": lambda: {"score": sightline.bias(to_table(bias))},
        "bias that hides": lambda: {
            "score": sightline.bias(to_table(np.where(rng.random(bias.shape) < 0.3, -np.inf, bias)))
        },
        "slopes": lambda: {"score": sightline.alibi(rng.random(H)), "mask": i >= j},
        "window": lambda: {"mask": sightline.window(int(rng.integers(10, 50)), int(rng.integers(2, 9)))},
        "cap": lambda: {
            "score": sightline.softcap(float(rng.random() * 9 + 2)),
            "mask": i - j < int(rng.integers(2, 9)),
        },
        "table of floats in half": lambda: {"score": s + read(rng.random((H, 7)).astype(np.float16))[h, (i - j) % 7]},
        "sinks": lambda: {"sinks": to_table(rng.normal(size=H).astype(np.float32)), "mask": i >= j},
        "dropout": lambda: {"dropout": 0.3, "seed": int(rng.integers(2**63, 2**64, dtype=np.uint64))},
        "statistics of a weights pass": lambda: {
            "see": [
                *(sightline.top_k(3), sightline.received(), sightline.entropy(), sightline.received(how="max")),
                *(sightline.pooled(min(n, 3), min(m, 2)), sightline.weights(), sightline.lse(), sightline.max_score()),
            ],
            "mask": sightline.padding(to_table(rng.integers(0, m + 1, B))),
        },
        "statistics": lambda: {"see": [sightline.entropy(), sightline.max_score(), sightline.lse()], "mask": i >= j},
        "means of a weights pass": lambda: {
            "see": [sightline.received().mean("heads"), sightline.pooled(min(n, 3), 1, "max").mean("batch")],
            "mask": i - j < int(rng.integers(2, 9)),
        },
        "mass and means": lambda: {
            "see": [
                *(sightline.mass(read(ids)[b, j] < 2), sightline.max_score(), sightline.entropy().mean("heads")),
                *(sightline.mass(i - j < int(rng.integers(3, 9))).mean("batch"), sightline.lse().mean("heads")),
            ],
            "mask": (i >= j) | (j < int(rng.integers(10, 20))),
            "score": sightline.bias(to_table(bias)),
        },
        "everything": lambda: {
            "mask": (j < read(rng.integers(1, m + 1, B))[b]) & (i - j < int(rng.integers(2, 99))),
            "score": s * read(rng.random(H))[h] + float(rng.random() + 2),
            "sinks": rng.normal(size=H),
            "dropout": 0.2,
            "seed": int(rng.integers(2**31)),
        },
    }[kind]()


KINDS = (
    *("padding", "padding of another dtype", "documents", "boolean array", "a row of booleans", "function", "bias"),
    *("bias that hides", "slopes", "window", "cap", "table of floats in half", "sinks", "dropout", "statistics"),
    *("statistics of a weights pass", "means of a weights pass", "mass and means", "everything"),
)
