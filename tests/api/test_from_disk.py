"""Attention over keys and values on disk agrees with the definition, stays within its memory, writes whole files."""

import os
import subprocess
import sys

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from fault_planting import Fault, assert_found
from sightline import i, j, table
from sightline.api import from_disk
from sightline.call.kernel import Result
from sightline.errors import DtypeError, ParameterError
from sightline.reference.testing import assert_conforms
from sightline.statistics import arrays_of
from statistic_definitions import check as check_statistics
from statistic_definitions import statistics, usable
from strategies import Case, cases

N = 330


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 keys and parts of 100 queries, so that a call has many steps."""
    monkeypatch.setattr(from_disk, "_choose_sizes", lambda *_: (64, 100))


def drawn(dtype=np.float32, n=N, batch=2):
    """Return query, key and value with shared key heads."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(batch, heads, n, 16)).astype(dtype) for heads in (4, 2, 2)]


def options():
    """Return a mask of a window, two sinks and documents, a score with a table, and sinks."""
    rng = np.random.default_rng(1)
    mask = ((i >= j) & (i - j < 90) | (j < 2)) & sightline.documents(lengths=[150, N - 150])
    return {"mask": mask, "score": sightline.s + table(rng.normal(size=N))[j], "sinks": rng.normal(size=4)}


def attend(**more):
    return sightline.attention_from_disk(*drawn(), **(options() | more))


def stop_after(count):
    """Return a function for `progress` that interrupts the call after this number of steps."""

    def report(finished, total):
        if finished == count:
            raise KeyboardInterrupt

    return report


def check(case, see=()):
    """Raise AssertionError unless a call from disk agrees with the definition. `see` are statistics other than lse."""

    def run(problem):
        output, seen = sightline.attention_from_disk(*case.arrays, **case.options, see=[sightline.lse(), *problem.see])
        axis = len(problem.batch_shape)
        if problem.heads_squeezed:
            output = np.expand_dims(output, axis)
            seen = [
                one.build_result([np.expand_dims(array, axis) for array in arrays_of(result)])
                for one, result in zip([sightline.lse(), *problem.see], seen, strict=True)
            ]
        return Result(output, seen[0].astype(np.float64), tuple(seen[1:]))

    problem = case.make_problem(see=see)
    assert_conforms(run, problem)
    if see and usable(problem):
        check_statistics(run, problem)


@given(st.data(), cases(poison=False), st.integers(1, 20), st.integers(1, 40), st.booleans())
@settings(max_examples=25)
def test_drawn_problems(data, case, groups, queries, has_statistics):
    see = [one for one in data.draw(statistics(case.make_problem())) if one.is_mergeable] if has_statistics else ()
    assert not see or {one.name for one in see} == {"lse", "entropy", "mass", "sum", "max_score", "top_k"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_disk, "_choose_sizes", lambda *_: (4 * groups, queries))
        check(case, see=see)


SEE = [sightline.entropy(), sightline.mass(i - j < 9), sightline.max_score(), sightline.top_k(3)]
SEE += [sightline.sum(sightline.p * (i - j), over=j)]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_window_with_sinks_and_documents(dtype, small_blocks, tmp_path):
    dtype = sightline.arrays.operations.resolve_dtype(np, dtype)
    arrays = []
    for name, array in zip("qkv", drawn(dtype, batch=1), strict=True):
        arrays.append(np.memmap(tmp_path / name, dtype, "w+", shape=array.shape))
        arrays[-1][...] = array
    check(Case(*arrays, options()), see=SEE)


FAULTS = {
    "a block that is not empty is skipped": Fault(
        from_disk._find_blocks, "find_runs(is_seen)", "find_runs(is_seen & (block != 1))"
    ),
    "keys count from the start of their block": Fault(from_disk._sum_blocks, "first_key=keys.start", "first_key=0"),
    "queries count from the start of their part": Fault(from_disk._sum_blocks, "rows.start", "0"),
    "sinks count in no block": Fault(from_disk._sum_blocks, "problem.sinks is None", "True"),
    "the next block in place of this one": Fault(
        from_disk._sum_blocks,
        "(reader.submit(read, block) for block in blocks)",
        "(reader.submit(read, block) for block in blocks[1:] + blocks)",
    ),
    "found keys count from the start of their block": Fault(
        from_disk._sum_blocks,
        "read_part(result.output.astype(output.dtype), result.lse, result.seen, keys.start)",
        "read_part(result.output.astype(output.dtype), result.lse, result.seen, 0)",
    ),
    "the last tile of queries is not computed": Fault(from_disk._find_blocks, "is_seen", "is_seen[:-1]"),
    "sums are not normalised": Fault(from_disk._sum_blocks, "normalize=True", "normalize=False"),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, small_blocks, monkeypatch):
    """Without a fault this case is that of `test_a_window_with_sinks_and_documents`."""
    assert_found(FAULTS[fault], monkeypatch, lambda: check(Case(*drawn(batch=1), options()), see=SEE))


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
    blocks = from_disk._find_blocks((i >= j) & (i - j < 512), (1, 1, n, n), 1024, n)
    assert len(blocks) == n // 1024
    assert max(rows.stop - rows.start for _, parts in blocks for rows in parts) <= 1024 + 512 + 2 * 256


# -- arguments ----------------------------------------------------------------


@pytest.mark.parametrize(("text", "size"), [(1000, 1000), ("2 GB", 2e9), ("1.5 kiB", 1536), ("7B", 7), ("3TB", 3e12)])
def test_limits_are_read(text, size):
    assert from_disk._parse_bytes(text) == size


@pytest.mark.parametrize("limit", ["2", "GB", "2 gb", 0, -1, True, 2.5, None, "0 GB"])
def test_other_limits_are_refused(limit):
    with pytest.raises(ParameterError, match="memory_limit"):
        from_disk._parse_bytes(limit)


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
    for other in (sightline.received(), sightline.weights().mean("heads"), sightline.mass(i < j).rows([0])):
        with pytest.raises(ParameterError, match=r"(?s)for keys on disk.*no selections"):
            sightline.attention_from_disk(query, key, value, see=[other])
    with pytest.raises(DtypeError, match="torch"):
        sightline.attention_from_disk(query, torch.from_numpy(key), value)
    with pytest.raises(ParameterError, match="progress"):
        sightline.attention_from_disk(query, key, value, progress="bar")


def test_statistics_by_name(small_blocks):
    arrays = drawn()
    mean = sightline.lse().mean("heads")
    _, seen = sightline.attention_from_disk(*arrays, see={"normaliser": mean})
    _, (expected,) = sightline.attention(*arrays, see=[mean])
    np.testing.assert_allclose(seen["normaliser"], expected, rtol=np.finfo(np.float32).resolution)


def test_the_progress_bar_is_drawn_on_request(small_blocks, capfd):
    sightline.attention_from_disk(*drawn(), progress=None)
    assert capfd.readouterr().err == ""
    sightline.attention_from_disk(*drawn(), progress=True)


# -- the output ---------------------------------------------------------------


def test_the_output_is_written_to_a_file_or_an_array(small_blocks, tmp_path):
    whole = attend()
    written = attend(output=tmp_path / "output.npy")
    assert isinstance(written, np.memmap)
    np.testing.assert_array_equal(written, whole)
    np.testing.assert_array_equal(np.load(tmp_path / "output.npy"), whole)
    own = np.empty_like(whole)
    assert attend(output=own) is own
    np.testing.assert_array_equal(own, whole)
    read_only = np.broadcast_to(np.float32(0), whole.shape)
    for wrong in (own[..., 1:, :], own.astype(float), read_only, [1.0]):
        with pytest.raises(ParameterError, match="output="):
            attend(output=wrong)
    with pytest.raises(FileNotFoundError):
        attend(output=tmp_path / "missing" / "output.npy", progress=stop_after(0))


@pytest.mark.parametrize("shape", [(2, 9, 4), (9, 4), (1, 2, 0, 4), (0, 2, 9, 4)])
@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
def test_files_of_every_form_are_those_of_numpy(shape, dtype, tmp_path):
    x = np.ones(shape, dtype)
    written = sightline.attention_from_disk(x, x, x, output=tmp_path / "output.npy")
    assert (written.shape, written.dtype) == (x.shape, x.dtype)
    np.save(tmp_path / "expected.npy", sightline.attention_from_disk(x, x, x))
    assert (tmp_path / "output.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()


def test_an_output_may_replace_the_file_of_an_input(tmp_path):
    """The inputs keep their entries, because the output is a new file that takes the name at the end."""
    path = tmp_path / "value.npy"
    query, key, value = drawn()
    expected = sightline.attention_from_disk(query, key, value)
    np.save(path, value)
    np.testing.assert_array_equal(
        sightline.attention_from_disk(query, key, np.load(path, mmap_mode="r"), output=path), expected
    )
    with h5py.File(tmp_path / "value.h5", "w") as file:
        file["value"] = value
        np.testing.assert_array_equal(sightline.attention_from_disk(query, key, file["value"]), expected)


def test_an_interrupted_call_leaves_no_output_and_keeps_an_older_one(small_blocks, tmp_path):
    path = tmp_path / "output.npy"
    for before in (None, np.arange(5.0)):
        if before is not None:
            np.save(path, before)
        with pytest.raises(KeyboardInterrupt):
            attend(output=path, progress=stop_after(3))
        assert [file.name for file in tmp_path.iterdir()] == [] if before is None else [path.name]
    np.testing.assert_array_equal(np.load(path), before)


FULL_DISK = """
import os, sys
import numpy as np, sightline
path = sys.argv[1] + "/output.npy"
x = np.ones((1, 4, 4096, 64), np.float32)
try:
    sightline.attention_from_disk(x, x, x, mask=sightline.window(8), output=path)
except OSError:
    print(os.listdir(sys.argv[1]))
"""


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path):
    command = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=3M none "{tmp_path}" && exec "$@"', "sh"]
    try:
        if subprocess.run([*command, "true"], capture_output=True).returncode:
            pytest.skip("this system does not let the test mount a file system")
    except FileNotFoundError:
        pytest.skip("this system has no command unshare")
    ran = subprocess.run([*command, sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr


# -- memory -----------------------------------------------------------------

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
see = [sightline.entropy(), sightline.max_score()]
sightline.attention(query[:99], key[:99], value[:99], mask=mask, see=see)  # libraries and the kernel's code
sightline.attention_from_disk(query[:999], key[:999], value[:999], mask=mask, see=see, memory_limit=2**21)
before, peak, ended = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not ended.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
sightline.attention_from_disk(
    query, key, value, mask=mask, memory_limit={limit}, output=sys.argv[1] + "output.npy",
    see=see,
)
ended.set()
watcher.join()
print(peak - before)
"""


def anonymous_bytes(folder, limit):
    """Return the peak anonymous bytes of a call on 64 MiB of keys and values; pages of files do not count."""
    program = MEMORY.replace("{limit}", str(limit))
    folder = os.path.join(folder, "")
    return int(subprocess.run([sys.executable, "-c", program, folder], capture_output=True, check=True).stdout)


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
def test_anonymous_memory_stays_within_the_limit(tmp_path):
    """A limit that all keys and values fit into is used, so the measurement finds what a call holds."""
    assert anonymous_bytes(tmp_path, LIMIT) < LIMIT + ALLOWANCE
    assert anonymous_bytes(tmp_path, 8 * LIMIT) > LIMIT + ALLOWANCE
