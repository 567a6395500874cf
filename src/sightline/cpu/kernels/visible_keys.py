"""The keys of a tile that the decoding kernel reads: in a partial tile, those that a query row of the item sees.

Decoding is limited by the bytes of K and V that it reads. A mask such as the lists of `formula.block_lists.blocks` may
show few keys of a tile, and the kernel reads their rows alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..codegen.builder import Variable
from ..codegen.values import INT64, Value, vector
from .kernel_spec import KEY_BLOCK

if TYPE_CHECKING:
    from .decode import Decode

ROW_BYTES = 8  # the number of a row, INT64


class VisibleKeys:
    """The rows of the current tile of keys that are read, in ascending order.

    Attributes
    ----------
    count : the number of these rows
    """

    count: Value

    def __init__(self, decode: Decode) -> None:
        self.decode, self.builder = decode, decode.builder
        self.has_mask = decode.spec.mask is not None
        if self.has_mask:
            # `seen` has the rows of a partial tile that are seen, and then other row numbers; `all` has every row
            self.seen, self.all = (decode.tiles.scratch(KEY_BLOCK * ROW_BYTES) for _ in range(2))
            self.marks = decode.tiles.scratch(KEY_BLOCK * ROW_BYTES)  # 1 for a row that is seen, else 0
            with self.builder.loop(0, KEY_BLOCK) as key:
                for target in (self.seen, self.all):
                    target.at(key * ROW_BYTES).store(key)

    def select(self, j0: Value, partial: Value) -> None:
        """Find the rows that are read of the tile at j0, and set `count` and `rows`."""
        builder = self.builder
        self.count = builder.minimum(self.decode.args.m - j0, KEY_BLOCK)
        if not self.has_mask:
            return
        count = Variable(builder, INT64, self.count)
        with builder.if_then(partial):
            self.mark_rows(j0)
            seen = Variable(builder, INT64, 0)
            with builder.loop(0, self.count) as key:
                self.seen.at(seen.get() * ROW_BYTES).store(key)
                seen.set(seen.get() + self.marks.at(key * ROW_BYTES).load(INT64))
            count.set(seen.get())
        self.rows, self.count = builder.where(partial, self.seen, self.all), count.get()

    def mark_rows(self, j0: Value) -> None:
        """Set `marks` to 1 for each row of the tile that a query row of the item sees, else to 0."""
        builder, decode = self.builder, self.decode
        kind = vector(INT64, decode.lanes)
        marks = [Variable(builder, kind, 0) for _ in range(KEY_BLOCK // decode.lanes)]
        with builder.loop(0, decode.num_rows) as r:
            for v, mark in enumerate(marks):
                key = builder.arange(decode.lanes, INT64) + v * decode.lanes
                allowed = decode.evaluate_mask(r, builder.minimum(key + j0, decode.args.m - 1))
                mark.set(builder.where(allowed, 1, mark.get()))
        for v, mark in enumerate(marks):
            self.marks.at(v * decode.lanes * ROW_BYTES).store(mark.get())

    def row(self, key: Value) -> Value:
        """Return the row in the tile of the key that is number `key` among the keys that are read."""
        return self.rows.at(key * ROW_BYTES).load(INT64) if self.has_mask else key

    def row_vector(self, v: int) -> Value:
        """Return the rows of a vector of keys; past the last key, numbers of other rows."""
        lanes = self.decode.lanes
        if not self.has_mask:
            return self.builder.arange(lanes, INT64) + v * lanes
        return self.rows.at(v * lanes * ROW_BYTES).load(vector(INT64, lanes))
