"""Indices of the results of the primitive `sightline_attention`: output, lse, lse in float64, statistics' arrays."""

from __future__ import annotations

OUTPUT, LSE, PRECISE_LSE, FIRST_ARRAY = range(4)  # the statistics' arrays begin at `FIRST_ARRAY`
