"""Print the lines of Python in each folder beside its budget, and fail if a folder has more.

The budgets are in budgets.toml. A commit that raises one says why. The name of a folder stands for all files below it,
and a name that ends in /*.py for the files of that folder alone.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def count_lines(name: str) -> int:
    files = ROOT.glob(name if name.endswith("/*.py") else f"{name}/**/*.py")
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> int:
    budgets = tomllib.loads((ROOT / "budgets.toml").read_text(encoding="utf-8"))["lines"]
    listed = {name: count_lines(name) for name in budgets}
    found = {"src/sightline/*.py", "tests/*.py"}
    for folder in ("src/sightline", "tests"):
        found |= {f"{folder}/{path.name}" for path in (ROOT / folder).iterdir() if any(path.rglob("*.py"))}
    failures = [f"{name} has no budget" for name in sorted(found - budgets.keys())]
    for name, lines in listed.items():
        mark = "" if lines <= budgets[name] else "  above its budget"
        print(f"{name:32}{lines:8,} of {budgets[name]:7,}{mark}")
        failures += [f"{name} has {lines} lines"] if mark else []
    print(f"{'src':32}{count_lines('src'):8,}\n{'tests':32}{count_lines('tests'):8,}")
    for failure in failures:
        print(f"{failure}: make room, or raise the budget in budgets.toml in a commit that says why", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
