"""The static parameters of the JAX primitives, and the shapes and dtypes that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..call.problem import Options, Problem
from ..call.spec import Arrays, CallSpec, find_differentiable_results
from ..call.validation import fold_scale
from ..formula.expression import Expression
from ..formula.formula_checks import check_spans

OUTPUT_INDEX, LSE_INDEX, PRECISE_LSE_INDEX, FIRST_ARRAY = range(4)  # the statistics' arrays begin at `FIRST_ARRAY`


@dataclass(frozen=True)
class PrimitiveOptions:
    """The static parameters of the primitives.

    Parameters
    ----------
    spec : the call; its arrays are the primitives' first arguments, in the order of `Arrays.flatten`
    wide_tables : for each table, the name of its dtype if it is passed as pairs of 32-bit words, else ""
    by_position : True if query, key, value, output and their derivatives lie in memory as (..., n, H, d)
        The shapes are still (..., H, n, d). Programs then need no copies of arrays whose axes the caller swapped.
    """

    spec: CallSpec
    wide_tables: tuple[str, ...]
    by_position: bool = False

    def examples(self, inputs: Sequence[Any]) -> Arrays:
        """Return arrays of zeros with the shapes and dtypes of the call's arrays, which are the first `inputs`."""
        arrays = self.spec.unflatten([example(x.shape, x.dtype) for x in inputs[: self.spec.num_arrays]])
        pairs = zip(arrays.tables, self.wide_tables, strict=True)
        return arrays._replace(tables=[example(x.shape[:-1], wide) if wide else x for x, wide in pairs])

    def problem(self, inputs: Sequence[Any]) -> Problem:
        """Return a problem without formulas, whose arrays have only the shapes and dtypes of `inputs`."""
        return self.spec.problem(self.examples(inputs))

    def result_types(self, inputs: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the shape and dtype of each result of the forward pass, from the shapes and dtypes of `inputs`."""
        problem = self.problem(inputs)
        rows = (*problem.batch_shape, problem.H, problem.n)
        types = [((*rows, problem.d_v), problem.dtype), (rows, problem.accumulator), ((*rows, 2), "uint32")]
        for statistic in problem.see:
            types += statistic.outputs(problem) if statistic.num_arrays else ()
        return [jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in types]

    def differentiable_results(self, inputs: Sequence[Any]) -> list[int]:
        """Return the indices of the results that have gradients."""
        return find_differentiable_results(self.problem(inputs).see, FIRST_ARRAY)


def fold_traced_scale(options: Options) -> Options:
    """Return the options of `parse`. A scale that is an array of JAX becomes a part of the score."""
    if not isinstance(options.scale, jax.Array):
        return options
    score, scale = fold_scale(options.score, options.scale)
    return options.replace(score=score, scale=scale)


def check_tables(problem: Problem) -> None:
    """Raise ShapeError if a table does not fit the extent (B, H, n, m) of the problem."""

    def check(formula: Expression) -> Expression:
        if 0 not in problem.extent:
            check_spans(formula, problem.extent)
        return formula

    problem.map_formulas(check)


def example(shape: Sequence[int], dtype: Any) -> Any:
    """Return a NumPy array of zeros of this shape and dtype, which takes the memory of one number."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))
