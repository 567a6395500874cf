"""Sightline for torch: the registered operator, torch's own signature, and layers."""

from .door import kernels, run

__all__ = ["kernels", "run"]
