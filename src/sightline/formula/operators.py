"""The operators of the formula language. `OPERATORS` has one line for each operator, with what all passes need of it.

Each pass over a formula has a dict of rules by the name of the operator: `formula.interval_arithmetic`,
`formula.derivative`, `formula.evaluate_array`, `cpu.codegen.render_llvm` and `gpu.codegen.render_triton`. Tests check
that each dict has a rule for every operator. The derivative has rules only for operators that can return floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["bool", "int", "float"]
_RANK: dict[Kind, int] = {"bool": 0, "int": 1, "float": 2}


def _widest_kind(kinds: tuple[Kind, ...]) -> Kind:
    return max(kinds, key=_RANK.__getitem__)


def promote(kinds: tuple[Kind, ...]) -> Kind:
    """Return the kind of an arithmetic result: int, or float if one of the arguments' kinds is float."""
    return _widest_kind((*kinds, "int"))


def common_kind(node: Any) -> Kind:
    """Return the kind to which a node converts its arguments first. The condition of a `where` is not converted."""
    kinds = [a.kind for a in node.arguments[1 if node.operator == "where" else 0 :]]
    return _widest_kind((*kinds, *([] if node.kind == "bool" else [node.kind])))


def _always(kind: Kind) -> Callable[[tuple[Kind, ...]], Kind]:
    return lambda _: kind


_BOOL, _INT, _FLOAT = _always("bool"), _always("int"), _always("float")


@dataclass(frozen=True)
class Operator:
    """The notation, the number of arguments and the result kind of an operator.

    `sign` is the printed sign or name. A larger `precedence` binds tighter; 0 means function notation. `kind` maps the
    arguments' kinds to that of the result. `conditions` has the positions of the arguments that must be conditions.
    """

    sign: str
    arity: int
    precedence: int
    kind: Callable[[tuple[Kind, ...]], Kind]
    conditions: tuple[int, ...] = ()


OPERATORS: dict[str, Operator] = {
    "add": Operator("+", 2, 5, promote),
    "subtract": Operator("−", 2, 5, promote),
    "multiply": Operator("·", 2, 6, promote),
    "divide": Operator("/", 2, 6, _FLOAT),
    "floor_divide": Operator("//", 2, 6, promote),
    "remainder": Operator("mod", 2, 6, promote),
    "negative": Operator("−", 1, 7, promote),
    "power": Operator("^", 2, 8, _FLOAT),
    "absolute": Operator("|·|", 1, 9, promote),
    "minimum": Operator("min", 2, 0, _widest_kind),
    "maximum": Operator("max", 2, 0, _widest_kind),
    "less": Operator("<", 2, 4, _BOOL),
    "less_equal": Operator("≤", 2, 4, _BOOL),
    "greater": Operator(">", 2, 4, _BOOL),
    "greater_equal": Operator("≥", 2, 4, _BOOL),
    "equal": Operator("=", 2, 4, _BOOL),
    "not_equal": Operator("≠", 2, 4, _BOOL),
    "logical_not": Operator("¬", 1, 7, _BOOL, (0,)),
    "logical_and": Operator("∧", 2, 2, _BOOL, (0, 1)),
    "logical_xor": Operator("⊻", 2, 1, _BOOL, (0, 1)),
    "logical_or": Operator("∨", 2, 1, _BOOL, (0, 1)),
    "bitwise_and": Operator("&", 2, 4, _INT),  # only for integers
    "where": Operator("where", 3, 0, lambda kinds: _widest_kind(kinds[1:]), (0,)),
    "exp": Operator("exp", 1, 0, _FLOAT),
    "exp2": Operator("exp2", 1, 0, _FLOAT),
    "log": Operator("ln", 1, 0, _FLOAT),
    "log2": Operator("log2", 1, 0, _FLOAT),
    "log1p": Operator("log1p", 1, 0, _FLOAT),
    "sqrt": Operator("√", 1, 0, _FLOAT),
    "tanh": Operator("tanh", 1, 0, _FLOAT),
    "sin": Operator("sin", 1, 0, _FLOAT),
    "cos": Operator("cos", 1, 0, _FLOAT),
    "floor": Operator("floor", 1, 0, promote),
    "ceil": Operator("ceil", 1, 0, promote),
}

# Other names of the operators in NumPy and torch, and the torch methods that Python's operators call.
OPERATOR_ALIASES: dict[str, str] = {
    "abs": "absolute",
    "fabs": "absolute",
    "true_divide": "divide",
    "div": "divide",
    "mul": "multiply",
    "sub": "subtract",
    "neg": "negative",
    "mod": "remainder",
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "left_shift": "bitwise_left_shift",
    "right_shift": "bitwise_right_shift",
    "invert": "bitwise_not",
    "float_power": "power",
    "pow": "power",
    "clamp": "clip",
    "fix": "trunc",
    "sgn": "sign",
    "__truediv__": "divide",
    "__floordiv__": "floor_divide",
    "rsub": "reverse_subtract",
    "logsigmoid": "log_sigmoid",
}
