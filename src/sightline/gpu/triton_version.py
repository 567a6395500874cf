"""The version of the installed triton."""

from __future__ import annotations

__all__ = ["triton_version"]


def triton_version() -> tuple[int, ...]:
    """Return (major, minor) of the installed triton."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])
