"""The primitives of JAX for attention: the forward pass, its derivative in some direction, and the backward pass.

    attention   inputs = query, key, value, tables, sinks, seed  →  output, lse, lse in float64, statistics' arrays
    tangent     inputs, output, lse in float64, tangents         →  tangents of output, lse and some statistics' arrays
    backward    inputs, output, lse in float64, gradients        →  gradients of the inputs `wanted`

`tangent` is the derivative of `attention`, and `backward` is the transpose of `tangent`. lse in float64 is passed as
pairs of 32-bit words, because JAX has no float64 unless `jax_enable_x64` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..call.batching import join_spec
from ..call.problem import NUM_OPERANDS
from ..cpu.calls.xla_handler import MAX_BUFFERS
from ..errors import KernelRefusedError
from ..statistics.reduction import refuse_learned
from .array_operations import compute, gradients, tangents
from .custom_call import register_custom_call
from .options import LSE_INDEX, OUTPUT_INDEX, PRECISE_LSE_INDEX, PrimitiveOptions
from .xla_calls import ArrayType, XlaBackward, XlaCall, XlaForward, XlaTangent

MAX_COMPILED = 256  # programs of calls outside of `jit`; the least recently used is dropped beyond this number
# the attribute of JAX's abstract arrays that lists the mesh axes whose devices may hold different entries
MANUAL_AXES = "manual_axis_type" if hasattr(jax.core.ShapedArray((), "float32"), "manual_axis_type") else "vma"


def _define(
    name: str, find_types: Callable[..., Sequence[Any]], operations: Callable[..., list[Any]], kind: type[XlaCall]
) -> Primitive:
    """Return a primitive with all rules but those of its derivatives.

    Parameters
    ----------
    find_types : function of the list of inputs and the parameters that returns objects with the results' shapes, dtypes
    operations : the function of the inputs and the parameters in operations of JAX
    kind : the custom call of XLA that computes the results on the CPU
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def compute(*arrays: Any, **options: Any) -> Any:
        checks = ("nan", jax.config.jax_debug_nans, np.isnan), ("inf", jax.config.jax_debug_infs, np.isinf)
        # under these three options, `jit` would call this function without end
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            results = _compile(primitive.bind, tuple(sorted(options.items())))(*arrays)
        finite = results[:1] if kind is XlaForward else results  # a statistic may be −∞, as lse without keys
        for what, is_forbidden, find in checks:
            if is_forbidden and any(find(np.asarray(result)).any() for result in finite):
                raise FloatingPointError(f"invalid value ({what}) encountered in {name}")
        return results

    primitive.def_impl(compute)
    primitive.def_abstract_eval(lambda *inputs, **options: _shaped(find_types(inputs, **options), inputs))
    lower = mlir.lower_fun(operations, multiple_results=True)
    mlir.register_lowering(primitive, lower)
    mlir.register_lowering(primitive, partial(_lower, kind, lower), platform="cpu")
    batching.primitive_batchers[primitive] = partial(_batch, primitive)
    return primitive


@lru_cache(MAX_COMPILED)
def _compile(function: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Return `function` with these options as one compiled program. Without `jit`, each operation would be one."""
    compiled: Callable[..., Any] = jax.jit(lambda *arrays: function(*arrays, **dict(options)))
    return compiled


# -- forward ---------------------------------------------------------------------------------------------------------


def bind_attention(*inputs: Any, options: PrimitiveOptions) -> list[Any]:
    """Return output, lse, lse in float64 as pairs of 32-bit words, and the arrays of all statistics but lse."""
    results: list[Any] = attention_p.bind(*vary_together(inputs), options=options)
    return results


def vary_together(inputs: Sequence[Any]) -> list[Any]:
    """Return the arrays, marked to vary over the same mesh axes, as `jax.shard_map` demands of a primitive's arguments.

    An array varies over an axis if the devices of the axis may hold different entries. The gradient of an array that
    did not vary is the sum of the devices' gradients.
    """
    axes = [_varying_axes(jax.typeof(x)) for x in inputs]
    joined = frozenset().union(*axes)
    return [x if own == joined else _vary(x, tuple(joined - own)) for x, own in zip(inputs, axes, strict=True)]


def _vary(array: Any, axes: tuple[Any, ...]) -> Any:
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, axes, to="varying")
    return jax.lax.pvary(array, axes)  # its name in JAX 0.7


def _varying_axes(aval: Any) -> frozenset[Any]:
    kind = getattr(aval, MANUAL_AXES, None)
    found: frozenset[Any] = getattr(kind, "varying", kind or frozenset())
    return found


def _shaped(types: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Return abstract arrays with the shapes and dtypes of `types`.

    Inside `jax.shard_map` the abstract arrays vary over the same mesh axes as the inputs; see `vary_together`.
    """
    options: dict[str, Any] = {}
    if _varying_axes(inputs[0]):
        sharding = jax.sharding.NamedSharding(inputs[0].sharding.mesh, jax.sharding.PartitionSpec())
        options = {"sharding": sharding, MANUAL_AXES: getattr(inputs[0], MANUAL_AXES)}
    return [jax.core.ShapedArray(x.shape, x.dtype, **options) for x in types]


def _lower(
    kind: type[XlaCall],
    lower_operations: Callable[..., Any],
    ctx: Any,
    *operands: Any,
    options: PrimitiveOptions,
    **more: Any,
) -> Any:
    """Lower a primitive to the custom call of XLA, and return the values of its results.

    A tangent of a statistic besides lse is lowered to operations of JAX.
    """
    if kind is XlaTangent and options.differentiable_results(ctx.avals_in) != [OUTPUT_INDEX, LSE_INDEX]:
        return lower_operations(ctx, *operands, options=options, **more)
    places = _find_operands(options.spec.num_arrays, **more) if options.by_position else (set(), set())
    arguments, results = (
        tuple([ArrayType(tuple(aval.shape), str(aval.dtype), k in own) for k, aval in enumerate(avals)])
        for avals, own in zip((ctx.avals_in, ctx.avals_out), places, strict=True)
    )
    if len(arguments) + len(results) > MAX_BUFFERS:
        raise KernelRefusedError(
            f"a call with {len(arguments)} arrays and {len(results)} results",
            f"at most {MAX_BUFFERS} arrays and results together in a compiled program",
            "join tables into one array, or ask for fewer statistics in see=",
        )
    call = kind(options, arguments, results, **more)
    if not options.by_position:
        return jax.ffi.ffi_lowering(register_custom_call())(ctx, *operands, call=call.to_text())
    # the transposes of `_call_by_position` undo those of the caller, so XLA removes both
    return mlir.lower_fun(partial(_call_by_position, call), multiple_results=True)(ctx, *operands)


def _call_by_position(call: XlaCall, *arrays: Any) -> list[Any]:
    """Return the results of a custom call that reads and writes some arrays with swapped axes; see `ArrayType`."""
    operands = [_swap_if(kind.by_position, x) for kind, x in zip(call.arguments, arrays, strict=True)]
    types = [jax.ShapeDtypeStruct(kind.memory_shape, kind.dtype) for kind in call.results]
    results = jax.ffi.ffi_call(register_custom_call(), types)(*operands, call=call.to_text())
    return [_swap_if(kind.by_position, x) for kind, x in zip(call.results, results, strict=True)]


def _swap_if(condition: bool, array: Any) -> Any:
    return jax.numpy.swapaxes(array, -3, -2) if condition else array


def _find_operands(
    num_inputs: int, wanted: tuple[int, ...] = (), given: tuple[int, ...] | None = None
) -> tuple[set[int], set[int]]:
    """Return the indices of the arguments, and of the results, to which `by_position` applies.

    The arguments of a derivative are the inputs, output, lse in float64, and then tangents of the arguments `wanted`,
    or, in the backward pass, the gradients of the results `given`.
    """
    changed = {k for k, place in enumerate(wanted) if place < NUM_OPERANDS}
    directions = changed if given is None else {k for k, place in enumerate(given) if place == OUTPUT_INDEX}
    arguments = {*range(NUM_OPERANDS), num_inputs, *[num_inputs + 2 + k for k in directions]}
    return arguments, {OUTPUT_INDEX} if given is None else changed


def _tangent_types(inputs: Sequence[Any], options: PrimitiveOptions, wanted: tuple[int, ...]) -> list[Any]:
    types = options.result_types(inputs)
    return [types[k] for k in options.differentiable_results(inputs)]


# -- derivatives -------------------------------------------------------------------------------------------------------


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], options: PrimitiveOptions) -> tuple[Any, Any]:
    """Return the results of `attention` and their tangents."""
    results = attention_p.bind(*primals, options=options)
    learned = [id(x) for x, tangent in zip(primals, tangents, strict=True) if type(tangent) is not ad.Zero]
    refuse_learned(options.spec.statistics(options.spec.unflatten(primals).tables), lambda x: id(x.array) in learned)
    wanted = tuple(k for k in options.spec.find_places(options.spec.score_tables) if type(tangents[k]) is not ad.Zero)
    if not wanted:  # only masks read the arrays with tangents
        return results, [_zero(result) for result in results]
    directions = [tangents[k] for k in wanted]
    derivatives = tangent_p.bind(
        *primals, results[OUTPUT_INDEX], results[PRECISE_LSE_INDEX], *directions, options=options, wanted=wanted
    )
    derivative_of = dict(zip(options.differentiable_results(primals), derivatives, strict=True))
    return results, [derivative_of.get(k, _zero(result)) for k, result in enumerate(results)]


def _zero(primal: Any) -> Any:
    """Return the tangent of a result that does not depend on the differentiated arguments: JAX's symbolic zero."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _differentiate_again(
    function: Callable[..., list[Any]], primals: Sequence[Any], directions: Sequence[Any], **options: Any
) -> tuple[Any, Any]:
    """Return the results of `tangent` or `backward` and their tangents; `function` computes these results in JAX."""
    tangents = [ad.instantiate_zeros(direction) for direction in directions]
    results: tuple[Any, Any] = jax.jvp(_compile(function, tuple(sorted(options.items()))), list(primals), tangents)
    return results


def _transpose(
    cotangents: Sequence[Any], *inputs: Any, options: PrimitiveOptions, wanted: tuple[int, ...]
) -> list[Any]:
    """Return None for each input of `tangent` that is not a tangent, and then the gradients of the tangents."""
    constants = inputs[: options.spec.num_arrays + 2]
    indices = options.differentiable_results(constants)
    present = [k for k, x in enumerate(cotangents) if type(x) is not ad.Zero]
    given = tuple(indices[k] for k in present)
    found = backward_p.bind(*constants, *(cotangents[k] for k in present), options=options, wanted=wanted, given=given)
    return [None] * len(constants) + list(found)


# -- vmap --------------------------------------------------------------------------------------------------------------

# The mapped axis becomes a leading batch axis, so that one call serves all its elements. `join_spec` rewrites the
# formulas for the joined call. In four cases the elements of the mapped axis are computed one after another: with
# dropout, with mapped sinks, with gradients of sinks, and with means over the batch.


def _batch(
    primitive: Primitive, inputs: Sequence[Any], axes: Sequence[int | None], options: PrimitiveOptions, **more: Any
) -> tuple[list[Any], list[int]]:
    """Return the results of a mapped call, and the mapped axis of each result, which is 0.

    Parameters
    ----------
    inputs : the arguments of the primitive
    axes : the mapped axis of each argument; None for an argument that is the same in every element
    options, more : the parameters of the primitive; those of a derivative have `wanted`, the indices of arguments
    """
    size = next(x.shape[axis] for x, axis in zip(inputs, axes, strict=True) if axis is not None)
    arguments = [x if axis is None else jax.numpy.moveaxis(x, axis, 0) for x, axis in zip(inputs, axes, strict=True)]
    is_mapped = [axis is not None for axis in axes]
    spec = options.spec
    tables = spec.table_places
    others = range(tables.stop, spec.num_arrays)  # sinks and seed
    wanted = more.get("wanted", ())
    element = [
        jax.ShapeDtypeStruct(x.shape[is_stacked:], x.dtype) for x, is_stacked in zip(arguments, is_mapped, strict=True)
    ]
    old = options.examples(element)
    has_batch_means = any(x.over_batch for x in spec.statistics(old.tables))
    if any(is_mapped[k] or k in wanted for k in others) or spec.has_seed or has_batch_means:
        results = _compute_in_turn(primitive, arguments, is_mapped, options=options, **more)
        return results, [0] * len(results)
    for k in range(len(arguments)):
        # `vmap` returns a table's gradient for each element, so the joined call then needs a table for each element
        if not is_mapped[k] and k not in others and (k not in tables or k in wanted):
            arguments[k], is_mapped[k] = jax.numpy.broadcast_to(arguments[k], (size, *arguments[k].shape)), True
    joined = join_spec(spec, old, options.examples(arguments).tables, [is_mapped[k] for k in tables])
    results = primitive.bind(*arguments, options=replace(options, spec=joined), **more)
    return results, [0] * len(results)


def _compute_in_turn(primitive: Primitive, arguments: list[Any], is_mapped: list[bool], /, **options: Any) -> list[Any]:
    """Return the results of the primitive, computed for one element of the mapped axis after another and stacked."""
    mapped = [x for x, is_stacked in zip(arguments, is_mapped, strict=True) if is_stacked]

    def compute(element: list[Any]) -> list[Any]:
        rest = iter(element)
        results: list[Any] = primitive.bind(
            *[next(rest) if is_stacked else x for x, is_stacked in zip(arguments, is_mapped, strict=True)], **options
        )
        return results

    results: list[Any] = jax.lax.map(compute, mapped)
    return results


# -- the primitives ----------------------------------------------------------------------------------------------------

attention_p = _define("sightline_attention", lambda inputs, options: options.result_types(inputs), compute, XlaForward)
tangent_p = _define("sightline_attention_tangent", _tangent_types, tangents, XlaTangent)
backward_p = _define(
    "sightline_attention_backward", lambda inputs, wanted, **_: [inputs[k] for k in wanted], gradients, XlaBackward
)
ad.primitive_jvps[attention_p] = _differentiate
ad.primitive_jvps[tangent_p] = partial(_differentiate_again, tangents)
ad.primitive_jvps[backward_p] = partial(_differentiate_again, gradients)
ad.primitive_transposes[tangent_p] = _transpose
