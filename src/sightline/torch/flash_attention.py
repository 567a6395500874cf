"""FlashAttention's functions and torch's `varlen_attn`, with their signatures.

Query i of n queries stands at position i + m − n among its m keys. So `causal` hides key j if j > i + m − n, and a
window (left, right) leaves the keys from `left` before this position to `right` after it; −1 is no limit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api.functions import attention
from ..arrays.operations import check_float_dtype
from ..errors import ParameterError, ShapeError, SightlineError
from ..formula.expression import SYMBOLS, Expression, as_expression
from ..formula.library import documents, padding
from ..formula.library import softcap as softcap_formula
from ..formula.tables import table
from ..statistics import lse as lse_of
from .nested import Packing

b, h, i, j, m, n, s = (SYMBOLS[name] for name in "bhijmns")
INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


class FlashOptions(NamedTuple):
    """The options that the functions have in common, as `flash_attn_func` describes them."""

    window: tuple[int, int]
    scale: float | None
    with_lse: bool
    causal: bool = False
    softcap: float = 0.0
    slopes: Tensor | None = None
    dropout: float = 0.0


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Compute attention of packed sequences, with the arguments of `torch.nn.attention.varlen.varlen_attn`, torch 2.13.

    Parameters
    ----------
    query : (T_q, H, d), the sequences one after another
    key, value : (T_k, G, d), or the pages (pages, page size, G, d) of a `block_table`
    cu_seq_q, cu_seq_k : (N + 1,) integers, the first position of each sequence, and the total
    max_q, max_k, num_splits : change nothing
    return_aux : torch.nn.attention.varlen.AuxRequest, optional
    scale : float, default 1/√d
    window_size : (left, right), default (−1, −1), which is no limit; (−1, 0) is causal attention
    enable_gqa : True allows H to be a multiple of G
    seqused_k : (N,) integers, default the lengths of `cu_seq_k`: how many first keys of each sequence take part
    block_table : (N, pages of a sequence) integers, optional: the pages of each sequence, which are copied

    Returns
    -------
    output : (T_q, H, d); 0 for a query without allowed keys
    lse : (H, T_q) float32, if `return_aux.lse`; −∞ for a query without allowed keys

    Raises
    ------
    ShapeError
        An array has other axes, or integers have other values; or heads differ without `enable_gqa`.

    Examples
    --------
    >>> import torch
    >>> from sightline.torch import varlen_attn
    >>> x, starts = torch.eye(3)[:, None], torch.tensor([0, 1, 3])  # sequences of one and of two tokens
    >>> varlen_attn(x, x, x, starts, starts, 2, 2, window_size=(-1, 0))[:2, 0]
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """
    if not enable_gqa and query.shape[-2] != key.shape[-2]:
        raise ShapeError("key with other heads than query", "as many heads as query", "enable_gqa=True for fewer heads")
    options = FlashOptions(window_size, scale, return_aux is not None and bool(return_aux.lse))
    return _attend_packed((query, key, value), "cu_seq", cu_seq_q, cu_seq_k, seqused_k, block_table, options)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention with the arguments of `flash_attn.flash_attn_func` (flash-attn 2.8).

    Parameters
    ----------
    q : (B, n, H, d)
    k, v : (B, m, G, d), where H is a multiple of G
    dropout_p, softmax_scale : floats, default 0 and 1/√d
    causal : True hides key j from query i if j > i + m − n, and sets the right side of the window to 0
    window_size : (left, right), default (−1, −1), which is no limit
    softcap : float, default 0, which is none: scores s become softcap · tanh(s / softcap)
    alibi_slopes : (H,) or (B, H), optional: −slope · abs(i + m − n − j) is added to the scores
    deterministic : changes nothing, since every run gives the same bits
    return_attn_probs : True returns (output, lse, None), and is refused with dropout

    Returns
    -------
    output : (B, n, H, d); 0 for a query without allowed keys
    lse : (B, H, n) float32; −∞ for a query without allowed keys

    Examples
    --------
    >>> import torch
    >>> from sightline.torch import flash_attn_func
    >>> x = torch.eye(2)[None, :, None]
    >>> flash_attn_func(x, x, x, causal=True)[0, :, 0]
    tensor([[1.0000, 0.0000],
            [0.3302, 0.6698]])
    """
    options = FlashOptions(window_size, softmax_scale, return_attn_probs, causal, softcap, alibi_slopes, dropout_p)
    results = _attend_dense((q, k, v), None, i + (m - n), b, len(q), options)
    return (*results, None) if return_attn_probs else results


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Compute attention of packed sequences, with the arguments of `flash_attn.flash_attn_varlen_func`.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, block_table : see `varlen_attn`; lengths of pages are those of `cu_seqlens_k`
    max_seqlen_q, max_seqlen_k, deterministic : change nothing
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs : see `flash_attn_func`
    """
    options = FlashOptions(window_size, softmax_scale, return_attn_probs, causal, softcap, alibi_slopes, dropout_p)
    results = _attend_packed((q, k, v), "cu_seqlens", cu_seqlens_q, cu_seqlens_k, None, block_table, options)
    return (*results, None) if return_attn_probs else results


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Compute attention over a cache, with the arguments of `flash_attn.flash_attn_with_kvcache` (flash-attn 2.8).

    Parameters
    ----------
    q : (B, n, H, d)
    k_cache, v_cache : (B, capacity, G, d), or the pages (pages, page size, G, d) of a `block_table`; the dtype of q
    k, v : (B, new, G, d), optional: written into the cache first, in place
    cache_seqlens : int or (B,) integers, default the capacity: the positions in use before the call
    cache_batch_idx : (B,) integers, optional: the sequence of the cache of each query sequence, which is copied
    cache_leftpad : (B,) integers, optional: the first position of each sequence in the cache
    block_table : (B, pages of a sequence) integers, optional: the pages of each sequence, which are copied
    rotary_cos, rotary_sin, rotary_interleaved : refused; rotate `q` and `k` before the call
    num_splits : changes nothing
    return_softmax_lse : True returns (output, lse)
    softmax_scale, causal, window_size, softcap, alibi_slopes : see `flash_attn_func`

    Raises
    ------
    ShapeError
        An array has other axes or another dtype, or integers other values; or a sequence ends behind the cache.
    ParameterError
        Rotary tables are given, only one of k and v, or `cache_batch_idx` with a `block_table`.
    """
    if rotary_cos is not None or rotary_sin is not None:
        raise ParameterError("rotary_cos or rotary_sin", "q and k that are rotated", "rotate q and k before the call")
    if (k is None) != (v is None):
        raise ParameterError("only one of k and v", "both, or neither", "k=new_keys, v=new_values")
    if block_table is not None and cache_batch_idx is not None:
        raise ParameterError("cache_batch_idx with a block_table", "one of them", "block_table[cache_batch_idx]")
    check_float_dtype("q", _check("q", q, (-1, -1, -1, -1), dtype=None))
    _check("k_cache", k_cache, (-1, -1, -1, -1), dtype=q.dtype)
    _check("v_cache", v_cache, (*k_cache.shape[:3], -1), dtype=q.dtype)
    count, size, device = len(q), k_cache.shape[1], k_cache.device
    if block_table is not None:
        name, pages = "block_table", _check("block_table", block_table, (count, -1))
    else:  # each sequence of the cache is a page
        rows = torch.arange(count, device=device) if cache_batch_idx is None else cache_batch_idx
        name, pages = "cache_batch_idx", _check("cache_batch_idx", rows, (count,))[:, None]
    new, capacity = 0 if k is None else k.shape[1], size * pages.shape[1]
    lengths = torch.as_tensor(capacity if cache_seqlens is None else cache_seqlens, device=device)
    lengths = _check("cache_seqlens", lengths, (), (count,), most=capacity - new).expand(count) + new
    pages = _pages_in_use(name, pages, lengths, k_cache)
    own = padding(lengths)
    if cache_leftpad is not None:
        own = own & (j >= table(_check("cache_leftpad", cache_leftpad, (count,)))[b])
    at = lengths[:, None] - new + torch.arange(new, device=device)
    place = pages.gather(1, at // size), at % size
    former = k_cache[place], v_cache[place]
    if k is not None and v is not None:
        shapes = [(count, new, *x.shape[2:]) for x in (k_cache, v_cache)]
        k_cache[place], v_cache[place] = (_check(*x, dtype=q.dtype) for x in zip("kv", (k, v), shapes, strict=True))
    is_copied = block_table is not None or cache_batch_idx is not None
    keys, values = (cache[pages].flatten(1, 2) if is_copied else cache for cache in (k_cache, v_cache))
    position = i + (table(lengths)[b] - n)
    options = FlashOptions(window_size, softmax_scale, return_softmax_lse, causal, softcap, alibi_slopes)
    try:
        return _attend_dense((q, keys, values), own, position, b, count, options)
    except SightlineError:  # a refused call leaves the cache as it was
        k_cache[place], v_cache[place] = former
        raise


def _check(name: str, given: Any, *shapes: tuple[int, ...], dtype: Any = torch.int64, most: Any = None) -> Any:
    """Return a tensor. Raise ShapeError if it has none of the shapes, in which −1 is any number, or another dtype.

    dtype : None allows every dtype; int64 allows all integers, and the result has this dtype
    most : if given, integers have to be from 0 to this number, or to the entry of this tensor
    """
    own, fits = tuple(getattr(given, "shape", ())), False
    if isinstance(given, Tensor) and dtype in (None, torch.int64 if given.dtype in INTEGERS else given.dtype):
        fits = any(len(own) == len(x) and all(map(lambda want, size: want in (-1, size), x, own)) for x in shapes)
    if fits and (most is None or not bool(((given < 0) | (given > most)).any())):
        return given.to(torch.int64) if dtype is torch.int64 else given
    shown = f"={given!r}" if fits or not own else f" of shape {own} and dtype {given.dtype}"
    allowed = f"a tensor of {dtype or 'any dtype'} and shape {' or '.join(map(str, shapes))}"
    raise ShapeError(name + shown, allowed + f", from 0 to {most}" * fits, f"{name} as the function describes it")


def _attend_dense(
    arrays: tuple[Tensor, Tensor, Tensor],
    own: Expression | None,
    position: Expression,
    sequence: Expression,
    count: int,
    options: FlashOptions,
) -> Any:
    """Return the output of arrays (B, positions, heads, width), or (output, lse).

    own : the mask of the keys of a query's sequence; None if these are all keys
    position, sequence : the position of query i among the keys, and its sequence, one of `count`
    """
    window, scale, with_lse, causal, softcap, slopes, dropout = options
    for name, array in zip(("query", "key", "value"), arrays, strict=True):
        _check(name, array, (len(arrays[0]), -1, -1, -1), dtype=None)
    if not isinstance(window, tuple | list) or [type(side) for side in window] != [int, int]:
        raise ParameterError(f"window_size={window!r}", "two integers, of which −1 is no limit", "window_size=(-1, -1)")
    if with_lse and dropout:
        cure = "sightline.attention(..., see=[sightline.weights()]) for the weights"
        raise ParameterError(f"return_attn_probs=True with dropout_p={dropout}", "one of them", cure)
    left, right = (window[0], 0) if causal else window
    mask = own
    for limit in [j <= position + right] * (right >= 0) + [j >= position - left] * (left >= 0):
        mask = limit if mask is None else mask & limit
    score = softcap_formula(softcap) if softcap else None
    if slopes is not None:
        heads = arrays[0].shape[2]
        _check("alibi_slopes", slopes, (heads,), (count, heads), dtype=None)
        slope = table(slopes)[h] if slopes.ndim == 1 else table(slopes)[sequence, h]
        score = (s if score is None else score) - slope * abs(position - j)
    see = [lse_of()] if with_lse else None
    results = attention(*arrays, layout="BNHD", mask=mask, score=score, scale=scale, dropout=dropout, see=see)
    return (results[0], results[1][0].float()) if with_lse else results


def _attend_packed(
    arrays: tuple[Tensor, Tensor, Tensor],
    name: str,
    starts: Tensor,
    key_starts: Tensor | None,
    used: Tensor | None,
    pages: Tensor | None,
    options: FlashOptions,
) -> Any:
    """Return the output of packed sequences, or (output, lse).

    name : the beginning of the names of `starts` and `key_starts`, for errors
    used : the number of keys of each sequence, from its first one; None for that of `key_starts`
    """
    for label, array in zip(("query", "key", "value"), arrays, strict=True):
        _check(label, array, (-1,) * (3 if pages is None or label == "query" else 4), dtype=None)
    query, key, value = arrays
    is_self = key_starts is starts and used is None and pages is None
    starts = _check_starts(f"{name}_q", starts, -1, len(query))
    count = len(starts) - 1
    if pages is None:
        key_starts = _check_starts(f"{name}_k", key_starts, count + 1, len(key))
        used = None if used is None else _check("seqused_k", used, (count,), most=key_starts.diff())
    else:
        pages, name = _check("block_table", pages, (count, -1)), f"{name}_k" if used is None else "seqused_k"
        used = _check(name, key_starts, (count + 1,)).diff() if used is None else used
        capacity = key.shape[1] * pages.shape[1]
        used = _check(name, used, (count,), most=capacity)
        pages = _pages_in_use("block_table", pages, used, key)
        key, value = (x[pages].flatten(0, 2) for x in (key, value))
        key_starts = torch.arange(count + 1, device=key.device) * capacity
    of_query = Packing.of(starts, None, len(query))
    sequence, position = of_query.read(of_query.sequence, "i"), as_expression(i)
    if is_self:
        own = documents(of_query.sequence)
    else:
        ends = key_starts[1:] if used is None else key_starts[:-1] + used
        own = of_query.same_sequence(Packing.of(key_starts, used, len(key)))
        position = i + of_query.read((ends - starts[1:])[of_query.sequence], "i")
    results = _attend_dense((query[None], key[None], value[None]), own, position, sequence, count, options)
    return (results[0][0], results[1][0]) if options.with_lse else results[0]


def _check_starts(name: str, given: Any, count: int, total: int) -> Any:
    """Return the starts of sequences and the total, `count` numbers. Raise ShapeError if they are others."""
    starts = _check(name, given, (count,))
    values = starts.tolist()
    if values[:1] == [0] and values[-1] == total and values == sorted(values):
        return starts
    allowed = f"integers that ascend from 0 to {total}, the number of positions"
    raise ShapeError(f"{name}={values}", allowed, f"{name}=torch.tensor([0, *lengths]).cumsum(0)")


def _pages_in_use(name: str, pages: Tensor, lengths: Tensor, cache: Tensor) -> Any:
    """Return the pages of each sequence, which behind its end may be any integers, with 0 there."""
    behind = torch.arange(pages.shape[1], device=pages.device) * cache.shape[1] >= lengths[:, None]
    return _check(name, pages.masked_fill(behind, 0), (-1, -1), most=len(cache) - 1)
