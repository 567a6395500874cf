"""The module that generated functions of formulas import as `tl` if they are compiled for Gluon.

It is Triton's language, with Gluon's definition of `full`.
"""

from triton.experimental.gluon.language import full
from triton.language import *  # noqa: F403

__all__ = ["full"]
