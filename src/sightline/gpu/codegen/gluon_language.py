"""Triton's language with the one word of formulas that Gluon has otherwise: what generated text calls `tl` in Gluon."""

from triton.experimental.gluon.language import full
from triton.language import *  # noqa: F403

__all__ = ["full"]
