"""What of a problem's shape is compiled into its kernels. Formulas are beside it; lengths and strides are arguments."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import triton.language as tl

__all__ = ["MetaParameters", "padded_width", "wrap_meta_parameters"]


def padded_width(width: int) -> int:
    """The width padded for a matrix product: the next power of two, 16 at least."""
    return max(16, 1 << max(width - 1, 0).bit_length())


@dataclass(frozen=True)
class MetaParameters:
    """One structure of a kernel. Read in kernels as `meta.rows`."""

    rows: int  # queries of a tile, a power of two
    keys: int  # keys of a tile, likewise, at most 128
    d_k: int
    d_v: int
    padded_d_k: int  # d_k and d_v up to the next power of two, 16 at least
    padded_d_v: int
    even: bool  # whether the keys fill their last tile
    index_type: Any  # type of offsets within a tile
    accumulator: Any  # type of scores and sums
    precision: str  # of products of float32: "ieee" or "tf32"
    widens_operands: bool  # whether factors are widened first, as Triton's interpreter needs for bfloat16
    max_score: bool = False  # whether the largest score and its key ride along
    entropy: bool = False  # whether the entropy does


@lru_cache(1024)
def wrap_meta_parameters(meta: MetaParameters) -> MetaParameters:
    """The form with every entry as a constant of the compiler's: before Triton 3.9 it took those of tuples for none."""
    return replace(meta, **{entry.name: tl.constexpr(getattr(meta, entry.name)) for entry in fields(meta)})
