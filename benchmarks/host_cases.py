"""Cases without contenders, which time themselves: the first call of a new problem, and the host's work for a new mask.

`python -m benchmarks.host_cases N D` prints the seconds of first calls in its own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sightline.cache_folder import CACHE_VARIABLE
from sightline.problem.problem import make_problem

from .cases import HostCase, Target
from .workloads import SMALL_LENGTH, Mask

if TYPE_CHECKING:
    from .device import Device

TILE = (128, 128)  # (queries, keys) in a tile of the forward kernel on Hopper GPUs


@dataclass(frozen=True, kw_only=True)
class FirstCall(HostCase):
    """The first call of a new problem, in a process that has computed another problem before.

    The call of the other problem loads llvmlite and LLVM's targets, which a process loads only once.
    """

    name: str
    n: int = 256
    d: int = 64
    processes: int = 5
    targets: tuple[Target, ...] = ()

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"8 heads, n {self.n:,}, d {self.d}, float32, causal; fresh processes"

    def small(self) -> FirstCall:
        return replace(self, n=32, processes=1, targets=())

    def measure_seconds(self, device: Device | None = None) -> dict[str, list[float]]:
        """Return the seconds of first calls, with one number per fresh process.

        Returns
        -------
        dict
            "compiled": the new problem's first call with the disk cache off. "from disk": the new problem's first call
            if the disk cache has its kernel. "first of all": the process's very first call, which computes another
            problem, with the disk cache off.
        """
        found: dict[str, list[float]] = {"compiled": [], "from disk": [], "first of all": []}
        with tempfile.TemporaryDirectory() as folder:
            self._run_process(folder)
            for _ in range(self.processes):
                before, new = self._run_process("off")
                found["first of all"].append(before)
                found["compiled"].append(new)
                found["from disk"].append(self._run_process(folder)[1])
        return found

    def _run_process(self, cache: str) -> tuple[float, float]:
        command = [sys.executable, "-m", "benchmarks.host_cases", str(self.n), str(self.d)]
        environment = os.environ | {CACHE_VARIABLE: cache}
        folder = Path(__file__).parents[1]  # where Python finds this package
        completed = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if completed.returncode:
            raise RuntimeError(completed.stderr.strip() or f"the process ended with status {completed.returncode}")
        before, new = json.loads(completed.stdout)
        return before, new


def main(n: int, d: int) -> None:
    """Print as JSON [seconds of the first call of this process, seconds of the first call of another problem]."""
    import sightline
    from sightline import i, j

    rng = np.random.default_rng(0)
    before, new = (rng.standard_normal((8, n, width), np.float32) for width in (d // 2, d))
    started = time.perf_counter()
    sightline.attention(before, before, before)
    loaded = time.perf_counter()
    sightline.attention(new, new, new, mask=i >= j)
    print(json.dumps([loaded - started, time.perf_counter() - loaded]))


@dataclass(frozen=True, kw_only=True)
class Planning(HostCase):
    """The host's work for a new mask: to find its tile ranges, and to copy them to the device as a schedule."""

    name: str
    mask: Callable[[int], Mask]  # a function of a width that returns a mask; every width gives a different mask
    width: int
    n: int
    H: int = 16
    masks: int = 5  # number of masks that are timed
    targets: tuple[Target, ...] = ()

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"{self.H} heads, n {self.n:,}, {self.mask(self.width).description}, each mask new"

    def small(self) -> Planning:
        return replace(self, n=SMALL_LENGTH, width=SMALL_LENGTH // 4, masks=2, targets=())

    def measure_seconds(self, device: Device) -> dict[str, list[float]]:
        """Return {"new mask": seconds}, with one number for each mask.

        Every mask has a different width, so that no cache has the mask's schedule. The timed work is to make the
        problem, to compute its schedule and to copy the schedule to the device. One more mask comes first as a warm-up,
        which the result leaves out.
        """
        import torch

        from sightline.gpu.launch.schedule import make_schedule  # needs torch

        query = torch.empty((), dtype=torch.bfloat16, device=device.device).expand(1, self.H, self.n, 1)
        seconds = []
        for k in range(self.masks + 1):
            mask = self.mask(self.width - k).formula(self.n)
            device.synchronize()
            started = time.perf_counter()
            problem = make_problem(query, query, query, mask=mask)
            make_schedule(problem, *TILE)
            device.synchronize()
            seconds.append(time.perf_counter() - started)
        return {"new mask": seconds[1:]}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
