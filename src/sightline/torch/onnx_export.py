"""Attention in a program that `torch.onnx.export` traces, by functions of torch that the exporter knows.

ONNX has the operator Attention since opset 23. It computes causal masks, arrays of booleans, and arrays that are added
to the scores. The exporter writes it for `torch.nn.functional.scaled_dot_product_attention`. So a mask, and the f of a
score s + f, become arrays (B, H, n, m) in the exported program. Other scores, and sinks, become products and a softmax.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention  # bound before `replacing` replaces it

from ..arrays.operations import namespace
from ..call.kernel import Result
from ..call.problem import Problem
from ..errors import KernelRefusedError
from ..formula.derivative import ONE, derivative
from ..formula.evaluate_array import evaluate
from ..formula.library import causal
from .interception import INTERCEPTIONS

CAUSAL_TEXT = causal().text  # formulas made while torch traces are equal in text alone


def is_exporting() -> bool:
    """True while `torch.onnx.export` traces in this thread. Exporting imports torch.onnx, which takes 30 ms."""
    is_in_process = "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()
    return is_in_process and any(function() for function in INTERCEPTIONS)


def run_exported(problem: Problem) -> Result:
    """Return the output; raise KernelRefusedError for statistics, dropout and quantised rows."""
    if problem.see or problem.dropout or problem.row_formats:
        given = "statistics of the weights, dropout or a quantised KVCache while torch.onnx.export traces"
        allowed = "query, key, value, mask, score, sinks and scale"
        refusal = KernelRefusedError(given, allowed, "export a module in model.eval(), without see")
        warn(str(refusal), stacklevel=2)  # the exporter tries again with strict=True, and shows only that error
        raise refusal
    batch_shape = problem.batch_shape
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (problem.query, problem.key, problem.value))
    problem = replace(problem, query=query, key=key, value=value)
    if problem.sinks is None and (problem.score is None or derivative(problem.score) is ONE):
        is_causal = problem.mask is not None and problem.mask.text == CAUSAL_TEXT and problem.score is None
        mask = None if is_causal else _mask_array(problem)
        output = scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, scale=problem.scale, enable_gqa=bool(problem.group > 1)
        )
    else:
        output = _multiply(problem)
    return Result(output.reshape(*batch_shape, *output.shape[-3:]), lse=None)


def _mask_array(problem: Problem) -> Any:
    """Return the mask as booleans, or mask and score as floats that are added to the scores; None without both.

    The last axes have the lengths n and m, because ONNX Runtime does not broadcast them.
    """
    if problem.mask is None and problem.score is None:
        return None
    if problem.mask is not None:
        array = allowed = _evaluate(problem, problem.mask, torch.float64)
    if problem.score is not None:
        array = _evaluate(problem, problem.score, problem.query.dtype, s=problem.query.new_zeros(()))
        array = array if problem.mask is None else torch.where(allowed, array, -inf)
    return array.expand(*array.shape[:-2], problem.n, problem.m)


def _multiply(problem: Problem) -> Any:
    """Return the output by two products and a softmax."""
    key, value = (x.repeat_interleave(problem.group, dim=1) for x in (problem.key, problem.value))
    scores = problem.query @ key.transpose(-1, -2) * problem.scale
    if problem.score is not None:
        scores = _evaluate(problem, problem.score, scores.dtype, s=scores)
    if problem.mask is not None:
        scores = torch.where(_evaluate(problem, problem.mask, torch.float64), scores, -inf)
    if problem.sinks is not None:
        sinks = problem.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.where(scores == -inf, 0.0, scores.softmax(-1))  # 0, not NaN, for a query that sees no key
    return weights[..., : problem.m] @ value


def _evaluate(problem: Problem, formula: Any, float_dtype: torch.dtype, **scores: Tensor) -> Any:
    """Return the formula's result as an array that broadcasts to (B, H, n, m)."""
    xp = namespace(problem.query)
    positions = problem.positions(xp, slice(0, problem.n), slice(0, problem.m))
    n, m = (torch.ones_like(each).sum() for each in positions[2:])  # a number would fix a length that may change
    symbols = {**dict(zip("bhij", positions, strict=True)), "n": n, "m": m, **scores}
    return evaluate(formula, symbols, xp=xp, float_dtype=float_dtype, like=problem.query)
