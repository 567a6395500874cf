"""Render a formula as the source text of a Triton function over a block of pairs. This module does not import triton.

Each node has the shape that its symbols give it: nodes that depend only on the query are columns (rows, 1), nodes that
depend only on the key are rows (1, columns), and the other nodes cover the whole block.

    def score_at(s, b, h, i, j, n, m, tables)      for a formula that takes the scores s
    def mask_at(b, h, i, j, n, m, tables)          for any other formula

Kernels pass each table as a tuple: a pointer, the stride of each axis in entries, and the length of each axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...formula.expression import Apply, Constant, Expression, Lookup, Symbol, walk
from ...formula.operators import Kind, common_kind

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
    "bitwise_and": "&",
}
_SAME_NAME = ("exp2", "log", "log2", "sin", "cos")

# The template of each operator: {0}, {1} and {2} stand for the operator's arguments. A pair of templates is (template
# for whole numbers and conditions, template for floats).
TRITON_RULES: dict[str, str | tuple[str, str]] = {
    **{name: f"{{0}} {symbol} {{1}}" for name, symbol in _INFIX.items()},
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
    "exp": "libdevice.exp({0})",  # tl.exp computes 2^(x log₂ e), whose error grows with |x|
    "tanh": "libdevice.tanh({0})",
    "log1p": "libdevice.log1p({0})",
    "floor": ("{0}", "tl.floor({0})"),
    "ceil": ("{0}", "tl.ceil({0})"),
}
_BOOL_TEMPLATES = {"minimum": "{0} & {1}", "maximum": "{0} | {1}"}
# Most operators nested in one line of source: Python's parser accepts 200 nested parentheses, and Triton's compiler is
# recursive.
MAX_NESTING_DEPTH = 32
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
    """Return the source of a module with one Triton function.

    Parameters
    ----------
    name : name of the function
    floats, integers : names of the dtypes of float nodes and of integer nodes; conditions are bool
    slots : for each table of `formula.tables`, its position among the kernel's tables
    clamped : (position of the lookup in `walk(formula)`, axis) of each index that may leave its table at hidden pairs
    scores : True if the function takes s, whether the formula reads s or not
        Such a function returns floats, even if the formula gives whole numbers.
    """
    return _TritonRenderer(formula, floats, integers, slots, clamped).render_module(name, scores)


class _TritonRenderer:
    def __init__(
        self, formula: Expression, floats: str, integers: str, slots: Sequence[int], clamped: Sequence[tuple[int, int]]
    ) -> None:
        self.formula, self.clamped = formula, set(clamped)
        self.types: dict[Kind, str] = {"bool": "tl.int1", "int": f"tl.{integers}", "float": f"tl.{floats}"}
        self.nodes = walk(formula)
        self.node_index = {id(node): position for position, node in enumerate(self.nodes)}
        self.slot = {id(table): slot for table, slot in zip(formula.tables, slots, strict=True)}
        self.use_counts: dict[int, int] = {}
        for node in self.nodes:
            for argument in node.arguments:
                self.use_counts[id(argument)] = self.use_counts.get(id(argument), 0) + 1
        self.lines: list[str] = []
        self.rendered: dict[int, str] = {}
        self.depth: dict[int, int] = {}  # by the id of a node: nesting depth of the operators in the node's text

    def render_module(self, name: str, scores: bool) -> str:
        for node in self.nodes:
            self.rendered[id(node)] = self.inline_or_assign(node, self.render_node(node))
        result = self.rendered[id(self.formula)]
        is_integer_score = self.formula.kind == "int" and scores
        if isinstance(self.formula, Constant):
            result = self.typed_literal(Constant(self.formula.value, "float") if is_integer_score else self.formula)
        elif is_integer_score:
            result = f"tl.cast({result}, {self.types['float']})"
        arguments = ["s"] * scores + list("bhijnm") + ["tables"]
        body = [*self.symbol_casts(), *self.lines, f"return {_strip_parentheses(result)}"]
        source = "\n".join(f"    {line}" for line in body)
        helpers = [helper for helper in _HELPERS if f"{helper}(" in source]
        imports = ["import triton", "import triton.language as tl"]
        imports += ["from triton.language.extra import libdevice"] * ("libdevice." in source)
        imports += [f"from sightline.gpu.kernels.math import {', '.join(helpers)}"] * bool(helpers)
        head = "\n".join([*imports, "", "", "@triton.jit", f"def {name}({', '.join(arguments)}):"])
        return f'{head}\n    """{self.formula}"""\n{source}\n'

    def symbol_casts(self) -> list[str]:
        """Return the lines that cast symbols to int64 or float64, if the formula is computed in these dtypes."""
        casts = []
        for symbol in sorted(self.formula.free_symbols):
            kind = self.types["float" if symbol == "s" else "int"]
            if kind not in ("tl.int32", "tl.float32"):
                casts.append(f"{symbol} = tl.cast({symbol}, {kind})")
        return casts

    def inline_or_assign(self, node: Expression, text: str) -> str:
        """Return a node's text itself, or the name of a variable to which the text is assigned.

        A node gets a variable if several nodes read it, if it is a lookup, or if its text is nested too deeply.
        """
        self.depth[id(node)] = depth = 1 + max([self.depth[id(a)] for a in node.arguments], default=0)
        is_inline = self.use_counts.get(id(node), 0) < 2 and not isinstance(node, Lookup) and depth < MAX_NESTING_DEPTH
        if isinstance(node, Symbol | Constant) or is_inline:
            return text
        self.depth[id(node)] = 0
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {_strip_parentheses(text)}")
        return name

    def render_node(self, node: Expression) -> str:
        if isinstance(node, Symbol):
            return node.name
        if isinstance(node, Constant):
            return _literal(node.value)
        if isinstance(node, Lookup):
            return self.render_lookup(node)
        assert isinstance(node, Apply)
        return self.render_apply(node)

    def render_apply(self, node: Apply) -> str:
        kind = common_kind(node)
        rule = TRITON_RULES[node.operator]
        template = rule if isinstance(rule, str) else rule[kind == "float"]
        conditions: Sequence[int] = (0,) if node.operator == "where" else ()
        if kind == "bool" and node.operator in _BOOL_TEMPLATES:
            template = _BOOL_TEMPLATES[node.operator]
        elif kind == "bool" and not node.operator.startswith("logical") and node.operator != "where":
            kind = "int"  # other operators compute with conditions as 0 and 1
        infix = " {1}" in template and "(" not in template
        # Triton's functions read a bare literal such as 0.1 as float32.
        narrow = not infix and kind == "float" and self.types["float"] == "tl.float64"
        is_typed = narrow or all(isinstance(argument, Constant) for argument in node.arguments)
        inputs = [
            self.typed_literal(a)
            if position in conditions and isinstance(a, Constant)
            else self.rendered[id(a)]
            if position in conditions
            else self.convert_argument(a, kind, is_typed)
            for position, a in enumerate(node.arguments)
        ]
        if "(" in template:
            inputs = [_strip_parentheses(text) for text in inputs]
        text = template.format(*inputs)
        return text if text.endswith(")") and not infix and template[0] not in "-{" else f"({text})"

    def convert_argument(self, node: Expression, kind: Kind, is_typed: bool) -> str:
        """Return the text of an operator's argument, cast to `kind`. If `is_typed`, constants have their dtype."""
        if isinstance(node, Constant):
            value = {"bool": bool, "int": int, "float": float}[kind](node.value)
            return self.typed_literal(Constant(value, kind)) if is_typed else _literal(value)
        text = self.rendered[id(node)]
        return text if node.kind == kind else f"tl.cast({_strip_parentheses(text)}, {self.types[kind]})"

    def typed_literal(self, node: Constant) -> str:
        return f"tl.full((), {_literal(node.value)}, {self.types[node.kind]})"

    def render_lookup(self, node: Lookup) -> str:
        table = f"tables[{self.slot[id(node.table)]}]"
        offsets = []
        for axis, index in enumerate(node.arguments):
            text = self.rendered[id(index)]
            if (self.node_index[id(node)], axis) in self.clamped:
                length = f"{table}[{1 + node.table.ndim + axis}]"
                text = f"tl.maximum(tl.minimum({_strip_parentheses(text)}, {length} - 1), 0)"
            offsets.append(f"{text} * {table}[{1 + axis}]")
        return f"tl.cast(tl.load({' + '.join([f'{table}[0]', *offsets])}), {self.types[node.kind]})"


def _literal(value: bool | int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value) if value is True or value is False or value >= 0 else f"({value!r})"


def _strip_parentheses(text: str) -> str:
    """Return the text without its outermost parentheses, if one pair of parentheses encloses the whole text."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and position < len(text) - 1:
            return text
    return text[1:-1]
