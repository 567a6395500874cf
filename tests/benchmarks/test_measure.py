"""How `python -m benchmarks` checks and times contenders, and what it prints of their measurements."""

from dataclasses import dataclass, field, replace

import pytest

from benchmarks.__main__ import main
from benchmarks.core import Call, Contender, Measurement, Problem
from benchmarks.measure import QUICK_ROUNDS, Cpu, measure
from benchmarks.report import notes_of, ratios_of, summarise, table_of
from sightline.cli.console import make_console


@dataclass
class Stub:
    """A library with a given share of the budget, or an error."""

    share: object
    closed: bool = False

    def prepare(self, problem, inputs, threads):
        def run(_):
            if isinstance(self.share, Exception):
                raise self.share

        def close():
            self.closed = True

        return Call(run, lambda _: self.share, close=close)


@dataclass(frozen=True, kw_only=True)
class StubProblem(Problem):
    name: str = "stub"
    stubs: list = field(default_factory=list, hash=False)

    def error(self, call, inputs):
        return call.results(None)


def problem_of(ours=0.5, theirs=0.5, **options):
    stubs = [Stub(ours), Stub(theirs)]
    contenders = (
        Contender("Sightline", stubs[0].prepare, is_ours=True, lacks=("wings",)),
        Contender("torch", stubs[1].prepare),
    )
    return StubProblem(contenders=contenders, stubs=stubs, **options)


def run(problem, device=None):
    device = device or Cpu(1)
    device.pause = 0.0
    return measure(problem, device, 0.01, is_quick=True)


@pytest.mark.parametrize("table", ["", "stubs"])
def test_contenders_alternate(table):
    problem = problem_of(table=table)
    ours, peer = run(problem)
    assert len(ours.seconds) == len(peer.seconds) >= QUICK_ROUNDS
    assert min(ours.seconds) > 0
    assert (ours.error, peer.error) == (0.5, 0.5)
    assert all(stub.closed for stub in problem.stubs)


def test_a_wrong_peer_is_marked_and_a_failing_peer_has_its_error():
    wrong, failed = (run(problem_of(theirs=share))[1] for share in (2.0, RuntimeError("no such\noperator")))
    assert (wrong.is_wrong, failed.is_wrong) == (True, False)
    assert wrong.seconds
    assert failed.reason == "RuntimeError: no such\noperator"
    assert failed.seconds == []
    assert not failed.has_failed


@pytest.mark.parametrize("share", [3.0, float("nan"), RuntimeError("no\nkernel")])
def test_no_times_are_reported_if_sightline_is_wrong_or_raises(share):
    """If Sightline fails, no later contender is called."""
    problem = problem_of(ours=share)
    ours, peer = run(problem)
    assert ours.has_failed
    assert ours.reason.endswith("no\nkernel" if isinstance(share, Exception) else "budget of rounding errors")
    assert ours.seconds == peer.seconds == []
    assert [stub.closed for stub in problem.stubs] == [True, False]


def test_a_refusal_is_no_error(monkeypatch):
    monkeypatch.setattr(StubProblem, "features", ("wings",))
    ours, peer = run(problem_of())
    assert (ours.reason, ours.has_failed) == ("no wings", False)
    assert peer.seconds == []


def test_an_error_while_timing_ends_the_problem_and_not_the_run():
    class Broken(Cpu):
        def time(self, call, repeats):
            raise RuntimeError("illegal memory access\nthe cure")

    ours, _ = run(problem_of(), Broken(1))
    assert ours.has_failed
    assert ours.reason == "RuntimeError: illegal memory access\nthe cure"


def test_a_result_that_depends_on_a_peers_random_numbers_is_not_checked():
    ours, peer = run(problem_of(theirs=7.0, dropout=0.1))
    assert (ours.error, peer.error) == (0.5, None)
    assert peer.seconds


def test_a_contender_may_measure_itself():
    contender = Contender("peak", lambda *_: Call(seconds=lambda: 7.0), is_ours=True)
    scaled = Contender("half", lambda *_: Call(factor=1e6), is_checked=False)
    own, half = run(replace(problem_of(), contenders=(contender, scaled)))
    assert set(own.seconds) == {7.0}
    assert min(half.seconds) > 1e-3


# -- the report -------------------------------------------------------------------------------------------------------

OURS, WATCHED, PEER, OTHER = (
    Contender(name, None, is_ours=name in ("Sightline", "watched"))
    for name in ("Sightline", "watched", "torch", "other")
)


def row_of(name, contenders=(OURS, WATCHED, PEER, OTHER), options=None, **seconds):
    found = [Measurement(each.name, each.is_ours, seconds.get(each.name, [])) for each in contenders]
    return Problem(name=name, contenders=contenders, **({"table": "t"} | (options or {}))), found


def test_ratios_are_medians_of_rounds():
    """A round that is slow for both contenders changes their medians, but not their ratio."""
    row = row_of("x", Sightline=[1.0, 5.0, 6.0], torch=[2.0, 10.0, 12.0])
    assert ratios_of(row) == {"ratio": 2.0}


def test_ratios_are_the_peers_times_over_the_others():
    first = row_of("a", Sightline=[1.0, 2.0], watched=[4.0, 8.0], torch=[2.0, 4.0])
    second = row_of("b", Sightline=[4.0, 4.0], torch=[2.0, 2.0])
    assert summarise([first, second]) == {
        "ratio": (pytest.approx(1.0), 0.5, "t, b"),
        "watched ratio": (0.5, 0.5, "t, a"),
    }


def lines(capsys, table):
    make_console().print(table)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_table_of_several_problems(capsys):
    options = {"options": {"beside": OTHER}}
    first = row_of("first", Sightline=[1e-5], torch=[2e-5], other=[4e-6], **options)
    second = row_of("second", Sightline=[2e-5], torch=[1e-5], **options)
    assert lines(capsys, table_of([first, second])) == [
        "Sightline watched torch other ratio over other",
        "first 10 µs – 20 µs 4 µs 2.00× 2.50×",
        "second 20 µs – 10 µs – 0.50×",
        "geometric mean 1.00×",
        "worst 0.50×",
    ]


def test_a_table_of_one_problem_has_its_targets(capsys):
    row = row_of(
        "x", Sightline=[1.0, 3.0], torch=[2.0, 6.0], options={"table": "", "targets": {"torch": 1.9, "other": 3}}
    )
    assert lines(capsys, table_of([row])) == [
        "time fastest ratio target",
        "Sightline 2 s 1 s 1.00×",
        "torch 4 s 2 s 2.00× ≥ 1.9× ✓",
    ]


def test_notes_say_what_to_distrust():
    row = row_of("x", Sightline=[1.0, 1.0, 1.0], torch=[2.0, 9.0, 9.0])
    row[1][2].error, row[1][3].reason = 3.0, "no wings\nat all"
    assert notes_of([row, row]) == [
        "torch: wrong, 3 times the budget of rounding errors",
        "other: no wings",
        "x: this machine is busy, distrust the ratio of torch",
    ]


def test_a_summary_of_a_group_is_printed(capsys, monkeypatch):
    seconds = iter([1.0, 2.0])

    def measure(problem, *_):
        return row_of(problem.name, Sightline=[next(seconds)], torch=[2.0])[1]

    problems = {"cpu": [row_of(name, options={"group": "g"})[0] for name in ("a", "b")]}
    monkeypatch.setattr("benchmarks.__main__.measure", measure)
    monkeypatch.setattr("benchmarks.__main__.PROBLEMS", problems)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "All g" in out
    assert "ratio: geometric mean 1.41×, worst 1.00× (t, b)" in out
