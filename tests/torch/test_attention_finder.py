"""The finder of attention calls: random programs, every way to call attention, and planted faults."""

import copy
import pickle
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as renamed
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import sightline
from fault_planting import Fault, plant
from sightline import watch
from sightline.errors import FormulaError, ParameterError
from sightline.reference.testing import assert_within_budget
from sightline.torch import SelfAttention, replacing
from sightline.torch.watching import attention_finder, running_modules
from sightline.torch.watching.attention_finder import FINDER
from watched_modules import Calling, make_encoder, record

HEADS, WIDTH, LENGTH = 2, 4, 6
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
POOL = ThreadPoolExecutor(2)  # its threads live longer than any watch
LSE, WEIGHTS = sightline.lse(), sightline.weights()


def dense(query, key, mask=None, scale=None):
    """Return softmax(Q Kᵀ · scale + M), with key heads that query heads share."""
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def in_thread(function, *inputs, **options):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*inputs, **options)))
    thread.start()
    thread.join()
    return results[0]


BIAS = torch.randn(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3))
WAYS = {  # how a module calls attention, and the mask of the call
    "renamed import": (lambda module, x: renamed(x, x, x, is_causal=True), CAUSAL),
    "attribute": (lambda module, x: functional.scaled_dot_product_attention(x, x, x, CAUSAL), CAUSAL),
    "method": (lambda module, x: module.attend(x), BIAS),
    "partial": (lambda module, x: partial(renamed, attn_mask=BIAS)(x, x, x), BIAS),
    "closure": (lambda module, x: (lambda: renamed(x, x, x, attn_mask=CAUSAL.mT))(), CAUSAL.mT),
    "thread": (lambda module, x: in_thread(renamed, x, x, x, is_causal=True), CAUSAL),
    "thread of a method": (lambda module, x: in_thread(module.attend, x), BIAS),
    "pool": (lambda module, x: POOL.submit(renamed, x, x, x, is_causal=True).result(), CAUSAL),
    "pool of a pool": (lambda module, x: POOL.submit(lambda: in_thread(module.attend, x)).result(), BIAS),
    "operator": (lambda module, x: torch.ops.aten.scaled_dot_product_attention(x, x, x, BIAS), BIAS),
    "exported": (lambda module, x: torch.ops.aten.scaled_dot_product_attention.default(x, x, x, CAUSAL), CAUSAL),
    "class of a mask": (lambda module, x: renamed(x, x, x, attn_mask=causal_lower_right(LENGTH, LENGTH)), CAUSAL),
    "this library": (lambda module, x: sightline.attention(x, x, x, mask=sightline.causal()), CAUSAL),
}


class Program(nn.Module):
    """A module that calls attention in some ways, and its children: in this thread, in another one, or twice."""

    def __init__(self, ways, children=()):
        super().__init__()
        self.ways, self.parts, self.log = ways, nn.ModuleList(children), []

    def attend(self, x):
        return renamed(x, x, x, attn_mask=BIAS)

    def forward(self, x):
        for number, way in enumerate(self.ways):
            call, mask = WAYS[way]
            self.log.append((way, x, mask))
            x = torch.tanh(x + call(self, x + number))
            self.log[-1] = (way, self.log[-1][1] + number, mask)
        for number, part in enumerate(self.parts):
            x = (part, partial(in_thread, part), lambda x, part=part: part(part(x)))[number % 3](x)
        return x


def draw_program(rng, depth=2):
    children = [draw_program(rng, depth - 1) for _ in range(rng.randint(1, 3) if depth else 0)]
    return Program(rng.choices(list(WAYS), k=rng.randint(1, 4)), children)


def check_program(program):
    """Compare what a watch records with what each module has called: each call once, by its path, with its weights."""
    x = torch.randn(1, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = program(x)
        for module in program.modules():
            module.log = []
        with watch(program, WEIGHTS) as seen:
            found = program(x)
    torch.testing.assert_close(found, plain)
    paths = {name or "Program": module for name, module in program.named_modules() if isinstance(module, Program)}
    assert set(seen.layers) == {path for path, module in paths.items() if module.ways}
    arrays = []
    for path in seen.layers:
        calls, log = seen.of(path), paths[path].log
        assert [call.call for call in calls] == list(range(len(log))), (path, [way for way, *_ in log])
        for call, (_, query, mask) in zip(calls, log, strict=True):
            exact = mask if mask.dtype == torch.bool else mask.double()
            arrays.append((call["weights"], dense(query.double(), query.double(), exact), dense(query, query, mask)))
    assert_within_budget(*map(torch.cat, zip(*arrays, strict=True)))


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed):
    check_program(draw_program(random.Random(seed)))


@pytest.mark.parametrize("way", WAYS)
def test_every_way(way):
    check_program(Program([], [Program([way, way])]))


def test_arguments_are_those_of_the_call():
    """Compare the weights of a call with dropout, scale, grouped heads and a mask, and its output."""
    layer = Calling(lambda q, k: renamed(q, k, k, CAUSAL.mT, 0.5, scale=0.3, enable_gqa=True))
    rng = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, heads, LENGTH, WIDTH, generator=rng) for heads in (4, 2))
    torch.manual_seed(5)
    plain = layer(q, k)
    torch.manual_seed(5)
    with watch(layer, WEIGHTS, heads=[3, 0]) as seen:
        assert torch.equal(layer(q, k), plain)  # the same weights are dropped
    oracle, expected = (dense(a, b, CAUSAL.mT, 0.3)[:, [3, 0]] for a, b in ((q.double(), k.double()), (q, k)))
    assert_within_budget(seen[0]["weights"], oracle, expected)


def test_calls_that_are_replaced_are_recorded():
    program, x = Program(["attribute", "method"]), torch.randn(1, HEADS, LENGTH, WIDTH)
    for outer, inner in ((replacing(), watch(program, WEIGHTS)), (watch(program, WEIGHTS), replacing())):
        with outer as first, inner as second:
            program(x)
        assert len(second if hasattr(first, "served") else first) == 2


def test_a_mode_of_the_user_is_not_disturbed():
    """A device as a context is a mode of torch too; it may end inside or outside of a watch."""
    program, x = Program([*WAYS]), torch.randn(1, HEADS, LENGTH, WIDTH)
    layer, row = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, LENGTH, 8)
    with torch.device("cpu"), watch(program, WEIGHTS) as seen, watch(layer, WEIGHTS) as seen_of_layer:
        modes = function_modes()
        with torch.device("cpu"):
            program(x)
            layer(row, row, row)
        assert function_modes() == modes
    assert (len(seen), len(seen_of_layer)) == (len(WAYS), 1)


FAULTS = {
    "a call missed in a pool": Fault(running_modules._submit, "_hand_over(task)", "task"),
    "calls missed by the operator": Fault(
        attention_finder.Finder.__torch_function__,
        "READERS.get(function)",
        "READERS.get(None if function is OPERATOR else function)",
    ),
    "a call under the name of another module": Fault(running_modules.RunningModules.current, "stack[-1]", "stack[0]"),
    "weights after dropout": Fault(
        attention_finder._read_torch,
        "convert_arguments(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)",
        "convert_arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)",
    ),
    "a mask dropped": Fault(
        attention_finder._read_torch,
        "convert_arguments(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)",
        "convert_arguments(query, key, value, None, 0.0, is_causal, scale, enable_gqa)",
    ),
    "a scale dropped": Fault(
        attention_finder._read_torch,
        "convert_arguments(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)",
        "convert_arguments(query, key, value, attn_mask, 0.0, is_causal, None, enable_gqa)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name, monkeypatch):
    plant(FAULTS[name], monkeypatch)
    with pytest.raises(AssertionError):  # noqa: PT012  # one of the two checks
        check_program(Program(list(WAYS), [Program(list(WAYS))]))
        test_arguments_are_those_of_the_call()


# -- torch's layers and flex_attention ---------------------------------------------------------------------------------


def draw_multi_head(seed):
    """Return a layer of torch, its operands and its options, with each argument drawn."""
    draw, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=rng)
    is_self, heads, (n, m) = draw.random() < 0.5, draw.choice([1, 2, 3]), draw.choice([(5, 5), (1, 4), (6, 3)])
    m, width = n if is_self else m, 4 * heads
    kdim, vdim = (width, width) if is_self else draw.choice([(width, width), (7, 5)])
    flags = {name: draw.random() < 0.4 for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")}
    layer = nn.MultiheadAttention(width, heads, draw.choice([0.0, 0.3]), kdim=kdim, vdim=vdim, **flags)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=rng)
    batch = draw.choice([(), (1,), (2,)])
    shapes = [(*batch, n, width), (*batch, m, kdim), (*batch, m, vdim)]
    if batch and not layer.batch_first:
        shapes = [(length, *batch, size) for *_, length, size in shapes]
    operands = [normal(shapes[0])] * 3 if is_self else list(map(normal, shapes))
    options = {name: draw.random() < 0.5 for name in ("need_weights", "average_attn_weights")}
    mask, causal = normal(*draw.choice([(), (heads * sum(batch or (1,)),)]), n, m), torch.ones(n, m).triu(1).bool()
    mask = draw.choice([None, mask, mask > 0.5, causal, torch.zeros(n, m).masked_fill(causal, -torch.inf)])
    if mask is not None:
        options |= {"attn_mask": mask, "is_causal": draw.random() < 0.5}
    if draw.random() < 0.5:
        padding = normal(*batch, m)
        options["key_padding_mask"] = draw.choice([padding, padding > 0.5])
    return layer.train(draw.random() < 0.5), operands, options


@pytest.mark.sampled(one_in=3)
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("seed", range(48))
def test_multi_head_attention_returns_the_same_while_watched(seed):
    """The oracle is torch's layer in float64, as with a watch: with NaN in the same places."""
    layer, operands, options = draw_multi_head(seed)

    def run(layer, cast=lambda x: x):
        own = {id(x): cast(x) for x in operands}  # equal operands are one tensor
        torch.manual_seed(seed)
        found = layer(*[own[id(x)] for x in operands], **tree_map_only(torch.Tensor, cast, options))
        return [x.detach() for x in found if x is not None]

    with watch(layer, WEIGHTS) as seen, torch.set_grad_enabled(seed % 2 == 0):
        found = run(layer)
    oracle = run(copy.deepcopy(layer).double(), lambda x: x.double() if x.is_floating_point() else x)
    for one, exact, other in zip(found, oracle, run(layer), strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert_within_budget(*(x.nan_to_num() for x in (one, exact, other)))
    if options["need_weights"] and not (layer.training and layer.dropout):
        weights = seen[0]["weights"].detach().reshape(-1, *seen[0]["weights"].shape[-3:])
        weights = weights.mean(1) if options["average_attn_weights"] else weights
        assert_within_budget(weights.view_as(oracle[1]), oracle[1].nan_to_num(), found[1].nan_to_num())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_flex_attention(is_compiled):
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    slopes = torch.tensor([0.5, 0.1])

    def run(x, score=lambda s, b, h, i, j: s - slopes[h] * (i - j)):
        attend = torch.compile(flex_attention, backend="eager") if is_compiled else flex_attention
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu")
        return attend(x, x, x, score, mask, return_aux=AuxRequest(lse=True))

    layer, x = Calling(run), torch.randn(1, HEADS, LENGTH, WIDTH)
    plain = layer(x)
    with watch(layer, WEIGHTS) as seen:
        found = layer(x)
    torch.testing.assert_close(found[0], plain[0])
    torch.testing.assert_close(found[1].lse, plain[1].lse)
    places = torch.arange(LENGTH)
    bias = (-slopes[:, None, None] * (places[:, None] - places)).masked_fill(~CAUSAL, -torch.inf)
    torch.testing.assert_close(seen[0]["weights"], dense(x, x, bias))
    with pytest.raises(FormulaError, match="fft_fft of a formula"), watch(layer, WEIGHTS):
        layer(x, lambda s, b, h, i, j: torch.fft.fft(s))


# -- programs that are compiled, copied, cast or run again -------------------------------------------------------------


@pytest.mark.parametrize("how", ["function", "method"])
def test_compiled_models_are_recorded(how):
    model, x = make_encoder(), torch.randn(2, LENGTH, 8)
    compiled = torch.compile(model, backend="eager") if how == "function" else model
    if how == "method":
        model.compile(backend="eager")
    with torch.no_grad():
        plain = compiled(x)
        with watch(compiled, WEIGHTS) as seen:
            torch.testing.assert_close(compiled(x), plain)
    assert [call.layer for call in seen] == ["layers.0.self_attn", "layers.1.self_attn"]


def test_copies_in_threads_have_one_path_and_users_have_their_own_watch():
    model, inputs = nn.Sequential(SelfAttention(8, 4, 4)), [torch.randn(1, LENGTH, 8) for _ in range(4)]
    with watch(model, WEIGHTS) as seen:
        replicas = [model._replicate_for_data_parallel() for _ in inputs]
        for replica in replicas:  # as torch.nn.parallel.replicate does for each device
            replica._modules = {"0": model[0]._replicate_for_data_parallel()}
            replica[0]._modules = model[0]._modules
        threads = [threading.Thread(target=replica, args=(x,)) for replica, x in zip(replicas, inputs, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [(call.layer, call.call) for call in seen] == [("0", 0)] * 4

    def run(x):
        own = copy.deepcopy(model)
        with watch(own, WEIGHTS) as seen_here:
            own(x)
        return seen_here

    with ThreadPoolExecutor(4) as pool:
        assert [len(one) for one in pool.map(run, inputs)] == [1] * 4
    assert not FINDER.watchers
    assert FINDER not in function_modes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "autocast"])
def test_half_precision_and_autocast(dtype):
    layer, x = Calling(lambda x: renamed(x, x, x)), torch.randn(1, HEADS, LENGTH, WIDTH)
    enabled, x = (True, x) if dtype == "autocast" else (False, x.to(dtype))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        plain = layer(x)
        with watch(layer, WEIGHTS) as seen:
            found = layer(x)
    assert found.dtype == plain.dtype
    half = x.to(plain.dtype)
    truth = dense(half.double(), half.double())
    for array, oracle, expected in (
        (found, truth @ half.double(), plain),
        (seen[0]["weights"], truth, dense(half.float(), half.float()).to(half.dtype)),
    ):
        assert array.dtype == half.dtype
        assert_within_budget(array, oracle, expected.float())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_run_again(reentrant):
    model = make_encoder().train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    x = torch.randn(2, LENGTH, 8, requires_grad=True)
    model(x).sum().backward()
    plain, x.grad = x.grad, None
    with watch(model, sightline.entropy()) as seen:
        y = x
        for layer in model.layers:
            y = checkpoint(layer, y, use_reentrant=reentrant)
        y.sum().backward()
    torch.testing.assert_close(x.grad, plain)
    assert [call.step for call in seen.of("layers.0.self_attn")] == [0, 1]


@pytest.mark.parametrize("how", ["backward", "autograd.backward", "autograd.grad"])
def test_checkpointed_functions_run_again(how):
    """torch compares what both runs save. It would end the second run inside of the attention."""
    model = nn.Sequential(Calling(lambda x: checkpoint(lambda y: renamed(y, y, y), x, use_reentrant=False)))
    x = torch.randn(1, HEADS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    differentiate = {
        "backward": lambda loss: loss.backward() or x.grad,
        "autograd.backward": lambda loss: torch.autograd.backward(loss) or x.grad,
        "autograd.grad": lambda loss: torch.autograd.grad(loss, x)[0],
    }[how]
    (plain,) = torch.autograd.grad(model(x).square().sum(), x)
    with watch(model, LSE) as seen:
        found = differentiate(model(x).square().sum())
    torch.testing.assert_close(found, plain)
    assert [(call.layer, call.step) for call in seen] == [("0", 0), ("0", 1)]
    with watch(model, LSE):
        loss = model(x).square().sum()
    with pytest.raises(ParameterError, match=r"the watch of its forward pass has ended(?s:.*)call backward\(\) in"):
        differentiate(loss)


def test_errors_and_interrupts_leave_no_module_running():
    def fail(x, error=None):
        if error is not None:
            raise error
        return renamed(x, x, x)

    model, x = nn.Sequential(Calling(fail)), torch.randn(1, HEADS, LENGTH, WIDTH)
    with watch(model, WEIGHTS) as seen:
        with pytest.raises(ValueError, match="inside"):
            model[0](x, ValueError("inside"))
        model(x)
    assert [call.layer for call in seen] == ["0"]
    with pytest.raises(KeyboardInterrupt), watch(model, WEIGHTS):
        model[0](x, KeyboardInterrupt())
    assert not running_modules.THREAD.stacks
    assert FINDER not in function_modes()


def test_methods_and_calls_of_other_models():
    model, other, x = Program(["method"]), Program(["method"]), torch.randn(1, HEADS, LENGTH, WIDTH)
    with watch(model, WEIGHTS) as seen:
        model.attend(x)
        other(x)
        other.attend(x)
        renamed(x, x, x)
    assert [call.layer for call in seen] == ["Program"]


def test_a_copy_of_a_watched_model_is_not_the_model():
    model, x = nn.Sequential(Program(["method"])), torch.randn(1, HEADS, LENGTH, WIDTH)
    with watch(model, WEIGHTS) as seen:
        other = copy.deepcopy(model)
        other(x)
        model(x)
        stored = pickle.dumps(model[0])
    assert len(seen) == 1
    other(x)
    pickle.loads(stored)(x)
    assert not running_modules.THREAD.stacks
    pickle.dumps(other)


def test_a_cache_of_this_library_and_transforms():
    def attend(x):
        cache = sightline.KVCache(dtype="float32")
        cache.append(x, x)
        return sightline.attention(x[..., -1:, :], cache, mask=sightline.causal(), see=LSE)

    layer, x = Calling(attend), torch.randn(1, HEADS, LENGTH, WIDTH)
    plain = layer(x)
    with watch(layer, WEIGHTS) as seen:
        output, (lse,) = layer(x)
    assert torch.equal(output, plain[0])
    assert torch.equal(lse, plain[1][0])
    assert (seen[0].n, seen[0].m, seen[0]["weights"].shape) == (1, LENGTH, (1, HEADS, 1, LENGTH))
    program = Program(["partial"])
    with pytest.raises(ParameterError, match=r"transform of torch\.func"), watch(program, LSE):
        torch.vmap(program)(x[None])


def test_cross_attention_and_caches():
    model = nn.ModuleDict({name: Calling(lambda q, k: renamed(q, k, k)) for name in ("attn", "cross_attn")})
    x = torch.randn(1, HEADS, LENGTH, WIDTH)
    with watch(model, WEIGHTS) as seen:
        model["attn"](x[..., :4, :], x[..., :4, :])
        model["attn"](x[..., 4:5, :], x[..., :5, :])
        model["attn"](x[..., :2, :], x)
        model["cross_attn"](x, x)
    assert [(call.kind, call.query_start, call.step) for call in seen] == [
        ("self", 0, 0),
        ("self", 4, 1),
        ("cross", 0, 2),
        ("cross", 0, 0),
    ]


def test_layers_by_number_and_attention_by_hand_beside_them():
    class ByHand(nn.Module):
        def forward(self, x):
            scores = (x @ x.transpose(-2, -1) / 2).masked_fill(~CAUSAL, -torch.inf)
            scores = torch.cat([scores, scores[..., :1] * 0], -1)  # a sink
            return functional.dropout(nn.Softmax(-1)(scores)[..., :-1], 0.1) @ x

    model = nn.Sequential(Program(["partial"]), Program(["partial"]), ByHand(), Program(["method"]))
    x = torch.randn(1, HEADS, LENGTH, WIDTH)
    expected = {(0,): "0", (-1,): "3", (-2,): "1", (1, -1): "13", ("[03]", -2): "013"}
    warns = partial(pytest.warns, UserWarning, match=rf"by hand was not recorded: ByHand \({__file__}:\d+\)")
    for layers, paths in expected.items():
        with warns():
            seen = record(model, WEIGHTS, x, layers=layers)
        assert "".join(call.layer for call in seen) == paths
    record(model, WEIGHTS, x, layers="0")  # no warning: the other layers are not asked for
    for program in (model, make_encoder()):
        with pytest.raises(ParameterError, match="nested tensors"):
            record(program, WEIGHTS, torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged))


@pytest.mark.wide
def test_a_model_that_is_first_compiled_in_a_watch():
    program = """
import sys, torch, sightline
model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval() for _ in range(2)])
assert "torch._dynamo" not in sys.modules
with torch.no_grad(), sightline.watch(model, see=sightline.lse()) as seen:
    torch.compile(model[1], backend="eager")(model[0](torch.zeros(1, 3, 8)))
print(*seen.layers, torch._dynamo.eval_frame._stance.stance, torch.compile.__module__)"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0.self_attn", "1.self_attn", "default", "torch"]
