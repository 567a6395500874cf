"""The definition of attention, kernels in plain array operations, dropout, and the budget of rounding errors."""

from .definition import Reference, StageGradients, Stages, backward, forward

__all__ = ["Reference", "StageGradients", "Stages", "backward", "forward"]
