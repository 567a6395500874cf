"""Tests written for arrays on the processor, run on a GPU: what they give is moved there, and the answer back."""

from dataclasses import fields, is_dataclass, replace

import torch

from sightline.formula.expression import Expression
from sightline.formula.tables import Table

__all__ = ["OnDevice", "moved"]


class OnDevice:
    """A kernel whose `run` and `backward` take problems of the processor's arrays."""

    def __init__(self, kernel, device="cuda"):
        self.kernel, self.device = kernel, device

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def run(self, problem, threads=None):
        return moved(self.kernel.run(self.there(problem), threads), problem.query.device)

    def backward(self, problem, *given):
        found = self.kernel.backward(self.there(problem), *(moved(each, self.device) for each in given))
        return moved(found, problem.query.device)

    def there(self, problem):
        """The problem with its arrays and the tables of its formulas and statistics on the device."""
        names = ("query", "key", "value", "sinks", "mask", "score")
        given = {name: moved(getattr(problem, name), self.device) for name in names}
        see = tuple(statistic.map_formulas(lambda formula: moved(formula, self.device)) for statistic in problem.see)
        return replace(problem, **given, see=see)


def moved(value, place):
    """Tensors there, those in tuples, results and formulas too; all else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(place)
    if isinstance(value, Expression):
        return value.with_tables([Table(moved(table.array, place), table.axes) for table in value.tables])
    if isinstance(value, tuple):
        parts = [moved(each, place) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: moved(getattr(value, each.name), place) for each in fields(value)})
    return value
