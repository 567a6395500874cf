"""Layout of source and tests: no import circles, no test that imports a test, no module with a public name."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import import_graph
import sightline

SOURCE = Path(sightline.__file__).parent
TESTS = Path(__file__).parent
HELPERS = TESTS / "helpers"


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions count; imports for a type checker do not."""
    found = import_graph.described(import_graph.graph(SOURCE))
    assert not found, "\n".join(found)


def package(folder, **texts):
    """Write a package of modules with these texts."""
    folder.mkdir(parents=True)
    for name, text in {"__init__": "", **texts}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_circle_is_found(tmp_path):
    late = "def f():\n    from planted.first import f\n    return f\n"
    found = import_graph.circles(
        import_graph.graph(
            package(tmp_path / "planted", first="from . import second\n", second=late, third="import os\n")
        )
    )
    assert found == [["planted.first", "planted.second"]]


def test_a_circle_through_packages_and_import_module_is_found(tmp_path):
    folder = package(tmp_path / "planted", base="from .inner import name\n")
    package(
        folder / "inner",
        __init__="from .deep import name\n",
        deep="name = 1\nload = lambda: import_module('planted.base')\n",
    )
    found = import_graph.circles(import_graph.graph(folder))
    assert found == [["planted.base", "planted.inner", "planted.inner.deep"]]


def test_imports_for_a_type_checker_are_no_circle(tmp_path):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .first import f\nelse:\n    import math\n"
    edges = import_graph.graph(package(tmp_path / "planted", first="from .second import g\n", second=text))
    assert edges == {"planted": set(), "planted.first": {"planted.second"}, "planted.second": set()}
    assert import_graph.circles(edges) == []


def imports_of_tests(folder):
    """Return each import of a test file by another file of the folder, also in program texts for other processes."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        names = [name for text in texts for name in re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE)]
        for name in [*import_graph.imported(path, ""), *names]:
            if re.match(r"test_|conftest\b|tests\b", name):
                found.append(f"{path.relative_to(folder)} imports {name}")
    return found


def test_no_test_imports_from_another():
    assert imports_of_tests(TESTS) == []


def test_an_import_from_a_test_is_found(tmp_path):
    line = "from {} import X".format("test_one")  # written so that this file does not contain the import
    program = f'PROGRAM = """\n{line}\n"""\n'
    folder = package(tmp_path / "tests", test_one="X = 1\n", test_two=f"def f():\n    {line}\n", test_three=program)
    assert imports_of_tests(folder) == ["test_three.py imports test_one", "test_two.py imports test_one.X"]


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
    found = [name for name in import_graph.modules(SOURCE) if name.rpartition(".")[2] in sightline.__all__]
    assert not found, ", ".join(found)


def test_no_module_uses_the_cached_property_of_functools():
    """That of Python 3.11 holds a lock; see `sightline.caching`."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    assert [
        path
        for path, text in texts.items()
        if re.search(r"functools import .*\bcached_property|functools\.cached_property\(", text)
    ] == []


def test_dir_shows_the_public_names_and_nothing_else():
    assert dir(sightline) == sorted(sightline.__all__)
