"""A default device of torch for the tests: `cpu` for all tensors, or `meta` for those that this library makes alone."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._device import DeviceContext

LIBRARY, MAKERS = Path(__file__).parents[2] / "src" / "sightline", ("torch", "array_api_compat")

# Tests of what a mode of torch changes: what torch.compile traces, torch's fast path, the line that an error names
WITHOUT_MODE = {
    "test_chosen_steps_compile_nothing_again",
    "test_compiled_models_are_recorded",
    "test_functions_that_are_no_masks_are_refused_at_the_door",
    "test_torch_layers_compute_the_same_while_watched",
    "test_torchs_encoder_with_padding",
}


def _makes_for_caller(frame):
    """True in torch, in a layer's constructor, and in a mode, which hands calls on: their callers choose the device."""
    package, name = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_name
    is_layer = name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module)
    return package in MAKERS or is_layer or name in ("__torch_function__", "choose")  # the second is of in_eager_code


class LibraryDevice(DeviceContext):
    """The default device for tensors that this library makes; a test finds its own on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if not torch.compiler.is_compiling():  # torch.compile cannot trace frames
            frame = sys._getframe(1)
            while _makes_for_caller(frame):
                frame = frame.f_back
            if Path(frame.f_code.co_filename).is_relative_to(LIBRARY):
                return super().__torch_function__(function, types, args, kwargs)
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def default_device(request):
    """Run the test under the default device that the environment variable DEFAULT_DEVICE names, if it names one."""
    name = os.environ.get("DEFAULT_DEVICE")
    if name and request.node.originalname in WITHOUT_MODE:
        pytest.skip("a mode of torch changes what is tested")
    with nullcontext() if name is None else LibraryDevice(name) if name == "meta" else torch.device(name):
        yield
