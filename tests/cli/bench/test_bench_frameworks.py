"""The benchmarks of JAX and of tangents: their contenders and checks."""

import numpy as np
import pytest
import torch

from sightline.cli.bench import peers
from sightline.cli.bench.benchmarks import CAUSAL, IN_JAX, IN_JAX_LAYOUT, NUMPY
from sightline.cli.bench.peers import PEERS
from sightline.cli.bench.tangents import Differentiator, TangentCase, attend_densely
from sightline.cli.bench.workloads import Workload

pytestmark = pytest.mark.filterwarnings(r"ignore:.torch\.jit:DeprecationWarning")  # torch.func's own

CONTENDERS = IN_JAX, IN_JAX_LAYOUT, PEERS["jax"], NUMPY
JAX = (
    Workload(name="plain", n=40, H=2, d_k=16),
    Workload(name="causal both", n=40, H=2, d_k=16, mask=CAUSAL, passes="forward and backward"),
    Workload(name="causal backward", n=40, H=2, d_k=16, mask=CAUSAL, passes="backward"),
    Workload(name="short", n=16, mask=CAUSAL),
)
TANGENTS = [TangentCase(name=f"tangent {wanted}", n=40, wanted=wanted) for wanted in ((0, 1, 2), (1,), (0, 2))]


def call(contender, case, inputs):
    prepared = contender.prepare(case, inputs, 1)
    return prepared, prepared.call(prepared.setup())


@pytest.mark.parametrize("case", [*JAX, *TANGENTS], ids=lambda case: case.name)
def test_every_contender_is_right(case):
    inputs = case.make_inputs()
    for contender in case.contenders if isinstance(case, TangentCase) else CONTENDERS:
        if contender.refuses(case) is None:
            prepared, _ = call(contender, case, inputs)
            assert contender.reference(case) is None or case.share_of_budget(prepared, inputs) <= 1


def test_a_short_call_has_the_bits_of_numpy():
    inputs = JAX[-1].make_inputs()
    by_head, by_position, _, numpy = (call(contender, JAX[-1], inputs) for contender in CONTENDERS)
    expected = numpy[0].results(numpy[1])["output"]
    for prepared, result in (by_head, by_position):
        assert np.array_equal(prepared.results(result)["output"], expected)


def test_a_mask_that_is_not_applied_is_found(monkeypatch):
    unmasked = peers.attention
    monkeypatch.setattr(peers, "attention", lambda query, key, value, mask: unmasked(query, key, value))
    inputs = JAX[1].make_inputs()
    prepared, _ = call(IN_JAX, JAX[1], inputs)
    assert JAX[1].share_of_budget(prepared, inputs) > 1


def test_a_wrong_tangent_is_found():
    case = TANGENTS[0]
    inputs = case.make_inputs()
    prepared, _ = call(Differentiator("x", "x", lambda query, key, value: query.softmax(-1) * value), case, inputs)
    assert case.share_of_budget(prepared, inputs) > 1


def test_a_tangent_is_the_derivative_in_the_direction():
    case, step = TangentCase(name="x", n=12, wanted=(0, 1)), 1e-6
    operands, directions = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, 1, 1, 12, 8)))
    output, tangent = case.differentiate(attend_densely, operands, directions)
    moved = attend_densely(*(operands[:2] + step * directions[:2]), operands[2])
    np.testing.assert_allclose((moved - output) / step, tangent, atol=1e-5)
