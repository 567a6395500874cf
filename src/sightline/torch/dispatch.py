"""Where `sightline.attention` takes in torch tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import call_cache
from ..dispatch import KERNELS, shaped, solve
from ..formula.expression import SYMBOLS, Expression
from ..kernel import Kernel, Result, choose
from ..problem import Problem, ask, examine
from ..statistics import Lse, Statistic, apart
from . import operator
from .autograd import recording, refuse_tangents, wants_gradients, watched
from .fused import Fused
from .operator_schema import Question

__all__ = ["kernels", "run"]

FUSED = Fused()


def kernels() -> tuple[Kernel, ...]:
    """Every kernel a problem of torch tensors may be given to."""
    return (FUSED, *KERNELS)


def run(
    query: Any,
    key: Any,
    value: Any,
    options: dict[str, Any],
    kernel: str | None,
    threads: int | None,
    asked: tuple[Any, ...] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(output, seen) of `sightline.attention`, whose other arguments `options` holds.

    `asked` is the call's key where torch need not see it: such a call goes NumPy's road, past the operator.
    """
    given = query, key, value
    query, key, value = (_autocast(array) for array in (query, key, value))
    formulas = {"mask": _called(options["mask"], "bhij"), "score": _called(options["score"], "sbhij")}
    seed = options["seed"]
    see = [_followed(statistic) for statistic in options["see"]] if torch.compiler.is_compiling() else options["see"]
    problem = ask(query, key, value, **(options | formulas | {"seed": 0 if seed is None else seed, "see": see}))
    if kernel == FUSED.name or (kernel is None and _is_fused(problem)):
        return shaped(problem, choose((FUSED,), problem, FUSED.name).kernel.run(problem))
    if asked is not None and not (problem.see and wants_gradients(*given)):
        return _run_past(examine(problem), given, kernel, threads, asked)
    return shaped(problem, apart(problem, lambda one: _answered(one, seed, kernel, threads)))


def _is_fused(problem: Problem) -> bool:
    """Whether torch's own kernels can serve the problem, and no other is cheaper.

    torch.compile cannot follow every kernel's reasons; where it is at work the rule decides alone.
    """
    if next(FUSED.refuses(problem), None) is not None:
        return False
    if torch.compiler.is_compiling():
        return FUSED.preferred(problem)
    return choose(kernels(), problem).kernel is FUSED


def _answered(problem: Problem, seed: int | None, kernel: str | None, threads: int | None) -> Result:
    """The operator's answer."""
    drawn = _seed(problem, seed) if problem.dropout else None
    question = Question.of(problem, drawn, kernel, threads)
    refuse_tangents(question)
    output, lse, *others = operator.attention(*question)
    narrow = lse if problem.query.dtype == torch.float64 else lse.float()
    seen, place = [], 0
    for statistic in problem.see:
        if isinstance(statistic, Lse):
            seen.append(narrow)
            continue
        count = len(statistic.outputs(problem))
        arrays = others[place : place + count]
        seen.append(statistic.joined(arrays if statistic.differentiable else [array.detach() for array in arrays]))
        place += count
    return Result(output, lse, tuple(seen))


def _followed(statistic: Any) -> Any:
    """While torch.compile follows, a statistic whose condition is a formula."""
    return statistic.mapped(lambda mask: _called(mask, "bhij")) if isinstance(statistic, Statistic) else statistic


def _run_past(
    problem: Problem, given: tuple[Any, Any, Any], kernel: str | None, threads: int | None, asked: tuple[Any, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(output, seen) past the operator, kept for the next such call."""
    inputs = problem.query, problem.key, problem.value
    with torch.no_grad():
        result = solve(problem, kernel, threads)
    if not wants_gradients(*given):
        output, seen = shaped(problem, result)
        call_cache.remember(asked, given, output, result, _with_lse if seen else None)
        return output, seen
    record = recording(Question.of(problem, None, kernel, threads))
    result = replace(result, output=record(*inputs, result.output, result.lse))
    output, seen = shaped(problem, result)
    if all(x is y for x, y in zip(inputs, given, strict=True)):
        call_cache.remember(asked, given, output, result, record)
    return output, seen


def _autocast(array: Any) -> Any:
    """Under torch.autocast attention runs in its dtype, as torch's own does; float64 stays."""
    if not isinstance(array, Tensor) or array.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return array
    place = array.device.type
    if place == "meta":  # for which torch has no autocast to ask about
        return array
    return array.to(torch.get_autocast_dtype(place)) if torch.is_autocast_enabled(place) else array


def _called(formula: Any, symbols: str) -> Any:
    """While torch.compile follows, a function's formula: it cannot follow `formula.trace`, which rebuilds functions."""
    if not torch.compiler.is_compiling() or isinstance(formula, Expression | Tensor) or not callable(formula):
        return formula
    return formula(*[SYMBOLS[name] for name in symbols])


def _seed(problem: Problem, seed: int | None) -> Tensor:
    """The caller's seed, or one from torch's generator, so that torch.manual_seed repeats a run."""
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64)
    return torch.tensor(problem.seed - (2**64 if problem.seed >= 2**63 else 0), dtype=torch.int64)


# -- calls asked again ---------------------------------------------------------------------------------------------


def _layouts(query: Any, key: Any, value: Any) -> tuple[Any, ...] | None:
    """What of plain tensors on the CPU decides the road; None where torch must see the call or does more than call.

    That is while it compiles, traces, transforms, counts gradients forward, or has a mode at work.
    """
    if (
        torch.compiler.is_compiling()
        or type(key) is not Tensor
        or type(value) is not Tensor
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or torch.is_autocast_enabled("cpu")
        or watched()
    ):
        return None
    for array in (query, key, value):
        if array.layout is not torch.strided or array.is_neg() or array.is_conj():
            return None
    return (
        *(query.shape, query.stride(), query.dtype),
        *(key.shape, key.stride(), key.dtype),
        *(value.shape, value.stride(), value.dtype),
        wants_gradients(query, key, value),
    )


def _empty(query: Tensor, output: Tensor) -> Any:
    shape, dtype = output.shape, output.dtype
    if shape == query.shape and query.is_contiguous():
        return torch.empty_like
    return lambda _: torch.empty(shape, dtype=dtype)


def _rows(output: Tensor) -> Any:
    shape = output.shape[:-1]
    return lambda: torch.empty(shape, dtype=torch.float64)


def _with_lse(query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor) -> Any:
    """The answer of a call that asks for lse and no more."""
    return output, (lse if output.dtype == torch.float64 else lse.float(),)


call_cache.DOORS[Tensor] = call_cache.Door(_layouts, Tensor.data_ptr, _empty, _rows)
