"""The bound on the error of each elementary function of generated code, and the check of the bound."""

from uuid import uuid4

import numpy as np

from sightline.cpu.codegen import math as codegen_math
from sightline.cpu.codegen.builder import Builder, Module
from sightline.cpu.codegen.values import DOUBLE, FLOAT, POINTER, vector
from sightline.cpu.runtime.processor import HOST

LANES = 16
PROMISED = {
    "exp": 2,
    "exp2": 2,
    "exp2_of_negative": 2,
    "exp_of_negative": 2,
    "tanh": {np.float32: 3, np.float64: 1.5},
    "log1p": 4,
}  # units in the last place, as in the docstrings; of each dtype where they differ


def applied(function, x, processor=HOST, lanes=LANES):
    """Apply a function of vectors with `lanes` lanes to an array, whose length is a multiple of `lanes`."""
    kind = FLOAT if x.dtype == np.float32 else DOUBLE
    module = Module()
    builder = Builder(module, "apply")
    source, target = (builder.arguments[0].at(8 * index).load(POINTER, 8) for index in range(2))
    with builder.loop(0, x.size, lanes) as at:
        value = source.at(at * x.itemsize).load(vector(kind, lanes))
        target.at(at * x.itemsize).store(function(builder, value))
    builder.finish()
    result = np.full_like(x, np.nan)
    arguments = np.array([x.ctypes.data, result.ctypes.data])
    kernel = processor.kernel(uuid4().hex, "apply", lambda: module)
    processor.call(kernel, arguments, 1, (x, result))
    return result


def ulps(actual, exact):
    """Return the largest error in units in the last place of the exact value. NaN and infinities must be equal."""
    rounded = exact.astype(actual.dtype)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(rounded))
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(actual[~finite & ~np.isnan(rounded)], rounded[~finite & ~np.isnan(rounded)])
    normal = finite & (np.abs(rounded) >= np.finfo(actual.dtype).tiny)
    error = np.abs(actual[normal].astype(np.longdouble) - exact[normal])
    return float((error / np.spacing(np.abs(rounded[normal])).astype(np.longdouble)).max())


def check_promise(name, dtype, processor=HOST):
    """Raise AssertionError if the error of an elementary function exceeds the bound of its docstring."""
    limit = 800.0 if dtype == np.float64 else 110.0
    x = np.concatenate([np.linspace(-limit, limit, 4096), np.linspace(-1, 1, 4096), np.geomspace(1e-30, 1, 2032)])
    x = np.concatenate(
        [x, [0.0, -0.0, np.inf, -np.inf, np.nan, 88.4, 88.72, 88.73, 127.9, 128.0, -126.0, 1.0, 2, 3, 4, 5]]
    )
    if name.endswith("_of_negative"):
        x = np.where(np.isnan(x), x, -np.abs(x))
    x = x.astype(dtype)
    with np.errstate(all="ignore"):
        exact = getattr(np, name.removesuffix("_of_negative"))(x.astype(np.longdouble))
        promised = PROMISED[name][dtype] if isinstance(PROMISED[name], dict) else PROMISED[name]
        assert ulps(applied(getattr(codegen_math, name), x, processor), exact) <= promised
