"""The division of sequences among ranks."""

import numpy as np
import pytest

from sightline.errors import ParameterError, ShapeError
from sightline.partition.shards import Shards, check_shards, divide

LENGTHS = [0, 1, 3, 4, 5, 17, 64, 100, 1023, 4096]
RANKS = [1, 2, 3, 4, 7, 8, 33]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_position_belongs_to_one_rank_and_one_row(length, ranks, layout):
    """Spans begin at multiples of 4, and fill the rows of their rank."""
    shards = divide(length, ranks, layout)
    assert len(shards.ranks) == ranks
    assert shards.length == length
    owned = [position for own in shards.ranks for span in own for position in range(span.start, span.stop)]
    assert sorted(owned) == list(range(length))
    for own, rows in zip(shards.ranks, shards.lengths, strict=True):
        assert all(span.start % 4 == 0 for span in own if len(span))
        filled = [row for span in own for row in range(span.rows.start, span.rows.stop)]
        assert filled == list(range(rows))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_parts_are_about_equally_long(length, ranks):
    """The numbers of groups of 4 positions differ by 1 at most; the last group of the sequence may be smaller."""
    for layout in ("contiguous", "zigzag"):
        groups = [-(-len(span) // 4) for own in divide(length, ranks, layout).ranks for span in own]
        assert max(groups) - min(groups) <= 1


def test_a_rank_of_a_zigzag_holds_a_part_from_each_end():
    assert [[(span.start, span.stop) for span in own] for own in divide(32, 4, "zigzag").ranks] == [
        [(0, 4), (28, 32)],
        [(4, 8), (24, 28)],
        [(8, 12), (20, 24)],
        [(12, 16), (16, 20)],
    ]


def test_more_ranks_than_positions_leave_ranks_without_positions():
    assert sorted(divide(5, 8).lengths) == [0, 0, 0, 0, 0, 0, 1, 4]


def test_lengths_of_a_caller_are_kept():
    shards = Shards.from_lengths([3, 0, 5])
    assert [(span.start, span.stop, span.row) for own in shards.ranks for span in own] == [
        (0, 3, 0),
        (3, 3, 0),
        (3, 8, 0),
    ]
    assert check_shards("key", [3, 0, 5], "contiguous") == shards
    assert check_shards("key", [4, 8], "zigzag") == divide(12, 2, "zigzag")
    with pytest.raises(ShapeError, match="key with"):
        check_shards("key", [8, 4], "zigzag")


def test_an_unknown_layout_is_refused():
    with pytest.raises(ParameterError, match="zigzag"):
        divide(8, 2, "striped")


def test_rows_of_a_rank_gather_its_positions():
    x = np.arange(40)
    for own in divide(40, 3, "zigzag").ranks:
        local = np.concatenate([x[span.start : span.stop] for span in own])
        for span in own:
            np.testing.assert_array_equal(local[span.rows], x[span.start : span.stop])
