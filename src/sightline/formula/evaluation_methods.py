"""The values of a formula for given lengths: an array, the share of hidden pairs, and a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..caching import cached_property
from ..errors import MaskError, ParameterError
from .operators import Kind
from .passes import PASSES

if TYPE_CHECKING:
    from ..view.picture import Picture
    from .tables import Table


class EvaluationMethods:
    """The base class of `Expression` with the methods that take the numbers of queries and keys."""

    kind: Kind
    free_symbols: cached_property[frozenset[str]]
    tables: cached_property[tuple[Table, ...]]

    def array(self, n: int, m: int | None = None, *, batch: int = 1, heads: int = 1, s: Any = None) -> Any:
        """Return the formula's result for every query i and key j, as a dense array.

        Parameters
        ----------
        n, m : int
            The number of queries, and the number of keys; m defaults to n.
        batch, heads : int
            The number of batch entries b, and the number of heads h.
        s : array, optional
            Scores, broadcastable to (batch, heads, n, m); required if the formula reads s.

        Returns
        -------
        numpy.ndarray
            An array (n, m) if batch = heads = 1, else (batch, heads, n, m). Its dtype is bool for a condition, int64
            for whole numbers, else float64.

        Raises
        ------
        ParameterError
            A length is not a whole number of at least 0.
        FormulaError
            The formula reads s, and `s` is not given.
        TableError
            The formula reads outside a table.

        Examples
        --------
        >>> from sightline import i, j
        >>> (i >= j).array(2, 3).astype(int)
        array([[1, 0, 0],
               [1, 1, 0]])
        """
        extent = self._check_extent("array", n, m, batch, heads)
        values = PASSES.evaluate_dense(self, extent, s)
        return values[0, 0] if batch == heads == 1 else values

    def sparsity(self, n: int, m: int | None = None, *, batch: int | None = None, heads: int | None = None) -> float:
        """Return the share of the pairs (i, j) that a mask hides, from 0 to 1.

        The kernels skip 64 × 64 tiles without a visible pair; `sightline.explain` counts these tiles.

        Parameters
        ----------
        n, m : int
            The number of queries, and the number of keys; m defaults to n.
        batch, heads : int
            The number of batch entries b, and the number of heads h, over which the share is the mean. Default: the
            lengths of the mask's arrays, as in `padding(lengths)`; 1 without such an array.

        Returns
        -------
        float
            1 − allowed / (batch · heads · n · m), counted exactly; 0 if there are no pairs.

        Raises
        ------
        MaskError
            The formula is not a condition, or reads the score s.
        ParameterError, TableError
            As in `array`.

        Examples
        --------
        >>> import sightline
        >>> sightline.causal().sparsity(4)
        0.375
        >>> round(sightline.window(256).sparsity(16_384), 3)
        0.984
        >>> sightline.padding([4, 2]).sparsity(4)
        0.25
        """
        if self.kind != "bool" or "s" in self.free_symbols:
            raise MaskError(f"sparsity of {self}", "a condition on b, h, i and j", "(i >= j).sparsity(1000)")
        spans = [span for table in self.tables for span in table.span_lengths]
        batch, heads = (
            max([length for axis, length in spans if axis == name], default=1) if given is None else given
            for name, given in (("b", batch), ("h", heads))
        )
        extent = self._check_extent("sparsity", n, m, batch, heads)
        pairs = math.prod(extent)
        return 1 - PASSES.count_pairs(self, extent) / pairs if pairs else 0.0

    def show(self, n: int, m: int | None = None, *, batch: int = 0, head: int = 0) -> Picture:
        """Return a picture of a mask, or of what a score formula adds to the score.

        Parameters
        ----------
        n, m : int
            The number of queries, and the number of keys, of any size; m defaults to n.
        batch, head : int
            The batch entry b and the head h that the picture shows.

        Returns
        -------
        Picture
            `print` draws it in a terminal, a notebook displays it, and `.save(path)` writes PNG, SVG or PDF.
        """
        return PASSES.picture(self, n, n if m is None else m, batch=batch, head=head)

    def _check_extent(self, name: str, n: Any, m: Any, batch: Any, heads: Any) -> tuple[int, int, int, int]:
        """Return (B, H, n, m) after the checks of a formula that need these lengths."""
        extent = (batch, heads, n, n if m is None else m)
        if not all(hasattr(length, "__index__") and length >= 0 for length in extent):
            raise ParameterError(f"{name} of (B, H, n, m) = {extent}", "whole numbers of at least 0", f"{name}(4, 6)")
        extent = (int(batch), int(heads), int(n), int(n if m is None else m))  # NumPy's integers would overflow
        PASSES.check_formulas(self, None, extent)
        return extent
