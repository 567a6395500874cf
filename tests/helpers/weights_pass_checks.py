"""Statistics by weights passes, and their check against the definitions of `statistic_definitions`."""

from dataclasses import replace

import numpy as np

import sightline
from sightline import i, j, p, s, where
from sightline.call.gradient_parts import is_lse_too_large
from sightline.cpu import Cpu
from sightline.cpu.launch.weights_pass import bind_passes, run_first
from sightline.cpu.runtime.processor import HOST
from sightline.reference.definition import compute_stages
from sightline.statistics import Mean, TopK, pooled, received, weights
from statistic_definitions import check_results


def compute(problem, lse, *statistics, threads=2, processor=HOST):
    """Return the arrays of each statistic, by as few passes as possible; None if streaming must compute them."""
    if is_lse_too_large(lse, problem.accumulator, or_nonfinite=True):
        return None
    if 0 in problem.extent:  # there is no pass if there is nothing to compute
        return list(Cpu().run(problem.with_statistics(*statistics)).seen)
    passes, found = bind_passes(replace(problem, see=statistics, threads=threads), processor), {}
    if not passes:
        return None
    kinds = ["" if isinstance(x, TopK) else x.axes for x in statistics]  # a pass has one grid of cells and one top_k
    assert len(passes) == max(kinds.count("ij"), kinds.count(""), 1)
    for bound in passes:
        found |= zip(bound[1].indices, run_first(problem, lse, bound), strict=True)
    return [tuple(arrays) if len(arrays) > 1 else arrays[0] for _, arrays in sorted(found.items())]


def check(problem, *groups, lse=None, **options):
    """Check groups of statistics within their error budgets, and return the results of all, as a list.

    A group is one statistic, or a list of statistics that share passes. The results are None, as they must be, if a
    visible score is NaN or +∞. If `lse` is None, the definition's lse is used. That lse has no rounding of the kernel's
    scores, so that the relative error of a weight is the absolute error of its score.
    """
    truth = compute_stages(problem)
    groups = [group if isinstance(group, list) else [group] for group in groups]
    found = [compute(problem, truth.lse if lse is None else lse, *group, **options) for group in groups]
    if np.isnan(truth.lse).any() or (truth.lse == np.inf).any():
        assert found == [None] * len(groups)
        return []
    statistics, results = ([one for group in lists for one in group] for lists in (groups, found))
    check_results(problem, statistics, results, has_exact_lse=lse is None)
    return results


def check_everything(problem, maxima=False, **options):
    """Check every statistic of a problem with uneven parameters, and return the results as a list of arrays."""
    n, m = problem.n, problem.m
    alone = [received(), pooled(5, 7), TopK(5), weights(), weight_sums(problem)]
    alone += [received("max"), pooled(2, 3, "max", ((n // 3, n), (m // 2, m)))] * maxima
    results = check(problem, *alone, several(problem), formulas(problem), sightline.sum(p * s, over=()), **options)
    return [array for one in results for array in (one if isinstance(one, tuple) else (one,))]


def several(problem):
    """Return statistics for one pass, and for a second pass the same ones with other parameters."""
    sums = received(), pooled(5, problem.m + 1), TopK(6)
    return [*sums, TopK(problem.m + 1), received("max"), pooled(5, 7, "max")]


def formulas(problem):
    """Return sums and maxima of formulas, which one pass computes."""
    entropies = p * np.log(p)
    return [
        sightline.sum(p * p, over=j),
        sightline.sum(s * j, over=j),
        sightline.max(where(j % 3 > 0, p, -1.0), over=j),
        sightline.sum(p * p + i, over=i),
        sightline.max(entropies + i * 1e-3, over=i),
        sightline.min(s * p, over=i),
        sightline.min(s + j, over=(i, j), cells=(3, problem.m // 2 + 1)),
    ]


def weight_sums(problem):
    """Return the sum over heads of the weights times factors."""
    return Mean(weights(), True, False, tuple(np.linspace(0.5, 2, problem.H).tolist()))
