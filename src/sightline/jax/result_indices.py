"""Indices of the arguments and results of the primitives."""

from __future__ import annotations

__all__ = ["FIRST_ARRAY", "LSE", "NUM_OPERANDS", "OUTPUT", "PRECISE_LSE"]

NUM_OPERANDS = 3  # query, key and value are the first arguments; then come the tables, the sinks and the seed
OUTPUT, LSE, PRECISE_LSE, FIRST_ARRAY = range(4)  # results; the statistics' arrays begin at `FIRST_ARRAY`
