"""The saved state of a call that was interrupted: the sums so far, and the number of finished work items."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...errors import ParameterError
from .arguments import BLOCKS, HASH_BYTES
from .locked_file import LockedFile

FILE_NAME = "attention.state"
MARK = b"sightline state2"  # the number changes with the meaning of a saved state
HEADER_BYTES = 4096  # of each copy
COPIES = 2  # one is written while the other one holds the state before
NUMBERS = struct.Struct(f"<{len(MARK)}sQ{HASH_BYTES}s{HASH_BYTES}s{HASH_BYTES}s")
NOTHING_READ = (bytes(HASH_BYTES), bytes(HASH_BYTES))


@dataclass
class State:
    """The merged output and lse of the finished work items. Both have a head axis.

    output : (*batch_shape, H, n, d_v), in the accumulator's dtype
    lse : (*batch_shape, H, n) float64
    finished : the number of finished work items
    read : the hashes of the blocks of keys and of values that the finished work items have read
    """

    output: Any
    lse: Any
    finished: int = 0
    read: tuple[bytes, bytes] = NOTHING_READ


@dataclass(frozen=True)
class _Header:
    """What the file says of one copy of the state."""

    finished: int
    read: tuple[bytes, bytes]
    checksum: bytes  # of output and lse
    arguments: bytes  # the hashes of the arguments, joined

    def pack(self) -> bytes:
        fields = NUMBERS.pack(MARK, self.finished, *self.read, self.checksum) + self.arguments
        return fields + hashlib.sha256(fields).digest()


class Checkpoint:
    """The file that holds the state of one call, while the call has it open and locked.

    The file has room for two copies of the state. It begins with two headers of `HEADER_BYTES`, then come output and
    lse of the first copy, then those of the second. A state is written over the older copy, its header last, so the
    newer copy is whole at any time. Every byte that is read is under a checksum.

    Parameters
    ----------
    folder : of the file; it is created if it does not exist
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
        """Read the newest whole state, if there is one, into `state`. Then make room for both copies.

        Raises
        ------
        ParameterError
            The state belongs to other arguments, or no copy of it is whole.
        OSError
            The disk has no room for both copies.
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
        self._make_folder()  # someone may have removed it, or only the file
        self.file.return_to_place(_offset(COPIES, state))
        copy = (self.copy + 1) % COPIES
        offset = _offset(copy, state)
        self.file.write(offset, state.output)
        self.file.write(offset + state.output.nbytes, state.lse)
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
        """Read a copy of the state, and return True if it is whole."""
        self._check_arguments(header)
        offset = _offset(copy, state)
        is_read = self.file.read(offset, state.output) and self.file.read(offset + state.output.nbytes, state.lse)
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
    """Return the place of a copy's output in the file."""
    return COPIES * HEADER_BYTES + copy * int(state.output.nbytes + state.lse.nbytes)


def _checksum(state: State) -> bytes:
    found = hashlib.sha256()
    for array in (state.output, state.lse):
        found.update(array.reshape(-1).view("u1").data)
    return found.digest()
