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


def printed(program):
    """Return what a fresh Python prints, in the folder with the benchmarks."""
    options = {"capture_output": True, "text": True, "check": True, "cwd": Path(__file__).parents[1]}
    return subprocess.run([sys.executable, "-c", program], **options).stdout


def loaded(program):
    """Return the top-level packages that a fresh Python has loaded after the program."""
    return set(printed(f"{program}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})").split())


def test_import_loads_only_numpy():
    found = loaded("import sightline")
    assert "numpy" in found
    assert not found & HEAVY


def test_flax_loads_with_the_first_layer_that_stores_its_weights():
    found = loaded("import sightline.flax")
    assert "jax" in found
    assert "flax" not in found


@pytest.mark.wide
def test_submodules_load_when_they_are_first_accessed():
    program = """
import os, sys, types
os.environ["KERAS_BACKEND"] = "torch"
sys.modules["lightning.pytorch"] = types.SimpleNamespace(Callback=object)
import sightline
print(*[getattr(sightline, name).__name__ for name in sightline.SUBMODULES])"""
    assert printed(program).split() == [f"sightline.{name}" for name in sightline.SUBMODULES]


def test_an_import_without_jax_names_the_extra():
    names = ["jax", "flax", "equinox"]
    program = f"""
import importlib, sys
sys.modules["jax"] = None
import sightline.errors
for name in {names}:
    try:
        importlib.import_module(f"sightline.{{name}}")
    except sightline.errors.MissingExtraError as error:
        print(error.cure)"""
    assert printed(program).splitlines() == [f'pip install "sightline-attention[{name}]"' for name in names]


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


def test_the_list_of_benchmarks_does_not_load_torch():
    printed("""
import sys
sys.modules["torch"] = None
from benchmarks.__main__ import main
assert [main(["--list", "--device", device]) for device in ("cpu", "cuda")] == [0, 0]""")


@pytest.mark.parametrize(
    "name", [m.name for m in pkgutil.walk_packages(sightline.__path__, "sightline.") if "__main__" not in m.name]
)
def test_every_public_name_exists(name):
    module = pytest.importorskip(name, exc_type=MissingExtraError)
    public = getattr(module, "__all__", [])
    assert len(public) == len(set(public))
    assert all(hasattr(module, entry) for entry in public)
