"""attention and explain: pose the problem, choose a kernel, run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from . import arrays, call_cache, streaming
from .dispatch import KERNELS, solve, to_caller_layout
from .explanation import Explanation
from .kernel import choose
from .kv_cache import KVCache, as_arrays
from .problem import make_problem
from .statistics import Statistic, Tile
from .streaming import Streaming
from .validation import check_choice

__all__ = ["attention", "explain", "tiles"]


def attention(
    query: Any,
    key: Any,
    value: Any = None,
    *,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    see: Sequence[Statistic] | None = None,
    kernel: str | None = None,
    threads: int | None = None,
) -> Any:
    """Exact scaled dot-product attention, softmax(score(Q Kᵀ · scale) + M) V.

    Parameters
    ----------
    query : (..., H, n, d_k) float16, bfloat16, float32 or float64, NumPy or torch
    key : (..., G, m, d_k), same dtype; H is a multiple of G and head h reads key head h // (H / G)
    value : (..., G, m, d_v)
        Leading axes broadcast. (n, d) and (B, n, d) without heads work too. Any strides. A `KVCache` may stand in place
        of key and value: attention(query, cache).
    mask : formula, function (b, h, i, j) or boolean array, optional
        True attends. What it hides never reaches the output, NaN and ∞ included.
    score : formula or function (s, b, h, i, j), optional
        What becomes of the scaled scores s, in logits. −∞ hides the pair.
    scale : float, default 1/√d_k
        A torch tensor of one number that requires a gradient is learned.
    sinks : (H,) floats, optional
        A logit per head that takes weight and gives nothing (Xiao et al., "Efficient streaming language models with
        attention sinks", 2024; OpenAI, gpt-oss model card, 2025).
    dropout : float, default 0
        Probability with which a weight is dropped; the kept ones are divided by 1 − dropout.
    seed : int, required with dropout for NumPy arrays
        The same seed drops the same weights with every kernel. torch draws it from its own generator.
    see : list of statistics, optional
        What to know of the weights, as `[lse(), top_k(5), received().mean("heads")]`: `sightline.statistics`.
    kernel : str, optional
        Take this kernel and no other: "cpu", "streaming" or "reference", on a GPU "triton" or "fused" (torch's own).
    threads : int, optional
        Threads of the generated kernels; else as `sightline.threads` or SIGHTLINE_THREADS says, else torch's own
        setting where torch is loaded, else every processor this process may run on.

    Returns
    -------
    output : (..., H, n, d_v), the inputs' dtype; 0 for a query that sees nothing
    seen : tuple, only where `see` was given
        One entry per statistic, an array or a named tuple of arrays.

    Raises
    ------
    SightlineError
        As `sightline.problem.make_problem` and `sightline.kernel.choose` say.

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
    plain_arrays = as_arrays(query, key, mask) if value is None and type(key) is KVCache else (key, value, mask)
    cache_key = call_cache.make_key(query, *plain_arrays, score, scale, sinks, dropout, seed, see, kernel, threads)
    if cache_key is not None:
        key, value, mask = plain_arrays
        cached_call = call_cache.lookup(cache_key)
        if cached_call is not None:
            answer = cached_call(query, key, value, threads)
            if answer is not None:
                return answer
    check_choice(kernel, threads)
    options = {"mask": mask, "score": score, "scale": scale, "sinks": sinks, "dropout": dropout, "seed": seed}
    options |= {"see": () if see is None else see}
    if arrays.framework(query) == "torch":
        from .torch.dispatch import run  # a plain import, which torch.compile can follow

        answer = run(query, key, value, options, kernel, threads, cache_key)
    else:
        problem = make_problem(query, key, value, **options)
        result = solve(problem, kernel, threads)
        answer = to_caller_layout(problem, result)
        if cache_key is not None:
            call_cache.insert(
                cache_key, (query, key, value), answer[0], result, call_cache.finish_with_lse if see else None
            )
    output, seen = answer
    return output if see is None else (output, seen)


def explain(
    query: Any,
    key: Any,
    value: Any = None,
    *,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    see: Sequence[Statistic] | None = None,
    kernel: str | None = None,
    threads: int | None = None,
    source: bool = False,
) -> Explanation:
    """What `attention` would do with the same arguments, without doing it.

    Parameters
    ----------
    query, key, value, mask, score, scale, sinks, dropout, seed, see, kernel, threads
        As in `attention`.
    source : bool, default False
        Tell the text of what is generated for the formulas too: LLVM's language for arrays on the processor, functions
        in Triton for a GPU's tensors.

    Returns
    -------
    Explanation
        Prints as a page: the formula, the kernel taken and why each other refused, empty, full and partial tiles,
        FLOPs, bytes, and memory beside the dense form's. Its fields hold the same.

    Raises
    ------
    SightlineError
        As `attention` does.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.eye(3, dtype=np.float32)
    >>> sightline.explain(x, x, x, mask=sightline.causal(), kernel="streaming").kernel
    'streaming'
    """
    check_choice(kernel, threads)
    problem = make_problem(
        query,
        key,
        value,
        mask=mask,
        score=score,
        scale=scale,
        sinks=sinks,
        dropout=dropout,
        seed=seed or 0,
        see=see or (),
    )
    kernels = KERNELS
    if problem.framework == "torch":
        from .torch.dispatch import kernels as with_torch

        kernels = with_torch()
    return Explanation.of(problem, choose(kernels, problem, kernel), source)


def tiles(query: Any, key: Any, value: Any = None, **options: Any) -> Iterator[Tile]:
    """Every tile of the weights in turn, normalised, where n × m of them would not fit.

    Parameters
    ----------
    query, key, value, **options : as in `attention`: mask, score, scale and sinks

    Yields
    ------
    Tile
        `rows` and `columns` (slices), `weights` and final `scores` (..., H, rows, columns) in the accumulator's dtype,
        without the head axis if none came, and `lse` (..., H, rows) float64. Rows in order, and columns in order among
        the same rows; pairs in no tile have no weight. Memory is that of a tile and of lse. They have no gradient.

    Raises
    ------
    SightlineError
        As `attention` does, before the first tile.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> x = np.eye(3, dtype=np.float32)
    >>> [tile.weights.sum().round(2) for tile in sightline.tiles(x, x, x, mask=sightline.causal())]
    [np.float32(3.0)]
    """
    problem = make_problem(query, key, value, **options)
    plain_arrays = {name: arrays.detach(getattr(problem, name)) for name in ("query", "key", "value")}
    problem = replace(problem, **plain_arrays)
    lse = Streaming().run(problem).lse  # made from the same scores as the tiles
    ops = streaming.TileOps(problem)

    def each() -> Iterator[Tile]:
        for tile in streaming.tiles(ops, lse):
            weights, scores = (problem.squeeze_heads(arrays.detach(array), 2) for array in (tile.weights, tile.scores))
            yield Tile(tile.rows, tile.columns, weights, scores, problem.squeeze_heads(tile.lse, 1))

    return each()
