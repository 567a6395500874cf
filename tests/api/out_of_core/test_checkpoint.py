"""A call that stopped continues with the same bits; a saved state that is damaged or of other arguments is refused."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from disk_calls import SIZES, N, continued, drawn, options, stop_after, stopped
from sightline import i, j, s, table
from sightline.api.out_of_core import block_plan, call, checkpoint, file_locks, locked_file, run
from sightline.errors import ParameterError
from sightline.problem.kernel import Result
from sightline.statistics import arrays_of
from sightline.testing import assert_conforms
from strategies import Case

FILE = "attention.state"


@pytest.fixture
def whole(small_blocks):
    """The output of a call that nothing interrupts."""
    return sightline.attention_from_disk(*drawn(), **options())


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_resumed_call_has_the_bits_of_an_uninterrupted_call(count, whole, tmp_path):
    for _ in range(2):
        stopped(tmp_path, count=count)
    output, finished = continued(tmp_path)
    assert finished == count
    assert output.tobytes() == whole.tobytes()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_resumed_call_has_the_bits_of_the_statistics(count, small_blocks, tmp_path):
    see = [sightline.lse(), sightline.entropy(), sightline.mass(i - j < 9), sightline.max_score(), sightline.top_k(3)]
    whole = sightline.attention_from_disk(*drawn(), **options(), see=see)
    for _ in range(2):
        stopped(tmp_path, count=count, see=see)
    resumed, finished = continued(tmp_path, see=see)
    assert finished == count
    found, expected = ([output, *[x for one in seen for x in arrays_of(one)]] for output, seen in (resumed, whole))
    assert [array.tobytes() for array in found] == [array.tobytes() for array in expected]


def test_an_interrupt_while_rows_are_stored_loses_nothing(whole, tmp_path, monkeypatch):
    """Rows that were stored twice have the same bits, because the merged rows are stored, not merged again."""
    store, calls = run.Run._store, []

    def interrupted(run):
        calls.append(run)
        if len(calls) == 3:
            run.state.output[..., run.items[run.merged[0]].queries, :] = run.merged[1].output  # the first of the arrays
            raise KeyboardInterrupt
        store(run)

    monkeypatch.setattr(run.Run, "_store", interrupted)
    stopped(tmp_path, count=-1)
    assert continued(tmp_path)[0].tobytes() == whole.tobytes()


def test_the_state_is_saved_from_time_to_time(small_blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SECONDS_BETWEEN_SAVES", 0.0)
    saved = []
    save = checkpoint.Checkpoint.save
    monkeypatch.setattr(
        checkpoint.Checkpoint, "save", lambda self, state: saved.append(state.finished) or save(self, state)
    )
    continued(tmp_path)
    assert saved == list(range(1, len(saved) + 1))


def test_an_interrupt_while_the_state_is_read_keeps_it(whole, tmp_path, monkeypatch):
    stopped(tmp_path, count=2)

    def interrupted(file, offset, values):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(locked_file.LockedFile, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            continued(tmp_path)
    output, finished = continued(tmp_path)
    assert finished == 2
    assert output.tobytes() == whole.tobytes()


def test_a_removed_folder_is_made_again(whole, tmp_path):
    folder = tmp_path / "state"

    def remove(finished, total):
        if finished == 2:
            shutil.rmtree(folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sightline.attention_from_disk(*drawn(), **options(), checkpoint=folder, progress=remove)
    output, finished = continued(folder)
    assert finished == 2
    assert output.tobytes() == whole.tobytes()


def test_a_link_to_a_folder_that_does_not_exist_is_followed(whole, tmp_path):
    """A disk for temporary files may have been emptied."""
    link, folder = tmp_path / "link", tmp_path / "away" / "state"
    link.symlink_to(folder)
    stopped(link, count=2)
    assert [path.name for path in folder.iterdir()] == [FILE]
    output, finished = continued(link)
    assert finished == 2
    assert output.tobytes() == whole.tobytes()
    assert link.is_symlink()


# -- other arguments ----------------------------------------------------------

TABLES = [table(np.arange(N)), table(np.arange(N)[::-1].copy())]
BOTH = TABLES[0][i] + 1 > TABLES[1][j] - N  # reads both tables, and hides nothing
OTHERS = {
    "mask": ({"mask": i >= j}, "mask or score"),
    "table": ({"score": s + table(np.zeros(N))[j]}, "mask or score"),
    "scale": ({"scale": 0.5}, "scale"),
    "sinks": ({"sinks": np.zeros(4)}, "sinks"),
    "statistics": ({"see": [sightline.entropy()]}, "see"),
    "condition": ({"see": [sightline.mass(TABLES[0][j] < 5)]}, "see"),
    "dropout": ({"dropout": 0.5, "seed": 1}, "dropout, seed"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_other_arguments_is_refused(name, small_blocks, tmp_path):
    changed, names = OTHERS[name]
    stopped(tmp_path, see=[sightline.mass(TABLES[1][j] < 5)] if name == "condition" else None)
    with pytest.raises(ParameterError, match="other arguments") as refused:
        continued(tmp_path, **changed)
    assert refused.value.given.endswith(f": {names} changed")


def test_a_score_that_reads_another_table_of_the_mask_is_refused(small_blocks, tmp_path):
    """The texts of the two calls and the tables of mask and score together are the same."""
    stopped(tmp_path, mask=BOTH, score=s + TABLES[0][j] / N)
    with pytest.raises(ParameterError, match="mask or score changed"):
        continued(tmp_path, mask=BOTH, score=s + TABLES[1][j] / N)


def test_a_checkpoint_of_other_blocks_is_refused(small_blocks, tmp_path, monkeypatch):
    stopped(tmp_path)
    monkeypatch.setattr(call, "choose_sizes", lambda *_: replace(SIZES, keys=32))
    with pytest.raises(ParameterError, match=r"memory_limit.* changed"):
        continued(tmp_path)


@pytest.mark.parametrize("shape", [(2, 4, N, 16), (1, 4, N, 16)])
def test_a_query_of_other_entries_or_shape_is_refused(shape, small_blocks, tmp_path):
    stopped(tmp_path)
    query = np.random.default_rng(5).normal(size=shape).astype(np.float32)
    with pytest.raises(ParameterError, match=r"query.* changed"):
        continued(tmp_path, [query, *drawn()[1:]])


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("kind", ["the same array", "the same map", "another file of the name"])
def test_one_changed_entry_is_refused(place, kind, small_blocks, tmp_path):
    """The entry is in the middle of its block. A memory map writes to its file without a new time of change."""
    arrays = drawn()
    path = tmp_path / "array.npy"
    np.save(path, arrays[place])
    if kind != "the same array":
        arrays[place] = np.load(path, mmap_mode="r+")
    stopped(tmp_path / "state", arrays, count=8)
    if kind == "another file of the name":
        changed = drawn()[place]
        path.unlink()
        np.save(path, changed + (np.arange(N) == 33)[:, None].astype(np.float32))
        arrays[place] = np.load(path, mmap_mode="r")
    else:
        arrays[place][1, 0, 33, 3] += 1
    with pytest.raises(ParameterError, match=f"{('query', 'key', 'value')[place]} changed"):
        continued(tmp_path / "state", arrays)


def test_entries_that_no_finished_item_has_read_may_change(small_blocks, tmp_path):
    arrays = drawn()
    stopped(tmp_path, arrays, count=2)
    for array in arrays[1:]:
        array[..., -1, :] *= 2
    output, finished = continued(tmp_path, arrays)
    assert finished == 2
    assert output.tobytes() == sightline.attention_from_disk(*arrays, **options()).tobytes()


def test_copied_files_continue(whole, tmp_path):
    stopped(tmp_path / "state", count=8)
    arrays = []
    for place, array in enumerate(drawn()):
        np.save(tmp_path / f"{place}.npy", array)
        arrays.append(np.load(tmp_path / f"{place}.npy", mmap_mode="r"))
    output, finished = continued(tmp_path / "state", arrays)
    assert finished == 8
    assert output.tobytes() == whole.tobytes()


def test_other_layouts_of_the_same_entries_continue(small_blocks, tmp_path):
    """The bits may differ, because the kernels may add in another order."""
    stopped(tmp_path, count=8)
    arrays = [np.ascontiguousarray(np.moveaxis(array, -2, 0)) for array in drawn()]
    case = Case(*[np.moveaxis(array, 0, -2) for array in arrays], options())

    def run(problem):
        (output, (lse,)), finished = continued(tmp_path, case.arrays, see=[sightline.lse()])
        assert finished == 8
        return Result(output, lse.astype(np.float64))

    assert_conforms(run, case.make_problem())


@pytest.mark.parametrize("folder", [5, b"state", 1.5])
def test_a_checkpoint_that_is_no_path_is_refused(folder):
    with pytest.raises(ParameterError, match="the path of a folder"):
        continued(folder)


# -- damage -------------------------------------------------------------------

SMALL = drawn(n=200, heads=(1, 1))  # for tests with many calls
CAUSAL = {"mask": i >= j, "score": None, "sinks": None}


@pytest.fixture
def small_whole(small_blocks):
    return sightline.attention_from_disk(*SMALL, **CAUSAL)


PLACES = st.one_of(st.floats(0, 1), st.integers(0, 600), st.integers(4096, 4700), st.sampled_from([8191, 8192, 8193]))


def damage(content, kind, start, stop, seed):
    """Return the content cut, with flipped bits, zeros or noise, with moved bytes, or as another kind of file.

    A place is a number of bytes, or a part of the length.
    """
    rng, size = np.random.default_rng(seed), len(content)
    places = [round(place * size) if isinstance(place, float) else min(place, size) for place in (start, stop)]
    start, stop = sorted(places)
    if kind == "flip":
        changed = bytearray(content)
        for place in {start, stop, *rng.integers(0, size, seed % 4)}:
            changed[min(place, size - 1)] ^= 1 << rng.integers(8)
        return bytes(changed)
    return {
        "cut": content[:start],
        "zeros": content[:start] + bytes(stop - start) + content[stop:],
        "noise": content[:start] + rng.bytes(stop - start) + content[stop:],
        "remove": content[:start] + content[stop:],
        "insert": content[:start] + rng.bytes(9) + content[start:],
        "swap": content[4096:8192] + content[:4096] + content[8192:],
        "npz": b"PK\x03\x04" + rng.bytes(stop - start),
        "other": rng.bytes(start),
    }[kind]


KINDS = ["cut", "flip", "flip", "flip", "zeros", "noise", "remove", "insert", "swap", "npz", "other"]


def test_damaged_states_are_refused_or_harmless(small_whole, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SECONDS_BETWEEN_SAVES", 0.0)
    stopped(tmp_path, SMALL, count=4, **CAUSAL)  # both copies of the state are written
    file = next(tmp_path.iterdir())
    content, refused = file.read_bytes(), []
    monkeypatch.setattr(run, "SECONDS_BETWEEN_SAVES", 60.0)

    @given(st.tuples(st.sampled_from(KINDS), PLACES, PLACES, st.integers(0, 10**6)))
    @settings(max_examples=300)
    def check(how):
        damaged = damage(content, *how)
        file.write_bytes(damaged)
        try:
            output, _ = continued(tmp_path, SMALL, **CAUSAL)
        except ParameterError as error:
            refused.append((error.given, file.read_bytes() == damaged))
        else:
            assert output.tobytes() == small_whole.tobytes()

    check()
    assert 20 < len(refused) < 280
    assert all("damaged checkpoint" in given and is_kept for given, is_kept in refused)


@pytest.mark.parametrize("finished", [10**6, 2**64 - 1])
def test_a_number_of_finished_items_that_does_not_exist_is_refused(finished, small_blocks, tmp_path):
    stopped(tmp_path)
    content = (tmp_path / FILE).read_bytes()
    header = header_of(content)
    (tmp_path / FILE).write_bytes(replace(header, finished=finished).pack() + content[len(header.pack()) :])
    with pytest.raises(ParameterError, match="damaged"):
        continued(tmp_path)


def header_of(content):
    """Return the header of the first copy of a state."""
    numbers = checkpoint.NUMBERS
    mark, finished, key, value, checksum = numbers.unpack_from(content)
    assert mark == checkpoint.MARK
    end = numbers.size + checkpoint.HASH_BYTES * 10
    header = checkpoint._Header(finished, (key, value), checksum, content[numbers.size : end])
    assert content.startswith(header.pack())
    return header


def test_nan_in_the_arrays_is_no_damage(small_blocks, tmp_path):
    arrays = drawn()
    arrays[1][0, 0, 3] = np.nan
    arrays[2][1, 1, 5] = np.inf
    stopped(tmp_path, arrays, count=8)
    output, finished = continued(tmp_path, arrays)
    assert finished == 8
    assert output.tobytes() == sightline.attention_from_disk(*arrays, **options()).tobytes()


def test_a_crash_at_any_byte_of_a_save_leaves_a_state(small_whole, tmp_path, monkeypatch):
    """After the first save, the file holds a whole state at any time."""
    monkeypatch.setattr(run, "SECONDS_BETWEEN_SAVES", 0.0)
    snapshots, write = [], locked_file.LockedFile.write

    def record(file, offset, values):
        data = bytes(locked_file._bytes_of(values))
        for length in {0, 1, 200, len(data) // 2, len(data) - 1}:
            write(file, offset, data[:length])
            snapshots.append((tmp_path / FILE).read_bytes())
        write(file, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(locked_file.LockedFile, "write", record)
        stopped(tmp_path, SMALL, count=5, **CAUSAL)
    monkeypatch.setattr(run, "SECONDS_BETWEEN_SAVES", 60.0)
    first_header = slice(10, 15)  # of 5 saves with 3 writes of 5 snapshots; only here is no older copy
    assert len(snapshots) == 75
    for number, content in enumerate(snapshots):
        (tmp_path / FILE).write_bytes(content)
        if number in range(75)[first_header] and any(content[:1]):
            with pytest.raises(ParameterError, match="damaged"):
                continued(tmp_path, SMALL, **CAUSAL)
            continue
        output, finished = continued(tmp_path, SMALL, **CAUSAL)
        assert finished == min(number // 15, 4), number
        assert output.tobytes() == small_whole.tobytes()


def test_a_disk_that_is_full_at_a_save_leaves_the_state_before(whole, tmp_path, monkeypatch):
    """Space that was allocated can be missing after all, on a file system that writes to new places."""
    stopped(tmp_path, count=2)
    write = locked_file.LockedFile.write

    def fail(file, offset, values):
        write(file, offset, bytes(locked_file._bytes_of(values)[:100]))
        raise OSError(28, "No space left on device", file.path)

    with monkeypatch.context() as patch:
        patch.setattr(locked_file.LockedFile, "write", fail)
        with pytest.raises(OSError, match=r"No space left.*attention\.state"):
            continued_until(4, tmp_path)
    output, finished = continued(tmp_path)
    assert finished == 2
    assert output.tobytes() == whole.tobytes()


def continued_until(count, folder):
    sightline.attention_from_disk(*drawn(), **options(), checkpoint=folder, progress=stop_after(count))


# -- other calls and other processes ------------------------------------------


def test_two_calls_do_not_share_a_checkpoint(whole, tmp_path):
    """The second call is refused while the first one runs, and the first one is not disturbed."""
    refused = []

    def call_again(finished, total):
        with pytest.raises(ParameterError, match="another call uses") as error:
            continued(tmp_path)
        refused.append(error.value)

    output = sightline.attention_from_disk(*drawn(), **options(), checkpoint=tmp_path, progress=call_again)
    assert output.tobytes() == whole.tobytes()
    assert "another checkpoint" in refused[0].cure
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_removed_before_it_is_locked_is_not_used(whole, tmp_path, monkeypatch):
    """Another call may finish, and remove its state, after this call has opened the file and before it has the lock."""
    lock, locked = fcntl.flock, []

    def finish_other_call(file, operation):
        if not locked:
            (tmp_path / FILE).unlink()
        locked.append(operation)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", finish_other_call)
    stopped(tmp_path, count=2)
    output, finished = continued(tmp_path)
    assert finished == 2
    assert output.tobytes() == whole.tobytes()


def test_a_state_that_another_call_has_replaced_is_not_written(whole, tmp_path):
    held = []

    def replace_state(finished, total):
        if finished == 2:
            (tmp_path / FILE).unlink()
            held.append(locked_file.LockedFile(tmp_path / FILE, "checkpoint"))
            raise KeyboardInterrupt

    with pytest.raises(ParameterError, match="another call uses") as refused:
        sightline.attention_from_disk(*drawn(), **options(), checkpoint=tmp_path, progress=replace_state)
    held[0].close()
    assert isinstance(refused.value.__context__.__context__, KeyboardInterrupt)
    assert (tmp_path / FILE).stat().st_size == 0
    output, finished = continued(tmp_path)
    assert finished == 0
    assert output.tobytes() == whole.tobytes()


@pytest.mark.parametrize("refusal", [errno.ENOLCK, errno.ENOSYS, None])
def test_a_file_system_without_locks_is_used_without(refusal, whole, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(refusal, os.strerror(refusal))

    if refusal is None:
        monkeypatch.setattr(file_locks, "fcntl", None)
    else:
        monkeypatch.setattr(fcntl, "flock", refuse)
    stopped(tmp_path, count=2)
    output, finished = continued(tmp_path, output=tmp_path / "output.npy")
    assert finished == 2
    assert output.tobytes() == whole.tobytes()


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns if an earlier test has loaded it
def test_a_fork_that_lives_on_does_not_keep_the_lock(whole, tmp_path):
    """The fork has a copy of the descriptor that holds the lock."""
    forked, ended = [], multiprocessing.get_context("fork").Event()

    def fork(finished, total):
        if finished == 1:
            forked.append(multiprocessing.get_context("fork").Process(target=ended.wait, args=(60,)))
            forked[0].start()
        if finished == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sightline.attention_from_disk(*drawn(), **options(), checkpoint=tmp_path, progress=fork)
    try:
        output, finished = continued(tmp_path)
    finally:
        ended.set()
        forked[0].join()
    assert finished == 2
    assert output.tobytes() == whole.tobytes()


PROGRAM = """
import signal, sys, time, numpy as np, sightline
from sightline import i, j
from sightline.api.out_of_core import block_plan, run
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
block_plan.MAX_PAIRS, run.SECONDS_BETWEEN_SAVES = 1 << 20, float(sys.argv[2])
x = np.random.default_rng(0).normal(size=(4, 4096, 64)).astype(np.float32)

def report(finished, total):
    if finished == 3:
        print("works", flush=True)
        time.sleep(float(sys.argv[3]))

sightline.attention_from_disk(
    x, x, x, mask=i >= j, memory_limit="9 MB", checkpoint=sys.argv[1], progress=report
)
"""


def start(folder, seconds_between_saves, seconds_after_three):
    """Start a process that computes, and return it when it has finished three work items."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, folder, str(seconds_between_saves), str(seconds_after_three)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"works\n"
    return process


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """A function that makes the call of the process, and returns the output and the number of finished items found."""
    monkeypatch.setattr(block_plan, "MAX_PAIRS", 1 << 20)
    x = np.random.default_rng(0).normal(size=(4, 4096, 64)).astype(np.float32)
    return lambda folder: continued(folder, [x, x, x], mask=i >= j, score=None, sinks=None, memory_limit="9 MB")


def test_an_interrupt_from_the_keyboard_saves_the_state(resumed, tmp_path):
    """While the process lives, no other one can use its checkpoint."""
    process = start(tmp_path, 60, 60)
    with pytest.raises(ParameterError, match="another call uses"):
        resumed(tmp_path)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in error
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert resumed(tmp_path)[1] == 3


def test_a_killed_process_leaves_a_state_that_continues(resumed, tmp_path):
    """The process saves its state after every step. It may be killed while it writes. Its lock ends with it."""
    process = start(tmp_path, 0, 0)
    process.kill()
    process.communicate()
    output, finished = resumed(tmp_path)
    assert finished >= 2
    assert output.tobytes() == resumed(None)[0].tobytes()
    assert list(tmp_path.iterdir()) == []
