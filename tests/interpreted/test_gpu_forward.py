"""The forward kernel in Triton answers as the float64 definition does."""

import numpy as np
import pytest
from strategies import DTYPES, Case
from test_conformance import arrays

from sightline import alibi, causal, documents, lse, softcap, window
from sightline.testing import assert_conforms

PROBLEMS = {
    "plain": ({"shape": (1, 2, 70, 24)}, {}),
    "causal": ({"shape": (2, 2, 70, 24)}, {"mask": causal()}),
    "grouped, capped, sinks": (
        {"shape": (2, 4, 40, 16), "groups": 2, "m": 57},
        {"mask": window(10, 3), "score": softcap(20.0), "sinks": np.array([-1.0, 0.0, 2.0, -np.inf], np.float32)},
    ),
    "biased, dropout": (
        {"shape": (2, 2, 40, 16), "d_v": 20},
        {"score": alibi(2), "mask": documents(lengths=[1, 20, 19]), "dropout": 0.3, "seed": 2**40 + 1},
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_named_problems(triton_kernel, dtype, name):
    shapes, options = PROBLEMS[name]
    case = Case(*arrays(dtype=dtype, **shapes), options).as_torch()
    assert_conforms(triton_kernel.run, case.pose(see=[lse()]))
