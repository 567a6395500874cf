"""What a system without POSIX must do too: calls, kernels from disk, threads, keys on disk.

These tests run twice: as they are, and in a Python without the names of POSIX (`pretended_system`).
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import sightline
from sightline import i, j, table
from sightline.call.request import machine_setting
from sightline.cpu.calls.python_functions import launcher
from sightline.cpu.runtime import compile, disk_cache, thread_count, thread_team
from sightline.cpu.runtime.disk_cache import CACHE_VARIABLE
from sightline.cpu.runtime.machine import CPU_VARIABLE, machine_names, missing_features, named_machine, native_machine

HELPERS = Path(__file__).parent / "helpers"
IS_PRETENDED = "pretended_system" in sys.modules
START = "import pretended_system; pretended_system.pretend()\n" if IS_PRETENDED else ""
PROGRAM = """
import numpy as np, sightline
from sightline import i, j, table
from sightline.cpu.runtime import compile, disk_cache
q = np.random.default_rng(0).normal(size=(1, 2, 70, 8)).astype(np.float32)
output = sightline.attention(q, q, q, mask=i >= j, score=sightline.s + table(np.arange(70.0))[i - j], kernel="cpu")
print(output.tobytes().hex()[:64], dict(compile.counts), disk_cache.state().error)
"""


def environment(**changes):
    """Return an environment in which another Python finds this package and the helpers of the tests."""
    paths = [str(Path(sightline.__file__).parents[1]), str(HELPERS)]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)} | changes


def run(program, **changes):
    """Return the last line that a program prints in another process."""
    command = [sys.executable, "-c", START + program]
    done = subprocess.run(
        command, env=environment(**changes), capture_output=True, text=True, errors="replace", timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the disk cache, in the home folder of a user whose kernels are not in memory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(disk_cache, "_errors", [])
    monkeypatch.setattr(disk_cache, "_write_budget", {})
    monkeypatch.setattr(compile, "_cache", compile.KernelCache())
    return tmp_path / "kernels"


@pytest.mark.skipif(IS_PRETENDED, reason="the system is pretended already")
def test_without_the_names_of_posix():
    command = [sys.executable, "-m", "pytest", "-p", "pretended_system", "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, __file__], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "1 skipped" in done.stdout, done.stdout


@pytest.mark.skipif(not IS_PRETENDED, reason="for a pretended system")
def test_the_names_are_gone():
    """The test runs in the other process alone."""
    assert not hasattr(os, "geteuid")
    assert not hasattr(os.fstat(0), "st_blocks")
    assert "torch" not in sys.modules, "torch loads OpenMP"
    with pytest.raises(ImportError):
        import fcntl  # noqa: F401


# -- kernels on disk -----------------------------------------------------------------------------------------------


def test_another_process_loads_the_kernels(folder):
    first, second = (run(PROGRAM, PYTHONHASHSEED=seed) for seed in "12")
    assert first.endswith("{'compiled': 2} None")  # a kernel with a formula has two parts
    assert second == first.replace("compiled", "read")
    assert [file.suffix for file in folder.iterdir()] == [".kernel"] * 2


def test_reading_an_old_kernel_updates_its_time(folder):
    run(PROGRAM)
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    assert "read" in run(PROGRAM)
    assert all(time.time() - file.stat().st_mtime < 100 for file in folder.iterdir())


def test_a_kernel_that_is_being_read_is_written_again(folder):
    disk_cache.write("a" * 64 + ".kernel", b"code")
    with (folder / ("a" * 64 + ".kernel")).open("rb"):
        disk_cache.write("a" * 64 + ".kernel", b"code")
    assert disk_cache.state().error is None
    assert disk_cache.read("a" * 64 + ".kernel") == b"code"
    assert len(list(folder.iterdir())) == 1


def test_a_kernel_that_is_being_read_is_not_evicted(folder, monkeypatch):
    names = [letter * 64 + ".kernel" for letter in "abc"]
    disk_cache.write(names[0], bytes(100))
    monkeypatch.setattr(disk_cache, "MAX_FOLDER_BYTES", 300)
    monkeypatch.setattr(disk_cache, "_write_budget", {})
    with (folder / names[0]).open("rb"):
        for name in names[1:]:
            disk_cache.write(name, bytes(100))
    assert disk_cache.state().error is None
    assert disk_cache.read(names[2]) == bytes(100)


@pytest.mark.skipif(not IS_PRETENDED, reason="this system reports the owners of files")
def test_a_folder_outside_of_the_home_folder_is_not_used(folder, monkeypatch, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    monkeypatch.setenv(CACHE_VARIABLE, str(outside))
    answer = run(PROGRAM)
    assert "{'compiled': 2}" in answer
    assert f"set SIGHTLINE_CACHE to a folder inside {folder.parent}" in answer
    assert not any(outside.iterdir())


# -- calls and threads ---------------------------------------------------------------------------------------------


def problem_arrays():
    return [np.random.default_rng(k).normal(size=(1, 4, 300, 16)).astype(np.float32) for k in range(3)]


def test_calls_are_right_and_repeated_calls_are_direct():
    """Repeated calls run in generated functions of Python, which need the C API of this process."""
    assert launcher() is not None
    arrays, mask = problem_arrays(), (i >= j) & (i - j < 99)
    score = sightline.s + table(np.linspace(-1, 1, 100))[i - j]
    exact = sightline.attention(*arrays, mask=mask, score=score, kernel="reference")
    outputs = [sightline.attention(*arrays, mask=mask, score=score) for _ in range(12)]
    np.testing.assert_allclose(outputs[0], exact, atol=1e-5)
    assert {output.tobytes() for output in outputs} == {outputs[0].tobytes()}


@pytest.mark.skipif("torch" in sys.modules, reason="torch loads OpenMP")
def test_threads_without_openmp():
    arrays = problem_arrays()
    one, three = (sightline.attention(*arrays, mask=i >= j, kernel="cpu", threads=k) for k in (1, 3))
    assert one.tobytes() == three.tobytes()
    assert thread_team._openmp_team() is None
    assert len(thread_team._teams.pool.threads) >= 2


def test_the_number_of_threads_has_a_default(monkeypatch):
    monkeypatch.delenv(thread_count.THREADS_VARIABLE, raising=False)
    assert 1 <= thread_count.available_processors() <= os.cpu_count()


def test_the_environment_selects_the_instructions(monkeypatch):
    names = [name for name in machine_names() if not missing_features(native_machine(), named_machine(name))]
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    assert machine_setting() is None
    monkeypatch.setenv(CPU_VARIABLE, names[-1])
    assert machine_setting() in (names[-1], names[-1].encode())


@pytest.mark.parametrize("arguments", [["explain", "to be or not to be"], ["bench", "--help"]])
def test_commands_print_to_a_console_of_windows(arguments):
    """The encoding of the console lacks most signs of formulas."""
    assert run(f"from sightline.cli import main\nmain({arguments})", PYTHONIOENCODING="cp1252")


# -- keys on disk --------------------------------------------------------------------------------------------------


def test_an_output_file_is_whole_or_not_there(tmp_path):
    def stop(finished, total):
        raise KeyboardInterrupt

    x = np.random.default_rng(0).normal(size=(1, 2, 300, 8))
    with pytest.raises(KeyboardInterrupt):
        sightline.attention_from_disk(x, x, x, output=tmp_path / "output.npy", progress=stop)
    assert list(tmp_path.iterdir()) == []
    output = sightline.attention_from_disk(x, x, x, output=tmp_path / "output.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "output.npy"), output)
    assert len(list(tmp_path.iterdir())) == 1
