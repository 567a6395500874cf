"""Elementary functions on lanes: exp and its kin from one reduction, the rest from the C library lane by lane."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .builder import DOUBLE, INT32, INT64, Code, Value, element, horner, lanes_of

__all__ = ["exp", "exp2", "exp2_by_scaling", "exp2_of_negative", "exp_of_negative", "tanh"]


class Format:
    """What these functions need to know of float32 or float64."""

    def __init__(self, value: Value) -> None:
        wide = element(value.type) == DOUBLE
        self.integer = INT64 if wide else INT32
        self.mantissa = 52 if wide else 23
        self.rounding = 1.5 * 2**self.mantissa  # adding it leaves the nearest whole number in the low bits
        self.smallest = -1022 if wide else -126  # exponent of the smallest normal number
        self.terms = 14 if wide else 7  # of the series of e^r − 1 on |r| ≤ ½ ln 2
        # ln 2 in two parts, the first short enough that its multiples are exact (Cody and Waite, 1980)
        self.ln2 = (0.6931471803691238, 1.9082149292705877e-10) if wide else (0.693359375, -2.12194440e-4)


@cache
def exp2_coefficients(wide: bool, degree: int = 5) -> tuple[float, ...]:
    """(2^f − 1) / f on [−½, ½] as a polynomial.

    For float64 its series; for float32 the series interpolated at Chebyshev's points, which needs fewer terms.
    """
    series = np.polynomial.Polynomial([math.log(2) ** k / math.factorial(k) for k in range(1, 14)])
    if not wide:
        fitted = np.polynomial.Chebyshev.interpolate(series, degree, [-0.5, 0.5])
        series = fitted.convert(kind=np.polynomial.Polynomial)
    return tuple(float(c) for c in series.coef)


def exp2_of_negative(code: Code, x: Value, degree: int = 5) -> Value:
    """2^x for x ≤ 0 or NaN, within 2 ulps; 0 below the smallest normal number, −∞ included.

    The softmax's own: the fewest instructions that do. 2^x = 2^n (1 + f q(f)), n added to the exponent bits. `degree`
    is q's, in float32; with 4 the error is under 3 ulps, far less than bfloat16 keeps.
    """
    form = Format(x)
    magic = x + form.rounding
    fraction = x - (magic - form.rounding)
    return _softmax_power(code, x, form.smallest, magic, fraction, exp2_coefficients(form.mantissa == 52, degree))


def exp2_by_scaling(code: Code, x: Value, degree: int = 5) -> Value:
    """As `exp2_of_negative` for whole vectors of AVX-512, which rounds and scales in one instruction each.

    Numbers below the smallest normal one are not cut off.
    """
    kind, lanes = x.type, lanes_of(x.type)
    wide, letter = element(kind) == DOUBLE, "d" if element(kind) == DOUBLE else "s"
    everywhere, rounding = ir.IntType(lanes)(-1), INT32(4)  # all lanes; the current rounding

    def instruction(name: str, second: Any) -> Callable[[Value], Value]:
        kinds = [kind, second.type, kind, everywhere.type, INT32]
        function = code.declare(f"llvm.x86.avx512.mask.{name}.p{letter}.512", ir.FunctionType(kind, kinds))
        return lambda v: Value(code, code.builder.call(function, [v.raw, second, v.raw, everywhere, rounding]))

    fraction = instruction("reduce", INT32(0))(x)  # x less the nearest whole number; 0 of −∞
    power = code.fma(fraction, horner(code, fraction, exp2_coefficients(wide, degree)), 1.0)
    return instruction("scalef", (x - fraction).raw)(power)


def exp_of_negative(code: Code, x: Value) -> Value:
    """e^x for x ≤ 0 or NaN, as `exp2_of_negative`: one instruction more, and no rounding of x log₂ e."""
    form = Format(x)
    magic = code.fma(x, 1 / math.log(2), form.rounding)
    n = magic - form.rounding
    rest = code.fma(n, -form.ln2[1], code.fma(n, -form.ln2[0], x))
    in_e = [c / math.log(2) ** (k + 1) for k, c in enumerate(exp2_coefficients(form.mantissa == 52))]
    return _softmax_power(code, x, form.smallest * math.log(2), magic, rest, in_e)


def _softmax_power(
    code: Code, x: Value, smallest: float, magic: Value, fraction: Value, coefficients: Sequence[float]
) -> Value:
    """2^n (1 + f q(f)) with n in the low bits of `magic`; 0 for x below `smallest`."""
    form = Format(x)
    power = code.fma(fraction, horner(code, fraction, coefficients), 1.0)
    scaled = (power.bits(form.integer) + (magic.bits(form.integer) << form.mantissa)).bits(element(x.type))
    return code.where(x < smallest, 0.0, scaled)


def _grown(code: Code, whole: Value, rest: Value) -> tuple[Value, Value]:
    """(2^n, e^r − 1) for n = whole − rounding bits; n within twice the exponents' range."""
    form = Format(rest)
    coefficients = [1 / math.factorial(k) for k in range(1, form.terms + 1)]
    grown = rest * horner(code, rest, coefficients)
    count = whole.bits(form.integer) - code.value(form.rounding, whole.type).bits(form.integer)
    return count, grown


def _times_power(code: Code, x: Value, count: Value) -> Value:
    """x · 2^count in two steps, so that neither leaves the range before the result does."""
    form = Format(x)
    one = code.value(1.0, x.type).bits(form.integer)
    half = Value(code, code.builder.ashr(count.raw, code.value(1, count.type).raw))
    for part in (half, count - half):
        x = x * ((part << form.mantissa) + one).bits(element(x.type))
    return x


def _held(code: Code, x: Value, limit: float) -> Value:
    """x within ±limit; NaN stays."""
    return code.where(x > limit, limit, code.where(x < -limit, -limit, x))


def exp2(code: Code, x: Value) -> Value:
    """2^x, within 2 ulps."""
    form = Format(x)
    x = _held(code, x, -1.2 * form.smallest)
    whole = x + form.rounding
    count, grown = _grown(code, whole, (x - (whole - form.rounding)) * math.log(2))
    return _times_power(code, grown + 1.0, count)


def exp(code: Code, x: Value) -> Value:
    """e^x, within 2 ulps."""
    count, grown = _grown(code, *_reduced(code, x))
    return _times_power(code, grown + 1.0, count)


def tanh(code: Code, x: Value) -> Value:
    """tanh x = −t / (t + 2) with t = e^(−2|x|) − 1 = 2^n (e^r − 1) + (2^n − 1), exact near 0; 3 ulps."""
    size = code.intrinsic("fabs", x)
    count, grown = _grown(code, *_reduced(code, _held(code, size, 25.0) * -2.0))
    scale = _times_power(code, code.value(1.0, x.type), count)
    t = code.fma(scale, grown, scale - 1.0)
    return code.intrinsic("copysign", -t / (t + 2.0), x)


def _reduced(code: Code, x: Value) -> tuple[Value, Value]:
    """(n with rounding bits, r) with x = n ln 2 + r and |r| ≤ ½ ln 2."""
    form = Format(x)
    x = _held(code, x, -1.2 * form.smallest * math.log(2))
    whole = x * (1 / math.log(2)) + form.rounding
    n = whole - form.rounding
    return whole, code.fma(n, -form.ln2[1], code.fma(n, -form.ln2[0], x))
