"""A problem's arrays, formulas and numbers as kernels take them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl

from ...arrays import detach
from ...dropout import threshold
from ...formula.expression import SYMBOLS
from ...formula.tensor_cache import to_device
from ...problem import Problem
from ..codegen.formula_functions import FormulaFunctions, combine_functions, compile_function
from ..codegen.formula_source import INT32_MAX, NamedFormula, collect_tables, render_sources
from ..kernels.meta_parameters import MetaParameters, padded_width
from ..kernels.tile_ops import Array
from ..tuning.configurations import Configuration

__all__ = ["Operands", "to_operand"]

MIN_SCALE = 2.0**-64  # below it scores are scaled before the softmax: lse over the scale would leave float32


class Operands:
    """A problem as kernels take it.

    Parameters
    ----------
    others : formulas besides mask and score, (name, formula, whether it reads scores), whose tables follow the
        problem's
    beside : further operands whose rows are read in tiles
    """

    def __init__(
        self,
        problem: Problem,
        configuration: Configuration,
        extra_formulas: Sequence[NamedFormula] = (),
        extra_arrays: Sequence[Array] = (),
    ) -> None:
        if problem.score is None and 0 < abs(problem.scale) < MIN_SCALE:
            problem = replace(problem, score=SYMBOLS["s"])
        self.problem, self.configuration, self.extra_arrays = problem, configuration, extra_arrays
        self.arrays = {name: to_operand(detach(getattr(problem, name))) for name in ("query", "key", "value")}
        dropout_scale = [
            _prepare_table(table.array, problem.query) for table in collect_tables(problem, extra_formulas)
        ]
        self.tables = tuple((t, *t.stride(), *t.shape) for t in dropout_scale)
        self.sources = render_sources(problem, extra_formulas)

    def formula_functions(self) -> FormulaFunctions:
        """The generated functions of these names; None for formulas that are not there."""
        sources = self.sources
        return FormulaFunctions(
            **{name: compile_function(sources[name], name) for name in FormulaFunctions._fields if name in sources}
        )

    def combine_functions(self, names: Sequence[str], expressions: Sequence[str], name: str) -> Any:
        """One function that answers with these calls of the generated functions of these names; None for none."""
        return combine_functions([self.sources[each] for each in names], expressions, name) if names else None

    def common_arguments(self) -> dict[str, Any]:
        """The arguments that every kernel over tiles takes."""
        problem = self.problem
        return {
            **self.arrays,
            "n": problem.n,
            "m": problem.m,
            "H": problem.H,
            "group": problem.group,
            **self.scale_arguments(),
            "tables": self.tables,
            "formulas": self.formula_functions(),
            "meta": self.meta(),
        }

    def meta(self, sizes: Configuration | None = None) -> MetaParameters:
        """What is compiled into a kernel of these sizes, the configuration's if none are given."""
        problem, sizes = self.problem, sizes or self.configuration
        arrays = (*self.arrays.values(), *self.extra_arrays)
        steps = [abs(step) for array in arrays for step in (array.row, array.column)]
        needs_int64 = max(steps) * (sizes.rows + sizes.keys + problem.d_k + problem.d_v) > INT32_MAX
        return MetaParameters(
            rows=sizes.rows,
            keys=sizes.keys,
            d_k=problem.d_k,
            d_v=problem.d_v,
            padded_d_k=padded_width(problem.d_k),
            padded_d_v=padded_width(problem.d_v),
            even=problem.m % sizes.keys == 0,
            index_type=tl.int64 if needs_int64 else tl.int32,
            accumulator=tl.float64 if problem.accumulator == "float64" else tl.float32,
            precision=_dot_precision(problem.query.device) if problem.dtype == "float32" else "ieee",
            widens_operands=sizes.widens_operands,
        )

    def scale_arguments(self) -> dict[str, float]:
        """sign, scale and unit: s = Q Kᵀ · sign · scale, and scores come to base 2 by · unit."""
        size = abs(self.problem.scale) or 1.0
        sign = math.copysign(1.0, self.problem.scale) if self.problem.scale else 0.0
        return {"sign": sign, "scale": size, "unit": math.log2(math.e) * (size if self.problem.score is None else 1.0)}

    def dropout_state(self) -> tuple[int, int, int] | None:
        """For `tiles.keep`: the seed's low and high word, the largest word that drops its weight. None for no dropout.

        Triton compiles anew for numbers that are 1, multiples of 16, or of another width than the last. Here none is.
        """
        dropped, seed = threshold(self.problem) - 1, self.problem.seed
        return None if dropped < 0 else (_pack_word(seed % 2**32), _pack_word(seed >> 32), _pack_word(dropped))

    def dropout_scale(self) -> float:
        """The factor on weights that dropout keeps."""
        return 0.0 if self.problem.dropout == 1 else 1 / (1 - self.problem.dropout)

    def allocate_flags(self, items: int) -> Any:
        """int32 for so many blocks, to say whose result is not finite."""
        return self.problem.query.new_empty(items, dtype=torch.int32)

    def sinks(self) -> Any:
        """(H,) float64, or None."""
        return None if self.problem.sinks is None else detach(self.problem.sinks).to(torch.float64).contiguous()


def to_operand(array: Any) -> Array:
    """(*lead, heads, rows, columns) as kernels take it. Leading axes that lie one in the other are one."""
    lengths: list[int] = []
    strides: list[int] = []
    for length, stride in zip(array.shape[:-3], array.stride()[:-3], strict=True):
        if length == 1:
            continue
        if lengths and strides[-1] == stride * length:
            lengths[-1] *= length
            strides[-1] = stride
        else:
            lengths.append(length)
            strides.append(stride)
    return Array(array, tuple(lengths), tuple(strides), *array.stride()[-3:])


def _pack_word(word: int) -> int:
    """A word of 32 bits as an odd number of 42."""
    return 2**41 + 2 * word + 1


def _dot_precision(device: Any) -> str:
    """Of products of float32, as torch was told. Of AMD's GPUs gfx942 alone has tf32; Triton refuses it elsewhere."""
    settings = torch.backends.cuda.matmul
    precision = getattr(settings, "fp32_precision", None)  # from torch 2.9 on; who sets it may not read the old one
    uses_tf32 = settings.allow_tf32 if precision is None else precision == "tf32"
    if uses_tf32 and torch.version.hip is not None and device.type == "cuda":
        uses_tf32 = torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx942")
    return "tf32" if uses_tf32 else "ieee"


def _prepare_table(array: Any, like: Any) -> Any:
    """A table as kernels read it."""
    array = detach(to_device(array, like))
    if array.numel() == 0:  # read at hidden pairs alone, where any number will do
        array = array.new_zeros([max(length, 1) for length in array.shape])
    return array
