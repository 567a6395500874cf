"""`python -m benchmarks --device cuda` on the CPU: a stand-in for `torch.cuda` has the clock and the memory counter."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import check, cuda, cuda_problems, host_cases, workloads
from benchmarks.__main__ import DEVICES, main
from benchmarks.cases import BEST, Target, TimedCall
from benchmarks.check import share_of_budget
from benchmarks.cpu_problems import CAUSAL
from benchmarks.cuda import CudaDevice
from benchmarks.host_cases import Planning
from benchmarks.measure import Settings, run
from benchmarks.report import Entry, Finding, Row
from benchmarks.workloads import Inputs, Workload
from fake_cuda import WORKLOADS, Capturing, Runtime

QUICK = ("backward window", "see received", "decode", "planning")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Problem sizes, peaks and flushes that the CPU computes quickly."""
    for module in (workloads, host_cases):
        monkeypatch.setattr(module, "SMALL_LENGTH", 40)
    for name, size in {"MATRIX_SIZE": 64, "COPY_BYTES": 1 << 16, "FLUSH_BYTES": 1 << 10}.items():
        monkeypatch.setattr(cuda, name, size)


def make_device(runtime=None):
    """A `CudaDevice` whose tensors are on the CPU."""
    device = CudaDevice(1, device="cpu", runtime=runtime or Runtime(), options={})
    device.pause = 0.0
    return device


# -- the benchmarks ----------------------------------------------------------------------------------------------------


def test_names_are_unique_and_contenders_known():
    device, names = make_device(), [benchmark.name for benchmark in cuda_problems.BENCHMARKS]
    assert len(set(names)) == len(names)
    for workload in WORKLOADS.values():
        assert set(workload.baselines) <= {*device.variants, *device.peers}
        assert {target.implementation for target in workload.targets} <= {"sightline", BEST, *workload.baselines}
        assert workload.dtype == "bfloat16"


def test_every_workload_but_decode_has_the_same_number_of_tokens():
    tokens = {workload.B * workload.n for workload in WORKLOADS.values() if workload.name != "decode"}
    assert tokens == {cuda_problems.TOKENS}


@pytest.mark.parametrize("name", ["backward softcap", "backward alibi", "backward prefix"])
def test_small_versions_are_right(name):
    workload = replace(WORKLOADS[name].small(), B=1, d_k=32, d_v=32)
    inputs = Inputs.of(workload)
    prepared = make_device().variants["sightline"].prepare(workload, inputs, 1)
    assert share_of_budget(workload, inputs, prepared.results(prepared.call(prepared.setup()))) <= 1


@pytest.mark.parametrize("name", ["softcap", "alibi"])
def test_scores_are_the_same_for_flex_attention(name):
    """FlexAttention's function of tensors and Sightline's formula of symbols have the same value."""
    score = cuda_problems.FORMULAS[name]["score"]
    at = {"s": 1.5, "b": 0, "h": 1, "i": 7, "j": 3}
    flex = score.make_function(4, torch.as_tensor)(*(torch.tensor(value) for value in at.values()))
    assert float(flex) == pytest.approx(float(check.evaluate_at(score.formula(4), 9, 9, **at)))


# -- the device --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(  # other tests run decoding and a backward pass, so here they are soak tests
    "name",
    [pytest.param(name, marks=() if name in ("see received", "planning") else pytest.mark.soak) for name in QUICK],
)
def test_problems_run(name):
    (benchmark,) = (each for each in cuda_problems.BENCHMARKS if each.name == name)
    settings = Settings(make_device(), seconds=0.01, quick=True)
    del settings.device.peers["flex"]  # flex compiles for long
    finding = run(benchmark, settings)
    assert finding.failed is None
    assert finding.entries[0].seconds
    if isinstance(benchmark, Planning):
        assert min(finding.entries[0].seconds) > 0
        return
    ours = finding.entry("sightline")
    assert ours.budget <= 1
    assert ours.memory == Runtime.held
    assert finding.share(ours) > 0
    entries = {entry.name: entry for entry in finding.entries}
    for peer in {"flash", "cudnn", "efficient", "dense"} & set(entries):
        assert entries[peer].seconds or entries[peer].skip_reason


def test_torch_flash_runs_on_the_cpu():
    """torch has its flash kernel for CPUs too, so this peer runs as on a GPU."""
    settings = Settings(make_device(), seconds=0.01, quick=True)
    settings.device.peers = {"flash": settings.device.peers["flash"]}
    for name in ("forward causal n8192", "backward full n8192"):
        finding = run(replace(WORKLOADS[name], d_k=32, d_v=32), settings)
        flash = finding.entry("flash")
        assert flash.budget <= 1
        finding.evaluate(WORKLOADS[name].targets)
        assert finding.verdicts[0].value == finding.entry("sightline").speedup_over(flash)


def test_calls_are_timed_between_events():
    device = make_device()
    workload = Workload(name="x", n=20, d_k=4)
    prepared = device.variants["sightline"].prepare(workload, Inputs.of(workload), 1)
    calls = []

    def call(_):
        calls.append(1)
        time.sleep(2e-3)

    prepared.call = call
    assert device.time_calls(prepared, 3) >= 2e-3
    assert len(calls) == 1 + 3


def test_the_time_of_short_calls_includes_the_host():
    device, calls = make_device(), []
    prepared = TimedCall(lambda state: calls.append(state) or time.sleep(2e-3), lambda x: x, lambda: 7)
    prepared.includes_host = True
    device._record_events = None  # no events
    assert 2e-3 <= device.time_calls(prepared, 3) < 2e-2
    assert calls == [7] * 4


def test_short_calls_are_measured_beside_torch():
    group = next(each for each in cuda_problems.BENCHMARKS if each.name == "short calls padding mask")
    assert all(case.device == "cuda" and case.dtype == "bfloat16" for case in group.cases)
    on_cpu = replace(group, cases=(replace(group.cases[0], device="cpu"),))
    (result,) = run(on_cpu, Settings(make_device(), seconds=0.01, quick=True)).rows
    assert result.failed is None
    assert [entry.name for entry in result.entries if entry.seconds] == ["sightline", "torch"]
    assert all(entry.budget <= 1 for entry in result.entries)


def test_a_call_is_captured_as_a_graph_if_possible():
    workload = Workload(name="x", n=20, d_k=4, cuda_graph=True)
    device = make_device(Capturing())
    prepared = device.variants["sightline"].prepare(workload, Inputs.of(workload), 1)
    cuda_graph, note = device.prepare_for_timing(prepared, workload)
    assert note == "as a CUDA graph"
    result = cuda_graph.call(cuda_graph.setup())
    assert device.runtime.cuda_graph.replays == 1
    np.testing.assert_array_equal(prepared.results(result)["output"], prepared.results(prepared.call(None))["output"])
    unchanged, note = make_device().prepare_for_timing(prepared, workload)
    assert unchanged is prepared
    assert "RuntimeError" in note


def test_peaks():
    peaks = make_device().peaks
    assert peaks.measure("matmul", 2) > 0
    assert peaks.measure("copy", 1) > 0
    assert set(peaks.best) == set(peaks.names)


# -- checks and verdicts -----------------------------------------------------------------------------------------------


def test_long_gradients_are_checked_for_some_queries(monkeypatch):
    """The timed call has the whole d_output; the check uses some queries of d_output and finds an error there."""
    monkeypatch.setattr(workloads, "CHECKED_GRADIENT_ROWS", 30)
    workload = Workload(name="long", H=1, n=150, d_k=16, mask=CAUSAL, passes="backward", baselines=())
    inputs, ours = Inputs.of(workload), make_device().variants["sightline"]
    assert np.count_nonzero(inputs.with_sampled_d_output.d_output.any((0, 1, 3))) == 30
    prepared = ours.prepare(workload, inputs, 1)
    before = prepared.results(prepared.call(prepared.setup()))
    assert workload.share_of_budget(prepared, inputs) <= 1
    after = prepared.results(prepared.call(prepared.setup()))
    assert all(np.array_equal(before[name], after[name]) for name in before)
    correct = prepared.results
    prepared.results = lambda result: correct(result) | {"key": correct(result)["key"] * 1.0001}
    assert not workload.share_of_budget(prepared, inputs) <= 1


def test_the_best_peer_is_the_fastest_peer_with_correct_results():
    times = {"sightline": [2.0], "flash": [3.0], "cudnn": [1.0], "flex": [0.5], "planned": [0.1]}
    entries = [Entry(name, name, seconds) for name, seconds in times.items()]
    entries[3].budget = 2.0
    finding = Finding("x", "", [Row("x", entries)], peers=("flash", "cudnn", "flex"))
    assert finding.target_entry(Target("faster", 0.9, BEST)).name == "cudnn"
    finding.evaluate([Target("faster", 0.9, BEST)])
    assert finding.verdicts[0].value == 0.5
    assert finding.verdicts[0].reached is False


# -- the command -------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_error_has_a_cure(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert "sees no CUDA device" in error
    assert "cure:" in error


def test_the_list_needs_no_gpu(capsys):
    assert main(["--device", "cuda", "--list"]) == 0
    out = capsys.readouterr().out
    for benchmark in cuda_problems.BENCHMARKS:
        assert benchmark.name in out
    assert "at least 0.95 times as fast as the best peer" in out
    assert "702 TFLOP/s" in out


def test_a_quick_run(capsys, tmp_path, monkeypatch):
    """The command prints tables and writes JSON and figures, as it does for the CPU."""
    device = make_device()
    monkeypatch.setitem(DEVICES, "cuda", lambda threads: device)
    device.peers = {name: peer for name, peer in device.peers.items() if name != "flex"}
    path, figures = tmp_path / "bench.json", tmp_path / "figures"
    options = ["--only", "forward causal n8192", "--only", "decode", "--json", str(path), "--figures", str(figures)]
    assert main(["--device", "cuda", "--quick", *options]) == 0
    out = capsys.readouterr().out
    for text in ("matmul", "copy", "a processor in a GPU's place", "torch, flash", "as planned", "644 TFLOP/s"):
        assert text in out
    saved = json.loads(path.read_text())
    assert saved["machine"]["device"] == "a processor in a GPU's place"
    assert {"driver", "cudnn"} <= set(saved["machine"])
    assert set(saved["peaks"]) == {"matmul", "copy"}
    assert {each.name for each in figures.iterdir()} == {"roofline.png", "ratios.png"}
