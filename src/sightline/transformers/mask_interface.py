"""Masks of transformers models as formulas, without n × m arrays."""

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

from ..arrays.operations import to_numpy
from ..errors import SightlineError
from ..formula.expression import SYMBOLS, Expression, as_expression
from ..formula.from_function import to_formula
from ..formula.tables import Table

b, i, j, n, m = (SYMBOLS[name] for name in "bijnm")


class FormulaMask(Tensor):
    """A bool mask (B, 1, n, m) that stores its formula and no entries; an entry is True where the query attends.

    A model passes the mask unchanged from the mask function to the attention layers. If the model uses the mask in any
    other tensor operation, transformers' own code computes the dense array, and the operation reads that array.

    Attributes
    ----------
    formula : Expression
    query_start : int
        The position of the first query, counted from the first key.
    key_start : int
        The position of the first key in the sequence.
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
        """Return the bool array that transformers' own code computes."""
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
    """Return the mask of a model's layers; the function that `transformers.AttentionMaskInterface` calls.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
    q_offset, kv_offset : int
        The positions of the first query and of the first key in the sequence.
    mask_function : callable (batch, head, query, key)
        Gets positions in the sequence; True where the query attends to the key.
    attention_mask : (B, length) bool, optional
        False at padding.
    allow_is_bidirectional_skip : bool, default False
        Return None instead of a mask that hides nothing.
    use_vmap : bool, default False
        As in transformers, for the dense array.

    Returns
    -------
    FormulaMask, bool tensor (B, 1, n, m) or None
        The mask is None if it hides nothing and `allow_is_bidirectional_skip` is true. It is a tensor while torch
        compiles the model, if formulas cannot express the mask function, or if it hides nothing and None is not
        allowed. Otherwise it is a `FormulaMask`.
    """
    inputs = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    options = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "use_vmap": use_vmap}
    make_dense: Callable[[], Tensor] = partial(sdpa_mask, *inputs, **options, device=device)
    if torch.compiler.is_compiling():
        return make_dense()
    padding_mask = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    padding = None if padding_mask is None else _padding_formula(padding_mask[:, kv_offset : kv_offset + kv_length])
    query_start = int(q_offset) - kv_offset
    if mask_function is bidirectional_mask_function:
        formula = padding
        if formula is None:
            return None if allow_is_bidirectional_skip else make_dense()
    else:
        try:
            formula = to_formula(mask_function, "mask", "b h i j")
        except SightlineError:  # formulas cannot express the function
            return make_dense()
        if formula.kind != "bool":
            return make_dense()
        row, column = _position_formulas(query_start, kv_offset, kv_length - q_length)
        formula = formula.rewrite({"h": as_expression(0), "i": row, "j": column})  # one mask serves all heads
        formula = formula if padding is None else formula & padding
    shape = (batch_size, 1, q_length, kv_length)
    return FormulaMask(formula, shape, device, make_dense, query_start, kv_offset)


def _position_formulas(query_start: int, key_start: int, cached: int) -> tuple[Expression, Expression]:
    """Return the positions of queries and keys in the sequence, as formulas of i and j.

    The formulas of all offsets have one structure, so they share a kernel. `cached` is the number of keys minus the
    number of queries. If it is the offset of the queries, as in a growing cache, the offset is m − n. Other offsets are
    tables with one entry, because the constants 0 and 1 would give other structures.
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


def _padding_formula(padding_mask: Tensor) -> Expression | None:
    """Return the formula of a padding mask (B, m), True at real keys; None if every key is real.

    The formula compares j with the first and last real key if the real keys of each entry are contiguous; otherwise it
    reads the mask as a table.
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
