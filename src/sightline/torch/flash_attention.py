"""FlashAttention's functions and torch's `varlen_attn`, with their signatures.

Query i of n queries stands at position i + m − n among its m keys. So `causal` hides key j if j > i + m − n, and a
window (left, right) leaves the keys from `left` before this position to `right` after it; −1 is no limit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api.functions import attention
from ..errors import ParameterError, ShapeError
from ..formula.expression import SYMBOLS, Expression, as_expression
from ..formula.library import documents, padding
from ..formula.library import softcap as softcap_formula
from ..formula.tables import table
from ..statistics import lse as lse_of
from .nested import Packing

b, h, i, j, m, n, s = (SYMBOLS[name] for name in "bhijmns")


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
    seqused_k : (N,) integers, optional: how many keys of each sequence take part, counted from its first position
    block_table : (N, pages of a sequence) integers, optional: the pages of each sequence, which are copied

    Returns
    -------
    output : (T_q, H, d); 0 for a query without visible keys
    lse : (H, T_q) float32, if `return_aux.lse`; −∞ for a query without visible keys

    Raises
    ------
    ShapeError
        Bounds of sequences do not ascend from 0 to the total, or the heads differ without `enable_gqa`.

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
    if (seqused_k if block_table is not None else cu_seq_k) is None:
        cure = "seqused_k=lengths of the sequences in the cache"
        raise ParameterError("no lengths of keys", "seqused_k with a block_table, cu_seq_k without one", cure)
    options = window_size, scale, return_aux is not None and bool(return_aux.lse)
    return _attend_packed((query, key, value), cu_seq_q, cu_seq_k, seqused_k, block_table, *options)


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
    output : (B, n, H, d); 0 for a query without visible keys
    lse : (B, H, n) float32; −∞ for a query without visible keys

    Examples
    --------
    >>> import torch
    >>> from sightline.torch import flash_attn_func
    >>> x = torch.eye(2)[None, :, None]
    >>> flash_attn_func(x, x, x, causal=True)[0, :, 0]
    tensor([[1.0000, 0.0000],
            [0.3302, 0.6698]])
    """
    options = window_size, softmax_scale, return_attn_probs, causal, softcap, alibi_slopes, dropout_p
    found = _attend((q, k, v), None, i + (m - n), b, *options)
    return (*found, None) if return_attn_probs else found


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
    used = None if block_table is None else cu_seqlens_k.diff()
    options = window_size, softmax_scale, return_attn_probs, causal, softcap, alibi_slopes, dropout_p
    found = _attend_packed((q, k, v), cu_seqlens_q, cu_seqlens_k, used, block_table, *options)
    return (*found, None) if return_attn_probs else found


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
    k_cache, v_cache : (B, capacity, G, d), or the pages (pages, page size, G, d) of a `block_table`
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
        A sequence, with its new keys, is longer than the capacity of the cache.
    ParameterError
        Rotary tables are given, or only one of k and v.
    """
    if rotary_cos is not None or rotary_sin is not None:
        raise ParameterError("rotary_cos and rotary_sin", "q and k that are rotated", "rotate q and k before the call")
    if (k is None) != (v is None):
        raise ParameterError("only one of k and v", "both, or neither", "k=new_keys, v=new_values")
    count, size, device = len(q), k_cache.shape[1], k_cache.device
    pages = None if block_table is None else block_table.to(torch.int64)
    capacity = size if pages is None else size * pages.shape[1]
    lengths = torch.as_tensor(capacity if cache_seqlens is None else cache_seqlens, device=device).long().expand(count)
    rows = None if cache_batch_idx is None else cache_batch_idx.to(torch.int64)
    new_length = 0 if k is None else k.shape[1]
    if bool((lengths + new_length > capacity).any()):
        cure = "a larger cache, or sightline.KVCache, which grows"
        raise ShapeError(f"{new_length} new keys after {lengths.tolist()}", f"at most {capacity} positions", cure)
    if k is not None and v is not None:
        at = lengths[:, None] + torch.arange(new_length, device=device)
        owner = torch.arange(count, device=device) if rows is None else rows
        place = (owner[:, None], at) if pages is None else (pages.gather(1, at // size), at % size)
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[place] = new
        lengths = lengths + new_length
    if pages is not None:
        keys, values = (cache[pages].flatten(1, 2) for cache in (k_cache, v_cache))
    else:
        keys, values = (k_cache, v_cache) if rows is None else (k_cache[rows], v_cache[rows])
    own = padding(lengths)
    if cache_leftpad is not None:
        own = own & (j >= table(cache_leftpad)[b])
    position = i + (table(lengths)[b] - n)
    options = window_size, softmax_scale, return_softmax_lse, causal, softcap, alibi_slopes
    return _attend((q, keys, values), own, position, b, *options)


def _attend(
    arrays: tuple[Tensor, Tensor, Tensor],
    own: Expression | None,
    position: Expression,
    sequence: Expression,
    window: tuple[int, int],
    scale: float | None,
    with_lse: bool,
    causal: bool = False,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    dropout: float = 0.0,
) -> Any:
    """Return the output of arrays (B, positions, heads, width), or (output, lse).

    own : the mask of the keys of a query's sequence; None if these are all keys
    position, sequence : the position of query i among the keys, and its sequence
    """
    if with_lse and dropout:
        given, allowed = f"return_attn_probs=True with dropout_p={dropout}", "return_attn_probs=True without dropout"
        raise ParameterError(given, allowed, "sightline.attention(..., see=[sightline.weights()]) for the weights")
    left, right = (window[0], 0) if causal else window
    mask = own
    for limit in [j <= position + right] * (right >= 0) + [j >= position - left] * (left >= 0):
        mask = limit if mask is None else mask & limit
    score = softcap_formula(softcap) if softcap else None
    if slopes is not None:
        slope = table(slopes)[h] if slopes.ndim == 1 else table(slopes)[sequence, h]
        score = (s if score is None else score) - slope * abs(position - j)
    see = [lse_of()] if with_lse else None
    options: dict[str, Any] = {"mask": mask, "score": score, "scale": scale, "dropout": dropout, "see": see}
    found = attention(*arrays, layout="BNHD", **options)
    return (found[0], found[1][0].float()) if with_lse else found


def _attend_packed(
    arrays: tuple[Tensor, Tensor, Tensor],
    starts: Tensor,
    key_starts: Tensor | None,
    used: Tensor | None,
    pages: Tensor | None,
    *options: Any,
) -> Any:
    """Return the output of packed sequences, or (output, lse). `used` is the number of keys of each sequence."""
    query, key, value = arrays
    if pages is not None:
        key, value = (x[pages.to(torch.int64)].flatten(0, 2) for x in (key, value))
        key_starts = torch.arange(len(pages) + 1, device=key.device) * (len(key) // max(len(pages), 1))
    key_starts = starts if key_starts is None else key_starts
    for bounds, total in ((starts, len(query)), (key_starts, len(key))):
        ascends = bounds.ndim == 1 and len(bounds) == len(starts) > 0 and not bool((bounds.diff() < 0).any())
        if not ascends or int(bounds[0]) != 0 or int(bounds[-1]) != total:
            raise ShapeError(
                f"starts of sequences {bounds.tolist()} on {total} positions",
                "numbers that ascend from 0 to the number of positions, as many for keys as for queries",
                "cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)",
            )
    if used is not None and bool((used > key_starts.diff()).any()):
        allowed = f"at most {key_starts.diff().tolist()}"
        raise ShapeError(f"seqused_k {used.tolist()}", allowed, "the number of keys in use of each sequence")
    of_query = Packing.of(starts, None, len(query))
    sequence, position = of_query.read(of_query.sequence, "i"), as_expression(i)
    if key_starts is starts and used is None and len(key) == len(query):
        own = documents(of_query.sequence)
    else:
        ends = key_starts[1:] if used is None else key_starts[:-1] + used
        own = of_query.same_sequence(Packing.of(key_starts, used, len(key)))
        position = i + of_query.read((ends - starts[1:]).to(torch.int64)[of_query.sequence], "i")
    found = _attend((query[None], key[None], value[None]), own, position, sequence, *options)
    return (found[0][0], found[1][0]) if isinstance(found, tuple) else found[0]
