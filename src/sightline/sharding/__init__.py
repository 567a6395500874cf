"""Attention over sequences that are divided among ranks: shards, parts of a problem, and the schedule of transfers."""

from __future__ import annotations

from .cost_model import Hardware, Method, PassCost, Prediction, Sizes, predict, predict_problem
from .part import part_of, shift
from .schedule import KeyBlock, Round, Schedule, find_schedule, key_block_length
from .shards import ShardLayout, Shards, Span, divide

__all__ = [
    "Hardware",
    "KeyBlock",
    "Method",
    "PassCost",
    "Prediction",
    "Round",
    "Schedule",
    "ShardLayout",
    "Shards",
    "Sizes",
    "Span",
    "divide",
    "find_schedule",
    "key_block_length",
    "part_of",
    "predict",
    "predict_problem",
    "shift",
]
