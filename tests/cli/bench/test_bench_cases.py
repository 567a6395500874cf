"""Groups of cases in `sightline bench`: how cases are measured, summarised, printed and stored."""

import json

import pytest

from sightline.cli import main
from sightline.cli.bench.cases import Case, CaseContender, CaseGroup
from sightline.cli.bench.device import Cpu
from sightline.cli.bench.implementations import PreparedCall
from sightline.cli.bench.measure import Settings, run
from sightline.cli.bench.ratio_summary import summarise
from sightline.cli.bench.report import CaseResult, Entry, Finding, Report
from sightline.cli.bench_command import QUICK_WARNING
from sightline.cli.bench_tables import format_ratio


class StubCase(Case):
    """A case with two contenders whose calls do nothing or raise a given error; the given share is the checks' result.

    The case records which contenders were closed.
    """

    def __init__(self, name="stub", ours=0.5, theirs=0.5):
        self.name, self.results, self.closed = name, {"sightline": ours, "torch": theirs}, []

    def small(self):
        return self

    def contenders(self, threads):
        for name, result in self.results.items():

            def call(_, result=result):
                if isinstance(result, Exception):
                    raise result

            prepared = PreparedCall(call, lambda _: {}, close=lambda name=name: self.closed.append(name))
            check = None if result is None else lambda result=result: result
            yield CaseContender(name, name, prepared, check, is_peer=name == "torch")


def group_of(*cases, **options):
    given = {"name": "stubs", "group": "stubs", "description": "about", "packages": (), "pip": "", "peer": "torch"}
    return CaseGroup(**given | options, cases=cases)


@pytest.fixture
def settings():
    return Settings(Cpu(1), seconds=0.01, quick=True)


def test_the_contenders_of_a_case_are_measured_in_turn(settings):
    case = StubCase()
    pause = settings.device.pause
    finding = run(group_of(case), settings)
    ours, peer = finding.cases[0].entries
    assert len(ours.seconds) == len(peer.seconds) >= settings.rounds
    assert (ours.budget, peer.budget) == (0.5, 0.5)
    assert finding.failed is None
    assert sorted(case.closed) == ["sightline", "torch"]
    assert settings.device.pause == pause


def test_a_case_of_which_sightline_is_wrong_or_raises_has_no_times(settings):
    """The other cases of the group are measured."""
    first, wrong, raising = StubCase("first"), StubCase("second", ours=3.0), StubCase(ours=RuntimeError("no\nkernel"))
    finding = run(group_of(raising, wrong, first), settings)
    assert [case.failed for case in finding.cases] == [
        "sightline did not run: RuntimeError: no\nkernel",
        "sightline uses 3 times its rounding-error budget",
        None,
    ]
    assert [case.wrong for case in finding.cases] == [False, True, False]
    assert [bool(case.entries) for case in finding.cases] == [False, False, True]
    assert wrong.closed == ["sightline"]
    assert finding.failed is None
    for case in finding.cases:
        report = Report(1, 1.0, True, {}, [finding_of(case)])
        assert report.failed == bool(case.failed)


def test_a_wrong_peer_is_marked_and_a_failing_peer_has_its_error(settings):
    wrong, failing = StubCase("wrong", theirs=2.0), StubCase("failing", theirs=RuntimeError("no such operator"))
    finding = run(group_of(wrong, failing), settings)
    assert [case.entries[1].wrong for case in finding.cases] == [True, False]
    assert finding.cases[1].entries[1].skip_reason == "RuntimeError: no such operator"
    assert finding.cases[1].entries[1].seconds == []
    assert [summary.count for summary in summarise([finding])] == [1]


def test_a_result_that_depends_on_a_peers_random_numbers_is_not_checked(settings):
    finding = run(group_of(StubCase(theirs=None)), settings)
    assert finding.cases[0].entries[1].budget is None
    assert finding.cases[0].entries[1].seconds


def test_a_missing_package_is_a_refusal(settings):
    finding = run(group_of(StubCase(), packages=("torch", "no_such_package"), pip="no-such-package"), settings)
    assert finding.failed == "no_such_package not installed: pip install no-such-package"
    assert finding.refused
    assert not Report(1, 1.0, True, {}, [finding]).failed


def case_result(name, **seconds):
    return CaseResult(name, [Entry(contender, contender, list(times)) for contender, times in seconds.items()])


def finding_of(*cases, **options):
    return Finding(**{"name": "x", "description": "about", "group": "g", "peers": ("torch",)} | options, cases=cases)


def test_ratios_are_the_peers_times_over_the_others():
    first = case_result("a", sightline=[1.0, 2.0], watched=[4.0, 8.0], torch=[2.0, 4.0])
    second = case_result("b", sightline=[4.0, 4.0], torch=[2.0, 2.0])
    ours, watched = summarise([finding_of(first), finding_of(second, name="y")])
    assert (ours.count, ours.geometric_mean, ours.worst) == (2, pytest.approx(1.0), 0.5)
    assert (ours.worst_finding, ours.worst_case) == ("y", "b")
    assert (watched.contender, watched.count, watched.worst) == ("watched", 1, 0.5)


def test_an_excess_is_the_median_of_the_rounds():
    """A round that is slow for both contenders changes the medians, but not the differences."""
    assert Entry("a", "a", [3.0, 9.0, 4.0]).excess_over(Entry("b", "b", [1.0, 8.0, 2.0])) == 2.0


def test_cases_are_saved(tmp_path):
    finding = finding_of(case_result("a", sightline=[1.0, 3.0], torch=[2.0, 6.0]))
    saved = json.loads(Report(1, 1.0, True, {}, [finding]).save(tmp_path / "bench.json").read_text())
    ours, peer = saved["findings"][0]["cases"][0]["entries"]
    assert (ours["median"], ours["ratio"], peer["median"], peer["ratio"]) == (2.0, 2.0, 4.0, None)
    assert saved["groups"]["g"][0]["geometric_mean"] == pytest.approx(2.0)
    assert saved["quick"] is True


def test_cases_are_printed(capsys, monkeypatch):
    cases = [
        case_result("first", sightline=[1e-5], torch=[2e-5], empty=[4e-6]),
        case_result("second", sightline=[2e-5], torch=[1e-5]),
        CaseResult("third", failed="sightline is off", wrong=True),
    ]
    findings = [
        finding_of(*cases, name=name, peers=("torch", "empty"), subtracted="empty") for name in ("plain", "causal")
    ]
    remaining = iter(findings)
    monkeypatch.setattr("sightline.cli.bench.peaks.TRY_SECONDS", 1e-3)
    monkeypatch.setattr("sightline.cli.bench.peaks.BUFFER_BYTES", 1 << 22)
    monkeypatch.setattr("sightline.cli.bench_command.run", lambda benchmark, settings: next(remaining))
    assert main(["bench", "--quick", "--only", "forward float32 d64", "--only", "forward float32 d128"]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for row in (
        "sightline torch empty ratio beyond empty",
        "first 10 µs 20 µs 4 µs 2.00× 6 µs",
        "second 20 µs 10 µs – 0.50×",
        "third – – – –",
        "third: wrong, not reported: sightline is off",
        "geometric mean 1.00×",
        "worst 0.50×",
        "All g",
        "sightline 4 cases",
        "worst 0.50× (plain, second)",
    ):
        assert row in rows, row
    assert rows.count(QUICK_WARNING) == 2


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.00123, "0.0012×"), (0.25, "0.25×"), (1.5, "1.50×"), (12.34, "12.3×"), (None, "")]
)
def test_ratios_as_text(ratio, text):
    assert format_ratio(ratio) == text
