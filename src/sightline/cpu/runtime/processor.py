"""Where kernels run: the one place that knows how a kernel is compiled and called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import thread_team as team
from .compile import get_or_compile
from .machine import Machine, host

__all__ = ["HOST", "Processor"]


class Processor:
    """The processor at hand: kernels are compiled into this process and called on its threads.

    Tests give `Cpu` others: this one with fewer features, or an emulated one of another kind.

    Parameters
    ----------
    machine : default `host()`, asked for each kernel
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine

    @property
    def machine(self) -> Machine:
        """What kernels are generated for."""
        return host() if self._machine is None else self._machine

    def kernel(self, key: str, name: str, build_module: Callable[[], Any]) -> Any:
        """The function `name`, void of a pointer, of the kernel with this key, as `call` takes it; see `get_or_compile`."""
        return get_or_compile(key, name, build_module, self.machine)

    def call(self, kernel: Any, packed_arguments: Any, threads: int, keep_alive: tuple[Any, ...]) -> None:
        """Call the kernel once on each thread with the address of `packed_arguments`; `keep_alive` is all memory the words point to."""
        team.call(kernel, packed_arguments, threads, keep_alive)


HOST = Processor()
