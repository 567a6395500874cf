"""The backward kernels in Triton against derivatives found another way: torch's through the dense computation."""

import numpy as np
import pytest
from strategies import DTYPES, Case
from test_conformance import arrays
from test_gradients import check, entries

from sightline import alibi, causal, documents, softcap, window
from sightline.arrays import to_numpy

PROBLEMS = {
    "plain": ({"shape": (1, 2, 40, 24)}, {}),
    "causal": ({"shape": (2, 2, 40, 24)}, {"mask": causal()}),
    "grouped, capped, sinks": (
        {"shape": (2, 4, 40, 16), "groups": 2, "m": 57},
        {"mask": window(10, 3), "score": softcap(20.0), "sinks": np.array([-1.0, 0.0, 2.0, -np.inf], np.float32)},
    ),
    "biased, dropout": (
        {"shape": (2, 2, 40, 16), "d_v": 20},
        {"score": alibi(2), "mask": documents(lengths=[1, 20, 19]), "dropout": 0.3, "seed": 2**40 + 1},
    ),
}


def by(kernel):
    """Gradients of the kernel; twice, the same bits."""

    def differentiate(problem, d_output, d_lse, _):
        answer = kernel.run(problem)
        options = (problem, d_output, d_lse, (answer.output, answer.lse), range(len(problem.tables)))
        found, again = (kernel.gradients(*options) for _ in range(2))
        for one, other in zip(entries(found), entries(again), strict=True):
            assert one is other is None or np.array_equal(to_numpy(one), to_numpy(other), equal_nan=True)
        return found

    return differentiate


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_named_problems(triton_kernel, dtype, name):
    shapes, options = PROBLEMS[name]
    check(Case(*arrays(dtype=dtype, **shapes), options), "torch", by(triton_kernel))
