"""Tests of `sightline.attention` under torch.func: each transformation agrees with that of the dense definition."""

import math
from functools import partial

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

import sightline
from sightline import b, h, i, j, s, table
from sightline.errors import KernelRefusedError, ParameterError, TableError
from sightline.torch import MultiHeadAttention, batching, operator, scaled_dot_product_attention
from torch_calls import drawn as drawn_float32

# torch's own jvp uses it
pytestmark = pytest.mark.filterwarnings(r"ignore:.torch\.jit:DeprecationWarning")

H, G, N, M, D = 4, 2, 3, 5, 3
drawn = partial(drawn_float32, dtype=torch.float64)


def operands(*lead, seed=0):
    shapes = (H, N, D), (G, M, D), (G, M, D - 1)
    return [drawn(*lead, *shape, seed=seed + k) for k, shape in enumerate(shapes)]


def define(query, key, value, *, allowed=None, added=0.0, sinks=None):
    """Compute attention by its dense definition, in torch operations."""
    key, value = (x.repeat_interleave(H // G, dim=-3) for x in (key, value))
    scores = query @ key.mT / math.sqrt(D) + added
    if allowed is not None:
        scores = torch.where(allowed, scores, -math.inf)
    if sinks is None:
        return torch.softmax(scores, -1) @ value
    extra = sinks[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1] @ value


ROWS, COLUMNS = torch.arange(N)[:, None], torch.arange(M)
LENGTHS = torch.tensor([[5, 2], [3, 4], [1, 5]])

# Each problem is (ours, definition, further arguments of three elements).
PROBLEMS = {
    "causal": (
        lambda q, k, v: sightline.attention(q, k, v, mask=i + 2 >= j),
        lambda q, k, v: define(q, k, v, allowed=COLUMNS <= ROWS + 2),
        [],
    ),
    "slopes": (
        lambda q, k, v, slopes: sightline.attention(q, k, v, score=s - table(slopes)[h] * abs(i - j)),
        lambda q, k, v, slopes: define(q, k, v, added=-slopes[:, None, None] * (ROWS - COLUMNS).abs()),
        [drawn(3, H)],
    ),
    "bias": (
        lambda q, k, v, bias: scaled_dot_product_attention(q, k, v, bias, enable_gqa=True),
        lambda q, k, v, bias: define(q, k, v, added=bias),
        [drawn(3, H, N, M)],
    ),
    "mask": (
        lambda q, k, v, mask: sightline.attention(q, k, v, mask=mask),
        lambda q, k, v, mask: define(q, k, v, allowed=mask),
        [(drawn(3, 2, 1, N, M) > -0.5) | (COLUMNS == 0)],
    ),
    "lengths": (
        lambda q, k, v, lengths: sightline.attention(q, k, v, mask=j < table(lengths)[b]),
        lambda q, k, v, lengths: define(q, k, v, allowed=lengths[:, None, None, None] > COLUMNS),
        [LENGTHS],
    ),
    "sinks": (
        lambda q, k, v, sinks: sightline.attention(q, k, v, mask=i >= j, sinks=sinks),
        lambda q, k, v, sinks: define(q, k, v, allowed=ROWS >= COLUMNS, sinks=sinks),
        [drawn(3, H)],
    ),
}


def problem(name):
    ours, definition, more = PROBLEMS[name]
    return ours, definition, [*operands(3, 2), *more]


def loss(call):
    return lambda *arrays: call(*arrays).sin().sum()


def floats(arrays):
    return tuple(k for k, x in enumerate(arrays) if x.is_floating_point())


def agree(transform, name, element=True):
    """Compare the transformations of attention and of its definition; `element` passes the arrays of one element."""
    ours, definition, arrays = problem(name)
    arrays = [x[0] for x in arrays] if element else arrays
    torch.testing.assert_close(transform(ours, arrays), transform(definition, arrays))


def one_by_one(call, *arrays):
    """Return the stacked results of a call for each element, as torch.vmap does."""
    return tree_map(lambda *results: torch.stack(results), *map(call, *arrays))


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of the operators."""
    made = []
    for name in ("attention", "attention_backward", "attention_tangent"):
        own = getattr(operator, f"{name}_op")
        monkeypatch.setattr(operator, f"{name}_op", lambda *x, own=own, name=name: (made.append(name), own(*x))[1])
    return made


# -- vmap --------------------------------------------------------------------------------------------------------------


MAPPED_ARGUMENTS = {"all": (0, 1, 2, 3), "query": (0,), "key and value": (1, 2), "table": (3,)}


@pytest.mark.parametrize(
    ("name", "mapped"),
    [(name, mapped) for name in PROBLEMS for mapped in MAPPED_ARGUMENTS if (name, mapped) != ("causal", "table")],
)
def test_vmap_makes_one_call(name, mapped, calls):
    def transform(call, arrays):
        dims = tuple([0 if k in MAPPED_ARGUMENTS[mapped] else None for k in range(len(arrays))])
        own = [x[0] if dim is None else x for x, dim in zip(arrays, dims, strict=True)]
        return torch.vmap(call, in_dims=dims)(*own)

    agree(transform, name, element=False)
    assert calls == ["attention"]


@pytest.mark.parametrize("axes", ["heads", "batch"])
def test_a_mean_of_lse_under_vmap(axes):
    """lse alone has no array of its own among the results. Sinks that are mapped join heads and elements."""
    x = [torch.randn(3, 1, 2, 5, 4, dtype=torch.float64) for _ in range(3)]
    sinks = torch.randn(3, 2, dtype=torch.float64)

    def loss(query, key, value, sinks):
        see = [sightline.lse().mean(axes), sightline.entropy()]
        output, (mean, entropy) = sightline.attention(query, key, value, sinks=sinks, see=see)
        return output.sin().sum() + mean.cos().sum() + entropy.sum()

    differentiate = torch.func.grad_and_value(loss, (0, 1, 2, 3))
    torch.testing.assert_close(torch.vmap(differentiate)(*x, sinks), one_by_one(differentiate, *x, sinks))


def test_a_fault_in_the_batching_rule_is_found(monkeypatch):
    monkeypatch.setattr(batching, "_join_spec", lambda spec, *_: spec)
    with pytest.raises(TableError):
        agree(
            lambda call, arrays: torch.vmap(call, in_dims=(0, 0, 0, None))(*arrays[:3], arrays[3][0]), "lengths", False
        )


def test_arguments_that_are_not_mapped_are_not_copied(monkeypatch):
    ours, _, (query, key, value) = problem("causal")
    given = []
    own = operator.attention_op
    monkeypatch.setattr(operator, "attention_op", lambda *x: (given.extend(x[:3]), own(*x))[1])
    torch.vmap(ours, in_dims=(0, None, None))(query, key[0], value[0])
    assert given[0].data_ptr() == query.data_ptr()
    assert given[1].data_ptr() == key.data_ptr()
    assert given[1].stride(0) == 0
    assert given[1].shape == (3, 2, G, M, D)


def test_vmap_over_other_axes_and_to_other_axes():
    ours, definition, (query, key, value) = problem("causal")
    arrays = query.movedim(0, 2), key.movedim(0, -1), value
    found, expected = (torch.vmap(call, in_dims=(2, -1, 0), out_dims=1)(*arrays) for call in (ours, definition))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["causal", "slopes", "mask"])
def test_nested_vmap(name, calls):
    """The inner vmap maps the batch axis, and the outer one the elements; a table is mapped by one of them."""
    dims = {"causal": (), "slopes": (None,), "mask": (0,)}[name]

    def transform(call, arrays):
        arrays = [*[x.unsqueeze(2) for x in arrays[:3]], *arrays[3:]]
        return torch.vmap(torch.vmap(call, in_dims=(0, 0, 0, *dims)))(*arrays)

    agree(transform, name, element=False)
    assert calls == ["attention"]


def test_vmap_in_chunks(calls):
    agree(lambda call, arrays: torch.vmap(call, chunk_size=2)(*arrays), "lengths", element=False)
    assert calls == ["attention"] * 2


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", ["lengths", "sinks"])
def test_vmap_of_statistics(name):
    """Means over the batch and over heads are those of each element."""
    see = [
        sightline.lse(),
        sightline.top_k(2),
        sightline.received().mean("batch"),
        sightline.entropy().mean("heads"),
        sightline.weights().mean("batch").mean("heads"),
        sightline.entropy().mean("batch").sum("heads", weights=[0.5, -2.0, 0.0, 1.0]),
        sightline.mass(j == b).rows([0, 2]),
        sightline.sum(sightline.p * (j - b), over=j),
    ]
    *arrays, more = problem(name)[2]

    def call(query, key, value, more):
        options = {"sinks": more} if name == "sinks" else {"mask": j < table(more)[b]}
        output, seen = sightline.attention(query, key, value, **options, see=see)
        return output, tuple(seen)

    def total(query, key, value, more):
        output, (lse, top, *rest) = call(query, key, value, more)
        return sum(x.sin().sum() for x in (output, lse, top.weights, *rest))

    def differentiate(*element):
        *own, more = element
        leaves = [x.clone().requires_grad_() for x in own]
        return torch.autograd.grad(total(*leaves, more), leaves)

    torch.testing.assert_close(torch.vmap(call)(*arrays, more), one_by_one(call, *arrays, more))
    found = torch.vmap(func.grad(total, argnums=(0, 1, 2)))(*arrays, more)
    torch.testing.assert_close(found, one_by_one(differentiate, *arrays, more))


def test_randomness_of_dropout(calls):
    x = torch.ones(3, 1, 2, 64, 4)

    def call(x):
        return sightline.attention(x, x, x, dropout=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(x)
    torch.manual_seed(0)
    different = torch.vmap(call, randomness="different")(x)
    assert calls == ["attention"]
    assert not any(torch.equal(different[0], other) for other in different[1:])
    torch.manual_seed(0)
    same = torch.vmap(call, randomness="same")(x)
    torch.manual_seed(0)
    assert torch.equal(same[0], call(x[0]))
    assert torch.equal(same, same[:1].expand_as(same))
    seeded = torch.vmap(lambda x: sightline.attention(x, x, x, dropout=0.5, seed=7))(x)
    assert torch.equal(seeded[1], sightline.attention(x[1], x[1], x[1], dropout=0.5, seed=7))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_drop_the_weights_of_the_forward_pass(randomness):
    """The output is linear in value, so value · gradient is the output."""
    query, key, value = problem("causal")[2]

    def call(query, key, value):
        def output(value):
            return sightline.attention(query, key, value, dropout=0.5).sum()

        gradient, found = func.grad_and_value(output)(value)
        return found, (gradient * value).sum()

    found, expected = torch.vmap(call, randomness=randomness)(query, key, value)
    torch.testing.assert_close(found, expected)


# -- derivatives -------------------------------------------------------------------------------------------------------

TRANSFORMS = {
    "grad": lambda call, x: func.grad(loss(call), argnums=floats(x))(*x),
    "grad_and_value": lambda call, x: func.grad_and_value(loss(call), argnums=floats(x))(*x),
    "vjp": lambda call, x: func.vjp(lambda *own: call(*own, *x[3:]), *x[:3])[1](call(*x).cos()),
    "jacrev": lambda call, x: func.jacrev(call, argnums=floats(x))(*x),
    "jvp": lambda call, x: func.jvp(lambda *own: call(*own, *x[3:]), tuple(x[:3]), tuple([y.cos() for y in x[:3]])),
    "jacfwd": lambda call, x: func.jacfwd(call, argnums=(0, 2))(*x),
}
SECOND = {
    "grad of grad": lambda call, x: func.grad(
        lambda *y: sum(g.square().sum() for g in func.grad(loss(call), floats(x))(*y)), floats(x)
    )(*x),
    "hessian": lambda call, x: func.hessian(loss(call), argnums=(0, 2))(*x),
    "jacrev of jacrev": lambda call, x: func.jacrev(func.jacrev(loss(call), argnums=1), argnums=(0, floats(x)[-1]))(*x),
    "jacfwd of jacfwd": lambda call, x: func.jacfwd(func.jacfwd(loss(call)))(*x),
}
MAPPED = {
    "per-sample gradients": lambda call, x: torch.vmap(func.grad(loss(call), argnums=floats(x)))(*x),
    "of shared arguments": lambda call, x: torch.vmap(
        func.grad(loss(call), argnums=floats(x)), in_dims=(0, *[None] * (len(x) - 1))
    )(x[0], *[y[0] for y in x[1:]]),
    "vmap of vjp": lambda call, x: torch.vmap(
        lambda *y: func.vjp(lambda *own: call(*own, *y[3:]), *y[:3])[1](call(*y).cos())
    )(*x),
    "gradient of vmap": lambda call, x: func.grad(loss(torch.vmap(call)), argnums=floats(x))(*x),
    "vmap of jvp": lambda call, x: torch.vmap(lambda q, *y: func.jvp(lambda q: call(q, *y), (q,), (q.cos(),)))(*x),
    "jacrev of vmap": lambda call, x: func.jacrev(lambda q: torch.vmap(call)(q, *x[1:]).sum(0))(x[0]),
    "vmap of grad of grad": lambda call, x: torch.vmap(lambda *y: SECOND["grad of grad"](call, y))(*x),
}


def pairs(transforms, names):
    """Return each transform with each problem. Outside of the soak, each transform has two problems."""
    quick = [(one, names[(k + step) % len(names)]) for k, one in enumerate(transforms) for step in range(2)]
    listed = [(one, name) for one in transforms for name in names]
    return [pair if pair in quick else pytest.param(*pair, marks=pytest.mark.soak) for pair in listed]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("transform", "name"), pairs(TRANSFORMS, list(PROBLEMS)))
def test_first_derivatives(transform, name):
    agree(TRANSFORMS[transform], name)


def test_forward_mode_of_torch_autograd():
    ours, definition, (query, key, value) = problem("causal")
    with forward_ad.dual_level():
        for other in (key, key.clone().requires_grad_()):
            dual = forward_ad.make_dual(query, query.cos())
            pairs = [forward_ad.unpack_dual(call(dual, other, value)) for call in (ours, definition)]
            torch.testing.assert_close(*[pair.primal for pair in pairs])
            torch.testing.assert_close(*[pair.tangent for pair in pairs])
        assert forward_ad.unpack_dual(ours(query, key, value)).tangent is None


def test_forward_mode_in_a_graph():
    """A loss of the tangent has a gradient. The oracle avoids torch.softmax, which loses its own under `forward_ad`."""
    ours, _, (query, key, value) = problem("causal")

    def definition(q, k, v):
        k, v = (x.repeat_interleave(H // G, dim=-3) for x in (k, v))
        scores = torch.where(COLUMNS <= ROWS + 2, q @ k.mT / math.sqrt(D), -math.inf)
        powers = torch.exp2(scores * math.log2(math.e))
        return powers / powers.sum(-1, keepdim=True) @ v

    found = []
    for call in (ours, definition):
        leaf = query.clone().requires_grad_()
        with forward_ad.dual_level():
            output, tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(leaf, query.cos()), key, value))
            found.append(torch.autograd.grad((tangent**2).sum() + output.sum(), leaf)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_kernel_computes_tangents(name, calls):
    """`jvp` of output and lse calls the operator of the kernel once, and `vmap` of it uses array operations."""

    def push(call, arrays):
        moved = tuple(x for x in arrays if x.is_floating_point())  # an array of integers is the last one
        return func.jvp(lambda *own: call(*own, *arrays[len(own) :]), moved, tuple(x.cos() for x in moved))

    agree(push, name)
    assert calls == ["attention", "attention_tangent"]


@pytest.mark.parametrize("see", [[], [sightline.entropy()]], ids=["kernel", "operations"])
def test_tangents_beside_statistics_without_gradients(see):
    _, definition, (query, key, value) = problem("causal")
    mask, see = i + 2 >= j, [*see, sightline.top_k(2), sightline.pooled(2, 2, "max")]

    def attend(q):
        output, (*_, top, cells) = sightline.attention(q, key[0], value[0], mask=mask, see=see)
        return output, top.weights, cells

    output, *others = func.jvp(attend, (query[0],), (query[0].cos(),))[1]
    expected = func.jvp(lambda q: definition(q, key[0], value[0]), (query[0],), (query[0].cos(),))[1]
    torch.testing.assert_close(output, expected)
    assert all(bool((other == 0).all()) for other in others)


def test_second_derivatives_in_inference_mode():
    ours, definition, (query, key, value) = problem("causal")

    def product(call):
        gradient = func.grad(lambda q: (call(q, key, value) ** 2).sum())
        return func.jvp(gradient, (query,), (query.cos(),))[1]

    expected = product(definition)
    with torch.inference_mode():
        found = product(ours)
    torch.testing.assert_close(found, expected)


def test_a_tangent_of_a_table_of_a_sum_is_refused():
    x, t = torch.ones(1, 2, 4, 3), torch.ones(4)
    call = lambda t: sightline.attention(x, x, x, see=sightline.sum(sightline.p * table(t)[j], over=j))[1][0]  # noqa: E731
    with pytest.raises(ParameterError, match="requires a gradient"):
        func.jvp(call, (t,), (t,))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch's own
def test_linearize():
    ours, definition, (query, key, value) = problem("causal")
    output, push = func.linearize(lambda q: ours(q, key, value), query)
    expected, other = func.linearize(lambda q: definition(q, key, value), query)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(push(query.cos()), other(query.cos()))


def test_second_derivatives_in_traced_programs_are_refused():
    ours, _, (query, key, value) = problem("causal")
    with pytest.raises(KernelRefusedError, match="traced"):
        make_fx(func.grad(lambda q: func.jvp(lambda q: ours(q, key, value), (q,), (q,))[1].sum()))(query)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("transform", "name"), pairs(SECOND, ["causal", "sinks", "slopes"]))
def test_second_derivatives(transform, name):
    agree(SECOND[transform], name)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("transform", "name"), pairs(MAPPED, list(PROBLEMS)))
def test_derivatives_of_mapped_calls(transform, name):
    agree(MAPPED[transform], name, element=False)


# -- as users compose them ---------------------------------------------------------------------------------------------


def test_an_ensemble_of_layers(calls):
    layers = [MultiHeadAttention(8, 2, batch_first=True, dtype=torch.float64) for _ in range(3)]
    parameters, buffers = func.stack_module_state(layers)
    x, padding = drawn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def call(parameters, buffers, x):
        return func.functional_call(layers[0], (parameters, buffers), (x, x, x), {"key_padding_mask": padding})[0]

    found = torch.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    torch.testing.assert_close(found, torch.stack([layer(x, x, x, key_padding_mask=padding)[0] for layer in layers]))


def test_gradients_of_each_sample_by_the_parameters_of_a_layer():
    layer = MultiHeadAttention(8, 2, batch_first=True, dtype=torch.float64)
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(layer.state_dict())
    x = drawn(3, 5, 8)

    def call(parameters, x):
        return func.functional_call(layer, parameters, (x[None],) * 3, {"need_weights": False})[0].sin().sum()

    found = torch.vmap(func.grad(call), in_dims=(None, 0))(dict(layer.named_parameters()), x)
    for k, sample in enumerate(x):
        output = theirs(*(sample[None],) * 3, need_weights=False)[0]
        expected = torch.autograd.grad(output.sin().sum(), theirs.parameters())
        torch.testing.assert_close([found[name][k] for name, _ in theirs.named_parameters()], expected)


def test_arrays_of_numpy_in_formulas_survive_a_transform():
    """A table that is made into a tensor inside a transform serves later calls too."""
    query, key, value = operands(2)
    score = sightline.alibi(H)
    slopes = torch.from_numpy(sightline.alibi(H).tables[0].array)

    def call(query):
        return sightline.attention(query, key, value, score=score).sum()

    expected = define(query, key, value, added=-slopes[:, None, None] * (ROWS - COLUMNS)).sum()
    for transform in (lambda: func.grad_and_value(call)(query)[1], lambda: torch.vmap(call)(query[None])[0]):
        torch.testing.assert_close(transform(), expected)
        torch.testing.assert_close(call(query), expected)


def test_vmap_of_the_backward_pass_of_an_eager_call():
    """The call is cached and bound before the transform sees its graph."""
    ours, definition, (query, key, value) = problem("causal")
    query = query.requires_grad_()
    directions = drawn(4, 3, 2, H, N, D - 1)
    for call in [ours] * 3:
        torch.autograd.grad(call(query[0], key[0], value[0]).sum(), query)
        outputs = [one(query[0], key[0], value[0]) for one in (call, definition)]
        found = [
            torch.vmap(lambda d, y=y: torch.autograd.grad(y, query, d, retain_graph=True)[0])(directions[:, 0])
            for y in outputs
        ]
        torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:.*vmap.*:UserWarning")
def test_the_vmap_of_torch_autograd_is_refused():
    ours, _, (query, key, value) = problem("causal")
    query = query[0].requires_grad_()
    for _ in range(3):
        output = ours(query, key[0], value[0])
        torch.autograd.grad(output.sum(), query, retain_graph=True)
        with pytest.raises(KernelRefusedError, match="is_grads_batched"):
            torch.autograd.grad(output, query, torch.ones(2, *output.shape), is_grads_batched=True)


def test_a_learned_scale_under_transforms():
    _, _, (query, key, value) = problem("causal")
    scales = drawn(3).exp()

    def ours(q, k, v, scale):
        return sightline.attention(q, k, v, scale=scale, score=lambda s, b, h, i, j: torch.tanh(s))

    def definition(q, k, v, scale):
        k, v = (x.repeat_interleave(H // G, dim=-3) for x in (k, v))
        return torch.softmax(torch.tanh(q @ k.mT * scale), -1) @ v

    for transform in (torch.vmap, lambda call: torch.vmap(func.grad(loss(call), argnums=(0, 3)))):
        torch.testing.assert_close(*[transform(call)(query, key, value, scales) for call in (ours, definition)])


# -- in compiled programs ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", ["lengths", "sinks"])
def test_compiled_vmap(name):
    torch.compiler.reset()
    ours, definition, arrays = problem(name)
    arrays = [x.requires_grad_() if x.is_floating_point() else x for x in arrays]
    compiled = torch.compile(lambda *x: torch.vmap(ours)(*x), fullgraph=True, backend="aot_eager")
    pairs = compiled(*arrays), torch.vmap(definition)(*arrays)
    torch.testing.assert_close(*pairs)
    learned = [x for x in arrays if x.requires_grad]
    torch.testing.assert_close(*[torch.autograd.grad(output.sin().sum(), learned) for output in pairs])


def test_compiled_forward_derivatives_are_refused():
    torch.compiler.reset()
    ours, _, (query, key, value) = problem("causal")

    @torch.compile(fullgraph=True, backend="eager")
    def call(query):
        return func.jvp(lambda q: ours(q, key, value), (query,), (query,))

    with pytest.raises(Exception, match="forward derivatives of attention inside a compiled function"):
        call(query)


def test_traced_gradients_and_mapped_calls():
    ours, definition, arrays = problem("causal")
    for transform in (lambda call: func.grad(loss(call), argnums=(0, 1, 2)), torch.vmap):
        traced = make_fx(transform(ours))(*arrays)
        torch.testing.assert_close(traced(*[2 * x for x in arrays]), transform(definition)(*[2 * x for x in arrays]))
