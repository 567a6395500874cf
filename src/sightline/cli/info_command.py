"""`sightline info`: print the host's properties, the installed libraries, and which problems each kernel supports."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from .. import __version__
from ..api.kernels import KERNELS
from ..arrays.operations import resolve_dtype
from ..call.kernel import Kernel
from ..call.problem import Problem, make_problem
from ..call.request import CPU_VARIABLE
from ..cpu.runtime import disk_cache, thread_count
from ..data import tried_versions
from ..formula.library import alibi, causal
from ..statistics import weights
from .console import key_value_table, make_console, note, section, table

PACKAGES = {
    "numpy": "",
    "llvmlite": "",
    "array-api-compat": "",
    "platformdirs": "",
    "rich": "",
    "torch": "tensors, layers, gradients; pip install torch",
    "transformers": 'Hugging Face models; pip install "sightline-attention[transformers]"',
    "jax": 'JAX arrays; pip install "sightline-attention[jax]"',
    "flax": 'layers of Flax; pip install "sightline-attention[flax]"',
    "equinox": 'layers of Equinox; pip install "sightline-attention[equinox]"',
    "triton": "kernels on GPUs; pip install triton",
    "keras": "Keras layers; pip install keras",
    "matplotlib": 'picture files; pip install "sightline-attention[plot]"',
    "anywidget": 'the explorer in a notebook; pip install "sightline-attention[notebook]"',
    "ml-dtypes": "bfloat16 in NumPy; pip install ml-dtypes",
}
TORCH_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # torch reads its initial number of threads from these
DRIVER_VERSION_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
VECTOR_FEATURES = ("avx512f", "avx512bf16", "amx-bf16", "avx2", "fma", "sse4.2", "neon", "sve")
SAMPLES: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "float64"},
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "mask formula": {"mask": causal()},
    "score formula": {"score": alibi(4)},
    "grouped heads": {},
    "sinks": {"sinks": np.zeros(4)},
    "dropout": {"dropout": 0.1, "seed": 0},
    "see weights": {"see": [weights()]},
}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `info` and its options to the command line."""
    command = commands.add_parser("info", help="show this machine, the libraries, and what each kernel supports")
    command.set_defaults(run=info)


def _make_sample(device: str | None = None, dtype: str = "float32", **options: Any) -> Problem:
    """Return a problem of 4 query heads, 2 key heads, 8 tokens and width 8.

    Its arrays are torch tensors on `device`, or NumPy arrays if `device` is None.
    """
    ones: Callable[..., Any]
    if device is not None:
        import torch

        kind, ones = getattr(torch, dtype), partial(torch.ones, device=device)
        if "sinks" in options:
            options["sinks"] = torch.as_tensor(options["sinks"], device=device)
    else:
        kind, ones = resolve_dtype(np, dtype), np.ones
    query, key = (ones(shape, dtype=kind) for shape in ((1, 4, 8, 8), (1, 2, 8, 8)))
    return make_problem(query, key, key, **options)


def support(kernels: tuple[Kernel, ...] = KERNELS, device: str | None = None) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return, by name of the kernel and name of the sample problem, the reasons why the kernel refuses the problem.

    The tuple of reasons is empty if the kernel supports the problem. The arrays of the sample problems are torch
    tensors on `device`, or NumPy arrays if `device` is None.
    """
    problems = {}
    for name, options in SAMPLES.items():
        if name != "bfloat16" or device is not None or find_spec("ml_dtypes"):
            problems[name] = _make_sample(device, **options)
    return {
        kernel.name: {name: tuple(map(str, kernel.refuses(problem))) for name, problem in problems.items()}
        for kernel in kernels
    }


def info(_: argparse.Namespace) -> None:
    """Print all sections of `sightline info`."""
    console = make_console()
    console.print(Text(f"sightline {__version__}", style="bold"))
    section(console, "Machine")
    console.print(key_value_table(_machine().items()))
    section(console, "Generated kernels")
    console.print(key_value_table(_generated().items()))
    section(console, "Libraries")
    console.print(key_value_table((name, _version_or_reason(name, use)) for name, use in PACKAGES.items()))
    section(console, "Kernels")
    console.print(key_value_table((kernel.name, kernel.description) for kernel in KERNELS))
    _print_support(console, support())
    if has_gpu():
        from ..torch.dispatch import kernels

        section(console, "Kernels on the GPU")
        _print_support(console, support(kernels(), "cuda"))
    console.print(
        "\nThe kernel with the lowest estimated cost runs, of those that support a problem.\n"
        "sightline.explain(...) shows which kernel that is, and why."
    )


def _print_support(console: Console, found: dict[str, dict[str, tuple[str, ...]]]) -> None:
    console.print()
    samples = next(iter(found.values()))
    marks = {True: Text("no", style="dim"), False: Text("yes", style="green")}  # by whether there are reasons
    rows = [(sample, *(marks[bool(found[kernel][sample])] for kernel in found)) for sample in samples]
    console.print(table("", *found, rows=rows))
    for kernel, answers in found.items():
        for reason in dict.fromkeys(reason for reasons in answers.values() for reason in reasons):
            note(console, f"not supported by {kernel}: {reason}")


def _machine() -> dict[str, str]:
    facts = {
        "processor": f"{processor_name()}, {thread_count.usable_processors()} usable threads",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}, Python {sys.version.split()[0]}",
    }
    if find_spec("llvmlite"):
        import llvmlite.binding as llvm

        from ..cpu.runtime.machine import host, native_machine

        features = llvm.get_host_cpu_features()
        machine = host()
        facts["vectors"] = ", ".join(name for name in VECTOR_FEATURES if features.get(name)) or "none known"
        facts["kernels for"] = f"{machine.cpu}: {machine.vector_registers} registers of {machine.vector_bytes} bytes"
        if machine != native_machine():
            facts["kernels for"] += f", set by {CPU_VARIABLE}={os.environ[CPU_VARIABLE]}"
    facts["GPU"] = "none found by torch"
    if has_gpu():
        import torch

        facts["GPU"] = torch.cuda.get_device_name()
    return facts


def has_gpu() -> bool:
    """Return True if torch finds a GPU.

    The import of torch takes long, so torch is imported only if a GPU driver is installed.
    """
    if not any(path.exists() for path in DRIVER_VERSION_FILES) or find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _generated() -> dict[str, str]:
    """Return texts about generated kernels, by name.

    "threads" is the number of threads and where the number comes from. "in torch programs" is the number in a program
    that loads torch. "cache" is the folder, the size and the error of the disk cache.
    """
    number, origin = thread_count.resolve_thread_count()
    state = disk_cache.state()
    cached = f"in memory only: {state.error}"
    if state.folder is not None:
        size = f"{state.kernels} kernels, {state.size / 2**20:.1f} of {disk_cache.MAX_FOLDER_BYTES / 2**20:.0f} MiB"
        cached = f"{state.folder}: {size}" + (f"; {state.error}" if state.error else "")
    return {"threads": f"{number}: {origin}", "in torch programs": torch_threads(), "cache": cached}


def torch_threads() -> str:
    """Return the number of threads of generated kernels in a program that loads torch, and why, as text.

    SIGHTLINE_THREADS wins over torch's setting, which wins over the number of processors. Torch's initial setting
    depends on the machine, on torch's build and on the environment. If torch is not loaded, another process loads torch
    to find the setting, since torch takes long to load and would change this process.
    """
    number, origin = thread_count.resolve_thread_count()
    if origin == thread_count.THREADS_VARIABLE:
        return f"{number}: {origin}, which wins over torch.set_num_threads"
    if find_spec("torch") is None:
        return "torch is not installed"
    if "torch" not in sys.modules:
        command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()[-1]
        except (OSError, subprocess.SubprocessError, IndexError):
            return "unknown: torch does not load"
        number = int(found)
    variables = [f"{name}={os.environ[name]}" for name in TORCH_VARIABLES if os.environ.get(name)]
    cause = f"from {', '.join(variables)}" if variables else "torch's own choice"
    return f"{number}: torch.get_num_threads(), {cause}; torch.set_num_threads changes it"


def processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version_or_reason(name: str, use: str) -> str:
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"not installed ({use})" if use else "not installed"
    newest = tried_versions()[name][-1]
    is_newer = _numbers(found) > _numbers(newest)
    return f"{found}: newer than {newest}, the newest tried" if is_newer else f"{found}; the newest tried is {newest}"


def _numbers(version: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", version.partition("+")[0])))
