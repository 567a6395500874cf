"""Options of the public functions: names of statistics, the layout of axes, and arguments of other libraries."""

import jax
import numpy as np
import pytest
import torch

import sightline
from sightline.call.foreign_arguments import CURES, OPTIONS
from sightline.errors import ParameterError, ShapeError, UnknownArgumentError

B, H, N, M, D = 2, 4, 7, 9, 8


@pytest.fixture
def arrays(rng):
    shapes = (B, H, N, D), (B, 2, M, D), (B, 2, M, 5)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def swap(array):
    return array.swapaxes(1, 2)


# -- names of statistics ------------------------------------------------------------------------------------------
def test_a_dict_of_statistics_gives_a_dict_of_results(arrays):
    see = {"uncertainty": sightline.entropy(), "normaliser": sightline.lse()}
    output, seen = sightline.attention(*arrays, see=see)
    expected_output, expected = sightline.attention(*arrays, see=list(see.values()))
    assert list(seen) == ["uncertainty", "normaliser"]
    np.testing.assert_array_equal(output, expected_output)
    for found, wanted in zip(seen.values(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor])
def test_one_statistic_is_a_list_of_one(arrays, convert):
    given = [convert(array) for array in arrays]
    _, (entropy,) = sightline.attention(*given, see=sightline.entropy())
    _, (expected,) = sightline.attention(*given, see=[sightline.entropy()])
    np.testing.assert_array_equal(entropy, expected)


def test_a_dict_of_statistics_has_gradients(arrays):
    query, key, value = (torch.tensor(array, requires_grad=True) for array in arrays)
    _, seen = sightline.attention(query, key, value, see={"spread": sightline.entropy()})
    seen["spread"].sum().backward()
    assert query.grad.abs().sum() > 0


def test_an_empty_dict_gives_an_empty_dict(arrays):
    assert sightline.attention(*arrays, see={})[1] == {}


def test_explain_takes_a_dict(arrays):
    assert sightline.explain(*arrays, see={"all": sightline.weights()}).memory > sightline.explain(*arrays).memory


# -- the layout of the axes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("convert", [np.asarray, torch.tensor, jax.numpy.asarray], ids=["numpy", "torch", "jax"])
def test_positions_before_heads(arrays, convert):
    query, key, value = (convert(array) for array in arrays)
    options = {"mask": sightline.causal(), "see": [sightline.lse()]}
    output, (lse,) = sightline.attention(query, key, value, **options)
    swapped, (same_lse,) = sightline.attention(*map(swap, (query, key, value)), layout="BNHD", **options)
    assert tuple(swapped.shape) == (B, N, H, 5)
    np.testing.assert_array_equal(np.asarray(swap(swapped)), np.asarray(output))
    np.testing.assert_array_equal(np.asarray(lse), np.asarray(same_lse))


def test_positions_before_heads_on_a_cache(arrays):
    query, key, value = arrays
    cache = sightline.KVCache()
    cache.append(key, value)
    output = sightline.attention(swap(query), cache, mask=sightline.causal(), layout="BNHD")
    np.testing.assert_array_equal(swap(output), sightline.attention(query, cache, mask=sightline.causal()))


def test_positions_before_heads_in_explain_and_tiles(arrays):
    swapped = [swap(array) for array in arrays]
    assert str(sightline.explain(*swapped, layout="BNHD")) == str(sightline.explain(*arrays))
    (found,), (expected,) = sightline.tiles(*swapped, layout="BNHD"), sightline.tiles(*arrays)
    np.testing.assert_array_equal(found.weights, expected.weights)
    assert not list(sightline.tiles(arrays[0], arrays[1][..., :0, :]))


def test_an_unknown_layout_is_refused(arrays):
    with pytest.raises(ParameterError, match="layout='bshd'"):
        sightline.attention(*arrays, layout="bshd")


def test_a_layout_with_heads_needs_a_head_axis(arrays):
    with pytest.raises(ShapeError, match=r"query: \(4, 7, 8\)"):
        sightline.attention(*(array[0] for array in arrays), layout="BNHD")


# -- arguments of other libraries ---------------------------------------------------------------------------------
NAMED_IN_CURES = {
    "is_causal": "mask=sightline.causal()",
    "attn_mask": "mask=array",
    "dropout_p": "dropout=0.1",
    "enable_gqa": "multiple of the number of key heads",
    "score_mod": "score=score_mod",
    "block_mask": "mask=mask_mod",
    "return_lse": "see=[sightline.lse()]",
    "window_size": "sightline.window(",
    "softcap": "sightline.softcap(",
    "cu_seqlens": "sightline.documents(",
    "masks": "may mean mask=",
    "dropout_prob": "may mean dropout",
    "zzz": "leave zzz= out",
}


@pytest.mark.parametrize("function", [sightline.attention, sightline.explain, sightline.tiles])
@pytest.mark.parametrize("name", NAMED_IN_CURES)
def test_an_argument_of_another_library_names_the_cure(arrays, function, name):
    with pytest.raises(UnknownArgumentError) as caught:
        function(*arrays, **{name: None})
    assert NAMED_IN_CURES[name] in caught.value.cure
    assert caught.value.allowed == ", ".join(["query, key, value", *[f"{x}=" for x in function.__kwdefaults__]])
    assert f"{function.__name__}(..., {name}=)" in str(caught.value)


def test_a_positional_mask_names_the_cure(arrays):
    with pytest.raises(TypeError, match=r"positional arguments after value: ndarray(.|\n)*mask=\.\.\."):
        sightline.attention(*arrays, np.ones((N, M), bool))


def test_no_cure_stands_for_an_option():
    assert not set(CURES) & set(OPTIONS)


def test_the_options_are_those_of_attention():
    assert tuple(sightline.attention.__kwdefaults__) == OPTIONS


@pytest.mark.parametrize(("function", "name"), [("tiles", "dropout"), ("attention", "source")])
def test_an_option_of_another_function_is_left_out(arrays, function, name):
    with pytest.raises(UnknownArgumentError, match=f"leave {name}= out"):
        getattr(sightline, function)(*arrays, **{name: None})
