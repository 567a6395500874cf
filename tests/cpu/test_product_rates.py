"""The choice between dot products of bfloat16 pairs and multiply-adds of float32."""

import ml_dtypes
import numpy as np
import pytest

from sample_calls import arrays
from sightline import i, j
from sightline.call.kernel import GivenGradients
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.cpu.kernels.block import Block
from sightline.cpu.launch import product_rates
from sightline.cpu.launch.product_rates import machine_for, prefers_widening
from sightline.cpu.runtime.machine import host
from sightline.cpu.runtime.processor import HOST, Processor
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_conforms
from sightline.statistics import received, top_k

needs_dot = pytest.mark.skipif(not host().has_bf16_dot, reason="this processor does not multiply pairs of bfloat16")


@needs_dot
@pytest.mark.parametrize("slow", ["bfloat16", "float32"])
def test_the_faster_loop_is_chosen(slow, monkeypatch):
    rates = {"bfloat16": 2.0, "float32": 2.0} | {slow: 1.0}
    monkeypatch.setattr(product_rates, "measure_rate", lambda dtype, machine: rates[dtype])
    monkeypatch.setattr(product_rates, "_ANSWERS", {})
    assert prefers_widening(host()) == (slow == "bfloat16")
    assert machine_for(HOST, "bfloat16").has_bf16_dot == (slow == "float32")
    assert machine_for(HOST, "float32") == host()
    assert machine_for(Processor(host()), "bfloat16") == host()  # only this process is measured


@pytest.mark.sampled(one_in=4)
@needs_dot
@pytest.mark.parametrize("queries", [1, 70])
def test_problems_of_a_processor_with_slow_dot_products(queries, rng, monkeypatch):
    """Forward pass, decoding, backward pass and weights pass: no kernel multiplies pairs."""
    monkeypatch.setattr(product_rates, "prefers_widening", lambda machine: True)
    paired, begin = [], Block.begin

    def spy(self, builder):
        paired.append(self.paired)
        begin(self, builder)

    monkeypatch.setattr(Block, "begin", spy)
    shapes = (1, 2, queries, 64), (1, 2, 90, 64), (1, 2, 90, 64)
    given = [x.astype(ml_dtypes.bfloat16) for x in arrays(rng, shapes, np.float32)]
    for options in ({}, {"mask": i - j < 71 + queries}, {"see": (received(), top_k(2))}):
        problem = make_problem(*given, **options)
        assert_conforms(Cpu().run, problem)
    result = Cpu().run(problem)
    given = GivenGradients(result.output, None, (result.output, result.lse), [])
    assert Cpu().backward(problem, given).query.shape == shapes[0]
    assert not any(paired)


@pytest.mark.parametrize("entry", [np.nan, np.inf, -np.inf])
def test_a_scale_of_0_hides_no_nan(entry, rng):
    """The product of 0 with NaN or ∞ is NaN, also if the processor multiplies pairs of bfloat16."""
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in arrays(rng))
    q[0, 1, 3, 4] = entry
    problem = make_problem(q, k, v, scale=0.0)
    output = Cpu(Processor(host())).run(problem).output
    np.testing.assert_array_equal(np.isnan(output), np.isnan(compute_stages(problem).output))
