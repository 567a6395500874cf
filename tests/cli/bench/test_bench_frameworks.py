"""The benchmarks of JAX and of tangents: their contenders and checks."""

import numpy as np
import pytest
import torch

from sightline.cli.bench import jax_cases, tangents
from sightline.cli.bench.jax_cases import JaxCase
from sightline.cli.bench.tangents import TangentCase

pytestmark = pytest.mark.filterwarnings(r"ignore:.torch\.jit:DeprecationWarning")  # torch.func's own

JAX = (
    JaxCase(40),
    JaxCase(40, is_causal=True, passes="forward and backward"),
    JaxCase(16, is_causal=True, is_short=True),
)
TANGENTS = TangentCase(40), TangentCase(40, (1,)), TangentCase(40, (0, 2))


@pytest.mark.parametrize("case", [*JAX, *TANGENTS], ids=lambda case: case.name)
def test_every_contender_is_right(case):
    contenders = list(case.contenders(1))
    assert contenders[0].name == "sightline"
    for contender in contenders:
        contender.prepared.call(contender.prepared.setup())
        assert contender.share_of_budget is None or contender.share_of_budget() <= 1


def test_a_short_call_has_the_bits_of_numpy():
    ours, by_position, _, numpy = (contender.prepared for contender in JAX[2].contenders(1))
    expected = numpy.results(numpy.call(None))["output"]
    for prepared in (ours, by_position):
        assert np.array_equal(prepared.results(prepared.call(None))["output"], expected)


def test_a_mask_that_is_not_applied_is_found(monkeypatch):
    monkeypatch.setattr(jax_cases, "causal", lambda: None)
    ours, *_ = JAX[1].contenders(1)
    assert ours.share_of_budget() > 1


def test_a_wrong_tangent_is_found(monkeypatch):
    monkeypatch.setattr(tangents, "attention", lambda query, key, value: query.softmax(-1) * value)
    ours, *_ = TANGENTS[0].contenders(1)
    assert ours.share_of_budget() > 1


def test_a_tangent_is_the_derivative_in_the_direction():
    case, step = TangentCase(12, (0, 1)), 1e-6
    operands, directions = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, 1, 1, 12, 8)))
    output, tangent = case._differentiate(tangents._attend_densely, operands, directions)
    moved = tangents._attend_densely(*(operands[:2] + step * directions[:2]), operands[2])
    np.testing.assert_allclose((moved - output) / step, tangent, atol=1e-5)
