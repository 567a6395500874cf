"""Arrays and formulas of a padded batch (B, n) as those of one sequence (1, tokens) of its real tokens, and back."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..arrays.operations import to_numpy
from ..caching import cached_property
from ..formula.expression import SYMBOLS, Expression, as_expression, table_lookup
from ..formula.formula_checks import check_spans
from ..formula.library import documents
from ..formula.tables import Table

i, j = SYMBOLS["i"], SYMBOLS["j"]


class Unpadding:
    """The real tokens of a padded batch (B, n) as one sequence, one batch entry after the other.

    Parameters
    ----------
    real : (B, n) bool
        False at padding.
    """

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

        Raises
        ------
        ShapeError
            An axis of a dense array has neither length 1 nor the length of the padded batch.
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
