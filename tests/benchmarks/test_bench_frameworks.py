"""The benchmarks of JAX and of tangents: their contenders and checks."""

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.contenders import VARIANTS
from benchmarks.cpu_problems import CAUSAL, IN_JAX, IN_JAX_LAYOUT, NUMPY, TANGENTS
from benchmarks.peers import PEERS
from benchmarks.workloads import Workload

pytestmark = pytest.mark.filterwarnings(r"ignore:.torch\.jit:DeprecationWarning")  # torch.func's own

CONTENDERS = IN_JAX, IN_JAX_LAYOUT, PEERS["jax"], NUMPY
JAX = (
    Workload(name="plain", n=40, H=2, d_k=16),
    Workload(name="causal both", n=40, H=2, d_k=16, mask=CAUSAL, passes="forward and backward"),
    Workload(name="causal backward", n=40, H=2, d_k=16, mask=CAUSAL, passes="backward"),
    Workload(name="short", n=16, mask=CAUSAL),
)
OF_TANGENTS = VARIANTS["sightline"], VARIANTS["without tangents"], PEERS["dense"]


def call(contender, case, inputs):
    prepared = contender.prepare(case, inputs, 1)
    return prepared, prepared.call(prepared.setup())


@pytest.mark.parametrize("case", [*JAX, *TANGENTS.small().cases], ids=lambda case: case.name)
def test_every_contender_is_right(case):
    inputs = case.make_inputs()
    for contender in OF_TANGENTS if case.tangents else CONTENDERS:
        if contender.refuses(case) is None:
            prepared, _ = call(contender, case, inputs)
            assert contender.reference(case).share_of_budget(prepared, inputs) <= 1


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
    case = TANGENTS.small().cases[0]
    inputs = case.make_inputs()
    prepared, (output, tangent) = call(VARIANTS["sightline"], case, inputs)
    prepared.call = lambda _: (output, tangent * 1.0001)
    assert case.share_of_budget(prepared, inputs) > 1
