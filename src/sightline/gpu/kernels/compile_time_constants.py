"""Compile-time constants of a kernel: tile sizes, head widths, types. Lengths and strides are run-time arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import triton.language as tl

__all__ = ["MetaParameters", "name_variants", "padded_width", "wrap_meta_parameters"]


def padded_width(width: int) -> int:
    """Return the width to which rows of `width` are padded for a matrix product: the next power of two, at least 16."""
    return max(16, 1 << max(width - 1, 0).bit_length())


@dataclass(frozen=True)
class MetaParameters:
    """Compile-time constants of one kernel. Kernels read a constant as `meta.rows`."""

    rows: int  # queries of a tile, a power of two
    keys: int  # keys of a tile, a power of two, at most 128
    d_k: int
    d_v: int
    padded_d_k: int  # `padded_width(d_k)`
    padded_d_v: int
    even: bool  # True if the problem's number of keys is a multiple of the tile size `keys`
    index_type: Any  # integer type of the offsets within a tile
    accumulator: Any  # float type of scores and sums
    precision: str  # the precision of float32 products: "ieee" or "tf32"
    widens_operands: (
        bool  # True if loaded tiles are widened to `accumulator`: Triton's interpreter needs it for bfloat16
    )
    max_score: bool = False  # True if the forward kernel also computes the largest score of each query and its key
    entropy: bool = False  # True if the forward kernel also computes the entropy of each query


@lru_cache(1024)
def wrap_meta_parameters(meta: MetaParameters) -> MetaParameters:
    """Return `meta` with every field as a `tl.constexpr`.

    Before version 3.9, Triton compiles numbers in a tuple as run-time arguments unless they are `tl.constexpr`.
    """
    return replace(meta, **{entry.name: tl.constexpr(getattr(meta, entry.name)) for entry in fields(meta)})


def name_variants(plain: str, nan_safe: str) -> Callable[[Any], str]:
    """Return the option `repr` of `triton.jit` for a kernel with two variants.

    Profilers show the name `nan_safe` if SUBBLOCKS is not 0, else the name `plain`.
    """
    return lambda specialization: nan_safe if specialization.constants["SUBBLOCKS"] else plain
