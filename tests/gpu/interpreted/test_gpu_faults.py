"""Each fault planted in the source of a kernel must make the check of a problem fail."""

import numpy as np
import pytest

from sample_problems import arrays
from sightline import dense, i, j, lse, padding, s, softcap
from sightline.formula.tensor_cache import TensorCache
from sightline.gpu.codegen import formula_functions, render_triton
from sightline.gpu.launch import schedule
from sightline.testing import assert_conforms
from strategies import Case

RED = r"budget|shape"

SINKS = np.array([-1.0, 0.5, 2.0, 1.0], np.float32)
HIDDEN = np.random.default_rng(1).random((21, 40)) < 0.5
PROBLEMS = {
    "masked": ({"shape": (1, 4, 21, 12), "groups": 2, "m": 75}, {"mask": (i * 8 >= j) & (j >= i), "sinks": SINKS}),
    "scored": ({"shape": (1, 2, 18, 12), "m": 40}, {"score": softcap(5.0), "scale": -0.7}),
    "divided": ({"shape": (1, 1, 18, 12)}, {"score": s + (j - 9) // 7}),
    "dropped": ({"shape": (2, 2, 20, 8), "m": 40}, {"dropout": 0.4, "seed": 2**40 + 3}),
    "poisoned": ({"shape": (1, 1, 21, 12), "m": 40}, {"mask": dense(HIDDEN)}),
    "decoded": ({"shape": (2, 4, 3, 12), "groups": 2, "m": 130}, {"mask": padding([130, 70]), "sinks": SINKS}),
}

FAULTS = {  # the problem that must fail; the module, a line of its source, and the line with the fault
    "stale maximum": ("masked", ("kernels.tile_ops", "alpha, new, total", "alpha, maximum, total")),
    "dropped rescale": ("masked", ("kernels.forward", "v, output * alpha[:, None]", "v, output")),
    "total not rescaled": ("masked", ("kernels.tile_ops", "old = total * alpha", "old = total")),
    "wrong head of a group": ("masked", ("kernels.forward", "h // args.group", "h % (args.H // args.group)")),
    "sinks without weight": ("masked", ("kernels.forward", "total = compensation + 1.0", "total = compensation")),
    "partial ranges left out": (
        "masked",
        ("kernels.tile_loop", "for range_index in range(middle, stop):", "for range_index in range(0):"),
    ),
    "full ranges left out": (
        "masked",
        ("kernels.tile_loop", "for range_index in range(start, middle):", "for range_index in range(0):"),
    ),
    "off-by-one mask": ("masked", ("kernels.tile_ops", "mask_at(b, h, i, at, n", "mask_at(b, h, i, at + 1, n")),
    "keys past the end": ("scored", ("kernels.tile_ops", "tl.where(j < m, s, float", "tl.where(j <= m + 64, s, float")),
    "wrong batch": ("dropped", ("kernels.tile_ops", "* array.strides[len(array.lengths) - 1 - k]", "* 0")),
    "sign of the scale": ("scored", ("kernels.tile_ops", "x * scalar(sign, meta.accumulator)", "x")),
    "unscaled scores": ("scored", ("kernels.tile_ops", "score_at(s * scale,", "score_at(s,")),
    "quotients towards 0": ("divided", ("kernels.math", "tl.where(wrong, quotient - 1, quotient)", "quotient")),
    "wrong word of four": (
        "dropped",
        ("kernels.tile_ops", "tl.join(tl.join(w0, w2), tl.join(w1, w3))", "tl.join(tl.join(w0, w1), tl.join(w2, w3))"),
    ),
    "wrong four keys": ("dropped", ("kernels.tile_ops", "(first // 4 + tl.arange", "(first // 4 + 1 + tl.arange")),
    "sum of the undropped weights": (
        "dropped",
        (
            "kernels.forward",
            "        v = tile_ops.load_rows(",
            "        total += tl.sum(p, 1) - sums\n        v = tile_ops.load_rows(",
        ),
    ),
    "weights not made larger": ("dropped", ("kernels.forward", "(dropout_scale / safe)", "(1 / safe)")),
    "blocks with NaN left as they are": (
        "poisoned",
        ("kernels.forward", "if tl.load(nonfinite_flags + item) != 0:", "if item < 0:"),
    ),
    "visible NaN left out": ("poisoned", ("kernels.forward", 'float("nan"), signs)', "0.0, signs)")),
    "infinities swapped": ("poisoned", ("kernels.forward", "(nonfinite & 2) != 0", "(nonfinite & 4) != 0")),
    "a split left out": (
        "decoded",
        (
            "kernels.decode",
            "tl.range(num_splits, loop_unroll_factor=UNROLL_FACTOR):\n        power",
            "range(num_splits - 1):\n        power",
        ),
    ),
    "splits weighted alike": (
        "decoded",
        (
            "kernels.decode",
            "(power - shift).to(meta.accumulator)",
            "tl.where(power > -1e30, 0.0, float('-inf')).to(meta.accumulator)",
        ),
    ),
    "sink in every split": ("decoded", ("kernels.decode", "init(None, 0, False, meta)", "init(0.0, 0, False, meta)")),
    "one head for all of a group": ("decoded", ("kernels.decode", "g * group + rows // n", "g * group")),
    "window past its end": ("decoded", ("kernels.decode", "(split + 1) * split_size)", "(split + 2) * split_size)")),
}

SEEN_DAILY = {
    "stale maximum", "wrong head of a group", "partial ranges left out", "off-by-one mask", "keys past the end",
    "wrong four keys", "visible NaN left out", "splits weighted alike",
}  # fmt: skip


def check(kernel, name):
    shapes, options = PROBLEMS[name]
    query, key, value = arrays(dtype="float32", **shapes)
    key[..., key.shape[-2] // 2 :, :] *= 3  # later keys score higher, so the running maximum moves
    if name == "poisoned":
        value[..., 3, 0] = np.nan
        value[..., 5, 1], value[..., 35, 2] = np.inf, -np.inf
    assert_conforms(kernel.run, Case(query, key, value, options).as_torch().make_problem(see=[lse()]))


@pytest.mark.parametrize("name", PROBLEMS)
def test_sound_kernels_pass(triton_kernel, name):
    check(triton_kernel, name)


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in SEEN_DAILY else pytest.mark.soak) for name in FAULTS]
)
def test_every_fault_is_seen(triton_kernel, plant, fault):
    name, planted = FAULTS[fault]
    plant(*planted)
    with pytest.raises(AssertionError, match=RED):
        check(triton_kernel, name)


def test_a_fault_in_the_schedule_is_seen(triton_kernel, monkeypatch):
    """A ragged last tile is taken for a full tile."""
    sound = schedule.encode_ranges

    def encode_ranges(ranges):
        rows, pairs = sound(ranges)
        rows[:, 1] = rows[:, 2]
        return rows, pairs

    monkeypatch.setattr(schedule, "encode_ranges", encode_ranges)
    monkeypatch.setattr(schedule, "_SCHEDULES", TensorCache(4))
    with pytest.raises(AssertionError, match=RED):
        check(triton_kernel, "masked")


def test_a_fault_in_the_text_is_seen(triton_kernel, monkeypatch):
    monkeypatch.setitem(render_triton.TRITON_RULES, "greater_equal", "{0} > {1}")
    monkeypatch.setattr(formula_functions, "_RENDERED", TensorCache(4))
    with pytest.raises(AssertionError, match=RED):
        check(triton_kernel, "masked")
