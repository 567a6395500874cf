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
from ...statistics import Entropy, Lse, Mass, MaxScore, Statistic, inner

__all__ = ["DRIVERS", "find", "findings", "folder", "forget", "keep", "machine", "ready", "structure"]

VARIABLE = "SIGHTLINE_CACHE"
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
REMEMBERED = 4096  # findings, and that there is none


def folder() -> Path | None:
    """Where findings lie; None where nothing is to be kept."""
    word = os.environ.get(VARIABLE, "").strip()
    if word.lower() == "off":
        return None
    if word:
        path = Path(os.path.expanduser(word))
        return path / "tuned" if path.is_absolute() else None
    from platformdirs import user_cache_path

    return user_cache_path("sightline", appauthor=False) / "tuned"


def structure(kernel: str, problem: Problem) -> str:
    """What of a problem is compiled into one of its kernels; lengths are not."""
    formulas = [None if formula is None else formula.text for formula in (problem.mask, problem.score)]
    riders = {"forward": True, "observe": False}.get(kernel)
    seen = [repr(each) for each in problem.see if not isinstance(each, Lse) and _rides(each) == riders]
    parts = [problem.dtype, problem.d_k, problem.d_v, *formulas, problem.sinks is not None, problem.dropout > 0, *seen]
    return json.dumps(parts, separators=(",", ":"))


def find(kernel: str, problem: Problem, device: str) -> Mapping[str, Any] | None:
    """The finding for a kernel of such problems on that device; None where there is none."""
    place = _place()
    return None if place is None else _found(place, kernel, structure(kernel, problem), device)


def findings() -> list[dict[str, Any]]:
    """All that lie in the folder and hold for this machine's driver, versions and sources, whatever the device."""
    place, found = folder(), []
    for path in sorted(place.glob("*.json")) if place is not None else ():
        with contextlib.suppress(OSError, ValueError, RecursionError):
            one = json.loads(path.read_text())
            if isinstance(one, dict) and isinstance(one.get("for"), dict) and machine().items() <= one["for"].items():
                found.append(one)
    return found


def ready() -> Path | None:
    """The folder, made if it is not there; None where nothing is to be kept.

    Raises
    ------
    ParameterError
        The folder cannot be written to.
    """
    word = os.environ.get(VARIABLE, "").strip()
    place = folder()
    try:
        if place is None:
            if word.lower() != "off":
                raise NotADirectoryError("neither off nor an absolute path")
            return None
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        raise ParameterError(
            f"{VARIABLE}={word or 'unset'}: what is found would be kept in {place}, and {error}",
            "a folder that can be written to, or off",
            f"{VARIABLE}=off to keep nothing",
        ) from error


def keep(kernel: str, problem: Problem, device: str, finding: Mapping[str, Any]) -> Path | None:
    """Write a finding, and say where; None where nothing is kept.

    Raises
    ------
    ParameterError
        The folder cannot be written to.
    """
    place = ready()
    if place is None:
        return None
    held_for = _identity(kernel, structure(kernel, problem), device)
    path = place / _name(held_for)
    part = path.with_suffix(f".{os.urandom(8).hex()}.part")
    try:
        part.write_text(json.dumps({"for": held_for, **finding}, indent=1) + "\n")
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    forget()
    return path


def forget() -> None:
    """Look at the files again."""
    _found.cache_clear()
    _place.cache_clear()


@lru_cache(maxsize=1)
def _place() -> Path | None:
    """The folder where it is there: in most processes nothing was ever tuned, and one look says so."""
    place = folder()
    return place if place is not None and os.path.isdir(place) else None


@lru_cache(maxsize=REMEMBERED)
def _found(place: Path, kernel: str, structure: str, device: str) -> Mapping[str, Any] | None:
    held_for = _identity(kernel, structure, device)
    try:
        found = json.loads((place / _name(held_for)).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("for") == held_for else None


def _rides(statistic: Statistic) -> bool:
    """Whether the forward kernel makes a statistic beside its output."""
    return isinstance(inner(statistic), Entropy | Mass | MaxScore)


def _identity(kernel: str, structure: str, device: str) -> dict[str, str]:
    """All that a finding holds for."""
    return {"kernel": kernel, "problem": structure, "device": device, **machine()}


def _name(held_for: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(held_for, sort_keys=True).encode()).hexdigest() + ".json"


@lru_cache(maxsize=1)
def machine() -> dict[str, str]:
    """The driver, the versions of what compiles, and the sources of what is compiled."""
    found = {"driver": "", "sources": _sources()}
    for path in DRIVERS:
        with contextlib.suppress(OSError):
            found["driver"] = path.read_text().splitlines()[0]
    for name in ("torch", "triton"):
        try:
            found[name] = import_module(name).__version__  # their packages go by several names
        except ImportError:
            found[name] = ""
    return found


def _sources() -> str:
    package = Path(__file__).parents[2]
    files = sorted([*(package / "gpu").rglob("*.py"), *(package / "formula").rglob("*.py")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()
