"""The look-up of a repeated call by the layouts of its arrays and by its structure: its formulas and options.

    find_or_run(entries, structure, numbers, operand, ..., table, ...)
        →  (entry, results, layouts, address of operand, ..., address of table, ...), or the only result

`entries` is a dict of earlier calls: the call cache for forward passes, or the backward passes of one cached call. Its
keys are (layouts, structure). The attribute `prepared` of an entry is a `PreparedCall` or None. If that call is direct,
generated code runs it, and `results` is a tuple of its results. A single result of a direct call is returned alone. If
the call is not direct, `results` is None, and the caller runs the entry. If no entry has the key, the entry is None. If
only the full dispatch can read the arrays (see `arrays.layouts`), None is returned. The full dispatch is the way of a
first call: all checks, the choice of a kernel, and its planning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..arrays.caching import store_entry
from ..arrays.layouts import NO_TENSORS, Tensors, read_arrays

if TYPE_CHECKING:
    from .call_cache import Entry, Operands
    from .request import Request

MAX_CACHED_CALLS = 256  # the call cache moves an entry that was used to the end, so the least recently used is dropped


class CallLookup:
    """Reads arrays and looks calls up, in Python, or by generated code from the first repeated call on.

    find_or_run : function that the module's docstring describes
    tensors : how tensors of torch are read
    is_generated : False until `generate` was called

    `sightline.cpu` sets these two, because the CPU's kernels and generated code have them:

    make_find_or_run : function (tensors) that returns the generated `find_or_run`, or None
    find_relative : function (request, operands) that returns an entry made from a call with other lengths, or None
    """

    make_find_or_run: Callable[[Tensors], Callable[..., Any] | None]
    find_relative: Callable[[Request, Operands], Entry | None]

    def __init__(self) -> None:
        self.serve_tensors(NO_TENSORS)

    def serve_tensors(self, tensors: Tensors) -> None:
        """From now on, read tensors of torch in the way that `tensors` describes, in Python until the next call."""
        self.tensors, self.is_generated = tensors, False
        self.find_or_run: Callable[..., Any] = self.find_in_python

    def generate(self) -> None:
        """From now on, read arrays and run direct calls by a generated function, if there is one."""
        self.find_or_run = self.make_find_or_run(self.tensors) or self.find_or_run
        self.is_generated = True

    def read_arrays(self, *arrays: Any) -> tuple[Any, ...] | None:
        """Return the layouts and addresses of the arrays; None if only the full dispatch can read them."""
        return read_arrays(self.tensors, *arrays)

    def find_in_python(
        self, entries: Mapping[Any, Any], structure: Any, numbers: tuple[float, ...], *arrays: Any
    ) -> tuple[Any, ...] | None:
        """Return (entry or None, None, layouts, *addresses); None if only the full dispatch can read the arrays.

        `numbers` are the numbers of the call's formulas, which only generated code uses.
        """
        found = self.read_arrays(*arrays)
        return None if found is None else (entries.get((found[0], structure)), None, *found)


LOOKUP = CallLookup()


def store_call(calls: dict[Any, Any], key: Any, entry: Any) -> None:
    """Store a call. The dict keeps `MAX_CACHED_CALLS` calls."""
    store_entry(calls, key, entry, MAX_CACHED_CALLS)
