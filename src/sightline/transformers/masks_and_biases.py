"""Masks, position biases and padded batches of transformers models as formulas, without n × m arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial, wraps
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ..arrays.caching import cached_property
from ..arrays.operations import is_traced, to_numpy
from ..errors import SightlineError
from ..formula.expression import SYMBOLS, Expression, as_expression, table_lookup
from ..formula.formula_checks import check_spans
from ..formula.from_function import to_formula
from ..formula.library import documents, relative_bias
from ..formula.tables import Table
from ..kv_cache.query_positions import without_later_keys
from . import compatibility

b, i, j, n, m = (SYMBOLS[name] for name in "bijnm")


class Unpadding:
    """The real tokens of a padded batch, one batch entry after the other. `real` (B, n) is False at padding."""

    def __init__(self, real: Tensor) -> None:
        self.B, self.n = real.shape
        self.places = real.flatten().nonzero().squeeze(1)  # the place of each token in the flattened batch (B · n)
        self.entries = self.places // self.n  # the batch entry of each token
        self.columns = self.places % self.n  # the place of each token in its batch entry

    def __len__(self) -> int:
        """The number of real tokens."""
        return len(self.places)

    @cached_property
    def documents(self) -> Expression:
        """The mask of the sequence: a token attends to the tokens of its own batch entry."""
        return documents(to_numpy(self.entries))

    @cached_property
    def symbols(self) -> Mapping[str, Expression]:
        """For the symbols b, i, j, n and m of the padded batch, formulas of the positions i and j in the sequence."""
        entry, column, length = Table(to_numpy(self.entries)), Table(to_numpy(self.columns)), as_expression(self.n)
        return {"b": entry[i], "i": column[i], "j": column[j], "n": length, "m": length}

    def translate(self, formula: Expression, heads: int) -> Expression:
        """Return a formula of the padded batch as a formula of the sequence.

        Raise ShapeError if an axis of a dense array has neither length 1 nor the length of the padded batch.
        """
        check_spans(formula, (self.B, heads, self.n, self.n))
        return formula.rewrite(self.symbols, table_lookup(lambda table: table.without_axes("b", "i", "j")))

    def flatten(self, array: Tensor) -> Tensor:
        """Return an array (B, n), (B, n, d) or (B, H, n, d) with the axes (1, tokens) in place of (B, n).

        An array that all entries share has length 1 in place of B. Arrays of other shapes are unchanged.
        """
        tokens = array.transpose(1, 2) if array.ndim == 4 else array
        if tokens.ndim not in (2, 3, 4) or tokens.shape[1] != self.n or tokens.shape[0] not in (1, self.B):
            return array
        if tokens.shape[0] == self.B:
            flattened = tokens.flatten(0, 1).index_select(0, self.places)[None]
        else:
            flattened = tokens[0].index_select(0, self.columns)[None]
        return flattened.transpose(1, 2) if array.ndim == 4 else flattened

    def pad(self, array: Tensor) -> Tensor:
        """Return an array (1, tokens), (1, tokens, d) or (1, H, tokens, d) with axes (B, n) in place of (1, tokens).

        The new entries at padding are 0. Arrays of other shapes are unchanged.
        """
        tokens = array.transpose(1, 2) if array.ndim == 4 else array
        if tokens.ndim not in (2, 3, 4) or tokens.shape[:2] != (1, len(self)):
            return array
        padded = tokens.new_zeros(self.B * self.n, *tokens.shape[2:]).index_copy(0, self.places, tokens[0])
        padded = padded.reshape(self.B, self.n, *tokens.shape[2:])
        return padded.transpose(1, 2) if array.ndim == 4 else padded


class WrapperTensor(Tensor):
    """A tensor without entries. It has a shape, a dtype, a device and attributes.

    Any other operation than the read of an attribute reads the dense tensor, which `dense()` returns.
    """

    dense: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: Any, device: Any, dtype: torch.dtype = torch.bool, **attributes: Any) -> Self:
        tensor: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        vars(tensor).update(attributes)
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, inputs: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call_dense(function, inputs, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({vars(self).get('formula', self.dtype)}, {tuple(self.shape)})"


def call_dense(function: Any, inputs: Any, kwargs: Any) -> Any:
    """Call a function with the dense tensor in place of each `WrapperTensor`."""

    def dense(value: Any) -> Any:
        return value.dense() if isinstance(value, WrapperTensor) else value

    return function(*tree_map(dense, inputs), **tree_map(dense, kwargs or {}))


class FormulaMask(WrapperTensor):
    """A bool mask (B, 1, n, m) that stores its formula and no entries; an entry is True where the query attends.

    A model passes the mask unchanged from the mask function to the attention layers. If the model uses the mask in any
    other tensor operation, transformers' own code computes the dense array, and the operation reads that array.

    formula : the mask as a formula of the rows i and j of the call; None if it hides nothing
    query_start : the position of the first query, counted from the first key
    key_start : the position of the first key in the sequence
    rule : the mask without padding, as a formula of positions in the sequence; None if it hides nothing
    is_real : (B, n), False at padding; given if queries and keys are the same positions, and some of them are padding
    unpadding : given if the queries and keys of the call are only the real positions
    padded : given with `unpadding`: the mask of the padded batch, which also hides every key from queries at padding
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
                stacklevel=2,
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
    mask_function: Callable[..., Any] = compatibility.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """Return the mask of a model's layers. Transformers calls this function.

    q_offset, kv_offset : the positions of the first query and of the first key in the sequence
    mask_function : function (batch, head, query, key) of positions, True where the query attends to the key
    attention_mask : (B, length), False at padding
    use_vmap : an option of transformers' function that makes the dense array

    The mask is None if it hides nothing and `allow_is_bidirectional_skip` is true. It is a tensor (B, 1, n, m) while
    torch compiles the model, if formulas cannot express the mask function, or if the mask hides nothing and must not be
    None. Otherwise it is a `FormulaMask`.
    """
    own = {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, "mask_function": mask_function}
    own |= {"attention_mask": attention_mask, "use_vmap": use_vmap}
    make_dense: Callable[[], Tensor] = partial(compatibility.make_dense_mask, q_length, q_offset, device, **own)
    if is_traced(attention_mask):
        return make_dense()
    real, stop = attention_mask, kv_offset + kv_length
    if real is not None:  # no key after the end of the padding mask is real
        real = torch.nn.functional.pad(real, (0, max(stop - real.shape[1], 0)))[:, kv_offset:stop]
    padding = None if real is None else padding_formula(real)
    query_start = int(q_offset) - kv_offset
    if mask_function is compatibility.bidirectional_mask_function:
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
    position: dict[str, Any] = {"query_start": query_start, "key_start": kv_offset, "rule": rule}
    position["is_real"] = real if is_prompt and has_padding else None
    shape = batch_size, 1, q_length, kv_length
    return FormulaMask(shape, device, formula=formula, dense=make_dense, **position)


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

    formula : the score s + bias as a formula of the rows of the call, whose first query may be later than position 0
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
    """
    compatibility.change_position_biases(configuration, _return_formulas)


def _return_formulas(compute_bias: Callable[..., Tensor]) -> Callable[..., Tensor]:

    @wraps(compute_bias)
    def compute(
        layer: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:
        def make_dense() -> Tensor:
            return compute_bias(layer, query_length, key_length, device, past_seen_tokens)

        if compatibility.read_implementation(layer.config) != compatibility.NAME or is_traced(past_seen_tokens):
            return make_dense()
        farthest, start = layer.relative_attention_max_distance, int(past_seen_tokens)
        # one query in the middle of 2 · farthest + 1 keys has each distance once
        table = compute_bias(layer, 1, 2 * farthest + 1, device, farthest)[0, :, 0]
        formula = relative_bias(table).rewrite(position_formulas(start, 0, key_length - query_length))
        shape = 1, len(table), query_length, key_length
        return PositionBias(shape, table.device, table.dtype, formula=formula, dense=make_dense)

    return compute
