"""The public functions `attention`, `explain` and `tiles`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Never

import numpy as np

from ..arrays import operations as arrays
from ..arrays.unreadable import is_array
from ..call import call_cache
from ..call.explanation import Explanation
from ..call.foreign_arguments import refuse_arguments
from ..call.kernel import Result, choose
from ..call.problem import Options, Problem, parse, validate
from ..call.request import Request, describe
from ..call.validation import AxisOrder, fold_scale, read_score, split_names, to_heads_first
from ..formula.expression import Expression
from ..formula.from_function import refuse_draws
from ..formula.library import bias
from ..kv_cache import KVCache, as_arrays, unpack_cache
from ..kv_cache.query_positions import name_queries, read_functions
from ..statistics import Statistic, Tile, average_results, scores, solve_selections_separately
from ..statistics.dispatch import formulas_of
from ..statistics.restriction import restrict
from .kernels import KERNELS, solve, to_caller
from .shared_prefix import attend_in_parts, can_merge

# While a watch lasts, these functions get the calls of `attend`. One that returns NotImplemented gives no answer.
OBSERVERS: list[Callable[..., Any]] = []
SCORES = scores(insist=True)
MAX_TILE_SCORES = 1 << 20  # the most scores of a tile of `tiles`, over all batches and heads, unless it has one query


def attention(
    query: Any,
    key: Any,
    value: Any = None,
    *positional: Any,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    see: Statistic | Sequence[Statistic] | dict[str, Statistic] | None = None,
    kernel: str | None = None,
    threads: int | None = None,
    layout: AxisOrder = "BHND",
    **unknown: Never,
) -> Any:
    """Compute exact scaled dot-product attention, softmax(score(Q Kᵀ · scale) + M) V.

    Parameters
    ----------
    query : (..., H, n, d_k) float16, bfloat16, float32 or float64
        An array of NumPy, torch, JAX or any other library with the array API. torch's nested tensors work too.
    key : (..., G, m, d_k), the same dtype
        H is a multiple of G. Query head h attends to key head h // (H / G).
    value : (..., G, m, d_v), the same dtype
        The leading axes of query, key and value broadcast. Arrays without a head axis, (n, d) or (B, n, d), work too.
        Any strides are allowed. A `KVCache` can replace key and value: attention(query, cache).
    mask : formula, function (b, h, i, j) or boolean array, optional
        True lets query i attend to key j. A hidden key never changes the output, even if its value is NaN or ∞.
    score : formula or function (s, b, h, i, j), optional
        The new score, in logits, computed from the scaled score s. A score of −∞ hides the pair.
    scale : float, default 1/√d_k
        A torch tensor of one number that requires a gradient is a learned scale, and receives a gradient.
    sinks : (H,) floats, optional
        One extra logit for each head. The logit takes part in the softmax, but has no row of V (Xiao et al., "Efficient
        streaming language models with attention sinks", 2024; OpenAI, gpt-oss model card, 2025).
    dropout : float, default 0
        The probability that a weight is dropped. The weights that are kept are divided by 1 − dropout.
    seed : int, required with dropout for arrays of NumPy and JAX
        The same seed drops the same weights with every kernel. For torch tensors the default is a seed from torch's
        generator.
    see : list of statistics, or dict from names to statistics, or one statistic, optional
        Statistics of the weights to return, for example `[lse(), top_k(5), received().mean("heads")]`.
    kernel : str, optional
        The only kernel to use: "cpu", "streaming" or "reference"; on a GPU also "triton" or "fused" (torch's own); for
        lists of keys also "gather".
    threads : int, optional
        The number of threads of a generated kernel. The default is the first of these that is set: the value of
        `sightline.threads`, the environment variable SIGHTLINE_THREADS, torch's setting if torch is loaded. If none is
        set, the kernel uses every usable processor.
    layout : {"BHND", "BNHD"}
        The order of the axes of query, key, value and output. With "BNHD" they are (..., n, H, d), positions before
        heads, and no array is copied. In a KVCache and in the statistics, heads always come before positions.

    Returns
    -------
    output : (..., H, n, d_v), the dtype of the inputs
        The output of a query without an allowed key is 0. On CPUs the output has the order of query in memory. If query
        is a view of (B, n, H · d), for example, a reshape joins the output's heads to (B, n, H · d_v) without a copy.
    seen : tuple, or dict if `see` is a dict; only if `see` is given
        The result of each statistic of `see`: an array, or a named tuple of arrays.

    Raises
    ------
    SightlineError
        The arguments do not fit together, or no kernel can compute the call. The subclass names the reason, such as
        ShapeError, DtypeError, MaskError, TableError, ParameterError or KernelRefusedError.
    UnknownArgumentError
        An argument that `attention` does not have. For arguments of other libraries, such as `is_causal`, the message
        says what to write.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, equation 1.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> from sightline import i, j
    >>> x = np.eye(3, dtype=np.float32)
    >>> sightline.attention(x, x, x, mask=i >= j).round(2)
    array([[1.  , 0.  , 0.  ],
           [0.36, 0.64, 0.  ],
           [0.26, 0.26, 0.47]], dtype=float32)
    """
    if positional or unknown:
        refuse_arguments("attention", attention, positional, unknown)
    if not (score is None or isinstance(score, Expression)) and is_array(score):
        read_score(score)  # raises an error, because only `attend` takes an array as the score
    by_position, names = layout != "BHND", None
    if by_position:
        query, key, value = to_heads_first(layout, query, key, value)
    if see is not None:
        names, see = split_names(see)
    options = Options(mask, score, see, scale, sinks, dropout, seed, kernel, threads, by_position)
    answer = attend(query, key, value, options)
    if not by_position and names is None:
        return answer
    output, seen = (answer, ()) if see is None else answer
    output = arrays.swap_heads(output) if by_position else output
    if see is None:
        return output
    return output, seen if names is None else dict(zip(names, seen, strict=True))


def attend(query: Any, key: Any, value: Any, options: Options) -> Any:
    """Do what `attention` does for arrays with the heads before the positions."""
    for observer in OBSERVERS:
        answer = observer(query, key, value, options)
        if answer is not NotImplemented:
            return answer
    scale = options.scale
    if type(scale) is not float and getattr(scale, "requires_grad", False) and not arrays.is_compiling():
        score, scale = fold_scale(options.score, scale)
        options = options.replace(score=score, scale=scale)
    if value is None and type(key) is KVCache:
        if arrays.may_break_graph():
            return arrays.untraced()(attend, query, key, None, options)
        key = key.snapshot()
        if key.prefix is not None:
            read = read_functions(options)
            if can_merge(query, key, read):
                output, seen = attend_in_parts(query, key, read, _attend_to_arrays)
                return output if options.see is None else (output, seen)
            key = key.joined()
        answer = _attend_to_arrays(query, key, None, options)
        return answer if options.see is None else (answer[0], name_queries(key, query, options.see, answer[1]))
    return _attend_to_arrays(query, key, value, options)


def _attend_to_arrays(query: Any, key: Any, value: Any, options: Options) -> Any:
    """Do what `attend` does for arrays, or for a cache without a prefix."""
    if arrays.is_compiling():  # the first trace adds torch's types to those that `describe` reads
        return _dispatch(query, key, value, options, None)
    keys, values, of_rows = key, value, options
    if value is None and type(key) is KVCache:
        keys, values, of_rows = as_arrays(query, key, options) or (key, value, options)
    request = describe(query, of_rows)
    if request is not None:
        answer, request = call_cache.answer(request, (query, keys, values))
        if answer is not None:
            if options.see is None:
                return answer[0]
            if True in [one.is_mean for one in options.see]:
                (output, seen), has_heads = answer, query.ndim > 3
                return output, average_results(options.see, seen, output.ndim - 2 - has_heads, has_heads)
            return answer
    refuse_draws(options.mask, options.score)
    if request is None:
        return _dispatch(query, key, value, options, None)
    mask, score, *_ = request.formulas()
    return _dispatch(query, keys, values, of_rows.replace(mask=mask, score=score), request)


def _dispatch(query: Any, key: Any, value: Any, options: Options, request: Request | None) -> Any:
    """Do what `attend` does for a call that the call cache has not answered, and store it if there is a `request`."""
    if request is None and hasattr(options.score, "dtype"):
        options = options.replace(score=bias(options.score))
    library, is_eager = arrays.framework(query), not arrays.is_compiling()
    see = options.see if is_eager and isinstance(options.see, list | tuple) else ()
    is_separate = any(isinstance(one, Statistic) and one.computed.has_own_problem for one in see)
    # results of a query without a batch axis have no batch axis; on a GPU, the output alone may need another kernel
    if is_separate and query.ndim > 2 and call_cache.LOOKUP.read_arrays(query) and arrays.device(query) == "cpu":
        return _dispatch_separately(query, key, value, options)
    if library is arrays.TORCH:
        is_first = is_eager and "sightline.torch.dispatch" not in sys.modules
        from ..torch import dispatch  # an import statement, because torch.compile can trace it

        if is_first:  # the call cache reads tensors from now on
            return _attend_to_arrays(query, key, value, options)
        without_autocast = dispatch.leave_autocast(query, key, value) if is_eager else None
        if without_autocast is not None:
            (query, key, value), context = without_autocast
            with context:  # the call cache serves calls of cast arrays
                return _attend_to_arrays(query, key, value, options)
        answer = dispatch.run(query, key, value, options, request)
    elif library is arrays.JAX:
        from ..jax import dispatch as jax_dispatch

        answer = jax_dispatch.run(query, key, value, options)
    else:
        problem = validate(parse(query, *unpack_cache(query, key, value, options)))
        result = solve(problem)
        answer = to_caller(problem, result, options.see)
        if request is not None:
            formulas = options.mask, options.score, *formulas_of(request.see)
            call_cache.FirstCall(request, formulas, (query, key, value), problem, result).store()
    output, seen = answer
    return output if options.see is None else (output, seen)


def _dispatch_separately(query: Any, key: Any, value: Any, options: Options) -> Any:
    """Do what `attend` does. One call computes each statistic with its own problem, and one call all other results."""
    valid_seed = 0 if options.seed is None else options.seed
    problem = validate(parse(query, *unpack_cache(query, key, value, options.replace(seed=valid_seed)), warns=False))

    def run(part: Problem) -> Result:
        given = part.mask, part.score, part.see, part.scale, part.sinks, part.dropout
        seed = options.seed if part.dropout else None
        own = Options(*given, seed, part.kernel, part.threads, row_formats=part.row_formats)
        output, seen = _attend_to_arrays(part.query, part.key, part.value, own)
        return Result(output, None, seen)

    return to_caller(problem, solve_selections_separately(problem, run), options.see)


def explain(
    query: Any,
    key: Any,
    value: Any = None,
    *positional: Any,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    see: Statistic | Sequence[Statistic] | dict[str, Statistic] | None = None,
    kernel: str | None = None,
    threads: int | None = None,
    layout: AxisOrder = "BHND",
    source: bool = False,
    **unknown: Never,
) -> Explanation:
    """Explain what `attention` would do with the same arguments, without running a kernel.

    Parameters
    ----------
    query, key, value, mask, score, scale, sinks, dropout, seed, see, kernel, threads, layout
        As in `attention`.
    source : bool, default False
        Include the generated code: LLVM assembly for arrays on the CPU, Triton functions for tensors on a GPU.

    Returns
    -------
    Explanation
        `print` shows the formulas, the chosen kernel, why the other kernels were not chosen, the numbers of empty, full
        and partial tiles, FLOPs, bytes, and memory. FLOPs and memory of the dense computation stand beside those of the
        call. The fields have the same information.

    Raises
    ------
    SightlineError
        Every error of `attention`.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.eye(3, dtype=np.float32)
    >>> sightline.explain(x, x, x, mask=sightline.causal(), kernel="streaming").kernel
    'streaming'
    """
    if positional or unknown:
        refuse_arguments("explain", explain, positional, unknown)
    query, key, value = to_heads_first(layout, query, key, value)
    caller_query, is_jax = query, arrays.framework(query) is arrays.JAX
    shared_keys = int(key.prefix.lengths.max()) if isinstance(key, KVCache) and key.prefix is not None else 0
    if is_jax:  # compiled programs run the kernel for NumPy arrays
        query, key, value = (
            arrays.empty(x.shape, arrays.dtype_name(x), x) if hasattr(x, "shape") else x for x in (query, key, value)
        )
    options = Options(mask, score, split_names(see)[1], scale, sinks, dropout, seed or 0, kernel, threads)
    problem = validate(parse(query, *unpack_cache(query, key, value, options)))
    if is_jax:
        from ..jax.dispatch import explain as explain_jax

        return explain_jax(caller_query, problem, source)
    kernels = KERNELS
    if problem.framework is arrays.TORCH:
        from ..torch.dispatch import kernels as with_torch

        kernels = with_torch()
    explanation = Explanation.of(problem, choose(kernels, problem, kernel), source)
    return replace(explanation, shared_keys=shared_keys)


def tiles(
    query: Any,
    key: Any,
    value: Any = None,
    *positional: Any,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    layout: AxisOrder = "BHND",
    **unknown: Never,
) -> Iterator[Tile]:
    """Yield the normalised weights tile by tile, for problems whose n × m weights do not fit into memory.

    Parameters
    ----------
    query, key, value, mask, score, scale, sinks, layout
        As in `attention`, but value may be None: tiles have no output.

    Yields
    ------
    Tile
        `rows` is a slice of the queries, `columns` a slice of the keys. `weights` and the final `scores` have the shape
        (..., H, rows, columns) and the accumulator's dtype; `lse` has the shape (..., H, rows) and is float64. The
        arrays have no head axis if the query has none. Tiles come in ascending order of their rows. A tile has all keys
        from the first to the last one that its queries see; other pairs have weight 0. Only one tile is in memory at a
        time: at most 2²⁰ pairs of all batches and heads, or one query. Tiles have no gradient.

    Raises
    ------
    SightlineError
        Every error of `attention`, before the first tile.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.eye(3, dtype=np.float32)
    >>> [tile.weights.sum().round(2) for tile in sightline.tiles(x, x, x, mask=sightline.causal())]
    [np.float32(3.0)]
    """
    if positional or unknown:
        refuse_arguments("tiles", tiles, positional, unknown)
    value = key if value is None and not isinstance(key, KVCache) else value
    query, key, value = to_heads_first(layout, query, key, value)
    options = Options(mask, score, [SCORES], scale, sinks)
    problem = validate(parse(query, *unpack_cache(query, key, value, options)))
    plain_arrays = {name: arrays.detach(getattr(problem, name)) for name in ("query", "key", "value")}
    return _each_tile(replace(problem, **plain_arrays))


def _each_tile(problem: Problem) -> Iterator[Tile]:
    """Yield a tile of some queries at a time, with the keys from the first to the last one that they see."""
    xp, count = arrays.namespace(problem.query), max(MAX_TILE_SCORES // max(problem.B * problem.H * problem.m, 1), 1)
    for start in range(0, problem.n, count):
        rows = slice(start, min(start + count, problem.n))
        result = solve(restrict(problem, rows, None))
        visible = arrays.to_numpy(result.seen[0] != -math.inf).any(tuple(range(result.seen[0].ndim - 1))).nonzero()[0]
        if not visible.size:
            continue
        columns = slice(int(visible[0]), int(visible[-1]) + 1)
        seen_scores = result.seen[0][..., columns]
        largest = xp.max(seen_scores, axis=-1, keepdims=True)
        largest = xp.where(largest == -math.inf, xp.zeros_like(largest), largest)
        with np.errstate(all="ignore"):  # ∞ − ∞ is NaN
            exponentials = xp.exp(seen_scores - largest)
            total = xp.sum(exponentials, axis=-1, keepdims=True, dtype=xp.float64)
            if problem.sinks is not None:
                total = total + xp.exp(xp.astype(problem.sinks, xp.float64)[:, None, None] - largest)
            weights = exponentials / xp.astype(xp.where(total == 0, xp.ones_like(total), total), seen_scores.dtype)
        seen_scores, weights = (problem.squeeze_heads(arrays.detach(array), 2) for array in (seen_scores, weights))
        yield Tile(rows, columns, weights, seen_scores, problem.squeeze_heads(result.lse, 1))
