"""Time the first call of a new problem in a fresh process.

`python -m sightline.cli.bench.first_call N D` prints seconds.

A call of another problem comes first. It loads llvmlite and LLVM's targets, which a process loads only once. The
seconds of that call are printed too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

from ...caching import CACHE_VARIABLE


def measure_seconds(n: int, d: int, processes: int) -> dict[str, list[float]]:
    """Return the seconds of first calls, a list for each kind of first call with one number per fresh process.

    Returns
    -------
    dict
        "compiled": the new problem's first call with the disk cache off. "from disk": the new problem's first call if
        the disk cache has its kernel. "first of all": the process's very first call, which computes another problem,
        with the disk cache off.
    """
    found: dict[str, list[float]] = {"compiled": [], "from disk": [], "first of all": []}
    with tempfile.TemporaryDirectory() as folder:
        _run_process(n, d, folder)
        for _ in range(processes):
            before, new = _run_process(n, d, "off")
            found["first of all"].append(before)
            found["compiled"].append(new)
            found["from disk"].append(_run_process(n, d, folder)[1])
    return found


def _run_process(n: int, d: int, cache: str) -> tuple[float, float]:
    command = [sys.executable, "-m", "sightline.cli.bench.first_call", str(n), str(d)]
    completed = subprocess.run(
        command, env=os.environ | {CACHE_VARIABLE: cache}, capture_output=True, text=True, check=True
    )
    before, new = json.loads(completed.stdout)
    return before, new


def main(n: int, d: int) -> None:
    """Print as JSON [seconds of the process's very first call, seconds of the first call of the new problem]."""
    import sightline
    from sightline import i, j

    rng = np.random.default_rng(0)
    before, new = (rng.standard_normal((8, n, width), np.float32) for width in (d // 2, d))
    started = time.perf_counter()
    sightline.attention(before, before, before)
    loaded = time.perf_counter()
    sightline.attention(new, new, new, mask=i >= j)
    print(json.dumps([loaded - started, time.perf_counter() - loaded]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
