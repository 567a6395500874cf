"""Triton kernels: on a GPU if torch sees one, else by Triton's interpreter on CPU tensors.

TRITON_INTERPRET must be set before triton loads, so `test_interpreted.py` starts a process for each file. To run one
file: TRITON_INTERPRET=1 pytest tests/gpu/interpreted/test_gpu_forward.py. On a GPU: pytest tests/gpu/interpreted.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

import sightline.gpu
import sightline.problem.problem
from on_device import OnDevice
from sightline.gpu import Triton
from sightline.gpu.codegen import formula_functions
from sightline.gpu.launch import forward as launch_forward
from triton_interpreter import INTERPRETED, patch_interpreter


def pytest_configure(config):
    """Raise if kernels can run neither on a GPU nor in the interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        cures = "set TRITON_INTERPRET=1, so that triton interprets these kernels, or install a torch built for your GPU"
        raise pytest.UsageError(f"torch {torch.__version__} sees no GPU: {cures}")


def pytest_collection_modifyitems(items):
    """The interpreter computes with NumPy, which warns where scores of hidden pairs overflow."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


if INTERPRETED:
    patch_interpreter()

FEW_KEYS = 32  # keys per split in decoding, so that small problems have several splits


@pytest.fixture
def triton_kernel(monkeypatch):
    """Return the kernels in the interpreter or on the GPU.

    Decoding has splits of FEW_KEYS keys, and no problem counts as small.
    """
    monkeypatch.setattr(launch_forward, "MIN_KEYS_PER_SPLIT", FEW_KEYS)
    monkeypatch.setattr(sightline.problem.problem, "MAX_SMALL_FLOPS", -1)
    return Triton("interpreter") if INTERPRETED else OnDevice(Triton())


@pytest.fixture
def small_kernel(triton_kernel, monkeypatch):
    """Return the kernels for tests whose problems are small, with tables on a device whose entries are not read."""
    monkeypatch.setattr(sightline.problem.problem, "MAX_SMALL_FLOPS", 2**31)
    monkeypatch.setattr(sightline.problem.problem, "_waits_for_entries", lambda _: True)
    return triton_kernel


@pytest.fixture(params=["small", "large"])
def any_kernel(request, triton_kernel):
    """Return the kernels twice, with the launches of small problems and with those of large problems."""
    return request.getfixturevalue("small_kernel") if request.param == "small" else triton_kernel


MODULES = (  # of kernels and launches; each module precedes the modules that import it
    "kernels.math",
    "kernels.tile_ops",
    "kernels.tile_loop",
    "kernels.fused_statistics",
    "kernels.table_gradient",
    "kernels.forward",
    "kernels.decode",
    "kernels.weights_pass",
    "kernels.weights_top_k",
    "kernels.weights_pooled",
    "launch.schedule",
    "kernels.backward",
    "kernels.backward_queries",
    "kernels.backward_keys",
    "launch.weights_pass",
    "launch.forward",
    "launch.backward",
)


@pytest.fixture
def plant(monkeypatch, tmp_path):
    """Return a function that replaces text in the source of a module until the end of the test."""

    def put(place, before, after):
        for name in MODULES[MODULES.index(place) :]:
            package, _, stem = name.partition(".")
            text = Path(sightline.gpu.__path__[0], package, f"{stem}.py").read_text()
            if name == place:
                assert text.count(before) >= 1, f"{name} no longer has {before!r}"
                text = text.replace(before, after)
            path = tmp_path / f"{name}.py"  # triton reads the source lines of kernels
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(f"sightline.gpu.{name}", path)
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, spec.name, module)
            monkeypatch.setattr(sys.modules[f"sightline.gpu.{package}"], stem, module, raising=False)
            spec.loader.exec_module(module)
        monkeypatch.setattr(sys.modules["sightline.gpu.launch.forward"], "MIN_KEYS_PER_SPLIT", FEW_KEYS)
        formula_functions.compile_function.cache_clear()  # generated functions import these modules

    yield put
    formula_functions.compile_function.cache_clear()
