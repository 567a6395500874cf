"""Gradients of NumPy arrays: `attention_vjp` beside torch's gradients of the same call, and errors at the door."""

import numpy as np
import pytest
import torch

import sightline
from sightline import b, h, i, j, p, s, table
from sightline.call import call_cache
from sightline.errors import ChangedArrayError, DtypeError, ParameterError, ShapeError

REPEATS = 9  # calls until a call is direct, and one more
B, H, G, N, M, D = 2, 4, 2, 9, 13, 8


@pytest.fixture(autouse=True)
def clear_cache():
    call_cache.clear()


def draw(rng, dtype=np.float64, shape=None):
    shapes = shape or ((B, H, N, D), (B, G, M, D), (B, G, M, D))
    return [rng.normal(size=one).astype(dtype) for one in shapes]


CALLS = {  # options, given a function that makes the tables: NumPy's arrays or tensors that require gradients
    "plain": lambda rng, wrap: {},
    "causal": lambda rng, wrap: {"mask": i >= j},
    "padding": lambda rng, wrap: {"mask": j < table(rng.integers(1, M, B))[sightline.b]},
    "numbers": lambda rng, wrap: {"mask": i + int(rng.integers(4, 9)) >= j, "score": s * float(rng.random() + 1)},
    "a learned table": lambda rng, wrap: {"score": s + table(wrap(rng.normal(size=H)))[h] * (i - j)},
    "a learned bias": lambda rng, wrap: {"score": s + table(wrap(rng.normal(size=(N, M))))[i, j], "mask": i >= j},
    "two tables": lambda rng, wrap: {
        "score": s * table(wrap(rng.normal(size=M)))[j] + table(wrap(rng.normal(size=N)))[i]
    },
    "sinks": lambda rng, wrap: {"sinks": wrap(rng.normal(size=H))},
    "dropout": lambda rng, wrap: {"dropout": 0.3, "seed": int(rng.integers(0, 1000))},
    "scale": lambda rng, wrap: {"scale": 0.2, "mask": i >= j},
}
SEEN = {
    "nothing": [],
    "entropy and lse": [sightline.entropy(), sightline.lse()],
    "mass": [sightline.mass(i - j < 3), sightline.max_score()],
    "sum": [sightline.sum(sightline.p * (i - j), over=j)],
    "means": [sightline.entropy().mean("heads"), sightline.lse().mean("batch")],
    "weighted heads": [
        sightline.weights().sum("heads", weights=[0.5, -2.0, 0.0, 1.0]),
        sightline.weighted_sum(np.eye(M)).rows([2]).sum("heads", weights=[0.5, -2.0, 0.0, 1.0]),
    ],
    "received": [sightline.received(), sightline.pooled(3, 3), sightline.top_k(2)],
    "selections": [sightline.weights().rows([1, -1, 1]), sightline.received(last=4).heads([3, 1, 2])],
    "extrema before sums": [sightline.max_score().rows([0, 3]), sightline.max(p, over=j), sightline.entropy()],
    "scalars": [sightline.sum(p**2, over=(b, h, i, j)), sightline.min(p, over=i).heads([1]), sightline.mass(j < 3)],
    "means of selections": [sightline.entropy().mean("heads").rows([0, 5]), sightline.lse().heads([2])],
    "weighted sums": [sightline.weighted_sum(np.eye(M)).rows([2]), sightline.weighted_sum(np.eye(M)).mean("batch")],
}


def tables_of(options):
    score = options.get("score")
    return [] if score is None else [x for x in score.tables if x.kind == "float"]


def first_array(result):
    return result[0] if isinstance(result, tuple) else result


def expect(operands, options, see, gradients):
    """The output and the gradients of `wrt` by torch, which runs the same kernels."""
    tensors = [torch.from_numpy(x).requires_grad_() for x in operands]
    answer = sightline.attention(*tensors, **options, see=see)
    results = [answer[0], *[first_array(x) for x in answer[1]]]
    inputs = [*tensors, *[x.array for x in tables_of(options)]]
    inputs += [options[name] for name in ("sinks", "scale") if isinstance(options.get(name), torch.Tensor)]
    total = sum((x * torch.from_numpy(d)).sum() for x, d in zip(results, gradients, strict=True) if d is not None)
    return results[0].detach().numpy(), [x.numpy() for x in torch.autograd.grad(total, inputs)]


def check(seed, kind, see, dtype=np.float64, shape=None):
    rng, other = np.random.default_rng(seed), np.random.default_rng(seed)
    operands = draw(rng, dtype, shape)
    assert all(map(np.array_equal, operands, draw(other, dtype, shape)))
    options = CALLS[kind](rng, np.asarray)
    of_torch = CALLS[kind](other, lambda x: torch.from_numpy(x).requires_grad_())
    if "scale" in options:
        of_torch["scale"] = torch.tensor(options["scale"], dtype=torch.float64, requires_grad=True)
    wrt = ["query", "key", "value", *tables_of(options), *[name for name in ("sinks", "scale") if name in options]]
    output, seen, vjp = sightline.attention_vjp(*operands, **options, see=see, wrt=wrt)
    results = [output, *map(first_array, seen)]
    gradients = [rng.normal(size=x.shape).astype(x.dtype) for x in results]
    for place, statistic in enumerate(see, 1):
        if not statistic.is_differentiable:
            gradients[place] = None
    right_output, expected = expect(operands, of_torch, see, gradients)
    assert np.array_equal(output, right_output)
    found = vjp(gradients[0], gradients[1:])
    for name, right in zip(wrt, expected, strict=True):
        own = np.asarray(found[name])
        assert own.shape == right.shape
        is_sum = any(x.computed.has_own_problem for x in see)
        if is_sum or (isinstance(name, str) and name == "sinks"):  # added in another order
            torch.testing.assert_close(torch.from_numpy(own), torch.from_numpy(right))
        else:
            assert np.array_equal(own, right), f"other bits of {name} of {kind}"
    again = vjp(gradients[0], gradients[1:])
    assert all(np.array_equal(found[name], again[name]) for name in wrt)
    for name, array in zip(("query", "key", "value"), operands, strict=True):
        assert found[name].dtype == array.dtype


@pytest.mark.sampled(one_in=47)
@pytest.mark.parametrize("see", SEEN)
@pytest.mark.parametrize("kind", CALLS)
def test_first_and_repeated_calls_have_the_gradients_of_torch(kind, see):
    for seed in range(REPEATS):
        check(seed, kind, SEEN[see])


@pytest.mark.parametrize("shape", [((N, D), (M, D), (M, 5)), ((3, N, D), (3, M, D), (3, M, D))], ids=str)
def test_arrays_without_heads(shape):
    for see in ([], [sightline.entropy(), sightline.received(), sightline.lse()]):
        check(1, "causal", see, shape=shape)


def test_repeated_calls_with_weighted_heads(rng):
    arrays, see = draw(rng), [sightline.entropy().sum("heads", weights=[1.0, -2.0, 0.5, 3.0])]
    calls = [sightline.attention_vjp(*arrays, see=see)[-1] for _ in range(3)]
    first, *repeated = [vjp(None, [np.ones((B, N))]) for vjp in calls]
    for found in repeated:
        np.testing.assert_equal(found, first)


def test_arrays_that_broadcast():
    check(1, "causal", [sightline.entropy()], shape=((B, H, N, D), (1, G, M, D), (B, G, M, D)))


def test_a_repeated_call_makes_no_plan(rng, monkeypatch):
    options = {"mask": i >= j, "see": [sightline.entropy()]}
    for _ in range(3):
        *_, vjp = sightline.attention_vjp(*draw(rng), **options)
        vjp(np.ones((B, H, N, D)), [np.ones((B, H, N))])
    monkeypatch.setattr("sightline.api.vjp.make_plan", lambda *_: pytest.fail("a plan was made"))
    monkeypatch.setattr("sightline.api.vjp.solve", lambda *_: pytest.fail("a problem was solved"))
    *_, vjp = sightline.attention_vjp(*draw(rng), **options)
    vjp(np.ones((B, H, N, D)), [np.ones((B, H, N))])


def test_results_by_name(rng):
    q, k, v = draw(rng)
    output, seen, vjp = sightline.attention_vjp(q, k, v, see={"spread": sightline.entropy(), "sums": sightline.lse()})
    assert list(seen) == ["spread", "sums"]
    assert output.shape == q.shape
    found, expected = vjp(d_seen={"sums": np.ones((B, H, N))}), vjp(d_seen=[None, np.ones((B, H, N))])
    assert all(np.array_equal(found[name], expected[name]) for name in ("query", "key", "value"))
    assert not found["value"].any()


def test_gradients_of_nothing_are_zeros(rng):
    *_, vjp = sightline.attention_vjp(*draw(rng), see=[sightline.lse()])
    assert not any(x.any() for x in vjp(d_seen=[None]).values())
    with pytest.raises(ParameterError, match="vjp without a gradient"):
        vjp()


@pytest.mark.parametrize("place", ["query", "value", "table", "output"])
def test_an_array_that_changes_before_the_backward_pass(rng, place):
    arrays = dict(zip(("query", "key", "value"), draw(rng), strict=True)) | {"table": rng.normal(size=H)}
    for _ in range(3):
        output, _, vjp = sightline.attention_vjp(
            arrays["query"], arrays["key"], arrays["value"], score=s + table(arrays["table"])[h] * j
        )
        (arrays | {"output": output})[place][..., 0] += 1
        with pytest.raises(ChangedArrayError):
            vjp(np.ones_like(output))


@pytest.mark.parametrize("statistic", [sightline.entropy(), sightline.mass(i > j), sightline.max_score()], ids=str)
def test_a_statistic_that_changes_before_the_backward_pass(rng, statistic):
    for _ in range(3):
        _, (result,), vjp = sightline.attention_vjp(*draw(rng), see=[statistic])
        first_array(result)[...] += 1
        with pytest.raises(ChangedArrayError):
            vjp(d_seen=[np.ones((B, H, N))])


def test_a_table_of_torch(rng):
    q, k, v = draw(rng)
    for _ in range(3):
        own, same = rng.normal(size=H), rng.normal(size=H)
        same[:] = own
        tables = table(torch.from_numpy(own)), table(same)
        found = [sightline.attention_vjp(q, k, v, score=s + x[h] * j, wrt=[x])[2](np.ones_like(q))[x] for x in tables]
        assert type(found[0]) is np.ndarray
        assert found[0].dtype == np.float64
        assert np.array_equal(*found)


def test_a_table_that_functions_wrap(rng):
    """Its gradient is that of the sum of all its uses."""
    (q, k, v), array, change, step = draw(rng), rng.normal(size=(H, 5)), rng.normal(size=(H, 5)), 1e-6
    above, below, t = (table(array + x * change) for x in (step, -step, 0))
    *ends, score = (2 * sightline.relative_bias(x) - s + x[h, 1] for x in (above, below, t))
    expected = np.subtract(*(sightline.attention(q, k, v, score=end) for end in ends)) / (2 * step)
    for _ in range(3):
        output, _, vjp = sightline.attention_vjp(q, k, v, score=score, wrt=[t])
        np.testing.assert_allclose((vjp(output)[t] * change).sum(), (expected * output).sum(), rtol=1e-6)
    np.testing.assert_allclose(sightline.attention_tangent(q, k, v, {t: change}, score=score)[1], expected, atol=1e-7)


X = np.ones((1, 2, 3, 4))
ERRORS = {  # arguments, those of vjp, and the error
    "a tensor": (lambda: sightline.attention_vjp(*[torch.ones(1, 1, 2, 2)] * 3), DtypeError),
    "a cache": (lambda: sightline.attention_vjp(X, sightline.KVCache(), None), DtypeError),
    "an unknown input": (lambda: sightline.attention_vjp(X, X, X, wrt=["keys"]), ParameterError),
    "sinks that are not given": (lambda: sightline.attention_vjp(X, X, X, wrt=["sinks"]), ParameterError),
    "a table that is not read": (lambda: sightline.attention_vjp(X, X, X, wrt=[table(X)]), ParameterError),
    "a name without a sequence": (lambda: sightline.attention_vjp(X, X, X, wrt="query"), ParameterError),
    "a table without a sequence": (lambda: sightline.attention_vjp(X, X, X, wrt=table(X)), ParameterError),
    "no sequence": (lambda: sightline.attention_vjp(X, X, X, wrt=None), ParameterError),
    "no sequence of gradients": (
        lambda: sightline.attention_vjp(X, X, X, see=sightline.lse())[2](d_seen=1.0),
        ParameterError,
    ),
    "a masked gradient": (lambda: sightline.attention_vjp(X, X, X)[2](np.ma.masked_array(X, True)), DtypeError),
    "a gradient that is a tensor": (
        lambda: sightline.attention_vjp(X, X, X)[2](torch.ones(X.shape, requires_grad=True)),
        DtypeError,
    ),
    "a wrong shape": (lambda: sightline.attention_vjp(X, X, X)[2](np.ones((2, 3, 4))), ShapeError),
    "whole numbers": (lambda: sightline.attention_vjp(X, X, X)[2](np.ones(X.shape, int)), DtypeError),
    "too many gradients": (lambda: sightline.attention_vjp(X, X, X)[2](d_seen=[X]), ParameterError),
    "an unknown name": (
        lambda: sightline.attention_vjp(X, X, X, see={"a": sightline.lse()})[2](d_seen={"b": X}),
        ParameterError,
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, error = ERRORS[case]
    with pytest.raises(error) as caught:
        call()
    if "without a sequence" in case:
        assert "wrt is" in str(caught.value)
