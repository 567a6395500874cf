"""Triton kernels: on a GPU if torch sees one, else by Triton's interpreter on CPU tensors.

TRITON_INTERPRET must be set before triton loads, so `test_interpreted.py` starts a process for each file. To run one
file: TRITON_INTERPRET=1 pytest tests/gpu/interpreted/test_gpu_forward.py. On a GPU: pytest tests/gpu/interpreted.
"""

import inspect
import os
import re
import sys
import textwrap
from collections import defaultdict

import pytest
import torch
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction

import fault_planting
import sightline.call.problem
from on_device import OnDevice
from sightline.formula.tensor_cache import TensorCache
from sightline.gpu import Triton
from sightline.gpu.codegen import formula_functions
from sightline.gpu.launch import arguments
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
    monkeypatch.setattr(sightline.call.problem, "MAX_SMALL_FLOPS", -1)
    return Triton("interpreter") if INTERPRETED else OnDevice(Triton())


@pytest.fixture
def small_kernel(triton_kernel, monkeypatch):
    """Return the kernels for tests whose problems are small, with tables on a device whose entries are not read."""
    monkeypatch.setattr(sightline.call.problem, "MAX_SMALL_FLOPS", 2**31)
    monkeypatch.setattr(sightline.call.problem, "UNVERSIONED_DEVICES", ())
    return triton_kernel


@pytest.fixture(params=["small", "large"])
def any_kernel(request, triton_kernel):
    """Return the kernels twice, with the launches of small problems and with those of large problems."""
    return request.getfixturevalue("small_kernel") if request.param == "small" else triton_kernel


@pytest.fixture
def plant(monkeypatch):
    """Return a function that plants a fault until the end of the test. Kernels are compiled again."""

    def put(fault):
        fault_planting.plant(fault, monkeypatch)
        formula_functions.compile_function.cache_clear()  # generated functions import the kernels' modules
        monkeypatch.setattr(arguments, "_SCHEDULES", TensorCache(4))
        if INTERPRETED:
            monkeypatch.setattr(InterpretedFunction, "rewritten_fn", {})
            return
        modules = [module for name, module in sys.modules.items() if name.startswith("sightline.gpu.kernels.")]
        for kernel in [x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)]:
            source = textwrap.dedent(inspect.getsource(kernel.fn))
            monkeypatch.setattr(kernel, "_src", source[re.search("^def ", source, re.MULTILINE).start() :])
            monkeypatch.setattr(kernel, "hash", None)  # of the source and of the functions that the kernel calls
            monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))

    yield put
    formula_functions.compile_function.cache_clear()
