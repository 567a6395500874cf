"""The check that all ranks make the same call: one short exchange before anything else is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...arrays.operations import dtype_name, needs_gradient, to_numpy
from ...call.validation import to_float
from ...errors import RankError
from ...formula.expression import Expression
from .group import Group

DIGEST_WORDS = 2


def describe_array(array: Any) -> str:
    """Return dtype, shape and a digest of the entries of an array."""
    array = array if hasattr(array, "dtype") else np.asarray(array)
    entries = to_numpy(array)
    if dtype_name(array) == "bfloat16":  # `to_numpy` widens tensors alone
        entries = entries.astype(np.float32)
    return f"{dtype_name(array)}{list(array.shape)} with the digest {_digest(entries.tobytes())}"


def describe_shard(name: str, x: Tensor, axis: int) -> dict[str, str]:
    """Return dtype, shape, device and requires_grad of a tensor as texts by name. The length on `axis` is left out."""
    shape: list[Any] = list(x.shape)
    shape[axis] = "positions"
    kind = f"{dtype_name(x)}{shape} on {x.device.type}"
    return {name: kind, f"requires_grad of {name}": str(needs_gradient(x))}


def describe_number(number: Any) -> str:
    """Return a number with all its digits; "None" for None."""
    return "None" if number is None else repr(to_float(number.detach() if isinstance(number, Tensor) else number))


def describe_formula(formula: Expression | None) -> str:
    """Return a formula, the digest of its text, and the descriptions of its tables.

    `repr` of a formula rounds numbers and is cut after some hundred characters. The text behind the digest is exact.
    """
    if formula is None:
        return "None"
    parts = [f"{formula!r} with the digest {_digest(formula.text.encode())}"]
    for table in formula.tables:
        batch = "" if table.batch_axes is None else f" of the batch axes {list(table.batch_axes.shape)}"
        parts.append(describe_array(table.array) + (f" for {table.axes}{batch}" if table.axes else ""))
    return "; ".join(parts)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def agree(group: Group, describe: Callable[[], tuple[tuple[int, ...], dict[str, str]]], like: Any) -> list[list[int]]:
    """Return four integers of each rank: its numbers, then zeros. Check that the ranks agree on everything else.

    describe : returns at most four integers, which may differ from rank to rank, and texts by name, which must not
    like : a tensor on the device of the tensors that are exchanged; any other object stands for the CPU

    If `describe` raises an error on a rank, or descriptions differ, every rank raises: its own error, or RankError.
    """
    failure: Exception | None = None
    try:
        numbers, description = describe()
    except Exception as error:
        failure, numbers, description = error, (), {}
    digest = hashlib.blake2b(repr(description).encode(), digest_size=8 * DIGEST_WORDS).digest()
    words = [int.from_bytes(digest[k : k + 8], "little", signed=True) for k in range(0, len(digest), 8)]
    device, padding = like.device if isinstance(like, Tensor) else "cpu", [0] * (4 - len(numbers))
    message = torch.tensor([failure is not None, *words, *numbers, *padding], dtype=torch.int64, device=device)
    messages = [row.tolist() for row in group.exchange(message, "the description of the call")]
    if any(row[0] or row[: 1 + DIGEST_WORDS] != messages[0][: 1 + DIGEST_WORDS] for row in messages):
        _raise_difference(group, failure, description)
    return [row[1 + DIGEST_WORDS :] for row in messages]


def _describe_error(error: Exception) -> str:
    """Return the text of an error, or the name of its class if `str` of the error fails."""
    try:
        return f"{error}"
    except Exception:
        return type(error).__name__


def _raise_difference(group: Group, failure: Exception | None, description: dict[str, str]) -> None:
    """Raise the error of this rank, or an error that says what another rank does differently."""
    answer = None if failure is None else _describe_error(failure), description
    answers = group.exchange_objects(answer, "the descriptions that differ")
    if failure is not None:
        raise failure
    for rank, (text, _) in enumerate(answers):
        if text is not None:
            given = f"rank {rank} raised: {text}"
            raise RankError(given, "a valid call on every rank", f"mend the call of rank {rank}")
    first = answers[0][1]
    for rank, (_, other) in enumerate(answers):
        for name in first | other:
            if first.get(name) != other.get(name):
                given = f"{name} differs: rank 0 has {first.get(name)}, rank {rank} has {other.get(name)}"
                allowed = "the same call on every rank; only the numbers of positions may differ"
                raise RankError(given, allowed, f"pass the same {name} on every rank")
