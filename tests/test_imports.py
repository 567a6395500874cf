"""`import sightline` loads NumPy and nothing heavier."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import sightline
from sightline.errors import MissingExtraError

HEAVY = {"jax", "keras", "llvmlite", "matplotlib", "ml_dtypes", "pandas", "rich", "scipy", "torch", "transformers"}
HEAVY |= {"equinox", "flax", "tensorflow", "triton"}


def loaded(program):
    """The top-level packages that a fresh Python has loaded after the program."""
    report = "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", program + report], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_import_loads_only_numpy():
    found = loaded("import sightline")
    assert "numpy" in found
    assert not found & HEAVY


def test_this_test_can_fail():
    assert "llvmlite" in loaded("import sightline, llvmlite") & HEAVY


def test_flax_loads_with_the_first_layer_that_stores_its_weights():
    found = loaded("import sightline.flax")
    assert "jax" in found
    assert "flax" not in found


@pytest.mark.wide
def test_submodules_load_when_they_are_first_accessed():
    program = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import sightline
print(*[getattr(sightline, name).__name__ for name in sightline.SUBMODULES])"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [f"sightline.{name}" for name in sightline.SUBMODULES]


@pytest.mark.parametrize("name", ["jax", "flax", "equinox"])
def test_an_import_without_jax_names_the_extra(name):
    program = f"""
import sys
sys.modules["jax"] = None
import sightline.errors
try:
    import sightline.{name}
except sightline.errors.MissingExtraError as error:
    print(error.cure)"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f'pip install "sightline-attention[{name}]"'


def test_formulas_and_streaming_need_no_compiler():
    program = """
import numpy as np, sightline
x = np.ones((4, 2), np.float32)
sightline.attention(x, x, x, mask=sightline.causal(), kernel="streaming")
sightline.explain(x, x, x)"""
    assert not loaded(program) & HEAVY


def test_llvmlite_loads_with_the_first_generated_kernel():
    program = "import numpy as np, sightline; x = np.ones((4, 2), np.float32); sightline.attention(x, x, x)"
    assert loaded(program) & HEAVY == {"llvmlite"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_list_of_benchmarks_does_not_load_torch(device):
    program = f"""
import sys
sys.modules["torch"] = None
from benchmarks.__main__ import main
assert main(["--list", "--device", {device!r}]) == 0"""
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)


@pytest.mark.parametrize(
    "name", [m.name for m in pkgutil.walk_packages(sightline.__path__, "sightline.") if "__main__" not in m.name]
)
def test_every_public_name_exists(name):
    module = pytest.importorskip(name, exc_type=MissingExtraError)
    public = getattr(module, "__all__", [])
    assert len(public) == len(set(public))
    assert all(hasattr(module, entry) for entry in public)
