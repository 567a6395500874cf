"""The factors of a weighted sum over heads."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np

from ..arrays.operations import convert, namespace
from ..errors import ParameterError
from .contexts import weigh

# one number for each head, one row of numbers for each layer of a watched model, or 1.0 for all; None stands for 1/H
HeadFactors = float | tuple[float, ...] | tuple[tuple[float, ...], ...] | None


def multiply_heads(array: Any, axis: int, factors: Any) -> Any:
    """Return the array with each head, along `axis`, multiplied by its factor. A factor of 0 gives 0, also of NaN."""
    if not isinstance(factors, tuple):  # 1 for every head
        return array
    xp = namespace(array)
    numbers = xp.astype(convert(np.asarray(factors), array), array.dtype)
    return weigh(xp.reshape(numbers, (-1, *[1] * (array.ndim - axis - 1))), array)


def parse_factors(how: str, weights: Any) -> HeadFactors:
    """Return the `HeadFactors` of a "sum" or "mean" over heads. The weights of a mean are divided by their sum."""
    if weights is None:
        return None if how == "mean" else 1.0
    if getattr(weights, "requires_grad", False):
        raise ParameterError(
            "weights of heads that require gradients",
            "constants",
            "weights=w.detach(), or multiply the statistic of each head by w yourself",
        )
    numbers = weights.tolist() if hasattr(weights, "tolist") else weights
    rows = (
        numbers if isinstance(numbers, list | tuple) and numbers and isinstance(numbers[0], list | tuple) else [numbers]
    )
    entries = [x if isinstance(x, Real) else math.nan for row in rows if isinstance(row, list | tuple) for x in row]
    if not (all(isinstance(row, list | tuple) and row for row in rows) and all(map(math.isfinite, entries))):
        raise ParameterError(
            f"weights={weights!r} of heads", "H finite numbers, or (layers, H) in a watch", "weights=[0.5, 0.5]"
        )
    totals = [math.fsum(row) if how == "mean" else 1.0 for row in rows]
    if 0 in totals:
        raise ParameterError(
            f"weights={weights!r}, whose sum is 0, of a mean", "weights with another sum", '.sum("heads", weights=...)'
        )
    factors = tuple([tuple([float(weight) / total for weight in row]) for row, total in zip(rows, totals, strict=True)])
    return factors[0] if rows[0] is numbers else factors


def format_factors(factors: Any) -> str:
    """Return ", weights=[...]" with up to 4 factors, or with their number if there are more; "" if all are 1."""
    if not isinstance(factors, tuple):
        return ""
    if isinstance(factors[0], tuple):
        return f", weights=[{len(factors)}×{len(factors[0])} numbers]"
    shown = ", ".join([f"{factor:.4g}" for factor in factors]) if len(factors) <= 4 else f"{len(factors)} numbers"
    return f", weights=[{shown}]"


def check_factors(factors: HeadFactors, num_heads: int) -> None:
    """Raise ParameterError if factors are a tuple that does not have one number for each head of a call."""
    if not isinstance(factors, tuple):
        return
    first = factors[0]
    if isinstance(first, tuple):
        shape, cure = f"{len(factors)}×{len(first)}", "see=[...] of a watch, where each layer has its own row"
    else:
        shape, cure = str(len(factors)), "weights of the selected heads alone, if heads are selected"
    if shape != str(num_heads):
        raise ParameterError(f"{shape} weights for {num_heads} heads", "one number for each head", cure)
