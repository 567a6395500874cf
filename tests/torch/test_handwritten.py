"""Attention that models write out by hand, recorded by a watch: spellings, gradients, refusals, and planted faults."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional

import sightline
from fault_planting import Fault, assert_found
from sightline import watch
from sightline.errors import ParameterError
from sightline.reference.testing import assert_within_budget
from sightline.torch.watching import attention_finder, handwritten
from softmax_capture import Softmaxes
from watched_modules import record

B, H, N, M, D = 2, 3, 5, 7, 4
RNG = torch.Generator().manual_seed(0)
BIAS = torch.randn(H, N, M, generator=RNG, dtype=torch.float64)
HIDDEN = torch.rand(B, 1, N, M, generator=RNG) < 0.3
ATEN, POOL = torch.ops.aten, ThreadPoolExecutor(1)
WEIGHTS, LSE = sightline.weights(), sightline.lse()
STATISTICS = [WEIGHTS, LSE, sightline.entropy(), sightline.max_score(), sightline.scores(), sightline.received()]


def scores_of(q, k):
    return (q @ k.mT / 2 + BIAS.to(q)).masked_fill(HIDDEN, torch.finfo(q.dtype).min)


def flat(x):
    return x.reshape(-1, *x.shape[-2:])


def as_bart(q, k, v):
    scores = torch.bmm(flat(q), flat(k).transpose(1, 2)).view(B, H, N, M) + BIAS.to(q)
    return torch.bmm(functional.dropout(functional.softmax(scores.view(B * H, N, M), dim=-1), 0.5), flat(v))


def viewed_after(q, k, v):
    weights = torch.softmax(flat(q) @ flat(k).mT, -1).view(B, H, N, M)
    return torch.bmm(weights.view(-1, N, M), flat(v))


def with_einsum(product, order, sums):
    return lambda q, k, v: torch.einsum(sums, torch.einsum(product, q, k).add(BIAS.to(q).permute(order)).softmax(-1), v)


SPELLINGS = {
    "matmul": lambda q, k, v: torch.softmax(scores_of(q, k), -1) @ v,
    "method": lambda q, k, v: scores_of(q, k).softmax(dim=3).matmul(v),
    "module": lambda q, k, v: torch.matmul(nn.Dropout(0.5)(nn.Softmax(-1)(scores_of(q, k))), v),
    "einsum": lambda q, k, v: torch.einsum("b h i j, b h j d -> b h i d", scores_of(q, k).softmax(-1), v),
    "ellipsis": lambda q, k, v: torch.einsum("...ij,...jd->...id", [scores_of(q, k).softmax(-1), v]),
    "queries before heads": with_einsum("bhid,bhjd->bihj", (1, 0, 2), "bihj,bhjd->bihd"),
    "heads last": lambda q, k, v: torch.einsum("bijh,bhjd->bihd", scores_of(q, k).softmax(-1).permute(0, 2, 3, 1), v),
    "values first": lambda q, k, v: v.mT @ scores_of(q, k).softmax(-1).transpose(-1, -2),
    "flattened after softmax": lambda q, k, v: torch.baddbmm(
        flat(q), scores_of(q, k).softmax(-1).view(-1, N, M), flat(v), beta=0
    ),
    "flattened before softmax": as_bart,
    "flattened, and viewed after softmax": viewed_after,
    "flattened": lambda q, k, v: torch.bmm(torch.softmax(flat(q) @ flat(k).mT, -1), flat(v)),
    "five axes": lambda q, k, v: scores_of(q, k)[None].softmax(-1) @ v,
    "in float32": lambda q, k, v: functional.softmax(scores_of(q, k), dim=-1, dtype=torch.float32).to(v.dtype) @ v,
    "cast before and after": lambda q, k, v: scores_of(q, k).float().softmax(-1).type_as(v) @ v,
    "linalg": lambda q, k, v: torch.linalg.matmul(torch.linalg.matmul(q, k.adjoint()).softmax(-1).requires_grad_(), v),
    "operators": lambda q, k, v: ATEN.matmul(ATEN.softmax(ATEN.matmul(q, ATEN.permute(k, [0, 1, 3, 2])), -1), v),
    "learned queries": lambda q, k, v: (nn.Parameter(q.detach()) @ k.mT + scores_of(q, k)).softmax(-1) @ v,
    "scores changed in place before": lambda q, k, v: (q @ k.mT).add_(BIAS.to(q)).softmax(-1) @ v,
}
IN_FLOAT32 = ("in float32", "cast before and after")


class ByHand(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.scale = attend, nn.Parameter(torch.ones(()))

    def forward(self, q, k, v):
        return self.attend(q * self.scale.to(q), k, v)


def draw(dtype=torch.float32):
    return [torch.randn(B, H, length, D, generator=RNG).to(dtype) for length in (N, M, M)]


def axes_of(name, array):
    """Return the softmax's array in the axes of the recording: batch, heads, queries, keys."""
    array = array.transpose(1, 2) if name == "queries before heads" else array
    if name == "flattened":
        return array[:, None]
    return array.reshape(B, H, N, M)


def check(name, dtype=torch.float32):
    model, inputs = ByHand(SPELLINGS[name]), draw(dtype)
    state = torch.get_rng_state()
    plain = model(*inputs)
    torch.set_rng_state(state)
    with torch.no_grad(), watch(model, STATISTICS, handwritten=True) as seen, Softmaxes() as dense:
        output = model(*inputs)
    assert torch.equal(output, plain)
    (oracle,), (baseline,), (scores,) = (
        [axes_of(name, array) for array in arrays] for arrays in (dense.oracles, dense.plain, dense.scores)
    )
    (call,) = seen
    assert (call.layer, call.n, call.m, len(call.heads)) == ("ByHand", N, M, 1 if name == "flattened" else H)
    assert call["weights"].dtype == baseline.dtype
    assert_within_budget(call["weights"], oracle, baseline.double())
    assert_within_budget(call["received"], oracle.sum(-2), baseline.float().sum(-2))
    assert torch.equal(call["scores"], scores.to(call["scores"].dtype))
    assert torch.equal(call["max_score"].score, scores.amax(-1).to(call["max_score"].score.dtype))
    exact, rounded = scores.double(), scores.to(torch.promote_types(dtype, torch.float32))
    assert_within_budget(call["lse"], exact.logsumexp(-1), rounded.logsumexp(-1))
    entropies = [torch.special.entr(scores.softmax(-1)).sum(-1) for scores in (exact, rounded)]
    assert_within_budget(call["entropy"], *entropies)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name, dtype):
    check(name, dtype)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", SPELLINGS)
def test_gradients_of_statistics_reach_the_parameters(name):
    """They equal the gradients through the softmax of torch, in float64."""
    model, inputs = ByHand(SPELLINGS[name]), draw(torch.float64)
    factors = torch.randn(B, H, N, M, generator=RNG, dtype=torch.float64)
    with watch(model, [WEIGHTS, LSE, sightline.entropy()], handwritten=True) as seen, Softmaxes() as dense:
        model(*inputs)
    scores = axes_of(name, dense.scores[0])
    weights = axes_of(name, dense.oracles[0])
    factors = factors.reshape(weights.shape)
    lse = scores.logsumexp(-1).sum()
    entropy = lse - (weights * scores.clamp(min=-1e6)).sum()  # the clamped terms have weight 0
    expected = (weights * factors).sum() + lse + entropy
    found = (seen[0]["weights"] * factors).sum() + seen[0]["lse"].sum() + seen[0]["entropy"].sum()
    (gradient,), (truth,) = (
        torch.autograd.grad(total, [model.scale], retain_graph=True) for total in (found, expected)
    )
    assert truth != 0
    torch.testing.assert_close(gradient.double(), truth.double(), rtol=1e-5 if name in IN_FLOAT32 else 1e-10, atol=0)


def weighted(scores, values):
    return scores.softmax(-1) @ values


def over_queries(q, k, v):
    scores = scores_of(q, k)
    return [scores[:, :, rows].softmax(-1) @ v for rows in (slice(0, 2), slice(2, N))]


def in_a_buffer(q, k, v):
    buffer = torch.zeros(B, H, N, M, dtype=q.dtype)
    for head, part in enumerate(scores_of(q, k).split(1, 1)):
        buffer[:, head] = part[:, 0]
    return buffer.softmax(-1) @ v


def in_a_pool(q, k, v):
    scores = scores_of(q, k)
    return list(POOL.map(weighted, scores.unbind(1), v.unbind(1)))


PARTS = {  # the axis of the parts
    "heads by index": (lambda q, k, v: [scores_of(q, k)[:, head].softmax(-1) @ v[:, head] for head in range(H)], 1),
    "heads unbound": (lambda q, k, v: list(map(weighted, scores_of(q, k).unbind(1), v.unbind(1))), 1),
    "heads in other threads": (in_a_pool, 1),
    "matrices": (lambda q, k, v: [one.softmax(-1).mm(v[0, 0]) for one in scores_of(q, k).view(-1, N, M)], 0),
    "blocks of queries": (over_queries, 2),
    "a buffer": (in_a_buffer, 0),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_scores(name):
    attend, axis = PARTS[name]
    q, k, v = draw()
    seen = record(ByHand(attend), WEIGHTS, q, k, v, handwritten=True)
    found = torch.cat(seen["weights"], axis).view(B, H, N, M)
    assert_within_budget(found, scores_of(q.double(), k.double()).softmax(-1), scores_of(q, k).softmax(-1))


def test_what_is_no_attention():
    """The product of an activation and a parameter has no scores, and a gate of experts is no factor of values."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.randn(M, D, generator=RNG))

        def forward(self, x):
            x = torch.softmax(x @ self.gate.t(), -1) @ self.gate
            gates = torch.softmax(x @ functional.normalize(self.gate).mT, -1)
            return x + sum(gates[..., expert : expert + 1] * x for expert in range(M))

    model, (q, k, v) = nn.ModuleList([Experts(), ByHand(SPELLINGS["matmul"])]), draw()
    with torch.no_grad(), watch(model, WEIGHTS, handwritten=True) as seen:  # a warning would name the gates
        model[1](model[0](q), k, v)
    assert [call.layer for call in seen] == ["1"]


def test_an_exported_program():
    model, inputs = ByHand(SPELLINGS["matmul"]).eval(), tuple(draw())
    program = torch.export.export(model, inputs).module()
    seen, own = (record(one, WEIGHTS, *inputs, handwritten=True) for one in (program, model))
    assert torch.equal(seen[0]["weights"], own[0]["weights"])


def with_values_of_the_weights_size(weights, v):
    other = torch.cat([v, v[..., :1]], -1).type_as(weights)
    assert other.numel() == weights.numel()
    return (other.mT @ other).sum() + (weights @ v).sum()


OTHER_PRODUCTS = {
    "before": lambda weights, v: (weights.mT @ v[:, :, :N]).sum() + weights @ v,
    "after": lambda weights, v: weights @ v + torch.einsum("bhij,bhjd->bhid", weights, v),
    "of values": with_values_of_the_weights_size,
}


@pytest.mark.parametrize("name", OTHER_PRODUCTS)
def test_each_run_has_one_call(name):
    model = ByHand(lambda q, k, v: OTHER_PRODUCTS[name](scores_of(q, k).softmax(-1), v))
    with watch(model, LSE, handwritten=True) as seen:  # a warning would name the other product
        model(*draw())
        model(*draw())
    assert len(seen) == 2


def test_a_watch_forgets_the_scores_of_weights_that_live_on():
    kept = []

    def attend(q, k, v):
        scores = scores_of(q, k)
        kept.extend((weakref.ref(scores), scores.softmax(-1)))
        return functional.scaled_dot_product_attention(q, k, v)

    record(ByHand(attend), LSE, *draw(), handwritten=True)
    gc.collect()
    assert kept[0]() is None


def multiplied_in_place(q, k, v):
    scores = scores_of(q, k)
    weights = scores.softmax(-1)
    scores.mul_(2)
    return weights @ v


CHANGES = {
    "in place": lambda weights: weights.mul_(0.5),
    "a part in place": lambda weights: weights[:, 0].zero_(),
    "one key in place": lambda weights: weights[..., :1].zero_(),
    "a head of several": lambda weights: weights.unbind(1)[0].zero_(),
    "a view in place": lambda weights: weights.view(-1).mul_(2),
    "an index in place": lambda weights: weights.__setitem__((..., 0), 0),
    "data in place": lambda weights: weights.data.mul_(2),
    "data of a part": lambda weights: weights[0].data.mul_(2),
    "other data": lambda weights: setattr(weights, "data", weights.data * 2),
    "out": lambda weights: torch.mul(weights, 2, out=weights),
    "several": lambda weights: torch._foreach_mul_([weights], 2),
}


def changed(change):
    def attend(q, k, v):
        weights = scores_of(q, k).softmax(-1)
        change(weights)
        return functional.dropout(weights.to(v.dtype), 0.5, training=False) @ v

    return attend


def overwritten(q, k, v):
    scores = scores_of(q, k)
    return torch.softmax(scores, -1, out=scores) @ v


def with_a_sink(q, k, v):
    scores = scores_of(q, k)
    return torch.cat([scores, scores[..., :1] * 0], -1).softmax(-1)[..., :-1] @ v


def mixed_heads(q, k, v):
    weights = scores_of(q, k).softmax(-1).permute(0, 2, 3, 1)
    return functional.linear(weights, torch.ones(H, H).to(q)).permute(0, 3, 1, 2) @ v


def data_of_scores(q, k):
    scores = scores_of(q, k)
    weights = scores.softmax(-1)
    scores.data.mul_(2)
    return weights


def nested(x):
    return torch.nested.nested_tensor([x[0], x[1, :, :2]])


def over_nested(q, k, v):
    return torch.matmul((torch.matmul(q, k.transpose(-1, -2)) * 2).softmax(-1), v)


def without_small(weights):
    return torch.where(weights < 0.1, torch.zeros_like(weights), weights)


def stored(weights):
    buffer = torch.zeros(weights.shape).to(weights)
    buffer[:] = weights
    return buffer


PRODUCT = "the product does not show which axes have its queries and keys"
PART = "computes with the weights between softmax and product"
REFUSED = {
    "head mask": (lambda q, k, v: (scores_of(q, k).softmax(-1) * (torch.rand(H, 1, 1) > 2)) @ v, "mul.* computes with"),
    "head mask in place": (lambda q, k, v: scores_of(q, k).softmax(-1).mul_(0.5) @ v, "changed in place"),
    "dropout in place": (
        lambda q, k, v: functional.dropout(scores_of(q, k).softmax(-1), 0.5, inplace=True) @ v,
        "changed in place",
    ),
    "sum normalised": (lambda q, k, v: functional.normalize(scores_of(q, k).softmax(-1), 1) @ v, "normalize computes"),
    "gate of scores": (lambda q, k, v: (scores_of(q, k).softmax(-1) * (q @ k.mT)) @ v, "mul.* computes with"),
    "dropout of heads": (lambda q, k, v: functional.dropout2d(scores_of(q, k).softmax(-1)) @ v, "dropout2d computes"),
    "integers": (lambda q, k, v: scores_of(q, k).softmax(-1).to(torch.int32).to(v) @ v, "to computes with"),
    "sink": (with_a_sink, PART),
    "NaN of scores that are NaN": (lambda q, k, v: ((q @ k.mT) * torch.nan).softmax(-1).nan_to_num() @ v, "nan_to_num"),
    "NaN filled with 1": (lambda q, k, v: scores_of(q, k).log().softmax(-1).nan_to_num(1.0) @ v, "nan_to_num comp"),
    "small weights": (lambda q, k, v: without_small(scores_of(q, k).softmax(-1)) @ v, "where computes with"),
    "a part of the queries": (lambda q, k, v: scores_of(q, k).softmax(-1)[:, :, :3] @ v, PART),
    "one head": (lambda q, k, v: scores_of(q, k).softmax(-1).select(1, 0) @ v[:, 0], PART),
    "mixed heads": (mixed_heads, "linear computes with"),
    "scores in place": (multiplied_in_place, "the scores are changed in place"),
    "scores' data in place": (lambda q, k, v: data_of_scores(q, k) @ v, "the scores are changed in place"),
    **{name: (changed(change), "the weights are changed in place") for name, change in CHANGES.items()},
    "a head": (lambda q, k, v: scores_of(q, k).softmax(-1)[:, 0] @ v[:, 0], "getitem.* computes with"),
    "heads one by one": (lambda q, k, v: scores_of(q, k).softmax(-1).unbind(1)[0] @ v[:, 0], "unbind computes with"),
    "mean of heads": (lambda q, k, v: scores_of(q, k).softmax(-1).mean(1) @ v[:, 0], "mean computes with"),
    "repeated": (lambda q, k, v: scores_of(q, k).softmax(-1).repeat(2, 1, 1, 1) @ v.repeat(2, 1, 1, 1), "repeat comp"),
    "stored in a buffer": (lambda q, k, v: stored(scores_of(q, k).softmax(-1)) @ v, "setitem.* computes with"),
    "nested tensors": (lambda q, k, v: over_nested(*map(nested, (q, k, v))), "are a nested tensor"),
    "tensordot": (lambda q, k, v: torch.tensordot(scores_of(q, k)[0, 0].softmax(-1), v[0, 0], 1), PRODUCT),
    "keys joined, and moved": (
        lambda q, k, v: scores_of(q, k).softmax(-1).flatten(2).transpose(1, 2) @ v[:, :, 0],
        "divides or joins",
    ),
    "out": (overwritten, "out="),
    "softmax over queries": (lambda q, k, v: scores_of(q, k).softmax(-2) @ v, "not over the last axis"),
    "sum over queries": (lambda q, k, v: scores_of(q, k).softmax(-1).mT @ q, PRODUCT),
    "no axis of queries": (
        lambda q, k, v: torch.einsum("bhij,bjd->bhid", scores_of(q, k).softmax(-1), v[:, 0]),
        PRODUCT,
    ),
    "no sum over keys": (lambda q, k, v: torch.einsum("bhij,bhjd->bhijd", scores_of(q, k).softmax(-1), v), PRODUCT),
    "keys divided": (lambda q, k, v: scores_of(q, k).softmax(-1).view(B, H, M, N) @ q, "divides or joins"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_exactly_is_refused(name):
    attend, reason = REFUSED[name]
    with pytest.raises(ParameterError, match=rf"by hand in ByHand \({__file__}:\d+\), where .*{reason}"):
        record(ByHand(attend), LSE, *draw(), handwritten=True)


def test_changes_in_inference_mode():
    """Those of scores come too late, because the watch has a copy. Those of weights and their parts are refused."""
    model = ByHand(multiplied_in_place)
    with torch.inference_mode(), watch(model, WEIGHTS, handwritten=True) as seen, Softmaxes() as dense:
        model(*draw())
    assert_within_budget(seen[0]["weights"], dense.oracles[0], dense.plain[0])
    for change in CHANGES.values():
        with torch.inference_mode(), pytest.raises(ParameterError, match="the weights are changed in place"):
            record(ByHand(changed(change)), LSE, *draw(), handwritten=True)
    model = ByHand(changed(lambda weights: weights[:, 0].amax() + weights.unbind(-1)[0].sum()))
    with torch.inference_mode():
        assert len(record(model, WEIGHTS, *draw(), handwritten=True)) == 1


FILLS = {
    "as they are": lambda weights: weights,
    "nan_to_num": lambda weights: weights.nan_to_num(),
    "where": lambda weights: torch.where(torch.isnan(weights), torch.zeros_like(weights), weights),  # TransformerLens
    "where not": lambda weights: torch.where(~weights.isnan(), weights, torch.zeros_like(weights)),
}


@pytest.mark.parametrize("name", FILLS)
def test_rows_of_the_least_number_and_of_minus_infinity(name):
    """A row of the least finite number is uniform, as torch computes it. A row of −∞ is NaN in torch, and 0 here."""
    least, hidden = torch.finfo(torch.float32).min, -torch.inf
    rows = [[least] * M, [hidden] * M, [0.0] * 3 + [least] * (M - 3), [hidden] * 3 + [least] * (M - 3)]
    bias = torch.tensor([*rows, [0.0] * M])
    model = ByHand(lambda q, k, v: FILLS[name](torch.softmax(q @ k.mT * 0 + bias, -1)) @ v)
    seen = record(model, [WEIGHTS, LSE], *draw(), handwritten=True)
    oracle, plain = (array.softmax(-1).expand(B, H, N, M) for array in (bias.double(), bias))
    assert plain[..., 1, :].isnan().all()
    assert_within_budget(seen[0]["weights"], oracle.nan_to_num(0.0), plain.nan_to_num(0.0))
    torch.testing.assert_close(seen[0]["lse"], bias.logsumexp(-1).expand(B, H, N))


def test_autocast():
    model, inputs = ByHand(SPELLINGS["matmul"]), draw()
    with torch.no_grad(), torch.autocast("cpu"), watch(model, WEIGHTS, handwritten=True) as seen, Softmaxes() as dense:
        model(*inputs)
    assert seen[0]["weights"].dtype == dense.plain[0].dtype == torch.float32
    assert_within_budget(seen[0]["weights"], dense.oracles[0], dense.plain[0])


class Layers(nn.Module):
    """Attention by hand, attention of torch's function, and attention by hand in another thread."""

    def __init__(self):
        super().__init__()
        self.first, self.last = ByHand(SPELLINGS["matmul"]), ByHand(SPELLINGS["einsum"])
        self.found = ByHand(functional.scaled_dot_product_attention)

    def forward(self, q, k, v):
        self.first(q, k, v)
        self.found(q, k, v)
        thread = threading.Thread(target=self.last, args=(q, k, v))
        thread.start()
        thread.join()


def test_layers_heads_threads_and_nested_watches():
    model, inputs = Layers(), draw()
    with watch(model, WEIGHTS, handwritten=True) as seen:
        model(*inputs)
        model(*inputs)
    assert [(call.layer, call.step, call.kind) for call in seen] == [
        (layer, step, "cross") for step in (0, 1) for layer in ("first", "found", "last")
    ]
    part = record(model, WEIGHTS, *inputs, handwritten=True, layers=[-1], heads=[2])
    assert [call.layer for call in part] == ["last"]
    assert torch.equal(part[0]["weights"], seen[2]["weights"][:, 2:])


def test_nested_watches_of_which_one_records_attention_by_hand():
    model, inputs = Layers(), draw()
    message = rf"(?s)by hand was not recorded: ByHand \({__file__}:\d+\), .*handwritten=True"
    for path, calls in (("", 3), ("first", 1)):
        outer, inner = watch(model, LSE), watch(model.get_submodule(path), LSE, handwritten=True)
        with pytest.warns(UserWarning, match=message), outer as plain, inner as seen:
            model(*inputs)
        assert [call.layer for call in plain] == ["found"]
        assert len(seen) == calls


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_scores_live_no_longer_than_in_the_model(is_asked, has_gradients):
    """Without `handwritten`, they end with the softmax. With it, they end with the product, or the results' graph."""
    alive, kept = [], []

    def attend(q, k, v):
        scores = scores_of(q, k)
        last = weakref.ref(scores)
        kept.append(scores.softmax(-1))
        del scores
        gc.collect()
        alive.append(last() is not None)
        output = kept[0] @ v
        gc.collect()
        alive.append(last() is not None)
        return output

    model = ByHand(attend)
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(has_gradients):
        patch.setattr(attention_finder, "_compute", lambda *_: None)  # results with gradients hold their inputs
        with suppress(ParameterError), watch(model, LSE, handwritten=is_asked):
            model(*draw())
    assert alive == [is_asked, False]


FAULTS = {  # the fault, and the spelling that shows it
    "scores in another order": (
        Fault(handwritten._complete, "mark.scores.reshape(x.shape).permute(order)", "mark.scores.reshape(x.shape)"),
        "queries before heads",
    ),
    "an earlier shape lost": (
        Fault(handwritten._follow, "_keep_shape(function, mark.shape, x, result)", "()"),
        "flattened before softmax",
    ),
    "scores of flattened weights": (
        Fault(handwritten._follow_weights, "result.ndim == 4", "True"),
        "flattened after softmax",
    ),
    "scores not moved": (
        Fault(
            handwritten._follow_weights, "scores = call.repeat(x, scores.reshape(x.shape))", "call.repeat(x, scores)"
        ),
        "heads last",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name, monkeypatch):
    """`test_spellings` has the same checks without the faults."""
    planted, spelling = FAULTS[name]
    kinds = AssertionError, RuntimeError, ParameterError
    assert_found(planted, monkeypatch, lambda: check(spelling), kinds=kinds)
