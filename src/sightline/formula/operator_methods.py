"""The operators of Python, and the functions of NumPy and torch, on formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

from ..errors import FormulaError
from .passes import PASSES
from .truth_errors import truth_value_error

if TYPE_CHECKING:
    from .expression import Expression


class OperatorMethods:
    """The base class of `Expression` with the methods that Python, NumPy and torch call, such as `__add__` for `+`."""

    # -- arithmetic ------------------------------------------------------------------------------------------------
    def __add__(self, other: Any) -> Expression:
        return PASSES.apply("add", self, other)

    def __radd__(self, other: Any) -> Expression:
        return PASSES.apply("add", other, self)

    def __sub__(self, other: Any) -> Expression:
        return PASSES.apply("subtract", self, other)

    def __rsub__(self, other: Any) -> Expression:
        return PASSES.apply("subtract", other, self)

    def __mul__(self, other: Any) -> Expression:
        return PASSES.apply("multiply", self, other)

    def __rmul__(self, other: Any) -> Expression:
        return PASSES.apply("multiply", other, self)

    def __truediv__(self, other: Any) -> Expression:
        return PASSES.apply("divide", self, other)

    def __rtruediv__(self, other: Any) -> Expression:
        return PASSES.apply("divide", other, self)

    def __floordiv__(self, other: Any) -> Expression:
        return PASSES.apply("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Expression:
        return PASSES.apply("floor_divide", other, self)

    def __mod__(self, other: Any) -> Expression:
        return PASSES.apply("remainder", self, other)

    def __rmod__(self, other: Any) -> Expression:
        return PASSES.apply("remainder", other, self)

    def __pow__(self, other: Any) -> Expression:
        return PASSES.power(self, other)

    def __rpow__(self, other: Any) -> Expression:
        return PASSES.power(other, self)

    def __neg__(self) -> Expression:
        return PASSES.apply("negative", self)

    def __pos__(self) -> Self:
        return self

    def __abs__(self) -> Expression:
        return PASSES.apply("absolute", self)

    # -- comparisons; `==` builds a formula, so identity is the hash ------------------------------------------------
    def __lt__(self, other: Any) -> Expression:
        return PASSES.apply("less", self, other)

    def __le__(self, other: Any) -> Expression:
        return PASSES.apply("less_equal", self, other)

    def __gt__(self, other: Any) -> Expression:
        return PASSES.apply("greater", self, other)

    def __ge__(self, other: Any) -> Expression:
        return PASSES.apply("greater_equal", self, other)

    def __eq__(self, other: object) -> Expression:  # type: ignore[override]
        return PASSES.apply("equal", self, other)

    def __ne__(self, other: object) -> Expression:  # type: ignore[override]
        return PASSES.apply("not_equal", self, other)

    __hash__ = object.__hash__

    # -- conditions, and the bits of integers -----------------------------------------------------------------------
    def __and__(self, other: Any) -> Expression:
        return PASSES.bitwise["and"](self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Expression:
        return PASSES.bitwise["or"](self, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Expression:
        return PASSES.bitwise["xor"](self, other)

    __rxor__ = __xor__

    def __lshift__(self, other: Any) -> Expression:
        return PASSES.bitwise["lshift"](self, other)

    def __rlshift__(self, other: Any) -> Expression:
        return PASSES.bitwise["lshift"](other, self)

    def __rshift__(self, other: Any) -> Expression:
        return PASSES.bitwise["rshift"](self, other)

    def __rrshift__(self, other: Any) -> Expression:
        return PASSES.bitwise["rshift"](other, self)

    def __invert__(self) -> Expression:
        return PASSES.apply("logical_not", self)

    # -- what Python must not do with a formula ---------------------------------------------------------------------
    def __bool__(self) -> NoReturn:
        raise truth_value_error(str(self))

    def __index__(self) -> NoReturn:
        raise FormulaError(
            f"a formula ({self}) was used as one whole number, as in array[{self}]",
            "formulas index tables",
            "wrap the array first: sightline.table(array)[...]",
        )

    __int__ = __index__

    def __float__(self) -> NoReturn:
        raise FormulaError(
            f"a formula ({self}) was used as one number, as Python's math functions do",
            "NumPy's functions, which stay formulas",
            "np.tanh(s) for math.tanh(s), and so on",
        )

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise FormulaError(
            f"a formula ({self}) was turned into an array",
            "formulas stay formulas until the lengths are known",
            "formula.array(n, m) for its values; sightline.table(array)[...] to read an array at it",
        )

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
            """Return the attribute of a torch tensor that has this name, such as the method in `q_idx.clamp(0, 5)`."""
            return PASSES.tensor_attribute(self, name)
