"""A plugin of pytest that compiles every kernel of `tests/gpu/interpreted` for a GPU, and runs none of them.

    pytest -p compile_only tests/gpu/interpreted

Triton's interpreter accepts programs that its compiler refuses. With this plugin Triton compiles each kernel as on a
GPU of the architecture COMPILE_FOR (sm_90 by default), and launches nothing. A test fails if a kernel does not compile.
"""

import os

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.driver import driver
from triton.runtime.errors import TritonError

import ahead_of_time
import on_device
from sightline.gpu import Triton

TARGET = os.environ.get("COMPILE_FOR", "sm_90")
FAILURES = CompilationError, TritonError  # PTXASError and OutOfResources are of the second kind


class CompileOnly(Triton):
    """The kernels for TARGET, for tensors in host memory."""

    def __init__(self, kernel):
        super().__init__(TARGET)
        self.kernel = self

    def run(self, problem):
        on_device.skip_unsupported(problem.dtype)
        return super().run(problem)


torch.cuda.is_available = lambda: True  # the tests ask whether there is a GPU
driver.set_active(ahead_of_time._OfflineDriver(TARGET))
on_device.OnDevice, on_device.DEVICE = CompileOnly, "cpu"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    if report.failed and not isinstance(error, FAILURES):
        report.outcome = "passed"
    return report
