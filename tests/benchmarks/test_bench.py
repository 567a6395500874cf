"""The benchmarks: problems at small sizes, their counts and checks, and the command."""

import json
import statistics
from dataclasses import replace

import numpy as np
import pytest

import sightline
from benchmarks import contenders, cuda_problems, first_calls
from benchmarks.__main__ import QUICK_WARNING, main, select
from benchmarks.attention import BOTH, CAUSAL, Attention, Inputs, Mask, padding, window
from benchmarks.check import checked_parts, error_of, problem_of
from benchmarks.contenders import SIGHTLINE, TORCH
from benchmarks.core import Measurement
from benchmarks.cpu_problems import CONTIGUOUS, PEERS, PROBLEMS
from benchmarks.measure import Cpu
from benchmarks.models import ModelCall
from benchmarks.peak_memory import peak_memory
from benchmarks.peaks import kernel_instructions
from benchmarks.report import format_amount, format_duration, format_ratio
from benchmarks.short_calls import ShortCall
from sightline import i, j
from sightline.cpu.runtime.machine import missing_features, named_machine, native_machine
from sightline.errors import ParameterError
from sightline.formula.evaluate_array import evaluate_dense
from sightline.reference.definition import compute_stages

ATTENTION = {
    f"{problem.title}, {problem.name}": problem
    for problem in PROBLEMS
    if isinstance(problem, Attention) and not isinstance(problem, ShortCall)
}


def results_of(contender, problem, inputs=None):
    """Return the problem as the contender changes it, its inputs, and the contender's results."""
    problem = replace(problem, **contender.changes)
    inputs = inputs or Inputs.of(problem)
    call = contender.prepare(problem, inputs, 2)
    return problem, inputs, call.results(call.run(call.setup()))


# -- the problems ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=41)
@pytest.mark.parametrize("name", ATTENTION)
def test_small_versions_are_right(name):
    """Every variant of Sightline that is timed stays within the budget of rounding errors."""
    problem = ATTENTION[name].small()
    for contender in problem.contenders:
        if contender.is_ours and not contender.refusal(problem):
            assert error_of(*results_of(contender, problem)) <= 1


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_installed_peers_are_right(peer):
    """Plain, causal, windowed and training problems; FlexAttention takes too long to compile and is skipped."""
    if peer.refusal(Attention(name="x")) or peer.name == "FlexAttention":
        pytest.skip(peer.refusal(Attention(name="x")) or "needs a C++ compiler and seconds for each problem")
    for options in ({}, {"mask": CAUSAL}, {"mask": window(256)}, {"mask": CAUSAL, "passes": BOTH}):
        problem = Attention(name="x", H=2, n=40, d_k=16, **options)
        if not peer.refusal(problem):
            assert error_of(*results_of(peer, problem)) <= 1


@pytest.mark.parametrize("problems", [PROBLEMS, cuda_problems.PROBLEMS], ids=["cpu", "cuda"])
def test_names_are_unique_and_targets_name_contenders(problems):
    names = [(problem.title, problem.name) for problem in problems]
    assert len(set(names)) == len(names)
    for problem in problems:
        contenders = [contender.name for contender in problem.contenders]
        assert len(set(contenders)) == len(contenders)
        assert contenders[0] not in problem.targets
        assert set(problem.targets) <= set(contenders)
        assert isinstance(problem, ModelCall) or problem.small().name == problem.name


def test_selecting():
    def names(*only):
        return [first.title for first, *_ in select(PROBLEMS, only)]

    assert names("decode fl*on 8") == ["decode float32 32 on 8", "decode float16 32 on 8"]
    assert [len(table) for table in select(PROBLEMS, ["short calls plain", "JAX"])] == [8, 12, 6]
    assert sum(map(len, select(PROBLEMS))) == len(PROBLEMS)
    with pytest.raises(ParameterError, match="--list") as caught:
        select(PROBLEMS[3:], ["no such problem"])
    assert PROBLEMS[3].name in caught.value.cure


def test_contenders_get_the_layout_they_are_named_for(monkeypatch):
    """Views of (B, n, H d), except for the variant "contiguous", and the same numbers in both layouts."""
    seen, problem = {}, Attention(name="x", B=2, H=3, n=20, d_k=4)

    def attend(query, *_, **__):
        seen[contender.name] = query.is_contiguous(), query.transpose(1, 2).is_contiguous()
        return query

    monkeypatch.setattr(contenders, "attention", attend)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attend)
    for contender in (SIGHTLINE, CONTIGUOUS, TORCH):
        _, inputs, results = results_of(contender, problem)
        np.testing.assert_array_equal(results["output"], inputs.query)
    assert seen == {"Sightline": (False, True), "contiguous": (True, False), "torch": (False, True)}


def test_the_instruction_set_of_the_kernels_is_named(monkeypatch):
    monkeypatch.setenv("SIGHTLINE_CPU", "avx2")
    if not missing_features(native_machine(), named_machine("avx2")):
        assert kernel_instructions() == "AVX2"
        assert ", AVX2 kernels, 2 threads" in Cpu(2).description


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
    problem = Attention(name="x", B=2, H=3, n=130, m=163, mask=mask)
    dense = np.ones(problem.extent, bool) if mask is None else evaluate_dense(problem.formula, problem.extent)
    assert problem.allowed == np.broadcast_to(dense, problem.extent).sum()


def test_flops_are_those_of_the_products():
    of_d_k, of_d_v = 10 * 7 * 4, 10 * 7 * 6  # multiply-adds of S, dQ and dK; of O, dP and dV
    forward = 2 * 3 * (of_d_k + of_d_v)
    backward = 2 * 3 * (3 * of_d_k + 2 * of_d_v)  # S, dQ, dK; dP, dV
    for passes, flops in {"forward": forward, "backward": backward, BOTH: forward + backward}.items():
        assert Attention(name="x", H=3, n=10, m=7, d_k=4, d_v=6, passes=passes).work == flops


def test_bytes_are_those_of_the_arrays():
    problem = Attention(name="x", H=4, n=10, m=7, d_k=4, d_v=6, unit="B/s")
    _, inputs, results = results_of(SIGHTLINE, problem)
    assert problem.work == sum(x.nbytes for x in (inputs.query, inputs.key, inputs.value, results["output"]))


# -- checking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, CAUSAL, window(256)])
def test_a_part_has_the_values_of_the_whole_problem(mask):
    """The reference output of the parts equals the same rows of the whole problem's reference output."""
    problem = Attention(name="x", H=4, G=2, n=200, d_k=8, mask=mask, dropout=0.3)
    whole = problem_of(problem, Inputs.of(problem))
    expected = compute_stages(whole).output
    parts = checked_parts(whole)
    assert [part.head for part in parts] == [0, 3]
    for part in parts:
        assert part.problem.n < whole.n
        output = compute_stages(part.problem).output
        np.testing.assert_allclose(output[:, 0], expected[:, part.head, part.rows], rtol=1e-12, atol=1e-14)


def test_a_part_has_every_key_that_any_batch_entry_attends_to():
    """The first batch entry attends to 30 keys and the second to 55, so no key from 55 on is in a part."""
    problem = Attention(name="x", B=2, H=2, n=60, d_k=8, mask=padding(np.array([30, 55])), passes=BOTH)
    _, inputs, results = results_of(SIGHTLINE, problem)
    assert {part.columns.stop for part in checked_parts(problem_of(problem, inputs))} == {55}
    assert error_of(problem, inputs, results) <= 1


FAULTS = {
    "output": lambda a: a | {"output": np.roll(a["output"], 1, axis=-2)},
    "nan": lambda a: a | {"output": np.where(np.arange(a["output"].shape[-1]) == 3, np.nan, a["output"])},
    "another head": lambda a: a | {"output": a["output"][:, ::-1]},
    "query": lambda a: a | {"query": a["query"] * 1.0001},
    "key": lambda a: a | {"key": a["key"] + np.roll(a["key"], 1, -2) * 1e-4},
    "value": lambda a: a | {"value": -a["value"]},
    "bias": lambda a: a | {"bias": a["bias"] * 1.0001},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_results_are_found(fault):
    problem = Attention(name="x", H=4, n=150, d_k=16, mask=CAUSAL, passes="backward", bias=True)
    _, inputs, results = results_of(SIGHTLINE, problem)
    assert error_of(problem, inputs, results) <= 1
    assert not error_of(problem, inputs, FAULTS[fault](results)) <= 1


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", [name for name, problem in ATTENTION.items() if name.startswith("see ")])
def test_wrong_statistics_are_found(name):
    """The check finds values of one head with a relative error of 1e-4, and keys of another row."""
    problem = ATTENTION[name].small()
    _, inputs, results = results_of(SIGHTLINE, problem)
    for statistic in problem.see:
        first, *others = results[repr(statistic)]
        off = first.copy()
        off[:, -1] *= 1.0001
        wrong = [(off, *others), *((first, np.roll(keys, 1, axis=2)) for keys in others)]
        for arrays in wrong:
            assert not error_of(problem, inputs, results | {repr(statistic): arrays}) <= 1


def test_an_output_of_another_shape_is_an_error():
    problem = Attention(name="x", n=20, d_k=4)
    _, inputs, results = results_of(SIGHTLINE, problem)
    with pytest.raises(ValueError, match=r"the output has the shape .*, expected \("):
        error_of(problem, inputs, {"output": results["output"].swapaxes(1, 2)})


# -- measuring ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(peak_memory(lambda _: None) is None, reason="this system has no peak resident set size")
def test_peak_memory_counts_the_memory_of_a_call():
    size = 1 << 27

    def call(_):
        whole = np.ones(size, np.uint8)
        return whole[: size // 2].copy()

    slack = size / 64  # Linux counts a thread's pages in batches
    assert abs(peak_memory(call) - 1.5 * size) <= slack
    assert peak_memory(lambda _: None) <= slack


@pytest.mark.wide
def test_first_calls():
    calls = [contender.prepare(first_calls.FIRST_CALL, None, 1) for contender in first_calls.CONTENDERS]
    assert all(call.seconds() > 0 for call in calls)
    for call in calls:
        call.close()


TEXTS = {
    format_duration: {1.5: "1.5 s", 0.0123456: "12.3 ms", 9.96e-6: "9.96 µs", 3e-7: "300 ns"},
    format_ratio: {0.00123: "0.0012×", 0.25: "0.25×", 1.5: "1.50×", 12.34: "12.3×"},
    lambda rate: format_amount(rate, 1000, "FLOP/s"): {2.32e11: "232 GFLOP/s", 5.8e10: "58 GFLOP/s"},
    lambda memory: format_amount(memory, 1024, "B"): {1536: "1.5 KiB", 1023: "0.999 KiB", 512: "512 B"},
}


@pytest.mark.parametrize("function", TEXTS)
def test_texts_of_numbers(function):
    assert [function(number) for number in TEXTS[function]] == list(TEXTS[function].values())


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
    assert all(problem.title in out for problem in PROBLEMS)
    assert "torch: at least 1.35 times Sightline's time" in out


@pytest.mark.wide
@pytest.mark.usefixtures("fast_peaks")
def test_a_quick_run(capsys, tmp_path):
    path = tmp_path / "deep" / "bench.json"
    only_one = "overhea[d]"  # a pattern that no other name matches
    code, out, _ = command(capsys, "--quick", "--only", only_one, "--only", "both bias*", "--json", str(path))
    assert code == 0
    for text in ("overhead", "both bias n2048", "NumPy", "torch", "peak", "≥ 2.5×", "Wrote", QUICK_WARNING):
        assert text in out
    saved = json.loads(path.read_text())
    ours = saved["problems"][0]["measurements"][0]
    assert ours["median"] == statistics.median(ours["seconds"])
    assert ours["error"] <= 1
    assert saved["versions"]["numpy"] == np.__version__
    assert saved["quick"] is True


def test_a_wrong_output_makes_the_command_fail(capsys, monkeypatch):
    wrong = Measurement("Sightline", True, reason="wrong by far", has_failed=True)
    monkeypatch.setattr("benchmarks.__main__.measure", lambda *_: [wrong])
    code, out, _ = command(capsys, "--only", "overhead")
    assert code == 1
    assert "Sightline: wrong by far" in out
    wrong.has_failed = False
    assert command(capsys, "--only", "overhead")[0] == 0, "a missing library is not an error"


def test_results_are_saved_before_the_device_fails(capsys, monkeypatch, tmp_path):
    path = tmp_path / "bench.json"

    def synchronize(self):
        raise RuntimeError("lost")

    monkeypatch.setattr("benchmarks.__main__.measure", lambda *_: [Measurement("Sightline", True, reason="illegal")])
    some = "--quick", "--only", "forward float32", "--json", str(path)
    assert command(capsys, *some)[0] == 0
    assert len(json.loads(path.read_text())["problems"]) == sum(map(len, select(PROBLEMS, ["forward float32"]))) > 1
    monkeypatch.setattr(Cpu, "synchronize", synchronize)
    assert "lost" in command(capsys, *some)[1]
    assert len(json.loads(path.read_text())["problems"]) == 1


@pytest.mark.parametrize("arguments", [("--only", "nothing like it"), ("--seconds", "-1"), ("--seconds", "nan")])
def test_errors_are_messages(capsys, arguments):
    code, _, err = command(capsys, *arguments)
    assert code == 2
    assert "cure:" in err
