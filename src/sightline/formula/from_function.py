"""Conversion of Python functions to formulas, so that a FlexAttention mask_mod or score_mod works unchanged.

The function is called once with the symbols, in the context `table_reads`. It may index any array that it can reach, as
in `document_id[q_idx]`. A TorchFunctionMode turns the read of a tensor at a formula into a lookup of a table, and
changes no other operation. So the tensor may come from a closure, an attribute or a list. NumPy has no modes, so arrays
of NumPy that the function reaches are replaced by `ReadableArray`s.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import pickle
import random
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..arrays.operations import JAX, NUMPY, framework
from ..errors import FormulaError, SightlineError
from .expression import SYMBOLS, Expression, as_expression
from .numpy_functions import IS_READING, accepts
from .tables import Table
from .torch_masks import block_formula, is_block_mask

MAX_FUNCTION_DEPTH = 4  # levels that are searched for arrays: the function, the functions that it calls, and so on
MAX_CONTAINER_LENGTH = 64  # arrays are not searched for in longer lists, tuples and dicts
NUM_TRIES = 3  # calls of a function that seems to draw random numbers
RANDOM_FUNCTIONS = {"bernoulli", "dropout", "multinomial", "normal", "rand", "randint", "randn", "random", "uniform"}
LIBRARIES = ("numpy", "torch", "jax", "sightline")  # modules whose functions are no user's code
ROLES = {  # argument → FlexAttention's name of such a function, and the parameters that the function has there
    "mask": ("mask_mod", "b, h, q_idx, kv_idx"),
    "score": ("score_mod", "score, b, h, q_idx, kv_idx"),
}


def to_formula(value: Any, argument: str, symbols: str) -> Expression:
    """Return `value`, which is an expression, a number or a function, as an expression.

    `argument` is the name of the value in error messages. `symbols` has the arguments for the function, as "b h i j".

    Raises
    ------
    FormulaError
        The function takes other arguments, does not return a formula, or uses the symbols in a way that has no meaning
        for formulas.
    """
    if is_block_mask(value):
        if argument != "mask":
            raise FormulaError(f"{argument} is a BlockMask", "a formula or a score_mod", "pass the BlockMask as mask=")
        return block_formula(value, to_formula(value.mask_mod, argument, symbols))
    if isinstance(value, Expression) or not callable(value):
        return as_expression(value)
    names = symbols.split()
    if _is_own(value):
        name = f"sightline.{value.__name__}"
        raise FormulaError(
            f"{argument} is the function {name} itself", "the formula that it returns", f"call it: {name}(...)"
        )
    function = _wrap_arrays(value)
    try:
        with table_reads():
            result = function(*[SYMBOLS[name] for name in names])
    except SightlineError as error:
        SightlineError.__init__(error, error.given + _place(error), error.allowed, error.cure)
        raise
    except (TypeError, AttributeError, IndexError, RuntimeError, NotImplementedError) as error:
        _check_parameters(value, argument, names)  # only after an error, because it takes longer than the call
        listed = ", ".join(names)
        raise FormulaError(
            f"{argument}={_name(value)} failed when called with ({listed}): {error}{_place(error)}",
            f"a function f({listed}) of formulas",
            "use the arguments as tensors of one number: i + 1, i.clamp(0, 5), tensor[i], torch.where(i >= j, x, y)",
        ) from error
    if result is None:
        raise FormulaError(f"{argument}={_name(value)} returned None", "a formula", "end the function with return ...")
    return as_expression(result)


def refuse_draw(draw: str) -> NoReturn:
    """Raise the error for a function that draws a random number. `draw` says what it calls."""
    raise FormulaError(
        f"{draw} in a mask or score function, which is called once for all pairs",
        "functions of the positions and the score",
        "draw the numbers before the call, in an array that the function indexes: noise[q_idx]",
    )


def refuse_draws(mask: Any, score: Any) -> None:
    """Raise FormulaError if a mask or score function draws from the generator of `random` or `numpy.random`.

    It takes 0.1 ms, so only first calls are checked. Another thread may draw meanwhile, but hardly in each of NUM_TRIES
    calls.
    """
    for function, *options in ((mask, "mask", "b h i j"), (score, "score", "s b h i j")):
        if callable(function) and all(_draws(function, *options) for _ in range(NUM_TRIES)):
            refuse_draw("random numbers of Python or NumPy")


def _draws(*function: Any) -> bool:
    """True if the state of a generator changes while the function is called."""
    before = _generator_states()
    to_formula(*function)
    return _generator_states() != before


def _generator_states() -> bytes:
    numpy_random = sys.modules.get("numpy.random")  # NumPy loads it when it is first read
    return pickle.dumps((random.getstate(), numpy_random and numpy_random.get_state(legacy=False)))


def _is_own(function: Any) -> bool:
    """True for a function of this library, such as `sightline.causal`."""
    module = getattr(function, "__module__", None) or ""  # None for functions that `exec` made
    return module.startswith("sightline.") and hasattr(sys.modules.get(module), getattr(function, "__name__", ""))


def _place(error: Exception) -> str:
    """Return the last line of the user's code before the error, as ", in line 3 of masks.py: if q >= k:"; or ""."""
    places = [
        (Path(frame.f_code.co_filename).name, line, linecache.getline(frame.f_code.co_filename, line).strip())
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_globals.get("__name__", "").startswith(LIBRARIES)
    ]
    return ", in line {1} of {0}: {2}".format(*places[-1]).rstrip(": ") if places else ""


def _name(function: Any) -> str:
    return repr(getattr(function, "__name__", function))


def _check_parameters(function: Any, argument: str, names: list[str]) -> None:
    """Raise FormulaError unless the function takes as many arguments as `names` has. The error suggests a cure."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    if accepts(signature, *names):
        return
    parameters = ", ".join(signature.parameters)
    for count, other in ((4, "mask"), (5, "score")):
        if accepts(signature, *range(count)) and other != argument and argument in ROLES:
            raise FormulaError(
                f"{argument}={_name(function)} takes {count} arguments ({parameters}), as a {ROLES[other][0]} does",
                f"a function of {len(names)} arguments ({ROLES[argument][1]})",
                f"{other}={getattr(function, '__name__', 'function')}",
            )
    listed = ROLES[argument][1] if argument in ROLES else ", ".join(names)
    raise FormulaError(
        f"{argument}={_name(function)} takes the arguments ({parameters})",
        f"a function of {len(names)} arguments ({listed})",
        f"lambda {listed}: f(...) with the arguments that the function needs",
    )


# -- reads of arrays at formulas -------------------------------------------------------------------------------------


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


def _has_formula(index: Any) -> bool:
    return any(isinstance(part, Expression) for part in (index if isinstance(index, tuple) else (index,)))


@cache
def torch_mode() -> Any:
    """Return the subclass of TorchFunctionMode for `table_reads`. A mode makes one table for each tensor."""
    torch = sys.modules["torch"]

    class TableReads(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __init__(self, is_compiled: bool = False) -> None:
            super().__init__()
            self.is_compiled = is_compiled  # torch.compile traces no ids, so every read makes a new table
            self.tables: dict[int, Table] = {}  # by the id of the tensor, which its table refers to

        def __torch_function__(self, function: Any, _: Any, inputs: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.__getitem__ and _has_formula(inputs[1]):
                tensor = inputs[0]
                if self.is_compiled:
                    return Table(tensor)[inputs[1]]
                if id(tensor) not in self.tables:
                    self.tables[id(tensor)] = Table(tensor)
                return self.tables[id(tensor)][inputs[1]]
            if not self.is_compiled and function.__name__.removesuffix("_").removesuffix("_like") in RANDOM_FUNCTIONS:
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


# -- arrays of NumPy and JAX, which torch's mode does not change ------------------------------------------------------


def _wrap_arrays(function: Any, depth: int = MAX_FUNCTION_DEPTH) -> Any:
    """Return the function with readable arrays in place of the arrays in its closure, globals and defaults.

    Functions that it calls are converted too, down to `depth` levels. Everything else is left unchanged.
    """
    if isinstance(function, functools.partial):
        inputs = [_as_readable(value, depth) for value in function.args]
        return functools.partial(
            _wrap_arrays(function.func, depth),
            *inputs,
            **{name: _as_readable(value, depth) for name, value in function.keywords.items()},
        )
    if isinstance(function, types.MethodType):
        return types.MethodType(_wrap_arrays(function.__func__, depth), function.__self__)
    if not isinstance(function, types.FunctionType) or depth == 0:
        return function
    closure, scope = function.__closure__ or (), function.__globals__
    if not all(map(_is_filled, closure)):
        return function
    globals_read = {name: scope[name] for name in _global_names(function.__code__) if name in scope}
    groups = [
        {str(k): cell.cell_contents for k, cell in enumerate(closure)},
        globals_read,
        {str(k): value for k, value in enumerate(function.__defaults__ or ())},
        function.__kwdefaults__ or {},
    ]
    readable = [{name: _as_readable(value, depth) for name, value in group.items()} for group in groups]
    if all(_is_same(new.values(), old.values()) for new, old in zip(readable, groups, strict=True)):
        return function
    cells, changed, defaults, keyword_defaults = readable
    new_cells = [  # a cell without arrays stays the function's own, which `nonlocal` writes to
        cell if value is cell.cell_contents else types.CellType(value)
        for cell, value in zip(closure, cells.values(), strict=True)
    ]
    copy = types.FunctionType(
        function.__code__, {**scope, **changed}, function.__name__, tuple(defaults.values()) or None, tuple(new_cells)
    )
    copy.__kwdefaults__ = keyword_defaults
    return copy


def _is_same(items: Iterable[Any], others: Iterable[Any]) -> bool:
    """True if the items are the same objects. The caller then keeps the original, to which a function may write."""
    return all(item is other for item, other in zip(items, others, strict=True))


def _as_readable(value: Any, depth: int) -> Any:
    """Return the value with its arrays readable at formulas; the value itself if it has none."""
    if type(value) is np.ndarray and value.ndim > 0:
        return value.view(ReadableArray)
    if framework(value) in (NUMPY, JAX) and getattr(value, "ndim", 0) > 0 and hasattr(value, "dtype"):
        return Table(value)
    if type(value) in (tuple, list) and depth > 0 and len(value) <= MAX_CONTAINER_LENGTH:
        items = [_as_readable(item, depth - 1) for item in value]
        return value if _is_same(items, value) else type(value)(items)
    if type(value) is dict and depth > 0 and len(value) <= MAX_CONTAINER_LENGTH:
        items = [_as_readable(item, depth - 1) for item in value.values()]
        return value if _is_same(items, value.values()) else dict(zip(value, items, strict=True))
    if isinstance(value, types.FunctionType | functools.partial) and not _is_library(value):
        return _wrap_arrays(value, depth - 1)
    return value


def _is_library(function: Any) -> bool:
    """True for the functions of array libraries, except those that FlexAttention's and_masks and or_masks return."""
    module = getattr(function, "__module__", "") or ""
    is_joint = module == "torch.nn.attention.flex_attention" and getattr(function, "__closure__", None)
    return module.startswith(LIBRARIES) and not is_joint


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names of the globals that a function and its nested functions read."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(_global_names(c) for c in inner))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  reading an empty cell raises ValueError
    except ValueError:
        return False
    return True
