"""Print one hash for each of a few hundred drawn problems: output, statistics and gradients, bit for bit.

A change that only moves or renames code leaves every line as it was. Run this script before and after such a change, on
the same machine, and compare the two outputs:

    python tests/helpers/fingerprint.py > before.txt
    python tests/helpers/fingerprint.py > after.txt
    diff before.txt after.txt

Problems are drawn with fixed seeds from what the tests draw from. The public interface alone is called.
"""

from __future__ import annotations

import argparse
import hashlib
import warnings
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import sightline
from sample_calls import KINDS, all_bits, draw_inputs
from sightline import i, j
from strategies import DTYPES, cases, to_torch

KERNELS = ("cpu", "streaming")


def digest(answer: Any) -> str:
    """Return the first 16 digits of the SHA-256 of the shapes and bytes of a result, or of (result, other results)."""
    return hashlib.sha256(repr(all_bits(answer)).encode()).hexdigest()[:16]


def statistics(queries: int, keys: int) -> list[Any]:
    """Return one statistic of each kind that a problem of these lengths allows."""
    see = [
        sightline.lse(),
        sightline.max_score(),
        sightline.entropy(),
        sightline.mass(i - j < 3),
        sightline.top_k(3),
        sightline.received("mean"),
        sightline.received("max"),
        sightline.weights(),
        sightline.entropy().mean("heads"),
    ]
    return see + ([sightline.pooled(min(queries, 3), min(keys, 5))] if queries and keys else [])


def gradients(arrays: Any, learned: list[Any], see: list[Any], **options: Any) -> tuple[Any, Any]:
    """Return the gradients of a sum over output and statistics, for the arrays and the learned tensors in `options`."""
    leaves = [x.detach().clone().requires_grad_() for x in arrays]
    output, seen = sightline.attention(*leaves, **options, see=see)
    total = (output.double() * torch.arange(output.numel()).reshape(output.shape).sin()).sum()
    for entry in seen:
        first = entry[0] if isinstance(entry, tuple) else entry
        total = total + first.double().nan_to_num(0.0, 0.0, 0.0).cos().sum() if first.requires_grad else total
    first, *others = torch.autograd.grad(total, [*leaves, *learned], allow_unused=True, materialize_grads=True)
    return first, others


def drawn(count: int, dtype: str) -> None:
    """Hash drawn problems of one dtype."""
    place = 0

    @seed(20170612)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(dtypes=(dtype,)))
    def hashes(case: Any) -> None:
        nonlocal place
        place += 1
        see = statistics(case.query.shape[-2], case.key.shape[-2])
        for kernel in KERNELS:
            answer = sightline.attention(*case.arrays, **case.options, see=see, kernel=kernel)
            print(dtype, place, kernel, digest(answer))
        if dtype != "float16" or place % 4 == 0:
            case = case.as_torch()
            learned = [case.options["sinks"].requires_grad_()] if case.options.get("sinks") is not None else []
            for name, one in (("output", []), ("statistics", [sightline.lse(), sightline.entropy()])):
                print(dtype, place, "gradients of", name, digest(gradients(case.arrays, learned, one, **case.options)))

    hashes()


def named() -> None:
    """Hash calls of every kind with learned tables, a learned scale, decoding, a cache, merged parts and selections."""
    rng = np.random.default_rng(7)
    for name in DTYPES:
        q, k, v, one, long_k, long_v = (
            torch.from_numpy(rng.normal(size=(2, *shape))).to(getattr(torch, name))
            for shape in ((4, 70, 24), (2, 90, 24), (2, 90, 20), (4, 1, 24), (2, 1500, 24), (2, 1500, 24))
        )
        for kind in KINDS:
            learned: list[Any] = []

            def to_table(array: Any, learned: list[Any] = learned) -> Any:
                tensor = to_torch(np.array(array))
                learned += [tensor.requires_grad_()] if tensor.is_floating_point() else []
                return tensor

            options = {"see": [sightline.entropy()], **draw_inputs(rng, kind, 2, 4, 70, 90, to_table)}
            print(name, kind, digest(sightline.attention(q, k, v, **options)))
            print(name, kind, "gradients", digest(gradients((q, k, v), learned, **options)))
        scale = torch.tensor(0.3, requires_grad=True)
        print(name, "scale", digest(gradients((q, k, v), [scale], [sightline.lse()], scale=scale)))
        print(name, "decode", digest(sightline.attention(one, long_k, long_v, mask=j < 1400, see=[sightline.lse()])))
        cache = sightline.KVCache(dtype=name)
        cache.append(k, k, lengths=[90, 31])
        print(name, "cache", digest(sightline.attention(q, cache, mask=sightline.causal())))
        spans = slice(40), slice(40, 90)
        merged = sightline.merge(
            [sightline.attention(q, k[..., x, :], v[..., x, :], see=[sightline.lse()]) for x in spans]
        )
        print(name, "merge", digest((merged[0], merged[1:])))
        x = rng.normal(size=(90, 3)).astype(np.float32)
        see = [sightline.weighted_sum(x), sightline.entropy().rows([0, -1]), sightline.weights().heads([1])]
        print(name, "parts", digest(sightline.attention(q, k, v, mask=i >= j, see=see)))


def main() -> None:
    """Parse the number of drawn problems and print all hashes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=60, help="drawn problems of each dtype (default 60)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    named()
    for dtype in DTYPES:
        drawn(options.problems, dtype)


if __name__ == "__main__":
    main()
