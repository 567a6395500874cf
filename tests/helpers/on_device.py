"""Run tests written for CPU arrays on a GPU: inputs are moved to the GPU, and results back."""

from dataclasses import fields, is_dataclass, replace

import torch

from sightline.formula.expression import Expression
from sightline.formula.tables import Table

__all__ = ["OnDevice", "moved"]


class OnDevice:
    """A kernel whose `run` and `backward` accept problems of CPU arrays."""

    def __init__(self, kernel, device="cuda"):
        self.kernel, self.device = kernel, device

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def run(self, problem, threads=None):
        return moved(self.kernel.run(self.move_problem(problem), threads), problem.query.device)

    def backward(self, problem, *given):
        found = self.kernel.backward(self.move_problem(problem), *(moved(each, self.device) for each in given))
        return moved(found, problem.query.device)

    def move_problem(self, problem):
        """Return the problem with its arrays, and the tables of its formulas and statistics, on the device."""
        names = ("query", "key", "value", "sinks", "mask", "score")
        given = {name: moved(getattr(problem, name), self.device) for name in names}
        see = tuple(statistic.map_formulas(lambda formula: moved(formula, self.device)) for statistic in problem.see)
        return replace(problem, **given, see=see)


def moved(value, device):
    """Return `value` with its tensors on a device, also in tuples, dataclasses and formulas."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Expression):
        return value.with_tables([Table(moved(table.array, device), table.axes) for table in value.tables])
    if isinstance(value, tuple):
        parts = [moved(each, device) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: moved(getattr(value, each.name), device) for each in fields(value)})
    return value
