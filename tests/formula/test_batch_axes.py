"""The leading axes of dense arrays broadcast to the batch axes of query, key and value, without copies."""

import itertools

import numpy as np
import pytest
import torch

import sightline
from sightline import bias, dense
from sightline.arrays.operations import convert, to_numpy
from sightline.call.problem import make_problem
from sightline.errors import ShapeError
from sightline.formula.batch_axes import BatchAxes
from sightline.formula.evaluate_array import evaluate_dense
from strategies import ON_HOST

BATCH_SHAPE, H, N, M = (2, 3), 2, 5, 7
LEADING = [(2, 3), (1, 3), (2, 1), (1, 1), (1, 2, 3), (1, 1, 2, 1)]


@pytest.mark.parametrize("batch_shape", list(itertools.product([1, 2, 3], repeat=3)))
def test_the_index_is_that_of_a_broadcast_array(batch_shape):
    for kept in itertools.product([False, True], repeat=3):
        lengths = tuple(length if one else 1 for length, one in zip(batch_shape, kept, strict=True))
        expected = np.broadcast_to(np.arange(np.prod(lengths)).reshape(lengths), batch_shape).ravel()
        for leading in (lengths, (1, *lengths), *([lengths[1:]] if lengths[0] == 1 else [])):
            axes = BatchAxes(leading, leading)
            assert axes.fits(batch_shape)
            found = evaluate_dense(axes.index(batch_shape), (expected.size, 1, 1, 1)).ravel()
            np.testing.assert_array_equal(found, expected)


def test_the_index_of_an_array_with_every_batch_axis_is_b():
    assert BatchAxes((2, 3), (2, 3)).index((2, 3)) is sightline.b
    assert str(BatchAxes((1, 1), (1, 1)).index((1, 1))) == "0"
    assert str(BatchAxes((2, 1), (2, 1)).index((2, 3))) == "b // 3"
    assert str(BatchAxes((1, 3), (1, 3)).index((2, 3))) == "b mod 3"


@pytest.fixture
def arrays(rng):
    """query, key and value, whose leading axes broadcast to `BATCH_SHAPE`."""
    shapes = (2, 1, H, N, 4), (1, 3, H, M, 4), (3, H, M, 6)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("like", [np.zeros(1), torch.zeros(1)], ids=["NumPy", "torch"])
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("kernel", ON_HOST, ids=lambda kernel: kernel.name)
def test_leading_axes_broadcast(arrays, rng, kernel, leading, like):
    query, key, value = (convert(array, like) for array in arrays)
    added = rng.normal(size=(*leading, 1, N, M)).astype(np.float32)
    allowed = rng.random((*leading, H, N, 1)) < 0.7

    def outputs(added, allowed):
        options = {"kernel": kernel.name, "see": [sightline.mass(allowed)]}
        output, (mass,) = sightline.attention(query, key, value, mask=allowed, score=bias(added), **options)
        return to_numpy(output), to_numpy(mass)

    whole = (np.broadcast_to(x[(0,) * (x.ndim - 5)], (2, 3, *x.shape[-3:])) for x in (added, allowed))
    merged = [convert(x.reshape(6, *x.shape[-3:]), like) for x in whole]
    for found, expected in zip(outputs(convert(added, like), convert(allowed, like)), outputs(*merged), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("leading", LEADING)
def test_nothing_is_copied(arrays, leading):
    own = np.zeros((*leading, H, N, M))
    expanded = np.broadcast_to(own, (*(1,) * (len(leading) - 2), 2, 3, H, N, M))
    for added in (own, expanded, torch.from_numpy(own).expand(expanded.shape)):
        (table,) = make_problem(*arrays, score=bias(added)).tables
        assert np.shares_memory(table.array, own)
        assert table.shape == (np.prod(leading), H, N, M)


def test_entries_that_repeat_are_not_copied_if_the_leading_axes_need_a_copy():
    turned = np.broadcast_to(np.arange(6.0).reshape(3, 2, 1, 1, 1), (3, 2, 1, 10**6, 10**6)).swapaxes(0, 1)
    (table,) = bias(turned).tables
    assert table.shape == (6, 1, 10**6, 10**6)
    np.testing.assert_array_equal(table.array[:, 0, 0, -1], [0, 2, 4, 1, 3, 5])


@pytest.mark.parametrize("leading", [(3, 2), (2, 2), (6, 1), (2, 2, 3), (6,)])
def test_leading_axes_that_do_not_fit(arrays, leading):
    array = np.ones((*(leading if len(leading) > 1 else (1, *leading)), H, N, M), bool)
    for options in ({"mask": array}, {"score": bias(array * 1.0)}, {"see": [sightline.mass(array)]}):
        with pytest.raises(ShapeError, match=r"whose leading axes .* stand for the batch axes \(2, 3\)") as caught:
            sightline.attention(*arrays, **options)
        assert str(array.shape) in str(caught.value)
        assert "B = 6" in caught.value.cure


def test_an_array_with_four_axes_counts_the_batch_axes_together(arrays):
    sightline.attention(*arrays, mask=np.ones((6, H, N, M), bool))
    with pytest.raises(ShapeError, match="axis 0 of length 3 stands for b"):
        sightline.attention(*arrays, mask=np.ones((3, H, N, M), bool))


def test_the_other_axes_are_checked_as_before(arrays):
    with pytest.raises(ShapeError, match=r"shape \(2, 1, 3, 5, 7\), whose axis 2 of length 3 stands for h"):
        sightline.attention(*arrays, mask=np.ones((2, 1, 3, N, M), bool))


def test_a_formula_alone_takes_the_leading_axes_for_the_batch(rng):
    whole = rng.random((2, 3, H, N, M)) < 0.5
    np.testing.assert_array_equal(dense(whole).array(N, M, batch=6, heads=H), whole.reshape(6, H, N, M))
    for part in (whole[:1], whole[:, :1]):
        repeated = np.broadcast_to(part, whole.shape)
        found = dense(repeated).array(N, M, batch=6, heads=H)
        np.testing.assert_array_equal(found, repeated.reshape(6, H, N, M))
    np.testing.assert_array_equal(dense(whole[:1]).array(N, M, batch=3, heads=H), whole[0])
    for batch in (1, 3, 12):
        with pytest.raises(ShapeError, match=r"whose leading axes, 6 in all, stand for b"):
            dense(whole).array(N, M, batch=batch, heads=H)
    assert dense(whole).show(N, M, batch=5, head=1).cells(N, M).tolist() == whole[1, 2, 1].tolist()


def test_no_array_is_taken_for_one_that_was_freed(arrays):
    """A call looks tables up by their ids. If it freed a table, the next table could have the same id."""
    mask = np.ones((2, 1, 1, N, M), bool)
    for _ in range(60):
        _, (mass,) = sightline.attention(*arrays, mask=mask, see=[sightline.mass(~mask)])
        assert not mass.any()


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("kernel", ["cpu", "streaming"])
@pytest.mark.parametrize("leading", LEADING[:4])
def test_gradients_of_an_array_with_leading_axes(arrays, rng, kernel, leading):
    query, key, value = map(torch.from_numpy, arrays)
    added = torch.from_numpy(rng.normal(size=(*leading, H, N, M)).astype(np.float32)).requires_grad_()
    seed = torch.from_numpy(rng.normal(size=(2, 3, H, N, 6)).astype(np.float32))

    def gradient(given):
        output = sightline.attention(query, key, value, score=bias(given), kernel=kernel)
        return torch.autograd.grad((output * seed).sum(), added)[0]

    expected = gradient(added.expand(2, 3, H, N, M).clone())
    for given in (added, added.expand(2, 3, H, N, M), added[None]):
        torch.testing.assert_close(gradient(given), expected)
