"""The first call of a new problem, in fresh processes that have computed another problem before.

The call of the other problem loads llvmlite and LLVM's targets, which a process loads only once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

from sightline.cpu.runtime.disk_cache import CACHE_VARIABLE

from .core import Call, Contender, Problem

PROGRAM = """
import json, time
import numpy as np, sightline
before, new = (np.ones((8, 256, width), np.float32) for width in (32, 64))
started = time.perf_counter()
sightline.attention(before, before, before)
loaded = time.perf_counter()
sightline.attention(new, new, new, mask=sightline.causal())
print(json.dumps([loaded - started, time.perf_counter() - loaded]))
"""


def prepare_process(problem: Problem, inputs: Any, threads: int, place: int, caches: bool = False) -> Call:
    """Prepare a fresh process, and the time of its call number `place`, with a disk cache of its own or without one."""
    folder = tempfile.TemporaryDirectory()

    def seconds() -> float:
        environment = os.environ | {CACHE_VARIABLE: folder.name if caches else "off"}
        command = [sys.executable, "-c", PROGRAM]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(ended.stderr.strip() or f"the process ended with status {ended.returncode}")
        return float(json.loads(ended.stdout)[place])

    if caches:
        seconds()  # fills the cache
    return Call(seconds=seconds, close=folder.cleanup)


CONTENDERS = (
    Contender("compiled", partial(prepare_process, place=1), is_ours=True),
    Contender("from disk", partial(prepare_process, place=1, caches=True), is_ours=True),
    Contender("first of all", partial(prepare_process, place=0), is_ours=True),
)
FIRST_CALL = Problem(name="first call", about="8 heads, n 256, d 64, causal; fresh processes", contenders=CONTENDERS)
