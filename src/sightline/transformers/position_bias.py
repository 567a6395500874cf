"""Position biases of T5 and similar models as a table of distances, without H × n × m arrays.

The first attention layer of such a model computes a bias for each head, query and key, `compute_bias` of T5, and
all later layers add the same bias. The bias depends on the distance j − i alone. Distances beyond
`relative_attention_max_distance` have the bias of that largest distance (Raffel et al., "Exploring the limits of
transfer learning with a unified text-to-text transformer", 2020, section 2.1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..formula.expression import Expression
from ..formula.library import relative_bias
from .compatibility import change_position_biases, read_implementation
from .mask_interface import position_formulas


class PositionBias(Tensor):
    """A bias (1, H, n, m), in logits, that stores its formula and no entries.

    A model passes the bias unchanged from layer to layer. If the model uses the bias in any other tensor operation, the
    model's own code computes the dense array, and the operation reads that array, with its gradient.

    Attributes
    ----------
    rule : Expression
        The score s + bias as a formula of the positions i and j in the sequence.
    formula : Expression
        The same score as a formula of the rows i and j of the call, whose first query may have a later position than 0.
    """

    rule: Expression
    formula: Expression
    _make_dense: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, rule: Expression, formula: Expression, shape: tuple[int, ...], like: Tensor, make_dense: Callable[[], Any]
    ) -> PositionBias:
        bias: PositionBias = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        bias.rule, bias.formula, bias._make_dense = rule, formula, make_dense
        return bias

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ == "__get__":  # the read of an attribute, such as `shape`
            with torch._C.DisableTorchFunctionSubclass():
                return function(*inputs)

        def dense(value: Any) -> Any:
            return value._make_dense() if isinstance(value, PositionBias) else value

        return function(*tree_map(dense, inputs), **tree_map(dense, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{function} got a PositionBias that `__torch_function__` did not make dense")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PositionBias({self.formula}, {tuple(self.shape)})"


@lru_cache(None)
def serve_position_biases(configuration: str, implementation: str) -> None:
    """Replace `compute_bias` in the layer classes of a family of models, so that it returns a `PositionBias`.

    The function that makes masks calls this function, because a model requests its masks before its layers run. A class
    is changed if its method `compute_bias` has the arguments of T5's. With another `attn_implementation`, the changed
    method returns the model's own array.

    Parameters
    ----------
    configuration : the module of the family's configuration, such as "transformers.models.t5.configuration_t5"
    implementation : the `attn_implementation` of models that get a `PositionBias`
    """
    change_position_biases(configuration, lambda compute_bias: _return_formulas(compute_bias, implementation))


def _return_formulas(compute_bias: Callable[..., Tensor], implementation: str) -> Callable[..., Tensor]:
    """Return a method in place of `compute_bias`. It returns a `PositionBias` if the model uses `implementation`.

    With another implementation, and while torch.compile traces, it returns the model's own array.
    """

    @wraps(compute_bias)
    def compute(
        layer: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:
        def make_dense() -> Tensor:
            return compute_bias(layer, query_length, key_length, device, past_seen_tokens)

        if read_implementation(layer.config) != implementation or torch.compiler.is_compiling():
            return make_dense()
        farthest, start = layer.relative_attention_max_distance, int(past_seen_tokens)
        # one query in the middle of 2 · farthest + 1 keys has each distance once
        table = compute_bias(layer, 1, 2 * farthest + 1, device, farthest)[0, :, 0]
        rule = relative_bias(table)
        formula = rule.rewrite(position_formulas(start, 0, key_length - query_length))
        return PositionBias(rule, formula, (1, len(table), query_length, key_length), table, make_dense)

    return compute
