"""A formula as the text of a Triton function of a block of pairs. Plain text: triton is not loaded.

What reads only the query is computed for a column (rows, 1), what reads only the key for a row (1, columns), and the
rest for the block, since each part has the shape its symbols give it.

    def score_at(s, b, h, i, j, n, m, tables)      for formulas of the scores s
    def mask_at(b, h, i, j, n, m, tables)          for others

A table is (pointer, stride of each axis in entries, length of each axis).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .expression import Apply, Constant, Expression, Lookup, Symbol, walk
from .operators import Kind, common_kind

__all__ = ["TRITON_RULES", "render"]

_INFIX = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
    "equal": "==",
    "not_equal": "!=",
    "logical_and": "&",
    "logical_xor": "^",
    "logical_or": "|",
}
_SAME_NAME = ("exp2", "log", "log2", "sin", "cos")

# {0}, {1}, {2} are the arguments; a pair is (of whole numbers and conditions, of floats).
TRITON_RULES: dict[str, str | tuple[str, str]] = {
    **{name: f"{{0}} {sign} {{1}}" for name, sign in _INFIX.items()},
    **{name: f"tl.{name}({{0}})" for name in _SAME_NAME},
    "floor_divide": ("whole_quotient({0}, {1})", "tl.floor(real_quotient({0}, {1}))"),
    "remainder": ("whole_remainder({0}, {1})", "real_remainder({0}, {1})"),
    "negative": "-{0}",
    "absolute": "tl.abs({0})",
    "minimum": ("tl.minimum({0}, {1})", "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"),
    "maximum": ("tl.maximum({0}, {1})", "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"),
    "logical_not": "{0} ^ True",
    "where": "tl.where({0}, {1}, {2})",
    "power": "libdevice.pow({0}, {1})",
    "sqrt": "square_root({0})",
    "exp": "libdevice.exp({0})",  # Triton's own goes by 2^(x log₂ e), whose error grows with x
    "tanh": "libdevice.tanh({0})",
    "floor": ("{0}", "tl.floor({0})"),
    "ceil": ("{0}", "tl.ceil({0})"),
}
_OF_CONDITIONS = {"minimum": "{0} & {1}", "maximum": "{0} | {1}"}
DEEPEST = 32  # operators in operators on a line: Python reads 200 parentheses, Triton's compiler calls itself
_HELPERS = ("real_quotient", "real_remainder", "square_root", "whole_quotient", "whole_remainder")


def render(
    formula: Expression,
    name: str,
    *,
    floats: str,
    integers: str = "int32",
    slots: Sequence[int] = (),
    clamped: Sequence[tuple[int, int]] = (),
    scores: bool = False,
) -> str:
    """The source of a module with one Triton function.

    Parameters
    ----------
    name : of the function
    floats, integers : names of the types numbers are computed in; conditions give bool, all else floats
    slots : which of the kernel's tables each of `formula.tables` is
    clamped : (place of a lookup in `walk`, axis) whose index may leave its table at hidden pairs
    scores : whether the function takes s, read or not, and answers floats even where the formula gives whole numbers
    """
    return _Writer(formula, floats, integers, slots, clamped).module(name, scores)


class _Writer:
    def __init__(
        self,
        formula: Expression,
        floats: str,
        integers: str,
        slots: Sequence[int],
        clamped: Sequence[tuple[int, int]],
    ) -> None:
        self.formula, self.clamped = formula, set(clamped)
        self.types: dict[Kind, str] = {"bool": "tl.int1", "int": f"tl.{integers}", "float": f"tl.{floats}"}
        self.nodes = walk(formula)
        self.place = {id(node): place for place, node in enumerate(self.nodes)}
        self.slot = {id(table): slot for table, slot in zip(formula.tables, slots, strict=True)}
        self.uses: dict[int, int] = {}
        for node in self.nodes:
            for argument in node.arguments:
                self.uses[id(argument)] = self.uses.get(id(argument), 0) + 1
        self.lines: list[str] = []
        self.written: dict[int, str] = {}
        self.depth: dict[int, int] = {}  # of operators in what is written for a node

    def module(self, name: str, scores: bool) -> str:
        for node in self.nodes:
            self.written[id(node)] = self.kept(node, self.text_of(node))
        result = self.written[id(self.formula)]
        whole = self.formula.kind == "int" and scores
        if isinstance(self.formula, Constant):
            result = self.typed(Constant(self.formula.value, "float") if whole else self.formula)
        elif whole:
            result = f"tl.cast({result}, {self.types['float']})"
        arguments = ["s"] * scores + list("bhijnm") + ["tables"]
        body = [*self.widened(), *self.lines, f"return {_bare(result)}"]
        source = "\n".join(f"    {line}" for line in body)
        helpers = [helper for helper in _HELPERS if f"{helper}(" in source]
        imports = ["import triton", "import triton.language as tl"]
        imports += ["from triton.language.extra import libdevice"] * ("libdevice." in source)
        imports += [f"from sightline.gpu.kernels.math import {', '.join(helpers)}"] * bool(helpers)
        head = "\n".join([*imports, "", "", "@triton.jit", f"def {name}({', '.join(arguments)}):"])
        return f'{head}\n    """{self.formula}"""\n{source}\n'

    def widened(self) -> list[str]:
        """The symbols in the types numbers are computed in, where those are wider than what kernels count in."""
        found = []
        for symbol in sorted(self.formula.reads):
            kind = self.types["float" if symbol == "s" else "int"]
            if kind not in ("tl.int32", "tl.float32"):
                found.append(f"{symbol} = tl.cast({symbol}, {kind})")
        return found

    def kept(self, node: Expression, text: str) -> str:
        """The text itself, or the name of a line for what is read more than once or from memory, or is deep."""
        self.depth[id(node)] = depth = 1 + max([self.depth[id(a)] for a in node.arguments], default=0)
        once = self.uses.get(id(node), 0) < 2 and not isinstance(node, Lookup) and depth < DEEPEST
        if isinstance(node, Symbol | Constant) or once:
            return text
        self.depth[id(node)] = 0
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {_bare(text)}")
        return name

    def text_of(self, node: Expression) -> str:
        if isinstance(node, Symbol):
            return node.name
        if isinstance(node, Constant):
            return _literal(node.value)
        if isinstance(node, Lookup):
            return self.lookup(node)
        assert isinstance(node, Apply)
        return self.applied(node)

    def applied(self, node: Apply) -> str:
        kind = common_kind(node)
        rule = TRITON_RULES[node.operator]
        template = rule if isinstance(rule, str) else rule[kind == "float"]
        conditions: Sequence[int] = (0,) if node.operator == "where" else ()
        if kind == "bool" and node.operator in _OF_CONDITIONS:
            template = _OF_CONDITIONS[node.operator]
        elif kind == "bool" and not node.operator.startswith("logical") and node.operator != "where":
            kind = "int"  # conditions compare as 0 and 1
        infix = " {1}" in template and "(" not in template
        narrow = not infix and kind == "float" and self.types["float"] == "tl.float64"  # functions take 0.1 for float32
        typed = narrow or all(isinstance(argument, Constant) for argument in node.arguments)
        inputs = [
            self.typed(a)
            if place in conditions and isinstance(a, Constant)
            else self.written[id(a)]
            if place in conditions
            else self.brought(a, kind, typed)
            for place, a in enumerate(node.arguments)
        ]
        if "(" in template:
            inputs = [_bare(text) for text in inputs]
        text = template.format(*inputs)
        return text if text.endswith(")") and not infix and template[0] not in "-{" else f"({text})"

    def brought(self, node: Expression, kind: Kind, typed: bool) -> str:
        """An argument in the type its operator computes in."""
        if isinstance(node, Constant):
            value = {"bool": bool, "int": int, "float": float}[kind](node.value)
            return self.typed(Constant(value, kind)) if typed else _literal(value)
        text = self.written[id(node)]
        return text if node.kind == kind else f"tl.cast({_bare(text)}, {self.types[kind]})"

    def typed(self, node: Constant) -> str:
        return f"tl.full((), {_literal(node.value)}, {self.types[node.kind]})"

    def lookup(self, node: Lookup) -> str:
        table = f"tables[{self.slot[id(node.table)]}]"
        offsets = []
        for axis, index in enumerate(node.arguments):
            text = self.written[id(index)]
            if (self.place[id(node)], axis) in self.clamped:
                length = f"{table}[{1 + node.table.ndim + axis}]"
                text = f"tl.maximum(tl.minimum({_bare(text)}, {length} - 1), 0)"
            offsets.append(f"{text} * {table}[{1 + axis}]")
        return f"tl.cast(tl.load({' + '.join([f'{table}[0]', *offsets])}), {self.types[node.kind]})"


def _literal(value: bool | int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value) if value is True or value is False or value >= 0 else f"({value!r})"


def _bare(text: str) -> str:
    """Without the parentheses around the whole."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0 and place < len(text) - 1:
            return text
    return text[1:-1]
