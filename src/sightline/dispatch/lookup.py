"""The look-up of a repeated call by the layouts of its arrays and by its structure: its formulas and options.

    find_or_run(entries, structure, numbers, operand, ..., table, ...)
        →  (entry, results, layouts, address of operand, ..., address of table, ...), or the only result

`entries` is a dict of earlier calls: the call cache for forward passes, or the backward passes of one cached call. Its
keys are (layouts, structure). The attribute `prepared` of an entry is a `PreparedCall`. If that call is direct,
generated code runs it, and `results` is a tuple of its results. A single result of a direct call is returned alone. If
the call is not direct, `results` is None, and the caller runs the entry. If no entry has the key, the entry is None. If
only the full dispatch can read the arrays (see `arrays.layouts`), None is returned. The full dispatch is the way of a
first call: all checks, the choice of a kernel, and its planning.

`find_in_python` looks up in Python, and runs no call. Generated code replaces it when the first entry is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..arrays import layouts as array_layouts

MAX_CACHED_CALLS = 256  # the call cache moves an entry that was used to the end, so the least recently used is dropped


def find_in_python(
    entries: Mapping[Any, Any], structure: Any, numbers: tuple[float, ...], *arrays: Any
) -> tuple[Any, ...] | None:
    """Return (entry or None, None, layouts, *addresses); None if only the full dispatch can read the arrays.

    `numbers` are the numbers of the call's formulas, which only generated code uses.
    """
    found = array_layouts.read_arrays(*arrays)
    return None if found is None else (entries.get((found[0], structure)), None, *found)


find_or_run: Callable[..., Any] = find_in_python


def read_arrays(*arrays: Any) -> tuple[Any, ...] | None:
    """Return the layouts and addresses of the arrays; None if only the full dispatch can read them."""
    return array_layouts.read_arrays(*arrays)


def use_generated_functions() -> None:
    """Read arrays and run direct calls in generated code from now on, where that is possible."""
    from ..cpu.calls.python_functions import make_array_functions  # loads llvmlite, as each call of a kernel does

    functions = make_array_functions(array_layouts.tensors())
    if functions is not None:
        use(*functions)


def use(reader: Callable[..., Any], finder: Callable[..., Any]) -> None:
    """From now on, read arrays by `reader` and look calls up by `finder`."""
    global find_or_run
    array_layouts.read_arrays, find_or_run = reader, finder


def serve_tensors(tensors: array_layouts.Tensors) -> None:
    """From now on, also read tensors of torch, in the way that `tensors` describes."""
    array_layouts.serve_tensors(tensors)
    use(array_layouts.read_in_python, find_in_python)


def store(entries: dict[Any, Any], key: tuple[Any, ...], entry: Any, limit: int | None = None) -> None:
    """Store an entry, and drop the first entries of the dict beyond `limit`, by default `MAX_CACHED_CALLS`."""
    entries[key] = entry  # each operation on the dict is atomic, so no lock is needed
    while len(entries) > (MAX_CACHED_CALLS if limit is None else limit):
        try:
            del entries[next(iter(entries))]
        except (KeyError, StopIteration, RuntimeError):  # other threads have changed the dict
            break
