"""Continuous batching of transformers: the new tokens of all requests lie on one axis, their keys in a paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..formula.expression import SYMBOLS, Expression
from ..formula.tables import Table
from .compatibility import PAGED_WINDOW, update_paged_cache

b, i, j = (SYMBOLS[name] for name in "bij")


def read_paged_cache(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, cache: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Expression]:
    """Store the new keys and values of a layer; return query, key, value and mask of the call for all requests.

    A query attends to the keys first ≤ j ≤ last: the keys of its own request up to its position, in the layer's window.
    If each request has one new token, the axis of tokens becomes the batch axis, and all batch entries share one array
    of keys. Then no query computes scores with the keys of another request.

    Parameters
    ----------
    module : the attention layer
    query : (1, H, n, d_k), the new tokens of one request after the other
    key, value : (1, G, n, d)
    cache : PagedAttentionCache, or None if it stores the new keys already
    options
        `cu_seq_lens_q` and `cu_seq_lens_k`, the places where the queries and keys of each request start and end, and
        `read_index` and `write_index`, the places in the cache.
    """
    n = query.shape[2]
    if cache is not None:
        key, value = update_paged_cache(cache, module.layer_idx, key, value, options)
    ends, key_ends = (options[name].long() for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    lengths = ends.diff()
    request = torch.repeat_interleave(lengths)
    last = torch.arange(len(request), device=query.device) + (key_ends - ends)[1:][request]
    start = key_ends[:-1][request]
    width = options[PAGED_WINDOW]
    first = start if width is None else torch.maximum(start, last - width + 1)
    row: Expression = i
    if n == len(lengths) == len(request):
        row, query = b, query.transpose(0, 2)
        key, value = key.expand(n, -1, -1, -1), value.expand(n, -1, -1, -1)
    return query, key, value, (j >= Table(first)[row]) & (j <= Table(last)[row])
