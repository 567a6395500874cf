"""Tests of the choice of the Triton kernels, and of the generated source that `explain` shows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import sightline
from sightline import b, causal, h, i, j, s
from sightline.api.kernels import KERNELS
from sightline.call.kernel import MAX_FORMULA_NODES, choose
from sightline.call.problem import make_problem
from sightline.gpu import MAX_HEAD_WIDTH, Triton


def on_cuda(problem):
    """Return the problem with a query that claims to be on a GPU, which suffices to choose a kernel."""

    class FakeCuda(torch.Tensor):
        device = torch.device("cuda:0")
        is_cuda = True

    return replace(problem, query=problem.query.as_subclass(FakeCuda))


@pytest.fixture(autouse=True)
def recent_gpu(monkeypatch):
    """Skip the query of the GPU's compute capability."""
    monkeypatch.setattr("sightline.gpu._is_too_old", lambda device: False)


def posed(d=8, dtype=torch.float32, **options):
    return make_problem(*[torch.zeros(1, 2, 16, d, dtype=dtype)] * 3, **options)


def test_triton_kernels_are_chosen_for_problems_on_a_gpu():
    plan = choose(KERNELS, on_cuda(posed(mask=causal(), dropout=0.1, seed=1)))
    assert plan.kernel.name == "triton"
    assert choose(KERNELS, posed()).kernel.name == "cpu"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (posed(), "torch arrays on cpu"),
        (make_problem(*[np.zeros((1, 1, 4, 4))] * 3), "numpy arrays on cpu"),
        (on_cuda(posed(d=MAX_HEAD_WIDTH + 1)), f"d_k {MAX_HEAD_WIDTH + 1}"),
        (on_cuda(posed(score=sum([s * k for k in range(MAX_FORMULA_NODES)], s))), "nodes would take long to compile"),
    ],
    ids=["host", "numpy", "wide", "long"],
)
def test_every_refusal_has_its_cure(problem, reason):
    (refusal,) = Triton().refuses(problem)
    assert reason in refusal.reason
    assert refusal.cure


def test_an_old_gpu_and_missing_triton_are_refused(monkeypatch):
    monkeypatch.setattr("sightline.gpu._is_too_old", lambda device: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [r.reason for r in Triton().refuses(on_cuda(posed()))] == [
        "a GPU older than compute capability 8.0",
        "triton is not installed",
    ]


@pytest.mark.parametrize(
    ("version", "refused"), [("3.4.0", ["float32", "float64"]), ("3.7.1", ["float64"]), ("3.8.0+git1", [])]
)
def test_old_triton_versions_are_refused(monkeypatch, version, refused):
    monkeypatch.setattr("triton.__version__", version)
    found = {
        dtype: list(Triton("interpreter").refuses(posed(dtype=getattr(torch, dtype))))
        for dtype in ("float32", "float64")
    }
    assert [dtype for dtype in found if found[dtype]] == refused
    for (refusal,) in filter(None, found.values()):
        assert "triton 3." in refusal.reason
        assert "or later" in refusal.cure


def test_explain_shows_the_generated_source():
    x = np.zeros((1, 1, 8, 4), np.float32)
    explanation = sightline.explain(x, x, x, mask=i >= j, source=True)
    assert "define void @sightline_forward" in str(explanation)
    assert sightline.explain(x, x, x, mask=i >= j).sources == {}
    assert sightline.explain(x, x, x, mask=i >= j, kernel="streaming", source=True).sources == {}


def compiled_for(shape=(1, 2, 100, 64), m=200, **options):
    """Return (kernel, options, specialisation) of each launch of a problem: Triton compiles once for equal tuples."""
    triton = pytest.importorskip("triton")
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from sightline.gpu.launch.forward import attention_launches

    key = torch.zeros(*shape[:2], m, shape[3])
    problem = make_problem(torch.zeros(shape), key, key, **options)
    backend = make_backend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
    found = []
    for call in attention_launches(problem, torch.zeros(shape), torch.zeros(shape[:-1], dtype=torch.float64), "sm_90"):
        bind = create_function_from_signature(call.kernel.signature, call.kernel.params, backend)
        options = call.options(call.configuration.stages)
        found.append((call.kernel, options, bind(**call.arguments, **options)[1]))
    return found


SMALL_STEP = {"dropout": 0.1, "seed": 1, "scale": 1.0}


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 16},
        {"seed": 2**63 + 5},
        {"dropout": 0.9},
        {"scale": 0.25},
        {"shape": (2, 2, 77, 64)},
        {"m": 1000},
        {"mask": i >= j, "m": 1000},
        {"mask": (i >= j) & (b < 1) & (h < 1), "shape": (2, 2, 3000, 64)},
    ],
    ids=str,
)
def test_other_numbers_need_no_new_compilation(other):
    one = SMALL_STEP | {name: other[name] for name in ("mask",) if name in other}
    one |= {"shape": (2, 2, 100, 64)} if "shape" in other else {}
    assert compiled_for(**(one | other)) == compiled_for(**one)


def test_another_formula_needs_a_new_compilation():
    assert compiled_for(mask=i >= j) != compiled_for(mask=i > j)


def test_every_kernel_gets_its_own_sizes(monkeypatch):
    """96 keys fill the tiles of the NaN-safe kernel of dK and dV (32 keys), but not those of the others (64 keys)."""
    pytest.importorskip("triton")
    from sightline.gpu.launch.arguments import to_operand
    from sightline.gpu.launch.backward import backward_launches
    from sightline.statistics import StatisticGradients

    monkeypatch.setattr(sightline.call.problem, "MAX_SMALL_FLOPS", -1)
    x = torch.zeros(1, 2, 96, 128, dtype=torch.bfloat16)
    names = ("d_lse", "lse", "rows", "sums", "d_query", "d_key", "d_value")
    arrays = dict.fromkeys(names) | {name: to_operand(x) for name in ("output", "d_output")}
    even = set()
    for call in backward_launches(make_problem(x, x, x, mask=i >= j), arrays, [], StatisticGradients(), "sm_90"):
        meta, sizes = call.arguments["meta"], call.configuration
        assert (meta.rows, meta.keys, meta.even) == (sizes.rows, sizes.keys, 96 % sizes.keys == 0)
        even.add(meta.even)
    assert even == {True, False}


def test_large_strides_of_any_array_need_64_bit_offsets():
    tl = pytest.importorskip("triton.language")
    from sightline.gpu.configurations import find_configuration
    from sightline.gpu.launch.arguments import GpuOperands, to_operand

    sizes = find_configuration("sm_90", "backward_queries", "float32", 8)
    far = to_operand(torch.empty_strided((1, 2, 16, 8), (2**33, 2**32, 1, 2**28), device="meta"))
    assert GpuOperands(posed(), sizes).meta().index_type == tl.int32
    assert GpuOperands(posed(), sizes, arrays=[far]).meta().index_type == tl.int64


@pytest.mark.parametrize(("name", "precision"), [("gfx942:sramecc+", "tf32"), ("gfx90a", "ieee")])
def test_tf32_is_used_only_on_a_gpu_that_has_it(monkeypatch, name, precision):
    pytest.importorskip("triton")
    from types import SimpleNamespace

    from sightline.gpu.launch import arguments as launch_arguments

    query = on_cuda(posed()).query
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=name))
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    assert launch_arguments.dot_precision(query) == precision
    assert launch_arguments.dot_precision(query.half()) == "ieee"
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    assert launch_arguments.dot_precision(query) == "ieee"
