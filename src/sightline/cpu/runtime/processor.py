"""The processor that compiles and calls kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import thread_team
from .compile import Part, get_or_compile
from .machine import Machine, host


class Processor:
    """The processor of this process: kernels are compiled into the process and called on its threads.

    Tests pass other processors to `Cpu`: the host with fewer features, or an emulator of another architecture.

    Parameters
    ----------
    machine : machine that kernels are compiled for; by default `host()`, evaluated for each kernel
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine

    @property
    def machine(self) -> Machine:
        return host() if self._machine is None else self._machine

    links_parts = True  # False if `kernel` takes no `common` part

    def kernel(
        self,
        key: str,
        name: str,
        build_module: Callable[[], Any],
        common: Part | None = None,
        machine: Machine | None = None,
    ) -> Any:
        """Return the function `name` of the kernel with this key, in the form that `call` takes; see `get_or_compile`.

        The function's type is void f(void *). By default, `machine` is the machine of this processor.
        """
        return get_or_compile(key, name, build_module, machine or self.machine, common)

    call = staticmethod(thread_team.call)


HOST = Processor()
