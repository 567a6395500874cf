"""Each fault planted in the source of a kernel must make the check of a problem fail."""

import numpy as np
import pytest

from fault_planting import Fault
from sample_problems import arrays
from sightline import dense, i, j, lse, padding, s, softcap
from sightline.formula.tensor_cache import TensorCache
from sightline.gpu.codegen import formula_functions, render_triton
from sightline.gpu.kernels import decode, forward, math, tile_loop, tile_ops
from sightline.gpu.launch import arguments
from sightline.reference.testing import assert_conforms
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

FAULTS = {  # for each problem: the faults that make it fail
    "masked": {
        "stale maximum": Fault(
            tile_ops.update_softmax,
            "x, p, sums, log2_alpha, alpha, new, total, compensation",
            "x, p, sums, log2_alpha, alpha, maximum, total, compensation",
        ),
        "dropped rescale": Fault(forward.process_range, "output * alpha[:, None]", "output"),
        "total not rescaled": Fault(tile_ops.update_softmax, "total * alpha", "total"),
        "wrong head of a group": Fault(tile_ops.load_query_block, "h // args.group", "h % (args.H // args.group)"),
        "sinks without weight": Fault(forward.init, "compensation + 1.0", "compensation"),
        "partial ranges left out": Fault(tile_loop.loop_over_tiles, "range(middle, stop)", "range(0)"),
        "full ranges left out": Fault(tile_loop.loop_over_tiles, "range(start, middle)", "range(0)"),
        "off-by-one mask": Fault(
            tile_ops.compute_scores,
            "formulas.mask_at(b, h, i, at, n, m, tables)",
            "formulas.mask_at(b, h, i, at + 1, n, m, tables)",
        ),
    },
    "scored": {
        "keys past the end": Fault(tile_ops.compute_scores, "j < m", "j <= m + 64"),
        "sign of the scale": Fault(tile_ops.apply_sign, "x * scalar(meta.sign, meta.accumulator)", "x"),
        "unscaled scores": Fault(tile_ops.compute_scores, "s * scale", "s"),
    },
    "dropped": {
        "wrong batch": Fault(tile_ops.locate_head, "array.strides[len(array.lengths) - 1 - k]", "0"),
        "wrong word of four": Fault(
            tile_ops.dropout_mask,
            "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
            "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
        ),
        "wrong four keys": Fault(tile_ops.dropout_mask, "first // 4", "first // 4 + 1"),
        "sum of the undropped weights": Fault(
            forward.process_range,
            "v = tile_ops.load_rows(block.value, j0, meta.keys, m, meta.d_v, meta.padded_d_v, bound, meta)",
            "v = tile_ops.load_rows(block.value, j0, meta.keys, m, meta.d_v, meta.padded_d_v, bound, meta)\n"
            "total += tl.sum(p, 1) - sums",
        ),
        "weights not made larger": Fault(forward.store, "dropout_scale", "1"),
    },
    "divided": {"quotients towards 0": Fault(math.whole_quotient, "quotient - 1", "quotient")},
    "poisoned": {
        "blocks with NaN left as they are": Fault(forward.forward, "tl.load(flags + item) != 0", "item < 0"),
        "visible NaN left out": Fault(forward.decode_nonfinite, 'float("nan")', "0.0"),
        "infinities swapped": Fault(forward.decode_nonfinite, "nonfinite & 2", "nonfinite & 4"),
    },
    "decoded": {
        "a split left out": Fault(
            decode.merge_splits, "power - shift", "tl.where(split < num_splits - 1, power - shift, float('-inf'))"
        ),
        "splits weighted alike": Fault(
            decode.merge_splits, "power - shift", "tl.where(power > -1e30, 0.0, float('-inf'))"
        ),
        "sink in every split": Fault(decode.decode, "init(None, 0, False, meta)", "init(0.0, 0, False, meta)"),
        "one head for all of a group": Fault(decode.decode, "g * group + rows // n", "g * group"),
        "window past its end": Fault(decode.decode, "split + 1", "split + 2"),
    },
}

RUN_BY_DEFAULT = {
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
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=() if fault in RUN_BY_DEFAULT else pytest.mark.soak)
        for name, faults in FAULTS.items()
        for fault in faults
    ],
)
def test_every_fault_is_seen(triton_kernel, plant, name, fault):
    plant(FAULTS[name][fault])
    with pytest.raises(AssertionError, match=RED):
        check(triton_kernel, name)


def test_a_fault_in_the_schedule_is_seen(triton_kernel, monkeypatch):
    """A ragged last tile is taken for a full tile."""
    sound = arguments.encode_ranges

    def encode_ranges(ranges):
        rows, pairs = sound(ranges)
        rows[:, 1] = rows[:, 2]
        return rows, pairs

    monkeypatch.setattr(arguments, "encode_ranges", encode_ranges)
    monkeypatch.setattr(arguments, "_SCHEDULES", TensorCache(4))
    with pytest.raises(AssertionError, match=RED):
        check(triton_kernel, "masked")


def test_a_fault_in_the_text_is_seen(triton_kernel, monkeypatch):
    monkeypatch.setitem(render_triton.TRITON_RULES, "greater_equal", "{0} > {1}")
    monkeypatch.setattr(formula_functions, "_RENDERED", TensorCache(4))
    with pytest.raises(AssertionError, match=RED):
        check(triton_kernel, "masked")
