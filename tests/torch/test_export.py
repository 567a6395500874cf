"""Tests of torch.export: an exported program is stored, loaded and run with other lengths."""

import io

import pytest
import torch
from torch.export import Dim

import sightline
from sightline import b, h, i, j, s, table
from sightline.torch import MultiHeadAttention
from torch_calls import drawn
from watched_modules import Calling

B, N = Dim("B"), Dim("N")


class Padded(torch.nn.Module):
    """Attention with lengths as an input, learned slopes, and a statistic."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(drawn(4, seed=9))

    def forward(self, query, key, value, lengths):
        mask = (i >= j) & (j < table(lengths)[b])
        score = s - table(self.slopes)[h] * (i - j)
        output, (entropy,) = sightline.attention(query, key, value, mask=mask, score=score, see=[sightline.entropy()])
        return output, entropy


def stored(program):
    """Return the module of the program after a round trip through a file."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_a_module_with_tables_and_changing_lengths(strict):
    torch.compiler.reset()
    module = Padded()
    example = [*[drawn(2, 4, 9, 8, seed=seed) for seed in range(3)], torch.tensor([3, 9])]
    shapes = [{0: B, 2: N}] * 3 + [{0: B}]
    run = stored(torch.export.export(module, tuple(example), dynamic_shapes=shapes, strict=strict))
    for batch, length in ((2, 9), (3, 12), (1, 70)):
        given = [drawn(batch, 4, length, 8, seed=seed) for seed in range(3)]
        lengths = torch.arange(2, 2 + batch)
        torch.testing.assert_close(run(*given, lengths), module(*given, lengths), rtol=0, atol=0)


def test_a_module_that_reads_a_cache():
    cache, x = sightline.KVCache(), drawn(2, 4, 9, 8)
    cache.append(x, x)

    reader = Calling(lambda query: sightline.attention(query, cache))
    assert torch.equal(torch.export.export(reader, (x,), strict=False).module()(x), reader(x))


def test_a_layer():
    layer = MultiHeadAttention(8, 2, batch_first=True)
    x, padding = drawn(2, 9, 8), torch.arange(9) > torch.tensor([[3], [8]])
    shapes = {"query": {0: B, 1: N}, "key": {0: B, 1: N}, "value": {0: B, 1: N}, "key_padding_mask": {0: B, 1: N}}
    run = stored(torch.export.export(layer, (x, x, x), {"key_padding_mask": padding}, dynamic_shapes=shapes))
    for batch, length in ((2, 9), (3, 20)):
        x = drawn(batch, length, 8)
        padding = torch.arange(length) > torch.arange(4, 4 + batch)[:, None]
        found, expected = (one(x, x, x, key_padding_mask=padding) for one in (run, layer))
        assert torch.equal(found[0], expected[0])


@pytest.mark.wide
def test_a_compiled_module_with_a_parameter_as_a_table():
    torch.compiler.reset()
    module = Padded()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 9), (3, 12)):
        given = [drawn(batch, 4, length, 8, seed=seed) for seed in range(3)]
        results = [one(*given, torch.arange(2, 2 + batch)) for one in (compiled, module)]
        torch.testing.assert_close(*results)
        gradients = [torch.autograd.grad(output.sin().sum(), module.slopes) for output, _ in results]
        torch.testing.assert_close(*gradients)


def test_a_batch_size_that_depends_on_data_is_exported():
    def attend(x, lengths, allowed):
        x, lengths, allowed = (each[lengths.nonzero()[:, 0]] for each in (x, lengths, allowed))
        return sightline.attention(x, x, x, mask=sightline.padding(lengths) & sightline.dense(allowed))

    x, allowed = torch.randn(4, 2, 5, 8), torch.ones(4, 1, 5, 5, dtype=torch.bool).tril()
    program = torch.export.export(Calling(attend), (x, torch.tensor([3, 0, 5, 1]), allowed)).module()
    for lengths in ([3, 0, 5, 1], [0, 0, 2, 0], [1, 2, 3, 4]):
        given = x, torch.tensor(lengths), allowed
        assert torch.equal(program(*given), attend(*given))
