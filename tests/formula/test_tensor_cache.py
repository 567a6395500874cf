"""What formulas with tables on a device need is found once, and again when the tables change.

Tensors of the CPU stand for a device's here: torch counts what it writes to them just so.
"""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sightline
from sightline import h, i, j, s, table
from sightline.formula import tables as table_module
from sightline.formula import tensor_cache
from sightline.formula.tensor_cache import TensorCache
from sightline.gpu.launch.schedule import make_schedule
from sightline.problem import make_problem


@pytest.fixture
def counted(monkeypatch):
    """Tensors of the CPU are looked at as a device's are."""
    monkeypatch.setattr(tensor_cache, "UNVERSIONED_DEVICES", ())


@pytest.fixture
def found():
    """Answers in the order they were found."""
    return []


def ask(kept, found, array, question="?"):
    return kept.get(question, [array], lambda: found.append(len(found)) or len(found) - 1)


def test_found_once_until_written_to(counted, found):
    kept, array = TensorCache(4), torch.zeros(3)
    assert [ask(kept, found, array) for _ in range(3)] == [0, 0, 0]
    array.add_(1)
    assert [ask(kept, found, array) for _ in range(2)] == [1, 1]
    array[1:].zero_()
    assert ask(kept, found, array) == 2
    assert ask(kept, found, array, "other") == 3


def test_views_made_anew_are_the_same(counted, found):
    kept, array = TensorCache(4), torch.zeros(3, 4)
    assert ask(kept, found, array[1:]) == ask(kept, found, array[1:]) == 0
    assert ask(kept, found, array[2:]) == 1
    assert ask(kept, found, array[1:].T) == 2


def test_what_ended_is_forgotten_and_only_so_many_are_kept(counted, found):
    kept = TensorCache(2)
    arrays = [torch.zeros(3) for _ in range(3)]
    for array in arrays:
        ask(kept, found, array)
    assert len(kept.entries) == 2
    ask(kept, found, arrays[0])
    assert len(found) == 4
    del array, arrays
    assert not kept.entries


def test_arrays_of_the_host_are_looked_at_each_time(found):
    for array in (np.zeros(3), torch.zeros(3)):
        kept = TensorCache(4)
        assert ask(kept, found, array) != ask(kept, found, array)
        assert not kept.entries


def test_a_mask_seen_before_costs_no_look_at_its_tables(counted, monkeypatch):
    x = torch.zeros(1, 1, 40, 4)
    lengths, bias = torch.tensor([30]), torch.zeros(40)
    bias[3] = -torch.inf

    def problem():
        return make_problem(x, x, x, mask=(j < table(lengths)[0]) & (i >= j), score=s + table(bias)[j])

    first = problem()
    rows = make_schedule(first, 16, 16)

    def looked(array):
        raise AssertionError("a table was copied to the host")

    monkeypatch.setattr(table_module, "to_host", looked)
    again = problem()
    assert again.mask.text == first.mask.text
    assert make_schedule(again, 16, 16) is rows
    lengths.sub_(1)
    with pytest.raises(AssertionError, match="copied"):
        problem()


def test_a_mask_found_again_reads_the_tables_of_its_own_call(counted):
    x = torch.zeros(1, 1, 6, 4)
    lengths = torch.tensor([3])
    masks = [
        make_problem(x, x, x, mask=j < table(lengths)[0], score=s + table(bias)[j]).mask
        for bias in (torch.zeros(6),) * 2
    ]
    assert [mask.tables[0].array is lengths for mask in masks] == [True, True]
    lengths.fill_(5)
    assert sightline.attention(x, x, x, mask=j < table(lengths)[0], see=[sightline.mass(j < 4)])[1][0][0, 0, 0] == 0.8


def test_what_a_captured_graph_reads_is_kept(counted, monkeypatch):
    """Replays read the same memory, whatever became of the table since."""
    x, lengths = torch.zeros(1, 1, 40, 4), torch.tensor([30])
    rows = []
    monkeypatch.setattr(tensor_cache, "_RETAINED", {})
    monkeypatch.setattr(table_module, "to_host", torch.clone)  # a copy, as of a device's
    for captured in (False, True):
        monkeypatch.setattr(tensor_cache, "_is_capturing", lambda like, captured=captured: captured)
        rows.append(weakref.ref(make_schedule(make_problem(x, x, x, mask=j < table(lengths)[0]), 16, 16)[0]))
        lengths = torch.tensor([20])
    assert [row() is None for row in rows] == [True, False]


def test_what_another_stream_reads_keeps_its_place(monkeypatch):
    stream, told = object(), []
    array = SimpleNamespace(record_stream=told.append)
    cuda = SimpleNamespace(current_stream=lambda device: stream, is_current_stream_capturing=lambda: False)
    monkeypatch.setattr(tensor_cache, "_framework_of", lambda like: SimpleNamespace(cuda=cuda))
    like = SimpleNamespace(is_cuda=True, device="cuda:0")
    assert tensor_cache.retain((array, 3), like) == (array, 3)
    assert tensor_cache.retain(array, like) is array
    assert told == [stream, stream]


def test_a_small_table_brought_in_inference_serves_training_after(counted):
    x, slopes = torch.zeros(1, 2, 4, 4, requires_grad=True), np.array([0.25, 0.125])
    with torch.inference_mode():
        assert not tensor_cache.to_device(slopes, x).is_inference()
    sightline.attention(x, x, x, score=s - table(slopes)[h] * (i - j)).sum().backward()
