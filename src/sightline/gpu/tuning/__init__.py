"""Tile sizes, warps and stages: the default table, measurement, selection and the cache on disk."""
