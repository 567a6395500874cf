"""Masks that models of transformers make, kept as formulas until attention reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from ..arrays import to_numpy
from ..formula.expression import SYMBOLS, Constant, Expression
from ..formula.tables import Table
from .mask_functions import trace_mask_function

__all__ = ["FormulaMask", "sightline_mask"]

b, i, j, n, m = (SYMBOLS[name] for name in "bijnm")


class FormulaMask(Tensor):
    """A boolean mask (B, 1, n, m), True attends, that holds its formula and no memory.

    Models hand it from where it is made to where it is read. Whatever else a model does to it is done to the dense
    array, which transformers itself then writes.

    Attributes
    ----------
    formula : Expression
    query_start, key_start : int
        The position of the first query among the keys, and of the first key in the sequence.
    """

    formula: Expression
    query_start: int
    key_start: int
    _make_dense: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, formula: Expression, shape: tuple[int, ...], device: Any, make_dense: Callable[[], Tensor], *starts: int
    ) -> FormulaMask:
        mask: FormulaMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.formula, mask._make_dense = formula, make_dense
        mask.query_start, mask.key_start = starts
        return mask

    def dense(self) -> Tensor:
        """The boolean array, as transformers writes it."""
        return self._make_dense()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def dense(value: Any) -> Any:
            return value.dense() if isinstance(value, FormulaMask) else value

        return function(*tree_map(dense, inputs), **tree_map(dense, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FormulaMask({self.formula}, {tuple(self.shape)})"


def sightline_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """The mask of a model's layers, as `transformers.AttentionMaskInterface` asks for it.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
    q_offset, kv_offset : int
        The positions of the first query and of the first key in the sequence.
    mask_function : callable (batch, head, query, key)
        Of positions in the sequence; True attends.
    attention_mask : (B, length) bool, optional
        False at padding.
    allow_is_bidirectional_skip : bool, default False
        Whether None may stand for a mask that hides nothing.
    use_vmap : bool, default False
        As transformers has it, for the dense array.

    Returns
    -------
    FormulaMask, None where nothing is hidden, or a boolean tensor
        The last where torch compiles the model, or where the function does what formulas have no word for.
    """
    make_dense: Callable[[], Tensor] = partial(
        sdpa_mask,
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    if torch.compiler.is_compiling():
        return make_dense()
    padding_mask = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    padding = None if padding_mask is None else padding_formula(padding_mask[:, kv_offset : kv_offset + kv_length])
    query_start = int(q_offset) - kv_offset
    if mask_function is bidirectional_mask_function:
        formula = padding
        if formula is None:
            return None if allow_is_bidirectional_skip else make_dense()
    else:
        row, column = position_formulas(query_start, kv_offset, kv_length - q_length)
        formula = trace_mask_function(mask_function, b, Constant(0, "int"), row, column)
        if formula is None:
            return make_dense()
        formula = formula if padding is None else formula & padding
    shape = (batch_size, 1, q_length, kv_length)
    return FormulaMask(formula, shape, device, make_dense, query_start, kv_offset)


def position_formulas(query_start: int, key_start: int, cached: int) -> tuple[Expression, Expression]:
    """Positions of queries and keys in the sequence.

    Numbers that change from call to call stay out of the formula, whose kernel would be another for each: keys held by
    a growing cache are m − n, other offsets a table of one entry.
    """
    row: Expression = i
    column: Expression = j
    if query_start == cached and cached:
        row = i + (m - n)
    elif query_start:
        row = i + Table(np.array([query_start]))[0]
    if key_start:
        first = Table(np.array([key_start]))[0]
        row, column = row + first, column + first
    return row, column


def padding_formula(padding_mask: Tensor) -> Expression | None:
    """(B, m) bool, True at real keys, as a formula: lengths or starts where the real keys stand together, else a table.

    None where every key is real.
    """
    real = to_numpy(padding_mask)
    if real.all():
        return None
    entry: Any = b if len(real) > 1 else 0
    count = real.shape[1]
    starts = np.where(real.any(1), real.argmax(1), 0)
    stops = np.where(real.any(1), count - real[:, ::-1].argmax(1), 0)
    if ((stops - starts) != real.sum(1)).any():
        return Table(padding_mask)[entry, j]
    formula = None
    if starts.any():
        formula = j >= Table(starts)[entry]
    if (stops < count).any():
        within = j < Table(stops)[entry]
        formula = within if formula is None else formula & within
    return formula
