"""The import graph of a package, read from its source, and the circles in the graph."""

import ast
from collections.abc import Iterator
from pathlib import Path


def modules(folder: Path) -> dict[str, Path]:
    """Return the paths of a package's modules by module name; the package is named after its folder."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node of the syntax tree except those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from executed(other)
        else:
            yield child
            yield from executed(child)


def imported(path: Path, package: str) -> Iterator[str]:
    """Yield the absolute names that a file imports: `a.b.c` for `import a.b.c` and for `from a.b import c`."""
    for node in executed(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            start = [".".join(parents[: len(parents) - node.level + 1])] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
            yield from (word.value for word in node.args[:1] if isinstance(word, ast.Constant))


def graph(folder: Path) -> dict[str, set[str]]:
    """Return for each module of the package in this folder the modules that it imports.

    The implicit import of a parent package does not count. Imports inside functions count; imports under
    `if TYPE_CHECKING` do not.
    """
    known = modules(folder)
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        targets = (target if target in known else target.rpartition(".")[0] for target in imported(path, package))
        found[name] = {target for target in targets if target in known and target != name}
    return found


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, each sorted, by Tarjan's algorithm."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in numbers:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], numbers[other])
        if lowest[name] == numbers[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in edges:
        if name not in numbers:
            visit(name)
    return sorted(found)


def described(edges: dict[str, set[str]]) -> list[str]:
    """Return a line for each circle: the number of modules and their imports of each other."""
    lines = []
    for circle in circles(edges):
        inner = [f"{name} -> {other}" for name in circle for other in sorted(edges[name] & set(circle))]
        lines.append(f"{len(circle)} modules: {'; '.join(inner)}")
    return lines
