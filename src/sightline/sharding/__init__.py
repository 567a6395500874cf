"""Attention over sequences that are divided among ranks: shards, parts of a problem, and the schedule of transfers."""

from __future__ import annotations

from .cost_model import Hardware, Prediction, Sizes, predict, predict_problem
from .part import part_of
from .schedule import KeyBlock, Round, Schedule, find_schedule, key_block_length
from .shards import Method, ShardLayout, Shards, Span, check_layout, check_method, check_shards, divide, divide_heads

__all__ = [
    "Hardware",
    "KeyBlock",
    "Method",
    "Prediction",
    "Round",
    "Schedule",
    "ShardLayout",
    "Shards",
    "Sizes",
    "Span",
    "check_layout",
    "check_method",
    "check_shards",
    "divide",
    "divide_heads",
    "find_schedule",
    "key_block_length",
    "part_of",
    "predict",
    "predict_problem",
]
