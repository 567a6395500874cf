"""The module `tl` of formulas compiled for Gluon: Triton's language, with Gluon's definition of `full`."""

from triton.experimental.gluon.language import full
from triton.language import *  # noqa: F403

__all__ = ["full"]
