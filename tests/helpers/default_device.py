"""A default device of torch for the tests: `cpu` for all tensors, or `meta` for those that this library makes alone."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._device import DeviceContext

LIBRARY, MAKERS = Path(__file__).parents[2] / "src" / "sightline", ("torch", "array_api_compat")


class LibraryDevice(DeviceContext):
    """The default device for tensors that this library makes; a test finds its own on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if not torch.compiler.is_compiling():  # torch.compile cannot trace frames
            frame = sys._getframe(1)
            while frame.f_globals.get("__name__", "").partition(".")[0] in MAKERS:
                frame = frame.f_back
            if Path(frame.f_code.co_filename).is_relative_to(LIBRARY):
                return super().__torch_function__(function, types, args, kwargs)
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def default_device():
    """Run the test under the default device that the environment variable DEFAULT_DEVICE names, if it names one."""
    name = os.environ.get("DEFAULT_DEVICE")
    with nullcontext() if name is None else LibraryDevice(name) if name == "meta" else torch.device(name):
        yield
