"""How formulas of positions become formulas of the rows of a call, for calls on a cache.

In the caller's formulas, `i` and `j` are positions of a whole sequence, and `n` and `m` are its length. The kernel
computes some queries on the rows that the cache stores, and counts both from 0. So each position is replaced by a
formula of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..call.problem import Options
from ..errors import ShapeError
from ..formula import from_function
from ..formula.expression import SYMBOLS, Expression, Indices, Lookup, apply, conjoin, conjuncts, intern
from ..formula.tables import Table

if TYPE_CHECKING:
    from ..statistics import Statistic
    from .row_positions import SharedPrefix
    from .stored_rows import StoredRows

b, i, j, m, n = (SYMBOLS[name] for name in "bijmn")
NOT_LATER = i >= j, j <= i, i - j >= 0, j - i <= 0  # forms of the condition that the key is not later than the query


@dataclass(frozen=True, eq=False)
class Rewriting:
    """How the formulas of a call are rewritten, from positions to rows of the kernel.

    symbols : the formulas that replace some of the symbols b, i, j, n and m
    condition : hides rows that are no keys of the query's sequence, and all keys of padded queries; None hides nothing
    are_last : True if each query is the last position of its sequence, so that no key is later
    """

    symbols: Mapping[str, Expression]
    condition: Expression | None = None
    are_last: bool = False

    def mask(self, mask: Expression | None) -> Expression | None:
        """Return the mask as a formula of rows, joined with `condition`; None if nothing is hidden."""
        rewritten = None if mask is None else self._rewrite(mask, self.are_last)
        if rewritten is None or self.condition is None:
            return self.condition if rewritten is None else rewritten
        return rewritten & self.condition

    def formula(self, formula: Expression) -> Expression:
        """Return a formula of positions as a formula of rows."""
        return cast(Expression, self._rewrite(formula, False))

    def _rewrite(self, formula: Expression, is_mask_of_last: bool) -> Expression | None:
        """Return a formula of rows; None for a mask of queries at the last position that hides only later keys.

        The result is stored with the given formula, while this rewriting exists. So no cache keeps a caller's tables.
        """
        found = formula.rewritten.setdefault(self, {})
        if is_mask_of_last in found:
            return found[is_mask_of_last]
        # the axes of a table span all positions and sequences, of which the kernel may compute only some
        spans = tuple([name for name in "bij" if name == "i" or name in self.symbols])
        axes = {axis[0] for table in formula.tables for axis in table.axes or () if axis}
        if not self.symbols or not (formula.free_symbols & self.symbols.keys() or axes.intersection(spans)):
            return formula
        result = without_later_keys(formula) if is_mask_of_last else formula
        if result is not None:
            result = result.rewrite(self.symbols, lambda table, indices: _look_up(table, indices, spans))
        found[is_mask_of_last] = result
        return result


# the rewritings for queries at all positions, at the last one, and at the last n, of sequences of equal lengths
NEWEST = {"i": i + (m - n), "n": m}
WITHOUT_EVICTION = Rewriting({}), Rewriting(NEWEST, are_last=True), Rewriting(NEWEST)


def without_later_keys(mask: Expression) -> Expression | None:
    """Return the mask without the conditions `NOT_LATER`, which always hold for a query at the last position.

    The result is None if no other condition is left.
    """
    result = None
    for term in conjuncts(mask):
        if not any(term is one for one in NOT_LATER):
            result = term if result is None else result & term
    return result


def _look_up(table: Table, indices: Indices, spans: tuple[str, ...]) -> Expression:
    """Return the lookup of a table at `indices`, formulas of rows; axes of the symbols `spans` may have any length.

    A dense array of pairs has a row for each query of the call and a column for each stored row, so it is read at i and
    j of the call, not at positions. Lists of blocks have entries for queries of the call and for positions of keys.
    """
    axes = [(axis or "").partition("/") for axis in table.axes or ()]  # "i/64": a row for each 64 queries
    names = [name for name, _, _ in axes]
    if "i" in names and "j" in names:
        row = names.index("i")
        size = int(axes[row][2] or 1)
        if "i" in indices[row].free_symbols:  # else one row serves all queries
            indices = (*indices[:row], i if size == 1 else i // size, *indices[row + 1 :])
        if names[-1] == "j" and not axes[-1][1]:
            return intern(Lookup(table, (*indices[:-1], j if table.shape[-1] > 1 else indices[-1])))
        spans = tuple([symbol for symbol in spans if symbol != "i"])
    return intern(Lookup(table.without_axes(*spans), indices))


def rewrite_formulas(cache: StoredRows, shape: tuple[int, ...], options: Options) -> Options:
    """Return the options of a call on a cache for a call on its rows, with formulas of rows in place of positions.

    Some rows hold no position of a sequence. If the mask is a formula or None, the returned mask hides such rows too.
    If the mask is an array, it is returned unchanged, and `row_mask` hides such rows. Functions become formulas. Raise
    ShapeError if a formula reads i, and there are more queries than positions. `shape` is the query's shape.
    """
    if len(shape) > 1:
        options = read_functions(options)
        rewriting = cache.rewriting(shape[-2], "i" in free_symbols(options), shape[1] if len(shape) == 4 else 1)
        options = rewrite(options, rewriting)
        if hasattr(options.mask, "dtype"):
            options = options.replace(row_mask=rewriting.condition)
    return options if cache.row_formats is None else options.replace(row_formats=cache.row_formats)


def read_functions(options: Options) -> Options:
    """Return the options with formulas in place of functions."""
    score = _to_formula(options.score, "score", "s b h i j")
    return options.with_formulas(_to_mask(options.mask), score, _map_formulas(options.see, _to_mask))


def free_symbols(options: Options) -> set[str]:
    """Return the names of the symbols in the formulas of the options."""
    formulas = [options.mask, options.score]
    _map_formulas(options.see, formulas.append)  # the statistics that it returns are not used
    return set().union(*[formula.free_symbols for formula in formulas if isinstance(formula, Expression)])


def rewrite(options: Options, rewriting: Rewriting) -> Options:
    """Return the options with formulas of the rows of a call. An array as mask or score stays as it is."""
    mask, score, see = options[:3]
    if isinstance(mask, Expression) or mask is None:
        mask = rewriting.mask(mask)
    if isinstance(score, Expression):
        score = rewriting.formula(score)
    return options.with_formulas(mask, score, _map_formulas(see, rewriting.formula) if rewriting.symbols else see)


def _map_formulas(see: Any, change: Callable[[Any], Any]) -> Any:
    """Return the statistics with changed formulas. What is no statistic stays, and a later check refuses it."""
    if not isinstance(see, Sequence) or isinstance(see, str):
        return see
    return tuple([one.map_formulas(change) if hasattr(one, "map_formulas") else one for one in see])


def _to_mask(given: Any) -> Any:
    return _to_formula(given, "mask", "b h i j")


def _to_formula(formula: Any, role: str, arguments: str) -> Any:
    if formula is None or hasattr(formula, "dtype") or not (isinstance(formula, Expression) or callable(formula)):
        return formula  # an array, or an argument that a later check refuses
    return from_function.to_formula(formula, role, arguments)


def find_rewriting(cache: StoredRows, count: int, reads_rows: bool, group: int) -> Rewriting:
    """Return how the formulas of `count` queries are rewritten; see `StoredRows.rewriting` and `key_formulas`."""
    lengths, (key_position, condition) = cache.lengths, cache.key_formulas(group)
    if cache.drafts is not None:
        condition = conjoin(condition, cache.drafts.condition(count))
    symbols = {} if key_position is j else {"j": key_position}
    entry = b if lengths.size != 1 else 0
    if not reads_rows:
        length = Table(lengths)[entry] if symbols or condition is not None else m
        return Rewriting({**symbols, "n": length, "m": length}, condition)
    positions = find_positions(cache, count)
    real = positions >= 0
    ends = Table(lengths)[entry]
    if not real.all():  # a query that is padding has no keys
        of_rows = j < Table(np.where(real, cache.row_counts[:, None], 0))[entry, i]
        condition = of_rows if condition is None or key_position is j else condition & of_rows
    if (positions == np.arange(count))[real].all():
        longest = int(lengths.max(initial=1))  # a query beyond it is padding, and must not read past a table's end
        position: Expression = i if count <= longest else apply("minimum", i, max(longest - 1, 0))
    elif real.all() and (np.diff(positions) == 1).all():
        position = i + Table(positions[:, 0])[entry]
    else:
        position = Table(np.maximum(positions, 0))[entry, i]
    are_last = count == 1 and bool((positions[:, 0] == lengths - 1)[real[:, 0]].all())
    return Rewriting({**symbols, "i": position, "n": ends, "m": ends}, condition, are_last)


def find_positions(cache: StoredRows, count: int) -> Any:
    """Return the positions (B, count) of the queries of a call whose formulas read i; −1 for padding.

    Raise ShapeError if there are more queries than positions.
    """
    longest = int(cache.lengths.max(initial=0))
    if count > longest > 0 and not cache.are_newest(count):
        given = f"{count} queries under a formula of i, on a KVCache of {longest} positions"
        cure = "append the keys of these queries first; for keys of another sequence use formulas of j alone"
        raise ShapeError(given, "the queries of the newest append, or of the last positions of every sequence", cure)
    return cache.positions(None if cache.are_newest(count) else count)


def name_queries(cache: StoredRows, query: Any, see: Sequence[Statistic], seen: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of a call, in which extrema over the queries name positions in place of rows of the call."""
    count, is_named = query.shape[-2], [one.finds and one.axes == "i" for one in see]
    if True not in is_named or not (count <= cache.max_length or cache.are_newest(count)):
        return tuple(seen)
    positions = cache.positions(None if cache.are_newest(count) else count)
    positions = positions[:, None] if query.ndim == 4 else positions if query.ndim == 3 else positions[0]
    return tuple([x.at_positions(positions) if named else x for x, named in zip(seen, is_named, strict=True)])


def rewrite_for_prefix(cache: StoredRows, prefix: SharedPrefix, count: int, options: Options, group: int) -> Options:
    """Return the options of a call of `count` queries for the rows of a prefix, which is one of `SharedPrefix.parts`.

    The call has a batch entry for each sequence of the prefix's cache. Entry b has the queries of all sequences that
    begin with sequence b of that cache: row i is query i % count of the sequence `prefix.groups[b, i // count]`.

    options : those of the call on the whole cache, with formulas in place of functions
    group : the number of query heads that share a key head
    """
    sequences = np.repeat(prefix.groups, count, axis=1)  # (B₀, rows)
    is_real, indices = sequences >= 0, np.maximum(sequences, 0)
    mask, free = options.mask, free_symbols(options)
    key_position, condition = prefix.cache.key_formulas(group)
    symbols = {} if key_position is j else {"j": key_position}
    if "i" in free:
        positions = find_positions(cache, count)[indices, np.arange(indices.shape[1]) % count]
        is_real &= positions >= 0
        if mask is not None and positions[is_real].min(initial=2**62) >= prefix.cache.max_length - 1:
            mask = without_later_keys(mask)
            options = options.replace(mask=mask)
            free = free_symbols(options)
        symbols["i"] = Table(np.maximum(positions, 0))[b, i]
    if not is_real.all():
        condition = conjoin(Table(is_real)[b, i], condition)
    limits = prefix.lengths[indices]
    if (limits < prefix.cache.lengths[:, None]).any():
        condition = conjoin(key_position < Table(limits)[b, i], condition)
    if free & {"n", "m"}:
        symbols["n"] = symbols["m"] = Table(cache.lengths[indices])[b, i]
    if "b" in free:
        symbols["b"] = Table(indices)[b, i]
    return rewrite(options, Rewriting(symbols, condition))
