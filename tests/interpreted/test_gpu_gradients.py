"""The backward kernels in Triton against derivatives found another way: torch's through the dense computation."""

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import DTYPES, Case, cases
from test_conformance import arrays
from test_gradients import check, entries

import sightline
from sightline import alibi, b, causal, documents, h, i, j, s, softcap, table, window
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
        if found is None:
            assert 0 in problem.extent or problem.d_v == 0  # streaming's
            return None
        for one, other in zip(entries(found), entries(again), strict=True):
            assert one is other is None or np.array_equal(to_numpy(one), to_numpy(other), equal_nan=True)
        return found

    return differentiate


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_named_problems(triton_kernel, dtype, name):
    shapes, options = PROBLEMS[name]
    check(Case(*arrays(dtype=dtype, **shapes), options), "torch", by(triton_kernel))


@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_problems(triton_kernel, dtype):
    @settings(max_examples=2)
    @given(cases(dtypes=(dtype,), poison=False, largest=2000))
    def conforms(case):
        check(case, "torch", by(triton_kernel))

    conforms()


TABLES = {  # scores of s that read tables, by the kind of each lookup in `gains`
    "pair": lambda x: s + table(x)[h, i, j],
    "pair, shared by heads": lambda x: s * table(x[0])[i, j],
    "pair, keys first": lambda x: s + table(x.swapaxes(1, 2).copy())[h, j, i],
    "pair, twice": lambda x: (lambda t: s + t[0, i, j] * t[1, i, j])(table(x)),
    "pair and any": lambda x: (lambda t: s + t[i, j] - t[j % 20, i])(table(x[0])),
    "pair, in float64": lambda x: s + table(x.astype(np.float64))[h, i, j],
    "any": lambda x: s + table(x[0, 0])[np.clip(i - j + 9, 0, 30)],
    "query": lambda x: s * table(x[0, :, :2])[i, b],
    "key": lambda x: s + np.tanh(s) * table(x[:, 0])[h, j],
    "head": lambda x: s * table(x[0, 0, :2])[h] + table(x[0, 1, :1])[0],
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_tables(triton_kernel, name, dtype, rng):
    if dtype == "float64" and name not in ("pair", "any"):
        pytest.skip("one of each way of adding")
    given = [rng.normal(size=(2, 2, length, 12)).astype(DTYPES[dtype]) for length in (20, 37, 37)]
    score = TABLES[name](rng.normal(size=(2, 20, 37)).astype(np.float32))
    mask = sightline.dense(rng.random((20, 37)) < 0.8)
    check(Case(*given, {"mask": mask, "score": score}), "torch", by(triton_kernel))
