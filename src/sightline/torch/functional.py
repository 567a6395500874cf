"""torch's own signature, so that this library can take the place of `F.scaled_dot_product_attention` anywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..errors import MaskError, ShapeError
from ..formula.expression import Expression
from ..formula.library import bias, causal, dense

__all__ = ["align_mask", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(Q Kᵀ · scale + M) V, with the arguments of `torch.nn.functional.scaled_dot_product_attention`.

    Parameters
    ----------
    query : (N, ..., H, L, E) float16, bfloat16, float32 or float64; any number of leading axes, none too
    key : (N, ..., G, S, E)
    value : (N, ..., G, S, E_v)
    attn_mask : broadcastable to (N, ..., H, L, S), optional
        bool: True attends. Floats are added to the scaled scores, in logits; −∞ hides; they may need gradients.
    dropout_p : float, default 0
        Probability with which a weight is dropped, whether or not any module trains, as torch has it. torch's generator
        is asked for one seed a call.
    is_causal : bool, default False
        i ≥ j, from the upper left corner. With `attn_mask` a pair must pass both (torch refuses the two together).
    scale : float, default 1/√E
    enable_gqa : bool, default False
        H may be a multiple of G; without it H = G, or one of them is 1.

    Returns
    -------
    output : (N, ..., H, L, E_v), the inputs' dtype; 0 for a query that sees nothing

    Raises
    ------
    ShapeError
        Query and key heads differ without `enable_gqa`; shapes that do not fit together.
    MaskError
        `attn_mask` holds integers, or is no tensor.
    SightlineError
        As `sightline.attention` says.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, equation 1.

    Examples
    --------
    >>> import torch, sightline.torch
    >>> x = torch.eye(2)
    >>> sightline.torch.scaled_dot_product_attention(x, x, x, is_causal=True)
    tensor([[1.0000, 0.0000],
            [0.3302, 0.6698]])
    """
    without_batch = query.ndim == key.ndim == value.ndim == 3
    if without_batch:  # the first axis counts as heads, which is what masks (N, L, S) and GQA take it for
        query, key, value = query[None], key[None], value[None]
    if not enable_gqa and min(query.ndim, key.ndim, value.ndim) > 3:
        query, key, value = _expand_heads(query, key, value)
    if not isinstance(attn_mask, Tensor | None):
        raise MaskError(
            "attn_mask is " + ("a formula" if isinstance(attn_mask, Expression) else f"a {type(attn_mask).__name__}"),
            "a tensor, as torch's own function takes it",
            "sightline.attention(query, key, value, mask=...) for formulas and arrays of NumPy",
        )
    mask: Any = causal() if is_causal else None
    score: Expression | None = None
    if attn_mask is not None:
        array = align_mask(attn_mask, query, key, value)
        if array.is_floating_point():
            score = bias(array)
        else:
            mask = dense(array) if mask is None else mask & dense(array)
    output: Tensor = attention(query, key, value, mask=mask, score=score, scale=scale, dropout=dropout_p)
    return output[0] if without_batch else output


def align_mask(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A mask for the scores' own shape, as one right-aligned to (B, H, n, m) where B counts all leading axes."""
    if query.ndim == 3 and mask.ndim == 3:
        return mask[:, None]
    if query.ndim > 4 and mask.ndim > 3:
        batch_shape = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # type: ignore[no-untyped-call]
        return mask.expand(*batch_shape, *mask.shape[-3:])
    return mask


def _expand_heads(*arrays: Tensor) -> list[Tensor]:
    heads = max(x.shape[-3] for x in arrays)
    if any(x.shape[-3] not in (1, heads) for x in arrays):
        raise ShapeError(
            f"{', '.join([str(x.shape[-3]) for x in arrays])} heads of query, key and value",
            "as many of each, or 1",
            "enable_gqa=True where key and value heads are shared",
        )
    return [x.expand(*x.shape[:-3], heads, *x.shape[-2:]) for x in arrays]
