"""Attention as a registered torch operator, `torch.ops.sightline.attention`, with gradients to any order.

Each operator has its computation and its shapes (for tracing); torch.library adds the rest. The gradient is an operator
too. Its own gradient is torch's, of the same tiles in plain operations, so every further order works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .. import streaming
from ..dispatch import differentiate, solve
from ..statistics import Lse, arrays_of
from .operator_schema import SCHEMA, Question

__all__ = ["attention", "attention_backward", "gradient"]


def _as_written(computation: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """The computation with torch.autocast off: the door has cast what it would, and sums are kept wide."""

    @wraps(computation)
    def run(*arguments: Any) -> list[Tensor]:
        place = next(x for x in arguments if isinstance(x, Tensor)).device.type
        if not torch.is_autocast_enabled(place):
            return computation(*arguments)
        with torch.autocast(place, enabled=False):
            return computation(*arguments)

    return run


@_as_written
def _answer(*arguments: Any) -> list[Tensor]:
    """[output, lse, *the arrays of every statistic asked for but lse]."""
    question = Question(*arguments)
    problem = question.problem()
    result = solve(problem, question.kernel, question.threads)
    seen = zip(problem.see, result.seen, strict=True)
    others = [arrays_of(answer) for statistic, answer in seen if not isinstance(statistic, Lse)]
    return [result.output, result.lse, *(array for arrays in others for array in arrays)]


def _answer_shapes(*arguments: Any) -> list[Tensor]:
    problem = Question(*arguments).outline()
    query, rows = problem.query, problem.query.shape[:-1]
    outputs = [query.new_empty((*rows, problem.d_v)), query.new_empty(rows, dtype=torch.float64)]
    for statistic in problem.see:
        if not isinstance(statistic, Lse):
            made = statistic.outputs(problem)
            outputs += [query.new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in made]
    return outputs


attention = torch.library.custom_op("sightline::attention", _answer, mutates_args=(), schema=f"({SCHEMA}) -> Tensor[]")
attention.register_fake(_answer_shapes)


@_as_written
def gradient(
    gradients: list[Tensor], given: list[int], wanted: list[int], output: Tensor, lse: Tensor, *arguments: Any
) -> list[Tensor]:
    """Gradients of `Question.inputs`; `gradients` are those of the answer's entries numbered in `given`."""
    return _chain(gradients, given, wanted, Question(*arguments), (output, lse))


def _gradient_shapes(_: Any, given: Any, wanted: list[int], output: Any, lse: Any, *arguments: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in Question(*arguments).inputs(wanted)]


attention_backward = torch.library.custom_op(
    "sightline::attention_backward",
    gradient,
    mutates_args=(),
    schema=f"(Tensor[] gradients, int[] given, int[] wanted, Tensor output, Tensor lse, {SCHEMA}) -> Tensor[]",
)
attention_backward.register_fake(_gradient_shapes)


def _chain(
    gradients: Sequence[Tensor],
    given: Sequence[int],
    wanted: Sequence[int],
    question: Question,
    saved: tuple[Tensor, Tensor] | None,
) -> list[Tensor]:
    """The chain rule through attention, tile by tile; differentiable where `saved` is None."""
    problem = question.problem()
    of_answer = dict(zip(given, gradients, strict=True))
    d_output = of_answer.get(0)
    if d_output is None:
        d_output = problem.query.new_zeros((*problem.query.shape[:-1], problem.d_v))
    place, d_seen = 2, []
    for statistic in problem.see:
        d_seen.append(None if isinstance(statistic, Lse) else of_answer.get(place))
        place += 0 if isinstance(statistic, Lse) else len(statistic.outputs(problem))
    tables = [question.tables[k] for k in wanted]
    if saved is None:
        found = streaming.backward(problem, d_output, of_answer.get(1), tuple(d_seen))
    else:
        slots = [k for k, table in enumerate(problem.tables) if any(table.array is tensor for tensor in tables)]
        found = differentiate(
            problem,
            d_output,
            of_answer.get(1),
            tuple(d_seen),
            saved,
            wanted=slots,
            kernel=question.kernel,
            threads=question.threads,
        )
    by_tensor: dict[int, Tensor] = {}  # one tensor may stand in two tables: the first of its places has their sum
    for table, gradient in zip(problem.tables, found.tables, strict=True):
        if gradient is not None:
            known = by_tensor.get(id(table.array))
            by_tensor[id(table.array)] = gradient if known is None else known + gradient
    of_tables = [by_tensor.pop(id(table), None) for table in tables]
    whole = [torch.zeros_like(t) if g is None else g for t, g in zip(tables, of_tables, strict=True)]
    return [found.query, found.key, found.value, *whole, *([] if found.sinks is None else [found.sinks])]


# -- what torch calls ----------------------------------------------------------------------------------------------


def _keep(ctx: Any, question: Question, *others: Tensor) -> None:
    """Tensors go where torch guards them, the rest into the context."""
    ctx.save_for_backward(
        question.query, question.key, question.value, question.sinks, question.seed, *question.tables, *others
    )
    ctx.words, ctx.tables = question[6:], len(question.tables)


def _kept(ctx: Any) -> tuple[Question, list[Tensor]]:
    query, key, value, sinks, seed, *rest = ctx.saved_tensors
    tables, others = rest[: ctx.tables], rest[ctx.tables :]
    return Question(query, key, value, tables, sinks, seed, *ctx.words), others


def _keep_answer(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    _keep(ctx, Question(*inputs), output[0], output[1])


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    question, (output, lse) = _kept(ctx)
    given = [k for k, gradient in enumerate(gradients) if gradient is not None]
    wanted = [k for k in question.gaining if ctx.needs_input_grad[3][k]]
    found = attention_backward([g for g in gradients if g is not None], given, wanted, output, lse, *question)
    return question.places(found, wanted)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    gradients, ctx.given, ctx.wanted, _, _, *arguments = inputs
    _keep(ctx, Question(*arguments), *gradients)


def _backward_of_backward(ctx: Any, directions: list[Tensor | None]) -> tuple[Any, ...]:
    """Output and lse only spare the gradient a forward pass: here it is done again, so they take no gradient."""
    question, gradients = _kept(ctx)
    onward = torch.is_grad_enabled()

    def fresh(tensor: Tensor) -> Tensor:
        """The tensor as a variable of its own, joined to the caller's graph where further orders may come."""
        if not tensor.requires_grad:
            return tensor
        return tensor.view_as(tensor) if onward else tensor.detach().requires_grad_()

    with torch.enable_grad():
        variables = [fresh(tensor) for tensor in (*gradients, *question.inputs(ctx.wanted))]
        count = len(gradients)
        again = question.with_inputs(variables[count:], ctx.wanted)
        found = _chain(variables[:count], ctx.given, ctx.wanted, again, None)
        pairs = [(f, d) for f, d in zip(found, directions, strict=True) if d is not None and f.requires_grad]
        wanted = [variable for variable in variables if variable.requires_grad]
        results = torch.autograd.grad(
            [f for f, _ in pairs], wanted, [d for _, d in pairs], create_graph=onward, allow_unused=True
        )
    rest = iter(results)
    every = [next(rest) if variable.requires_grad else None for variable in variables]
    nothing: Any = None if ctx.wanted else []  # torch takes an empty list for one of tensors
    return every[:count], None, nothing, None, None, *question.places(every[count:], ctx.wanted)


attention.register_autograd(_backward, setup_context=_keep_answer)
attention_backward.register_autograd(_backward_of_backward, setup_context=_keep_gradient)
