"""Attention in torch's graph in eager mode: one `torch.autograd.Function`, without the registered operator.

The registered operator of `operator` serves whatever must see an operator (torch.compile, transforms, modes), and
gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad

from ..errors import KernelRefusedError
from ..kernel import Plan, Result
from ..problem import Problem
from . import operator
from .operator_schema import OperatorArguments, build_result, flatten_result, make_seed

__all__ = [
    "attach_to_graph",
    "is_intercepted",
    "make_graph_attacher",
    "needs_gradients",
    "refuse_tangents",
]


@dataclass(frozen=True)
class _Call:
    """The data of a call that its backward pass needs, besides the tensors that torch saves."""

    problem: Problem  # its formulas hold the tables; its query, key, value and sinks are replaced by saved tensors
    plan: Plan
    kernel: str | None  # the name that the caller gave
    threads: int | None
    wanted_tables: tuple[int, ...]  # indices in `problem.tables` of the tables in the graph

    def with_inputs(self, inputs: Sequence[Tensor]) -> Problem:
        """Return the problem with these tensors in place of query, key, value, the wanted tables and the sinks."""
        query, key, value, *rest = inputs
        tables = [table.array for table in self.problem.tables]
        saved = dict(zip(self.wanted_tables, rest, strict=False))
        problem = self.problem
        if any(tables[index] is not tensor for index, tensor in saved.items()):
            problem = problem.with_tables([saved.get(index, array) for index, array in enumerate(tables)])
        sinks = None if problem.sinks is None else rest[-1]
        return replace(problem, query=query, key=key, value=value, sinks=sinks)


class _Attention(torch.autograd.Function):
    """The function by which torch's graph connects results, which are computed already, to their inputs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, results: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*inputs, results[0], results[1])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        *inputs, output, lse = ctx.saved_tensors
        call, given = ctx.call, [gradient for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * (2 + len(inputs))
        needs_operator = (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or is_intercepted()
            or any(type(gradient) is not Tensor for gradient in given)
        )
        compute = _differentiate_by_operator if needs_operator else _differentiate
        return (None, None, *compute(call, call.with_inputs(inputs), gradients, (output, lse)))


def _differentiate(
    call: _Call, problem: Problem, gradients: Sequence[Tensor | None], saved: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Return the gradients of the inputs by the kernel's backward pass, or by streaming's."""
    with operator.autocast_disabled(saved[0]):
        return operator.differentiate_results(problem, call.plan, gradients, saved, call.wanted_tables, call.threads)


def _differentiate_by_operator(
    call: _Call, problem: Problem, gradients: Sequence[Tensor | None], saved: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Return the gradients of the inputs by the registered operator, which can be differentiated again."""
    arguments = OperatorArguments.from_problem(problem, make_seed(problem.seed), call.kernel, call.threads)
    mask_tables = 0 if problem.mask is None else len(problem.mask.tables)
    score_tables = () if problem.score is None else problem.score.tables
    place = {id(table): mask_tables + index for index, table in enumerate(score_tables)}
    wanted = [place[id(problem.tables[index])] for index in call.wanted_tables]
    indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
    given = [gradient for gradient in gradients if gradient is not None]
    found: list[Tensor] = operator.attention_backward(given, indices, wanted, *saved, *arguments)
    return found


def _trainable_inputs(problem: Problem) -> tuple[list[Tensor], tuple[int, ...]]:
    """Return the tensors that may need gradients, and the indices in `problem.tables` of the tables among them."""
    read_by_score = {id(table) for table in (() if problem.score is None else problem.score.tables)}
    wanted = tuple(
        index
        for index, table in enumerate(problem.tables)
        if id(table) in read_by_score and getattr(table.array, "requires_grad", False)
    )
    tables = [problem.tables[index].array for index in wanted]
    sinks = [] if problem.sinks is None else [problem.sinks]
    return [problem.query, problem.key, problem.value, *tables, *sinks], wanted


def attach_to_graph(problem: Problem, plan: Plan, kernel: str | None, threads: int | None, result: Result) -> Result:
    """Return the result with its arrays in torch's graph, if any input needs a gradient."""
    inputs, wanted = _trainable_inputs(problem)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return result
    call = _Call(_without_tensors(problem), plan, kernel, threads, wanted)
    results = tuple(flatten_result(problem.see, result))
    attached: tuple[Tensor, ...] = _Attention.apply(call, results, *inputs)  # type: ignore[no-untyped-call]
    return replace(build_result(problem.see, attached), bound_call=result.bound_call)


def make_graph_attacher(
    problem: Problem, plan: Plan, kernel: str | None, threads: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a function of (query, key, value, output, lse) that returns the output in torch's graph.

    It serves every later call with the structure of this problem, which has no tables, sinks or statistics.
    """
    call = _Call(_without_tensors(problem), plan, kernel, threads, ())

    def attach(query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor) -> Tensor:
        attached: Tensor = _Attention.apply(call, (output, lse), query, key, value)[0]  # type: ignore[no-untyped-call]
        return attached

    return attach


def _without_tensors(problem: Problem) -> Problem:
    """Return the problem without query, key, value and sinks, so that it keeps none of these tensors alive."""
    return replace(problem, query=None, key=None, value=None, sinks=None if problem.sinks is None else ())


def needs_gradients(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if torch records a graph and any of these tensors requires a gradient."""
    return (query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled()


def refuse_tangents(arguments: OperatorArguments) -> None:
    """Raise KernelRefusedError for forward derivatives: torch drops them silently for custom operators."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    tensors = [*arguments[:3], *arguments.tables, *([] if arguments.sinks is None else [arguments.sinks])]
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise KernelRefusedError(
            "forward derivatives of attention, as of torch.func.jvp or forward_ad.make_dual",
            "derivatives backward, to any order",
            "torch.autograd.functional.jvp, which takes two of them",
        )


def is_intercepted() -> bool:
    """True if a mode, a transform, a tracer or a forward derivative is active in this thread."""
    return bool(
        _C._len_torch_function_stack()
        or _C._len_torch_dispatch_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )
