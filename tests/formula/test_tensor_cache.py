"""Results derived from tables on a device are computed once, and again when a table changes.

In these tests, CPU tensors stand in for tensors of a device.
"""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sightline
from sightline import h, i, j, s, table
from sightline.call.problem import make_problem
from sightline.formula import tables as table_module
from sightline.formula import tensor_cache
from sightline.formula.tensor_cache import TensorCache
from sightline.gpu.launch.arguments import make_schedule


@pytest.fixture
def counted(monkeypatch):
    """Treat CPU tensors like tensors of a device: torch counts writes to both in the same way."""
    monkeypatch.setattr(tensor_cache, "UNVERSIONED_DEVICES", ())


@pytest.fixture
def found():
    """The results in the order in which they were computed."""
    return []


def get(cache, found, array, name="?"):
    return cache.get(name, [array], lambda: found.append(len(found)) or len(found) - 1)


def test_computed_once_until_the_array_is_written(counted, found):
    cache, array = TensorCache(4), torch.zeros(3)
    assert [get(cache, found, array) for _ in range(3)] == [0, 0, 0]
    array.add_(1)
    assert [get(cache, found, array) for _ in range(2)] == [1, 1]
    array[1:].zero_()
    assert get(cache, found, array) == 2
    assert get(cache, found, array, "other") == 3


def test_equal_views_of_the_same_memory_are_hits(counted, found):
    cache, array = TensorCache(4), torch.zeros(3, 4)
    assert get(cache, found, array[1:]) == get(cache, found, array[1:]) == 0
    assert get(cache, found, array[2:]) == 1
    assert get(cache, found, array[1:].T) == 2


def test_entries_of_freed_arrays_are_dropped_and_the_size_is_limited(counted, found):
    cache = TensorCache(2)
    arrays = [torch.zeros(3) for _ in range(3)]
    for array in arrays:
        get(cache, found, array)
    assert len(cache.entries) == 2
    get(cache, found, arrays[0])
    assert len(found) == 4
    del array, arrays
    assert not cache.entries


def test_host_arrays_are_not_cached(found):
    for array in (np.zeros(3), torch.zeros(3)):
        cache = TensorCache(4)
        assert get(cache, found, array) != get(cache, found, array)
        assert not cache.entries


def test_a_cached_mask_does_not_read_its_tables_again(counted, monkeypatch):
    x = torch.zeros(1, 1, 40, 4)
    lengths, bias = torch.tensor([30]), torch.zeros(40)
    bias[3] = -torch.inf

    def problem():
        return make_problem(x, x, x, mask=(j < table(lengths)[0]) & (i >= j), score=s + table(bias)[j])

    first = problem()
    rows = make_schedule(first, 16, 16)

    def fail(array):
        raise AssertionError("a table was copied to the host")

    monkeypatch.setattr(table_module, "to_host", fail)
    again = problem()
    assert again.mask.text == first.mask.text
    assert make_schedule(again, 16, 16) is rows
    lengths.sub_(1)
    with pytest.raises(AssertionError, match="copied"):
        problem()


def test_a_cached_mask_reads_the_tables_of_its_own_call(counted):
    x = torch.zeros(1, 1, 6, 4)
    lengths = torch.tensor([3])
    masks = [
        make_problem(x, x, x, mask=j < table(lengths)[0], score=s + table(bias)[j]).mask
        for bias in (torch.zeros(6),) * 2
    ]
    assert [mask.tables[0].array is lengths for mask in masks] == [True, True]
    lengths.fill_(5)
    assert sightline.attention(x, x, x, mask=j < table(lengths)[0], see=[sightline.mass(j < 4)])[1][0][0, 0, 0] == 0.8


def test_arrays_that_a_captured_graph_reads_stay_alive(counted, monkeypatch):
    """Replays of the graph read the same memory, even after the table was replaced."""
    x, lengths = torch.zeros(1, 1, 40, 4), torch.tensor([30])
    rows = []
    monkeypatch.setattr(tensor_cache, "_RETAINED", {})
    monkeypatch.setattr(table_module, "to_host", torch.clone)  # a copy, as a transfer from a device is
    for captured in (False, True):
        monkeypatch.setattr(tensor_cache, "_is_capturing", lambda like, captured=captured: captured)
        rows.append(weakref.ref(make_schedule(make_problem(x, x, x, mask=j < table(lengths)[0]), 16, 16)[0]))
        lengths = torch.tensor([20])
    assert [row() is None for row in rows] == [True, False]


def test_arrays_read_by_another_stream_are_recorded_on_it(monkeypatch):
    stream, recorded = object(), []
    array = SimpleNamespace(record_stream=recorded.append)
    cuda = SimpleNamespace(current_stream=lambda device: stream, is_current_stream_capturing=lambda: False)
    monkeypatch.setattr(torch, "cuda", cuda)
    like = SimpleNamespace(is_cuda=True, device="cuda:0")
    assert tensor_cache.retain((array, 3), like) == (array, 3)
    assert tensor_cache.retain(array, like) is array
    assert recorded == [stream, stream]


def test_a_small_table_converted_in_inference_mode_serves_training(counted):
    x, slopes = torch.zeros(1, 2, 4, 4, requires_grad=True), np.array([0.25, 0.125])
    with torch.inference_mode():
        assert not tensor_cache.to_device(slopes, x).is_inference()
    sightline.attention(x, x, x, score=s - table(slopes)[h] * (i - j)).sum().backward()
