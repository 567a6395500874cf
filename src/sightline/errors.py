"""The errors that Sightline raises: one class for each kind of error.

`check_count` raises one of them. `name_file` adds a path to Python's errors. A `Context` warns if it is not entered.

An error message has three parts: what was given, what is allowed, and the cure. Each class also derives from a fitting
built-in exception, so that `except ValueError` and similar clauses catch these errors too.
"""

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Generator, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Never, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

__all__ = [
    "ChangedArrayError",
    "DeviceError",
    "DtypeError",
    "FormulaError",
    "KernelRefusedError",
    "MaskError",
    "MissingExtraError",
    "ParameterError",
    "RankError",
    "ShapeError",
    "SightlineError",
    "TableError",
    "UnknownArgumentError",
    "name_file",
]


class SightlineError(Exception):
    """Base class of all errors of this library.

    The three parameters are also attributes, and `str(error)` shows each of them on its own line. If Keras rewrites an
    error, the new error has the whole message in `given`.

    Parameters
    ----------
    given : str
        What the caller passed, with its numbers.
    allowed : str
        What the library accepts.
    cure : str
        One thing to write instead.
    """

    def __init__(self, given: str, allowed: str = "", cure: str = "") -> None:
        self.given, self.allowed, self.cure = given, allowed, cure
        self.args = (f"{given}\n  allowed: {allowed}\n  cure:    {cure}" if allowed or cure else given,)

    def __reduce__(self) -> tuple[type["SightlineError"], tuple[str, str, str]]:
        return type(self), (self.given, self.allowed, self.cure)


class ShapeError(SightlineError, ValueError):
    """Shapes of query, key, value, sinks or tables do not fit together. Also a ValueError."""


class DtypeError(SightlineError, TypeError):
    """Arrays have a dtype that Sightline does not accept, or have different dtypes. Also a TypeError."""


class DeviceError(SightlineError, ValueError):
    """Arrays lie on different devices or belong to different frameworks. Also a ValueError."""


class ParameterError(SightlineError, ValueError):
    """The value of a parameter, such as scale, dropout, seed or kernel, is not allowed. Also a ValueError."""


class UnknownArgumentError(SightlineError, TypeError):
    """A function received an argument that it does not have, such as one of another library. Also a TypeError."""


class MaskError(SightlineError, TypeError):
    """A mask is not a condition (True where a query may attend to a key). Also a TypeError."""


class FormulaError(SightlineError, TypeError):
    """An expression has no meaning in the formula language, such as `i >= j and j > 3`. Also a TypeError."""


class TableError(SightlineError, IndexError):
    """A formula reads outside its table. Also an IndexError."""


class ChangedArrayError(SightlineError, RuntimeError):
    """An array of a call was changed in place between forward and backward pass. Also a RuntimeError."""


class KernelRefusedError(SightlineError, NotImplementedError):
    """The kernel that the caller named cannot serve the call. The message lists why. Also a NotImplementedError."""


class RankError(SightlineError, RuntimeError):
    """A rank of a distributed call has failed, or passed other arguments than the other ranks. Also a RuntimeError."""


class MissingExtraError(SightlineError, ImportError):
    """An optional dependency is needed but not installed. Also an ImportError."""


def check_count(given: str, value: Any, least: int, cure: str) -> int:
    """Return `value` as an int if it is an int or a NumPy int (no bool) of at least `least`; else raise ParameterError.

    Parameters
    ----------
    given, cure : two texts of the error, as in `SightlineError`
        In `given`, "{!r}" stands for the value. torch.compile cannot trace `repr` of a number that is a symbol.
    """
    try:
        count = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise ParameterError(given.format(value), f"a whole number of at least {least}", cure)
    return count


@contextlib.contextmanager
def name_file(path: str | PathLike[str]) -> Iterator[None]:
    """If the `with` block raises an OSError without a file name, add this path; name a folder that is missing.

    Python names the file if the file cannot be opened, but not if a write fails, for example on a full disk.

    Parameters
    ----------
    path : str or path of the file
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not (folder := Path(path).absolute().parent).is_dir():
            error.strerror = f"The folder does not exist; create it by os.makedirs({str(folder)!r})"
        if error.strerror is not None and error.filename is None:
            error.filename = str(path)
        raise


class Context(contextlib._GeneratorContextManager[T]):
    """What `contextlib.contextmanager` returns, which also tells that nothing happens without `with`."""

    is_used = False

    def __enter__(self) -> T:
        self.is_used = True
        return super().__enter__()

    def __call__(self, function: Any) -> Any:
        self.is_used = True  # as a decorator, which makes a new context for each call
        return super().__call__(function)

    def __getattr__(self, name: str) -> Never:
        if name.startswith("_") or name == "gen":
            raise AttributeError(name)
        self._refuse(f".{name}")

    def __getitem__(self, key: Any) -> Never:
        self._refuse(f"[{key!r}]")

    def _refuse(self, read: str) -> Never:
        """Raise ParameterError. `read` is the text of an attribute or entry of what `with` binds."""
        self.is_used, call = True, f"{self.gen.__name__.strip('_')}(...)"  # type: ignore[attr-defined]
        cure = f"with {call} as result: ..., then result{read}"
        raise ParameterError(f"{call}{read} outside of a `with` statement", "what `with` binds", cure)

    def __del__(self) -> None:
        if not self.is_used and hasattr(self, "gen"):
            call = f"{self.gen.__name__.strip('_')}(...)"  # type: ignore[attr-defined]
            message = f"{call} without `with` does nothing\n  cure: with {call}: and your calls in its block"
            warnings.warn(message, UserWarning, stacklevel=2)


def context(function: Callable[P, Generator[T]]) -> Callable[P, Context[T]]:
    """Return a function that makes a `Context` of a generator, as `contextlib.contextmanager` does."""
    return functools.wraps(function)(lambda *inputs, **options: Context(function, inputs, options))
