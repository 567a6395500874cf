"""The kernel caches in memory and on disk, shared by threads and processes; files that are never trusted."""

import dataclasses
import errno
import gc
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import minimal_kernels
from minimal_kernels import called, constant, kernel, number_of
from sightline.cpu.runtime import compile, disk_cache
from sightline.cpu.runtime.disk_cache import CACHE_VARIABLE
from sightline.cpu.runtime.machine import host

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the disk cache needs the owners of files")

# arguments: address of x, address of the result, number of bytes to clear at the result first
LIBRARY = """
declare float @llvm.sin.f32(float)
declare float @llvm.pow.f32(float, float)
declare float @tanhf(float)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
define void @apply(ptr %arguments) {
  %source = load ptr, ptr %arguments
  %second = getelementptr i8, ptr %arguments, i64 8
  %target = load ptr, ptr %second
  %third = getelementptr i8, ptr %arguments, i64 16
  %bytes = load i64, ptr %third
  call void @llvm.memset.p0.i64(ptr %target, i8 0, i64 %bytes, i1 false)
  %x = load float, ptr %source
  %sin = call float @llvm.sin.f32(float %x)
  %pow = call float @llvm.pow.f32(float %sin, float %x)
  %tanh = call float @tanhf(float %pow)
  store float %tanh, ptr %target
  ret void
}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a disk cache for one test. No kernel is in memory, and no error is recorded."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(disk_cache, "_errors", [])
    monkeypatch.setattr(disk_cache, "_write_budget", {})
    monkeypatch.setattr(compile, "counts", type(compile.counts)())
    forget(monkeypatch)
    return tmp_path / "kernels"


def forget(monkeypatch):
    """Forget the kernels in memory, as in a new process."""
    monkeypatch.setattr(compile, "_cache", compile.KernelCache())


def files(folder):
    return sorted(folder.iterdir())


# -- memory --------------------------------------------------------------------------------------------------------


def test_the_c_library_is_found_by_code_from_disk(folder, monkeypatch):
    x, target = np.array([0.7], np.float32), np.ones(5, np.float32)
    arguments = np.array([x.ctypes.data, target.ctypes.data, 16], np.int64)
    for _ in range(2):
        target[:] = 1
        called(compile.get_or_compile("library", "apply", lambda: LIBRARY, host()), arguments)
        expected = math.tanh(math.sin(x[0]) ** x[0])
        assert abs(target[0] - expected) <= 4 * np.spacing(np.float32(expected))
        np.testing.assert_array_equal(target[1:], [0, 0, 0, 1])
        forget(monkeypatch)
    assert compile.counts == {"compiled": 1, "read": 1}


CALLER = """
declare i64 @number()
define void @apply(ptr %arguments) {
  %address = load ptr, ptr %arguments
  %found = call i64 @number()
  store i64 %found, ptr %address
  ret void
}
"""


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_kernels_share_a_part(folder, monkeypatch, is_on_disk):
    """The common part is compiled once, and each part is a file on disk."""
    if not is_on_disk:
        monkeypatch.setenv(CACHE_VARIABLE, "off")
    common = compile.Part("caller", lambda: CALLER)

    def compute(number):
        def build():
            return f"define i64 @number() {{ ret i64 {number} }}"

        target = np.zeros(1, np.int64)
        called(compile.get_or_compile(f"{number}", "apply", build, host(), common), np.array([target.ctypes.data]))
        return target[0]

    assert [compute(number) for number in (5, 7, 5)] == [5, 7, 5]
    assert compile.counts == {"compiled": 3}
    forget(monkeypatch)
    assert compute(7) == 7
    assert compile.counts == ({"compiled": 3, "read": 2} if is_on_disk else {"compiled": 5})


def test_few_common_parts_stay_in_memory(folder, monkeypatch):
    monkeypatch.setattr(compile, "MAX_COMMON_CODES", 2)
    for number in range(4):
        common = compile.Part(f"part {number}", lambda: CALLER)
        compile.get_or_compile(f"{number}", "apply", lambda: "define i64 @number() { ret i64 1 }", host(), common)
    assert [key.splitlines()[-1] for key in compile._cache.common_codes] == ["part 2", "part 3"]


def test_one_thread_compiles_and_all_get_the_kernel(folder, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    written = []

    def write():
        written.append(threading.get_ident())
        time.sleep(0.05)
        return constant(7)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: compile.get_or_compile("seven", "apply", write, host()), range(8)))
    assert {number_of(address) for address in found} == {7}
    assert len(written) == 1


def test_different_kernels_are_written_at_once(folder):
    meeting = threading.Barrier(2, timeout=20)

    def write(number):
        meeting.wait()
        return constant(number)

    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda n: compile.get_or_compile(f"meet {n}", "apply", lambda: write(n), host()), (1, 2))
        assert [number_of(address) for address in found] == [1, 2]


def test_a_failed_kernel_can_be_tried_again(folder):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile.get_or_compile("constant 3", "apply", fail, host())
    assert number_of(kernel(3)) == 3


def test_memory_is_bounded_and_no_running_kernel_ends(folder, monkeypatch):
    monkeypatch.setattr(compile, "MAX_KERNELS_IN_MEMORY", 2)
    running, ends = kernel(0), []
    for address in map(kernel, range(1, 5)):
        address.engine.in_cycle = address  # garbage collection once freed LLVM's context before the engine: a crash
        ends.append(weakref.ref(address.engine))
    del address
    gc.collect()
    assert [end() is None for end in ends] == [True, True, False, False]
    assert number_of(running) == 0
    kernel(3)
    kernel(5)  # evicts kernel 4: kernel 3 was used more recently
    gc.collect()
    assert [end() is None for end in ends] == [True, True, False, True]


# -- disk ----------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, numpy as np, sightline
from sightline import i, j, table
from sightline.cpu.runtime import compile, disk_cache
if "hold" in sys.argv:
    print("ready", flush=True); sys.stdin.readline()
rng = np.random.default_rng(0)
q = rng.normal(size=(1, 2, 70, 8)).astype(np.float32)
near, far = (table(rng.normal(size=40).astype(np.float32)) for _ in range(2))
score = sightline.s + near[i - j] + far[i - j - 1] + near[j - i + 30]
out = sightline.attention(q, q, q, mask=(i - j >= 1) & (i - j < 40) & (j - i + 30 >= 0), score=score, kernel="cpu")
print(out.tobytes().hex()[:64], dict(compile.counts), disk_cache.state().error)
"""


def started(folder, *arguments, program=PROGRAM, **options):
    environment = os.environ | {CACHE_VARIABLE: str(folder)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options
    )


def said(process):
    out, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    return out.splitlines()[-1]


def test_two_processes_at_once(tmp_path):
    both = [started(tmp_path / "kernels", "hold") for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [said(process).split()[0] for process in both]
    assert answers[0] == answers[1]
    assert [file.suffix for file in files(tmp_path / "kernels")] == [".kernel"] * 2


DAMAGE = {
    "truncated": lambda content, _: content[:-9],
    "without its code": lambda content, _: content[: len(disk_cache.MAGIC) + 32],
    "empty": lambda content, _: b"",
    "one bit": lambda content, _: content[:200] + bytes([content[200] ^ 4]) + content[201:],
    "longer": lambda content, _: content + b"\0",
    "another kernel": lambda _, other: other,
    "something else": lambda _, other: b"\x7fELF" * 99,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_compiled_again(damage, folder, monkeypatch):
    kernel(1)
    (file,) = files(folder)
    whole = file.read_bytes()
    kernel(2)
    (other,) = set(files(folder)) - {file}
    file.write_bytes(DAMAGE[damage](whole, other.read_bytes()))
    assert file.read_bytes() != whole
    for expected in ({"compiled": 3}, {"compiled": 3, "read": 1}):
        forget(monkeypatch)
        assert number_of(kernel(1)) == 1
        assert compile.counts == expected
        assert "damaged" in disk_cache.state().error
    assert file.read_bytes() == whole


def change_machine(monkeypatch):
    return dataclasses.replace(host(), features=host().features.replace("+sse4a", "-sse4a") + ",-avx512vp2intersect")


def change_sources(monkeypatch):
    monkeypatch.setattr(disk_cache, "source_hash", lambda: "of another version")


def change_llvm(monkeypatch):
    monkeypatch.setattr("llvmlite.__version__", "0.0")


@pytest.mark.parametrize("change", [change_machine, change_sources, change_llvm])
def test_what_decides_the_code_decides_the_file(change, folder, monkeypatch):
    kernel(1)
    forget(monkeypatch)
    kernel(1)
    assert compile.counts == {"compiled": 1, "read": 1}
    forget(monkeypatch)
    kernel(1, change(monkeypatch))
    assert compile.counts == {"compiled": 2, "read": 1}
    assert len(files(folder)) == 2


def test_a_change_of_any_source_changes_the_hash(tmp_path, monkeypatch):
    """The hash covers cpu/, formula/ and the modules whose constants are in the kernels."""
    package = Path(disk_cache.__file__).parents[2]
    for folder in ("cpu", "formula"):
        shutil.copytree(package / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for place in ("reference/dropout.py", "arrays/layouts.py", "arrays/row_formats.py", "call/gradient_parts.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        shutil.copy(package / place, tmp_path / place)
    monkeypatch.setattr(disk_cache, "__file__", str(tmp_path / "cpu" / "runtime" / "disk_cache.py"))
    monkeypatch.setattr(disk_cache, "IMPORT_TIME", math.inf)
    folders = {path.parent for path in tmp_path.rglob("*.py")}
    assert {"codegen", "kernels", "launch", "runtime", "formula"} <= {folder.name for folder in folders}
    before = disk_cache.source_hash.__wrapped__()
    for file in [*(min(folder.glob("*.py")) for folder in sorted(folders)), tmp_path / "arrays" / "row_formats.py"]:
        file.write_text(f"# changed {before}")
        before, after = disk_cache.source_hash.__wrapped__(), before
        assert after != before


def test_sources_newer_than_the_process_keep_nothing(folder, monkeypatch):
    monkeypatch.setattr(disk_cache, "IMPORT_TIME", 0.0)
    disk_cache.source_hash.cache_clear()
    try:
        assert number_of(kernel(1)) == 1
        assert not folder.exists()
        assert "changed after it was imported" in disk_cache.state().error
    finally:
        disk_cache.source_hash.cache_clear()


def test_the_folder_is_ours_alone(folder):
    old = os.umask(0)
    try:
        os.environ[CACHE_VARIABLE] = str(folder / "deeper")
        kernel(1)
    finally:
        os.umask(old)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "deeper")] == [0o700] * 2
    assert [file.stat().st_mode & 0o777 for file in files(folder / "deeper")] == [0o600]


# -- untrusted files ----------------------------------------------------------------------------------------------


def give_away(path, monkeypatch):
    """Make another user the owner of the path. Without the right to do so, the test pretends to be another user."""
    if os.geteuid() == 0:
        os.chown(path, 65534, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)


def lead_through_a_link(folder, monkeypatch):
    link = folder.parent / "link"
    link.symlink_to(folder.parent)
    give_away(link, monkeypatch)
    monkeypatch.setenv(CACHE_VARIABLE, str(link / folder.name))


def give_file_away(folder, monkeypatch):
    if os.geteuid():
        pytest.skip("only root gives a file away")
    give_away(files(folder)[0], monkeypatch)


def replace_by_link(folder, _):
    (file,) = files(folder)
    file.rename(folder.parent / "kernel")
    file.symlink_to(folder.parent / "kernel")


def replace_by_pipe(folder, _):
    (file,) = files(folder)
    file.unlink()
    os.mkfifo(file)


DOUBTS = {  # what is done to the folder and its file, and the reason why the code is then not run
    "the group may write": (lambda folder, _: folder.chmod(0o770), "other users may write to"),
    "all may write": (lambda folder, _: folder.chmod(0o702), "other users may write to"),
    "all may rename": (lambda folder, _: folder.parent.chmod(0o777), "other users may write to"),
    "of somebody else": (give_away, "belongs to another user"),
    "behind somebody else's link": (lead_through_a_link, "belongs to another user"),
    "a file others may write": (lambda folder, _: files(folder)[0].chmod(0o620), "other users may have written"),
    "a file of somebody else": (give_file_away, "other users may have written"),
    "a file that is a link": (replace_by_link, "symbolic links"),
    "a pipe": (replace_by_pipe, "other users may have written"),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_code_that_others_may_have_written_is_not_run(doubt, folder, monkeypatch):
    change, reason = DOUBTS[doubt]
    kernel(1)
    forget(monkeypatch)
    change(folder, monkeypatch)
    assert number_of(kernel(1)) == 1
    assert compile.counts == {"compiled": 2}
    assert reason in disk_cache.state().error


def test_our_own_link_may_point_to_a_missing_folder(folder, monkeypatch):
    link = folder.parent / "link"
    link.symlink_to(folder)
    monkeypatch.setenv(CACHE_VARIABLE, str(link))
    kernel(1)
    assert len(files(folder)) == 1
    assert folder.stat().st_mode & 0o777 == 0o700


def test_our_own_link_and_a_shared_folder_with_the_sticky_bit_are_fine(folder, monkeypatch):
    kernel(1)
    forget(monkeypatch)
    folder.parent.chmod(0o1777)
    (folder.parent / "link").symlink_to(folder)
    monkeypatch.setenv(CACHE_VARIABLE, str(folder.parent / "link"))
    kernel(1)
    assert compile.counts == {"compiled": 1, "read": 1}


# -- without a disk cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["off", "OFF", "kernels", "/dev/null/kernels", "/proc/sightline"])
def test_calls_work_without_a_disk(setting, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, setting)
    assert number_of(kernel(1)) == 1
    forget(monkeypatch)
    assert number_of(kernel(1)) == 1
    assert compile.counts == {"compiled": 2}
    assert disk_cache.state().error
    assert not any(tmp_path.iterdir())


FULL = """
import resource, signal
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
"""


def test_a_full_disk_breaks_nothing(tmp_path):
    answer = said(started(tmp_path / "kernels", program=FULL + PROGRAM, stderr=subprocess.STDOUT))
    assert "{'compiled': 2}" in answer
    assert f"{tmp_path / 'kernels'}: File too large" in answer
    assert not any((tmp_path / "kernels").iterdir())


def test_the_default_is_the_users_cache_folder(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(CACHE_VARIABLE, "")
    empty = disk_cache.state().folder
    monkeypatch.delenv(CACHE_VARIABLE)
    for found in (empty, disk_cache.state().folder):
        assert tmp_path in found.parents
        assert found.name == "sightline"


def test_a_user_without_a_home_folder(folder, monkeypatch, tmp_path):
    """A container may run under a number that has no name and no home folder."""
    for name in ("HOME", "XDG_CACHE_HOME", CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    assert number_of(kernel(1)) == 1
    assert disk_cache.state().folder is None
    assert "no home folder" in disk_cache.state().error
    assert not any(tmp_path.iterdir())


def test_the_folder_is_bounded_and_the_oldest_files_are_deleted(folder, monkeypatch):
    kernel(0)
    (first,) = files(folder)
    foreign = [folder / "letter.kernel", folder / "letter.part"]
    stale = folder / f"{first.name}.{'0' * 16}.part"
    for age, path in enumerate([*foreign, stale, first]):
        path.write_bytes(first.read_bytes())
        os.utime(path, (age, age))
    monkeypatch.setattr(disk_cache, "MAX_FOLDER_BYTES", 10 * first.stat().st_size)
    monkeypatch.setattr(disk_cache, "_write_budget", {})
    for number in range(1, 25):
        kernel(number)
        os.utime(max(files(folder), key=lambda file: file.stat().st_mtime), (100 + number, 100 + number))
    left = [file for file in files(folder) if file not in foreign]
    assert all(path.exists() for path in foreign)
    assert not stale.exists()
    assert 7 <= len(left) <= 11  # one file beyond the limit may be written before the folder is measured again
    forget(monkeypatch)
    compile.counts.clear()
    for number in range(24, 17, -1):
        kernel(number)
    assert compile.counts == {"read": 7}


def test_old_files_of_a_read_only_disk_are_read(folder, monkeypatch):
    """Such files keep their times, as in the image of a container."""
    kernel(1)
    (file,) = files(folder)
    os.utime(file, (1, 1))
    forget(monkeypatch)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert number_of(kernel(1)) == 1
    assert compile.counts == {"compiled": 1, "read": 1}
    assert disk_cache.state().error is None
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    state = disk_cache.state()
    assert (state.folder, state.kernels, state.size) == (folder, 1, file.stat().st_size)
    assert state.error == f"{folder} cannot be written to; set SIGHTLINE_CACHE to another folder"


# -- forks ---------------------------------------------------------------------------------------------------------

FORK = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from minimal_kernels import constant, kernel, number_of
from sightline.cpu.runtime import compile
from sightline.cpu.runtime.machine import host
many = "\\n".join(f"  %x{n} = load volatile i64, ptr %arguments" for n in range(1500))
heavy = "define void @apply(ptr %arguments) {\\n" + many + "\\n  ret void\\n}\\n"
def work(name):
    for n in range(40):
        compile.get_or_compile(f"{name} {n}", "apply", lambda: heavy, host())
kernel(0)
thread = threading.Thread(target=work, args=("heavy",), daemon=True)
thread.start()
bad = forks = 0
while thread.is_alive() and forks < 6:
    time.sleep(0.02)
    child = os.fork()
    if child == 0:
        compile.get_or_compile(f"heavy {forks}", "apply", lambda: constant(5), host())
        os._exit(number_of(kernel(0)) + number_of(kernel(1)) - 1)
    forks += 1
    for _ in range(1000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            bad += status != 0
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        bad += 1
        break
print("forks", forks, "bad", bad)
"""


def test_a_fork_while_another_thread_compiles(tmp_path):
    answer = said(started("off", os.path.dirname(minimal_kernels.__file__), program=FORK)).split()
    assert answer[3] == "0"
    assert int(answer[1]) >= 3
