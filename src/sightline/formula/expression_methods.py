"""The methods of formulas that call other modules: Python's operators, functions of NumPy and torch, and evaluation."""

from __future__ import annotations

import dis
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ..arrays.caching import cached_property
from ..errors import FormulaError, MaskError, ParameterError
from .operators import Kind

if TYPE_CHECKING:
    from ..view.formula_pictures import Picture
    from .expression import Expression
    from .tables import Table


class Passes:
    """Functions that methods of `Expression` call. They are set later, because their modules import `expression`.

    `formula/__init__.py` sets every attribute except `picture`, which `sightline/__init__.py` sets.
    """

    translate_call: Callable[..., Expression]
    tensor_attribute: Callable[[Any, str], Any]
    apply: Callable[..., Expression]
    composed: dict[str, Callable[[Any, Any], Expression]]
    check_formula: Callable[..., None]
    count_pairs: Callable[[Any, tuple[int, int, int, int]], int]
    evaluate_dense: Callable[..., Any]
    learned_number: Callable[[Any], Expression]
    format_formula: Callable[[Expression], str]
    picture: Callable[..., Picture]
    make_row: Callable[..., Any]


PASSES = Passes()


def _unary(operator: str) -> Callable[[Any], Expression]:
    return lambda self: PASSES.apply(operator, self)


def _binary(operator: str) -> Callable[[Any, Any], Expression]:
    return lambda self, other: PASSES.apply(operator, self, other)


def _reflected(operator: str) -> Callable[[Any, Any], Expression]:
    """Return the method that Python calls for `other ∘ self` if `other` is no formula."""
    return lambda self, other: PASSES.apply(operator, other, self)


def _composed(function: str) -> Callable[[Any, Any], Expression]:
    """Return the method that calls a function of `composed_functions`."""
    return lambda self, other: PASSES.composed[function](self, other)


def _composed_reflected(function: str) -> Callable[[Any, Any], Expression]:
    return lambda self, other: PASSES.composed[function](other, self)


class ExpressionMethods:
    """The base class of `Expression`, with the methods that call `PASSES`."""

    kind: Kind
    free_symbols: cached_property[frozenset[str]]
    tables: cached_property[tuple[Table, ...]]

    # -- Python's operators; `==` builds a formula, so identity is the hash -------------------------------------------
    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("subtract"), _reflected("subtract")
    __mul__, __rmul__ = _binary("multiply"), _reflected("multiply")
    __truediv__, __rtruediv__ = _binary("divide"), _reflected("divide")
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _reflected("floor_divide")
    __mod__, __rmod__ = _binary("remainder"), _reflected("remainder")
    __pow__, __rpow__ = _composed("power"), _composed_reflected("power")
    __lt__, __le__ = _binary("less"), _binary("less_equal")
    __gt__, __ge__ = _binary("greater"), _binary("greater_equal")
    __eq__ = _binary("equal")  # type: ignore[assignment]
    __ne__ = _binary("not_equal")  # type: ignore[assignment]
    __hash__ = object.__hash__
    __and__ = __rand__ = _composed("bitwise_and")
    __or__ = __ror__ = _composed("bitwise_or")
    __xor__ = __rxor__ = _composed("bitwise_xor")
    __lshift__, __rlshift__ = _composed("bitwise_left_shift"), _composed_reflected("bitwise_left_shift")
    __rshift__, __rrshift__ = _composed("bitwise_right_shift"), _composed_reflected("bitwise_right_shift")
    __neg__, __abs__, __invert__ = _unary("negative"), _unary("absolute"), _unary("logical_not")

    def __pos__(self) -> Self:
        return self

    # -- what Python must not do with a formula ---------------------------------------------------------------------
    def __bool__(self) -> NoReturn:
        raise _truth_value_error(str(self))

    def __index__(self) -> NoReturn:
        raise FormulaError(
            f"a formula ({self}) was used as one whole number, as in array[{self}]",
            "formulas as indices of tables",
            "wrap the array first: sightline.table(array)[...]",
        )

    __int__ = __index__

    def __float__(self) -> NoReturn:
        raise FormulaError(
            f"a formula ({self}) was used as one number, as Python's math functions do",
            "NumPy's functions, which return formulas",
            "np.tanh(s) for math.tanh(s), and so on",
        )

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise FormulaError(
            f"a formula ({self}) was turned into an array",
            "formulas, which have no entries before n and m are known",
            "formula.array(n, m) for the formula's values; sightline.table(array)[formula] to read an array",
        )

    def __getitem__(self, index: Any) -> NoReturn:
        raise FormulaError(
            f"indices of a formula ({self})",
            "formulas, which are values of one pair (i, j), and tables with indices",
            "table(weights)[b, h, j, i] for the weight of another pair; weights is a result of sightline.weights()",
        )

    def __iter__(self) -> Any:
        """Raise FormulaError. Without this method Python would iterate by means of `__getitem__`."""
        return PASSES.translate_call("sum", (self,), {}, "a loop over a formula, or Python's")

    # -- other libraries' functions ---------------------------------------------------------------------------------
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Expression:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return PASSES.translate_call(name, inputs, kwargs, "numpy")

    def __array_function__(self, function: Any, _: Any, inputs: Any, kwargs: Any) -> Expression:
        return PASSES.translate_call(function.__name__, inputs, kwargs, "numpy")

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, inputs: Any = (), kwargs: Any = None) -> Expression:
        return PASSES.translate_call(function.__name__, inputs, kwargs or {}, "torch", function)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return for this formula what a torch tensor has under this name: `clamp`, for example, makes a formula.

            So functions that were written for tensors accept formulas. A name without such a meaning raises
            AttributeError.
            """
            return PASSES.tensor_attribute(self, name)

    # -- the values for given lengths -------------------------------------------------------------------------------
    def array(
        self, n: int | None = None, m: int | None = None, *, batch: int = 1, heads: int = 1, s: Any = None
    ) -> Any:
        """Return the formula's result for every query i and key j, as a dense array.

        Parameters
        ----------
        n, m : int
            The number of queries, which has no default, and the number of keys; m defaults to n.
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

    def sparsity(
        self, n: int | None = None, m: int | None = None, *, batch: int | None = None, heads: int | None = None
    ) -> float:
        """Return the share of the pairs (i, j) that a mask hides, from 0 to 1.

        Kernels skip tiles, blocks of 64 × 64 pairs, if all pairs are hidden. `sightline.explain` counts these tiles.

        Parameters
        ----------
        n, m : int
            The number of queries, which has no default, and the number of keys; m defaults to n.
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
            A length is not a whole number of at least 0, or the mask reads outside a table.

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
        if self.kind != "bool" or self.free_symbols & {"s", "p"}:
            raise MaskError(f"sparsity of {self}", "a condition on b, h, i and j", "(i >= j).sparsity(1000)")
        spans = [span for table in self.tables for span in table.span_lengths]
        batch, heads = (
            max([length for axis, length in spans if axis == name], default=1) if given is None else given
            for name, given in (("b", batch), ("h", heads))
        )
        extent = self._check_extent("sparsity", n, m, batch, heads)
        pairs = math.prod(extent)
        return 1 - PASSES.count_pairs(self, extent) / pairs if pairs else 0.0

    def show(self, n: int | None = None, m: int | None = None, *, batch: int = 0, head: int = 0) -> Picture:
        """Return a picture of a mask, or of what a score formula adds to each score, without the mask of a call.

        Parameters
        ----------
        n, m : int
            The number of queries, which has no default, and the number of keys, of any size; m defaults to n.
        batch, head : int
            The batch entry b and the head h that the picture shows.

        Returns
        -------
        Picture
            `print` draws it in a terminal, a notebook displays it, and `.save(path)` writes PNG, SVG or PDF.

        Examples
        --------
        >>> import sightline
        >>> print(sightline.window(2).show(4))
        i − j < 2 ∧ j − i ≤ 0   4 queries × 4 keys, 7 of 16 pairs allowed (43.8%)
           ┌────────┐
         0 │██ · · ·│
           │████ · ·│
           │ ·████ ·│
         3 │ · ·████│
           └────────┘
            0      3
        """
        _, _, n, m = self._check_lengths("show", n, m, 1, 1)
        return PASSES.picture(self, n, m, batch=batch, head=head)

    def _check_extent(self, name: str, n: Any, m: Any, batch: Any, heads: Any) -> tuple[int, int, int, int]:
        """Check the lengths, and the formula for these lengths. Return (B, H, n, m); errors show the method `name`."""
        extent = self._check_lengths(name, n, m, batch, heads)
        PASSES.check_formula(self, extent)
        return extent

    @staticmethod
    def _check_lengths(name: str, n: Any, m: Any, batch: Any, heads: Any) -> tuple[int, int, int, int]:
        extent = (batch, heads, n, n if m is None else m)
        if not all(hasattr(length, "__index__") and length >= 0 for length in extent):
            raise ParameterError(
                f"{name} of (B, H, n, m) = {extent}", "whole numbers of at least 0", f"{name}(4, 6) for n = 4 and m = 6"
            )
        return int(batch), int(heads), int(n), int(n if m is None else m)  # NumPy's integers would overflow


def _truth_value_error(formula: str) -> FormulaError:
    """Return the error for a formula that Python uses as one True or False, with a cure for the place of the use.

    This place is two frames up: the code there made Python call `__bool__`, which called this function.
    """
    frame = sys._getframe(2)
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    place = "by `and`, `or`, `not`, `if` or a chained comparison"
    cure = (
        "write (a < i) & (i < b) for a < i < b and for a < i & i < b, & for and, | for or, ~ for not, "
        "sightline.where(...) for if"
    )
    if "CALL" in operation:
        place = "by a function of Python, such as max, min, any, all or sorted"
        cure = (
            "write numpy.maximum(i, j) or torch.maximum(i, j) for max(i, j), minimum for min, x | y for any([x, y]), "
            "x & y for all([x, y])"
        )
    elif operation == "CONTAINS_OP":
        place = "by `in`"
        cure = "write (i == 1) | (i == 5), or torch.isin(i, torch.tensor([1, 5])), for i in [1, 5]"
    return FormulaError(
        f"a formula ({formula}) was used as one True or False, {place}",
        "conditions over all (i, j) at once, joined by & | ~",
        cure,
    )
