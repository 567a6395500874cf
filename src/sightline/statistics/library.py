"""The functions that request sums, maxima and minima of formulas of the weights, and the named ones among them."""

from __future__ import annotations

import math
from operator import index
from typing import Any, Literal

from ..arrays.operations import check_float_dtype
from ..arrays.unreadable import check_kind
from ..errors import MaskError, ParameterError, check_count
from ..formula.expression import SYMBOLS, Expression, apply, as_expression, walk, where
from ..formula.printing import format_as_code
from .contexts import MAX_RESULT_BYTES
from .per_query import WeightedSum
from .reduction import EXTREMES, Rectangle, Reduction
from .statistic import Statistic

j, s, p = (SYMBOLS[name] for name in "jsp")
Over = Expression | tuple[Expression, ...]
Cells = tuple[int, int] | None
MAX_SCORE = Reduction(s, "max", "j", name="max_score", hidden=-math.inf)
ENTROPY = Reduction(-p * apply("log", p), "sum", "j", name="entropy")
RECEIVED = {how: Reduction(p, how, "i", name="received") for how in ("sum", "mean", "max")}


def sum(formula: Any, over: Over, cells: Cells = None) -> Statistic:
    """Request Σ f over some of the axes, where f is any formula of a pair, its weight p and its score s.

    `sum(p * abs(i - j), over=j)` is the mean distance between a query and the keys that it attends to.
    `sum(p, over=i)` is the weight that every key receives, and `sum(p / 12, over=h)` one map of 12 heads.

    p is the weight P_ij after softmax and before dropout, s is the final score, and log(p) is s − lse, exact where p
    underflows. If f divides by such a p, it is NaN or ∞. Hidden pairs add nothing, even if f is NaN or ∞ there. Query,
    key, sinks and the tables of the score get gradients; the tables of f get none. A sum over j that is proportional to
    p is computed together with the output. `explain` says how the others are computed.

    The result is in the accumulator's dtype (float64 for float64 arrays, else float32). The weights themselves,
    `sum(p, over=())`, and their sums over b and h are in the query's dtype.

    Parameters
    ----------
    formula : formula or number
        f, of p, s, b, h, i, j, n, m and tables: `p * abs(i - j)`, `p ** 2`, `where(j < i, p, 0)`, `-p * np.log(p)`. A
        condition counts as 1 and 0.
    over : symbol, or tuple of symbols
        The axes that are summed: any of b, h, i and j. The result has the others, in the order (..., H, n, m).
        `over=()` is the matrix of f itself.
    cells : (rows, columns), optional
        With i and j in `over`, the pairs are summed in the cells of a grid, as in `pooled`. The result has these two
        axes last.

    Raises
    ------
    ParameterError
        over or cells is something else, or f reads a table that requires a gradient. Also raised by attention if a
        result with an entry for every pair takes more than 2 GiB.
    FormulaError, TableError
        The formula has no meaning or reads outside its table.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> from sightline import i, j, p
    >>> x, mask = np.zeros((4, 1), np.float32), sightline.causal()  # tokens with equal scores
    >>> see = {"distance": sightline.sum(p * (i - j), over=j), "purity": sightline.sum(p**2, over=j)}
    >>> _, seen = sightline.attention(x, x, x, mask=mask, see=see)
    >>> seen["distance"]  # the mean of 0 to i
    array([0. , 0.5, 1. , 1.5], dtype=float32)
    >>> (1 / seen["purity"]).round(2)  # the number of keys that count
    array([1., 2., 3., 4.], dtype=float32)
    """
    axes, outer = _read_over("sum", over)
    formula, cells = _read_formula(formula), _read_cells("sum", axes, cells)
    statistic: Statistic = Reduction(formula, "sum", axes, cells)
    for axis, name in (("h", "heads"), ("b", "batch")):
        statistic = statistic.sum(name) if axis in outer else statistic
    return statistic


def max(formula: Any, over: Over, cells: Cells = None) -> Statistic:
    """Request the maximum of f over i, j or both, where f is any formula of a pair, its weight p and its score s.

    Hidden pairs take no part. The maximum of no pairs is −∞. Parameters, dtype and errors are those of `sum`; `over`
    has only i and j, because the maximum over heads is the maximum of the result over its axis of heads.

    Over one axis, the result is a named tuple: `value`, and `where`, int64: the first position of the maximum among the
    keys (over j) or the queries (over i); −1 for no pairs. With `.rows(...)`, or on a cache, a query's position is that
    in its sequence. Keys are counted among those that the cache keeps. The gradient goes to this pair. A maximum over
    both axes has no gradient.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> from sightline import i, j, p, where
    >>> x, mask = np.array([[2], [1], [0], [1]], np.float32), sightline.causal()
    >>> see = {"from far": sightline.max(where(i - j > 1, p, 0), over=i)}  # of every key: who attends to it from afar?
    >>> _, seen = sightline.attention(x, x, x, mask=mask, see=see)
    >>> seen["from far"].where
    array([3, 3, 2, 3])
    """
    return _extremum("max", formula, over, cells)


def min(formula: Any, over: Over, cells: Cells = None) -> Statistic:
    """Request the minimum of f over i, j or both; ∞ for no pairs. All else is as in `max`."""
    return _extremum("min", formula, over, cells)


def _extremum(how: str, formula: Any, over: Over, cells: Cells) -> Statistic:
    axes, outer = _read_over(how, over)
    if outer:
        cure = f"the {how} of the result over its axis of heads or batch"
        raise ParameterError(f"{how}(formula, over={over})", "i, j or both", cure)
    formula, cells = _read_formula(formula), _read_cells(how, axes, cells)
    return Reduction(formula, how if axes else "sum", axes, cells, name=how, hidden=EXTREMES[how])


def _read_over(name: str, over: Any) -> tuple[str, str]:
    """Return the axes of a pair, in the order "ij", and the axes "h" and "b" among the symbols in `over`."""
    listed = over if type(over) in (tuple, list) else (over,)
    names = [axis for axis in "bhij" if any(symbol is SYMBOLS[axis] for symbol in listed)]
    if len(names) != len(listed):
        allowed = "the symbols b, h, i and j, or a tuple of some of them, each once"
        cure = "over=j, with `from sightline import j`; to sum groups of keys, weighted_sum(x), x[j, c] 1 for group c"
        raise ParameterError(f"{name}(formula, over={over!r})", allowed, cure)
    return "".join([axis for axis in names if axis in "ij"]), "".join([axis for axis in names if axis in "bh"])


def _read_cells(name: str, axes: str, cells: Any) -> Cells:
    if cells is None:
        return None
    given = f"{name}(formula, cells={cells!r})"
    if axes != "ij":
        raise ParameterError(f"{given} over {axes or 'no axes'}", "cells of queries and keys", "over=(i, j)")
    if type(cells) not in (tuple, list) or len(cells) != 2:
        raise ParameterError(given, "(rows, columns)", "cells=(64, 64)")
    rows, columns = [check_count(name + "(formula, cells={!r})", count, 1, "cells=(64, 64)") for count in cells]
    return rows, columns


def _read_formula(formula: Any) -> Expression:
    expression = as_expression(formula)
    return where(expression, 1.0, 0.0) if expression.kind == "bool" else expression


def mass(mask: Any) -> Statistic:
    """Request Σⱼ P_ij over the keys that satisfy a condition, such as the weight on a document or on a prefix.

    It is `sum(where(mask, p, 0), over=j)`, with the same gradient and errors. The result is (..., H, n) in the
    accumulator's dtype (float64 for float64 arrays, else float32), from 0 to 1; 0 for a query without keys.

    Parameters
    ----------
    mask : formula, function (b, h, i, j) or boolean array
        The condition. The weights of pairs for which it is True are summed. The condition hides no pair.

    Raises
    ------
    MaskError
        mask is None, a formula of a number, or reads p. Also raised by attention if mask is not a condition.

    Examples
    --------
    >>> import sightline
    >>> from sightline import i, j
    >>> a, see = sightline.data.load("minilm_cat").layers[0], [sightline.mass(j == i - 1)]
    >>> _, (before,) = sightline.attention(a.query, a.key, a.value, see=see)
    >>> before[1, :4, 1:].mean(-1).round(2)  # of four heads, head 2 attends to the token before
    array([0.06, 0.06, 1.  , 0.06], dtype=float32)
    """
    reads_p = isinstance(mask, Expression) and any(node is p for node in walk(mask))
    if mask is None or reads_p or (isinstance(mask, Expression) and mask.kind != "bool"):
        text = format_as_code(mask)
        other = f"sum(where({text}, p, 0), over=j)" if reads_p else f"sum(p * {text}, over=j)"
        cure = "mass(i == j)" if mask is None else other
        raise MaskError(f"mass({mask})", "a condition of b, h, i and j. True pairs are summed", cure)
    return Reduction(mask, "sum", "j", name="mass")


def weighted_sum(x: Any) -> Statistic:
    """Request (P x)_i = Σⱼ P_ij x_j: the product of the weights, before dropout, with an array x other than value.

    If x holds positions, the result is the mean position that a query attends to. If x has one-hot rows, the result is
    the weight on each group of keys. If x is the rollout matrix of earlier layers, the result is the attention rollout
    (Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020, section 3).

    The result is (..., H, n, r) in the query's dtype; 0 for a query without keys. The weights and x get gradients.

    Parameters
    ----------
    x : (m, r), (G, m, r) or (..., G, m, r) floats
        One row for every key. Attention converts x to the query's dtype.

    Raises
    ------
    ParameterError, DtypeError
        x is a formula, or not a plain array of floats.
    ShapeError, DeviceError
        Raised by attention if x does not fit the keys, or lies on another device than the query.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x, mask = np.zeros((3, 1), np.float32), sightline.causal()  # tokens with equal scores
    >>> places = np.arange(3, dtype=np.float32)[:, None]
    >>> _, (mean,) = sightline.attention(x, x, x, mask=mask, see=[sightline.weighted_sum(places)])
    >>> mean.ravel().round(2)  # the mean of the positions 0 to i
    array([0. , 0.5, 1. ], dtype=float32)
    """
    if isinstance(x, Expression):
        raise ParameterError("weighted_sum(formula)", "an array with one row for every key", "sum(p * formula, over=j)")
    check_kind("x of weighted_sum(x)", x)
    check_float_dtype("x of weighted_sum(x)", x)
    return WeightedSum(x)


def received(how: Literal["sum", "mean", "max"] = "sum", last: int | None = None) -> Statistic:
    """Request the weight that every key j receives from the queries: Σᵢ P_ij, the mean over i, or max_i P_ij.

    The result is (..., H, m) in the accumulator's dtype (float64 for float64 arrays, else float32); 0 for a key that
    no query attends to. With grouped-query attention (GQA), H is the number of query heads. The result has a
    gradient. The gradient of a maximum goes to the weight of the first query that has the maximum.

    Parameters
    ----------
    how : {"sum", "mean", "max"}, default "sum"
        The mean divides by the number of queries, whether or not they attend to the key.
    last : int, optional
        Count only the last `last` queries, or all queries if there are fewer. Only these queries are computed.

    Raises
    ------
    ParameterError
        how is another word, or last is not a whole number of at least 1.

    References
    ----------
    For the sum: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
    2023. For the last queries: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x, mask = np.zeros((3, 1), np.float32), sightline.causal()  # tokens with equal scores
    >>> _, (received,) = sightline.attention(x, x, x, mask=mask, see=[sightline.received()])
    >>> received.round(2)  # 1 + 1/2 + 1/3, 1/2 + 1/3, and 1/3
    array([1.83, 0.83, 0.33], dtype=float32)
    """
    if how not in [*RECEIVED]:
        raise ParameterError(f"received(how={how!r})", '"sum", "mean" or "max"', 'received("sum")')
    statistic = RECEIVED[how]
    if last is None:
        return statistic
    count = check_count("received(last={!r})", last, 1, "last=32, or last=None for all")
    return statistic.rows(slice(-count, None))


def weights(limit: int = MAX_RESULT_BYTES, insist: bool = False) -> Statistic:
    """Request P_ij = exp(S_ij − lse_i), 0 where hidden: the whole matrix of weights, before dropout.

    The result is (..., H, n, m) in the query's dtype, with a gradient. `.rows(...)`, `.heads(...)` and `.mean(...)`
    make smaller results.

    Parameters
    ----------
    limit : int, default 2 GiB
        The largest size of the matrix in bytes.
    insist : bool, default False
        Ignore the limit.

    Raises
    ------
    ParameterError
        limit is not a whole number ≥ 0. Also raised by attention if the matrix takes more bytes than the limit.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.eye(4, dtype=np.float32)
    >>> _, (last,) = sightline.attention(x, x, x, see=[sightline.weights().rows([-1])])
    >>> last.round(2)
    array([[0.22, 0.22, 0.22, 0.35]], dtype=float32)
    """
    return Reduction(p, "sum", "", name="weights", limit=_check_limit("weights", limit, insist))


def scores(limit: int = MAX_RESULT_BYTES, insist: bool = False) -> Statistic:
    """Request S_ij, the scores that softmax reads: after scale, score formula and mask.

    The result is (..., H, n, m) in the accumulator's dtype (float64 for float64 arrays, else float32), in nats; −∞
    where hidden. The scores have a gradient. The mean over heads is −∞ where any head hides the pair.

    Parameters
    ----------
    limit, insist
        As in `weights`, with the same errors.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x, mask = np.array([[2], [-1]], np.float32), sightline.causal()
    >>> _, (scores,) = sightline.attention(x, x, x, mask=mask, see=[sightline.scores()])
    >>> scores  # the products 2·2, −1·2 and −1·−1
    array([[  4., -inf],
           [ -2.,   1.]], dtype=float32)
    """
    return Reduction(s, "sum", "", name="scores", hidden=-math.inf, limit=_check_limit("scores", limit, insist))


def pooled(rows: int, columns: int, how: Literal["mean", "max"] = "mean", within: Rectangle | None = None) -> Statistic:
    """Request the exact mean or maximum of P over every cell of a grid: the matrix as a picture of any size.

    The rectangle that is pooled has N queries and M keys. With R = min(rows, N), row r of cells covers the queries i,
    counted within the rectangle, with ⌊r·N / R⌋ ≤ i < ⌊(r + 1)·N / R⌋. Columns of cells divide the keys in this way.

    The result is (..., H, min(rows, N), min(columns, M)) in the accumulator's dtype (float64 for float64 arrays, else
    float32). The mean has a gradient, the maximum has none.

    Parameters
    ----------
    rows, columns : int
        The number of cells along queries and along keys. If the rectangle has fewer queries or keys, each has its own
        cell: `pooled(64, 64)` of 10 queries on 10 keys is P itself.
    how : {"mean", "max"}, default "mean"
        Hidden pairs count as 0.
    within : ((first query, past the last), (first key, past the last)), optional
        The rectangle. Default: the whole matrix.

    Raises
    ------
    ParameterError
        rows or columns is not a whole number of at least 1, how is another word, or within is not a rectangle.
    ShapeError
        Raised by attention if the rectangle is not within the matrix.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x, mask = np.zeros((4, 1), np.float32), sightline.causal()  # tokens with equal scores
    >>> _, (cells,) = sightline.attention(x, x, x, mask=mask, see=[sightline.pooled(2, 2)])
    >>> cells.round(2)  # the upper left cell is the mean of 1, 0, 1/2 and 1/2
    array([[0.5 , 0.  ],
           [0.29, 0.21]], dtype=float32)
    """
    rows = check_count("pooled(rows={!r})", rows, 1, "pooled(64, 64)")
    columns = check_count("pooled(columns={!r})", columns, 1, "pooled(64, 64)")
    if how not in ("mean", "max"):
        raise ParameterError(f"pooled(how={how!r})", '"mean" or "max"', 'pooled(64, 64, "mean")')
    return Reduction(p, how, "ij", (rows, columns), None if within is None else _parse_rectangle(within), "pooled")


def _parse_rectangle(within: Any) -> Rectangle:
    try:
        (i0, i1), (j0, j1) = within
        return (index(i0), index(i1)), (index(j0), index(j1))
    except (TypeError, ValueError):
        raise ParameterError(
            f"pooled(within={within!r})", "((first query, past last), (first key, past last))", "((0, 8), (0, 8))"
        ) from None


def _check_limit(name: str, limit: Any, insist: Any) -> int | None:
    limit = check_count(name + "(limit={!r}), a number of bytes", limit, 0, f"{name}(insist=True) for any size")
    return None if insist else limit


def max_score() -> Statistic:
    """Request the largest score of every query, max_j S_ij without the sink logit, and the first j with that score.

    It is `max(s, over=j)`. The result is a named tuple: `value` (..., H, n) in nats, also named `score`, in the
    accumulator's dtype (float64 for float64 arrays, else float32), and `where` (..., H, n) int64. For a query without
    keys, `value` is −∞ and `where` is −1. The gradient of `value` goes to the score of the pair (i, `where`). QK-Clip
    bounds the largest score to keep training stable. Source: Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025,
    section 2.1.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.array([[2], [-1], [1]], np.float32)  # scores: products of two numbers
    >>> _, (largest,) = sightline.attention(x, x, x, see=[sightline.max_score()])
    >>> largest.score, largest.where
    (array([4., 1., 2.], dtype=float32), array([0, 1, 0]))
    """
    return MAX_SCORE


def entropy() -> Statistic:
    """Request H_i = −Σⱼ P_ij ln P_ij, the entropy of the weights: `sum(-p * np.log(p), over=j)`. A sink adds no term.

    The result is (..., H, n) in the accumulator's dtype (float64 for float64 arrays, else float32), in nats, from 0 to
    ln m; 0 for a query without keys. The entropy has a gradient. Training becomes unstable if it falls towards 0.
    Source: Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse", 2023, section 3.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x, mask = np.zeros((3, 1), np.float32), sightline.causal()  # tokens with equal scores
    >>> _, (entropy,) = sightline.attention(x, x, x, mask=mask, see=[sightline.entropy()])
    >>> np.exp(entropy).round(2)  # the number of keys that each query attends to
    array([1., 2., 3.], dtype=float32)
    """
    return ENTROPY
