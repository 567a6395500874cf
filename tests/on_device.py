"""Tests written for arrays on the processor, run on a GPU: what they give is moved there."""

from dataclasses import fields, is_dataclass, replace

import torch

__all__ = ["OnDevice"]


class OnDevice:
    """A kernel whose `run` and `gradients` take problems from anywhere."""

    def __init__(self, kernel, device="cuda"):
        self.kernel, self.device = kernel, device

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def run(self, problem, threads=None):
        return self.kernel.run(self.moved(problem), threads)

    def gradients(self, problem, d_output, d_lse, saved, wanted, threads=None, slopes=None):
        given = (self.placed(each) for each in (d_output, d_lse))
        saved = tuple(self.placed(each) for each in saved)
        return self.kernel.gradients(self.moved(problem), *given, saved, wanted, threads, self.slopes(slopes))

    def moved(self, problem):
        """The problem with its arrays and the tables of its formulas on the device."""
        arrays = {name: self.placed(getattr(problem, name)) for name in ("query", "key", "value", "sinks")}
        formulas = {name: self.formula(getattr(problem, name)) for name in ("mask", "score")}
        return replace(problem, **arrays, **formulas, see=tuple(each.mapped(self.formula) for each in problem.see))

    def slopes(self, slopes):
        """The formulas of statistics' gradients, likewise."""
        if not is_dataclass(slopes):
            return slopes
        named = {each.name: getattr(slopes, each.name) for each in fields(slopes)}
        return replace(slopes, **{name: self.formula(self.placed(each)) for name, each in named.items()})

    def formula(self, formula):
        """A formula that reads its tables there; anything else as it is."""
        if not hasattr(formula, "with_tables"):
            return formula
        return formula.with_tables([replace_array(table, self.placed(table.array)) for table in formula.tables])

    def placed(self, array):
        """A tensor there; anything else as it is."""
        return array.to(self.device) if isinstance(array, torch.Tensor) else array


def replace_array(table, array):
    """A table of the same axes."""
    return type(table)(array, table.axes)
