"""Random programs of changes of `sightline.transformers.Cache`, beside `DynamicCache`."""

import copy

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from sightline.errors import ParameterError, ShapeError
from sightline.transformers import Cache
from sightline.transformers.decoding_cache import StoredTensor
from tiny_models import make_model


def programs(rng, length):
    """Return random changes of a cache of two layers and three sequences, as functions."""
    batch, stored, new, program = 3, 0, 0, []  # `new` positions since the last crop
    while len(program) < length:
        kind = rng.choice(["append", "step", "step", "reorder", "select", "repeat", "crop", "copy", "reset"])
        if kind in ("append", "step"):
            count = 1 if kind == "step" else int(rng.integers(1, 12))
            x = torch.tensor(rng.normal(size=(2, batch, 2, count, 4)).astype(np.float32)).double()
            program.append(lambda cache, x=x: [cache.update(*x, layer) for layer in range(2)])
            stored, new = stored + count, new + count
        elif kind == "copy":
            program.append(copy.deepcopy)
        elif kind == "reset" and rng.integers(3) == 0:
            program.append(lambda cache: cache.reset())
            stored = new = 0
        elif kind == "reorder" and stored:
            order = torch.tensor(rng.integers(0, batch, batch))
            program.append(lambda cache, order=order: cache.reorder_cache(order))
        elif kind == "select" and stored:
            chosen = torch.tensor(rng.permutation(batch)[: rng.integers(1, batch + 1)])
            chosen = chosen - batch * int(rng.integers(2))  # negative numbers count from the end
            batch = len(chosen)
            chosen = chosen if rng.integers(2) else slice(0, batch)
            program.append(lambda cache, chosen=chosen: cache.batch_select_indices(chosen))
        elif kind == "repeat" and stored and batch < 4:
            batch *= 2
            program.append(lambda cache: cache.batch_repeat_interleave(2))
        elif kind == "crop" and stored > new:
            count = int(rng.integers(min(new, 3) + 1))
            program.append(lambda cache, count=count: cache.crop(-count))
            new = 0
    return program


def run_change(change, cache):
    """Return the result of a change, or the message of transformers' error."""
    try:
        return change(cache)
    except RuntimeError as error:
        return str(error)


def entries(tensor):
    """Return keys or values as a plain tensor: the keys in the cache of a `StoredTensor`."""
    if not isinstance(tensor, StoredTensor):
        return tensor
    assert tensor.shape == tensor.cache.key.shape
    return tensor.cache.key.double()


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("records_past", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Mistral"])
def test_programs_of_changes(name, records_past, seed, dtype):
    """Tensors of float64 whose entries are those of float32, which a cache of float32 stores without a rounding."""
    rng = np.random.default_rng([seed, records_past, len(name)])
    config = make_model(name).config
    caches = [Cache(config=config, dtype=dtype), DynamicCache(config=config)]
    left = []  # the originals of copies, with their contents
    for cache in caches:
        if records_past:
            cache.activate_past_recording()
    for change in programs(rng, 40):
        if change is copy.deepcopy:
            left += [(layer, entries(layer.keys).clone()) for layer in caches[0].layers if layer.keys is not None]
            caches = [copy.deepcopy(cache) for cache in caches]
            continue
        found, expected = (run_change(change, cache) for cache in caches)
        if isinstance(expected, list):
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(entries(ours[0]), theirs[0])
                assert torch.equal(ours[1].cache.value.double() if dtype else ours[1], theirs[1])
        else:
            assert found == expected
        for layer in range(2):
            ours, theirs = (cache.layers[layer] for cache in caches)
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
            assert ours.is_initialized == theirs.is_initialized
            assert ours.get_max_length() == theirs.get_max_length()
            assert ours.keys is None or torch.equal(ours.cache.key[:, :, -1:], entries(ours.keys)[:, :, -1:])
    for layer, before in left:
        assert torch.equal(entries(layer.keys), before)


def test_iteration_and_early_initialization():
    config = make_model("Gemma 3").config
    cache = Cache(config=config)
    cache.early_initialization(3, 2, 4, torch.double, "cpu")
    assert cache.is_initialized
    assert cache.get_seq_length() == 0
    x = torch.randn(3, 2, 4, 4, dtype=torch.double)
    for layer in range(2):
        cache.update(x, -x, layer)
    for keys, values, _ in cache:
        assert torch.equal(keys, x)
        assert torch.equal(values, -x)
    again = DynamicCache(list(cache), config=config)
    assert [layer.get_seq_length() for layer in again.layers] == [4, 4]


def test_positions_that_a_window_has_left_cannot_be_restored():
    cache = Cache(config=make_model("Mistral").config)
    cache.activate_past_recording()
    x = torch.ones(2, 1, 2, 30, 4)
    cache.update(*x, 0)
    cache.update(*x, 1)
    cache.crop(-3)
    with pytest.raises(ParameterError, match="since the last crop"):
        cache.crop(-3)


def test_layers_may_be_skipped():
    """Layers that read the keys of another layer store none."""
    cache, x = Cache(), torch.ones(2, 1, 2, 3, 4)
    for layer in (0, 5, 2, 0, 5, 2):
        cache.update(*x, layer)
    assert [cache.get_seq_length(layer) for layer in range(6)] == [6, 0, 6, 0, 0, 6]


@pytest.mark.parametrize("counts", [[2], [1, 2, 3], [-1, 1], -1, 1.5, "2", None])
def test_a_fork_with_wrong_counts_changes_no_layer(counts):
    cache = Cache(config=make_model("Gemma 3").config)  # the first layer has a window, the second has none
    x = torch.ones(2, 2, 2, 3, 4)
    for layer in range(2):
        cache.update(*x, layer)
    with pytest.raises(ShapeError, match="one for each of 2 sequences"):
        cache.fork(counts)
    assert [len(layer.keys) for layer in cache.layers] == [2, 2]


def test_a_fork_needs_a_prompt():
    for cache in (Cache(), Cache(config=make_model("Gemma 3").config)):
        with pytest.raises(ParameterError, match="=cache\\)"):
            cache.fork(2)
