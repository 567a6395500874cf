"""Checks of backward passes against gradients that torch.autograd computes through the dense definition."""

import itertools
from dataclasses import replace

import numpy as np
import torch

from sightline import weights
from sightline.arrays.operations import dtype_name, to_numpy
from sightline.call.kernel import GivenGradients
from sightline.cpu import Cpu
from sightline.formula.derivative import derivative
from sightline.formula.evaluate_array import evaluate_dense
from sightline.formula.expression import Lookup, walk
from sightline.reference.accuracy import dense_attention, gradient_term_sizes, summation_orders
from sightline.reference.definition import backward as reference_backward
from sightline.reference.definition import compute_stages
from sightline.reference.dropout import keep_factor
from sightline.reference.streaming import backward as streaming_backward
from sightline.reference.testing import assert_within_budget
from strategies import DTYPES, to_torch

NAMES = ("query", "key", "value")


def differentiated(problem, seeds, dtype, order):
    """For each seed, the gradients of Σ seed ∘ result by torch.autograd through the dense computation in that dtype."""

    def leaf(array):
        tensor = to_torch(np.array(array))
        if not tensor.is_floating_point():
            return tensor
        return (tensor.to(torch.float64) if dtype == "float64" else tensor).requires_grad_()

    arrays = {name: leaf(getattr(problem, name)) for name in NAMES}
    tables = [leaf(entry.array) for entry in problem.tables]
    sinks = None if problem.sinks is None else leaf(problem.sinks)
    posed = replace(problem.with_tables(tables), **arrays, sinks=sinks)
    output, lse, matrix = dense_attention(posed, dtype, order)
    results = output, torch.where(torch.isfinite(lse), lse, 0.0), matrix
    inputs = [*arrays.values(), *(t for t in tables if t.requires_grad), *([] if sinks is None else [sinks])]
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    found = []
    for seed in seeds:
        total = sum((to_torch(one).to(result.dtype) * result).sum() for one, result in zip(seed, results, strict=True))
        found.append([to_numpy(g).astype(np.float64) for g in torch.autograd.grad(total, inputs, **options)])
    return found


def seeds_of(problem):
    """Two random sets of gradients with respect to output, lse and weights."""
    rng, rows = np.random.default_rng(1), (*problem.batch_shape, problem.H, problem.n)
    shapes = ((*rows, problem.d_v), rows, (*rows, problem.m))
    return [[rng.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(2)]


def by_streaming(problem, d_output, d_lse=None, d_weights=None):
    return streaming_backward(problem, GivenGradients(d_output, d_lse, d_seen=(d_weights,)))


def by_cpu(problem, d_output, d_lse, _, answer=None):
    """Run the generated backward kernels, after the forward kernel if no answer is given.

    The gradients with two threads and with three threads must be equal bit for bit.
    """
    answer = Cpu().run(problem) if answer is None else answer
    wanted_tables = range(len(problem.tables))
    given = GivenGradients(d_output, d_lse, (answer.output, answer.lse), wanted_tables)
    found, again = (Cpu().backward(replace(problem, threads=threads), given) for threads in (2, 3))
    if found is not None:
        for one, other in zip(entries(found), entries(again), strict=True):
            assert one is other is None or np.array_equal(to_numpy(one), to_numpy(other))
    return found


def entries(found):
    return [found.query, found.key, found.value, found.sinks, *found.tables]


def undefined(problem):
    """True if a score is NaN, hidden or not: torch's gradient is then NaN · 0, but the definition's is 0."""
    return np.isnan(dense_attention(replace(problem, mask=None), "float64")[0]).any()


def reference_gradients(problem, d_output, **extra):
    """Return the `StageGradients` of a problem by the definition; those of key and value are per query head."""
    stages, slope = compute_stages(problem), 1.0
    arrays = [to_numpy(getattr(problem, name)) for name in NAMES]
    arrays[1:] = [np.repeat(x, problem.group, axis=-3) for x in arrays[1:]]
    if problem.score is not None:
        slope = evaluate_dense(derivative(problem.score), problem.extent, stages.scaled.reshape(problem.extent))
        slope = slope.reshape(stages.scaled.shape)
    keep = keep_factor(problem, np, slice(0, problem.n), slice(0, problem.m), np.float64)
    return reference_backward(stages, *arrays, d_output, scale=problem.scale, slope=slope, keep=keep, **extra)


def by_definition(problem, d_output, d_lse, d_weights):
    """The gradients of query, key and value by `sightline.reference.definition`."""
    found = reference_gradients(problem, d_output, d_lse=d_lse, d_weights=d_weights)
    return found.query, over_groups(found.key, problem), over_groups(found.value, problem)


def of_stored_output(problem, d_output, d_lse, d_weights):
    """Seeds whose exact gradients include the rounding of the stored output in δ = rowsum(dO ∘ O) − dlse."""
    output, narrow = dense_attention(problem, "float64")[0], DTYPES[problem.dtype]
    stored = [output, *(dense_attention(problem, problem.dtype, order)[0] for order in summation_orders(problem))]
    changes = [(d_output * (one.astype(narrow).astype(np.float64) - output)).sum(-1) for one in stored]
    return [(d_output, d_lse - change, d_weights) for change in changes]


def check(case, framework="numpy", differentiate=by_streaming, has_lse=True):
    """Check gradients of output and lse, and with streaming also of weights, in one framework or in several.

    Without `has_lse`, the gradient of lse is 0. The tables are constants if `differentiate` returns no `tables`.
    The budget comes from the error of a plain computation. A second set of seeds adds to the plain error, since a sum
    of few terms may have no error by chance. Kernels read the output as stored, possibly in 16 bits, and the plain
    computation has it unrounded, so the effect of this rounding is added. In float64, the oracle has the same rounding
    as the plain computation and the same functions of torch, so the gradients of `reference.definition` count as plain.
    """
    streams = differentiate is by_streaming
    problem = case.make_problem(see=[weights()] if streams else [])
    if undefined(problem):
        return
    seeds = seeds_of(problem)
    if not streams:
        seeds = [(x.astype(problem.query.dtype), d_lse * has_lse, 0 * d_weights) for x, d_lse, d_weights in seeds]
    oracle, other = differentiated(problem, seeds, "float64", 0)
    plain = []
    for order in summation_orders(problem):
        same, more = differentiated(problem, seeds, problem.dtype, order)
        plain += [same, [truth + (x - y) for truth, x, y in zip(oracle, more, other, strict=True)]]
    if problem.dtype != problem.accumulator:
        plain += differentiated(problem, of_stored_output(problem, *seeds[0]), "float64", 0)
    if problem.dtype == "float64":
        plain.append([*by_definition(problem, *seeds[0]), *oracle[len(NAMES) :]])
    sizes = gradient_term_sizes(problem, *seeds[0])
    for name in (framework,) if isinstance(framework, str) else framework:
        given = case.as_torch().make_problem(see=problem.see) if name == "torch" else problem
        with np.errstate(all="ignore"):
            found = differentiate(given, *(to_torch(x) if name == "torch" else x for x in seeds[0]))
        if found is not None:  # None: the values are not finite, and streaming computes the gradients
            judge(problem, found, oracle, plain, sizes)


def judge(problem, found, oracle, plain, sizes):
    """Check the gradients, and which tables have a gradient."""
    floats = [k for k, entry in enumerate(problem.tables) if entry.kind == "float"]
    read = {id(x.table) for x in walk(problem.score) if isinstance(x, Lookup)} if problem.score is not None else set()
    for k, entry in enumerate(problem.tables) if found.tables is not None else ():
        assert (found.tables[k] is not None) == (entry.kind == "float" and id(entry) in read)
    keys = [*NAMES, *floats, "sinks"]
    tables = [None] * len(problem.tables) if found.tables is None else found.tables
    answers = [found.query, found.key, found.value, *(tables[k] for k in floats), found.sinks]
    names = [*NAMES, *(f"table {k}" for k in floats), "sinks"]
    for what, key, answer, truth, *rough in itertools.zip_longest(names, keys, answers, oracle, *plain):
        if answer is not None:
            finer = what not in NAMES and dtype_name(answer) == "float64"  # has a wider dtype than its sums
            judged = to_numpy(answer).astype(problem.accumulator) if finer else answer
            assert_within_budget(judged, truth, rough, f"gradient of {what}", sizes.get(key))


def over_groups(gradient, problem):
    """The gradient of each key head: the sum over the query heads of its group."""
    shape = (*problem.batch_shape, problem.G, problem.group, *gradient.shape[-2:])
    return gradient.reshape(shape).sum(-3)
