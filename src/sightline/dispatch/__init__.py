"""The choice of a kernel for a problem, and the cache of calls that are repeated."""
