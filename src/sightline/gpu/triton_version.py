"""The version of the installed triton."""

from __future__ import annotations

__all__ = ["triton_version"]


def triton_version() -> tuple[int, ...]:
    """Return the version of the installed triton as (major, minor)."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])
