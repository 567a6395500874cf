"""Contexts, such as `with sightline.threads(2):`, that warn if they are called without `with`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import _GeneratorContextManager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from .errors import ParameterError

P = ParamSpec("P")
T = TypeVar("T")


class Context(_GeneratorContextManager[T]):
    """What `contextlib.contextmanager` returns, which also tells that nothing happens without `with`."""

    def __init__(self, function: Callable[..., Generator[T]], inputs: Any, options: Any) -> None:
        super().__init__(function, inputs, options)
        self._name, self._is_used = function.__name__.strip("_"), False

    def __enter__(self) -> T:
        self._is_used = True
        return super().__enter__()

    def __call__(self, function: Any) -> Any:
        self._is_used = True
        return super().__call__(function)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._is_used = True
        cure = f"with {self._name}(...) as result: ..., then result.{name}"
        raise ParameterError(f"{self._name}(...).{name} outside of a `with` statement", "what `with` binds", cure)

    def __getitem__(self, key: Any) -> Any:
        return self.calls

    def __del__(self) -> None:
        if not vars(self).get("_is_used", True):
            cure = f"with {self._name}(...): and your calls in its block"
            message = f"{self._name}(...) without `with` does nothing\n  cure: {cure}"
            warnings.warn(message, UserWarning, stacklevel=2)


def context(function: Callable[P, Generator[T]]) -> Callable[P, Context[T]]:
    """Return a function that makes a `Context` of a generator, as `contextlib.contextmanager` does."""
    return wraps(function)(lambda *inputs, **options: Context(function, inputs, options))
