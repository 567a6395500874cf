"""Every statistic, in every kernel, is the definition's within the budget of rounding errors; so are its gradients."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observed import check, parts, statistics, usable
from strategies import DTYPES, cases

from sightline.attention import KERNELS

EXAMPLES = {"reference": 6, "streaming": 12, "cpu": 3}  # of each dtype; with the last most compile a kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_drawn_problems(kernel, dtype):
    @settings(max_examples=EXAMPLES[kernel.name])
    @given(st.data(), cases(dtypes=(dtype,), largest=8000))
    def conforms(data, case):
        problem = case.pose()
        if not usable(problem):
            return
        see = data.draw(statistics(problem))
        framework = data.draw(st.sampled_from(["numpy", "torch"]))
        check(kernel.run, (case.as_torch() if framework == "torch" else case).pose(see=see))

    conforms()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_drawn_parts(kernel):
    @settings(max_examples=2 * EXAMPLES[kernel.name])
    @given(st.data(), cases(largest=4000))
    def conforms(data, case):
        problem = case.pose()
        if usable(problem):
            check(kernel.run, case.pose(see=data.draw(parts(problem))))

    conforms()
