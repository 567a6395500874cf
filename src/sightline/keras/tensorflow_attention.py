"""Attention on TensorFlow's tensors, in eager mode and in `tf.function`.

TensorFlow calls the kernels by `tf.numpy_function`, which XLA cannot compile. So Keras trains the layers without XLA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..api.kernels import differentiate, make_plan
from ..call.kernel import GivenGradients
from ..call.problem import Problem, make_problem
from ..errors import KernelRefusedError, MissingExtraError
from ..statistics import weights

try:
    import tensorflow as tf
except ImportError as error:
    given = "Keras's TensorFlow backend without TensorFlow"
    raise MissingExtraError(given, "TensorFlow", 'pip install "sightline-attention[tensorflow]"') from error

if TYPE_CHECKING:
    from .backend_attention import AttentionMask


def attend(
    query: Any, key: Any, value: Any, mask: AttentionMask, dropout: float, seed: Any, with_weights: bool
) -> tuple[Any, Any]:
    """Return (output, weights or None) as `backend_attention.attend` does, for tensors of TensorFlow."""
    call = _HostCall(mask, dropout, with_weights)
    constants = [tf.constant(0) if seed is None else seed, *mask.arrays]
    shapes = [query.shape[:-1] + value.shape[-1:], query.shape[:-1] + key.shape[-2:-1]]

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def run(*operands: Any) -> tuple[Any, Any]:
        types = [query.dtype, tf.float64, *[query.dtype] * with_weights]
        output, lse, *seen = tf.numpy_function(call.forward, [*operands, *constants], types, stateful=False)
        results = [output, *seen]
        for result, shape in zip(results, shapes, strict=False):
            result.set_shape(shape)

        def gradient(*d_results: Any) -> Any:
            return _differentiate(call, operands, [output, lse, *d_results, *constants])

        return results, gradient

    results = run(query, key, value)
    return results[0], results[1] if with_weights else None


def _differentiate(call: _HostCall, operands: Any, others: list[Any]) -> Any:
    """Return the gradients of the operands query, key and value. A derivative of these gradients raises an error."""

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def run(*inputs: Any) -> tuple[Any, Any]:
        gradients = tf.numpy_function(call.backward, inputs, [x.dtype for x in operands], stateful=False)
        for gradient, operand in zip(gradients, operands, strict=True):
            gradient.set_shape(operand.shape)
        return gradients, _refuse

    return run(*operands, *others)


def _refuse(*_: Any) -> Any:
    given = "second derivatives of attention in TensorFlow"
    raise KernelRefusedError(given, "first derivatives", "set KERAS_BACKEND=torch, which has derivatives of any order")


@dataclass(frozen=True)
class _HostCall:
    """The options of one call. The methods compute the forward and the backward pass on NumPy arrays."""

    mask: AttentionMask
    dropout: float
    with_weights: bool

    def forward(self, query: Any, key: Any, value: Any, seed: Any, *masks: Any) -> list[Any]:
        """Return output, lse in float64, and the weights if they are requested."""
        problem = self.make_problem(query, key, value, seed, masks)
        result = make_plan(problem).kernel.run(problem)
        return [result.output, np.asarray(result.lse, np.float64), *result.seen]

    def backward(
        self, query: Any, key: Any, value: Any, output: Any, lse: Any, d_output: Any, *others: Any
    ) -> list[Any]:
        """Return the gradients of query, key and value. `others` are the gradient of the weights, seed and masks."""
        d_weights = others[0] if self.with_weights and others[0].any() else None
        seed, *masks = others[self.with_weights :]
        problem = self.make_problem(query, key, value, seed, masks)
        given = GivenGradients(d_output, saved=(output, lse), d_seen=(d_weights,) * self.with_weights)
        sums = differentiate(problem, make_plan(problem), given)
        pairs = zip((sums.query, sums.key, sums.value), (query, key, value), strict=True)
        return [np.asarray(gradient, x.dtype) for gradient, x in pairs]

    def make_problem(self, query: Any, key: Any, value: Any, seed: Any, masks: Any) -> Problem:
        formula, see = self.mask.formula(masks), [weights()] if self.with_weights else []
        return make_problem(query, key, value, mask=formula, dropout=self.dropout, seed=int(seed), see=see)
