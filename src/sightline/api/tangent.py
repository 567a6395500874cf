"""The public function `attention_tangent`: the forward derivative of attention on NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays.operations import NUMPY, check_float_dtype, framework
from ..arrays.unreadable import check_kind
from ..call.kernel import Tangents
from ..call.problem import OPERANDS, Options, Problem, parse, validate
from ..call.validation import broadcast_inputs, read_scale, read_score
from ..errors import DtypeError, ParameterError, ShapeError
from ..formula.expression import SYMBOLS, Expression
from ..formula.tables import Table
from .kernels import make_plan, push_forward

INPUTS = '"query", "key", "value", "scale", "sinks" if given, or a table (of floats, up to 4 axes) of the score'
TRANSFORMS = {  # the functions of other libraries that differentiate their arrays
    "attention_tangent": {"torch": "torch.func.jvp", "jax": "jax.jvp"},
    "attention_vjp": {"torch": "loss.backward()", "jax": "jax.vjp"},
}


def attention_tangent(
    query: Any,
    key: Any,
    value: Any,
    tangents: Mapping[str | Table, Any],
    *,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    kernel: str | None = None,
    threads: int | None = None,
) -> tuple[Any, Any]:
    """Return (output, tangent): attention, and its derivative in the direction of the inputs' tangents.

    With the final scores S, P = softmax(S), and the tangents Ṡ of S and V̇ of V, the tangent of the output is

        (P ∘ Ṡ) V + P V̇ − rowsum(P ∘ Ṡ) ∘ output.

    The memory is O(n). For torch tensors use `torch.func.jvp` of `attention`, for JAX arrays `jax.jvp`.

    Parameters
    ----------
    query, key, value, mask, score, scale, sinks, dropout, seed, kernel, threads
        As in `attention`; query, key and value are NumPy arrays.
    tangents : mapping
        The tangents of inputs. The keys "query", "key", "value" and "sinks" have an array of the input's shape, and
        "scale" has a number. A key may also be a `Table` of floats that the score reads, with an array of the table's
        shape. The other inputs have tangent 0.

    Returns
    -------
    output, tangent : (..., n, d_v) in the dtype of query

    Raises
    ------
    ParameterError
        `tangents` names an unknown input, an input that is not given, or a table that the score does not read.
    ShapeError, DtypeError
        A tangent does not have the shape of its input or holds no floats, or query is not a NumPy array.
    SightlineError
        The errors of `attention`.

    References
    ----------
    Griewank and Walther, "Evaluating Derivatives", 2008, chapter 3 (forward mode). Lu and Song, "Simplifying,
    Stabilizing and Scaling Continuous-Time Consistency Models", 2024, appendix F (of attention).

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.eye(2)
    >>> output, tangent = sightline.attention_tangent(x, x, x, {"value": np.ones((2, 2))})
    >>> tangent  # the rows of the weights sum to 1
    array([[1., 1.],
           [1., 1.]])
    """
    check_numpy("attention_tangent", query)
    if not isinstance(tangents, Mapping):
        given = f"tangents is a {type(tangents).__name__}"
        raise ParameterError(given, "a mapping from inputs to tangents", '{"query": array}')
    arrays = {name: read_floats("tangent", name, tangent) for name, tangent in tangents.items()}
    formula = read_score(score)
    if "scale" in arrays:
        formula, scale, learned = include_scale(query, formula, scale)
        arrays[learned] = _check_tangent("scale", arrays.pop("scale"), ())[None]
    options = Options(mask, formula, None, scale, sinks, dropout, seed, kernel, threads)
    problem = validate(parse(query, key, value, options))
    plan = make_plan(problem)
    result = plan.kernel.run(problem)
    directions = _read_tangents(problem, formula, arrays, {"query": query, "key": key, "value": value, "sinks": sinks})
    tangent, _ = push_forward(problem, plan, directions, (result.output, result.lse))
    output, tangent = (problem.squeeze_heads(x, 2) for x in (result.output, tangent))
    return output, tangent


def check_numpy(name: str, query: Any) -> None:
    """Raise DtypeError unless the query of the function with this name is a NumPy array."""
    check_kind("query", query)
    library = framework(query)
    if library is not NUMPY:
        cure = TRANSFORMS[name].get(library.name, "numpy.asarray(query)")
        raise DtypeError(f"{name} of a query of {library.name}", "NumPy arrays", cure)


def include_scale(query: Any, score: Expression | None, scale: Any) -> tuple[Expression, float, Table]:
    """Return (the score formula with s · t[0] in place of s, 1.0 as the scale, the table t of the scale)."""
    own = Table(np.asarray([read_scale(scale, query)]))
    scaled = SYMBOLS["s"] * own[0]
    return scaled if score is None else score.with_scores(scaled), 1.0, own


def find_uses(origin: Table, score: Expression | None) -> list[Table]:
    """Return the tables of floats that the score reads: `origin` itself, and those that were made from it."""
    read = () if score is None else score.tables
    return [table for table in read if table.kind == "float" and (table is origin or table.source is origin)]


def _read_tangents(
    problem: Problem, score: Expression | None, tangents: dict[Any, Any], inputs: Mapping[str, Any]
) -> Tangents:
    """Return the tangents, broadcast like the problem's arrays. Raise an error for a tangent that fits no input."""
    tables: list[Any] = [None] * len(problem.tables)
    slots = {problem.tables[slot].origin: slot for slot in problem.score_table_indices}
    operands: dict[str, Any] = {}
    for name, array in tangents.items():
        source = inputs.get(name) if isinstance(name, str) else None
        if isinstance(name, Table) and (uses := find_uses(name, score)):
            tangent = _check_tangent(repr(name), array, name.shape)
            for slot in [slots[table.origin] for table in uses]:
                tables[slot] = np.broadcast_to(tangent, problem.tables[slot].shape)
        elif source is None:
            cure = 'tangents={"query": array}; masks have no tangents'
            raise ParameterError(f"a tangent of {name!r}", INPUTS, cure)
        else:
            operands[str(name)] = _check_tangent(str(name), array, np.shape(source))
    sinks = operands.pop("sinks", None)
    filled = {name: operands.get(name, np.zeros((), problem.query.dtype)) for name in OPERANDS}
    filled = {name: np.broadcast_to(x.astype(problem.query.dtype), inputs[name].shape) for name, x in filled.items()}
    pairs = zip(OPERANDS, broadcast_inputs(filled), strict=True)
    query, key, value = (array if name in operands else None for name, array in pairs)
    return Tangents(query, key, value, tuple(tables), sinks)


def _check_tangent(name: str, array: Any, shape: tuple[int, ...]) -> Any:
    """Return the tangent of input `name`. Raise ShapeError if it does not have the input's shape."""
    if array.shape != tuple(shape):
        given = f"a tangent of {name} of shape {array.shape}"
        raise ShapeError(given, f"the input's shape {tuple(shape)}", "numpy.broadcast_to(tangent, shape)")
    return array


def read_floats(what: str, name: Any, array: Any) -> Any:
    """Return a tangent or gradient (`what`) of an input as a NumPy array of floats. `array` may be a Python number."""
    array = np.asarray(float(array)) if isinstance(array, int | float) else array
    if not isinstance(array, np.ndarray | np.generic) or isinstance(array, np.ma.MaskedArray):
        kind = type(array).__name__
        raise DtypeError(f"a {what} of {name} that is a {kind}", "NumPy arrays of floats", f"numpy.asarray({what})")
    check_float_dtype(f"the {what} of {name}", array)
    return np.asarray(array)
