"""`sightline.tune`: what it measures, lets count and keeps, with sizes that cost and err as they are told."""

import json
import shutil
import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sightline
from sightline import i, j
from sightline.errors import KernelRefusedError, ParameterError
from sightline.gpu import Triton
from sightline.gpu.tuning import cache as tuning_cache
from sightline.gpu.tuning import selection
from sightline.gpu.tuning.configurations import Configuration, default_configuration
from sightline.gpu.tuning.selection import candidates, try_sizes
from sightline.gpu.tuning.tuner import MIN_SPEEDUP, tune
from sightline.problem import make_problem
from sightline.streaming import Streaming, backward

MASK = i >= j
TABLE = default_configuration("interpreter", "forward", "float32", 8)


class Told(Triton):
    """Answers by plain tiles whatever its sizes; some are wrong, some fail, each takes the time it is told."""

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
        sizes = selection.select(name, problem, self.architecture)
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
    """Findings of a test lie in a folder of its own."""
    monkeypatch.setenv(tuning_cache.CACHE_VARIABLE, str(tmp_path))
    tuning_cache.clear()
    yield tmp_path / "tuned"
    tuning_cache.clear()


def arrays(width=8):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1, 2, 40, width, generator=generator) for _ in range(3)]


def others():
    return [sizes for sizes in candidates("forward", make_problem(*arrays()), "interpreter") if sizes != TABLE]


def tuned(kernel, gradients=False, **options):
    return tune(*arrays(), mask=MASK, kernel=kernel, timer=kernel.timer, show=False, gradients=gradients, **options)


def taken(problem=None):
    return selection.select("forward", problem or make_problem(*arrays(), mask=MASK), "interpreter")


def test_the_fastest_that_is_right_is_kept_and_taken(folder):
    wrong, failing, best = others()[:3]
    kernel = Told({("forward", wrong): 0.1, ("forward", best): 0.5}, wrong={wrong}, failing={failing})
    assert taken() == TABLE
    (found,) = tuned(kernel).found
    assert (found.best, found.default) == (best, TABLE)
    assert (found.before, found.after) == (1.0, 0.5)
    assert (found.tried, found.wrong, found.failed) == (len(others()) + 1, 1, 1)
    assert found.reason == "RuntimeError: out of resource: shared memory"
    assert found.path.parent == folder
    assert taken() == best
    assert [each["configuration"] for each in tuning_cache.list_entries()] == [asdict(best)]
    with try_sizes({"forward": wrong}):
        assert taken() == wrong, "a trial goes before what was found"
    with try_sizes({}):
        assert taken() == TABLE, "and is beside the table, not beside an earlier finding"


def test_it_is_taken_by_problems_of_the_same_structure_alone():
    best = others()[0]
    tuned(Told({("forward", best): 0.5}))
    longer = [torch.cat([x, x], dim=-2) for x in arrays()]
    assert taken(make_problem(*longer, mask=MASK)) == best
    for query, key, value in (arrays(16), [x.double() for x in arrays()]):
        assert taken(make_problem(query, key, value, mask=MASK)) != best
    assert taken(make_problem(*arrays(), mask=i > j)) == TABLE
    assert taken(make_problem(*arrays())) == TABLE
    assert selection.select("forward", make_problem(*arrays(), mask=MASK), "sm_90") != best


def test_backward_kernels_are_tuned_apart():
    first, second = others()[:2]
    told = tuned(Told({("forward", first): 0.5, ("backward", second): 0.25}), gradients=True)
    assert {one.kernel: one.best for one in told.found} == {"forward": first, "backward": second}
    problem = make_problem(*arrays(), mask=MASK)
    assert selection.select("backward", problem, "interpreter") == second


def test_statistics_are_tuned_and_judged_with_the_problem_that_asks_for_them():
    best, wrong = others()[:2]

    class Seeing(Told):
        def run(self, problem, threads=None):
            result = super().run(problem)
            seen = tuple(array * (1 + 1e-3 * (self.ran[-1][1] == wrong)) for array in result.seen)
            return replace(result, seen=seen)

    (found,) = tuned(Seeing({("forward", best): 0.5, ("forward", wrong): 0.1}), see=[sightline.entropy()]).found
    assert (found.best, found.wrong) == (best, 1)
    assert taken() == TABLE
    assert taken(make_problem(*arrays(), mask=MASK, see=[sightline.entropy(), sightline.lse()])) == best


def test_what_is_hardly_faster_is_noise(folder):
    kernel = Told({("forward", others()[0]): 1.0 / (1 + (MIN_SPEEDUP - 1) / 2)})
    (found,) = tuned(kernel).found
    assert found.best == found.default == TABLE
    assert found.path is None
    assert not any(folder.iterdir())


def test_a_default_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="shared memory"):
        tuned(Told(failing={TABLE}))


def test_the_table_it_prints(capsys):
    best = others()[0]
    kernel = Told({("forward", best): 0.5})
    tune(*arrays(), mask=MASK, kernel=kernel, timer=kernel.timer, gradients=False)
    out = capsys.readouterr().out
    for words in ("forward", f"{best.rows} × {best.keys}", "2.00×", "500 ms", "0 wrong", "kept in"):
        assert words in out


def test_the_table_says_why_nothing_is_kept_and_what_failed(monkeypatch):
    slow = tuned(Told(failing={others()[0]}))
    assert "nothing kept: no sizes were" in str(slow)
    assert "forward: the first that failed: RuntimeError: out of resource" in str(slow)
    assert len(repr(slow).splitlines()) == 1, "what is printed is not printed once more by a prompt"
    monkeypatch.setenv(tuning_cache.CACHE_VARIABLE, "off")
    assert "nothing kept: SIGHTLINE_CACHE=off" in str(tuned(Told({("forward", others()[0]): 0.5})))


def test_an_unknown_word_is_said_to_be_tune_s():
    with pytest.raises(TypeError, match=r"tune\(\) got an unexpected keyword argument 'threads'"):
        tune(*arrays(), threads=2)


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_where_nothing_is_to_be(monkeypatch):
    monkeypatch.setenv(tuning_cache.CACHE_VARIABLE, "off")
    (found,) = tuned(Told({("forward", others()[0]): 0.5})).found
    assert found.best == others()[0]
    assert found.path is None
    assert taken() == TABLE


DAMAGE = {
    "cut short": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "\x00",
    "another's": lambda text: text.replace('"interpreter"', '"NVIDIA H200 (sm_90)"'),
    "too large": lambda text: text.replace('"rows": 16', '"rows": 1000000').replace('"rows": 32', '"rows": 1000000'),
    "no number": lambda text: text.replace('"warps": 1', '"warps": "1"'),
    "no lines to compute": lambda text: text.replace('"rows": 16', '"rows": 0').replace('"rows": 32', '"rows": 0'),
    "no power of two": lambda text: text.replace('"rows": 16', '"rows": 24').replace('"rows": 32', '"rows": 24'),
    "never launched": lambda text: text.replace('"stages": 1', '"stages": 0'),
    "nested without end": lambda text: "[" * 100_000,
    "a part missing": lambda text: text.replace('"warps"', '"workers"'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_does_not_read_as_expected_is_none(damage):
    (found,) = tuned(Told({("forward", others()[0]): 0.5})).found
    text = found.path.read_text()
    damaged = DAMAGE[damage](text)
    assert damaged != text
    found.path.write_text(damaged)
    tuning_cache.clear()
    assert taken() == TABLE


@pytest.mark.parametrize("place", ["/dev/null/x", "/" + "x" * 5000, "~nobody of that name/x", "no/absolute/path"])
def test_a_folder_that_cannot_be_hinders_no_call_and_is_told_before_tuning(place, monkeypatch):
    monkeypatch.setenv(tuning_cache.CACHE_VARIABLE, place)
    tuning_cache.clear()
    assert taken() == TABLE
    kernel = Told()
    with pytest.raises(ParameterError, match=tuning_cache.CACHE_VARIABLE):
        tuned(kernel)
    assert not kernel.ran


def test_a_kernel_s_name_is_no_kernel():
    with pytest.raises(ParameterError, match="kernel='triton'"):
        sightline.tune(*arrays(), kernel="triton")


@pytest.mark.parametrize("choice", ["gradients", "specialised", "show"])
def test_a_choice_that_is_neither_true_nor_false(choice):
    """Of a word the truth would be taken: "no" would try a kernel that may never end."""
    with pytest.raises(ParameterError, match=f"{choice}='no'"):
        tune(*arrays(), **{"kernel": Told(), "show": False, choice: "no"})


@pytest.mark.parametrize(
    "timer", [5, lambda call: None, lambda call: "1", lambda call: float("nan"), lambda call: -1.0]
)
def test_a_timer_that_tells_no_time(timer):
    with pytest.raises(ParameterError, match="timer"):
        tune(*arrays(), kernel=Told(), timer=timer, show=False, gradients=False)


def test_where_no_kernel_runs_the_table_says_so():
    kernel = Told()
    kernel.run = Streaming().run  # as without queries or keys
    assert "no kernel runs" in str(tuned(kernel))


def test_other_sources_or_versions_find_nothing(monkeypatch):
    tuned(Told({("forward", others()[0]): 0.5}))
    machine = tuning_cache.environment()
    for name in machine:
        tuning_cache.clear()
        monkeypatch.setattr(tuning_cache, "environment", lambda name=name: machine | {name: "another"})
        assert taken() == TABLE
        assert tuning_cache.list_entries() == []


def test_a_change_of_any_source_changes_the_hash(monkeypatch, tmp_path):
    """In every folder under gpu/ and formula/."""
    package = Path(sightline.__file__).parent
    for folder in ("gpu", "formula"):
        shutil.copytree(package / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(tuning_cache, "__file__", str(tmp_path / "gpu" / "tuning" / "cache.py"))
    before, folders = tuning_cache._hash_sources(), {path.parent for path in tmp_path.rglob("*.py")}
    assert {"codegen", "kernels", "launch", "tuning", "hopper", "formula"} <= {folder.name for folder in folders}
    for folder in sorted(folders):
        next(iter(sorted(folder.glob("*.py")))).write_text("# changed")
        assert tuning_cache._hash_sources() != before
        before = tuning_cache._hash_sources()


def test_many_may_write_at_once(folder):
    """Whoever reads meanwhile meets a whole file, of one writer or another."""
    problem, met = make_problem(*arrays()), []

    def writes(k):
        for _ in range(20):
            tuning_cache.store("forward", problem, "interpreter", {"configuration": k, "filling": "x" * 10000})
            met.append(tuning_cache.load("forward", problem, "interpreter"))

    threads = [threading.Thread(target=writes, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {found["configuration"] for found in met} <= set(range(4))
    assert len(list(folder.iterdir())) == 1
    assert json.loads(next(folder.iterdir()).read_text())["for"]["kernel"] == "forward"


# -- before ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [arrays(), [np.ones((2, 4, 8), np.float32)] * 3], ids=["torch", "numpy"])
def test_without_a_gpu_it_says_what_to_do(given):
    with pytest.raises(KernelRefusedError, match="cuda") as caught:
        sightline.tune(*given)
    cure = str(caught.value).partition("cure:")[2]
    if isinstance(given[0], np.ndarray):
        assert "torch tensors on cuda" in cure
    else:
        assert "move query, key and value: .to('cuda')" in cure
        assert ("a torch built for CUDA or ROCm" in cure) == (not (torch.version.cuda or torch.version.hip))


def test_candidates_fit_the_machine():
    problem = make_problem(*[torch.empty(1, 1, 8, 256, dtype=torch.bfloat16)] * 3)
    small, large = (candidates("backward_keys", problem, name) for name in ("sm_86", "sm_90"))
    assert set(small) < set(large)
    assert Configuration(128, 128, 8, 4) not in large
    assert len(candidates("forward", make_problem(*[torch.empty(1, 1, 8, 64, dtype=torch.bfloat16)] * 3), "gfx942")) > 1


def test_on_hopper_the_specialised_kernel_is_tried_if_asked_and_taken_where_it_serves():
    half = [torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16) for _ in range(3)]
    problem, dropping = make_problem(*half), make_problem(*half, dropout=0.5, seed=1)

    def able(kernel, asked, specialised=True):
        return [sizes for sizes in candidates(kernel, asked, "sm_90", specialised) if sizes.specialised]

    tried = able("forward", problem)
    assert tried
    assert not able("forward", problem, specialised=False)
    assert not able("backward_keys", problem)
    assert not able("forward", dropping)
    with try_sizes({"forward": tried[0]}):
        assert selection.select("forward", problem, "sm_90") == tried[0]
        assert not selection.select("forward", dropping, "sm_90").specialised
