"""Attention over a sequence that is divided among four devices of the CPU. `../test_distributed.py` runs this file."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gradient_checks
import sightline
import statistic_definitions
from fault_planting import Fault, make_fault_test
from sample_calls import draw_inputs
from sightline import h, i, j, lse, s, table
from sightline.call.kernel import Gradients, Result
from sightline.call.partition import parts
from sightline.errors import ParameterError, ShapeError, SightlineError
from sightline.jax import distributed
from sightline.reference.testing import assert_conforms
from strategies import Case

B, D, D_V = 2, 8, 5
KINDS = ("padding", "documents", "boolean array", "bias that hides", "slopes", "sinks")
SPEC = P(None, None, "x")  # positions are the third axis of operands, and of lse


def draw_case(rng, kind, ranks, dtype="float32"):
    """Return a call whose lengths divide among the ranks in both layouts."""
    n, m = (2 * ranks * int(rng.integers(1, 9)) for _ in range(2))
    H, G = [(4, 2), (3, 3), (4, 1)][rng.integers(3)]
    if kind == "documents":
        m = n
    shapes = (B, H, n, D), (B, G, m, D), (B, G, m, D_V)
    return Case(*(rng.normal(size=shape).astype(dtype) for shape in shapes), draw_inputs(rng, kind, B, H, n, m))


def on_devices(function, ranks, layout, n, m, **options):
    """Return the function of whole arrays that calls `function` on the shards of that many devices."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), "x")
    rows, columns = (distributed.order(length, ranks, layout) for length in (n, m))
    options = {"axis_name": "x", "layout": layout} | options

    def attend(query, key, value, *tables):
        def local(query, key, value, *tables):
            return function(query, key, value, *tables, **options)

        specs = (SPEC, SPEC, SPEC, *(P() for _ in tables))
        sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=SPEC)
        output, seen = sharded(query[..., rows, :], key[..., columns, :], value[..., columns, :], *tables)
        back = np.argsort(rows)
        return output[..., back, :], jax.tree.map(lambda x: x[:, :, back], seen)

    return attend


def attend_problem(problem, ranks, layout):
    """Return the function of query, key, value, the tables and the sinks of a problem, (output, seen)."""

    def local(query, key, value, sinks, *tables, **options):
        posed = problem.with_tables(tables) if tables else problem
        given = {name: getattr(posed, name) for name in ("mask", "score", "scale", "see")}
        sinks = None if problem.sinks is None else sinks
        return distributed.attention(query, key, value, sinks=sinks, **given, **options)

    return on_devices(local, ranks, layout, problem.n, problem.m)


def operands_of(problem, traced):
    """Return the arrays that are arguments of the program: tables only if they are to be traced."""
    sinks = np.zeros(problem.H, np.float32) if problem.sinks is None else problem.sinks
    return problem.query, problem.key, problem.value, sinks, *([x.array for x in problem.tables] if traced else [])


def run(problem, ranks, layout, traced):
    """Return the result of a problem of NumPy arrays whose first statistic is lse."""
    attend = attend_problem(problem, ranks, layout)
    output, seen = jax.tree.map(np.asarray, jax.jit(attend)(*map(jnp.asarray, operands_of(problem, traced))))
    wide = [x._replace(where=x.where.astype(np.int64)) if isinstance(x, tuple) else x for x in seen]
    return Result(output, seen[0], tuple(wide))


def differentiate(ranks, layout, problem, d_output, d_lse, d_weights):
    """Return the gradients of output and lse, of query, key, value, the tables and the sinks."""
    problem = problem.with_statistics(lse())
    operands = operands_of(problem, traced=True)
    floats = [k for k, x in enumerate(operands) if x.dtype.kind == "f" or x.dtype == ml_dtypes.bfloat16]
    attend = attend_problem(problem, ranks, layout)

    @jax.jit
    def pull(given, d_output, d_lse):
        def function(*chosen):
            replaced = dict(zip(floats, chosen, strict=True))
            output, (own,) = attend(*[replaced.get(k, x) for k, x in enumerate(given)])
            return output, own

        return jax.vjp(function, *[given[k] for k in floats])[1]((d_output, d_lse))

    found = dict(zip(floats, pull([jnp.asarray(x) for x in operands], d_output, d_lse), strict=True))
    found = {k: np.asarray(x) for k, x in found.items()}
    scored = set(problem.score_table_indices)
    tables = tuple([found.get(4 + k) if k in scored else None for k in range(len(problem.tables))])
    sinks = None if problem.sinks is None else found[3]
    return Gradients(found[0], found[1], found[2], tables, sinks)


# -- the tests --------------------------------------------------------------------------------------------------------


def test_results():
    """Drawn problems conform to the definition, with known and with traced tables."""
    rng = np.random.default_rng(0)
    for count, kind in enumerate(KINDS):
        ranks, layout = (1, 2, 3, 4, 2, 3)[count], ("contiguous", "zigzag")[count % 2]
        dtype = ml_dtypes.bfloat16 if kind == "slopes" else np.float32
        problem = draw_case(rng, kind, ranks, dtype).make_problem(see=[lse()])
        assert_conforms(partial(run, ranks=ranks, layout=layout, traced=count % 2), problem)


def test_statistics():
    see = [lse(), sightline.entropy(), sightline.max_score(), sightline.mass(i - j < 5), sightline.top_k(3)]
    see += [sightline.sum(sightline.p * (i - j) / 64, over=j)]
    case = draw_case(np.random.default_rng(3), "sinks", 3)
    problem = case.make_problem(see=see, mask=(i >= j + 3) | (j == 1))
    statistic_definitions.check(partial(run, ranks=3, layout="zigzag", traced=False), problem)


def test_ties():
    """Of equal scores on several devices, the first key counts, though a later one arrives first."""
    x = jnp.ones((1, 1, 16, 4))
    attend = partial(distributed.attention, mask=j > 2, see=[sightline.max_score(), sightline.top_k(2)])
    _, (largest, heaviest) = jax.jit(on_devices(attend, 2, "contiguous", 16, 16))(x, x, x)
    assert (largest.where == 3).all()
    assert (heaviest.where == jnp.array([3, 4])).all()


def test_gradients():
    rng = np.random.default_rng(1)
    gradient_checks.check(draw_case(rng, "sinks", 3), differentiate=partial(differentiate, 3, "zigzag"))


def test_gradients_of_statistics():
    """The gradients of the statistics are those of one device."""
    x, sinks = _example(16), jnp.asarray([0.5, -1.0])
    see = [sightline.entropy(), sightline.mass(i - j < 3), sightline.max_score(), lse()]
    see += [sightline.entropy().mean("heads", weights=[1, 3]).mean("batch")]

    def gradients(attend):
        def loss(*x):
            output, (entropy, mass, largest, own, mean) = attend(*x)
            return (output**2).sum() + (entropy * mass + jnp.sin(largest.score) + own**2 + mean**3).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*x)

    options = {"mask": (i >= j) & (i - j < 9), "sinks": sinks, "see": see}

    def attend(*x, **more):
        output, (*seen, mean) = distributed.attention(*x, **options, **more)
        return output, (*seen, mean[None, None])  # positions are the third axis

    expected = gradients(partial(sightline.attention, **options))
    found = gradients(on_devices(attend, 2, "contiguous", 16, 16))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.soak
def test_second_derivatives():
    x = _example(8)

    def push_gradient(attend):
        gradient = jax.grad(lambda *x: (attend(*x)[0] ** 2).sum(), argnums=(0, 1, 2))
        return jax.jit(lambda *x: jax.jvp(gradient, x, x)[1])(*x)

    expected = push_gradient(partial(sightline.attention, mask=i >= j, see=()))
    ours = on_devices(partial(distributed.attention, mask=i >= j, see=()), 2, "contiguous", 8, 8)
    for one, other in zip(push_gradient(ours), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_hidden():
    """Queries that see no key give 0 and −∞. Hidden keys of NaN change neither output nor gradient."""
    query, key, value = _example(16)
    nan = jnp.where(jnp.arange(16)[:, None] >= 12, jnp.nan, value)
    attend = partial(distributed.attention, mask=(j < 12) & (i >= 4), see=[lse(), sightline.entropy()])
    function = on_devices(attend, 2, "contiguous", 16, 16)

    def loss(*x):
        output, (own, entropy) = function(*x)
        return (output**2).sum() + jnp.where(jnp.isfinite(own), own, 0).sum() + entropy.sum()

    output, (own, entropy) = jax.jit(function)(query, key, nan)
    assert (output[..., :4, :] == 0).all()
    assert (own[..., :4] == -jnp.inf).all()
    assert (entropy[..., :4] == 0).all()
    assert jnp.isfinite(output).all()
    assert all(jnp.isfinite(x).all() for x in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, key, nan))
    nothing = on_devices(partial(distributed.attention, mask=i > j + 16, see=lse()), 2, "contiguous", 16, 16)
    assert (jax.jit(nothing)(query, key, nan)[0] == 0).all()


def test_transfers():
    """Blocks travel only to devices that need them, as far as the mask is known."""
    x = _example(512)

    def pairs(ranks, layout, **options):
        """Return the pairs (sender, receiver) of each transfer of keys."""
        attend = partial(distributed.attention, see=[lse()], **options)
        text = str(jax.make_jaxpr(on_devices(attend, ranks, layout, 512, 512))(*x)).replace(" ", "").replace("\n", "")
        found = [part[: part.index("))") + 2] for part in text.replace(",)", ")").split("perm=")[1:]]
        assert found[::2] == found[1::2]  # those of the values are equal
        return found[::2]

    neighbours = "((0,1),(1,2),(2,3))"
    assert pairs(4, "contiguous", mask=(i >= j) & (i - j < 60)) == [neighbours]
    causal = [neighbours, "((0,2),(1,3))", "((0,3))"]
    assert pairs(4, "contiguous", mask=i >= j) == causal
    assert pairs(4, "contiguous", mask=(i >= j) & (j < table(jnp.asarray([9]))[0])) == ["((0,1))", "((0,2))", "((0,3))"]
    assert len(pairs(4, "contiguous")) == 3
    assert len(pairs(4, "zigzag", mask=i >= j)) == 6
    assert pairs(4, "contiguous", mask=i // 128 == j // 128) == []


def test_errors():
    """Each wrong argument is named, with its cure, while the program is traced."""
    x = _example(16)

    def message(layout="contiguous", ranks=2, n=16, **options):
        given = [y[..., :n, :] for y in x]
        mesh = Mesh(np.array(jax.devices()[:ranks]), "x")
        attend = partial(distributed.attention, **{"axis_name": "x", "layout": layout} | options)
        with pytest.raises(SightlineError) as raised:
            jax.shard_map(attend, mesh=mesh, in_specs=SPEC, out_specs=SPEC)(*given)
        return str(raised.value)

    assert "axis_name='y'" in message(axis_name="y")
    assert "layout='ring'" in message(layout="ring")
    assert "an even number" in message(layout="zigzag", n=6)
    assert "received" in message(see=[sightline.received()])
    assert "mean" in message(see=[sightline.weights().mean("heads")])
    assert "dropout=0.1" in message(dropout=0.1)
    assert "is_causal" in message(is_causal=True)
    assert "of length 8 stands for j" in message(mask=jnp.ones(8, bool))
    assert "reads outside" in message(score=s + table(np.ones(4))[i])
    assert "sinks of shape (3,)" in message(sinks=jnp.ones(3))
    with pytest.raises(ParameterError, match=r"inside jax\.shard_map"):
        distributed.attention(*x, axis_name="x")
    with pytest.raises(ShapeError, match="a multiple of 3"):
        distributed.order(16, 3)


def _example(n):
    rng = np.random.default_rng(5)
    return [jnp.asarray(rng.normal(size=(1, 2, n, 4)), jnp.float32) for _ in range(3)]


@pytest.mark.soak
def test_learned_table():
    """A table that all devices read receives the sum of their gradients; axes of other names stay local."""
    x, slopes = _example(16), jnp.asarray([0.3, 0.7])

    def loss(attend, *x):
        return (attend(*x) ** 2).sum()

    def alone(query, key, value, slopes):
        return sightline.attention(query, key, value, score=s - table(slopes)[h] * abs(i - j))

    def shared(query, key, value, slopes, **options):
        score = s - table(slopes)[h] * abs(i - j)
        return distributed.attention(query, key, value, score=score, see=(), **options)

    attend = on_devices(shared, 2, "contiguous", 16, 16)
    found = jax.jit(jax.grad(lambda *x: loss(lambda *y: attend(*y)[0], *x), argnums=3))(*x, slopes)
    expected = jax.grad(lambda *x: loss(alone, *x), argnums=3)(*x, slopes)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


COMPUTE_PARTS = distributed._Exchange.compute_parts
FAULTS = {
    "keys of a later device": Fault(COMPUTE_PARTS, "self.rank - distance", "self.rank + distance"),
    "queries from the first key": Fault(COMPUTE_PARTS, "_first(self.problem.queries, self.rank, span)", "first_key"),
    "blocks of a later device": Fault(COMPUTE_PARTS, "rank - distance", "rank + distance"),
    "totals without factors": Fault(parts.add_parts, "factor * part.total", "part.total"),
}


def check_documents():
    problem = draw_case(np.random.default_rng(2), "documents", 3).make_problem(see=[lse()])
    assert_conforms(partial(run, ranks=3, layout="contiguous", traced=True), problem)


test_documents = make_fault_test(FAULTS, check_documents, "budget")
