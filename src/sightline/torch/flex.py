"""The names of `torch.nn.attention.flex_attention` with torch's signatures, computed by this library.

A program changes the line of its import, and keeps its functions `mask_mod` and `score_mod`. `formula.from_function`
converts them to formulas: a mask when `create_block_mask` is called, a score at each call. A name that is not defined
here, such as `create_mask` or `AuxRequest`, is torch's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import copy
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import and_masks as and_masks
from torch.nn.attention.flex_attention import noop_mask as noop_mask
from torch.nn.attention.flex_attention import or_masks as or_masks

from ..api.functions import attention
from ..arrays.operations import is_traced
from ..call.validation import read_mask
from ..errors import MaskError, ParameterError, ShapeError, SightlineError
from ..formula.expression import Expression, from_records, live_numbers
from ..formula.formula_checks import check_formula
from ..formula.tables import Table
from ..formula.tile_ranges import find_blocks
from ..formula.torch_masks import is_block_mask
from ..statistics import lse, max_score
from .interception import hides_entries

__all__ = ["BlockMask", "create_block_mask", "flex_attention"]

Mod = Callable[..., Any] | Expression
LSE, MAX_SCORE = lse(), max_score()


def __getattr__(name: str) -> Any:
    return getattr(torch_flex, name)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Return softmax(score_mod(Q Kᵀ · scale) + M) V, with the arguments of torch's `flex_attention`.

    M is 0 where `block_mask` allows the pair, and −∞ elsewhere. `torch.compile` is not needed. Gradients reach query,
    key, value and the tensors that `score_mod` reads.

    Parameters
    ----------
    query : (B, H, L, E) float16, bfloat16, float32 or float64
    key : (B, G, S, E), the dtype of query; B may be 1
    value : (B, G, S, E_v), the dtype of query; B may be 1
    score_mod : function (score, b, h, q_idx, kv_idx) or formula, optional
        The new score, computed from the scaled score. The function may read tensors, also those that require gradients.
    block_mask : BlockMask, optional
        The result of `create_block_mask` of this module or of torch, or what `sightline.attention` takes as a mask.
    scale : float, default 1/√E
    enable_gqa : bool, default False
        True allows H to be a multiple of G (grouped-query attention, GQA).
    return_lse : bool, default False
        Return (output, lse).
    kernel_options : ignored
    return_aux : torch's AuxRequest, optional
        Return (output, AuxOutput), with `lse` and `max_scores` as requested.

    Returns
    -------
    output : (B, H, L, E_v), the dtype of query; 0 for a query without allowed keys
    lse : (B, H, L) float32, or float64 for float64
        The natural logarithm of Σⱼ exp(scoreᵢⱼ); −∞ for a query without allowed keys.
    max_scores : the shape and dtype of lse
        The largest score of each query. As in torch, it has no gradient.

    Raises
    ------
    ShapeError
        An array has no four axes, the numbers of heads differ without `enable_gqa`, or the block mask is for other
        lengths.
    ParameterError
        Both `return_lse` and `return_aux` are given.
    SightlineError
        The other errors of `sightline.attention`, such as FormulaError for a function that is not a formula.

    References
    ----------
    Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024.

    Examples
    --------
    >>> import torch
    >>> from sightline.torch.flex import create_block_mask, flex_attention
    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> block_mask = create_block_mask(causal, B=None, H=None, Q_LEN=5, KV_LEN=5)
    >>> x = torch.eye(5).reshape(1, 1, 5, 5).requires_grad_()
    >>> flex_attention(x, x, x, block_mask=block_mask).sum().backward()
    >>> x.grad.shape
    torch.Size([1, 1, 5, 5])
    """
    _check_shapes(query, key, value, block_mask, enable_gqa)
    mask = block_mask
    if type(block_mask) is BlockMask:
        mask = block_mask.traced_mask() if is_traced(query) else block_mask.formula
    if return_aux is None:
        if not return_lse:
            return attention(query, key, value, mask=mask, score=score_mod, scale=scale)
        output, (found,) = attention(query, key, value, mask=mask, score=score_mod, scale=scale, see=[LSE])
        return output, found
    if return_lse:
        raise ParameterError("return_lse and return_aux", "one of them", "return_aux=AuxRequest(lse=True)")
    see = {"lse": LSE} if return_aux.lse else {}
    see |= {"max_scores": MAX_SCORE} if return_aux.max_scores else {}
    output, seen = attention(query, key, value, mask=mask, score=score_mod, scale=scale, see=see)
    if "max_scores" in seen:
        seen["max_scores"] = seen["max_scores"].score.detach()
    return output, torch_flex.AuxOutput(**seen)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool) -> None:
    """Raise ShapeError for shapes that `sightline.attention` takes, and torch's function does not."""
    if not query.ndim == key.ndim == value.ndim == 4:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("query", query), ("key", key), ("value", value)))
        raise ShapeError(shapes, "four axes: (B, H, L, E)", "use sightline.attention for other axes")
    batch, heads, queries, _ = query.shape
    _, key_heads, keys, _ = key.shape
    if heads != key_heads and not enable_gqa:
        raise ShapeError(f"{heads} query heads and {key_heads} key heads", "equal numbers of heads", "enable_gqa=True")
    if type(block_mask) is not BlockMask and not is_block_mask(block_mask):
        return
    B, H, n, m = (1, 1, *block_mask.shape)[-4:]
    if (n, m) != (queries, keys):
        given = f"a block mask for {n} queries and {m} keys, {queries} queries and {keys} keys"
        raise ShapeError(given, "the lengths of the call", f"create_block_mask(mask_mod, B, H, {queries}, {keys})")
    if B not in (1, batch) or H not in (1, heads):
        given = f"a block mask for B={B} and H={H}, a query with B={batch} and H={heads}"
        cure = "create_block_mask(mask_mod, None, None, ...), which serves every B and H"
        raise ShapeError(given, "the numbers of the query, or 1", cure)


class BlockMask:
    """A mask of given lengths as a formula, which `create_block_mask` returns. It replaces torch's class of this name.

    The mask stores no lists of blocks, because the kernels find the tiles that the formula hides. Its memory does not
    grow with n × m, and one mask serves every device. Each call reads the tensors of `mask_mod` anew, also tensors
    without axes. Python's numbers are read once, when the mask is created or `mask_mod` is set.

    Attributes
    ----------
    mask_mod : function (b, h, q_idx, kv_idx) or formula
        A program can set it, for example on a slice. The function is converted once, not at each call.
    formula : Expression
        The formula of `mask_mod`; `sightline.attention` takes it as `mask=`.
    seq_lengths : (Q_LEN, KV_LEN); it can be set
    shape : (B, H, Q_LEN, KV_LEN)
    BLOCK_SIZE : (queries, keys) of a block in `to_dense` and `sparsity`; the kernels have their own tiles
    from_kv_blocks : torch's function, for programs that make the lists of blocks; it returns torch's BlockMask

    Raises
    ------
    AttributeError
        The attribute is one that only torch's class has, such as `kv_num_blocks`.

    Examples
    --------
    >>> from sightline.torch.flex import create_block_mask
    >>> causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256)
    >>> causal.formula, causal.to_dense()[0, 0].tolist()  # blocks of 128: one is hidden
    (i ≥ j, [[1, 0], [1, 1]])
    """

    from_kv_blocks = torch_flex.BlockMask.from_kv_blocks

    def __init__(
        self, mask_mod: Mod, batch: int, heads: int, seq_lengths: tuple[int, int], block_size: tuple[int, int]
    ) -> None:
        self.seq_lengths, self.BLOCK_SIZE = seq_lengths, block_size
        self._leading: tuple[int, ...] = batch, heads
        self._formula: Expression | None
        self._mask_mod: Mod | None
        self._parts: tuple[Any, Any] | None  # what `traced_mask` is built from
        self.mask_mod = mask_mod

    @property
    def mask_mod(self) -> Any:
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, mask_mod: Mod) -> None:
        if not callable(mask_mod) and not isinstance(mask_mod, Expression):
            allowed = "a function (b, h, q_idx, kv_idx) or a formula"
            raise MaskError(f"mask_mod is a {type(mask_mod).__name__}", allowed, "lambda b, h, i, j: mask[i, j]")
        self._mask_mod, self._formula, self._parts = mask_mod, None, None
        if not hides_entries():  # torch.compile cannot trace the conversion
            self._convert()

    def _convert(self) -> None:
        with live_numbers():
            formula = self._formula = cast(Expression, read_mask(self._mask_mod))
        tables = [(table.array, table.axes, table.batch_axes) for table in formula.tables]
        self._parts = json.loads(formula.text), tables

    @property
    def formula(self) -> Expression:
        if self._mask_mod is None:
            given = "a slice of a BlockMask without a mask_mod"
            cure = "block_mask.mask_mod = lambda b, h, q_idx, kv_idx: mask_mod(b, h, q_idx + offset, kv_idx)"
            raise MaskError(given, "a mask_mod that is set after slicing, since its q_idx starts at 0", cure)
        if self._formula is None:  # a compiled function or a transform made the mask
            self._convert()
        return cast(Expression, self._formula)

    def traced_mask(self) -> Mod:
        """Return `formula`, built anew while torch.compile traces. Masks of one form then share one compiled graph."""
        if self._parts is None:  # a mask that this trace has made, or a slice
            return self._mask_mod or self.formula
        records, tables = self._parts
        return from_records(records, [Table(torch.as_tensor(array), *axes) for array, *axes in tables])

    def to_expression(self) -> Expression:
        """Return `formula`. This method lets a BlockMask work as `mask=` of `sightline.attention`, and in formulas."""
        return self.formula

    @property
    def shape(self) -> tuple[int, ...]:
        return *self._leading, *self.seq_lengths

    def numel(self) -> int:
        return math.prod(self.shape)

    def to(self, device: Any) -> BlockMask:
        """Return the mask itself, which has no tensors of its own."""
        return self

    def to_dense(self) -> Tensor:
        """Return (B, H, blocks of queries, blocks of keys) int32: 1 where the mask allows a pair of the block."""
        blocks = find_blocks(self.formula, self.shape, self.BLOCK_SIZE)  # type: ignore[arg-type]
        return torch.from_numpy(np.broadcast_to(blocks, (*self._leading, *blocks.shape[2:])).astype(np.int32))

    def sparsity(self) -> float:
        """Return the percentage of blocks in which the mask hides every pair."""
        return 100 * (1 - float(find_blocks(self.formula, self.shape, self.BLOCK_SIZE).mean()))  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> BlockMask:
        """Return a mask of some batch entries and heads, for the same lengths. As in torch, set its `mask_mod` next."""
        taken = index[:2] if isinstance(index, tuple) else (index,)
        taken = tuple(slice(at, at + 1 or None) if isinstance(at, int) else at for at in taken)
        part = copy(self)
        part._leading = tuple(torch.zeros((), device="cpu").expand(self._leading)[taken].shape)
        part._mask_mod = part._formula = part._parts = None
        return part

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """Return the mask for other lengths."""
        other = copy(self)
        other.seq_lengths = new_q_len, new_kv_len
        return other

    def __repr__(self) -> str:
        formula = "without mask_mod" if self._mask_mod is None else self.formula
        return f"BlockMask({formula}, shape={self.shape})"

    def __str__(self) -> str:
        if self._mask_mod is None:
            return repr(self)
        picture = self.formula.show(*self.seq_lengths)
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n{picture}\n)"

    def __getattr__(self, name: str) -> Any:
        error = SightlineError(
            f"the attribute {name} of a BlockMask of sightline",
            "formula, mask_mod, shape, seq_lengths, BLOCK_SIZE, sparsity(), to_dense(), to(device): no lists of blocks",
            "torch's create_block_mask(block_mask.mask_mod, *block_mask.shape) has these lists, "
            "and sightline's flex_attention takes that mask too",
        )
        raise AttributeError(str(error))


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: Any = True,
) -> BlockMask:
    """Return the mask of a function, with the arguments of torch's `create_block_mask`.

    The function is called once, with formulas. The time and memory do not grow with Q_LEN · KV_LEN.

    Parameters
    ----------
    mask_mod : function (b, h, q_idx, kv_idx) or formula
        True where the query attends to the key. The function may read tensors.
    B, H : int or None
        The numbers of batch entries and heads; None and 1 serve every number.
    Q_LEN, KV_LEN : int
        The numbers of queries and keys.
    BLOCK_SIZE : int or (queries, keys), default 128
        The blocks of `BlockMask.to_dense` and `BlockMask.sparsity`.
    device, _compile, separate_full_blocks, compute_dq_write_order, dq_kv_order : ignored

    Returns
    -------
    BlockMask

    Raises
    ------
    FormulaError
        The function is not a formula: it has an `if` on its arguments, or an operation that formulas do not have. The
        message names the operation and the line.
    MaskError
        `mask_mod` is no function, or does not return a condition.
    TableError
        The function reads outside a tensor.
    ParameterError
        B, H or a length is not a whole number of at least 0, or BLOCK_SIZE is not one of at least 1.

    Examples
    --------
    >>> from sightline.torch.flex import create_block_mask
    >>> block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 1024, 1024)
    >>> block_mask
    BlockMask(i ≥ j, shape=(1, 1, 1024, 1024))
    >>> block_mask.sparsity()
    43.75
    """
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    lengths = {"B": 1 if B is None else B, "H": 1 if H is None else H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    for name, length, least in [(*item, 0) for item in lengths.items()] + [("BLOCK_SIZE", size, 1) for size in block]:
        if not (isinstance(length, int) or hasattr(length, "__index__")) or length < least:
            raise ParameterError(f"{name}={length!r}", f"a whole number of at least {least}", f"{name}=128")
    batch, heads, queries, keys = map(int, lengths.values())
    block_mask = BlockMask(mask_mod, batch, heads, (queries, keys), block)
    if block_mask._formula is not None:  # else torch hides entries of tensors
        check_formula(block_mask.formula, (batch, heads, queries, keys))
    return block_mask
