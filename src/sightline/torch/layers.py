"""Ready-made attention layers (nn.Module) that compute what common published code computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..arrays.operations import check_float_dtype, dtype_name
from ..arrays.unreadable import check_kind, check_memory, refuse_subclass
from ..call.problem import Options
from ..call.validation import to_float
from ..errors import DtypeError, MaskError, ParameterError, SightlineError
from ..formula.expression import SYMBOLS, Expression, conjoin
from ..formula.library import causal, dense
from ..formula.tables import Table
from ..formula.torch_masks import is_causal_bias
from ..positions import rotary
from ..statistics import weights as weights_of
from ..statistics.recording import AttentionKind
from .functional import align_mask, check_array_mask, check_operands, read_causal_bias
from .interception import is_intercepted
from .layer_calls import LayerCall, attend_for_layer
from .nested import is_nested

j, s = SYMBOLS["j"], SYMBOLS["s"]
Projected = TypeVar("Projected")

CURES_OF_FORMULAS = {  # the end of a call of torch.as_tensor, for a formula given as this argument
    "attn_mask": "~mask.array(n, m)), or is_causal=True for causal()",
    "key_padding_mask": "~mask.array(1, m, batch=N).reshape(N, m)) for a formula of b and j, such as padding(lengths)",
}
CURES_OF_INTEGERS = {
    "attn_mask": "attn_mask=mask == 0 if the tensor holds zeros and ones, and 1 attends",
    "key_padding_mask": "key_padding_mask=mask == 0 if the tensor holds zeros and ones, and 1 attends; "
    "key_padding_mask=torch.arange(m) >= lengths[:, None] if the tensor holds lengths",
}


class ScaledDotProductAttention(nn.Module):
    """softmax(Q Kᵀ · scale + M) V, with the weights as a second result.

    The layer covers the common forms: masks whose 0 hides (`masked_fill(mask == 0, -1e9)`), masks whose True hides,
    arrays with and without heads, and d_v other than d_k. The weights need O(n · m) memory.

    Parameters
    ----------
    dropout : float, default 0
        The probability that a weight is dropped, in training only.
    scale : float, default 1/√d_k
        The factor on the scores; for example 1 / math.sqrt(d_model) divides by the square root of the model's width.
    mask_means : {"attend", "ignore"}, default "attend"
        The meaning of True or nonzero mask entries: the query attends to the key, or ignores the key.

    Raises
    ------
    ParameterError
        `mask_means` is neither "attend" nor "ignore", or `dropout` is outside [0, 1].

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1.

    Examples
    --------
    >>> import torch
    >>> from sightline.torch import ScaledDotProductAttention
    >>> x = torch.eye(2)
    >>> output, weights = ScaledDotProductAttention()(x, x, x, torch.tensor([[1, 0], [1, 1]]))
    >>> weights
    tensor([[1.0000, 0.0000],
            [0.3302, 0.6698]])
    """

    def __init__(
        self, dropout: float = 0.0, *, scale: float | None = None, mask_means: Literal["attend", "ignore"] = "attend"
    ) -> None:
        super().__init__()
        if not 0 <= to_float(dropout) <= 1:
            raise ParameterError(f"dropout={dropout!r}", "a probability from 0 to 1", "dropout=0.1, and no widths")
        if mask_means not in ("attend", "ignore"):
            raise ParameterError(f"mask_means={mask_means!r}", '"attend" or "ignore"', "what True entries mean")
        self.dropout, self.scale, self.mask_means = dropout, scale, mask_means

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | Expression | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the weights.

        Parameters
        ----------
        query : (..., H, n, d_k) float16, bfloat16, float32 or float64; (B, n, d_k) without heads
        key : (..., G, m, d_k), or (B, m, d_k); H is a multiple of G
        value : (..., G, m, d_v), or (B, m, d_v)
        mask : bool or numbers, broadcastable to the scores (..., H, n, m) or (B, n, m), or a formula, optional
            `mask_means` defines the meaning of an array. A formula is True where the query attends to the key,
            independent of `mask_means`. A CausalBias of torch.nn.attention.bias is the formula that it stands for.

        Returns
        -------
        output : (..., H, n, d_v), the dtype of query; 0 for a query without allowed keys
        weights : (..., H, n, m), the dtype of query
            The weights before dropout: they sum to 1 over the keys, or are 0 for a query without allowed keys. The
            output is computed with the weights after dropout.

        Raises
        ------
        SightlineError
            The errors of `sightline.attention`.
        """
        if not (type(query) is type(key) is type(value) is Tensor) or is_nested(query, key, value):
            check_operands(query, key, value)
        if mask is not None and not isinstance(mask, Expression):
            mask = _read_mask(mask, self.mask_means == "ignore", query, key, value)
        dropout = self.dropout if self.training else 0.0
        kind: AttentionKind = "self" if query.shape[-2] == key.shape[-2] else "cross"
        options = Options(mask, see=[weights_of()], scale=self.scale, dropout=dropout)
        output, (weights,) = attend_for_layer(query, key, value, LayerCall(kind), options)
        return output, weights

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, scale={self.scale}, mask_means={self.mask_means!r}"


class SelfAttention(nn.Module):
    """Self-attention: softmax(R(x W_Q) R(x W_K)ᵀ / √d_k + M) x W_V.

    R is the rotary position embedding, which rotates pairs of components of queries and keys, but not of values. M is
    the causal mask, or 0 if `causal` is False. The outputs of the heads are concatenated, without an output projection.
    Add an `nn.Linear` after the layer to mix the heads.

    Parameters
    ----------
    d_model : int
        The width of x.
    d_k, d_v : int
        In each head, the width of queries and keys, and the width of values. d_k must be even if `rope` is True.
    heads : int, default 1
    rope : bool, default True
        Apply the rotary position embedding.
    causal : bool, default True
        Hide keys after the query's own position.

    Attributes
    ----------
    query, key, value : nn.Linear without bias, initialised by Glorot's normal distribution

    Raises
    ------
    ParameterError
        d_k is odd, and `rope` is True.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2; Su et al., "RoFormer", 2021, equation 16; Glorot
    and Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010, equation 12 (the
    variance; the distribution here is normal).

    Examples
    --------
    >>> import torch
    >>> from sightline.torch import SelfAttention
    >>> SelfAttention(d_model=16, d_k=8, d_v=4)(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 4])
    """

    def __init__(
        self, d_model: int, d_k: int, d_v: int, heads: int = 1, rope: bool = True, causal: bool = True
    ) -> None:
        super().__init__()
        if rope and d_k % 2:
            allowed = "an even d_k, since rotary positions rotate pairs of components"
            raise ParameterError(f"d_k={d_k} with rope=True", allowed, f"d_k={d_k + 1}, or rope=False")
        self.heads, self.rope, self.causal = heads, rope, causal
        self.query = nn.Linear(d_model, heads * d_k, bias=False)
        self.key = nn.Linear(d_model, heads * d_k, bias=False)
        self.value = nn.Linear(d_model, heads * d_v, bias=False)
        for projection in (self.query, self.key, self.value):
            nn.init.xavier_normal_(projection.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., n, heads · d_v) for x (..., n, d_model), in the dtype of the projections."""
        _check_inputs(x=x)
        query, key, value = _project(self._project, x=x)
        if self.rope:
            query, key = rotary(query), rotary(key)
        output, _ = attend_for_layer(query, key, value, LayerCall("self"), Options(causal() if self.causal else None))
        return output.transpose(-2, -3).flatten(-2)

    def _project(self, x: Tensor) -> list[Tensor]:
        """Return query, key and value (..., heads, n, d)."""
        return [
            projection(x).reshape(*x.shape[:-1], self.heads, -1).transpose(-2, -3)
            for projection in (self.query, self.key, self.value)
        ]

    def extra_repr(self) -> str:
        return f"heads={self.heads}, rope={self.rope}, causal={self.causal}"


class MultiHeadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` computed by this library, with the same parameters, arguments and state dict.

    The layer computes softmax(Q Kᵀ / √d + M) V for each head, with d = embed_dim / num_heads, and projects inputs and
    output.

    Masks have the polarity of torch's layer: **True hides** a key, the opposite of `sightline.attention`. Float masks
    are logits, added to the scaled scores. There are three differences from torch's layer:

    - For a query without allowed keys the output is the output projection of 0; torch gives NaN.
    - The returned weights are the weights before dropout.
    - `is_causal` alone applies the mask i ≥ j. In torch `is_causal` is a hint that needs `attn_mask` too.

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        As in `torch.nn.MultiheadAttention`.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

    Examples
    --------
    >>> import torch
    >>> from sightline.torch import MultiHeadAttention
    >>> theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> ours = MultiHeadAttention(8, 2, batch_first=True)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(3, 5, 8)
    >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
    True
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with `need_weights`, the weights.

        Parameters
        ----------
        query : (n, N, E); (N, n, E) with `batch_first`; (n, E) without a batch
        key : (m, N, kdim); (N, m, kdim) with `batch_first`; (m, kdim) without a batch
        value : (m, N, vdim); (N, m, vdim) with `batch_first`; (m, vdim) without a batch
        key_padding_mask : (N, m) or (m,), optional
            bool: True hides the key. Floats are logits, added to the scores.
        need_weights : bool, default True
            Return the weights, which need O(n · m) memory. Without the weights memory is O(n).
        attn_mask : (n, m) or (N · heads, n, m), optional
            bool: True hides the key. Floats are logits, added to the scores.
        average_attn_weights : bool, default True
            Average the returned weights over the heads.
        is_causal : bool, default False
            Hide keys after the query's own position.

        Returns
        -------
        output : the shape of query
        weights : (N, n, m), or (N, heads, n, m) without averaging; no axis N without a batch; None if not needed

        Raises
        ------
        MaskError
            attn_mask or key_padding_mask is no tensor, or holds integers.
        SightlineError
            The errors of `sightline.attention`.
        """
        _check_inputs(query=query, key=key, value=value)
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
        for name, array in masks.items():
            if array is not None:
                entries = CURES_OF_FORMULAS[name] if isinstance(array, Expression) else "array)"
                cure = f"{name}=torch.as_tensor({entries}"
                check_array_mask(name, array, "hides", cure, CURES_OF_INTEGERS[name])
        kind: AttentionKind = "self" if query is key else "cross"
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        queries, keys, values = _project(self._project, query=query, key=key, value=value)
        extra = keys.shape[-2] - key.shape[1]  # keys of bias_k and add_zero_attn, which no mask hides
        make = partial(self._make_formulas, is_causal=is_causal, m=key.shape[1], extra=extra)
        formulas = _read_tensors(make, **masks)
        dropout = self.dropout if self.training else 0.0
        options = Options(**formulas, dropout=dropout, see=[weights_of()] if need_weights else None)
        output, seen = attend_for_layer(queries, keys, values, LayerCall(kind, 0), options)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        weights = None
        if need_weights:
            weights = seen[0].mean(1) if average_attn_weights else seen[0]
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return queries (N, heads, n, d), and keys and values (N, heads, m + extra, d)."""
        if self.in_proj_weight is not None:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        arrays = [functional.linear(*three) for three in zip((query, key, value), matrices, biases, strict=True)]
        if self.bias_k is not None and self.bias_v is not None:
            arrays[1:] = [
                torch.cat([x, row.expand(x.shape[0], 1, -1)], 1)
                for x, row in zip(arrays[1:], (self.bias_k, self.bias_v), strict=True)
            ]
        if self.add_zero_attn:
            arrays[1:] = [functional.pad(x, (0, 0, 0, 1)) for x in arrays[1:]]
        return [x.reshape(*x.shape[:-1], self.num_heads, -1).transpose(1, 2) for x in arrays]

    def _make_formulas(
        self, attn_mask: Tensor | None, padding: Tensor | None, is_causal: bool, m: int, extra: int
    ) -> dict[str, Any]:
        """Return {"mask": ..., "score": ...} for the two masks, each bool or float, and the causal mask."""
        arrays: list[tuple[Tensor, str]] = []
        if attn_mask is not None and attn_mask.ndim == 3:
            arrays.append((attn_mask.reshape(-1, self.num_heads, *attn_mask.shape[1:]), "bhij"))
        elif attn_mask is not None:
            arrays.append((attn_mask, "ij"))
        if padding is not None:
            arrays.append((padding if padding.ndim == 2 else padding[None], "bj"))
        mask: Any = causal() | (j >= m) if is_causal else None
        score: Any = None
        for array, axes in arrays:
            is_additive = array.is_floating_point()
            array = functional.pad(array if is_additive else ~array, (0, extra), value=0 if is_additive else 1)
            lookup = Table(array, tuple(axes))[tuple([SYMBOLS[axis] for axis in axes])]
            if is_additive:
                score = (s if score is None else score) + lookup
            else:
                mask = conjoin(mask, lookup)
        return {"mask": mask, "score": score}


# -- what the layers accept --------------------------------------------------------------------------------------------


def _check_inputs(**inputs: Any) -> None:
    """Raise DtypeError unless the named inputs of a layer's projections are tensors of kinds that torch can project."""
    for name, array in inputs.items():
        if not isinstance(array, Tensor):
            raise DtypeError(f"{name} is a {type(array).__name__}", "a tensor of torch", f"torch.as_tensor({name})")
        if type(array) is not Tensor or array.layout is not torch.strided or array.is_nested:
            check_kind(name, array)


def _project(projections: Callable[..., Projected], **inputs: Tensor) -> Projected:
    """Return projections(*inputs). If torch raises an error that an input's kind explains, raise DtypeError instead."""
    try:
        return _read_tensors(projections, **inputs)
    except SightlineError:
        raise
    except Exception:
        for name, array in inputs.items():
            check_kind(name, array)
            check_float_dtype(name, array)
        raise


def _read_tensors(function: Callable[..., Projected], **tensors: Any) -> Projected:
    """Return function(*tensors). Raise DtypeError if a tensor has no memory, or if its class explains an error."""
    is_read = not is_intercepted()
    for name, tensor in tensors.items() if is_read else ():
        if type(tensor) is Tensor:
            check_memory(name, tensor)  # torch itself would read at the address 0
    try:
        return function(*tensors.values())
    except Exception as error:  # classes of tensors raise errors of every kind
        if is_read:
            refuse_subclass(list(tensors.items()), error)
        raise


def _read_mask(mask: Any, hides: bool, query: Tensor, key: Tensor, value: Tensor) -> Expression:
    """Return the formula of a mask that is an array or a CausalBias of torch.

    `hides` is True if the entries of an array that are not 0 hide the key.
    """
    if is_causal_bias(mask):
        return read_causal_bias(mask, query, key)
    check_kind("mask", mask)
    array = mask if isinstance(mask, Tensor) else np.asarray(mask)
    if not getattr(array.dtype, "name", dtype_name(array)).startswith(("bool", "int", "uint", "float", "bfloat")):
        allowed = "booleans or real numbers, or a formula"
        raise MaskError(f"mask is an array of {dtype_name(array)}", allowed, "pass an array of True and False")
    compare: Any = np.equal if hides else np.not_equal
    if isinstance(array, Tensor):
        compare = torch.eq if hides else torch.ne
    return dense(align_mask(_read_tensors(lambda mask: compare(mask, 0), mask=array), query, key, value))
