"""Hashes of the arguments of a call, which tell whether a saved state belongs to the call."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

from ...arrays.operations import drop_repeats, to_numpy
from ...formula.expression import Expression
from ...problem.problem import Problem
from .block_plan import WorkItem

HASH_BYTES = 32
HASHED_ELEMENTS = 1 << 16  # of an array that are copied and hashed at once
BLOCKS = "memory_limit, or output given or not"  # what the work items depend on beside the other arguments


def hash_arguments(problem: Problem, sources: dict[str, Any], items: list[WorkItem]) -> dict[str, bytes]:
    """Return a hash of each argument that the result depends on.

    The hashes of key and value are of shape and dtype. `hash_block` hashes their entries as they are read.
    """
    shapes = {name: [tuple(map(int, array.shape)), str(array.dtype), sys.byteorder] for name, array in sources.items()}
    return {
        "query": _hash(*shapes["query"], sources["query"]),
        "key": _hash(*shapes["key"]),
        "value": _hash(*shapes["value"]),
        "mask or score": _hash(*_parts_of_formula(problem.mask), *_parts_of_formula(problem.score)),
        "scale": _hash(problem.scale),
        "sinks": _hash(None if problem.sinks is None else to_numpy(problem.sinks)[:, None]),
        "dropout": _hash(problem.dropout, problem.dropout_origin),
        "seed": _hash(problem.seed),
        BLOCKS: _hash(*[(item.queries, item.keys) for item in items]),
    }


def hash_block(previous: bytes, block: Any) -> bytes:
    """Return the hash of a block of keys or values and of all blocks before it, whose hash is `previous`."""
    return _hash(previous, block)


def _parts_of_formula(formula: Expression | None) -> list[Any]:
    """Return the text of a formula, and the entries of its tables in the order in which the text counts them."""
    if formula is None:
        return [None]
    tables = [np.atleast_2d(to_numpy(drop_repeats(table.array))) for table in formula.tables]
    return [formula.text, *tables]


def _hash(*parts: Any) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        if len(getattr(part, "shape", ())) > 1:
            _add_array(found, part)
        else:
            found.update(f"{part!r}\n".encode())
    return found.digest()


def _add_array(found: Any, array: Any) -> None:
    """Hash dtype, shape and entries of an array of two or more axes, some positions at a time."""
    *outer, positions, width = array.shape
    found.update(f"{array.dtype} {tuple(array.shape)}\n".encode())
    step = max(HASHED_ELEMENTS // max(int(np.prod(outer, dtype=np.int64)) * width, 1), 1)
    for start in range(0, positions, step):
        part = np.ascontiguousarray(array[..., start : start + step, :])
        found.update(part.reshape(-1).view(np.uint8).data)
