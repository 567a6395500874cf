"""Drawn calls with statistics, of the forward kernel and of a second pass, first and repeated: bit for bit the same."""

from functools import reduce
from operator import or_

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sightline
from sample_calls import all_bits, arrays
from sightline import b, h, i, j, p, s, table, where
from sightline.arrays.operations import to_numpy
from sightline.call import call_cache
from sightline.call.kernel import Result
from sightline.statistics import arrays_of
from statistic_definitions import check, defined, oracle
from strategies import Case, generators, to_torch

B, H, N = 1, 2, 22
OTHERS = [
    *(sightline.max_score(), sightline.entropy(), sightline.lse(), sightline.weights()),
    *(sightline.received(), sightline.received("max"), sightline.top_k(2), sightline.pooled(3, 2)),
    sightline.sum(where(p >= 0, p, 0), over=j),
]


def conditions(rng, shared):
    """Conditions of one structure. `shared` is the same number in every call, and a divisor stays in the code."""
    number = int(rng.integers(6, N))
    documents = table(rng.integers(0, 3, N))[i] == table(rng.integers(0, 3, N))[j]
    numbers = i - j < shared, i // shared == j // shared, (i - j) % shared == 0, j <= i + shared
    return *numbers, j < number, i - j < number, documents, table(rng.random(N) < 0.7)[j]


def scores(rng, shared):
    relative = table(rng.normal(size=(H, shared)))[h, (i - j) % shared]
    return None, s * 0.5 + float(rng.normal()) * j / shared, s + relative, s - table(rng.normal(size=(B, N)))[b, j]


def attend_from_cache(query, *rows, **options):
    cache = sightline.KVCache()
    cache.append(*rows)
    return sightline.attention(query, cache, **options)


CALLS = {  # by name: the function of the call, and what converts arrays
    "numpy": (sightline.attention, np.array),
    "torch": (sightline.attention, to_torch),
    "graph": (sightline.attention, lambda x: to_torch(x).requires_grad_()),
    "vjp": (lambda *operands, **options: sightline.attention_vjp(*operands, **options)[:2], np.array),
    "cache": (attend_from_cache, np.array),
    "jax": (sightline.attention, jnp.array),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", CALLS)
@given(st.data(), generators(), st.sampled_from([np.float32, np.float32, np.float64, ml_dtypes.bfloat16]))
@settings(max_examples=3)
def test_first_and_repeated_calls(name, data, rng, dtype):
    """Three calls of one structure, with other numbers and tables. Some have a query with NaN or ∞."""
    dtype = np.float32 if name == "jax" else dtype
    indices = st.lists(st.integers(0, 7), min_size=1, max_size=2)
    mask, *masses = (data.draw(indices) for _ in range(3))
    score, shared = data.draw(st.integers(0, 3)), data.draw(st.integers(2, 5))
    order = data.draw(st.permutations([*masses, *data.draw(st.sets(st.sampled_from(OTHERS), min_size=2, max_size=5))]))

    has_formula = data.draw(st.booleans())

    def draw_case():
        operands = arrays(rng, ((B, H, N, 8),) * 3, dtype)
        if rng.random() < 0.4:
            operands[0][0, 0, 3, 2] = rng.choice([np.nan, np.inf])
        of = conditions(rng, shared)
        see = [sightline.mass(reduce(or_, [of[k] for k in x])) if isinstance(x, list) else x for x in order]
        if has_formula:
            numbers = table(rng.normal(size=(N,)))
            see = [sightline.sum(p * p * float(rng.normal()) + numbers[i] + where(p >= 0, 1, 2), over=i), *see]
        return Case(*operands, {"mask": reduce(or_, [of[k] for k in mask]), "score": scores(rng, shared)[score]}), see

    def attend(case, see):
        function, convert = CALLS[name]
        return function(*map(convert, case.arrays), see=see, **case.options)

    drawn, found = [draw_case() for _ in range(3)], []
    for case, see in drawn:
        call_cache.clear()
        found.append(attend(case, see))
    for given_case, first in zip(2 * drawn, 2 * found, strict=True):
        assert all_bits(attend(*given_case)) == all_bits(first)
    for (case, see), (output, seen) in zip(drawn, found, strict=True):
        problem = case.make_problem(see=see)
        own = [  # in the promised dtypes, since JAX has no int64 by default, and NumPy no bfloat16
            tuple(
                [to_numpy(x).astype(kind) for x, (_, kind) in zip(arrays_of(entry), one.outputs(problem), strict=True)]
            )
            for one, entry in zip(see, seen, strict=True)
        ]
        if np.isfinite(case.query).all():
            check(lambda _, own=own, output=output: Result(output, None, own), problem)
            continue
        for statistic, (array, *_) in zip(see, own, strict=True):
            if statistic.name != "top_k":  # in which NumPy sorts NaN to the end
                np.testing.assert_array_equal(np.isnan(array), np.isnan(defined(statistic, oracle(problem))[0]))
