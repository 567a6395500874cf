"""For caches: properties computed once, and dicts of limited length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from .operations import store_first

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801 - a decorator, named like that of functools
    """Compute the property at its first access and store the value in the object's `__dict__`, without a lock.

    `functools.cached_property` of Python 3.11 holds one lock for all objects of a class while it computes a value. A
    fork in another thread copies the held lock into the child, which then waits for it forever. Python 3.12 removed the
    lock. If several threads make the first access at once, each computes the value, and all receive the value stored
    first.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> cached_property[T] | T:
        if instance is None:
            return self
        value: T = store_first(vars(instance), self.name, self.function(instance))
        return value


def store_entry(entries: dict[Any, Any], key: Any, entry: Any, limit: int) -> None:
    """Store an entry, and drop the first entries of the dict beyond the limit."""
    entries[key] = entry  # each operation on the dict is atomic, so no lock is needed
    while len(entries) > limit:
        try:
            del entries[next(iter(entries))]
        except (KeyError, StopIteration, RuntimeError):  # other threads have changed the dict
            break
