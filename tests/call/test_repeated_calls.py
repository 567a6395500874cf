"""Repeated calls of drawn structures on arrays of every memory, and the assumptions of `sightline.call.call_cache`.

`call_cache` says what a repeated call takes from an earlier call. A test breaks each of these assumptions, and the
drawn calls must fail.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import sightline
from cached_calls import run_in_python
from fault_planting import Fault, plant
from repeated_calls import Repetition
from sightline import h, i, j, m, n, padding, s, table
from sightline.call import problem
from sightline.call import request as call_request
from sightline.cpu.launch import bound_call, forward_entry
from sightline.cpu.launch.arguments import convert_sinks
from sightline.cpu.launch.backward import BoundBackward
from sightline.cpu.launch.bound_call import BoundCall, CallFamily, PreparedCall
from sightline.cpu.launch.tile_search import BoundSearch
from sightline.errors import ChangedArrayError, ParameterError, TableError

SEEDS_PER_TEST = 5
REPEATS = 4  # calls until a call is direct, and one more


@pytest.mark.sampled(one_in=13)
@pytest.mark.parametrize(
    "first", [*range(0, 60, SEEDS_PER_TEST), *(pytest.param(k, marks=pytest.mark.soak) for k in range(1000, 3000, 5))]
)
def test_drawn_calls_equal_the_definition(first):
    for seed in range(first, first + SEEDS_PER_TEST):
        Repetition(seed).check()


# -- faults that were found --------------------------------------------------------------------------------------------


def draw(rng, n=20, m=20, heads=4, library=np.asarray):
    return [library(rng.normal(size=(2, heads, length, 8)).astype(np.float32)) for length in (n, m, m)]


def check_call(rng, options, copies, **shape):
    """Check a call of tensors against the definition, whose options are NumPy copies of the call's."""
    q, k, v = draw(rng, **shape)
    output = sightline.attention(*map(torch.from_numpy, (q, k, v)), **options).numpy()
    expected = sightline.attention(*(x.astype(np.float64) for x in (q, k, v)), **copies, kernel="reference")
    np.testing.assert_allclose(output, expected, atol=1e-4)  # a wrong table differs by 1 and more


def backwards(array):
    return np.ascontiguousarray(array[::-1])[::-1]


def read_only(array):
    array = np.repeat(array, 2, axis=-1)[..., ::2]
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("memory", [backwards, read_only])
@pytest.mark.parametrize("kind", ["table", "narrow table", "padding", "documents", "alibi", "dense", "bias", "array"])
def test_arrays_that_torch_cannot_share(rng, kind, memory):
    """torch would copy these arrays of NumPy, and repeated calls once read them with the strides of the copies."""
    make = {
        "table": lambda c, wrap: {"score": s + 5 * table(wrap(c.random(4)))[h] * (i - j)},
        "narrow table": lambda c, wrap: {"score": s + 5 * table(wrap(c.random(4).astype(np.float16)))[h] * j},
        "padding": lambda c, wrap: {"mask": padding(wrap(c.integers(1, 20, 2)))},
        "documents": lambda c, wrap: {"mask": sightline.documents(wrap(c.integers(0, 4, (2, 20))))},
        "alibi": lambda c, wrap: {"score": sightline.alibi(wrap(c.random(4)))},
        "dense": lambda c, wrap: {"mask": sightline.dense(wrap(c.random((20, 20)) < 0.3))},
        "bias": lambda c, wrap: {"score": sightline.bias(wrap(9 * c.random((20, 20))))},
        "array": lambda c, wrap: {"mask": wrap(c.random((20, 20)) < 0.3)},
    }[kind]
    for turn in range(REPEATS):
        given, copies = (make(np.random.default_rng(turn), wrap) for wrap in (memory, np.array))
        check_call(rng, given, copies)


INDICES = {
    "constant": lambda t: j < table(t)[5],
    "constant beside a symbol": lambda t: j < table(np.stack([t] * 4))[h, 5],
    "row of a function": lambda t: lambda b, h, i, j: j < table(np.stack([t] * 6))[5][h + 2],
    "formula of heads": lambda t: j < table(t)[2 * h - 1 + (h < 1)],
    "formula of heads and a number": lambda t: j < table(t)[h + 2],
    "number of keys": lambda t: j < table(np.concatenate([t] * 4))[m],
    "number of queries": lambda t: j < table(np.concatenate([t] * 4))[n],
}


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("index", INDICES)
def test_an_index_beyond_a_shorter_table(rng, index, library):
    """After calls with longer tables, the rest of a call's family once read past the end of a shorter one."""
    for length in (8, 7, 3):
        q, k, v = draw(rng, 20, 23, library=library)
        for _ in range(REPEATS):
            if length > 3:
                sightline.attention(q, k, v, mask=INDICES[index](np.full(length, 9)))
                continue
            with pytest.raises(TableError):
                sightline.attention(q, k, v, mask=INDICES[index](np.full(length, 9)))


def check_forms():
    """Check biases of half precision whose copies have other adjacent entries, in calls of one family."""
    rng = np.random.default_rng(1)
    for keys, memory in ((30, read_only), (28, np.asfortranarray), (13, lambda x: np.broadcast_to(x[:, :1], x.shape))):
        bias = memory(rng.normal(size=(20, keys)).astype(np.float16))
        for _ in range(2):
            check_call(rng, {"score": sightline.bias(bias)}, {"score": sightline.bias(np.array(bias))}, m=keys)


def test_a_copy_with_other_adjacent_entries():
    check_forms()


CHANGED = {  # the entries, the options of a call that reads them, and other entries
    "lengths": (np.array([9, 20]), lambda x: {"mask": padding(x)}, np.array([9, 3])),
    "bias": (np.zeros((20, 20)), lambda x: {"score": sightline.bias(x)}, np.eye(20)),
    "array": (np.ones((20, 20), bool), lambda x: {"mask": x}, np.eye(20) < 1),
    "repeated": (np.ones((1, 20), bool), lambda x: {"mask": np.broadcast_to(x, (20, 20))}, np.arange(20)[None] < 9),
    "backwards": (np.ones((20, 20), bool), lambda x: {"mask": x[::-1, ::-1]}, np.eye(20) < 1),
    "condition": (np.arange(20), lambda x: {"see": [sightline.mass(table(x)[j] < 5)]}, np.arange(20) + 1),
}


@pytest.mark.parametrize("in_inference_mode", [False, True])
@pytest.mark.parametrize("kind", CHANGED)
def test_a_table_that_changes_before_the_backward_pass(rng, kind, in_inference_mode):
    """The saved lse belongs to the old entries, and torch counts writes neither to arrays nor to inference tensors."""
    old, make, new = CHANGED[kind]
    for _ in range(REPEATS):
        q, k, v = draw(rng, library=lambda x: torch.from_numpy(x).requires_grad_())
        with torch.inference_mode(in_inference_mode):
            entries = torch.from_numpy(old.copy()) if in_inference_mode and kind != "backwards" else old.copy()
        answer = sightline.attention(q, k, v, **make(entries))
        result = answer[1][0].sum() if isinstance(answer, tuple) else answer.sum()
        torch.autograd.grad(result, (q, k), retain_graph=True)
        with torch.inference_mode(in_inference_mode):
            entries[...] = torch.from_numpy(new) if isinstance(entries, torch.Tensor) else new
        with pytest.raises(ChangedArrayError):
            torch.autograd.grad(result, (q, k))


def test_sinks_that_change_before_the_backward_pass(rng):
    for turn in range(REPEATS):
        x = draw(rng, library=lambda x: torch.from_numpy(x).requires_grad_())
        sinks, see = np.zeros(4), [sightline.entropy()] * (turn % 2)
        answer = sightline.attention(*x, sinks=sinks, see=see)
        total = answer[0].sum() + sum(entry.sum() for entry in answer[1])
        expected = torch.autograd.grad(total, x, retain_graph=True, allow_unused=True)
        sinks[:] = 9
        assert all(map(torch.equal, torch.autograd.grad(total, x, allow_unused=True), expected))


def test_the_operator_keeps_the_entries_of_the_forward_pass(rng):
    """The registered operator, which serves transforms and modes, saves a copy of an array of NumPy."""
    lengths = np.array([9, 20])
    x = draw(rng, library=torch.from_numpy)

    def loss(query):
        return sightline.attention(query, *x[1:], mask=padding(lengths)).sum()

    expected = torch.func.grad(loss)(x[0])
    output, backward = torch.func.vjp(loss, x[0])
    lengths[:] = 3
    torch.testing.assert_close(backward(torch.ones_like(output))[0], expected)


ENVIRONMENT = """
import os, numpy as np, sightline
x = np.ones((1, 1, 4, 8), np.float32)
for _ in range(3):
    sightline.attention(x, x, x)
os.environ["SIGHTLINE_CPU"] = "no such machine"
try:
    sightline.attention(x, x, x)
except sightline.errors.ParameterError:
    print("seen")
"""


def test_the_machine_is_read_at_each_call_in_an_empty_environment():
    """Without PATH, a change of SIGHTLINE_CPU was once not seen."""
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "HOME") if name in os.environ}
    found = subprocess.run(
        [sys.executable, "-c", ENVIRONMENT], env=variables, capture_output=True, text=True, check=False
    )
    assert found.stdout == "seen\n", found.stderr


# -- the assumptions, broken -------------------------------------------------------------------------------------------


def copy_tables(patch):
    """Convert arrays of NumPy to tensors, with copies of what torch cannot share, and bind the copies' layouts."""
    patch.setattr(problem, "np", type("NoArrays", (), {"ndarray": ()}))
    ignore_layouts(patch)


def keep_input(patch, place):
    """Run each bound call with the addresses of tables (place 0) or the numbers (place 2) of the first repetition."""
    first, kept, run = {}, [], PreparedCall.run

    def stale(self, *given, **named):
        kept.append(given)
        start = len(self.operands) if place == 0 else 0
        known = first.setdefault(id(self.call), (self.call, given[place][start:]))[1]
        given = *given[:place], (*given[place][:start], *known), *given[place + 1 :]
        return run(self, *given, **named)

    run_in_python(patch)
    patch.setattr(PreparedCall, "run", stale)


def keep_option(patch, name, kind=BoundCall, copy=lambda value: value):
    """Run each bound call of this kind with the seed or the sinks of the first repetition, or with their copy."""
    first, run = {}, PreparedCall.run

    def stale(self, *given, **named):
        if isinstance(self.call, kind) and named.get(name) is not None:
            named[name] = first.setdefault(id(self), (self, copy(named[name])))[1]
        return run(self, *given, **named)

    patch.setattr(PreparedCall, "run", stale)


def run_dropout_directly(patch):
    """Make calls with dropout direct. Their records have the seed 0."""
    condition = "problem.dropout == 0 and request.sinks is None"
    plant(Fault(forward_entry.keep_forward, condition, "request.sinks is None"), patch)


def ignore_layouts(patch):
    """Bind calls without comparing the memory layouts of tables."""
    patch.setattr(bound_call, "memory_layout", lambda array: None)


def keep_tile_ranges(patch):
    """Run each bound call with the tile ranges of the first call, whatever its tables have."""
    start = BoundSearch.__init__

    def stale(self, arguments, *others):
        start(self, arguments, *others)
        self.is_needed = self.is_needed and not arguments.has_tile_ranges

    patch.setattr(BoundSearch, "__init__", stale)


ASSUMPTIONS = {
    "a bound call reads tables with the memory layouts for which it was bound": ignore_layouts,
    "a kernel for the CPU reads the caller's own tables": copy_tables,
    "addresses of tables are those of the call": lambda patch: keep_input(patch, 0),
    "numbers are those of the call": lambda patch: keep_input(patch, 2),
    "the seed is that of the call": lambda patch: keep_option(patch, "seed"),
    "the seed of a backward pass is that of its forward pass": lambda patch: keep_option(patch, "seed", BoundBackward),
    "a call with dropout is not direct": run_dropout_directly,
    "the entries of sinks are those of the call": lambda patch: keep_option(
        patch, "sinks", copy=lambda sinks: convert_sinks(sinks).copy()
    ),
    "the sinks are the array of the call": lambda patch: keep_option(patch, "sinks"),
    "tile ranges are those of the call if its mask reads a table": keep_tile_ranges,
    "the machine is that of the call": lambda patch: patch.setattr(call_request, "machine_setting", lambda: None),
    "a family checks the indices of tables": lambda patch: patch.setattr(
        CallFamily, "are_indices_inside", lambda *_: True
    ),
    "a family checks the form of tables": lambda patch: patch.setattr(bound_call, "_form", lambda table: None),
}


def check_drawn_calls():
    for seed in range(60):
        Repetition(seed).check(lengths=2)


def check_dropout():
    """Check calls that would be direct if they had no dropout."""
    for seed in range(5):
        call = Repetition(seed)
        call.mask = call.score = "none"
        call.dropout, call.has_sinks, call.options = 0.5, False, {"threads": 1}
        call.check(lengths=1)


def check_machine():
    """Check that a call for a machine that does not exist is an error, after the same call without a machine."""
    for library in (np.asarray, torch.from_numpy):
        given = draw(np.random.default_rng(1), library=library)
        for _ in range(REPEATS):
            sightline.attention(*given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SIGHTLINE_CPU", "no such machine")
            try:
                sightline.attention(*given)
            except ParameterError:
                continue
        raise AssertionError("a repeated call does not see SIGHTLINE_CPU")


CHECKS = {
    "a family checks the form of tables": check_forms,
    "a call with dropout is not direct": check_dropout,
    "the machine is that of the call": check_machine,
}


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("assumption", ASSUMPTIONS)
def test_a_broken_assumption_is_seen(assumption, monkeypatch):
    ASSUMPTIONS[assumption](monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS.get(assumption, check_drawn_calls)()


def test_sound_calls_pass():
    check_dropout()
    check_machine()
