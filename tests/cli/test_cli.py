"""The commands: their output, plain text of 80 columns in a pipe, and errors as messages without a traceback."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from sightline import __version__, attention, padding, weights
from sightline.api.kernels import KERNELS
from sightline.call.problem import make_problem
from sightline.cli import bench_command, head_patterns, main
from sightline.cli.demo_command import compare_times, describe_times, measure_errors
from sightline.cli.explain_command import print_walkthrough
from sightline.cli.info_command import DRIVER_VERSION_FILES, PACKAGES, TORCH_VARIABLES, torch_threads
from sightline.cli.walkthrough import walk_through
from sightline.data import NAMES, load, tried_versions
from sightline.errors import ParameterError
from sightline.reference.accuracy import compute_baseline
from sightline.reference.testing import assert_within_budget
from sightline.view.palette import DARK, rgb


@pytest.fixture
def run(capsys, monkeypatch):
    """A function that runs a command and returns (exit code, output, errors); the output is plain, ≤ 80 columns."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def command(*arguments):
        code = main(arguments)
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err
        assert max(map(len, captured.out.splitlines()), default=0) <= 80
        return code, captured.out, captured.err

    return command


def test_help_without_arguments(run):
    """Without arguments the help is printed, which lists every command."""
    code, out, _ = run()
    assert code == 0
    with pytest.raises(SystemExit):
        run("--help")
    for command in ("demo", "explain", "view", "info", "bench"):
        assert re.search(rf"^ +{command} +\w", out, re.M)
    assert "COMMAND\n" not in out


def test_python_runs_the_package():
    done = subprocess.run([sys.executable, "-m", "sightline", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"sightline {__version__}\n"


def test_explain_shows_every_stage(run):
    code, out, _ = run("explain", "the cat ate the rat")
    assert code == 0
    assert re.search(r"number +9 +0 +2 +7 +0 +7 +3 +9 +0 +6 +7$", out, re.M)
    stages = ["Tokens", "Embeddings", "Projections", "Query, key", "Rotation", "Scores", "Scaled", "Mask", "Weights"]
    for stage in stages:
        assert re.search(rf"^\d+  {stage}.*\(", out, re.M), stage
    for shape in ("(11, 512)", "3 × (512, 64)", "3 × (11, 64)", "(11, 11)", "(11, 64)"):
        assert shape in out
    assert "query 2 (c) and key 9 (r), distance 7" in out
    assert "The mask allows the pair" in out
    value = walk_through().stages.weights[2, 9]
    assert f"[{value:.2f}]" in out


def test_explain_joins_words_without_quotes(run):
    small = ("--d-model", "8", "--d-k", "4")
    assert run("explain", "the", "cat", *small) == run("explain", "the cat", *small)


def test_explain_under_the_causal_mask(run):
    code, out, _ = run("explain", "--mask", "causal")
    assert code == 0
    assert re.search(r"^weight .* 0$", out, re.M)
    assert "its weight is exactly 0" in out
    assert "66 of 121 pairs allowed" in out


def test_explain_options(run):
    code, out, _ = run(
        "explain", "cat " * 9 + "rat", "--d-model", "6", "--d-k", "2", "--seed", "5", "--mask", "window:3"
    )
    assert code == 0
    assert "3 × (6, 2)" in out
    assert "⋯" in out
    assert run("explain", "the", "--d-k", "4", "--pair", "0", "0")[0] == 0


def test_explain_shows_the_published_merges(run):
    _, out, _ = run("explain")
    assert re.search(r"^a \+ t +3 +7 +17 +␣ t h e ␣ c at ␣ at e ␣ t h e ␣ r at +$", out, re.M)
    assert re.search(r"^␣ \+ th \+ e +2 +9 +11 +the ␣ c at ␣ at e the ␣ r at +$", out, re.M)


def test_explain_learns_merges_step_by_step(run):
    _, out, _ = run("explain", "low lower")
    rows = re.findall(r"^(.*) \+ (.*?) +2 +(\d+) +(\d+) ", out, re.M)
    assert rows == [("␣", "l", "6", "8"), ("␣l", "o", "7", "6"), ("␣lo", "w", "8", "4")]
    assert "No further pair of tokens occurs twice" in out
    assert "--merges" in run("explain", "low lower", "--merges", "1")[1]


LONG = "".join(f"{k} naïve 注意力 👩‍💻 e\u0301\n" for k in range(99))[:2000]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("text", ["x", " \t ", LONG, "a" * 2000])
def test_explain_fits_any_console(text, width):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_walkthrough(walk_through(text, d_model=8, d_k=8, mask="causal"), 0, console)
    lines = console.file.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    assert len(lines) < 200
    assert "⋯ " in console.file.getvalue() or len(text) < 4


def test_explain_draws_a_figure(run, tmp_path):
    code, out, _ = run("explain", "--figure", str(tmp_path / "cat.svg"))
    assert code == 0
    assert "Wrote" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat.svg"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", ""], "an empty text"),
        (["explain", "dog" * 1000], "a text of 3,000 characters"),
        (["explain", "dog", "--merges", "-1"], "-1 merges"),
        (["explain", "--mask", "diagonal"], "none, causal or window:N"),
        (["explain", "--d-k", "7"], "even width"),
        (["explain", "--figure", "cat.bmp"], ".png, .svg, .pdf"),
    ],
)
def test_errors_are_messages(run, arguments, message):
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "cure:" in err
    assert "Traceback" not in err


def test_a_file_that_cannot_be_written_is_a_message(run, tmp_path):
    code, _, err = run("explain", "--figure", str(tmp_path / "none" / "cat.svg"))
    assert code == 2
    assert "none/cat.svg': The folder" in err
    assert "does not exist; create it" in err
    assert "Traceback" not in err


def test_a_full_disk_is_a_message(run, tmp_path):
    (tmp_path / "cat.svg").symlink_to("/dev/full")
    code, _, err = run("explain", "--figure", str(tmp_path / "cat.svg"))
    assert code == 2
    assert "cat.svg': No space left on device" in err
    assert "Traceback" not in err


def test_colours_in_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(force_terminal=True, color_system="truecolor", width=90, highlight=False, file=io.StringIO())
    with console.capture() as captured:
        print_walkthrough(walk_through(mask="causal"), 0, console)
    assert "48;2;{};{};{}".format(*rgb(DARK.weights[-1])) in captured.get()


def test_info_prints_what_the_kernels_report(run):
    code, out, _ = run("info")
    assert code == 0
    for kernel in KERNELS:
        assert kernel.description.split()[0] in out
    for name in PACKAGES:
        assert re.search(rf"^{name} ", out, re.M)


def test_info_says_which_versions_are_newer_than_the_tried_ones(run, monkeypatch):
    monkeypatch.setattr("sightline.cli.info_command.version", {"torch": "99.0.1+cpu", "numpy": "2.0.0"}.__getitem__)
    monkeypatch.setattr("sightline.cli.info_command.PACKAGES", {"torch": "", "numpy": ""})
    words, tried = " ".join(run("info")[1].split()), tried_versions()
    assert f" torch 99.0.1+cpu: newer than {tried['torch'][-1]}, the newest tried " in words
    assert f" numpy 2.0.0; the newest tried is {tried['numpy'][-1]} " in words


def test_info_prints_the_gpu_that_torch_finds(run, monkeypatch):
    monkeypatch.setattr("sightline.cli.info_command.has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    _, out, _ = run("info")
    assert "NVIDIA H200" in out
    monkeypatch.setattr("sightline.cli.info_command.has_gpu", lambda: False)
    _, out, _ = run("info")
    assert "none found by torch" in out


def test_info_prints_the_threads_of_torch_programs(run, monkeypatch):
    for name in TORCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    own = f"{torch.get_num_threads()}: torch.get_num_threads(), "
    assert f"in torch programs {own}torch's own choice;" in " ".join(run("info")[1].split())
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert torch_threads() == f"{own}from OMP_NUM_THREADS=5; torch.set_num_threads changes it"
    monkeypatch.setitem(sys.modules, "torch", None)  # an import raises ImportError
    assert torch_threads() == "torch is not installed, or does not load"
    monkeypatch.setenv("SIGHTLINE_THREADS", "3")
    assert torch_threads() == "3: SIGHTLINE_THREADS, which wins over torch.set_num_threads"


def test_info_prints_the_thread_count_and_the_kernel_cache(run, monkeypatch, tmp_path):
    monkeypatch.setenv("SIGHTLINE_THREADS", "3")
    monkeypatch.setenv("SIGHTLINE_CACHE", "off")
    _, out, _ = run("info")
    assert re.search(r"^threads +3: SIGHTLINE_THREADS *$", out, re.M)
    assert re.search(r"^cache +in memory only: SIGHTLINE_CACHE=off *$", out, re.M)
    monkeypatch.setenv("SIGHTLINE_CACHE", str(tmp_path))
    (tmp_path / f"{'0' * 64}.kernel").write_bytes(bytes(3 << 20))
    _, out, _ = run("info")
    assert "1 kernels, 3.0 of 256 MiB" in " ".join(out.split())


def test_demo(run, tmp_path):
    code, out, _ = run("demo", "--output", str(tmp_path / "demo.png"), "--repeats", "1")
    assert code == 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    for text in ("the cat ate the rat", "kernel", "float64 definition", "Sightline", "NumPy", "torch SDPA", "15 ran"):
        assert text in out
    assert out.endswith("docs/course, from the start\n")
    for size in ("short", "long"):
        assert re.search(rf"^On {size} input, .*torch SDPA", out, re.M)
    before = r"^← +the token before +layer 0, head 2 +1\.00 *$"  # the mean omits the first query: no token before it
    assert re.search(before, out, re.M)
    assert (tmp_path / "demo-heads.png").read_bytes().startswith(b"\x89PNG")
    assert "whale" in (tmp_path / "demo-heads.html").read_text() or head_patterns.encoder_folder() is None


@pytest.mark.parametrize("layer", [0, 3])
def test_the_models_results_are_reproduced_within_rounding(layer):
    """The model's queries, keys and values give the model's weights and outputs, within float32 rounding."""
    cat = load("minilm_cat")
    given, mask = cat.layers[layer], padding(cat.lengths)
    out, (seen,) = attention(given.query, given.key, given.value, mask=mask, see=[weights()])
    differences, shares = measure_errors(given, mask, out, seen)
    assert max(shares) <= 1
    rough = compute_baseline(make_problem(given.query, given.key, given.value, mask=mask))
    assert_within_budget(out, given.output.astype(float), rough.output)  # as near to the model as plain NumPy
    assert_within_budget(seen, given.weights.astype(float), rough.weights)
    ours, models, mutual = differences.values()
    assert all(b <= o + m for o, m, b in zip(ours, models, mutual, strict=True))  # the triangle inequality
    assert not seen[0, :, :, cat.lengths[0] :].any()


def test_comparison_times_every_contender():
    arrays = [np.ones((1, 2, 8, 4), np.float32)] * 3
    times = compare_times(arrays, np.array([5]), 2)
    assert list(times) == ["Sightline", "torch SDPA", "NumPy"]
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())


def test_the_demo_says_who_is_faster():
    short = {"Sightline": [0.002] * 3, "torch SDPA": [0.001] * 3, "NumPy": [0.0019, 0.002, 0.0021], "a": [0.1, 0.1, 9]}
    long = {"Sightline": [1.0, 1.1, 1.2], "torch SDPA": [1.3, 1.4, 1.4], "NumPy": [124.0] * 3, "b": [1.0, 400.0, 440.0]}
    assert describe_times({"short": short, "long": long}) == [
        "On short input, torch SDPA is faster: Sightline takes 2.0 times as long.",
        "On short input, NumPy and Sightline take about the same time.",
        "On short input, Sightline is faster: a takes 50 times as long.",
        "On long input, Sightline is faster: torch SDPA takes 1.3 times as long.",
        "On long input, Sightline is faster: NumPy takes 110 to 120 times as long.",
        "On long input, times beside b are not reliable: this machine is busy.",
    ]


def test_demo_without_torch_and_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    absent = ("torch", "matplotlib")
    modules = ("sightline.cli.demo_command", "sightline.cli.head_patterns", "importlib.util")
    for target in (f"{module}.find_spec" for module in modules):
        monkeypatch.setattr(target, lambda name, *rest: None if name in absent else find(name, *rest))
    code, out, _ = run("demo", "--repeats", "1", "--layer", "0", "--head", "5")
    assert code == 0
    assert "pip install torch" in out
    assert 'pip install "sightline-attention[plot]"' in out
    assert 'pip install "sightline-attention[demo]"' in out
    assert "NumPy" in out
    assert [path.name for path in tmp_path.iterdir()] == ["sightline-demo-heads.html"]


@pytest.mark.parametrize("colours", ["truecolor", "256", "standard", None])
def test_every_head_has_a_cell(colours):
    found = head_patterns.analyse_activations()
    console = Console(force_terminal=colours is not None, color_system=colours, width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(head_patterns.pattern_map(console, found))
    assert ("48;" in captured.get()) == (colours in ("truecolor", "256"))
    first, *lines = re.sub(r"\x1b\[[\d;]*m", "", captured.get()).splitlines()
    assert first.split() == [*map(str, range(12)), "head"]
    for line, layer, masses in zip(lines, found.layers, found.masses.max(0), strict=True):
        numbers = re.sub("[←→◦=]", " ", line).split()
        assert numbers == ["layer", str(layer), *(str(min(round(100 * mass), 99)) for mass in masses)]


def test_shipped_activations():
    assert set(NAMES) == {"minilm_cat", "minilm_moby"}
    moby = load("minilm_moby")
    assert moby.texts[0].startswith("Call me Ishmael.")
    assert moby.layers[3].query.shape == (1, 12, len(moby.tokens[0]), 32)
    assert moby.layers[3].weights is None
    with pytest.raises(ParameterError, match="minilm_cat"):
        load("minilm_dog")


def test_commands_load_no_framework_they_do_not_need():
    """In a fresh interpreter, `explain` and `info` import neither torch, keras nor matplotlib."""
    program = (
        "import sys, json, sightline; first = sorted(sys.modules)\n"
        "from sightline.cli import main; main(['explain']); main(['info'])\n"
        "print(json.dumps([first, sorted(sys.modules)]))"
    )
    environment = {**os.environ, "SIGHTLINE_THREADS": "1"}  # then `info` need not ask torch in another process
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    first, later = json.loads(result.stdout.splitlines()[-1])
    assert not {"torch", "keras", "matplotlib", "rich", "llvmlite"} & set(first)
    has_driver = any(path.exists() for path in DRIVER_VERSION_FILES)  # then `info` imports torch to find the GPU
    assert not ({"keras", "matplotlib"} | (set() if has_driver else {"torch"})) & set(later)


def test_bench_times_every_problem(run):
    pytest.importorskip("torch")
    code, out, _ = run("bench", "--quick")
    assert code == 0
    for problem in bench_command.PROBLEMS:
        assert problem.name.split()[-1] in out
    differences = [float(word) for word in out.split() if re.fullmatch(r"\d\.\de[+-]\d\d", word)]
    assert len(differences) == len(bench_command.PROBLEMS) - 1  # dropout has none
    assert max(differences) < 0.1  # the largest is that of bfloat16
    code, _, err = run("bench", "--only", "no such problem")
    assert code == 2
    assert "parts of: forward, " in err
