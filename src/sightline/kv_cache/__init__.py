"""A cache of the keys and values of a decoding loop, and how attention reads it: as arrays, with formulas of rows."""

from __future__ import annotations

from typing import Any

from ..arrays.operations import dtype_name, framework
from ..errors import ParameterError
from .argument_checks import NARROW_FLOATS, check_query
from .cache import KVCache
from .query_positions import rewrite_formulas

__all__ = ["KVCache", "as_arrays", "can_serve", "unpack_cache"]


def can_serve(query: Any, cache: KVCache) -> bool:
    """True if the cache can serve the query without a conversion.

    The array types are equal. The dtypes are equal too, or the cache is quantised and serves the query's dtype.
    """
    storage = cache._storage
    if storage is None or type(query) is not type(storage.key) or query.ndim < 2:
        return False
    return bool(query.dtype == storage.key.dtype if storage.row_formats is None else dtype_name(query) in NARROW_FLOATS)


def as_arrays(query: Any, cache: KVCache, mask: Any, score: Any, see: Any) -> tuple[Any, Any, Any, Any, Any] | None:
    """Return (key, value, mask, score, see) of attention on a cache, as arrays and formulas of rows.

    The result is None where the slower `unpack_cache` is needed: if the query has another array type or dtype than the
    cache, or if the mask is an array and other rows must be hidden too.
    """
    if not can_serve(query, cache):
        return None
    if mask is None and score is None and not see and cache._rows_are_full:
        return *cache.rows(), mask, score, see
    mask, score, statistics, condition = rewrite_formulas(cache, query.shape, mask, score, see)
    if condition is not None:
        return None
    return *cache.rows(), mask, score, see if see is None else statistics


def unpack_cache(query: Any, key: Any, value: Any, options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return (key, value, options) for the arguments of attention, with arrays in place of a cache.

    `options` has mask, score and see. If `key` is a cache, the returned formulas read its rows, `row_mask` is the
    condition of `rewrite_formulas`, and `row_formats` say how the rows are quantised.
    """
    if isinstance(value, KVCache) or (isinstance(key, KVCache) and value is not None):
        raise ParameterError(
            "a KVCache and a key or a value",
            "a cache in place of both",
            "append first, then attention(query, cache, mask=...)",
        )
    if not isinstance(key, KVCache):
        if value is None:
            raise ParameterError(
                "attention of query and key without value",
                "query, key and value, or query and a KVCache",
                "attention(query, cache)" if isinstance(query, KVCache) else "attention(query, key, value)",
            )
        return key, value, options
    key = key.joined()
    keys, values = key.rows()
    if framework(query) is framework(keys):
        check_query(query, key.dtype, key.row_formats is not None)
    names = "mask", "score", "see", "row_mask"
    found: tuple[Any, ...] = *[options.get(name) for name in names[:2]], options.get("see", ()), None
    if getattr(query, "ndim", 0) > 1:
        found = rewrite_formulas(key, query.shape, *found[:3])
    return keys, values, options | dict(zip(names, found, strict=True)) | {"row_formats": key.row_formats}
