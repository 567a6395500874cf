"""Print the lines of Python in each folder beside its budget, and fail if a folder has more.

The budgets are in budgets.toml. A commit that raises one says why.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def count_lines(place: Path) -> int:
    files = [place] if place.is_file() else place.rglob("*.py")
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> int:
    budgets = tomllib.loads((ROOT / "budgets.toml").read_text(encoding="utf-8"))["lines"]
    listed = {name: count_lines(ROOT / name) for name in budgets}
    parts = [path for folder in ("src/sightline", "tests") for path in sorted((ROOT / folder).iterdir())]
    found = {path.relative_to(ROOT).as_posix() for path in parts if path.is_dir() and any(path.rglob("*.py"))}
    failures = [f"{name} has no budget" for name in sorted(found - budgets.keys())]
    for name, lines in listed.items():
        mark = "" if lines <= budgets[name] else "  above its budget"
        print(f"{name:32}{lines:8,} of {budgets[name]:7,}{mark}")
        failures += [f"{name} has {lines} lines"] if mark else []
    print(f"{'src':32}{count_lines(ROOT / 'src'):8,}\n{'tests':32}{count_lines(ROOT / 'tests'):8,}")
    for failure in failures:
        print(f"{failure}: make room, or raise the budget in budgets.toml in a commit that says why", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
