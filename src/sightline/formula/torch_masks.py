"""Masks of torch's own classes as formulas: FlexAttention's BlockMask, and CausalBias.

A BlockMask has a function `mask_mod` and two lists of blocks of pairs. In a block of the first list, `mask_mod` says
which pairs are allowed. In a block of the second list, the full blocks, every pair is allowed. In all other blocks
every pair is hidden. If `create_block_mask` made the lists from `mask_mod`, then `mask_mod` alone is the mask. If the
lists have other blocks, the formula reads the state of each block from a table.

`torch.nn.attention.bias.causal_lower_right` and `causal_upper_left` return a CausalBias: a tensor without entries of
its own, which stands for a causal mask of given lengths. The memory of the tensor is not initialised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.operations import to_numpy
from ..errors import ShapeError
from .expression import SYMBOLS, Expression
from .interval_arithmetic import compute_intervals
from .library import causal
from .tables import Table

HIDDEN, PARTIAL, FULL = range(3)
LARGEST_INDEX = float(2**31)  # above every b or h that one batch entry or one head of a BlockMask serves


def is_block_mask(value: Any) -> bool:
    """True if the value is a `torch.nn.attention.flex_attention.BlockMask`."""
    return type(value).__name__ == "BlockMask" and hasattr(value, "kv_num_blocks") and hasattr(value, "mask_mod")


def block_formula(block_mask: Any, mask: Expression) -> Expression:
    """Return the formula of a BlockMask whose `mask_mod` is the formula `mask`.

    The result is `mask` itself if interval arithmetic proves that `mask` hides every pair of the hidden blocks, and
    allows every pair of the full blocks.
    """
    states = _read_states(block_mask)
    if _agrees(mask, states, block_mask):
        return mask
    rows, columns = block_mask.BLOCK_SIZE
    b, h, i, j = (SYMBOLS[name] for name in "bhij")
    first = [symbol if length > 1 else 0 for symbol, length in zip((b, h), states.shape[:2], strict=True)]
    state = Table(states)[(*first, i // rows, j // columns)]
    return (state == FULL) | ((state == PARTIAL) & mask)


def _read_states(block_mask: Any) -> Any:
    """Return an array (B, H, blocks of queries, blocks of keys) of HIDDEN, PARTIAL and FULL."""
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices, PARTIAL)]
    if block_mask.full_kv_num_blocks is not None:
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL))
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    states = None
    for counts, indices, state in lists:
        indices = to_numpy(indices)
        indices = indices.reshape((1,) * (4 - indices.ndim) + indices.shape)
        is_listed = np.arange(indices.shape[-1]) < to_numpy(counts).reshape(*indices.shape[:-1], 1)
        if states is None:
            states = np.full((*indices.shape[:-1], columns), HIDDEN, np.int32)
        *places, slot = np.nonzero(is_listed)
        states[(*places, indices[(*places, slot)])] = state
    return states


def _agrees(mask: Expression, states: Any, block_mask: Any) -> bool:
    """True if bounds prove that `mask` is False in every hidden block and True in every full block."""
    axes = np.ogrid[tuple(map(slice, states.shape))]
    box = {name: (1.0 * length, 1.0 * length) for name, length in zip("nm", block_mask.seq_lengths, strict=True)}
    for name, at, size, length in zip(
        "bhij", axes, (1, 1, *block_mask.BLOCK_SIZE), (*states.shape[:2], *block_mask.seq_lengths), strict=True
    ):
        low = at * float(size)
        box[name] = low, np.minimum(low + size, length) - 1.0
        if name in "bh" and length == 1:
            box[name] = low, low + LARGEST_INDEX
    low, high = compute_intervals(mask, box)[id(mask)]
    return bool(np.all((states != HIDDEN) | (high == 0)) and np.all((states != FULL) | (low == 1)))


def is_causal_bias(value: Any) -> bool:
    """True if the value is a `torch.nn.attention.bias.CausalBias`."""
    return type(value).__name__ == "CausalBias" and hasattr(value, "seq_len_kv")


def causal_bias_formula(bias: Any, lengths: tuple[int, int] | None) -> Expression:
    """Return the formula of a CausalBias: i ≥ j, or i + (m − n) ≥ j for `causal_lower_right`.

    Parameters
    ----------
    bias : CausalBias
    lengths : (n, m), the numbers of queries and keys of the call; None if the call has sequences of several lengths

    Raises
    ------
    ShapeError
        The lengths of the bias are not those of the call.
    """
    align = "lower right" if bias.variant.name == "LOWER_RIGHT" else "upper left"
    expected = bias.seq_len_q, bias.seq_len_kv
    if lengths is None or expected[0] != lengths[0] or expected[1] != lengths[1]:
        actual = "sequences of several lengths" if lengths is None else f"{lengths[0]} queries and {lengths[1]} keys"
        name = "causal_" + align.replace(" ", "_")
        raise ShapeError(
            f"the mask {name}({expected[0]}, {expected[1]}), a CausalBias of torch, in a call of {actual}",
            "the lengths of the call",
            f"mask=sightline.causal({align!r}) of sightline.attention, which fits all lengths"
            + ("" if lengths is None else f", or {name}({lengths[0]}, {lengths[1]})"),
        )
    return causal(align)  # type: ignore[arg-type]
