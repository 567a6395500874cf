"""Attention on JAX arrays: the bits of NumPy's results, the bits of torch's gradients, and JAX's transformations."""

import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import sightline
from fault_planting import Fault, make_fault_test
from gradient_checks import NAMES, differentiated
from jax_kernel import enable_x64
from sample_calls import KINDS, draw_inputs
from sightline import b, h, i, j, s, table
from sightline.call import batching
from sightline.call.backward_calls import BackwardPasses
from sightline.call.problem import make_problem
from sightline.call.spec import CallSpec
from sightline.errors import FormulaError, ParameterError, ShapeError, SightlineError
from sightline.jax import dispatch, primitives, xla_calls
from sightline.jax.options import PrimitiveOptions
from sightline.reference.accuracy import gradient_term_sizes, summation_orders
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from strategies import to_torch

pytestmark = pytest.mark.sampled(one_in=5)

B, H, N, D = 2, 4, 20, 8
SHAPE = (B, H, N, D)
FAILED = jax.errors.JaxRuntimeError, ValueError  # what JAX raises for an error of a custom call
SEE = [sightline.entropy(), sightline.lse(), sightline.mass(j < 3), sightline.received().mean("heads")]
SEE += [sightline.sum(sightline.p * (i - j) * s, over=j)]


@pytest.fixture
def operands(rng):
    return [jnp.asarray(rng.normal(size=SHAPE), jnp.float32) for _ in range(3)]


def same_bits(found, expected):
    """True if both answers have the same arrays; JAX has int32 in place of int64."""
    found, expected = (jax.tree.leaves(jax.tree.map(np.asarray, answer)) for answer in (found, expected))
    return all(
        x.shape == y.shape and np.array_equal(x, y.astype(x.dtype), equal_nan=True)
        for x, y in zip(found, expected, strict=True)
    )


# -- the same answer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_results_have_the_bits_of_numpy(rng, kind, operands):
    """Each call has other contents, and later calls go through the call cache."""
    plain = [np.asarray(x) for x in operands]
    for _ in range(4):
        state = rng.bit_generator.state
        with jax.debug_infs(False):  # a bias that hides has −∞
            options = draw_inputs(rng, kind, B, H, N, N, jnp.asarray)
        rng.bit_generator.state = state
        expected = sightline.attention(*plain, **draw_inputs(rng, kind, B, H, N, N))
        assert same_bits(sightline.attention(*operands, **options), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtypes(rng, dtype):
    with enable_x64(dtype == "float64"):
        given = [jnp.asarray(rng.normal(size=(2, 3, 70, 16)), dtype) for _ in range(3)]
        compiled = jax.jit(partial(sightline.attention, mask=i >= j, see=[sightline.top_k(3)]))
        found = compiled(*given)
    expected = sightline.attention(*map(np.asarray, given), mask=i >= j, see=[sightline.top_k(3)])
    assert same_bits(found, expected)
    assert (found[0].dtype, found[1][0].where.dtype) == (dtype, "int64" if dtype == "float64" else "int32")


def test_wide_numbers_of_numpy_tables_are_exact(operands):
    numbers = np.arange(N) + 2**40
    mask = (table(numbers)[i] - 2**40 >= j) & (table(np.linspace(0, 1, N) + 1e-12)[j] > 0.5)
    expected = sightline.attention(*map(np.asarray, operands), mask=mask)
    assert same_bits(jax.jit(partial(sightline.attention, mask=mask))(*operands), expected)
    found = jax.vmap(partial(sightline.attention, mask=mask))(*(x[:, None] for x in operands))
    assert same_bits(found[:, 0], expected)


@pytest.mark.parametrize("shape", [(9, 8), (3, 9, 8), (1, 2, 9, 8), (2, 1, 2, 9, 8)], ids=str)
def test_any_number_of_axes(rng, shape):
    given = [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3)]
    see = [sightline.received(), sightline.entropy().rows([-1])]
    expected = sightline.attention(*map(np.asarray, given), see=see)
    assert same_bits(sightline.attention(*given, see=see), expected)


def test_gradients_of_a_selection_are_those_without_dropout(operands):
    def last_entropy(query, dropout):
        see = sightline.entropy().rows([-1])
        return sightline.attention(query, *operands[1:], see=see, dropout=dropout, seed=3)[1][0].sum()

    found, expected = (jax.grad(last_entropy)(operands[0], dropout) for dropout in (0.4, 0.0))
    assert same_bits(found, expected)


@pytest.mark.parametrize("in_layout_of_jax", [False, True])
def test_later_calls_need_no_full_dispatch(rng, in_layout_of_jax, monkeypatch):
    """The second run of a program is a bound call that reads other contents, tables included."""

    @jax.jit
    def attend(q, k, v, lengths, slopes):
        mask, score = j < table(lengths)[b], s * 1.5 - table(slopes)[h] * abs(i - j)
        if in_layout_of_jax:
            bias = -table(slopes)[h] * abs(i - j)
            return sightline.jax.dot_product_attention(q, k, v, bias, mask, return_residual=True)
        return sightline.attention(q, k, v, mask=mask, score=score, see=[sightline.lse()])

    def draw():
        shape = (B, N, H, D) if in_layout_of_jax else SHAPE
        arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3)]
        return *arrays, jnp.asarray(rng.integers(1, N, B)), jnp.asarray(rng.random(H), jnp.float32)

    inputs = [draw() for _ in range(3)]
    found = [jax.block_until_ready(attend(*given)) for given in inputs]
    monkeypatch.setattr(xla_calls, "make_plan", lambda *_: pytest.fail("a plan was made"))
    assert same_bits([jax.block_until_ready(attend(*given)) for given in inputs[::-1]], found[::-1])
    monkeypatch.undo()
    monkeypatch.setattr(xla_calls.call_cache, "answer", lambda *_: (None, None))
    assert same_bits([attend(*given) for given in inputs], found)


def test_functions_that_read_arrays_of_jax(rng, operands):
    """A mask function of FlexAttention reads arrays of its scope."""
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (B, N)), axis=1))
    found = jax.jit(lambda *x: sightline.attention(*x, mask=lambda b, h, i, j: ids[b, i] == ids[b, j]))(*operands)
    assert same_bits(found, sightline.attention(*operands, mask=table(ids)[b, i] == table(ids)[b, j]))


def test_traced_tables_sinks_scale_and_seed(rng, operands):
    lengths, slopes = jnp.asarray([5, 17]), jnp.asarray(rng.random(H), jnp.float32)
    sinks, scale, seed = jnp.asarray(rng.normal(size=H), jnp.float32), jnp.float32(0.3), jnp.int32(7)

    def call(query, key, value, lengths, slopes, sinks, scale, seed):
        options = {"mask": sightline.padding(lengths), "score": sightline.alibi(slopes), "sinks": sinks}
        return sightline.attention(query, key, value, scale=scale, dropout=0.3, seed=seed, **options)

    given = *operands, lengths, slopes, sinks
    expected = call(*map(np.asarray, given), 1.0, 7)
    assert same_bits(jax.jit(call, static_argnums=6)(*given, 1.0, seed), expected)
    assert same_bits(jax.jit(call)(*given, scale, seed), call(*map(np.asarray, given), float(scale), 7))


# -- gradients ---------------------------------------------------------------------------------------------------------


def loss_of(answer):
    output, seen = answer
    return (output * output).sum() + sum((x * x).sum() for x in seen)


def test_gradients_are_those_of_torch(rng, operands):
    slopes, sinks = (jnp.asarray(rng.normal(size=H), jnp.float32) for _ in range(2))

    def loss(query, key, value, slopes, sinks):
        score = s - table(slopes)[h] * (i - j)
        return loss_of(sightline.attention(query, key, value, mask=i >= j, score=score, sinks=sinks, see=SEE[:3]))

    given = *operands, slopes, sinks
    tensors = [to_torch(np.asarray(x)).requires_grad_() for x in given]
    expected = torch.autograd.grad(loss(*tensors), tensors)
    for differentiate in (jax.grad(loss, range(5)), jax.jit(jax.grad(loss, range(5)))):
        *found, of_sinks = differentiate(*given)
        assert same_bits(found, [x.numpy() for x in expected[:-1]])
        np.testing.assert_allclose(of_sinks, expected[-1].numpy(), rtol=2e-5, atol=2e-5)  # added in another order


def test_gradients_of_some_arguments_and_results(operands):
    query, key, value = operands
    whole = jax.grad(lambda *given: sightline.attention(*given).sum(), (0, 1, 2))(*operands)
    assert same_bits(jax.grad(lambda value: sightline.attention(query, key, value).sum())(value), whole[2])
    of_lse = jax.grad(lambda key: sightline.attention(query, key, value, see=[sightline.lse()])[1][0].sum())(key)
    expected = jax.grad(lambda key: jax.nn.logsumexp(query @ key.mT / np.sqrt(D), -1).sum())(key)
    np.testing.assert_allclose(of_lse, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hidden", [np.nan, np.inf, 3e38])
def test_hidden_values_give_no_warnings_and_no_gradients(rng, operands, hidden):
    """Array operations compute these gradients, and their hidden products overflow. A warning is an error in tests."""
    mask, see = (i >= j) & (j != 5), [sightline.received("max")]
    d_output, d_received = (rng.normal(size=shape).astype(np.float32) for shape in (SHAPE, (B, H, N)))

    def fill(filler):
        query, key, value = operands
        return query * 9, *(x.at[..., 5, :].set(filler) for x in (key, value))

    def loss(*x):
        output, (received,) = sightline.attention(*x, mask=mask, see=see)
        return (output * d_output).sum() + (received * d_received).sum()

    problem = make_problem(*map(np.asarray, fill(0.0)), mask=mask)
    with jax.debug_nans(False), jax.debug_infs(False):
        given = fill(hidden)
    d_weights = np.zeros((B, H, N, N), np.float32)
    largest = compute_stages(problem).weights.argmax(-2)[..., None, :]
    np.put_along_axis(d_weights, largest, d_received[..., None, :], -2)
    seeds = d_output, np.zeros((B, H, N), np.float32), d_weights
    (oracle,), *orders = (
        differentiated(problem, [seeds], dtype, order)
        for dtype, order in [("float64", 0), *(("float32", order) for order in summation_orders(problem))]
    )
    sizes = gradient_term_sizes(problem, *seeds)
    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*given)
    for name, own, right, *plain in zip(NAMES, found, oracle, *(order for (order,) in orders), strict=True):
        assert_within_budget(own, right, plain, f"gradient of {name}", sizes[name])


@pytest.mark.parametrize("reads", ["the mask", "a condition", "mask and score"])
def test_arrays_that_only_masks_read_have_no_gradient(rng, operands, reads):
    lengths = jnp.asarray([5.0, 17.0])

    def loss(query, lengths):
        mask = j < table(lengths)[b]
        options = {"the mask": {"mask": mask}, "a condition": {"see": [sightline.mass(mask)]}}
        both = {"mask": mask, "score": s * table(lengths)[b]}
        answer = sightline.attention(query, *operands[1:], **options.get(reads, both))
        return answer[1][0].sum() if reads == "a condition" else (answer * answer).sum()

    of_query, of_lengths = jax.grad(loss, (0, 1))(operands[0], lengths)
    assert same_bits(jax.grad(loss)(operands[0], lengths), of_query)
    only = jax.grad(loss, 1)(operands[0], lengths)
    assert same_bits(only, of_lengths)
    assert bool((only != 0).any()) == (reads == "mask and score")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_later_backward_passes_need_no_dispatch(rng, dtype, monkeypatch):
    operands = [jnp.asarray(rng.normal(size=SHAPE), dtype) for _ in range(3)]
    given = [*operands, *(jnp.asarray(rng.normal(size=H), dtype) for _ in range(2))]

    @jax.jit
    def differentiate(*given):
        def loss(query, key, value, slopes, sinks):
            options = {"mask": i - j < 9, "score": s * 1.5 - table(slopes)[h] * (i - j), "sinks": sinks}
            output, (lse,) = sightline.attention(query, key, value, see=[sightline.lse()], **options)
            return (output.astype(jnp.float32) ** 2).sum() + lse.sum()

        return jax.grad(loss, range(5))(*given)

    expected = jax.block_until_ready(differentiate(*given))
    others = [x[::-1] for x in given]
    monkeypatch.setattr(xla_calls.XlaBackward, "dispatch", None)
    assert same_bits(differentiate(*given), expected)
    found = jax.block_until_ready(differentiate(*others))
    monkeypatch.undo()
    monkeypatch.setattr(BackwardPasses, "repeat", lambda *_: None)
    assert same_bits(differentiate(*others), found)
    assert not same_bits(found, expected)


SWITCHES = {
    "x64": lambda: enable_x64(True),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "infinities": lambda: jax.debug_infs(True),
    "leaks": jax.checking_leaks,
}


@pytest.mark.sampled(one_in=11)
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_derivatives_under_the_switches_of_jax(operands, dtype, switch):
    """The first two queries attend to no key. `make test-switches` runs all tests of this folder under each switch."""
    query, key, value = (x.astype(dtype) for x in operands)
    gradient = jax.grad(lambda x: sightline.attention(x, key, value, mask=i - j > 1, sinks=key[0, :, 0, 0]).sum())
    with SWITCHES[switch]():
        found = jax.jvp(gradient, (query,), (query,))
    assert same_bits(found, jax.jvp(gradient, (query,), (query,)))


@pytest.mark.usefixtures("without_checks")
def test_nan_is_an_error_if_jax_forbids_it(operands):
    given = *operands[:2], operands[2] * np.float32(np.nan)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"nan.*in sightline_attention"):
        sightline.attention(*given)


# -- vmap --------------------------------------------------------------------------------------------------------------


def padded(query, key, value, lengths, slopes):
    """Attention whose formulas read b, and tables of it."""
    mask, score = (j < table(lengths)[b]) | (i == j), s * 1.5 + table(slopes)[h] * (i - j) + 0.1 * b
    see = [sightline.entropy(), sightline.mass(j < table(lengths)[b] // 2), sightline.lse().mean("heads")]
    return sightline.attention(query, key, value, mask=mask, score=score, see=see)


@pytest.fixture
def elements(rng):
    given = [jnp.asarray(rng.normal(size=(3, *SHAPE)), jnp.float32) for _ in range(3)]
    return [*given, jnp.asarray(rng.integers(1, N, (3, B))), jnp.asarray(rng.normal(size=(3, H)), jnp.float32)]


AXES = [(0, 0, 0, 0, 0), (0, None, 0, 0, None), (1, 0, 0, None, 0), (0, 0, 0, None, None), (None,) * 3 + (0, None)]


def given_to(elements, axes):
    """The arguments of a mapped call: the first element of what is not mapped."""
    moved = [x if not axis else jnp.moveaxis(x, 0, axis) for x, axis in zip(elements, axes, strict=True)]
    return [x[0] if axis is None else x for x, axis in zip(moved, axes, strict=True)]


def each(function, given, axes):
    """The results of the function for one element after another, stacked."""
    elements = ([x if a is None else jnp.take(x, k, a) for x, a in zip(given, axes, strict=True)] for k in range(3))
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *[function(*element) for element in elements])


def check_vmap(elements, axes):
    given = given_to(elements, axes)
    assert same_bits(jax.jit(jax.vmap(padded, axes))(*given), each(padded, given, axes)), "other bits"


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_vmap_is_one_call_for_all_elements(elements, axes, monkeypatch):
    monkeypatch.setattr(primitives, "_compute_in_turn", None)
    check_vmap(elements, axes)


FAULTS = {
    "b of all elements": Fault(batching._element_symbols, "_remainder(b, batches)", "b"),
    "a table of another element": Fault(batching._element_symbols, "b // batches", "b % batches"),
    "a table that spans the joined batches": Fault(batching.join_spec, "None if axis in symbols else axis", "axis"),
}


def check_tables_of_the_batch():
    """Check a mapped call whose formulas read b and tables of it, mapped and not."""
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 3, 2, 4, 20, 8)).astype(np.float32)
    lengths, slopes = rng.integers(1, 20, (3, 2)), rng.normal(size=2).astype(np.float32)

    def attend(query, key, value, lengths):
        mask, score = sightline.padding(lengths) | (i == j), s + table(slopes)[b] * (i - j) + 0.5 * b
        return sightline.attention(query, key, value, mask=mask, score=score)

    found = jax.vmap(attend)(query, key, value, lengths)
    for element in range(3):
        expected = attend(query[element], key[element], value[element], lengths[element])
        assert np.array_equal(found[element], expected), "a mapped element has other bits"


ERRORS = AssertionError, SightlineError, *FAILED
test_tables_in_vmap = make_fault_test(FAULTS, check_tables_of_the_batch, kinds=ERRORS)


@pytest.mark.parametrize("axes", [AXES[0], *[pytest.param(a, marks=pytest.mark.soak) for a in AXES[1:]]], ids=str)
def test_gradients_in_vmap(elements, axes):
    given = given_to(elements, axes)
    gradients = jax.grad(lambda *given: loss_of(padded(*given)), (0, 1, 2, 4))
    found, expected = jax.vmap(gradients, axes)(*given), each(gradients, given, axes)
    for x, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, right, rtol=1e-5, atol=1e-5)
    if axes[0] is not None:
        total = jax.grad(lambda *given: loss_of(jax.vmap(padded, axes)(*given)))(*given)
        np.testing.assert_allclose(jnp.moveaxis(total, axes[0], 0), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["dropout", "sinks", "means over the batch"])
def test_what_one_call_cannot_express_is_computed_in_turn(rng, elements, kind):
    def call(query, key, value, sinks):
        options = {
            "dropout": {"dropout": 0.4, "seed": 3},
            "sinks": {"sinks": sinks},
            "means over the batch": {"see": [sightline.entropy().mean("batch")]},
        }[kind]
        return sightline.attention(query, key, value, **({"mask": i >= j, "see": []} | options))

    given, axes = [*elements[:3], jnp.asarray(rng.normal(size=(3, H)), jnp.float32)], (0, 0, 0, 0)
    assert same_bits(jax.vmap(call)(*given), each(call, given, axes))
    gradients = jax.grad(lambda *x: loss_of(call(*x)), range(4))
    for x, right in zip(jax.vmap(gradients)(*given), each(gradients, given, axes), strict=True):
        np.testing.assert_allclose(x, right, rtol=1e-5, atol=1e-6)


def test_nested_vmap(elements):
    given = [x[:, :, :, None] for x in elements[:3]]  # vmap over elements, batch and heads; one head is left
    attend = partial(sightline.attention, mask=(i >= j) & (b == 0))
    found = jax.vmap(jax.vmap(jax.vmap(attend)))(*given)
    assert same_bits(found[:, :, :, 0], sightline.attention(*elements[:3], mask=i >= j))


# -- other transformations ---------------------------------------------------------------------------------------------


def attend(query, key, value):
    return sightline.attention(query, key, value, mask=i >= j)


def test_scan_cond_checkpoint_jacrev_and_donation(operands):
    query, key, value = operands
    once = attend(query, key, value)
    twice = attend(once, key, value)
    found, _ = jax.lax.scan(lambda x, _: (attend(x, key, value), None), query, None, length=2)
    assert same_bits(found, twice)
    assert same_bits(jax.lax.cond(True, attend, lambda query, *_: query, *operands), once)
    loss = lambda query, function: (function(query, key, value) ** 2).sum()  # noqa: E731
    expected = jax.grad(loss)(query, attend)
    assert same_bits(jax.grad(loss)(query, jax.checkpoint(attend)), expected)
    rows = jax.jacrev(lambda query: attend(query, key, value)[0, 0, :2, 0])(query)
    one = jax.grad(lambda query: attend(query, key, value)[0, 0, 1, 0])(query)
    assert same_bits(rows[1], one)
    compiled = jax.jit(attend, donate_argnums=0).lower(*operands).compile()
    assert same_bits(compiled(query + 0, key, value), once)


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import threading
import jax, jax.numpy as jnp, numpy as np, sightline
from functools import partial
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from sightline import i, j
x = [jnp.asarray(np.random.default_rng(k).normal(size=(4, 2, 30, 8)), jnp.float32) for k in range(3)]
attend = partial(sightline.attention, mask=i >= j)
def loss(*x):
    return (attend(*x) ** 2).sum()
expected, right = attend(*x), jax.grad(loss)(*x)
mesh = Mesh(np.array(jax.devices()), "x")
sharded = jax.shard_map(attend, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
assert np.array_equal(sharded(*x), expected)
assert np.array_equal(jax.jit(sharded)(*x), expected)
assert np.allclose(jax.grad(lambda *x: (sharded(*x) ** 2).sum())(*x), right, atol=1e-5)
split = [jax.device_put(y, NamedSharding(mesh, P("x"))) for y in x]
assert np.array_equal(jax.jit(attend)(*split), expected)
assert np.allclose(jax.jit(jax.grad(loss))(*split), right, atol=1e-5)
devices, failed = jax.devices(), []
def call(number):
    own = [jax.device_put(y, devices[number % 4]) for y in x]
    for _ in range(50):
        if not np.array_equal(jax.jit(attend)(*own), expected):
            failed.append(number)
threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed
"""


def test_several_devices_and_threads():
    subprocess.run([sys.executable, "-c", SHARDED], check=True, timeout=300)


def test_without_jit(operands):
    with jax.disable_jit():
        assert same_bits(attend(*operands), sightline.attention(*map(np.asarray, operands), mask=i >= j))


PENDING = """
import sys
import jax, jax.numpy as jnp, sightline
x = jnp.ones((2, 8, 2048, 64))
attend = jax.jit(lambda x: sightline.attention(x, x, x))
attend(x).block_until_ready()
pending = [attend(x + k) for k in range(5)]
if sys.argv[1] == "dropped":
    del pending
"""


@pytest.mark.parametrize("results", ["kept", "dropped"])
def test_the_process_ends_while_programs_are_pending(results):
    subprocess.run([sys.executable, "-c", PENDING, results], check=True, timeout=60)


EXPORTED = """
import sys
import jax, numpy as np
import jax.export
if sys.argv[2] == "with":
    import sightline.jax
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
x = np.random.default_rng(0).normal(size=(1, 2, 9, 8)).astype(np.float32)
np.save(sys.argv[1] + ".npy", program.call(x, x, x))
"""


@pytest.mark.parametrize("registers", ["with", "without"])
def test_an_exported_program_runs_in_another_process(tmp_path, registers):
    x = np.random.default_rng(0).normal(size=(1, 2, 9, 8)).astype(np.float32)
    checks = [jax.export.DisabledSafetyCheck.custom_call("sightline_attention")]
    exported = jax.export.export(jax.jit(attend), disabled_checks=checks)(x, x, x)
    path = tmp_path / "program"
    path.write_bytes(exported.serialize())
    command = [sys.executable, "-c", EXPORTED, str(path), registers]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode == 0) == (registers == "with"), result.stderr
    if registers == "with":
        assert same_bits(np.load(f"{path}.npy"), attend(x, x, x))
    else:
        assert "sightline_attention" in result.stderr


# -- errors and faults -------------------------------------------------------------------------------------------------


def test_an_error_during_the_program_has_its_message(operands):
    compiled = jax.jit(lambda *given, ids: sightline.attention(*given, mask=table(ids)[table(ids)[i]] > 0))
    with pytest.raises(FAILED, match="TableError"):
        jax.block_until_ready(compiled(*operands, ids=jnp.full(N, 99)))
    assert np.isfinite(attend(*operands)).all()


def test_an_error_on_a_thread_of_xla_has_its_message():
    operand, entries = jnp.ones((2, 4, 70, 16)), jnp.zeros(3)
    program = jax.jit(lambda x, t: jnp.sin(sightline.attention(x, x, x, score=s + table(t)[j]) @ jnp.ones((16, 16))))
    for _ in range(3):
        with pytest.raises(FAILED, match="TableError: t\\[j\\] reads outside"):
            jax.block_until_ready(program(operand, entries))


def test_statistics_that_no_cached_call_has(operands):
    plain = [np.asarray(x) for x in operands]
    for see in ([sightline.scores()], [sightline.entropy(), sightline.weights().mean("heads"), sightline.lse()]):
        expected = sightline.attention(*plain, see=see)
        for _ in range(3):
            assert same_bits(sightline.attention(*operands, see=see), expected)


class UnprintableError(Exception):
    def __str__(self):
        raise TypeError


@pytest.mark.parametrize("error", [UnprintableError(), OSError("\udcff")], ids=["no text", "a surrogate"])
def test_an_error_without_a_text_is_an_error(operands, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(xla_calls.XlaForward, "run", fail)
    with pytest.raises(FAILED, match=type(error).__name__):  # a call with this scale was not made before
        jax.block_until_ready(sightline.attention(*operands, scale=0.123))


@pytest.mark.parametrize("seed", ["x", jnp.float32(1), jnp.asarray([1, 2])], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_seeds_that_are_no_whole_numbers_are_errors(operands, seed, dropout):
    with pytest.raises(ParameterError, match="seed"):
        sightline.attention(*operands, seed=seed, dropout=dropout)


def test_explain_names_the_kernel_of_the_program(operands):
    lengths = jnp.asarray([5, 17])
    explained = sightline.explain(*operands, mask=sightline.padding(lengths))
    assert explained.kernel == "cpu"
    assert sightline.explain(*operands, kernel="streaming").kernel == "streaming"
    with pytest.raises(ParameterError, match="without value"):
        sightline.explain(*operands[:2])
    explain_traced = jax.jit(lambda *x: sightline.explain(*x).shape == "" or x[0])
    assert same_bits(explain_traced(*operands), operands[0])


def test_explain_says_why_no_kernel_serves_another_device(operands):
    tpu = SimpleNamespace(devices=lambda: [SimpleNamespace(platform="tpu")])
    explained = dispatch.explain(tpu, make_problem(*map(np.asarray, operands), mask=i >= j), False)
    assert explained.kernel == "jax"
    assert "'tpu'" in explained.refusals["cpu"][0]
    assert "operations of JAX" in str(explained)


def test_merge(operands):
    def join(query, key, value):
        parts = [slice(0, 7), slice(7, N)]
        see = [sightline.lse()]
        return sightline.merge([sightline.attention(query, key[:, :, x], value[:, :, x], see=see) for x in parts])[0]

    np.testing.assert_allclose(jax.jit(join)(*operands), sightline.attention(*operands), rtol=1e-5, atol=1e-6)
    loss = lambda function: jax.grad(lambda *given: (function(*given) ** 2).sum(), (0, 1, 2))(*operands)  # noqa: E731
    for x, right in zip(loss(join), loss(sightline.attention), strict=True):
        np.testing.assert_allclose(x, right, rtol=1e-4, atol=1e-5)


def test_bad_arguments_are_errors_while_the_program_is_traced(operands):
    query, key, value = operands
    for kernel in ("triton", "nothing"):
        with pytest.raises(ParameterError, match="for JAX arrays"):
            sightline.attention(*operands, kernel=kernel)
    with pytest.raises(SightlineError):
        jax.jit(sightline.attention)(query, key[..., :4], value)
    symbolic = jax.ShapeDtypeStruct((B, H, *jax.export.symbolic_shape("n"), D), "float32")
    with pytest.raises(ShapeError, match="symbolic"):
        jax.export.export(jax.jit(attend))(symbolic, symbolic, symbolic)
    with pytest.raises(ShapeError):
        jax.jit(lambda *given: sightline.attention(*given, mask=jnp.ones((N, N + 1), bool)))(*operands)
    with pytest.raises(ShapeError, match="total_repeat_length"):
        jax.jit(lambda lengths: attend(*operands, mask=sightline.documents(lengths=lengths)))(jnp.array([3, N - 3]))
    with pytest.raises(SightlineError, match="all from NumPy, torch or JAX, or from one"):
        sightline.attention(query, np.asarray(key), value)
    with pytest.raises(ParameterError, match="scale of dtype bool"):
        sightline.attention(*operands, scale=jnp.bool_(True))


def test_a_program_has_the_text_of_its_call(operands):
    program = jax.jit(attend).lower(*operands).as_text()
    assert "sightline_attention" in program
    assert "XlaForward" in program
    shape = list(operands[0].shape)
    types = tuple([xla_calls.ArrayType(operands[0].shape, "float32")] * 3)
    spec, _ = CallSpec.of(make_problem(*map(np.asarray, operands), mask=i >= j, threads=2))
    call = xla_calls.XlaForward(PrimitiveOptions(spec, ()), types, types[:1])
    _, values = json.loads(call.to_text())
    assert values["arguments"][0] == [shape, "float32", False]
    assert xla_calls.parse_call(call.to_text().encode()) == call


def test_the_code_of_the_custom_call_lives_as_long_as_the_process():
    """XLA holds its address, and the cache of kernels may drop it."""
    program = """
import gc, jax, numpy as np, sightline
from sightline.cpu.runtime import compile
from sightline.call import call_cache
x = np.ones((1, 2, 9, 8), np.float32)
attend = jax.jit(lambda x: sightline.attention(x, x, x))
expected = attend(jax.numpy.asarray(x))
compile._cache = compile.KernelCache()
call_cache.clear()
gc.collect()
assert np.array_equal(attend(jax.numpy.asarray(x)), expected)"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_traced_numbers_enter_formulas_through_tables():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 6, 4)), jnp.float32)
    with pytest.raises(FormulaError, match=r"int32, inside a formula\n(.|\n)*table\(number\[None\]\)\[0\]"):
        jax.jit(lambda width: sightline.attention(x, x, x, mask=i - j < width))(jnp.int32(3))
    by_table = jax.jit(lambda width: sightline.attention(x, x, x, mask=i - j < table(width[None])[0]))
    for width in (2, 3):
        assert np.array_equal(by_table(jnp.int32(width)), sightline.attention(x, x, x, mask=i - j < width))


def test_a_learned_table_of_a_sum_is_refused():
    x, distance = jnp.ones((1, 5, 8)), lambda t: sightline.sum(sightline.p * table(t)[j], over=j)
    with pytest.raises(ParameterError, match="a table that requires a gradient"):
        jax.grad(lambda t: sightline.attention(x, x, x, see=[distance(t)])[1][0].sum())(jnp.ones(5))
