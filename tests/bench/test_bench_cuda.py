"""`sightline bench --device cuda`: all its machinery on the processor, a clock and a counter in place of the GPU's."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from fake_cuda import WORKLOADS, Capturing, Runtime
from sightline.bench import check, cuda, cuda_benchmarks, measure, workloads
from sightline.bench.benchmarks import CAUSAL
from sightline.bench.check import share_of_budget
from sightline.bench.cuda import Cuda
from sightline.bench.measure import Settings, run
from sightline.bench.report import Entry, Finding
from sightline.bench.workloads import BEST, Inputs, Planning, Target, Workload
from sightline.cli import main
from sightline.cli.bench_command import DEVICES
from sightline.formula.render_array import evaluate

QUICK = ("backward window", "see received", "decode", "planning")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Problems, peaks and caches of a size the processor is done with at once."""
    monkeypatch.setattr(workloads, "SMALL_LENGTH", 40)
    for name, size in {"MATRIX_SIZE": 64, "COPY_BYTES": 1 << 16, "FLUSH_BYTES": 1 << 10}.items():
        monkeypatch.setattr(cuda, name, size)


def on_processor(runtime=None):
    device = Cuda(1, device="cpu", runtime=runtime or Runtime(), options={})
    device.pause = 0.0
    return device


# -- the table ---------------------------------------------------------------------------------------------------------


def test_names_are_unique_and_contenders_known():
    device, names = on_processor(), [benchmark.name for benchmark in cuda_benchmarks.BENCHMARKS]
    assert len(set(names)) == len(names)
    for workload in WORKLOADS.values():
        assert set(workload.baselines) <= {*device.variants, *device.peers}
        assert {target.implementation for target in workload.targets} <= {"sightline", BEST, *workload.baselines}
        assert workload.dtype == "bfloat16"


def test_every_race_but_decoding_has_as_many_tokens():
    assert {workload.B * workload.n for workload in WORKLOADS.values() if workload.name != "decode"} == {
        cuda_benchmarks.TOKENS
    }


@pytest.mark.parametrize("name", ["backward softcap", "backward alibi", "backward prefix"])
def test_small_versions_are_right(name):
    workload = replace(WORKLOADS[name].small(), B=1, d_k=32, d_v=32)
    inputs = Inputs.of(workload)
    prepared = on_processor().variants["sightline"].prepare(workload, inputs, 1)
    assert share_of_budget(workload, inputs, prepared.results(prepared.call(prepared.setup()))) <= 1


@pytest.mark.parametrize("name", ["softcap", "alibi"])
def test_scores_mean_the_same_to_others(name):
    """FlexAttention's function of numbers and our formula of symbols."""
    score = cuda_benchmarks.FORMULAS[name]["score"]
    at = {"s": 1.5, "b": 0, "h": 1, "i": 7, "j": 3}
    written = score.make_function(4, torch.as_tensor)(*(torch.tensor(value) for value in at.values()))
    values = {symbol: np.asarray(value) for symbol, value in at.items()} | {"n": 9, "m": 9}
    found = evaluate(score.formula(4), values, xp=np, float_dtype=np.dtype("float64"), like=np.zeros(()))
    assert float(written) == pytest.approx(float(found))


# -- the device --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(  # decoding and a backward pass run in other tests every day
    "name",
    [pytest.param(name, marks=() if name in ("see received", "planning") else pytest.mark.soak) for name in QUICK],
)
def test_problems_run(name):
    (benchmark,) = (each for each in cuda_benchmarks.BENCHMARKS if each.name == name)
    settings = Settings(on_processor(), seconds=0.01, quick=True)
    settings.peers = [peer for peer in settings.device.peers.values() if peer.name != "flex"]  # it compiles for long
    finding = run(benchmark, settings)
    assert finding.failed is None
    assert finding.entries[0].seconds
    if isinstance(benchmark, Planning):
        assert min(finding.entries[0].seconds) > 0
        return
    ours = finding.entry("sightline")
    assert ours.budget <= 1
    assert ours.memory == Runtime.held
    assert finding.best > 0
    assert finding.share(ours) > 0
    told = {entry.name: entry for entry in finding.entries}
    for peer in {"flash", "cudnn", "efficient", "dense"} & set(told):
        assert told[peer].seconds or told[peer].skip_reason, "nobody is left out without a word"


def test_torch_flash_takes_part_where_it_is_on_this_machine():
    """torch has that kernel for processors too, so one peer runs as it will on a GPU."""
    settings = Settings(on_processor(), seconds=0.01, quick=True)
    settings.peers = [settings.device.peers["flash"]]
    for name in ("forward causal n8192", "backward full n8192"):
        finding = run(replace(WORKLOADS[name], d_k=32, d_v=32), settings)
        flash = finding.entry("flash")
        assert flash.budget <= 1
        finding.evaluate(WORKLOADS[name].targets)
        assert finding.verdicts[0].value == finding.entry("sightline").speedup_over(flash)


def test_times_are_those_between_events():
    device = on_processor()
    workload = Workload(name="x", n=20, d_k=4)
    prepared = device.variants["sightline"].prepare(workload, Inputs.of(workload), 1)
    calls = []

    def call(_):
        calls.append(1)
        time.sleep(2e-3)

    prepared.call = call
    assert device.time_calls(prepared, 3) >= 2e-3
    assert len(calls) == 1 + 3


def test_a_call_is_captured_where_it_can_be():
    workload = Workload(name="x", n=20, d_k=4, cuda_graph=True)
    device = on_processor(Capturing())
    prepared = device.variants["sightline"].prepare(workload, Inputs.of(workload), 1)
    cuda_graph, note = device.prepare_for_timing(prepared, workload)
    assert note == "as a CUDA graph"
    answer = cuda_graph.call(cuda_graph.setup())
    assert device.runtime.cuda_graph.replays == 1
    np.testing.assert_array_equal(prepared.results(answer)["output"], prepared.results(prepared.call(None))["output"])
    left, note = on_processor().prepare_for_timing(prepared, workload)
    assert left is prepared
    assert "RuntimeError" in note


def test_peaks():
    peaks = on_processor().peaks
    assert peaks.measure("matmul", 2) > 0
    assert peaks.measure("copy", 1) > 0
    assert set(peaks.best) == set(peaks.names)


# -- checking and judging ----------------------------------------------------------------------------------------------


def test_gradients_are_checked_by_chunks(monkeypatch):
    """Some queries at a time or all at once, what is right is right, and one query's part that is off is seen."""
    monkeypatch.setattr(check, "GRADIENT_CHUNK_ROWS", 40)
    workload = Workload(name="chunks", H=2, n=150, d_k=16, mask=CAUSAL, passes="backward")
    inputs = Inputs.of(workload)
    prepared = on_processor().variants["sightline"].prepare(workload, inputs, 1)
    results = prepared.results(prepared.call(prepared.setup()))
    assert share_of_budget(workload, inputs, results) <= 1
    late = results["value"].copy()
    late[:, -1, 140] *= 1.0001
    assert not share_of_budget(workload, inputs, results | {"value": late}) <= 1


def test_long_gradients_are_checked_by_some_queries(monkeypatch):
    """What is timed has all of d_output; what is looked at some queries' part, and a fault there is seen."""
    monkeypatch.setattr(workloads, "CHECKED_GRADIENT_ROWS", 30)
    workload = Workload(name="long", H=1, n=150, d_k=16, mask=CAUSAL, passes="backward", baselines=())
    inputs, own = Inputs.of(workload), on_processor().variants["sightline"]
    assert np.count_nonzero(inputs.with_sampled_d_output.d_output.any((0, 1, 3))) == 30
    prepared = own.prepare(workload, inputs, 1)
    before = prepared.results(prepared.call(prepared.setup()))
    assert measure._budget_used(prepared, workload, inputs) <= 1
    after = prepared.results(prepared.call(prepared.setup()))
    assert all(np.array_equal(before[name], after[name]) for name in before)
    true = prepared.results
    prepared.results = lambda found: true(found) | {"key": true(found)["key"] * 1.0001}
    assert not measure._budget_used(prepared, workload, inputs) <= 1


def test_the_best_peer_is_the_fastest_that_is_right():
    times = {"sightline": [2.0], "flash": [3.0], "cudnn": [1.0], "flex": [0.5], "planned": [0.1]}
    entries = [Entry(name, name, seconds) for name, seconds in times.items()]
    entries[3].budget = 2.0
    finding = Finding("x", "", entries, peers=("flash", "cudnn", "flex"))
    assert finding.target_entry(Target("faster", 0.9, BEST)).name == "cudnn"
    finding.evaluate([Target("faster", 0.9, BEST)])
    assert finding.verdicts[0].value == 0.5
    assert finding.verdicts[0].reached is False


# -- the command -------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_command_says_what_to_do(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", "--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert "sees no CUDA device" in said
    assert "cure:" in said


def test_the_list_needs_no_gpu(capsys):
    assert main(["bench", "--device", "cuda", "--list"]) == 0
    out = capsys.readouterr().out
    for benchmark in cuda_benchmarks.BENCHMARKS:
        assert benchmark.name in out
    assert "at least 0.95 times as fast as the best peer" in out
    assert "702 TFLOP/s" in out


def test_a_quick_run(capsys, tmp_path, monkeypatch):
    """Table, JSON and pictures of it, as the processor's bench writes them."""
    device = on_processor()
    monkeypatch.setitem(DEVICES, "cuda", lambda threads: device)
    device.peers = {name: peer for name, peer in device.peers.items() if name != "flex"}
    path, figures = tmp_path / "bench.json", tmp_path / "figures"
    asked = ["--only", "forward causal n8192", "--only", "decode", "--json", str(path), "--figures", str(figures)]
    assert main(["bench", "--device", "cuda", "--quick", *asked]) == 0
    out = capsys.readouterr().out
    for words in ("matmul", "copy", "a processor in a GPU's place", "torch, flash", "as planned", "644 TFLOP/s"):
        assert words in out
    kept = json.loads(path.read_text())
    assert kept["machine"]["device"] == "a processor in a GPU's place"
    assert {"driver", "tuned"} <= set(kept["machine"])
    assert set(kept["peaks"]) == {"matmul", "copy"}
    assert {each.name for each in figures.iterdir()} == {"roofline.png", "ratios.png"}
