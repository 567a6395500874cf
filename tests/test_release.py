"""What `make release` refuses, the archives that it compares, and the versions that `make test-versions` tried."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from sightline import __version__
from sightline.data import tried_versions

PROGRAMS = Path(__file__).parents[1] / ".ci"
UNTRIED = {"demo", "gpu", "gpu-test", "serve", "course", "bench", "dev", "docs"}  # extras with ranges that nothing runs


@pytest.fixture
def release(monkeypatch):
    """The module .ci/wheel/release.py."""
    monkeypatch.syspath_prepend(PROGRAMS / "wheel")
    yield importlib.import_module("release")
    del sys.modules["check"], sys.modules["release"]


@pytest.fixture
def repository(tmp_path):
    """A repository whose version 1.2.3 can be released."""
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2030-12-31\n")
    for command in ("init -q", "add .", "-c user.name=A -c user.email=a@example.org commit -q -m Begin"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    return tmp_path


def test_each_problem_is_found(release, repository):
    assert release.find_problems("1.2.3", repository) == []
    (repository / "new.py").write_text("")
    subprocess.run(["git", "tag", "v1.2.4dev"], cwd=repository, check=True)
    form, section, files, tag = release.find_problems("1.2.4dev", repository)
    assert "its form is 1.2.3" in form
    assert "rename Unreleased" in section
    assert "new.py" in files
    assert "raise __version__" in tag


@pytest.mark.parametrize("line", ["## [1.2.3]", "## [Unreleased]", "## [1.2.3] - soon", "### [1.2.3] - 2030-12-31"])
def test_a_section_without_number_or_date_is_found(line, release, repository):
    (repository / "CHANGELOG.md").write_text(f"{line}\n")
    assert "CHANGELOG.md" in release.find_problems("1.2.3", repository)[0]


def test_the_version_is_that_of_the_package(release):
    assert release.find_version() == __version__


@pytest.mark.parametrize("second", ["other bytes", "the same"])
def test_builds_that_differ_are_found(second, release, tmp_path, monkeypatch):
    archives = iter(["the same", second])

    def build(source, target):
        target.mkdir()
        (target / "archive.whl").write_text(next(archives))
        return [target / "archive.whl"]

    monkeypatch.setattr(release.check, "build", build)
    if second == "the same":
        assert [path.name for path in release.check.build_twice(tmp_path)] == ["archive.whl"]
    else:
        with pytest.raises(SystemExit, match="two builds differ"):
            release.check.build_twice(tmp_path)


REPORT = """<testsuites><testsuite>
<testcase classname="tests.kv_cache.test_kv_cache.TestAgainstLists" name="runTest" file="hypothesis/stateful.py" />
<testcase classname="tests.keras.test_keras_layer" name="test_masks[a]" time="2" />
<testcase classname="tests.keras.test_keras_layer" name="test_masks[b]"><failure message="b" /></testcase>
<testcase classname="" name="tests.jax.test_dot_product_attention"><error message="ImportError" /></testcase>
</testsuite></testsuites>"""


def test_results_are_those_of_each_package(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(PROGRAMS)
    versions, report = importlib.import_module("versions"), tmp_path / "report.xml"
    environment = versions.Environment("new", requirements=("numpy", "keras", "tensorflow-cpu", "jax"), above="newest")
    report.write_text(REPORT)
    installed = {"numpy": "2.5.5", "keras": "3.15.1", "tensorflow-cpu": "2.21.0", "jax": "0.8"}
    rows, lines = versions.read_report(environment, installed, report)
    counts = {row.package: (row.passed, row.failed, row.refused, row.seconds) for row in rows}
    assert counts == {"numpy": (1, 0, 0, 0), "keras": (1, 1, 0, 2), "tensorflow-cpu": (1, 1, 0, 2), "jax": (0, 0, 1, 0)}
    assert lines[0] == "new: keras 3.15.1, tensorflow-cpu 2.21.0: failed: tests.keras.test_keras_layer.test_masks[b]: b"
    assert "refused: tests.jax.test_dot_product_attention: jax before 0.8.1" in lines[1]


def test_both_ends_of_each_range_were_tried_and_are_on_the_page(monkeypatch):
    monkeypatch.syspath_prepend(PROGRAMS)
    versions, tried = importlib.import_module("versions"), tried_versions()
    page, extras = versions.PAGE.read_text(encoding="utf-8"), versions.PROJECT["optional-dependencies"]
    ranges = [*versions.PROJECT["dependencies"], *(each for name in extras.keys() - UNTRIED for each in extras[name])]
    for name, bound in (each.split(",")[0].split(">=") for each in ranges):
        oldest = versions.numbers(bound)
        assert any(versions.numbers(each)[: len(oldest)] == oldest for each in tried[name]), name
        assert versions.fill_ranges(page, {name: ["0.1", *tried[name]]}) != page, f"{name} has no row"
    assert versions.fill_ranges(page, tried) == page
