"""The files that a call writes have room on their disk before the work, one writer, and are never half an output."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import h5py
import ml_dtypes
import numpy as np
import pytest

import sightline
from disk_calls import continued, drawn, options, stop_after, stopped
from sightline import i, j, table
from sightline.api.out_of_core import locked_file, output
from sightline.api.out_of_core.checkpoint import Checkpoint
from sightline.errors import DtypeError, ParameterError, ShapeError

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def whole(small_blocks):
    """The output of a call in memory."""
    return sightline.attention_from_disk(*drawn(), **options())


def attend(output=None, **more):
    return sightline.attention_from_disk(*drawn(), **(options() | more), output=output)


def test_the_output_is_written_to_a_file_or_an_array(whole, tmp_path):
    written = attend(tmp_path / "output.npy")
    assert isinstance(written, np.memmap)
    np.testing.assert_array_equal(written, whole)
    np.testing.assert_array_equal(np.load(tmp_path / "output.npy"), whole)
    own = np.empty_like(whole)
    assert attend(own) is own
    np.testing.assert_array_equal(own, whole)
    with pytest.raises(ShapeError, match="output of shape"):
        attend(own[..., 1:, :])
    with pytest.raises(DtypeError, match="float64"):
        attend(own.astype(float))


@pytest.mark.parametrize("shape", [(2, 9, 4), (9, 4), (1, 2, 0, 4), (0, 2, 9, 4)])
@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
def test_files_of_every_form_begin_as_numpy_writes_them(shape, dtype, tmp_path):
    x = np.ones(shape, dtype)
    written = sightline.attention_from_disk(x, x, x, output=tmp_path / "output.npy")
    assert (written.shape, written.dtype) == (x.shape, x.dtype)
    np.save(tmp_path / "expected.npy", sightline.attention_from_disk(x, x, x))
    assert (tmp_path / "output.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    path = tmp_path / "value.npy"
    np.save(path, drawn()[2])
    query, key, _ = drawn()
    value = np.load(path, mmap_mode="r")
    with pytest.raises(ParameterError, match="the file of value"):
        sightline.attention_from_disk(query, key, value[:], output=str(path))
    with pytest.raises(ParameterError, match="the file of a table"):
        sightline.attention_from_disk(query, key, drawn()[2], score=table(value)[0, 0, j, 0], output=path)
    assert np.array_equal(np.load(path), drawn()[2])
    with h5py.File(tmp_path / "value.h5", "w") as file:
        file["value"] = value
        with pytest.raises(ParameterError, match="the file of value"):
            sightline.attention_from_disk(query, key, file["value"], output=tmp_path / "value.h5")
    with pytest.raises(ParameterError, match="read-only"):
        sightline.attention_from_disk(query, key, value, output=np.broadcast_to(np.float32(0), query.shape))
    with pytest.raises(ParameterError, match="a folder"):
        sightline.attention_from_disk(query, key, value, checkpoint=path)


# -- room on the disk ---------------------------------------------------------


def held(path):
    """Return the bytes of the disk that a file holds; holes of the file hold none."""
    return os.stat(path).st_blocks * 512


def test_files_hold_their_bytes_of_the_disk_before_the_work(whole, tmp_path):
    """Linux counts the blocks of a file; the output as a map is the middle one of three in a file with holes."""
    maps = np.memmap(tmp_path / "maps", np.float32, "w+", 4096, (3, *whole.shape))
    seen = {}

    def look(finished, total):
        if not finished:
            seen.update({path.name: held(path) for path in tmp_path.iterdir()})

    attend(tmp_path / "output.npy", progress=look)
    assert seen["output.npy"] >= whole.nbytes > seen["maps"]
    attend(maps[1], progress=look, checkpoint=tmp_path)
    assert whole.nbytes <= seen["maps"] < 2 * whole.nbytes
    # of the state: 16 components of 4 bytes and an lse of 8 bytes for each query, twice
    assert seen["attention.state"] >= 2 * (whole.nbytes + whole.nbytes // 16 * 2)
    np.testing.assert_array_equal(maps[1], whole)
    assert not maps[0].any()
    assert not maps[2].any()


def no_room(monkeypatch, what):
    """Make the allocation of the file of this argument fail, as on a full disk."""
    reserve = locked_file.reserve

    def fail(file, start, size, path, argument):
        if argument == what:
            monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(NO_SPACE))
        reserve(file, start, size, path, argument)

    for module in (locked_file, output):
        monkeypatch.setattr(module, "reserve", fail)


@pytest.mark.parametrize("kind", ["new file", "old file", "map", "view of a map"])
def test_a_full_disk_is_an_error_before_the_work(kind, whole, tmp_path, monkeypatch):
    """The message has the bytes needed and free. A saved state stays, and so does a file that existed."""
    folder, path, target = tmp_path / "state", tmp_path / "output.npy", tmp_path / "output.npy"
    stopped(folder)
    if kind == "old file":
        path.write_bytes(b"before")
    elif kind != "new file":
        target = np.memmap(path, np.float32, "w+", shape=whole.shape)
        target = target if kind == "map" else np.asarray(target)
    with monkeypatch.context() as patch:
        no_room(patch, "output")
        with pytest.raises(OSError, match=r"output needs [\d,]+ bytes and [\d,]+ bytes are free") as full:
            attend(target, checkpoint=folder, progress=lambda *_: pytest.fail("work before the check"))
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, os.path.realpath(path))
    assert f"{whole.nbytes + 128 * ('file' in kind):,} bytes" in str(full.value)
    assert path.exists() == (kind != "new file")
    assert kind != "old file" or path.read_bytes() == b"before"
    output, finished = continued(folder)
    assert finished == 2
    assert output.tobytes() == whole.tobytes()


def test_a_disk_without_room_for_the_state_is_an_error_before_the_work(small_blocks, tmp_path, monkeypatch):
    no_room(monkeypatch, "checkpoint")
    with pytest.raises(OSError, match=r"checkpoint needs [\d,]+ bytes .*attention\.state"):
        attend(tmp_path / "output.npy", checkpoint=tmp_path, progress=lambda *_: pytest.fail("work before the check"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_a_file_system_that_cannot_allocate_is_asked_for_its_free_bytes(refusal, whole, tmp_path, monkeypatch):
    """macOS has no posix_fallocate."""

    def refuse(*_):
        raise OSError(refusal, os.strerror(refusal))

    if refusal is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert attend(tmp_path / "output.npy", checkpoint=tmp_path / "state").tobytes() == whole.tobytes()
    os.unlink(tmp_path / "output.npy")
    target = np.memmap(tmp_path / "map", np.float32, "w+", shape=whole.shape)  # a file with holes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=whole.nbytes - 8192))
    for place in (tmp_path / "output.npy", target):
        with pytest.raises(OSError, match="No space left on device: output needs"):
            attend(place)
    assert not (tmp_path / "output.npy").exists()
    target[...] = 1  # the file has no holes now, so that it needs no more bytes
    target.flush()
    assert attend(target).tobytes() == whole.tobytes()


@pytest.mark.parametrize("what", ["output", "checkpoint"])
def test_a_limit_of_the_size_of_files_is_an_error_before_the_work(what, small_blocks, tmp_path):
    """The system enforces the limit, so nothing is replaced here."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    given = {"output": tmp_path / "output.npy"} if what == "output" else {"checkpoint": tmp_path}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"File too large: {what} needs") as refused:
            attend(**given, progress=lambda *_: pytest.fail("work before the check"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


SMALL_DISK = """
import os, sys
import numpy as np, sightline
from sightline import i, j
from sightline.api.out_of_core import block_plan, run
folder, started = sys.argv[1], []
block_plan.MAX_PAIRS, run.SECONDS_BETWEEN_SAVES = 1 << 16, 0.0
query, key, value = np.random.default_rng(0).normal(size=(3, 2, 1024, 64)).astype(np.float32)
given = {"mask": i >= j, "memory_limit": "2 MB"}
expected = sightline.attention_from_disk(query, key, value, **given)

def report(finished, total):  # fills the disk when the work begins, and interrupts the work at `stop`
    if not os.path.exists(folder + "/filling"):
        started.append(finished)
        take(0)
    if finished == stop:
        raise KeyboardInterrupt

def attempt(output, checkpoint=folder + "/state"):
    try:
        output = sightline.attention_from_disk(
            query, key, value, **given, output=output, checkpoint=checkpoint, progress=fill
        )
    except BaseException as error:
        print(type(error).__name__, getattr(error, "errno", None), sorted(os.listdir(folder)))
    else:
        print("right" if np.array_equal(output, expected) else "wrong", sorted(os.listdir(folder)))

def take(size):  # leaves so many bytes free
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with open(folder + "/filling", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - size)

def attempt(output, checkpoint=folder + "/state"):
    try:
        output = sightline.attention_from_disk(
            query, key, value, **given, output=output, checkpoint=checkpoint, progress=report
        )
    except BaseException as error:
        print(type(error).__name__, getattr(error, "errno", None))
    else:
        print("right" if np.array_equal(output, expected) else "wrong")
    os.path.exists(folder + "/filling") and os.unlink(folder + "/filling")

stop = None
take(query.nbytes)
attempt(folder + "/output.npy", None)
stop = 3
attempt(None)
stop = None
take(query.nbytes)
attempt(folder + "/output.npy")
target = np.memmap(folder + "/output.npy", np.float32, "w+", shape=query.shape)
take(query.nbytes // 2)
attempt(target)
del target
os.unlink(folder + "/output.npy")
started = []
attempt(folder + "/output.npy")
print(started, sorted(os.listdir(folder)))
os.unlink(folder + "/output.npy")
attempt(np.memmap(folder + "/output.npy", np.float32, "w+", shape=query.shape))
"""


def small_disk(folder):
    """Return a command that runs Python with a file system of 3 MiB in the folder; None if that is not allowed."""
    mount = f"mount -t tmpfs -o size=3M none '{folder}'"
    for namespace in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        command = [*namespace, "sh", "-c", f'{mount} && exec "$@"', "sh"]
        try:
            if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
                return [*command, sys.executable]
        except FileNotFoundError:
            return None
    return None


def test_a_real_disk_that_is_full_at_any_time_ends_no_process(tmp_path):
    """The other tests of full disks need no file system of their own, and are never skipped."""
    command = small_disk(tmp_path)
    if command is None:
        pytest.skip("this system does not let the test mount a file system")
    ran = subprocess.run([*command, "-c", SMALL_DISK, tmp_path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        f"OSError {errno.ENOSPC}",
        "KeyboardInterrupt None",  # the disk became full, but the checkpoint has its room
        f"OSError {errno.ENOSPC}",  # no room for a file with its header
        f"OSError {errno.ENOSPC}",  # no room for a map
        "right",  # the disk became full, but the output has its room
        "[3] ['output.npy', 'state']",
        "right",
    ]


# -- one writer, and no half output -------------------------------------------


def test_two_calls_do_not_write_one_output(whole, tmp_path):
    path, refused = tmp_path / "output.npy", []

    def call_again(finished, total):
        with pytest.raises(ParameterError, match="another call uses") as error:
            attend(path)
        refused.append(error.value)

    written = attend(path, progress=call_again)
    assert written.tobytes() == whole.tobytes()
    assert "another output" in refused[0].cure
    assert attend(path).tobytes() == whole.tobytes()  # although the map `written` has the file open


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_output_that_is_removed_during_the_work_is_made_again(is_replaced, whole, tmp_path):
    path = tmp_path / "output.npy"

    def remove(finished, total):
        if finished == 2:
            path.unlink()
            if is_replaced:
                np.save(path, np.arange(10**6))

    attend(path, progress=remove)
    assert np.load(path).tobytes() == whole.tobytes()


def test_an_output_whose_folder_is_removed_is_an_error_that_keeps_the_state(whole, tmp_path):
    folder = tmp_path / "away"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r"output\.npy"):
        attend(
            folder / "output.npy",
            checkpoint=tmp_path / "state",
            progress=lambda finished, total: finished == 2 and shutil.rmtree(folder),
        )
    folder.mkdir()
    done = []
    attend(folder / "output.npy", checkpoint=tmp_path / "state", progress=lambda *numbers: done.append(numbers))
    assert done == [(done[0][1], done[0][1])]
    assert np.load(folder / "output.npy").tobytes() == whole.tobytes()


def test_an_interrupted_call_leaves_no_output_and_keeps_an_older_one(small_blocks, tmp_path):
    path = tmp_path / "output.npy"
    for before in (None, np.arange(5.0), np.zeros(10**6)):
        if before is not None:
            np.save(path, before)
        with pytest.raises(KeyboardInterrupt):
            attend(path, progress=stop_after(3))
        if before is None:
            assert not path.exists()
        else:
            np.testing.assert_array_equal(np.load(path), before)


@pytest.mark.parametrize("size", [0, 10**6])
def test_a_shorter_or_longer_file_is_replaced(size, whole, tmp_path):
    path = tmp_path / "output.npy"
    path.write_bytes(b"x" * size)
    attend(path)
    np.save(tmp_path / "expected.npy", whole)
    assert path.read_bytes() == (tmp_path / "expected.npy").read_bytes()


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("failing", range(3))
def test_an_error_while_the_output_is_written_leaves_no_file_that_loads(failing, existed, whole, tmp_path, monkeypatch):
    """The checkpoint has the finished state, from which a second call writes the output again."""
    path, write, count = tmp_path / "output.npy", locked_file.LockedFile.write, []

    def fail(file, offset, values):
        if file.argument == "output":
            count.append(offset)
            if len(count) == failing + 1:
                raise OSError(errno.EIO, "Input/output error", file.path)
        write(file, offset, values)

    if existed:
        np.save(path, whole[..., ::-1])
    with monkeypatch.context() as patch:
        patch.setattr(locked_file.LockedFile, "write", fail)
        with pytest.raises(OSError, match="Input/output"):
            attend(path, checkpoint=tmp_path / "state")
    assert path.exists() == existed
    if existed and failing > 0:
        with pytest.raises(ValueError, match="allow_pickle"):
            np.load(path)
    output, finished = continued(tmp_path / "state", output=path)
    assert finished > 10
    assert output.tobytes() == whole.tobytes()


def test_an_interrupt_while_the_state_is_removed_leaves_the_output(whole, tmp_path, monkeypatch):
    def interrupted(checkpoint):
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attend(tmp_path / "output.npy", checkpoint=tmp_path / "state")
    np.testing.assert_array_equal(np.load(tmp_path / "output.npy"), whole)


def test_a_link_to_a_file_that_does_not_exist_stays(whole, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "output.npy")
    with pytest.raises(KeyboardInterrupt):
        attend(tmp_path / "link", progress=stop_after(1))
    assert [path.name for path in tmp_path.iterdir()] == ["link"]
    attend(tmp_path / "link")
    np.testing.assert_array_equal(np.load(tmp_path / "output.npy"), whole)


def test_an_output_in_a_map_that_lies_outside_its_file_is_left_to_the_map(whole, tmp_path):
    """The file that has the name of the map now is not that of the map, and is not changed."""
    target = np.memmap(tmp_path / "map", np.float32, "w+", shape=whole.shape)
    os.unlink(tmp_path / "map")
    assert attend(target).tobytes() == whole.tobytes()
    (tmp_path / "map").write_bytes(b"other")
    assert attend(target, mask=i >= j) is target
    assert (tmp_path / "map").read_bytes() == b"other"
    private = np.memmap(tmp_path / "map", np.uint8, "c", shape=(5,))
    assert output._find_map(private[1:]) is private
