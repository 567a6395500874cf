"""The decoding kernel's call: the keys cut into parts, and the parts' answers joined."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import empty, layout, namespace, resolve, to_numpy
from ..problem import Problem
from .arguments import DECODE, pack
from .block import KEYS
from .call import Inputs, kernel_of, structure_of
from .decode import ROWS, TOGETHER, Decode
from .processor import Processor

__all__ = ["decode", "decodes"]

ITEMS = 16  # pieces of work wanted, whatever the number of threads
LEAST = 8 * KEYS  # keys worth a part of their own


def decodes(problem: Problem, processor: Processor) -> bool:
    """Whether few queries look at many keys, in rows of whole vectors and the same ones for all heads."""
    lanes = processor.machine.width // (8 if problem.dtype == "float64" else 4)
    paired = problem.dtype == "bfloat16" and processor.machine.bf16_dot
    units = all(layout(x)[1][-1] == x.itemsize for x in (problem.key, problem.value))
    whole = problem.d_k % (lanes * (1 + paired)) == 0 and problem.d_v % lanes == 0
    shared = problem.mask is None or "h" not in problem.mask.reads
    return problem.n <= ROWS and problem.m >= LEAST and not problem.dropout and whole and units and shared


def decode(problem: Problem, output: Any, lse: Any, threads: int, processor: Processor) -> bool:
    """Fill output and lse; False where an output is NaN or ∞, which the forward kernel sorts out."""
    inputs = Inputs(problem, ROWS)
    rows = problem.group * problem.n
    structure = structure_of("decode", problem, inputs, together=min(rows, TOGETHER))
    batches, blocks = -(-rows // ROWS), -(-problem.m // KEYS)
    apart = problem.B * problem.G * batches
    chunk = -(-blocks // min(-(-ITEMS // apart), -(-problem.m // LEAST)))
    parts = -(-blocks // chunk)
    found = empty((parts, *output.shape), problem.accumulator, problem.query)
    normalisers, taint = np.empty((parts, *lse.shape)), np.zeros(1, np.int64)
    fields = inputs.fields(structure) | {
        "items": apart * parts,
        "query_blocks": 1,
        "lse": inputs.address(normalisers),
        "output": layout(found)[0],
        "taint": inputs.address(taint),
        "batches": problem.B,
        "chunks": parts,
        "chunk": chunk,
    }
    words = pack(DECODE, fields, inputs.table_words())
    kernel = kernel_of(structure, inputs, Decode, processor)
    processor.call(kernel, words, min(threads, apart * parts), (*inputs.kept, found))
    if taint[0]:
        return False
    join(problem, found, normalisers, output, lse)
    return True


def join(problem: Problem, parts: Any, normalisers: Any, output: Any, lse: Any) -> None:
    """output = Σ exp(lse_p − lse) output_p with lse = ln Σ exp lse_p, the sink counted."""
    if problem.sinks is not None:
        sinks = np.broadcast_to(to_numpy(problem.sinks).astype(np.float64)[:, None], lse.shape)
        normalisers = np.concatenate([normalisers, sinks[None]])
    largest = normalisers.max(axis=0)
    shares = np.exp(normalisers - np.where(largest == -np.inf, 0.0, largest))
    total = shares.sum(axis=0)
    nothing = total == 0
    with np.errstate(divide="ignore"):
        lse[...] = np.where(nothing, -np.inf, largest + np.log(total))
    shares /= np.where(nothing, 1.0, total)
    xp = namespace(output)
    weights = resolve(xp, problem.accumulator)
    whole = parts[0] * xp.astype(xp.asarray(shares[0]), weights)[..., None]
    for part, share in zip(parts[1:], shares[1 : len(parts)], strict=True):
        whole = whole + part * xp.astype(xp.asarray(share), weights)[..., None]
    output[...] = xp.astype(whole, output.dtype)
