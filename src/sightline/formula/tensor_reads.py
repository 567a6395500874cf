"""How a mask or score function reads an array at a formula, as in `document_id[q_idx]`.

`from_function.to_formula` calls the function in the context `table_reads`, in which a TorchFunctionMode is active. This
mode turns the read of a tensor at a formula into a lookup of a table, and changes no other operation. So the tensor may
come from a closure, an attribute or a list. NumPy has no modes, so `to_formula` makes `ReadableArray`s of its arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NoReturn

import numpy as np

from ..errors import FormulaError
from .expression import Expression, is_compiling
from .tables import Table

RANDOM_FUNCTIONS = {"bernoulli", "dropout", "multinomial", "normal", "rand", "randint", "randn", "random", "uniform"}
IS_READING = ContextVar("IS_READING", default=False)  # True while a mask or score function is called


@contextmanager
def table_reads() -> Iterator[None]:
    """Return a context in which a formula can be the index of a torch tensor, as in `document_id[q_idx]`."""
    token = IS_READING.set(True)
    try:
        if "torch" in sys.modules:
            with torch_mode()():
                yield
        else:
            yield
    finally:
        IS_READING.reset(token)


def refuse_draw(draw: str) -> NoReturn:
    """Raise the error for a function that draws a random number. `draw` says what it calls."""
    raise FormulaError(
        f"{draw} in a mask or score function, which is called once for all pairs",
        "functions of the positions and the score",
        "draw the numbers before the call, in an array that the function indexes: noise[q_idx]",
    )


def _has_formula(index: Any) -> bool:
    return any(isinstance(part, Expression) for part in (index if isinstance(index, tuple) else (index,)))


@cache
def torch_mode() -> Any:
    """Return the subclass of TorchFunctionMode for `table_reads`. A mode makes one table for each tensor that is read.

    While torch.compile traces, every read makes a new table.
    """
    torch = sys.modules["torch"]

    class TableReads(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, Table] = {}  # by the id of the tensor, which its table refers to

        def __torch_function__(self, function: Any, _: Any, inputs: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.__getitem__ and _has_formula(inputs[1]):
                tensor = inputs[0]
                if is_compiling():
                    return Table(tensor)[inputs[1]]
                if id(tensor) not in self.tables:
                    self.tables[id(tensor)] = Table(tensor)
                return self.tables[id(tensor)][inputs[1]]
            if not is_compiling() and function.__name__.removesuffix("_").removesuffix("_like") in RANDOM_FUNCTIONS:
                refuse_draw(f"torch.{function.__name__}")
            return function(*inputs, **(kwargs or {}))

    return TableReads


class ReadableArray(np.ndarray[Any, Any]):
    """A view of an array whose entries can be read at formulas."""

    def __getitem__(self, index: Any) -> Any:
        if not _has_formula(index):
            return super().__getitem__(index)
        if "table" not in vars(self):
            vars(self)["table"] = Table(np.asarray(self))
        table: Table = vars(self)["table"]
        return table[index]
