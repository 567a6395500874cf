"""How `python -m benchmarks` checks, times and summarises contenders, and how it prints and stores groups of cases."""

import json

import pytest

from benchmarks.__main__ import QUICK_WARNING, main
from benchmarks.cases import Case, CaseGroup, Contender, Target, TimedCall
from benchmarks.device import CpuDevice
from benchmarks.measure import Settings, run
from benchmarks.report import Entry, Finding, Report, Row, summarise
from benchmarks.workloads import Inputs, Workload, series
from sightline.cli.timing import interleave


class Stub(Contender):
    """A contender with a given share of the budget, or an error; None for results that are not checked."""

    def __init__(self, name, share):
        self.name, self.label, self.share, self.calls, self.is_closed = name, name, share, 0, False
        self.is_peer = name == "torch"

    def reference(self, case):
        return None if self.share is None else case

    def prepare(self, case, inputs, threads):
        def call(_):
            self.calls += 1
            if isinstance(self.share, Exception):
                raise self.share

        def close():
            self.is_closed = True

        return TimedCall(call, lambda _: self.share, close=close)


class StubCase(Case):
    """A case of two contenders with the given shares."""

    description = "about"

    def __init__(self, name="stub", ours=0.5, theirs=0.5):
        self.name, self.contenders = name, (Stub("sightline", ours), Stub("torch", theirs))

    def small(self):
        return self

    def share_of_budget(self, prepared, inputs):
        return prepared.results(prepared.call(prepared.setup()))


def group_of(*cases, **options):
    return CaseGroup(**{"name": "stubs", "group": "stubs", "description": "about"} | options, cases=cases)


@pytest.fixture
def settings(fast_peaks):
    device = CpuDevice(1)
    device.pause = 0.0
    return Settings(device, seconds=0.01, quick=True)


KINDS = pytest.mark.parametrize("make", [lambda case: case, group_of], ids=["single", "group"])


@KINDS
def test_contenders_alternate(make, settings):
    case, settings.device.pause = StubCase(), 0.001
    finding = run(make(case), settings)
    ours, peer = finding.rows[0].entries
    assert len(ours.seconds) == len(peer.seconds) >= settings.rounds
    assert min(ours.seconds) > 0
    assert (ours.budget, peer.budget) == (0.5, 0.5)
    assert finding.failed is None
    assert all(contender.is_closed for contender in case.contenders)
    assert settings.device.pause == 0.001
    assert (finding.entries == finding.rows[0].entries) == (finding.group == "")


def test_a_workload_is_checked_and_compared_with_the_peak(settings):
    workload = Workload(name="small", n=40, d_k=8, H=2, baselines=("peer",))
    inputs = Inputs.of(workload)
    prepared = settings.device.variants["sightline"].prepare(workload, inputs, 1)
    output = prepared.results(prepared.call(None))["output"]
    peer = Stub("peer", {"output": output})
    peer.is_peer, settings.device.peers = True, {"peer": peer}
    finding = run(workload, settings)
    assert finding.entries[1].budget <= 1
    assert finding.peers == ("peer",)
    assert len(finding.rows[0].peaks) == len(finding.entries[0].seconds)
    assert finding.share(finding.entries[0]) > 0
    peer.share = {"output": output + 1}
    assert run(workload, settings).entries[1].wrong


@KINDS
def test_a_wrong_peer_is_marked_and_a_failing_peer_has_its_error(make, settings):
    failing = StubCase(theirs=RuntimeError("no such\noperator"))
    (wrong,), (failed,) = (run(make(case), settings).rows for case in (StubCase(theirs=2.0), failing))
    assert (wrong.entries[1].wrong, failed.entries[1].wrong) == (True, False)
    assert wrong.entries[1].seconds
    assert failed.entries[1].skip_reason == "RuntimeError: no such\noperator"
    assert failed.entries[1].seconds == []
    assert [summary.count for summary in summarise([finding_of(wrong, failed)])] == [1]


FAILURES = {
    "wrong": (3.0, "sightline uses 3 times its rounding-error budget"),
    "raising": (RuntimeError("no\nkernel"), "sightline did not run: RuntimeError: no\nkernel"),
}


@pytest.mark.parametrize("failure", FAILURES)
@KINDS
def test_no_times_are_reported_if_sightline_is_wrong_or_raises(make, failure, settings):
    """If Sightline fails, no later contender is called. The other cases of a group are measured."""
    share, message = FAILURES[failure]
    case = StubCase(ours=share)
    finding = run(make(case), settings)
    outcome = finding.rows[0] if finding.group else finding
    assert (outcome.failed, outcome.wrong, outcome.refused) == (message, failure == "wrong", False)
    assert finding.entries == []
    assert [contender.is_closed for contender in case.contenders] == [True, False]
    assert Report(1, 1.0, True, {}, [finding]).failed
    finding.evaluate((Target("faster", 1.0, "torch"),))
    assert [verdict.reached for verdict in finding.verdicts] == [None]
    both = run(group_of(case, StubCase("right")), settings)
    assert both.failed is None
    assert [bool(row.entries) for row in both.rows] == [False, True]
    assert [bool(row.failed) for row in both.rows] == [True, False]


@KINDS
def test_a_refusal_is_no_error(make, settings, monkeypatch):
    monkeypatch.setattr(Stub, "refuses", lambda self, case: "no such library")
    finding = run(make(StubCase()), settings)
    outcome = finding.rows[0] if finding.group else finding
    assert outcome.refused
    assert outcome.failed == "sightline did not run: no such library"
    assert not Report(1, 1.0, True, {}, [finding]).failed


def test_an_error_while_timing_ends_the_problem_and_not_the_run(settings, monkeypatch):
    workload = Workload(name="small", n=40, d_k=8, H=2, baselines=())

    def time_calls(prepared, repeats):
        raise RuntimeError("illegal memory access\nthe cure")

    monkeypatch.setattr(settings.device, "time_calls", time_calls)
    monkeypatch.setattr(settings.device, "memory", lambda prepared: None)
    for benchmark in (workload, series("series", "n", points=(workload, workload)), group_of(workload)):
        finding = run(benchmark, settings)
        outcome = finding.rows[0] if finding.group else finding
        assert outcome.failed.endswith("RuntimeError: illegal memory access\nthe cure")
        assert not outcome.refused


def test_a_result_that_depends_on_a_peers_random_numbers_is_not_checked(settings):
    finding = run(StubCase(theirs=None), settings)
    assert finding.entries[1].budget is None
    assert finding.entries[1].seconds


def test_a_missing_package_is_a_refusal(settings, monkeypatch):
    monkeypatch.setattr(Stub, "packages", ("no_such_package",))
    finding = run(group_of(StubCase()), settings)
    assert finding.failed == "not installed: pip install "
    assert finding.refused
    assert not Report(1, 1.0, True, {}, [finding]).failed


def test_short_calls_are_repeated(settings):
    contender = Stub("x", None)
    prepared = contender.prepare(None, None, 1)
    counts = []

    def turn(count):
        counts.append(count)
        return settings.device.time_calls(prepared, count)

    interleave({"x": turn}, 1)
    assert counts[-1] > 100
    contender.calls = 0
    turn(counts[-1])
    assert contender.calls == counts[-1] + 1


def row_of(name, **seconds):
    return Row(name, [Entry(contender, contender, list(times)) for contender, times in seconds.items()])


def finding_of(*rows, **options):
    return Finding(**{"name": "x", "description": "about", "group": "g", "peers": ("torch",)} | options, rows=rows)


def test_ratios_are_the_peers_times_over_the_others():
    first = row_of("a", sightline=[1.0, 2.0], watched=[4.0, 8.0], torch=[2.0, 4.0])
    second = row_of("b", sightline=[4.0, 4.0], torch=[2.0, 2.0])
    ours, watched = summarise([finding_of(first), finding_of(second, name="y")])
    assert (ours.count, ours.geometric_mean, ours.worst) == (2, pytest.approx(1.0), 0.5)
    assert (ours.worst_finding, ours.worst_case) == ("y", "b")
    assert (watched.contender, watched.count, watched.worst) == ("watched", 1, 0.5)


def test_cases_are_saved(tmp_path):
    finding = finding_of(row_of("a", sightline=[1.0, 3.0], torch=[2.0, 6.0]))
    saved = json.loads(Report(1, 1.0, True, {}, [finding]).save(tmp_path / "bench.json").read_text())
    ours, peer = saved["findings"][0]["rows"][0]["entries"]
    assert (ours["median"], ours["ratio"], peer["median"], peer["ratio"]) == (2.0, 2.0, 4.0, None)
    assert saved["groups"]["g"][0]["geometric_mean"] == pytest.approx(2.0)
    assert saved["quick"] is True


@pytest.mark.usefixtures("fast_peaks")
def test_cases_are_printed(capsys, monkeypatch):
    cases = [
        row_of("first", sightline=[1e-5], torch=[2e-5], empty=[4e-6]),
        row_of("second", sightline=[2e-5], torch=[1e-5]),
        Row("third", failed="sightline is off", wrong=True),
    ]
    findings = [finding_of(*cases, name=name, peers=("torch", "empty"), beside="empty") for name in ("plain", "causal")]
    remaining = iter(findings)
    monkeypatch.setattr("benchmarks.__main__.run", lambda benchmark, settings: next(remaining))
    assert main(["--quick", "--only", "forward float32 d64", "--only", "forward float32 d128"]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for row in (
        "sightline torch empty ratio over empty",
        "first 10 µs 20 µs 4 µs 2.00× 2.50×",
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
