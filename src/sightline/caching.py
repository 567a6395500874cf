"""For caches: properties computed once, dicts of limited length, and hashes of the sources of cache files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from .arrays.operations import is_compiling

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801 - a decorator, named like that of functools
    """Compute the property at its first access and store the value in the object's `__dict__`, without a lock.

    `functools.cached_property` of Python 3.11 holds one lock for all objects of a class while it computes a value. A
    fork in another thread copies the held lock into the child, which then waits for it forever. Python 3.12 removed the
    lock. If several threads make the first access at once, each computes the value, and all receive the value stored
    first.
    """

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> cached_property[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Value: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> cached_property[Value] | Value:
        if instance is None:
            return self
        value = self.function(instance)
        if is_compiling():  # torch.compile of torch 2.11 does not trace `setdefault` of an object's dict
            vars(instance)[self.name] = value
            return value
        stored: Value = vars(instance).setdefault(self.name, value)  # `setdefault` is atomic
        return stored


def find_sources(package: Path, *places: str) -> list[Path]:
    """Return the Python files at these places of the package, sorted; a place is a folder or a file."""
    roots = [package / place for place in places]
    return sorted(path for root in roots for path in ([root] if root.suffix else root.rglob("*.py")))


def hash_sources(package: Path, files: Iterable[Path]) -> str:
    """Return one hash of the paths of these files within the package, and of their contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def store(entries: dict[Any, Any], key: Any, entry: Any, limit: int) -> None:
    """Store an entry, and drop the first entries of the dict beyond the limit."""
    entries[key] = entry  # each operation on the dict is atomic, so no lock is needed
    while len(entries) > limit:
        try:
            del entries[next(iter(entries))]
        except (KeyError, StopIteration, RuntimeError):  # other threads have changed the dict
            break
