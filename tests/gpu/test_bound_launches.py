"""Bound launches pass to compiled kernels what the first call passed, with the addresses of their own arrays."""

from contextlib import contextmanager

import pytest
import torch

from sightline import alibi, causal, entropy, i, lse, max_score, padding
from sightline.call.problem import make_problem

pytest.importorskip("triton")

from triton.runtime.driver import driver

import ahead_of_time
from sightline.call.kernel import GivenGradients
from sightline.formula.parameters import structure_of
from sightline.gpu import Triton
from sightline.gpu.launch.bound_launches import BoundLaunches, LaunchBinder
from sightline.gpu.launch.launches import REDUCED_STAGES

TARGET = "sm_90"


class Recorder(ahead_of_time._OfflineDriver):
    """A driver that records the grid and the arguments of every launch, with addresses in the place of tensors."""

    def __init__(self):
        super().__init__(TARGET)
        self.launches = []

    def launcher_cls(self, source, metadata):
        def launch(grid, grid_y, grid_z, stream, function, packed, more, enter, leave, *arguments):
            kinds = list(source.signature.values())
            self.launches.append((source.fn, grid, grid_y, grid_z, stream, *flatten(kinds, arguments)))

        super().launcher_cls(source, metadata)
        return launch


def flatten(kinds, arguments):
    """Return the arguments that are no compile-time constants, without tuples; see `CudaLauncher` of Triton."""
    found = []
    for kind, argument in zip(kinds, arguments, strict=True):
        if isinstance(kind, tuple):
            found += flatten(kind, argument)
        elif kind != "constexpr":
            found.append(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument)
    return found


@contextmanager
def recorder():
    recording = Recorder()
    REDUCED_STAGES.clear()
    with ahead_of_time._active_driver(recording):
        assert driver.active is recording
        yield recording


PROBLEMS = {
    "causal": ({"mask": causal()}, 50),
    "biased, dropout": ({"score": alibi(4), "mask": padding([50, 3]), "dropout": 0.2, "seed": 2**40 + 5}, 50),
    "statistics": ({"see": [entropy(), max_score(), lse()], "mask": i != 3}, 50),
    "decoding": ({"mask": causal("lower right")}, 1),
}


def check(recording, recorded, arrays, options):
    """Repeat a call in its own arrays, and compare its launches with the recorded ones."""
    expected = recording.launches.copy()
    recording.launches.clear()
    formulas = options.get("mask"), options.get("score")
    tables = [table.array for table in structure_of(*formulas).tables]
    call = BoundLaunches.of(recorded, formulas, tables)
    addresses = [torch.as_tensor(array).data_ptr() for array in (*arrays, *tables)]
    found = call.run(call.read_inputs(arrays, addresses, tables, None), recorded.problem.seed)
    assert len(expected) == len(recorded.launches)
    assert recording.launches == expected
    assert all(x is y for x, y in zip(found, recorded.results, strict=True))
    recording.launches.clear()


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_bound_call_passes_what_the_first_call_passed(name, monkeypatch):
    index_of_written = LaunchBinder._index_of_written

    def keep_array(self, name, array):
        index = index_of_written(self, name, array)
        self.makers[index] = lambda: array  # a repeated call allocates another array
        return index

    monkeypatch.setattr(LaunchBinder, "_index_of_written", keep_array)
    monkeypatch.setattr("sightline.call.problem.UNVERSIONED_DEVICES", ())
    options, n = PROBLEMS[name]
    m = 600 if n == 1 else n
    query, key, value = (torch.randn(2, 4, length, 32, dtype=torch.float16) for length in (n, m, m))
    problem = make_problem(query, key, value, **options)
    with recorder() as recording:
        result = Triton(TARGET).run(problem)
        check(recording, result.keep.__self__, (query, key, value), options)
        if name == "causal":
            saved, d_output = (result.output, result.lse), torch.randn_like(value)
            found = Triton(TARGET).backward(problem, GivenGradients(d_output, None, saved, ()))
            check(recording, found.make_entry.__self__, (query, key, value, saved[0], d_output, saved[1]), options)
