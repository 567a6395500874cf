"""How the positions of a sequence are divided among ranks.

A rank is one process, or one device, of a group that computes attention together. Its shard is a list of spans of
consecutive positions; the rows of the rank's arrays are the positions of its spans, one span after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

from ...errors import ParameterError, ShapeError

ShardLayout = Literal["contiguous", "zigzag"]
KEY_ALIGNMENT = 4  # spans begin at multiples of 4, because dropout counts the keys in groups of 4


@dataclass(frozen=True)
class Span:
    """Consecutive positions, from `start` to before `stop`, whose first row in the rank's arrays is `row`."""

    start: int
    stop: int
    row: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """The rows of the rank's arrays that hold these positions."""
        return slice(self.row, self.row + len(self))

    def part(self, start: int, stop: int) -> Span:
        """Return the part of the span from the position `start` to before `stop`."""
        return Span(start, stop, self.row + start - self.start)

    def cut(self, length: int) -> list[Span]:
        """Return consecutive parts of at most `length` positions."""
        return [self.part(at, min(at + length, self.stop)) for at in range(self.start, self.stop, length)]


@dataclass(frozen=True)
class Shards:
    """The division of a sequence: the spans of each rank. Every position belongs to one span."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> int:
        """The number of positions of the whole sequence."""
        return sum(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions of each rank."""
        return tuple([sum(map(len, spans)) for spans in self.ranks])

    def cut(self, length: int) -> Shards:
        """Return the division whose spans have at most `length` positions."""
        return Shards(tuple([tuple([part for span in spans for part in span.cut(length)]) for spans in self.ranks]))

    @classmethod
    def from_bounds(cls, bounds: Sequence[int], layout: ShardLayout) -> Shards:
        """Return the division whose parts end at consecutive bounds: R parts of "contiguous", 2R parts of "zigzag"."""
        parts = list(pairwise(bounds))
        if layout == "contiguous":
            return cls(tuple([(Span(*part, 0),) for part in parts]))
        pairs = list(zip(parts, reversed(parts), strict=True))[: len(parts) // 2]
        return cls(tuple([(Span(*first, 0), Span(*last, first[1] - first[0])) for first, last in pairs]))


def divide(length: int, ranks: int, layout: ShardLayout = "contiguous", alignment: int = KEY_ALIGNMENT) -> Shards:
    """Return the division of `length` positions among ranks.

    contiguous
        Rank r holds the r-th of R parts of about equal length.
    zigzag
        The sequence has 2R parts, and rank r holds the parts r and 2R − 1 − r. Under a causal mask every rank then
        computes about as many pairs as every other rank.

    All parts begin at multiples of `alignment`. Of 4, the lengths of two parts may differ by up to 7.

    Raises
    ------
    ParameterError
        `layout` is neither "contiguous" nor "zigzag".
    """
    check_layout(layout)
    count = ranks if layout == "contiguous" else 2 * ranks
    units = -(-length // alignment)
    bounds = [min(alignment * (-(-units * part // count)), length) for part in range(count + 1)]
    return Shards.from_bounds(bounds, layout)


def check_shards(name: str, lengths: Sequence[int], layout: ShardLayout) -> Shards:
    """Return the division whose ranks have these lengths. Raise ShapeError if the layout does not allow them."""
    if layout == "contiguous":
        return Shards.from_bounds([0, *accumulate(lengths)], layout)
    shards = divide(sum(lengths), len(lengths), layout)
    if tuple(lengths) != shards.lengths:
        raise ShapeError(
            f"{name} with {list(lengths)} positions on the ranks, layout={layout!r}",
            f"{list(shards.lengths)} positions",
            f"divide the {shards.length} positions with shard(x, layout={layout!r})",
        )
    return shards


def divide_heads(key_heads: int, ranks: int) -> list[int]:
    """Return a list of the first key head of each rank, followed by the number of key heads.

    Raises
    ------
    ParameterError
        There are fewer key heads than ranks.
    """
    if ranks > key_heads:
        given = f'method="heads" with {key_heads} key heads on {ranks} ranks'
        raise ParameterError(given, "at least as many key heads as ranks", 'method="ring"')
    return [key_heads * rank // ranks for rank in range(ranks + 1)]


def check_layout(layout: Any) -> None:
    if layout not in get_args(ShardLayout):
        raise ParameterError(f"layout={layout!r}", '"contiguous" or "zigzag"', 'layout="zigzag" for a causal mask')
