"""Masks and position biases of transformers models as formulas, without n × m arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial, wraps
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..arrays.operations import to_numpy
from ..caching import cached_property
from ..errors import SightlineError
from ..formula.expression import SYMBOLS, Expression, as_expression
from ..formula.from_function import to_formula
from ..formula.library import relative_bias
from ..formula.tables import Table
from ..kv_cache.query_positions import without_later_keys
from .compatibility import (
    NAME,
    bidirectional_mask_function,
    causal_mask_function,
    change_position_biases,
    make_dense_mask,
    read_implementation,
)
from .unpadding import Unpadding
from .wrapper_tensors import WrapperTensor, call_dense

b, i, j, n, m = (SYMBOLS[name] for name in "bijnm")


class FormulaMask(WrapperTensor):
    """A bool mask (B, 1, n, m) that stores its formula and no entries; an entry is True where the query attends.

    A model passes the mask unchanged from the mask function to the attention layers. If the model uses the mask in any
    other tensor operation, transformers' own code computes the dense array, and the operation reads that array.

    Attributes
    ----------
    formula : Expression, optional
        The mask as a formula of the rows i and j of the call. None if it hides nothing.
    query_start : int
        The position of the first query, counted from the first key.
    key_start : int
        The position of the first key in the sequence.
    rule : Expression, optional
        The mask without padding, as a formula of positions in the sequence. None if it hides nothing.
    is_real : (B, n) bool tensor, optional
        False at padding. Given if queries and keys are the same positions, and some of them are padding.
    unpadding : Unpadding, optional
        Given if the queries and keys of the call are only the real positions.
    padded : FormulaMask, optional
        Given with `unpadding`: the mask of the padded batch, which also hides every key from queries at padding.
    """

    formula: Expression | None
    query_start: int = 0
    key_start: int = 0
    rule: Expression | None = None
    is_real: Tensor | None = None
    unpadding: Unpadding | None = None
    padded: FormulaMask | None = None
    has_checked: bool = False

    @cached_property
    def unpadded(self) -> FormulaMask:
        """The mask (1, 1, tokens, tokens) of the real positions alone. `is_real` must be given."""
        real = cast(Tensor, self.is_real)
        unpadding = Unpadding(real)
        formula, count = unpadding.documents, len(unpadding)
        if self.rule is not None:
            formula = formula & unpadding.translate(self.rule, heads=1)
        real_queries = cast(Expression, padding_formula(real)).rewrite({"j": i})
        masked = cast(Expression, self.formula) & real_queries
        padded = FormulaMask(self.shape, self.device, formula=masked, dense=self.dense)

        def make_dense() -> Tensor:
            entry, column = unpadding.entries, unpadding.columns
            dense = self.dense().expand(self.shape)[entry[:, None], 0, column[:, None], column]
            return (dense & (entry[:, None] == entry))[None, None]

        shape = (1, 1, count, count)
        return FormulaMask(shape, self.device, formula=formula, dense=make_dense, unpadding=unpadding, padded=padded)

    def translate(self, rule: Expression, heads: int) -> Expression:
        """Return `rule`, a formula of positions in the sequence, as a formula of the rows of the call."""
        if self.unpadding is not None:
            return self.unpadding.translate(rule, heads)
        return rule.rewrite(position_formulas(self.query_start, self.key_start, self.shape[3] - self.shape[2]))

    def warn_of_restarts(self, positions: Any) -> None:
        """Warn if the positions (B, n) of a prompt restart, and the mask lets tokens attend to earlier documents.

        Every layer gets the same mask, and only the first one checks it.
        """
        formula, count = self.formula, self.shape[2]
        is_plain = formula is not None and not formula.tables and self.shape[3] == count and not self.query_start
        if not is_plain or self.has_checked:
            return
        self.has_checked = True
        if isinstance(positions, Tensor) and positions.ndim == 2 and bool((positions.diff() < 0).any()):
            warnings.warn(
                "position_ids restart, but the mask lets tokens attend to the documents before\n  cure: leave out "
                "attention_mask= and the cache, so that transformers separates the documents; or run the model in "
                "`with sightline.transformers.masking(model, sightline.documents(lengths=[...])):`",
                UserWarning,
                stacklevel=3,
            )

    @cached_property
    def array(self) -> Tensor:
        """The bool array, which a compiled model gets in place of the mask."""
        with _disable_current_modes():
            return self.dense().expand(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name the tensor that torch.compile reads: a model may get a mask that was made outside the compiled code."""
        return ["array"], None

    @staticmethod
    def __tensor_unflatten__(arrays: Mapping[str, Tensor], _: None, shape: Any, strides: Any) -> FormulaMask:
        array = arrays["array"]
        return FormulaMask(shape, array.device, formula=None, dense=lambda: array, array=array)

    def _stable_hash_for_caching(self) -> str:
        return type(self).__name__  # compiled code depends on no attribute


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
    """Return the mask of a model's layers. Transformers calls this function.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
    q_offset, kv_offset : int
        The positions of the first query and of the first key in the sequence.
    mask_function : callable (batch, head, query, key)
        It gets positions in the sequence, and returns True where the query attends to the key.
    attention_mask : (B, length) bool, optional
        False at padding.
    allow_is_bidirectional_skip : bool, default False
        If True, None is returned in place of a mask that hides nothing.
    use_vmap : bool, default False
        An option of transformers' function that makes the dense array.

    Returns
    -------
    FormulaMask, bool tensor (B, 1, n, m) or None
        The mask is None if it hides nothing and `allow_is_bidirectional_skip` is true. The mask is a tensor while torch
        compiles the model, if formulas cannot express the mask function, or if the mask hides nothing and must not be
        None. Otherwise the mask is a `FormulaMask`.
    """
    make_dense: Callable[[], Tensor] = partial(
        make_dense_mask,
        q_length,
        q_offset,
        device,
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
    )
    if torch.compiler.is_compiling():
        return make_dense()
    real, stop = attention_mask, kv_offset + kv_length
    if real is not None:  # no key after the end of the padding mask is real
        real = torch.nn.functional.pad(real, (0, max(stop - real.shape[1], 0)))[:, kv_offset:stop]
    padding = None if real is None else padding_formula(real)
    query_start = int(q_offset) - kv_offset
    if mask_function is bidirectional_mask_function:
        rule, formula = None, padding
        if padding is None:
            return None if allow_is_bidirectional_skip else make_dense()
    else:
        rule = _read_rule(mask_function)
        if rule is None:
            return make_dense()
        is_newest = q_length == 1 and query_start == kv_length - 1  # then no key is later, and a step searches no tiles
        remaining = without_later_keys(rule) if is_newest else rule
        formula = padding
        if remaining is not None:
            formula = remaining.rewrite(position_formulas(query_start, kv_offset, kv_length - q_length))
            formula = formula if padding is None else formula & padding
    is_prompt = q_length == kv_length and query_start == kv_offset == 0
    has_padding = real is not None and padding is not None and bool(real.any())
    return FormulaMask(
        (batch_size, 1, q_length, kv_length),
        device,
        formula=formula,
        dense=make_dense,
        query_start=query_start,
        key_start=kv_offset,
        rule=rule,
        is_real=real if is_prompt and has_padding else None,
    )


def _read_rule(mask_function: Callable[..., Any]) -> Expression | None:
    """Return a mask function as a formula of positions in the sequence; None if formulas cannot express it."""
    try:
        rule = to_formula(mask_function, "mask", "b h i j")
    except SightlineError:
        return None
    return rule.rewrite({"h": as_expression(0)}) if rule.kind == "bool" else None  # one mask serves all heads


def position_formulas(query_start: int, key_start: int, cached: int) -> dict[str, Expression]:
    """Return formulas of the rows of a call, by symbol: the positions i of query and j of key, and the length n = m.

    `cached` is the number of keys minus the number of queries. If the first query has this position, as in a growing
    cache, its offset is written as m − n. Other offsets are tables with one entry. So the formulas of calls with
    different offsets differ only in entries of tables, and the calls share a compiled kernel.
    """
    row: Expression = i
    column: Expression = j
    length: Expression = m
    if query_start == cached and cached:
        row = i + (m - n)
    elif query_start:
        row = i + Table(np.array([query_start]))[0]
    if key_start:
        first = Table(np.array([key_start]))[0]
        row, column, length = row + first, column + first, m + first
    return {"i": row, "j": column, "n": length, "m": length}


def padding_formula(padding_mask: Tensor) -> Expression | None:
    """Return the formula of a padding mask (B, m), True at real keys; None if every key is real.

    If the real keys of each batch entry are contiguous, the formula compares j with the first and the last of them.
    Otherwise the formula reads the mask as a table.
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


class PositionBias(WrapperTensor):
    """A bias (1, H, n, m) of T5 and similar models, in logits, that stores its formula and no entries.

    The bias is a table of distances j − i. Distances beyond `relative_attention_max_distance` have the bias of that
    largest distance (Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
    transformer", 2020, section 2.1). The first layer of a model makes the bias, and all later layers add it. If the
    model uses the bias in any other tensor operation, the model's own code computes the dense array, and the operation
    reads that array, with its gradient.

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
