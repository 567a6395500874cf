"""Caches that one append fills, the numbers that quantised ones store, and checks of attention on them."""

import ml_dtypes
import numpy as np

from sightline import KVCache
from sightline.arrays.operations import to_numpy
from sightline.call.problem import make_problem
from sightline.reference.accuracy import compute_baseline, term_sizes
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from strategies import DTYPES, to_torch

GROUPS = {"int8": 128, "float8_e4m3fn": 128, "int4": 32}
PAIR = ("int8", "int4")


def quantized(dtype, x):
    """The numbers that a cache stores for rows x (..., d), by the formulas of `KVCache`, as float32."""
    groups = []
    for start in range(0, x.shape[-1], GROUPS[dtype]):
        group = np.asarray(x[..., start : start + GROUPS[dtype]], np.float32)
        low, high = group.min(-1, keepdims=True), group.max(-1, keepdims=True)
        span = high - low if dtype == "int4" else np.abs(group).max(-1, keepdims=True)
        scale = (span / np.float32({"int8": 127, "int4": 15}.get(dtype, 448))).astype(np.float16).astype(np.float32)
        scale = np.where(np.isfinite(group).all(-1, keepdims=True), scale, np.nan)
        offset = low.astype(np.float16).astype(np.float32) if dtype == "int4" else np.float32(0)
        with np.errstate(invalid="ignore"):  # ∞ − ∞
            ratio = (group - offset) / np.where(scale == 0, np.inf, scale)
        if dtype == "float8_e4m3fn":
            codes = np.clip(ratio, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            codes = np.clip(np.rint(ratio), *((-127, 127) if dtype == "int8" else (0, 15)))
        groups.append(codes * scale + offset)
    return np.concatenate(groups, -1)


def assert_stores(dtype, stored, x):
    """Raise AssertionError unless the stored numbers are those of the formulas for the rows x."""
    assert stored.shape == x.shape
    assert str(stored.dtype).endswith("float32")
    np.testing.assert_allclose(to_numpy(stored), quantized(dtype, to_numpy(x)), rtol=1e-6, atol=1e-7)


def random_arrays(rng, widths=(64, 64), length=150, batch=2, heads=(4, 2), kind="numpy", dtype="float32"):
    """Query, key and value, whose channels have different sizes, as those of trained models have."""
    shapes = [(batch, heads[0], length, widths[0]), *[(batch, heads[1], length, width) for width in widths]]
    found = [(rng.normal(size=x) * rng.uniform(0.2, 3, size=x[-1])).astype(DTYPES[dtype]) for x in shapes]
    return [to_torch(x) for x in found] if kind == "torch" else found


def filled_cache(key, value, *, dtype=None, capacity=0, **options):
    """Return a cache after one append, to which the options are passed."""
    cache = KVCache(dtype=dtype, capacity=capacity)
    cache.append(key, value, **options)
    return cache


def assert_solves(output, problem, rows=slice(None)):
    """Raise AssertionError unless `output` has these rows of the problem's output, within the budget.

    Return the stages of the whole problem.
    """
    truth, rough = compute_stages(problem), compute_baseline(problem)
    terms = term_sizes(problem, truth.weights)[..., rows, :]
    assert_within_budget(output, truth.output[..., rows, :], rough.output[..., rows, :], terms=terms)
    return truth


def assert_attends(output, query, key, value, **options):
    """Raise AssertionError unless `output` is attention on these float32 keys and values, within the budget.

    The query may be narrower than float32. The budget is that of its dtype: float32 sums, rounded once.
    """
    query, key, value = (to_numpy(x) for x in (query, key, value))
    narrow = output.dtype if isinstance(output, np.ndarray) else DTYPES[str(output.dtype).rpartition(".")[2]]
    whole = make_problem(query.astype(np.float32), key, value, **options)
    truth = compute_stages(whole)
    rough = compute_baseline(whole).output if narrow == np.float32 else truth.output.astype(narrow)
    assert_within_budget(output, truth.output, rough, terms=term_sizes(whole, truth.weights))
