"""Kernels in Triton: on a GPU where torch sees one, else triton's interpreter runs them on tensors of the CPU.

Interpreted files run in processes of their own, which `test_gpu.py` starts: TRITON_INTERPRET must be set before triton
loads. One alone: TRITON_INTERPRET=1 pytest tests/interpreted/test_gpu_forward.py. On a GPU: pytest tests/interpreted.
"""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import sightline.gpu
from on_device import OnDevice
from sightline.gpu import Triton
from sightline.gpu.codegen import formula_functions as seams
from sightline.gpu.launch import forward as run


def pytest_configure(config):
    """Kernels must have a place to run."""
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        cures = "set TRITON_INTERPRET=1, so that triton interprets these kernels, or install a torch built for your GPU"
        raise pytest.UsageError(f"torch {torch.__version__} sees no GPU: {cures}")


def pytest_collection_modifyitems(items):
    """Arrays of NumPy stand for blocks of pairs there, and what a mask hides may overflow."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


def lifted(function):
    """A function of NumPy on the interpreter's blocks, which knows none of libdevice."""

    def call(*inputs):
        blocks = [x for x in inputs if isinstance(x, tl.tensor)]
        values = function(*(x.handle.data if isinstance(x, tl.tensor) else x for x in inputs))
        shape = max((block.type for block in blocks), key=lambda kind: len(getattr(kind, "shape", ())))
        return tl.tensor(TensorHandle(values.astype(blocks[0].handle.data.dtype), blocks[0].dtype.scalar), shape)

    return call


def condition(comparison):
    """A comparison that says of its result that it is a condition, not a number: of scalars the interpreter forgets."""
    return lambda *blocks: TensorHandle(comparison(*blocks).data.astype(bool), tl.int1)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    for name in dir(InterpreterBuilder):
        if name.startswith(("create_fcmp", "create_icmp")):
            setattr(InterpreterBuilder, name, condition(getattr(InterpreterBuilder, name)))
    libdevice.exp, libdevice.tanh, libdevice.pow = lifted(np.exp), lifted(np.tanh), lifted(np.power)


def once(patch):
    """Puts the interpreter's functions in place once a launch, where it does so for every call of a device function."""
    done = set()

    def patched(function):
        rooms = frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)
        if rooms in done:
            return None
        done.add(rooms)
        scope = patch(function)
        restore = scope.restore
        scope.restore = lambda: (done.clear(), restore())
        return scope

    return patched


if INTERPRETED:
    interpreter._patch_lang = once(interpreter._patch_lang)
    options = interpreter.interpreter_builder.options  # it works out whether sums overflow, and without debug drops it
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)


FEW_KEYS = 32  # worth a part of their own in decoding: small problems have several


@pytest.fixture
def triton_kernel(monkeypatch):
    """The kernels as the interpreter runs them, or the GPU, which decode where there are fewer keys."""
    monkeypatch.setattr(run, "LEAST", FEW_KEYS)
    return Triton("interpreter") if INTERPRETED else OnDevice(Triton())


MODULES = (  # of kernels and launches, each before those that import it
    "kernels.math",
    "kernels.tile_ops",
    "kernels.tile_loop",
    "kernels.fused_statistics",
    "kernels.table_gradient",
    "kernels.forward",
    "kernels.decode",
    "kernels.weights_pass",
    "kernels.weights_top_k",
    "kernels.weights_dense",
    "kernels.weights_pooled",
    "kernels.weights_received",
    "launch.schedule",
    "kernels.backward",
    "kernels.backward_queries",
    "kernels.backward_keys",
    "launch.weights_pass",
    "launch.statistics",
    "launch.forward",
    "launch.backward",
)


@pytest.fixture
def plant(monkeypatch, tmp_path):
    """Put a fault into a module's source: a line as it is, and the line with the fault. The test's end removes it."""

    def put(place, before, after):
        for name in MODULES[MODULES.index(place) :]:
            package, _, stem = name.partition(".")
            text = Path(sightline.gpu.__path__[0], package, f"{stem}.py").read_text()
            if name == place:
                assert text.count(before) >= 1, f"{name} no longer has {before!r}"
                text = text.replace(before, after)
            path = tmp_path / f"{name}.py"  # triton reads the lines of what it runs
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(f"sightline.gpu.{name}", path)
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, spec.name, module)
            monkeypatch.setattr(sys.modules[f"sightline.gpu.{package}"], stem, module, raising=False)
            spec.loader.exec_module(module)
        monkeypatch.setattr(sys.modules["sightline.gpu.launch.forward"], "LEAST", FEW_KEYS)
        seams.function.cache_clear()  # generated functions import others

    yield put
    seams.function.cache_clear()
