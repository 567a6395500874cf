"""The expression graph of masks and scores: symbols, constants, operators and table lookups.

A formula combines five symbols (batch `b`, query head `h`, query position `i`, key position `j`, scaled score `s`) and
two lengths (`n` queries, `m` keys) by arithmetic, comparisons, `& | ~`, `where` and functions of NumPy or torch. A
formula of a statistic also reads the weight `p`; the symbol "ln p" stands for its logarithm. The graph is immutable.
Other modules of this package are passes over the graph, such as printing or differentiation. A pass visits every node
once, after the arguments of the node. So a part that occurs several times is computed once. The loop in `walk` finds
this order, so a deep formula does not reach Python's recursion limit.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

from ..arrays.caching import cached_property
from ..arrays.operations import is_compiling, is_traced
from ..errors import FormulaError
from .expression_methods import PASSES, ExpressionMethods
from .operators import OPERATORS, Kind

if TYPE_CHECKING:
    from .parameters import Structure
    from .tables import Table

T = TypeVar("T")
Indices = tuple["Expression", ...]

OPERATORS_ON_CONDITIONS = {"add": "logical_or", "multiply": "logical_and"}
MAX_EXACT_INTEGER = 2**53  # bounds of whole numbers are float64, which is not exact for larger integers


class Expression(ExpressionMethods):
    """A formula of `b h i j s p n m`, such as `sightline.i >= sightline.j`.

    `print` shows the formula in mathematical notation, `array` returns a dense array, and `show` draws a picture.
    """

    kind: Kind
    arguments: tuple[Expression, ...]
    template: ClassVar[Expression | None] = None  # the formula that `parameters.from_template` copied

    # -- reading ----------------------------------------------------------------------------------------------------
    def __repr__(self) -> str:
        return PASSES.format_formula(self)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables that the formula reads, each once, in the order in which `walk` returns their lookups."""
        by_id = {id(node.table): node.table for node in walk(self) if isinstance(node, Lookup)}
        return tuple(by_id.values())

    @cached_property
    def structures(self) -> dict[tuple[int, int], Structure]:
        """Results of `parameters.structure_of` for this formula alone, where all its other arguments are None.

        A key is (number of arguments of `structure_of`, position of this formula among them).
        """
        return {}

    @cached_property
    def rewritten(self) -> WeakKeyDictionary[Any, dict[bool, Expression | None]]:
        """What this formula became on caches of keys and values, by the `kv_cache.query_positions.Rewriting`."""
        return WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a pickle or copy. `rewritten` cannot be pickled, and is computed again."""
        return {name: value for name, value in vars(self).items() if name != "rewritten"}

    @cached_property
    def free_symbols(self) -> frozenset[str]:
        """The names of the symbols that the formula contains."""
        return frozenset(node.name for node in walk(self) if isinstance(node, Symbol))

    @cached_property
    def text(self) -> str:
        """The graph as one line of JSON, without the contents of its tables. `parse_text` parses this line."""
        return write_text(self)[0]

    def with_scores(self, scores: Expression) -> Expression:
        """Return the formula with `scores` in place of s."""
        return self.rewrite({"s": scores})

    def rewrite(
        self,
        symbols: Mapping[str, Expression] | None = None,
        lookup: Callable[[Table, Indices], Expression] | None = None,
        constant: Callable[[Constant], Expression] | None = None,
    ) -> Expression:
        """Return the formula with other expressions for some of its symbols, lookups or constants.

        Parameters
        ----------
        symbols : the new expression of each symbol that is replaced, by the name of the symbol
        lookup : a function of (table, rewritten indices) that returns the new expression of a lookup
        constant : a function of a constant that returns its new expression
        """
        symbols = symbols or {}

        def visit(node: Expression, arguments: list[Expression]) -> Expression:
            if isinstance(node, Symbol):
                return symbols.get(node.name, node)
            if isinstance(node, Apply):
                return intern(Apply(node.operator, tuple(arguments), node.kind))
            if isinstance(node, Lookup):
                indices = tuple(arguments)
                return lookup(node.table, indices) if lookup else intern(Lookup(node.table, indices))
            return constant(node) if constant and isinstance(node, Constant) else node

        return fold(visit, self)

    # -- for subclasses ---------------------------------------------------------------------------------------------
    def own_values(self) -> tuple[Any, ...]:
        """Return what distinguishes this node from others of its class with the same arguments; `intern` reads it."""
        return ()


@dataclass(frozen=True, eq=False, repr=False)
class Symbol(Expression):
    """A symbol of formulas: b, h, i, j, s, p, ln p, n or m."""

    name: str
    kind: Kind
    arguments: tuple[Expression, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _symbol, (self.name,)  # a copy is the symbol itself, because `derivative` compares nodes by identity


@dataclass(frozen=True, eq=False, repr=False)
class Constant(Expression):
    """A constant in a formula: a Python number, True or False."""

    value: bool | int | float
    kind: Kind
    arguments: tuple[Expression, ...] = ()

    def own_values(self) -> tuple[Any, ...]:
        return self.kind, repr(self.value)  # the kind tells 1 from True, and `repr` tells −0.0 from 0.0


@dataclass(frozen=True, eq=False, repr=False)
class Offset(Constant):
    """A constant that is always an argument of the kernel. Other constants are in its code if they are −1, 0 or 1.

    So one kernel serves all offsets. Two offsets with different names are different nodes, even with equal values.
    """

    name: str = ""

    def own_values(self) -> tuple[Any, ...]:
        return *super().own_values(), self.name


@dataclass(frozen=True, eq=False, repr=False)
class Parameter(Expression):
    """A number that a kernel takes as an argument instead of a constant in its code; see `parameters.Structure`."""

    slot: int
    kind: Kind
    arguments: tuple[Expression, ...] = ()

    def own_values(self) -> tuple[Any, ...]:
        return self.slot, self.kind


@dataclass(frozen=True, eq=False, repr=False)
class Apply(Expression):
    """An operator of `operators.OPERATORS`, applied to arguments."""

    operator: str
    arguments: tuple[Expression, ...]
    kind: Kind

    def own_values(self) -> tuple[Any, ...]:
        return (self.operator,)


@dataclass(frozen=True, eq=False, repr=False)
class Lookup(Expression):
    """A read of one entry of a table. The node's arguments are the indices, which are whole-number expressions."""

    table: Table
    arguments: tuple[Expression, ...]

    def own_values(self) -> tuple[Any, ...]:
        return (id(self.table),)

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        return self.table.kind


_INTERNED: dict[tuple[Any, ...], weakref.ref[Expression]] = {}


def intern(node: Expression) -> Expression:
    """Return the stored node that equals `node` in class, values, table and arguments; else store and return `node`.

    So equal formulas are one object, and a formula can be the key of a cache. The dict `_INTERNED` has weak references
    to the nodes. It needs no lock, because `dict.setdefault` is atomic. While torch.compile traces, nothing is stored.
    """
    if is_compiling():
        return node
    key = (type(node), *node.own_values(), *map(id, node.arguments))
    reference = weakref.ref(node, lambda dead: _INTERNED.pop(key, None) if _INTERNED.get(key) is dead else None)
    existing = _INTERNED.setdefault(key, reference)()
    if existing is None:  # the node that `_INTERNED` held was deleted just now
        _INTERNED[key] = reference
        return node
    return existing


def _symbol(name: str) -> Symbol:
    return SYMBOLS[name]


def where(condition: Any, yes: Any, no: Any) -> Expression:
    """Return the formula that is `yes` where the condition is true, and `no` elsewhere.

    Parameters
    ----------
    condition : formula that is a condition
    yes, no : formulas or numbers
        A read outside a table is allowed in the branch that is not taken.

    Examples
    --------
    >>> from sightline import i, j, s, where
    >>> where(i >= j, s, s - 1)
    where(i ≥ j, s, s − 1)
    """
    return apply("where", condition, yes, no)


_HAS_LIVE_NUMBERS = ContextVar("_HAS_LIVE_NUMBERS", default=False)


@contextmanager
def live_numbers() -> Iterator[None]:
    """Return a context in which a torch tensor without axes becomes the read of a table, instead of a constant.

    A formula that is kept between calls then reads the number that the tensor has at each call.
    """
    token = _HAS_LIVE_NUMBERS.set(True)
    try:
        yield
    finally:
        _HAS_LIVE_NUMBERS.reset(token)


def as_expression(value: Any) -> Expression:
    """Return a formula unchanged, and a number, or an array without axes, as a `Constant`.

    A torch tensor without axes is a `Lookup` if it requires a gradient, or in the context `live_numbers`.
    Any other object raises FormulaError.
    """
    if isinstance(value, Expression):
        return value
    if not isinstance(value, int | float):  # torch.compile cannot trace `getattr` of a number that is a symbol
        # While torch.compile traces, the value of a tensor is not known.
        is_variable = getattr(value, "requires_grad", False) or (
            hasattr(value, "requires_grad") and (is_traced(value) or _HAS_LIVE_NUMBERS.get())
        )
        if is_variable and tuple(value.shape) == ():
            return PASSES.learned_number(value)
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = _read_number(value)
    if isinstance(value, bool):
        return intern(Constant(value, "bool"))
    value = specialize(value)
    if isinstance(value, int):
        if abs(value) >= MAX_EXACT_INTEGER:
            raise FormulaError(f"the integer {value} in a formula", "between −2⁵³ and 2⁵³", "write it as a float, 1e18")
        return intern(Constant(value, "int"))
    if isinstance(value, float):
        return intern(Constant(float(value), "float"))
    if hasattr(value, "to_expression"):
        refused: NoReturn = value.to_expression()
        return refused
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise FormulaError(
        f"a {type(value).__name__}{shape} inside a formula", "formulas, numbers and tables", _suggest_operand(value)
    )


def specialize(value: Any) -> Any:
    """Return the value, with a number in place of a number that is a symbol of torch.compile.

    A guard makes torch.compile compile again for another number.
    """
    if isinstance(value, int | float) and is_compiling():
        return sys.modules["torch.fx.experimental.symbolic_shapes"].guard_scalar(value)
    return value


def _suggest_operand(value: Any) -> str:
    """Return what to write in place of an operand that is no formula, number or table."""
    name = type(value).__name__
    if callable(value) and not hasattr(value, "shape"):
        return (
            "call the function in a new function: "
            "mask=lambda b, h, q_idx, kv_idx: mask_mod(b, h, q_idx, kv_idx) & (q_idx >= kv_idx)"
        )
    if name == "BlockMask":
        return "pass mask=and_masks(block_mask.mask_mod, other_mask_mod); torch has the function and_masks"
    if isinstance(value, list | tuple | set | range):
        return "np.isin(j, [0, 4]) to test j against several numbers; sightline.table(array)[j] to read an array at j"
    indices = example_indices(len(getattr(value, "shape", "ij")))
    return f"sightline.dense(array) for a mask, True attends; sightline.table(array)[{indices}] for any array"


def example_indices(ndim: int) -> str:
    """Return indices of an array with so many axes, for the text of a cure: "i, j" for a matrix."""
    return ", ".join([*"0" * (ndim - 4), *"bhij"[-ndim:]])


def _read_number(array: Any) -> Any:
    """Return the number of an array without axes. Raise FormulaError if JAX traces the array."""
    if not is_compiling() and is_traced(array):
        raise FormulaError(
            f"a number that JAX traces, of dtype {array.dtype}, inside a formula",
            "formulas, numbers and tables; the contents of tables may be traced",
            "table(number[None])[0]",
        )
    return array.item()


def apply(operator: str, *values: Any) -> Expression:
    """Return the operator applied to formulas or numbers. Raise FormulaError for a number in place of a condition.

    As in NumPy and torch, the sum of two conditions is `or`, and their product is `and`.
    """
    arguments = tuple([value if isinstance(value, Expression) else as_expression(value) for value in values])
    kinds = tuple([argument.kind for argument in arguments])
    if kinds == ("bool", "bool"):
        operator = OPERATORS_ON_CONDITIONS.get(operator, operator)
    rule = OPERATORS[operator]
    not_bool = [k for k in rule.conditions if kinds[k] != "bool"]
    if not_bool:
        argument = arguments[not_bool[0]]
        raise FormulaError(
            f"{rule.sign} on {argument}, which is {'an int' if argument.kind == 'int' else 'a float'}",
            "conditions",
            "put every comparison in parentheses, (i >= j) & (i - j < 256), since Python's & | ~ bind tighter than >=; "
            f"to use a number as a condition write ({argument} != 0)",
        )
    return intern(Apply(operator, arguments, rule.kind(kinds)))


def walk(*roots: Expression) -> list[Expression]:
    """Return every node of the graphs of these roots once. The arguments of a node come before the node."""
    done: dict[int, Expression] = {}
    stack = list(reversed(roots))
    while stack:
        node = stack[-1]
        remaining = [argument for argument in node.arguments if id(argument) not in done]
        if [argument for argument in remaining if argument.arguments]:
            stack += reversed(remaining)
        else:  # nodes without arguments are not put on the stack
            for argument in remaining:
                done[id(argument)] = argument
            done[id(stack.pop())] = node
    return list(done.values())


def conjuncts(mask: Expression, operator: str = "logical_and") -> list[Expression]:
    """Return the conditions that `and`, or another operator, joins in a mask; another form is one condition."""
    conditions, waiting = [], [mask]
    while waiting:
        formula = waiting.pop()
        if isinstance(formula, Apply) and formula.operator == operator:
            waiting.extend(reversed(formula.arguments))
        else:
            conditions.append(formula)
    return conditions


def conjoin(mask: Any, other: Any) -> Any:
    """Return the mask that hides what either mask hides. None stands for a mask that hides nothing."""
    if mask is None or other is None:
        return other if mask is None else mask
    return mask & other


def fold(visit: Callable[[Expression, list[T]], T], formula: Expression) -> T:
    """Return the result of the formula, where the result of a node is `visit(node, results of its arguments)`."""
    results: dict[int, T] = {}
    for node in walk(formula):
        results[id(node)] = visit(node, [results[id(argument)] for argument in node.arguments])
    return results[id(formula)]


def table_lookup(change: Callable[[Table], Table]) -> Callable[[Table, Indices], Expression]:
    """Return a function for the argument `lookup` of `Expression.rewrite`: it replaces each table by `change(table)`.

    `change` is called once for each table. So two formulas that share a table still do if one function rewrites both.
    """
    changed: dict[int, Table] = {}

    def lookup(table: Table, indices: Indices) -> Expression:
        if id(table) not in changed:
            changed[id(table)] = change(table)
        return intern(Lookup(changed[id(table)], indices))

    return lookup


def node_record(node: Expression, number: dict[int, int], slot: dict[int, int]) -> list[Any]:
    """Return a node as a list for `Expression.text`. The dicts map the id of a node or a table to its position."""
    arguments = [number[id(argument)] for argument in node.arguments]
    if isinstance(node, Lookup):
        return ["lookup", slot[id(node.table)], *arguments]
    if isinstance(node, Constant):
        return ["constant", node.kind, repr(specialize(node.value))]
    if isinstance(node, Parameter):
        return ["parameter", node.slot, node.kind]
    return [node.operator, *arguments] if isinstance(node, Apply) else [cast(Symbol, node).name]


def write_text(formula: Expression) -> tuple[str, list[Table]]:
    """Return `formula.text` and `formula.tables`, computed by plain code, which torch.compile can trace."""
    nodes = walk(formula)
    number = {id(node): k for k, node in enumerate(nodes)}
    tables = list({id(node.table): node.table for node in nodes if isinstance(node, Lookup)}.values())
    slot = {id(table): k for k, table in enumerate(tables)}
    lines = []
    for node in nodes:
        words = [str(word) if isinstance(word, int) else f'"{word}"' for word in node_record(node, number, slot)]
        lines.append("[" + ",".join(words) + "]")
    return "[" + ",".join(lines) + "]", tables


def to_text(formula: Expression | None) -> tuple[str, list[Table]]:
    """Return `formula.text` and `formula.tables`; a formula that torch.compile traces does not store them."""
    if formula is None:
        return "", []
    return write_text(formula) if is_compiling() else (formula.text, list(formula.tables))


def parse_text(text: str, tables: Sequence[Table]) -> Expression:
    """Return the formula that has this `Expression.text`. It reads `tables`, in the order of `Expression.tables`."""
    return from_records(json.loads(text), tables)


def from_records(records: Sequence[Sequence[Any]], tables: Sequence[Table]) -> Expression:
    """Return the formula whose nodes have these `node_record`s."""
    nodes: list[Expression] = []
    for head, *rest in records:
        if head == "constant":
            nodes.append(intern(Constant(_CONSTANTS[rest[0]](rest[1]), rest[0])))
        elif head == "lookup":
            nodes.append(intern(Lookup(tables[rest[0]], tuple(nodes[k] for k in rest[1:]))))
        elif head in SYMBOLS:
            nodes.append(SYMBOLS[head])
        else:
            nodes.append(apply(head, *(nodes[k] for k in rest)))
    return nodes[-1]


_CONSTANTS: dict[str, Callable[[str], bool | int | float]] = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
}

SYMBOLS: dict[str, Symbol] = {name: Symbol(name, "float" if name in "sp" else "int") for name in "bhijnmsp"}
SYMBOLS["ln p"] = Symbol("ln p", "float")  # the logarithm of p; see `statistics.reduction`
OF_SCORES = frozenset(("s", "p", "ln p"))  # the symbols whose values are known only when a pair's score is computed
