"""A property that is computed once for each object, without a lock.

`functools.cached_property` of Python 3.11 holds one lock for all objects of a class while it computes a value. A fork
in another thread copies the held lock into the child, which then waits for it forever. Python 3.12 removed the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

__all__ = ["cached_property"]

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801 - a decorator, named like that of functools
    """Compute the property at its first access and store the value in the object's `__dict__`.

    If several threads make the first access at once, each computes the value, and all receive the value stored first.
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
        value: Value = vars(instance).setdefault(self.name, self.function(instance))  # `setdefault` is atomic
        return value
