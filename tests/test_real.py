"""Activations of a trained model: every kernel reproduces its weights and outputs from its queries, keys and values."""

import numpy as np
import pytest

import sightline.data
from sightline import padding, weights
from sightline.call.problem import make_problem
from sightline.reference.accuracy import compute_baseline
from sightline.reference.testing import assert_conforms, assert_within_budget
from strategies import ON_HOST

LAYERS = [(name, number) for name in sightline.data.NAMES for number in sightline.data.load(name).layers]


@pytest.fixture(params=LAYERS, ids=lambda given: f"{given[0]}-{given[1]}")
def layer(request):
    name, number = request.param
    text = sightline.data.load(name)
    return text, text.layers[number]


def problem_of(text, layer, **options):
    return make_problem(layer.query, layer.key, layer.value, mask=padding(text.lengths), see=[weights()], **options)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("kernel", ON_HOST, ids=lambda kernel: kernel.name)
def test_kernels_conform_on_real_activations(layer, kernel):
    assert_conforms(kernel.run, problem_of(*layer))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("kernel", ON_HOST, ids=lambda kernel: kernel.name)
def test_kernels_agree_with_the_model(layer, kernel):
    """With the model's results as oracle: the difference is at most that of the plain float32 computation."""
    text, given = layer
    problem = problem_of(text, given)
    result, rough = kernel.run(problem), compute_baseline(problem)
    assert_within_budget(result.output, given.output.astype(float), rough.output)
    if given.weights is not None:
        assert_within_budget(result.seen[0], given.weights.astype(float), rough.weights)


def test_real_scores_have_a_wide_range(layer):
    """Unlike with random numbers, attention is sharp and the scores span tens."""
    _, given = layer
    scores = np.einsum("bhid,bhjd->bhij", given.query, given.key) / np.sqrt(given.query.shape[-1])
    assert np.ptp(scores) > 10
