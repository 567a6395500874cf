"""The saved state of a call that was interrupted: the results so far, and the number of finished work items.

Hashes of the arguments tell whether a saved state belongs to a call.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ...arrays.operations import drop_repeats, to_numpy
from ...errors import ParameterError
from ...formula.expression import Expression
from ...problem.problem import Problem
from ...statistics import Statistic
from .block_plan import WorkItem
from .locked_file import LockedFile

FILE_NAME = "attention.state"
MARK = b"sightline state3"  # the number changes with the meaning of a saved state
HEADER_BYTES = 4096  # the size of each copy's header
HASH_BYTES = 32
HASHED_ELEMENTS = 1 << 16  # the elements of an array that are copied and hashed at once
BLOCKS = "memory_limit, or output given or not"  # what the work items depend on besides the other arguments
COPIES = 2  # while one copy is written, the other copy has the previous state
NUMBERS = struct.Struct(f"<{len(MARK)}sQ{HASH_BYTES}s{HASH_BYTES}s{HASH_BYTES}s")
NOTHING_READ = (bytes(HASH_BYTES), bytes(HASH_BYTES))


@dataclass
class State:
    """The merged results of the finished work items. All arrays have a head axis.

    output : (*batch_shape, H, n, d_v), in the accumulator's dtype
    lse : (*batch_shape, H, n) float64
    seen : the arrays of each statistic other than lse, in float64 and int64
    finished : the number of finished work items
    read : the hashes of the blocks of keys and of values that the finished work items have read
    """

    output: Any
    lse: Any
    seen: list[list[Any]]
    finished: int = 0
    read: tuple[bytes, bytes] = NOTHING_READ

    @property
    def arrays(self) -> list[Any]:
        return [self.output, self.lse, *[array for own in self.seen for array in own]]


@dataclass(frozen=True)
class _Header:
    """The header of one copy of the state."""

    finished: int
    read: tuple[bytes, bytes]
    checksum: bytes  # the hash of the arrays
    arguments: bytes  # the hashes of the arguments, joined

    def pack(self) -> bytes:
        fields = NUMBERS.pack(MARK, self.finished, *self.read, self.checksum) + self.arguments
        return fields + hashlib.sha256(fields).digest()


class Checkpoint:
    """The file with the state of one call, while the call has the file open and locked.

    The file stores two copies of the state. Its first bytes are the two headers, of `HEADER_BYTES` each. The arrays of
    the first copy follow, and then the arrays of the second copy. `save` replaces the older copy and writes its header
    last, so the newer copy is complete at any time. Checksums cover every byte that is read.

    Parameters
    ----------
    folder : the folder of the file; it is created if it does not exist
    arguments : the hash of each argument of the call
    items : the number of work items of the call
    """

    def __init__(self, folder: Any, arguments: dict[str, bytes], items: int) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise ParameterError(f"checkpoint={folder!r}", "the path of a folder", 'checkpoint="state"')
        self.folder, self.arguments, self.items = Path(folder), arguments, items
        self.path = self.folder / FILE_NAME
        self.copy = COPIES - 1  # the copy that holds the newest state
        self.is_kept = True  # False if the file is known to hold no state
        if self.folder.exists() and not self.folder.is_dir():
            raise ParameterError(f"checkpoint={str(folder)!r}, a file", "a folder", 'checkpoint="state"')
        self._make_folder()
        self.file = LockedFile(self.path, "checkpoint")

    def _make_folder(self) -> None:
        os.makedirs(os.path.realpath(self.folder), exist_ok=True)  # `mkdir` of a link without a folder would fail

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_kept:
            self.file.remove()
        self.file.close()

    def load(self, state: State) -> None:
        """Read the newest complete state, if there is one, into `state`. Then reserve disk space for both copies.

        Raises
        ------
        ParameterError
            The state belongs to other arguments, or no copy of it is complete.
        OSError
            The disk has no space for both copies.
        """
        stored = [bytearray(HEADER_BYTES) for _ in range(COPIES)]
        for copy, content in enumerate(stored):
            self.file.read(copy * HEADER_BYTES, content)
        self.is_kept = any(map(any, stored))
        found = [(header, copy) for copy, content in enumerate(stored) if (header := self._unpack(content)) is not None]
        found.sort(key=lambda each: each[0].finished, reverse=True)
        for header, copy in found:
            if self._read(header, copy, state):
                break
        else:
            if self.is_kept:
                raise ParameterError(
                    f"a damaged checkpoint {self.path}, or one of another version",
                    "the file of an interrupted call",
                    f"choose another folder, or delete {self.path}",
                )
        self.file.allocate(_offset(COPIES, state))

    def save(self, state: State) -> None:
        """Replace the older copy of the state."""
        self._make_folder()  # the folder, or the file alone, may have been removed
        self.file.return_to_place(_offset(COPIES, state))
        copy = (self.copy + 1) % COPIES
        for offset, array in _places(copy, state):
            self.file.write(offset, array)
        self.file.sync()
        self.is_kept = True
        header = _Header(state.finished, state.read, _checksum(state), b"".join(self.arguments.values()))
        self.file.write(copy * HEADER_BYTES, header.pack())
        self.file.sync()
        self.copy = copy

    def remove(self) -> None:
        """Delete the saved state."""
        self.file.remove()
        self.is_kept = False

    def _unpack(self, content: bytearray) -> _Header | None:
        """Return the header of a copy; None if it was never written or is damaged."""
        size = NUMBERS.size + HASH_BYTES * len(self.arguments)
        fields = bytes(content[:size])
        mark, finished, key, value, checksum = NUMBERS.unpack_from(fields)
        header = _Header(finished, (key, value), checksum, fields[NUMBERS.size :])
        return header if mark == MARK and content[: size + HASH_BYTES] == header.pack() else None

    def _read(self, header: _Header, copy: int, state: State) -> bool:
        """Read a copy of the state, and return True if it is complete."""
        self._check_arguments(header)
        is_read = all(self.file.read(offset, array) for offset, array in _places(copy, state))
        if not is_read or _checksum(state) != header.checksum or header.finished > self.items:
            return False
        state.finished, state.read, self.copy = header.finished, header.read, copy
        return True

    def _check_arguments(self, header: _Header) -> None:
        """Raise ParameterError if the state belongs to a call with other arguments."""
        changed = [
            name
            for k, (name, expected) in enumerate(self.arguments.items())
            if header.arguments[k * HASH_BYTES : (k + 1) * HASH_BYTES] != expected
        ]
        if changed:
            names = [name for name in changed if name != BLOCKS] or changed
            self.refuse(names)

    def refuse(self, names: list[str]) -> None:
        """Raise ParameterError, because these arguments are not those of the saved state."""
        raise ParameterError(
            f"a checkpoint of other arguments in {self.folder}: {', '.join(names)} changed",
            "the same arguments",
            f"give the arguments of the interrupted call, choose another folder, or delete {self.path}",
        )


def _offset(copy: int, state: State) -> int:
    """Return the offset of a copy's first array in the file."""
    return COPIES * HEADER_BYTES + copy * sum([int(array.nbytes) for array in state.arrays])


def _places(copy: int, state: State) -> Iterator[tuple[int, Any]]:
    """Yield (offset in the file, array) of each array of a copy."""
    offset = _offset(copy, state)
    for array in state.arrays:
        yield offset, array
        offset += array.nbytes


def _checksum(state: State) -> bytes:
    found = hashlib.sha256()
    for array in state.arrays:
        found.update(array.reshape(-1).view("u1").data)
    return found.digest()


def hash_arguments(problem: Problem, sources: dict[str, Any], items: list[WorkItem]) -> dict[str, bytes]:
    """Return a hash of each argument that the result depends on.

    The hashes of key and value cover shape and dtype. `hash_block` hashes their entries when a block has been read.
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
        "see": _hash(*[part for statistic in problem.see for part in _parts_of_statistic(statistic)]),
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


def _parts_of_statistic(statistic: Statistic) -> list[Any]:
    """Return the name and the numbers of a statistic, and the parts of its formula if it has one."""
    parts: list[Any] = statistic.serialize(lambda _: "")
    statistic.map_formulas(lambda formula: parts.extend(_parts_of_formula(formula)))
    return parts


def _hash(*parts: Any) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        if len(getattr(part, "shape", ())) > 1:
            _add_array(found, part)
        else:
            found.update(f"{part!r}\n".encode())
    return found.digest()


def _add_array(found: Any, array: Any) -> None:
    """Hash dtype, shape and entries of an array of two or more axes, a few positions at a time."""
    *outer, positions, width = array.shape
    found.update(f"{array.dtype} {tuple(array.shape)}\n".encode())
    step = max(HASHED_ELEMENTS // max(int(np.prod(outer, dtype=np.int64)) * width, 1), 1)
    for start in range(0, positions, step):
        part = np.ascontiguousarray(array[..., start : start + step, :])
        found.update(part.reshape(-1).view(np.uint8).data)
