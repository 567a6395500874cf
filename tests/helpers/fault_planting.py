"""Plant faults: change one place in the syntax tree of a function, and let the function run the changed code."""

import __future__

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType

import pytest

KNOWN = []  # all faults of the files that pytest has imported


@dataclass(frozen=True)
class Fault:
    """A function, an expression or a statement that occurs once in it, and what the fault puts there.

    Several statements may take the place of one. "name=value" is a statement or an argument of a call. A decorated
    function stands for the function within.
    """

    function: Callable
    before: str
    after: str

    def __post_init__(self):
        KNOWN.append(self)


class Replacement(ast.NodeTransformer):
    """The replacement of each node that equals `before`. Spaces and line breaks do not count."""

    def __init__(self, before: str, after: str):
        old, new = ast.parse(before).body, ast.parse(after).body
        if all(len(part) == 1 and isinstance(part[0], ast.Expr) for part in (old, new)):
            old, new = [old[0].value], new[0].value
        (node,) = old
        self.replaced, self.count = {ast.dump(node): new}, 0
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(new[0], ast.Assign):
            argument, other = (ast.keyword(one.targets[0].id, one.value) for one in (node, new[0]))
            self.replaced[ast.dump(argument)] = other

    def visit(self, node):
        found = ast.dump(node)
        if found not in self.replaced:
            return self.generic_visit(node)
        self.count += 1
        return self.replaced[found]


def plant(faults, monkeypatch):
    """Plant one fault, or each fault of a tuple, until the monkeypatch is undone.

    The function's own code is exchanged: the fault is seen wherever the function is called, under every name.
    """
    for fault in faults if isinstance(faults, tuple) else (faults,):
        function, code = change_code(fault.function, fault.before, fault.after)
        monkeypatch.setattr(function, "__code__", code)


def change_code(function, before, after):
    """Return the function itself, without wrappers, and its code with `after` in place of `before`.

    `inspect.getsource` finds the changed source, so that a second fault can be planted and Triton can read it.
    """
    function = inspect.unwrap(getattr(function, "fn", function))  # `fn`: a kernel of Triton
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    replacement, outer = Replacement(before, after), function.__code__.co_freevars
    replacement.visit(definition)
    if replacement.count != 1:
        raise ValueError(f"this occurs {replacement.count} times in {function.__qualname__}, not once: {before}")
    definition.decorator_list = []
    if outer:  # the closure's variables, also those that the fault does not read
        definition.body.insert(0, ast.Nonlocal([*outer]))
    enclosing = ast.parse(f"def enclosing({', '.join(outer)}): pass")
    enclosing.body[0].body = [definition]
    source = ast.unparse(enclosing)
    name = f"<fault in {function.__qualname__}: {after}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    code = compile(source, name, "exec", flags, dont_inherit=True)
    for wanted in ("enclosing", function.__name__):
        (code,) = (one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == wanted)
    return function, code


def assert_found(fault, monkeypatch, check, match=None, kinds=AssertionError):
    """Raise AssertionError unless the check, with the fault planted, raises an error of these kinds that matches."""
    plant(fault, monkeypatch)
    with pytest.raises(kinds, match=match):
        check()


def make_fault_test(faults, check, match=None, kinds=AssertionError):
    """Return a test with a case for each fault, which the check finds, and one without a fault, where it passes."""

    @pytest.mark.parametrize("fault", [None, *faults])
    def test(fault, monkeypatch):
        if fault is None:
            check()
        else:
            assert_found(faults[fault], monkeypatch, check, match, kinds)

    return test
