"""Attention over keys and values on disk agrees with the definition, resumes exactly and stays within its memory."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from fault_planting import broken
from sightline import i, j, out_of_core, table
from sightline.errors import DtypeError, ParameterError, ShapeError
from sightline.kernel import Result
from sightline.out_of_core import block_plan, call, checkpoint
from sightline.testing import assert_conforms
from strategies import Case, cases

N = 700
SIZES = block_plan.BlockSizes(keys=64, queries=100)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(call, "choose_sizes", lambda *_: SIZES)


def drawn(seed=0, dtype=np.float32, n=N, heads=(4, 2)):
    """Return query, key and value with shared key heads."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(2, number, n, 16)).astype(dtype) for number in (heads[0], heads[1], heads[1])]


def options():
    """Return a mask of a window, two sinks and documents, a score with a table, and sinks."""
    start = sightline.documents(lengths=[250, N - 250])
    rng = np.random.default_rng(1)
    mask = ((i >= j) & (i - j < 90) | (j < 2)) & start
    return {"mask": mask, "score": sightline.s + table(rng.normal(size=N))[j], "sinks": rng.normal(size=4)}


def check(case, attend=None):
    """Raise AssertionError unless a call from disk agrees with the definition."""

    def run(problem):
        output, (lse,) = (attend or sightline.attention_from_disk)(*case.arrays, **case.options, see=[sightline.lse()])
        if problem.heads_squeezed:
            output, lse = output[..., None, :, :], lse[..., None, :]
        return Result(output, lse.astype(np.float64))

    problem = case.make_problem()
    assert_conforms(run, problem)


@given(cases(poison=False), st.integers(1, 20), st.integers(1, 40))
@settings(max_examples=30)
def test_drawn_problems(case, groups, queries):
    sizes = block_plan.BlockSizes(4 * groups, queries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "choose_sizes", lambda *_: sizes)
        check(case)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_window_with_sinks_and_documents(dtype, small_blocks, tmp_path):
    dtype = sightline.arrays.resolve_dtype(np, dtype)
    arrays = []
    for name, array in zip("qkv", drawn(dtype=dtype), strict=True):
        arrays.append(np.memmap(tmp_path / name, dtype, "w+", shape=array.shape))
        arrays[-1][...] = array
    check(Case(*arrays, options()))


FAULTS = {
    "a block that is not empty is skipped": (
        block_plan,
        "for first, last in find_runs(is_seen):",
        "for first, last in find_runs(is_seen) if block != 1 else ():",
    ),
    "keys count from the start of their block": (call, ", first_key=item.keys.start", ""),
    "queries count from the start of their range": (call, "first_row=rows.start, ", ""),
    "sinks count in no block": (call, "if problem.sinks is not None:", "if False:"),
    "the next block in place of this one": (
        call,
        "keys) for items in blocks)",
        "keys) for items in blocks[1:] + blocks)",
    ),
    "the last tile of queries is not computed": (block_plan, "in find_runs(is_seen):", "in find_runs(is_seen[:-1]):"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name, small_blocks, monkeypatch):
    """Without a fault this case is that of `test_a_window_with_sinks_and_documents`."""
    module, before, after = FAULTS[name]
    copy = broken(module, before, after)
    if module is block_plan:
        monkeypatch.setattr(call, "find_work", copy.find_work)
        copy = call
    monkeypatch.setattr(copy, "choose_sizes", lambda *_: SIZES)
    with pytest.raises(AssertionError):
        check(Case(*drawn(), options()), copy.attention_from_disk)


class Counting:
    """An array that counts how often each position is read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.reads = np.zeros(array.shape[-2], int)

    def __getitem__(self, index):
        self.reads[index[-2]] += 1
        return self.array[index]


def test_every_key_is_read_once_and_hidden_blocks_never(small_blocks):
    query, key, value = drawn()
    key, value = Counting(key), Counting(value)
    sightline.attention_from_disk(query, key, value, mask=(i >= j) & (j >= 128))
    for counted in (key, value):
        assert (counted.reads[:128] == 0).all()
        assert (counted.reads[128:] == 1).all()


def test_only_queries_that_see_a_block_are_computed():
    n = 1 << 14
    items = block_plan.find_work((i >= j) & (i - j < 512), (1, 1, n, n), block_plan.BlockSizes(1024, n))
    assert len(items) == n // 1024
    assert max(item.queries.stop - item.queries.start for item in items) <= 1024 + 512 + 2 * block_plan.SEARCH_ROWS


# -- resuming -----------------------------------------------------------------


def stop_after(count):
    def report(finished, total):
        if finished == count:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_resumed_call_has_the_bits_of_an_uninterrupted_call(count, small_blocks, tmp_path):
    arrays, given = drawn(), options()
    whole = sightline.attention_from_disk(*arrays, **given, progress=False)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sightline.attention_from_disk(*arrays, **given, checkpoint=tmp_path, progress=stop_after(count))
    finished = []
    output = sightline.attention_from_disk(
        *arrays, **given, checkpoint=tmp_path, progress=lambda done, total: finished.append(done)
    )
    assert finished[0] == count
    assert output.tobytes() == whole.tobytes()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_rows_are_stored_loses_nothing(small_blocks, tmp_path, monkeypatch):
    """Rows that were stored twice have the same bits, because the merged rows are stored, not merged again."""
    arrays, given = drawn(), options()
    whole = sightline.attention_from_disk(*arrays, **given)
    store, calls = call._Run._store, []

    def interrupted(run):
        calls.append(run)
        if len(calls) == 3:
            run.state.output[..., run.items[run.merged[0]].queries, :] = run.merged[1]  # the first of the two arrays
            raise KeyboardInterrupt
        store(run)

    monkeypatch.setattr(call._Run, "_store", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sightline.attention_from_disk(*arrays, **given, checkpoint=tmp_path)
    output = sightline.attention_from_disk(*arrays, **given, checkpoint=tmp_path)
    assert output.tobytes() == whole.tobytes()


def test_the_state_is_saved_from_time_to_time(small_blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(call, "SECONDS_BETWEEN_SAVES", 0.0)
    saved = []
    save = checkpoint.Checkpoint.save
    monkeypatch.setattr(
        checkpoint.Checkpoint, "save", lambda self, state: saved.append(state.finished) or save(self, state)
    )
    sightline.attention_from_disk(*drawn(), **options(), checkpoint=tmp_path)
    assert saved == list(range(1, len(saved) + 1))


def interrupted(folder, **more):
    with pytest.raises(KeyboardInterrupt):
        sightline.attention_from_disk(*drawn(), **(options() | more), checkpoint=folder, progress=stop_after(2))


OTHERS = {
    "mask": {"mask": i >= j},
    "table": {"score": sightline.s + table(np.zeros(N))[j]},
    "scale": {"scale": 0.5},
    "sinks": {"sinks": np.zeros(4)},
    "dropout": {"dropout": 0.5, "seed": 1},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_other_arguments_is_refused(name, small_blocks, tmp_path):
    interrupted(tmp_path)
    with pytest.raises(ParameterError, match="other arguments"):
        sightline.attention_from_disk(*drawn(), **(options() | OTHERS[name]), checkpoint=tmp_path)


def test_a_checkpoint_of_other_arrays_or_blocks_is_refused(small_blocks, tmp_path, monkeypatch):
    interrupted(tmp_path)
    with pytest.raises(ParameterError, match="other arguments"):
        sightline.attention_from_disk(*drawn(seed=5), **options(), checkpoint=tmp_path)
    monkeypatch.setattr(call, "choose_sizes", lambda *_: replace(SIZES, keys=32))
    with pytest.raises(ParameterError, match="other arguments"):
        sightline.attention_from_disk(*drawn(), **options(), checkpoint=tmp_path)


def test_a_half_written_file_is_no_state(small_blocks, tmp_path, monkeypatch):
    """A save that fails in the middle leaves the older state, and a cut file is refused."""
    interrupted(tmp_path)
    before = (tmp_path / "attention.npz").read_bytes()

    def fail(file, **arrays):
        file.write(before[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", fail)
        with pytest.raises(OSError, match=r"No space left.*attention\.npz\.unfinished"):
            sightline.attention_from_disk(*drawn(), **options(), checkpoint=tmp_path, progress=stop_after(4))
    assert (tmp_path / "attention.npz").read_bytes() == before
    output = sightline.attention_from_disk(*drawn(), **options(), checkpoint=tmp_path)
    assert output.tobytes() == sightline.attention_from_disk(*drawn(), **options()).tobytes()
    for cut in (0, 100, len(before) // 2, len(before) - 1):
        (tmp_path / "attention.npz").write_bytes(before[:cut])
        with pytest.raises(ParameterError, match="damaged"):
            sightline.attention_from_disk(*drawn(), **options(), checkpoint=tmp_path)


# -- arguments ----------------------------------------------------------------


def test_the_output_is_written_to_a_file_or_an_array(small_blocks, tmp_path):
    arrays, given = drawn(), options()
    expected = sightline.attention_from_disk(*arrays, **given)
    written = sightline.attention_from_disk(*arrays, **given, output=tmp_path / "output.npy")
    assert isinstance(written, np.memmap)
    np.testing.assert_array_equal(np.load(tmp_path / "output.npy"), expected)
    own = np.empty_like(expected)
    assert sightline.attention_from_disk(*arrays, **given, output=own) is own
    np.testing.assert_array_equal(own, expected)
    with pytest.raises(ShapeError, match="output of shape"):
        sightline.attention_from_disk(*arrays, **given, output=own[..., 1:, :])
    with pytest.raises(DtypeError, match="float64"):
        sightline.attention_from_disk(*arrays, **given, output=own.astype(float))


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    path = tmp_path / "value.npy"
    np.save(path, drawn()[2])
    query, key, _ = drawn()
    value = np.load(path, mmap_mode="r")
    with pytest.raises(ParameterError, match="the file of value"):
        sightline.attention_from_disk(query, key, value[:], output=str(path))
    assert np.array_equal(np.load(path), drawn()[2])
    with pytest.raises(ParameterError, match="read-only"):
        sightline.attention_from_disk(query, key, value, output=np.broadcast_to(np.float32(0), query.shape))
    with pytest.raises(ParameterError, match="a folder"):
        sightline.attention_from_disk(query, key, value, checkpoint=path)


@pytest.mark.parametrize(
    ("text", "size"), [(1000, 1000), ("2 GB", 2 * 10**9), ("1.5 kiB", 1536), ("7B", 7), ("3TB", 3 * 10**12)]
)
def test_limits_are_read(text, size):
    assert block_plan.parse_bytes(text) == size


@pytest.mark.parametrize("limit", ["2", "GB", "2 gb", 0, -1, True, 2.5, None, "0 GB"])
def test_other_limits_are_refused(limit):
    with pytest.raises(ParameterError, match="memory_limit"):
        block_plan.parse_bytes(limit)


def test_a_limit_that_is_too_small_names_the_smallest():
    arrays = drawn()
    with pytest.raises(ParameterError, match="at least") as refused:
        sightline.attention_from_disk(*arrays, memory_limit=1000)
    least = int(refused.value.cure.partition("=")[2].partition(",")[0])
    sightline.attention_from_disk(*arrays, memory_limit=least)
    with pytest.raises(ParameterError, match="at least"):
        sightline.attention_from_disk(*arrays, memory_limit=least - 1)


def test_other_statistics_frameworks_and_progress_are_refused():
    torch = pytest.importorskip("torch")
    query, key, value = drawn()
    with pytest.raises(ParameterError, match=r"lse\(\) alone"):
        sightline.attention_from_disk(query, key, value, see=[sightline.entropy()])
    with pytest.raises(DtypeError, match="torch"):
        sightline.attention_from_disk(query, torch.from_numpy(key), value)
    with pytest.raises(ParameterError, match="progress"):
        sightline.attention_from_disk(query, key, value, progress="bar")


def test_statistics_by_name(small_blocks):
    arrays = drawn()
    _, seen = sightline.attention_from_disk(*arrays, see={"normaliser": sightline.lse()})
    _, (expected,) = sightline.attention(*arrays, see=[sightline.lse()])
    np.testing.assert_allclose(seen["normaliser"], expected, rtol=np.finfo(np.float32).resolution)


def test_the_progress_bar_is_drawn_on_request(small_blocks, capfd):
    sightline.attention_from_disk(*drawn(), progress=None)
    assert capfd.readouterr().err == ""
    sightline.attention_from_disk(*drawn(), progress=True)


# -- in other processes -------------------------------------------------------

INTERRUPTED = """
import sys, numpy as np, sightline
from sightline import i, j
from sightline.out_of_core import block_plan, call
block_plan.MAX_PAIRS, call.SECONDS_BETWEEN_SAVES = 1 << 20, float(sys.argv[2])
x = np.random.default_rng(0).normal(size=(4, 4096, 64)).astype(np.float32)
print("begins", flush=True)
while True:
    sightline.attention_from_disk(x, x, x, mask=i >= j, memory_limit="9 MB", checkpoint=sys.argv[1])
"""


def start(folder, seconds_between_saves):
    """Start a process that computes again and again; return it when its first call begins."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, folder, str(seconds_between_saves)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"begins\n"
    return process


def test_an_interrupt_from_the_keyboard_saves_the_state(tmp_path):
    process = start(tmp_path, 60)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in error
    assert [path.name for path in tmp_path.iterdir()] == ["attention.npz"]


def test_a_killed_process_leaves_a_state_that_continues(tmp_path, monkeypatch):
    """The process saves its state after every step. It may be killed while it writes."""
    process = start(tmp_path, 0)
    end = time.monotonic() + 60
    while not (tmp_path / "attention.npz").exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    monkeypatch.setattr(block_plan, "MAX_PAIRS", 1 << 20)
    x = np.random.default_rng(0).normal(size=(4, 4096, 64)).astype(np.float32)
    finished, given = [], {"mask": i >= j, "memory_limit": "9 MB"}
    output = sightline.attention_from_disk(
        x, x, x, **given, checkpoint=tmp_path, progress=lambda done, total: finished.append(done)
    )
    assert finished[0] > 0
    assert output.tobytes() == sightline.attention_from_disk(x, x, x, **given).tobytes()
    assert list(tmp_path.iterdir()) == []


LIMIT, ALLOWANCE = 48 * 2**20, 24 * 2**20
MEMORY = """
import sys, threading, time
import numpy as np, sightline
from sightline import i, j

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

n, d = 1 << 17, 64
query, key, value = (np.memmap(sys.argv[1] + name, np.float32, "w+", shape=(n, d)) for name in "qkv")
rng = np.random.default_rng(0)
for array in (query, key, value):
    for start in range(0, n, 4096):
        array[start : start + 4096] = rng.standard_normal((4096, d), np.float32)
mask = (i >= j) & (i - j < 256) | (j < 16)
sightline.attention(query[:99], key[:99], value[:99], mask=mask)  # libraries and the kernel's code
sightline.attention_from_disk(query[:999], key[:999], value[:999], mask=mask, memory_limit=2**21)
before, peak, ended = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not ended.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
sightline.attention_from_disk(query, key, value, mask=mask, memory_limit={limit}, output=sys.argv[1] + "output.npy")
ended.set()
watcher.join()
print(peak - before)
"""


def anonymous_bytes(folder, limit):
    """Return the peak anonymous bytes of a call on 64 MiB of keys and values; pages of files do not count."""
    program = MEMORY.replace("{limit}", str(limit))
    folder = os.path.join(folder, "")
    return int(subprocess.run([sys.executable, "-c", program, folder], capture_output=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
def test_anonymous_memory_stays_within_the_limit(tmp_path):
    """A limit that all keys and values fit into is used, so the measurement finds what a call holds."""
    assert anonymous_bytes(tmp_path, LIMIT) < LIMIT + ALLOWANCE
    assert anonymous_bytes(tmp_path, 8 * LIMIT) > LIMIT + ALLOWANCE


def test_the_package_exports_the_function():
    assert out_of_core.attention_from_disk is sightline.attention_from_disk
