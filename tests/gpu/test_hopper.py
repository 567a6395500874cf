"""The warp-specialised kernel without a GPU: in an interpreter in NumPy, and compiled for Hopper."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sightline.problem
from sample_problems import arrays
from sightline import alibi, causal, documents, entropy, h, i, j, s, softcap, table, window
from sightline.kernel import Result
from sightline.problem import make_problem
from sightline.testing import assert_conforms
from strategies import Case, generators, masks, scores, to_torch

pytest.importorskip("triton")

from gluon_interpreter import Machine, broken
from sightline.gpu import hopper
from sightline.gpu.aot import compile_kernels
from sightline.gpu.hopper import kernel
from sightline.gpu.hopper import shared_memory_rings as rings
from sightline.gpu.kernels import tile_ops
from sightline.gpu.launch.forward import attention_launches, forward_launches
from sightline.gpu.tuning.default_configurations import Configuration


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Let no problem count as small, for which other kernels run."""
    monkeypatch.setattr(sightline.problem, "MAX_SMALL_FLOPS", -1)


SMALL = Configuration(rows=32, keys=16, warps=4, stages=2)  # so that small problems have several tiles
SHAPES = {"shape": (2, 4, 75, 24), "groups": 2, "m": 83}
PROBLEMS = {
    "plain": {},
    "full tiles alone": {"mask": (i >= 64) | (j < 64)},
    "causal": {"mask": causal()},
    "lower right": {"mask": causal("lower right")},
    "window, capped": {"mask": window(20, 3), "score": softcap(20.0)},
    "packed": {"mask": documents(lengths=[1, 30, 0, 44], key_lengths=[1, 30, 0, 52]) & causal()},
    "rows that see nothing": {"mask": (i > 40) & (j < 30)},
    "holes everywhere": {"mask": (i * 7 // 3 + j) % 3 != 0, "scale": 0.3},
    "biased, sinks": {"score": alibi(4), "sinks": np.array([-1.0, 0.0, 2.0, -np.inf], np.float32)},
    "large scores": {"scale": 40.0, "score": s * 4},
    "by head": {"mask": (i >= j) & (j - i < table(np.array([3, 80, 1, 9]))[h]), "score": s * 2.5},
}


def empty(problem):
    """Return output and lse, full of NaN."""
    rows = (*problem.batch_shape, problem.H, problem.n)
    output = problem.query.new_full((*rows, problem.d_v), torch.nan)
    return output, problem.query.new_full(rows, torch.nan, dtype=torch.float64)


def calls(problem, sizes=SMALL):
    output, lse = empty(problem)
    sizes = replace(sizes, specialised=True)
    return output, lse, list(forward_launches(problem, output, lse, "sm_90", sizes=sizes))


def on_machine(seed, sizes=SMALL, instead=None):
    """Return a function that runs the kernel on a problem in the interpreter."""

    def run(problem):
        output, lse, (call, *_) = calls(problem, sizes)
        Machine(seed, instead).launch(call.kernel, call.programs, **call.arguments)
        return Result(output, lse)

    return run


def build_problem(dtype, options, **shapes):
    return Case(*arrays(dtype=dtype, **(SHAPES | shapes)), options).as_torch().make_problem()


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in PROBLEMS), ("causal", "float16"), ("biased, sinks", "float16")]
)
def test_named_problems(name, dtype):
    problem = build_problem(dtype, PROBLEMS[name])
    assert not list(hopper.refuses(problem))
    assert_conforms(on_machine(seed=0), problem)


def test_a_sink_beyond_base_2_takes_all_weight():
    sinks = np.array([3e38, 0.0, -3e38, 1.0], np.float32)
    found = on_machine(seed=0)(build_problem("bfloat16", {"sinks": sinks, "mask": causal()}))
    assert found.output.isfinite().all()
    assert [bool(head.any()) for head in found.output[0]] == [False, True, True, True]


@pytest.mark.parametrize("stages", [1, 3])
def test_results_do_not_depend_on_the_order_of_events(stages):
    problem = build_problem("bfloat16", PROBLEMS["causal"])
    first, *others = (on_machine(seed, replace(SMALL, stages=stages))(problem) for seed in range(4))
    assert_conforms(lambda _: first, problem)
    for other in others:
        assert torch.equal(other.output, first.output)
        assert torch.equal(other.lse, first.lse)


@st.composite
def problems(draw):
    """Draw problems of the kernel's shapes and layouts, with any mask and score."""
    rng = draw(generators())
    B, G, group = (draw(st.integers(1, 2)) for _ in range(3))
    n, m, eighths = draw(st.integers(1, 90)), draw(st.integers(1, 90)), draw(st.integers(1, 5))
    shapes = [(B, G * group, n, 8 * eighths), (B, G, m, 8 * eighths), (B, G, m, 8 * eighths)]
    extent = (B, G * group, n, m)
    made = [rng.normal(size=shape).astype(np.float16) for shape in shapes]
    if draw(st.booleans()):
        made = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in made]
    options = {"mask": draw(masks(extent)) if draw(st.integers(0, 3)) else None}
    options["score"] = draw(scores(extent)) if draw(st.booleans()) else None
    return make_problem(*map(to_torch, made), **options)


def drawn_problems(examples):
    @settings(max_examples=examples)
    @given(problems(), st.integers(0, 2**32))
    def conforms(problem, seed):
        assume(not list(hopper.refuses(problem)))
        assert_conforms(on_machine(seed), problem)

    conforms()


def test_drawn_problems():
    drawn_problems(12)


@pytest.mark.soak
def test_many_drawn_problems():
    drawn_problems(1000)


FAULTS = {
    "keys not waited for": (rings.wait_tile, "mbarrier.wait(ring.ready.index(slot), step // STAGES & 1)", "pass"),
    "copied over what is read": (
        rings.load_tile,
        "mbarrier.wait(ring.free.index(slot), (step // STAGES & 1) ^ 1)",
        "pass",
    ),
    "phase of the round before": (rings.wait_tile, "step // STAGES & 1", "(step // STAGES & 1) ^ 1"),
    "rounds not counted": (rings.load_tile, "(step // STAGES & 1) ^ 1", "1"),
    "fewer bytes expected": (rings.load_tile, "matrix.nbytes_per_cta", "matrix.nbytes_per_cta // 2"),
    "one warpgroup releases for both": (rings.make_ring, "count=WARPGROUPS", "count=1"),
    "turn not passed": (kernel.process_ranges, "pass_turn(turn, WARPGROUP)\n                products", "products"),
    "no warpgroup begins": (rings.wait_turn, "(step & 1) ^ (1 - WARPGROUP)", "step & 1"),
    "keys released unread": (
        kernel.process_ranges,
        "products = warpgroup_mma_wait(0, deps=[products])\n        release_tile(k_ring, step)",
        "release_tile(k_ring, step)\n        products = warpgroup_mma_wait(0, deps=[products])",
    ),
    "values released unread": (
        kernel.process_ranges,
        "output, p = warpgroup_mma_wait(0, deps=[output, p])  # the product reads p from its registers\n"
        "                release_tile(v_ring, step - 1)",
        "release_tile(v_ring, step - 1)\n                output, p = warpgroup_mma_wait(0, deps=[output, p])",
    ),
    "scores not waited for": (kernel.process_ranges, "wait(1, deps=[products])", "wait(2, deps=[products])"),
    "values of another tile": (
        kernel.process_ranges,
        "v = wait_tile(v_ring, step - 1, meta.padded_d_v, meta)\n                output",
        "v = wait_tile(v_ring, step, meta.padded_d_v, meta)\n                output",
    ),
    "queries not waited for": (kernel.compute_worker, "mbarrier.wait(queries[1].index(WARPGROUP), 0)", "pass"),
    "output not fenced": (kernel.compute_worker, "fence_async_shared()", "pass"),
    "output not waited for": (kernel.compute_worker, "tma.store_wait(0)", "pass"),
    "dropped rescale": (kernel.rescale, "return output *", "return output + 0 *"),
    "stale maximum": (tile_ops.update_softmax, "alpha, new, total", "alpha, maximum, total"),
    "off-by-one mask": (tile_ops.compute_scores, "mask_at(b, h, i, at,", "mask_at(b, h, i, at + 1,"),
    "missed tail of keys": (tile_ops.compute_scores, "j < m,", "j < m + 1,"),
    "first tile twice": (kernel.process_ranges, "gl.where(range_index == first_range, 1, 0)", "0"),
    "wrong head of a group": (kernel.load_worker, "block.h // block.group", "block.h % block.group"),
    "other half of the queries": (kernel.compute_worker, "+ WARPGROUP * ROWS", "+ (1 - WARPGROUP) * ROWS"),
    "sinks forgotten": (kernel.compute_worker, "if sinks is not None:\n        logit", "if False:\n        logit"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if k % 3 else ()) for k, name in enumerate(FAULTS)]
)
def test_broken_on_purpose(name):
    function, before, after = FAULTS[name]
    faulty = {function: broken(function, before, after)}
    sinks = np.array([1.0, 2.0], np.float32)
    problem = build_problem("float16", {"mask": i + 9 >= j, "sinks": sinks}, shape=(1, 2, 75, 24), groups=1)
    right = on_machine(seed=0)(problem)
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(20):
            found = on_machine(seed, instead=faulty)(problem)
            assert torch.equal(found.output, right.output)
            assert torch.equal(found.lse, right.lse)


def test_hidden_nan_flags_its_blocks_for_the_second_launch():
    arrays_of = arrays((1, 2, 100, 16), "float16")
    arrays_of[2][..., 50, 3] = np.nan  # visible to queries from 50 on
    problem = make_problem(*map(to_torch, arrays_of), mask=i >= j)
    output, lse, (call, again) = calls(problem)
    Machine(0).launch(call.kernel, call.programs, **call.arguments)
    nonfinite_flags = call.arguments["nonfinite_flags"].reshape(2, -1).flip(1)  # later blocks come first
    assert torch.equal(nonfinite_flags, torch.tensor([[0, 1, 1, 1]] * 2, dtype=torch.int32))
    for name in ("nonfinite_flags", "lse", "blocks", "n", "m", "schedule"):
        assert again.arguments[name] is call.arguments[name]
    assert again.arguments["output"] is output
    first = Result(output[:, :, :32], lse[:, :, :32])
    assert_conforms(lambda _: first, make_problem(*(to_torch(x[:, :, :32]) for x in arrays_of), mask=i >= j))


def test_no_plan_selects_the_kernel_by_default():
    problem = build_problem("bfloat16", PROBLEMS["causal"])
    assert not list(hopper.refuses(problem))
    launched = [call.kernel for call in attention_launches(problem, *empty(problem), "sm_90")]
    assert launched
    assert kernel.forward not in launched


REFUSED = {
    "float32": ("float32", {}, {}),
    "widths": ("float16", {}, {"d_v": 40}),
    "rows of a multiple of": ("float16", {}, {"shape": (1, 2, 20, 20)}),
    "one of each": ("float16", {}, {"shape": (1, 2, 0, 24)}),
    "a scale above 0": ("float16", {"scale": -1.0}, {}),
    "dropout=0": ("float16", {"dropout": 0.5, "seed": 1}, {}),
    "see=()": ("float16", {"see": [entropy()]}, {}),
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_is_refused(word):
    dtype, options, shapes = REFUSED[word]
    assert any(word in str(refusal) for refusal in hopper.refuses(build_problem(dtype, options, **shapes)))


def test_older_triton_is_refused(monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.6.0")
    assert any("triton 3.9 or later" in str(refusal) for refusal in hopper.refuses(build_problem("float16", {})))


LAYOUTS = {
    "columns": lambda x: x.mT.contiguous().mT,
    "one batch axis": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "address": lambda x: torch.cat([x.reshape(-1), x.reshape(-1)])[1 : 1 + x.numel()].view(x.shape),
    "above 0": lambda x: x[..., :1, :].expand(x.shape),
}


@pytest.mark.parametrize("word", LAYOUTS)
def test_layouts_no_tile_can_be_copied_from(word):
    x = [torch.zeros(2, 3, 2, 20, 24, dtype=torch.bfloat16) for _ in range(3)]
    for place, name in enumerate(("query", "key", "value")):
        given = [LAYOUTS[word](array) if k == place else array for k, array in enumerate(x)]
        refusals = [str(refusal) for refusal in hopper.refuses(make_problem(*given))]
        assert any(word in refusal and refusal.startswith(name) for refusal in refusals)


def for_hopper(width, options, dtype=torch.bfloat16):
    """Yield the kernel compiled for sm_90 in each of its sizes."""
    problem = make_problem(*(torch.zeros(2, 4, 1000, width, dtype=dtype) for _ in range(3)), **options)
    for sizes in hopper.candidate_configurations(problem):
        _, _, (call, *_) = calls(problem, sizes)
        yield from compile_kernels(call.launch, "sm_90")


def assert_specialised(found):
    """Check that the kernel uses wgmma and TMA, moves registers to the compute warps, and serialises no products."""
    for word in ("wgmma.mma_async", "cp.async.bulk.tensor", "mbarrier.try_wait", "setmaxnreg.inc.sync.aligned.u32"):
        assert word in found.text
    assert "serialized" not in found.remarks  # the remark of ptxas if products wait for each other
    assert found.warps == 12
    assert found.shared <= 227 << 10


def test_compiled_for_hopper():
    found = next(for_hopper(64, {"mask": causal()}))
    assert_specialised(found)
    assert found.spilled == 0


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 75, 24), (1, 4, 75, 24), (2, 1, 75, 24), (2, 4, 1, 24), (1, 1, 1, 8)])
def test_axes_of_descriptors_are_in_the_order_of_their_strides(shape, rows_first):
    x = torch.arange(float(np.prod(shape))).reshape(shape).half()
    problem = make_problem(*(x.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else x for _ in range(3)))
    assert not list(hopper.refuses(problem))
    _, _, (call, *_) = calls(problem)
    for name in ("query", "key", "value", "output"):
        matrix = call.arguments[name]
        for outer, inner, length in zip(matrix.strides[:-1], matrix.strides[1:], matrix.shape[1:], strict=True):
            assert outer >= inner * length
        assert all(step % 8 == 0 for step in matrix.strides[:-1])
    assert_conforms(on_machine(seed=0), problem)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["plain", "causal", "window, capped", "by head", "biased, sinks"])
@pytest.mark.parametrize(("width", "dtype"), [(16, "float16"), (64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16")])
def test_all_sizes_compile_for_hopper(width, dtype, name):
    found = list(for_hopper(width, PROBLEMS[name], getattr(torch, dtype)))
    for one in found:
        assert_specialised(one)
    assert found[0].spilled <= (64 if width == 256 else 0)
