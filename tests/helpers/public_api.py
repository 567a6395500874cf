"""The public names and their signatures, read from the pages of the API reference and from the sources.

    python tests/helpers/public_api.py > tests/public_api.txt

A line is a name with its parameters and their defaults. Annotations are left out. The members of a class follow the
class: those that the reference lists, or else all public ones, with those of base classes in the package.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```\{api\}\n(.*?)^```", re.MULTILINE | re.DOTALL)


def public_api(root=ROOT):
    """Return the lines of all names in the `api` blocks of docs/api, each class before its members."""
    blocks = [
        block for page in (root / "docs" / "api").glob("*.md") for block in BLOCK.findall(page.read_text("utf-8"))
    ]
    found = {}
    for block in blocks:
        names = [line for line in block.splitlines() if line and not line.startswith(":")]
        listed = re.search(r"^:members: (.*)$", block, re.MULTILINE)
        for name in names:
            found[name] = list(lines_of(root / "src", name, listed and listed[1].split()))
    return [line for name in sorted(found) for line in found[name]]


@cache
def parsed(source, module):
    """Return the statements of a module, also those under `if`, and the package where relative imports start."""
    path = source.joinpath(*module.split("."))
    is_package = path.is_dir()
    tree = ast.parse((path / "__init__.py" if is_package else path.with_suffix(".py")).read_text(encoding="utf-8"))
    nested = [child for node in tree.body if isinstance(node, ast.If) for child in node.body]
    return [*tree.body, *nested], module if is_package else module.rpartition(".")[0]


def find(source, module, name):
    """Return (module, node) of the definition of a name that a module defines or imports; None if there is none."""
    statements, package = parsed(source, module)
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and not is_overload(node):
            return module, node
        if isinstance(node, ast.ImportFrom) and node.level:
            parents = package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(source, base, alias.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [each.id for target in filter(None, targets) for each in ast.walk(target) if isinstance(each, ast.Name)]
        if name in names:
            return module, node
    return None


def lines_of(source, full, listed) -> Iterator[str]:
    """Yield the lines of one public name. `listed` has the members of a class to show; None for all public ones."""
    module, _, name = full.rpartition(".")
    found = find(source, module, name)
    assert found is not None, f"{full} has no definition"
    place, node = found
    if isinstance(node, ast.ClassDef):
        fields, members = members_of(source, place, node)
        constructor = f"({', '.join(fields.values())})" if fields else ""
        yield f"class {full}{members.pop('__init__', constructor)}"
        chosen = members if listed is None else [member for member in listed if member != "none"]
        yield from (f"{full}.{member}{members[member]}" for member in sorted(chosen))
    else:
        yield full + (parameters(node) if isinstance(node, ast.FunctionDef) else "")


def members_of(source, module, node):
    """Return the fields of a class, in the order of its constructor, and its public members: name → text.

    The members have `__init__` if the class defines it.
    """
    fields, members = {}, {}
    is_record = "NamedTuple" in map(ast.unparse, node.bases) or "dataclass" in ast.unparse(node).partition("class ")[0]
    for base in reversed(node.bases):
        found = find(source, module, ast.unparse(base).partition("[")[0])
        if found is not None and isinstance(found[1], ast.ClassDef):
            inherited = members_of(source, *found)
            fields, members = fields | inherited[0], members | inherited[1]
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and not is_overload(child):
            is_property = any(ast.unparse(each).endswith("property") for each in child.decorator_list)
            members[child.name] = ": property" if is_property else parameters(child)
        elif is_record and isinstance(child, ast.AnnAssign) and "ClassVar" not in ast.unparse(child.annotation):
            name = ast.unparse(child.target)
            fields[name] = f"{name}={ast.unparse(child.value)}" if child.value else name
    return fields, {name: text for name, text in members.items() if name == "__init__" or not name.startswith("_")}


def parameters(node):
    """Return the parameters of a function with their defaults, without annotations, `self` and `cls`."""
    given = node.args
    for each in [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]:
        if each is not None:
            each.annotation = None
    if given.args and given.args[0].arg in ("self", "cls"):
        given.args.pop(0)
    return f"({ast.unparse(given)})"


def is_overload(node):
    return any(ast.unparse(each).endswith("overload") for each in getattr(node, "decorator_list", []))


if __name__ == "__main__":
    print("\n".join(public_api()))
