"""Arrays whose entries repeat along axes of stride 0 are converted without a copy of each repetition."""

import ml_dtypes
import numpy as np
import pytest
import torch

import sightline
from sightline.arrays.operations import JAX, NUMPY, TORCH, convert, drop_repeats, framework, map_entries, to_numpy
from sightline.cpu.launch.arguments import convert_table

MILLION = 10**6
ROW = np.arange(3) - 1.0
REPEATED = {  # by name: an array whose entries repeat, and the array without repetitions
    "NumPy": (np.broadcast_to(ROW[:, None, None], (4, 3, MILLION, MILLION)), ROW.reshape(1, 3, 1, 1)),
    "NumPy, reversed": (np.broadcast_to(ROW[::-1], (MILLION, MILLION, 3)), ROW[::-1].reshape(1, 1, 3)),
    "torch": (torch.from_numpy(ROW).expand(MILLION, MILLION, 3), ROW.reshape(1, 1, 3)),
    "torch, bfloat16": (torch.from_numpy(ROW).bfloat16().expand(MILLION, MILLION, 3), ROW.reshape(1, 1, 3)),
    "nothing repeats": (ROW, ROW),
    "an axis of length 1": (np.broadcast_to(ROW, (1, 3)), ROW.reshape(1, 3)),
    "no entries": (np.broadcast_to(np.zeros((0, 1)), (0, MILLION)), np.zeros((0, 1))),
}


def test_the_class_of_an_array_names_its_library():
    tracer, other = (type("Array", (), {"__module__": name})() for name in ("jaxlib.not_loaded", "other.arrays"))
    arrays = torch.nn.Parameter(torch.zeros(1)), np.ma.zeros(1), np.float32(1), tracer
    assert [framework(array) for array in arrays] == [TORCH, NUMPY, NUMPY, JAX]
    assert framework(other) is framework(type(other)())


@pytest.mark.parametrize("name", REPEATED)
def test_repetitions_are_neither_copied_nor_converted(name):
    array, entries = REPEATED[name]
    np.testing.assert_array_equal(to_numpy(drop_repeats(array)), entries)
    sizes = []
    doubled = map_entries(lambda part: sizes.append(tuple(part.shape)) or part * 2, array)
    assert sizes == [entries.shape]
    assert doubled.shape == array.shape
    np.testing.assert_array_equal(to_numpy(drop_repeats(doubled)), 2 * entries)


@pytest.mark.parametrize("like", [np.zeros(1), torch.zeros(1)], ids=["NumPy", "torch"])
@pytest.mark.parametrize("name", REPEATED)
def test_converted_arrays_repeat_as_before(name, like):
    array, entries = REPEATED[name]
    found = convert(array, like)
    assert isinstance(found, type(like))
    assert tuple(found.shape) == tuple(array.shape)
    np.testing.assert_array_equal(to_numpy(drop_repeats(found)), entries)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint32, np.int64, np.float16, ml_dtypes.bfloat16, np.float64])
def test_tables_of_the_cpu_kernels_repeat_as_before(dtype):
    row = np.array([0, 1, 1], dtype)
    found = convert_table(np.broadcast_to(row, (MILLION, MILLION, 3)))
    assert found.shape == (MILLION, MILLION, 3)
    assert found.strides[:2] == (0, 0)
    np.testing.assert_array_equal(found[-1, 0], row.astype(found.dtype))


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float64", "bfloat16 of torch"])
def test_attention_with_a_mask_or_bias_that_repeats(dtype, rng):
    """A full copy of the array would take 1 to 8 TB. `window` makes almost all tiles empty."""
    x = rng.normal(size=(MILLION, 4)).astype(np.float32)
    row = torch.from_numpy(rng.normal(size=MILLION) * 3)
    row = row.bfloat16() if "torch" in dtype else row.numpy().astype(dtype)

    def output(array):
        if dtype == "bool":
            return sightline.attention(x, x, x, mask=sightline.dense(array) & sightline.window(2))
        return sightline.attention(x, x, x, score=sightline.bias(array), mask=sightline.window(2))

    shape = (MILLION, MILLION)
    found = output(row.expand(shape) if isinstance(row, torch.Tensor) else np.broadcast_to(row, shape))
    np.testing.assert_array_equal(found, output(row[None]))
