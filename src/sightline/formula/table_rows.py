"""Rows of tables: small arrays of formulas, such as the embedding `x[i]` of a query in a FlexAttention function."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NoReturn, cast

import numpy as np

from ..errors import FormulaError
from .expression import Expression, Indices, as_expression
from .expression_methods import PASSES
from .operators import OPERATOR_ALIASES, OPERATORS
from .tables import Table, index_error

MAX_ROW_LENGTH = 256  # the entries of a row are written out in the generated code


class Row:
    """A small array of formulas: the entries of a table at its first indices, or what functions made of them.

    If x is a table of shape (n, d), then `x[i]` is a row of shape (d,). Rows have torch's and NumPy's elementwise
    functions, dot, norm, reductions over the last axis or all axes, and changes of shape. Every function writes out one
    formula for each entry.
    """

    def __init__(self, table: Table | None, indices: Indices, shape: tuple[int, ...], entries: Any = None) -> None:
        self.table, self.indices, self.shape, self.entries_ = table, indices, shape, entries
        self.ndim = len(shape)

    @property
    def entries(self) -> list[Expression]:
        """The entries in C order."""
        if math.prod(self.shape) > MAX_ROW_LENGTH:
            raise FormulaError(
                f"a function of a row of shape {self.shape}",
                f"rows of at most {MAX_ROW_LENGTH} entries, because each is written out",
                "append the entries of the rows to those of query and key, whose products attention computes",
            )
        if self.entries_ is None:
            places = itertools.product(*map(range, self.shape))
            self.entries_ = [cast(Table, self.table)[(*self.indices, *place)] for place in places]
        return cast(list[Expression], self.entries_)

    def __getitem__(self, indices: Any) -> Any:
        indices = indices if isinstance(indices, tuple) else (indices,)
        if self.table is not None:
            return self.table[(*self.indices, *indices)]
        if len(indices) == 1 and isinstance(indices[0], int):
            size = math.prod(self.shape[1:])
            return _as_row(self.shape[1:], self.entries[range(0, len(self.entries), size)[indices[0]] :][:size])
        raise FormulaError(f"a row of formulas indexed by {indices}", "whole numbers", "index the table itself")

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    __hash__ = object.__hash__  # `==` compares the entries

    def to_expression(self) -> NoReturn:
        """Raise FormulaError, because a mask or score is one formula."""
        if self.table is None:
            raise FormulaError(f"a row of shape {self.shape} used as one number", "one formula", "row.sum(), row.any()")
        raise index_error(self.table, self.indices, "torch.dot(x[i], y[j]) for the product of two rows")

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, inputs: Any = (), kwargs: Any = None) -> Any:
        return _call(function.__name__, inputs, kwargs or {})

    def __array_function__(self, function: Any, _: Any, inputs: Any, kwargs: Any) -> Any:
        return _call(function.__name__, inputs, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _call(ufunc.__name__, inputs, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in {*OPERATORS, *OPERATOR_ALIASES, *PASSES.composed, *ROW_FUNCTIONS, *ROW_ALIASES}:
            return lambda *inputs, **kwargs: _call(name, (self, *inputs), kwargs)
        raise AttributeError(f"rows of formulas have no attribute {name!r}")


def _as_row(shape: tuple[int, ...], entries: list[Expression]) -> Any:
    """Return a row of these entries; the entry itself if the shape is ()."""
    return Row(None, (), shape, entries) if shape else entries[0]


def _call(name: str, inputs: Any, kwargs: dict[str, Any]) -> Any:
    """Return what the function of torch or NumPy with this name returns for rows, arrays and formulas."""
    name = ROW_ALIASES.get(name, name)
    kwargs = {keyword: value for keyword, value in kwargs.items() if value is not None and value is not False}
    rows = [Row(Table(x), (), tuple(x.shape)) if getattr(x, "ndim", 0) and type(x) is not Row else x for x in inputs]
    if name in ROW_FUNCTIONS:
        return ROW_FUNCTIONS[name](*rows, **kwargs)
    shape = np.broadcast_shapes(*[row.shape for row in rows if isinstance(row, Row)])  # () without rows
    columns = [_spread(row, shape) for row in rows]
    return _as_row(shape, [PASSES.translate_call(name, each, kwargs, "torch") for each in zip(*columns, strict=True)])


def _spread(row: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return the entries of a row, an array or a formula, broadcast to the shape."""
    if not isinstance(row, Row):
        return [row] * math.prod(shape)
    places = np.broadcast_to(np.arange(len(row.entries)).reshape(row.shape), shape)
    return [row.entries[place] for place in places.ravel().tolist()]


def _reduce(operator: str, empty: Any) -> Callable[..., Any]:
    """Return the function that joins the entries of the last axis, or of all axes, by an operator."""

    def function(row: Row, dim: Any = None, axis: Any = None) -> Any:
        dim = axis if dim is None else dim
        if dim is not None and dim not in (-1, row.ndim - 1, (-1,), [-1]):
            raise FormulaError(f"a reduction of axis {dim} of a row of shape {row.shape}", "the last axis", "dim=-1")
        size, shape = (math.prod(row.shape), ()) if dim is None else (row.shape[-1], row.shape[:-1])
        entries = iter(row.entries)
        groups = [list(itertools.islice(entries, size)) for _ in range(math.prod(shape))]
        return _as_row(shape, [_join(operator, each, empty) for each in groups])

    return function


def _join(operator: str, entries: list[Expression], empty: Any) -> Expression:
    if operator in ("logical_or", "logical_and"):
        entries = [_call("bool", (entry,), {}) for entry in entries]
    elif operator == "add":
        entries = [_call("where", (entry, 1, 0), {}) if entry.kind == "bool" else entry for entry in entries]
    return reduce(lambda x, y: _call(operator, (x, y), {}), entries or [as_expression(empty)])


def _dot(x: Row, y: Row) -> Any:
    if x.shape != y.shape or x.ndim != 1:
        raise FormulaError(
            f"dot of rows of shapes {x.shape} and {y.shape}",
            "two rows of one axis and the same length",
            "slice the tensors to as many entries",
        )
    return _SUM(_call("multiply", (x, y), {}))


def _norm(row: Row, ord: Any = 2, dim: Any = None, axis: Any = None, p: Any = 2) -> Any:
    """Return the Euclidean norm, whose derivative at 0 is 0."""
    if ord not in (2, "fro") or p not in (2, "fro"):
        raise FormulaError("another norm of a row", "the Euclidean norm", "row.abs().sum()")
    square = _SUM(_call("multiply", (row, row), {}), dim, axis)
    is_zero = _call("equal", (square, 0), {})
    root = _call("sqrt", (_call("where", (is_zero, 1.0, square), {}),), {})
    return _call("where", (is_zero, 0.0, root), {})


def _reshape(row: Row, *shape: Any) -> Any:
    lengths = list(shape[0] if isinstance(shape[0], tuple | list) else shape)
    if -1 in lengths:
        lengths[lengths.index(-1)] = math.prod(row.shape) // -math.prod(lengths)
    return _as_row(tuple(lengths), row.entries)


def _unsqueeze(row: Row, dim: int) -> Any:
    at = dim % (row.ndim + 1)
    return _as_row((*row.shape[:at], 1, *row.shape[at:]), row.entries)


_SUM = _reduce("add", 0)
ROW_ALIASES = {
    **dict.fromkeys(("inner", "vdot", "matmul", "__matmul__", "__rmatmul__"), "dot"),
    **dict.fromkeys(("vector_norm", "linalg_vector_norm", "linalg_norm"), "norm"),
    "view": "reshape",
    "flatten": "ravel",
}
ROW_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "dot": _dot,
    "norm": _norm,
    "sum": _SUM,
    "any": _reduce("logical_or", False),
    "all": _reduce("logical_and", True),
    "amax": _reduce("maximum", -math.inf),
    "amin": _reduce("minimum", math.inf),
    "reshape": _reshape,
    "ravel": lambda row: _reshape(row, -1),
    "unsqueeze": _unsqueeze,
}


def _set_operator(method: str, name: str) -> None:
    setattr(Row, f"__{method}__", lambda self, *others: _call(name, (self, *others), {}))
    setattr(Row, f"__r{method}__", lambda self, other: _call(name, (other, self), {}))


PYTHON_OPERATORS = (
    "add:add sub:subtract mul:multiply truediv:divide floordiv:floor_divide mod:remainder pow:power matmul:dot "
    "lt:less le:less_equal gt:greater ge:greater_equal eq:equal ne:not_equal and:bitwise_and or:bitwise_or "
    "xor:bitwise_xor neg:negative abs:absolute invert:bitwise_not"
)
for pair in PYTHON_OPERATORS.split():
    _set_operator(*pair.split(":"))
