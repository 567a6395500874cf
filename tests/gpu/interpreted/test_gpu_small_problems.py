"""Small problems in Triton: plans that read no tables, and calls that the call cache repeats."""

import math

import numpy as np
import pytest
import torch

import sightline
import sightline.api.kernels
from fault_planting import Fault
from on_device import DEVICE
from sample_problems import arrays
from sightline import bias, causal, dense, entropy, i, j, lse, mass, max_score, padding, s, softcap, table
from sightline.call import call_cache
from sightline.call.kernel import GivenGradients
from sightline.call.problem import make_problem
from sightline.errors import ChangedArrayError, FormulaError, TableError
from sightline.formula.tables import Table
from sightline.formula.tile_ranges import find_tile_ranges
from sightline.gpu.kernels.backward_keys import backward_keys
from sightline.gpu.kernels.backward_queries import backward_queries
from sightline.gpu.kernels.forward import forward
from sightline.gpu.launch.bound_launches import BoundLaunches
from sightline.reference.testing import assert_conforms
from strategies import Case
from triton_interpreter import INTERPRETED

SHAPE = {"shape": (2, 2, 20, 16), "m": 37}
SINKS = np.array([0.5, -2.0], np.float32)


def tensors(grad=False, seed=0, **shapes):
    """Return query, key and value as new tensors."""
    rng = np.random.default_rng(seed)
    given = arrays(dtype="float32", **(SHAPE | shapes))
    return [torch.from_numpy(rng.permuted(x)).to(DEVICE).requires_grad_(grad) for x in given]


def tensor(array):
    return torch.from_numpy(np.asarray(array)).to(DEVICE)


# -- one NaN-safe launch -----------------------------------------------------------------------------------------------
FAULTS = {
    "a forward launch that is not NaN-safe": Fault(forward, "flags is None", "False"),
    "a launch for queries that is not NaN-safe": Fault(backward_queries, "flags is None", "False"),
    "a launch for keys that is not NaN-safe": Fault(backward_keys, "flags is None", "False"),
}


def hidden_value_reaches_nothing(kernel):
    """Check that NaN in a hidden key, value and output gradient reaches neither the output nor a gradient."""
    query, key, value, d_output = (torch.randn(1, 2, 20, 8) for _ in range(4))
    key[..., 7, :] = value[..., 7, :] = d_output[..., 3, :] = math.nan
    mask = (j != 7) & (i != 3)
    problem = make_problem(query, key, value, mask=mask)
    answer = kernel.run(problem)
    found = kernel.backward(problem, GivenGradients(d_output, None, (answer.output, answer.lse), ()))
    for array in (answer.output, found.query, found.key, found.value):
        assert torch.isfinite(array).all()


def test_hidden_values_reach_nothing(any_kernel):
    hidden_value_reaches_nothing(any_kernel)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_seen(small_kernel, plant, fault):
    plant(FAULTS[fault])
    with pytest.raises(AssertionError):
        hidden_value_reaches_nothing(small_kernel)


# -- plans without entries ---------------------------------------------------------------------------------------------
HIDDEN = np.random.default_rng(1).random((20, 37)) < 0.5
TABLES = {
    "dense mask": {"mask": dense(HIDDEN)},
    "bias with −∞": {"score": bias(np.where(HIDDEN, 0.5, -math.inf).astype(np.float32))},
    "padding, causal": {"mask": padding([37, 5]) & causal(), "score": softcap(5.0)},
    "a condition": {"see": [mass(table(HIDDEN[0])[i] & (i > 3)), entropy()]},
    "whole numbers of 64 bits": {"mask": table(np.arange(37, dtype=np.int64) % 3)[j] + 1 != 2},
}


@pytest.mark.parametrize("name", TABLES)
def test_the_entries_of_small_problems_are_not_read(small_kernel, name, monkeypatch):
    options = TABLES[name]
    case = Case(*arrays(dtype="float32", **SHAPE), options).as_torch()
    monkeypatch.setattr(Table, "bounds", property(without_reading(Table.bounds)))
    problem = case.make_problem()
    answer = small_kernel.run(problem)
    monkeypatch.undo()
    assert_conforms(lambda _: answer, case.make_problem())


def without_reading(bounds):
    def read(table):
        assert table.has_unknown_entries
        return bounds.__get__(table)

    return read


def test_a_plan_without_entries_still_uses_what_positions_prove(small_kernel):
    x = [torch.randn(1, 1, 64, 8) for _ in range(3)]
    mask = make_problem(*x, mask=causal() & padding([50])).mask
    assert all(entry.has_unknown_entries for entry in mask.tables)
    tiles = find_tile_ranges(mask, (1, 1, 64, 64), 16, 16).tiles
    assert tiles == {"empty": 6, "full": 0, "partial": 10}


@pytest.mark.parametrize(
    "options",
    [
        {"mask": table(np.array([1, 0]))[table(np.arange(37) % 2)[j]] == 0},  # the index depends on entries
        {"mask": j >= 30, "score": s + table(np.arange(7.0))[j - 30]},  # the mask hides the pairs outside the table
    ],
)
def test_entries_are_read_where_they_decide_whether_the_formula_is_valid(small_kernel, options):
    case = Case(*arrays(dtype="float32", **SHAPE), options).as_torch()
    problem = case.make_problem()
    assert not any(entry.has_unknown_entries for entry in problem.tables)
    assert_conforms(small_kernel.run, problem)


def test_entries_of_64_bits_beyond_the_assumed_limit_are_computed(small_kernel):
    """Only the check of whole numbers assumes a limit: plans and checks of indices hold for every entry."""
    numbers = np.arange(37) % 2 * (2**52 + 10)
    case = Case(*arrays(dtype="float32", **SHAPE), {"mask": table(numbers)[j] <= 2**52 + 1}).as_torch()
    assert all(entry.has_unknown_entries for entry in case.make_problem().tables)
    assert_conforms(small_kernel.run, case.make_problem())
    places = table(torch.arange(2**13 + 1.0))[table(numbers)[j] // 2**40 + 2**12]
    problem = Case(*arrays(dtype="float32", **SHAPE), {"score": s + places}).as_torch().make_problem()
    assert not any(entry.has_unknown_entries for entry in problem.tables)
    with pytest.raises(FormulaError, match="may reach ±2⁵³"):
        make_problem(*tensors(), mask=table(2 * numbers)[j] * 2 > 0)


def test_a_read_outside_its_table_is_an_error_as_before(small_kernel):
    with pytest.raises(TableError, match="reads outside its table"):
        make_problem(*tensors(), mask=table(np.arange(20))[j] > 2)


def test_large_problems_and_tables_in_host_memory_are_read(triton_kernel):
    assert not make_problem(*tensors(), mask=dense(HIDDEN)).mask.tables[0].has_unknown_entries


# -- calls of the call cache -------------------------------------------------------------------------------------------
CALLS = {  # functions that return the options of a call with new tables
    "plain": lambda _: {},
    "causal": lambda _: {"mask": causal()},
    "padding": lambda rng: {"mask": tensor(rng.random((2, 1, 1, 37)) < 0.7)},
    "bias": lambda rng: {"score": bias(tensor(rng.normal(size=(2, 20, 37)).astype(np.float32)))},
    "a table in host memory": lambda rng: {"score": s - table(rng.random(2).astype(np.float32))[sightline.h] * j},
    "documents": lambda rng: {
        "mask": table(tensor(rng.integers(0, 3, 20)))[i] == table(tensor(np.arange(37) // 13))[j]
    },
    "sinks": lambda rng: {"sinks": tensor(rng.normal(size=2).astype(np.float32)), "mask": causal()},
    "dropout": lambda rng: {"dropout": 0.3, "seed": int(rng.integers(2**40))},
    "dropout that drops nothing": lambda _: {"dropout": 1e-12, "seed": 3},
    "statistics": lambda rng: {"see": [max_score(), lse(), entropy().mean("heads"), mass(i >= j)], "mask": i != 3},
}


@pytest.fixture
def repeated(small_kernel, monkeypatch, fresh_calls):
    """Let `attention` use these kernels. Return a list that gets an element for each repeated call."""
    kernel = small_kernel if INTERPRETED else small_kernel.kernel
    others = [other for other in sightline.api.kernels.KERNELS if other.name not in ("triton", "cpu")]
    monkeypatch.setattr(sightline.api.kernels, "KERNELS", (kernel, *others))
    found, run = [], BoundLaunches.run

    def spy(self, *given):
        found.append(self)
        return run(self, *given)

    monkeypatch.setattr(BoundLaunches, "run", spy)
    return found


def results(inputs, options):
    """Return every array of a call's result, and the gradients of the output if the inputs require gradients."""
    found = sightline.attention(*inputs, **options)
    output, seen = found if "see" in options else (found, ())
    flat = [output]
    for one in seen:
        flat += one if isinstance(one, tuple) else [one]
    if inputs[0].requires_grad:
        flat += torch.autograd.grad((output * torch.arange(output.shape[-1], device=DEVICE)).sum(), inputs)
    return [array.detach() for array in flat]


def without_cache(inputs, options):
    call_cache.calls.clear()
    found = results(inputs, options)
    call_cache.calls.clear()
    return found


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_repeated_call_has_the_bits_of_a_new_call(repeated, name, grad):
    draws = [CALLS[name](np.random.default_rng(seed)) for seed in range(3)]
    inputs = [tensors(grad, seed) for seed in range(3)]
    expected = [without_cache(*call) for call in zip(inputs, draws, strict=True)]
    repeated.clear()
    found = [results(*call) for call in zip(inputs, draws, strict=True)]
    # the backward pass of the first repeated call is planned; the gradient of sinks needs more than launches
    assert len(repeated) == 2 + (grad and name != "sinks")
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("shape", [(20, 16), (2, 20, 16), (2, 1, 2, 20, 16)], ids=["n d", "B n d", "A B H n d"])
def test_arrays_of_other_ranks(repeated, shape):
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for _ in range(3)]
    options = {"mask": causal(), "see": [entropy()]}
    expected = without_cache(inputs, options)
    for _ in range(3):
        found = results(inputs, options)
        assert all(torch.equal(x, y) and x.shape == y.shape for x, y in zip(found, expected, strict=True))
    assert len(repeated) == 3


def test_each_number_of_a_formula_has_its_own_kernels(repeated):
    inputs = tensors()
    expected = {width: without_cache(inputs, {"mask": (i >= j) & (i - j < width)})[0] for width in (3, 5)}
    for width in (3, 5, 3, 5):
        assert torch.equal(sightline.attention(*inputs, mask=(i >= j) & (i - j < width)), expected[width])
    assert len(repeated) == 2


def test_arrays_at_odd_addresses_take_the_full_dispatch(repeated):
    x = torch.randn(3, 2, 2, 20, 16, device=DEVICE)
    odd = torch.randn(x.numel() + 1, device=DEVICE)[1:].reshape(x.shape)
    assert odd.data_ptr() % 16
    for inputs in (odd, odd, x, x, odd):
        sightline.attention(*inputs, mask=causal())
    assert len(repeated) == 1


def test_hooks_may_change_the_strides_of_saved_tensors(repeated):
    """A hook returns lse with other strides, which the backward kernels read contiguous."""

    def unpack(x):
        return x.mT.contiguous().mT if x.dtype == torch.float64 else x

    inputs, found = tensors(True), []
    for _ in range(4):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            output, _ = sightline.attention(*inputs, see=[lse()])
        found.append(torch.autograd.grad(output.square().sum(), inputs))
    for one in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(one, found[0], strict=True))


def test_a_large_problem_whose_tables_decide_its_plan_is_not_stored(repeated, monkeypatch):
    monkeypatch.setattr(sightline.call.problem, "MAX_SMALL_FLOPS", -1)
    for name, stored in (("padding", False), ("causal", True)):
        for seed in range(2):
            results(tensors(seed=seed), CALLS[name](np.random.default_rng(seed)))
        assert bool(repeated) == stored


@pytest.mark.parametrize("name", ["sinks", "mask"])
def test_an_array_changed_before_the_backward_pass_is_an_error(repeated, name):
    inputs, array = tensors(True), tensor(SINKS.copy() if name == "sinks" else np.ones((20, 37), bool))
    for _ in range(3):
        output = sightline.attention(*inputs, **{name: array})
        array[0] = 0
        with pytest.raises(ChangedArrayError):
            output.sum().backward()
    assert len(repeated) == 2


def test_a_call_that_cannot_be_repeated_draws_one_seed(repeated):
    given = torch.randn(3, 2, 2, 20, 16, device=DEVICE)
    odd = torch.empty(given.numel() + 1, device=DEVICE)[1:].reshape(given.shape).copy_(given)
    found = []
    for inputs in (given, given, odd):
        torch.manual_seed(6)
        found.append(sightline.attention(*inputs, dropout=0.5))
    assert len(repeated) == 1
    assert all(torch.equal(output, found[0]) for output in found)


def test_the_gradient_of_a_statistic_takes_the_full_dispatch(repeated):
    expected = None
    for _ in range(2):
        inputs = tensors(True)
        output, (one,) = sightline.attention(*inputs, see=[entropy()])
        found = torch.autograd.grad(output.sum() + one.sum(), inputs)
        expected = expected or found
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert len(repeated) == 1


def test_a_learned_bias_receives_its_gradient_from_a_repeated_call(repeated):
    inputs, biases = tensors(True), torch.randn(2, 20, 37, device=DEVICE, requires_grad=True)
    found = [
        torch.autograd.grad(sightline.attention(*inputs, score=bias(biases)).sum(), [*inputs, biases]) for _ in "ab"
    ]
    assert len(repeated) == 1
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
