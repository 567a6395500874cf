"""The class `KVCache`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeVar, cast

import numpy as np

from ..arrays.operations import dtype_name, may_break_graph, place, untraced
from ..call.explanation import format_amount
from ..errors import ParameterError, ShapeError, check_count
from .argument_checks import (
    check_append,
    check_can_quantize,
    check_lengths,
    read_cache_dtype,
    read_counts,
    read_owners,
    to_integers,
    unsqueeze_to_4d,
)
from .row_positions import DraftTree, KeptRows, SharedPrefix, all_rows, find_rows, keep_rows
from .storage import RelativeErrors, Storage
from .stored_rows import StoredRows, nothing_appended

MIN_SHARED_ROWS = 64  # `KVCache.fork` copies fewer rows, because each prefix adds a call to attention
Change = TypeVar("Change", bound=Callable[..., None])


def at_once(change: Change) -> Change:
    """Make a method change the cache at once: no other thread sees half of the change, and an error leaves nothing."""

    @wraps(change)
    def wrapped(cache: KVCache, *arguments: Any, **options: Any) -> None:
        if may_break_graph():
            untraced()(wrapped, cache, *arguments, **options)
        else:
            changed = cache.snapshot()
            change(changed, *arguments, **options)
            cache.__dict__.update(changed.__dict__)

    return cast(Change, wrapped)


class KVCache(StoredRows):
    """Keys and values of one attention layer in a decoding loop; `attention(query, cache)` reads them in place.

    Sequences of a batch may have different lengths. The storage has the shape (B, G, capacity, d). A full storage
    doubles, or grows by a quarter if it is large, so appending one position costs O(1) on average. The rows of a head
    stay adjacent in memory. An append does not copy earlier positions unless the storage grows.

    Parameters
    ----------
    capacity : int, default 0
        The number of positions to allocate at the first append. The cache grows beyond it as needed.
    dtype : {"float16", "bfloat16", "float32", "float64", "int8", "int4", "float8_e4m3fn"} or a pair, optional
        The dtype of the stored keys and values, to which appended arrays are cast. Default: the dtype of the first
        append, which every later append must have. Queries must have the same dtype, because attention does not convert
        a cache at every token. With one of the last three, or a pair of them such as ("int8", "int4") for keys and
        values, the cache is quantised: see the notes.

    Raises
    ------
    ParameterError
        capacity is not a whole number ≥ 0.
    DtypeError
        dtype is not one of those above.

    Notes
    -----
    The first append decides batch, heads, widths, library and device. In torch, the cache stores no gradients.

    Positions of a sequence count from 0 in the order of the appends, without padding. In the formulas of a call, `i` is
    the position of the query, `j` that of the key, and `n` and `m` are the sequence's length: a formula means what it
    means for the whole sequence. The queries of a call are the positions of the newest append, if it has as many, and
    otherwise the last positions of every sequence. If a formula reads `i`, a query that is padding sees no key, and its
    output is 0, also if all queries are padding. An array as mask or score has one row for each query. Positions beyond
    a sequence's end are hidden in every call.

    torch.compile runs each change of a cache, and each attention over it, in eager mode. It breaks its graph there.

    A quantised cache stores a code for each number x. It also stores a float16 scale for each group of 128 adjacent
    numbers of a row, or for int4 a scale and an offset for each 32. The code stands for a number x̂ in place of x:

        int8, float8_e4m3fn   x̂ = scale · code             scale = max |x| / 127, or / 448 for float8_e4m3fn
        int4                  x̂ = scale · code + offset    scale = (max x − min x) / 15,   offset = min x

    Codes are rounded to the nearest, ties to even. Attention is computed with x̂, and its error is within the budget of
    the query's dtype. No copy of all x̂ is made. Queries are float32, bfloat16 or float16, and the output has their
    dtype. `quantization_error` measures how far x̂ is from x. A group with NaN or ∞, or whose scale or offset exceeds
    65504, the largest float16, becomes NaN. A quantised cache needs the processor's memory and llvmlite.

    The arrays `key` and `value` are views of the cache's storage. Growth does not change them. `reorder` may overwrite
    them, and so may an append after `truncate` or `reset`.

    Values that are a view of the first d_v numbers of the keys are stored once, and each row is read once:
    `cache.append(latent, latent[..., :512])`. Absorbed multi-head latent attention has such values (DeepSeek-V2, 2024,
    section 2.1). After an append of other values, and in a quantised cache, keys and values are stored apart.

    One thread may append, fork or evict while another attends. The other thread sees the cache as before the change or
    as after it. While a thread calls `reorder`, `accept`, `truncate` or `reset`, which move or free keys, no other
    thread may use the cache.

    `copy.deepcopy` and `copy.copy` copy no keys and values. The copy and the original share the storage; each of them
    copies it when it first writes to it. One cache of a prompt may so be continued many times.

    Examples
    --------
    >>> import numpy as np, sightline
    >>> rng = np.random.default_rng(0)
    >>> def projected(t):
    ...     return [rng.normal(size=(2, heads, t, 64)).astype(np.float32) for heads in (8, 2, 2)]
    >>> cache = sightline.KVCache()
    >>> query, key, value = projected(5)  # prompts of 5 and 3 tokens, padded to 5
    >>> cache.append(key, value, lengths=[5, 3])
    >>> sightline.attention(query, cache, mask=sightline.causal()).shape
    (2, 8, 5, 64)
    >>> query, key, value = projected(1)  # then one token each
    >>> cache.append(key, value)
    >>> sightline.attention(query, cache, mask=sightline.causal()).shape
    (2, 8, 1, 64)
    >>> cache
    KVCache: 2 sequences of 6 and 4 positions, capacity 10
      2 heads, d_k 64, d_v 64, float32, numpy on cpu, 20 KiB

    References
    ----------
    Scales and offsets of a token's numbers: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache"
    (arXiv:2402.02750), section 3. The bits of float8_e4m3fn: Micikevicius et al., "FP8 Formats for Deep Learning"
    (arXiv:2209.05433), table 1.
    """

    def __init__(self, *, capacity: int = 0, dtype: str | tuple[str, str] | None = None) -> None:
        self._min_capacity = check_count("capacity={!r}", capacity, 0, "capacity=1024")
        self._quantized = read_cache_dtype(dtype)  # the dtypes of quantised keys and values; None for floats
        self._dtype, self._casts_inputs = dtype, dtype is not None
        super().__init__()

    # -- contents ---------------------------------------------------------------------------------------------------
    @property
    def key(self) -> Any:
        """(B, G, max(lengths), d_k), a view of the storage that attention reads, with the axes of the appended arrays.

        Entries at or beyond a sequence's own length are undefined. For a quantised cache, ParameterError is raised.
        """
        return self._float_view()[0]

    @property
    def value(self) -> Any:
        """(B, G, max(lengths), d_v), a view like `key`."""
        return self._float_view()[1]

    def dequantized(self) -> tuple[Any, Any]:
        """Return float32 copies of the keys and values whose codes a quantised cache stores, with the axes of `key`."""
        formats, views = self.row_formats, self.joined().rows()
        if formats is None:
            raise ParameterError(f"dequantized() of a {self._dtype} cache", "a quantised cache", "cache.key")
        key, value = (form.unpack(rows) for form, rows in zip(formats, views, strict=True))
        return key, value

    @property
    def quantization_error(self) -> RelativeErrors | None:
        """The relative error that quantisation has made in all keys and values appended so far, root mean square.

        `quantization_error.key` is √(Σ (x − x̂)² / Σ x²). None for a cache of floats.
        """
        if self._quantized is None:
            return None
        return RelativeErrors(*[math.sqrt(lost / total) if total else 0.0 for lost, total in self._squares.tolist()])

    @property
    def key_positions(self) -> Any:
        """(B, G, rows) int64: the position whose key each row of `key` holds; −1 for a row that holds none.

        The position is the number of the row, unless `keep` has evicted keys. A draft's row has the draft's position.
        """
        if self.prefix is not None:
            return self.joined().key_positions
        heads = 0 if self.storage is None else self.storage.key.shape[1]
        kept = self._kept or all_rows(len(self._lengths), heads)
        found = kept.of_rows(self._num_rows, self._lengths)
        if self.drafts is not None:
            np.put_along_axis(found, self.drafts.rows[:, None], self.drafts.positions[:, None], axis=-1)
        return found

    @property
    def capacity(self) -> int:
        """The number of positions that fit without growth."""
        own = self._min_capacity if self.storage is None else self.storage.capacity
        return own if self.prefix is None else own + int(self.prefix.lengths.min())

    @property
    def dtype(self) -> str | tuple[str, str] | None:
        """The dtype of the stored keys and values, or the given pair; None until the first append decides it."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the storage, unused capacity included. A prefix that sequences share counts once."""
        own = 0 if self.storage is None else self.storage.nbytes
        return own if self.prefix is None else own + self.prefix.cache.nbytes

    def __repr__(self) -> str:
        if self.storage is None:
            return f"KVCache: empty, capacity {self.capacity}, the first append decides the rest"
        array, (d_k, d_v) = self.storage.key, self.storage.widths
        B, G = array.shape[:2]
        if B == 1:
            sequences = f"1 sequence of {self.max_length:,} positions"
        elif (self._lengths == self.max_length).all():
            sequences = f"{B} sequences of {self.max_length:,} positions each"
        elif B == 2:
            sequences = f"2 sequences of {' and '.join(f'{length:,}' for length in self._lengths)} positions"
        else:
            sequences = f"{B} sequences of {self._lengths.min():,} to {self.max_length:,} positions"
        if self.prefix is not None:
            sequences += f", of which up to {self.prefix.lengths.max():,} are shared"
        elif self._kept is not None:
            sequences += f", of which up to {self._num_rows:,} are kept"
        heads = "no head axis" if self._ndim < 4 else f"{G} head{'s' * (G != 1)}"
        stored = self._dtype if isinstance(self._dtype, str) else " and ".join(self._quantized or ())
        return (
            f"KVCache: {sequences}, capacity {self.capacity:,}\n"
            f"  {heads}, d_k {d_k}, d_v {d_v}, {stored}, {place(array)}, {format_amount(self.nbytes, 1024, 'B')}"
        )

    # -- changes ----------------------------------------------------------------------------------------------------
    @at_once
    def append(
        self,
        key: Any,
        value: Any,
        lengths: Any = None,
        *,
        padding: Literal["right", "left"] = "right",
        parents: Any = None,
    ) -> None:
        """Add t positions to the end of every sequence, or fewer to some sequences.

        Parameters
        ----------
        key : (B, G, t, d_k), or (B, t, d_k) or (t, d_k) without heads
        value : (B, G, t, d_v), or (B, t, d_v) or (t, d_v) without heads
        lengths : (B,) integers from 0 to t, optional
            The number of real positions in each sequence, 0 for a sequence that has ended. The other positions are
            padding and are not stored. Default: t for every sequence.
        padding : {"right", "left"}
            The side of the padding: after the real positions, or before them.
        parents : (t,) or (B, t) integers, optional
            The t positions are a tree of drafts: parents[k] is the index of the parent of position k among them, and −1
            stands for the last position before them. Drafts of equal depth have the same position. The queries of the
            next call must be those of the drafts. Each draft sees the earlier positions, its ancestors and itself, as
            far as the mask allows. `accept` ends the tree.

        Raises
        ------
        ShapeError
            Shapes differ from those of the first append in more than t, or lengths is not (B,) or is outside 0 ... t.
        DtypeError
            key or value is no array of floats, key and value differ in dtype, or their dtype is not the cache's and the
            cache was made without a dtype.
        DeviceError
            The library or the device differs from that of the first append.
        ParameterError
            padding is neither "right" nor "left", parents is no tree or is given with lengths, drafts wait for
            `accept`, or a tensor requires a gradient.
        """
        self._check_no_drafts("append")
        storage = self.storage
        if storage is None or self._ndim < 4 or not storage.fits(key, value):
            check_append(key, value, storage, self._ndim, self._casts_inputs)
            if self._quantized is not None:
                check_can_quantize(self._dtype, key, value)
        if padding not in ("right", "left"):
            given = f"padding={padding!r}"
            raise ParameterError(given, '"right" or "left"', 'padding="left" if padding precedes the tokens')
        axes = key.ndim
        key, value = unsqueeze_to_4d(key), unsqueeze_to_4d(value)
        B, _, t, _ = key.shape
        counts = None if lengths is None else check_lengths(lengths, B, t)
        lengths_before = np.zeros(B, np.int64) if storage is None else self._lengths
        if parents is not None:
            if lengths is not None:
                given = "append with lengths and parents"
                raise ParameterError(given, "lengths or parents", "append(key, value, parents=...)")
            drafts = DraftTree.read(parents, t, lengths_before if storage is None else self.row_counts, lengths_before)
        if storage is None:
            storage = self._allocate(key, value, axes)
        if parents is not None:
            storage.reserve(int(drafts.rows.max(initial=-1)) + 1, self._num_rows)
            storage.write(key, value, drafts.rows)
            self.drafts = drafts
            self._set_lengths(drafts.positions.max(1) + 1, drafts.positions)
            return
        if self._has_equal_rows and (counts is None or (counts == t).all()):
            self._append_to_all(storage, key, value)
            return
        counts = np.full(B, t) if counts is None else counts
        used = self.row_counts
        storage.reserve(int((used + counts).max(initial=0)), self._num_rows)
        rows = np.arange(t) - (0 if padding == "right" else (t - counts)[:, None])  # (B, t), 0 for the first real row
        real = (rows >= 0) & (rows < counts[:, None])
        storage.write(key, value, np.where(real, used[:, None] + rows, -1))
        self._set_lengths(self._lengths + counts, np.where(real, self._lengths[:, None] + rows, -1))

    def _append_to_all(self, storage: Storage, key: Any, value: Any) -> None:
        """Append t positions to every sequence, if all have equally many rows: a step of most decoding loops."""
        t, start = key.shape[2], self._num_rows
        storage.reserve(start + t, start)
        storage.write(key, value, start)
        self._newest_positions = self._lengths[:, None] + np.arange(t)
        self._lengths = self._lengths + t
        self._rewritings = {}
        self._num_rows, self._newest_are_last = start + t, True

    @at_once
    def accept(self, path: Any) -> None:
        """Keep the drafts of a path, and drop the others.

        Parameters
        ----------
        path : (k,) or (B, k) integers
            Indices among the positions of `append(parents=...)`: a root, then one of its children, and so on. −1 stands
            behind the last one of a shorter path. [] drops all drafts.

        Raises
        ------
        ShapeError
            path has another shape, or is not of whole numbers.
        ParameterError
            path is no path from a root, or there are no drafts.
        """
        drafts, storage = self.drafts, self.storage
        if drafts is None or storage is None:
            raise ParameterError("accept without drafts", "a cache with drafts", "append(..., parents=[-1, 0]) first")
        found = drafts.read_path(path)
        steps = np.where(found >= 0, np.arange(found.shape[1]), -1)
        storage.reserve(self._num_rows, self._num_rows)
        first = drafts.first_rows[:, None]
        storage.move_rows(first + found, np.where(steps >= 0, first + steps, -1))
        self.drafts = None
        positions = np.where(steps >= 0, drafts.lengths[:, None] + steps, -1)
        self._set_lengths(drafts.lengths + (steps >= 0).sum(1), positions)

    @at_once
    def truncate(self, lengths: Any) -> None:
        """Shorten every sequence to at most `lengths` positions, for example to drop rejected drafts.

        If less than a quarter of large storage is left in use, the rest is freed.

        Parameters
        ----------
        lengths : int or (B,) integers ≥ 0
            The largest length of every sequence. Shorter sequences stay as they are.

        Raises
        ------
        ShapeError
            lengths is not an int or (B,) integers, or is negative.
        """
        self._check_no_drafts("truncate")
        cure = "cache.truncate(cache.lengths - rejected)"
        limits = read_counts("truncate", lengths, self._lengths.size, cure)
        new_lengths = np.minimum(self._lengths, limits)
        before = self._newest_positions
        newest = np.where(before < new_lengths[:, None], before, -1)
        if (before >= 0).any() and not (newest >= 0).any():
            newest = newest[:, :0]  # no query of the newest append is left
        self.prefix = self.prefix and self.prefix.truncated(new_lengths)
        kept = self._kept and self._kept.truncated(new_lengths)
        self._kept = kept if kept and (kept.positions.size or kept.evicted.any()) else None
        self._set_lengths(new_lengths, newest)
        if self.storage is not None:
            self.storage.release(self._num_rows, self._min_capacity)

    @at_once
    def reorder(self, indices: Any) -> None:
        """Replace sequence b by sequence indices[b], as beam search does. Sequences that stay in place are not copied.

        Parameters
        ----------
        indices : (B',) integers from 0 to B − 1
            B' may differ from B: a prompt may become several beams, and sequences that have ended may be dropped.

        Raises
        ------
        ShapeError
            indices is not one axis of integers from 0 to B − 1, or arrays without a batch axis would become several
            sequences.
        """
        count = self._lengths.size
        order = to_integers(indices)
        if order is None or order.ndim != 1 or (order < 0).any() or (order >= count).any():
            allowed = f"one axis of whole numbers from 0 to {count - 1}"
            raise ShapeError(f"reorder({indices!r})", allowed, "reorder([1, 0]) swaps two sequences")
        if self.storage is None:
            return
        if self._ndim == 2 and order.size != 1:
            raise ShapeError(f"reorder({indices!r}) of arrays (t, d)", "one index", "append arrays (B, t, d)")
        self.storage.reorder(order, self._num_rows)
        self.prefix = self.prefix and self.prefix.reordered(order)
        self.drafts = self.drafts and self.drafts.reordered(order)
        self._kept = self._kept and self._kept.reordered(order)
        self._set_lengths(self._lengths[order], self._newest_positions[order])

    @at_once
    def fork(self, counts: Any) -> None:
        """Replace sequence b by counts[b] sequences that begin as it does, and share what is stored.

        The stored keys and values become a prefix that is not copied. Attention reads it once for all sequences that
        share it, and merges the result with that of each sequence's later positions (Juravsky et al., "Hydragen:
        High-Throughput LLM Inference with Shared Prefixes", 2024, section 3). Every other method works as before:
        `reorder` moves sequences without a copy of what they share, and `truncate` may cut into it.

        Parameters
        ----------
        counts : int or (B,) integers ≥ 0
            The number of sequences that sequence b becomes, in its place. 0 removes it.

        Raises
        ------
        ShapeError
            counts is not an int or (B,) integers, or is negative, or arrays without a batch axis would become several
            sequences.
        ParameterError
            Nothing was appended, or drafts wait for `accept`.

        Notes
        -----
        If fewer than 64 rows are stored, `fork` copies them, as `reorder` does. Some calls need the rows of a sequence
        in one array, so they copy them first: calls with an array as mask or score, with dropout, or with statistics of
        single keys such as `received()`; also `keep`, `last`, `key`, `value`, `key_positions` and `dequantized`.
        Repeated forks join earlier prefixes that are not shared any more, so that attention reads few parts.
        """
        self._check_no_drafts("fork")
        owners = read_owners(counts, self._lengths.size)
        if self.storage is None:
            raise nothing_appended()
        if self._num_rows < MIN_SHARED_ROWS or not owners.size or (self._ndim == 2 and owners.size > 1):
            self.reorder(owners)
            return
        stored = copy.deepcopy(self).compacted()
        self.storage = self.storage.without_rows(owners.size)
        self.prefix = SharedPrefix(stored, owners, self._lengths[owners])
        none = np.zeros((owners.size, self.storage.key.shape[1], 0), np.int64)
        self._kept = KeptRows(none, np.zeros(owners.size, np.int64), self._lengths[owners])
        self._set_lengths(self._lengths[owners], self._newest_positions[owners])

    @at_once
    def keep(self, indices: Any) -> None:
        """Keep the keys and values of these positions, evict all others, and free their memory.

        Later appends, masks and scores go on with the original positions: `j` is the position of a key, `i` that of a
        query, and `lengths` does not change. Statistics have a number for each row that is left, and `key_positions`
        has the position of each row. `truncate` and `reorder` work as before.

        Parameters
        ----------
        indices : (B or 1, G or 1, c) integers
            The positions that a key head keeps, ascending, then −1 if it keeps fewer than c. Every head takes the
            memory of the head that keeps most.

        Raises
        ------
        ShapeError
            `indices` has another shape, or is not of whole numbers.
        ParameterError
            The positions of a head do not ascend, or one of them was evicted before or is outside the sequence.
        """
        self._check_no_drafts("keep")
        joined = self.joined()
        if joined.storage is None:
            raise nothing_appended()
        rows, positions = find_rows(indices, joined.key_positions)
        kept = keep_rows(positions, self._lengths)
        self.storage, self.prefix = joined.storage.gathered(rows[:, :, : kept.positions.shape[2]]), None
        self._kept = kept
        self._set_lengths(self._lengths, self._newest_positions)

    def last(self, count: int, *, capacity: int | None = None) -> KVCache:
        """Return a cache of the positions from `max_length` − count on, which count from 0 in the returned cache.

        Parameters
        ----------
        count : int ≥ 0
            At most `max_length` positions are kept.
        capacity : int, optional
            Copy the positions to new storage of this capacity. Default: the result reads the storage of this cache, as
            long as this cache does not overwrite it, and copies it before it writes.

        Raises
        ------
        ParameterError
            A number is negative or not whole, `keep` has evicted keys, or drafts wait for `accept`.
        """
        self._check_no_drafts("last")
        if self.prefix is not None:
            return self.joined().last(count, capacity=capacity)
        first = max(self._num_rows - check_count("count={!r}", count, 0, "count=256"), 0)
        if capacity is not None:
            capacity = check_count("capacity={!r}", capacity, 0, "capacity=1024")
        if self._kept is not None:
            raise ParameterError("last() of a cache after keep()", "a cache of all keys", "cache.keep(last_positions)")
        tail = self.snapshot()
        tail.storage = self.storage and self.storage.from_row(first)
        newest = self._newest_positions
        tail._set_lengths(np.maximum(self._lengths - first, 0), np.maximum(newest - first, -1))
        if capacity is not None and tail.storage is not None:
            tail.storage.move(max(capacity, tail._num_rows), tail._num_rows)
        return tail

    @at_once
    def reset(self) -> None:
        """Remove every position, and free large storage beyond the cache's first `capacity`."""
        self.prefix = self.drafts = self._kept = None
        self.truncate(0)

    def joined(self) -> KVCache:
        """Return this cache if it has no prefix, else a cache with copies of the prefix's rows and of this cache's."""
        cache = self
        while cache.prefix is not None:
            cache = cache._merge_prefix()
        return cache

    def compacted(self) -> KVCache:
        """Return the cache after its nearest prefixes became its own rows, if sequences share them no more.

        A prefix with more rows than the cache stays. So f forks leave at most about log₂ f unshared prefixes.
        """
        cache = self
        while (prefix := cache.prefix) is not None and prefix.is_own and prefix.cache._num_rows <= cache._num_rows:
            cache = cache._merge_prefix()
        return cache

    # -- internals --------------------------------------------------------------------------------------------------
    def _float_view(self) -> tuple[Any, Any]:
        """Return views of key and value; raise ParameterError if the cache is quantised."""
        if self._quantized is not None:
            given = f"key or value of a cache of {self._dtype}, which stores codes"
            allowed = "attention(query, cache), which reads the codes"
            raise ParameterError(given, allowed, "cache.dequantized(), which returns float32 copies")
        return self.joined().rows()

    def _merge_prefix(self) -> KVCache:
        """Return a cache whose own rows are copies of the rows of the nearest prefix, and then of this cache's own."""
        assert self.prefix is not None
        assert self.storage is not None
        merged = copy.deepcopy(self.prefix.cache)
        merged.reorder(self.prefix.owners)
        merged.truncate(self.prefix.lengths)
        assert merged.storage is not None
        first = merged.row_counts
        merged.storage.append_rows(self.storage, first, self.row_counts, merged._num_rows)
        merged.storage.squares = merged.storage.squares + self.storage.squares
        merged.drafts = self.drafts and self.drafts.after(first)
        merged._set_lengths(self._lengths, self._newest_positions)
        return merged

    def _check_no_drafts(self, operation: str) -> None:
        if self.drafts is not None:
            given = f"{operation} on a cache with {self.drafts.count} drafts"
            raise ParameterError(given, "a cache without drafts", "cache.accept(path) first")

    def _allocate(self, key: Any, value: Any, axes: int) -> Storage:
        """Make the storage for arrays like these, for the first append."""
        dtype = self._dtype or dtype_name(key)
        self.storage = Storage(key, value, self._min_capacity, str(dtype), self._quantized)
        self._dtype = dtype
        self._ndim = axes
        self._set_lengths(np.zeros(key.shape[0], np.int64), np.zeros((key.shape[0], 0), np.int64))
        return self.storage
