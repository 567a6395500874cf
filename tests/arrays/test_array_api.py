"""Arrays of any library with the array API: `array_api_strict` has the standard's functions and no others."""

import array_api_strict as strict
import numpy as np
import pytest

import sightline
from sightline import b, h, i, j, s, table
from sightline.call.problem import make_problem
from sightline.errors import DeviceError, KernelRefusedError
from sightline.reference.accuracy import compute_baseline
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget


def operands(dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, *shape)).astype(dtype) for shape in ((4, 6, 8), (2, 9, 8), (2, 9, 5))]


RNG = np.random.default_rng(1)
DENSE, ADDED, SLOPES = RNG.random((6, 9)) < 0.7, RNG.normal(size=(6, 9)), RNG.random(4)
PROBLEMS = {  # functions of the namespace, whose arrays the tables are
    "plain": lambda xp: {},
    "causal": lambda xp: {"mask": i >= j},
    "blind rows": lambda xp: {"mask": (j < 2) & (i != 1)},
    "dense": lambda xp: {"mask": xp.asarray(DENSE)},
    "bias": lambda xp: {"score": sightline.bias(xp.asarray(ADDED))},
    "tables": lambda xp: {
        "mask": j < table(xp.asarray([3, 8]))[b],
        "score": s - table(xp.asarray(SLOPES))[h] * abs(i - j),
    },
    "table of NumPy": lambda xp: {"score": sightline.alibi(4)},
    "softcap and sinks": lambda xp: {"score": sightline.softcap(2.0), "sinks": xp.asarray(SLOPES)},
    "dropout": lambda xp: {"dropout": 0.4, "seed": 3},
}
SEE = [
    sightline.lse(),
    sightline.max_score(),
    sightline.entropy(),
    sightline.mass(i >= j),
    sightline.top_k(2),
    sightline.received(),
    sightline.pooled(3, 3),
    sightline.weights(),
    sightline.weights().mean("heads"),
    sightline.entropy().rows([0, 3]).heads([1]),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", PROBLEMS)
def test_outputs_are_those_of_the_definition(name, dtype):
    given = operands(dtype)
    output = sightline.attention(*map(strict.asarray, given), **PROBLEMS[name](strict))
    assert type(output) is type(strict.asarray(0))
    problem = make_problem(*given, **PROBLEMS[name](np))
    found = np.asarray(output)
    assert found.dtype == dtype
    assert_within_budget(found, compute_stages(problem).output, compute_baseline(problem).output)


@pytest.mark.parametrize("see", SEE, ids=repr)
def test_statistics_are_those_of_numpy(see):
    results = [
        sightline.attention(*map(make, operands(np.float64)), mask=i >= j, see=[see], kernel="streaming")[1][0]
        for make in (strict.asarray, np.asarray)
    ]
    found, expected = (each if isinstance(each, tuple) else (each,) for each in results)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), other)


def test_explain_says_why_generated_kernels_do_not_serve_them():
    arrays = [strict.asarray(x) for x in operands()]
    found = sightline.explain(*arrays)
    assert found.kernel == "streaming"
    assert "arrays of array_api_strict" in str(found.refusals["cpu"])
    with pytest.raises(KernelRefusedError, match="arrays of array_api_strict"):
        sightline.attention(*arrays, kernel="cpu")


def test_other_objects_and_mixed_libraries_are_refused():
    query, key, value = operands()
    with pytest.raises(DeviceError, match="one library"):
        sightline.attention(strict.asarray(query), key, value)
