"""Attention as a registered torch operator, `torch.ops.sightline.attention`, with gradients to any order.

An operator takes tensors and plain values. Formulas travel as text, what they read as a list of tensors, and the problem
is put together again inside. Three functions of one signature: the answer, its shapes for tracing, its gradient. The
gradient is an operator too; its own gradient is torch's, of the same tiles in plain operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import streaming
from ..attention import solve
from ..observe import STATISTICS
from ..problem import Problem
from .wording import gaining, read

__all__ = ["attention", "attention_backward"]

QUESTION = (
    "Tensor query, Tensor key, Tensor value, Tensor[] tables, Tensor? sinks, Tensor? seed, "
    "str mask, str score, str spans, float scale, float dropout, str see, str? kernel, int? threads"
)
WORDS = 8  # of these the last, which are no tensors


def _answer(*question: Any) -> list[Tensor]:
    """[output, lse, *every statistic asked for but lse]."""
    problem = _problem(*question)
    result = solve(problem, *question[-2:])
    seen = zip(problem.see, result.seen, strict=True)
    return [result.output, result.lse, *(array for statistic, array in seen if statistic.name != "lse")]


def _shapes(*question: Any) -> list[Tensor]:
    """Empty tensors like the answer's; the formulas are not read, since their tables have no values yet."""
    problem = _outline(*question)
    query, value = problem.query, problem.value
    rows = query.shape[:-1]
    outputs = [
        query.new_empty((*rows, value.shape[-1])),
        query.new_empty(rows, dtype=getattr(torch, problem.accumulator)),
    ]
    for statistic in problem.see:
        if statistic.name != "lse":
            dtype = getattr(torch, statistic.dtype(problem))
            outputs.append(query.new_empty(statistic.shape(problem), dtype=dtype))
    return outputs


attention = torch.library.custom_op(
    "sightline::attention", _answer, mutates_args=(), schema=f"({QUESTION}) -> Tensor[]"
)
attention.register_fake(_shapes)


def _gradients(gradients: list[Tensor], given: list[int], output: Tensor, lse: Tensor, *question: Any) -> list[Tensor]:
    """Gradients of `_inputs(question)`, from those of the answer's parts numbered in `given`."""
    return _shares(gradients, given, (output, lse), question)


def _gradient_shapes(_: list[Tensor], __: list[int], ___: Tensor, ____: Tensor, *question: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in _inputs(question)]


attention_backward = torch.library.custom_op(
    "sightline::attention_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor[] gradients, int[] given, Tensor output, Tensor lse, {QUESTION}) -> Tensor[]",
)
attention_backward.register_fake(_gradient_shapes)


def _outline(query: Tensor, key: Tensor, value: Tensor, _: Any, sinks: Any, seed: Any, *words: Any) -> Problem:
    """The problem without its formulas."""
    *_, scale, dropout, see, _, _ = words
    see = tuple(STATISTICS[name]() for name in see.split())
    return Problem(query, key, value, None, None, sinks, scale, dropout, 0, see, headless=False)
