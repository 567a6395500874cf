"""The static parameters of the JAX primitives, and the indices, shapes and dtypes that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..dispatch.call_text import CallText, count_arrays, find_differentiable_results
from ..problem.problem import NUM_OPERANDS, Problem
from .result_indices import FIRST_ARRAY


@dataclass(frozen=True)
class CallOptions:
    """The static parameters of the primitives.

    Parameters
    ----------
    text : the formulas, the statistics, scale and dropout
    wide_tables : for each table, the name of its dtype if it is passed as pairs of 32-bit words, else ""
    has_sinks, has_seed : whether sinks and a seed follow the arguments query, key, value and tables
    kernel, threads : as in `attention`
    by_position : True if query, key, value, output and their derivatives lie in memory as (..., n, H, d)
        The shapes are still (..., H, n, d). Programs then need no copies of arrays whose axes the caller swapped.
    """

    text: CallText
    wide_tables: tuple[str, ...]
    has_sinks: bool
    has_seed: bool
    kernel: str | None
    threads: int | None
    by_position: bool = False

    @property
    def num_inputs(self) -> int:
        """The number of arguments of the forward pass."""
        return NUM_OPERANDS + len(self.wide_tables) + self.has_sinks + self.has_seed

    @property
    def table_places(self) -> range:
        """The indices of the tables among the arguments."""
        return range(NUM_OPERANDS, NUM_OPERANDS + len(self.wide_tables))

    @property
    def differentiable_inputs(self) -> list[int]:
        """The indices of the arguments that may have gradients: query, key, value, the score's tables and the sinks."""
        tables = [NUM_OPERANDS + k for k in self.text.score_tables]
        return [*range(NUM_OPERANDS), *tables, *([self.table_places.stop] if self.has_sinks else [])]

    def tables(self, inputs: Sequence[Any]) -> list[Any]:
        """Return an array of zeros in place of each table among `inputs`, with the shape and dtype of the table."""
        given = zip(self.table_places, self.wide_tables, strict=True)
        return [
            example(inputs[k].shape[:-1], wide) if wide else example(inputs[k].shape, inputs[k].dtype)
            for k, wide in given
        ]

    def problem(self, inputs: Sequence[Any]) -> Problem:
        """Return a problem without formulas, whose arrays have only the shapes and dtypes of `inputs`."""
        query, key, value = (example(x.shape, x.dtype) for x in inputs[:NUM_OPERANDS])
        return self.text.problem((query, key, value), self.tables(inputs))

    def result_types(self, inputs: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the shape and dtype of each result of the forward pass, from the shapes and dtypes of `inputs`."""
        problem = self.problem(inputs)
        rows = (*problem.batch_shape, problem.H, problem.n)
        types = [((*rows, problem.d_v), problem.dtype), (rows, problem.accumulator), ((*rows, 2), "uint32")]
        for statistic in problem.see:
            types += statistic.outputs(problem) if count_arrays(statistic) else ()
        return [jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in types]

    def differentiable_results(self, inputs: Sequence[Any]) -> list[int]:
        """Return the indices of the results that have gradients."""
        return find_differentiable_results(self.problem(inputs).see, FIRST_ARRAY)


def example(shape: Sequence[int], dtype: Any) -> Any:
    """Return a NumPy array of zeros of this shape and dtype, which takes the memory of one number."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))
