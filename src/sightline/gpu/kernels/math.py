"""Operations of formulas that Triton lacks or defines differently: division as in Python, correctly rounded roots."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def whole_quotient(x, y):
    """Return ⌊x / y⌋ for integers x and y; 0 where y is 0."""
    zero = y == 0
    safe = tl.where(zero, 1, y)
    quotient = x // safe  # rounded toward 0
    rest = x - quotient * safe
    wrong = (rest != 0) & ((rest < 0) ^ (safe < 0))
    return tl.where(zero, 0, tl.where(wrong, quotient - 1, quotient))


@triton.jit
def whole_remainder(x, y):
    """Return x − y ⌊x / y⌋ for integers x and y; 0 where y is 0."""
    return tl.where(y == 0, 0, x - y * whole_quotient(x, y))


@triton.jit
def real_quotient(x, y):
    """Return x / y, correctly rounded. Triton's float32 division is off by up to 2 ulp: 6 / 3 may be less than 2."""
    quotient = x / y
    if quotient.dtype == tl.float32:
        return tl.div_rn(x, y)
    return quotient


@triton.jit
def real_remainder(x, y):
    """Return x − ⌊x / y⌋ y for floats x and y."""
    return x - tl.floor(real_quotient(x, y)) * y


@triton.jit
def square_root(x):
    """Return √x, correctly rounded."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    return tl.sqrt(x)
