"""The benchmarks: problems at small sizes, counts and verdicts, and that wrong results are not reported."""

import ctypes
import json
import statistics
from dataclasses import replace

import numpy as np
import pytest

import sightline
from benchmarks import contenders, cuda_problems, figures
from benchmarks.__main__ import main
from benchmarks.cases import Target
from benchmarks.check import sample, share_of_budget
from benchmarks.contenders import VARIANTS
from benchmarks.cpu_problems import BENCHMARKS, CAUSAL, select, window
from benchmarks.device import CpuDevice
from benchmarks.host_cases import FirstCall
from benchmarks.peak_memory import can_measure, peak_memory
from benchmarks.peaks import Peaks, kernel_instructions
from benchmarks.peers import PEERS
from benchmarks.ragged import RAGGED
from benchmarks.report import (
    Entry,
    Finding,
    Report,
    Row,
    format_amount,
    format_duration,
    format_ratio,
)
from benchmarks.workloads import Inputs, Mask, Workload
from sightline import i, j
from sightline.cpu.runtime.machine import missing_features, named_machine, native_machine
from sightline.errors import ParameterError
from sightline.formula.evaluate_array import evaluate_dense
from sightline.problem.problem import make_problem
from sightline.reference.definition import compute_stages

WORKLOADS = {workload.name: workload for workload in BENCHMARKS if isinstance(workload, Workload)}


def results_of(implementation, workload):
    inputs = Inputs.of(workload)
    prepared = implementation.prepare(workload, inputs, 2)
    return inputs, prepared.results(prepared.call(prepared.setup()))


# -- the benchmarks ----------------------------------------------------------------------------------------------------


RARER = "backward", "both", "threads"  # run only in the soak: `bench --quick` checks one that begins with "both" too


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name.startswith(RARER) else ()) for name in WORKLOADS]
)
def test_small_versions_are_right(name):
    """Every variant of Sightline that is timed stays within the rounding-error budget."""
    workload = WORKLOADS[name].small()
    for variant in (VARIANTS[name] for name in ("sightline", *workload.baselines) if name in VARIANTS):
        inputs, results = results_of(variant, workload)
        assert share_of_budget(variant.reference(workload), inputs, results) <= 1


@pytest.mark.parametrize("name", [benchmark.name for benchmark in BENCHMARKS if benchmark.axis])
def test_series_are_right(name):
    (series,) = (benchmark for benchmark in BENCHMARKS if benchmark.name == name)
    points = series.small().cases
    assert len({point.n for point in points}) == len(points)
    for point in (points[0], points[-1]):
        inputs, results = results_of(VARIANTS["sightline"], point)
        assert share_of_budget(point, inputs, results) <= 1


@pytest.mark.parametrize("benchmarks", [BENCHMARKS, cuda_problems.BENCHMARKS], ids=["cpu", "cuda"])
def test_every_benchmark_has_a_small_version(benchmarks):
    for benchmark in benchmarks:
        small = benchmark.small()
        assert small.name == benchmark.name
        assert not small.targets
        assert 0 < len(small.cases) <= len(benchmark.cases)
        if benchmark.group:
            assert len({case.name for case in small.cases}) == len(small.cases)


def test_names_are_unique_and_contenders_known():
    assert len({benchmark.name for benchmark in BENCHMARKS}) == len(BENCHMARKS)
    for workload in WORKLOADS.values():
        assert set(workload.baselines) <= set(VARIANTS) | set(PEERS)
        assert {target.implementation for target in workload.targets} <= {"sightline", *workload.baselines}


def test_selecting():
    assert [p.name for p in select(BENCHMARKS, ["decode fl*on 8"])] == [
        "decode float32 32 on 8",
        "decode float16 32 on 8",
    ]
    assert all(p.dtype == "bfloat16" for p in select(BENCHMARKS, dtype="bfloat16"))
    assert select(BENCHMARKS) == BENCHMARKS
    with pytest.raises(ParameterError, match="--list") as caught:
        select(BENCHMARKS[3:], ["no such problem"])
    assert BENCHMARKS[3].name in caught.value.cure


def test_a_mask_is_causal_by_its_formula():
    """Another mask object with the same formula is the causal mask too."""
    same = Mask("lower triangle", lambda n, to_table: lambda b, h, i, j: i >= j)
    for mask, is_causal in ((same, True), (CAUSAL, True), (window(8), False), (None, False)):
        workload = Workload(name="x", n=20, mask=mask)
        assert (workload.is_causal, workload.needs_mask_array) == (is_causal, mask is not None and not is_causal)


def test_contenders_get_the_layout_they_are_named_for(monkeypatch):
    """Views of (B, n, H d), except for the variant "contiguous", and the same numbers in both layouts."""
    seen, workload = {}, Workload(name="x", B=2, H=3, n=20, d_k=4)

    def attend(query, *_, **__):
        seen[name] = query.is_contiguous(), query.transpose(1, 2).is_contiguous()
        return query

    monkeypatch.setattr(contenders, "attention", attend)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attend)
    for name in ("sightline", "contiguous", "torch"):
        _, results = results_of((VARIANTS | PEERS)[name], workload)
        np.testing.assert_array_equal(results["output"], Inputs.of(replace(workload, contiguous=True)).query)
    assert seen == {"sightline": (False, True), "contiguous": (True, False), "torch": (False, True)}


@pytest.mark.parametrize("case", RAGGED.small().cases, ids=lambda case: case.name)
def test_ragged_batches_are_right(case):
    """The padded contenders have the results of the packed documents at the tokens."""
    inputs = Inputs.of(case)
    assert sum(case.mask.lengths(case.n)) == case.n
    for contender in case.contenders:
        prepared = contender.prepare(case, inputs, 2)
        results = prepared.results(prepared.call(prepared.setup()))
        assert share_of_budget(case, inputs, results) <= 1
        results["output"][:, :, -1] += 1e-3
        assert not share_of_budget(case, inputs, results) <= 1


def test_the_instruction_set_of_the_kernels_is_named(monkeypatch):
    monkeypatch.setenv("SIGHTLINE_CPU", "avx2")
    if not missing_features(native_machine(), named_machine("avx2")):
        assert kernel_instructions() == "AVX2"
        assert Peaks().measured_name("bfloat16") == "float32"
        assert ", AVX2 kernels, 2 threads" in CpuDevice(2).description


# -- counting ----------------------------------------------------------------------------------------------------------

MASKS = {
    "window": (i >= j) & (i - j < 33),
    "by head": sightline.table(np.array([3, 70, 500]))[sightline.h] > i - j,
    "padding": sightline.padding([100, 163]),
    "nothing": i < 0,
}


@pytest.mark.parametrize("mask", [None, CAUSAL, *MASKS], ids=["no mask", "causal", *MASKS])
def test_allowed_pairs_are_those_of_the_dense_mask(mask):
    if mask in MASKS:
        mask = Mask("x", lambda n, to_table, formula=MASKS[mask]: lambda *_: formula)
    workload = Workload(name="x", B=2, H=3, n=130, m=163, mask=mask)
    dense = np.ones(workload.extent, bool) if mask is None else evaluate_dense(workload.formula, workload.extent)
    assert workload.allowed == np.broadcast_to(dense, workload.extent).sum()


def test_flops_are_those_of_the_products():
    of_d_k, of_d_v = 10 * 7 * 4, 10 * 7 * 6  # multiply-adds of S, dQ and dK; of O, dP and dV
    forward = 2 * 3 * (of_d_k + of_d_v)
    backward = 2 * 3 * (3 * of_d_k + 2 * of_d_v)  # S, dQ, dK; dP, dV
    for passes, flops in {"forward": forward, "backward": backward, "forward and backward": forward + backward}.items():
        assert Workload(name="x", H=3, n=10, m=7, d_k=4, d_v=6, passes=passes).flops == flops


def test_bytes_are_those_of_the_arrays():
    for passes in ("forward", "forward and backward"):
        workload = Workload(name="x", H=4, n=10, m=7, d_k=4, d_v=6, passes=passes, bias=True)
        inputs = Inputs.of(workload)
        given = inputs.query.nbytes + inputs.key.nbytes + inputs.value.nbytes + inputs.bias.nbytes
        times = 1 if passes == "forward" else 2
        assert workload.bytes_moved == times * given + workload.output_bytes


# -- checking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_a_sample_has_the_values_of_the_whole_problem(mask):
    """The reference output of the sample equals the same rows of the whole problem's reference output."""
    from benchmarks.check import _reference_stages

    workload = Workload(name="x", H=4, n=200, m=200, d_k=8, mask=mask, dropout=0.3)
    inputs = Inputs.of(workload)
    part = sample(workload, inputs)
    options = {"mask": workload.formula, "dropout": 0.3, "seed": part.seed}
    whole = compute_stages(make_problem(inputs.query, inputs.key, inputs.value, **options))
    expected = whole.output[:, part.heads][:, :, part.rows]
    np.testing.assert_allclose(_reference_stages(part).output, expected, rtol=1e-12, atol=1e-14)
    assert part.rows.size < workload.n


def test_a_sample_has_every_key_that_any_batch_entry_attends_to():
    """The first batch entry attends to 30 keys and the second to 55, so no key from 55 on is in the sample."""
    lengths = np.array([30, 55])
    mask = Mask("padding", lambda n, to_table: lambda b, h, i, j: j < to_table(lengths)[b])
    for passes in ("forward", "forward and backward"):
        workload = Workload(name="x", B=2, H=2, n=60, d_k=8, mask=mask, passes=passes)
        inputs, results = results_of(VARIANTS["sightline"], workload)
        assert sample(workload, inputs).columns.size == 55
        assert share_of_budget(workload, inputs, results) <= 1


FAULTS = {
    "output": lambda a: a | {"output": np.roll(a["output"], 1, axis=-2)},
    "nan": lambda a: a | {"output": np.where(np.arange(a["output"].shape[-1]) == 3, np.nan, a["output"])},
    "another head": lambda a: a | {"output": a["output"][:, ::-1]},
    "query": lambda a: a | {"query": a["query"] * 1.0001},
    "key": lambda a: a | {"key": a["key"] + np.roll(a["key"], 1, -2) * 1e-4},
    "value": lambda a: a | {"value": -a["value"]},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_results_are_found(fault):
    workload = Workload(name="x", H=4, n=150, d_k=16, mask=CAUSAL, passes="backward")
    inputs, results = results_of(VARIANTS["sightline"], workload)
    assert share_of_budget(workload, inputs, results) <= 1
    assert not share_of_budget(workload, inputs, FAULTS[fault](results)) <= 1


@pytest.mark.parametrize("name", [name for name, workload in WORKLOADS.items() if workload.see])
def test_wrong_statistics_are_found(name):
    """The check finds values of one head with a relative error of 1e-4, and keys of another row."""
    workload = WORKLOADS[name].small()
    inputs, results = results_of(VARIANTS["sightline"], workload)
    for statistic in workload.see:
        first, *others = results[repr(statistic)]
        off = first.copy()
        off[:, -1] *= 1.0001
        wrong = [(off, *others), *((first, np.roll(keys, 1, axis=2)) for keys in others)]
        for arrays in wrong:
            assert not share_of_budget(workload, inputs, results | {repr(statistic): arrays}) <= 1


def test_an_output_of_another_shape_is_an_error():
    workload = Workload(name="x", n=20, d_k=4)
    inputs, results = results_of(VARIANTS["sightline"], workload)
    with pytest.raises(ValueError, match=r"the output has the shape .*, expected \("):
        share_of_budget(workload, inputs, {"output": results["output"].swapaxes(1, 2)})


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_outputs_with_dropout_are_checked_unless_a_peer_draws_its_own_numbers():
    workload = WORKLOADS["forward dropout 0.1"].small()
    assert PEERS["torch"].reference(workload) is None
    assert VARIANTS["without dropout"].reference(workload).dropout == 0
    inputs, results = results_of(VARIANTS["without dropout"], workload)
    assert not share_of_budget(workload, inputs, results) <= 1


def test_threads_are_set_for_torch():
    import torch

    before = torch.get_num_threads()
    try:
        contenders.set_threads(1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not can_measure(), reason="this system has no peak resident set size that can be reset")
def test_peak_memory_counts_the_memory_of_a_call():
    size = 1 << 27

    def call(_):
        whole = np.ones(size, np.uint8)
        return whole[: size // 2].copy()

    slack = size / 64  # Linux counts a thread's pages in batches
    assert abs(peak_memory(call) - 1.5 * size) <= slack
    assert peak_memory(lambda _: None) <= slack


def test_peaks():
    """float64 has half the lanes; bfloat16 is at least as fast as float32."""
    peaks = Peaks(1)
    for _ in range(30):  # other programs may slow single tries; the best of all tries counts
        peaks.measure("float32", 1), peaks.measure("float64", 1)
        single, double = peaks.best["float32"], peaks.best["float64"]
        if 1.2 < single / double < 3.3:
            break
    assert 1.2 < single / double < 3.3
    assert peaks.measure("read", 1) > 0
    peaks.measure("bfloat16", 5)
    assert peaks.best[peaks.measured_name("bfloat16")] >= single / 1.2
    assert peaks.measured_name("float16") == "float32"


def test_the_dot_product_of_pairs_adds_up():
    """The loop of the bfloat16 peak adds two products to each of 16 lanes, in every chain and iteration."""
    from sightline.cpu.kernels.rate_loops import NAME, make_product_loop
    from sightline.cpu.runtime.compile import compile_module
    from sightline.cpu.runtime.machine import host

    if not host().has_bf16_dot:
        pytest.skip("no AVX-512 bfloat16")
    iterations, loop = 5, make_product_loop("bfloat16", host())
    address = compile_module(str(loop.module), host(), NAME)
    ones = np.full(32, 0x3F80, np.uint16)  # 1.0
    sums = np.zeros(16, np.float32)
    arguments = np.array([iterations, ones.ctypes.data, sums.ctypes.data], np.int64)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(arguments.ctypes.data)
    np.testing.assert_array_equal(sums, iterations * loop.flops / (2 * 16))


def test_first_calls():
    times = FirstCall(name="x", n=16, d=8, processes=1).measure_seconds()
    assert set(times) == {"compiled", "from disk", "first of all"}
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in times.values())


@pytest.mark.parametrize("peer", PEERS)
def test_installed_peers_are_right(peer):
    """Plain, causal, windowed and backward problems; FlexAttention takes too long to compile and is skipped."""
    implementation = PEERS[peer]
    if implementation.skip_reason():
        pytest.skip(implementation.skip_reason())
    if peer == "flex":
        pytest.skip("needs a C++ compiler and seconds for each problem; `python -m benchmarks --quick` runs it")
    names = ("forward float32 d64", "forward float32 causal n4096", "forward window 256", "backward float32 d64")
    if peer in ("dense", "mha"):
        names += tuple(name for name in WORKLOADS if name.startswith("see "))
    ran = 0
    for workload in (WORKLOADS[name].small() for name in names):
        if implementation.refuses(workload) is None:
            inputs, results = results_of(implementation, workload)
            assert share_of_budget(workload, inputs, results) <= 1
            ran += 1
    assert ran


# -- verdicts and reports ----------------------------------------------------------------------------------------------


def finding_of(ours, peer, **more):
    entries = [Entry("sightline", "Sightline", ours), Entry("torch", "torch", peer)]
    rows = [Row("x", entries, peaks=[200.0] * len(ours))]
    return Finding("x", "about", rows, flops=100, bytes_moved=10, peak="float32", **more)


def test_ratios_are_medians_of_rounds():
    """A round that is slow for both contenders changes their medians, but not their ratio."""
    finding = finding_of([1.0, 5.0, 6.0], [2.0, 10.0, 12.0])
    finding.evaluate((Target("faster", 2.0, "torch"), Target("faster", 2.1, "torch"), Target("share", 0.1)))
    assert [verdict.value for verdict in finding.verdicts] == [2.0, 2.0, 100 / 5.0 / 200]
    assert [verdict.reached for verdict in finding.verdicts] == [True, False, True]


def test_each_measure():
    finding = finding_of([2.0], [3.0])
    finding.evaluate([Target("slower", 0.7, "torch"), Target("seconds", 2.5, "torch"), Target("faster", 1.0, "flex")])
    assert [v.value for v in finding.verdicts] == [pytest.approx(2 / 3), 3.0, None]
    assert [v.reached for v in finding.verdicts] == [True, False, None]


def test_verdicts_of_series():
    def point(n, seconds, memory):
        return Row("", [Entry("sightline", "", [seconds], memory=memory)], coordinate=n, n=n, outputs=8 * n)

    finding = Finding("x", "about", group="x", axis="n", rows=[point(10, 1.0, 10_080), point(20, 2.4, 12_160)])
    finding.evaluate((Target("spread", 1.15), Target("growth", 1.25), Target("extra", 100)))
    spread, growth, extra = finding.verdicts
    assert spread.value == pytest.approx(1.2)
    assert growth.value == pytest.approx(12_000 / 10_000)
    assert extra.value == pytest.approx(10_000 / 80)
    assert [spread.reached, growth.reached, extra.reached] == [False, True, False]


def test_reports_are_json(tmp_path):
    report = Report(2, 1.0, False, {"float32": 200.0}, [finding_of([1.0], [2.0])])
    report.findings[0].evaluate((Target("faster", 1.5, "torch"),))
    saved = json.loads(report.save(tmp_path / "deep" / "bench.json").read_text())
    (finding,) = saved["findings"]
    assert finding["verdicts"][0]["reached"] is True
    assert finding["rows"][0]["entries"][0]["seconds"] == [1.0]
    assert finding["rows"][0]["entries"][0]["share"] == 0.5
    assert saved["machine"]["numpy"] == np.__version__
    (tmp_path / "full.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*full\.json\.part"):
        report.save(tmp_path / "full.json")


TEXTS = {
    format_duration: {1.5: "1.5 s", 0.0123456: "12.3 ms", 9.96e-6: "9.96 µs", 3e-7: "300 ns"},
    format_ratio: {0.00123: "0.0012×", 0.25: "0.25×", 1.5: "1.50×", 12.34: "12.3×", None: ""},
    lambda rate: format_amount(rate, "FLOP/s"): {2.32e11: "232 GFLOP/s", 5.8e10: "58 GFLOP/s"},
    lambda memory: format_amount(memory, "B"): {1536: "1.5 KiB"},
}


@pytest.mark.parametrize("function", TEXTS)
def test_texts_of_numbers(function):
    assert [function(number) for number in TEXTS[function]] == list(TEXTS[function].values())


def test_figures(tmp_path):
    report = Report(2, 1.0, False, {"float32": 200.0, "read": 20.0}, [finding_of([1.0], [2.0])])
    report.findings[0].evaluate((Target("faster", 1.5, "torch"), Target("share", 0.5)))
    entries = {n: [Entry("sightline", "Sightline", [n / 10], memory=0)] for n in (8, 16, 32)}
    points = [Row(f"n {n}", of_n, coordinate=n, n=n) for n, of_n in entries.items()]
    report.findings.append(Finding("by length", "about", group="by length", axis="n", rows=points))
    drawn = figures.draw(report, tmp_path / "figures")
    assert [path.name for path in drawn] == ["roofline.png", "ratios.png", "by-length.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


# -- the command -------------------------------------------------------------------------------------------------------


def command(capsys, *arguments):
    """Run `python -m benchmarks`; return the exit code, the output and the errors."""
    code = main([*arguments])
    captured = capsys.readouterr()
    assert max(map(len, captured.out.splitlines()), default=0) <= 80
    return code, captured.out, captured.err


def test_the_list_has_every_problem(capsys):
    code, out, _ = command(capsys, "--list")
    assert code == 0
    for benchmark in BENCHMARKS:
        assert benchmark.name in out


@pytest.mark.usefixtures("fast_peaks")
def test_a_quick_run(capsys, tmp_path):
    path = tmp_path / "bench.json"
    only_one = "overhea[d]"  # a pattern that no other name matches
    code, out, _ = command(capsys, "--quick", "--only", only_one, "--only", "both bias*", "--json", str(path))
    assert code == 0
    for text in ("Peaks", "overhead", "both bias n2048", "Sightline on NumPy", "torch", "Wrote"):
        assert text in out
    assert out.count("Its times and ratios mean nothing.") == 2  # above and below the tables
    ours = json.loads(path.read_text())["findings"][0]["rows"][0]["entries"][0]
    assert ours["median"] == statistics.median(ours["seconds"])
    assert ours["budget"] <= 1


@pytest.mark.usefixtures("fast_peaks")
def test_a_wrong_output_makes_the_command_fail(capsys, monkeypatch):
    wrong = Finding("overhead", "about", failed="Sightline uses 3 times its budget", wrong=True)
    monkeypatch.setattr("benchmarks.__main__.run", lambda benchmark, settings: wrong)
    code, out, _ = command(capsys, "--only", "overhead")
    assert code == 1
    assert "not reported" in out
    wrong.wrong, wrong.refused = False, True
    assert command(capsys, "--only", "overhead")[0] == 0, "a missing library is not an error"


@pytest.mark.usefixtures("fast_peaks")
def test_results_are_saved_before_the_device_fails(capsys, monkeypatch, tmp_path):
    path = tmp_path / "bench.json"

    def fails(benchmark, settings):
        assert path.exists() == (benchmark is not BENCHMARKS[0])
        return Finding(benchmark.name, "about", failed=None if benchmark is BENCHMARKS[0] else "RuntimeError: illegal")

    def synchronize(self):
        raise RuntimeError("lost")

    monkeypatch.setattr("benchmarks.__main__.run", fails)
    code, out, _ = command(capsys, "--quick", "--json", str(path))
    assert code == 1
    assert len(json.loads(path.read_text())["findings"]) == len(BENCHMARKS)
    path.unlink()
    monkeypatch.setattr(CpuDevice, "synchronize", synchronize)
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
