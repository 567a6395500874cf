"""torch's CausalBias as a formula.

`torch.nn.attention.bias.causal_lower_right` and `causal_upper_left` return a CausalBias: a tensor without entries of
its own, which stands for a causal mask of given lengths. The memory of the tensor is not initialised.
"""

from __future__ import annotations

from typing import Any

from ..errors import ShapeError
from .expression import Expression
from .library import causal


def is_causal_bias(value: Any) -> bool:
    """True if the value is a `torch.nn.attention.bias.CausalBias`."""
    return type(value).__name__ == "CausalBias" and hasattr(value, "seq_len_kv")


def causal_bias_formula(bias: Any, lengths: tuple[int, int] | None) -> Expression:
    """Return the formula of a CausalBias: i ≥ j, or i + (m − n) ≥ j for `causal_lower_right`.

    Parameters
    ----------
    bias : CausalBias
    lengths : (n, m), the numbers of queries and keys of the call; None if its sequences have several lengths

    Raises
    ------
    ShapeError
        The lengths of the bias are not those of the call.
    """
    align = "lower right" if bias.variant.name == "LOWER_RIGHT" else "upper left"
    own = bias.seq_len_q, bias.seq_len_kv
    if lengths is None or own[0] != lengths[0] or own[1] != lengths[1]:
        given = "sequences of several lengths" if lengths is None else f"{lengths[0]} queries and {lengths[1]} keys"
        name = "causal_" + align.replace(" ", "_")
        raise ShapeError(
            f"the mask {name}({own[0]}, {own[1]}), a CausalBias of torch, in a call of {given}",
            "the lengths of the call",
            f"mask=sightline.causal({align!r}) of sightline.attention, which has the lengths of every call"
            + ("" if lengths is None else f", or {name}({lengths[0]}, {lengths[1]})"),
        )
    return causal(align)  # type: ignore[arg-type]
