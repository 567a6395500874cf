"""`sightline info`: print the host's properties, the installed libraries, and the kernels."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rich.text import Text

from .. import __version__
from ..api.kernels import KERNELS
from ..call.request import CPU_VARIABLE
from ..cpu.runtime import disk_cache, thread_count
from ..data import tried_versions
from .console import key_value_table, make_console, section

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


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `info` and its options to the command line."""
    command = commands.add_parser("info", help="show this machine, the libraries, and the kernels")
    command.set_defaults(run=info)


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
    console.print(
        "\nThe kernel with the lowest estimated cost runs, of those that support a problem.\n"
        "sightline.explain(...) shows which kernel that is, and why the others do not run."
    )


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
    depends on the machine, on torch's build and on the environment.
    """
    number, origin = thread_count.resolve_thread_count()
    if origin == thread_count.THREADS_VARIABLE:
        return f"{number}: {origin}, which wins over torch.set_num_threads"
    try:
        import torch
    except ImportError:
        return "torch is not installed, or does not load"
    number = torch.get_num_threads()
    variables = [f"{name}={os.environ[name]}" for name in TORCH_VARIABLES if os.environ.get(name)]
    cause = f"from {', '.join(variables)}" if variables else "torch's own choice"
    return f"{number}: torch.get_num_threads(), {cause}; torch.set_num_threads changes it"


def processor_name() -> str:
    with suppress(OSError):
        if found := re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
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
