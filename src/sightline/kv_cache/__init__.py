"""Keys and values of a decoding loop, kept where attention reads them."""

from .cache import KVCache, as_arrays, unpack_cache

__all__ = ["KVCache", "as_arrays", "unpack_cache"]
