"""Parts of a problem, merged, are the whole problem."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from sharded_problems import run_parts
from sightline import causal, documents, h, i, j, m, n, s, table, where
from sightline.call.partition.parts import part_of
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.formula.parameters import structure_of
from sightline.reference.streaming import Streaming
from sightline.reference.testing import assert_conforms
from strategies import masks, scores

KERNELS = {"cpu": Cpu(), "streaming": Streaming()}
B, H, G, N, M = 2, 4, 2, 37, 83
RNG = np.random.default_rng(8)
TABLE, WINDOWS = RNG.normal(size=(H, N, M)), np.array([5, 90, 17, 40])
FORMULAS = {
    "none": {},
    "causal": {"mask": causal()},
    "lower right": {"mask": causal("lower right")},
    "lengths": {"mask": (i * m >= j * n) | (j > m - 4), "score": s + (n - i) * 0.01 - abs(m - 1 - j) / m},
    "heads": {"mask": (i + 40 - j < table(WINDOWS)[h]) & (i + 40 >= j), "score": s - (h + 1) * abs(i - j) / 16},
    "tables": {"score": s + table(TABLE)[h, i, j]},
    "documents": {"mask": documents(lengths=[20, 0, 17], key_lengths=[30, 13, 40])},
    "a hidden key": {"score": where(j % 5 == 3, -np.inf, s * (1 + h))},
    "scale": {"scale": -0.4},
}
DROPOUT = {"dropout": 0.4, "seed": 11}  # parts of the keys begin at multiples of 4, in which its generator counts them


def problem_of(rng, dtype=np.float32, **options):
    query, key, value = (rng.normal(size=(B, *shape)).astype(dtype) for shape in ((H, N, 8), (G, M, 8), (G, M, 5)))
    return make_problem(query, key, value, **options)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("formulas", "options"), [*((name, {}) for name in FORMULAS), ("none", DROPOUT), ("heads", DROPOUT)]
)
def test_parts_are_the_whole(rng, formulas, options, kernel):
    problem = problem_of(rng, **FORMULAS[formulas], **options)
    assert_conforms(lambda whole: run_parts(KERNELS[kernel].run, whole, head_parts=2), problem)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_parts_of_drawn_formulas_are_the_whole(kernel, data):
    extent = B, H, N, M
    options = {"mask": data.draw(masks(extent)), "score": data.draw(scores(extent, hides=False))}
    problem = problem_of(np.random.default_rng(data.draw(st.integers(0, 99))), np.float64, **options)
    if kernel == "cpu" and list(KERNELS[kernel].refuses(problem)):
        return
    assert_conforms(lambda whole: run_parts(KERNELS[kernel].run, whole), problem)


def test_a_part_of_a_part_is_a_part_of_the_whole(rng):
    problem = problem_of(rng, dropout=0.4, seed=3, **FORMULAS["heads"])
    query, key, value = problem.query, problem.key, problem.value
    half = part_of(
        problem, query[:, 2:, 8:], key[:, 1:, 40:], value[:, 1:, 40:], first_head=2, first_row=8, first_key=40
    )
    arrays = half.query[:, :, 5:], half.key[:, :, 8:], half.value[:, :, 8:]
    origins = {"first_row": 5, "first_key": 8}, {"first_head": 2, "first_row": 13, "first_key": 48}
    again, direct = part_of(half, *arrays, **origins[0]), part_of(problem, *arrays, **origins[1])
    assert again.dropout_origin == direct.dropout_origin
    for kernel in KERNELS.values():
        np.testing.assert_array_equal(kernel.run(again).output, kernel.run(direct).output)


def test_a_formula_without_positions_stays_the_same_object(rng):
    problem = problem_of(rng)
    arrays = problem.query, problem.key, problem.value

    def shift(formula, head, row, key):
        whole = replace(problem, mask=formula)
        return part_of(whole, *arrays, first_head=head, first_row=row, first_key=key).mask

    assert shift(s * 2, 1, 2, 3) is s * 2
    assert str(shift(i >= j, 0, None, 8)) == "i ≥ j + 8"
    parts = [shift((i >= j) & (i - j < 20), 0, *first) for first in ((0, 0), (0, 8), (8, 8), (20, 1))]
    assert len({structure_of(part).formulas for part in parts}) == 1  # one kernel serves them
    assert str(shift(j < m, 0, None, None)) == f"j < {M}"


def test_a_part_has_no_sinks(rng):
    problem = problem_of(rng, sinks=np.zeros(H, np.float32), see=[sightline.lse()])
    part = part_of(problem, problem.query, problem.key, problem.value)
    assert part.sinks is None
    assert part.see == ()
