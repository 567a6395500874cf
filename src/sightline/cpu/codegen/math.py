"""Elementary functions on vectors: exp, exp2, tanh and log1p.

The functions share one range reduction. `render_llvm` takes all other functions from LLVM's intrinsics, which may call
the C library once per lane.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from .builder import Builder
from .values import DOUBLE, INT32, INT64, Value, integer


class FloatConstants:
    """The constants of elementary functions for the format of `value`, float32 or float64."""

    def __init__(self, value: Value) -> None:
        is_double = value.type.element == DOUBLE
        self.integer_type = INT64 if is_double else INT32
        self.mantissa_bits = 52 if is_double else 23
        # x + rounding_constant has the whole number nearest to x in its low bits
        self.rounding_constant = 1.5 * 2**self.mantissa_bits
        self.min_exponent = -1022 if is_double else -126  # exponent of the smallest normal number
        self.series_terms = 14 if is_double else 7  # terms of the series of e^r − 1 for |r| ≤ ½ ln 2
        # ln 2 = high + low; high has few enough bits that its multiples are exact (Cody and Waite, 1980)
        self.ln2_split = (0.6931471803691238, 1.9082149292705877e-10) if is_double else (0.693359375, -2.12194440e-4)


@cache
def exp2_coefficients(is_double: bool, degree: int = 5) -> tuple[float, ...]:
    """Return the coefficients of a polynomial for (2^f − 1) / f on [−½, ½], lowest power first.

    float64 uses the Taylor series, whatever `degree` is. float32 interpolates the series at Chebyshev points with a
    polynomial of this degree, which needs fewer terms than the series.
    """
    series = np.polynomial.Polynomial([math.log(2) ** k / math.factorial(k) for k in range(1, 14)])
    if not is_double:
        fitted = np.polynomial.Chebyshev.interpolate(series, degree, [-0.5, 0.5])
        series = fitted.convert(kind=np.polynomial.Polynomial)
    return tuple(float(c) for c in series.coef)


def exp2_of_negative(builder: Builder, x: Value, degree: int = 5) -> Value:
    """Return 2^x for x ≤ 0 or NaN, within 2 ulps; 0 if 2^x is below the smallest normal number, also for x = −∞.

    The softmax uses this function, so it has as few instructions as possible. For x = n + f, it computes
    2^x = 2^n (1 + f q(f)), and adds n to the exponent bits. `degree` is the degree of q in float32. With degree 4 the
    error is below 3 ulps of float32, far less than an ulp of bfloat16.
    """
    constants = FloatConstants(x)
    magic = x + constants.rounding_constant
    fraction = x - (magic - constants.rounding_constant)
    coefficients = exp2_coefficients(constants.mantissa_bits == 52, degree)
    return _assemble_power(builder, x, constants.min_exponent, magic, fraction, coefficients)


def exp2_by_scaling(builder: Builder, x: Value, degree: int = 5) -> Value:
    """Return the result of `exp2_of_negative` for a whole vector of AVX-512 (64 bytes), subnormal results included.

    One instruction of AVX-512 subtracts the nearest whole number, and another multiplies by a power of two.
    """
    kind, is_double = x.type, x.type.element == DOUBLE
    letter, all_lanes = "d" if is_double else "s", builder.value(-1, integer(kind.lanes))
    rounding = builder.value(4, INT32)  # the current rounding mode

    def instruction(name: str, v: Value, second: Value) -> Value:
        function = f"llvm.x86.avx512.mask.{name}.p{letter}.512"
        return builder.call(function, kind, v, second, v, all_lanes, rounding)

    fraction = instruction("reduce", x, builder.value(0, INT32))  # x − the nearest whole number; 0 for x = −∞
    power = builder.fma(fraction, horner(builder, fraction, exp2_coefficients(is_double, degree)), 1.0)
    return instruction("scalef", power, x - fraction)


def exp_of_negative(builder: Builder, x: Value) -> Value:
    """Return e^x for x ≤ 0 or NaN, as `exp2_of_negative` does, with one more instruction.

    The reduction does not round the product x log₂ e, so that the error stays within 2 ulps.
    """
    constants = FloatConstants(x)
    magic = builder.fma(x, 1 / math.log(2), constants.rounding_constant)
    rest = _subtract_ln2_multiple(builder, x, magic - constants.rounding_constant)
    coefficients = [c / math.log(2) ** (k + 1) for k, c in enumerate(exp2_coefficients(constants.mantissa_bits == 52))]
    return _assemble_power(builder, x, constants.min_exponent * math.log(2), magic, rest, coefficients)


def _assemble_power(builder: Builder, x: Value, low: float, magic: Value, f: Value, q: Sequence[float]) -> Value:
    """Return 2^n (1 + f q(f)), with n in the low bits of `magic` and the coefficients `q`; 0 for x < `low`."""
    constants = FloatConstants(x)
    power = builder.fma(f, horner(builder, f, q), 1.0)
    power_bits, n = (value.bits(constants.integer_type) for value in (power, magic))
    scaled = (power_bits + (n << constants.mantissa_bits)).bits(x.type.element)
    return builder.where(x < low, 0.0, scaled)


def _exponent_and_expm1(builder: Builder, whole: Value, rest: Value) -> tuple[Value, Value]:
    """Return (n as an integer, e^r − 1) for `whole` = n + rounding_constant and `rest` = r."""
    constants = FloatConstants(rest)
    coefficients = [1 / math.factorial(k) for k in range(1, constants.series_terms + 1)]
    expm1 = builder.fma(rest * rest, horner(builder, rest, coefficients[1:]), rest)
    offset = builder.value(constants.rounding_constant, whole.type)
    exponent, offset_bits = (value.bits(constants.integer_type) for value in (whole, offset))
    return exponent - offset_bits, expm1


def _scale_by_power_of_2(builder: Builder, x: Value, exponent: Value) -> Value:
    """Return x · 2^exponent, for an exponent within twice the format's range.

    The function multiplies twice by about 2^(exponent / 2), so that the first product neither overflows nor underflows
    unless the result does.
    """
    constants = FloatConstants(x)
    one = builder.value(1.0, x.type).bits(constants.integer_type)
    half = exponent.shift_right_signed(1)
    for part in (half, exponent - half):
        x = x * ((part << constants.mantissa_bits) + one).bits(x.type.element)
    return x


def _clamp(builder: Builder, x: Value, limit: float) -> Value:
    """Return x clamped to [−limit, limit]; NaN stays NaN."""
    return builder.where(x > limit, limit, builder.where(x < -limit, -limit, x))


def exp2(builder: Builder, x: Value) -> Value:
    """Return 2^x, within 2 ulps."""
    constants = FloatConstants(x)
    x = _clamp(builder, x, -1.2 * constants.min_exponent)
    whole = x + constants.rounding_constant
    exponent, expm1 = _exponent_and_expm1(builder, whole, (x - (whole - constants.rounding_constant)) * math.log(2))
    return _scale_by_power_of_2(builder, expm1 + 1.0, exponent)


def exp(builder: Builder, x: Value) -> Value:
    """Return e^x, within 2 ulps."""
    exponent, expm1 = _exponent_and_expm1(builder, *_reduce_range(builder, x))
    return _scale_by_power_of_2(builder, expm1 + 1.0, exponent)


def tanh(builder: Builder, x: Value) -> Value:
    """Return tanh x, within 3 ulps of float32 and 1.5 ulps of float64.

    tanh |x| = −t / (t + 2), with t = e^(−2|x|) − 1 = 2^n (e^r − 1) + (2^n − 1), which does not cancel near 0.
    """
    magnitude = builder.call_intrinsic("fabs", x)
    exponent, expm1 = _exponent_and_expm1(builder, *_reduce_range(builder, _clamp(builder, magnitude, 25.0) * -2.0))
    scale = _scale_by_power_of_2(builder, builder.value(1.0, x.type), exponent)
    t = builder.fma(scale, expm1, scale - 1.0)
    result = -t / (t + 2.0)
    if x.type.element == DOUBLE:
        result = result + _tanh_correction(builder, result, t, builder.fma(scale, expm1, scale - 1.0 - t))
    return builder.call_intrinsic("copysign", result, x)


def log1p(builder: Builder, x: Value) -> Value:
    """Return ln(1 + x), within 4 ulps: for u, the rounded 1 + x, it is ln(u) · x / (u − 1) (Kahan)."""
    u = x + 1.0
    logarithm = builder.call_intrinsic("log", u)
    return builder.where(u == 1.0, x, builder.where(x > 1.0, logarithm, logarithm * (x / (u - 1.0))))


def _tanh_correction(builder: Builder, result: Value, t: Value, t_error: Value) -> Value:
    """Return the correction to add to `result`, a rounded −t / (t + 2). The exact number t is t + t_error.

    The correction is the remainder of the division, less the rounding errors of t and t + 2, divided by t + 2.
    """
    divisor = t + 2.0
    divisor_error = t - (divisor - 2.0) + t_error
    remainder = builder.fma(-result, divisor, -t) - t_error - result * divisor_error
    return remainder / divisor


def _reduce_range(builder: Builder, x: Value) -> tuple[Value, Value]:
    """Return (n + rounding_constant, r) with x = n ln 2 + r and |r| ≤ ½ ln 2."""
    constants = FloatConstants(x)
    x = _clamp(builder, x, -1.2 * constants.min_exponent * math.log(2))
    whole = x * (1 / math.log(2)) + constants.rounding_constant
    return whole, _subtract_ln2_multiple(builder, x, whole - constants.rounding_constant)


def _subtract_ln2_multiple(builder: Builder, x: Value, n: Value) -> Value:
    """Return x − n ln 2, with ln 2 in two parts."""
    high, low = FloatConstants(x).ln2_split
    return builder.fma(n, -low, builder.fma(n, -high, x))


def horner(builder: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """Return c₀ + c₁ x + c₂ x² + ..."""
    result: Value = builder.value(coefficients[-1], x.type)
    for coefficient in reversed(coefficients[:-1]):
        result = builder.fma(result, x, coefficient)
    return result


Combine = Callable[[Value, Value], Value]


def reduce_within_groups(vectors: list[Value], group_lanes: int, combine: Combine = operator.add) -> list[Value]:
    """Add the lanes of each vector within groups of `group_lanes` lanes; `combine` replaces the addition.

    Every `group_lanes` vectors give one vector, in which lane k of a group is the sum of this group in vector k.
    """
    for _ in range(group_lanes.bit_length() - 1):
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        halves = ([a.deinterleave(b, half, 1, group_lanes) for half in range(2)] for a, b in pairs)
        vectors = [combine(even, odd) for even, odd in halves]
    return vectors


def reduce_across_groups(vectors: list[Value], group_lanes: int, combine: Combine = operator.add) -> Value:
    """Add the groups of `group_lanes` lanes of each vector to one group; `combine` replaces the addition.

    Return one vector with the groups of all vectors, in their order.
    """
    lanes = group_lanes * len(vectors)
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        halves = ([a.deinterleave(b, half, group_lanes, lanes) for half in range(2)] for a, b in pairs)
        vectors = [combine(even, odd) for even, odd in halves]
    return vectors[0]
