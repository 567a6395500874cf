"""Backward passes against torch.autograd through the dense definition, and against finite differences."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import sightline
from gradient_checks import by_cpu, by_definition, check, differentiated, reference_gradients, seeds_of, undefined
from gradient_checks import by_streaming as streaming_backward
from sightline import attention, h, i, j, padding, s, softcap, table
from sightline.arrays.operations import to_numpy
from sightline.call.problem import OPERANDS, make_problem
from sightline.cpu.launch.backward import find_table_gradients
from sightline.reference.accuracy import summation_orders
from sightline.reference.definition import backward, compute_stages, forward
from sightline.reference.testing import assert_within_budget
from strategies import DTYPES, Case, cases, to_torch

pytestmark = pytest.mark.sampled(one_in=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_problems(dtype):
    @settings(max_examples=10)
    @given(cases(dtypes=(dtype,), poison=False, layouts=("contiguous", "positions before heads"), largest=2000))
    def conforms(case):
        check(case, ("numpy", "torch"))

    conforms()


@pytest.mark.parametrize(
    ("framework", "examples"),
    [("numpy", 4), ("torch", 2), *(pytest.param(name, 100, marks=pytest.mark.soak) for name in ("numpy", "torch"))],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_problems_by_the_generated_kernel(dtype, framework, examples):
    """Each problem compiles two kernels."""

    @settings(max_examples=examples)
    @given(cases(dtypes=(dtype,), poison=False, largest=20000))
    def conforms(case):
        check(case, framework, by_cpu)

    conforms()


PAIRS = {  # tables with an entry per pair, (H, n, m) = (2, 70, 137) or shared, as scores
    "in order": lambda x: s + table(x)[h, i, j],
    "shared by heads": lambda x: s * table(x[0])[i, j],
    "keys first": lambda x: s + table(np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2))[h, i, j],
    "read twice": lambda x: (lambda t: s + t[0, i, j] * t[1, i, j])(table(x)),
    "read across": lambda x: (lambda t: s + t[i, j] - t[j % 70, i])(table(x[0])),
    "in float64": lambda x: s + table(x.astype(np.float64))[h, i, j],
    "where a condition holds": lambda x: np.where(table(x > 0)[h, i, j], s, s + table(x)[h, i, j]),
}


QUICK_PAIRS = "shared by heads", "read twice", "where a condition holds"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("in order", "bfloat16"),
        *(pytest.param(name, "float32", marks=() if name in QUICK_PAIRS else pytest.mark.soak) for name in PAIRS),
    ],
)
def test_tables_with_an_entry_per_pair(name, dtype, rng):
    arrays = [rng.normal(size=(2, 2, length, 12)).astype(DTYPES[dtype]) for length in (70, 137, 137)]
    score = PAIRS[name](rng.normal(size=(2, 70, 137)).astype(np.float32))
    mask, dropout = sightline.dense(rng.random((70, 137)) < 0.8), 0.2 if dtype == "bfloat16" else 0.0
    check(Case(*arrays, {"mask": mask, "score": score, "dropout": dropout, "seed": 5}), differentiate=by_cpu)


def test_a_table_entry_shared_by_hidden_pairs_has_no_owner(rng):
    """Threads of other keys add 0 to it without atomics, and would overwrite what the owner adds in the meantime."""
    query, key = rng.normal(size=(2, 20, 4)).astype(np.float32), rng.normal(size=(2, 201, 4)).astype(np.float32)

    def owners(heads, keys):
        score = s + table(rng.normal(size=(heads, keys)).astype(np.float32))[h, j]
        problem = make_problem(query[None], key[None], key[None], mask=(h < heads) & (j < keys), score=score)
        return [
            (table_gradient.is_per_key, table_gradient.is_per_head)
            for table_gradient in find_table_gradients(problem, [0])
        ]

    assert owners(2, 201) == [(True, True)]
    assert owners(2, 100) == [(False, True)]
    assert owners(1, 201) == [(True, False)]


@pytest.mark.parametrize("kernel", [None, "cpu", "streaming"])
def test_values_without_columns(kernel, rng):
    """With d_v = 0 the output is empty, so that only statistics and lse have an effect on query, key and sinks."""
    case = Case(*(rng.normal(size=(2, 4, length, d)).astype(np.float32) for length, d in ((5, 3), (7, 3), (7, 0))))
    case.options |= {"mask": i >= j - 1, "score": softcap(5.0), "sinks": np.ones(4, np.float32)}
    check(case, ("numpy", "torch"))  # streaming computes the gradients for every kernel
    inputs = [torch.from_numpy(array).requires_grad_() for array in (*case.arrays, case.options["sinks"])]
    options = case.options | {"sinks": inputs[3], "kernel": kernel}
    for see in ([], [sightline.lse()], [sightline.entropy(), sightline.weights()]):
        output, seen = attention(*inputs[:3], **options, see=see)
        gradients = torch.autograd.grad([output.sum(), *(part.sin().sum() for part in seen)], inputs)
        assert [g.shape for g in gradients] == [x.shape for x in inputs]
        assert all(torch.isfinite(g).all() for g in gradients)
        assert all(bool(gradients[k].any()) == bool(see) for k in (0, 1, 3))


@pytest.mark.parametrize("kernel", [None, "streaming"])
def test_sinks_of_no_heads(kernel, rng):
    shapes = *[(1, 2, 4, 8)] * 3, (2,)
    inputs = [torch.from_numpy(rng.normal(size=shape)).requires_grad_() for shape in shapes]
    _, (none,) = attention(*inputs[:3], sinks=inputs[3], see=[sightline.entropy().heads([])], kernel=kernel)
    assert not any(one.any() for one in torch.autograd.grad(none.sum(), inputs, materialize_grads=True))


# -- the reference's own gradients -------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(cases(dtypes=("float64",), poison=False, layouts=("contiguous",), largest=2000))
def test_the_references_gradients_equal_torchs(case):
    problem = case.make_problem()
    if undefined(problem):
        return
    seeds = seeds_of(problem)
    oracle, other = differentiated(problem, seeds, "float64", 0)
    plain = [differentiated(problem, seeds, "float64", order) for order in summation_orders(problem)]
    for k, (name, answer) in enumerate(zip(OPERANDS, by_definition(problem, *seeds[0]), strict=True)):
        rough = [same[k] for same, _ in plain] + [oracle[k] + (more[k] - other[k]) for _, more in plain]
        assert_within_budget(answer, oracle[k], rough, name)


def test_the_references_gradients_equal_finite_differences(rng):
    """Central differences; halving the step bounds the error of the third derivative."""
    q, k, v, d_o = (rng.normal(size=(2, 5, 3)) for _ in range(4))
    d_lse, d_p = rng.normal(size=(2, 5)), rng.normal(size=(2, 5, 5))
    options = {"scale": 0.7, "allowed": np.tri(5, dtype=bool), "sinks": np.array([0.3, -1.0]), "keep": 1.25}

    def total(*arrays):
        stages = forward(*arrays, score=lambda s: np.tanh(s) * 2, **options)
        return (d_o * stages.output).sum() + (d_lse * stages.lse).sum() + (d_p * stages.weights).sum()

    stages = forward(q, k, v, score=lambda s: np.tanh(s) * 2, **options)
    slope = 2 * (1 - np.tanh(stages.scaled) ** 2)
    inputs = {"scale": 0.7, "keep": 1.25, "slope": slope, "d_lse": d_lse, "d_weights": d_p}
    found = backward(stages, q, k, v, d_o, **inputs)
    for place, gradient in enumerate((found.query, found.key, found.value)):
        direction = rng.normal(size=(2, 5, 3))

        def difference(step, place=place, direction=direction):
            up, down = (
                [x + sign * step * direction * (p == place) for p, x in enumerate((q, k, v))] for sign in (1, -1)
            )
            return (total(*up) - total(*down)) / (2 * step)

        step = np.finfo(float).eps ** (1 / 5)
        wide, narrow = difference(step), difference(step / 2)
        slack = abs(narrow - wide) / 4 + np.finfo(float).eps / step * abs(total(q, k, v))
        assert abs((4 * narrow - wide) / 3 - (gradient * direction).sum()) <= slack


# -- hidden positions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_hidden_values_do_not_affect_gradients(framework, bad, rng):
    """Padding of NaN gives the same bits as padding of zeros; so do rows that attend to no key."""
    x = [rng.normal(size=(2, 2, 9, 4)).astype(np.float32) for _ in range(4)]
    mask = padding(np.array([6, 0]))
    found = []
    for filler in (0.0, bad):
        q, k, v, d_o = (array.copy() for array in x)
        for array in (k, v):
            array[0, :, 6:], array[1] = filler, filler
        case = Case(q, k, v, {"mask": mask, "score": softcap(5.0), "sinks": np.zeros(2, np.float32)})
        problem = (case.as_torch() if framework == "torch" else case).make_problem()
        with np.errstate(all="ignore"):
            found.append(streaming_backward(problem, to_torch(d_o) if framework == "torch" else d_o))
    for clean, poisoned in ((getattr(g, name) for g in found) for name in (*OPERANDS, "sinks")):
        assert np.array_equal(to_numpy(clean), to_numpy(poisoned))
    assert not to_numpy(found[1].query)[1].any()
    assert not to_numpy(found[1].key)[0, :, 6:].any()
    assert np.isfinite(to_numpy(found[1].value)).all()


def test_a_dropped_nan_value_does_not_affect_its_query(rng):
    """A query that dropped the key whose value is NaN has a finite output and finite gradients."""
    query, key, value, d_output = (rng.normal(size=(1, 1, 20, 8)) for _ in range(4))
    value[..., 7, 0] = np.nan
    problem = make_problem(query, key, value, dropout=0.5, seed=3)
    whole = np.isfinite(compute_stages(problem).output).all(-1)
    assert 0 < whole.sum() < 20
    with np.errstate(all="ignore"):
        for found in (reference_gradients(problem, d_output), streaming_backward(problem, d_output)):
            assert np.array_equal(np.isfinite(found.query).all(-1), whole)


def test_gradients_of_tables_are_deterministic():
    """Many pairs read one entry; the order of the sum does not depend on the threads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 300, 8, generator=generator) for _ in range(3))
    bias = torch.randn(4, 1023, generator=generator).requires_grad_()
    found = []
    for _ in range(3):
        out = attention(q, k, v, score=s + table(bias)[h, i - j + 511])
        found.append(torch.autograd.grad(out.square().sum(), bias)[0])
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("kernel", ["cpu", "streaming"])
def test_gradients_of_tables_in_half_precision(rng, kernel):
    """δ is that of the output in float32: a rounded one changes all terms of a query, whose sum almost cancels."""
    given = [torch.tensor(rng.normal(3 * (name == "v"), size=(1, 2, 90, 16))).bfloat16() for name in "qkv"]

    def differentiate(dtype, kind):
        entries = torch.zeros(90, dtype=kind, requires_grad=True)
        output = attention(*[x.to(dtype) for x in given], score=s + table(entries)[abs(i - j)], kernel=kernel)
        return torch.autograd.grad(output.sum(), entries)[0].numpy()

    exact, plain = (differentiate(kind, kind) for kind in (torch.float64, torch.float32))
    for _ in range(3):
        assert_within_budget(differentiate(torch.bfloat16, torch.float32), exact, plain)
