"""How sequences are divided among ranks, and which blocks of keys a rank needs: never too few, and few by a mask."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_problems import assert_covers, needed_pairs
from sightline import causal, documents, h, i, j, padding, prefix, table, window
from sightline.call.partition.needed_keys import find_schedule
from sightline.call.partition.shards import Shards, Span, check_shards, divide
from sightline.call.problem import make_problem
from sightline.errors import ParameterError, ShapeError
from strategies import masks

LAYOUTS = ["contiguous", "zigzag"]


def schedule_of(problem, ranks, layout, block_length=10**9):
    _, _, n, m = problem.extent
    return find_schedule(problem.mask, problem.extent, divide(n, ranks, layout), divide(m, ranks, layout), block_length)


def schedule_of_mask(mask, n, ranks, layout="contiguous", extent=(1, 1)):
    shards = divide(n, ranks, layout)
    return find_schedule(mask, (*extent, n, n), shards, shards, n)


def problem_of(mask, extent):
    B, H, n, m = extent
    query, key = (np.broadcast_to(np.float32(0), (B, H, length, 1)) for length in (n, m))
    return make_problem(query, key, key, mask=mask)


def received_keys(schedule):
    """Return (ranks, ranks): the number of keys that rank r receives from rank o, at [r, o]; 0 on the diagonal."""
    counts = np.zeros((schedule.size, schedule.size))
    for column, block in enumerate(schedule.blocks):
        counts[:, block.owner] += np.diff(schedule.seen[:, :, column], axis=0)[0]
    np.fill_diagonal(counts, 0)
    return counts


@st.composite
def masked(draw):
    extent = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 300)), draw(st.integers(1, 300))
    return problem_of(draw(masks(extent)), extent)


@settings(max_examples=60, deadline=None)
@given(masked(), st.integers(1, 9), st.sampled_from(LAYOUTS), st.sampled_from([4, 20, 64, 1000]))
def test_no_visible_pair_of_a_drawn_mask_is_needless(problem, ranks, layout, block_length):
    assert_covers(schedule_of(problem, ranks, layout, block_length), needed_pairs(problem))


N = 500
HEADS = np.array([8, 300, 40])
NAMED = {
    "no mask": None,
    "causal": causal(),
    "window": causal() & window(70),
    "prefix": causal() | prefix(90),
    "documents": documents(lengths=[100, 1, 0, 199, 200]) & causal(),
    "a table of documents": documents(np.random.default_rng(3).integers(0, 3, (2, N))),
    "padding": padding([130, 500]),
    "a window of each head": (i - j < table(HEADS)[h]) & (i >= j),
    "every seventh": (i * j) % 7 == 0,
    "nothing": i < 0,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("name", NAMED)
def test_no_visible_pair_of_a_named_mask_is_needless(name, ranks, layout):
    problem = problem_of(NAMED[name], (2, 3, N, N))
    assert_covers(schedule_of(problem, ranks, layout, 100), needed_pairs(problem))


def test_tiles_on_the_border_of_two_ranks_need_no_more_blocks():
    """A tile of the search has more than 64 positions if the sequence is long, and may belong to two ranks."""
    n = 200_000
    schedule = schedule_of_mask((i - j < 10) & (i >= j), n, 7)
    for rank in range(7):
        needed = [block.owner for block in schedule.blocks if schedule.needed_part(rank, block)]
        assert needed == [rank - 1, rank] if rank else needed == [0]


def test_only_the_keys_and_queries_of_a_window_are_needed():
    schedule = schedule_of_mask((i - j < 100) & (i >= j), 1024, 2)  # a shard is one block
    first, last = schedule.blocks
    own, received = schedule.needed_part(1, last).span, schedule.needed_part(1, first).span
    assert (own, received) == (Span(512, 1024, 0), Span(384, 512, 384))  # tiles of 64 positions
    assert list(schedule.seeing_spans(1, first)) == [Span(512, 640, 0)]
    assert received_keys(schedule).tolist() == [[0, 0], [128, 0]]


@pytest.mark.parametrize("n", [101, 1000])
def test_a_causal_rank_never_needs_a_later_rank(n):
    schedule = schedule_of_mask(causal(), n, 3)
    np.testing.assert_array_equal(received_keys(schedule) > 0, np.tri(3, k=-1, dtype=bool))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_length", [1, 7, 100, 10**6])
def test_blocks_cover_the_keys_once(layout, block_length):
    schedule = schedule_of(problem_of(causal(), (1, 1, 300, 222)), 4, layout, block_length)
    keys = [position for block in schedule.blocks for position in range(block.span.start, block.span.stop)]
    assert sorted(keys) == list(range(222))
    assert all(0 < len(block.span) <= block_length for block in schedule.blocks)
    for owner in range(4):
        blocks = [block for block in schedule.blocks if block.owner == owner]
        assert [block.index for block in blocks] == list(range(len(blocks)))
        rows = [row for block in blocks for row in range(block.span.rows.start, block.span.rows.stop)]
        assert sorted(rows) == list(range(schedule.keys.lengths[owner]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_needed_block_is_received_once_and_sent_once(layout):
    schedule = schedule_of(problem_of(causal() & window(120), (1, 1, 400, 400)), 5, layout, 30)
    rounds = [schedule.rounds(rank) for rank in range(5)]
    for rank, own in enumerate(rounds):
        received = [each.received for each in own if each.received is not None]
        needed = [schedule.needed_part(rank, block) for block in schedule.blocks if block.owner != rank]
        assert sorted(received, key=schedule.column) == [part for part in needed if part is not None]
        for place, each in enumerate(own):
            if each.received is not None:
                assert rounds[each.received.owner][place].sent == each.received
        assert received_keys(schedule)[rank].sum() == sum(len(block.span) for block in received)


def test_a_window_sends_a_fifth_of_a_full_ring_at_most():
    n, ranks = 131_072, 8
    schedule = schedule_of_mask(causal() & window(4096), n, ranks)
    assert 0 < received_keys(schedule).sum() <= 0.2 * (ranks - 1) * n


def test_documents_of_whole_shards_send_nothing():
    assert received_keys(schedule_of_mask(documents(lengths=[128] * 4), 512, 4)).sum() == 0


def test_an_empty_sequence_needs_nothing():
    schedule = find_schedule(causal(), (1, 1, 0, 0), divide(0, 3), divide(0, 3), 64)
    assert all(not schedule.rounds(rank) for rank in range(3))


# -- the division of sequences -----------------------------------------------------------------------------------------


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
    shards = Shards.from_bounds([0, 3, 3, 8], "contiguous")
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
