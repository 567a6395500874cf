"""Every error Sightline raises: one class per kind, one shape of message.

A message says what was given, what is allowed, and the cure. Each class also derives from the built-in exception a
caller would expect, so `except ValueError` keeps working.
"""

__all__ = [
    "DeviceError",
    "DtypeError",
    "FormulaError",
    "KernelRefusedError",
    "MaskError",
    "MissingExtraError",
    "ParameterError",
    "ShapeError",
    "SightlineError",
    "TableError",
]


class SightlineError(Exception):
    """Base of all errors of this library.

    Parameters
    ----------
    given : str
        What the caller passed, with its numbers.
    allowed : str
        What would have been accepted.
    cure : str
        One thing to write instead.
    """

    def __init__(self, given: str, allowed: str, cure: str) -> None:
        self.given, self.allowed, self.cure = given, allowed, cure
        self.args = (f"{given}\n  allowed: {allowed}\n  cure:    {cure}",)

    def __reduce__(self) -> tuple[type["SightlineError"], tuple[str, str, str]]:
        return type(self), (self.given, self.allowed, self.cure)


class ShapeError(SightlineError, ValueError):
    """Shapes of query, key, value, sinks or a table that do not fit together."""


class DtypeError(SightlineError, TypeError):
    """Arrays of a kind attention is not defined on, or of several kinds at once."""


class DeviceError(SightlineError, ValueError):
    """Arrays that live on different devices or belong to different frameworks."""


class ParameterError(SightlineError, ValueError):
    """A number or word out of range: scale, dropout, seed, a statistic, a kernel's name."""


class MaskError(SightlineError, TypeError):
    """A mask that is not a condition (True attends)."""


class FormulaError(SightlineError, TypeError):
    """An expression the formula language cannot mean, such as `i >= j and j > 3`."""


class TableError(SightlineError, IndexError):
    """A formula that reads outside its table."""


class KernelRefusedError(SightlineError, NotImplementedError):
    """The kernel asked for by name cannot serve the problem; the message holds every reason."""


class MissingExtraError(SightlineError, ImportError):
    """An optional dependency is needed and not installed."""
