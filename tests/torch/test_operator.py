"""Tests of `sightline.attention` on torch tensors: the operator, its gradients, compilation and torch's signature."""

import math
import operator
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.autograd import gradcheck, gradgradcheck

import sightline
from sightline import bias, h, i, j, m, n, s, table, where
from sightline.call.problem import Options, make_problem, parse
from sightline.errors import DeviceError, DtypeError, KernelRefusedError, MaskError, ParameterError, ShapeError
from sightline.formula.expression import to_text
from sightline.formula.tables import Table
from sightline.reference.accuracy import compute_baseline, dense_attention, gradient_term_sizes
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from sightline.torch import scaled_dot_product_attention
from sightline.torch.dispatch import kernels
from sightline.torch.operator import attention_backward_op, find_float_tables, read_arguments, to_arguments
from sightline.torch.operator import attention_op as attention_operator

SHAPES = ((4, 4, 3), (2, 5, 3), (2, 5, 2))  # two query heads share a key head, and d_v differs from d_k
DOCUMENTS = torch.tensor([0, 0, 1, 1, 2])


def drawn(*shape, dtype=torch.float64, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def arrays(dtype=torch.float64, grad=True, batch=2):
    return [drawn(batch, *shape, dtype=dtype, grad=grad, seed=k) for k, shape in enumerate(SHAPES)]


# A problem is a function of learned slopes (H,), bias (n, m) and sinks (H,), and returns attention's arguments.
PROBLEMS = {
    "plain": lambda slopes, bias, sinks: {},
    "causal": lambda slopes, bias, sinks: {"mask": i >= j},
    "blind rows": lambda slopes, bias, sinks: {"mask": (j < 2) & (i != 1)},
    "documents": lambda slopes, bias, sinks: {"mask": sightline.documents(DOCUMENTS) & (i >= j)},
    "softcap": lambda slopes, bias, sinks: {"score": sightline.softcap(2.0)},
    "alibi": lambda slopes, bias, sinks: {"mask": i >= j, "score": sightline.alibi(slopes)},
    "bias": lambda slopes, bias, sinks: {"score": sightline.bias(bias)},
    "curved": lambda slopes, bias, sinks: {"score": torch.tanh(s * table(slopes)[h]) + table(bias)[i, j] * s},
    "one table twice": lambda slopes, bias, sinks: {"score": s * table(slopes)[h] + table(slopes)[j % 2]},
    "sinks": lambda slopes, bias, sinks: {"mask": i > j, "sinks": sinks},
    "dropout": lambda slopes, bias, sinks: {"mask": i >= j, "dropout": 0.4, "seed": 2**64 - 1},
    "all": lambda slopes, bias, sinks: {
        "mask": i + (m - n) >= j,
        "score": where(i > j, s, torch.tanh(s) - table(slopes)[h] * abs(i - j)) + table(bias)[i, j],
        "sinks": sinks,
        "dropout": 0.2,
        "seed": 7,
        "scale": 0.3,
    },
}


def quick_and_soak(names, quick):
    """Return all names as parameters of a test. Those that are not among `quick` run in the soak."""
    assert set(quick) <= set(names)
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.soak) for name in names]


def learned(dtype=torch.float64):
    return [drawn(4, dtype=dtype, seed=3), drawn(4, 5, dtype=dtype, seed=4), drawn(4, dtype=dtype, seed=5)]


def answers(name, see=()):
    """Return a function from every differentiable tensor to output and statistics, with 0 instead of −∞."""

    def call(query, key, value, *parameters):
        output, seen = sightline.attention(query, key, value, **PROBLEMS[name](*parameters), see=see)
        return output, *(torch.where(array == -math.inf, 0.0, array) for array in seen)

    return call


# -- values and gradients ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", PROBLEMS)
def test_output_and_statistics_equal_their_definitions(name):
    options = PROBLEMS[name](*learned(torch.float32)) | {"see": [sightline.weights(), sightline.lse()]}
    inputs = arrays(torch.float32, batch=20)
    output, (weights, lse) = sightline.attention(*inputs, **options)
    problem = make_problem(*inputs, **options)
    truth, rough = compute_stages(problem), compute_baseline(problem)
    for found, stage in ((output, "output"), (weights, "weights"), (lse, "lse")):
        assert_within_budget(found, getattr(truth, stage), getattr(rough, stage), name)


@pytest.mark.wide
@pytest.mark.parametrize("name", quick_and_soak(PROBLEMS, ("blind rows", "bias", "one table twice", "sinks", "all")))
def test_gradients_equal_finite_differences(name):
    see = [sightline.lse(), sightline.weights()] if name in ("curved", "all", "blind rows") else ()
    assert gradcheck(answers(name, see), [*arrays(batch=1), *learned()])


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", ["blind rows", "one table twice", pytest.param("all", marks=pytest.mark.soak)])
def test_gradients_of_gradients_equal_finite_differences(name):
    see = [sightline.lse(), sightline.weights()] if name == "all" else ()
    two_heads = [x[:, : x.shape[1] // 2, :3].detach().requires_grad_() for x in arrays(batch=1)]
    parameters = [
        x[:k, :3].detach() if x.ndim > 1 else x[:2].detach() for k, x in zip((2, 3, 2), learned(), strict=True)
    ]
    assert gradgradcheck(answers(name, see), [*two_heads, *(x.requires_grad_() for x in parameters)])


def test_third_derivatives():
    x = drawn(3, 2)

    def second(query):
        first = torch.autograd.grad(
            sightline.attention(query, query, query, mask=i >= j).sin().sum(), query, create_graph=True
        )
        return torch.autograd.grad(first[0].square().sum(), query, create_graph=True)[0]

    assert gradcheck(second, [x])


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", ["plain", "blind rows", "alibi", "sinks", "dropout"])
def test_float32_gradients_within_budget(name):
    given = [x.detach() for x in (*arrays(torch.float32, batch=20), *learned(torch.float32))]

    def gradients(call, dtype):
        tensors = [x.to(dtype, copy=True).requires_grad_() for x in given]
        output = call(tensors)
        return torch.autograd.grad(output.square().sum(), tensors, allow_unused=True)

    def by_hand(order):
        return lambda t: dense_attention(make_problem(*t[:3], **PROBLEMS[name](*t[3:])), str(t[0].dtype)[6:], order)[0]

    found = gradients(lambda t: sightline.attention(*t[:3], **PROBLEMS[name](*t[3:])), torch.float32)
    truth = gradients(by_hand(0), torch.float64)
    rough = [gradients(by_hand(order), torch.float32) for order in range(4)]
    problem = make_problem(*given[:3], **PROBLEMS[name](*given[3:]))
    sizes = gradient_term_sizes(problem, 2 * compute_stages(problem).output)
    slots = {id(entry.array): k for k, entry in enumerate(problem.tables)}
    keys = ["query", "key", "value", *(slots.get(id(x)) for x in given[3:5]), "sinks"]
    for key, ours, oracle, *orders in zip(keys, found, truth, *rough, strict=True):
        assert (ours is None) == (oracle is None)
        if ours is not None:
            assert_within_budget(ours, oracle, np.stack([x.numpy() for x in orders]), name, sizes.get(key))


def test_hidden_nan_reaches_neither_output_nor_gradient():
    query, key, value = arrays(grad=False)
    query[..., 0, :], key[..., 4, :], value[..., 4, :] = math.nan, math.nan, math.inf
    tensors = [x.requires_grad_() for x in (query, key, value)]
    output = sightline.attention(*tensors, mask=(j < 4) & (i > 0))
    gradients = torch.autograd.grad(output.sum(), tensors)
    assert all(x.isfinite().all() for x in (output, *gradients))
    assert not output[..., 0, :].any()
    assert not gradients[0][..., 0, :].any()
    assert not gradients[1][..., 4, :].any()


def test_gradients_reach_only_used_inputs():
    query, key, value = arrays()
    _, (lse,) = sightline.attention(query, key, value, see=[sightline.lse()])
    of_query, of_value = torch.autograd.grad(lse.sum(), (query, value))
    assert of_query.any()
    assert not of_value.any()


@pytest.mark.parametrize("score", [None, sightline.softcap(3.0)], ids=["plain", "capped"])
def test_a_learned_scale_has_its_gradient(score):
    query, key, value = arrays()
    scale = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    formula = (s if score is None else score).with_scores(s * table(scale.reshape(1))[0])
    written = sightline.attention(query, key, value, scale=1.0, score=formula)
    assert torch.equal(sightline.attention(query, key, value, scale=scale, score=score), written)
    assert torch.autograd.gradcheck(
        lambda *x: sightline.attention(*x[:3], scale=x[3], score=score), (query, key, value, scale)
    )
    with pytest.raises(ParameterError, match="one number"):
        sightline.attention(query, key, value, scale=torch.ones(4, requires_grad=True))


def test_mask_functions_with_captured_tensors():
    slopes = drawn(4)

    def score_mod(score, batch, head, q_idx, kv_idx):
        return score - slopes[head] * (q_idx - kv_idx)

    def mask_mod(batch, head, q_idx, kv_idx):
        return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]

    inputs = arrays()
    output = sightline.attention(*inputs, mask=mask_mod, score=score_mod)
    expected = sightline.attention(*inputs, mask=sightline.documents(DOCUMENTS), score=sightline.alibi(slopes))
    assert torch.equal(output, expected)
    assert torch.autograd.grad(output.sum(), slopes)[0].any()


# -- dropout, autocast, devices, errors --------------------------------------------------------------------------------


def test_manual_seed_repeats_dropout():
    inputs = arrays(torch.float32)

    def call(seed):
        torch.manual_seed(seed)
        first = sightline.attention(*inputs, dropout=0.5)
        return first, sightline.attention(*inputs, dropout=0.5)

    (one, two), (again, _), (other, _) = call(1), call(1), call(2)
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"mask": sightline.causal()}], ids=["plain", "causal"])
def test_a_forward_derivative_by_two_backward_ones(options):
    """torch.autograd.functional.jvp differentiates the backward pass, at an output gradient of 0."""
    q, k, v = (drawn(1, 2, 5, 4, grad=False, seed=seed) for seed in range(3))

    def call(query):
        return sightline.attention(query, k, v, kernel="cpu", **options)

    step = 1e-6
    expected = (call(q + step * k) - call(q - step * k)) / (2 * step)
    torch.testing.assert_close(torch.autograd.functional.jvp(call, q, k)[1], expected)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tables_of_unsigned_integers(dtype):
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    entries = torch.tensor([3, 2**16 - 1, 5, 0, 2, 7, 1, 9, 4])
    of = [sightline.table(x)[sightline.j] for x in (entries.to(getattr(torch, dtype)), entries)]
    for kernel in ("cpu", "streaming"):
        one, other = (sightline.attention(q, k, v, mask=each > sightline.i, kernel=kernel) for each in of)
        assert torch.equal(one, other)


def test_a_call_without_dropout_does_not_use_torchs_generator():
    state = torch.get_rng_state()
    sightline.attention(*arrays(torch.float32), mask=i >= j)
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_computes_in_its_dtype():
    inputs = arrays(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = sightline.attention(*inputs)
        wide = sightline.attention(*arrays(torch.float64))
    assert output.dtype == torch.bfloat16
    assert wide.dtype == torch.float64
    assert torch.equal(output, sightline.attention(*(x.bfloat16() for x in inputs)))
    assert torch.autograd.grad(output.float().sum(), inputs[0])[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"key": np.zeros((2, 2, 5, 3))}, DeviceError),
        ({"key": torch.zeros(2, 2, 5, 7, dtype=torch.float64)}, ShapeError),
        ({"value": torch.zeros(2, 2, 5, 2)}, DtypeError),
        ({"mask": i - j}, MaskError),
        ({"mask": torch.ones(3, 5, dtype=torch.bool)}, ShapeError),
        ({"mask": torch.ones(4, 5)}, MaskError),
        ({"scale": math.nan}, ParameterError),
        ({"dropout": 1.5}, ParameterError),
        ({"dropout": 0.1, "seed": -1}, ParameterError),
        ({"see": ["lse"]}, ParameterError),
        ({"kernel": "none such"}, ParameterError),
        ({"kernel": "fused", "mask": i >= j}, KernelRefusedError),
        ({"sinks": torch.zeros(3)}, ShapeError),
    ],
)
def test_errors_are_the_librarys_own(change, error):
    given = dict(zip(("query", "key", "value"), arrays(), strict=True)) | change
    with pytest.raises(error):
        sightline.attention(**given)


def test_the_refusals_of_fused():
    reasons = str(sightline.explain(*arrays(), mask=i >= j).refusals["fused"])
    assert "on a GPU only" in reasons
    assert kernels()[0].name == "fused"


def test_fused_computes_attention():
    """Call `run` directly, since `Fused` refuses arrays on the CPU: grouped heads, a scale, several leading axes."""
    query, key, value = (
        drawn(3, 2, heads, length, 8, dtype=torch.float32) for heads, length in ((4, 6), (2, 9), (2, 9))
    )
    problem = make_problem(query, key, value, scale=0.3)
    truth, rough = compute_stages(problem), compute_baseline(problem)
    assert_within_budget(kernels()[0].run(problem).output.detach(), truth.output, rough.output)


def test_tensors_without_elements():
    output = sightline.attention(torch.zeros(2, 1, 0, 4), torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), mask=i >= j)
    assert output.shape == (2, 1, 0, 4)
    output = sightline.attention(torch.ones(2, 1, 3, 4), torch.zeros(2, 1, 0, 4), torch.zeros(2, 1, 0, 4))
    assert not output.any()


# -- the operator ------------------------------------------------------------------------------------------------------


def make_arguments(name, see=(), grad=True):
    tensors = [x.requires_grad_(grad) for x in (*arrays(torch.float32), *learned(torch.float32))]
    problem = parse(*tensors[:3], Options(**PROBLEMS[name](*tensors[3:]), see=see))
    given, spec = to_arguments(problem, torch.tensor(5) if problem.dropout else None)
    return *given, *spec


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_opcheck(name):
    see = [sightline.weights(), sightline.lse()] if name == "all" else []
    torch.library.opcheck(attention_operator._opoverload, make_arguments(name, see))
    plain_arguments = make_arguments(name, see, grad=False)
    answer = attention_operator(*plain_arguments)
    given = list(range(len(answer)))
    gradients = [torch.ones_like(x) for x in answer]
    torch.library.opcheck(
        attention_backward_op._opoverload,
        (gradients, given, find_float_tables(*read_arguments(plain_arguments)), *answer[:2], *plain_arguments),
    )


def test_to_text_is_the_formulas_text(monkeypatch):
    slopes, bias, _ = learned()
    formula = where(i >= j, torch.tanh(s / 2.5) - table(slopes)[h], -math.inf) + Table(bias, ("i", None))[i, j % 5]
    expected = formula.text, list(formula.tables)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert to_text(formula) == expected


# -- compilation -------------------------------------------------------------------------------------------------------

OUTER_MASK = (i >= j) & (i - j < 256)
ALIBI = sightline.alibi(4)  # the slopes are a NumPy array
SLOPES = drawn(4, dtype=torch.float32)

COMPILED = {
    "no formula": lambda q, k, v: sightline.attention(q, k, v),
    "inner formula": lambda q, k, v: sightline.attention(q, k, v, mask=i >= j),
    "outer formula": lambda q, k, v: sightline.attention(q, k, v, mask=OUTER_MASK),
    "ready names": lambda q, k, v: sightline.attention(q, k, v, mask=sightline.causal() & sightline.window(256)),
    "lambda": lambda q, k, v: sightline.attention(q, k, v, mask=lambda b, h, i, j: i >= j),
    "score lambda": lambda q, k, v: sightline.attention(q, k, v, score=lambda s, b, h, i, j: torch.tanh(s / 30) * 30),
    "slopes": lambda q, k, v: sightline.attention(q, k, v, score=s - table(SLOPES)[h] * (i - j)),
    "NumPy table outside": lambda q, k, v: sightline.attention(q, k, v, score=ALIBI),
    "dense mask": lambda q, k, v: sightline.attention(q, k, v, mask=torch.ones(4, 5, dtype=torch.bool).tril()),
    "computed bias": lambda q, k, v: sightline.attention(q, k, v, score=sightline.bias(SLOPES.reshape(4, 1, 1).exp())),
    "statistics": lambda q, k, v: sightline.attention(q, k, v, see=[sightline.weights(), sightline.lse()])[1][0],
    "sinks": lambda q, k, v: sightline.attention(q, k, v, sinks=SLOPES, scale=0.5),
    "dropout": lambda q, k, v: sightline.attention(q, k, v, dropout=0.5),
    "without heads": lambda q, k, v: sightline.attention(q[:, 0], k[:, 0], v[:, 0], mask=i >= j),
    "broadcast": lambda q, k, v: sightline.attention(q[:1], k, v, mask=i >= j),
    "torch's signature": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "traced lengths": lambda q, k, v: sightline.attention(q, k, v, mask=sightline.padding(q[:, 0, 0, 0].abs().long())),
    "traced documents": lambda q, k, v: sightline.attention(
        q, k, v, mask=sightline.documents((k[:, 0, :, 0] > 0).long())
    ),
    "traced slopes": lambda q, k, v: sightline.attention(q, k, v, score=sightline.alibi(q[0, :, 0, 0])),
    "traced distances": lambda q, k, v: sightline.attention(q, k, v, score=sightline.relative_bias(q[0, :, 0])),
}

QUICK_CALLS = "lambda", "score lambda", "slopes", "computed bias", "statistics", "sinks", "dropout", "without heads"
QUICK_CALLS += ("traced slopes",)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", quick_and_soak(COMPILED, QUICK_CALLS))
def test_calls_compile_to_one_graph(name):
    torch.compiler.reset()
    call, tensors = COMPILED[name], arrays(torch.float32)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, compiled):
        torch.manual_seed(0)
        output = function(*tensors)
        results.append((output, *torch.autograd.grad(output.square().sum(), tensors, allow_unused=True)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.wide
def test_one_graph_serves_all_lengths_and_each_number_has_one():
    """Numbers of the call, and of formulas and statistics that are arguments."""
    torch.compiler.reset()
    counter = CompileCounter()

    def call(x, w, mask, score, see):
        see = [*see, sightline.weights(), sightline.pooled(w, 2), sightline.received(last=w)]
        return sightline.attention(x, x, x, mask=mask, score=score - table(SLOPES)[h], scale=w / 2, see=see)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    formulas = {w: (sightline.window(w), s * (w * 0.1), [sightline.top_k(w), sightline.mass(j < w)]) for w in (2, 3, 5)}
    calls = [(drawn(2, 4, length, 8), w, *formulas[w]) for length, w in ((5, 2), (6, 2), (9, 3), (70, 3), (8, 2))]
    for given, answer in [(given, call(*given)) for given in calls]:  # formulas keep what eager calls compute of them
        torch.testing.assert_close(compiled(*given), answer, rtol=0, atol=0, equal_nan=True)
    assert counter.frame_count == 2


@pytest.mark.soak
def test_the_first_call_of_a_process_compiles_with_changing_lengths():
    program = """if True:
        import torch, sightline

        @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
        def call(x):
            return sightline.attention(x * 2, x, x, mask=sightline.causal())

        for length in (8, 9):
            x = torch.randn(1, 2, length, 4)
            assert torch.equal(call(x), sightline.attention(x * 2, x, x, mask=sightline.causal()))
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


CHANGING_NUMBERS = {
    "window": lambda x, w: {"mask": sightline.window(w, w - 1)},
    "prefix": lambda x, w: {"mask": (i >= j) | sightline.prefix(w)},
    "softcap": lambda x, w: {"score": sightline.softcap(w / 2)},
    "offset": lambda x, w: {"mask": i + w >= j},
    "reflected operators": lambda x, w: {"mask": w - i < 2 + j, "score": w * s + where(i > j, w, 0)},
    "divisor": lambda x, w: {"mask": (i - j) % w == 0},
    "power": lambda x, w: {"score": s**w},
    "float": lambda x, w: {"score": s * (w * 0.1)},
    "index": lambda x, w: {"score": s + table(SLOPES)[(i + w) % 4]},
    "length": lambda x, w: {"score": s * x.shape[2] - i // x.shape[2]},
    "logarithm of a length": lambda x, w: {"score": s * math.log(x.shape[2])},
    "comparison by torch's functions": lambda x, w: {"mask": torch.lt(i - j, x.shape[2] // 2) & torch.ne(j, w)},
    "comparison with an index": lambda x, w: {
        "mask": (i - j < operator.index(x.shape[2] // 2)) & (operator.index(w) != j)
    },
    "mask function": lambda x, w: {"mask": lambda b, h, i, j: i - j - w < 0},
    "whole scale": lambda x, w: {"scale": w},
    "rows": lambda x, w: {"see": [sightline.weights().rows(slice(w)), sightline.lse().rows([w, -w])]},
    "condition": lambda x, w: {"see": [sightline.mass(sightline.window(w)).mean("heads")]},
    "blocks": lambda x, w: {"mask": sightline.blocks(x.new_zeros(1, 1, -(-x.shape[2] // w), 1).long(), w, x.shape[2])},
}


@pytest.mark.wide
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", quick_and_soak(CHANGING_NUMBERS, ["window"]))
def test_changing_numbers_in_formulas_compile(name, dynamic):
    torch.compiler.reset()

    def call(x, w):
        return sightline.attention(x, x, x, **CHANGING_NUMBERS[name](x, w))

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length, w in ((6, 2), (6, 3), (9, 4)):
        x = drawn(1, 2, length, 4, dtype=torch.float32)
        torch.testing.assert_close(compiled(x, w), call(x, w), rtol=0, atol=0, equal_nan=True)


@pytest.mark.wide
@pytest.mark.parametrize(
    "leading", [(2, 1), *[pytest.param(each, marks=pytest.mark.soak) for each in ((2, 3), (1, 3), (1, 1))]]
)
def test_leading_axes_of_a_bias_broadcast_when_compiled(leading):
    torch.compiler.reset()

    def call(x, added, allowed):
        return scaled_dot_product_attention(x, x, x, allowed) + sightline.attention(x, x, x, score=bias(added))

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 6):
        x = drawn(2, 3, 2, length, 4, dtype=torch.float32)
        added = drawn(*leading, 2, length, length, dtype=torch.float32)
        allowed = drawn(3, 1, length, length, grad=False) > -0.5  # has one batch axis
        pair = call(x, added, allowed), compiled(x, added, allowed)
        torch.testing.assert_close(*pair)
        torch.testing.assert_close(*[torch.autograd.grad(y.sum(), (x, added)) for y in pair])


def test_shape_errors_are_readable_when_compiled():
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k: sightline.attention(q, k, k), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="project both to the same d_k"):
        compiled(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 4))


# -- eager calls -------------------------------------------------------------------------------------------------------


def test_eager_calls_pass_the_problem_and_no_text(monkeypatch):
    """Forward and backward, with a learned table, sinks, dropout and statistics."""
    x = [torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3)]
    bias, sinks = torch.randn(2, 19, requires_grad=True), torch.randn(2, requires_grad=True)
    score = s + table(bias)[h, i - j + 9]
    options = {"mask": i >= j, "score": score, "sinks": sinks, "see": [sightline.lse(), sightline.entropy()]}

    def gradients():
        output, seen = sightline.attention(*x, **options, dropout=0.5, seed=3)
        return torch.autograd.grad(sum(y.sin().sum() for y in (output, *seen)), [*x, bias, sinks])

    expected = gradients()
    monkeypatch.setattr(sys.modules["sightline.torch.autograd"], "to_arguments", None)
    monkeypatch.setattr(sys.modules["sightline.torch.dispatch"], "to_arguments", None)
    assert all(torch.equal(found, sound) for found, sound in zip(gradients(), expected, strict=True))


def test_streaming_gradients_use_the_saved_output_and_lse(monkeypatch):
    x = [torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3)]
    output = sightline.attention(*x, kernel="reference")
    monkeypatch.setattr(sys.modules["sightline.reference.streaming"], "forward", None)
    found = torch.autograd.grad(output.sin().sum(), x)
    expected = torch.autograd.grad(torch.softmax(x[0] @ x[1].mT / 2, -1).matmul(x[2]).sin().sum(), x)
    torch.testing.assert_close(found, expected)


def test_explain_says_why_streaming_computes_the_gradients():
    x = torch.zeros(1, 1, 2, 4, requires_grad=True)
    assert "gradients     by streaming: reference has no backward pass" in str(
        sightline.explain(x, x, x, kernel="reference")
    )
    assert sightline.explain(x, x, x, kernel="cpu").backward_refusals == ()
    assert "(B, H, n, m) = (1, 1, 0, 2)" in sightline.explain(x[:, :, :0], x, x).backward_refusals[0]
