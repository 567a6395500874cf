"""Processes of a test that form groups of `torch.distributed` over the loopback interface, and run functions."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

CALL_SECONDS = 240  # the time limit of one call


class Ranks:
    """Processes that are started once and run one function after another.

    Parameters
    ----------
    size : the number of processes; groups of the ranks 0 to k − 1 exist for every k up to `size`
    timeout : the timeout of the groups in seconds
    """

    def __init__(self, size: int = 4, timeout: float = 120.0) -> None:
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")  # which imports these packages once
        context.set_forkserver_preload(["pytest", "hypothesis", "torch.distributed", "sightline.torch.distributed"])
        pipes = [context.Pipe() for _ in range(size)]
        self.pipes = [own for own, _ in pipes]
        arguments = [(rank, size, f"{self.folder.name}/store", timeout, other) for rank, (_, other) in enumerate(pipes)]
        self.processes = [context.Process(target=_serve, args=one, daemon=True) for one in arguments]
        for process in self.processes:
            process.start()
        for _, other in pipes:
            other.close()

    def run(self, function: Callable[..., Any], *arguments: Any, size: int | None = None) -> list[Any]:
        """Return what `function(group, *arguments)` returns on each of the ranks 0 to size − 1.

        Raises the error of the first rank that raises one. The function belongs to a module that the processes import.
        """
        answers = self.outcomes(function, *arguments, size=size)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def outcomes(self, function: Callable[..., Any], *arguments: Any, size: int | None = None) -> list[Any]:
        """Return the answer or the exception of each rank; an EOFError for a rank that died."""
        size = self.size if size is None else size
        message = pickle.dumps((function, arguments, size))
        for pipe in self.pipes[:size]:
            pipe.send_bytes(message)
        end = time.monotonic() + CALL_SECONDS
        return [self._receive(pipe, end) for pipe in self.pipes[:size]]

    def _receive(self, pipe: Any, end: float) -> Any:
        try:
            if pipe.poll(max(end - time.monotonic(), 0.0)):
                return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return EOFError("the process ended")
        self.close()
        raise AssertionError(f"a rank did not answer within {CALL_SECONDS} s")

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()


def _serve(rank: int, size: int, store: str, timeout: float, pipe: Any) -> None:
    """Join the groups, and answer calls until the pipe closes."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    from torch import distributed as dist
    from torch import set_num_threads

    # some packages install a package of this name
    sys.modules["tests"] = tests = ModuleType("tests")
    tests.__path__ = [str(Path(__file__).parents[1])]
    set_num_threads(1)
    wait = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait)
    groups = [dist.new_group(list(range(count)), timeout=wait) for count in range(1, size + 1)]
    while True:
        try:
            function, arguments, count = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps(function(groups[count - 1], *arguments))
        except Exception as error:
            answer = _pickled(error)
        pipe.send_bytes(answer)


def _pickled(error: Exception) -> bytes:
    """Return the pickled error; for an error that cannot be pickled, a RuntimeError with its text."""
    try:
        pickle.loads(text := pickle.dumps(error))
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return text
