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

from ..formula.expression import Expression
from ..formula.library import relative_bias
from .compatibility import NAME, change_position_biases, read_implementation
from .mask_interface import position_formulas
from .wrapper_tensors import WrapperTensor, call_dense


class PositionBias(WrapperTensor):
    """A bias (1, H, n, m), in logits, that stores its formula and no entries.

    A model passes the bias unchanged from layer to layer. If the model uses the bias in any other tensor operation, the
    model's own code computes the dense array, and the operation reads that array, with its gradient.

    Attributes
    ----------
    formula : Expression
        The score s + bias as a formula of the rows i and j of the call, whose first query may be later than position 0.
    """

    formula: Expression

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function.__name__ == "__get__":  # the read of an attribute, such as `shape`
            with torch._C.DisableTorchFunctionSubclass():
                return function(*inputs)
        return call_dense(function, inputs, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{function} got a PositionBias that `__torch_function__` did not make dense")


@lru_cache(None)
def serve_position_biases(configuration: str) -> None:
    """Replace `compute_bias` in the layer classes of a family of models, so that it returns a `PositionBias`.

    The function that makes masks calls this function, because a model requests its masks before its layers run. A class
    is changed if its method `compute_bias` has the arguments of T5's. With another `attn_implementation`, the changed
    method returns the model's own array, and also while torch.compile traces.

    Parameters
    ----------
    configuration : the module of the family's configuration, such as "transformers.models.t5.configuration_t5"
    """
    change_position_biases(configuration, _return_formulas)


def _return_formulas(compute_bias: Callable[..., Tensor]) -> Callable[..., Tensor]:

    @wraps(compute_bias)
    def compute(
        layer: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:
        def make_dense() -> Tensor:
            return compute_bias(layer, query_length, key_length, device, past_seen_tokens)

        if read_implementation(layer.config) != NAME or torch.compiler.is_compiling():
            return make_dense()
        farthest, start = layer.relative_attention_max_distance, int(past_seen_tokens)
        # one query in the middle of 2 · farthest + 1 keys has each distance once
        table = compute_bias(layer, 1, 2 * farthest + 1, device, farthest)[0, :, 0]
        formula = relative_bias(table).rewrite(position_formulas(start, 0, key_length - query_length))
        shape = 1, len(table), query_length, key_length
        return PositionBias(shape, table.device, table.dtype, formula=formula, dense=make_dense)

    return compute
