"""Print one hash for each of a few hundred drawn problems: output, statistics and gradients, bit for bit.

A change that only moves or renames code leaves every line as it was. Run this script before and after such a change, on
the same machine, and compare the two outputs:

    python tests/helpers/fingerprint.py > before.txt
    python tests/helpers/fingerprint.py > after.txt
    diff before.txt after.txt

Problems are drawn with fixed seeds from the strategies that the tests use. The public interface alone is called.
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
from sightline import b, h, i, j, s, table
from strategies import DTYPES, cases, to_torch

KERNELS = ("cpu", "streaming")


def digest(*arrays: Any) -> str:
    """Return the first 16 digits of the SHA-256 of the arrays' shapes, dtypes and bytes."""
    found = hashlib.sha256()
    for array in arrays:
        if isinstance(array, torch.Tensor):
            array = array.detach().contiguous().view(torch.uint8) if array.ndim else array.detach().reshape(1)
            array = array.numpy()
        array = np.ascontiguousarray(array)
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:16]


def flat(answer: Any) -> list[Any]:
    """Return the arrays of a result of `attention`, in order."""
    if isinstance(answer, tuple):
        return [array for entry in answer for array in flat(entry)]
    return [answer]


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


def gradients(query: Any, key: Any, value: Any, options: dict[str, Any], see: list[Any]) -> list[Any]:
    """Return gradients of a sum over output and statistics, for the inputs and the learned tensors of `options`."""
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    learned = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    output, seen = sightline.attention(*leaves, **options, see=see)
    total = (output.double() * torch.arange(output.numel()).reshape(output.shape).sin()).sum()
    for entry in seen:
        first = entry[0] if isinstance(entry, tuple) else entry
        total = total + first.double().nan_to_num(0.0, 0.0, 0.0).cos().sum()
    found = torch.autograd.grad(total, [*leaves, *learned], allow_unused=True, materialize_grads=True)
    return list(found)


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
            answer = flat(sightline.attention(*case.arrays, **case.options, see=see, kernel=kernel))
            print(dtype, place, kernel, digest(*answer))
        if dtype != "float16" or place % 4 == 0:
            tensors, options = [to_torch(x) for x in case.arrays], dict(case.options)
            if options.get("sinks") is not None:
                options["sinks"] = to_torch(options["sinks"]).requires_grad_()
            for name, one in (("output", []), ("statistics", [sightline.lse(), sightline.entropy()])):
                print(dtype, place, "gradients of", name, digest(*gradients(*tensors, options, one)))

    hashes()


def named() -> None:
    """Hash named problems: learned tables and scale, decoding, a cache, merged parts, statistics of parts."""
    rng = np.random.default_rng(7)

    def tensor(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype)

    for name in DTYPES:
        dtype = getattr(torch, name)
        q, k, v = (
            tensor(2, 4, 70, 24, dtype=dtype),
            tensor(2, 2, 90, 24, dtype=dtype),
            tensor(2, 2, 90, 20, dtype=dtype),
        )
        slopes, bias = tensor(4).abs().requires_grad_(), tensor(4, 181).requires_grad_()
        dense, scale = tensor(4, 70, 90).requires_grad_(), torch.tensor(0.3, requires_grad=True)
        lengths = torch.tensor([90, 31])
        formulas = {
            "alibi": (slopes, {"score": s - table(slopes)[h] * abs(i - j)}),
            "relative": (bias, {"score": s + table(bias)[h, i - j + 90], "mask": j < table(lengths)[b]}),
            "dense": (dense, {"score": s + table(dense)[h, i, j], "mask": sightline.causal("lower right")}),
            "scale": (scale, {"scale": scale}),
            "softcap": (None, {"score": 5.0 * np.tanh(s / 5.0), "mask": sightline.window(17, 3)}),
            "dropout": (None, {"dropout": 0.25, "seed": 11, "mask": i >= j}),
        }
        for title, (learned, options) in formulas.items():
            for see in ([], [sightline.entropy(), sightline.received("sum")]):
                leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
                output, seen = sightline.attention(*leaves, **options, see=see)
                total = sum(x.double().sin().sum() for x in (output, *seen))
                wanted = [*leaves, *([] if learned is None else [learned])]
                print(name, title, len(see), digest(output, *seen, *torch.autograd.grad(total, wanted)))
        query = tensor(2, 4, 1, 24, dtype=dtype)
        long_k, long_v = tensor(2, 2, 1500, 24, dtype=dtype), tensor(2, 2, 1500, 24, dtype=dtype)
        answer = sightline.attention(query, long_k, long_v, mask=j < 1400, see=[sightline.lse()])
        print(name, "decode", digest(*flat(answer)))
        cache = sightline.KVCache(dtype=name)
        cache.append(k, k, lengths=[90, 31])
        print(name, "cache", digest(sightline.attention(query, cache, mask=sightline.causal())))
        parts = [
            sightline.attention(q, k[..., x, :], v[..., x, :], see=[sightline.lse()])
            for x in (slice(40), slice(40, 90))
        ]
        print(name, "merge", digest(*flat(sightline.merge(parts))))
        x = rng.normal(size=(90, 3)).astype(np.float32)
        see = [sightline.weighted_sum(x), sightline.entropy().rows([0, -1]), sightline.weights().heads([1])]
        print(name, "parts", digest(*flat(sightline.attention(q, k, v, mask=i >= j, see=see))))


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
