"""Run tests written for CPU arrays on a GPU: inputs are moved to the GPU, and results back."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from sightline.formula.expression import Expression, table_lookup
from sightline.gpu import MIN_TRITON_VERSION_BY_DTYPE, triton_version
from triton_interpreter import INTERPRETED

__all__ = ["DEVICE", "OnDevice", "moved", "skip_unsupported"]

DEVICE = "cpu" if INTERPRETED else "cuda"  # of the tensors that Triton kernels read in tests


class OnDevice:
    """A kernel whose `run` and `backward` accept problems of CPU arrays."""

    def __init__(self, kernel, device=DEVICE):
        self.kernel, self.device = kernel, device

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def run(self, problem):
        skip_unsupported(problem.dtype)
        result = self.kernel.run(self.move_problem(problem))
        return moved(replace(result, keep=None), problem.query.device)

    def backward(self, problem, *given):
        found = self.kernel.backward(self.move_problem(problem), *(moved(each, self.device) for each in given))
        return None if found is None else moved(replace(found, make_entry=None), problem.query.device)

    def move_problem(self, problem):
        """Return the problem with its arrays and the tables of its formulas, also of statistics, on the device."""
        lookup = table_lookup(
            lambda table: table.with_array(moved(table.array, self.device))
        )  # shared tables stay shared
        given = {name: moved(getattr(problem, name), self.device) for name in ("query", "key", "value", "sinks")}
        return replace(problem, **given).map_formulas(lambda formula: formula.rewrite(lookup=lookup))


def skip_unsupported(dtype):
    """Skip the test if the installed triton is too old for a dtype, as `Triton.refuses` reports."""
    minimum = MIN_TRITON_VERSION_BY_DTYPE.get(dtype)
    if minimum and triton_version() < minimum:
        pytest.skip(f"triton {triton_version()} does not compile the kernels in {dtype}")


def moved(value, device):
    """Return `value` with its tensors on a device, also in tuples, dataclasses and formulas."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Expression):
        return value.rewrite(lookup=table_lookup(lambda table: table.with_array(moved(table.array, device))))
    if isinstance(value, tuple):
        parts = [moved(each, device) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: moved(getattr(value, each.name), device) for each in fields(value)})
    return value
