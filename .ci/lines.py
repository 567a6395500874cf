"""Print the lines of Python in each folder beside its budget, and fail if a folder has more.

The budgets are in budgets.toml. The sum of those under `lines` may only fall: a commit that gives a folder more lines
takes them from another folder, and says why. Those under `tests` are limits. The name of a folder stands for all files
below it, and a name that ends in /*.py for the files of that folder alone.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def count_lines(name: str) -> int:
    files = ROOT.glob(name if name.endswith("/*.py") else f"{name}/**/*.py")
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def find_earlier_sums() -> list[int]:
    """Return the sum of the budgets in this commit and in the one before it, as far as Git has them."""
    found = []
    for revision in ("HEAD", "HEAD~1"):
        command = ["git", "show", f"{revision}:./budgets.toml"]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found += [sum(tomllib.loads(answer.stdout)["lines"].values())] if answer.returncode == 0 else []
    return found


def main() -> int:
    tables = tomllib.loads((ROOT / "budgets.toml").read_text(encoding="utf-8"))
    budgets = tables["lines"] | tables["tests"]
    listed = {name: count_lines(name) for name in budgets}
    folders = [path.name for path in (ROOT / "src/sightline").iterdir() if any(path.rglob("*.py"))]
    found = {"src/sightline/*.py", "tests", *(f"src/sightline/{name}" for name in folders)}
    failures = [f"{name} has no budget" for name in sorted(found - budgets.keys())]
    for name, lines in listed.items():
        mark = "" if lines <= budgets[name] else "  above its budget"
        print(f"{name:32}{lines:8,} of {budgets[name]:7,}{mark}")
        failures += [f"{name} has {lines} lines"] if mark else []
    print(f"{'src':32}{count_lines('src'):8,}")
    total = sum(tables["lines"].values())
    failures += [
        f"the sum of the budgets rose from {earlier} to {total}" for earlier in find_earlier_sums() if total > earlier
    ]
    for failure in failures:
        print(f"{failure}: make room, or take lines from another folder's budget in budgets.toml", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
