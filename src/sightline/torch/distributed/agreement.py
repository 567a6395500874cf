"""The check that all ranks make the same call: one short exchange before anything else is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...arrays import to_numpy
from ...errors import RankError
from ...formula.expression import Expression
from .group import Group

__all__ = ["agree", "describe_array", "describe_formula"]

DIGEST_WORDS = 2


def describe_array(array: Any) -> str:
    """Return dtype, shape and a digest of the entries of an array."""
    own = array.detach().cpu() if isinstance(array, Tensor) else array
    if isinstance(own, Tensor) and own.dtype == torch.bfloat16:
        own = own.float()
    numbers = to_numpy(own)
    digest = hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()
    return f"{numbers.dtype}{list(numbers.shape)} with the digest {digest}"


def describe_formula(formula: Expression | None) -> str:
    """Return the text of a formula and the descriptions of its tables."""
    if formula is None:
        return "None"
    tables = [describe_array(table.array) for table in formula.tables]
    return f"{formula!r}" + (f" with {'; '.join(tables)}" if tables else "")


def agree(group: Group, describe: Callable[[], tuple[tuple[int, ...], dict[str, str]]], device: Any) -> list[list[int]]:
    """Return the numbers that the ranks passed, (ranks, numbers), if they agree on everything else.

    Parameters
    ----------
    describe : function that returns (numbers, description)
        The numbers may differ from rank to rank. The description of the call, by name, must be equal on all ranks.
    device : the device of the tensors that are exchanged

    Raises
    ------
    Exception
        That of `describe` on this rank.
    RankError
        `describe` raised an error on another rank, or descriptions differ. Every rank raises.
    """
    failure: Exception | None = None
    numbers: tuple[int, ...] = ()
    description: dict[str, str] = {}
    try:
        numbers, description = describe()
    except Exception as error:
        failure = error
    digest = hashlib.blake2b(repr(description).encode(), digest_size=8 * DIGEST_WORDS).digest()
    words = [int.from_bytes(digest[k : k + 8], "little", signed=True) for k in range(0, len(digest), 8)]
    own = torch.zeros(1 + DIGEST_WORDS + 4, dtype=torch.int64)
    own[: 1 + DIGEST_WORDS + len(numbers)] = torch.tensor([failure is not None, *words, *numbers])
    found = [row.tolist() for row in group.exchange(own.to(device), "the description of the call")]
    if any(row[0] or row[: 1 + DIGEST_WORDS] != found[0][: 1 + DIGEST_WORDS] for row in found):
        _raise_difference(group, failure, description)
    return [row[1 + DIGEST_WORDS :] for row in found]


def _raise_difference(group: Group, failure: Exception | None, description: dict[str, str]) -> None:
    """Raise the error of this rank, or an error that says what another rank does differently."""
    answers = group.exchange_objects((None if failure is None else f"{failure}", description))
    if failure is not None:
        raise failure
    for rank, (text, _) in enumerate(answers):
        if text is not None:
            raise RankError(
                f"rank {rank} raised: {text}", "a valid call on every rank", f"mend the call of rank {rank}"
            )
    first = answers[0][1]
    for rank, (_, other) in enumerate(answers):
        for name in first | other:
            if first.get(name) != other.get(name):
                raise RankError(
                    f"{name} differs: rank 0 has {first.get(name)}, rank {rank} has {other.get(name)}",
                    "the same call on every rank; only the numbers of positions may differ",
                    f"pass the same {name} on every rank",
                )
