"""Elementary functions on lanes: exp and its kin from one reduction, the rest from the C library lane by lane."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .builder import DOUBLE, INT32, INT64, Builder, Value, element_type, horner, lanes_of

__all__ = ["exp", "exp2", "exp2_by_scaling", "exp2_of_negative", "exp_of_negative", "tanh"]


class FloatConstants:
    """What these functions need to know of float32 or float64."""

    def __init__(self, value: Value) -> None:
        is_double = element_type(value.type) == DOUBLE
        self.integer_type = INT64 if is_double else INT32
        self.mantissa_bits = 52 if is_double else 23
        self.rounding_constant = (
            1.5 * 2**self.mantissa_bits
        )  # adding it leaves the nearest whole number in the low bits
        self.min_exponent = -1022 if is_double else -126  # exponent of the smallest normal number
        self.series_terms = 14 if is_double else 7  # of the series of e^r − 1 on |r| ≤ ½ ln 2
        # ln 2 in two parts, the first short enough that its multiples are exact (Cody and Waite, 1980)
        self.ln2_split = (0.6931471803691238, 1.9082149292705877e-10) if is_double else (0.693359375, -2.12194440e-4)


@cache
def exp2_coefficients(is_double: bool, degree: int = 5) -> tuple[float, ...]:
    """(2^f − 1) / f on [−½, ½] as a polynomial.

    For float64 its series; for float32 the series interpolated at Chebyshev's points, which needs fewer terms.
    """
    series = np.polynomial.Polynomial([math.log(2) ** k / math.factorial(k) for k in range(1, 14)])
    if not is_double:
        fitted = np.polynomial.Chebyshev.interpolate(series, degree, [-0.5, 0.5])
        series = fitted.convert(kind=np.polynomial.Polynomial)
    return tuple(float(c) for c in series.coef)


def exp2_of_negative(builder: Builder, x: Value, degree: int = 5) -> Value:
    """2^x for x ≤ 0 or NaN, within 2 ulps; 0 below the smallest normal number, −∞ included.

    The softmax's own: the fewest instructions that do. 2^x = 2^n (1 + f q(f)), n added to the exponent bits. `degree`
    is q's, in float32; with 4 the error is under 3 ulps, far less than bfloat16 keeps.
    """
    constants = FloatConstants(x)
    magic = x + constants.rounding_constant
    fraction = x - (magic - constants.rounding_constant)
    return _assemble_power(
        builder, x, constants.min_exponent, magic, fraction, exp2_coefficients(constants.mantissa_bits == 52, degree)
    )


def exp2_by_scaling(builder: Builder, x: Value, degree: int = 5) -> Value:
    """As `exp2_of_negative` for whole vectors of AVX-512, which rounds and scales in one instruction each.

    Numbers below the smallest normal one are not cut off.
    """
    kind, lanes = x.type, lanes_of(x.type)
    is_double, letter = element_type(kind) == DOUBLE, "d" if element_type(kind) == DOUBLE else "s"
    all_lanes, rounding_constant = ir.IntType(lanes)(-1), INT32(4)  # all lanes; the current rounding

    def instruction(name: str, second: Any) -> Callable[[Value], Value]:
        kinds = [kind, second.type, kind, all_lanes.type, INT32]
        function = builder.declare(f"llvm.x86.avx512.mask.{name}.p{letter}.512", ir.FunctionType(kind, kinds))
        return lambda v: Value(
            builder, builder.irbuilder.call(function, [v.raw, second, v.raw, all_lanes, rounding_constant])
        )

    fraction = instruction("reduce", INT32(0))(x)  # x less the nearest whole number; 0 of −∞
    power = builder.fma(fraction, horner(builder, fraction, exp2_coefficients(is_double, degree)), 1.0)
    return instruction("scalef", (x - fraction).raw)(power)


def exp_of_negative(builder: Builder, x: Value) -> Value:
    """e^x for x ≤ 0 or NaN, as `exp2_of_negative`: one instruction more, and no rounding of x log₂ e."""
    constants = FloatConstants(x)
    magic = builder.fma(x, 1 / math.log(2), constants.rounding_constant)
    n = magic - constants.rounding_constant
    rest = builder.fma(n, -constants.ln2_split[1], builder.fma(n, -constants.ln2_split[0], x))
    coefficients = [c / math.log(2) ** (k + 1) for k, c in enumerate(exp2_coefficients(constants.mantissa_bits == 52))]
    return _assemble_power(builder, x, constants.min_exponent * math.log(2), magic, rest, coefficients)


def _assemble_power(
    builder: Builder, x: Value, min_exponent: float, magic: Value, fraction: Value, coefficients: Sequence[float]
) -> Value:
    """2^n (1 + f q(f)) with n in the low bits of `magic`; 0 for x below `min_exponent`."""
    constants = FloatConstants(x)
    power = builder.fma(fraction, horner(builder, fraction, coefficients), 1.0)
    scaled = (
        power.bits(constants.integer_type) + (magic.bits(constants.integer_type) << constants.mantissa_bits)
    ).bits(element_type(x.type))
    return builder.where(x < min_exponent, 0.0, scaled)


def _exponent_and_expm1(builder: Builder, whole: Value, rest: Value) -> tuple[Value, Value]:
    """(2^n, e^r − 1) for n = whole − rounding bits; n within twice the exponents' range."""
    constants = FloatConstants(rest)
    coefficients = [1 / math.factorial(k) for k in range(1, constants.series_terms + 1)]
    expm1 = rest * horner(builder, rest, coefficients)
    count = whole.bits(constants.integer_type) - builder.value(constants.rounding_constant, whole.type).bits(
        constants.integer_type
    )
    return count, expm1


def _scale_by_power_of_2(builder: Builder, x: Value, count: Value) -> Value:
    """x · 2^count in two steps, so that neither leaves the range before the result does."""
    constants = FloatConstants(x)
    one = builder.value(1.0, x.type).bits(constants.integer_type)
    half = Value(builder, builder.irbuilder.ashr(count.raw, builder.value(1, count.type).raw))
    for part in (half, count - half):
        x = x * ((part << constants.mantissa_bits) + one).bits(element_type(x.type))
    return x


def _clamp(builder: Builder, x: Value, limit: float) -> Value:
    """x within ±limit; NaN stays."""
    return builder.where(x > limit, limit, builder.where(x < -limit, -limit, x))


def exp2(builder: Builder, x: Value) -> Value:
    """2^x, within 2 ulps."""
    constants = FloatConstants(x)
    x = _clamp(builder, x, -1.2 * constants.min_exponent)
    whole = x + constants.rounding_constant
    count, expm1 = _exponent_and_expm1(builder, whole, (x - (whole - constants.rounding_constant)) * math.log(2))
    return _scale_by_power_of_2(builder, expm1 + 1.0, count)


def exp(builder: Builder, x: Value) -> Value:
    """e^x, within 2 ulps."""
    count, expm1 = _exponent_and_expm1(builder, *_reduce_range(builder, x))
    return _scale_by_power_of_2(builder, expm1 + 1.0, count)


def tanh(builder: Builder, x: Value) -> Value:
    """tanh x = −t / (t + 2) with t = e^(−2|x|) − 1 = 2^n (e^r − 1) + (2^n − 1), exact near 0; 3 ulps."""
    size = builder.call_intrinsic("fabs", x)
    count, expm1 = _exponent_and_expm1(builder, *_reduce_range(builder, _clamp(builder, size, 25.0) * -2.0))
    scale = _scale_by_power_of_2(builder, builder.value(1.0, x.type), count)
    t = builder.fma(scale, expm1, scale - 1.0)
    return builder.call_intrinsic("copysign", -t / (t + 2.0), x)


def _reduce_range(builder: Builder, x: Value) -> tuple[Value, Value]:
    """(n with rounding bits, r) with x = n ln 2 + r and |r| ≤ ½ ln 2."""
    constants = FloatConstants(x)
    x = _clamp(builder, x, -1.2 * constants.min_exponent * math.log(2))
    whole = x * (1 / math.log(2)) + constants.rounding_constant
    n = whole - constants.rounding_constant
    return whole, builder.fma(n, -constants.ln2_split[1], builder.fma(n, -constants.ln2_split[0], x))
