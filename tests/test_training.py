"""A small transformer learns equally with Sightline's and torch's attention: a short examples/train_tiny.py."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

SOURCE = Path(__file__).parents[1] / "examples" / "train_tiny.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_tiny", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WITH_COMPILER = pytest.param(4, "aot_eager", marks=pytest.mark.wide)


# torch's compiler imports deprecated modules of torch
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised by torch
@pytest.mark.parametrize(
    ("steps", "backend"),
    [(10, ""), WITH_COMPILER, *(pytest.param(300, name, marks=pytest.mark.soak) for name in ("", "inductor"))],
)
def test_losses_agree(example, steps, backend):
    """The losses agree within rounding at first, and at the end within the difference that another seed makes."""
    try:
        ours, theirs, other = (
            np.array(example.train(example.ATTENTIONS[name], steps, seed, backend))
            for name, seed in (("sightline", 0), ("torch", 0), ("torch", 1))
        )
    finally:
        torch.compiler.reset()
    depth = example.LAYERS * example.CONTEXT  # consecutive roundings in a step, each of half a unit in the last place
    assert (abs(ours - theirs)[:4] <= depth * np.spacing(theirs[:4].astype(np.float32))).all()
    assert ours[-1] < ours[0]
    last = max(steps // 10, 1)
    spread = abs(theirs[-last:].mean() - other[-last:].mean())
    assert abs(ours[-last:].mean() - theirs[-last:].mean()) <= spread
