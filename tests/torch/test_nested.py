"""Tests of attention on nested tensors: each sequence gets the results of the sequence alone."""

import itertools

import pytest
import torch
from torch.nn import functional

import sightline
from sightline import b, h, i, j, m, n, s, table
from sightline.call.problem import make_problem
from sightline.errors import DtypeError, KernelRefusedError, MaskError, ParameterError, ShapeError
from sightline.reference.accuracy import compute_baseline
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from sightline.torch import scaled_dot_product_attention

LENGTHS, KEY_LENGTHS = (70, 1, 0, 130), (3, 64, 2, 131)
H, G, D = 4, 2, 8


def drawn(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def offsets_of(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def operands(lengths=LENGTHS, heads=H, dtype=torch.float64):
    """Return the packed values of query, key and value, and the nested tensors of these values."""
    of_query, of_key = offsets_of(LENGTHS), offsets_of(lengths)
    shapes = (H, sum(LENGTHS), D), (heads, sum(lengths), D), (heads, sum(lengths), D - 1)
    values = [drawn(*shape, dtype=dtype, seed=k) for k, shape in enumerate(shapes)]
    offsets = of_query, of_key, of_key
    return values, [
        torch.nested.nested_tensor_from_jagged(x, of, jagged_dim=2) for x, of in zip(values, offsets, strict=True)
    ]


def sequences(values, lengths=LENGTHS):
    """Return (query, key, value) of each sequence."""
    split = [x.split(list(own), dim=1) for x, own in zip(values, (LENGTHS, lengths, lengths), strict=True)]
    return list(zip(*split, strict=True))


ADDED = drawn(130, 131, seed=3)
WIDTHS = torch.tensor([3, 4, 1, 50])

# A problem is a function of the number of the sequence: b for nested tensors, or a number for one sequence.
PROBLEMS = {
    "plain": lambda b: {},
    "causal": lambda b: {"mask": i >= j},
    "aligned at the end": lambda b: {"mask": sightline.causal("lower right")},
    "function": lambda _: {"mask": lambda b, h, i, j: i - j < 20},
    "numbers of the sequence": lambda b: {"mask": (j < table(WIDTHS)[b]) | (i == n - 1), "score": s / m},
    "lengths": lambda b: {"mask": j < int(WIDTHS[b]) if isinstance(b, int) else sightline.padding(WIDTHS)},
    "tables": lambda b: {"score": s + table(ADDED)[i, j] - table(torch.arange(H))[h]},
    "alibi and sinks": lambda b: {"score": sightline.alibi(H), "sinks": torch.arange(4.0, dtype=torch.float64)},
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("name", "cross"), [*[(name, False) for name in PROBLEMS], ("causal", True), ("numbers of the sequence", True)]
)
def test_each_sequence_is_computed_alone(name, cross):
    given = (KEY_LENGTHS, G) if cross else ()
    values, nested = operands(*given)
    leaves = [*values, *([ADDED] if name == "tables" else [])]
    see = [sightline.lse(), sightline.entropy(), sightline.mass(i >= j), sightline.sum(sightline.p * (i - j), over=j)]
    output, seen = sightline.attention(*nested, **PROBLEMS[name](b), see=see)
    assert output.shape == (*nested[0].shape[:3], D - 1)
    assert all(x.shape == nested[0].shape[:3] for x in seen)
    assert output.offsets() is nested[0].offsets()
    found = [x.values() for x in (output, *seen)]
    alone = [
        sightline.attention(*[x[None] for x in own], **PROBLEMS[name](k), see=see, kernel="reference")
        for k, own in enumerate(sequences(values, *given[:1]))
    ]
    expected = [torch.cat([x[0] for x in each], 1) for each in zip(*[(y, *z) for y, z in alone], strict=True)]
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(sum(x[0].sin().sum() for x in each), leaves) for each in (found[:1], expected[:1])]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # torch's function makes some
def test_torchs_function():
    """The function of torch serves neither causal masks nor empty sequences on the CPU."""
    offsets = offsets_of([length for length in LENGTHS if length])
    leaves = [drawn(sum(LENGTHS), H, D, dtype=torch.float32, seed=seed) for seed in range(3)]
    nested = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in leaves]
    pairs = [call(*nested) for call in (scaled_dot_product_attention, functional.scaled_dot_product_attention)]
    torch.testing.assert_close(*[x.values() for x in pairs])
    torch.testing.assert_close(*[torch.autograd.grad(x.values().sin().sum(), leaves) for x in pairs])
    assert (pairs[0] + nested[0]).shape == nested[0].shape  # the nested tensors have the same sequences


def test_the_definition_in_float32():
    values, nested = operands(dtype=torch.float32)
    output = scaled_dot_product_attention(*nested, is_causal=True)
    for own, part in zip(output.values().detach().split(list(LENGTHS), 1), sequences(values), strict=True):
        problem = make_problem(*[x.detach()[None] for x in part], mask=i >= j)
        assert_within_budget(own[None], compute_stages(problem).output, compute_baseline(problem).output)


def test_gradients_reach_a_nested_leaf():
    parts = [drawn(length, 2, D, seed=length).detach() for length in (3, 7)]
    leaf = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    x = leaf.transpose(1, 2)
    sightline.attention(x, x, x, mask=i >= j).values().sin().sum().backward()
    for found, part in zip(leaf.grad.unbind(), parts, strict=True):
        own = part.requires_grad_()
        alone = own.transpose(0, 1)[None]
        expected = torch.autograd.grad(sightline.attention(alone, alone, alone, mask=i >= j).sin().sum(), own)[0]
        torch.testing.assert_close(found, expected)


def test_sequences_without_heads_and_with_gaps():
    padded = drawn(3, 6, D)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([3, 2, 4])
    nested = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)  # the memory has gaps
    output = sightline.attention(nested, nested, nested, mask=i >= j)
    parts = [x[start : start + length] for x, start, length in zip(padded, starts, lengths, strict=True)]
    expected = [sightline.attention(own, own, own, mask=i >= j) for own in parts]
    pair = output.unbind(), expected
    torch.testing.assert_close(*pair)
    torch.testing.assert_close(*[torch.autograd.grad(sum(x.sin().sum() for x in each), padded) for each in pair])


def test_only_the_tiles_of_the_sequences_are_computed():
    lengths = [64] * 64
    x = torch.nested.nested_tensor_from_jagged(torch.zeros(1, 4096, 4), offsets_of(lengths), jagged_dim=2)
    scores = []
    original = sightline.reference.streaming.TileOps.masked

    def masked(ops, s, *rest):
        scores.append(s.numel())
        return original(ops, s, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sightline.reference.streaming.TileOps, "masked", masked)
        sightline.attention(x, x, x, kernel="streaming")
    assert sum(scores) < 4096**2 / 2


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(error, text, *arrays, **options):
    with pytest.raises(error, match=text):
        sightline.attention(*arrays, **options)


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
def test_refusals():
    values, (query, key, value) = operands()
    dense = torch.ones(LENGTHS[-1], LENGTHS[-1], dtype=torch.bool)
    refused(MaskError, "dense array", query, key, value, mask=dense)
    refused(MaskError, "dense array", query, key, value, mask=sightline.dense(dense) & (i >= j))
    refused(MaskError, "dense array", query, key, value, score=sightline.bias(dense.double()))
    with pytest.raises(MaskError, match="dense array"):
        scaled_dot_product_attention(query, key, value, dense)
    other = torch.nested.nested_tensor_from_jagged(values[2], offsets_of(LENGTHS[::-1]), jagged_dim=2)
    refused(ShapeError, "value with offsets", query, key, other)
    lengths = offsets_of(LENGTHS).diff() // 2
    shorter = torch.nested.nested_tensor_from_jagged(values[2], offsets_of(LENGTHS), lengths, jagged_dim=2)
    refused(ShapeError, rf"lengths .* and \[{', '.join(map(str, lengths.tolist()))}\]", query, key, shorter)
    refused(ShapeError, "query dense", values[0], key, value)
    refused(ShapeError, r"transpose\(1, 2\)", *(x.transpose(1, 2) for x in (query, key, value)))
    fewer = torch.nested.nested_tensor_from_jagged(values[0], offsets_of([6, 200]), jagged_dim=2)
    refused(ShapeError, "2 sequences", fewer, key, value)
    strided = torch.nested.nested_tensor([torch.ones(2, length, D) for length in (3, 4)])
    refused(ShapeError, "strided nested", strided, strided, strided)
    refused(DtypeError, "strided layout", strided, strided, strided, layout="BNHD")
    refused(ShapeError, "query jagged, key jagged, value NoneType", query, key)
    refused(ShapeError, "query jagged, key KVCache", query, sightline.KVCache(dtype="float64"))
    refused(ParameterError, "unbind", query, key, value, see=[sightline.weights()])
    with pytest.raises(KernelRefusedError, match="documents"):
        torch.func.grad(lambda x: sightline.attention(x, x, x).values().sum())(query)
    with pytest.raises(DtypeError, match="documents"):
        sightline.explain(query, key, value)


def test_overlapping_sequences_are_refused():
    """Each packed position belongs to one sequence: the last rows of an earlier sequence were those of the next."""
    offsets, lengths = torch.tensor([0, 3, 8]), torch.tensor([5, 5])
    x = torch.nested.nested_tensor_from_jagged(drawn(8, 2, D), offsets, lengths=lengths).transpose(1, 2)
    refused(ShapeError, r"query with offsets \[0, 3, 8\] and lengths \[5, 5\]", x, x, x)


def test_compiled_nested_calls():
    torch.compiler.reset()
    parts = [drawn(length, H, D).detach() for length in (3, 7)]
    nested = [torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)] * 3
    compiled = torch.compile(lambda *x: sightline.attention(*x, mask=i >= j), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*nested).values(), sightline.attention(*nested, mask=i >= j).values())
