"""Attention and its derivatives of every order, in reverse and forward mode: one autograd Function for torch.func.

Order 0 is attention. Order 1 is its backward pass, and order k + 1 is the backward pass of order k. The tensors and
the outputs of each order are these:

    order 0   query, key, value, tables, sinks, seed    →  output, lse, statistics' arrays
    order 1   gradients of some outputs of order 0,     →  gradients of query, key, value, the wanted tables, sinks
              output, lse, tensors of order 0
    order k   gradients of the outputs of order k − 1,  →  gradients of the differentiable tensors of order k − 1
              tensors of order k − 1

The generated kernels compute orders 0 and 1. torch differentiates the array operations of `streaming` for the other
orders. `batching` has the rule of `torch.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..call.problem import NUM_OPERANDS
from ..call.spec import Arrays, CallSpec, find_differentiable_results
from ..errors import KernelRefusedError
from ..statistics.reduction import refuse_learned
from . import batching, operator
from .operator import find_float_tables, read_arguments


@dataclass(frozen=True)
class Derivative:
    """A derivative of attention of some order, without its tensors.

    spec : the call
    float_tables : the indices of the tables that may have gradients
    differentiable_places : the indices of the tensors with respect to which the next order differentiates
    order : 0 for attention
    below : the derivative of the order below
    gradient_indices : at order 1, the outputs of order 0 whose gradients are the first tensors
    learned_tables : the indices of the tables whose gradients are outputs
    num_gradients : how many of the tensors, from the first, are gradients of the outputs of the order below
    num_own_tensors : the number of tensors that this order adds: its gradients, and at order 1 also output and lse
    output_places : for each output the index of the tensor whose gradient the output is
    """

    spec: CallSpec
    float_tables: tuple[int, ...]
    differentiable_places: tuple[int, ...]
    order: int = 0
    below: Derivative | None = None
    gradient_indices: tuple[int, ...] = ()
    learned_tables: tuple[int, ...] = ()
    num_gradients: int = 0
    num_own_tensors: int = 0
    output_places: tuple[int, ...] = ()

    @classmethod
    def of(cls, arrays: Arrays, spec: CallSpec) -> Derivative:
        """Return attention, the derivative of order 0."""
        tables = find_float_tables(arrays, spec)
        return cls(spec, tuple(tables), tuple(spec.find_places(tables)))

    def above(self, gradient_indices: Sequence[int] = (), learned_tables: Sequence[int] | None = None) -> Derivative:
        """Return the derivative of the next order. The parameters are fields of a derivative of order 1."""
        learned = self.float_tables if learned_tables is None else learned_tables
        count = len(self.output_places) if self.order else len(gradient_indices)
        num_own = count if self.order else count + 2
        places = self.differentiable_places if self.order else self.spec.find_places(learned)
        return replace(
            self,
            differentiable_places=(*range(count), *[num_own + place for place in self.differentiable_places]),
            order=self.order + 1,
            below=self,
            gradient_indices=tuple(gradient_indices),
            learned_tables=tuple(learned),
            num_gradients=count,
            num_own_tensors=num_own,
            output_places=tuple([num_own + place for place in places]),
        )

    def with_spec(self, spec: CallSpec) -> Derivative:
        """Return the derivative of another call with as many arrays of each kind."""
        return replace(self, spec=spec, below=None if self.below is None else self.below.with_spec(spec))

    @property
    def num_saved_outputs(self) -> int:
        """How many outputs, from the first, `differentiate` and `push_forward` need: output and lse at order 0."""
        return 2 if self.order == 0 else 0

    def differentiable_results(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the indices of the outputs of order 0 that have gradients."""
        return find_differentiable_results(self.spec.problem(self.spec.unflatten(tensors)).see)

    # -- computation --------------------------------------------------------------------------------------------------
    def compute(self, *tensors: Tensor) -> list[Tensor]:
        """Return the outputs. The result is not differentiable."""
        if any(x.is_nested for x in tensors):  # a transform hides this from `dispatch`
            cure = "pass query.values(), key.values(), value.values() and mask=sightline.documents(lengths=...)"
            raise KernelRefusedError("nested tensors inside torch.func or a forward derivative", "dense tensors", cure)
        if self.order == 0:
            results: list[Tensor] = operator.attention_op(*self.spec.unflatten(tensors), *self.spec)
            return results
        if self.order == 1:
            gradients, (output, lse, *rest) = list(tensors[: self.num_gradients]), tensors[self.num_gradients :]
            order = list(self.gradient_indices), list(self.learned_tables)
            found: list[Tensor] = operator.attention_backward_op(
                gradients, *order, output, lse, *self.spec.unflatten(rest), *self.spec
            )
            return found
        if get_proxy_mode() is not None or any(isinstance(x, FakeTensor) for x in tensors):
            given = "second or forward derivatives of attention in a traced program"
            cure = "torch.func.jvp, jacfwd, jacrev and hessian in eager mode, in place of linearize, make_fx or compile"
            raise KernelRefusedError(given, "first derivatives by the backward pass", cure)
        # in inference mode torch records no graph; for tensors that were created in this mode, it never records one
        with torch.inference_mode(False), torch.enable_grad(), operator.autocast_disabled(tensors[0]):
            variables = [x.clone() if x.is_inference() else x for x in tensors]
            for place in self.differentiable_places:
                variables[place] = variables[place].detach().requires_grad_()
            return self._differentiate(variables, create_graph=False)

    def _differentiate(self, variables: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
        """Return the outputs of an order of at least 1. The result is differentiable if `create_graph` is True."""
        gradients, tensors_below = variables[: self.num_gradients], variables[self.num_own_tensors :]
        if self.below is None or self.below.below is None:
            order = self.gradient_indices, self.learned_tables
            return operator.apply_chain_rule(gradients, *order, self.spec.unflatten(tensors_below), self.spec, None)
        outputs = self.below._differentiate(tensors_below, create_graph=True)
        pairs = [(y, gradient) for y, gradient in zip(outputs, gradients, strict=True) if y.requires_grad]
        inputs = [variables[place] for place in self.output_places]
        found: tuple[Tensor, ...] = torch.autograd.grad(
            [y for y, _ in pairs],
            inputs,
            [gradient for _, gradient in pairs],
            create_graph=create_graph,
            materialize_grads=True,
        )
        return list(found)

    # -- derivatives --------------------------------------------------------------------------------------------------
    def differentiate(
        self,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """Return the gradients of the tensors, None for a tensor without a gradient.

        `outputs` are output and lse at order 0, and empty at other orders. `gradients` are the gradients of the
        outputs, None for 0. `wanted` says of each tensor whether its gradient is needed.
        """
        if self.order == 0:
            known = {k: gradient for k, gradient in enumerate(gradients) if gradient is not None}
            above = self.above([*known], [k for k in self.float_tables if wanted[NUM_OPERANDS + k]])
            own_tensors = [*known.values(), *outputs]
        else:
            above, own_tensors = self.above(), _fill_zeros(gradients, tensors, self.output_places)
        places = [place - above.num_own_tensors for place in above.output_places]
        gradient_of = dict(zip(places, apply_derivative(above, *own_tensors, *tensors), strict=True))
        return [gradient_of.get(place) for place in range(len(tensors))]

    def push_forward(
        self,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        tangents: Sequence[Tensor | None],
        types: Sequence[Any],
    ) -> Sequence[Tensor | None]:
        """Return the tangents of the outputs, by a kernel if the order is 0 and only output and lse have tangents.

        `tangents` are those of the tensors, None for 0. `types` are the shapes and dtypes of the outputs. The other
        arguments are as in `differentiate`.
        """
        if self.order == 0:
            learned = [id(x) for x, tangent in zip(tensors, tangents, strict=False) if tangent is not None]
            see = self.spec.statistics(self.spec.unflatten(tensors[: self.spec.num_arrays]).tables)
            refuse_learned(see, lambda table: id(table.array) in learned)
        if self.order > 0 or self.differentiable_results(tensors) != [0, 1]:
            return self.push_by_operations(tensors, outputs, tangents, types)
        known = {place: x for place in self.differentiable_places if (x := tangents[place]) is not None}
        return apply_derivative(ForwardDerivative(self, tuple(known)), *tensors, *outputs, *known.values())

    def push_by_operations(
        self,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        tangents: Sequence[Tensor | None],
        types: Sequence[Any],
    ) -> list[Any]:
        """Return the tangents of the outputs: the forward derivative J t for the tangents t of the tensors.

        The backward pass gives Jᵀ u for gradients u of the outputs. So its own backward pass, two orders above, gives
        J t as the gradient of u. The result does not depend on u, which is 0.
        """
        if self.order == 0:
            results = self.differentiable_results(tensors)
            above = self.above(results)
        else:
            results, above = list(range(len(self.output_places))), self.above()
        zeros = [tensors[0].new_zeros(types[k][0], dtype=types[k][1]) for k in results]
        inputs = [*zeros, *outputs, *tensors]
        directions = [tangents[place - above.num_own_tensors] for place in above.output_places]
        own_tensors = _fill_zeros(directions, inputs, above.output_places)
        derivatives = apply_derivative(above.above(), *own_tensors, *inputs)
        tangent_of = dict(zip(results, derivatives, strict=False))
        return [tangent_of.get(k) for k in range(len(types))]

    def batch(self, tensors: Sequence[Tensor], dims: Sequence[int | None], size: int) -> Sequence[Tensor]:
        """Return the outputs under torch.vmap of `size` elements, mapped over their first axis."""
        return batching.batch(apply_derivative, self, tensors, dims, size)


def _fill_zeros(given: Sequence[Tensor | None], tensors: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Return the tensors `given`, with zeros in place of None. The zeros have the shape of `tensors[place]`."""
    pairs = zip(given, places, strict=True)
    return [torch.zeros_like(tensors[place]) if one is None else one for one, place in pairs]


@dataclass(frozen=True)
class ForwardDerivative:
    """The tangents of output and lse, which the generated kernel computes; see `apply_derivative`.

    Its tensors are those of attention, output, lse, and the tangents of the tensors `places` of attention. Array
    operations differentiate it.
    """

    derivative: Derivative
    places: tuple[int, ...]
    num_saved_outputs: ClassVar[int] = 0

    def compute(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tangents of output and lse."""
        spec = self.derivative.spec
        call_tensors, (output, lse, *directions) = self._split(tensors)
        arguments = *spec.unflatten(call_tensors), *spec
        found: list[Tensor] = operator.attention_tangent_op(directions, list(self.places), output, lse, *arguments)
        return found

    def differentiate(
        self, tensors: Sequence[Tensor], _: Sequence[Tensor], gradients: Sequence[Tensor | None], __: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of the tensors, as `Derivative.differentiate` does."""
        chosen = self._differentiable(tensors)
        results, pull_back, *_ = torch.func.vjp(self._by_operations(tensors, chosen), *[tensors[k] for k in chosen])
        filled = [torch.zeros_like(y) if x is None else x for x, y in zip(gradients, results, strict=True)]
        gradient_of = dict(zip(chosen, pull_back(tuple(filled)), strict=True))
        return [gradient_of.get(k) for k in range(len(tensors))]

    def push_forward(
        self, tensors: Sequence[Tensor], _: Sequence[Tensor], tangents: Sequence[Tensor | None], __: Sequence[Any]
    ) -> Sequence[Tensor]:
        """Return the tangents of the tangents, as `Derivative.push_forward` does."""
        chosen = [k for k in self._differentiable(tensors) if tangents[k] is not None]
        pairs = tuple([tensors[k] for k in chosen]), tuple([tangents[k] for k in chosen])
        found: tuple[Tensor, ...] = torch.func.jvp(self._by_operations(tensors, chosen), *pairs)[1]
        return found

    def batch(self, tensors: Sequence[Tensor], dims: Sequence[int | None], _: int) -> Sequence[Tensor]:
        """Return the tangents of all elements, as `Derivative.batch` does."""

        def function(*elements: Tensor) -> tuple[Tensor, ...]:
            return self._by_operations(elements, range(len(elements)))(*elements)

        found: tuple[Tensor, ...] = torch.vmap(function, tuple(dims))(*tensors)
        return found

    def _split(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the tensors of attention, and the others."""
        count = self.derivative.spec.num_arrays
        return tensors[:count], tensors[count:]

    def _differentiable(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the indices of the tensors on which the tangents depend.

        Output and lse are not among them, because the array operations compute both again.
        """
        return [*self.derivative.differentiable_places, *range(self.derivative.spec.num_arrays + 2, len(tensors))]

    def _by_operations(self, tensors: Sequence[Tensor], chosen: Sequence[int]) -> Callable[..., tuple[Tensor, ...]]:
        """Return the tangents of output and lse as a function of the tensors `chosen`, in differentiable operations."""

        def function(*variables: Tensor) -> tuple[Tensor, ...]:
            replaced = dict(zip(chosen, variables, strict=True))
            call_tensors, (output, lse, *directions) = self._split([replaced.get(k, x) for k, x in enumerate(tensors)])
            direction_of = dict(zip(self.places, directions, strict=True))
            types = [(x.shape, x.dtype) for x in (output, lse)]
            tangents = [direction_of.get(place) for place in range(len(call_tensors))]
            return tuple(self.derivative.push_by_operations(call_tensors, (output, lse), tangents, types))

        return function


class _Differentiable(torch.autograd.Function):
    """A derivative, or tangents, in torch's graph and under torch's transforms."""

    @staticmethod
    def forward(derivative: Derivative | ForwardDerivative, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(derivative.compute(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
        ctx.derivative, *tensors = inputs
        ctx.num_tensors, ctx.types = len(tensors), [(x.shape, x.dtype) for x in output]
        saved = [*tensors, *output[: ctx.derivative.num_saved_outputs]]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        tensors, outputs = ctx.saved_tensors[: ctx.num_tensors], ctx.saved_tensors[ctx.num_tensors :]
        if all(gradient is None for gradient in gradients):
            return (None,) * (1 + len(tensors))
        return None, *ctx.derivative.differentiate(tensors, outputs, gradients, ctx.needs_input_grad[1:])

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Any, ...]:
        tensors, outputs = ctx.saved_tensors[: ctx.num_tensors], ctx.saved_tensors[ctx.num_tensors :]
        derivatives = ctx.derivative.push_forward(tensors, outputs, tangents, ctx.types)
        # torch fails on None as the tangent of floats, such as the weights of `top_k`
        zeros = tensors[0].new_zeros
        pairs = zip_longest(derivatives, ctx.types)
        return tuple([zeros(t[0], dtype=t[1]) if x is None and t[1].is_floating_point else x for x, t in pairs])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], derivative: Derivative | ForwardDerivative, *tensors: Tensor
    ) -> tuple[Any, Any]:
        outputs = derivative.batch(tensors, in_dims[1:], info.batch_size)
        return tuple(outputs), (0,) * len(outputs)


def apply_derivative(derivative: Derivative | ForwardDerivative, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of the derivative. torch records the call in its graph of gradients."""
    outputs: tuple[Tensor, ...] = _Differentiable.apply(derivative, *tensors)  # type: ignore[no-untyped-call]
    return outputs


# -- the registered operators, in programs of torch.compile ------------------------------------------------------------
# The tensors among the arguments of an operator are those of its derivative, in the same order. The arguments of
# `attention_backward` end with those of `attention`.

NUM_ARGUMENTS = len(Arrays._fields) + len(CallSpec._fields)  # of `attention`


def _read_derivative(arguments: Sequence[Any]) -> Derivative:
    """Return the derivative that the operator with these arguments computes."""
    attention = Derivative.of(*read_arguments(arguments[-NUM_ARGUMENTS:]))
    return attention.above(arguments[1], arguments[2]) if len(arguments) > NUM_ARGUMENTS else attention


def _mark_tensors(argument: Any) -> Any:
    """Return True for a tensor, a list of True for a list of tensors, and None for another argument.

    An empty list is a list of tensors: torch takes every empty list for one.
    """
    if isinstance(argument, list) and all(isinstance(x, Tensor) for x in argument):
        return [True] * len(argument)
    return True if isinstance(argument, Tensor) else None


def _flatten(marks: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return the values of the marked tensors. `values` has lists where `marks` has lists."""
    pairs = [pair for pair in zip(marks, values, strict=True) if pair[0] is not None]
    return [one for mark, value in pairs for one in (value if isinstance(mark, list) else [value])]


def _map_operator(info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[Sequence[Tensor], list[int]]:
    """Return the outputs of an operator under torch.vmap, and their mapped axes."""
    derivative, marks = _read_derivative(arguments), [*map(_mark_tensors, arguments)]
    tensors, dims = _flatten(marks, arguments), _flatten(marks, in_dims)
    outputs = batching.batch(Derivative.compute, derivative, tensors, dims, info.batch_size)
    return outputs, [0] * len(outputs)


def _save_tensors(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    ctx.marks = [*map(_mark_tensors, inputs)]
    _Differentiable.setup_context(ctx, (_read_derivative(inputs), *_flatten(ctx.marks, inputs)), output)


def _differentiate_operator(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the gradients of the arguments."""
    tensors, outputs = ctx.saved_tensors[: ctx.num_tensors], ctx.saved_tensors[ctx.num_tensors :]
    wanted = _flatten(ctx.marks, ctx.needs_input_grad)
    rest = iter(ctx.derivative.differentiate(tensors, outputs, gradients, wanted))
    return tuple([[next(rest) for _ in x] if isinstance(x, list) else next(rest) if x else None for x in ctx.marks])


for _operator in (operator.attention_op, operator.attention_backward_op):
    _operator.register_vmap(_map_operator)
    _operator.register_autograd(_differentiate_operator, setup_context=_save_tensors)
