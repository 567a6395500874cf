"""What `sightline.tune` found, kept for the next process: one small JSON file a kernel of a problem.

It lies in the folder `tuned` of the user's cache, or of the one SIGHTLINE_CACHE names by an absolute path ("off" keeps
nothing). A file's name is the hash of all that the finding holds for: the device and its driver, the versions of torch
and Triton, the sources of the kernels, and the problem's structure. Files are written under another name and renamed,
so that processes may meet; they are numbers, not code, and a file that does not read as expected is none.
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

from ...errors import ParameterError
from ...problem import Problem
from ...statistics import Entropy, Lse, Mass, MaxScore, Statistic, unwrap_mean

__all__ = [
    "DRIVER_VERSION_FILES",
    "clear",
    "environment",
    "folder",
    "list_entries",
    "load",
    "prepare_folder",
    "problem_key",
    "store",
]

CACHE_VARIABLE = "SIGHTLINE_CACHE"
DRIVER_VERSION_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
MAX_CACHED_LOOKUPS = 4096  # findings, and that there is none


def folder() -> Path | None:
    """Where findings lie; None where nothing is to be kept."""
    setting = os.environ.get(CACHE_VARIABLE, "").strip()
    if setting.lower() == "off":
        return None
    if setting:
        path = Path(os.path.expanduser(setting))
        return path / "tuned" if path.is_absolute() else None
    from platformdirs import user_cache_path

    return user_cache_path("sightline", appauthor=False) / "tuned"


def problem_key(kernel: str, problem: Problem) -> str:
    """What of a problem is compiled into one of its kernels; lengths are not."""
    formulas = [None if formula is None else formula.text for formula in (problem.mask, problem.score)]
    wants_fused = {"forward": True, "weights_pass": False}.get(kernel)
    statistics = [repr(each) for each in problem.see if not isinstance(each, Lse) and _is_fused(each) == wants_fused]
    parts = [
        problem.dtype,
        problem.d_k,
        problem.d_v,
        *formulas,
        problem.sinks is not None,
        problem.dropout > 0,
        *statistics,
    ]
    return json.dumps(parts, separators=(",", ":"))


def load(kernel: str, problem: Problem, device: str) -> Mapping[str, Any] | None:
    """The finding for a kernel of such problems on that device; None where there is none."""
    place = _existing_folder()
    return None if place is None else _load(place, kernel, problem_key(kernel, problem), device)


def list_entries() -> list[dict[str, Any]]:
    """All that lie in the folder and hold for this machine's driver, versions and sources, whatever the device."""
    place, found = folder(), []
    for path in sorted(place.glob("*.json")) if place is not None else ():
        with contextlib.suppress(OSError, ValueError, RecursionError):
            one = json.loads(path.read_text())
            if (
                isinstance(one, dict)
                and isinstance(one.get("for"), dict)
                and environment().items() <= one["for"].items()
            ):
                found.append(one)
    return found


def prepare_folder() -> Path | None:
    """The folder, made if it is not there; None where nothing is to be kept.

    Raises
    ------
    ParameterError
        The folder cannot be written to.
    """
    setting = os.environ.get(CACHE_VARIABLE, "").strip()
    place = folder()
    try:
        if place is None:
            if setting.lower() != "off":
                raise NotADirectoryError("neither off nor an absolute path")
            return None
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        raise ParameterError(
            f"{CACHE_VARIABLE}={setting or 'unset'}: what is found would be kept in {place}, and {error}",
            "a folder that can be written to, or off",
            f"{CACHE_VARIABLE}=off to keep nothing",
        ) from error


def store(kernel: str, problem: Problem, device: str, entry: Mapping[str, Any]) -> Path | None:
    """Write a finding, and say where; None where nothing is kept.

    Raises
    ------
    ParameterError
        The folder cannot be written to.
    """
    place = prepare_folder()
    if place is None:
        return None
    key = _make_key(kernel, problem_key(kernel, problem), device)
    path = place / _file_name(key)
    part = path.with_suffix(f".{os.urandom(8).hex()}.part")
    try:
        part.write_text(json.dumps({"for": key, **entry}, indent=1) + "\n")
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    clear()
    return path


def clear() -> None:
    """Look at the files again."""
    _load.cache_clear()
    _existing_folder.cache_clear()


@lru_cache(maxsize=1)
def _existing_folder() -> Path | None:
    """The folder where it is there: in most processes nothing was ever tuned, and one look says so."""
    place = folder()
    return place if place is not None and os.path.isdir(place) else None


@lru_cache(maxsize=MAX_CACHED_LOOKUPS)
def _load(place: Path, kernel: str, problem_key: str, device: str) -> Mapping[str, Any] | None:
    key = _make_key(kernel, problem_key, device)
    try:
        found = json.loads((place / _file_name(key)).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("for") == key else None


def _is_fused(statistic: Statistic) -> bool:
    """Whether the forward kernel makes a statistic beside its output."""
    return isinstance(unwrap_mean(statistic), Entropy | Mass | MaxScore)


def _make_key(kernel: str, problem_key: str, device: str) -> dict[str, str]:
    """All that a finding holds for."""
    return {"kernel": kernel, "problem": problem_key, "device": device, **environment()}


def _file_name(key: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest() + ".json"


@lru_cache(maxsize=1)
def environment() -> dict[str, str]:
    """The driver, the versions of what compiles, and the sources of what is compiled."""
    found = {"driver": "", "sources": _hash_sources()}
    for path in DRIVER_VERSION_FILES:
        with contextlib.suppress(OSError):
            found["driver"] = path.read_text().splitlines()[0]
    for name in ("torch", "triton"):
        try:
            found[name] = import_module(name).__version__  # their packages go by several names
        except ImportError:
            found[name] = ""
    return found


def _hash_sources() -> str:
    package = Path(__file__).parents[2]
    files = sorted([*(package / "gpu").rglob("*.py"), *(package / "formula").rglob("*.py")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()
