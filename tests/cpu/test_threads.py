"""The threads of a kernel: their number and team, and calls after forks, after signals and at the interpreter's end."""

import builtins
import contextlib
import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import sightline
from minimal_kernels import count_calls
from sightline.cpu.runtime import thread_count, thread_team
from sightline.errors import ParameterError

# -- number --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch):
    """No setting gives a number of threads."""
    monkeypatch.delenv(thread_count.THREADS_VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "torch")


def usable():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def test_the_first_available_setting_applies(monkeypatch, bare):
    monkeypatch.setattr(thread_count, "_cgroup_quota", lambda: 10**6)
    assert thread_count.thread_count() == usable()
    monkeypatch.setenv(thread_count.THREADS_VARIABLE, "")
    assert thread_count.thread_count() == usable()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 11)
    assert thread_count.thread_count() == 11
    monkeypatch.setenv(thread_count.THREADS_VARIABLE, "12")
    assert thread_count.thread_count() == 12
    with sightline.threads(13):
        assert thread_count.thread_count() == 13
        with sightline.threads(14):
            assert thread_count.thread_count() == 14
            assert thread_count.thread_count(15) == 15
        assert thread_count.thread_count() == 13
    with pytest.raises(KeyError), sightline.threads(13):
        raise KeyError
    assert thread_count.thread_count() == 12


def test_a_block_applies_to_its_own_python_thread():
    before = thread_count.thread_count()
    with sightline.threads(before + 1), ThreadPoolExecutor(1) as pool:
        assert pool.submit(thread_count.thread_count).result() == before
        assert pool.submit(contextvars.copy_context().run, thread_count.thread_count).result() == before + 1


@pytest.mark.parametrize("number", [0, -1, 1.0, True, "2", None, 2**31])
def test_invalid_numbers_of_threads(number):
    with pytest.raises(ParameterError, match="whole number from 1 to 2³¹ − 1"):
        sightline.threads(number)


@pytest.mark.parametrize("setting", ["0", "-2", "two", "1.5", "99999999999"])
def test_invalid_numbers_in_the_variable(setting, monkeypatch):
    monkeypatch.setenv(thread_count.THREADS_VARIABLE, setting)
    x = np.ones((3, 2), np.float32)
    with pytest.raises(ParameterError, match=thread_count.THREADS_VARIABLE):
        sightline.attention(x, x, x, kernel="cpu")
    assert sightline.attention(x, x, x, kernel="cpu", threads=1).shape == (3, 2)


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("max 100000", thread_count.MAX_THREADS),
        ("", thread_count.MAX_THREADS),
    ],
)
def test_the_quota_of_a_container(line, number, tmp_path, monkeypatch, bare):
    file = tmp_path / "cpu.max"
    assert thread_count._cgroup_quota(str(file)) == thread_count.MAX_THREADS
    file.write_text(line + "\n")
    thread_count._cgroup_quota.cache_clear()
    quota = thread_count._cgroup_quota(str(file))
    assert quota == number
    monkeypatch.setattr(thread_count, "_cgroup_quota", lambda: quota)
    assert thread_count.thread_count() == min(number, usable())


# -- team ----------------------------------------------------------------------------------------------------------

needs_openmp = pytest.mark.skipif(thread_team._openmp_team() is None, reason="torch has no OpenMP here")


@pytest.fixture(params=[pytest.param("openmp", marks=needs_openmp), "pool"])
def team(request, monkeypatch):
    """The team: the OpenMP runtime of torch ("openmp"), or the thread pool ("pool")."""
    monkeypatch.setattr(thread_team, "_teams", thread_team.Teams(is_forked=request.param == "pool"))
    assert (thread_team._openmp_team() is None) == (request.param == "pool")
    yield request.param
    assert (not thread_team._teams.pool.threads) == (request.param == "openmp")


def test_every_thread_calls_once(team):
    for number in (3, 2, 5):
        assert count_calls(number) == number


def test_one_thread_uses_no_team(monkeypatch):
    monkeypatch.setattr(thread_team, "_openmp_team", None)
    monkeypatch.setattr(thread_team, "_teams", None)
    assert count_calls(1) == 1


def test_loaded_libraries_are_searched_once(monkeypatch):
    monkeypatch.setattr(thread_team, "_teams", thread_team.Teams())
    monkeypatch.setattr(thread_team, "_find_gomp_parallel", lambda library: None)
    opened = []
    original = builtins.open
    monkeypatch.setattr(builtins, "open", lambda *a, **k: (opened.append(a[0]), original(*a, **k))[1])
    for _ in range(5):
        count_calls(2)
    assert opened.count("/proc/self/maps") <= 1
    monkeypatch.setitem(sys.modules, "a module that may have brought one", sys)
    count_calls(2)
    assert opened.count("/proc/self/maps") <= 2


def test_one_thread_does_all_work_if_no_other_can_start(monkeypatch):
    monkeypatch.setattr(thread_team, "_teams", thread_team.Teams(is_forked=True))

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(thread_team, "start_new_thread", refuse)
    assert count_calls(4, expected=1) == 1


def test_the_pool_reuses_its_threads(monkeypatch):
    monkeypatch.setattr(thread_team, "MAX_THREADS", 3)
    pool, called = thread_team.Pool(), []
    for _ in range(50):
        pool.call(lambda _: called.append(threading.get_ident()), 0, 2, ())
    assert len(pool.threads) <= 2
    assert {threading.get_ident()} <= set(called) <= {threading.get_ident(), *pool.threads}
    assert not pool.busy
    for _ in range(3):
        pool.call(lambda _: None, 0, 5, ())
    assert len(pool.threads) == 3


def test_a_call_does_not_wait_for_threads_that_have_not_begun(monkeypatch):
    monkeypatch.setattr(thread_team, "start_new_thread", lambda *_: 0)
    pool, called, memory = thread_team.Pool(), [], np.zeros(3)
    owner = weakref.ref(memory)
    pool.call(called.append, 7, 2, (memory,))
    del memory
    assert owner() is None
    assert called == [7]
    pool._help(pool.calls.get())  # a thread that comes late finds no ticket
    pool._help(pool.calls.get())
    assert called == [7]
    assert pool.calls.empty()


def test_memory_lives_while_a_thread_of_the_pool_uses_it():
    """The exception ends the call of this thread while another thread is still inside the kernel."""
    begun, end, memory = threading.Event(), threading.Event(), np.zeros(3)
    owner, caller = weakref.ref(memory), threading.get_ident()

    def kernel(_):
        if threading.get_ident() == caller:
            assert begun.wait(20)
            raise KeyboardInterrupt
        begun.set()
        end.wait(20)

    with contextlib.suppress(KeyboardInterrupt):
        thread_team.Pool().call(kernel, 0, 1, (memory,))
    del memory
    assert owner() is not None
    end.set()
    deadline = time.monotonic() + 20
    while owner() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def large(heads=4, n=700):
    rng = np.random.default_rng(11)
    return [rng.normal(size=(1, heads, n, 32)).astype(np.float32) for _ in range(3)]


def test_many_python_threads_at_once(team):
    arrays = [large(heads) for heads in range(1, 9)]
    alone = [sightline.attention(*three, kernel="cpu", threads=1) for three in arrays]
    start = threading.Barrier(8)

    def work(index):
        start.wait()
        return [sightline.attention(*arrays[index], kernel="cpu", threads=3) for _ in range(4)]

    with ThreadPoolExecutor(8) as pool:
        for expected, results in zip(alone, pool.map(work, range(8)), strict=True):
            for result in results:
                np.testing.assert_array_equal(result, expected)


# -- forks, signals and the end ------------------------------------------------------------------------------------

START = """
import os, signal, sys, threading, time, numpy as np
{before}
import sightline
from sightline.cpu.runtime import thread_team
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore the signal
rng = np.random.default_rng(0)
q = rng.normal(size=(1, 4, 900, 32)).astype(np.float32)
expected = sightline.attention(q, q, q, kernel="cpu", threads=1)
def right():
    return np.array_equal(sightline.attention(q, q, q, kernel="cpu", threads=3), expected)
"""
WITH_TORCH = "import torch; torch.set_num_threads(2); torch.ones(1 << 20).exp().sum()"
hosts = pytest.mark.parametrize("before", ["", WITH_TORCH], ids=["alone", "with torch"])


def program(text, before, **options):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", START.format(before=before) + text], **pipes, **options)


def said(process):
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.splitlines()


FORK = """
def child():
    signal.alarm(20)
    assert thread_team._openmp_team() is None
    fine = right() and right()
    os._exit(0 if fine and thread_team._teams.pool.threads else 1)
fine = [right()]
for _ in range(2):
    process = os.fork()
    if process == 0:
        child()
    fine.append(right())
    fine.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0)
print(fine, thread_team._openmp_team() is not None)
"""


@pytest.mark.sampled(one_in=2)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@hosts
def test_a_fork_calls_and_so_does_its_parent(before):
    (line,) = said(program(FORK, before))
    assert line == f"{[True] * 5} {bool(before) and thread_team._openmp_team() is not None}"


LATE = """
import multiprocessing, numpy as np, torch
torch.ones(1 << 20).exp().sum()
def work(queue):
    import sightline
    x = np.ones((1, 4, 900, 32), np.float32)
    queue.put(float(sightline.attention(x, x, x, kernel="cpu", threads=3).sum()))
context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=work, args=(queue,), daemon=True)
process.start()
print(queue.get(timeout=30))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_that_imports_later_calls_too():
    result = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert float(result.stdout) == 4 * 900 * 32


INTERRUPT = """
long = rng.normal(size=(1, 8, 6000, 64)).astype(np.float32)
sightline.attention(long[:, :1, :64], long[:, :1, :64], long[:, :1, :64], kernel="cpu")
for attempt in range(3):
    try:
        print("ready", flush=True)
        for _ in range(100):
            sightline.attention(long, long, long, kernel="cpu", threads=3)
    except KeyboardInterrupt:
        print("stopped", right(), flush=True)
"""


@pytest.mark.sampled(one_in=3)
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@hosts
def test_calls_work_after_an_interrupted_call(before):
    process = program(INTERRUPT, before)
    for _ in range(3):
        assert process.stdout.readline() == "ready\n"
        threading.Event().wait(0.15)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopped True\n"
    assert said(process) == []


END = """
import atexit, threading
atexit.register(lambda: print("at exit", right(), flush=True))
def late():
    time.sleep(0.3)
    while True:
        right()
threading.Thread(target=late, daemon=True).start()
print(right())
threading.Thread(target=lambda: (time.sleep(0.5), print("last thread", right(), flush=True))).start()
"""


@pytest.mark.sampled(one_in=3)
@hosts
def test_calls_as_the_interpreter_ends(before):
    assert said(program(END, before)) == ["True", "last thread True", "at exit True"]
