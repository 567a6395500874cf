"""The public names and their signatures are those of tests/public_api.txt."""

import difflib
from pathlib import Path

import pytest

from public_api import public_api

SNAPSHOT = Path(__file__).with_name("public_api.txt")
RENEW = """
The public API changed. If the change is on purpose, write the new one, and read its difference before the commit:

    python tests/helpers/public_api.py > tests/public_api.txt

List the change in CHANGELOG.md. "Versions" in CONTRIBUTING.md says which number the next version gets.
"""


def difference(expected, found):
    """Return the changed lines, and how to renew the snapshot; "" if nothing changed."""
    lines = list(difflib.unified_diff(expected, found, "tests/public_api.txt", "the sources", lineterm="", n=0))
    return "\n".join([*lines, RENEW]) if lines else ""


def test_the_public_api_is_that_of_the_snapshot():
    found = public_api()
    assert len(found) > 200
    changes = difference(SNAPSHOT.read_text(encoding="utf-8").splitlines(), found)
    if changes:
        pytest.fail(changes, pytrace=False)


SOURCES = {
    "src/package/__init__.py": "from .inner import Base, Point, function as renamed\nx, y = 1, 2\n",
    "src/package/inner.py": """
from typing import overload
@overload
def function(a: int) -> int: ...
@overload
def function(a: str) -> str: ...
def function(a, b=1, *, c: bool = False): ...
class Base:
    def __init__(self, size): ...
    def grow(self, by: int = 2): ...
    @property
    def size(self): ...
    def _hidden(self): ...
@dataclass(frozen=True)
class Point:
    x: int
    y: int = 0
    kinds: ClassVar[int] = 3
    def norm(self): ...
""",
    "docs/api/page.md": "```{api}\npackage.renamed\npackage.x\npackage.Point\n```\n"
    "```{api}\n:members: grow\npackage.Base\n```\n",
}
LINES = [
    "class package.Base(size)",
    "package.Base.grow(by=2)",
    "class package.Point(x, y=0)",
    "package.Point.norm()",
    "package.renamed(a, b=1, *, c=False)",
    "package.x",
]


@pytest.fixture
def package(tmp_path):
    """A function that writes a package in which one text is replaced by another, and returns its public API."""

    def write(old="", new="", folder="package"):
        for name, text in SOURCES.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new) if old else text)
        return public_api(tmp_path / folder)

    return write


def test_names_parameters_and_defaults_are_read(package):
    assert package() == LINES
    assert difference(LINES, package()) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [("b=1", "b=2"), ("bool = False", "bool"), ("y: int = 0", "y: int"), ("by: int", "amount: int"), ("x\n", "y\n")],
)
def test_a_change_is_shown_with_the_command_that_renews_the_snapshot(old, new, package):
    shown = difference(LINES, package(old, new, folder="changed"))
    assert "\n-" in shown
    assert "\n+" in shown
    assert "python tests/helpers/public_api.py" in shown


def test_a_name_without_a_definition_is_an_error(package):
    with pytest.raises(AssertionError, match=r"package\.Base has no definition"):
        package("class Base", "class Other", folder="changed")
