"""Tile sizes, warps and stages: defaults, measurement, selection and the cache on disk."""
