"""Keys and values of a decoding loop, kept where attention reads them."""

from .cache import KVCache, as_arrays, opened

__all__ = ["KVCache", "as_arrays", "opened"]
