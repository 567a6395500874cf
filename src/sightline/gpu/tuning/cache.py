"""The cache on disk of configurations that `sightline.tune` found: one small JSON file for each kernel of a problem.

A configuration is the tile sizes, warps and stages of a kernel. The files are in the subfolder `tuned` of the folder of
`sightline.cache_folder`. A file's name is the hash of its key: the kernel, the device and its driver, the versions of
torch and Triton, the sources of the kernels, and the structure of the problem. A file is renamed to its name when it is
complete, so several processes may write and read. Files hold data, no code. A file with unexpected content is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ...cache_folder import CACHE_VARIABLE, cache_folder, cache_setting
from ...caching import find_sources, hash_sources
from ...errors import ParameterError
from ...problem.problem import Problem
from ...statistics import Lse, unwrap_mean
from ...statistics.computation import FUSED

DRIVER_VERSION_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
MAX_CACHED_LOOKUPS = 4096  # most look-ups whose results are held in memory; a result may be that there is no entry


def folder() -> Path | None:
    """Return the folder of the tuning cache; None if no folder can be used, as with SIGHTLINE_CACHE=off."""
    try:
        return cache_folder() / "tuned"
    except OSError:
        return None


def problem_key(kernel: str, problem: Problem) -> str:
    """Return the part of a cache key that describes what is compiled into a problem's kernel. Lengths are not."""
    formulas = [None if formula is None else formula.text for formula in (problem.mask, problem.score)]
    wants_fused = {"forward": True, "weights_pass": False}.get(kernel)
    others = [each for each in problem.see if not isinstance(each, Lse)]
    statistics = [repr(each) for each in others if isinstance(unwrap_mean(each), FUSED) == wants_fused]
    flags = [problem.sinks is not None, problem.dropout > 0]
    fields = [problem.dtype, problem.d_k, problem.d_v, *formulas, *flags, *statistics]
    return json.dumps(fields, separators=(",", ":"))


def load(kernel: str, problem: Problem, device: str) -> Mapping[str, Any] | None:
    """Return the cache entry of a kernel for the problem's `problem_key` on `device`; None if there is no entry."""
    existing = _existing_folder()
    return None if existing is None else _load(existing, kernel, problem_key(kernel, problem), device)


def list_entries() -> list[dict[str, Any]]:
    """Return every cache entry, for any device, whose driver, versions and sources are those of this process."""
    path, files, entries = folder(), [], []
    with contextlib.suppress(OSError):  # the folder cannot be read
        files = sorted(path.glob("*.json")) if path is not None else []
    for file in files:
        entry = _read(file)
        if entry and isinstance(key := entry.get("for"), dict) and environment().items() <= key.items():
            entries.append(entry)
    return entries


def prepare_folder() -> Path | None:
    """Create the folder of the cache if necessary, and return the folder; None if SIGHTLINE_CACHE is "off".

    Raises
    ------
    ParameterError
        The folder is not writable, its disk is full, or `cache_folder` finds no folder.
    """
    path = None
    if cache_setting() == "off":
        return None
    try:
        path = cache_folder() / "tuned"
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"0")
        return path
    except OSError as error:
        raise _unwritable(path, error) from error


def store(kernel: str, problem: Problem, device: str, entry: Mapping[str, Any]) -> Path | None:
    """Save a cache entry, and return the path of its file; None if SIGHTLINE_CACHE is "off".

    Raises
    ------
    ParameterError
        The folder is not writable, or its disk is full.
    """
    writable = prepare_folder()
    if writable is None:
        return None
    key = _make_key(kernel, problem_key(kernel, problem), device)
    path = writable / _file_name(key)
    temporary = path.with_suffix(f".{os.urandom(8).hex()}.part")
    try:
        temporary.write_text(json.dumps({"for": key, **entry}, indent=1) + "\n")
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise _unwritable(writable, error) from error
        raise
    clear()
    return path


def clear() -> None:
    """Forget the configurations in memory, so that the next look-up reads the tuning files again."""
    global _num_changes
    _load.cache_clear()
    _existing_folder.cache_clear()
    _num_changes += 1


_num_changes = 0


def num_changes() -> int:
    """Return how often `clear` was called in this process."""
    return _num_changes


@lru_cache(maxsize=1)
def _existing_folder() -> Path | None:
    """Return the folder of the tuning cache; None if the folder does not exist.

    On most computers `tune` was never called. The folder then does not exist, and no file is looked for.
    """
    path = folder()
    return path if path is not None and os.path.isdir(path) else None


@lru_cache(maxsize=MAX_CACHED_LOOKUPS)
def _load(folder: Path, kernel: str, problem_key: str, device: str) -> Mapping[str, Any] | None:
    key = _make_key(kernel, problem_key, device)
    entry = _read(folder / _file_name(key))
    return entry if entry is not None and entry.get("for") == key else None


def _unwritable(path: Path | None, error: OSError) -> ParameterError:
    """Return the error for configurations that cannot be saved; `path` is the folder, or None if there is none."""
    where = "" if path is None else f" in {path}"
    return ParameterError(
        f"{CACHE_VARIABLE}={cache_setting() or 'unset'}: results cannot be saved{where}: {error}",
        "the absolute path of a writable folder on a disk with free space, or off",
        f"{CACHE_VARIABLE}=off to save nothing",
    )


def _read(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file cannot be read or holds anything but a JSON object."""
    try:
        entry = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _make_key(kernel: str, problem_key: str, device: str) -> dict[str, str]:
    """Return the complete key of a cache entry."""
    return {"kernel": kernel, "problem": problem_key, "device": device, **environment()}


def _file_name(key: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest() + ".json"


@lru_cache(maxsize=1)
def environment() -> dict[str, str]:
    """Return the part of a cache key that describes the installation.

    It has the version of the GPU's driver, the versions of torch and triton, and a hash of the kernels' sources.
    """
    found = {"driver": "", "sources": _hash_sources()}
    for path in DRIVER_VERSION_FILES:
        with contextlib.suppress(OSError):
            found["driver"] = path.read_text(errors="replace").partition("\n")[0]
    for name in ("torch", "triton"):
        try:
            found[name] = import_module(name).__version__  # not `importlib.metadata`: several packages install triton
        except ImportError:
            found[name] = ""
    return found


def _hash_sources() -> str:
    """Return one hash of all source files under gpu/ and formula/."""
    package = Path(__file__).parents[2]
    return hash_sources(package, find_sources(package, "gpu", "formula"))
