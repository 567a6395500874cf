"""Prepare a release: check the repository, build and verify the archives, and print the commands that publish them.

`make release` runs this program after `make check`. It publishes nothing, and changes nothing but the folder `dist`.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from pathlib import Path

import check

DIST = check.ROOT / "dist"


def main() -> None:
    version = find_version()
    if problems := list(find_problems(version)):
        sys.exit("no release yet:\n" + "\n".join(f"- {problem}" for problem in problems))
    shutil.rmtree(DIST, ignore_errors=True)
    check.main(DIST)
    print(f"\nThe archives of version {version}:")
    for path in sorted(DIST.iterdir()):
        print(f"  {hashlib.sha256(path.read_bytes()).hexdigest()}  dist/{path.name}")
    print(
        "\nWhat remains, after `make test-all` has passed on this commit:\n"
        f"  git tag --annotate v{version} --message 'Sightline {version}'\n"
        f"  git push origin v{version}\n"
        "  python -m twine upload dist/*"
    )


def find_version() -> str:
    """Return `__version__` of the package."""
    text = (check.SOURCE / "sightline" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def find_problems(version: str, root: Path = check.ROOT) -> list[str]:
    """Return what must change before this version can be released, with the cure of each problem."""
    problems = []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        problems.append(f"__version__ is {version}; its form is 1.2.3 or 1.2.3rc1")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        problems.append(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'; rename Unreleased")
    if status := check.git("status", "--porcelain", root=root):
        problems.append(f"files are not committed:\n{status.rstrip()}")
    if check.git("tag", "--list", f"v{version}", root=root):
        problems.append(f"the tag v{version} exists; raise __version__")
    return problems


if __name__ == "__main__":
    main()
