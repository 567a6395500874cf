"""Planted faults: each fault, written into the source of the batching rule or of XLA's handler, must be seen."""

import jax
import numpy as np
import pytest

import jax_kernel
import sightline
from fault_planting import Fault, assert_found, plant
from sightline import b, i, j, lse, s, table
from sightline.call import join as call_join
from sightline.call.problem import make_problem
from sightline.cpu.calls.xla_handler import XlaHandler
from sightline.errors import SightlineError
from sightline.testing import assert_conforms

BATCHING = {
    "b of all elements": Fault(call_join._element_symbols, "_remainder(b, batches)", "b"),
    "a table of another element": Fault(call_join._element_symbols, "b // batches", "b % batches"),
    "a table that spans the joined batches": Fault(call_join.join_spec, "None if axis in symbols else axis", "axis"),
}
COPY = "self.copy_addresses(ARGUMENTS, num_arguments, buffers)"
HANDLER = {
    "query and key exchanged": Fault(
        XlaHandler.build,
        COPY,
        f"{COPY}; pair = [buffers.at(k * 8).load(INT64) for k in (1, 0)]; "
        "[buffers.at(k * 8).store(x) for k, x in enumerate(pair)]",
    ),
    "key in place of value": Fault(
        XlaHandler.build,
        COPY,
        f"{COPY}; buffers.at(16).store(buffers.at(8).load(INT64))",
    ),
}


def check_batching():
    """Check a mapped call whose formulas read b and tables of it, mapped and not."""
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 3, 2, 4, 20, 8)).astype(np.float32)
    lengths, slopes = rng.integers(1, 20, (3, 2)), rng.normal(size=2).astype(np.float32)

    def attend(query, key, value, lengths):
        mask, score = sightline.padding(lengths) | (i == j), s + table(slopes)[b] * (i - j) + 0.5 * b
        return sightline.attention(query, key, value, mask=mask, score=score)

    found = jax.vmap(attend)(query, key, value, lengths)
    for element in range(3):
        expected = attend(query[element], key[element], value[element], lengths[element])
        assert np.array_equal(found[element], expected), "a mapped element has other bits"


def check_handler():
    x = np.random.default_rng(0).normal(size=(3, 1, 2, 20, 8)).astype(np.float32)
    assert_conforms(jax_kernel.run_jit, make_problem(*x, mask=i >= j, see=[lse()]))


def test_sound_code_passes():
    check_batching()
    check_handler()


@pytest.mark.parametrize("fault", BATCHING)
def test_every_fault_in_the_batching_rule_is_seen(fault, monkeypatch):
    kinds = AssertionError, SightlineError, jax.errors.JaxRuntimeError
    assert_found(BATCHING[fault], monkeypatch, check_batching, kinds=kinds)


@pytest.mark.parametrize("fault", HANDLER)
def test_every_fault_in_the_handler_is_seen(fault, monkeypatch, fresh_kernels):
    plant(HANDLER[fault], monkeypatch)
    jax_kernel.register_alone(monkeypatch, f"sightline: {fault}")
    with pytest.raises(AssertionError, match="bits"):
        check_handler()
