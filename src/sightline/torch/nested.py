"""Attention on nested tensors of torch in the jagged layout: the sequences of a batch, packed on one axis.

A nested tensor of shape (B, H, j, d) has the positions of all sequences in one array (H, total, d). One call computes
all sequences, and the mask keeps them apart. In the formulas, b, i, j, n and m are those of each sequence: i becomes
i − start[i], for example, where start is the first position of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arrays.operations import is_traced
from ..arrays.unreadable import is_array
from ..call.problem import Options
from ..call.validation import read_mask, read_score, read_statistics
from ..errors import MaskError, ParameterError, ShapeError
from ..formula.expression import SYMBOLS, Expression, apply, table_lookup
from ..formula.tables import Table
from ..formula.torch_masks import is_causal_bias
from ..statistics import Statistic


def is_nested(*arrays: Any) -> bool:
    """True if an array is a nested tensor. Inside a transform of torch.func, nested tensors look dense."""
    return any(isinstance(array, Tensor) and array.is_nested for array in arrays)


def pack_sequences(query: Any, key: Any, value: Any, options: Options) -> tuple[Any, Any, Any, Options]:
    """Return query, key and value of the packed sequences, and the options of the packed call.

    query : (B, H, j, d_k) or (B, j, d_k), a nested tensor in the jagged layout; j is the ragged axis
    key, value : nested tensors of B sequences; key and value have the same lengths

    Raise ShapeError as `check_nested` does, MaskError for a dense array as mask or bias, since sequences of different
    lengths have no common matrix of scores, and ParameterError for a statistic but lse, entropy, mass and sums over j.
    """
    check_nested({"query": query, "key": key, "value": value})
    of_query, of_key = (Packing.of(x.offsets(), x.lengths(), x.values().shape[x.ndim - 3]) for x in (query, key))
    symbols = {
        "b": of_query.read(of_query.sequence.clamp(min=0), "i"),
        "i": SYMBOLS["i"] - of_query.read(of_query.start, "i"),
        "j": SYMBOLS["j"] - of_key.read(of_key.start, "j"),
        "n": of_query.read(of_query.length, "i"),
        "m": of_key.read(of_key.length, "j"),
    }
    mask, score = options.mask, options.score
    if is_causal_bias(mask):
        read_mask(mask)  # raises an error: its lengths are those of one sequence
    if any(hasattr(formula, "dtype") and not isinstance(formula, Expression) for formula in (mask, score)):
        raise _dense_array_error()
    mask, score = read_mask(mask), read_score(score)
    see = [_check_statistic(x).map_formulas(lambda one: _rewrite(one, symbols)) for x in read_statistics(options.see)]
    own = of_query.same_sequence(of_key)
    mask = own if mask is None else own & _rewrite(mask, symbols)
    options = options.with_formulas(mask, None if score is None else _rewrite(score, symbols), see)
    packed = [x.values()[None] if query.ndim == 4 else x.values() for x in (query, key, value)]
    return packed[0], packed[1], packed[2], options


def unpack_sequences(query: Any, output: Tensor, seen: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (output, seen) of the packed call as nested tensors with the offsets of the nested tensor `query`."""
    nest, layout = torch.nested.nested_tensor_from_jagged, (query.offsets(), query.lengths())
    arrays = [x[0] if query.ndim == 4 else x for x in (output, *seen)]
    output, *rest = [nest(x, *layout, jagged_dim=query.ndim - 2) for x in arrays]
    return output, tuple(rest)


@dataclass(frozen=True)
class Packing:
    """The sequences of a batch on a packed axis.

    Each position has the number of its sequence, which is −1 outside of all, and the start and length of the sequence.
    """

    sequence: Tensor
    start: Tensor
    length: Tensor

    @classmethod
    def of(cls, offsets: Tensor, lengths: Tensor | None, total: int) -> Packing:
        """Return the packing of sequences that begin at offsets[:-1], without gaps if `lengths` is None."""
        offsets = offsets.to(torch.int64)
        first, spans = offsets[:-1], offsets.diff()
        lengths = spans if lengths is None else lengths
        # a position of no sequence gets the start and length of the nearest sequence before it, or of the first one
        positions = torch.arange(total, device=offsets.device)
        nearest = torch.searchsorted(offsets, positions, right=True).sub_(1).clamp_(0, max(len(spans) - 1, 0))
        start, length = first[nearest], lengths[nearest]
        inside = (positions >= start) & (positions < start + length)
        return cls(torch.where(inside, nearest, -1), start, length)

    def same_sequence(self, of_key: Packing) -> Expression:
        """Return the mask of the pairs of one sequence. A query of no sequence sees no key."""
        keys = torch.where(of_key.sequence < 0, -2, of_key.sequence)
        return apply("equal", self.read(self.sequence, "i"), of_key.read(keys, "j"))

    def read(self, entries: Tensor, symbol: str) -> Expression:
        return Table(entries, axes=(symbol,))[SYMBOLS[symbol]]


def check_nested(named: dict[str, Any]) -> None:
    """Raise ShapeError unless query, key and value are jagged tensors whose sequences fit together."""
    layouts = {name: _layout_of(x) for name, x in named.items()}
    if set(layouts.values()) != {"jagged"}:
        given = ", ".join(f"{name} {layout}" for name, layout in layouts.items())
        allowed = "all three nested tensors in the jagged layout, or all three dense"
        raise ShapeError(given, allowed, "torch.nested.nested_tensor(list, layout=torch.jagged)")
    for name, x in named.items():
        if x.ndim not in (3, 4) or x._ragged_idx != x.ndim - 2:
            given = f"{name} nested with {x.ndim} axes, the ragged one at {x._ragged_idx}"
            allowed = "(B, H, j, d) or (B, j, d), where j is the ragged axis"
            raise ShapeError(given, allowed, f"{name}.transpose(1, 2) if its axes are (B, j, H, d)")
        if x.lengths() is not None and not is_traced(x) and bool((x.lengths() > torch.diff(x.offsets())).any()):
            given = f"{name} with offsets {x.offsets().tolist()} and lengths {x.lengths().tolist()}"
            cure = "copy the sequences: torch.nested.nested_tensor(list, layout=torch.jagged)"
            raise ShapeError(given, "sequences that end before the next offset", cure)
    query, key, value = named.values()
    if not (query.ndim == key.ndim == value.ndim and len(query.offsets()) == len(key.offsets())):
        given = ", ".join(f"{name} of {len(x.offsets()) - 1} sequences with {x.ndim} axes" for name, x in named.items())
        allowed = "equal numbers of sequences and of axes"
        raise ShapeError(given, allowed, "give each query sequence a key sequence, which may be empty")
    if not (_is_equal(key.offsets(), value.offsets()) and _is_equal(key.lengths(), value.lengths())):
        raise ShapeError(
            f"key with offsets {key.offsets().tolist()}, value with offsets {value.offsets().tolist()}"
            f"; lengths {_lengths(key)} and {_lengths(value)}",
            "one value for each key: equal offsets and lengths",
            "build value with nested_tensor_from_jagged(values, key.offsets())",
        )


def _layout_of(array: Any) -> str:
    if is_nested(array):
        return "jagged" if array.layout is torch.jagged else "strided nested"
    return "dense" if is_array(array) else type(array).__name__


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _lengths(nested: Any) -> Any:
    return (nested.offsets().diff() if nested.lengths() is None else nested.lengths()).tolist()


def _check_statistic(statistic: Statistic) -> Statistic:
    if statistic.axes != "j" or statistic.finds or statistic.is_mean or statistic.has_own_problem:
        given, allowed = f"{statistic!r} of nested tensors", "lse(), entropy(), mass(...) and sum(..., over=j)"
        raise ParameterError(given, allowed, "call attention for each sequence: query.unbind()")
    return statistic


def _dense_array_error() -> MaskError:
    allowed = "formulas, whose i and j are positions inside each sequence"
    cure = "mask=sightline.causal(), or score=s + table(array)[i, j] if the array covers the longest sequence"
    return MaskError("a dense array or lists of blocks as mask or bias of nested tensors", allowed, cure)


def _rewrite(formula: Expression, symbols: dict[str, Expression]) -> Expression:
    """Return the formula with the symbols of the packed call. Raise MaskError if the formula reads a dense array."""
    if any((axis or "b")[0] in "ij" for table in formula.tables for axis in table.axes or ()):
        raise _dense_array_error()
    return formula.rewrite(symbols, table_lookup(lambda table: table.without_axes("b")))
