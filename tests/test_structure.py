"""Layout of source and tests: no import circles, no test that imports a test, no name that stands for two things."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import sightline

SOURCE = Path(sightline.__file__).parent
TESTS = Path(__file__).parent
HELPERS = TESTS / "helpers"
TYPE_NAME = re.compile(r"^(?: *class (?=\w+[(:])|(?=[A-Z]\w*[a-z]\w* = (?!TypeVar)))(\w+)", re.MULTILINE)
PRIVATE_IMPORT = re.compile(r"^ *from \.[\w.]* import (?:\([^)]*|[^(\n]*)\b_[a-z]", re.MULTILINE)


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
        is_check = isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for kept in child.orelse if is_check else [child]:
            yield kept
            yield from executed(kept)


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


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, the first one twice; nothing if there is no circle."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions count; imports for a type checker do not."""
    found = circle(graph(SOURCE))
    assert not found, " -> ".join(found)


def package(folder, **texts):
    """Write a package of modules with these texts."""
    folder.mkdir(parents=True)
    for name, text in {"__init__": "", **texts}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_circle_is_found(tmp_path):
    late = "def f():\n    from planted.first import f\n    return f\n"
    folder = package(tmp_path / "planted", first="from . import second\n", second=late, third="import os\n")
    assert set(circle(graph(folder))) == {"planted.first", "planted.second"}


def test_a_circle_through_packages_and_import_module_is_found(tmp_path):
    folder = package(tmp_path / "planted", base="from .inner import name\n")
    deep = "name = 1\nload = lambda: import_module('planted.base')\n"
    package(folder / "inner", __init__="from .deep import name\n", deep=deep)
    assert set(circle(graph(folder))) == {"planted.base", "planted.inner", "planted.inner.deep"}


def test_imports_for_a_type_checker_are_no_circle(tmp_path):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .first import f\nelse:\n    import math\n"
    edges = graph(package(tmp_path / "planted", first="from .second import g\n", second=text))
    assert edges == {"planted": set(), "planted.first": {"planted.second"}, "planted.second": set()}
    assert circle(edges) == []


def imports_of_tests(folder):
    """Return each import of a test file by another file of the folder, also in program texts for other processes."""
    start = r"""(?:^|["']|\\n)[ \t]*(?:from|import) +|import_module\(["']"""
    line = re.compile(rf"(?:{start})((?:test_|conftest\b|tests\b)\w*)", re.MULTILINE)
    return [
        f"{path.relative_to(folder)} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        for name in line.findall(path.read_text(encoding="utf-8"))
    ]


def test_no_test_imports_from_another():
    assert imports_of_tests(TESTS) == []


def test_an_import_from_a_test_is_found(tmp_path):
    line = "from {} import X".format("test_one")  # written so that this file does not contain the import
    program = f'PROGRAM = """\n{line}\n"""\n'
    folder = package(tmp_path / "tests", test_one="X = 1\n", test_two=f"def f():\n    {line}\n", test_three=program)
    assert imports_of_tests(folder) == ["test_three.py imports test_one", "test_two.py imports test_one"]


def test_names_of_test_files_and_helpers_are_unique():
    names = [path.stem for path in TESTS.rglob("*.py") if path.stem != "conftest"]
    assert sorted(names) == sorted(set(names))


def test_no_folder_of_tests_is_importable():
    """tests/keras would be imported as keras if keras is not installed."""
    for folder in TESTS.rglob("*"):
        if folder.is_dir() and folder != HELPERS and folder.name.isidentifier() and folder.name != "__pycache__":
            spec = find_spec(folder.name)
            places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or [])]
            assert not [place for place in places if Path(place).is_relative_to(TESTS)], folder


def test_no_module_has_the_name_of_a_public_function():
    """`sightline.attention` was once both a function and a module."""
    found = [name for name in modules(SOURCE) if name.rpartition(".")[2] in sightline.__all__]
    assert not found, ", ".join(found)


def shared_class_names(folder):
    """Return the public names that several classes or types of the folder have."""
    names = [name for path in folder.rglob("*.py") for name in TYPE_NAME.findall(path.read_text(encoding="utf-8"))]
    return {name for name in names if names.count(name) > 1 and not name.startswith("_")}


def test_no_two_classes_share_a_public_name(tmp_path):
    """Two classes are layers for torch and for Keras, one is a callback for three trainers."""
    assert shared_class_names(SOURCE) == {"ScaledDotProductAttention", "MultiHeadAttention", "MonitorCallback"}
    text = "class A: ...\nclass _B: ...\nLengths = tuple[int, ...]\n"
    assert shared_class_names(package(tmp_path / "planted", one=text, two=text)) == {"A", "Lengths"}


def test_no_module_imports_a_private_name_of_another():
    assert all(PRIVATE_IMPORT.search(text) for text in ("from .a import b, _c", "    from ..a import (\n  _c,\n)"))
    assert not [path for path in SOURCE.rglob("*.py") if PRIVATE_IMPORT.search(path.read_text(encoding="utf-8"))]


def test_dir_shows_the_public_names_and_the_submodules():
    """The submodules are loaded when they are accessed; completion offers them all the same."""
    functions = """
        AttentionMonitor alibi alibi_slopes attention attention_from_disk attention_tangent attention_vjp bias blocks
        causal dense documents entropy explain lse mass max max_score merge min padding pooled prefix received
        relative_bias scores softcap sum table threads tiles top_k watch weighted_sum weights where window
    """
    modules = "data equinox eviction flax jax keras lightning positions torch transformers view"
    expected = [*"bhijspnm", "OVERVIEW", "Expression", "KVCache", "Table", *functions.split(), *modules.split()]
    assert dir(sightline) == sorted(expected)
