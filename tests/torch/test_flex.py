"""Programs that import FlexAttention from sightline, and published functions, compared with torch's results."""

import copy
import functools
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex

import sightline
from flex_functions import MASKS, SCORES, SHAPES, B, D, H, N, Tensors
from gradient_checks import NAMES, differentiated
from sightline.call import call_cache
from sightline.call.problem import make_problem
from sightline.call.validation import read_mask
from sightline.errors import FormulaError, MaskError, ParameterError, ShapeError, TableError
from sightline.formula.tile_ranges import find_blocks
from sightline.reference.accuracy import compute_baseline, gradient_term_sizes, term_sizes
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from sightline.torch import dispatch, flex
from sightline.torch.flex import and_masks, create_block_mask, flex_attention, noop_mask, or_masks

OF_ANY_LENGTH = ["causal", "sliding window", "dilated window", "batchified", "prefix"]
OF_N = [*OF_ANY_LENGTH, "documents", "prefix of each sequence", "padding", "window with sinks", "window of each head"]
LEARNED = ["head bias", "distance bias", "pair bias", "learned temperature", "graph distances", "latent rotary"]
Request = getattr(torch_flex, "AuxRequest", lambda **fields: SimpleNamespace(**({"lse": False} | fields)))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def extent_of(query, key):
    return *query.shape[:3], key.shape[2]


def by_torch(query, key, value, mask=None, score=None, **options):
    """Return the result of torch's own flex_attention, which computes it from dense scores."""
    extent, block_mask = extent_of(query, key), None
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")  # torch advises to compile flex_attention
        if mask is not None:  # torch takes plain functions, and no bound methods
            block_mask = torch_flex.create_block_mask(
                lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx), *extent, "cpu"
            )
        return torch_flex.flex_attention(query, key, value, score, block_mask, enable_gqa=True, **options)


class IndexByTensors(torch.overrides.TorchFunctionMode):
    """Reads tensors at indices that torch.vmap batches."""

    def __torch_function__(self, function, types, inputs=(), kwargs=None):
        if function is torch.Tensor.__getitem__ and not isinstance(inputs[1], int | slice):
            index = inputs[1] if isinstance(inputs[1], tuple) else (inputs[1],)
            if all(isinstance(part, torch.Tensor) for part in index):
                return torch.ops.aten.index(inputs[0], index)
        return function(*inputs, **(kwargs or {}))


def at_all_pairs(function, extent, *scores):
    """Return the values of a mask or score function at all (b, h, i, j)."""
    for axis in (3, 2, 1, 0):
        index_dims = [None] * 4
        index_dims[axis] = 0
        function = torch.vmap(function, in_dims=(*[0] * len(scores), *index_dims))
    with IndexByTensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some functions have no rule of vmap's own
        return function(*scores, *map(torch.arange, extent))


def by_definition(query, key, value, mask=None, score=None):
    extent = extent_of(query, key)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores if score is None else at_all_pairs(score, extent, scores)
    allowed = at_all_pairs(mask or noop_mask, extent).broadcast_to(extent)
    weights = torch.softmax(torch.where(allowed, scores, torch.finfo(scores.dtype).min), -1) * allowed
    return weights @ value


def gradients(attention, inputs, d_output, functions, learned):
    inputs = [x.detach().to(d_output.dtype).requires_grad_() for x in inputs]
    return torch.autograd.grad(attention(*inputs, **functions), [*inputs, *learned], d_output, retain_graph=True)


def check_gradients(attention, problem, inputs, d_output, functions, learned, definition):
    found = gradients(attention, inputs, d_output, functions, learned)
    truth = gradients(by_definition, inputs, d_output.double(), *definition)
    seed = (d_output.numpy(), *(np.zeros((*d_output.shape[:3], *shape)) for shape in ((), (problem.m,))))
    tables = [entry.array.detach().numpy() for entry in problem.tables]
    detached = replace(problem.with_tables(tables), **{name: x.numpy() for name, x in zip(NAMES, inputs, strict=True)})
    sizes = gradient_term_sizes(detached, seed[0])
    rough = [differentiated(detached, [seed], "float32", order)[0] for order in range(4)]
    for k, name in enumerate(NAMES):
        assert_within_budget(found[k], truth[k].numpy(), [one[k] for one in rough], name, sizes[name])
    floats = [k for k, entry in enumerate(problem.tables) if entry.kind == "float"]

    def of_learned(of_tables, leaf):
        """Return the gradient of a learned tensor from the gradients of the tables that were computed from it."""
        total = torch.zeros_like(leaf)
        for k, gradient in zip(floats, of_tables, strict=True):
            array = problem.tables[k].array
            if array.requires_grad:
                seed = torch.as_tensor(np.asarray(gradient), dtype=leaf.dtype)
                (one,) = torch.autograd.grad(array, leaf, seed, retain_graph=True, allow_unused=True)
                total = total if one is None else total + one
        return total.numpy()

    for place, leaf in enumerate(learned, 3):
        terms = of_learned([sizes[k] for k in floats], leaf)
        orders = [of_learned(one[3:], leaf) for one in rough]
        assert_within_budget(found[place], truth[place].double().numpy(), orders, "learned tensor", terms)


def operands(n, m=None, heads=H, key_heads=H, batch=B, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n)
    shapes = (heads, n), (key_heads, m or n), (key_heads, m or n), (heads, n)
    return [torch.randn(batch, *shape, D, generator=generator).to(dtype) for shape in shapes]


def by_flex(query, key, value, mask=None, score=None, **options):
    block_mask = None if mask is None else create_block_mask(mask, *query.shape[:3], key.shape[2])
    return flex_attention(query, key, value, score, block_mask, enable_gqa=True, **options)


def drawn(seed, dtype):
    """Return ({role: function}, learned tensors, (n, m), key heads), the same functions for every dtype."""
    rng, tensors = np.random.default_rng(seed), Tensors(dtype)
    n, m = (N, N) if seed % 3 else rng.integers(1, 200, 2).tolist()
    one, two = (MASKS[name] for name in rng.choice(OF_N if seed % 3 else OF_ANY_LENGTH, 2))
    functions = {"mask": [and_masks, or_masks][seed % 2](one, two)}
    if seed % 4:
        score = rng.choice(LEARNED if seed % 3 else ["alibi", "softcap", "head bias", "relative positions"])
        functions["score"] = SCORES[score](tensors)
    return functions, tensors.learned, (n, m), int(rng.choice([1, 2, H]))


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", range(12))
def test_drawn_functions(seed):
    functions, learned, lengths, key_heads = drawn(seed, torch.float32)
    *inputs, d_output = operands(*lengths, key_heads=key_heads)
    check_functions(by_flex, by_flex, inputs, d_output, (functions, learned), drawn(seed, torch.float64)[:2])


CASES = [("mask", name) for name in MASKS] + [("score", name) for name in SCORES]


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(("role", "name"), CASES, ids=map(" ".join, CASES))
def test_published_functions(role, name):
    *inputs, d_output = operands(*SHAPES.get(name, (N, N)))
    place = CASES.index((role, name))  # a third of the outputs and a ninth of the gradients come from generated kernels
    attention, differentiated_attention = (
        functools.partial(sightline.attention, kernel="streaming" if place % share else "cpu") for share in (3, 9)
    )

    def make(dtype):
        tensors = Tensors(dtype)
        return {role: MASKS[name] if role == "mask" else SCORES[name](tensors)}, tensors.learned

    check_functions(attention, differentiated_attention, inputs, d_output, make(torch.float32), make(torch.float64))


def test_published_functions_compile_to_one_graph():
    """Reads of several axes, of a tensor of one number, and of entries whose values torch.compile does not know."""
    document, first, sinks = torch.tensor([[0, 0, 1], [0, 1, 1]]), torch.tensor([1]), torch.tensor([0, 2])

    def mask(b, h, q_idx, kv_idx):
        is_seen = (kv_idx >= first[0]) | torch.isin(kv_idx, sinks) & noop_mask(b, h, q_idx, kv_idx)
        return is_seen & (document[b, q_idx] == document[b, kv_idx])

    query, key, value = (torch.randn(2, 1, 3, 4) for _ in range(3))
    compiled = torch.compile(sightline.attention, backend="eager", fullgraph=True)
    found, expected = (call(query, key, value, mask=mask) for call in (compiled, sightline.attention))
    assert torch.equal(found, expected)


def test_enough_functions_are_published():
    assert len(MASKS) >= 30
    assert len(SCORES) >= 30


def check_functions(attention, differentiated_attention, inputs, d_output, given, definition):
    """Compare output and gradients; `given` and `definition` are (functions, learned tensors) of two dtypes."""
    functions, learned = given
    check_output(attention(*inputs, **functions).detach(), inputs, definition[0], **functions)
    problem = make_problem(*inputs, **functions)
    check_gradients(differentiated_attention, problem, inputs, d_output, functions, learned, definition)


def check_output(output, inputs, definition=None, **functions):
    """Compare the output with that of torch's flex_attention in float64."""
    problem = make_problem(*inputs, **functions)
    sizes = term_sizes(problem, compute_stages(problem).weights)
    truth = by_torch(*(x.double() for x in inputs), **(definition or functions)).detach()
    assert_within_budget(output, truth.numpy(), compute_baseline(problem).output, "output", sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_lse_and_the_largest_scores(dtype):
    """The kind of each result is torch's, and so are the values of a query without visible keys."""
    query, key, value, _ = operands(40, dtype=dtype)

    def mask(b, h, q_idx, kv_idx):
        return causal(b, h, q_idx, kv_idx) & (q_idx != 3)

    output, aux = by_flex(query, key, value, mask, return_aux=Request(lse=True, max_scores=True))
    theirs, lse = by_torch(query, key, value, mask, return_lse=True)
    assert (output.dtype, aux.lse.dtype, aux.max_scores.dtype) == (theirs.dtype, lse.dtype, lse.dtype)
    check_output(output, (query, key, value), mask=mask)
    torch.testing.assert_close(aux.lse, lse)
    allowed = at_all_pairs(mask, (B, H, 40, 40))
    scores = (query.to(lse.dtype) @ key.to(lse.dtype).mT / D**0.5).masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(aux.max_scores, scores.amax(-1))
    aux = by_flex(query.requires_grad_(), key, value, mask, return_aux=Request(max_scores=True))[1]
    assert (aux.lse, aux.max_scores.requires_grad) == (None, False)


def test_lse_has_its_gradient():
    query, key, value, _ = operands(20)
    query.requires_grad_()
    lse = by_flex(query, key, value, causal, return_lse=True)[1]
    weights = torch.softmax((query @ key.mT / D**0.5).masked_fill(~torch.ones(20, 20).tril().bool(), -torch.inf), -1)
    torch.testing.assert_close(torch.autograd.grad(lse.sum(), query)[0], weights @ key / D**0.5)


def test_a_shared_prefix_is_computed_once():
    """Attention to a prefix and to the rest, merged by lse, is attention to both."""
    query, key, value, _ = operands(90)
    rest = slice(30, 90)
    block_mask = create_block_mask(causal, 1, 1, 60, 60, device=query.device, BLOCK_SIZE=128)
    near, near_lse = flex_attention(*(x[:, :, rest] for x in (query, key, value)), None, block_mask, return_lse=True)
    far, far_lse = flex_attention(query[:, :, rest], key[:, :, :30], value[:, :, :30], return_lse=True)
    share = torch.sigmoid(near_lse - far_lse)[..., None]
    torch.testing.assert_close(share * near + (1 - share) * far, by_torch(query, key, value, causal)[:, :, rest])


# -- block masks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "dilated window", "documents", "padding", "spatial heads", "no mask"])
def test_blocks_are_those_of_torch(name):
    mask = MASKS[name]
    ours, theirs = (create(mask, B, H, N, N, "cpu", 4) for create in (create_block_mask, torch_flex.create_block_mask))
    assert (ours.shape, ours.BLOCK_SIZE, ours.seq_lengths) == (theirs.shape, theirs.BLOCK_SIZE, theirs.seq_lengths)
    assert torch.equal(ours.to_dense(), theirs.to_dense().to(torch.int32))
    assert ours.sparsity() == pytest.approx(theirs.sparsity(), abs=1e-4)  # torch's is float32
    assert f"sparsity={ours.sparsity():.2f}%" in str(ours)


def test_blocks_of_unequal_sides_and_lengths_that_they_do_not_divide():
    mask = create_block_mask(causal, None, None, 10, 30, BLOCK_SIZE=(4, 16))
    assert mask.to_dense().tolist() == [[[[1, 0], [1, 0], [1, 0]]]]
    assert mask.sparsity() == 50


@pytest.mark.parametrize(
    ("name", "fault", "check"),
    [
        ("read_mask", lambda mask: read_mask(mask).rewrite({"j": sightline.j + 1}), lambda: test_drawn_functions(2)),
        ("LSE", sightline.entropy(), test_a_shared_prefix_is_computed_once),
        ("find_blocks", lambda *inputs: find_blocks(*inputs).mT, lambda: test_blocks_are_those_of_torch("causal")),
    ],
)
def test_planted_faults(monkeypatch, name, fault, check):
    monkeypatch.setattr(flex, name, fault)
    with pytest.raises(AssertionError):
        check()


def test_a_mask_of_a_long_sequence_needs_no_memory_of_its_square():
    assert create_block_mask(causal, 1, 1, 96_000, 96_000).sparsity() == pytest.approx(50, abs=0.1)


@pytest.mark.parametrize("name", ["causal", "documents", "padding"])
def test_block_masks_of_torch_and_other_masks_are_taken(name):
    mask = MASKS[name]
    query, key, value, _ = operands(N)
    expected = by_flex(query, key, value, mask)
    own = create_block_mask(mask, B, None, N, N)
    of_torch = torch_flex.create_block_mask(mask, B, None, N, N, device="cpu")
    for given in (of_torch, own.formula, mask, create_block_mask(own.formula, None, None, N, N)):
        assert torch.equal(flex_attention(query, key, value, block_mask=given), expected)
    assert torch.equal(sightline.attention(query, key, value, mask=own), expected)
    assert torch_flex.create_block_mask(own.mask_mod, *own.shape, device="cpu").shape == own.shape


def test_layers_that_share_a_mask_repeat_a_cached_call(monkeypatch):
    mask = create_block_mask(MASKS["documents"], None, None, N, N)
    query, key, value, _ = operands(N)
    first = flex_attention(query, key, value, block_mask=mask)

    def refuse(*_, **__):
        raise AssertionError("a conversion, or the full dispatch")

    monkeypatch.setattr(dispatch, "run", refuse)
    monkeypatch.setattr(call_cache.FirstCall, "store", refuse)
    monkeypatch.setattr("sightline.formula.from_function.to_formula", refuse)
    assert torch.equal(flex_attention(query, key, value, block_mask=mask), first)
    assert not torch.equal(flex_attention(key, query, value, block_mask=mask), first)


def test_tensors_that_a_mask_reads_are_read_at_each_call():
    document, offset = torch.zeros(8, dtype=torch.int64), torch.tensor(0)
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: (document[q_idx] == document[kv_idx]) & (q_idx + offset >= kv_idx), 1, 1, 8, 8
    )
    query, key, value, _ = operands(8)
    for shift in (2, 5):
        document[shift:] = shift
        offset.fill_(shift)
        expected = by_torch(query, key, value, mask.mask_mod)
        torch.testing.assert_close(flex_attention(query, key, value, block_mask=mask), expected)


def test_decoding_with_slices_of_a_mask():
    """The loop of gpt-fast: the rows of the newest block of queries, with the position added to q_idx."""
    query, key, value, _ = operands(40)
    whole = create_block_mask(causal, 1, 1, 40, 40, BLOCK_SIZE=8)
    position = torch.tensor([0])
    for step in range(40):
        position.fill_(step)
        mask = whole[:, :, position // whole.BLOCK_SIZE[0]]
        with pytest.raises(MaskError, match="slice of a BlockMask"):
            flex_attention(query, key, value, block_mask=mask)
        first = position[0]
        mask.mask_mod = lambda b, h, q_idx, kv_idx, first=first: whole.mask_mod(b, h, q_idx + first, kv_idx)
        mask.seq_lengths = (1, 40)
        found = flex_attention(query[:, :, step : step + 1], key, value, block_mask=mask)
        torch.testing.assert_close(found, by_torch(query, key, value, causal)[:, :, step : step + 1])
    assert repr(whole[0]) == "BlockMask(without mask_mod, shape=(1, 1, 40, 40))"


def test_what_programs_read_of_a_mask():
    mask = create_block_mask(causal, 3, 4, 1000, 1000)
    assert (mask.shape, mask.numel()) == ((3, 4, 1000, 1000), 12_000_000)
    assert mask[1].shape == mask[-1].shape == (1, 4, 1000, 1000)
    assert mask[0:2, torch.tensor([0, 2, 3])].shape == (2, 3, 1000, 1000)
    assert mask[:, torch.tensor([1])].shape == (3, 1, 1000, 1000)
    assert mask.to("cpu") is mask
    assert mask._adjust(10, 20).shape == (3, 4, 10, 20)
    assert mask._adjust(10, 20).formula is mask.formula is copy.copy(mask).formula
    assert repr(mask) == "BlockMask(i ≥ j, shape=(3, 4, 1000, 1000))"
    with pytest.raises(AttributeError, match=r"kv_num_blocks(?s:.)*cure: +torch's create_block_mask"):
        _ = mask.kv_num_blocks


def test_other_names_are_those_of_torch():
    from sightline.torch.flex import _DEFAULT_SPARSE_BLOCK_SIZE, create_mask

    assert create_mask is torch_flex.create_mask
    assert _DEFAULT_SPARSE_BLOCK_SIZE == 128
    assert noop_mask is torch_flex.noop_mask
    with pytest.raises(ImportError):
        from sightline.torch.flex import no_such_name  # noqa: F401


# -- wrong use ---------------------------------------------------------------------------------------------------------


def branch(b, h, q_idx, kv_idx):
    if q_idx >= kv_idx:
        return q_idx < 5
    return kv_idx < 5


def running_sum(b, h, q_idx, kv_idx):
    total = torch.cumsum(q_idx, 0)
    return total >= kv_idx


def value_of_a_tensor(b, h, q_idx, kv_idx):
    return torch.tensor(3) * q_idx.nonexistent() > 0


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (branch, FormulaError, "`if`.*in line [0-9]+ of test_flex.py: if q_idx >= kv_idx"),
        (running_sum, FormulaError, "torch.cumsum of a formula, in line [0-9]+ of test_flex.py: total = torch.cumsum"),
        (value_of_a_tensor, FormulaError, "nonexistent.*in line [0-9]+ of test_flex.py: return torch.tensor"),
        (lambda b, h, q_idx, kv_idx: causal(b, h, q_idx, kv_idx).item(), FormulaError, "item.*in line .*item"),
        (lambda score, b, h, q_idx, kv_idx: score, FormulaError, "5 arguments"),
        (lambda b, h, q_idx, kv_idx: q_idx - kv_idx, MaskError, "a number"),
        (lambda b, h, q_idx, kv_idx: torch.arange(9)[kv_idx] > 3, TableError, "shape \\(9,\\)"),
        (torch.ones(10, 10), MaskError, "mask_mod is a Tensor"),
        (None, MaskError, "mask_mod is a NoneType"),
    ],
)
def test_functions_that_are_no_masks_are_refused_at_the_door(mask, error, message):
    with pytest.raises(error, match=message):
        create_block_mask(mask, None, None, 10, 10)


@pytest.mark.parametrize("changed", [{"Q_LEN": -1}, {"B": 2.5}, {"KV_LEN": "10"}, {"BLOCK_SIZE": 0}])
def test_lengths_that_are_no_lengths(changed):
    with pytest.raises(ParameterError, match=next(iter(changed))):
        create_block_mask(causal, **({"B": None, "H": None, "Q_LEN": 10, "KV_LEN": 10} | changed))


@pytest.mark.parametrize(
    ("shapes", "mask", "message"),
    [
        ([(4, 8, D)] * 3, None, "four axes"),
        ([(1, 4, 8, D), (1, 2, 8, D), (1, 2, 8, D)], None, "enable_gqa=True"),
        ([(1, 4, 8, D)] * 3, (None, None, 9, 8), r"create_block_mask\(mask_mod, B, H, 8, 8\)"),
        ([(3, 4, 8, D)] * 3, (2, None, 8, 8), "B=2 and H=1, a query with B=3 and H=4"),
        ([(3, 4, 8, D)] * 3, (3, 2, 8, 8), "H=2"),
    ],
)
@pytest.mark.parametrize("create", [create_block_mask, functools.partial(torch_flex.create_block_mask, device="cpu")])
def test_shapes_that_torch_refuses(shapes, mask, message, create):
    block_mask = None if mask is None else create(causal, *mask)
    with pytest.raises(ShapeError, match=message):
        flex_attention(*map(torch.zeros, shapes), block_mask=block_mask)


def test_options_of_kernels_are_ignored_and_two_kinds_of_lse_refused(recwarn):
    query, key, value, _ = operands(8)
    flex_attention(query, key, value, return_lse=True, kernel_options={"BLOCK_M": 32})
    assert not recwarn.list
    with pytest.raises(ParameterError, match="return_lse and return_aux"):
        flex_attention(query, key, value, return_lse=True, return_aux=Request(lse=True))


# -- programs around the call ------------------------------------------------------------------------------------------


def test_programs_that_compile_the_functions():
    query, key, value, d_output = operands(N)
    bias, document = torch.randn(H, requires_grad=True), torch.arange(N) // 7

    def score(score, b, h, q_idx, kv_idx):
        return score + bias[h] * (q_idx - kv_idx)

    def model(query, document, create=create_block_mask, attend=flex_attention):
        def same(b, h, q_idx, kv_idx):
            return document[q_idx] == document[kv_idx]

        mask = create(and_masks(causal, same), None, None, query.shape[2], query.shape[2], _compile=True)
        output = attend(query, key, value, score_mod=score, block_mask=mask)
        return output, *torch.autograd.grad(output, [query, bias], d_output)

    compile_whole = functools.partial(torch.compile, backend="eager", fullgraph=True)
    query.requires_grad_()
    expected = model(query, document)
    for found in (
        model(query, document, compile_whole(create_block_mask, dynamic=True), compile_whole(flex_attention)),
        model(query, document, attend=compile_whole(functools.partial(flex_attention, enable_gqa=True))),
    ):
        assert all(map(torch.equal, found, expected))
    inside = compile_whole(lambda x, n: flex_attention(x, x, x, None, create_block_mask(causal, None, None, n, n)))
    for n in (N, N - 3, N - 5):
        x = query.detach()[:, :, :n]
        with torch.compiler.set_stance("fail_on_recompile" if n == N - 5 else "default"):
            found = inside(x, n)
        assert torch.equal(found, flex_attention(x, x, x, block_mask=create_block_mask(causal, None, None, n, n)))


def test_masks_of_one_form_share_a_compiled_graph():
    """Another document in every step, and another length: one graph, and one more when lengths become symbols."""
    torch.compiler.reset()  # the tests share the code that they compile
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter, fullgraph=True)
    for step in range(12):
        document = torch.arange(70 + step) // (10 + step)
        mask = create_block_mask(
            lambda b, h, q_idx, kv_idx, document=document: document[q_idx] == document[kv_idx], 1, 1, *[70 + step] * 2
        )
        query, key, value, _ = operands(70 + step)
        found, expected = (attend(query, key, value, block_mask=mask) for attend in (compiled, flex_attention))
        assert torch.equal(found, expected)
    assert counter.frame_count == 2


def test_transforms_of_torch_func():
    *inputs, _ = operands(N)
    samples = torch.stack([torch.stack(inputs)] * 3)
    slopes, document = torch.rand(3, H), torch.stack([torch.arange(N) // size for size in (3, 5, 7)])

    def loss(slopes, inputs, document):
        mask = create_block_mask(lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx], None, None, N, N)
        score = lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs()  # noqa: E731
        return flex_attention(*inputs, score, mask).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(slopes, samples, document)
    for k in range(3):
        own = slopes[k].requires_grad_()
        torch.testing.assert_close(found[k], torch.autograd.grad(loss(own, samples[k], document[k]), own)[0])


def test_a_learned_bias_is_trained():
    """A bias of each head and distance, learned from outputs of torch's own flex_attention."""
    torch.manual_seed(0)
    query, key, value, _ = operands(N)
    true_bias = torch.randn(H, 2 * N)
    mask = create_block_mask(causal, None, None, N, N)

    def score_with(bias):
        return lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx - kv_idx + N]

    target = by_torch(query, key, value, causal, score_with(true_bias))
    bias = torch.nn.Parameter(torch.zeros(H, 2 * N))
    optimizer = torch.optim.Adam([bias], 0.1)
    losses = []
    for _ in range(100):
        loss = (flex_attention(query, key, value, score_with(bias), mask) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 100
