"""The bench: its problems at small sizes, its counting and judging, and that it refuses to report what is wrong."""

import ctypes
import json
import statistics

import numpy as np
import pytest

import sightline
from sightline import i, j
from sightline.bench import contenders, first_call, measure, pictures
from sightline.bench.check import sample, share_of_budget
from sightline.bench.contenders import OWN, Contender, Ready
from sightline.bench.device import Cpu
from sightline.bench.measure import Settings, run
from sightline.bench.memory import can_measure, peak_memory
from sightline.bench.peaks import Peaks, has_bfloat16_dot
from sightline.bench.peers import PEERS
from sightline.bench.problems import CAUSAL, PROBLEMS, select
from sightline.bench.races import Inputs, Race, Series, Target, allowed_pairs
from sightline.bench.report import Entry, Finding, Point, Report, Verdict, amount, duration
from sightline.cli import main
from sightline.errors import ParameterError
from sightline.formula.render_array import dense_values
from sightline.problem import pose
from sightline.reference import stages_of

RACES = {race.name: race for race in PROBLEMS if isinstance(race, Race)}


def answers_of(contender, race):
    inputs = Inputs.of(race)
    ready = contender.prepare(race, inputs, 2)
    return inputs, ready.answers(ready.call(ready.start()))


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(  # what a quick run checks too is left to long runs
    "name", [pytest.param(name, marks=pytest.mark.soak if name.startswith("backward") else ()) for name in RACES]
)
def test_small_versions_are_right(name):
    """Every way of ours that the bench times, on the table's own problems, within the budget."""
    race = RACES[name].small()
    for own in ("sightline", *(other for other in race.against if other in OWN)):
        inputs, answers = answers_of(OWN[own], race)
        assert share_of_budget(OWN[own].judged_as(race), inputs, answers) <= 1


@pytest.mark.parametrize("name", [problem.name for problem in PROBLEMS if isinstance(problem, Series)])
def test_series_are_right(name):
    (series,) = (problem for problem in PROBLEMS if problem.name == name)
    points = series.small().points
    assert len({point.n for point in points}) == len(points)
    for point in (points[0], points[-1]):
        inputs, answers = answers_of(OWN["sightline"], point)
        assert share_of_budget(point, inputs, answers) <= 1


def test_names_are_unique_and_contenders_known():
    assert len({problem.name for problem in PROBLEMS}) == len(PROBLEMS)
    for race in RACES.values():
        assert set(race.against) <= set(OWN) | set(PEERS)
        assert {target.who for target in race.targets} <= {"sightline", *race.against}


def test_selecting():
    assert [p.name for p in select(PROBLEMS, ["decode*"])] == ["decode float32", "decode bfloat16"]
    assert all(p.dtype == "bfloat16" for p in select(PROBLEMS, dtype="bfloat16"))
    assert select(PROBLEMS) == PROBLEMS
    with pytest.raises(ParameterError, match="--list") as caught:
        select(PROBLEMS[3:], ["no such problem"])
    assert PROBLEMS[3].name in caught.value.cure


# -- counting ----------------------------------------------------------------------------------------------------------

MASKS = {
    "none": None,
    "causal": i >= j,
    "window": (i >= j) & (i - j < 33),
    "by head": sightline.table(np.array([3, 70, 500]))[sightline.h] > i - j,
    "padding": sightline.padding([100, 163]),
    "nothing": i < 0,
}


@pytest.mark.parametrize("mask", MASKS)
def test_allowed_pairs_are_those_of_the_dense_mask(mask):
    extent = (2, 3, 130, 163)
    dense = np.ones(extent, bool) if MASKS[mask] is None else dense_values(MASKS[mask], extent)
    assert allowed_pairs(MASKS[mask], extent) == np.broadcast_to(dense, extent).sum()


def test_flops_are_those_of_the_products():
    race = Race(name="x", H=3, n=10, m=7, d_k=4, d_v=6)
    products = {
        "S": 10 * 7 * 4,
        "O": 10 * 7 * 6,
        "dP": 10 * 7 * 6,
        "dV": 7 * 10 * 6,
        "dQ": 10 * 7 * 4,
        "dK": 7 * 10 * 4,
    }
    forward = 2 * 3 * (products["S"] + products["O"])
    backward = 2 * 3 * (products["S"] + products["dP"] + products["dV"] + products["dQ"] + products["dK"])
    counted = {
        passes: Race(name="x", H=3, n=10, m=7, d_k=4, d_v=6, passes=passes).flops
        for passes in ("forward", "backward", "forward and backward")
    }
    assert race.flops == forward
    assert counted == {"forward": forward, "backward": backward, "forward and backward": forward + backward}


def test_bytes_are_those_of_the_arrays():
    for passes in ("forward", "forward and backward"):
        race = Race(name="x", H=4, n=10, m=7, d_k=4, d_v=6, passes=passes, bias=True)
        inputs = Inputs.of(race)
        given = inputs.query.nbytes + inputs.key.nbytes + inputs.value.nbytes + inputs.bias.nbytes
        times = 1 if passes == "forward" else 2
        assert race.bytes_moved == times * given + race.output_bytes


# -- checking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_a_sample_is_part_of_the_whole(mask):
    """The definition at the sampled rows is the definition of the whole problem there."""
    from sightline.bench.check import _definition

    race = Race(name="x", H=4, n=200, m=200, d_k=8, mask=mask, dropout=0.3)
    inputs = Inputs.of(race)
    part = sample(race, inputs)
    options = {"mask": race.formula, "dropout": 0.3, "seed": part.seed}
    whole = stages_of(pose(inputs.query, inputs.key, inputs.value, **options))
    expected = whole.output[:, part.heads][:, :, part.rows]
    np.testing.assert_allclose(_definition(part).output, expected, rtol=1e-12, atol=1e-14)
    assert part.rows.size < race.n


FAULTS = {
    "output": lambda a: a | {"output": np.roll(a["output"], 1, axis=-2)},
    "nan": lambda a: a | {"output": np.where(np.arange(a["output"].shape[-1]) == 3, np.nan, a["output"])},
    "another head": lambda a: a | {"output": a["output"][:, ::-1]},
    "query": lambda a: a | {"query": a["query"] * 1.0001},
    "key": lambda a: a | {"key": a["key"] + np.roll(a["key"], 1, -2) * 1e-4},
    "value": lambda a: a | {"value": -a["value"]},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_answers_are_seen(fault):
    race = Race(name="x", H=4, n=150, d_k=16, mask=CAUSAL, passes="backward")
    inputs, answers = answers_of(OWN["sightline"], race)
    assert share_of_budget(race, inputs, answers) <= 1
    assert not share_of_budget(race, inputs, FAULTS[fault](answers)) <= 1


@pytest.mark.parametrize("name", [name for name, race in RACES.items() if race.see])
def test_wrong_statistics_are_seen(name):
    """Values of one head that are a little off, and keys that belong to another row."""
    race = RACES[name].small()
    inputs, answers = answers_of(OWN["sightline"], race)
    for statistic in race.see:
        first, *others = answers[repr(statistic)]
        off = first.copy()
        off[:, -1] *= 1.0001
        wrong = [(off, *others), *((first, np.roll(keys, 1, axis=2)) for keys in others)]
        for arrays in wrong:
            assert not share_of_budget(race, inputs, answers | {repr(statistic): arrays}) <= 1


def test_an_answer_of_another_shape_is_refused():
    race = Race(name="x", n=20, d_k=4)
    inputs, answers = answers_of(OWN["sightline"], race)
    with pytest.raises(ValueError, match="is due"):
        share_of_budget(race, inputs, {"output": answers["output"].swapaxes(1, 2)})


# -- measuring ---------------------------------------------------------------------------------------------------------

SMALL = Race(name="small", n=40, d_k=8, H=2, targets=(Target("share", 0.5), Target("faster", 1.0, "numpy")))


class Made(Contender):
    """A contender that answers as told, and counts its calls."""

    def __init__(self, name, answer, raises=None):
        self.name, self.label, self.answer, self.raises, self.calls = name, name, answer, raises, 0

    def refuses(self, race):
        return None

    def prepare(self, race, inputs, threads):
        def call(_):
            self.calls += 1
            if self.raises:
                raise self.raises
            return

        return Ready(call, lambda _: {"output": self.answer}, threads=threads)


@pytest.fixture
def right():
    race = Race(name="small", n=40, d_k=8, H=2, against=("peer",))
    _, answers = answers_of(OWN["sightline"], race)
    return race, answers["output"]


@pytest.fixture
def settings():
    device = Cpu(1)
    device.pause = 0.0
    return Settings(device, seconds=0.01, quick=True)


def test_contenders_take_turns(right, settings):
    race, output = right
    settings.peers = (Made("peer", output),)
    finding = run(race, settings)
    ours, peer = finding.entries
    assert len(ours.seconds) == len(peer.seconds) >= settings.rounds
    assert min(ours.seconds) > 0
    assert finding.failed is None
    assert peer.budget <= 1
    assert finding.best == settings.peaks.best["float32"]


def test_a_wrong_peer_is_marked_and_a_failing_one_says_why(right, settings):
    race, output = right
    settings.peers = (Made("peer", output + 1),)
    assert run(race, settings).entries[1].wrong
    settings.peers = (Made("peer", output, RuntimeError("no such\ninstruction")),)
    assert run(race, settings).entries[1].absent == "RuntimeError: no such\ninstruction"


def test_a_wrong_answer_of_ours_is_not_reported(right, settings, monkeypatch):
    race, output = right
    monkeypatch.setitem(OWN, "sightline", Made("sightline", output + 1e-3))
    finding = run(race, settings)
    assert finding.wrong
    assert "budget" in finding.failed
    assert finding.entries == []
    finding.judge((Target("faster", 1.0, "peer"),))
    assert [verdict.reached for verdict in finding.verdicts] == [None]


def test_what_cannot_run_is_said_and_no_error(right, settings, monkeypatch):
    race, output = right
    monkeypatch.setitem(OWN, "sightline", Made("sightline", output, NotImplementedError("not yet")))
    finding = run(race, settings)
    assert not finding.wrong
    assert not finding.refused
    assert "NotImplementedError: not yet" in finding.failed
    monkeypatch.setattr(Made, "refuses", lambda self, race: "no such library")
    assert run(race, settings).refused, "which is no fault"


def test_an_error_while_timing_ends_the_problem_and_not_the_run(right, settings, monkeypatch):
    race, _ = right
    series = Series(name="series", axis="n", points=(race,))

    def turn(ready, repeats):
        raise RuntimeError("illegal memory access\nthe cure")

    monkeypatch.setattr(settings.device, "turn", turn)
    monkeypatch.setattr(settings.device, "memory", lambda ready: None)
    for problem in (race, series):
        finding = run(problem, settings)
        assert finding.failed.endswith("RuntimeError: illegal memory access\nthe cure")
        assert not finding.refused


def test_short_calls_are_repeated(settings):
    made = Made("x", None)
    ready = made.prepare(None, None, 1)
    count = measure._repeats(ready, settings.device)
    assert count > 100
    made.calls = 0
    settings.device.turn(ready, count)
    assert made.calls == count + 1


def test_dropout_is_compared_where_it_can_be():
    race = RACES["forward dropout 0.1"].small()
    assert PEERS["torch"].judged_as(race) is None
    assert OWN["without dropout"].judged_as(race).dropout == 0
    inputs, answers = answers_of(OWN["without dropout"], race)
    assert not share_of_budget(race, inputs, answers) <= 1


def test_threads_are_set_for_torch():
    import torch

    before = torch.get_num_threads()
    try:
        contenders.set_threads(1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not can_measure(), reason="this system keeps no high-water mark that can be reset")
def test_peak_memory_sees_what_a_call_holds():
    size = 1 << 26

    def call(_):
        whole = np.ones(size, np.uint8)
        return whole[: size // 2].copy()

    slack = size / 64  # Linux counts a thread's pages in batches
    assert abs(peak_memory(call) - 1.5 * size) <= slack
    assert peak_memory(lambda _: None) <= slack


def test_peaks():
    """Double precision has half the lanes; more tries cannot lower the best; bfloat16 may always be widened."""
    peaks = Peaks(1)
    single, double = peaks.measure("float32", 3), peaks.measure("float64", 3)
    assert 1.2 < single / double < 3.3
    assert peaks.measure("float32", 1) >= single
    assert peaks.measure("read", 1) > 0
    assert peaks.measure("bfloat16", 1) >= single
    assert peaks.entry("float16") == "float32"


def test_the_dot_product_of_pairs_adds_up():
    """The text the bfloat16 peak is measured with computes: every turn adds two products to a lane."""
    if not has_bfloat16_dot():
        pytest.skip("no AVX-512 bfloat16")
    from sightline.bench.peaks import UNROLLED, _dots
    from sightline.cpu.runtime.compile import compile_module
    from sightline.cpu.runtime.machine import host

    chains, turns = 3, 5
    address = compile_module(_dots(chains), host(), "peak")
    ones = np.full(32, 0x3F80, np.uint16)  # 1.0
    found = np.zeros(16, np.float32)
    words = np.array([turns, ones.ctypes.data, found.ctypes.data], np.int64)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(words.ctypes.data)
    np.testing.assert_array_equal(found, chains * turns * UNROLLED * 2)


def test_first_calls():
    times = first_call.timed(16, 8, 1)
    assert set(times) == {"compiled", "from disk", "first of all"}
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in times.values())


@pytest.mark.parametrize("peer", PEERS)
def test_peers_are_right_or_say_why_not(peer):
    """Those installed, on a plain, a causal, a windowed and a backward problem; FlexAttention compiles for long."""
    contender = PEERS[peer]
    if contender.absent():
        pytest.skip(contender.absent())
    if peer == "flex":
        pytest.skip("needs a C++ compiler and seconds for each problem; `sightline bench --quick` runs it")
    names = ("forward float32 d64", "forward float32 causal n4096", "forward window 256", "backward float32 d64")
    if peer in ("dense", "mha"):
        names += tuple(name for name in RACES if name.startswith("see "))
    ran = 0
    for race in (RACES[name].small() for name in names):
        if contender.refuses(race) is None:
            inputs, answers = answers_of(contender, race)
            assert share_of_budget(race, inputs, answers) <= 1
            ran += 1
    assert ran


# -- judging and reporting ---------------------------------------------------------------------------------------------


def finding_of(ours, peer, **more):
    entries = [Entry("sightline", "Sightline", ours), Entry("torch", "torch", peer)]
    return Finding("x", "about", entries, flops=100, bytes_moved=10, peak="float32", best=200.0, **more)


def test_ratios_are_medians_of_rounds():
    """A round that was slow for both does not move the ratio, though it moves both medians."""
    finding = finding_of([1.0, 5.0, 6.0], [2.0, 10.0, 12.0])
    finding.judge((Target("faster", 2.0, "torch"), Target("faster", 2.1, "torch"), Target("share", 0.1)))
    assert [verdict.value for verdict in finding.verdicts] == [2.0, 2.0, 100 / 5.0 / 200]
    assert [verdict.reached for verdict in finding.verdicts] == [True, False, True]


def test_each_measure():
    finding = finding_of([2.0], [3.0], threads=2)
    targets = [Target("slower", 0.7, "torch"), Target("efficiency", 0.7, "torch"), Target("seconds", 2.5, "torch")]
    finding.judge([*targets, Target("faster", 1.0, "flex")])
    assert [v.value for v in finding.verdicts] == [pytest.approx(2 / 3), 0.75, 3.0, None]
    assert [v.reached for v in finding.verdicts] == [True, True, False, None]


def test_series_are_judged_by_their_ends():
    def point(n, seconds, memory):
        return Point(n, n, 8 * n, [Entry("sightline", "Sightline", [seconds], memory=memory)])

    finding = Finding("x", "about", axis="n", points=[point(10, 1.0, 10_080), point(20, 2.4, 12_160)])
    finding.judge((Target("spread", 1.15), Target("growth", 1.25)))
    spread, growth = finding.verdicts
    assert spread.value == pytest.approx(1.2)
    assert growth.value == pytest.approx(12_000 / 10_000)
    assert [spread.reached, growth.reached] == [False, True]


def test_reports_are_json(tmp_path):
    report = Report(2, 1.0, False, {"float32": 200.0}, [finding_of([1.0], [2.0])])
    report.findings[0].judge((Target("faster", 1.5, "torch"),))
    kept = json.loads(report.save(tmp_path / "deep" / "bench.json").read_text())
    (finding,) = kept["findings"]
    assert finding["verdicts"][0]["reached"] is True
    assert finding["entries"][0]["seconds"] == [1.0]
    assert finding["entries"][0]["share"] == 0.5
    assert kept["machine"]["numpy"] == np.__version__


@pytest.mark.parametrize(
    ("seconds", "words"), [(1.5, "1.5 s"), (0.0123456, "12.3 ms"), (9.96e-6, "9.96 µs"), (3e-7, "300 ns")]
)
def test_durations(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "unit", "words"), [(2.32e11, "FLOP/s", "232 GFLOP/s"), (5.8e10, "B/s", "58 GB/s"), (1536, "B", "1.5 KiB")]
)
def test_amounts(value, unit, words):
    assert amount(value, unit) == words


def test_pictures(tmp_path):
    report = Report(2, 1.0, False, {"float32": 200.0, "read": 20.0}, [finding_of([1.0], [2.0])])
    report.findings[0].judge((Target("faster", 1.5, "torch"), Target("share", 0.5)))
    points = [Point(n, n, 0, [Entry("sightline", "Sightline", [n / 10], memory=0)]) for n in (8, 16, 32)]
    report.findings.append(Finding("by length", "about", axis="n", points=points))
    drawn = pictures.draw(report, tmp_path / "figures")
    assert [path.name for path in drawn] == ["roofline.png", "ratios.png", "by-length.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


# -- the command -------------------------------------------------------------------------------------------------------


def command(capsys, *arguments):
    code = main(["bench", *arguments])
    said = capsys.readouterr()
    assert max(map(len, said.out.splitlines()), default=0) <= 80
    return code, said.out, said.err


def test_the_list_has_every_problem(capsys):
    code, out, _ = command(capsys, "--list")
    assert code == 0
    for problem in PROBLEMS:
        assert problem.name in out


def test_a_quick_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sightline.bench.peaks.SECONDS", 1e-3)
    monkeypatch.setattr("sightline.bench.peaks.BUFFER", 1 << 22)
    path = tmp_path / "bench.json"
    code, out, _ = command(capsys, "--quick", "--only", "overhead", "--only", "both bias*", "--json", str(path))
    assert code == 0
    for words in ("Peaks", "overhead", "both bias n2048", "Sightline on NumPy", "torch", "Wrote"):
        assert words in out
    kept = json.loads(path.read_text())
    ours = kept["findings"][0]["entries"][0]
    assert ours["median"] == statistics.median(ours["seconds"])
    assert ours["budget"] <= 1


def test_a_wrong_answer_makes_the_command_fail(capsys, monkeypatch):
    monkeypatch.setattr("sightline.bench.peaks.SECONDS", 1e-3)
    monkeypatch.setattr("sightline.bench.peaks.BUFFER", 1 << 22)
    wrong = Finding("overhead", "about", failed="Sightline uses 3 times its budget", wrong=True)
    monkeypatch.setattr("sightline.cli.bench_command.run", lambda problem, settings: wrong)
    code, out, _ = command(capsys, "--only", "overhead")
    assert code == 1
    assert "not reported" in out
    wrong.wrong, wrong.refused = False, True
    assert command(capsys, "--only", "overhead")[0] == 0, "a library that is not there is no fault of ours"


def test_what_was_found_is_kept_when_the_device_breaks(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sightline.bench.peaks.SECONDS", 1e-3)
    monkeypatch.setattr("sightline.bench.peaks.BUFFER", 1 << 22)
    path = tmp_path / "bench.json"

    def fails(problem, settings):
        assert path.exists() == (problem is not PROBLEMS[0])
        return Finding(problem.name, "about", failed=None if problem is PROBLEMS[0] else "RuntimeError: illegal")

    def finish(self):
        raise RuntimeError("lost")

    monkeypatch.setattr("sightline.cli.bench_command.run", fails)
    code, out, _ = command(capsys, "--quick", "--json", str(path))
    assert code == 1
    assert len(json.loads(path.read_text())["findings"]) == len(PROBLEMS)
    path.unlink()
    monkeypatch.setattr(Cpu, "finish", finish)
    code, out, _ = command(capsys, "--quick", "--json", str(path))
    assert code == 1
    assert "lost" in out
    assert [each["failed"] for each in json.loads(path.read_text())["findings"]] == [None, "RuntimeError: illegal"]


@pytest.mark.parametrize(
    "arguments", [("--only", "nothing like it"), ("--threads", "0"), ("--seconds", "-1"), ("--seconds", "nan")]
)
def test_errors_are_messages(capsys, arguments):
    code, _, err = command(capsys, *arguments)
    assert code == 2
    assert "cure:" in err


def test_verdicts_need_a_value():
    assert Verdict(Target("share", 0.5), None).reached is None
