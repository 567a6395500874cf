"""Run tests with the oldest and the newest version of each package, and print a table. `make test-versions` runs this.

    python .ci/versions.py [--folder FOLDER] [--newest PYTHON] [--write] [ENVIRONMENT ...]

versions.toml lists the environments and their tests, pyproject.toml the ranges of versions. FOLDER receives the
environments. PYTHON is the interpreter of those with the newest versions. `--write` writes the versions to
src/sightline/data/tried_versions.toml and to the table of docs/installation.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRIED = ROOT / "src" / "sightline" / "data" / "tried_versions.toml"
PAGE = ROOT / "docs" / "installation.md"
SETTINGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FIND_VERSIONS = """
import json, sys
from importlib.metadata import distributions
found = {}
for each in distributions():
    found.setdefault(each.name.lower().replace("_", "-"), each.version.partition("+")[0])
print(json.dumps(found | {"python": sys.version.split()[0]}))
"""


@dataclass(frozen=True)
class Environment:
    """One environment: the packages that it adds to the one `above` which it stands, and the tests that it runs."""

    name: str
    extras: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    oldest: bool = False
    above: str | None = None
    without: tuple[str, ...] = ()  # packages of the environment below that this one cannot import
    variables: tuple[tuple[str, str], ...] = ()

    def find_requirements(self) -> list[str]:
        """Return what pip installs. For the oldest versions, a range such as `numpy>=2.0` becomes `numpy==2.0`."""
        extras = PROJECT["optional-dependencies"]
        declared = [] if self.above else PROJECT["dependencies"]
        declared = [*declared, *(requirement for extra in self.extras for requirement in extras[extra])]
        pattern = r"(.+?)>=([\d.]+).*"
        used = [each for each in declared if package(each) not in SETTINGS["tools"]]
        return [*self.requirements, *(re.sub(pattern, r"\1==\2", each) if self.oldest else each for each in used)]

    def tests(self) -> dict[str, list[str]]:
        """Return the tests by package."""
        packages = map(package, self.find_requirements())
        return {name: SETTINGS["tests"][name] for name in dict.fromkeys(packages) if name in SETTINGS["tests"]}


@dataclass(frozen=True)
class Row:
    """The tests of one package in one environment."""

    environment: str
    package: str
    version: str
    passed: int
    failed: int
    refused: int
    seconds: float


def package(requirement: str) -> str:
    """Return the name in a requirement."""
    return re.match(r"[\w-]+", requirement)[0]


def list_environments() -> list[Environment]:
    """Return the environments of versions.toml, each after the one that it is above."""
    listed = [
        Environment(**{name: tuple(x.items()) if isinstance(x, dict) else x for name, x in entry.items()})
        for entry in SETTINGS["environments"]
    ]
    return listed + [
        Environment(f"{name} {version}", requirements=(f"{name}=={version}.*",), above="newest")
        for name, versions in SETTINGS["between"].items()
        for version in versions
    ]


def create(environment: Environment, folder: Path, newest: str) -> Path:
    """Create an environment, unless an earlier run has done so, and return its interpreter."""
    path = folder / environment.name.replace(" ", "-")
    python = path / "bin" / "python"
    requirements = environment.find_requirements()
    done = path / "requirements.json"
    if done.exists() and json.loads(done.read_text(encoding="utf-8")) == requirements:
        return python
    lower = environment.oldest or (environment.above or "").startswith("oldest")
    run(sys.executable if lower else newest, "-m", "venv", "--clear", str(path))
    if environment.above:  # the packages of the other environment follow those of this one
        [packages] = path.glob("lib/python*/site-packages")
        below = folder / environment.above / packages.relative_to(path)
        hide = f"import sys; sys.modules.update(dict.fromkeys({environment.without!r}))"
        lines = f"import site; site.addsitedir({str(below)!r})\n{hide}\n"
        (packages / "below.pth").write_text(lines, encoding="utf-8")
    else:
        requirements = [*requirements, *SETTINGS["tools"], "--editable", str(ROOT)]
    run(str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile", *requirements)
    done.write_text(json.dumps(environment.find_requirements()), encoding="utf-8")
    return python


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository. Its environment variables do not name other folders of packages."""
    variables = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "KERAS_BACKEND")}
    variables |= options.pop("variables", {})
    return subprocess.run(command, cwd=ROOT, env=variables, **{"check": True, "text": True, **options})


def run_tests(environment: Environment, python: Path) -> tuple[list[Row], list[str]]:
    """Run an environment's tests. Return the results, and a line for each failed or refused test."""
    report = python.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    paths = dict.fromkeys(path for paths in environment.tests().values() for path in paths)
    options = ["-n", "2", "-W", "default", "--continue-on-collection-errors", f"--junitxml={report}"]
    command = [str(python), "-m", "pytest", *options, *paths]
    result = run(*command, variables=dict(environment.variables), check=False, capture_output=True)
    if result.returncode not in (0, 1) or not report.exists():  # an error of pytest itself; 1 stands for failed tests
        sys.exit(f"{environment.name}: the tests did not run\n{result.stdout[-4000:]}{result.stderr[-4000:]}")
    versions = json.loads(run(str(python), "-c", FIND_VERSIONS, capture_output=True).stdout)
    return read_report(environment, versions, report)


def read_report(environment: Environment, versions: dict[str, str], report: Path) -> tuple[list[Row], list[str]]:
    """Return the results of each package in a report of pytest, and a line for each failed or refused test.

    A test counts for each package that lists its file.
    """
    modules = {
        name: tuple(f"{path.removesuffix('.py').replace('/', '.')}." for path in paths)
        for name, paths in environment.tests().items()
    }
    counts: dict[str, Counter[str]] = {name: Counter() for name in modules}
    lines = []
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('classname')}.{case.get('name')}".strip(".")  # no class name: a file that was not imported
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if problem is None else "refused" if problem.tag == "skipped" else "failed"
        limit = None if problem is None else find_limit(versions, test)
        outcome = "refused" if limit else outcome
        packages = [name for name in modules if f"{test}.".startswith(modules[name])]
        for name in packages:
            counts[name] += Counter({outcome: 1, "seconds": float(case.get("time", 0))})
        if problem is not None:
            reason = limit or problem.get("message", "").split("\n")[0]
            used = ", ".join(f"{name} {versions[name]}" for name in packages)
            lines.append(f"{environment.name}: {used}: {outcome}: {test}: {reason}"[:250])
    names = ("passed", "failed", "refused", "seconds")
    return [Row(environment.name, each, versions[each], *(counts[each][k] for k in names)) for each in modules], lines


def find_limit(versions: dict[str, str], test: str) -> str | None:
    """Return why a test cannot pass with these versions, or None if versions.toml does not say so."""
    for limit in SETTINGS["limits"]:
        is_older = numbers(versions.get(limit["package"], limit["before"])) < numbers(limit["before"])
        if is_older and re.search(limit["tests"], test):
            return f"{limit['package']} before {limit['before']}: {limit['reason']}"
    return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers in a version."""
    return tuple(map(int, re.findall(r"\d+", version)))


def as_table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| environment | package | version | passed | failed | refused | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (row.environment, row.package, row.version, row.passed, row.failed, row.refused, round(row.seconds))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def find_tried(rows: list[Row]) -> dict[str, list[str]]:
    """Return the versions of each package whose tests did not fail, oldest first."""
    tried: dict[str, set[str]] = {name: set() for name in SETTINGS["tests"]}
    for row in rows:
        tried[row.package] |= set() if row.failed else {row.version}
    return {name: sorted(found, key=numbers) for name, found in tried.items() if found}


def fill_ranges(page: str, tried: dict[str, list[str]]) -> str:
    """Return the page with the oldest and newest tried version and the declared range in the row of each package."""
    extras = PROJECT["optional-dependencies"].values()
    requirements = [each for group in (PROJECT["dependencies"], *extras) for each in group]
    declared = {package(each): each.removeprefix(package(each)) for each in reversed(requirements)}

    def fill(row: re.Match[str]) -> str:
        name = row[1].lower().replace("_", "-")
        found = tried.get(name)
        return f"| {row[1]} | {found[0]} | {found[-1]} | `{declared[name]}` |" if found else row[0]

    return re.sub(r"^\| ([\w-]+) \|.*?\|.*?\|.*?\|", fill, page, flags=re.MULTILINE)


def write(rows: list[Row]) -> None:
    """Write the versions that were tried to the package and to the page."""
    tried = find_tried(rows)
    head = "# Written by `make test-versions`: the versions of each package that were tried, oldest first."
    lines = [f"{name} = {json.dumps(found)}" for name, found in tried.items()]
    TRIED.write_text("\n".join([head, *lines, ""]), encoding="utf-8")
    PAGE.write_text(fill_ranges(PAGE.read_text(encoding="utf-8"), tried), encoding="utf-8")


def main(folder: Path, newest: str, names: list[str], write_results: bool) -> int:
    """Run the environments called `names`, or all of them, and return 1 if a test failed.

    The printed table also has the results of earlier runs in the same `folder`.
    """
    environments = list_environments()
    chosen = [each for each in environments if not names or each.name in names]
    needed = {each.above for each in chosen} | {each.name for each in chosen}
    rows: list[Row] = []
    for environment in environments:
        if environment.name in needed:
            python = create(environment, folder.resolve(), newest)
        results = folder / f"{environment.name}.json"
        if environment in chosen:
            found, lines = run_tests(environment, python)
            print("\n".join([as_table(found), *lines, ""]), flush=True)
            results.write_text(json.dumps([asdict(row) for row in found]), encoding="utf-8")
        if results.exists():
            rows += [Row(**row) for row in json.loads(results.read_text(encoding="utf-8"))]
    print(as_table(rows))
    if write_results:
        write(rows)
    return any(row.failed for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help="default: all environments of versions.toml")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="for the environments")
    parser.add_argument("--newest", default=sys.executable, metavar="PYTHON", help="for the newest versions")
    parser.add_argument("--write", action="store_true", dest="write_results", help="write the page and the versions")
    sys.exit(main(**vars(parser.parse_args())))
