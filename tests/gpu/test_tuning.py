"""Tests of `sightline.tune`: what it measures, accepts and saves, with a fake kernel of chosen times and errors."""

import errno
import json
import os
import shutil
import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sightline.problem.problem
from sightline import i, j
from sightline.cache_folder import CACHE_VARIABLE
from sightline.errors import KernelRefusedError, ParameterError
from sightline.gpu import Triton
from sightline.gpu.tuning import cache as tuning_cache
from sightline.gpu.tuning import configurations
from sightline.gpu.tuning.configurations import Configuration, candidates, default_configuration, try_sizes
from sightline.gpu.tuning.tuner import MIN_SPEEDUP, tune
from sightline.problem.problem import make_problem
from sightline.reference.streaming import Streaming, backward

MASK = i >= j
DEFAULT = default_configuration("interpreter", "forward", "float32", 8)


class FakeTriton(Triton):
    """A kernel that computes by streaming: given configurations are wrong, fail, or take given seconds."""

    def __init__(self, seconds=None, wrong=(), failing=()):
        super().__init__("interpreter")
        self.seconds, self.wrong, self.failing, self.ran = seconds or {}, wrong, failing, []

    def run(self, problem, threads=None):
        sizes = self._sizes("forward", problem)
        result = Streaming().run(problem)
        result.output.add_(1e-3 * (sizes in self.wrong))
        return result

    def backward(self, problem, d_output, d_lse, saved, wanted_tables, threads=None, statistic_gradients=None):
        self._sizes("backward", problem)
        return backward(problem, d_output, d_lse)

    def _sizes(self, name, problem):
        sizes = configurations.select(name, problem, self.architecture)
        if sizes in self.failing:
            raise RuntimeError("out of resource: shared memory")
        self.ran.append((name, sizes))
        return sizes

    def timer(self, call):
        self.ran.clear()
        call()
        return self.seconds.get(self.ran[-1], 1.0)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the tuning cache, a new one for each test. No problem counts as small."""
    monkeypatch.setattr(sightline.problem.problem, "MAX_SMALL_FLOPS", -1)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    tuning_cache.clear()
    yield tmp_path / "tuned"
    tuning_cache.clear()


def arrays(width=8):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1, 2, 40, width, generator=generator) for _ in range(3)]


def candidate_list():
    """Return the candidates other than the default."""
    return [sizes for sizes in candidates("forward", make_problem(*arrays()), "interpreter") if sizes != DEFAULT]


def tuned(kernel, gradients=False, **options):
    return tune(*arrays(), mask=MASK, kernel=kernel, timer=kernel.timer, show=False, gradients=gradients, **options)


def selected(problem=None):
    return configurations.select("forward", problem or make_problem(*arrays(), mask=MASK), "interpreter")


def test_the_fastest_valid_configuration_is_saved_and_selected(folder):
    wrong, failing, best = candidate_list()[:3]
    kernel = FakeTriton({("forward", wrong): 0.1, ("forward", best): 0.5}, wrong={wrong}, failing={failing})
    assert selected() == DEFAULT
    (found,) = tuned(kernel).found
    assert (found.best, found.default) == (best, DEFAULT)
    assert (found.before, found.after) == (1.0, 0.5)
    assert (found.tried, found.wrong, found.failed) == (len(candidate_list()) + 1, 1, 1)
    assert found.reason == "RuntimeError: out of resource: shared memory"
    assert found.path.parent == folder
    assert selected() == best
    assert [each["configuration"] for each in tuning_cache.list_entries()] == [asdict(best)]
    with try_sizes({"forward": wrong}):
        assert selected() == wrong, "a trial takes precedence over the cache"
    with try_sizes({}):
        assert selected() == DEFAULT, "a trial without sizes uses the default table, not the cache"


def test_only_problems_of_the_same_structure_use_a_saved_configuration():
    best = candidate_list()[0]
    tuned(FakeTriton({("forward", best): 0.5}))
    longer = [torch.cat([x, x], dim=-2) for x in arrays()]
    assert selected(make_problem(*longer, mask=MASK)) == best
    for query, key, value in (arrays(16), [x.double() for x in arrays()]):
        assert selected(make_problem(query, key, value, mask=MASK)) != best
    assert selected(make_problem(*arrays(), mask=i > j)) == DEFAULT
    assert selected(make_problem(*arrays())) == DEFAULT
    assert configurations.select("forward", make_problem(*arrays(), mask=MASK), "sm_90") != best


def test_backward_kernels_are_tuned_separately():
    first, second = candidate_list()[:2]
    tuning = tuned(FakeTriton({("forward", first): 0.5, ("backward", second): 0.25}), gradients=True)
    assert {each.kernel: each.best for each in tuning.found} == {"forward": first, "backward": second}
    problem = make_problem(*arrays(), mask=MASK)
    assert configurations.select("backward", problem, "interpreter") == second


def test_statistics_are_tuned_and_checked_with_their_problem():
    best, wrong = candidate_list()[:2]

    class FakeWithWrongStatistics(FakeTriton):
        def run(self, problem, threads=None):
            result = super().run(problem)
            seen = tuple(array * (1 + 1e-3 * (self.ran[-1][1] == wrong)) for array in result.seen)
            return replace(result, seen=seen)

    (found,) = tuned(
        FakeWithWrongStatistics({("forward", best): 0.5, ("forward", wrong): 0.1}), see=[sightline.entropy()]
    ).found
    assert (found.best, found.wrong) == (best, 1)
    assert selected() == DEFAULT
    assert selected(make_problem(*arrays(), mask=MASK, see=[sightline.entropy(), sightline.lse()])) == best


def test_a_small_speedup_is_not_saved(folder):
    kernel = FakeTriton({("forward", candidate_list()[0]): 1.0 / (1 + (MIN_SPEEDUP - 1) / 2)})
    (found,) = tuned(kernel).found
    assert found.best == found.default == DEFAULT
    assert found.path is None
    assert not any(folder.iterdir())


def test_a_default_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="shared memory"):
        tuned(FakeTriton(failing={DEFAULT}))


def test_the_printed_table(capsys):
    best = candidate_list()[0]
    kernel = FakeTriton({("forward", best): 0.5})
    tune(*arrays(), mask=MASK, kernel=kernel, timer=kernel.timer, gradients=False)
    out = capsys.readouterr().out
    for text in ("forward", f"{best.rows} × {best.keys}", "2.00×", "500 ms", "0 wrong", "saved in"):
        assert text in out


def test_the_table_says_why_nothing_is_saved_and_what_failed(monkeypatch):
    slow = tuned(FakeTriton(failing={candidate_list()[0]}))
    assert "nothing saved: no configuration was" in str(slow)
    assert "forward: first error: RuntimeError: out of resource" in str(slow)
    assert len(repr(slow).splitlines()) == 1, "an interactive prompt shows one line, not the printed table again"
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert "nothing saved: SIGHTLINE_CACHE=off" in str(tuned(FakeTriton({("forward", candidate_list()[0]): 0.5})))


def test_an_unknown_argument_is_reported_for_tune():
    with pytest.raises(TypeError, match=r"tune\(\) got an unexpected keyword argument 'threads'"):
        tune(*arrays(), threads=2)


# -- the cache on disk -------------------------------------------------------------------------------------------------


def test_nothing_is_saved_when_the_cache_is_off(monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    (found,) = tuned(FakeTriton({("forward", candidate_list()[0]): 0.5})).found
    assert found.best == candidate_list()[0]
    assert found.path is None
    assert selected() == DEFAULT


DAMAGE = {
    "truncated": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "\x00",
    "another device": lambda text: text.replace('"interpreter"', '"NVIDIA H200 (sm_90)"'),
    "too large": lambda text: text.replace('"rows": 16', '"rows": 1000000').replace('"rows": 32', '"rows": 1000000'),
    "not a number": lambda text: text.replace('"warps": 1', '"warps": "1"'),
    "zero rows": lambda text: text.replace('"rows": 16', '"rows": 0').replace('"rows": 32', '"rows": 0'),
    "not a power of two": lambda text: text.replace('"rows": 16', '"rows": 24').replace('"rows": 32', '"rows": 24'),
    "zero stages": lambda text: text.replace('"stages": 1', '"stages": 0'),
    "nested too deeply": lambda text: "[" * 100_000,
    "a field missing": lambda text: text.replace('"warps"', '"workers"'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_ignored(damage):
    (found,) = tuned(FakeTriton({("forward", candidate_list()[0]): 0.5})).found
    text = found.path.read_text()
    damaged = DAMAGE[damage](text)
    assert damaged != text
    found.path.write_text(damaged)
    tuning_cache.clear()
    assert selected() == DEFAULT


@pytest.mark.parametrize("path", ["/dev/null/x", "/" + "x" * 5000, "~no user of that name/x", "no/absolute/path"])
def test_an_unusable_folder_affects_no_call_and_is_an_error_before_tuning(path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, path)
    tuning_cache.clear()
    assert selected() == DEFAULT
    assert tuning_cache.list_entries() == []
    kernel = FakeTriton()
    with pytest.raises(ParameterError, match=CACHE_VARIABLE):
        tuned(kernel)
    assert not kernel.ran


@pytest.mark.skipif(os.name != "posix", reason="home folders of POSIX")
def test_without_a_home_folder_nothing_is_saved(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    tuning_cache.clear()
    assert selected() == DEFAULT
    assert tuning_cache.list_entries() == []
    with pytest.raises(ParameterError, match="no home folder"):
        tuned(FakeTriton())
    assert not any(tmp_path.iterdir())


def test_an_empty_file_of_the_driver(tmp_path, monkeypatch):
    (tmp_path / "version").touch()
    monkeypatch.setattr(tuning_cache, "DRIVER_VERSION_FILES", (tmp_path / "version",))
    assert tuning_cache.environment.__wrapped__()["driver"] == ""


@pytest.mark.parametrize("when", ["before tuning", "after tuning"])
def test_a_full_disk_is_an_error_that_names_the_folder(folder, when, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((tempfile, "TemporaryFile") if when == "before tuning" else (Path, "write_text")), fail)
    kernel = FakeTriton({("forward", candidate_list()[0]): 0.5})
    with pytest.raises(ParameterError, match=f"cannot be saved in {folder}: .*No space left on device"):
        tuned(kernel)
    assert bool(kernel.ran) == (when == "after tuning")
    assert not any(folder.iterdir())


def test_a_kernel_s_name_is_refused():
    with pytest.raises(ParameterError, match="kernel='triton'"):
        sightline.tune(*arrays(), kernel="triton")


def test_small_problems_are_not_tuned(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ParameterError, match=r"a small problem, .* = \(1, 2, 40, 40\), whose launches are not tuned"):
        tuned(FakeTriton())


@pytest.mark.parametrize("choice", ["gradients", "show"])
def test_a_flag_must_be_a_bool(choice):
    """The string "no" is true, so `show="no"` would print."""
    with pytest.raises(ParameterError, match=f"{choice}='no'"):
        tune(*arrays(), **{"kernel": FakeTriton(), "show": False, choice: "no"})


@pytest.mark.parametrize(
    "timer", [5, lambda call: None, lambda call: "1", lambda call: float("nan"), lambda call: -1.0]
)
def test_a_timer_that_returns_no_time(timer):
    with pytest.raises(ParameterError, match="timer"):
        tune(*arrays(), kernel=FakeTriton(), timer=timer, show=False, gradients=False)


def test_the_table_says_that_no_kernel_runs():
    kernel = FakeTriton()
    kernel.run = Streaming().run  # no kernel selects sizes, as without queries or keys
    assert "no kernel runs" in str(tuned(kernel))


def test_other_sources_or_versions_find_no_entry(monkeypatch):
    tuned(FakeTriton({("forward", candidate_list()[0]): 0.5}))
    machine = tuning_cache.environment()
    for name in machine:
        tuning_cache.clear()
        monkeypatch.setattr(tuning_cache, "environment", lambda name=name: machine | {name: "another"})
        assert selected() == DEFAULT
        assert tuning_cache.list_entries() == []


def test_a_change_of_any_source_changes_the_hash(monkeypatch, tmp_path):
    """Change a source in every folder under gpu/ and formula/."""
    package = Path(sightline.__file__).parent
    for folder in ("gpu", "formula"):
        shutil.copytree(package / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(tuning_cache, "__file__", str(tmp_path / "gpu" / "tuning" / "cache.py"))
    before, folders = tuning_cache._hash_sources(), {path.parent for path in tmp_path.rglob("*.py")}
    assert {"codegen", "kernels", "launch", "tuning", "formula"} <= {folder.name for folder in folders}
    for folder in sorted(folders):
        next(iter(sorted(folder.glob("*.py")))).write_text("# changed")
        assert tuning_cache._hash_sources() != before
        before = tuning_cache._hash_sources()


def test_concurrent_writers_and_readers(folder):
    """A concurrent reader finds a complete file of one of the writers."""
    problem, loaded = make_problem(*arrays()), []

    def writes(k):
        for _ in range(20):
            tuning_cache.store("forward", problem, "interpreter", {"configuration": k, "filling": "x" * 10000})
            loaded.append(tuning_cache.load("forward", problem, "interpreter"))

    threads = [threading.Thread(target=writes, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {found["configuration"] for found in loaded} <= set(range(4))
    assert len(list(folder.iterdir())) == 1
    assert json.loads(next(folder.iterdir()).read_text())["for"]["kernel"] == "forward"


# -- refusals and candidates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [arrays(), [np.ones((2, 4, 8), np.float32)] * 3], ids=["torch", "numpy"])
def test_the_error_without_a_gpu_has_a_cure(given):
    with pytest.raises(KernelRefusedError, match="cuda") as caught:
        sightline.tune(*given)
    cure = str(caught.value).partition("cure:")[2]
    if isinstance(given[0], np.ndarray):
        assert "torch tensors on cuda" in cure
    else:
        assert "move query, key and value: .to('cuda')" in cure
        assert ("a torch built for CUDA or ROCm" in cure) == (not (torch.version.cuda or torch.version.hip))


def test_candidates_fit_the_gpu():
    problem = make_problem(*[torch.empty(1, 1, 8, 256, dtype=torch.bfloat16)] * 3)
    small, large = (candidates("backward_keys", problem, name) for name in ("sm_86", "sm_90"))
    assert set(small) < set(large)
    assert Configuration(128, 128, 8, 4) not in large
    assert len(candidates("forward", make_problem(*[torch.empty(1, 1, 8, 64, dtype=torch.bfloat16)] * 3), "gfx942")) > 1
