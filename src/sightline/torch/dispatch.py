"""`sightline.attention` for torch tensors: the fused kernels of torch, an eager call, or the registered operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import call_cache
from ..array_adapters import ADAPTERS, BOOLEANS, ArrayAdapter
from ..call_request import Request
from ..dispatch import KERNELS, make_plan, to_caller_layout
from ..formula.expression import SYMBOLS, Expression
from ..kernel import Kernel, Result, choose
from ..problem import Problem, parse, validate
from ..statistics import Statistic, solve_selections_separately
from . import operator
from .autograd import GraphAttacher, attach_to_graph, is_intercepted, needs_gradients, refuse_tangents
from .fused import Fused
from .operator_schema import OperatorArguments, build_result, make_seed

__all__ = ["kernels", "run"]

FUSED = Fused()


def kernels() -> tuple[Kernel, ...]:
    """Return every kernel that can serve torch tensors."""
    return (FUSED, *KERNELS)


def run(
    query: Any,
    key: Any,
    value: Any,
    options: dict[str, Any],
    kernel: str | None,
    threads: int | None,
    request: Request | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (output, seen) of `sightline.attention`; `options` are its other arguments.

    `request` is the request to the call cache, or None if the call cannot be cached.
    """
    caller_inputs = query, key, value
    query, key, value = (_apply_autocast(array) for array in (query, key, value))
    formulas = {"mask": _build_formula(options["mask"], "bhij"), "score": _build_formula(options["score"], "sbhij")}
    seed = options["seed"]
    see = (
        [_build_conditions(statistic) for statistic in options["see"]]
        if torch.compiler.is_compiling()
        else options["see"]
    )
    problem = parse(query, key, value, **(options | formulas | {"seed": 0 if seed is None else seed, "see": see}))
    if kernel == FUSED.name or (kernel is None and _prefers_fused(problem)):
        return to_caller_layout(problem, choose((FUSED,), problem, FUSED.name).kernel.run(problem))
    if _is_eager(problem):
        given = options["mask"], options["score"]
        return _run_eager(validate(problem), caller_inputs, seed, kernel, threads, request, given)
    return to_caller_layout(
        problem, solve_selections_separately(problem, lambda one: _run_operator(one, seed, kernel, threads))
    )


def _is_eager(problem: Problem) -> bool:
    """True if no part of torch except autograd must see the call, and every tensor is a plain tensor with data."""
    if torch.compiler.is_compiling() or is_intercepted() or problem.device == "meta":
        return False
    tables = [table.array for table in problem.tables if isinstance(table.array, Tensor)]
    tensors = [problem.query, problem.key, problem.value, *tables]
    return all(type(x) in (Tensor, Parameter) for x in tensors)


def _prefers_fused(problem: Problem) -> bool:
    """True if torch's own kernels can serve the problem and no other kernel is cheaper.

    torch.compile cannot trace the refusals of every kernel. While it traces, the rule of `Fused` alone decides.
    """
    if next(FUSED.refuses(problem), None) is not None:
        return False
    if torch.compiler.is_compiling():
        return FUSED.is_preferred(problem)
    return choose(kernels(), problem).kernel is FUSED


def _run_operator(problem: Problem, seed: int | None, kernel: str | None, threads: int | None) -> Result:
    """Return the result of the registered operator."""
    seed_tensor = make_seed(None if seed is None else problem.seed) if problem.dropout else None
    arguments = OperatorArguments.from_problem(problem, seed_tensor, kernel, threads)
    refuse_tangents(arguments)
    return build_result(problem.see, operator.attention(*arguments))


def _build_conditions(statistic: Any) -> Any:
    """While torch.compile traces, replace the statistic's condition by a formula."""
    return (
        statistic.map_formulas(lambda mask: _build_formula(mask, "bhij"))
        if isinstance(statistic, Statistic)
        else statistic
    )


def _run_eager(
    problem: Problem,
    caller_inputs: tuple[Any, Any, Any],
    seed: int | None,
    kernel: str | None,
    threads: int | None,
    request: Request | None,
    formulas: tuple[Expression | None, Expression | None],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (output, seen) without the operator. The call cache stores the call if it has a request."""

    def run_kernel(one: Problem) -> Result:
        if one.dropout and seed is None:
            one = replace(one, seed=int(make_seed(None)))
        plan = make_plan(one, kernel)
        with torch.no_grad(), operator.autocast_disabled(one.query):
            result = plan.kernel.run(one, threads)
        return attach_to_graph(one, plan, kernel, threads, result)

    result = solve_selections_separately(problem, run_kernel)
    if request is not None:
        inputs = problem.query, problem.key, problem.value
        if not needs_gradients(*caller_inputs):
            call_cache.insert(request, formulas, caller_inputs, problem, result)
        elif all(x is y for x, y in zip(inputs, caller_inputs, strict=True)):
            attach = GraphAttacher(problem, kernel, threads)
            call_cache.insert(request, formulas, caller_inputs, problem, result, attach)
    return to_caller_layout(problem, result)


def _apply_autocast(array: Any) -> Any:
    """Under torch.autocast, cast the array to autocast's dtype, as torch's attention does; float64 stays."""
    if not isinstance(array, Tensor) or array.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return array
    device_type = array.device.type
    if device_type == "meta":  # torch has no autocast for it
        return array
    return array.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else array


def _build_formula(formula: Any, symbols: str) -> Any:
    """While torch.compile traces, call a mask or score function: it cannot trace `formula.from_function`."""
    if not torch.compiler.is_compiling() or isinstance(formula, Expression | Tensor) or not callable(formula):
        return formula
    return formula(*[SYMBOLS[name] for name in symbols])


# -- the call cache -----------------------------------------------------------------------------------------------


def _layouts(query: Any, key: Any, value: Any) -> tuple[Any, ...] | None:
    """Return the part of the cache key that describes the tensors; None if the call cannot be cached.

    A call can be cached if its tensors are plain tensors on the CPU and torch does not follow it: torch does not
    trace or transform, computes no forward derivative, and no mode is active. `make_request` has checked that torch
    does not compile.
    """
    if (
        type(key) is not Tensor
        or type(value) is not Tensor
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or torch.is_autocast_enabled("cpu")
        or is_intercepted()
    ):
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():
        return None
    try:
        return (
            *(query.shape, query.stride(), query.dtype),
            *(key.shape, key.stride(), key.dtype),
            *(value.shape, value.stride(), value.dtype),
            needs_gradients(query, key, value),
        )
    except RuntimeError:  # tensors that are sparse, nested or opaque have no strides
        return None


def _layout(array: Tensor) -> tuple[Any, ...] | None:
    """Return shape, strides and dtype of a table or of sinks; None if the call needs the full dispatch."""
    if not array.is_cpu or array.layout is not torch.strided or array.is_neg() or array.is_conj():
        return None
    return None if array.requires_grad and torch.is_grad_enabled() else (array.shape, array.stride(), array.dtype)


def _empty(query: Tensor, shape: tuple[int, ...]) -> Any:
    dtype = query.dtype
    if shape == query.shape and query.is_contiguous():
        return torch.empty_like
    return lambda _: torch.empty(shape, dtype=dtype)


def _empty_array(shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.empty(shape, dtype=_DTYPES[dtype])


def _finish_lse(lse: Tensor, output: Tensor) -> Tensor:
    return lse if output.dtype == torch.float64 else lse.float()


_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
BOOLEANS.add(torch.bool)
ADAPTERS[Tensor] = ArrayAdapter(
    _layouts, _layout, Tensor.data_ptr, _empty, _empty_array, _finish_lse, lambda: int(make_seed(None))
)
