"""A cache of the keys and values of a decoding loop, and how attention reads it: as arrays, with formulas of rows."""

from __future__ import annotations

from typing import Any

from ..arrays.operations import dtype_name, framework
from ..call.problem import Options
from ..errors import ParameterError
from .argument_checks import NARROW_FLOATS, check_query
from .cache import KVCache
from .query_positions import rewrite_formulas

__all__ = ["KVCache", "as_arrays", "needs_no_conversion", "unpack_cache"]


def needs_no_conversion(query: Any, cache: KVCache) -> bool:
    """True if the cache can serve the query without a conversion.

    The array types are equal. The dtypes are equal too, or the cache is quantised and serves the query's dtype.
    """
    storage = cache.storage
    if storage is None or type(query) is not type(storage.key) or query.ndim < 2:
        return False
    return bool(query.dtype == storage.key.dtype if storage.row_formats is None else dtype_name(query) in NARROW_FLOATS)


def as_arrays(query: Any, cache: KVCache, options: Options) -> tuple[Any, Any, Options] | None:
    """Return (key, value, options) of attention on a cache, as arrays and formulas of rows.

    The result is None where the slower `unpack_cache` is needed: if the query has another array type or dtype than the
    cache, or if the mask is an array and other rows must be hidden too.
    """
    if not needs_no_conversion(query, cache):
        return None
    if not (options.mask is None and options.score is None and not options.see and cache.rows_are_full):
        options = rewrite_formulas(cache, query.shape, options)
    elif cache.row_formats is not None:
        options = options.replace(row_formats=cache.row_formats)
    return None if options.row_mask is not None else (*cache.rows(), options)


def unpack_cache(query: Any, key: Any, value: Any, options: Options) -> tuple[Any, Any, Options]:
    """Return (key, value, options) for the arguments of attention, with arrays in place of a cache.

    If `key` is a cache, the returned options are those of `rewrite_formulas`.
    """
    if isinstance(value, KVCache) or (isinstance(key, KVCache) and value is not None):
        given = "a KVCache and a key or a value"
        raise ParameterError(given, "a cache in place of both", "append first, then attention(query, cache, mask=...)")
    if not isinstance(key, KVCache):
        if value is None:
            given = "attention of query and key without value"
            cure = "attention(query, cache)" if isinstance(query, KVCache) else "attention(query, key, value)"
            raise ParameterError(given, "query, key and value, or query and a KVCache", cure)
        return key, value, options
    key = key.joined()
    keys, values = key.rows()
    if framework(query) is framework(keys):
        check_query(query, key.dtype, key.row_formats is not None)
    return keys, values, rewrite_formulas(key, getattr(query, "shape", ()), options)
