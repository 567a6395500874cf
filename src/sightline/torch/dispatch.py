"""`sightline.attention` for torch tensors, by the fused kernels of torch, an eager call, or the registered operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import _C, Tensor
from torch.nn import Parameter

from ..api.kernels import KERNELS, make_plan, to_caller
from ..arrays.layouts import BOOLEANS, FRAMEWORKS, MAX_GPUS, Layout, Tensors, make_kind
from ..arrays.operations import TORCH, is_traced
from ..arrays.unreadable import check_class, check_memory, refuse_subclass
from ..call.call_cache import LOOKUP, FirstCall, build_answer
from ..call.kernel import Kernel, Result, choose
from ..call.problem import Options, Problem, parse, validate
from ..call.request import Request
from ..call.validation import fold_scale
from ..errors import KernelRefusedError, SightlineError
from ..formula.expression import SYMBOLS, Expression
from ..formula.from_function import torch_mode
from ..kv_cache import unpack_cache
from ..statistics import Statistic, solve_selections_separately
from ..statistics.dispatch import formulas_of
from . import onnx_export, operator
from .autograd import GraphPasses, attach_to_graph, needs_gradients
from .derivatives import Derivative, apply_derivative
from .fused import Fused, store_fused
from .interception import INTERCEPTIONS, is_intercepted, is_transformed, refuse_functionalize, refuse_tangents
from .nested import is_nested, pack_sequences, unpack_sequences
from .operator import autocast_disabled, build_result, make_seed, to_arguments

FUSED = Fused()
TABLE_READS = torch_mode()
_DLPACK_CODES = {  # the code of each dtype in the struct DLDataType of DLPack
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64), 0),
    **dict.fromkeys((torch.uint8, torch.uint16, torch.uint32, torch.uint64), 1),
    **dict.fromkeys((torch.float16, torch.float32, torch.float64), 2),
    torch.bfloat16: 4,
    torch.bool: 6,
}


def kernels() -> tuple[Kernel, ...]:
    """Return every kernel that can serve torch tensors."""
    return (FUSED, *KERNELS)


def run(
    query: Any, key: Any, value: Any, options: Options, request: Request | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (output, seen) of `sightline.attention`. `request` is None if the call cannot be cached."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_class(name, array)
    if is_nested(query, key, value):
        return unpack_sequences(query, *run(*pack_sequences(query, key, value, options)))
    caller_inputs = query, key, value
    query, key, value = (apply_autocast(array) for array in (query, key, value))
    is_compiled = is_traced(query)
    prepared_options = _call_functions(options) if is_compiled else options
    if isinstance(options.scale, Tensor) and is_transformed():
        score, scale = fold_scale(options.score, options.scale)
        prepared_options = prepared_options.replace(score=score, scale=scale)
    prepared_options = prepared_options.replace(seed=0 if options.seed is None else options.seed)
    problem = parse(query, *unpack_cache(query, key, value, prepared_options), warns=not is_compiled)
    if onnx_export.is_exporting():
        return to_caller(problem, onnx_export.run_exported(problem), prepared_options.see)
    if problem.kernel == FUSED.name or (problem.kernel is None and not is_transformed() and _prefers_fused(problem)):
        result = choose((FUSED,), problem, FUSED.name).kernel.run(problem)
        if request is not None:
            store_fused(request, caller_inputs, problem)
        return to_caller(problem, result, prepared_options.see)
    is_plain = all(type(array) in (Tensor, Parameter) for _, array in _tensors(problem))
    if is_plain and not is_intercepted() and problem.device != "meta":  # no mode, no transform
        for name, array in _tensors(problem):
            check_memory(name, array)
        return _run_eager(validate(problem), caller_inputs, options, request)
    result = solve_selections_separately(problem, lambda subproblem: _run_operator(subproblem, options))
    return to_caller(problem, result, prepared_options.see)


def _tensors(problem: Problem) -> list[tuple[str, Tensor]]:
    """Return pairs of the name and the tensor for every tensor of a problem. Tables may also be arrays of NumPy."""
    named = [("query", problem.query), ("key", problem.key), ("value", problem.value), ("sinks", problem.sinks)]
    named += [("a table", table.array) for table in problem.tables]
    return [(name, array) for name, array in named if isinstance(array, Tensor)]


def _prefers_fused(problem: Problem) -> bool:
    """True if torch's own kernels can serve the problem and no other kernel is cheaper.

    torch.compile cannot trace the refusals of every kernel. While it traces, the rule of `Fused` alone decides.
    """
    if next(FUSED.refuses(problem), None) is not None:
        return False
    if is_traced(problem.query):
        return FUSED.is_preferred(problem)
    return choose(kernels(), problem).kernel is FUSED


def _run_operator(problem: Problem, options: Options) -> Result:
    """Return the result of the registered operator.

    Raise KernelRefusedError for a quantised KVCache, and DtypeError for a tensor whose class cannot run the operator.
    """
    if problem.row_formats is not None:
        given = "a quantised KVCache in a transform or a mode of torch"
        raise KernelRefusedError(given, "eager calls", "leave the mode, or store floats")
    seed_tensor = make_seed(None if options.seed is None else problem.seed) if problem.dropout else None
    arrays, spec = to_arguments(problem, seed_tensor)
    if is_transformed():
        refuse_functionalize()
        return build_result(problem.see, apply_derivative(Derivative.of(arrays, spec), *arrays.flatten()))
    refuse_tangents()
    try:
        return build_result(problem.see, operator.attention_op(*arrays, *spec))
    except SightlineError:
        raise
    except Exception as error:  # classes of tensors raise errors of every kind
        if not is_intercepted():
            refuse_subclass(_tensors(problem), error)
        raise


def _run_eager(
    problem: Problem, caller_inputs: tuple[Any, Any, Any], options: Options, request: Request | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (output, seen) without the operator. The call cache stores the call if `request` is not None."""

    def run_kernel(subproblem: Problem) -> Result:
        if subproblem.dropout and options.seed is None:
            subproblem = replace(subproblem, seed=int(make_seed(None)))
        plan = make_plan(subproblem)
        with torch.no_grad(), autocast_disabled(subproblem.query):
            result = plan.kernel.run(subproblem)
        return attach_to_graph(subproblem, plan, result)

    result = solve_selections_separately(problem, run_kernel)
    if request is not None:
        formulas = options.mask, options.score, *formulas_of(options.see or ())
        passes = GraphPasses.of_call(problem, formulas) if needs_gradients(problem) else None
        if passes is None or passes.reads(request, caller_inputs, problem):
            FirstCall(request, formulas, caller_inputs, problem, result, passes or build_answer).store()
    return to_caller(problem, result, options.see)


def leave_autocast(query: Tensor, key: Any, value: Any) -> tuple[list[Any], Any] | None:
    """Return (the operands as torch.autocast casts them, a context without autocast); None if autocast is off.

    The result is also None for a subclass of Tensor, and if a mode or a transform of torch must see the casts.
    """
    is_seen = type(query) is Tensor and torch._C._is_any_autocast_enabled() and not is_intercepted()
    if not is_seen or query.is_meta or not torch.is_autocast_enabled(query.device.type):
        return None
    return [apply_autocast(array) for array in (query, key, value)], autocast_disabled(query)


def apply_autocast(array: Any) -> Any:
    """Return the array, cast as torch's attention casts it if torch.autocast is on. float64 is not cast."""
    if not isinstance(array, Tensor) or array.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return array
    device_type = array.device.type
    if device_type == "meta":  # torch has no autocast for it
        return array
    return array.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else array


def _call_functions(options: Options) -> Options:
    """Return the options with formulas in place of functions, as torch.compile traces it.

    torch.compile cannot trace `formula.from_function`, which converts such functions in eager calls.
    """

    def call(function: Any, symbols: str) -> Any:
        if isinstance(function, Expression | Tensor) or not callable(function):
            return function
        with TABLE_READS(is_compiled=True):
            return function(*[SYMBOLS[name] for name in symbols])

    see = [
        statistic.map_formulas(lambda mask: call(mask, "bhij")) if isinstance(statistic, Statistic) else statistic
        for statistic in options.see or ()
    ]
    return options.replace(mask=call(options.mask, "bhij"), score=call(options.score, "sbhij"), see=see)


# -- how the call cache reads tensors ----------------------------------------------------------------------------------


def _read_layout(tensor: Tensor) -> tuple[Layout, int] | None:
    """Return the layout and the address of a tensor; None if the call cache cannot serve the tensor."""
    gpu = 0 if tensor.is_cpu else 1 + tensor.get_device() if tensor.is_cuda else None
    if gpu is None or gpu > MAX_GPUS or tensor.dtype not in _DLPACK_CODES or tensor.is_neg():
        return None
    size = tensor.dtype.itemsize
    dtype = 1 << 16 | 8 * size << 8 | _DLPACK_CODES[tensor.dtype]
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    try:
        strides = tuple([size * stride for stride in tensor.stride()])
        address = tensor.data_ptr()
        layout = Layout(make_kind(size, dtype, needs_gradient, True, gpu), tuple(tensor.shape), strides)
        return (layout, address) if address else None
    except RuntimeError:  # tensors that are sparse, nested or opaque have no strides
        return None


BOOLEANS.add(torch.bool)  # from this line on, the call cache serves tensors
FRAMEWORKS.update({Tensor: TORCH, Parameter: TORCH})
_states = (*INTERCEPTIONS, _C._is_any_autocast_enabled), torch.is_grad_enabled
_exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
LOOKUP.serve_tensors(Tensors((Tensor, Parameter), _read_layout, *_states, _exchange))
