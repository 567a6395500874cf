"""Pictures of a mask's tiles, the rectangles of pairs that kernels process: empty, full or partial."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.operations import Array
from ..call.validation import read_mask
from ..errors import MaskError, ParameterError
from ..formula.expression import Expression
from ..formula.tile_ranges import find_tile_ranges
from . import plotting
from .formula_pictures import validate_extent
from .palette import LIGHT

MAX_TILES = 512  # largest number of tiles per side; more queries or keys get larger tiles
MAX_LINED_TILES = 64  # largest number of tiles per side at which lines separate the tiles
EMPTY, PARTIAL, FULL = 0, 1, 2
TILE_KINDS = {EMPTY: ("empty", LIGHT.hidden), PARTIAL: ("partial", LIGHT.weights[2]), FULL: ("full", LIGHT.blue)}


def tile_kinds(mask: Expression, n: int, m: int, block: int, *, batch: int = 0, head: int = 0) -> Array:
    """Return the kind of every tile of a mask as a uint8 array, with one number per tile of `block` queries and keys.

    0 is an empty tile (all pairs hidden), 2 a full tile (all pairs allowed), 1 any other tile (partial).
    """
    tile_ranges = find_tile_ranges(mask, (batch + 1, head + 1, n, m), block, block)
    kinds = np.zeros((tile_ranges.query_blocks, tile_ranges.key_blocks), np.uint8)
    for row in range(tile_ranges.query_blocks):
        for k in tile_ranges.row(batch, head, row):
            kinds[row, tile_ranges.first[k] : tile_ranges.last[k]] = FULL if tile_ranges.full[k] else PARTIAL
    return kinds


def tile_map(
    mask: Any,
    n: int,
    m: int | None = None,
    axis: Any = None,
    *,
    block: int = 64,
    batch: int = 0,
    head: int = 0,
    title: str | None = None,
) -> Any:
    """Draw the tiles of a mask. Kernels skip empty tiles, and evaluate the mask only in partial tiles.

    Parameters
    ----------
    mask : formula, function (b, h, i, j) or boolean array
        The mask, in any form that `sightline.attention` accepts.
    n, m : int
        The numbers of queries and keys; by default m is n.
    axis : matplotlib axis, optional
        The axis to draw on; by default that of a new figure, which is `axis.figure`.
    block : int, default 64
        The number of queries and of keys in a tile. The number is doubled until there are at most 512 tiles per side.
    batch, head : int, default 0
        The batch b and the head h whose tiles are drawn.
    title : str, optional
        By default the formula of the mask.

    Returns
    -------
    matplotlib axis
        The axis has a legend with the share of tiles of each kind.

    Raises
    ------
    MaskError
        The mask is None, or a formula that is not a condition.
    ParameterError
        n, m or block is below 1, or batch or head is negative.
    TableError, ShapeError
        The mask reads outside its tables for some i or j below n or m, or a table does not fit its axes.
    MissingExtraError
        matplotlib is not installed.

    Examples
    --------
    >>> import sightline.view
    >>> axis = sightline.view.tile_map(sightline.causal(), 512)
    >>> [text.get_text() for text in axis.get_legend().get_texts()]
    ['empty 43.8%', 'partial 12.5%', 'full 43.8%']
    """
    m, formula = n if m is None else m, read_mask(mask)
    if formula is None:
        raise MaskError("mask=None, which has no tiles", "a condition", "tile_map(sightline.causal(), 1000)")
    if min(n, m, block) < 1 or min(batch, head) < 0:
        given = f"n={n}, m={m}, block={block}, batch={batch}, head={head}"
        raise ParameterError(given, "n, m, block ≥ 1 and batch, head ≥ 0", "tile_map(mask, 1000)")
    validate_extent(formula, n, m, batch, head)
    while -(-max(n, m) // block) > MAX_TILES:
        block *= 2
    axis = plotting.new_axis(axis, 5.2, 4.6)
    _draw_tiles(axis, tile_kinds(formula, n, m, block, batch=batch, head=head), block)
    axis.set(xlabel="key j", ylabel="query i", xlim=(-0.5, m - 0.5), ylim=(n - 0.5, -0.5), box_aspect=min(n / m, 4))
    plotting.set_position_ticks(axis, "xy")
    return plotting.finish(axis, title or f"{formula}   tiles of {block} × {block}")


def _draw_tiles(axis: Any, kinds: Array, block: int) -> None:
    """Draw tiles of `block` × `block` pairs, each in the colour of its kind, and a legend of the kinds."""
    from matplotlib.patches import Patch

    frame = (-0.5, kinds.shape[1] * block - 0.5, kinds.shape[0] * block - 0.5, -0.5)
    colours = plotting.colour_map(tuple(colour for _, colour in TILE_KINDS.values()))
    axis.imshow(kinds, cmap=colours, vmin=0, vmax=2, extent=frame, interpolation="nearest", aspect="auto")
    if max(kinds.shape) <= MAX_LINED_TILES:
        plotting.draw_grid_lines(axis, kinds.shape[0], kinds.shape[1], block)
    shares = {name: f"{(kinds == kind).mean():.1%}" for kind, (name, _) in TILE_KINDS.items()}
    patches = [Patch(color=colour, label=f"{name} {shares[name]}") for name, colour in TILE_KINDS.values()]
    axis.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)
