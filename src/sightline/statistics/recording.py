"""The recording of a watched model: a `Seen` holds one `Call` for each run of an attention layer of the model.

This module imports no framework. The recorded results are arrays of the model's framework.
"""

from __future__ import annotations

import math
import re
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from ..arrays.operations import accumulator, dtype_name, namespace, resolve_dtype, to_numpy
from ..errors import ParameterError
from . import STATISTICS, Statistic, arrays_of

__all__ = ["AttentionKind", "Call", "HeavyKey", "Seen", "Tokens", "Total", "select_names"]

MAX_LINES, MAX_COLUMNS, MAX_PATH = 40, 98, 40  # of a `Seen` as text: longer tables lose their middle, paths their start
AttentionKind = Literal["self", "cross"]
BatchLabels = Sequence[Sequence[str]]  # for each batch entry, the labels of its positions
Tokens = BatchLabels | Mapping[str, BatchLabels]  # labels of one sequence, or of two: {"encoder": ..., "decoder": ...}


class LabelledInputs(Protocol):
    """The labels of positions, such as tokens, that were read from a model's inputs; None if they are unknown.

    `start` is the position of a call's first query: the number of tokens in the cache, or in the decoder's cache.
    """

    tokens: Tokens | None
    start: int


@dataclass(frozen=True, repr=False)
class Call:
    """One run of one attention layer.

    Attributes
    ----------
    layer : str
        The module's path in the model, such as "model.layers.0.self_attn".
    kind : {"self", "cross"}
        "self" if queries and keys come from one sequence, "cross" if the keys come from another sequence.
    step : int
        How many runs of the model have called this layer before. In generation it is the index of the generated token.
    query_start : int
        If `kind` is "self", the number of keys before the first query: 0 without a cache, else the number of keys in
        it. If `kind` is "cross", the position of the first query in its own sequence.
    key_start : int
        The position of the first key in its sequence. It is above 0 after a sliding cache has discarded keys.
    n, m : int
        The number of queries, and the number of keys.
    heads : tuple of int
        The query heads whose results were recorded. They are axis 1 of the results.
    statistics : tuple of Statistic
        The recorded statistics.
    results : tuple
        The result of each statistic, of shape (B, heads, …); the statistic defines the other axes.
    inputs : LabelledInputs, optional
        The labels of positions, read from the inputs that the model had got when the layer ran.
    call : int
        How many calls the layer has made before in this run of the model. It is above 0 if the layer computes attention
        several times, or if the model runs one layer several times, as ALBERT does.
    names : tuple of str
        The names of the statistics, if the watch got a dict.
    """

    layer: str
    kind: AttentionKind
    step: int
    query_start: int
    key_start: int
    n: int
    m: int
    heads: tuple[int, ...]
    statistics: tuple[Statistic, ...]
    results: tuple[Any, ...]
    inputs: LabelledInputs | None = None
    call: int = 0
    names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The layer's path, with the number of the call if the layer has made other calls before in this run."""
        return f"{self.layer} (call {self.call})" if self.call else self.layer

    def __getitem__(self, name: str) -> Any:
        """Return the result of the statistic that has this name ("top_k") or prints as this text ("top_k(8)").

        "top_k" also names a mean or a selection of `top_k`, if no other statistic of the call has this name.
        """
        return self.results[_find_statistic(name, self.statistics, self.names)]

    def of_heads(self, heads: Sequence[int]) -> Call:
        """Return the call with the results of these query heads alone. `heads` are the heads' numbers in the model."""
        missing = [head for head in heads if head not in self.heads]
        if missing:
            given = f"heads {missing} of {self.layer}, which were not recorded"
            raise ParameterError(given, f"heads {list(self.heads)}", f"heads={[*self.heads][:1]}")
        places = [self.heads.index(head) for head in heads]
        results = []
        for statistic, result in zip(self.statistics, self.results, strict=True):
            axis = statistic.head_axis(1)
            if axis is None:
                raise ParameterError(f"heads=... of {statistic!r}", "statistics with a head axis", "leave heads= out")
            results.append(map_arrays(itemgetter((slice(None),) * axis + (places,)), result))
        return replace(self, heads=tuple(heads), results=tuple(results))

    def __repr__(self) -> str:
        statistics = ", ".join(map(repr, self.statistics))
        return f"Call({self.name}, {self.kind}, step {self.step}, {self.n} queries on {self.m} keys: {statistics})"


class HeavyKey(NamedTuple):
    """A key that receives a large share of a head's attention; see `Seen.heaviest`.

    Attributes
    ----------
    layer : the layer's path
    head : the query head
    token : the label of the key, as `Seen.labels` gives it: its token, or its position
    share : the part of the head's attention, from 0 to 1
    position : the position of the key
    entry : the batch entry
    step : `Call.step`
    """

    layer: str
    head: int
    token: str
    share: float
    position: int
    entry: int
    step: int


class Total:
    """The sum or mean of a statistic over the calls of a watch, added while the model runs.

    Attributes
    ----------
    statistic : the sum or mean over layers of a statistic
    name : str
        The key of the statistic if `see` was a dict, else "".
    count : int
        The number of calls.
    """

    def __init__(self, statistic: Any, name: str = "") -> None:
        self.statistic, self.name, self.count, self._lock = statistic, name, 0, threading.Lock()
        self._sum: Any = None

    def add(self, layer: str, result: Any) -> None:
        """Add the result of a call of a layer. The sum is float64 if the result is float64, else float32.

        Raises
        ------
        ParameterError
            The result has another shape than those of the calls before.
        """
        xp = namespace(result)
        result = xp.astype(result, resolve_dtype(xp, accumulator(dtype_name(result))), copy=False)
        with self._lock:  # a model may call its layers in several threads
            if self.count and self._sum.shape != result.shape:
                old, new = ("×".join(map(str, array.shape)) for array in (self._sum, result))
                raise ParameterError(
                    f"{self.statistic!r} with results of shape {old}, and of shape {new} in {layer}",
                    "results of one shape, as those of one forward pass",
                    "layers=[...] for layers of one kind; in a generation the statistic of each call",
                )
            self._sum = result if self._sum is None else self._sum + result
            self.count += 1

    @property
    def result(self) -> Any:
        """The sum, or the mean, over the calls so far. ParameterError is raised before the first call."""
        if self._sum is None:
            raise ParameterError(f"{self.statistic!r} before the first call", "a model that ran", "call the model")
        return self._sum if self.statistic.how == "sum" else self._sum / self.count

    def __repr__(self) -> str:
        calls = _plural(self.count, "call")
        return f"{self.statistic!r} {_shape(self.result)}, of {calls}" if self.count else "no calls"


class Seen:
    """The calls of a watched model, in the order in which they ran.

    `seen["lse"]` is the list of one statistic's results, one for each call. A sum or mean over layers has one array in
    place of the list. `seen.of(layer=..., step=...)` selects calls. A loop over `seen` yields the calls.

    Parameters
    ----------
    calls : sequence of Call
    tokens : labels of positions, optional
        For each batch entry a list of strings. A model with two sequences has {"encoder": ..., "decoder": ...} with
        such lists for each sequence. The labels can be set later as `seen.tokens`, for example after generation. By
        default each call has the labels of its `inputs`.
    totals : sequence of Total, optional
        Sums and means over the calls. `of` leaves them out, because it selects some of the calls.
    """

    model: str = "Attention"  # the name of the model, for titles
    load_explorer: ClassVar[Callable[[], Any]]  # returns `sightline.view.explorer`; set in `sightline/__init__.py`

    def __init__(
        self, calls: Sequence[Call] = (), tokens: Tokens | Sequence[str] | None = None, totals: Sequence[Total] = ()
    ) -> None:
        self.calls, self.totals = list(calls), tuple(totals)
        self.tokens = tokens

    @property
    def tokens(self) -> Tokens | None:
        """The labels of positions: a list for each batch entry, or a dict of such lists.

        The dict has the keys "encoder" and "decoder". If no labels were set, the labels are the tokens of the last
        call's inputs; they are None if these tokens are unknown.

        A list has one string for each position. The longest list must have as many strings as the recorded calls have
        positions. It may have more strings if the recording has steps of a generation. A shorter list belongs to a text
        with padding at its end. For other labels ParameterError is raised.
        """
        if self._tokens is None and self.calls and self.calls[-1].inputs is not None:
            return self.calls[-1].inputs.tokens
        return self._tokens

    @tokens.setter
    def tokens(self, given: Tokens | Sequence[str] | None) -> None:
        sides = ("encoder", "decoder")
        tokens: Tokens | None = None
        if not isinstance(given, Mapping):
            tokens = None if given is None else labels_by_entry(given)
        elif set(given) <= set(sides):
            tokens = {side: labels_by_entry(labels) for side, labels in given.items()}
        else:
            raise ParameterError(
                f"tokens of {sorted(given)}", 'labels of "encoder" and "decoder"', 'tokens={"encoder": [["a", "b"]]}'
            )
        if tokens is not None:
            self.check_tokens(tokens)
        self._tokens = tokens  # only labels that fit replace those before

    def check_tokens(self, tokens: Tokens | None = None) -> None:
        """Raise ParameterError if labels, by default those that were set, do not fit the recorded calls."""
        tokens = self._tokens if tokens is None else tokens
        if tokens is None or not self.calls:
            return
        results = self.calls[0].results
        texts = len(arrays_of(results[0])[0]) if results else math.inf
        for side, labels in (tokens if isinstance(tokens, Mapping) else {"": tokens}).items():
            positions, is_generation = _count_positions(self.calls, side)
            longest = max(map(len, labels), default=0)
            is_too_long = longest > positions and not is_generation  # no layer gets the last token of a generation
            if positions and (len(labels) > texts or longest < positions or is_too_long):
                raise ParameterError(
                    f"tokens: {len(labels)} lists of up to {longest} labels, for calls with {texts} batch entries of "
                    f"{positions} positions",
                    "one label for each position; those of padding at the end may be missing or empty",
                    "tokens=[tokenizer.convert_ids_to_tokens(row) for row in input_ids.tolist()] for texts, or "
                    "tokens=['class', *registers, *patches] for an image, as the model orders them",
                )

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the recorded layers, in the order in which the layers first ran."""
        return tuple(dict.fromkeys(call.layer for call in self.calls))

    def of(
        self,
        layer: str | int | Sequence[str | int] | None = None,
        *,
        kind: AttentionKind | None = None,
        step: int | None = None,
        call: int | None = None,
        heads: Sequence[int] | None = None,
    ) -> Seen:
        """Return a `Seen` of the calls that match every given argument. `heads` leaves out the results of other heads.

        Parameters
        ----------
        layer : str, int or several
            A layer's path, a pattern of paths ("*.3.*"), or an index in `layers`. A negative index counts from the end.
        kind : {"self", "cross"}, optional
        step : int, optional
            A negative step counts from the end: -1 is the last step of each layer.
        call : int, optional
            The number of the call among those of the layer in one run of the model. A negative number counts from the
            end.
        heads : list of int, optional
            Query heads, by their numbers in the model.

        Raises
        ------
        ParameterError
            The layer, kind or head does not exist.
        """
        if kind not in (None, "self", "cross"):
            raise ParameterError(f"kind={kind!r}", '"self", "cross" or None', 'seen.of(kind="self")')
        names = self.layers if layer is None else select_names(self.layers, layer)
        steps = {recorded.layer: recorded.step + 1 for recorded in self.calls}
        counts = {(recorded.layer, recorded.step): recorded.call + 1 for recorded in self.calls}
        calls = [
            recorded
            for recorded in self.calls
            if recorded.layer in names
            and (kind is None or recorded.kind == kind)
            and (step is None or recorded.step == (step if step >= 0 else steps[recorded.layer] + step))
            and (call is None or recorded.call == (call if call >= 0 else counts[recorded.layer, recorded.step] + call))
        ]
        selected = Seen(calls if heads is None else [recorded.of_heads(heads) for recorded in calls])
        selected.model, selected._tokens = self.model, self._tokens  # the labels fit all calls, and so a part of them
        return selected

    def labels(self, call: Call, entry: int = 0) -> tuple[list[str], list[str]]:
        """Return (n labels of the call's queries, m labels of the call's keys) in one batch entry.

        The labels are those of `tokens`, else those of the call's inputs. The frames of Whisper's encoder have times
        ("1.24 s", from the start of its window). The positions of an image have "class", "register 1" and "row,column".
        If no labels are known, they are the positions in the sequence: "0", "1", and so on. Padding at the end of a
        text has the label "".
        """
        tokens: Tokens | None = self._tokens
        read = None if call.inputs is None else call.inputs.tokens
        if tokens is None:
            tokens = read
        elif isinstance(tokens, Mapping) and isinstance(read, Mapping):
            tokens = {**read, **tokens}  # labels of one side leave those of the other side
        queries = _labels_of_side(tokens, _side(call), entry)
        keys = queries if call.kind == "self" else _labels_of_side(tokens, "encoder", entry)
        if call.kind == "cross" and not isinstance(tokens, Mapping):
            keys = None  # a single list of tokens labels the sequence of the queries
        first = _query_position(call)
        if self._tokens is None:  # inputs of another length label another sequence, such as the patches of an image
            queries = _of_length(queries, first + call.n)
            keys = queries if call.kind == "self" else _of_length(keys, call.m)
        return _piece(queries, first, call.n), _piece(keys, call.key_start, call.m)

    def __getitem__(self, name: str | int | slice) -> Any:
        """Return the call at an index, or the calls of a slice as a list.

        For the name of a statistic, return the list of its results, one result for each call. For the name of a sum or
        mean over layers, return its one result. `Call.__getitem__` says which names a statistic has.
        """
        if not isinstance(name, str):
            with suppress(IndexError, TypeError):
                return self.calls[name]
            allowed = f"a statistic's name, or the number of one of {_plural(len(self), 'call')}"
            raise ParameterError(f"seen[{name!r}]", allowed, 'seen["entropy"], or seen[0]')
        own, names = (self.calls[0].statistics, self.calls[0].names) if self.calls else ((), ())
        if self.totals:
            statistics = [*own, *[total.statistic for total in self.totals]]
            place = _find_statistic(name, statistics, [*names, *[total.name for total in self.totals]]) - len(own)
            if place >= 0:
                return self.totals[place].result
        return [call[name] for call in self.calls]

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        header = ("layer", "kind", "step", "queries", "keys", "heads", "results")
        rows = [header, *_join_rows(map(_row, self.calls))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
        lines: list[str] = []
        for *cells, results in rows:
            start = "".join(cell.ljust(width + 2) for cell, width in zip(cells, widths, strict=True))
            lines += textwrap.wrap(start + results, MAX_COLUMNS, subsequent_indent=" " * len(start))
        if len(lines) > MAX_LINES:
            lines[MAX_LINES // 2 : -MAX_LINES // 2] = [f"… {len(lines) - MAX_LINES} more lines"]
        totals = [line for total in self.totals for line in textwrap.wrap(repr(total), MAX_COLUMNS)]
        counts = f"{_plural(len(self), 'call')} of {_plural(len(self.layers), 'layer')}"
        return "\n".join([f"Seen: {counts}", *(lines if self.calls else []), *totals])

    def heaviest(self, name: str = "received", count: int = 8) -> list[HeavyKey]:
        """Return the keys with the largest shares of a head's attention, over all calls, heads and batch entries.

        The share of key j is rⱼ / Σⱼ rⱼ, from 0 to 1, where rⱼ is what `received()` recorded. If attention is uniform,
        every share is 1/m. Heads that look at one key alone, such as the first token (a sink), come first.

        Parameters
        ----------
        name : the statistic `received()`, by its name or text as in `seen[name]`
        count : the number of keys

        Raises
        ------
        ParameterError
            The recording has no such statistic, or the statistic has no number for each head and key.
        """
        candidates: list[tuple[float, Call, int, int, int]] = []
        for call in self.calls:
            statistic = call.statistics[_find_statistic(name, call.statistics, call.names)]
            received = to_numpy(call[name])
            if statistic.name != "received" or received.shape[1:] != (len(call.heads), call.m):
                raise ParameterError(
                    f"heaviest({name!r}), where {statistic!r} was recorded",
                    "received(), which has a number for each head and key",
                    "see=[sightline.received()]",
                )
            total = np.maximum(received.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
            shares = received.astype(np.float64) / total
            for place in np.argsort(-shares, axis=None, kind="stable")[:count]:
                entry, head, key = map(int, np.unravel_index(place, shares.shape))
                candidates.append((float(shares[entry, head, key]), call, entry, head, key))
        candidates.sort(key=lambda candidate: -candidate[0])
        return [
            HeavyKey(call.name, call.heads[head], labels[key], share, call.key_start + key, entry, call.step)
            for share, call, entry, head, key in candidates[:count]
            for labels in (self.labels(call, entry)[1],)
        ]

    def explore(self, **options: Any) -> Any:
        """Show the explorer, a page with every layer, head and token, in a notebook or in a browser.

        Parameters
        ----------
        options : the keyword arguments of `sightline.view.explorer.from_seen`, such as `title` and `limit`
        """
        explorer = Seen.load_explorer()
        return explorer.explore(explorer.from_seen(self, **options))

    def save_html(self, path: Any, **options: Any) -> None:
        """Write the explorer's page to an HTML file. A browser is enough to read it.

        Parameters
        ----------
        path : str or Path
        options : the keyword arguments of `sightline.view.explorer.from_seen`, such as `title` and `limit`
        """
        explorer = Seen.load_explorer()
        explorer.save_html(explorer.from_seen(self, **options), path)

    show = explore


def select_names(names: Sequence[str], asked: str | int | Sequence[str | int], what: str = "layers") -> tuple[str, ...]:
    """Return the names that `asked` selects by path, by pattern or by index, in the order of `names`.

    `what` says in the plural what the names are, for the error.

    Raises
    ------
    ParameterError
        A path, a pattern or an index in `asked` matches no name.
    """
    matches: set[str] = set()
    for selector in asked if isinstance(asked, Iterable) and not isinstance(asked, str) else [asked]:
        if isinstance(selector, str):
            fitting = [name for name in names if fnmatchcase(name, selector)]
        else:
            is_number = isinstance(selector, int | np.integer) and not isinstance(selector, bool)
            fitting = [names[selector]] if is_number and -len(names) <= selector < len(names) else []
        if not fitting:
            near = get_close_matches(str(selector).strip("*."), names, 4, 0.3) or names[:4]
            if what == "modules":  # few of them compute attention
                cure = "layers=[0], the first layer that runs; `seen.layers` of a watch without layers= has all paths"
            else:
                cure = f'layers=["{near[0]}"]' if near else "a model with attention"
            raise ParameterError(
                f"layers={selector!r}, which selects none of {len(names)} {what}",
                f"a number of a layer, or a path or pattern of {what} such as {', '.join(near)}",
                cure,
            )
        matches.update(fitting)
    return tuple(name for name in names if name in matches)


def map_arrays(function: Callable[[Any], Any], result: Any) -> Any:
    """Return a statistic's result with the function applied to its array, or to each of its arrays."""
    return type(result)(*map(function, result)) if isinstance(result, tuple) else function(result)


def _side(call: Call) -> str:
    """Return "encoder" if the call's queries are positions of the encoder's sequence, else "decoder"."""
    return "encoder" if "encoder" in call.layer.split(".") else "decoder"


def _query_position(call: Call) -> int:
    """Return the position of the call's first query in its sequence."""
    return call.query_start + (call.key_start if call.kind == "self" else 0)


def _count_positions(calls: Sequence[Call], side: str) -> tuple[int, bool]:
    """Return the number of positions of a side's sequence, and True if the sequence grew in steps, as in generation.

    The side is "encoder" or "decoder". The side "" counts the calls of both sides.
    """
    own = [call for call in calls if call.kind == "self" and side in ("", _side(call))]
    counts = [_query_position(call) + call.n for call in own]
    if side == "encoder":
        counts += [call.m for call in calls if call.kind == "cross"]
    return max(counts, default=0), any(call.query_start for call in own)


def _labels_of_side(tokens: Tokens | None, side: str, entry: int) -> Sequence[str] | None:
    """Return the labels of a side, "encoder" or "decoder", in one batch entry; None if `tokens` lacks them."""
    labels = tokens.get(side) if isinstance(tokens, Mapping) else tokens
    return None if labels is None or not -len(labels) <= entry < len(labels) else labels[entry]


def _of_length(labels: Sequence[str] | None, length: int) -> Sequence[str] | None:
    """Return the labels if they have this length, else None."""
    return labels if labels is not None and len(labels) == length else None


def _piece(labels: Sequence[str] | None, first: int, count: int) -> list[str]:
    """Return `count` labels from index `first` on, "" where `labels` ends. Without `labels`, return the indices."""
    if labels is None:
        return [str(first + k) for k in range(count)]
    piece = list(labels[first : first + count])
    return piece + [""] * (count - len(piece))


def _find_statistic(name: str, statistics: Sequence[Statistic], names: Sequence[str]) -> int:
    """Return the index of the statistic that has this key in a dict, this text or this name; see `Call.__getitem__`."""
    texts = [repr(statistic) for statistic in statistics]
    own_names, inner_names = [statistic.name for statistic in statistics], [text.partition("(")[0] for text in texts]
    for candidates in (list(names), texts, own_names, inner_names):
        if candidates.count(name) == 1:
            return candidates.index(name)
    function, near = name.partition("(")[0], get_close_matches(name, [*names, *texts], 1) or texts
    cure = f"seen[{near[0]!r}]" if near else "see=[sightline.entropy()] in the watch"
    if function in STATISTICS and function not in [*own_names, *inner_names]:
        cure = f"see=[sightline.{function}(...)] in the watch"
    given = f"seen[{name!r}] of a recording of {', '.join(texts) or 'no statistic'}"
    raise ParameterError(given, "the name or text of one recorded statistic", cure)


def _shape(array: Any) -> str:
    return "×".join(map(str, array.shape))


def _row(call: Call) -> tuple[str, ...]:
    results = [
        f"{statistic!r} " + ", ".join(map(_shape, arrays_of(result)))
        for statistic, result in zip(call.statistics, call.results, strict=True)
    ]
    queries = f"{call.n} from {call.query_start}" if call.query_start else str(call.n)
    return call.name, call.kind, str(call.step), queries, str(call.m), str(len(call.heads)), "; ".join(results)


def _join_rows(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows, with one row ("layers.0–5") for rows that differ in only one number of the layer's path."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for name, *cells in rows:
        parts = re.split(r"(\d+)", name)  # text and numbers in turn
        groups.setdefault(("0".join(parts[::2]), *cells), []).append(parts)
    joined = []
    for (_, *cells), names in groups.items():
        columns = list(zip(*names, strict=True))
        differs_once = sum(len(set(column)) > 1 for column in columns) <= 1
        paths = map("".join, [map(_ranges, columns)] if differs_once else names)
        joined += [(path if len(path) <= MAX_PATH else "…" + path[1 - MAX_PATH :], *cells) for path in paths]
    return joined


def _ranges(cells: Sequence[str]) -> str:
    """Return the text of the cells if they are equal, else the ranges of the cells' whole numbers: "0–5, 7"."""
    if len(set(cells)) == 1:
        return cells[0]
    numbers = sorted(set(map(int, cells)))
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(f"{a}–{z}" if z > a else f"{a}" for a, z in zip(starts, ends, strict=True))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def labels_by_entry(labels: Any) -> list[list[str]]:
    """Return a list of labels for each batch entry. A plain list of labels is read as the labels of one entry.

    Raises
    ------
    ParameterError
        `labels` is neither a list of labels nor a list of such lists.
    """
    try:
        entries = [labels] if len(labels) and isinstance(labels[0], str) else labels
        return [list(map(str, entry)) for entry in entries]
    except TypeError as error:  # `labels` has no length, or holds numbers instead of lists
        raise ParameterError(
            f"tokens of a {type(labels).__name__}: {error}",
            "a list of strings, or such a list for each text",
            "tokens=tokenizer.convert_ids_to_tokens(numbers)",
        ) from error
