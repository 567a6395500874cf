"""The saved state of a call that was interrupted: the sums so far, and the number of finished work items."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import drop_repeats, to_numpy
from ..errors import ParameterError, name_file
from ..problem import Problem
from .block_plan import BlockSizes

__all__ = ["Checkpoint", "State", "digest"]

FORMAT = "1"  # changes with the meaning of a saved state


@dataclass
class State:
    """The merged output and lse of the finished work items. Both have a head axis.

    output : (*batch_shape, H, n, d_v), in the accumulator's dtype
    lse : (*batch_shape, H, n) float64
    finished : the number of finished work items
    """

    output: Any
    lse: Any
    finished: int = 0


class Checkpoint:
    """The file that holds the state of one call.

    The file is written under another name and then renamed, so it is never half written.
    """

    def __init__(self, folder: str | os.PathLike[str], digest: str) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "attention.npz"
        self.unfinished_path = self.folder / "attention.npz.unfinished"
        self.digest = digest

    def load(self) -> State | None:
        """Return the saved state; None if there is none.

        Raises
        ------
        ParameterError
            The state belongs to other arguments, the file is damaged, or `folder` is a file.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ParameterError(f"checkpoint={str(self.folder)!r}, a file", "a folder", 'checkpoint="state"')
        if not self.path.exists():
            return None
        cure = f"give the arguments of the interrupted call, choose another folder, or delete {self.path}"
        try:
            with open(self.path, "rb") as file, np.load(file, allow_pickle=False) as saved:
                digest = str(saved["digest"])
                state = None
                if digest == self.digest:
                    state = State(saved["output"], saved["lse"], int(saved["finished"]))
        except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
            raise ParameterError(
                f"a damaged checkpoint {self.path}", "the file of an interrupted call", cure
            ) from error
        if state is None:
            raise ParameterError(f"a checkpoint of other arguments in {self.folder}", "the same arguments", cure)
        return state

    def save(self, state: State) -> None:
        """Replace the saved state."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with name_file(self.unfinished_path), open(self.unfinished_path, "wb") as file:
            np.savez(file, digest=self.digest, output=state.output, lse=state.lse, finished=state.finished)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.unfinished_path, self.path)

    def remove(self) -> None:
        """Delete the saved state."""
        self.unfinished_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def digest(problem: Problem, sources: dict[str, Any], sizes: BlockSizes) -> str:
    """Return a hash of the arguments of a call. A saved state fits a call with the same hash.

    The hash reads shapes, dtypes, and the first and last position of query, key and value, but not all their entries.
    """
    found = hashlib.sha256()
    for part in _parts(problem, sources, sizes):
        if isinstance(part, np.ndarray):
            found.update(f"{part.dtype} {part.shape}\n".encode())
            found.update(np.ascontiguousarray(part).view(np.uint8).data if part.size else b"")
        else:
            found.update(f"{part!r}\n".encode())
    return found.hexdigest()


def _parts(problem: Problem, sources: dict[str, Any], sizes: BlockSizes) -> Iterator[Any]:
    """Yield the values and arrays that are hashed."""
    yield FORMAT, sizes, problem.scale, problem.dropout, problem.seed, problem.dropout_origin
    yield [None if formula is None else formula.text for formula in (problem.mask, problem.score)]
    for table in problem.tables:
        yield table.axes
        yield np.atleast_1d(to_numpy(drop_repeats(table.array)))
    yield None if problem.sinks is None else to_numpy(problem.sinks)
    for name, array in sources.items():
        yield name, tuple(array.shape), str(array.dtype)
        for position in (slice(0, 1), slice(max(array.shape[-2] - 1, 0), array.shape[-2])):
            yield np.array(array[..., position, :])
