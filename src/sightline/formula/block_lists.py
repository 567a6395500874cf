"""The mask `blocks`: for each block of queries, a list of the blocks of keys to which it attends.

The lists become a table of booleans with one entry for each block of queries and block of keys. If all entries in a
tile of pairs are equal, a kernel skips the tile, or allows all its pairs, and evaluates no formula. Short lists of
single keys stay lists: the formula searches them, and the kernel `gather` of `reference` reads only their keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays import operations as arrays
from ..arrays.unreadable import check_kind, is_array
from ..errors import DtypeError, ParameterError, ShapeError, check_count
from .expression import SYMBOLS, Expression, apply, specialize, where
from .tables import Table

PAIRS_PER_KEY = 256  # a kernel that works by tiles computes so many pairs while the kernel `gather` copies one key
PAIRS_PER_CALL = 1 << 20  # and so many pairs while the lists of a call are prepared
MAX_TABLE_BYTES = 1 << 30  # on a GPU, where `gather` does not run, only the lists of a larger table are searched
MAX_BLOCKS = 2**31  # a table has an entry for each block up to the largest index

b, h, i, j = (SYMBOLS[name] for name in "bhij")


def blocks(indices: Any, size: int | tuple[int, int] = 64, keys: int | None = None) -> Expression:
    """Return the mask j // size ∈ indices[b, h, i // size]: each block of queries attends to the blocks in its list.

    Blocks that no list names are skipped, so the cost grows with the lists. A list may be in any order, and a number
    that it repeats counts once. A query whose list is empty attends to nothing. The mask alone is not causal: combine
    it with another mask by `&`.

    On a `KVCache`, j is the position of the key in the cache. A query's number in the call chooses its list, not its
    position: a call of one query has one list.

    Parameters
    ----------
    indices : (B or 1, H or 1, ⌈n / size⌉, c) integers
        The numbers of the blocks, from 0 to ⌈m / size⌉ − 1. −1 names no block, and fills lists that have fewer than c
        entries. In grouped-query attention (GQA), query heads that share a key head have lists of their own.
    size : int or (int, int), default 64
        The number of queries, and the number of keys, in a block; at least 1. Two numbers are those of queries and of
        keys: `size=(1, 64)` for a list of each query. With `size=1`, the lists name single keys, and short lists in a
        long sequence take O(n · c) time and memory: the kernel `gather` copies these keys. The last block may be
        shorter. Blocks of 64, or a multiple, cost least: kernels for many queries process 64 × 64 pairs at once.
    keys : int, optional
        The number m of keys. A call that torch.compile or `jax.jit` traces needs this number, because the largest
        index is then not known.

    Raises
    ------
    ParameterError
        size or keys is not as above. Or a compiler traces the call, and keys is not given.
    DtypeError
        The indices are not integers.
    ShapeError
        The indices do not have four axes, or an index is below −1 or, if keys is given, at least ⌈keys / size⌉. When
        attention is computed: the axes do not have the lengths above, or an index is at least ⌈m / size⌉.

    Examples
    --------
    >>> import sightline
    >>> lists = [[[[0, -1], [0, 2], [2, 1]]]]  # one sequence, one list for all heads, three blocks of queries
    >>> (sightline.blocks(lists, size=2) & sightline.causal()).array(6).astype(int)
    array([[1, 0, 0, 0, 0, 0],
           [1, 1, 0, 0, 0, 0],
           [1, 1, 0, 0, 0, 0],
           [1, 1, 0, 0, 0, 0],
           [0, 0, 1, 1, 1, 0],
           [0, 0, 1, 1, 1, 1]])
    """
    two = tuple(size) if isinstance(size, tuple | list) and len(size) == 2 else (size, size)
    cure = "size=64, or size=(1, 64) for a list of each query"
    rows, columns = (check_count("blocks(..., size={!r})", length, 1, cure) for length in two)
    indices = _read_indices(indices)
    count = None if keys is None else -(-check_count("blocks(..., keys={!r})", keys, 1, "keys=m") // columns)
    count = _check_entries(indices, columns, count)
    first = [0 if arrays.is_one(length) else symbol for length, symbol in zip(indices.shape, (b, h), strict=False)]
    row, column = (x if length == 1 else x // length for x, length in ((i, rows), (j, columns)))
    axes = ("b", "h", f"i/{rows}", f"j/{columns}")
    pairs, entries = math.prod(indices.shape[:-1]) * count, math.prod(indices.shape)
    least = PAIRS_PER_CALL if arrays.device(indices) == "cpu" else MAX_TABLE_BYTES
    if columns == 1 and arrays.is_true((entries > 0) & (pairs > PAIRS_PER_KEY * entries + least)):
        axes = axes if arrays.is_traced(indices) else (*axes[:-1], f"j/1<{count}")
        xp = arrays.namespace(indices)
        return _search(Table(xp.sort(xp.astype(indices, xp.int32), axis=-1), axes), (*first, row)) == j
    visible = Table(_mark(indices, count), axes=axes)
    return visible[(*first, row, apply("minimum", column, count))]


def _read_indices(indices: Any) -> Any:
    """Return the indices as an array of integers with four axes; raise an error for other arrays."""
    if not is_array(indices):
        try:
            indices = np.asarray(indices)
        except ValueError as error:
            raise ShapeError("lists of unequal lengths", "a rectangular array", "fill shorter lists with -1") from error
    check_kind("indices", indices)
    name = arrays.dtype_name(indices)
    if not name.startswith(("int", "uint")):
        cure = {"bool": "sightline.dense for a mask of booleans"}.get(
            name, "cast them to int64, and use -1 for no block"
        )
        raise DtypeError(f"block indices of dtype {name}", "integers", cure)
    if len(indices.shape) != 4:
        raise ShapeError(
            f"block indices of shape {tuple(indices.shape)}",
            "four axes, (B or 1, H or 1, ⌈n / size⌉, c)",
            "indices[None, None] for lists (⌈n / size⌉, c) that all batch entries and heads share",
        )
    return indices


def _check_entries(indices: Any, size: int, count: int | None) -> int:
    """Return the number of blocks of keys: `count`, or the largest index plus 1. Raise an error for invalid indices.

    If `count` is given, indices that a compiler traces, or that lie on a GPU, are not read.
    """
    if arrays.is_traced(indices) or (count is not None and arrays.device(indices) != "cpu"):
        if count is None:
            raise ParameterError(
                "blocks of indices that a compiler traces, without keys",
                "the number of keys, because the largest index is not known",
                "blocks(indices, size, keys=key.shape[-2])",
            )
        return count
    low, high = (-1, -1) if 0 in indices.shape else map(int, arrays.framework(indices).min_max(indices))
    if low < -1 or high >= (MAX_BLOCKS if count is None else count):
        raise ShapeError(
            f"the block index {low if low < -1 else high}",
            f"−1 for no block, and 0 to {f'⌈m / size⌉ − 1, below {MAX_BLOCKS:,}' if count is None else count - 1}",
            f"positions // {size} if the indices are positions of keys",
        )
    return max(high + 1, 1) if count is None else count


def _search(lists: Table, row: tuple[Any, ...]) -> Expression:
    """Return the largest entry of an ascending list that is at most j, or the first entry."""
    place: Any = 0
    last = specialize(lists.shape[-1]) - 1
    for power in reversed(range(last.bit_length())):
        middle = apply("minimum", place + (1 << power), last) if isinstance(place, Expression) else 1 << power
        place = where(lists[(*row, middle)] <= j, middle, place)
    return lists[(*row, place)]


def _mark(indices: Any, count: int) -> Any:
    """Return booleans (B or 1, H or 1, blocks of queries, count + 1): True for the blocks of keys in the lists.

    The last column is False: the mask reads it for blocks past the largest index. Index −1 sets a column that is cut.
    """
    shape = *indices.shape[:3], count + 2
    if arrays.framework(indices) is arrays.TORCH:
        visible = indices.new_zeros(shape, dtype=arrays.namespace(indices).bool)
        return visible.scatter(-1, indices.long() % (count + 2), True)[..., :-1]
    if arrays.framework(indices) is arrays.JAX:
        xp = arrays.namespace(indices)
        places = indices.astype(int) % (count + 2)
        return xp.put_along_axis(xp.zeros(shape, bool), places, True, -1, inplace=False)[..., :-1]
    visible = np.zeros(shape, np.bool_)
    np.put_along_axis(visible, np.asarray(indices).astype(np.intp), True, -1)
    return visible[..., :-1]
