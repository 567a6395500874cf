"""A replacement for `torch.nn.functional.scaled_dot_product_attention` with the same signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..api.functions import attend
from ..arrays.unreadable import check_class, check_kind
from ..call.problem import Options
from ..errors import MaskError, ParameterError, ShapeError
from ..formula.expression import Expression
from ..formula.library import causal
from ..formula.torch_masks import causal_bias_formula, is_causal_bias
from .nested import check_nested, is_nested

CAUSAL = causal()
CURE_OF_CLASSES = "sightline.attention(query, key, value, mask=...) for formulas and NumPy arrays"
CURE_OF_INTEGERS = "attn_mask=mask != 0 if it holds zeros and ones"


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
    """Return softmax(Q Kᵀ · scale + M) V, with the arguments of `torch.nn.functional.scaled_dot_product_attention`.

    Parameters
    ----------
    query : (..., H, L, E) float16, bfloat16, float32 or float64, with any number of leading axes
        (L, E), a query without heads, is allowed too. The leading axes of query, key and value broadcast, also if one
        array has fewer of them. If E = 0, all scores are 0.
    key : (..., G, S, E), the dtype of query
    value : (..., G, S, E_v), the dtype of query
    attn_mask : tensor broadcastable to (..., H, L, S), optional
        A bool entry is True where the query attends to the key. Float entries are logits that are added to the scaled
        scores; −∞ hides the key. A float mask may require gradients. A CausalBias of torch.nn.attention.bias is the
        mask that it stands for; its lengths must be L and S.
    dropout_p : float, default 0
        The probability that a weight is dropped. As in torch, weights are dropped in training and evaluation alike.
        Each call draws one seed from torch's generator.
    is_causal : bool, default False
        Hide key j from query i if i < j. As in torch, `attn_mask` and `is_causal` exclude each other.
    scale : float, default 1/√E
    enable_gqa : bool, default False
        True allows H to be a multiple of G (grouped-query attention, GQA). With False, H equals G, or one of them is 1.

    Returns
    -------
    output : (..., H, L, E_v), the dtype of query; 0 for a query without allowed keys

    Raises
    ------
    ShapeError
        The shapes do not fit together, or the numbers of heads differ without `enable_gqa`.
    ParameterError
        `attn_mask` is given, and `is_causal` is True.
    MaskError
        `attn_mask` is not a tensor, or holds integers.
    SightlineError
        The other errors of `sightline.attention`.

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
    try:
        operands, options, without_batch = convert_arguments(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    except Exception:
        check_operands(query, key, value)  # the error of an array that has no shape, for example
        raise
    output: Tensor = attend(*operands, options)
    return output[0] if without_batch else output


def convert_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kernel: str | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], Options, bool]:
    """Return ((query, key, value), options) for `api.functions.attend`, and True if a batch axis was added."""
    ndim = query.ndim
    if not 0 < ndim == key.ndim == value.ndim or query.shape[-1] == 0:
        query, key, value, scale = _complete_axes(query, key, value, scale)
        ndim = query.ndim
    without_batch = ndim == key.ndim == value.ndim == 3
    if without_batch:  # as in torch, the first of three axes counts as heads, for masks and for GQA
        query, key, value, ndim = query[None], key[None], value[None], 4
    if not enable_gqa and min(ndim, key.ndim, value.ndim) > 3:
        heads = query.shape[-3]
        if not (heads == key.shape[-3] == value.shape[-3]):
            query, key, value = _expand_heads(query, key, value)
    if is_causal and attn_mask is not None:
        cure = "sightline.attention(..., mask=causal() & dense(attn_mask)), or score=bias(attn_mask) if it holds floats"
        raise ParameterError("attn_mask and is_causal=True", "one of them", cure)
    mask: Any = CAUSAL if is_causal else None
    score: Any = None
    if attn_mask is not None and type(attn_mask) is not Tensor and is_causal_bias(attn_mask):
        mask = read_causal_bias(attn_mask, query, key)
    elif attn_mask is not None:
        if type(attn_mask) is not Tensor or not (attn_mask.is_floating_point() or attn_mask.dtype is torch.bool):
            check_array_mask("attn_mask", attn_mask, "attends", CURE_OF_CLASSES, CURE_OF_INTEGERS)
        array = attn_mask if ndim == 4 else align_mask(attn_mask, query, key, value)
        array = array if array.ndim else array[None]
        mask, score = (None, array) if array.is_floating_point() else (array, None)
    return (query, key, value), Options(mask, score, None, scale, None, dropout_p, None, kernel), without_batch


def read_causal_bias(bias: Any, query: Tensor, key: Tensor) -> Expression:
    """Return the formula of a CausalBias; raise ShapeError if the bias is for other lengths than query and key have."""
    return causal_bias_formula(bias, None if is_nested(query, key) else (query.shape[-2], key.shape[-2]))


def check_array_mask(name: str, mask: Any, meaning: str, cure_of_classes: str, cure_of_integers: str) -> None:
    """Raise MaskError unless the mask is a tensor of booleans or floats, and DtypeError if its kind cannot be read.

    `meaning` says what True does, for the message. `cure_of_classes` is the cure for what is no tensor.
    """
    allowed = f"a torch tensor: booleans where True {meaning}, or floats that are added to the scores"
    if not isinstance(mask, Tensor):
        given = "a formula" if isinstance(mask, Expression) else f"a {type(mask).__name__}"
        raise MaskError(f"{name} is {given}", allowed, cure_of_classes)
    check_kind(name, mask)
    if not (mask.is_floating_point() or mask.dtype is torch.bool):
        raise MaskError(f"{name} is a tensor of {str(mask.dtype).removeprefix('torch.')}", allowed, cure_of_integers)


def _complete_axes(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Return the arguments with equal numbers of axes. If E is 0, query and key get one component 0."""
    axes = [x.ndim for x in (query, key, value)]
    if min(axes) >= 2:
        query, key, value = (x[(None,) * (max(axes) - x.ndim)] for x in (query, key, value))
    if min(axes) > 0 and query.shape[-1] == key.shape[-1] == 0:
        query, key, scale = functional.pad(query, (0, 1)), functional.pad(key, (0, 1)), 1.0
    return query, key, value, scale


def check_operands(query: Any, key: Any, value: Any) -> None:
    """Raise DtypeError or, for nested tensors, ShapeError if the kind of query, key or value cannot be read."""
    named = {"query": query, "key": key, "value": value}
    for name, array in named.items():
        check_class(name, array)
    if is_nested(*named.values()):
        check_nested(named)
    else:
        for name, array in named.items():
            check_kind(name, array)


def align_mask(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the mask, which broadcasts to the scores (..., H, n, m), with the axes that `dense` and `bias` expect.

    `dense` reads the first of four axes as all batch axes together. So with several batch axes, a mask of four axes
    gets a fifth one. For arrays without heads, a mask (B, n, m) gets an axis of one head.
    """
    if query.ndim == 3 and mask.ndim == 3:
        return mask[:, None]
    if max(query.ndim, key.ndim, value.ndim) > 4 and mask.ndim == 4:
        return mask[None]
    return mask


def _expand_heads(*arrays: Tensor) -> list[Tensor]:
    heads = max(x.shape[-3] for x in arrays)
    if any(x.shape[-3] not in (1, heads) for x in arrays):
        given = f"{', '.join([str(x.shape[-3]) for x in arrays])} heads of query, key and value"
        cure = "enable_gqa=True if several query heads share a key head"
        raise ShapeError(given, "equal numbers of heads, or 1", cure)
    return [x.expand(*x.shape[:-3], heads, *x.shape[-2:]) for x in arrays]
