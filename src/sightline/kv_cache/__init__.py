"""A cache of the keys and values of a decoding loop, which attention reads in place."""

from .cache import KVCache
from .call_arguments import as_arrays, can_serve, unpack_cache

__all__ = ["KVCache", "as_arrays", "can_serve", "unpack_cache"]
