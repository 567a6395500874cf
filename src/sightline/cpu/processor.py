"""Where kernels run: the one place that knows how a kernel is compiled and called."""

from __future__ import annotations

from typing import Any

from . import threads as team
from .compile import compile_module
from .machine import Machine, host

__all__ = ["HOST", "Processor"]


class Processor:
    """The processor at hand: kernels are compiled into this process and called on its threads.

    Tests give `Cpu` others: this one with fewer features, or an emulated one of another kind. Each keeps the kernels
    compiled for it, by machine and structure.

    Parameters
    ----------
    machine : default `host()`, asked for each kernel
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine
        self.kernels: dict[Any, Any] = {}

    @property
    def machine(self) -> Machine:
        """What kernels are generated for."""
        return host() if self._machine is None else self._machine

    def compile(self, module: Any, name: str) -> Any:
        """The module's function `name`, void of a pointer, as `call` takes it."""
        return compile_module(module, self.machine, name)

    def call(self, kernel: Any, words: Any, threads: int, kept: tuple[Any, ...]) -> None:
        """Call the kernel once on each thread with the address of `words`; `kept` is all memory the words point to."""
        team.call(kernel, words, threads, kept)


HOST = Processor()
