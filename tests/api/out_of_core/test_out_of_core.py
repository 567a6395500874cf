"""Attention over keys and values on disk agrees with the definition and stays within its memory."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from disk_calls import drawn, options
from fault_planting import broken
from sightline import i, j
from sightline.api import out_of_core
from sightline.api.out_of_core import block_plan, call, run
from sightline.errors import DtypeError, ParameterError
from sightline.problem.kernel import Result
from sightline.statistics import arrays_of
from sightline.testing import assert_conforms
from statistic_definitions import check as check_statistics
from statistic_definitions import statistics, usable
from strategies import Case, cases


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


@given(cases(poison=False), st.integers(1, 20), st.integers(1, 40))
@settings(max_examples=30)
def test_drawn_problems(case, groups, queries):
    sizes = block_plan.BlockSizes(4 * groups, queries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "choose_sizes", lambda *_: sizes)
        check(case)


@given(st.data(), cases(poison=False), st.integers(1, 20), st.integers(1, 40))
@settings(max_examples=30)
def test_statistics_of_drawn_problems(data, case, groups, queries):
    see = [one for one in data.draw(statistics(case.make_problem())) if one.is_mergeable]
    assert {one.name for one in see} == {"lse", "entropy", "mass", "max_score", "top_k"}
    sizes = block_plan.BlockSizes(4 * groups, queries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "choose_sizes", lambda *_: sizes)
        check(case, see=see)


def one_sequence(**more):
    return [x[:1] for x in drawn(**more)]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_window_with_sinks_and_documents(dtype, small_blocks, tmp_path):
    dtype = sightline.arrays.operations.resolve_dtype(np, dtype)
    arrays = []
    for name, array in zip("qkv", one_sequence(dtype=dtype), strict=True):
        arrays.append(np.memmap(tmp_path / name, dtype, "w+", shape=array.shape))
        arrays[-1][...] = array
    check(Case(*arrays, options()), see=SEE)


SEE = [sightline.entropy(), sightline.mass(i - j < 9), sightline.max_score(), sightline.top_k(3)]
FAULTS = {
    "a block that is not empty is skipped": (
        block_plan,
        "for first, last in find_runs(is_seen):",
        "for first, last in find_runs(is_seen) if block != 1 else ():",
    ),
    "keys count from the start of their block": (run, '"first_key": item.keys.start', '"first_key": 0'),
    "queries count from the start of their range": (run, '"first_row": rows.start', '"first_row": 0'),
    "sinks count in no block": (run, "None if problem.sinks is None", "None if True"),
    "the next block in place of this one": (
        run,
        "number) for number in numbers)",
        "number) for number in numbers[1:] + numbers)",
    ),
    "the sink counts as a key": (run, "1.0 if self.sinks is None else", "1.0 if True else"),
    "found keys count from the start of their block": (run, "result.seen, item.keys.start", "result.seen, 0"),
    "the last tile of queries is not computed": (block_plan, "in find_runs(is_seen):", "in find_runs(is_seen[:-1]):"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, small_blocks, monkeypatch):
    """Without a fault this case is that of `test_a_window_with_sinks_and_documents`."""
    module, before, after = FAULTS[fault]
    copy = broken(module, before, after)
    name = "find_work" if module is block_plan else "Run"
    monkeypatch.setattr(call, name, getattr(copy, name))
    with pytest.raises(AssertionError):
        check(Case(*one_sequence(), options()), see=SEE)


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


# -- arguments ----------------------------------------------------------------


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
    for other in (sightline.received(), sightline.entropy().mean("heads"), sightline.mass(i < j).rows([0])):
        with pytest.raises(ParameterError, match=r"(?s)for keys on disk.*without selections and means"):
            sightline.attention_from_disk(query, key, value, see=[other])
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
    query, key, value, mask=mask, memory_limit={limit}, output=sys.argv[1] + "output.npy", checkpoint=sys.argv[1],
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own accounting")
def test_anonymous_memory_stays_within_the_limit(tmp_path):
    """A limit that all keys and values fit into is used, so the measurement finds what a call holds."""
    assert anonymous_bytes(tmp_path, LIMIT) < LIMIT + ALLOWANCE
    assert anonymous_bytes(tmp_path, 8 * LIMIT) > LIMIT + ALLOWANCE


def test_the_package_exports_the_function():
    assert out_of_core.attention_from_disk is sightline.attention_from_disk
