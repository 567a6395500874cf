"""The version of triton that is installed."""

from __future__ import annotations

__all__ = ["triton_version"]


def triton_version() -> tuple[int, ...]:
    """(major, minor) of the triton that is installed."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])
